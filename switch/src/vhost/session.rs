//! One front-end: what it says, and what its port is made of that.
//!
//! Whenever a message changes something, the whole [`Setup`] of the port is made anew and handed to the
//! thread that forwards, and the message is answered when that thread has it. So after an answer nothing
//! of before is used. A ring is served when all is known of it: memory, size, addresses, kick, and that
//! it is enabled; in which order a front-end says these is its affair.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::event;
use vnplug_os::memory::{Watch, of_peer};
use vnplug_ring::Region;

use super::call::Call;
use super::card::Card;
use super::link::{Order, Setup, Started, Wire};
use super::memory::{Allowance, Described, Memory, Slot};
use super::message::{self, Message, Read, Reader};
use super::payload::{DESCRIBED, announcement, describe, one_piece, ring_of, words};
use super::ring::{Addresses, Place};
use super::spec::{MAX_PAIRS, MAX_RINGS, MAX_SIZE, feature, protocol, request};

/// A front-end's connection.
pub(crate) struct Session {
    socket: PeerFd,
    closer: Closer,
    reader: Reader,
    wire: Wire,
    /// What the device says of itself.
    card: Card,
    /// It was told what the device offers, and said what it takes of it.
    is_told: bool,
    has_agreed: bool,
    features: u64,
    watch: Arc<Watch>,
    memory: Option<Arc<Memory>>,
    log: Option<Region>,
    rings: Vec<Ring>,
    /// For requests of ours; none is made yet.
    _channel: Option<PeerFd>,
    /// What the thread that forwards had before, until nobody has it.
    old: Vec<Arc<Memory>>,
}

#[derive(Default)]
struct Ring {
    /// 0: not said yet.
    size: u16,
    addresses: Option<Addresses>,
    kick: Option<PeerFd>,
    call: Option<Arc<Call>>,
    is_enabled: bool,
}

/// What comes of a request.
enum Done {
    /// What was asked is done.
    Yes,
    /// It is not, and why.
    No(String),
    /// This is the answer.
    Answer(Vec<u8>),
}

/// Whether to go on with a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// That was all for now.
    Nothing,
    /// There may be more.
    More,
    /// It was closed by the front-end.
    End,
}

impl Session {
    pub(crate) fn new(socket: PeerFd, wire: Wire, card: Card) -> Self {
        Self {
            closer: socket.closer().clone(),
            socket,
            reader: Reader::default(),
            wire,
            card,
            is_told: false,
            has_agreed: false,
            features: 0,
            watch: Arc::default(),
            memory: None,
            log: None,
            rings: (0..MAX_RINGS).map(|_| Ring::default()).collect(),
            _channel: None,
            old: Vec::new(),
        }
    }

    pub(crate) fn socket(&self) -> &PeerFd {
        &self.socket
    }

    /// Whether it knows what the device offers, and agreed to nothing.
    pub(crate) fn was_declined(&self) -> bool {
        self.is_told && !self.has_agreed
    }

