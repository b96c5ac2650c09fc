//! The thread that lets programs of VDE in: their requests, their sockets' files, the console.
//!
//! It never touches a frame, and no client can make it wait: it reads what is there, and a path that
//! a client names is opened only in the directories in which libvdeplug makes sockets, so that no
//! file system of the client's is asked.

use std::collections::HashMap;
use std::fs::{DirBuilder, DirEntry, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{
    DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags, flock, open, statx};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    send, socket_with, sockopt,
};
use vnplug_os::closer::{Closers, PeerFd};
use vnplug_os::privileges::user_name;
use vnplug_os::socket::{self, Heard};
use vnplug_os::{event, peer_log};

use super::console::{self, Console, Said};
use super::link::Datagrams;
use super::request::{self, MAX_REQUEST, Request};
use crate::control::{Change, Line};
use crate::forward::Number;
use crate::link::{Entrance, Losses};
use crate::queue::VdeConfig;
use crate::roster::{Holder, Roster, locked};

/// An entrance that is made and not served yet.
pub(crate) struct Open {
    name: String,
    config: VdeConfig,
    roster: Arc<Mutex<Roster>>,
    ctl: OwnedFd,
    mgmt: Option<OwnedFd>,
    /// Held while the directory is ours.
    _lock: File,
    /// The directory is removed with it.
    made: bool,
    /// Its name without links.
    real: PathBuf,
}

/// The entrance of a switch.
pub(crate) struct Door {
    open: Option<Open>,
    line: Line,
    stop: Arc<AtomicBool>,
    waker: Option<Arc<OwnedFd>>,
    thread: Option<JoinHandle<()>>,
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
        let dir = &config.dir;
        let at = |path: &Path, error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let in_dir = |error| at(dir, error);
        let dir_mode = config.dir_mode.unwrap_or_else(|| dir_mode(config.mode));
        let made = match DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(in_dir(error)),
        };
        let lock = File::options()
            .read(true)
            .custom_flags((OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32)
            .open(dir)
            .map_err(in_dir)?;
        let found = lock.metadata().map_err(in_dir)?;
        let us = rustix::process::geteuid().as_raw();
        let user = config.user.map_or(us, |(uid, _)| uid);
        if found.uid() != us && found.uid() != user {
            let what = format!(
                "{} belongs to user {}; name another directory",
                dir.display(),
                found.uid()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let what = format!("another switch serves {}", dir.display());
            io::Error::new(io::ErrorKind::AddrInUse, what)
        })?;
        if !made && !is_for_switches(dir).map_err(in_dir)? {
            let what = format!(
                "{} has other files: name an empty directory, or one that is not there yet",
                dir.display()
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        lock.set_permissions(Permissions::from_mode(dir_mode))
            .map_err(in_dir)?;
        let real = std::fs::canonicalize(dir).map_err(in_dir)?;
        // Room for the names of data sockets.
        request::answer(&real.join("0000.0000000")).map_err(io::Error::other)?;
        let ctl_path = real.join("ctl");
        let ctl = socket::listen(&ctl_path, config.mode)?;
        clear(&real).map_err(in_dir)?;
        let mgmt = match &config.mgmt {
            Some((path, mode)) => Some(socket::listen(path, *mode)?),
            None => None,
        };
        let uid = config.user.map(|(uid, _)| uid);
        let gid = config.group.or(config.user.map(|(_, gid)| gid));
        let mgmt_path = config.mgmt.as_ref().map(|(path, _)| path.clone());
        for path in [real.clone(), ctl_path].into_iter().chain(mgmt_path) {
            if uid.is_some() || gid.is_some() {
                chown(&path, uid, gid).map_err(|error| at(&path, error))?;
            }
        }
        Ok(Self {
            name: name.to_owned(),
            config,
            roster: Arc::clone(roster),
            ctl,
            mgmt,
            _lock: lock,
            made,
            real,
        })
    }
}

/// Permission bits of a directory whose sockets have these: who may use one may look for it.
fn dir_mode(mode: u32) -> u32 {
    mode | (mode & 0o444) >> 2 | (mode & 0o222) >> 1
}

/// Whether a directory has been a switch's, or has nothing but sockets: the permissions of no other are
/// changed.
fn is_for_switches(dir: &Path) -> io::Result<bool> {
    let is_socket = |entry: &DirEntry| entry.file_type().map(|it| it.is_socket());
    let mut all = true;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let socket = is_socket(&entry)?;
        if socket && entry.file_name() == "ctl" {
            return Ok(true);
        }
        all &= socket;
    }
    Ok(all)
}

