//! The switch as a source: a turn takes frames of the ports that have some, and forwards them.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_os::datagrams::Rest;
use vnplug_os::peer_log;
use vnplug_path::source::{
    Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};

use vnplug_ring::offload::{Offload, gso};

use crate::batch::{Batch, MAX_SUPER};
use crate::board::Switchboard;
use crate::control::{self, Change, Inlet, PortTold, Told};
use crate::direct::Directs;
use crate::exits::Exits;
use crate::forward::{Forwarder, HOST, Loop, Number};
use crate::link::{Entrance, Losses};
use crate::roster::{Holder, Roster, locked};
use crate::settings::Settings;
use crate::sockets::door::{self as sockets, SocketsConfig};
use crate::table::Limits;
use crate::turn::{Passed, Sink, Spare};
use crate::uplink::{self, UPLINK, Uplink, Uplinks};
use crate::vde::door as vde;
use crate::vhost::door::{self as vhost, VhostConfig};

/// What a switch is to be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Its name.
    pub name: String,
    /// Stations that it knows, in all and at one port.
    pub stations: (usize, usize),
    /// What can be changed while it runs.
    pub settings: Settings,
    /// Bytes of the longest frame, Ethernet header included, FCS excluded.
    pub longest: usize,
    /// Ports in all, and of one user that is neither root nor the daemon's.
    pub ports: (usize, usize),
    /// Where programs of VDE come in.
    pub vde: Option<VdeConfig>,
    /// Where machines come in by plain sockets.
    pub sockets: SocketsConfig,
    /// Where virtual machines come in.
    pub vhost: VhostConfig,
}

/// Where programs of VDE come in: the options of `vde_switch`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdeConfig {
    /// The directory of its sockets (`-s`).
    pub dir: PathBuf,
    /// Permission bits of the sockets (`-m`).
    pub mode: u32,
    /// Permission bits of the directory (`--dirmode`); by default what `mode` says.
    pub dir_mode: Option<u32>,
    /// Their group (`-g`).
    pub group: Option<u32>,
    /// The socket of the management console (`--mgmt`), and its permission bits.
    pub mgmt: Option<(PathBuf, u32)>,
    /// The user that the daemon will be, if it is not to stay what it is.
    pub user: Option<(u32, u32)>,
}

impl SwitchConfig {
    /// A switch of this name, without entrances.
    pub fn new(name: impl Into<String>) -> Self {
        let limits = Limits::default();
        Self {
            name: name.into(),
            stations: (limits.all, limits.each),
            settings: Settings::default(),
            longest: LONGEST,
            ports: (1024, 256),
            vde: None,
            sockets: SocketsConfig::default(),
            vhost: VhostConfig::default(),
        }
    }

    /// The entrances that it has, each by the name of its option, and where they are.
    pub fn entrances(&self) -> Vec<(&'static str, PathBuf)> {
        let sockets = &self.sockets;
        let all = [
            ("vde", self.vde.as_ref().map(|vde| &vde.dir)),
            ("vhost", self.vhost.path.as_ref()),
            ("stream", sockets.stream.as_ref()),
            ("bess", sockets.bess.as_ref()),
            ("dgram", sockets.dgram.as_ref()),
        ];
        let given = |(name, path): (&'static str, Option<&PathBuf>)| {
            // A directory that is gone cannot be named.
            let path = std::path::absolute(path?);
            path.ok().map(|path| (name, path))
        };
        all.into_iter().filter_map(given).collect()
    }
}

