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
#[cfg(test)]
mod growth_tests;
mod ports;
mod regions;
mod registry;
mod regrant;
mod share;

use std::time::{Duration, Instant};

use vnplug_ring::control::backend::{Connect, Register};
use vnplug_ring::control::{Backend, Counted, Message, code};

use self::channel::{End, Side};
use self::growth::Growth;
pub(super) use self::ports::Growing;
use self::regions::{LONGEST, Regions};
use self::registry::{Registry, WINDOWS};
use super::Control;
use super::session::Over;
use super::waiting::Whom;
use crate::control::request::quoted;
use crate::hub::{BackendGrant, OpenTo, Peer, Refusal};

/// Messages for one connection in a turn.
const TURN: usize = 32;
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
            growth: Growth::new(),
        }
    }

    /// Bytes that may wait in the windows of a program's owner.
    pub(super) fn windows_of(&self, owner: &Peer) -> u64 {
        self.registry.windows_of(owner)
    }

    /// One entry per back-end that the operator grants.
    pub(super) fn counters(&self) -> Vec<Counted> {
        self.registry.counters(|id| self.regions.shared_by(id))
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
                let list = self.backends.registry.list(viewer, &self.policy);
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
        let registry = &mut self.backends.registry;
        registry.register(whom.token, viewer, &self.policy, request)?;
        log::info!(target: "backend", "{viewer:?} is back-end {} {:?}", request.id, request.name);
        Ok(())
    }

    fn connect(
        &mut self,
        program: End,
        viewer: &Peer,
        request: &Connect,
    ) -> Result<Backend, Refusal> {
        if !self.policy.is_operator(viewer) {
            let windows = self.backends.windows_of(viewer) + WINDOWS;
            self.hub.bears_windows(viewer, windows)?;
        }
        let registry = &mut self.backends.registry;
        let connected = registry.connect(program, viewer, &self.policy, request)?;
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
        let is_gone = |end: End| end.token == token && app.is_none_or(|app| app == end.app);
        self.backends.regions.programs_pay(is_gone);
        let ended = self.backends.registry.gone(token, app, reason);
        self.channels_are_over(ended);
        self.plugger_gone(token);
        self.give_up_growing(|it| it.token == token && app.is_none_or(|app| app == it.app));
        for region in self.backends.regions.of_program(is_gone) {
            self.free_region(region, true);
        }
    }

    /// An operator ends channels of a back-end. Their programs have some time to let go of memory.
    pub(super) fn revoke_channels(&mut self, backend: &str, whose: &str) -> Result<(), Refusal> {
        let whose = OpenTo::list(whose).map_err(|word| {
            let what = format!("{word:?} is nobody: write vm:NAME, uid:N, vm:*, uid:* or *");
            Refusal::new(code::INVALID, what)
        })?;
        let is_meant = |owner: &Peer| whose.iter().any(|it| it.is(owner));
        let ended = self.backends.registry.revoke(backend, is_meant)?;
        log::info!(
            target: "backend",
            "an operator revokes {} channels of back-end {}",
            ended.len(),
            quoted(backend)
        );
        self.channels_are_over(ended);
        Ok(())
    }

    /// A VM is detached: its pool is no more.
    pub(super) fn pool_gone(&mut self, vm: &str) {
        self.unplug_all(vm);
        for region in self.backends.regions.in_pool_of(vm) {
            self.remove_region(region, true);
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

fn no_channel(number: u32) -> Refusal {
    let what = format!("channel {number} is not open on this connection, or is over");
    Refusal::new(code::NOT_FOUND, what)
}
