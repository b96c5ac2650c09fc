//! Third parties' back-ends: processes that are neither ours nor privileged, and programs that use them, in
//! guests, containers and elsewhere.
//!
//! ```text
//!   back-end's connection ─┐                       ┌─ program's connection
//!                          ├── registry ── channel ┤
//!   (Register, Region, …)  │      │                └─ agent's channel (an application each)
//!                          └── regions ── memory that both map
//! ```
//!
//! Messages are passed by this thread; memory is mapped by both and nothing of ours is in its way.

mod channel;
mod devices;
mod growth;
mod regions;
mod registry;

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use vnplug_os::memory::Exported;
use vnplug_ring::control::backend::{Connect, Mapped, Register};
use vnplug_ring::control::grow::PLUGGED_OFFSET;
use vnplug_ring::control::{Backend, Message, RingPlace, code};

use self::channel::{End, Side};
use self::growth::{Growth, device_len};
use self::regions::{Home, LONGEST, Regions, Shared, State};
use self::registry::Registry;
use super::Control;
use super::memory::{LARGE, Want};
use super::session::Over;
use super::waiting::{Then, Whom};
use crate::hub::{BackendGrant, NO_DESCRIPTORS, Peer, Refusal, no_memory};

/// Messages for one connection in a turn.
const TURN: usize = 32;
/// Pieces of memory of one channel.
const MAX_REGIONS: usize = 16;
/// What a message that is passed costs of what its sender may ask, and each 64 KiB of it.
pub(super) const PASSED: f64 = 0.05;

/// Back-ends, channels, memory.
pub(super) struct Backends {
    registry: Registry,
    regions: Regions,
    growth: Growth,
}

/// Memory that is being made for a back-end.
#[derive(Debug, Clone, Copy)]
pub(super) struct RegionWish {
    channel: u32,
    bytes: u64,
    writable: bool,
}

impl Backends {
    /// What the operator grants; nobody is there yet.
    pub(super) fn new(grants: Vec<BackendGrant>) -> Self {
        Self {
            registry: Registry::new(grants),
            regions: Regions::new(),
            growth: Growth::default(),
        }
    }

    /// How soon a program has to have let go of memory.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        let turns = self.registry.has_fresh().then_some(Duration::ZERO);
        let times = [
            turns,
            self.regions.look_again(now),
            self.growth.look_again(now),
        ];
        times.into_iter().flatten().min()
    }
}

impl Control {
    /// Serves what a back-end says, or who uses one.
    pub(super) fn of_backends(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        said: Backend,
    ) -> Result<(), Over> {
        let end = End {
            token: whom.token,
            app: whom.app,
        };
        match said {
            Backend::Register(request) => {
                let registered = self.register(whom, viewer, &request);
                self.done_if(whom, registered)?;
            }
            Backend::List => {
                let is_operator = self.policy.is_operator(viewer);
                let list = self.backends.registry.list(viewer, is_operator);
                self.answer_backend(whom, Ok(Backend::Listed(list)))?;
            }
            Backend::Connect(request) => {
                let connected = self.connect(end, viewer, &request);
                self.answer_backend(whom, connected)?;
            }
            Backend::Region {
                channel,
                bytes,
                writable,
            } => {
                let wish = RegionWish {
                    channel,
                    bytes,
                    writable,
                };
                self.region(whom, end, wish)?;
            }
            Backend::Withdraw {
                channel: _,
                region,
                within_ms,
            } if whom.id != 0 => {
                let within = Duration::from_millis(within_ms.into()).min(LONGEST);
                if let Err(refusal) = self.withdraw(whom, end, region, within) {
                    self.sessions.answer(whom, Err(refusal))?;
                }
            }
            Backend::Withdraw { region, .. } => self.let_go(end, region),
            said if said.is_passed() => self.pass(end, said),
            other => return self.is_no_request(whom, &Message::Backend(other)),
        }
        self.deliver();
        Ok(())
    }

    fn register(&mut self, whom: Whom, viewer: &Peer, request: &Register) -> Result<(), Refusal> {
        if self.sessions.get(whom.token).is_some_and(|it| it.channel) {
            let what = "a back-end is a process on the host";
            return Err(Refusal::new(code::DENIED, what));
        }
        let is_operator = self.policy.is_operator(viewer);
        let registry = &mut self.backends.registry;
        registry.register(whom.token, viewer, is_operator, request)?;
        log::info!(target: "backend", "{viewer:?} is back-end {} {:?}", request.id, request.name);
        Ok(())
    }

