//! The control thread: every connection of clients, agents and QEMUs, in one loop.
//!
//! It polls, reads, decides by the [`hub`](crate::hub) and answers; it never touches a packet and
//! never waits for a peer. Each turn serves every connection that has something to say once, with
//! a bounded amount of work (R4); a connection that asks too fast is read again when its bucket has
//! a token (the kernel then holds its sender). Filters compile, and memory is committed, in threads
//! of their own.

mod channel;
mod closing;
mod compile;
mod groups;
mod limit;
mod memory;
mod open;
mod request;
mod rules;
mod session;
mod waiting;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::net::sockopt::socket_peercred;

use vnplug_ring::control::{Message, code};

use crate::awake::Awake;
use crate::hub::policy::{Policy, Viewer};
use crate::hub::{Hub, NO_DESCRIPTORS, Owner};
use crate::vm::{Broken, Dirs, Vm};
use closing::Leaving;
use compile::CompileThread;
use limit::Buckets;
use memory::MemoryThread;
use session::{Over, Session, Unserved};
use vnplug_filter::{Compiler, Jit};
use vnplug_os::closer::PeerFd;
use vnplug_os::memory::leave_to_readers;
use vnplug_os::peer_log;

/// Connections in all, and of one user that is no operator.
const MAX_SESSIONS: usize = 32_768;
const MAX_SESSIONS_PER_USER: usize = 1_024;
/// A connection that has not said Hello after this long is closed.
const GREETING: Duration = Duration::from_secs(10);
/// Messages of one connection per turn, and for how long: another one waits for all who ask.
const BUDGET: usize = 16;
const SLICE: Duration = Duration::from_micros(100);
/// How soon it is looked for the answers of queues' threads.
const ANSWERED: Duration = Duration::from_millis(1);
/// Connections accepted (or refused) per turn.
const ACCEPTS: usize = 64;
/// So many bytes of garbage in a channel cost as much as a message.
const GARBAGE: f64 = 256.0;
/// After so many panics the daemon ends: something is wrong beyond one connection.
const MAX_PANICS: u32 = 64;
/// How long a listener rests when descriptors are short.
const REST: Duration = Duration::from_millis(50);

/// What the loop needs to know.
pub(crate) struct Setup {
    pub(crate) hub: Hub,
    pub(crate) policy: Policy,
    pub(crate) dirs: Dirs,
    pub(crate) compiler: Compiler,
    pub(crate) jit: Jit,
    pub(crate) awake: Option<Awake>,
    pub(crate) listener: OwnedFd,
    /// Becomes readable when the daemon is to end.
    pub(crate) termination: Arc<OwnedFd>,
}

/// The control loop.
pub(crate) struct Control {
    hub: Hub,
    policy: Policy,
    dirs: Dirs,
    compiler: CompileThread,
    memory: MemoryThread,
    /// The CPUs, while there are ports.
    awake: Option<Awake>,
    epoll: OwnedFd,
    listener: OwnedFd,
    /// Listeners that rest because descriptors are short, and until when.
    resting: Vec<(Instant, u64)>,
    _termination: Arc<OwnedFd>,
    /// Rung by the compile and memory threads and by ports of VMs that are woken through a channel.
    bell: Arc<OwnedFd>,
    sessions: HashMap<u64, Session>,
    /// How much each owner may ask.
    buckets: Buckets,
    /// Connections of clients that have not said Hello.
    silent: HashSet<u64>,
    pending: HashMap<u64, waiting::Pending>,
    /// Requests that wait for queues' threads.
    asking: Vec<waiting::Asking>,
    vms: HashMap<String, Vm>,
    /// VMs of an earlier daemon that cannot be served.
    broken: Vec<Broken>,
    /// Names of VMs whose pools are being made.
    attaching: HashSet<String>,
    /// Names of groups of the host whose arenas are being made.
    making_groups: HashSet<String>,
    /// Listeners of VMs by token: name, and whether it is the doorbell's.
    vm_listeners: HashMap<u64, (String, bool)>,
    /// Connections that asked too much, and until when nothing of theirs is served.
    paused: HashMap<u64, Instant>,
    /// Connections with a turn's work left over.
    unfinished: Vec<u64>,
    leaving: Leaving,
    /// How often something panicked.
    panics: u32,
    next_token: u64,
    spare: Option<OwnedFd>,
}

const LISTENER: u64 = 0;
const TERMINATION: u64 = 1;
const BELL: u64 = 2;