/// Removes what a switch left that was killed: sockets named `NNN.FD`.
fn clear(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_data = |name: &str| {
            let (port, socket) = name.split_once('.')?;
            let is_number =
                |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
            (is_number(port) && is_number(socket)).then_some(())
        };
        if name.to_str().and_then(is_data).is_some() && entry.file_type()?.is_socket() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl Door {
    /// Of a switch that is spoken to by `line`.
    pub(crate) fn new(open: Open, line: Line) -> Self {
        Self {
            open: Some(open),
            line,
            stop: Arc::default(),
            waker: None,
            thread: None,
        }
    }

    fn serve(&mut self, open: Open) -> io::Result<()> {
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (line, stop) = (self.line.clone(), Arc::clone(&self.stop));
        let mut porter = Porter::new(open, line, Arc::clone(&waker))?;
        let thread = std::thread::Builder::new()
            .name("vnplug-vde".into())
            .spawn(move || porter.run(&stop))?;
        (self.waker, self.thread) = (Some(waker), Some(thread));
        Ok(())
    }
}

impl Entrance for Door {
    fn open(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        let name = open.name.clone();
        if let Err(error) = self.serve(open) {
            log::error!(target: "switch", "{name}: no VDE client can join: {error}");
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(waker) = &self.waker {
            event::ring(waker);
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!(target: "switch", "the thread of a VDE entrance panicked");
        }
    }
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
    losses: Receiver<Number>,
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
            let mut events = [Event {
                flags: EventFlags::empty(),
                data: EventData::new_u64(0),
            }; 32];
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            // A signal ends the wait early.
            let found = epoll::wait(&self.epoll, &mut events, Some(&second)).unwrap_or(0);
            for event in &events[..found] {
                match event.data.u64() {
                    WAKER => event::clear(&self.waker),
                    CTL => self.accept(false),
                    MGMT => self.accept(true),
                    id => self.hear(id),
                }
            }
            while let Ok(port) = self.losses.try_recv() {
                if let Some(id) = self.ports.get(&port) {
                    self.close(*id);
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
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                peer_log!(
                    log::Level::Warn,
                    "switch",
                    "{}: out of descriptors",
                    self.open.name
                );
                std::thread::sleep(PAUSE);
                return;
            }
            // It is gone again.
            Err(_) => return,
        };
        let Ok(peer) = sockopt::socket_peercred(&socket) else {
            return;
        };
        let uid = peer.uid.as_raw();
        // Where the kernel cannot refuse descriptors, what is read stops before them.
        socket::pass_rights(&socket, false);
        let socket = PeerFd::new(socket, self.closers.of(&uid));
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
                for line in lines {
                    let said =
                        console::answer(&line, &self.line, &self.open.roster, &self.open.config);
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
            locked(&self.open.roster).free(port);
        }
        joined
    }

    fn join(&mut self, id: u64, uid: u32, port: Number, request: &Request) -> Result<(), String> {
        let theirs = self.find(&request.socket, uid)?;
        let ours = connected(&theirs).map_err(|error| {
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
            .real
            .join(format!("{port:03}.{}", ours.as_raw_fd()));
        self.name(&ours, &path, uid)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let answer = request::answer(&path)?;
        let link = Datagrams::new(PeerFd::new(ours, self.closers.of(&uid)));
        let Some(session) = self.sessions.get_mut(&id) else {
            return Err("it is gone".into());
        };
        session.state = State::Has { port, path };
        let description = &request.description;
        log::info!(
            target: "switch",
            "{}: port {port}: a VDE client of user {uid} ({description:?})",
            self.open.name
        );
        self.ports.insert(port, id);
        // Before the answer: what the client sends then is forwarded.
        self.line.send(Change::Add {
            port,
            link: Box::new(link),
            losses: self.told.clone(),
        });
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(&session.socket, &answer, flags) {
            Ok(count) if count == answer.len() => Ok(()),
            _ => Err("it does not take the answer".into()),
        }
    }

    /// Takes a port for a client.
    fn take(&self, uid: u32, request: &Request) -> Result<Number, String> {
        let us = rustix::process::geteuid().as_raw();
        let holder = Holder {
            owner: user_name(uid),
            is_trusted: uid == 0 || uid == us,
            way: "unix prog",
            description: request.description.clone(),
        };
        let port = locked(&self.open.roster).take(holder, request.port)?;
        Ok(port.get())
    }

    /// A client's data socket, which must be a socket of its own.
    fn find(&self, path: &Path, uid: u32) -> Result<OwnedFd, String> {
        let named = path.display();
        let dir = path.parent().unwrap_or(Path::new("/"));
        if dir != self.open.real && !PLACES.iter().any(|place| dir == Path::new(place)) {
            return Err(format!(
                "its data socket {named} must be in the switch's directory, or in one of {PLACES:?}"
            ));
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open(path, flags, Mode::empty()).map_err(|error| format!("{named}: {error}"))?;
        // Asks no file system that a client may serve.
        let flags = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(AT_STATX_DONT_SYNC);
        let found = statx(&file, "", flags, StatxFlags::BASIC_STATS)
            .map_err(|error| format!("{named}: {error}"))?;
        if FileType::from_raw_mode(u32::from(found.stx_mode)) != FileType::Socket {
            return Err(format!("{named} is no socket"));
        }
        if uid != 0 && found.stx_uid != uid {
            let owner = found.stx_uid;
            return Err(format!(
                "{named} belongs to user {owner}, not to the client's"
            ));
        }
        Ok(file)
    }

    /// Gives our socket its name, for the client alone.
    fn name(&self, ours: &OwnedFd, path: &Path, uid: u32) -> io::Result<()> {
        bind(ours, &SocketAddrUnix::new(path)?)?;
        let mode = self.open.config.mode;
        // Without the right to give files away, who may connect to `ctl` may connect to it. Nobody
        // but the client can send to a socket that is connected to the client's.
        let given = chown(path, Some(uid), self.open.config.group).is_ok();
        let mode = if given { mode & 0o700 } else { mode };
        let named = std::fs::set_permissions(path, Permissions::from_mode(mode));
        named.inspect_err(|_| {
            let _ = std::fs::remove_file(path);
        })
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
            locked(&self.open.roster).free(*port);
            let _ = std::fs::remove_file(path);
            log::info!(target: "switch", "{}: port {port} is free", self.open.name);
        }
    }

    fn end(&mut self) {
        let all: Vec<u64> = self.sessions.keys().copied().collect();
        all.into_iter().for_each(|id| self.close(id));
        let open = &self.open;
        let mgmt = open.config.mgmt.as_ref().map(|(path, _)| path.clone());
        for path in std::iter::once(open.real.join("ctl")).chain(mgmt) {
            if let Err(error) = std::fs::remove_file(&path) {
                log::warn!(target: "switch", "{}: {error}", path.display());
            }
        }
        if open.made {
            // Clients may have left something.
            let _ = std::fs::remove_dir(&open.real);
        }
    }
}

/// A socket that is connected to a client's, and bound to no name.
fn connected(theirs: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let ours = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // The file that was looked at, whatever its name names now.
    let path = format!("/proc/self/fd/{}", theirs.as_fd().as_raw_fd());
    connect(&ours, &SocketAddrUnix::new(path)?)?;
    Ok(ours)
}

/// Where libvdeplug makes data sockets if it may not do so in the switch's directory.
const PLACES: [&str; 4] = ["/run", "/var/run", "/var/tmp", "/tmp"];
/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections of one user that have no port.
const MAX_WAITING: usize = 32;
/// How long to wait for descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// `linux/fcntl.h`.
const AT_STATX_DONT_SYNC: u32 = 0x4000;

const WAKER: u64 = 0;
const CTL: u64 = 1;
const MGMT: u64 = 2;
const FIRST: u64 = 16;
