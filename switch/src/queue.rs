//! The switch as a source: a turn takes frames of the ports that have some, and forwards them.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vnplug_frame::offload::{self, Pieces};
use vnplug_frame::{Frame, MAX_BATCH, recycle, vlan_of};
use vnplug_os::datagrams::{Inbox, Rest};
use vnplug_os::peer_log;
use vnplug_path::source::{
    Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};

use vnplug_ring::layout::flags;
use vnplug_ring::offload::{Offload, gso};

use crate::control::{self, Change, Inlet, Told};
use crate::forward::{Counters, Forwarder, Number};
use crate::roster::{Roster, Switchboard};
use crate::table::Limits;
use crate::vde::door::{Door, Open};
use crate::vde::link::Link;

/// What a switch is to be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Its name.
    pub name: String,
    /// How many stations it knows, and for how long.
    pub limits: Limits,
    /// Every frame is for all.
    pub is_hub: bool,
    /// Bytes of the longest frame, Ethernet header included, FCS excluded.
    pub longest: usize,
    /// Ports in all, and of one user that is neither root nor the daemon's.
    pub ports: (usize, usize),
    /// Where programs of VDE come in.
    pub vde: Option<VdeConfig>,
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
        Self {
            name: name.into(),
            limits: Limits::default(),
            is_hub: false,
            longest: LONGEST,
            ports: (1024, 256),
            vde: None,
        }
    }
}

/// What went through one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PortCounters {
    /// Frames that it sent.
    pub(crate) in_frames: u64,
    /// Their bytes.
    pub(crate) in_bytes: u64,
    /// Frames that it was given.
    pub(crate) out_frames: u64,
    /// Their bytes.
    pub(crate) out_bytes: u64,
    /// Frames that it could not be given.
    pub(crate) out_dropped: u64,
}

/// A switch, forwarding.
pub struct Switch {
    name: String,
    forwarder: Forwarder,
    exits: Exits,
    inlet: Inlet,
    door: Door,
    /// Ports that may have frames.
    ready: VecDeque<Number>,
    /// Ports to be closed when their last frames are forwarded, and why.
    lost: Vec<(Number, String)>,
    /// Turns since the last look at all of them.
    unlooked: u32,
    inbox: Inbox,
    /// Whose the frames in the inbox are.
    origins: Vec<Number>,
    /// What the frames of a batch are due to.
    ranges: Vec<Range<usize>>,
    frames: Vec<Frame<'static>>,
    sent: Sent,
    longest: usize,
    started: Instant,
    counters: QueueCounters,
}

/// The ports that are not rings.
struct Exits {
    epoll: OwnedFd,
    ports: Vec<Option<Port>>,
    /// Those that have something to be sent.
    touched: Vec<Number>,
    /// What super-frames of the batch became.
    pieces: Pieces,
}

struct Port {
    /// None: its frames go through rings, which the fanout fills.
    link: Option<Link>,
    is_ready: bool,
    /// It is told when the client reads.
    is_watched: bool,
    counters: PortCounters,
    /// What it is to be given of the batch.
    todo: Vec<Item>,
}

/// A frame of the batch, or a packet that one became.
#[derive(Clone, Copy)]
struct Item {
    place: u32,
    piece: Option<u32>,
}

/// A frame that enters.
struct Entered<'a> {
    from: Number,
    bytes: &'a [u8],
    /// There were more bytes.
    is_long: bool,
    /// What is left to be done with it.
    offload: Option<&'a Offload>,
}

/// Frames that come through a ring.
#[derive(Default)]
struct Sent {
    /// Whose they are.
    from: Number,
    bytes: Vec<u8>,
    ends: Vec<usize>,
    offloads: Vec<Offload>,
}

impl Switch {
    /// Makes the switch and its entrances; they are served when the source is.
    ///
    /// # Errors
    /// [`SourceError`] if an entrance cannot be made.
    pub fn open(config: SwitchConfig) -> Result<(Box<dyn Queue>, Switchboard), SourceError> {
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
        let roster = Roster::new(config.ports);
        let vde = config.vde.map(|vde| Open::new(&name, vde, &roster));
        let vde = vde.transpose().map_err(failed("its VDE entrance"))?;
        let mut forwarder = Forwarder::new(config.limits);
        forwarder.is_hub = config.is_hub;
        let board = Switchboard {
            roster,
            line: line.clone(),
        };
        let switch = Self {
            door: Door::new(vde, line),
            name,
            forwarder,
            exits: Exits {
                epoll,
                ports: Vec::new(),
                touched: Vec::new(),
                pieces: Pieces::default(),
            },
            inlet,
            ready: VecDeque::new(),
            lost: Vec::new(),
            unlooked: 0,
            inbox: Inbox::new(BATCH, config.longest),
            origins: Vec::with_capacity(BATCH),
            ranges: Vec::with_capacity(MAX_BATCH),
            frames: Vec::with_capacity(MAX_BATCH),
            sent: Sent::default(),
            longest: config.longest,
            started: Instant::now(),
            counters: QueueCounters::default(),
        };
        Ok((Box::new(switch), board))
    }

