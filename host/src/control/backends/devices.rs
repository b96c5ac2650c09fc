//! Devices with shared memory: plugged into VMs that run, and taken out again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use vnplug_os::event;
use vnplug_os::memory::Exported;
use vnplug_ring::control::backend::Mapped;
use vnplug_ring::control::grow::PLUGGED_MAGIC;
use vnplug_ring::control::{Backend, Grow, Message, code};

use super::channel::End;
use super::growth::Wanted;
use super::regions::{Home, Plugging, State};
use super::{RegionWish, no_channel};
use crate::control::Control;
use crate::control::session::Over;
use crate::control::waiting::Whom;
use crate::hub::{NO_DESCRIPTORS, Peer, Refusal};

impl Control {
    /// Serves a process that plugs devices.
    pub(in crate::control) fn of_growth(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        said: Grow,
    ) -> Result<(), Over> {
        match said {
            Grow::Offer {
                name,
                most_bytes,
                apart,
            } => {
                let offered = self.offer_growth(whom, viewer, (&name, most_bytes, apart));
                self.done_if(whom, offered)
            }
            Grow::Plugged { number, error } => {
                self.plugged(whom.token, number, &error);
                self.deliver();
                Ok(())
            }
            Grow::Unplugged { number, error } => {
                if error.is_empty() {
                    let waited = self.backends.growth.unplugged(whom.token, number);
                    self.refuse_wanted(waited, "took the device out");
                    self.deliver();
                } else {
                    log::warn!(target: "vm", "a device with shared memory stays plugged: {error}");
                }
                Ok(())
            }
            other => self.is_no_request(whom, &Message::Grow(other)),
        }
    }

    fn offer_growth(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        (name, most, apart): (&str, u64, bool),
    ) -> Result<(), Refusal> {
        let claimed = self.sessions.get(whom.token).map(|it| &it.attached);
        let own = self.vms.get(name).map(|vm| (name.to_owned(), vm.owner()));
        let is_own = own.is_some_and(|own| claimed.is_some_and(|it| it.contains(&own)));
        if !self.policy.is_operator(viewer) || !is_own {
            let what = format!("VM {name:?} is not attached over this connection: attach it first");
            return Err(Refusal::new(code::DENIED, what));
        }
        if let Some(vm) = self.vms.served.get_mut(name) {
            vm.set_apart(apart, &self.vms.dirs.state)?;
        }
        self.backends.growth.offer(name, whom.token, most);
        Ok(())
    }

    /// Has memory plugged into a VM; the back-end is answered when it is there, or soon.
    pub(super) fn plug(
        &mut self,
        whom: Whom,
        end: End,
        wish: RegionWish,
        vm: &str,
        made: Exported,
    ) -> Result<(), Over> {
        let memory = event::random().max(1);
        let len = made.len();
        let page = [PLUGGED_MAGIC.to_le_bytes(), memory.to_le_bytes()].concat();
        let fd = made
            .open_to_vm(wish.writable, &page)
            .and_then(|()| made.for_program().as_fd().try_clone_to_owned());
        let fd = match fd {
            Ok(fd) => fd,
            Err(error) => {
                let refusal = Refusal::new(code::NO_MEMORY, error.to_string());
                return self.sessions.answer(whom, Err(refusal));
            }
        };
        let wanted = Wanted::Region(Plugging {
            whom,
            end,
            wish,
            made: Some(made),
            memory,
            told: None,
        });
        let Some((number, token)) = self.backends.growth.begin(vm, len, wanted) else {
            let what = "nobody plugs so much into this VM any more (vnplug attach qemu --grow)";
            let refusal = Refusal::new(code::UNAVAILABLE, what);
            return self.sessions.answer(whom, Err(refusal));
        };
        self.sessions.set_busy(whom.token, true);
        let plug = Grow::Plug {
            number,
            len,
            readonly: !wish.writable,
        };
        self.tell_plugger(token, plug, vec![fd]);
        Ok(())
    }

    /// Who plugs says that a device is there, or why not.
    fn plugged(&mut self, token: u64, number: u32, error: &str) {
        let there = error.is_empty();
        let growth = &mut self.backends.growth;
        if growth.is_late(token, number) {
            match there {
                true => self.unplug(number),
                false => drop(growth.unplugged(token, number)),
            }
            return;
        }
        let Some((vm, wanted)) = growth.plugged(token, number, there) else {
            if there && growth.found(token, number) {
                self.unplug(number);
            }
            return;
        };
        let refusal = || {
            let what = format!("VM {vm:?} cannot get more memory: {error}");
            Refusal::new(code::UNAVAILABLE, what)
        };
        match wanted {
            Wanted::Port(whom, growing) => {
                let plugged = there.then_some(()).ok_or_else(refusal);
                let went = self.port_plugged(whom, *growing, plugged);
                self.went_on(whom.token, went);
            }
            Wanted::Region(Plugging {
                told: Some(mapped), ..
            }) if there => {
                let shared = self.backends.regions.get_mut(mapped.region);
                match shared.map(|it| matches!(it.state, State::Used)) {
                    Some(true) => self.tell_program(mapped, None),
                    // Its back-end is gone, or its channel over. This takes out the device, too.
                    Some(false) => self.free_region(mapped.region, true),
                    None => self.unplug(number),
                }
            }
            Wanted::Region(plugging) if there => {
                let whom = plugging.whom;
                self.sessions.set_busy(whom.token, false);
                let (end, wish) = (plugging.end, plugging.wish);
                let shared = self.share_device(number, plugging);
                if shared.is_err() {
                    self.unplug(number);
                }
                let went = self.tell_shared(whom, end, wish, shared);
                self.went_on(whom.token, went);
            }
            wanted => self.refuse(wanted, refusal()),
        }
    }

