//! Every connection, whose turn it is, and what it may do next.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use vnplug_ring::control::wire::{Header, Malformed};
use vnplug_ring::control::{Backend, Message, code};

use super::backends::PASSED;
use super::limit::{self, Buckets};
use super::request::cut;
use super::session::{Over, Session, Unserved};
use super::waiting::Whom;
use crate::hub::{Peer, Refusal};

/// Connections in all.
const MAX_SESSIONS: usize = 32_768;
/// A connection that has not said Hello after this long is closed.
const GREETING: Duration = Duration::from_secs(10);
/// How often it is looked whether descriptors were read that others wait for.
const UNREAD: Duration = Duration::from_millis(20);
/// Messages of one connection per turn, and for how long: another one waits for all who ask.
const BUDGET: usize = 16;
const SLICE: Duration = Duration::from_micros(100);
/// Bytes that are read from a connection at once: a whole message of a back-end.
const ROOM: usize = (64 << 10) + 256;
/// This many bytes of garbage in a channel cost as much as a message.
const GARBAGE: f64 = 256.0;
/// The longest reason of a refusal in bytes.
const MAX_REASON: usize = 1024;
/// Tokens up to this one are the loop's own.
const OWN_TOKENS: u64 = 16;

/// An answer, and the descriptors that go with it.
pub(super) type Answer = Result<(Message, Vec<OwnedFd>), Refusal>;

/// The connections, and the descriptors that the loop watches.
pub(super) struct Sessions {
    epoll: OwnedFd,
    all: HashMap<u64, Session>,
    /// How much each owner may ask.
    buckets: Buckets,
    /// Connections of clients that have not said Hello.
    silent: HashSet<u64>,
    /// Connections that asked too much, and until when nothing of theirs is served.
    paused: HashMap<u64, Instant>,
    /// Connections with a turn's work left over.
    unfinished: Vec<u64>,
    /// Connections whose next descriptors wait until others are read.
    awaiting: HashSet<u64>,
    /// Connections that are over, and whose peers have not read all descriptors.
    unread: Vec<Session>,
    /// When both are looked at again.
    look_at_unread: Instant,
    last_token: u64,
    /// Where a connection is read into, before its messages are cut.
    room: Box<[u8]>,
}

/// A connection's turn: when it began, and what it has had of it.
pub(super) struct Turn {
    begun: Instant,
    now: Instant,
    messages: usize,
}

/// What a connection's turn goes on with.
pub(super) enum Next {
    /// This message is to be served.
    Message((Header, Vec<u8>)),
    /// What it sent is no message: it is told so, and is over.
    Malformed(Malformed),
    /// It is over.
    Over(Over),
    /// Nothing for now.
    Rests,
}