    fn now_s(&self) -> u32 {
        self.started.elapsed().as_secs() as u32
    }

    /// Does what other threads ask.
    #[inline]
    fn obey(&mut self) {
        if self.inlet.has_news() {
            while let Some(change) = self.inlet.take() {
                self.change(change);
            }
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
        let found = epoll::wait(&self.exits.epoll, &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..found] {
            let (number, flags) = (event.data.u64(), event.flags);
            if number == WAKER {
                continue;
            }
            let number = number as Number;
            let Some(port) = self.exits.port(number) else {
                continue;
            };
            if flags.contains(EventFlags::OUT)
                && port.is_watched
                && let Some(link) = &mut port.link
            {
                let dropped = link.go_on();
                port.counters.out_dropped += dropped;
                port.counters.out_frames -= dropped;
                self.forwarder.counters.enqueued -= dropped;
                self.forwarder.counters.dropped_gone += dropped;
                self.exits.watch(number);
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
                self.exits.put(number, None);
                self.forwarder.add(number);
            }
            Change::Add(number, link) => {
                if let Err(error) = self.exits.add(number, link) {
                    log::error!(target: "switch", "{}: port {number}: {error}", self.name);
                    self.door.lose(number);
                    return;
                }
                self.forwarder.add(number);
            }
            Change::Remove(number) => self.remove(number),
            Change::Hub(is_hub) => self.forwarder.is_hub = is_hub,
            Change::Age(age_s) => self.forwarder.table.set_age(age_s),
            Change::Hold(hold_s) => self.forwarder.table.set_hold(hold_s),
            Change::Tell(reply) => {
                let table = &self.forwarder.table;
                let ports = (0..).zip(&self.exits.ports);
                let ports = ports.filter_map(|(at, port)| Some((at, port.as_ref()?.counters)));
                let told = Told {
                    counters: self.forwarder.counters,
                    ports: ports.collect(),
                    stations: table.entries(self.now_s()).take(MAX_TOLD).collect(),
                    limits: table.limits(),
                    is_hub: self.forwarder.is_hub,
                };
                // Nobody waits any more.
                let _ = reply.send(told);
            }
        }
    }

    fn remove(&mut self, number: Number) {
        self.forwarder.remove(number);
        self.exits.remove(number);
        self.ready.retain(|ready| *ready != number);
    }

    /// Takes frames of the ports that have some, each a part of the batch.
    fn take(&mut self) {
        self.inbox.clear();
        self.origins.clear();
        for _ in 0..self.ready.len() {
            if self.inbox.room() == 0 {
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
            let first = self.inbox.len();
            let rest = link.receive(&mut self.inbox, EACH);
            for place in first..self.inbox.len() {
                port.counters.in_frames += 1;
                port.counters.in_bytes += self.inbox.get(place).0.len() as u64;
            }
            self.origins.resize(self.inbox.len(), number);
            match rest {
                Ok(Rest::More) => self.ready.push_back(number),
                Ok(Rest::Nothing) => port.is_ready = false,
                Ok(Rest::Rights) => self.lost.push((number, "it sent descriptors".into())),
                Err(error) => self.lost.push((number, error.to_string())),
            }
        }
    }

    /// Closes ports that cannot be served any more. NB: not before their frames are forwarded, from which
    /// the switch learns where stations are: nobody is to be found at a port that is gone.
    fn close_lost(&mut self) {
        while let Some((number, why)) = self.lost.pop() {
            peer_log!(
                log::Level::Warn,
                "switch",
                "{}: port {number} is closed: {why}",
                self.name
            );
            self.remove(number);
            self.door.lose(number);
        }
    }
}

impl Queue for Switch {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        self.door.begin();
        self.obey();
        self.look();
        if self.ready.is_empty() {
            return Ok(Received::Nothing);
        }
        self.take();
        let count = self.inbox.len();
        if count == 0 {
            self.close_lost();
            return Ok(Received::Nothing);
        }
        let now_s = self.now_s();
        let (inbox, origins) = (&self.inbox, &self.origins);
        let entered = |place: usize| {
            let (bytes, is_long) = inbox.get(place);
            Entered {
                from: origins[place],
                bytes,
                is_long,
                offload: None,
            }
        };
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        forward(forwarder, exits, &mut self.ranges, count, entered, now_s);
        let mut frames = recycle(std::mem::take(&mut self.frames));
        show(&mut frames, &self.forwarder, &self.ranges, entered);
        self.counters.seen += frames.len() as u64;
        if !frames.is_empty() {
            sink(&frames);
        }
        self.frames = recycle(frames);
        self.close_lost();
        Ok(Received::Frames(count))
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.ready.is_empty() {
            true => Wake {
                fds: [Some(self.exits.epoll.as_fd()), None],
                within: None,
            },
            false => Wake::NOW,
        }
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        self.counters
    }

    fn own_counters(&self) -> Vec<(String, u64)> {
        let mut named = self.forwarder.counters.named();
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
        self.sent.from = member;
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.take_sent(bytes, &Offload::default(), self.longest)
    }

    fn takes_offload(&self) -> bool {
        true
    }

    fn transmit_offloaded(&mut self, bytes: &[u8], offload: &Offload) -> Transmit {
        let longest = match offload.gso_type {
            gso::NONE => self.longest,
            _ => MAX_SUPER,
        };
        self.take_sent(bytes, offload, longest)
    }

    fn flush(&mut self, shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let count = self.sent.ends.len();
        if count == 0 {
            return Flushed::default();
        }
        // The port that they come from may be there since just now.
        self.obey();
        let now_s = self.now_s();
        let sent = &self.sent;
        if let Some(port) = self.exits.port(sent.from) {
            port.counters.in_frames += count as u64;
            port.counters.in_bytes += sent.bytes.len() as u64;
        }
        let entered = |place: usize| Entered {
            from: sent.from,
            bytes: sent.get(place),
            is_long: false,
            offload: Some(&sent.offloads[place]).filter(|it| it.is_due()),
        };
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        forward(forwarder, exits, &mut self.ranges, count, entered, now_s);
        let mut frames = recycle(std::mem::take(&mut self.frames));
        show(&mut frames, &self.forwarder, &self.ranges, entered);
        self.counters.seen += count as u64;
        self.counters.shown += count as u64;
        shown(&frames);
        self.frames = recycle(frames);
        self.sent.bytes.clear();
        self.sent.ends.clear();
        self.sent.offloads.clear();
        Flushed {
            sent: count as u64,
            ..Flushed::default()
        }
    }
}

impl Switch {
    fn take_sent(&mut self, bytes: &[u8], offload: &Offload, longest: usize) -> Transmit {
        if bytes.len() < HEADER || bytes.len() > longest {
            return Transmit::BadLength;
        }
        let sent = &mut self.sent;
        if sent.ends.len() == MAX_BATCH || sent.bytes.len() + bytes.len() > MAX_SENT {
            return Transmit::Full;
        }
        sent.bytes.extend_from_slice(bytes);
        sent.ends.push(sent.bytes.len());
        sent.offloads.push(*offload);
        Transmit::Taken
    }
}

impl Sent {
    fn get(&self, place: usize) -> &[u8] {
        let begin = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[begin..self.ends[place]]
    }
}

/// Decides for each frame of a batch where it goes, and gives it to those of these ports that have no
/// rings.
fn forward<'a>(
    forwarder: &mut Forwarder,
    exits: &mut Exits,
    ranges: &mut Vec<Range<usize>>,
    count: usize,
    entered: impl Fn(usize) -> Entered<'a> + Copy,
    now_s: u32,
) {
    forwarder.begin(now_s);
    exits.pieces.clear();
    ranges.clear();
    for place in 0..count {
        let it = entered(place);
        let to = forwarder.decide(it.from, it.bytes, it.is_long, now_s);
        ranges.push(to.clone());
        let noted = exits.note(place as u32, &it, forwarder.due(to));
        forwarder.counters.rings += noted.rings;
        forwarder.counters.cut += noted.cut;
        forwarder.counters.due += noted.cut;
    }
    while let Some(number) = exits.touched.pop() {
        exits.send(number, entered, &mut forwarder.counters);
    }
}