    /// Hears one message. Never waits for the front-end. `complain` is told of what is not done.
    ///
    /// # Errors
    /// The connection is to be closed, and why.
    pub(crate) fn hear(&mut self, complain: &mut dyn FnMut(&str)) -> io::Result<Heard> {
        let message = match self.reader.read(&self.socket, &self.closer)? {
            Read::Message(message) => message,
            Read::Nothing => return Ok(Heard::Nothing),
            Read::End => return Ok(Heard::End),
        };
        let (what, needs_answer) = (message.request, message.needs_answer);
        let done = self.obey(message)?;
        if let Done::No(why) = &done {
            complain(&format!("request {what}: {why}"));
        }
        match done {
            Done::Answer(payload) => message::answer(&self.socket, what, &payload)?,
            Done::Yes | Done::No(_) if needs_answer => {
                let result = u64::from(matches!(done, Done::No(_)));
                message::answer(&self.socket, what, &result.to_le_bytes())?;
            }
            // It waits for an answer that there is none of.
            Done::No(_) if ANSWERED.contains(&what) => {
                let error = format!("request {what} cannot be answered");
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            Done::Yes | Done::No(_) => {}
        }
        Ok(Heard::More)
    }

    fn obey(&mut self, mut message: Message) -> io::Result<Done> {
        let number = message.number();
        let pair = message.pair();
        let malformed = |payload: &Message| {
            Ok(Done::No(format!(
                "{} bytes make no sense",
                payload.payload.len()
            )))
        };
        match message.request {
            request::GET_FEATURES => {
                self.is_told = true;
                Ok(Done::number(feature::OFFERED & !self.card.lacks))
            }
            request::GET_PROTOCOL_FEATURES => Ok(Done::number(protocol::OFFERED)),
            request::GET_QUEUE_NUM => Ok(Done::number(2 * MAX_PAIRS as u64)),
            request::GET_MAX_MEM_SLOTS => Ok(Done::number(self.card.memory.pieces as u64)),
            request::SET_OWNER | request::SET_CONFIG => Ok(Done::Yes),
            // Our answer to each request depends on the request alone.
            request::SET_PROTOCOL_FEATURES => match number {
                Some(bits) if bits & !protocol::OFFERED == 0 => Ok(Done::Yes),
                Some(bits) => Ok(Done::No(format!("{bits:#x} has what was not offered"))),
                None => malformed(&message),
            },
            request::SET_FEATURES => match number {
                Some(bits) => self.set_features(bits),
                None => malformed(&message),
            },
            request::SET_MEM_TABLE => self.set_table(message),
            request::ADD_MEM_REG => self.add_slot(message),
            request::REM_MEM_REG => self.remove_slot(&message),
            request::SET_LOG_BASE => self.set_log(message),
            request::SET_LOG_FD | request::SET_VRING_ERR => Ok(Done::Yes),
            request::SET_VRING_NUM => match pair {
                Some((at, size)) => self.set_size(at, size),
                None => malformed(&message),
            },
            request::SET_VRING_ADDR => match message.exactly() {
                Some(bytes) => self.set_addresses(&bytes),
                None => malformed(&message),
            },
            // Where a ring goes on is in the guest's memory.
            request::SET_VRING_BASE => match pair {
                Some((at, _)) if (at as usize) < MAX_RINGS => Ok(Done::Yes),
                _ => malformed(&message),
            },
            request::GET_VRING_BASE => match pair {
                Some((at, _)) => self.stop(at),
                None => malformed(&message),
            },
            request::SET_VRING_KICK => self.set_kick(message),
            request::SET_VRING_CALL => self.set_call(message),
            request::SET_VRING_ENABLE => match pair {
                Some((at, enable)) => match self.rings.get_mut(at as usize) {
                    Some(ring) => {
                        ring.is_enabled = enable != 0;
                        self.publish().map(|_| Done::Yes)
                    }
                    None => Ok(no_ring(at)),
                },
                None => malformed(&message),
            },
            request::RESET_OWNER | request::RESET_DEVICE => {
                for at in 0..self.rings.len() {
                    self.forget(at);
                    self.rings[at].is_enabled = false;
                }
                self.publish().map(|_| Done::Yes)
            }
            request::SEND_RARP => match number {
                Some(mac) => {
                    let [a, b, c, d, e, f, ..] = mac.to_le_bytes();
                    self.wire
                        .send(Order::Announce(announcement([a, b, c, d, e, f])));
                    Ok(Done::Yes)
                }
                None => malformed(&message),
            },
            request::NET_SET_MTU => match number {
                Some(mtu) if (68..=self.card.mtu() as u64).contains(&mtu) => Ok(Done::Yes),
                Some(mtu) => Ok(Done::No(format!(
                    "MTU {mtu} is none up to {} (option longest)",
                    self.card.mtu()
                ))),
                None => malformed(&message),
            },
            request::SET_BACKEND_REQ_FD => {
                self._channel = message.only_fd();
                Ok(Done::Yes)
            }
            request::GET_CONFIG => Ok(self.config(&message.payload)),
            other => Ok(Done::No(format!("{other} is not known"))),
        }
    }

    fn set_features(&mut self, bits: u64) -> io::Result<Done> {
        if bits & !feature::OFFERED != 0 {
            return Ok(Done::No(format!("{bits:#x} has what was not offered")));
        }
        let changed = bits ^ self.features;
        let runs = self.rings.iter().any(Ring::is_served);
        if runs && changed & !feature::LOG_ALL != 0 {
            return Ok(Done::No("rings run".into()));
        }
        self.features = bits;
        self.has_agreed = true;
        if bits & feature::PROTOCOL == 0 {
            // Nobody will enable them.
            self.rings.iter_mut().for_each(|it| it.is_enabled = true);
        }
        self.remember(self.slots())
    }

    fn slots(&self) -> Vec<Slot> {
        let memory = self.memory.as_ref();
        memory.map_or(Vec::new(), |it| it.slots().to_vec())
    }

    /// The memory has these pieces from now on.
    fn remember(&mut self, slots: Vec<Slot>) -> io::Result<Done> {
        let log = self.log.clone();
        let log = log.filter(|_| self.features & feature::LOG_ALL != 0);
        let memory = match Memory::new(slots, Arc::clone(&self.watch), log) {
            Ok(memory) => memory,
            Err(error) => return Ok(Done::No(error.to_string())),
        };
        let old = self.memory.replace(Arc::new(memory));
        self.old.extend(old);
        self.publish().map(|_| Done::Yes)
    }

    fn set_table(&mut self, message: Message) -> io::Result<Done> {
        let Some((&[a, b, c, d, ..], rest)) = message.payload.split_first_chunk::<8>() else {
            return Ok(Done::No("a table without a head".into()));
        };
        let count = u32::from_le_bytes([a, b, c, d]) as usize;
        let (pieces, _) = rest.as_chunks::<DESCRIBED>();
        // User-mode Linux always sends two, and says how many of them are any.
        let Some(pieces) = pieces.get(..count).filter(|_| count == message.fds.len()) else {
            let (bytes, fds) = (rest.len(), message.fds.len());
            let what = format!("{count} pieces in {bytes} bytes with {fds} descriptors");
            return Ok(Done::No(what));
        };
        self.map(Vec::new(), pieces.iter().map(describe).zip(&message.fds))
    }

    /// The memory has these pieces and new ones from now on.
    fn map<'a>(
        &mut self,
        mut slots: Vec<Slot>,
        new: impl Iterator<Item = (Described, &'a PeerFd)>,
    ) -> io::Result<Done> {
        let Allowance {
            pieces: most,
            bytes: most_bytes,
            stranger,
        } = self.card.memory;
        let mut bytes: u64 = slots.iter().map(Slot::len).sum();
        for (piece, fd) in new {
            bytes = bytes.saturating_add(piece.len);
            if slots.len() >= most || bytes > most_bytes {
                let what = format!("more memory than {most} pieces or {most_bytes} bytes");
                return Ok(Done::No(what));
            }
            match Slot::map(piece, fd, &self.watch, stranger) {
                Ok(slot) => slots.push(slot),
                Err(error) => return Ok(Done::No(error.to_string())),
            }
        }
        self.remember(slots)
    }

    fn add_slot(&mut self, mut message: Message) -> io::Result<Done> {
        let (Some((_, piece)), Some(fd)) = (one_piece(&message), message.only_fd()) else {
            return Ok(Done::No("not a piece with one descriptor".into()));
        };
        let mut slots = self.slots();
        // QEMU 7.2 tells of each piece once for each pair of queues.
        slots.retain(|slot| !slot.is(&piece));
        self.map(slots, std::iter::once((piece, &fd)))
    }

    fn remove_slot(&mut self, message: &Message) -> io::Result<Done> {
        let Some((_, piece)) = one_piece(message) else {
            return Ok(Done::No("not a piece".into()));
        };
        let mut slots = self.slots();
        let before = slots.len();
        slots.retain(|slot| !slot.is(&piece));
        match slots.len() < before {
            true => self.remember(slots),
            // The same for another pair of queues: it has gone with the first one.
            false => Ok(Done::Yes),
        }
    }

    fn set_log(&mut self, mut message: Message) -> io::Result<Done> {
        let (Some(bytes), Some(fd)) = (message.exactly::<16>(), message.only_fd()) else {
            return Ok(Done::No("not a log with one descriptor".into()));
        };
        let [len, offset] = words(&bytes);
        // NB: not compared with the memory: QEMU hands over a longer log before it adds memory (`vhost_commit`).
        if len > LONGEST_LOG {
            return Ok(Done::No(format!(
                "a log of {len} bytes, more than {LONGEST_LOG}"
            )));
        }
        let stranger = self.card.memory.stranger;
        self.log = match of_peer(&fd, offset, len, &self.watch, stranger) {
            Ok(log) => Some(log),
            Err(error) => return Ok(Done::No(error.to_string())),
        };
        match self.remember(self.slots())? {
            // It is answered in any case, and with nothing.
            Done::Yes => Ok(Done::Answer(Vec::new())),
            other => Ok(other),
        }
    }

    fn set_size(&mut self, at: u32, size: u32) -> io::Result<Done> {
        let Some(ring) = self.rings.get_mut(at as usize) else {
            return Ok(no_ring(at));
        };
        // Checked before it becomes shorter.
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Ok(Done::No(format!("a ring of {size} entries")));
        }
        ring.size = size as u16;
        self.publish().map(|_| Done::Yes)
    }

