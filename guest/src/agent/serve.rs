//! The agent's loop: the listener, the applications, the channel and its phases.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, getrlimit, setrlimit};
use vnplug_ring::control::{Message, Role, VERSION};

use super::app::{App, Hangup};
use super::channel::{Channel, Heard};
use super::doorbell::{self, Doorbell};
use super::find::{Identity, Pool, find};
use super::relay::{Pending, PortEntry};
use super::{AgentConfig, AgentDevice};
use crate::connection::timespec;
use crate::error::Error;

/// See the table in [`super`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Searching,
    Silent,
    Greeting,
    Up,
}

/// The agent's whole state; `relay` has what concerns messages.
#[derive(Debug)]
pub(super) struct Agent {
    config: AgentConfig,
    epoll: OwnedFd,
    listener: OwnedFd,
    /// The listener is out of the epoll instance until then, for want of descriptors.
    deaf_until: Option<Instant>,
    pub(super) phase: Phase,
    tick_at: Instant,
    greetings: u32,
    pub(super) channel: Option<Channel>,
    channel_id: Option<Identity>,
    channel_writes: bool,
    /// Candidates; from Welcome on the one in use.
    pub(super) pools: Vec<Pool>,
    pub(super) apps: BTreeMap<u32, App>,
    pub(super) ports: BTreeMap<u32, PortEntry>,
    pub(super) pending: BTreeMap<u32, Pending>,
    last_app: u32,
    last_id: u32,
    pub(super) hello_id: u32,
    /// Applications that were busy until the host was lost.
    pub(super) held_back: BTreeSet<u32>,
    /// Ports that were kicked, of which the host is to be told.
    pub(super) kicks_owed: BTreeSet<u32>,
    /// Questions that the host has not answered.
    pub(super) probes: VecDeque<u32>,
    /// Ticks since the host said anything.
    pub(super) missed: u32,
    pub(super) blind_at: Instant,
    pub(super) doorbell: Option<Rc<Doorbell>>,
    /// A doorbell that did not work or was asked back; not touched again while the channel is open.
    shunned: Option<Identity>,
}