/// Frames of a batch as captures and ports with rings see them, received just now; none that is no frame.
fn show<'a>(
    frames: &mut Vec<Frame<'a>>,
    forwarder: &'a Forwarder,
    ranges: &[Range<usize>],
    entered: impl Fn(usize) -> Entered<'a>,
) {
    let ts_ns = now_ns();
    for (place, to) in ranges.iter().enumerate() {
        let it = entered(place);
        if it.is_long || it.bytes.len() < HEADER {
            continue;
        }
        let (tag, vlan_tci) = vlan_of(it.bytes);
        let left = match it.offload {
            Some(_) => flags::OFFLOAD | flags::CSUM_NOT_READY,
            None => 0,
        };
        frames.push(Frame {
            bytes: it.bytes,
            wire_len: it.bytes.len() as u32,
            ts_ns,
            flags: tag | left,
            vlan_tci,
            offload: it.offload.copied().unwrap_or_default(),
            due: forwarder.due(to.clone()),
        });
    }
}

/// What was noted of a frame.
#[derive(Default)]
struct Noted {
    /// Ports with rings that it is due to.
    rings: u64,
    /// Packets that it became for the other ports, beyond one for each.
    cut: u64,
}

impl Exits {
    fn port(&mut self, number: Number) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(number))?.as_mut()
    }

    fn add(&mut self, number: Number, link: Link) -> std::io::Result<()> {
        self.remove(number);
        let data = EventData::new_u64(u64::from(number));
        epoll::add(&self.epoll, &link, data, EventFlags::IN)?;
        self.put(number, Some(link));
        Ok(())
    }

    fn put(&mut self, number: Number, link: Option<Link>) {
        let at = usize::from(number);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        self.ports[at] = Some(Port {
            link,
            is_ready: false,
            is_watched: false,
            counters: PortCounters::default(),
            todo: Vec::new(),
        });
    }

    fn remove(&mut self, number: Number) {
        let place = self.ports.get_mut(usize::from(number));
        if let Some(link) = place.and_then(Option::take).and_then(|port| port.link) {
            // NB: before it is closed, which happens aside.
            let _ = epoll::delete(&self.epoll, &link);
        }
    }

    /// A frame of the batch is due to these ports.
    #[inline]
    fn note(&mut self, place: u32, it: &Entered<'_>, due: &[Number]) -> Noted {
        let mut noted = Noted::default();
        // What it becomes for ports that want the packets of the wire.
        let mut made = None;
        for &number in due {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            if port.link.is_none() {
                port.counters.out_frames += 1;
                port.counters.out_bytes += it.bytes.len() as u64;
                noted.rings += 1;
                continue;
            }
            if port.todo.is_empty() {
                self.touched.push(number);
            }
            let Some(offload) = it.offload else {
                port.todo.push(Item { place, piece: None });
                continue;
            };
            let pieces = &mut self.pieces;
            let made = made.get_or_insert_with(|| pieces_of(pieces, it.bytes, offload));
            noted.cut += made.len() as u64 - 1;
            let items = made.clone().map(|piece| Item {
                place,
                piece: Some(piece as u32),
            });
            port.todo.extend(items);
        }
        noted
    }

    /// Gives a port what was noted for it.
    fn send<'a>(
        &mut self,
        number: Number,
        entered: impl Fn(usize) -> Entered<'a> + Copy,
        counters: &mut Counters,
    ) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        let Some(link) = &mut port.link else {
            return;
        };
        let pieces = &self.pieces;
        let parts = |item: &Item| {
            let bytes = entered(item.place as usize).bytes;
            match item.piece {
                None => (bytes, &[][..]),
                Some(piece) => {
                    let piece = pieces.get(piece as usize, bytes);
                    (piece.head, piece.body)
                }
            }
        };
        let given = link.send(port.todo.iter().map(parts));
        port.todo.clear();
        counters.enqueued += given.enqueued;
        counters.dropped_full += given.full;
        counters.dropped_gone += given.gone;
        port.counters.out_frames += given.enqueued;
        port.counters.out_bytes += given.bytes;
        port.counters.out_dropped += given.full + given.gone;
        self.watch(number);
    }

    /// Waits for a client to read if frames wait for it, and else does not.
    #[inline]
    fn watch(&mut self, number: Number) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        let Some(link) = &port.link else {
            return;
        };
        if link.is_waiting() != port.is_watched {
            port.is_watched = !port.is_watched;
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, port.is_watched);
            let data = EventData::new_u64(u64::from(number));
            // It is in there, so the only error is a lack of memory: then it waits for the next frame.
            let _ = epoll::modify(&self.epoll, link, data, flags);
        }
    }
}

/// What a frame becomes that was left to a NIC. A lie, which is not expected here, leaves it as it is.
fn pieces_of(pieces: &mut Pieces, frame: &[u8], offload: &Offload) -> Range<usize> {
    let len = frame.len() as u32;
    match offload::work(frame, len, offload) {
        Ok(Some(work)) => pieces.make(frame, len, &work),
        _ => pieces.keep(frame, len),
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
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
/// Bytes that the host's programs send in one turn.
const MAX_SENT: usize = 1 << 20;
/// Bytes of the longest super-frame: 64 KiB, Ethernet header and tags.
const MAX_SUPER: usize = 66 << 10;
/// Bytes of an Ethernet header.
const HEADER: usize = 14;
/// Bytes of a frame with an MTU of 9,216, with two tags.
const LONGEST: usize = 9216 + 14 + 8;
