//! The socket that front-ends connect to, sockets of front-ends that we connect to, and the thread that
//! hears them. Each connection is a port.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};
use vnplug_os::closer::{Closers, PeerFd};
use vnplug_os::socket::{self, Peer};
use vnplug_os::{event, peer_log};

use super::call::{Caller, Calls};
use super::card::{self, Card};
use super::link;
use super::session::{Heard, Remains, Session};
use crate::board;
use crate::control::{Change, Line};
use crate::door::Door;
use crate::forward::Number;
use crate::link::{Loss, Losses};
use crate::porter::{self, Access};
use crate::roster::{Roster, locked};

/// Where the front-ends of vhost-user come in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VhostConfig {
    /// The socket that they connect to.
    pub path: Option<PathBuf>,
    /// Sockets of front-ends that listen, which we connect to.
    pub connect: Vec<PathBuf>,
    /// Who may use ours.
    pub access: Access,
}

/// An entrance that is made and not served yet.
pub(crate) struct Open {
    name: String,
    config: VhostConfig,
    longest: usize,
    roster: Arc<Mutex<Roster>>,
    listener: Option<OwnedFd>,
}

impl Open {
    /// Makes the socket.
    ///
    /// # Errors
    /// The system's, or who has it.
    pub(crate) fn new(
        name: &str,
        config: VhostConfig,
        longest: usize,
        roster: &Arc<Mutex<Roster>>,
    ) -> io::Result<Self> {
        let listen = |path: &PathBuf| {
            let listener = config.access.listen(path, SocketType::STREAM)?;
            // Front-ends send descriptors from their first messages on.
            socket::pass_rights(&listener, true);
            Ok::<_, io::Error>(listener)
        };
        let listener = config.path.as_ref().map(listen).transpose()?;
        Ok(Self {
            name: name.to_owned(),
            config,
            longest,
            roster: Arc::clone(roster),
            listener,
        })
    }

