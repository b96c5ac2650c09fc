//! Memory that back-ends ask for: made, told to both sides, and taken back.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_os::memory::Exported;
use vnplug_ring::control::backend::Mapped;
use vnplug_ring::control::grow::PLUGGED_OFFSET;
use vnplug_ring::control::{Backend, Message, code};

use super::channel::{self, End, Side};
use super::growth::device_len;
use super::regions::{Bill, Home, Shared, State};
use super::{RegionWish, no_channel};
use crate::control::Control;
use crate::control::memory::{Contents, LARGE, Want};
use crate::control::session::Over;
use crate::control::waiting::{Then, Whom};
use crate::hub::{NO_DESCRIPTORS, Peer, Refusal, no_memory};

/// Pieces of memory of one channel, with those of which the back-end was not told yet that they are gone.
const MAX_REGIONS: usize = 16;
/// Pieces of memory of one back-end: each has descriptors here.
const MAX_PIECES: usize = 4096;

impl Control {
    pub(super) fn region(&mut self, whom: Whom, end: End, wish: RegionWish) -> Result<(), Over> {
        let may = self.may_share(end, wish);
        if let (Ok((len, _)), Some(session)) = (&may, self.sessions.get(whom.token)) {
            // As a user's rings do: memory takes its time to commit.
            session.bucket.borrow_mut().charge_bytes(*len);
        }
        match may {
            Err(refusal) => self.sessions.answer(whom, Err(refusal)),
            Ok((len, Peer::User(_))) => {
                let want = Want::Shared {
                    len,
                    writable: wish.writable,
                };
                self.make(whom, want, Then::Region(wish))
            }
            Ok((len, Peer::Vm(name))) if self.backends.growth.is_for(&name) => {
                let device = device_len(len);
                let left = self.backends.growth.left(&name);
                if device > left {
                    let what = format!(
                        "a device of {device} bytes for VM {name:?}, which may get {left} more: attach it \
                         with a larger --grow, or share less"
                    );
                    let refusal = Refusal::new(code::NO_MEMORY, what);
                    return self.sessions.answer(whom, Err(refusal));
                }
                let want = Want::Shared {
                    len: device,
                    writable: wish.writable,
                };
                self.make(whom, want, Then::Region(wish))
            }
            Ok((len, Peer::Vm(name))) => {
                let region = match self.place_in_pool(whom, end, wish, &name, len) {
                    Ok(region) => region,
                    Err(refusal) => return self.sessions.answer(whom, Err(refusal)),
                };
                self.sessions.set_busy(whom.token, true);
                match self.empty_elsewhere(region) {
                    true => Ok(()),
                    false => self.came(whom, region, wish),
                }
            }
        }
    }