impl Agent {
    pub(super) fn new(config: AgentConfig) -> Result<Self, Error> {
        raise_descriptor_limit();
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("cannot make an epoll instance"))?;
        let listener = listen(&config.socket, config.group)?;
        let agent = Self {
            config,
            epoll,
            listener,
            deaf_until: None,
            phase: Phase::Searching,
            tick_at: Instant::now(),
            greetings: 0,
            channel: None,
            channel_id: None,
            channel_writes: false,
            pools: Vec::new(),
            apps: BTreeMap::new(),
            ports: BTreeMap::new(),
            pending: BTreeMap::new(),
            last_app: 0,
            last_id: 0,
            hello_id: 0,
            held_back: BTreeSet::new(),
            kicks_owed: BTreeSet::new(),
            probes: VecDeque::new(),
            missed: 0,
            blind_at: Instant::now(),
            doorbell: None,
            shunned: None,
        };
        agent.watch(&agent.listener, LISTENER)?;
        if let Some(stop) = &agent.config.stop {
            agent.watch(stop, STOP)?;
        }
        Ok(agent)
    }

    pub(super) fn run(mut self) -> Result<(), Error> {
        loop {
            let now = Instant::now();
            if now >= self.tick_at {
                self.tick();
            }
            if self.deaf_until.is_some_and(|until| now >= until) {
                self.deaf_until = None;
                self.watch(&self.listener, LISTENER)?;
            }
            for app in std::mem::take(&mut self.held_back) {
                self.serve_requests(app);
            }
            self.relay_kicks();
            self.watch_channel();
            let blind = self.wake_blind(now);
            let next = [Some(self.tick_at), self.deaf_until, blind];
            let next = next.into_iter().flatten().min().unwrap_or(now);
            let time = timespec(next.saturating_duration_since(Instant::now()));
            let mut events = [Event {
                flags: EventFlags::empty(),
                data: EventData::new_u64(0),
            }; 32];
            let found = match epoll::wait(&self.epoll, &mut events, Some(&time)) {
                Ok(found) => found,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Error::system("cannot wait for events")(errno)),
            };
            for event in &events[..found] {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    CHANNEL => self.hear(),
                    STOP => return Ok(()),
                    DOORBELL => self.give_doorbell_back(),
                    kick if kick >> 32 == KICK >> 32 => self.kicked(kick as u32),
                    app => self.serve(app as u32, event.flags),
                }
            }
        }
    }

    /// The next number for a message on the channel.
    pub(super) fn next_id(&mut self) -> u32 {
        loop {
            self.last_id = self.last_id.wrapping_add(1);
            if self.last_id != 0 && !self.pending.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }

    pub(super) fn say(&mut self, message: &Message, id: u32, app: u32) {
        if let Some(channel) = &mut self.channel {
            channel.say(message, id, app);
        }
    }

    /// Says Hello, which closes all ports of this channel on the host.
    pub(super) fn greet(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.reset();
        }
        self.hello_id = self.next_id();
        let hello = Message::Hello {
            min_version: VERSION,
            max_version: VERSION,
            role: Role::Agent,
            name: format!("vnplug agent {}", env!("CARGO_PKG_VERSION")),
            live: self.live(),
            vectors: self.doorbell.as_ref().map_or(0, |it| it.vectors),
        };
        self.phase = Phase::Greeting;
        self.probes.clear();
        self.say(&hello, self.hello_id, 0);
        self.greetings += 1;
        self.tick_in(if self.greetings > 5 {
            SLOW_GREETING
        } else {
            GREETING
        });
    }

    /// The answer to Hello.
    pub(super) fn welcomed(&mut self, message: Message) {
        if self.phase != Phase::Greeting {
            return;
        }
        match message {
            Message::Welcome {
                version,
                server,
                pool_id,
            } if version == VERSION => {
                let ours = self.pools.iter().position(|pool| pool.header.id == pool_id);
                let Some(ours) = ours else {
                    log::warn!("the host's pool {pool_id:#x} is not plugged in (yet)");
                    return self.close_channel();
                };
                self.pools.swap(0, ours);
                self.pools.truncate(1);
                self.greetings = 0;
                if self.take_doorbell() {
                    return self.greet();
                }
                log::info!("connected to {server:?}");
                self.phase = Phase::Up;
                self.tick_in(PROBE);
            }
            Message::Error { text, .. } => log::warn!("the host refuses: {text:?}"),
            other => log::warn!("the host answers a greeting with kind {}", other.kind()),
        }
    }

    /// Watches for requests of an application unless it is busy, and for room in its socket while
    /// something waits for it.
    pub(super) fn watch_app(&self, number: u32) {
        if let Some(app) = self.apps.get(&number) {
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::IN, !app.is_busy());
            flags.set(EventFlags::OUT, app.has_backlog());
            let data = EventData::new_u64(u64::from(number));
            if let Err(errno) = epoll::modify(&self.epoll, app.as_fd(), data, flags) {
                log::warn!("cannot watch application {number}: {errno}");
            }
        }
    }

    fn tick(&mut self) {
        if !matches!(self.phase, Phase::Searching) && !self.is_plugged() {
            log::info!("the device was unplugged");
            self.lose("the host's device was unplugged");
            self.close_channel();
        }
        match self.phase {
            Phase::Searching => self.search(),
            Phase::Silent => {
                if self.channel.as_ref().is_some_and(Channel::is_connected) {
                    self.begin();
                } else {
                    self.tick_in(SEARCH);
                }
            }
            Phase::Greeting => self.greet(),
            Phase::Up => self.ask(),
        }
    }

    /// Asks whether the host still knows us: a tty does not tell when its other end restarts.
    pub(super) fn ask(&mut self) {
        if !self.probes.is_empty() {
            self.missed += 1;
        }
        if self.missed >= 2 {
            log::info!("the host does not answer");
            self.lose("the host does not answer");
            return self.greet();
        }
        if self.ports.is_empty() && self.pending.is_empty() && self.take_doorbell() {
            return self.greet();
        }
        let id = self.next_id();
        self.probes.push_back(id);
        if self.probes.len() > MAX_PROBES {
            self.probes.pop_front();
        }
        self.say(&Message::List, id, 0);
        self.tick_in(PROBE);
    }

    fn search(&mut self) {
        self.tick_in(SEARCH);
        let found = match find(&self.config.device) {
            Ok(Some(found)) => found,
            Ok(None) => return,
            Err(error) => return log::warn!("{error}"),
        };
        match Channel::new(found.channel) {
            Ok(channel) => self.channel = Some(channel),
            Err(error) => return log::warn!("{error}"),
        }
        (self.pools, self.channel_id) = (found.pools, found.channel_id);
        log::info!(
            "found memory and channel of VM {:?}",
            self.pools[0].header.name
        );
        self.phase = Phase::Silent;
        self.tick();
    }

    /// The channel's other end is connected: listen and say Hello.
    fn begin(&mut self) {
        let Some(channel) = &self.channel else {
            return;
        };
        self.channel_writes = false;
        if let Err(error) = self.watch(channel, CHANNEL) {
            log::warn!("{error}");
            return self.close_channel();
        }
        self.greetings = 0;
        self.shunned = None;
        self.greet();
    }

    /// Takes a doorbell into use, if there is one that works and we have none; then the host has
    /// to be told.
    fn take_doorbell(&mut self) -> bool {
        let Some(pool_id) = self.pools.first().map(|pool| pool.header.id) else {
            return false;
        };
        let given = matches!(self.config.device, AgentDevice::Given { .. });
        let held = self.doorbell.as_ref().map(|it| it.pool_id);
        if !self.config.doorbell || given || held == Some(pool_id) {
            return false;
        }
        self.doorbell = None;
        match doorbell::find(pool_id, self.shunned.as_ref()) {
            None => return held.is_some(),
            Some(Err(unusable)) => {
                log::warn!("{unusable}; readers are woken over the channel");
                self.shunned = Some(unusable.id);
                return held.is_some();
            }
            Some(Ok(doorbell)) => match self.watch(&doorbell, DOORBELL) {
                Ok(()) => self.doorbell = Some(Rc::new(doorbell)),
                Err(error) => {
                    log::warn!("{error}");
                    self.shunned = Some(doorbell.id);
                    return held.is_some();
                }
            },
        }
        true
    }

    /// The doorbell is being unplugged: its ports open again and are woken over the channel.
    fn give_doorbell_back(&mut self) {
        log::info!("the doorbell is being unplugged");
        self.lose("the doorbell is being unplugged");
        self.shunned = self.doorbell.take().map(|it| it.id.clone());
        self.greet();
    }

    fn hear(&mut self) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        channel.flush();
        let mut messages = Vec::new();
        let heard = channel.hear(&mut messages);
        for (header, message) in messages {
            self.host_says(&header, message);
        }
        if heard == Heard::HungUp {
            log::info!("the channel's other end is gone");
            self.lose("the host's daemon is gone");
            self.doorbell = None;
            if let Some(channel) = &mut self.channel {
                channel.reset();
                self.phase = Phase::Silent;
                self.tick_at = Instant::now() + SEARCH;
                // A hung-up descriptor is always ready.
                if let Err(errno) = epoll::delete(&self.epoll, channel.as_fd()) {
                    log::debug!("the channel was not watched: {errno}");
                }
            }
        }
    }

    fn close_channel(&mut self) {
        self.channel = None;
        self.channel_id = None;
        self.doorbell = None;
        self.pools.clear();
        self.phase = Phase::Searching;
        self.tick_in(SEARCH);
    }

    fn is_plugged(&self) -> bool {
        let pools = self.pools.iter().filter_map(|pool| pool.id.as_ref());
        self.channel_id
            .iter()
            .chain(pools)
            .all(Identity::still_there)
    }

    fn accept(&mut self) {
        // Each may leave a farewell behind, which has to find room.
        if self.is_clogged() {
            return self.rest();
        }
        // A few at a time; the epoll instance reminds of the rest.
        for _ in 0..8 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                Err(errno) => {
                    log::warn!("cannot accept applications: {errno}");
                    return self.rest();
                }
            };
            let uid = socket_peercred(&socket).map_or(u32::MAX, |peer| peer.uid.as_raw());
            let same = self.apps.values().filter(|app| app.uid == uid).count();
            if same >= MAX_PER_USER || self.apps.len() >= MAX_APPS {
                log::warn!("too many connections of user {uid}");
                continue;
            }
            let number = self.next_app();
            match self.watch(&socket, u64::from(number)) {
                Ok(()) => {
                    self.apps.insert(number, App::new(socket, uid));
                }
                Err(error) => log::warn!("{error}"),
            }
        }
    }

    /// Accepts nobody for a moment.
    fn rest(&mut self) {
        let deleted = epoll::delete(&self.epoll, &self.listener);
        debug_assert!(deleted.is_ok(), "the listener was watched");
        self.deaf_until = Some(Instant::now() + Duration::from_millis(200));
    }

    fn serve(&mut self, number: u32, flags: EventFlags) {
        let Some(app) = self.apps.get_mut(&number) else {
            return;
        };
        let mut served = Ok(());
        if flags.contains(EventFlags::OUT) {
            served = app.flush();
        }
        // NB: a busy application is not read, and its hang-up would be reported on and on.
        let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if gone && app.is_busy() {
            served = Err(Hangup("closed".into()));
        } else if gone || flags.contains(EventFlags::IN) {
            served = served.and_then(|()| app.read());
        }
        match served {
            Ok(()) => self.serve_requests(number),
            Err(hangup) => self.drop_app(number, &hangup),
        }
    }

    /// Serves the requests of an application that were read, until it is busy.
    pub(super) fn serve_requests(&mut self, number: u32) {
        let served = loop {
            let Some(app) = self.apps.get_mut(&number) else {
                return;
            };
            let said = match app.next_request() {
                Ok(Some((id, request))) => self.app_says(number, id, request),
                Ok(None) => break Ok(()),
                Err(hangup) => Err(hangup),
            };
            if said.is_err() {
                break said;
            }
        };
        match served {
            Ok(()) => self.watch_app(number),
            Err(hangup) => self.drop_app(number, &hangup),
        }
    }

    /// Numbers come back only after four billion others.
    fn next_app(&mut self) -> u32 {
        loop {
            self.last_app = self.last_app.wrapping_add(1);
            if self.last_app != 0 && !self.apps.contains_key(&self.last_app) {
                return self.last_app;
            }
        }
    }

    fn watch(&self, fd: &impl AsFd, what: u64) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, EventData::new_u64(what), EventFlags::IN)
            .map_err(Error::system("cannot watch a descriptor"))
    }

    /// Watches for kicks of a port; its descriptor leaves with its last copy.
    pub(super) fn watch_kick(&self, kick: &OwnedFd, port: u32) -> Result<(), Error> {
        self.watch(kick, KICK | u64::from(port))
    }

    /// Does not watch a descriptor any more.
    pub(super) fn unwatch(&self, fd: &OwnedFd) {
        if let Err(errno) = epoll::delete(&self.epoll, fd) {
            log::debug!("a descriptor was not watched: {errno}");
        }
    }

    /// Watches for room in the channel while something waits for it.
    fn watch_channel(&mut self) {
        let Some(channel) = &self.channel else {
            return;
        };
        let writes = channel.backlog() > 0;
        if writes != self.channel_writes && matches!(self.phase, Phase::Greeting | Phase::Up) {
            let out = if writes {
                EventFlags::OUT
            } else {
                EventFlags::empty()
            };
            let data = EventData::new_u64(CHANNEL);
            if let Err(errno) =
                epoll::modify(&self.epoll, channel.as_fd(), data, EventFlags::IN | out)
            {
                log::warn!("cannot watch the channel: {errno}");
            }
            self.channel_writes = writes;
        }
    }

    fn tick_in(&mut self, delay: Duration) {
        self.tick_at = Instant::now() + delay;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.config.socket) {
            log::debug!("the socket was removed by somebody else: {error}");
        }
    }
}