    /// The entrance, of a switch that is spoken to by `line`.
    pub(crate) fn door(self, line: Line) -> Door {
        let said = ("vnplug-vhost", "no vhost-user front-end can join");
        Door::new(self.name.clone(), said, |waker| {
            let mut porter = Porter::new(self, line, waker)?;
            Ok(move |stop: &AtomicBool| porter.run(stop))
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(path) = &self.config.path
            && let Err(error) = std::fs::remove_file(path)
        {
            log::warn!(target: "switch", "{}: {error}", path.display());
        }
    }
}

/// A connection.
struct Guest {
    peer: Peer,
    state: State,
}

enum State {
    /// Its first message is still to come; if it came to us, by then.
    Silent {
        socket: PeerFd,
        until: Option<Instant>,
    },
    Has {
        port: Number,
        session: Box<Session>,
    },
}

impl Guest {
    /// Whether there was an event, but no word.
    fn is_mute(&self) -> bool {
        match &self.state {
            State::Silent { socket, .. } => {
                rustix::io::ioctl_fionread(socket).is_ok_and(|bytes| bytes == 0)
            }
            State::Has { .. } => false,
        }
    }
}

/// A front-end that listens, and that we connect to.
struct Dial {
    path: PathBuf,
    /// The connection, while there is one.
    guest: Option<u64>,
    /// When to try again.
    next: Instant,
}

/// Who lets front-ends in.
struct Porter {
    open: Open,
    line: Line,
    /// For the thread that forwards, and what it says.
    told: Losses,
    losses: Receiver<Loss>,
    waker: Arc<OwnedFd>,
    epoll: OwnedFd,
    dials: Vec<Dial>,
    guests: HashMap<u64, Guest>,
    next: u64,
    ports: HashMap<Number, u64>,
    /// The ports that front-ends had.
    homes: HashMap<Peer, Number>,
    /// Front-ends that a card without offloads was not enough for: QEMU goes on with what its guest has once
    /// agreed to, or hangs up.
    choosy: HashSet<Peer>,
    closers: Closers<u32>,
    calls: Arc<Calls>,
    /// Who calls the guests of each user that is not trusted.
    callers: HashMap<u32, Caller>,
    /// What the thread that forwards may still have.
    remains: Vec<Remains>,
    /// Those who may have said more than was heard.
    unheard: HashSet<u64>,
}

impl Porter {
    fn new(open: Open, line: Line, waker: Arc<OwnedFd>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let listener = open.listener.as_ref().map(|it| (it.as_fd(), LISTENER));
        for (fd, number) in listener.into_iter().chain([(waker.as_fd(), WAKER)]) {
            epoll::add(&epoll, fd, EventData::new_u64(number), EventFlags::IN)?;
        }
        let dial = |path: &PathBuf| Dial {
            path: path.clone(),
            guest: None,
            next: Instant::now(),
        };
        let dials = open.config.connect.iter().map(dial).collect();
        let (told, losses) = Losses::new(Arc::clone(&waker));
        let calls = Arc::new(Calls::counting(Arc::clone(&line.called_again)));
        Ok(Self {
            open,
            line,
            told,
            losses,
            waker,
            epoll,
            dials,
            guests: HashMap::new(),
            next: FIRST,
            ports: HashMap::new(),
            homes: HashMap::new(),
            choosy: HashSet::new(),
            closers: Closers::default(),
            calls,
            callers: HashMap::new(),
            remains: Vec::new(),
            unheard: HashSet::new(),
        })
    }

    fn run(&mut self, stop: &AtomicBool) {
        if let Some(path) = &self.open.config.path {
            let (name, path) = (&self.open.name, path.display());
            log::info!(target: "switch", "{name}: vhost-user front-ends join at {path}");
        }
        while !stop.load(Ordering::Acquire) {
            let (mut comes, mut news) = (false, HashSet::new());
            porter::wait(&self.epoll, self.within(), |number| match number {
                WAKER => event::clear(&self.waker),
                LISTENER => comes = true,
                id => {
                    news.insert(id);
                }
            });
            self.unheard.extend(news);
            if comes {
                self.accept();
            }
            for id in std::mem::take(&mut self.unheard) {
                self.hear(id);
            }
            while let Ok(Loss { port, client }) = self.losses.try_recv() {
                if self.ports.get(&port) == Some(&client) {
                    self.close(client);
                }
            }
            self.tidy();
            self.dial();
        }
        let all: Vec<u64> = self.guests.keys().copied().collect();
        all.into_iter().for_each(|id| self.close(id));
    }

    /// Connects to front-ends that listen, again and again.
    fn dial(&mut self) {
        let now = Instant::now();
        for at in 0..self.dials.len() {
            let dial = &mut self.dials[at];
            if dial.guest.is_some() || dial.next > now {
                continue;
            }
            dial.next = now + AGAIN;
            let Ok(socket) = connected(&dial.path) else {
                continue;
            };
            self.dials[at].guest = self.meet(socket, true);
        }
    }

    /// How long to wait for events.
    fn within(&self) -> Duration {
        let us = rustix::process::geteuid().as_raw();
        let is_stranger = |guest: &Guest| guest.peer.uid != 0 && guest.peer.uid != us;
        if !self.unheard.is_empty() {
            Duration::ZERO
        } else if !self.remains.is_empty() {
            SOON
        } else if self.guests.values().any(is_stranger) {
            WATCHFUL
        } else if self.dials.iter().any(|dial| dial.guest.is_none()) {
            AGAIN
        } else {
            Duration::from_secs(1)
        }
    }

    /// Sends those away who say nothing, ends calls that block, unmaps what nobody has.
    fn tidy(&mut self) {
        self.calls.unblock();
        let now = Instant::now();
        let (mut late, mut unused) = (Vec::new(), Vec::new());
        for (id, guest) in &mut self.guests {
            match &mut guest.state {
                State::Silent { until, .. } => {
                    if until.is_some_and(|until| until <= now) {
                        late.push(*id);
                    }
                }
                State::Has { session, .. } => {
                    let uid = guest.peer.uid;
                    let is_stuck = self.callers.get(&uid).is_some_and(Caller::is_stuck);
                    if session.has_blocked() || is_stuck || self.closers.of(&uid).open() > MAX_OPEN
                    {
                        late.push(*id);
                    }
                    unused.extend(session.unused());
                }
            }
        }
        late.into_iter().for_each(|id| self.close(id));
        let gone: Vec<_> = self.remains.extract_if(.., |it| it.is_unused()).collect();
        if !unused.is_empty() || !gone.is_empty() {
            // To unmap much takes long. Without a thread it is done here.
            let aside = std::thread::Builder::new().name("vnplug-unmap".into());
            if let Err(error) = aside.spawn(move || drop((unused, gone))) {
                log::debug!(target: "switch", "no thread to unmap with: {error}");
            }
        }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Some(listener) = &self.open.listener else {
            return;
        };
        let socket = match accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => {
                let name = &self.open.name;
                peer_log!(log::Level::Warn, "switch", "{name}: out of descriptors");
                std::thread::sleep(PAUSE);
                return;
            }
            // It is gone again.
            Err(_) => return,
        };
        self.meet(socket, false);
    }

    /// Takes a connection.
    fn meet(&mut self, socket: OwnedFd, is_ours: bool) -> Option<u64> {
        let peer = socket::peer(&socket).ok()?;
        let is_stuck = self.callers.get(&peer.uid).is_some_and(Caller::is_stuck);
        let closer = self.closers.of(&peer.uid);
        let is_hanging = is_stuck || closer.open() > MAX_OPEN;
        let socket = PeerFd::new(socket, closer);
        if is_hanging {
            let (name, uid) = (&self.open.name, peer.uid);
            peer_log!(
                log::Level::Warn,
                "switch",
                "{name}: what user {uid} sent before hangs; one more connection is refused"
            );
            return None;
        }
        let silent = self.guests.values().filter(|it| it.peer.uid == peer.uid);
        let silent = silent.filter(|it| matches!(it.state, State::Silent { .. }));
        if silent.count() >= MAX_SILENT {
            let (name, uid) = (&self.open.name, peer.uid);
            peer_log!(
                log::Level::Warn,
                "switch",
                "{name}: user {uid} has {MAX_SILENT} silent connections; one more is refused"
            );
            return None;
        }
        let id = self.next;
        self.next += 1;
        let data = EventData::new_u64(id);
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            log::warn!(target: "switch", "{}: {error}", self.open.name);
            return None;
        }
        // Who listens may have its guest still to start.
        let until = (!is_ours).then(|| Instant::now() + PATIENCE);
        let state = State::Silent { socket, until };
        self.guests.insert(id, Guest { peer, state });
        Some(id)
    }

