//! Permissions that end: those of answers that hold once, and of rules that hold until some time.
//!
//! A connection of TCP may begin within [`BEGINS`] of the call that was allowed; it passes until both sides have ended it, or one
//! has broken it off. What has no connections may be sent as long as that is not paused for [`PAUSES`].
//!
//! Anybody can send an end in the peer's name. One that the peer has ended is over when the program's kernel says that it has
//! taken that end, and one that was broken off has the number that comes next. An end that is missed costs no more than a place
//! here: nothing else begins by an old connection, and who was not used for longest makes room.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::counts::Peer;
use super::flow::{ACK, FIN, RST, SYN, Segment, ahead};
use super::sets::Lasting;
use crate::act::Transport;

#[derive(Debug)]
pub(super) struct Brief {
    /// With whom something may begin.
    peers: Lasting<Peer>,
    /// The addresses of those, so that they can be found.
    addresses: Lasting<IpAddr>,
    /// Connections of TCP that began in time.
    flows: BTreeMap<Ends, Flow>,
}

/// The peer's address and port, and the own ones: those of an address stand together.
type Ends = (IpAddr, u16, SocketAddr);

#[derive(Debug)]
struct Flow {
    /// The number that it began with.
    number: u32,
    /// The number behind everything that was sent.
    last: u32,
    /// The number of the peer's next byte; `None`: it has not answered.
    theirs: Option<u32>,
    /// The number behind the peer's end, if that was one.
    end: Option<u32>,
    /// The program, the peer has ended it.
    ended: (bool, bool),
    /// It ends then; `None`: it stands.
    until: Option<Instant>,
    used: Instant,
}

impl Brief {
    pub(super) fn new() -> Self {
        Self {
            peers: Lasting::new(MOST_PEERS),
            addresses: Lasting::new(MOST_PEERS),
            flows: BTreeMap::new(),
        }
    }

    /// A call was allowed that speaks with this peer.
    pub(super) fn permit(&mut self, peer: Peer, now: Instant) {
        let time = match peer.0 {
            Transport::Tcp => BEGINS,
            _ => PAUSES,
        };
        self.extend(peer, now + time);
    }

    fn extend(&mut self, peer: Peer, until: Instant) {
        self.peers.extend(peer, Some(until));
        self.addresses.extend(peer.1, Some(until));
    }

    /// Whether a packet of the program's may pass; its segment, if it is one.
    pub(super) fn sent(
        &mut self,
        peer: Peer,
        own: SocketAddr,
        segment: Option<Segment<'_>>,
        now: Instant,
    ) -> bool {
        let raw = (Transport::Raw, peer.1, 0);
        if self.goes_on(raw, now) {
            return true;
        }
        if peer.0 != Transport::Tcp {
            return self.goes_on(peer, now);
        }
        let Some(segment) = segment else {
            return false;
        };
        let key = (peer.1, peer.2, own);
        if let Some(flow) = self.flows.get_mut(&key)
            && flow.lives(now)
            && (!segment.has(SYN) || flow.number == segment.number)
        {
            flow.sent(&segment, now);
            return true;
        }
        let begins = segment.has(SYN) && self.peers.lives(&peer, now);
        if begins {
            self.make_room(now);
            let mut flow = Flow {
                number: segment.number,
                last: segment.number,
                theirs: None,
                end: None,
                ended: (false, false),
                until: None,
                used: now,
            };
            flow.sent(&segment, now);
            self.flows.insert(key, flow);
        }
        begins
    }

    /// Whether a packet of the peer's to this own address and port may pass.
    pub(super) fn received(
        &mut self,
        peer: Peer,
        own: SocketAddr,
        segment: Option<Segment<'_>>,
        now: Instant,
    ) -> bool {
        let raw = (Transport::Raw, peer.1, 0);
        if peer.0 != Transport::Tcp || self.peers.lives(&raw, now) {
            return self.peers.lives(&peer, now) || self.peers.lives(&raw, now);
        }
        match self.flows.get_mut(&(peer.1, peer.2, own)) {
            Some(flow) if flow.lives(now) => {
                if let Some(segment) = segment {
                    flow.received(&segment, now);
                }
                true
            }
            _ => false,
        }
    }