/// A switch, forwarding.
pub struct Switch {
    name: String,
    forwarder: Forwarder,
    exits: Exits,
    directs: Directs,
    inlet: Inlet,
    entrances: Vec<Box<dyn Entrance>>,
    uplinks: Uplinks,
    /// The entrances are open.
    is_open: bool,
    /// Ports that may have frames.
    ready: VecDeque<Number>,
    /// What the operator says of it.
    settings: Settings,
    /// Ports to be closed when their last frames are forwarded, and why.
    lost: Vec<(Number, std::io::Error)>,
    /// Turns since the last look at all of them.
    unlooked: u32,
    /// What came through links.
    came: Batch,
    /// What came through rings.
    sent: Batch,
    /// Ports of which frames came this turn.
    taken: Vec<Number>,
    /// Nobody reads what passes.
    is_unread: bool,
    spare: Spare,
    started: Instant,
    counters: QueueCounters,
}

impl Switch {
    /// Makes the switch and its entrances; they are served when the source is.
    ///
    /// # Errors
    /// [`SourceError`] if an entrance cannot be made.
    pub fn open(config: SwitchConfig) -> Result<(Box<dyn Queue>, Switchboard), SourceError> {
        Self::open_with(config, Vec::new())
    }

    /// As [`open`](Self::open), with uplinks, which are its first ports in this order.
    ///
    /// # Errors
    /// [`SourceError`] if an entrance or an uplink cannot be made.
    pub fn open_with(
        config: SwitchConfig,
        uplinks: Vec<Uplink>,
    ) -> Result<(Box<dyn Queue>, Switchboard), SourceError> {
        let entrances = config.entrances();
        let name = config.name;
        let failed = |what: &str| {
            let what = format!("switch {name:?}: {what}");
            move |error: std::io::Error| SourceError::io(what, error)
        };
        let (line, inlet) = control::line().map_err(failed("no descriptors"))?;
        let epoll = epoll::create(CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|error| failed("no descriptors")(error.into()))?;
        let waker = EventData::new_u64(WAKER);
        let watched = epoll::add(&epoll, &inlet.waker, waker, EventFlags::IN);
        watched.map_err(|error| failed("no descriptors")(error.into()))?;
        let settings = config.settings;
        let roster = Roster::new(config.ports, settings.clone());
        let vde = config.vde.map(|vde| vde::Open::new(&name, vde, &roster));
        let vde = vde.transpose().map_err(failed("its VDE entrance"))?;
        let sockets = Some(config.sockets).filter(|sockets| !sockets.is_empty());
        let sockets =
            sockets.map(|sockets| sockets::Open::new(&name, sockets, config.longest, &roster));
        let sockets = sockets
            .transpose()
            .map_err(failed("its entrance by sockets"))?;
        let vhost = Some(config.vhost).filter(|vhost| !vhost.is_empty());
        let vhost = vhost.map(|vhost| vhost::Open::new(&name, vhost, config.longest, &roster));
        let vhost = vhost
            .transpose()
            .map_err(failed("its vhost-user entrance"))?;
        let (all, each) = config.stations;
        let forwarder = Forwarder::new(Limits {
            all,
            each,
            age_s: settings.age_s,
            hold_s: settings.hold_s,
        });
        let board = Switchboard {
            roster,
            line: line.clone(),
            entrances: entrances.into(),
        };
        let mut entrances: Vec<Box<dyn Entrance>> = Vec::new();
        if let Some(open) = vde {
            entrances.push(Box::new(vde::Door::new(open, line.clone())));
        }
        if let Some(open) = sockets {
            entrances.push(Box::new(sockets::Door::new(open, line.clone())));
        }
        if let Some(open) = vhost {
            entrances.push(Box::new(vhost::Door::new(open, line)));
        }
        let mut switch = Self {
            uplinks: Uplinks::new(&name).map_err(failed("no descriptors"))?,
            name: name.clone(),
            forwarder,
            exits: Exits::new(epoll),
            directs: Directs::default(),
            inlet,
            entrances,
            is_open: false,
            ready: VecDeque::new(),
            settings: Settings::default(),
            lost: Vec::new(),
            unlooked: 0,
            came: Batch::new(BATCH, config.longest),
            sent: Batch::new(MAX_BATCH, SENT_EACH.max(config.longest)),
            taken: Vec::new(),
            is_unread: false,
            spare: Spare::default(),
            started: Instant::now(),
            counters: QueueCounters::default(),
        };
        switch.set_all(settings);
        for (number, uplink) in (1..).zip(uplinks) {
            let interface = uplink.interface.clone();
            let cannot = |error: SourceError| SourceError {
                what: format!("switch {name:?}: uplink {interface}: {}", error.what),
                cause: error.cause,
            };
            switch.connect(uplink, number, &board).map_err(cannot)?;
        }
        Ok((Box::new(switch), board))
    }