    /// Something came from a connection, or its end.
    fn hear(&mut self, id: u64) {
        // Who goes without a word never had a port.
        let is_mute = self.guests.get(&id).is_some_and(Guest::is_mute);
        if is_mute {
            return self.close(id);
        }
        // Each request may bring descriptors, which are closed as slowly as they let themselves.
        let uid = self.guests.get(&id).map(|guest| guest.peer.uid);
        if uid.is_some_and(|uid| self.closers.of(&uid).open() > MAX_OPEN) {
            return self.close(id);
        }
        if let Err(why) = self.admit(id) {
            let name = &self.open.name;
            peer_log!(
                log::Level::Warn,
                "switch",
                "{name}: no port for a guest: {why}"
            );
            return self.close(id);
        }
        let Some(guest) = self.guests.get_mut(&id) else {
            return;
        };
        let State::Has { port, session, .. } = &mut guest.state else {
            return;
        };
        let (name, port) = (&self.open.name, *port);
        let mut complain = |what: &str| {
            peer_log!(log::Level::Warn, "switch", "{name}: port {port}: {what}");
        };
        for _ in 0..AT_ONCE {
            match session.hear(&mut complain) {
                Ok(Heard::More) => {}
                Ok(Heard::Nothing) => return,
                Ok(Heard::End) => return self.close(id),
                Err(error) => {
                    complain(&error.to_string());
                    return self.close(id);
                }
            }
        }
        // The others first.
        self.unheard.insert(id);
    }

