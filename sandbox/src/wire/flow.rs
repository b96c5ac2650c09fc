//! One connection of a TLS client that must name its server: what it said, what of that its peer has, and whether it may say
//! more.
//!
//! The kernel sends once more what was lost, and takes it from where it lies: a file that was sent (`sendfile`) may have other
//! bytes then. So what was judged is kept until the peer has acknowledged it, and nothing else passes in its place. Nobody but
//! the peer knows the numbers by which it acknowledges.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::hello::{Client, Hello, Server};
use crate::name::Name;

/// A segment of TCP, as far as it counts here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    pub(super) number: u32,
    pub(super) acknowledged: u32,
    pub(super) flags: u8,
    pub(super) options: &'a [u8],
    pub(super) data: &'a [u8],
}

/// What becomes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// It goes on.
    Passes,
    /// It does not, now: it may be said again, or it was refused before.
    Waits,
    /// It does not: this server may not be named, or it cannot be understood whom it means.
    Refused(Option<Name>),
}

#[derive(Debug)]
pub(super) struct Flow {
    /// The number that it began with.
    number: u32,
    /// What was judged, and the peer is not known to have.
    said: Vec<u8>,
    /// The number of the byte behind that.
    next: u32,
    /// The number behind everything that was sent.
    last: u32,
    /// The number of the next byte of the peer's; `None`: it has not answered.
    theirs: Option<u32>,
    client: Client,
    server: Server,
    /// When it was first seen, among the calls that make connections.
    mark: u64,
    /// The names by which it was allowed; `None`: its call has not said so yet.
    names: Option<Arc<[Name]>>,
    stage: Stage,
    /// The program's kernel has taken the answer: it does not begin once more.
    stands: bool,
    /// The program says nothing more.
    ended: bool,
    /// Somebody who knows its numbers has broken it off, and the program did not go on.
    broken: bool,
    began: Instant,
    /// When a segment of it was seen.
    seen: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A name can still be said.
    Reading,
    /// It may say what it likes.
    Free,
    /// It named a server that it may not reach.
    Refused,
}

/// Both ends of a connection: the peer, and the own address and port. Several own addresses have each port.
pub(super) type Ends = (SocketAddr, SocketAddr);

/// Connections.
#[derive(Debug, Default)]
pub(super) struct Flows {
    flows: HashMap<Ends, Flow>,
    /// Bytes that are kept of all of them.
    kept: usize,
}

impl<'a> Segment<'a> {
    pub(super) fn of(body: &'a [u8]) -> Option<Self> {
        let head = body.first_chunk::<20>()?;
        let (whole, data) = body.split_at_checked(usize::from(head[12] >> 4) * 4)?;
        Some(Self {
            number: u32::from_be_bytes([head[4], head[5], head[6], head[7]]),
            acknowledged: u32::from_be_bytes([head[8], head[9], head[10], head[11]]),
            flags: head[13],
            options: whole.get(head.len()..)?,
            data,
        })
    }

    /// Only its head: the rest comes in other parts of a datagram.
    pub(super) fn head(self) -> Self {
        Self { data: &[], ..self }
    }

    /// The number behind it.
    pub(super) fn behind(&self) -> u32 {
        let marks = u32::from(self.has(SYN)) + u32::from(self.has(FIN));
        let length = self.data.len() as u32 + marks;
        self.number.wrapping_add(length)
    }

    pub(super) fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// It carries a part of a connection that others carry, too (RFC 8684, 3.2): nobody could read what comes by all of them.
    pub(super) fn joins(&self) -> bool {
        let mut options = self.options;
        loop {
            options = match options {
                [] | [0, ..] => return false,
                [1, rest @ ..] => rest,
                [MULTIPATH, _, what, ..] if what >> 4 == JOIN => return true,
                [_, length, ..] if *length >= 2 => match options.get(usize::from(*length)..) {
                    Some(rest) => rest,
                    None => return false,
                },
                _ => return false,
            }
        }
    }
}

impl Flow {
    /// A connection that begins with a segment of this number.
    pub(super) fn new(number: u32, mark: u64, names: Option<Arc<[Name]>>, now: Instant) -> Self {
        let next = number.wrapping_add(1);
        Self {
            number,
            said: Vec::new(),
            next,
            last: next,
            theirs: None,
            client: Client::default(),
            server: Server::default(),
            mark,
            names,
            stage: Stage::Reading,
            stands: false,
            ended: false,
            broken: false,
            began: now,
            seen: now,
        }
    }

    /// Whether a segment of this number begins this one: its kernel has said so before, and has not seen the answer when it says
    /// so again.
    pub(super) fn began_with(&self, number: u32) -> bool {
        self.number == number && !self.stands
    }

    pub(super) fn mark(&self) -> u64 {
        self.mark
    }