    /// What a wish takes, and who would map it, if it may be.
    pub(super) fn may_share(&mut self, end: End, wish: RegionWish) -> Result<(u64, Peer), Refusal> {
        let (channel, _) = self.own_channel(end, wish.channel)?;
        let (backend, program) = (channel.backend, channel.end(Side::Program));
        let untold = channel.untold(Side::BackEnd);
        let (all, used) = self.backends.regions.shared_by(backend);
        let pieces = self.backends.regions.of_channel(wish.channel) + untold;
        let most = self
            .backends
            .registry
            .grant(backend)
            .map_or(0, |it| it.memory);
        let len = wish
            .bytes
            .checked_next_multiple_of(4096)
            .unwrap_or(u64::MAX);
        if len == 0 {
            return Err(Refusal::new(
                code::INVALID,
                "a region has at least one byte",
            ));
        }
        if len > most.saturating_sub(used) || pieces >= MAX_REGIONS || all >= MAX_PIECES {
            let what = format!(
                "{len} bytes of shared memory: this back-end may share {most} (memory= of its grant) and \
                 shares {used}; a channel has at most {MAX_REGIONS} regions, and all together {MAX_PIECES}"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        let sessions = &self.sessions;
        let viewer_of = |end: End| sessions.get(end.token).map(|session| &session.viewer);
        let viewer = viewer_of(program).ok_or_else(|| no_channel(wish.channel))?;
        if !self.policy.is_operator(viewer) {
            let regions = &self.backends.regions;
            let own = regions.shared_with(backend, |end| viewer_of(end) == Some(viewer));
            let half = most.saturating_sub(used - own) / 2;
            if len > half.saturating_sub(own) {
                let what = format!(
                    "{len} bytes of shared memory for {viewer:?}, which has {own}: of the {most} that this \
                     back-end may share (memory= of its grant) one user or VM has at most half of what the \
                     others leave"
                );
                return Err(Refusal::new(code::LIMIT, what));
            }
        }
        Ok((len, viewer.clone()))
    }

    fn own_channel(
        &mut self,
        end: End,
        number: u32,
    ) -> Result<(&mut channel::Channel, Side), Refusal> {
        let own = self.backends.registry.channel_of(end, number);
        own.filter(|(channel, side)| *side == Side::BackEnd && !channel.has_ended())
            .ok_or_else(|| no_channel(number))
    }

    /// Memory for a back-end is made.
    pub(in crate::control) fn shared(
        &mut self,
        whom: Whom,
        wish: RegionWish,
        made: std::io::Result<Exported>,
    ) -> Result<(), Over> {
        let end = End {
            token: whom.token,
            app: whom.app,
        };
        let made = made.map_err(|error| no_memory(wish.bytes, &error));
        let program = match made.as_ref() {
            Ok(_) => self.may_share(end, wish).ok(),
            Err(_) => None,
        };
        let shared = match (made, program) {
            (Ok(made), Some((_, Peer::Vm(name)))) => {
                return self.plug(whom, end, wish, &name, made);
            }
            (made, _) => made.and_then(|made| {
                let made = Arc::new(made);
                let shared = self.share_own(end, wish, Arc::clone(&made));
                if shared.is_err() {
                    let len = made.len();
                    self.jobs.discard(made, len);
                }
                shared
            }),
        };
        let told = self.tell_shared(whom, end, wish, shared);
        self.deliver();
        told
    }

    fn share_own(
        &mut self,
        end: End,
        wish: RegionWish,
        made: Arc<Exported>,
    ) -> Result<(Mapped, [OwnedFd; 2]), Refusal> {
        let (len, _) = self.may_share(end, wish)?;
        let copy = |fd: &OwnedFd| {
            let copied = fd.as_fd().try_clone_to_owned();
            copied.map_err(|_| Refusal::new(code::NO_MEMORY, NO_DESCRIPTORS))
        };
        let fds = [copy(&made.whole)?, copy(made.for_program())?];
        let mapped = self.add_region(end, wish, len, Home::Own(made))?;
        Ok((mapped, fds))
    }

    /// Takes a place in the pool of a VM, which is to be emptied first: the region's number. Whoever maps
    /// it maps all of the pool.
    fn place_in_pool(
        &mut self,
        whom: Whom,
        end: End,
        wish: RegionWish,
        name: &str,
        len: u64,
    ) -> Result<u32, Refusal> {
        let (channel, _) = self.own_channel(end, wish.channel)?;
        let backend = channel.backend;
        if !self
            .backends
            .registry
            .grant(backend)
            .is_some_and(|it| it.pool)
        {
            let what = format!(
                "VM {name:?} maps one memory, its pool, and this back-end may not have that: the operator \
                 permits it by pool = true in its [[backend]], and it can then read and write all rings of the VM; \
                 or attach the VM with --grow, for memory of its own (QEMU)"
            );
            return Err(Refusal::new(code::DENIED, what));
        }
        let no_vm = || Refusal::new(code::NOT_FOUND, format!("no VM {name:?} is attached"));
        let vm = self.vms.get_mut(name).ok_or_else(no_vm)?;
        if vm.is_apart() {
            let what = format!(
                "no program of VM {name:?} maps its pool (--apart), and nobody plugs devices now: run `vnplug \
                 attach qemu --name {name} --grow SIZE --apart`"
            );
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        let place = vm.places.take(len).ok_or_else(|| {
            let what = format!(
                "no {len} bytes are free in the pool of VM {name:?}: attach it with a larger --pool"
            );
            Refusal::new(code::NO_MEMORY, what)
        })?;
        let home = Home::Pool(name.to_owned(), place);
        let mapped = self.add_region(end, wish, len, home)?;
        if let Some(shared) = self.backends.regions.get_mut(mapped.region) {
            shared.state = State::Coming(whom, wish);
        }
        Ok(mapped.region)
    }

    /// A place in a pool is empty: it is the back-end's and the program's, if they are still there.
    fn came(&mut self, whom: Whom, region: u32, wish: RegionWish) -> Result<(), Over> {
        self.sessions.set_busy(whom.token, false);
        let end = End {
            token: whom.token,
            app: whom.app,
        };
        let shared = self.share_in_pool(end, region, wish);
        if shared.is_err()
            && let Some(shared) = self.backends.regions.remove(region)
        {
            self.give_back(shared.home, shared.len);
        }
        let told = self.tell_shared(whom, end, wish, shared);
        self.deliver();
        told
    }

    fn share_in_pool(
        &mut self,
        end: End,
        region: u32,
        wish: RegionWish,
    ) -> Result<(Mapped, [OwnedFd; 2]), Refusal> {
        self.own_channel(end, wish.channel)?;
        let none = || no_channel(wish.channel);
        let shared = self.backends.regions.get_mut(region).ok_or_else(none)?;
        let Home::Pool(name, place) = &shared.home else {
            return Err(none());
        };
        let vm = self.vms.get_mut(name).ok_or_else(none)?;
        let opened = || {
            let file = vm.pool_file();
            file.map_err(|error| no_memory(shared.len, &error))
        };
        let fds = [opened()?, opened()?];
        shared.state = State::Used;
        let mapped = Mapped {
            channel: wish.channel,
            region,
            memory: 0,
            offset: place.offset,
            len: shared.len,
            writable: wish.writable,
        };
        Ok((mapped, fds))
    }

    pub(super) fn add_region(
        &mut self,
        end: End,
        wish: RegionWish,
        len: u64,
        home: Home,
    ) -> Result<Mapped, Refusal> {
        let (channel, _) = self.own_channel(end, wish.channel)?;
        let (backend, program) = (channel.backend, channel.end(Side::Program));
        let bucket = |end: End| Some(Rc::clone(&self.sessions.get(end.token)?.bucket));
        let bill = Bill {
            back_end: bucket(end),
            program: bucket(program),
        };
        let (memory, offset) = match &home {
            Home::Own(_) => (0, 0),
            Home::Pool(_, place) => (0, place.offset),
            Home::Device { memory, .. } => (*memory, PLUGGED_OFFSET),
        };
        let shared = Shared {
            channel: wish.channel,
            backend,
            owner: end,
            program,
            len,
            bill,
            home,
            state: State::Used,
            is_busy: false,
            gone: None,
        };
        Ok(Mapped {
            channel: wish.channel,
            region: self.backends.regions.add(shared),
            memory,
            offset,
            len,
            writable: wish.writable,
        })
    }

    /// Tells a program of its memory.
    pub(super) fn tell_program(&mut self, mapped: Mapped, fd: Option<OwnedFd>) {
        let told = Backend::Mapped(mapped);
        let registry = &mut self.backends.registry;
        registry.tell(mapped.channel, Side::Program, told, fd);
    }

    /// A piece is lost that its program was not told of: its back-end is.
    pub(super) fn lose_region(&mut self, mapped: Mapped) {
        let told = Backend::Withdraw {
            channel: mapped.channel,
            region: mapped.region,
            within_ms: 0,
        };
        let registry = &mut self.backends.registry;
        registry.tell(mapped.channel, Side::BackEnd, told, None);
        self.free_region(mapped.region, true);
    }

    /// Tells the back-end of its memory, and the program.
    pub(super) fn tell_shared(
        &mut self,
        whom: Whom,
        end: End,
        wish: RegionWish,
        shared: Result<(Mapped, [OwnedFd; 2]), Refusal>,
    ) -> Result<(), Over> {
        let (mapped, [whole, programs]) = match shared {
            Ok(shared) => shared,
            Err(refusal) => return self.sessions.answer(whom, Err(refusal)),
        };
        let message = Message::Backend(Backend::Mapped(mapped));
        self.sessions.answer(whom, Ok((message, vec![whole])))?;
        if let Some((channel, _)) = self.backends.registry.channel_of(end, wish.channel) {
            let program = channel.end(Side::Program);
            let by_agent = self
                .sessions
                .get(program.token)
                .is_some_and(|it| it.channel);
            self.tell_program(mapped, (!by_agent).then_some(programs));
        }
        Ok(())
    }

    /// A back-end wants its memory back.
    pub(super) fn withdraw(
        &mut self,
        whom: Whom,
        end: End,
        region: u32,
        within: Duration,
    ) -> Result<(), Refusal> {
        let no_region = || Refusal::new(code::NOT_FOUND, format!("no region {region} is yours"));
        let growth = &self.backends.growth;
        let shared = self.backends.regions.get_mut(region);
        let shared = shared.filter(|it| it.owner == end).ok_or_else(no_region)?;
        if matches!(&shared.home, Home::Device { number, .. } if growth.is_coming(*number)) {
            // Its program was not told of it.
            shared.state = State::Asked(Instant::now(), Some(whom));
            self.free_region(region, true);
            return Ok(());
        }
        match shared.state {
            State::Used => {}
            State::Coming(..) | State::Asked(_, None) | State::Emptied => return Err(no_region()),
            State::Asked(_, Some(_)) => {
                let what = format!("region {region} is being withdrawn");
                return Err(Refusal::new(code::EXISTS, what));
            }
        }
        shared.state = State::Asked(Instant::now() + within, Some(whom));
        let told = Backend::Withdraw {
            channel: shared.channel,
            region,
            within_ms: within.as_millis() as u32,
        };
        let channel = shared.channel;
        self.backends
            .registry
            .tell(channel, Side::Program, told, None);
        Ok(())
    }

    /// A program does not map a piece any more.
    pub(super) fn let_go(&mut self, program: End, region: u32) {
        let shared = self.backends.regions.get_mut(region);
        let Some(shared) = shared.filter(|it| it.program == program) else {
            return;
        };
        let channel = shared.channel;
        if matches!(shared.state, State::Used) {
            // By itself: its back-end is told.
            shared.bill.is_the_programs(shared.len);
            let told = Backend::Withdraw {
                channel,
                region,
                within_ms: 0,
            };
            let registry = &mut self.backends.registry;
            registry.tell(channel, Side::BackEnd, told, None);
        }
        self.free_region(region, true);
    }

    /// Forgets a piece that no program maps, and answers who waits for that. A place in a pool is given to
    /// nobody else while a thread empties it.
    pub(super) fn free_region(&mut self, region: u32, released: bool) {
        match self.backends.regions.get_mut(region) {
            Some(shared) if shared.is_busy && matches!(shared.home, Home::Pool(..)) => {
                shared.gone = Some(released);
            }
            _ => self.remove_region(region, released),
        }
    }

    /// As [`free_region`](Self::free_region), at once: the pool is no more.
    pub(super) fn remove_region(&mut self, region: u32, released: bool) {
        let Some(shared) = self.backends.regions.remove(region) else {
            return;
        };
        let registry = &mut self.backends.registry;
        registry.forget_region(shared.channel, region);
        self.withdrawn(&shared.state, released);
        self.give_back(shared.home, shared.len);
    }

    fn give_back(&mut self, home: Home, len: u64) {
        match home {
            // NB: its back-end may map it, and keep it: it is empty then.
            Home::Own(made) => match len >= LARGE {
                true => self.jobs.discard(made, len),
                false => drop(made),
            },
            // It is emptied for who has it next.
            Home::Pool(name, place) => {
                if let Some(vm) = self.vms.get_mut(&name) {
                    vm.places.give(place);
                }
            }
            Home::Device { number, made, .. } => {
                let bytes = made.len();
                match bytes >= LARGE {
                    true => self.jobs.discard(made, bytes),
                    false => drop(made),
                }
                self.unplug(number);
            }
        }
    }

    /// Gives memory back that nobody has; much of it elsewhere.
    pub(super) fn give_memory(&mut self, made: Exported) {
        let bytes = made.len();
        match bytes >= LARGE {
            true => self.jobs.discard(made, bytes),
            false => drop(made),
        }
    }

    fn withdrawn(&mut self, state: &State, released: bool) {
        if let State::Coming(whom, wish) = state {
            self.sessions.set_busy(whom.token, false);
            let refusal = no_channel(wish.channel);
            let went = self.sessions.answer(*whom, Err(refusal));
            self.went_on(whom.token, went);
        }
        if let State::Asked(_, Some(whom)) = state {
            let answer = Backend::Withdrawn { released };
            if let Err(over) = self.answer_backend(*whom, Ok(answer)) {
                self.end(whom.token, &over);
            } else {
                self.sessions.rearm(whom.token);
            }
        }
    }

    /// Empties what programs have not let go in time.
    pub(in crate::control) fn empty_overdue(&mut self) {
        self.give_up_plugging();
        for made in self.backends.growth.take_unused() {
            self.give_memory(made);
        }
        for region in self.backends.regions.overdue(Instant::now()) {
            if !self.empty_elsewhere(region) {
                self.emptied(region);
            }
        }
    }

    /// Has a thread empty much, and is told when it has; little is empty at once: false.
    fn empty_elsewhere(&mut self, region: u32) -> bool {
        let Some(shared) = self.backends.regions.get_mut(region) else {
            return false;
        };
        let contents = match &shared.home {
            Home::Own(made) | Home::Device { made, .. } => Contents::Own(Arc::clone(made)),
            Home::Pool(name, place) => match self.vms.get_mut(name) {
                Some(vm) => Contents::Pool(vm.region.clone(), *place),
                None => return false,
            },
        };
        let len = shared.len;
        shared.is_busy = len >= LARGE && self.jobs.empty(region, contents.clone(), len);
        if !shared.is_busy {
            contents.empty();
        }
        shared.is_busy
    }

    /// A piece is empty: it is shared now, or was not let go in time.
    pub(in crate::control) fn emptied(&mut self, region: u32) {
        // Its pool may be gone, and it with that.
        let Some(shared) = self.backends.regions.get_mut(region) else {
            return;
        };
        shared.is_busy = false;
        if let Some(released) = shared.gone {
            return self.remove_region(region, released);
        }
        if let State::Coming(whom, wish) = shared.state {
            let went = self.came(whom, region, wish);
            return self.went_on(whom.token, went);
        }
        let state = std::mem::replace(&mut shared.state, State::Emptied);
        self.withdrawn(&state, false);
    }
}