    fn share_device(
        &mut self,
        number: u32,
        plugging: Plugging,
    ) -> Result<(Mapped, [OwnedFd; 2]), Refusal> {
        let Plugging {
            end, wish, memory, ..
        } = plugging;
        let (len, _) = self
            .may_share(end, wish)
            .map_err(|_| no_channel(wish.channel))?;
        let made = plugging.made.ok_or_else(|| no_channel(wish.channel))?;
        let made = Arc::new(made);
        let copy = || {
            let copied = made.whole.as_fd().try_clone_to_owned();
            copied.map_err(|_| Refusal::new(code::NO_MEMORY, NO_DESCRIPTORS))
        };
        let fds = [copy()?, copy()?];
        let home = Home::Device {
            number,
            memory,
            made,
        };
        let mapped = self.add_region(end, wish, len, home)?;
        Ok((mapped, fds))
    }

    /// A device takes its time: the back-end is answered now, and the program told when it is there.
    fn answer_early(&mut self, number: u32, plugging: Plugging) {
        let (whom, end, wish, memory) =
            (plugging.whom, plugging.end, plugging.wish, plugging.memory);
        self.sessions.set_busy(whom.token, false);
        let answer = match self.share_device(number, plugging) {
            Ok((mapped, [whole, _])) => {
                let waits = Plugging {
                    whom,
                    end,
                    wish,
                    made: None,
                    memory,
                    told: Some(mapped),
                };
                let growth = &mut self.backends.growth;
                growth.wait_more(number, Wanted::Region(waits));
                Ok((Message::Backend(Backend::Mapped(mapped)), vec![whole]))
            }
            Err(refusal) => {
                self.backends.growth.is_too_late(number);
                Err(refusal)
            }
        };
        let went = self.sessions.answer(whom, answer);
        self.went_on(whom.token, went);
    }

    /// Has a device taken out that nobody uses.
    pub(super) fn unplug(&mut self, number: u32) {
        if let Some(token) = self.backends.growth.end(number) {
            self.tell_plugger(token, Grow::Unplug { number }, Vec::new());
        }
    }

    /// A VM is detached: all that was plugged for it goes.
    pub(super) fn unplug_all(&mut self, vm: &str) {
        for number in self.backends.growth.detached(vm) {
            self.unplug(number);
        }
        self.backends.growth.forget(vm);
    }

    /// A process that plugged is gone: who waits for it is told.
    pub(super) fn plugger_gone(&mut self, token: u64) {
        let gone = self.backends.growth.gone(token);
        self.refuse_wanted(gone, "is gone");
    }

    /// Tells who has waited too long for a device, and has those taken out that stayed long enough.
    pub(super) fn give_up_plugging(&mut self) {
        let now = Instant::now();
        for (number, wanted) in self.backends.growth.overdue(now) {
            match wanted {
                Wanted::Region(plugging) if plugging.told.is_none() => {
                    self.answer_early(number, plugging);
                }
                wanted => {
                    self.backends.growth.is_too_late(number);
                    self.refuse_wanted(Some(wanted), "does not answer");
                }
            }
        }
        for number in self.backends.growth.lingered(now) {
            self.unplug(number);
        }
    }

    fn refuse_wanted(&mut self, all: impl IntoIterator<Item = Wanted>, why: &str) {
        for wanted in all {
            let what = format!("who plugs devices into the VM {why} (vnplug attach qemu --grow)");
            self.refuse(wanted, Refusal::new(code::UNAVAILABLE, what));
        }
    }

    /// Tells who waits for a device that there will be none.
    fn refuse(&mut self, wanted: Wanted, refusal: Refusal) {
        match wanted {
            Wanted::Region(Plugging {
                told: Some(mapped), ..
            }) => {
                let region = mapped.region;
                log::warn!(target: "backend", "region {region} is lost: {}", refusal.text);
                self.lose_region(mapped);
            }
            Wanted::Region(Plugging { whom, made, .. }) => {
                made.into_iter().for_each(|made| self.give_memory(made));
                self.sessions.set_busy(whom.token, false);
                let went = self.sessions.answer(whom, Err(refusal));
                self.went_on(whom.token, went);
            }
            Wanted::Port(whom, growing) => {
                let went = self.port_plugged(whom, *growing, Err(refusal));
                self.went_on(whom.token, went);
            }
        }
    }

    pub(super) fn tell_plugger(&mut self, token: u64, what: Grow, fds: Vec<OwnedFd>) {
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        match session.say(&Message::Grow(what), 0, 0, fds) {
            Ok(()) => self.sessions.rearm(token),
            Err(over) => self.end(token, &over),
        }
    }
}