    fn connect(
        &mut self,
        program: End,
        viewer: &Peer,
        request: &Connect,
    ) -> Result<Backend, Refusal> {
        let is_operator = self.policy.is_operator(viewer);
        let registry = &mut self.backends.registry;
        let connected = registry.connect(program, viewer, is_operator, request)?;
        Ok(Backend::Connected(connected))
    }

    fn pass(&mut self, from: End, said: Backend) {
        let (channel, bytes) = match &said {
            Backend::Say { channel, bytes } => (*channel, bytes.len()),
            Backend::Took { channel, .. }
            | Backend::Events { channel, .. }
            | Backend::Hangup { channel, .. } => (*channel, 0),
            _ => return,
        };
        let share = bytes as f64 / (64 << 10) as f64;
        self.sessions.charge(from.token, PASSED * share);
        let hangs_up = matches!(said, Backend::Hangup { .. });
        let by_program = match self.backends.registry.channel_of(from, channel) {
            Some((_, side)) => side == Side::Program,
            None => return,
        };
        let is_over = self.backends.registry.pass(from, channel, said);
        if hangs_up && by_program {
            let own = self.backends.regions.of_program(|program| program == from);
            for region in own {
                if self
                    .backends
                    .regions
                    .get_mut(region)
                    .is_some_and(|it| it.channel == channel)
                {
                    self.let_go(from, region);
                }
            }
        } else if is_over {
            self.backends
                .regions
                .channel_is_over(channel, Instant::now());
        }
    }

    /// A connection is over, or one application of it is gone.
    pub(super) fn backends_gone(&mut self, token: u64, app: Option<u32>) {
        let reason = "the other side is gone";
        let ended = self.backends.registry.gone(token, app, reason);
        let now = Instant::now();
        for channel in ended {
            self.backends.regions.channel_is_over(channel, now);
        }
        self.plugger_gone(token);
        let is_gone = |end: End| end.token == token && app.is_none_or(|app| app == end.app);
        for region in self.backends.regions.of_program(is_gone) {
            self.free_region(region, true);
        }
    }

    /// A VM is detached: its pool is no more.
    pub(super) fn pool_gone(&mut self, vm: &str) {
        self.unplug_all(vm);
        for region in self.backends.regions.in_pool_of(vm) {
            self.free_region(region, true);
        }
    }