impl Sessions {
    /// None yet.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            all: HashMap::new(),
            buckets: Buckets::default(),
            silent: HashSet::new(),
            paused: HashMap::new(),
            unfinished: Vec::new(),
            awaiting: HashSet::new(),
            unread: Vec::new(),
            look_at_unread: Instant::now(),
            last_token: OWN_TOKENS,
            room: vec![0; ROOM].into_boxed_slice(),
        })
    }

    /// Waits until something that is watched has something to say.
    pub(super) fn wait_for(
        &self,
        events: &mut Vec<epoll::Event>,
        timeout: Duration,
    ) -> io::Result<()> {
        let timeout = rustix::event::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let space = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, space, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Watches a descriptor that is no connection.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
    }

    /// Watches a listener, under a token of its own.
    pub(super) fn watch_new(&mut self, fd: BorrowedFd<'_>) -> (u64, rustix::io::Result<()>) {
        self.last_token += 1;
        (self.last_token, self.watch(fd, self.last_token))
    }

    /// The opposite of [`watch`](Self::watch).
    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            log::warn!(target: "control", "cannot stop watching a descriptor: {error}");
        }
    }

    /// A connection.
    pub(super) fn get(&self, token: u64) -> Option<&Session> {
        self.all.get(&token)
    }

    /// A connection.
    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut Session> {
        self.all.get_mut(&token)
    }

    /// Whether no more connections may be.
    pub(super) fn is_full(&self) -> bool {
        self.all.len() >= MAX_SESSIONS
    }

    /// Connections of one viewer.
    pub(super) fn count_of(&self, viewer: &Peer) -> usize {
        let all = self.all.values();
        all.filter(|session| session.viewer == *viewer).count()
    }

    /// The bucket for a new connection of a viewer.
    pub(super) fn bucket_of(&mut self, viewer: &Peer, is_operator: bool) -> limit::SharedBucket {
        self.buckets.of(viewer, is_operator, Instant::now())
    }

    /// Adds a connection; `None` if it cannot be watched.
    pub(super) fn add(&mut self, session: Session) -> Option<u64> {
        let (token, watched) = self.watch_new(session.fd());
        if let Err(error) = watched {
            log::warn!(target: "control", "cannot watch a connection: {error}");
            return None;
        }
        if !session.channel {
            self.silent.insert(token);
        }
        self.all.insert(token, session);
        Some(token)
    }

    /// Forgets a connection.
    pub(super) fn remove(&mut self, token: u64) -> Option<Session> {
        let session = self.all.remove(&token)?;
        self.unwatch(session.fd());
        self.silent.remove(&token);
        self.awaiting.remove(&token);
        if self.paused.remove(&token).is_some() {
            session.bucket.borrow_mut().line_up(false);
        }
        Some(session)
    }

    /// Keeps a connection that is over while descriptors are on their way in it: they count as its owner's until
    /// they are read, or its peer is gone, too.
    pub(super) fn see_off(&mut self, mut session: Session) {
        if session.has_unread_fds() {
            session.end();
            self.unread.push(session);
        }
    }

    /// It said Hello.
    pub(super) fn greeted(&mut self, token: u64) {
        if let Some(session) = self.all.get_mut(&token) {
            session.greeted = true;
            self.silent.remove(&token);
            session.begin_anew();
        }
    }

    /// Connections that said no Hello for too long.
    pub(super) fn late(&self, now: Instant) -> Vec<u64> {
        let late = |token: &&u64| {
            let session = self.all.get(token);
            session.is_some_and(|session| now - session.since > GREETING)
        };
        self.silent.iter().filter(late).copied().collect()
    }

    /// Sends and reads what the connection can.
    pub(super) fn exchange(&mut self, token: u64, flags: epoll::EventFlags) -> Result<(), Over> {
        let Some(session) = self.all.get_mut(&token) else {
            return Ok(());
        };
        if flags.contains(epoll::EventFlags::OUT) {
            session.flush()?;
        }
        let readable = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(readable) {
            session.read(&mut self.room)?;
        }
        Ok(())
    }

    /// What a connection has to be served with next, as far as its turn goes.
    pub(super) fn next(&mut self, token: u64, turn: &mut Turn) -> Next {
        let Some(session) = self.all.get_mut(&token) else {
            return Next::Rests;
        };
        if session.busy || session.is_clogged() || self.paused.contains_key(&token) {
            return Next::Rests;
        }
        if turn.is_over() {
            if !session.unfinished {
                session.unfinished = true;
                self.unfinished.push(token);
            }
            return Next::Rests;
        }
        let mut bucket = session.bucket.borrow_mut();
        if let Some(wait) = bucket.wait(turn.now) {
            bucket.line_up(true);
            self.paused.insert(token, turn.now + wait);
            return Next::Rests;
        }
        drop(bucket);
        let skipped = session.framer.skipped();
        let message = session.next_message();
        let garbage = (session.framer.skipped() - skipped) as f64 / GARBAGE;
        let charge = |tokens| session.bucket.borrow_mut().charge(tokens + garbage);
        match message {
            Ok(Some(message)) => {
                // An acknowledgement is part of what it acknowledges; only a flood of them costs.
                let acknowledges = message.0.kind == Message::Ack { bytes: 0 }.kind();
                let is_passed = Backend::is_passed_kind(message.0.kind);
                charge(if acknowledges || is_passed {
                    PASSED
                } else {
                    1.0
                });
                Next::Message(message)
            }
            Ok(None) => {
                charge(0.0);
                Next::Rests
            }
            Err(Unserved::Malformed(malformed)) => Next::Malformed(malformed),
            Err(Unserved::Over(over)) => Next::Over(over),
        }
    }

    /// Connections that go on now: they have paused long enough, or had their turn.
    pub(super) fn go_on(&mut self, now: Instant) -> Vec<u64> {
        let over = self.paused.extract_if(|_, until| *until <= now);
        let over: Vec<u64> = over.map(|(token, _)| token).collect();
        for session in over.iter().filter_map(|token| self.all.get(token)) {
            session.bucket.borrow_mut().line_up(false);
        }
        let mut next = std::mem::take(&mut self.unfinished);
        for token in &next {
            if let Some(session) = self.all.get_mut(token) {
                session.unfinished = false;
            }
        }
        next.extend(over);
        next.extend(self.look_at_unread(now));
        next
    }

    /// Looks which descriptors were read: the connections that waited for that go on.
    fn look_at_unread(&mut self, now: Instant) -> HashSet<u64> {
        let waits = !self.awaiting.is_empty() || !self.unread.is_empty();
        if !waits || now < self.look_at_unread {
            return HashSet::new();
        }
        self.look_at_unread = now + UNREAD;
        self.unread.retain_mut(Session::has_unread_fds);
        if self.awaiting.is_empty() {
            return HashSet::new();
        }
        for session in self.all.values_mut() {
            session.has_unread_fds();
        }
        let go_on = std::mem::take(&mut self.awaiting);
        for token in &go_on {
            if let Some(session) = self.all.get_mut(token) {
                session.awaits_readers = false;
            }
        }
        go_on
    }

    /// How soon one of them has to be looked at, if any.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        if !self.unfinished.is_empty() {
            return Some(Duration::ZERO);
        }
        let waits = !self.awaiting.is_empty() || !self.unread.is_empty();
        let unread = waits.then(|| self.look_at_unread.saturating_duration_since(now));
        let silent = (!self.silent.is_empty()).then_some(Duration::from_secs(1));
        let paused = self.paused.values();
        let paused = paused.map(|until| until.saturating_duration_since(now));
        silent.into_iter().chain(unread).chain(paused).min()
    }

    /// Watches for what a connection can do now: nothing is read while it is busy or paused.
    pub(super) fn rearm(&mut self, token: u64) {
        let Some(session) = self.all.get(&token) else {
            return;
        };
        if session.awaits_readers {
            self.awaiting.insert(token);
        }
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

    /// Answers a request, if its connection is still there.
    pub(super) fn answer(&mut self, whom: Whom, answer: Answer) -> Result<(), Over> {
        let (message, fds) = match answer {
            Ok(answer) => answer,
            Err(Refusal { code, text }) => {
                let text = cut(text, MAX_REASON);
                (Message::Error { code, text }, Vec::new())
            }
        };
        match self.all.get_mut(&whom.token) {
            Some(session) => session.say(&message, whom.id, whom.app, fds),
            None => Ok(()),
        }
    }

    /// Nothing more of a connection is read while it waits for something.
    pub(super) fn set_busy(&mut self, token: u64, busy: bool) {
        if let Some(session) = self.all.get_mut(&token) {
            session.busy = busy;
        }
    }

    /// What it asked costs `tokens` more.
    pub(super) fn charge(&mut self, token: u64, tokens: f64) {
        if let Some(session) = self.all.get_mut(&token) {
            session.bucket.borrow_mut().charge(tokens);
        }
    }

    /// Refuses what is no port of this application, on this connection.
    pub(super) fn owned(&self, whom: Whom, port: u32) -> Result<(), Refusal> {
        let session = self.all.get(&whom.token);
        if session.is_some_and(|session| session.ports.contains(&(whom.app, port))) {
            return Ok(());
        }
        let what = format!("port {port} is not open on this connection");
        Err(Refusal::new(code::NOT_FOUND, what))
    }

    /// The ports of this application, on this connection.
    pub(super) fn ports_of(&self, whom: Whom) -> Vec<u32> {
        let ports = self.all.get(&whom.token).into_iter();
        let ports = ports.flat_map(|session| &session.ports);
        let own = ports.filter(|(opener, _)| *opener == whom.app);
        own.map(|(_, port)| *port).collect()
    }

    /// The connections, and the applications there, that have these ports: token, application, port.
    pub(super) fn openers(&self, ports: &HashSet<u32>) -> Vec<(u64, u32, u32)> {
        let of = |(token, session): (&u64, &Session)| {
            let own = session.ports.iter();
            let own = own.filter(|(_, port)| ports.contains(port));
            let own = own.map(|(app, port)| (*token, *app, *port));
            own.collect::<Vec<_>>()
        };
        self.all.iter().flat_map(of).collect()
    }

    /// Forgets the ports of a connection that `which` (application, port) names.
    pub(super) fn forget_ports(
        &mut self,
        token: u64,
        which: impl Fn(u32, u32) -> bool,
    ) -> Vec<u32> {
        let Some(session) = self.all.get_mut(&token) else {
            return Vec::new();
        };
        let gone = session
            .ports
            .extract_if(.., |(app, port)| which(*app, *port));
        gone.map(|(_, port)| port).collect()
    }
}

impl Turn {
    /// Begins now.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            begun: now,
            now,
            messages: 0,
        }
    }

    /// A message was served.
    pub(super) fn served(&mut self) {
        self.messages += 1;
        self.now = Instant::now();
    }

    fn is_over(&self) -> bool {
        self.messages == BUDGET || self.now - self.begun > SLICE
    }
}
