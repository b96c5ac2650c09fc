//! The agent's phases: finding the device, greeting the host, noticing that either is gone.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use vnplug_ring::control::{Message, Role, VERSION};

use super::AgentDevice;
use super::channel::{Channel, Heard};
use super::doorbell;
use super::find::{Found, Identity, Looked, Pool, find, open_channel};
use super::held;
use super::serve::{Agent, CHANNEL, DOORBELL, HELD};

/// See the table in [`super`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Searching,
    Silent,
    Greeting,
    Up,
}

impl Agent {
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
            name: own_name(),
            live: self.live(),
            vectors: self.doorbell.as_ref().map_or(0, |it| it.vectors),
            locked_down: false,
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
                let place = |pools: &[Pool]| pools.iter().position(|it| it.header.id == pool_id);
                let mut ours = place(&self.pools);
                if ours.is_none() {
                    // Of a machine that moved with its memory another daemon has signed the pool.
                    self.pools.retain_mut(Pool::read_again);
                    ours = place(&self.pools);
                }
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

    pub(super) fn tick(&mut self) {
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
                } else if self.silent_since.elapsed() < SOON {
                    // A port is found a moment before the kernel knows that its other end is there.
                    self.tick_in(SOON_SILENT);
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
        // By which the host was told that nothing can be mapped: only one has it at a time.
        self.channel = None;
        let looked = match find(&self.config.device) {
            Ok(looked) => looked,
            Err(error) => return log::warn!("{error}"),
        };
        let was_locked_down = std::mem::replace(
            &mut self.is_locked_down,
            matches!(looked, Looked::LockedDown),
        );
        let found = match looked {
            Looked::Found(found) => found,
            Looked::LockedDown => {
                if !was_locked_down {
                    log::warn!("{LOCKED_DOWN}");
                    self.told_at = None;
                    self.held_at = Instant::now() + PLUGGED_ANEW;
                }
                match self.find_through_vfio() {
                    Some(found) => found,
                    None => return self.tell_locked_down(),
                }
            }
            Looked::Nothing => return,
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
        self.silent_since = Instant::now();
        self.tick();
    }

    /// The memory through VFIO, where nobody has plugged what this kernel maps by itself.
    fn find_through_vfio(&mut self) -> Option<Found> {
        if Instant::now() < self.held_at {
            return None;
        }
        self.held_at = Instant::now() + TELL_AGAIN;
        let (channel, channel_id) = open_channel(&self.config.device)?;
        let (pool, held) = match held::take(self.given_back.as_ref()) {
            Ok(taken) => taken,
            Err(why) => {
                log::debug!("not through VFIO: {why}");
                return None;
            }
        };
        if let Err(error) = self.watch(&held, HELD) {
            log::warn!("{error}");
            return None;
        }
        log::info!("the memory is mapped through VFIO, uncached");
        (self.held, self.given_back, self.is_locked_down) = (Some(held), None, false);
        Some(Found {
            pools: vec![pool],
            channel,
            channel_id,
        })
    }

    /// The memory that was taken through VFIO is being unplugged, which waits for us.
    pub(super) fn give_pool_back(&mut self) {
        log::info!("the memory is being unplugged");
        self.lose("the memory is being unplugged");
        self.given_back = self.held.as_ref().map(|it| it.id.clone());
        self.close_channel();
    }

    /// Has the host know that this kernel maps none of its memory, so that it plugs what this kernel does map. Again
    /// and again: another daemon does not know it.
    fn tell_locked_down(&mut self) {
        if self.told_at.is_some_and(|told| told.elapsed() < TELL_AGAIN) {
            return;
        }
        let Some((channel, _)) = open_channel(&self.config.device) else {
            return;
        };
        let mut channel = match Channel::new(channel) {
            Ok(channel) if channel.is_connected() => channel,
            // The host's end comes a moment later.
            Ok(_) => return,
            Err(error) => return log::warn!("{error}"),
        };
        let hello = Message::Hello {
            min_version: VERSION,
            max_version: VERSION,
            role: Role::Agent,
            name: own_name(),
            live: Vec::new(),
            vectors: 0,
            locked_down: true,
        };
        channel.say(&hello, self.next_id(), 0);
        self.told_at = Some(Instant::now());
        // Until the next look: the kernel may take its time with what is written.
        self.channel = Some(channel);
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
    pub(super) fn give_doorbell_back(&mut self) {
        log::info!("the doorbell is being unplugged");
        self.lose("the doorbell is being unplugged");
        self.shunned = self.doorbell.take().map(|it| it.id.clone());
        self.greet();
    }

    /// Somebody at the other end does not know us, who knew us before: the machine moved there, with its channel.
    pub(super) fn is_stranger(&mut self) {
        // What was said before the answer to Hello is settled by that answer.
        if self.phase == Phase::Up {
            log::info!("another daemon is at the channel's other end");
            self.lose("the machine moved");
            self.greet();
        }
    }

    pub(super) fn hear(&mut self) {
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
                self.silent_since = Instant::now();
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
        self.held = None;
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
}

fn own_name() -> String {
    format!("vnplug agent {}", env!("CARGO_PKG_VERSION"))
}

/// What is said where the kernel refuses to map a PCI memory.
pub(super) const LOCKED_DOWN: &str = "this guest's kernel is locked down (Secure Boot) and lets nobody map the \
     memory that is plugged: run `vnplug attach qemu` for it again on the host, which plugs what may be mapped \
     (--memory pmem); the machine needs -m SIZE,maxmem=MORE for that, or an IOMMU (-device intel-iommu,intremap=on) and \
     the modules vfio-pci and vfio_iommu_type1";
/// How long the host has for plugging what can be mapped, before what is there is taken through VFIO.
const PLUGGED_ANEW: Duration = Duration::from_secs(3);
/// Before the host is told again that nothing can be mapped, and VFIO is tried again.
const TELL_AGAIN: Duration = Duration::from_secs(5);
/// Between looks for the device, and for the host's end of the channel.
const SEARCH: Duration = Duration::from_millis(300);
/// Between looks for the host's end at first, and how long that is.
const SOON_SILENT: Duration = Duration::from_millis(10);
const SOON: Duration = Duration::from_secs(3);
/// Before Hello is said again.
const GREETING: Duration = Duration::from_millis(500);
/// The same when the host has not answered for long.
const SLOW_GREETING: Duration = Duration::from_secs(2);
/// Between questions whether the host is still there.
const PROBE: Duration = Duration::from_secs(5);
/// Questions that are remembered.
const MAX_PROBES: usize = 8;