    /// Whether somebody at this address is spoken with. Connections that are over are forgotten on the way, so that strangers who
    /// have this asked again and again do not have the same ones looked at.
    pub(super) fn knows(&mut self, address: IpAddr, now: Instant) -> bool {
        if self.addresses.lives(&address, now) {
            return true;
        }
        let least = SocketAddr::new([0; 4].into(), 0);
        let most = SocketAddr::new(Ipv6Addr::from([0xff; 16]).into(), u16::MAX);
        loop {
            let mut of_it = self
                .flows
                .range((address, 0, least)..=(address, u16::MAX, most));
            match of_it.next().map(|(key, flow)| (*key, flow.lives(now))) {
                None => return false,
                Some((_, true)) => return true,
                Some((key, false)) => drop(self.flows.remove(&key)),
            }
        }
    }

    fn goes_on(&mut self, peer: Peer, now: Instant) -> bool {
        let lives = self.peers.lives(&peer, now);
        if lives {
            self.extend(peer, now + PAUSES);
        }
        lives
    }

    /// Who is over goes, and if nobody is, who was not used for longest: first of those that nobody has answered.
    fn make_room(&mut self, now: Instant) {
        if self.flows.len() < MOST_FLOWS {
            return;
        }
        self.flows.retain(|_, flow| flow.lives(now));
        if self.flows.len() >= MOST_FLOWS {
            let flows = self.flows.iter();
            let oldest = flows.min_by_key(|(_, flow)| (flow.theirs.is_some(), flow.used));
            if let Some(key) = oldest.map(|(key, _)| *key) {
                self.flows.remove(&key);
            }
        }
    }
}

impl Flow {
    fn lives(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until > now)
    }

    /// A segment of the program's.
    fn sent(&mut self, segment: &Segment<'_>, now: Instant) {
        self.used = now;
        let behind = segment.behind();
        // To a wrong answer the kernel says the number that stands in it.
        if !segment.has(RST) && ahead(behind, self.last) > 0 {
            self.last = behind;
        }
        let is_answered = self.theirs.is_some();
        if segment.has(ACK) {
            let theirs = self.theirs.get_or_insert(segment.acknowledged);
            if ahead(segment.acknowledged, *theirs) >= 0 {
                *theirs = segment.acknowledged;
                // Nothing follows an end.
                self.ended.1 = self.end == Some(segment.acknowledged);
            }
        }
        self.ended.0 |= segment.has(FIN);
        if self.ended == (true, true) || segment.has(RST) && is_answered {
            self.end(now);
        } else if !segment.has(RST) {
            // Whoever goes on was not broken off.
            self.until = None;
        }
        // While nobody has answered, the kernel resets what is not of this connection, and goes on.
    }

    /// A segment in the peer's name.
    fn received(&mut self, segment: &Segment<'_>, now: Instant) {
        let Some(theirs) = &mut self.theirs else {
            let said = 1..=ahead(self.last, self.number);
            let more = ahead(segment.acknowledged, self.number);
            match segment.has(ACK) && said.contains(&more) {
                true if segment.has(RST) => self.end(now),
                true if segment.has(SYN) => self.theirs = Some(segment.number.wrapping_add(1)),
                _ => {}
            }
            return;
        };
        if segment.has(RST) {
            if segment.number == *theirs {
                self.end(now);
            }
            return;
        }
        let is_next = segment.number == *theirs;
        if segment.has(FIN) && (0..=MOST_WINDOW).contains(&ahead(segment.number, *theirs)) {
            self.end = Some(segment.behind());
        }
        if is_next {
            *theirs = theirs.wrapping_add(segment.data.len() as u32);
        }
    }

    fn end(&mut self, now: Instant) {
        self.until = Some(self.until.unwrap_or(now + LINGERS));
    }
}

/// As long as an answer that holds once (`ask::ONCE`).
pub(super) const BEGINS: Duration = Duration::from_secs(10);
/// Between two packets of what has no connection.
pub(super) const PAUSES: Duration = Duration::from_secs(300);
/// Last words of a connection that has ended: the kernel answers them for a minute.
pub(super) const LINGERS: Duration = Duration::from_secs(60);
/// So far ahead the peer may be (RFC 7323, 2.3).
const MOST_WINDOW: i32 = 1 << 30;
const MOST_PEERS: usize = 4096;
const MOST_FLOWS: usize = 4096;

#[cfg(test)]
#[path = "brief_tests.rs"]
mod tests;