    /// Makes an interface a port.
    fn connect(
        &mut self,
        uplink: Uplink,
        number: Number,
        board: &Switchboard,
    ) -> Result<(), SourceError> {
        let holder = Holder {
            owner: UPLINK.into(),
            is_trusted: true,
            way: UPLINK,
            description: format!("interface {} ({})", uplink.interface, uplink.how),
        };
        let port = locked(&board.roster).take(holder, Some(number));
        let port = port.map_err(SourceError::new)?.get();
        let link = self.uplinks.add(uplink, port)?;
        self.exits.add_unwatched(port, link);
        self.join(port);
        Ok(())
    }

    /// Lets clients join. By now the daemon has given up its privileges.
    #[cold]
    fn begin(&mut self) {
        self.is_open = true;
        self.entrances.iter_mut().for_each(|it| it.open());
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// Does what other threads ask.
    #[inline]
    fn obey(&mut self) {
        if self.inlet.has_news() {
            while let Some(change) = self.inlet.take() {
                self.change(change);
            }
        }
        // The clock is looked at only where something is to be told.
        if self.directs.next_us(&self.forwarder).is_some() {
            let now_us = self.now_us();
            self.directs.tell(&self.forwarder, &self.settings, now_us);
        }
    }

    /// Finds out which ports have frames or read again.
    fn look(&mut self) {
        if !self.ready.is_empty() && self.unlooked < UNLOOKED {
            self.unlooked += 1;
            return;
        }
        self.unlooked = 0;
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; EVENTS];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // The only error that is possible is a signal.
        let found = epoll::wait(self.exits.epoll(), &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..found] {
            let (number, flags) = (event.data.u64(), event.flags);
            if number == WAKER {
                continue;
            }
            let number = number as Number;
            if flags.contains(EventFlags::OUT) {
                self.exits.go_on(number, &mut self.forwarder.counters);
            }
            // The other end is gone, if it is not for reading: its next read says so.
            let has_frames = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
            if let Some(port) = self.exits.port(number)
                && has_frames
                && !port.is_ready
            {
                port.is_ready = true;
                self.ready.push_back(number);
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::AddRing(number) => {
                self.exits.add_ring(number);
                self.join(number);
            }
            Change::Add { port, link, losses } => match self.exits.add(port, link, losses) {
                Ok(()) => self.join(port),
                Err(error) => {
                    log::error!(target: "switch", "{}: port {port}: {error}", self.name);
                }
            },
            Change::Remove(number) => {
                self.remove(number);
            }
            Change::Anew(number) => self.forwarder.pardon(number),
            Change::Close(number) => {
                if let Some(losses) = self.remove(number) {
                    losses.tell(number);
                }
            }
            Change::Settings(number, settings) => {
                match settings {
                    Some(settings) => self.settings.ports.insert(number, *settings),
                    None => self.settings.ports.remove(&number),
                };
                self.set(number);
            }
            Change::Direct(number, place) => self.directs.set(number, place),
            Change::Read(number, comes) => self.exits.read(number, comes),
            Change::Whole(settings) => self.set_all(*settings),
            Change::Tell(reply) => {
                // Nobody waits any more, if it fails.
                let _ = reply.send(self.told());
            }
        }
    }

    fn told(&self) -> Told {
        let table = &self.forwarder.table;
        let now_s = (self.now_us() / MILLION) as u32;
        let port = |(number, counters)| PortTold {
            number,
            counters,
            refused: self.forwarder.refused(number),
            state: match self.forwarder.is_shut(number) {
                (_, true) => "shut",
                (true, _) => "down",
                _ => "up",
            },
        };
        Told {
            counters: self.forwarder.counters,
            ports: self.exits.counters().into_iter().map(port).collect(),
            stations: table.entries(now_s).take(MAX_TOLD).collect(),
            station_count: table.len() as u64,
            limits: table.limits(),
            is_hub: self.forwarder.is_hub,
        }
    }

    /// A port is there.
    fn join(&mut self, number: Number) {
        self.forwarder.add(number);
        self.set(number);
    }

    /// A port is from now on as its settings say.
    fn set(&mut self, number: Number) {
        self.directs.settings_changed();
        let is_ring = self.exits.is_ring(number);
        if is_ring.is_none() && number != HOST {
            return;
        }
        let settings = self.settings.of(number);
        self.forwarder.set(number, settings, self.settings.storm);
        self.exits
            .set(number, settings, self.started.elapsed().as_micros() as u64);
        if is_ring == Some(true) && !settings.wire.is_plain() {
            log::warn!(
                target: "switch",
                "{}: port {number} has rings, which delay and lose nothing",
                self.name
            );
        }
    }

    /// The switch and all its ports are from now on as the settings say.
    fn set_all(&mut self, settings: Settings) {
        let before = std::mem::replace(&mut self.settings, settings);
        self.directs.settings_changed();
        let settings = &self.settings;
        self.forwarder.is_hub = settings.is_hub;
        self.forwarder.loops = settings.loops;
        self.forwarder.table.set_age(settings.age_s);
        self.forwarder.table.set_hold(settings.hold_s);
        if before.statics != settings.statics {
            self.forwarder.set_statics(settings);
        }
        let has_new_storm = before.storm != settings.storm;
        let mut ports = self.forwarder.ports().to_vec();
        ports.push(HOST);
        for number in ports {
            if has_new_storm || before.of(number) != self.settings.of(number) {
                self.set(number);
            }
        }
    }

    /// Says who is to be told, if nobody knows it yet.
    fn remove(&mut self, number: Number) -> Option<Losses> {
        self.forwarder.remove(number);
        self.directs.set(number, None);
        if self.exits.port(number).is_some_and(|port| port.is_ready) {
            self.ready.retain(|ready| *ready != number);
        }
        self.exits.remove(number)
    }

    /// Takes frames of the ports that have some, each a part of the batch.
    fn take(&mut self) {
        let batch = &mut self.came;
        batch.clear();
        batch.leaves = self.is_unread;
        for _ in 0..self.ready.len() {
            if batch.room() == 0 {
                break;
            }
            let Some(number) = self.ready.pop_front() else {
                break;
            };
            let Some(port) = self.exits.port(number) else {
                continue;
            };
            let Some(link) = &mut port.link else {
                continue;
            };
            let first = batch.len();
            batch.sends(number);
            let rest = link.receive(batch, EACH);
            port.count_lost(&mut self.forwarder.counters);
            for place in first..batch.len() {
                port.counters.in_frames += 1;
                port.counters.in_bytes += batch.get(place).len() as u64;
            }
            if batch.left() > 0 {
                self.taken.push(number);
            }
            match rest {
                Ok(Rest::More) => self.ready.push_back(number),
                Ok(Rest::Nothing) => port.is_ready = false,
                Ok(Rest::Rights) => {
                    let why = std::io::Error::other("it sent descriptors");
                    self.lost.push((number, why));
                }
                Err(error) => self.lost.push((number, error)),
            }
        }
    }

    /// Says which loops were found.
    #[cold]
    fn tell_loops(&mut self) {
        while let Some(found) = self.forwarder.next_loop() {
            let Loop {
                port,
                station,
                is_shut,
            } = found;
            let station = station.map(|byte| format!("{byte:02x}")).join(":");
            let what = match is_shut {
                true => "it is shut for a minute",
                false => "to shut such ports, say loops=shut",
            };
            peer_log!(
                log::Level::Warn,
                "switch",
                "{}: a loop, or two of one address: port {port} sends as {station}, which is at another \
                 port; {what}",
                self.name
            );
        }
    }

    /// Closes ports that cannot be served any more. NB: not before their frames are forwarded, from which
    /// the switch learns where stations are: nobody is to be found at a port that is gone.
    fn close_lost(&mut self) {
        while let Some((number, why)) = self.lost.pop() {
            let level = match why.kind() {
                std::io::ErrorKind::UnexpectedEof => log::Level::Info,
                _ => log::Level::Warn,
            };
            peer_log!(
                level,
                "switch",
                "{}: port {number} is closed: {why}",
                self.name
            );
            if let Some(losses) = self.remove(number) {
                losses.tell(number);
            }
        }
    }
}

impl Switch {
    /// Forwards what came through links.
    fn receive_links(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Received {
        self.look();
        if self.exits.is_late() {
            let now_us = self.now_us();
            self.exits.arrive(now_us, &mut self.forwarder.counters);
        }
        if self.ready.is_empty() {
            return Received::Nothing;
        }
        self.take();
        let count = self.came.len();
        if count == 0 {
            self.close_lost();
            return Received::Nothing;
        }
        let now_us = self.now_us();
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        self.spare.decide(forwarder, self.came.iter(), now_us);
        if self.came.left() > 0 {
            self.spare.fetch(forwarder, exits, &mut self.came);
        }
        let sink = (!self.is_unread).then_some(sink);
        let (came, spare) = (self.came.iter(), &mut self.spare);
        let passed = spare.give(forwarder, exits, came, now_us, sink);
        // Now their senders may have them back.
        self.exits.release(&mut self.taken);
        self.came.clear();
        self.counters.seen += passed.frames;
        self.tell_loops();
        self.close_lost();
        passed.received(count, self.is_unread)
    }

    /// Forwards what came to the next queue of an uplink; `None` when all had their turn.
    fn receive_uplink(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Option<Received> {
        let now_us = self.now_us();
        let longest = self.came.longest();
        let (forwarder, exits, spare) = (&mut self.forwarder, &mut self.exits, &mut self.spare);
        let (is_unread, mut all) = (self.is_unread, Passed::default());
        let received = self.uplinks.receive(&mut |number, frames| {
            if let Some(port) = exits.port(number) {
                port.counters.in_frames += frames.len() as u64;
                port.counters.in_bytes +=
                    frames.iter().map(|it| it.bytes.len() as u64).sum::<u64>();
            }
            let entered = frames.iter().map(|it| uplink::entered(number, it, longest));
            spare.decide(forwarder, entered.clone(), now_us);
            let mut sink = |frames: &[Frame<'_>]| sink(frames);
            let sink: Option<&mut Sink<'_>> = match is_unread {
                true => None,
                false => Some(&mut sink),
            };
            let passed = spare.give(forwarder, exits, entered, now_us, sink);
            all.frames += passed.frames;
            all.bytes += passed.bytes;
        })?;
        self.counters.seen += all.frames;
        Some(match received {
            Received::Frames(count) => all.received(count, is_unread),
            other => other,
        })
    }
}

impl Queue for Switch {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if !self.is_open {
            self.begin();
        }
        self.obey();
        // One call has the frames of one: those of links are one, those of each uplink's queue are another.
        if !self.uplinks.is_empty() {
            let sink = &mut |frames: &[Frame<'_>]| sink(frames);
            while let Some(received) = self.receive_uplink(sink) {
                if let Received::Frames(_) | Received::Passed { .. } = received {
                    self.tell_loops();
                    return Ok(received);
                }
            }
        }
        Ok(self.receive_links(sink))
    }

    fn may_pass(&mut self, is_unread: bool) {
        self.is_unread = is_unread;
    }

    fn arm(&mut self) -> Wake<'_> {
        if !self.ready.is_empty() {
            return Wake::NOW;
        }
        let due = [self.exits.next_us(), self.directs.next_us(&self.forwarder)];
        let arrives = due.into_iter().flatten().min();
        let arrives =
            arrives.map(|at_us| Duration::from_micros(at_us.saturating_sub(self.now_us())));
        let links = Some(self.exits.epoll().as_fd());
        if self.uplinks.is_empty() {
            return Wake {
                fds: [links, None],
                within: arrives,
            };
        }
        let uplinks = self.uplinks.arm();
        Wake {
            fds: [links, uplinks.fds[0]],
            within: [arrives, uplinks.within].into_iter().flatten().min(),
        }
    }

    fn woke(&mut self, _: Seen) {
        if !self.uplinks.is_empty() {
            self.uplinks.woke();
        }
    }

    fn counters(&mut self) -> QueueCounters {
        self.uplinks.count();
        self.counters
    }

    fn own_counters(&self) -> Vec<(String, u64)> {
        let mut named = self.forwarder.counters.named();
        named.extend(self.uplinks.named());
        named.push(("stations".into(), self.forwarder.table.len() as u64));
        named.push(("switch_ports".into(), self.forwarder.ports().len() as u64));
        named
    }

    fn state(&self) -> &'static str {
        "up"
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        Some(self)
    }
}

impl Transmitter for Switch {
    fn sends(&mut self, member: u16) {
        self.sent.sends(member);
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.transmit_offloaded(bytes, &Offload::default())
    }