    fn set_addresses(&mut self, bytes: &[u8; 40]) -> io::Result<Done> {
        let [head, desc, used, avail, log] = words(bytes);
        let (at, flags) = (head as u32, (head >> 32) as u32);
        let Some(ring) = self.rings.get_mut(at as usize) else {
            return Ok(no_ring(at));
        };
        let addresses = Addresses {
            desc,
            used,
            avail,
            log: (flags & LOGGED != 0).then_some(log),
        };
        if ring.size > 0
            && let Some(memory) = &self.memory
            && Place::find(memory, ring.size, &addresses).is_none()
        {
            return Ok(Done::No(format!(
                "ring {at} is not in the memory: {addresses:x?}"
            )));
        }
        ring.addresses = Some(addresses);
        self.publish().map(|_| Done::Yes)
    }

    fn set_kick(&mut self, mut message: Message) -> io::Result<Done> {
        let (at, fd) = match ring_of(&mut message) {
            Ok(found) => found,
            Err(why) => return Ok(Done::No(why)),
        };
        let Some(kick) = fd else {
            return Ok(Done::No("a ring without a kick is not served".into()));
        };
        if !event::is_eventfd(&kick) {
            return Ok(Done::No("the kick is no eventfd".into()));
        }
        if let Err(error) = self.wire.watch(&kick) {
            return Ok(Done::No(error.to_string()));
        }
        if let Some(before) = self.rings[at].kick.replace(kick) {
            self.wire.forget(&before);
        }
        self.publish().map(|_| Done::Yes)
    }

