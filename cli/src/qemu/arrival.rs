//! The other end of `vnplug migrate --libvirt`: a domain is attached when libvirt has brought it here.
//!
//! libvirt starts the QEMU that the domain comes into when it begins to move it. So nothing can be plugged before; what is
//! made sure of is everything else: libvirt answers and knows no such domain that runs, the daemon speaks what the guest's
//! agent speaks, shows the VM what its applications read, and has memory for its pool. That memory is made, and kept until
//! the domain is here.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use vnplug::Client;
use vnplug_ring::control::VERSION;

use super::incoming::{AWAITED, CANCEL, CONNECTS, LOOK, READY, SENT, Waited, patiently, words};
use super::monitor::MonitorError;
use super::virsh::{self, Virsh};
use super::{Attach, VIRSH_LIMIT};
use crate::failure::{Failure, OK, Outcome};
use crate::{out, sys};

/// What a domain does that has not come yet.
const MOVES: &str = "paused (migrating)";
/// Whose memory it is until the domain has come, which has a number of its own.
const NOBODY: u64 = 1;

/// Where a domain is, as seen from here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// It is not here, or is here and does not run.
    Absent,
    /// On its way.
    Moves,
    Here,
}

impl Attach {
    /// Makes sure, says so, waits and attaches; one that has come already is attached at once.
    pub(super) fn attach_arriving(&self, connect: &dyn Fn() -> Result<Client, Failure>) -> Outcome {
        let name = &self.vm.name;
        self.check_protocol()?;
        let domain = self.monitor.libvirt.as_deref().unwrap_or_default();
        let virsh = Virsh::at(domain, self.monitor.connect.as_deref(), VIRSH_LIMIT);
        let arrival = arrival(&virsh)?;
        match (arrival, self.come) {
            (Arrival::Here, false) => {
                let text = "the libvirt here runs that domain already";
                return Err(Failure::about(name, text));
            }
            (Arrival::Absent, true) => {
                return Err(Failure::about(name, "the libvirt here does not run it"));
            }
            (Arrival::Absent, false) => self.make_sure(connect)?,
            (Arrival::Here | Arrival::Moves, _) => {}
        }
        out::line(&format!("{name}: {READY}"))?;
        sys::catch_signals();
        match self.wait_for_arrival(&virsh) {
            Ok(Waited::Come) => {
                let mut monitor = self.monitor.open()?;
                let client = patiently(connect)?;
                self.attach_pool(monitor.as_mut(), &self.buses, client)?;
                Ok(OK)
            }
            Ok(_) => {
                self.unmake(connect)?;
                let text = "the machine does not come; nothing is left here";
                out::note(&format!("{name}: {text}"));
                Ok(OK)
            }
            Err(error) => {
                self.unmake(connect)?;
                Err(Failure::about(
                    name,
                    format!("the machine did not come: {}", error.line()),
                ))
            }
        }
    }

    /// Refuses an agent that the daemon here would refuse when it is here.
    pub(super) fn check_protocol(&self) -> Result<(), Failure> {
        match self.speaks {
            Some(version) if version != VERSION => {
                let text = format!(
                    "its agent speaks protocol version {version}, the daemon here {VERSION}: have the same version of vNPlug \
                     on both hosts and in the guest"
                );
                Err(Failure::about(&self.vm.name, text))
            }
            _ => Ok(()),
        }
    }

    /// The daemon here has what the domain needs.
    fn make_sure(&self, connect: &dyn Fn() -> Result<Client, Failure>) -> Result<(), Failure> {
        let mut client = connect()?;
        let ready = client.attach_vm(self.spec(NOBODY))?;
        self.check_needs(&ready, false).inspect_err(|_| {
            self.forget(&mut client, NOBODY);
        })
    }

    /// The daemon forgets a domain that did not come. One that was attached meanwhile by somebody else, a hook, is not
    /// `NOBODY`'s any more.
    fn unmake(&self, connect: &dyn Fn() -> Result<Client, Failure>) -> Result<(), Failure> {
        let told = patiently(connect)?.detach_own_vm(&self.vm.name, NOBODY);
        if let Err(error) = told {
            log::debug!("{}: not forgotten: {error}", self.vm.name);
        }
        Ok(())
    }

    fn wait_for_arrival(&self, virsh: &Virsh) -> Result<Waited, Failure> {
        let words = words();
        let mut is_awaited = self.come;
        let mut was_seen = false;
        let mut silent: Option<Instant> = None;
        loop {
            match said(&words) {
                Said::Sent => {
                    // Who does not hear it sends no machine.
                    if out::line(&format!("{}: {AWAITED}", self.vm.name)).is_err() {
                        return Ok(Waited::Cancelled);
                    }
                    is_awaited = true;
                }
                Said::Cancel => return Ok(Waited::Cancelled),
                Said::Nothing => {}
                Said::NoMore => {
                    silent.get_or_insert_with(Instant::now);
                }
            }
            if sys::stop().is_some() {
                return Ok(Waited::GivenUp);
            }
            let arrival = arrival(virsh)?;
            match arrival {
                Arrival::Here if is_awaited => return Ok(Waited::Come),
                Arrival::Here | Arrival::Moves => was_seen = true,
                // Its way ended, and nobody is there to say how.
                Arrival::Absent if silent.is_some() && (was_seen || !is_awaited) => {
                    return Ok(Waited::GivenUp);
                }
                Arrival::Absent => {
                    if silent.is_some_and(|since| since.elapsed() >= CONNECTS) {
                        return Ok(Waited::GivenUp);
                    }
                }
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// What who sends the machine says.
enum Said {
    Sent,
    Cancel,
    Nothing,
    /// Nobody says anything any more.
    NoMore,
}

fn said(words: &Receiver<String>) -> Said {
    match words.try_recv() {
        Ok(word) if word == SENT => Said::Sent,
        Ok(word) if word == CANCEL => Said::Cancel,
        Ok(_) | Err(TryRecvError::Empty) => Said::Nothing,
        Err(TryRecvError::Disconnected) => Said::NoMore,
    }
}

fn arrival(virsh: &Virsh) -> Result<Arrival, MonitorError> {
    Ok(match virsh::state(virsh)?.as_deref() {
        None => Arrival::Absent,
        Some(state) if state.starts_with("shut off") || state.starts_with("crashed") => {
            Arrival::Absent
        }
        Some(MOVES) => Arrival::Moves,
        Some(_) => Arrival::Here,
    })
}
