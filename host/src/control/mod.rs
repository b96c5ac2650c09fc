//! The control thread: every connection of clients, agents and QEMUs, in one loop.
//!
//! It polls, reads, decides by the [`hub`](crate::hub) and answers; it never touches a packet and
//! never waits for a peer. Each turn serves every connection that has something to say once, with
//! a bounded amount of work (R4); a connection that asks too fast is read again when its bucket has
//! a token (the kernel then holds its sender). Filters compile, and memory is committed, in threads
//! of their own.
//!
//! ```text
//!   accept ── sessions ── request ──┬── open, rules, stats ── hub ── queues' threads
//!                                   ├── channel, groups ───── vms
//!                                   └── what takes time ───── jobs (waiting), leaving (closing)
//! ```

mod accept;
mod backends;
mod channel;
mod closing;
mod compile;
mod elsewhere;
mod entrances;
mod grants;
mod groups;
mod kept;
mod kept_sources;
mod limit;
mod memory;
mod open;
mod patterns;
mod programs;
mod reloads;
mod request;
mod rules;
mod session;
mod sessions;
mod sources;
mod switches;
mod vms;
mod waiting;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};

use crate::awake::Awake;
use crate::config::Config;
use crate::hub::maker::Maker;
use crate::hub::policy::Policy;
use crate::hub::{Hub, Peer};
use crate::pattern::OpenPattern;
use crate::vm::{Dirs, Vm};
use crate::watch::Watch;
use accept::Door;
use backends::Backends;
use closing::Leaving;
use entrances::Entering;
pub(crate) use kept::KeptGrants;
pub(crate) use kept_sources::KeptSources;
use patterns::Patterns;
use programs::ProgramChanges;
pub(crate) use reloads::ReadAgain;
use reloads::Reloads;
use session::Over;
use sessions::{Next, Sessions, Turn};
use sources::Additions;
pub(crate) use switches::Switches;
use vms::Vms;
use vnplug_filter::{Compiler, Jit};
use vnplug_os::kept::Kept;
use vnplug_os::memory::leave_to_readers;
use vnplug_os::namespace::Entrance;
use vnplug_os::peer_log;
use vnplug_path::engine::Pulse;
use vnplug_path::source::early::SeatOffice;
use waiting::Jobs;

/// How soon it is looked for the answers of queues' threads.
const ANSWERED: Duration = Duration::from_millis(1);
/// After this many panics the daemon ends: something is wrong beyond one connection.
const MAX_PANICS: u32 = 64;

/// What the loop needs to know.
pub(crate) struct Setup {
    pub(crate) hub: Hub,
    pub(crate) policy: Policy,
    pub(crate) dirs: Dirs,
    pub(crate) compiler: Compiler,
    pub(crate) jit: Jit,
    pub(crate) awake: Option<Awake>,
    pub(crate) switches: Switches,
    pub(crate) grants: KeptGrants,
    /// Loads programs, if the operator lets them change.
    pub(crate) maker: Option<Maker>,
    pub(crate) kept_sources: KeptSources,
    /// In force.
    pub(crate) config: Config,
    /// The patterns of interfaces in it.
    pub(crate) patterns: Vec<OpenPattern>,
    /// Reads it again.
    pub(crate) read_again: ReadAgain,
    /// The user (uid, gid) that the daemon became, if it is another one.
    pub(crate) user: Option<(u32, u32)>,
    /// Who makes what early drop needs.
    pub(crate) seats: SeatOffice,
    /// By which sources enter network namespaces.
    pub(crate) entrance: Arc<Entrance>,
    /// What the service manager keeps over a restart.
    pub(crate) kept: Arc<Kept>,
    /// Sees threads hang.
    pub(crate) watch: Watch,
    pub(crate) listener: OwnedFd,
    /// Becomes readable when the daemon is to end.
    pub(crate) termination: Arc<OwnedFd>,
    /// By which others see whether the loop turns.
    pub(crate) pulse: Arc<Pulse>,
}