    /// Gives a front-end its port, when it says something for the first time.
    fn admit(&mut self, id: u64) -> Result<(), String> {
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        let State::Silent { .. } = &guest.state else {
            return Ok(());
        };
        let peer = guest.peer;
        let description = peer.to_string();
        let holder = || porter::holder(peer.uid, "vhost-user", description.clone());
        let is_trusted = holder().is_trusted;
        let (roster, line) = (&self.open.roster, &self.line);
        let take = |wanted| board::admit(roster, line, peer.uid, holder(), wanted);
        let home = self.homes.get(&peer).copied();
        let again = home.and_then(|home| take(Some(home)).ok());
        let port = match again {
            Some(port) => port,
            None => take(None)?,
        };
        let port = port.get();
        let name = &self.open.name;
        let caller = (!is_trusted).then(|| self.callers.entry(peer.uid).or_default().clone());
        let calls = Arc::clone(&self.calls);
        let made = link::pair(format!("{name}: port {port}"), calls, caller);
        let (wire, rings) = made.map_err(|error| {
            board::free(&self.open.roster, &self.line, port);
            error.to_string()
        })?;
        peer_log!(
            log::Level::Info,
            "switch",
            "{name}: port {port}: a vhost-user front-end of user {}, {peer}",
            peer.uid
        );
        let losses = self.told.of(id);
        board::add(&self.open.roster, &self.line, port, Box::new(rings), losses);
        if self.homes.len() >= MAX_HOMES {
            self.homes.clear();
        }
        // Processes of another namespace are not told apart: none of them takes another's number.
        if peer.pid.is_some() {
            self.homes.insert(peer, port);
        }
        self.ports.insert(port, id);
        let settings = locked(&self.open.roster).settings.of(port).clone();
        // Who cannot be told from others may be one of these. What it sends is right all the same.
        let takes_less = peer.pid.is_some() && !self.choosy.contains(&peer);
        let card = Card {
            mac: card::mac(name, port),
            lacks: match takes_less {
                true => card::lacking(&settings),
                false => 0,
            },
            longest: self.open.longest,
            memory: card::allowance(peer.uid, is_trusted),
        };
        // Taken out to be put into the session.
        let Some(guest) = self.guests.remove(&id) else {
            return Ok(());
        };
        if let State::Silent { socket, .. } = guest.state {
            let state = State::Has {
                port,
                session: Box::new(Session::new(socket, wire, card)),
            };
            self.guests.insert(id, Guest { peer, state });
        }
        Ok(())
    }

    fn close(&mut self, id: u64) {
        let Some(guest) = self.guests.remove(&id) else {
            return;
        };
        let dial = self.dials.iter_mut().find(|it| it.guest == Some(id));
        if let Some(dial) = dial {
            dial.guest = None;
        }
        match guest.state {
            State::Silent { socket, .. } => {
                let _ = epoll::delete(&self.epoll, &socket);
            }
            State::Has { port, session, .. } => {
                let _ = epoll::delete(&self.epoll, session.socket());
                self.ports.remove(&port);
                if session.was_declined() {
                    if self.choosy.len() >= MAX_HOMES {
                        self.choosy.clear();
                    }
                    self.choosy.insert(guest.peer);
                }
                // First: who takes the number again must not be removed.
                self.line.send(Change::Remove(port));
                self.remains.push(session.end());
                board::free(&self.open.roster, &self.line, port);
                peer_log!(
                    log::Level::Info,
                    "switch",
                    "{}: port {port} is free",
                    self.open.name
                );
            }
        }
    }
}

/// A connection to a front-end that listens. Never blocks.
fn connected(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// How long a front-end may be silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// When to try again to connect.
const AGAIN: Duration = Duration::from_millis(500);
/// Silent connections of one user.
const MAX_SILENT: usize = 32;
/// Messages of one front-end before the others'.
const AT_ONCE: usize = 16;
/// Descriptors of a user that wait to be closed, before nothing more is taken of it.
const MAX_OPEN: usize = 256;
/// Front-ends whose ports are remembered.
const MAX_HOMES: usize = 4096;
/// How long to wait for descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// When to look again whether memory is used.
const SOON: Duration = Duration::from_millis(5);
/// How often to look whether a call blocks, while there are front-ends that might do that.
const WATCHFUL: Duration = Duration::from_millis(100);

const WAKER: u64 = 0;
const LISTENER: u64 = 1;
const FIRST: u64 = 16;
