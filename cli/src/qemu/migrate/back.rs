//! A move failed: the machine is attached where it runs, or what must be done is said.

use std::time::{Duration, Instant};

use vnplug_ring::control::{VmReady, code};

use super::carrier::Carrier;
use super::{Connect, Migrate, Standing, TURN};
use crate::failure::Failure;
use crate::qemu::monitor::Monitor;
use crate::qemu::parts::{self, Kind, Part};
use crate::qemu::slots;
use crate::qemu::target::Target;

/// How long QEMU may go on sending a machine when it was told not to.
const CANCEL_LIMIT: Duration = Duration::from_secs(20);

impl Migrate {
    /// Attaches the machine here again, if it is here; true if something was to be done.
    fn undo(
        &self,
        carrier: &mut dyn Carrier,
        connect: Connect<'_>,
        owner: u64,
    ) -> Result<bool, Failure> {
        let name = &self.vm.name;
        // NB: first. While QEMU may send the machine nobody may write what it sends.
        self.stays_here(carrier)?;
        let qemu = carrier.monitor();
        let ready = match connect()?.hold_vm(name, owner, false) {
            Ok(ready) => ready,
            Err(vnplug::Error::Refused { code, .. }) if code == code::NOT_FOUND => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        let parts = parts::parts(name, false, ready.arenas.len());
        let present = parts::present(qemu)?;
        let missing: Vec<&Part> = parts
            .iter()
            .filter(|part| !present.contains(&part.id))
            .collect();
        self.plug_again(qemu, &missing, &ready)?;
        Ok(true)
    }

    /// Waits until it is said that the machine is here and stays here.
    fn stays_here(&self, carrier: &mut dyn Carrier) -> Result<(), Failure> {
        let until = Instant::now() + CANCEL_LIMIT;
        let mut is_told = false;
        loop {
            let what = match carrier.standing()? {
                (Standing::Here, _) => return Ok(()),
                (Standing::Gone, _) => "the machine is at the target",
                (Standing::Moving, _) if Instant::now() < until => {
                    if !is_told {
                        carrier.cancel()?;
                        is_told = true;
                    }
                    std::thread::sleep(TURN);
                    continue;
                }
                (Standing::Moving, _) => "QEMU goes on sending the machine",
            };
            return Err(Failure::about(
                &self.vm.name,
                format!("{what}; it stays held"),
            ));
        }
    }

    fn plug_again(
        &self,
        qemu: &mut dyn Monitor,
        missing: &[&Part],
        ready: &VmReady,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let pci = missing.iter().filter(|part| part.kind == Kind::Pci).count();
        let places =
            slots::choose(qemu, &[], pci)?.map_err(|no_room| Failure::about(name, no_room))?;
        let mut places = places.into_iter();
        for part in missing {
            let place = match part.kind {
                Kind::Pci => places.next().unwrap_or_default(),
                _ => slots::DeviceAddress::default(),
            };
            part.add(qemu, name, ready, 0, &place)?;
        }
        Ok(())
    }

    /// Ends a move that failed: the machine is attached where it runs.
    pub(super) fn give_up(
        &self,
        carrier: &mut dyn Carrier,
        connect: Connect<'_>,
        owner: u64,
        target: Option<Target>,
        failure: Failure,
    ) -> Failure {
        // First what the machine needs; the target may be out of reach.
        let undone = self.undo(carrier, connect, owner);
        // Where it is not known that the machine stays here it may still come there.
        if undone.is_ok()
            && let Some(target) = target
        {
            target.cancel();
        }
        match undone {
            Ok(false) => failure,
            Ok(true) => {
                let text = format!("{}; it is attached here as before", failure.line());
                Failure::with_code(failure.code(), text)
            }
            Err(other) => self.both(&failure, &other),
        }
    }

    /// It failed, and so did the way back.
    fn both(&self, first: &Failure, second: &Failure) -> Failure {
        let text = format!(
            "{}; attaching it here again failed, too: {}; run the same command again, or `vnplug attach qemu`",
            first.line(),
            second.line()
        );
        Failure::about(&self.vm.name, text)
    }

    /// The machine runs there, and is not attached.
    pub(super) fn stranded(&self, failure: &Failure) -> Failure {
        let text = format!(
            "the machine runs at the target and is not attached there: {}; run the same command again",
            failure.line()
        );
        Failure::about(&self.vm.name, text)
    }
}