    fn takes_offload(&self) -> bool {
        true
    }

    fn transmit_offloaded(&mut self, bytes: &[u8], offload: &Offload) -> Transmit {
        let longest = match offload.gso_type {
            gso::NONE => self.came.longest(),
            _ => MAX_SUPER,
        };
        if bytes.len() < HEADER || bytes.len() > longest {
            return Transmit::BadLength;
        }
        let fill = |place: &mut [u8]| {
            place.copy_from_slice(bytes);
            true
        };
        match self.sent.push(bytes.len(), *offload, fill) {
            true => Transmit::Taken,
            false => Transmit::Full,
        }
    }

    fn flush(&mut self, shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        if self.sent.is_empty() {
            return Flushed::default();
        }
        let count = self.sent.len() as u64;
        // The port that they come from may be there since just now.
        self.obey();
        let now_us = self.now_us();
        if let Some(port) = self.exits.port(self.sent.get(0).from) {
            port.counters.in_frames += count;
            let bytes = self.sent.iter().map(|it| it.bytes.len() as u64);
            port.counters.in_bytes += bytes.sum::<u64>();
        }
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        self.spare.decide(forwarder, self.sent.iter(), now_us);
        let sent = self.sent.iter();
        self.spare.give(forwarder, exits, sent, now_us, Some(shown));
        self.tell_loops();
        self.counters.seen += count;
        self.counters.shown += count;
        self.sent.clear();
        Flushed {
            sent: count,
            ..Flushed::default()
        }
    }
}

/// The event of the thread's own waker; no port has this number.
const WAKER: u64 = u64::MAX;
/// Frames that are taken in one turn, of all ports and of one.
const BATCH: usize = 128;
const EACH: usize = 64;
/// Events that are looked at in one turn.
const EVENTS: usize = 64;
/// Turns without a look at ports that seemed to have nothing.
const UNLOOKED: u32 = 4;
/// Stations that are told at once.
const MAX_TOLD: usize = 16_384;
/// Bytes of a frame that rings send, on average of a full turn: 1 MiB in all.
const SENT_EACH: usize = 4096;
/// Microseconds of a second.
const MILLION: u64 = 1_000_000;
/// Bytes of an Ethernet header.
pub(crate) const HEADER: usize = 14;
/// Bytes of a frame with an MTU of 9,216, with two tags.
const LONGEST: usize = 9216 + 14 + 8;
