//! Which memory a guest gets, where nobody says.
//!
//! An ivshmem device comes and goes as it should, and a kernel that is locked down lets nobody map it. A virtio-pmem device
//! is mapped by either kernel, if it has the drivers, and stays until the machine ends. So the first is taken unless the
//! guest is known to be locked down, by the first of these that knows it:
//!
//! | who says it | when |
//! |---|---|
//! | what is plugged already | the VM is attached by virtio-pmem |
//! | QEMU's guest agent, where it may be asked (`--guest-agent`, or libvirt's) | before anything is plugged |
//! | a virtio-pmem device that an earlier attach of this machine left | before anything is plugged |
//! | our agent in the guest | when it finds that it cannot map what was plugged: that goes, and the other comes |
//!
//! The daemon keeps the agent's word for as long as the machine is the same and its agent says nothing else, so that of a
//! guest whose agent has fallen silent the same is known as before.

use std::time::{Duration, Instant};

use vnplug::{Client, Counted};
use vnplug_ring::counters::label;

use super::access;
use super::advice::pending;
use super::attach::Attach;
use super::monitor::Monitor;
use super::parts;
use super::pmem::{self, MORE_MEMORY, Memory};
use crate::failure::Failure;
use crate::{attach, out};

/// What `--memory` asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Wanted {
    /// What the guest can map: ivshmem, or pmem where its kernel is locked down
    #[default]
    Auto,
    /// An ivshmem-plain device
    Ivshmem,
    /// A virtio-pmem device, which also a guest with a locked-down kernel (Secure Boot) may map. The machine needs
    /// `-m SIZE,maxmem=MORE`; the device stays until the machine ends
    Pmem,
}

/// What a guest's agent says of the memory that was plugged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    /// It has mapped it.
    Ready,
    /// Its kernel lets nobody map it.
    LockedDown,
    /// Nothing yet.
    Silent,
    /// The daemon tells nothing of this VM.
    Unknown,
}