    fn region(&mut self, whom: Whom, end: End, wish: RegionWish) -> Result<(), Over> {
        match self.may_share(end, wish) {
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
                let shared = self.share_in_pool(end, wish, &name, len);
                self.tell_shared(whom, end, wish, shared)
            }
        }
    }

    /// What a wish takes, and who would map it, if it may be.
    fn may_share(&mut self, end: End, wish: RegionWish) -> Result<(u64, Peer), Refusal> {
        let (channel, _) = self.own_channel(end, wish.channel)?;
        let (backend, program) = (channel.backend, channel.end(Side::Program));
        let (used, pieces) = self.backends.regions.use_of(backend, wish.channel);
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
        if len > most.saturating_sub(used) || pieces >= MAX_REGIONS {
            let what = format!(
                "{len} bytes of shared memory: this back-end may share {most} (memory= of its grant) and \
                 shares {used}; a channel has at most {MAX_REGIONS} regions"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        let session = self.sessions.get(program.token);
        let viewer = session.map(|session| session.viewer.clone());
        viewer
            .map(|viewer| (len, viewer))
            .ok_or_else(|| no_channel(wish.channel))
    }

    fn own_channel(
        &mut self,
        end: End,
        number: u32,
    ) -> Result<(&mut channel::Channel, Side), Refusal> {
        let own = self.backends.registry.channel_of(end, number);
        own.filter(|(_, side)| *side == Side::BackEnd)
            .ok_or_else(|| no_channel(number))
    }

    /// Memory for a back-end is made.
    pub(super) fn shared(
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
            (made, _) => made.and_then(|made| self.share_own(end, wish, made)),
        };
        let told = self.tell_shared(whom, end, wish, shared);
        self.deliver();
        told
    }

    fn share_own(
        &mut self,
        end: End,
        wish: RegionWish,
        made: Exported,
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

    /// In the pool of a VM: whoever maps it maps all of it.
    fn share_in_pool(
        &mut self,
        end: End,
        wish: RegionWish,
        name: &str,
        len: u64,
    ) -> Result<(Mapped, [OwnedFd; 2]), Refusal> {
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
        let opened = || vm.pool_file().map_err(|error| no_memory(len, &error));
        let fds = [opened()?, opened()?];
        let place = vm.places.take(len).ok_or_else(|| {
            let what = format!(
                "no {len} bytes are free in the pool of VM {name:?}: attach it with a larger --pool"
            );
            Refusal::new(code::NO_MEMORY, what)
        })?;
        vm.region.clear(place.offset, place.len);
        let home = Home::Pool(name.to_owned(), place);
        let mapped = self.add_region(end, wish, len, home)?;
        Ok((mapped, fds))
    }

    fn add_region(
        &mut self,
        end: End,
        wish: RegionWish,
        len: u64,
        home: Home,
    ) -> Result<Mapped, Refusal> {
        let (channel, _) = self.own_channel(end, wish.channel)?;
        let (memory, offset) = match &home {
            Home::Own(_) => (0, 0),
            Home::Pool(_, place) => (0, place.offset),
            Home::Device { memory, .. } => (*memory, PLUGGED_OFFSET),
        };
        let shared = Shared {
            channel: wish.channel,
            backend: channel.backend,
            owner: end,
            program: channel.end(Side::Program),
            len,
            home,
            state: State::Used,
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

    /// Tells the back-end of its memory, and the program.
    fn tell_shared(
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
            let fd = (!by_agent).then_some(programs);
            let told = Backend::Mapped(mapped);
            self.backends
                .registry
                .tell(wish.channel, Side::Program, told, fd);
        }
        Ok(())
    }

    /// A back-end wants its memory back.
    fn withdraw(
        &mut self,
        whom: Whom,
        end: End,
        region: u32,
        within: Duration,
    ) -> Result<(), Refusal> {
        let no_region = || Refusal::new(code::NOT_FOUND, format!("no region {region} is yours"));
        let shared = self.backends.regions.get_mut(region);
        let shared = shared.filter(|it| it.owner == end).ok_or_else(no_region)?;
        match shared.state {
            State::Used => {}
            State::Asked(_, None) | State::Emptied => return Err(no_region()),
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
    fn let_go(&mut self, program: End, region: u32) {
        let shared = self.backends.regions.get_mut(region);
        let Some(shared) = shared.filter(|it| it.program == program) else {
            return;
        };
        let channel = shared.channel;
        if matches!(shared.state, State::Used) {
            // By itself: its back-end is told.
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

    /// Forgets a piece that no program maps, and answers who waits for that.
    fn free_region(&mut self, region: u32, released: bool) {
        let Some(shared) = self.backends.regions.remove(region) else {
            return;
        };
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
            Home::Pool(name, place) => {
                if let Some(vm) = self.vms.get_mut(&name) {
                    empty(vm, place);
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

    fn withdrawn(&mut self, state: &State, released: bool) {
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
    pub(super) fn empty_overdue(&mut self) {
        self.give_up_plugging();
        for region in self.backends.regions.overdue(Instant::now()) {
            let Some(shared) = self.backends.regions.get_mut(region) else {
                continue;
            };
            let state = std::mem::replace(&mut shared.state, State::Emptied);
            match &shared.home {
                Home::Own(made) | Home::Device { made, .. } => made.empty(),
                Home::Pool(name, place) => {
                    if let Some(vm) = self.vms.get_mut(name) {
                        empty(vm, *place);
                    }
                }
            }
            self.withdrawn(&state, false);
        }
    }

    fn answer_backend(&mut self, whom: Whom, answer: Result<Backend, Refusal>) -> Result<(), Over> {
        let answer = answer.map(|answer| (Message::Backend(answer), Vec::new()));
        self.sessions.answer(whom, answer)
    }

    /// Sends what waits, to every connection that has room for it, a turn's worth each.
    pub(super) fn deliver(&mut self) {
        for token in self.backends.registry.take_fresh() {
            self.deliver_to(token);
        }
    }

    /// Sends a connection what waits for it, as far as it has room.
    pub(super) fn deliver_to(&mut self, token: u64) {
        if !self.backends.registry.waits_for(token) {
            return;
        }
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        let (mut over, mut left) = (None, TURN);
        while over.is_none() && session.has_room() {
            if left == 0 {
                self.backends.registry.later(token);
                break;
            }
            left -= 1;
            let Some((app, what, fd)) = self.backends.registry.next(token) else {
                break;
            };
            let fds = fd.into_iter().collect();
            over = session.say(&Message::Backend(what), 0, app, fds).err();
        }
        match over {
            Some(over) => self.end(token, &over),
            None => self.sessions.rearm(token),
        }
    }
}

fn empty(vm: &crate::vm::Vm, place: RingPlace) {
    vm.region.clear(place.offset, place.len);
}

fn no_channel(number: u32) -> Refusal {
    let what = format!("channel {number} is not open on this connection, or is over");
    Refusal::new(code::NOT_FOUND, what)
}