    fn set_call(&mut self, mut message: Message) -> io::Result<Done> {
        let (at, fd) = match ring_of(&mut message) {
            Ok(found) => found,
            Err(why) => return Ok(Done::No(why)),
        };
        let call = fd.map(|fd| self.wire.call(fd));
        if let Some(None) = call {
            return Ok(Done::No(
                "the call is no eventfd and no stream socket of the host".into(),
            ));
        }
        self.rings[at].call = call.flatten();
        self.publish().map(|_| Done::Yes)
    }

    /// Stops a ring, and says where it is.
    fn stop(&mut self, at: u32) -> io::Result<Done> {
        if at as usize >= self.rings.len() {
            return Ok(no_ring(at));
        }
        // Of one that is not served the guest's memory says it.
        let ring = &self.rings[at as usize];
        let place = self.memory.as_ref().zip(ring.addresses.as_ref());
        let place = place.and_then(|(memory, at)| Place::find(memory, ring.size, at));
        self.forget(at as usize);
        let indices = self.publish()?;
        let index = indices.get(at as usize).copied().flatten();
        let index = index.or(place.map(|place| place.index())).unwrap_or(0);
        let mut answer = at.to_le_bytes().to_vec();
        answer.extend(u32::from(index).to_le_bytes());
        Ok(Done::Answer(answer))
    }

    /// Forgets where a ring is and what it is told by.
    fn forget(&mut self, at: usize) {
        let ring = &mut self.rings[at];
        (ring.addresses, ring.call) = (None, None);
        if let Some(kick) = ring.kick.take() {
            self.wire.forget(&kick);
        }
    }

