//! Devices with shared memory: plugged into VMs that run, and taken out again.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use vnplug_os::event;
use vnplug_os::memory::Exported;
use vnplug_ring::control::grow::PLUGGED_MAGIC;
use vnplug_ring::control::{Grow, Message, code};

use super::channel::End;
use super::growth::Wanted;
use super::regions::Home;
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
            Grow::Offer { name, most_bytes } => {
                let offered = self.offer_growth(whom, viewer, &name, most_bytes);
                self.done_if(whom, offered)
            }
            Grow::Plugged { number, error } => {
                self.plugged(whom.token, number, &error);
                self.deliver();
                Ok(())
            }
            Grow::Unplugged { number, error } => {
                if error.is_empty() {
                    self.backends.growth.unplugged(whom.token, number);
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
        name: &str,
        most: u64,
    ) -> Result<(), Refusal> {
        let claimed = self.sessions.get(whom.token).map(|it| &it.attached);
        let own = self.vms.get(name).map(|vm| (name.to_owned(), vm.owner()));
        let is_own = own.is_some_and(|own| claimed.is_some_and(|it| it.contains(&own)));
        if !self.policy.is_operator(viewer) || !is_own {
            let what = format!("VM {name:?} is not attached over this connection: attach it first");
            return Err(Refusal::new(code::DENIED, what));
        }
        self.backends.growth.offer(name, whom.token, most);
        Ok(())
    }

    /// Has memory plugged into a VM; the back-end is answered when it is there.
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
        let wanted = Wanted {
            whom,
            end,
            wish,
            made,
            memory,
        };
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

    fn plugged(&mut self, token: u64, number: u32, error: &str) {
        let there = error.is_empty();
        if self.backends.growth.is_late(token, number) {
            match there {
                true => self.unplug(number),
                false => self.backends.growth.unplugged(token, number),
            }
            return;
        }
        let Some((vm, wanted)) = self.backends.growth.plugged(token, number, there) else {
            return;
        };
        let Wanted {
            whom,
            end,
            wish,
            made,
            memory,
        } = wanted;
        let shared = match there {
            true => self.share_device(end, wish, number, memory, made),
            false => {
                let what = format!("VM {vm:?} cannot get more memory: {error}");
                Err(Refusal::new(code::UNAVAILABLE, what))
            }
        };
        if there && shared.is_err() {
            self.unplug(number);
        }
        self.sessions.set_busy(whom.token, false);
        let went = self.tell_shared(whom, end, wish, shared);
        self.went_on(whom.token, went);
    }

    fn share_device(
        &mut self,
        end: End,
        wish: RegionWish,
        number: u32,
        memory: u64,
        made: Exported,
    ) -> Result<(vnplug_ring::control::backend::Mapped, [OwnedFd; 2]), Refusal> {
        let (len, _) = self
            .may_share(end, wish)
            .map_err(|_| no_channel(wish.channel))?;
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

    /// Has a device taken out that nobody uses.
    pub(super) fn unplug(&mut self, number: u32) {
        if let Some(token) = self.backends.growth.end(number) {
            self.tell_plugger(token, Grow::Unplug { number }, Vec::new());
        }
    }

    /// A VM is detached: all that was plugged for it goes.
    pub(super) fn unplug_all(&mut self, vm: &str) {
        for (token, number) in self.backends.growth.detached(vm) {
            self.tell_plugger(token, Grow::Unplug { number }, Vec::new());
        }
    }

    /// A process that plugged is gone: who waits for it is told.
    pub(super) fn plugger_gone(&mut self, token: u64) {
        let gone = self.backends.growth.gone(token);
        self.refuse_wanted(gone, "is gone");
    }

    /// Tells who has waited too long for a device.
    pub(super) fn give_up_plugging(&mut self) {
        let late = self.backends.growth.overdue(Instant::now());
        self.refuse_wanted(late, "does not answer");
    }

    fn refuse_wanted(&mut self, all: Vec<Wanted>, why: &str) {
        for wanted in all {
            let what = format!("who plugs devices into the VM {why} (vnplug attach qemu --grow)");
            let refusal = Refusal::new(code::UNAVAILABLE, what);
            self.sessions.set_busy(wanted.whom.token, false);
            let went = self.sessions.answer(wanted.whom, Err(refusal));
            self.went_on(wanted.whom.token, went);
        }
    }

    fn tell_plugger(&mut self, token: u64, what: Grow, fds: Vec<OwnedFd>) {
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        match session.say(&Message::Grow(what), 0, 0, fds) {
            Ok(()) => self.sessions.rearm(token),
            Err(over) => self.end(token, &over),
        }
    }
}
