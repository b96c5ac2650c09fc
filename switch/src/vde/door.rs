//! The thread that lets programs of VDE in: their requests, their sockets' files, the console.
//!
//! It never touches a frame, and no client can make it wait: it reads what is there, and a path that
//! a client names is opened only in the directories in which libvdeplug makes sockets, so that no
//! file system of the client's is asked.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{SendFlags, SocketType, send};
use vnplug_os::closer::{Closers, PeerFd};
use vnplug_os::socket::{self, Heard};
use vnplug_os::{event, peer_log};

use super::console::{self, Console, Said};
use super::request::{self, MAX_REQUEST, Request};
use crate::board::{self, Switchboard};
use crate::config::VdeConfig;
use crate::control::{Change, Line};
use crate::door::Door;
use crate::forward::Number;
use crate::link::{Loss, Losses};
use crate::porter::{self, Access, Directory};
use crate::roster::Roster;
use crate::sockets::datagrams::Datagrams;

/// An entrance that is made and not served yet.
pub(crate) struct Open {
    name: String,
    config: VdeConfig,
    roster: Arc<Mutex<Roster>>,
    ctl: OwnedFd,
    mgmt: Option<OwnedFd>,
    dir: Directory,
}

impl Open {
    /// Makes the directory and its sockets, or takes over what a switch left that is gone.
    ///
    /// # Errors
    /// The system's, or who has the directory.
    pub(crate) fn new(
        name: &str,
        config: VdeConfig,
        roster: &Arc<Mutex<Roster>>,
    ) -> io::Result<Self> {
        let access = config.access();
        let dir = Directory::open(&config.dir, &access)?;
        // Room for the names of data sockets.
        request::answer(&dir.real.join("0000.0000000")).map_err(io::Error::other)?;
        let ctl = access.listen(&dir.real.join("ctl"), SocketType::STREAM)?;
        let mut open = Self {
            name: name.to_owned(),
            config,
            roster: Arc::clone(roster),
            ctl,
            mgmt: None,
            dir,
        };
        open.dir.clear(is_data)?;
        if let Some((path, mode)) = &open.config.mgmt {
            let mode = *mode;
            let access = Access { mode, ..access };
            open.mgmt = Some(access.listen(path, SocketType::STREAM)?);
        }
        Ok(open)
    }