/// The control loop.
pub(crate) struct Control {
    /// Sources and ports.
    hub: Hub,
    policy: Policy,
    /// Connections.
    sessions: Sessions,
    door: Door,
    vms: Vms,
    /// What was set of switches at run time.
    switches: Switches,
    /// Which grants were changed at run time.
    grants: KeptGrants,
    /// Which sources were added for good.
    kept_sources: KeptSources,
    /// Third parties' back-ends, and who uses them.
    backends: Backends,
    /// Programs that change.
    programs: ProgramChanges,
    /// The configuration, and how it is read again.
    reloads: Reloads,
    /// Sources that are being added.
    additions: Additions,
    /// Entrances of switches that come and go.
    entering: Entering,
    patterns: Patterns,
    /// The user (uid, gid) that the daemon became.
    user: Option<(u32, u32)>,
    seats: SeatOffice,
    entrance: Arc<Entrance>,
    kept: Arc<Kept>,
    watch: Watch,
    /// What is done elsewhere.
    jobs: Jobs,
    /// Ports on their way out.
    leaving: Leaving,
    /// The CPUs, while there are ports.
    awake: Option<Awake>,
    /// Rung by the compile and memory threads and by ports of VMs that are woken through a channel.
    bell: Arc<OwnedFd>,
    _termination: Arc<OwnedFd>,
    pulse: Arc<Pulse>,
    /// How often something panicked.
    panics: u32,
}

const LISTENER: u64 = 0;
const TERMINATION: u64 = 1;
const BELL: u64 = 2;

impl Control {
    /// Prepares the loop; VMs of an earlier daemon are served again.
    pub(crate) fn new(setup: Setup) -> io::Result<Self> {
        let Setup {
            hub,
            policy,
            dirs,
            compiler,
            jit,
            awake,
            switches,
            grants,
            maker,
            kept_sources,
            config,
            patterns,
            read_again,
            entrance,
            kept,
            watch,
            listener,
            termination,
            pulse,
            user,
            seats,
        } = setup;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let sessions = Sessions::new()?;
        for (fd, token) in [
            (&listener, LISTENER),
            (&*termination, TERMINATION),
            (&*bell, BELL),
        ] {
            sessions.watch(fd.as_fd(), token)?;
        }
        let jobs = Jobs::start(compiler, jit, &bell)?;
        let (vms, broken) = Vm::load_all(&dirs);
        let mut control = Self {
            hub,
            policy,
            sessions,
            door: Door::new(listener),
            vms: Vms::new(dirs, broken),
            switches,
            grants,
            kept_sources,
            backends: Backends::new(config.backends.clone()),
            programs: ProgramChanges::new(maker),
            reloads: Reloads::new(config, read_again),
            additions: Additions::default(),
            entering: Entering::default(),
            user,
            seats,
            patterns: Patterns::default(),
            entrance,
            kept,
            watch,
            jobs,
            leaving: Leaving::default(),
            awake,
            bell,
            _termination: termination,
            pulse,
            panics: 0,
        };
        for vm in vms {
            log::info!(target: "vm", "serving VM {:?} again", vm.name());
            control.admit_again(&vm);
            control.add_vm(vm)?;
        }
        control.shut_out_again();
        control.bar_broken();
        control.remove_packets();
        for pattern in patterns {
            let welcomed = control.welcome_pattern(pattern);
            welcomed.map_err(|refusal| io::Error::other(refusal.text))?;
        }
        control.settle_patterns();
        Ok(control)
    }

