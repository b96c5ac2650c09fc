//! The agent's state and its loop.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use vnplug_ring::control::Message;

use super::accept::listen;
use super::app::App;
use super::arena::Handed;
use super::backend::{Awaited, ChannelEntry};
use super::channel::Channel;
use super::closer::{Closer, PeerFd};
use super::doorbell::Doorbell;
use super::find::{Identity, Pool};
use super::held::Held;
use super::phase::Phase;
use super::plugged::AwaitedPort;
use super::plugs;
use super::relay::{Pending, PortEntry};
use super::{AgentConfig, Standing};
use crate::connection::timespec;
use crate::error::Error;

/// The agent's whole state; `phase` has what concerns the host, `accept` the applications'
/// connections, `relay` the messages of both.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) config: AgentConfig,
    pub(super) epoll: OwnedFd,
    /// News of devices, where the kernel tells them.
    plugs: Option<OwnedFd>,
    pub(super) listener: OwnedFd,
    /// The listener is out of the epoll instance until then, for want of descriptors.
    pub(super) deaf_until: Option<Instant>,
    pub(super) phase: Phase,
    /// How it stood when it was told last.
    told_standing: Option<Standing>,
    /// The memory that was found last cannot be mapped here.
    pub(super) is_locked_down: bool,
    /// When the host was told so.
    pub(super) told_at: Option<Instant>,
    /// When that memory is taken through VFIO, if nobody has plugged another one.
    pub(super) held_at: Instant,
    /// It was.
    pub(super) held: Option<Held>,
    /// One that the kernel asked for, until it is gone.
    pub(super) given_back: Option<Identity>,
    pub(super) tick_at: Instant,
    /// Since when the channel's other end is not connected.
    pub(super) silent_since: Instant,
    pub(super) greetings: u32,
    pub(super) channel: Option<Channel>,
    pub(super) channel_id: Option<Identity>,
    pub(super) channel_writes: bool,
    /// Candidates; from Welcome on the one in use.
    pub(super) pools: Vec<Pool>,
    pub(super) apps: BTreeMap<u32, App>,
    /// By user, who closes what its applications had their hands on.
    pub(super) closers: BTreeMap<u32, Closer>,
    pub(super) ports: BTreeMap<u32, PortEntry>,
    /// Channels to back-ends.
    pub(super) channels: BTreeMap<u32, ChannelEntry>,
    /// Memory of back-ends whose device the guest has not found yet.
    pub(super) awaited: Vec<Awaited>,
    /// Ports likewise.
    pub(super) awaited_ports: Vec<AwaitedPort>,
    /// Devices of which applications have descriptors.
    pub(super) handed: Handed,
    pub(super) pending: BTreeMap<u32, Pending>,
    pub(super) last_app: u32,
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
    pub(super) shunned: Option<Identity>,
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
            plugs: plugs::listen().ok(),
            listener,
            deaf_until: None,
            phase: Phase::Searching,
            told_standing: None,
            is_locked_down: false,
            told_at: None,
            held_at: Instant::now(),
            held: None,
            given_back: None,
            tick_at: Instant::now(),
            silent_since: Instant::now(),
            greetings: 0,
            channel: None,
            channel_id: None,
            channel_writes: false,
            pools: Vec::new(),
            apps: BTreeMap::new(),
            closers: BTreeMap::new(),
            ports: BTreeMap::new(),
            channels: BTreeMap::new(),
            awaited: Vec::new(),
            awaited_ports: Vec::new(),
            handed: Handed::default(),
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
        if let Some(plugs) = &agent.plugs {
            agent.watch(plugs, PLUGS)?;
        }
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
            self.tell_standing();
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
            let awaits = self.look_for_devices(now);
            let memory = self.look_for_memory(now);
            let next = [Some(self.tick_at), self.deaf_until, blind, awaits, memory];
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
                    HELD => self.give_pool_back(),
                    PLUGS => self.devices_changed(),
                    kick if kick >> 32 == KICK >> 32 => self.kicked(kick as u32),
                    app => self.serve(app as u32, event.flags),
                }
            }
        }
    }

    /// Tells how it stands, if that is not what was told.
    pub(super) fn tell_standing(&mut self) {
        let standing = match self.phase {
            Phase::Up => Standing::Connected,
            Phase::Searching | Phase::Silent | Phase::Greeting => Standing::Waiting,
        };
        if self.told_standing != Some(standing) {
            self.told_standing = Some(standing);
            if let Some(hears) = &mut self.config.hears {
                (hears.0)(standing);
            }
        }
    }

    /// A device came or went, perhaps the host's: whoever waits for it looks at once.
    fn devices_changed(&mut self) {
        if let Some(plugs) = &self.plugs {
            plugs::drain(plugs);
        }
        if matches!(self.phase, Phase::Searching | Phase::Silent) {
            self.tick_at = Instant::now();
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

    pub(super) fn watch(&self, fd: &impl AsFd, what: u64) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, EventData::new_u64(what), EventFlags::IN)
            .map_err(Error::system("cannot watch a descriptor"))
    }

    /// Watches for kicks of a port: each is told once, whatever is left unread, for the descriptor stays
    /// watched until another thread has closed it.
    pub(super) fn watch_kick(&self, kick: &PeerFd, port: u32) -> Result<(), Error> {
        let data = EventData::new_u64(KICK | u64::from(port));
        epoll::add(&self.epoll, kick, data, EventFlags::IN | EventFlags::ET)
            .map_err(Error::system("cannot watch a descriptor"))
    }

    /// Does not watch a descriptor any more.
    pub(super) fn unwatch(&self, fd: &impl AsFd) {
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

    pub(super) fn tick_in(&mut self, delay: Duration) {
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

pub(super) const LISTENER: u64 = 1 << 32;
pub(super) const CHANNEL: u64 = 2 << 32;
const STOP: u64 = 3 << 32;
pub(super) const DOORBELL: u64 = 4 << 32;
/// And the port's number.
const KICK: u64 = 5 << 32;
const PLUGS: u64 = 6 << 32;
pub(super) const HELD: u64 = 7 << 32;