    /// Whether it is known by which names it was allowed.
    pub(super) fn is_named(&self) -> bool {
        self.names.is_some()
    }

    /// It was allowed by these names.
    pub(super) fn name(&mut self, names: Arc<[Name]>) {
        self.names = Some(names);
    }

    /// Bytes that are kept of it.
    fn kept(&self) -> usize {
        let names = self.names.as_deref().map_or(0, bytes_of);
        self.said.capacity() + self.client.kept() + self.server.kept() + names
    }

    /// The number of the first byte that the peer is not known to have.
    fn first(&self) -> u32 {
        self.next.wrapping_sub(self.said.len() as u32)
    }

    /// The number that it began with.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Whether the program's kernel has taken an answer.
    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// Nothing is left to look at: it passes as it is.
    pub(super) fn is_over(&self) -> bool {
        let says_nothing = self.ended && self.stage == Stage::Reading;
        self.said.is_empty() && (says_nothing || self.stage == Stage::Free)
    }

    /// What a segment of the program's says, if `may` tells which names besides its own it may say. So much more of it may be kept.
    pub(super) fn sent(
        &mut self,
        segment: &Segment<'_>,
        room: usize,
        now: Instant,
        may: impl Fn(&Name) -> bool,
    ) -> Word {
        self.seen = now;
        self.broken = false;
        self.stands |= segment.has(ACK) && !segment.has(SYN);
        if segment.has(ACK) {
            let theirs = self.theirs.get_or_insert(segment.acknowledged);
            // As far as the program's own kernel has taken it.
            if ahead(segment.acknowledged, *theirs) > 0 {
                *theirs = segment.acknowledged;
                self.server.lose();
            }
        }
        let word = match segment.data {
            [] => Word::Passes,
            data => self.says(segment, data, room, may),
        };
        if word == Word::Passes {
            let behind = segment.behind();
            // What is missing before an end is still to be said.
            self.ended |= segment.has(FIN) && behind == self.next.wrapping_add(1);
            if ahead(behind, self.last) > 0 {
                self.last = behind;
            }
        }
        word
    }

    fn says(
        &mut self,
        segment: &Segment<'_>,
        data: &[u8],
        room: usize,
        may: impl Fn(&Name) -> bool,
    ) -> Word {
        let first = segment.number.wrapping_add(u32::from(segment.has(SYN)));
        let ahead = ahead(first, self.next);
        match self.stage {
            Stage::Refused => return Word::Waits,
            Stage::Free if ahead > 0 => return Word::Passes,
            // What is missing before it comes first.
            Stage::Reading if ahead > 0 => return Word::Waits,
            _ => {}
        }
        let back = ahead.unsigned_abs() as usize;
        if back > MOST_BACK {
            // Of another connection, whatever the kernel makes of it: nobody waits for that any more.
            return Word::Waits;
        }
        let (old, mut new) = data.split_at(back.min(data.len()));
        // Said once more: the same again, or nothing. What the peer has it does not take anew.
        let had = back.saturating_sub(self.said.len()).min(old.len());
        let at = self.said.len().saturating_sub(back);
        if !self.said[at..].starts_with(&old[had..]) {
            return Word::Waits;
        }
        if new.is_empty() || self.stage == Stage::Free {
            return Word::Passes;
        }
        if segment.has(URG) {
            // The peer may take a byte of it out of the stream.
            return self.refuse(None);
        }
        // It is kept twice: what the peer does not have, and a message that is not whole.
        if self.said.len() > MOST_SAID || self.kept() + 2 * new.len() > room {
            // Later, when the peer has more of it.
            return Word::Waits;
        }
        self.said.reserve_exact(new.len());
        self.said.extend_from_slice(new);
        self.next = self.next.wrapping_add(new.len() as u32);
        while let Some(hello) = self.client.read(&mut new) {
            match hello {
                Hello::Unnamed => {}
                Hello::Named(name) if self.may_say(&name) || may(&name) => {}
                Hello::Other => {
                    self.free();
                    return Word::Passes;
                }
                // The server has taken one, in words that came here in another order. Who was read whole has not.
                Hello::Over if self.server.is_lost() => {
                    self.free();
                    return Word::Passes;
                }
                Hello::Named(name) => return self.refuse(Some(name)),
                Hello::Wrong | Hello::Over => return self.refuse(None),
            }
        }
        Word::Passes
    }

    fn may_say(&self, name: &Name) -> bool {
        let names = self.names.as_deref();
        names.is_some_and(|names| names.contains(name))
    }

    fn free(&mut self) {
        (self.stage, self.client) = (Stage::Free, Client::default());
    }

    fn refuse(&mut self, name: Option<Name>) -> Word {
        (self.stage, self.said) = (Stage::Refused, Vec::new());
        self.client = Client::default();
        Word::Refused(name)
    }