    /// Serves until it is to end.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(256);
        let mut turn = 0;
        loop {
            events.clear();
            turn += 1;
            self.pulse.sleep(turn);
            if let Err(error) = self.sessions.wait_for(&mut events, self.timeout()) {
                self.leave();
                return Err(error);
            }
            self.pulse.beat(turn);
            for event in &events {
                let (flags, token) = (event.flags, event.data.u64());
                match token {
                    TERMINATION => {
                        self.leave();
                        return Ok(());
                    }
                    LISTENER => self.guarded(None, Self::accept),
                    BELL => self.guarded(None, Self::bell),
                    token if self.vms.who_listens(token).is_some() => {
                        self.guarded(None, |it| it.accept_vm(token));
                    }
                    token => self.guarded(Some(token), |it| it.serve(token, flags)),
                }
            }
            self.guarded(None, Self::housekeeping);
            if self.panics > MAX_PANICS {
                self.leave();
                let what = format!("it panicked {} times; the log says where", self.panics);
                return Err(io::Error::other(what));
            }
        }
    }

    /// What others go on with stays as it is.
    fn leave(&self) {
        leave_to_readers();
        self.kept.leave();
    }

    /// Does something, for a connection or for all. A panic there is a bug of ours that a peer may
    /// have found a way to: it costs that connection, and the daemon goes on (R10); one that comes
    /// again and again ends it in order.
    fn guarded(&mut self, token: Option<u64>, what: impl FnOnce(&mut Self)) {
        let failed = |panics: &mut u32| {
            *panics += 1;
            let what = "serving a connection panicked, which is a bug in vnplugd";
            log::error!(target: "control", "{what}");
        };
        if catch_unwind(AssertUnwindSafe(|| what(self))).is_ok() {
            return;
        }
        failed(&mut self.panics);
        let Some(token) = token else {
            return;
        };
        let over = Over::Misbehaved("the daemon failed while serving it");
        if catch_unwind(AssertUnwindSafe(|| self.end(token, &over))).is_err() {
            failed(&mut self.panics);
        }
    }

    fn timeout(&self) -> Duration {
        let now = Instant::now();
        let longest = Duration::from_secs(if self.vms.served.is_empty() { 3600 } else { 1 });
        let soon = [
            self.sessions.look_again(now),
            self.door.look_again(now),
            self.jobs.look_again(),
            self.leaving.look_again(),
            self.backends.look_again(now),
        ];
        soon.into_iter().flatten().fold(longest, Duration::min)
    }

    fn serve(&mut self, token: u64, flags: epoll::EventFlags) {
        match self.sessions.exchange(token, flags) {
            Ok(()) => self.work(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Serves the whole messages that a connection has sent, as far as its turn goes.
    fn work(&mut self, token: u64) {
        let mut turn = Turn::new();
        loop {
            match self.sessions.next(token, &mut turn) {
                Next::Message(message) => {
                    if let Err(over) = self.request(token, &message) {
                        return self.end(token, &over);
                    }
                }
                Next::Malformed(malformed) => return self.misbehaved(token, &malformed),
                Next::Over(over) => return self.end(token, &over),
                Next::Rests => break,
            }
            turn.served();
        }
        self.after_serving(token);
    }

    /// Wakes readers behind a channel that has room again, then watches it.
    fn after_serving(&mut self, token: u64) {
        let session = self.sessions.get(token);
        if let Some(session) = session.filter(|session| session.channel)
            && let Peer::Vm(name) = session.viewer.clone()
        {
            self.wake_readers(&name);
        }
        self.deliver_to(token);
        self.sessions.rearm(token);
    }

    /// Ends a connection and whatever was opened through it.
    fn end(&mut self, token: u64, over: &Over) {
        let Some(session) = self.sessions.remove(token) else {
            return;
        };
        match over {
            Over::Closed => log::debug!(target: "control", "{:?}: {over}", session.viewer),
            _ => {
                peer_log!(
                    log::Level::Info,
                    "control",
                    "{:?} is cut off: {over}",
                    session.viewer
                );
            }
        }
        self.jobs.forget(token);
        self.leaving.forget(token);
        let ports = session.ports.iter().map(|(_, port)| *port);
        self.close_soon(&session.viewer, ports.collect());
        self.backends_gone(token, None);
        if let Peer::Vm(name) = &session.viewer
            && let Some(vm) = self.vms.get_mut(name)
            && vm.channel == Some(token)
        {
            vm.channel = None;
            peer_log!(
                log::Level::Info,
                "vm",
                "VM {name:?}: its control channel is closed"
            );
        }
        self.sessions.see_off(session);
    }

    fn housekeeping(&mut self) {
        let now = Instant::now();
        for token in self.sessions.go_on(now) {
            self.guarded(Some(token), |it| it.work(token));
        }
        self.listen_again(now);
        for token in self.sessions.late(now) {
            self.end(token, &Over::Misbehaved("it said no Hello"));
        }
        self.drop_lost_vms();
        self.heard();
        self.close_doomed();
        self.see_sources_off();
        self.free_programs();
        self.empty_overdue();
        self.deliver();
        self.serve_parked();
        if let Some(awake) = &mut self.awake {
            awake.hold(!self.hub.ports().is_empty());
        }
    }
}

#[cfg(test)]
mod tests;