    /// Hands the whole setup to the thread that forwards, which has it when this returns: the indices of
    /// the rings before.
    fn publish(&mut self) -> io::Result<Vec<Option<u16>>> {
        let setup = Box::new(self.setup());
        let (done, answer) = channel();
        if !self.wire.send(Order::Setup(setup, done)) {
            return Err(io::Error::other("its port is closed"));
        }
        for _ in 0..TRIES {
            match answer.recv_timeout(TRY) {
                Ok(done) => return Ok(done.indices),
                // Perhaps another guest holds it up.
                Err(RecvTimeoutError::Timeout) => self.wire.calls().unblock(),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("its port is closed"));
                }
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn setup(&self) -> Setup {
        let memory = self.memory.as_ref();
        let start = |ring: &Ring| {
            let place = Place::find(memory?, ring.size, ring.addresses.as_ref()?)?;
            ring.is_served().then(|| Started {
                place,
                call: ring.call.clone(),
            })
        };
        let mut rings: Vec<_> = self.rings.iter().map(start).collect();
        let used = rings
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |it| it + 1);
        rings.truncate(used);
        // The last one, which has no other one beside it.
        let control = used
            .checked_sub(1)
            .filter(|last| last % 2 == 0 && *last > 0);
        Setup {
            features: self.features,
            memory: memory.map(Arc::clone),
            rings,
            control: control.filter(|_| self.features & feature::CTRL_VQ != 0),
        }
    }

    /// The answer to GET_CONFIG: as many bytes as were asked for.
    fn config(&self, payload: &[u8]) -> Done {
        let Some((head, asked)) = payload.split_first_chunk::<12>() else {
            return Done::No("no configuration is asked for".into());
        };
        let [a, b, c, d, ..] = *head;
        let offset = u32::from_le_bytes([a, b, c, d]) as usize;
        let space = self.card.config();
        let mut answer = head.to_vec();
        let bytes = (0..asked.len()).map(|at| offset.checked_add(at).and_then(|at| space.get(at)));
        answer.extend(bytes.map(|byte| byte.copied().unwrap_or(0)));
        Done::Answer(answer)
    }

    /// Memory that nobody has any more, to be unmapped aside.
    pub(crate) fn unused(&mut self) -> Vec<Arc<Memory>> {
        let is_unused = |memory: &mut Arc<Memory>| Arc::get_mut(memory).is_some();
        self.old.extract_if(.., is_unused).collect()
    }

    /// Whether the guest made a call block.
    pub(crate) fn has_blocked(&self) -> bool {
        let calls = self.rings.iter().filter_map(|ring| ring.call.as_ref());
        calls.into_iter().any(|call| call.was_full())
    }

    /// What the thread that forwards may have: to be kept until it has not. The kicks are forgotten.
    pub(crate) fn end(mut self) -> Remains {
        let calls = self.rings.iter().filter_map(|ring| ring.call.clone());
        let calls = calls.collect();
        (0..MAX_RINGS).for_each(|at| self.forget(at));
        let mut memories = std::mem::take(&mut self.old);
        memories.extend(self.memory.take());
        Remains { memories, calls }
    }
}

/// What is left of a session.
pub(crate) struct Remains {
    memories: Vec<Arc<Memory>>,
    calls: Vec<Arc<Call>>,
}

impl Remains {
    /// Whether nobody has any of it.
    pub(crate) fn is_unused(&self) -> bool {
        let memories = self.memories.iter().all(|it| Arc::strong_count(it) == 1);
        memories && self.calls.iter().all(|it| Arc::strong_count(it) == 1)
    }
}

impl Ring {
    fn is_served(&self) -> bool {
        self.size > 0 && self.addresses.is_some() && self.kick.is_some() && self.is_enabled
    }
}

impl Done {
    fn number(number: u64) -> Self {
        Self::Answer(number.to_le_bytes().to_vec())
    }
}

fn no_ring(at: u32) -> Done {
    Done::No(format!("there is no ring {at}"))
}

/// Requests that have an answer of their own.
const ANSWERED: [u32; 7] = [
    request::GET_FEATURES,
    request::GET_PROTOCOL_FEATURES,
    request::GET_QUEUE_NUM,
    request::GET_VRING_BASE,
    request::GET_CONFIG,
    request::GET_MAX_MEM_SLOTS,
    request::SET_LOG_BASE,
];
/// Bytes of a log: a bit for each page of 4 KiB below the guest's address 2^46; no guest has more memory.
const LONGEST_LOG: u64 = 1 << (46 - 12 - 3);
/// In SET_VRING_ADDR: writes to the used ring are logged.
const LOGGED: u32 = 1;
/// How long the thread that forwards may take: how often it is looked at, and how long each time.
const TRIES: u32 = 100;
const TRY: Duration = Duration::from_millis(20);