impl Attach {
    /// Settles which memory it is, as far as that can be known before it is plugged; true if the guest's agent is
    /// still to be heard.
    pub(super) fn choose(
        &mut self,
        monitor: &mut dyn Monitor,
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Result<bool, Failure> {
        self.memory = match self.wanted {
            Wanted::Pmem => Memory::Pmem,
            Wanted::Ivshmem | Wanted::Auto => Memory::Ivshmem,
        };
        if self.wanted != Wanted::Auto {
            return Ok(false);
        }
        let name = self.vm.name.clone();
        let present = parts::present(monitor)?;
        if pmem::other_kind(&name, Memory::Ivshmem, &present).is_some() {
            if let Some(option) = self.needs_pci() {
                let text = format!(
                    "is attached with --memory pmem, which does not go with {option}: run `vnplug detach qemu` first"
                );
                return Err(Failure::about(&name, text));
            }
            self.memory = Memory::Pmem;
            return Ok(false);
        }
        match self.push.is_locked_down(&self.monitor) {
            None if self.needs_pci().is_none() && !pmem::devices(&name, &present).is_empty() => {
                out::line(&format!("{name}: memory: virtio-pmem, {AS_BEFORE}"))?;
                self.memory = Memory::Pmem;
                Ok(false)
            }
            None => Ok(true),
            Some(false) => {
                out::line(&format!("{name}: memory: ivshmem, {NOT_LOCKED}"))?;
                Ok(false)
            }
            Some(true) => {
                self.must_be_pmem(monitor, connect)?;
                Ok(false)
            }
        }
    }

    /// Hears what the guest's agent says of what was plugged. If its kernel lets nobody map it, it is taken out, and
    /// the other kind is plugged.
    pub(super) fn settle(
        &mut self,
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Result<(), Failure> {
        let name = self.vm.name.clone();
        match self.hear(&mut connect()?, self.wait)? {
            Word::Ready => {
                return out::line(&format!(
                    "{name}: memory: ivshmem, which the guest has mapped"
                ));
            }
            Word::Silent if !self.wait.is_zero() => {
                out::note(&format!(
                    "{name}: memory: ivshmem; no agent has spoken in the guest within {} s. If its kernel is locked \
                     down, run this again when it has",
                    self.wait.as_secs_f32()
                ));
                return Ok(());
            }
            Word::Silent | Word::Unknown => return Ok(()),
            Word::LockedDown => {}
        }
        let mut monitor = self.monitor.open()?;
        self.must_be_pmem(monitor.as_mut(), &connect)?;
        if self.memory == Memory::Ivshmem {
            drop(monitor);
            return self.hear_of_vfio(&mut connect()?);
        }
        let buses = self.buses.clone();
        self.attach_pool(monitor.as_mut(), &buses, connect()?)?;
        drop(monitor);
        if self.hear(&mut connect()?, self.wait)? == Word::Silent && !self.wait.is_zero() {
            out::note(&format!(
                "{name}: the guest has not mapped it within {} s: its kernel needs the drivers virtio_pmem, nd_pmem, \
                 dax_pmem and device_dax",
                self.wait.as_secs_f32()
            ));
        }
        Ok(())
    }

    /// Waits until the guest's agent has mapped what is plugged through VFIO, of which it says nothing else before.
    fn hear_of_vfio(&self, client: &mut Client) -> Result<(), Failure> {
        if self.wait.is_zero() {
            return Ok(());
        }
        let limit = self.wait.max(BY_VFIO);
        let until = Instant::now() + limit;
        while self.hear(client, Duration::ZERO)? != Word::Ready {
            if Instant::now() >= until {
                out::note(&format!(
                    "{}: the guest has not mapped it within {} s: its kernel needs the drivers vfio-pci and vfio_iommu_type1 \
                     (modprobe -a), and the IOMMU in use (intel_iommu=on)",
                    self.vm.name,
                    limit.as_secs_f32()
                ));
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        out::line(&format!(
            "{}: memory: ivshmem, which the guest has mapped through VFIO",
            self.vm.name
        ))
    }

    /// The guest's kernel is locked down: what is plugged of the other kind goes. Unless the machine has no room for
    /// virtio-pmem, and an IOMMU: then what is plugged stays, and the guest maps it through VFIO.
    fn must_be_pmem(
        &mut self,
        monitor: &mut dyn Monitor,
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        if let Some(option) = self.needs_pci() {
            let text = format!(
                "the guest's kernel is locked down and maps no PCI memory, which {option} is: leave it out"
            );
            return Err(Failure::about(name, text));
        }
        if !pmem::has_room(monitor)? {
            if pmem::has_iommu(monitor)? {
                return out::line(&format!(
                    "{name}: memory: ivshmem through the guest's VFIO, uncached, for its kernel is locked down and the \
                     machine has no room for memory of another kind"
                ));
            }
            let text = format!(
                "the guest's kernel is locked down and maps no PCI memory, and the machine has no room for memory of \
                 another kind: start it with {MORE_MEMORY}, or (a q35) with -device intel-iommu,intremap=on"
            );
            return Err(Failure::about(name, text));
        }
        let present = parts::present(monitor)?;
        if pmem::other_kind(name, Memory::Pmem, &present).is_some() {
            let owner = access::identity(monitor)?;
            attach::forget(&mut connect()?, name, owner)?;
            let left = parts::remove(monitor, &parts::all_parts(name), LET_GO)?;
            if !left.is_empty() {
                return Err(Failure::about(name, pending(&left)));
            }
        }
        out::line(&format!(
            "{name}: memory: virtio-pmem, for the guest's kernel is locked down and maps no PCI memory"
        ))?;
        self.memory = Memory::Pmem;
        Ok(())
    }

    /// Refuses what a domain's definition cannot give to a guest that is locked down.
    pub(super) fn must_map_pci(
        &self,
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Result<(), Failure> {
        let is_locked_down = match self.push.is_locked_down(&self.monitor) {
            Some(is_locked_down) => is_locked_down,
            None => self.hear(&mut connect()?, Duration::ZERO)? == Word::LockedDown,
        };
        match is_locked_down {
            false => Ok(()),
            true => {
                let text = "the guest's kernel is locked down and maps no PCI memory, and no other is written into a \
                     definition: attach it after each start, without --permanent";
                Err(Failure::about(&self.vm.name, text))
            }
        }
    }

    /// What the guest's agent says, or said, within `limit`.
    fn hear(&self, client: &mut Client, limit: Duration) -> Result<Word, Failure> {
        let until = Instant::now() + limit;
        loop {
            let counters = match client.stats() {
                Ok(counters) => counters,
                Err(vnplug::Error::Refused { text, .. }) => {
                    log::debug!("the daemon does not tell: {text}");
                    return Ok(Word::Unknown);
                }
                Err(error) => return Err(error.into()),
            };
            let own = |it: &&Counted| it.kind == "vm" && it.name == self.vm.name;
            match counters.iter().find(own).map(|vm| label(vm, "state")) {
                Some("ready") => return Ok(Word::Ready),
                Some("locked-down") => return Ok(Word::LockedDown),
                None => return Ok(Word::Unknown),
                _ if Instant::now() >= until => return Ok(Word::Silent),
                _ => std::thread::sleep(LOOK),
            }
        }
    }
}

const AS_BEFORE: &str = "which this machine had before";
const NOT_LOCKED: &str = "for the guest's kernel is not locked down";
/// How long the guest may take to let go of what its kernel cannot map.
const LET_GO: Duration = Duration::from_secs(20);
/// How long the guest's agent may take to map what is plugged through VFIO: it gives the host three seconds first.
const BY_VFIO: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(50);