    /// A segment in the peer's name.
    pub(super) fn received(&mut self, segment: &Segment<'_>, now: Instant) {
        let first = self.first();
        let more = ahead(segment.acknowledged, first);
        let acknowledges = segment.has(ACK) && (0..=ahead(self.last, first)).contains(&more);
        let had = self.said.len().min(more.unsigned_abs() as usize);
        let Some(theirs) = self.theirs else {
            if acknowledges && segment.has(SYN) && !segment.has(RST) {
                self.theirs = Some(segment.number.wrapping_add(1));
                self.take(had);
                self.seen = now;
            }
            return;
        };
        if segment.has(RST) {
            // Whether it is broken off the program's kernel decides. If not, it goes on, and is looked at as before.
            if segment.number == theirs && !self.broken {
                (self.broken, self.seen) = (true, now);
            }
            return;
        }
        if !acknowledges {
            return;
        }
        // Somebody who does not see the connection knows neither what comes next nor what was said.
        if segment.number == theirs {
            self.seen = now;
            self.take(had);
        }
        // It may begin with what came before.
        let known = usize::try_from(ahead(theirs, segment.number));
        let new = known.ok().and_then(|known| segment.data.get(known..));
        let new = new.filter(|new| !new.is_empty());
        if let Some(new) = new {
            self.theirs = Some(theirs.wrapping_add(new.len() as u32));
            let takes = self.server.read(new) && self.client.has_greeted();
            if takes && self.stage == Stage::Reading {
                self.free();
            }
        }
    }

    /// The peer has the first `had` bytes of what was said.
    fn take(&mut self, had: usize) {
        self.said.drain(..had);
        self.said.shrink_to_fit();
    }

    /// The kernel has given it up: it would have sent what is not acknowledged, which it does every two minutes, or what it says
    /// to a wrong end.
    fn is_dead(&self, now: Instant) -> bool {
        let silence = now.duration_since(self.seen);
        let waits = !self.said.is_empty() || self.stage == Stage::Refused;
        waits && silence > SILENCE || self.broken && silence > BROKEN
    }
}

impl Flows {
    pub(super) fn take(&mut self, key: &Ends) -> Option<Flow> {
        let flow = self.flows.remove(key)?;
        self.kept -= flow.kept();
        Some(flow)
    }

    pub(super) fn put(&mut self, key: Ends, flow: Flow) {
        self.kept += flow.kept();
        self.flows.insert(key, flow);
    }

    /// How many bytes may be kept of one more.
    pub(super) fn room(&self) -> usize {
        MOST_KEPT.saturating_sub(self.kept)
    }

    /// Whether another one may begin. If there are too many, one that nobody has answered makes room, the oldest first;
    /// then one that is dead.
    pub(super) fn has_room(&mut self, now: Instant) -> bool {
        if self.flows.len() < MOST_FLOWS {
            return true;
        }
        let oldest = |which: &dyn Fn(&Flow) -> bool| {
            let flows = self.flows.iter().filter(|(_, flow)| which(flow));
            flows
                .min_by_key(|(_, flow)| flow.began)
                .map(|(key, _)| *key)
        };
        let unanswered = oldest(&|flow: &Flow| flow.theirs.is_none());
        let gone = unanswered.or_else(|| oldest(&|flow: &Flow| flow.is_dead(now)));
        gone.and_then(|key| self.take(&key)).is_some()
    }
}

/// Bytes of names.
pub(super) fn bytes_of(names: &[Name]) -> usize {
    let bytes = names.iter().map(|name| name.as_str().len());
    bytes.sum::<usize>() + size_of_val(names)
}

/// How far one number is ahead of another.
pub(super) fn ahead(number: u32, of: u32) -> i32 {
    number.wrapping_sub(of).cast_signed()
}

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 0x10;
pub(super) const URG: u8 = 0x20;
/// The option of Multipath TCP, and which of them says that a connection is one more of several.
const MULTIPATH: u8 = 30;
const JOIN: u8 = 1;
/// Connections that have not said whom they mean, or whose peer does not have that yet, at once; more have to wait.
pub(super) const MOST_FLOWS: usize = 1024;
/// If this much of a connection is not acknowledged, more has to wait. The kernel hands up to 64 KiB over in one segment.
const MOST_SAID: usize = 65_536;
/// What is said once more begins at most this number of bytes before the next one: what the peer does not have, and what it took while
/// that was on its way.
const MOST_BACK: usize = 4 * MOST_SAID;
/// The most that is kept of all connections: what they said, messages that are not whole, and names.
pub(super) const MOST_KEPT: usize = 32 << 20;
/// After this a connection is dead whose kernel would have something to say.
const SILENCE: Duration = Duration::from_secs(300);
/// After this one that was broken off does not go on.
const BROKEN: Duration = Duration::from_secs(60);