/// A descriptor per application and one per port are many; the hard limit is the operator's.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        log::debug!("cannot raise the limit of descriptors: {errno}");
    }
}

/// Listens on `path`; replaces the socket of an agent that died, not of one that lives.
fn listen(path: &Path, group: Option<u32>) -> Result<OwnedFd, Error> {
    let system = |what| {
        move |error: std::io::Error| Error::System {
            what,
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        }
    };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(system("cannot make the socket's directory"))?;
    }
    if std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        if UnixStream::connect(path).is_ok() {
            let what = "another agent or daemon listens on the socket";
            return Err(Error::System {
                what,
                errno: Errno::ADDRINUSE,
            });
        }
        std::fs::remove_file(path).map_err(system("cannot remove a dead agent's socket"))?;
    }
    let listener = UnixListener::bind(path).map_err(system("cannot make the socket"))?;
    let system_mode = system("cannot open the socket to its users");
    let mode = if group.is_some() { 0o660 } else { 0o666 };
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)
            .map_err(system("cannot give the socket to its group"))?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(system_mode)?;
    listener
        .set_nonblocking(true)
        .map_err(system("cannot set up the socket"))?;
    Ok(listener.into())
}

const LISTENER: u64 = 1 << 32;
const CHANNEL: u64 = 2 << 32;
const STOP: u64 = 3 << 32;
const DOORBELL: u64 = 4 << 32;
/// And the port's number.
const KICK: u64 = 5 << 32;

/// Between looks for the device, and for the host's end of the channel.
const SEARCH: Duration = Duration::from_millis(300);
/// Before Hello is said again.
const GREETING: Duration = Duration::from_millis(500);
/// The same when the host has not answered for long.
const SLOW_GREETING: Duration = Duration::from_secs(2);
/// Between questions whether the host is still there.
const PROBE: Duration = Duration::from_secs(5);
/// Questions that are remembered.
const MAX_PROBES: usize = 8;
/// Connections of one user.
const MAX_PER_USER: usize = 256;
/// Connections of all.
const MAX_APPS: usize = 1024;