    /// The entrance, of a switch that is spoken to by `line`.
    pub(crate) fn door(self, line: Line) -> Door {
        let said = ("vnplug-vde", "no VDE client can join");
        Door::new(self.name.clone(), said, |waker| {
            let mut porter = Porter::new(self, line, waker)?;
            Ok(move |stop: &AtomicBool| porter.run(stop))
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mgmt = self.config.mgmt.as_ref().filter(|_| self.mgmt.is_some());
        let mgmt = mgmt.map(|(path, _)| path.clone());
        for path in std::iter::once(self.dir.real.join("ctl")).chain(mgmt) {
            if let Err(error) = std::fs::remove_file(&path) {
                log::warn!(target: "switch", "{}: {error}", path.display());
            }
        }
    }
}

impl VdeConfig {
    fn access(&self) -> Access {
        Access {
            mode: self.mode,
            dir_mode: self.dir_mode,
            group: self.group,
            user: self.user,
        }
    }
}

/// Whether a data socket of ours has such a name: `NNN.FD`.
fn is_data(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let parts = name.split_once('.');
    parts.is_some_and(|(port, socket)| is_number(port) && is_number(socket))
}

/// A connection.
struct Session {
    socket: PeerFd,
    uid: u32,
    state: State,
}

enum State {
    /// Its request is still to come.
    Asks { until: Instant },
    /// It has a port, and this is the file of its socket.
    Has { port: Number, path: PathBuf },
    /// It is a person's.
    Talks(Console),
}

/// Who lets programs in.
struct Porter {
    open: Open,
    line: Line,
    /// For the thread that forwards, and what it says.
    told: Losses,
    losses: Receiver<Loss>,
    waker: Arc<OwnedFd>,
    epoll: OwnedFd,
    sessions: HashMap<u64, Session>,
    next: u64,
    ports: HashMap<Number, u64>,
    closers: Closers<u32>,
}

impl Porter {
    fn new(open: Open, line: Line, waker: Arc<OwnedFd>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let watch = |fd: &OwnedFd, number| {
            epoll::add(&epoll, fd, EventData::new_u64(number), EventFlags::IN)
        };
        watch(&waker, WAKER)?;
        watch(&open.ctl, CTL)?;
        open.mgmt
            .as_ref()
            .map_or(Ok(()), |mgmt| watch(mgmt, MGMT))?;
        let (told, losses) = Losses::new(Arc::clone(&waker));
        Ok(Self {
            open,
            line,
            told,
            losses,
            waker,
            epoll,
            sessions: HashMap::new(),
            next: FIRST,
            ports: HashMap::new(),
            closers: Closers::default(),
        })
    }

    fn run(&mut self, stop: &AtomicBool) {
        let dir = self.open.config.dir.display().to_string();
        log::info!(target: "switch", "{}: VDE clients join at {dir}", self.open.name);
        while !stop.load(Ordering::Acquire) {
            let mut news = Vec::new();
            porter::wait(&self.epoll, Duration::from_secs(1), |id| news.push(id));
            for id in news {
                match id {
                    WAKER => event::clear(&self.waker),
                    CTL => self.accept(false),
                    MGMT => self.accept(true),
                    id => self.hear(id),
                }
            }
            while let Ok(Loss { port, client }) = self.losses.try_recv() {
                if self.ports.get(&port) == Some(&client) {
                    self.close(client);
                }
            }
            self.tidy();
        }
        self.end();
    }

    /// Sends those away who asked for nothing in time.
    fn tidy(&mut self) {
        let now = Instant::now();
        let is_late =
            |session: &Session| matches!(session.state, State::Asks { until } if until <= now);
        let late = self.sessions.iter().filter(|(_, it)| is_late(it));
        let late: Vec<u64> = late.map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.close(id));
    }

    fn accept(&mut self, talks: bool) {
        let listener = match (&self.open.mgmt, talks) {
            (Some(mgmt), true) => mgmt,
            _ => &self.open.ctl,
        };
        let accepted = porter::accept(listener, &self.open.name, &mut self.closers);
        let Some((socket, socket::Peer { uid, .. })) = accepted else {
            return;
        };
        let waiting = self.sessions.values().filter(|it| it.uid == uid);
        let waiting = waiting
            .filter(|it| !matches!(it.state, State::Has { .. }))
            .count();
        if waiting >= MAX_WAITING {
            peer_log!(
                log::Level::Warn,
                "switch",
                "{}: user {uid} has {MAX_WAITING} connections without a port; one more is refused",
                self.open.name
            );
            return;
        }
        let id = self.next;
        self.next += 1;
        let data = EventData::new_u64(id);
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            log::warn!(target: "switch", "{}: {error}", self.open.name);
            return;
        }
        let state = match talks {
            true => State::Talks(Console::default()),
            false => State::Asks {
                until: Instant::now() + PATIENCE,
            },
        };
        let session = Session { socket, uid, state };
        self.sessions.insert(id, session);
        if talks {
            self.say(id, &console::greeting());
        }
    }

    /// Something came from a connection, or its end.
    fn hear(&mut self, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let mut bytes = [0; MAX_REQUEST];
        let count = match socket::receive(&session.socket, &mut bytes) {
            Ok(Heard::Nothing) => return,
            Ok(Heard::Bytes(0) | Heard::Rights) | Err(_) => return self.close(id),
            Ok(Heard::Bytes(count)) => count,
        };
        let bytes = &bytes[..count];
        match &mut session.state {
            // vde_switch reads nothing of it, either.
            State::Has { .. } => {}
            State::Talks(console) => {
                let lines = console.lines(bytes);
                let board = Switchboard {
                    roster: Arc::clone(&self.open.roster),
                    line: self.line.clone(),
                    entrances: Arc::default(),
                };
                for line in lines {
                    let said = console::answer(&line, &board, &self.open.config);
                    match said {
                        Said::Text(text) => self.say(id, &text),
                        Said::Bye(text) => {
                            self.say(id, &text);
                            self.close(id);
                            return;
                        }
                    }
                }
            }
            State::Asks { .. } => {
                let uid = session.uid;
                let asked = Request::parse(bytes).and_then(|it| self.admit(id, uid, &it));
                if let Err(why) = asked {
                    peer_log!(
                        log::Level::Warn,
                        "switch",
                        "{}: a client of user {uid} cannot join: {why}",
                        self.open.name
                    );
                    self.close(id);
                }
            }
        }
    }