/// Tells a client that there is no descriptor for it, as far as it listens at once.
fn tell_why(refused: &OwnedFd) {
    use rustix::net::{SendFlags, send};
    let why = Message::Error {
        code: code::LIMIT,
        text: NO_DESCRIPTORS.into(),
    };
    let _ = send(
        refused,
        &why.encode(0, 0),
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    );
}

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
            listener,
            termination,
        } = setup;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, token) in [
            (&listener, LISTENER),
            (&*termination, TERMINATION),
            (&*bell, BELL),
        ] {
            watch(&epoll, fd.as_fd(), token)?;
        }
        let compiler = CompileThread::start(compiler, jit, Arc::clone(&bell))?;
        let memory = MemoryThread::start(Arc::clone(&bell))?;
        let (vms, broken) = Vm::load_all(&dirs);
        let mut control = Self {
            hub,
            policy,
            dirs,
            compiler,
            memory,
            awake,
            epoll,
            listener,
            resting: Vec::new(),
            _termination: termination,
            bell,
            sessions: HashMap::new(),
            buckets: Buckets::default(),
            silent: HashSet::new(),
            pending: HashMap::new(),
            asking: Vec::new(),
            vms: HashMap::new(),
            broken,
            attaching: HashSet::new(),
            making_groups: HashSet::new(),
            vm_listeners: HashMap::new(),
            paused: HashMap::new(),
            unfinished: Vec::new(),
            leaving: Leaving::default(),
            panics: 0,
            next_token: 16,
            spare: spare(),
        };
        for vm in vms {
            log::info!(target: "vm", "serving VM {:?} again", vm.name());
            control.admit_again(&vm);
            control.add_vm(vm)?;
        }
        control.shut_out_again();
        control.bar_broken();
        control.remove_packets();
        Ok(control)
    }

    /// Serves until it is to end.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(256);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&timeout),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    leave_to_readers();
                    return Err(error.into());
                }
            }
            for event in &events {
                let (flags, token) = (event.flags, event.data.u64());
                match token {
                    TERMINATION => {
                        leave_to_readers();
                        return Ok(());
                    }
                    LISTENER => self.guarded(None, Self::accept),
                    BELL => self.guarded(None, Self::bell),
                    token if self.vm_listeners.contains_key(&token) => {
                        self.guarded(None, |it| it.accept_vm(token));
                    }
                    token => self.guarded(Some(token), |it| it.serve(token, flags)),
                }
            }
            self.guarded(None, Self::housekeeping);
            if self.panics > MAX_PANICS {
                let what = format!("it panicked {} times; the log says where", self.panics);
                return Err(io::Error::other(what));
            }
        }
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

    fn timeout(&self) -> Timespec {
        let now = Instant::now();
        let mut wait = Duration::from_secs(if self.vms.is_empty() { 3600 } else { 1 });
        if !self.silent.is_empty() {
            wait = wait.min(Duration::from_secs(1));
        }
        let rests = self.resting.iter().map(|(until, _)| until);
        for until in rests.chain(self.paused.values()) {
            wait = wait.min(until.saturating_duration_since(now));
        }
        if !self.asking.is_empty() {
            wait = wait.min(ANSWERED);
        }
        if let Some(soon) = self.leaving.look_again() {
            wait = wait.min(soon);
        }
        if !self.unfinished.is_empty() {
            wait = Duration::ZERO;
        }
        Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.accept_on(LISTENER) {
                Ok(Some(fd)) => self.welcome_client(fd),
                Ok(None) => return,
                Err(error) => {
                    self.refuse_for_want_of_descriptors(LISTENER, &error);
                    return;
                }
            }
        }
    }

    /// Descriptors are short: close who is waiting at once instead of spinning on a readable
    /// listener, and listen again a little later.
    fn refuse_for_want_of_descriptors(&mut self, token: u64, error: &rustix::io::Errno) {
        peer_log!(
            log::Level::Warn,
            "control",
            "cannot accept a connection: {error}"
        );
        self.spare = None;
        for _ in 0..ACCEPTS {
            let Ok(Some(refused)) = self.accept_on(token) else {
                break;
            };
            if token == LISTENER {
                tell_why(&refused);
            }
            let owner = match socket_peercred(&refused) {
                Ok(peer) => Owner::User(peer.uid.as_raw()),
                Err(_) => Owner::User(u32::MAX),
            };
            self.hub.closers.of(&owner).close(refused);
        }
        self.spare = spare();
        if let Some(listener) = self.listener_of(token) {
            unwatch(&self.epoll, listener);
            self.resting.push((Instant::now() + REST, token));
        }
    }

    fn listener_of(&self, token: u64) -> Option<BorrowedFd<'_>> {
        if token == LISTENER {
            return Some(self.listener.as_fd());
        }
        let (name, doorbell) = self.vm_listeners.get(&token)?;
        let vm = self.vms.get(name)?;
        if *doorbell {
            vm.doorbell.as_ref().map(|server| server.listener.as_fd())
        } else {
            Some(vm.listener.as_fd())
        }
    }

    fn accept_on(&self, token: u64) -> rustix::io::Result<Option<OwnedFd>> {
        let Some(listener) = self.listener_of(token) else {
            return Ok(None);
        };
        match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED,
            ) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn welcome_client(&mut self, fd: OwnedFd) {
        let uid = match socket_peercred(&fd) {
            Ok(credentials) => credentials.uid.as_raw(),
            Err(error) => {
                peer_log!(
                    log::Level::Warn,
                    "control",
                    "a client without credentials: {error}"
                );
                return;
            }
        };
        let viewer = Viewer::User(uid);
        let fd = self.peer_socket(fd, &viewer);
        let own = self.sessions.values();
        // Connections that are over count until they are closed.
        let has_many = || {
            let present = own.filter(|it| it.viewer == viewer).count();
            present + fd.closer().open() >= MAX_SESSIONS_PER_USER
        };
        let operator = self.policy.is_operator(&viewer);
        if self.sessions.len() >= MAX_SESSIONS || !operator && has_many() {
            log::debug!(target: "control", "user {uid} has too many connections");
            return;
        }
        let now = Instant::now();
        let bucket = self.buckets.of(&viewer, operator, now);
        let mut session = Session::new(fd, viewer, false, bucket, now);
        if operator {
            session.take_gifts();
        }
        self.add_session(session);
    }

    /// A peer's socket, which nobody closes here.
    fn peer_socket(&mut self, fd: OwnedFd, viewer: &Viewer) -> PeerFd {
        let owner = match viewer {
            Viewer::User(uid) => Owner::User(*uid),
            Viewer::Vm(name) => Owner::Vm(name.clone()),
        };
        PeerFd::new(fd, self.hub.closers.of(&owner))
    }

    fn add_session(&mut self, session: Session) -> Option<u64> {
        let token = self.fresh_token();
        if let Err(error) = watch(&self.epoll, session.fd(), token) {
            log::warn!(target: "control", "cannot watch a connection: {error}");
            return None;
        }
        if !session.channel {
            self.silent.insert(token);
        }
        self.sessions.insert(token, session);
        Some(token)
    }

    fn serve(&mut self, token: u64, flags: epoll::EventFlags) {
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        let mut result = Ok(());
        if flags.contains(epoll::EventFlags::OUT) {
            result = session.flush();
        }
        let readable = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if result.is_ok() && flags.intersects(readable) {
            result = session.read();
        }
        match result {
            Ok(()) => self.work(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Serves the whole messages that a connection has sent, as far as its turn goes.
    fn work(&mut self, token: u64) {
        let begun = Instant::now();
        let mut now = begun;
        for turn in 0.. {
            let Some(session) = self.sessions.get_mut(&token) else {
                return;
            };
            if session.busy || session.is_clogged() || self.paused.contains_key(&token) {
                break;
            }
            if turn == BUDGET || now - begun > SLICE {
                if !session.unfinished {
                    session.unfinished = true;
                    self.unfinished.push(token);
                }
                break;
            }
            let mut bucket = session.bucket.borrow_mut();
            if let Some(wait) = bucket.wait(now) {
                bucket.line_up(true);
                self.paused.insert(token, now + wait);
                break;
            }
            drop(bucket);
            let skipped = session.framer.skipped();
            let message = match session.next_message() {
                Ok(Some(message)) => message,
                Ok(None) => {
                    let garbage = session.framer.skipped() - skipped;
                    session.bucket.borrow_mut().charge(garbage as f64 / GARBAGE);
                    break;
                }
                Err(Unserved::Malformed(malformed)) => {
                    self.misbehaved(token, &malformed);
                    return;
                }
                Err(Unserved::Over(over)) => {
                    self.end(token, &over);
                    return;
                }
            };
            let garbage = session.framer.skipped() - skipped;
            // An acknowledgement is part of what it acknowledges; only a flood of them costs.
            let acknowledges = message.0.kind == Message::Ack { bytes: 0 }.kind();
            let tokens = if acknowledges { 0.05 } else { 1.0 };
            session
                .bucket
                .borrow_mut()
                .charge(tokens + garbage as f64 / GARBAGE);
            if let Err(over) = self.request(token, &message) {
                self.end(token, &over);
                return;
            }
            now = Instant::now();
        }
        self.after_serving(token);
    }

    /// Wakes readers behind a channel that has room again, then watches it.
    fn after_serving(&mut self, token: u64) {
        let channel_of = |session: &Session| match &session.viewer {
            Viewer::Vm(name) if session.channel => Some(name.clone()),
            _ => None,
        };
        if let Some(name) = self.sessions.get(&token).and_then(channel_of) {
            self.wake_readers(&name);
        }
        self.rearm(token);
    }

    /// Watches for what a connection can do now: nothing is read while it is busy or paused.
    fn rearm(&mut self, token: u64) {
        let Some(session) = self.sessions.get(&token) else {
            return;
        };
        let waits = session.busy || session.unfinished || session.is_clogged();
        let mut flags = epoll::EventFlags::empty();
        if !waits && !self.paused.contains_key(&token) {
            flags |= epoll::EventFlags::IN;
        }
        if session.wants_to_send() {
            flags |= epoll::EventFlags::OUT;
        }
        let data = epoll::EventData::new_u64(token);
        if let Err(error) = epoll::modify(&self.epoll, session.fd(), data, flags) {
            log::warn!(target: "control", "cannot watch a connection: {error}");
        }
    }

    /// Ends a connection and whatever was opened through it.
    fn end(&mut self, token: u64, over: &Over) {
        let Some(session) = self.sessions.remove(&token) else {
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
        unwatch(&self.epoll, session.fd());
        self.silent.remove(&token);
        self.pending.remove(&token);
        if self.paused.remove(&token).is_some() {
            session.bucket.borrow_mut().line_up(false);
        }
        self.leaving.forget(token);
        let ports = session.ports.iter().map(|(_, port)| *port);
        self.close_soon(&session.viewer, ports.collect());
        if let Viewer::Vm(name) = &session.viewer
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
    }

    fn housekeeping(&mut self) {
        let now = Instant::now();
        let over: Vec<u64> = self
            .paused
            .extract_if(|_, until| *until <= now)
            .map(|(token, _)| token)
            .collect();
        for session in over.iter().filter_map(|token| self.sessions.get(token)) {
            session.bucket.borrow_mut().line_up(false);
        }
        let left_over = std::mem::take(&mut self.unfinished);
        for &token in &left_over {
            if let Some(session) = self.sessions.get_mut(&token) {
                session.unfinished = false;
            }
        }
        for token in left_over.into_iter().chain(over) {
            self.guarded(Some(token), |it| it.work(token));
        }
        let (rested, still): (Vec<_>, Vec<_>) =
            self.resting.drain(..).partition(|(until, _)| *until <= now);
        self.resting = still;
        for (_, token) in rested {
            if let Some(listener) = self.listener_of(token)
                && let Err(error) = watch(&self.epoll, listener, token)
            {
                log::error!(target: "control", "cannot listen again: {error}");
            }
        }
        let late = |token: &&u64| {
            let session = self.sessions.get(token);
            session.is_some_and(|session| now - session.since > GREETING)
        };
        let silent: Vec<u64> = self.silent.iter().filter(late).copied().collect();
        for token in silent {
            self.end(token, &Over::Misbehaved("it said no Hello"));
        }
        self.drop_lost_vms();
        self.heard();
        self.close_doomed();
        self.serve_parked();
        if let Some(awake) = &mut self.awake {
            awake.hold(!self.hub.ports().is_empty());
        }
    }

    fn fresh_token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    epoll::add(
        epoll,
        fd,
        epoll::EventData::new_u64(token),
        epoll::EventFlags::IN,
    )
}

fn unwatch(epoll: &OwnedFd, fd: BorrowedFd<'_>) {
    if let Err(error) = epoll::delete(epoll, fd) {
        log::warn!(target: "control", "cannot stop watching a descriptor: {error}");
    }
}

/// A descriptor held back for the moment when there are no more.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

#[cfg(test)]
mod tests;
