//! Ports of VMs that do not fit the pool, or are not to lie there: devices are plugged for their rings and for
//! the arenas of their groups, and taken out when they are closed.
//!
//! ```text
//!   Open ── fits the pool? ── yes ──────────────────────────────────┐
//!                └─ no ── memory is made ── plugged ── looks again ──┴── opened
//! ```
//!
//! The agent's connection is served meanwhile: only this port waits.

use std::os::fd::AsFd;

use vnplug_os::event;
use vnplug_os::memory::Exported;
use vnplug_ring::Region;
use vnplug_ring::control::grow::PLUGGED_MAGIC;
use vnplug_ring::control::{Grow, Open, RingPlace, code};

use super::growth::{Wanted, device_len};
use crate::control::Control;
use crate::control::channel::MOVES;
use crate::control::memory::Want;
use crate::control::session::Over;
use crate::control::waiting::{Then, Whom};
use crate::hub::{Grown, Opening, Peer, Plugged, Programs, Refusal, no_memory};

/// A port that is opened, with what was plugged for it so far, and what is plugged next.
pub(in crate::control) struct Growing {
    open: Open,
    programs: Programs,
    grown: Grown,
    part: Part,
    /// Of what is plugged next, once it is made.
    region: Option<Region>,
    memory: u64,
}

/// What of a port lies in a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Its rings: the guest writes there.
    Rings,
    /// The arenas of its group: it only reads.
    Arenas,
}

impl Control {
    /// Opens a port of a VM, in the pool or in devices that are plugged for it first.
    pub(in crate::control) fn open_in_vm(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        open: Open,
        programs: Programs,
        mut grown: Grown,
    ) -> Result<(), Over> {
        // Its filter was compiled, or memory was plugged, since it was asked for.
        let lacks = match self.vms.is_held(viewer) {
            true => Err(Refusal::new(code::UNAVAILABLE, MOVES)),
            false => self.lacks(viewer, &open, &programs, &mut grown),
        };
        match lacks {
            Ok(None) => {}
            Ok(Some((part, len))) => {
                // As a user's rings do: memory takes its time to commit.
                if let Some(session) = self.sessions.get(whom.token) {
                    session.bucket.borrow_mut().charge_bytes(len);
                }
                let writable = part == Part::Rings;
                let growing = Growing {
                    open,
                    programs,
                    grown,
                    part,
                    region: None,
                    memory: 0,
                };
                let then = Then::Grow(Box::new(growing));
                return self.make(whom, Want::Device { len, writable }, then);
            }
            Err(refusal) => {
                self.give_up_growing(|it| it == whom);
                return self.sessions.answer(whom, Err(refusal));
            }
        }
        let has_arenas = grown.arenas.is_some();
        let opening = self.opened(whom, viewer, &open, programs, None, grown);
        if let Ok(Opening { opened, .. }) = &opening {
            let arenas = has_arenas.then_some(opened.arenas.memory);
            self.backends.growth.opened(whom, opened.memory, arenas);
        }
        // What was plugged and is not used after all.
        self.give_up_growing(|it| it == whom);
        self.tell_opened(whom, opening)
    }

    /// What is to be plugged next for a port, and its bytes, if something is.
    fn lacks(
        &mut self,
        viewer: &Peer,
        open: &Open,
        programs: &Programs,
        grown: &mut Grown,
    ) -> Result<Option<(Part, u64)>, Refusal> {
        let Some(vm) = self.vms.of_mut(viewer) else {
            return Ok(None);
        };
        let (name, is_apart) = (vm.name().to_owned(), vm.is_apart());
        let growth = &self.backends.growth;
        if !growth.is_for(&name) {
            if is_apart {
                let what = format!(
                    "each port of VM {name:?} gets a device of its own, and nobody plugs now: run \
                     `vnplug attach qemu --name {name} --grow SIZE --apart`"
                );
                return Err(Refusal::new(code::UNAVAILABLE, what));
            }
            return Ok(None);
        }
        self.hub.within_limits(open, viewer, programs, (0, 0))?;
        let (rings, arenas) = self.hub.need_in_vm(open, viewer, programs)?;
        if arenas == 0 {
            // Another made the group meanwhile.
            grown.arenas = None;
        }
        let has_rings = grown.rings.is_some();
        let (part, need, len) = if !has_rings && (is_apart || !vm.places.fit(&[rings])) {
            (Part::Rings, rings, device_len(rings))
        } else if arenas > 0
            && grown.arenas.is_none()
            && (is_apart || has_rings || !vm.places.fit(&[rings, arenas]))
        {
            let len = arenas.checked_next_power_of_two().unwrap_or(u64::MAX);
            (Part::Arenas, arenas, len)
        } else {
            return Ok(None);
        };
        let left = growth.left(&name);
        if len > left {
            let free = vm.places.free();
            let pool = match is_apart {
                true => "no port of this VM lies in its pool (--apart)".to_owned(),
                false => format!("the VM's pool has {free} bytes free"),
            };
            let what = format!(
                "{pool} and this port needs {need} in one piece; a device for that has {len} bytes, and \
                 {left} more may be plugged: use a smaller ring, close ports, or attach with a larger --pool \
                 or --grow"
            );
            return Err(Refusal::new(code::NO_MEMORY, what));
        }
        Ok(Some((part, len)))
    }