    /// Gives a client its port.
    fn admit(&mut self, id: u64, uid: u32, request: &Request) -> Result<(), String> {
        let port = self.take(uid, request)?;
        let joined = self.join(id, uid, port, request);
        // One that got as far as to have it is closed with its session, which frees it.
        if joined.is_err() && !self.ports.contains_key(&port) {
            board::free(&self.open.roster, &self.line, port);
        }
        joined
    }

    fn join(&mut self, id: u64, uid: u32, port: Number, request: &Request) -> Result<(), String> {
        let theirs = self.find(&request.socket, uid)?;
        let ours = porter::connected(&theirs).map_err(|error| {
            let advice = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; it is open to nobody but its user: run the daemon with --user"
                }
                _ => "",
            };
            format!("{}: {error}{advice}", request.socket.display())
        })?;
        let path = self
            .open
            .dir
            .real
            .join(format!("{port:03}.{}", ours.as_raw_fd()));
        porter::name_for(&ours, &path, uid, &self.open.config.access())
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let answer = request::answer(&path)?;
        let link = Datagrams::new(PeerFd::new(ours, self.closers.of(&uid)));
        let Some(session) = self.sessions.get_mut(&id) else {
            return Err("it is gone".into());
        };
        session.state = State::Has { port, path };
        let description = &request.description;
        peer_log!(
            log::Level::Info,
            "switch",
            "{}: port {port}: a VDE client of user {uid} ({description:?})",
            self.open.name
        );
        self.ports.insert(port, id);
        // Before the answer: what the client sends then is forwarded.
        let losses = self.told.of(id);
        board::add(&self.open.roster, &self.line, port, Box::new(link), losses);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(&session.socket, &answer, flags) {
            Ok(count) if count == answer.len() => Ok(()),
            _ => Err("it does not take the answer".into()),
        }
    }

    /// Takes a port for a client.
    fn take(&self, uid: u32, request: &Request) -> Result<Number, String> {
        let holder = porter::holder(uid, "unix prog", request.description.clone());
        let port = board::admit(&self.open.roster, &self.line, uid, holder, request.port)?;
        Ok(port.get())
    }

    /// A client's data socket, which must be a socket of its own.
    fn find(&self, path: &Path, uid: u32) -> Result<OwnedFd, String> {
        let named = path.display();
        let dir = path.parent().unwrap_or(Path::new("/"));
        if dir != self.open.dir.real && !PLACES.iter().any(|place| dir == Path::new(place)) {
            return Err(format!(
                "its data socket {named} must be in the switch's directory, or in one of {PLACES:?}"
            ));
        }
        let (file, owner) = porter::find_socket(path)?;
        if uid != 0 && owner != uid {
            return Err(format!(
                "{named} belongs to user {owner}, not to the client's"
            ));
        }
        Ok(file)
    }

    /// Writes to a console; one that does not read is closed.
    fn say(&mut self, id: u64, text: &str) {
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&session.socket, rest, flags) {
                Ok(count) => rest = &rest[count..],
                Err(_) => return self.close(id),
            }
        }
    }

    fn close(&mut self, id: u64) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        let _ = epoll::delete(&self.epoll, &session.socket);
        if let State::Has { port, path } = &session.state {
            self.ports.remove(port);
            // First: who takes the number again must not be removed.
            self.line.send(Change::Remove(*port));
            board::free(&self.open.roster, &self.line, *port);
            let _ = std::fs::remove_file(path);
            peer_log!(
                log::Level::Info,
                "switch",
                "{}: port {port} is free",
                self.open.name
            );
        }
    }

    fn end(&mut self) {
        let all: Vec<u64> = self.sessions.keys().copied().collect();
        all.into_iter().for_each(|id| self.close(id));
    }
}

/// Where libvdeplug makes data sockets if it may not do so in the switch's directory.
const PLACES: [&str; 4] = ["/run", "/var/run", "/var/tmp", "/tmp"];
/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections of one user that have no port.
const MAX_WAITING: usize = 32;

const WAKER: u64 = 0;
const CTL: u64 = 1;
const MGMT: u64 = 2;
const FIRST: u64 = 16;