    /// Memory for a port is made, and is to be plugged.
    pub(in crate::control) fn grow_for(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        growing: Box<Growing>,
        made: std::io::Result<(Exported, Region)>,
    ) -> Result<(), Over> {
        if let Err(refusal) = self.plug_for(whom, viewer, growing, made) {
            self.give_up_growing(|it| it == whom);
            return self.sessions.answer(whom, Err(refusal));
        }
        Ok(())
    }

    fn plug_for(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        mut growing: Box<Growing>,
        made: std::io::Result<(Exported, Region)>,
    ) -> Result<(), Refusal> {
        let (made, region) = made.map_err(|error| no_memory(0, &error))?;
        let Peer::Vm(vm) = viewer else {
            return Err(Refusal::new(code::INTERNAL, "a device for a process"));
        };
        let (part, len) = (growing.part, made.len());
        let (memory, page) = match part {
            Part::Rings => {
                let memory = event::random().max(1);
                let page = [PLUGGED_MAGIC.to_le_bytes(), memory.to_le_bytes()].concat();
                (memory, page)
            }
            // The agent knows them by the first arena's header.
            Part::Arenas => (0, Vec::new()),
        };
        let fd = made
            .open_to_vm(part == Part::Rings, &page)
            .and_then(|()| made.for_program().as_fd().try_clone_to_owned())
            .map_err(|error| no_memory(len, &error))?;
        (growing.region, growing.memory) = (Some(region), memory);
        let wanted = Wanted::Port(whom, growing);
        let growth = &mut self.backends.growth;
        let Some((number, token)) = growth.begin(vm, len, wanted) else {
            let what = "nobody plugs so much into this VM any more (vnplug attach qemu --grow)";
            return Err(Refusal::new(code::UNAVAILABLE, what));
        };
        growth.is_for_port(number, whom, part, (memory, made));
        let plug = Grow::Plug {
            number,
            len,
            readonly: part == Part::Arenas,
        };
        self.tell_plugger(token, plug, vec![fd]);
        Ok(())
    }

    /// A device for a port is plugged, or why not.
    pub(super) fn port_plugged(
        &mut self,
        whom: Whom,
        growing: Growing,
        plugged: Result<(), Refusal>,
    ) -> Result<(), Over> {
        let viewer = self.sessions.get(whom.token).map(|it| it.viewer.clone());
        let Growing {
            open,
            programs,
            mut grown,
            part,
            region,
            memory,
        } = growing;
        match (plugged, viewer, region) {
            (Ok(()), Some(viewer), Some(region)) => {
                let plugged = Some(Plugged { region, memory });
                match part {
                    Part::Rings => grown.rings = plugged,
                    Part::Arenas => grown.arenas = plugged,
                }
                self.open_in_vm(whom, &viewer, open, programs, grown)
            }
            (Err(refusal), Some(_), _) => {
                self.give_up_growing(|it| it == whom);
                self.sessions.answer(whom, Err(refusal))
            }
            // Who asked is gone, and what was plugged for it goes with that.
            _ => Ok(()),
        }
    }

    /// What was plugged for ports that are not opened after all is taken out.
    pub(super) fn give_up_growing(&mut self, whose: impl Fn(Whom) -> bool) {
        for number in self.backends.growth.give_up(whose) {
            self.unplug(number);
        }
    }

    /// Ports and groups are closed that had these places: devices among them go when no program maps them.
    pub(in crate::control) fn close_devices(&mut self, places: &[RingPlace]) {
        for memory in places.iter().filter_map(RingPlace::as_device) {
            if let Some(number) = self.backends.growth.closed(memory) {
                self.unplug(number);
            }
        }
    }

    /// An agent says of which devices no program maps anything any more.
    pub(in crate::control) fn release_devices(&mut self, viewer: &Peer, places: &[RingPlace]) {
        let Peer::Vm(vm) = viewer else { return };
        for memory in places.iter().filter_map(RingPlace::as_device) {
            if let Some(number) = self.backends.growth.released(vm, memory) {
                self.unplug(number);
            }
        }
    }

    /// An agent came, whose programs map these devices.
    pub(in crate::control) fn name_devices(&mut self, viewer: &Peer, live: &[RingPlace]) {
        if let Peer::Vm(vm) = viewer {
            let memories: Vec<u64> = live.iter().filter_map(RingPlace::as_device).collect();
            self.backends.growth.named(vm, &memories);
        }
    }

    /// Devices of a VM, and their bytes.
    pub(in crate::control) fn grown(&self, vm: &str) -> (usize, u64) {
        self.backends.growth.used(vm)
    }
}

#[cfg(test)]
impl Growing {
    /// A port without filters that is to have its rings in a device.
    pub(super) fn of(device: &str) -> Self {
        Self {
            open: crate::hub::tests::request(device, ""),
            programs: Programs::default(),
            grown: Grown::default(),
            part: Part::Rings,
            region: None,
            memory: 0,
        }
    }
}
