//! Permissions that end: those of answers that hold once, and of rules that hold until some time.
//!
//! A connection of TCP may begin within [`BEGINS`] of the call that was allowed; it passes until both sides have ended it, or one
//! has broken it off. What has no connections may be sent as long as that is not paused for [`PAUSES`].

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::counts::Peer;
use super::flow::{FIN, RST, SYN, Segment};
use super::sets::Lasting;
use crate::act::Transport;

#[derive(Debug)]
pub(super) struct Brief {
    /// With whom something may begin.
    peers: Lasting<Peer>,
    /// Connections that began in time, by own address and port.
    flows: HashMap<(Peer, SocketAddr), Flow>,
}

#[derive(Debug)]
struct Flow {
    /// The number that it began with.
    number: u32,
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
            flows: HashMap::new(),
        }
    }

    /// A call was allowed that speaks with this peer.
    pub(super) fn permit(&mut self, peer: Peer, now: Instant) {
        let time = match peer.0 {
            Transport::Tcp => BEGINS,
            _ => PAUSES,
        };
        self.peers.extend(peer, Some(now + time));
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
        let key = (peer, own);
        if let Some(flow) = self.flows.get_mut(&key)
            && flow.lives(now)
            && (!segment.has(SYN) || flow.number == segment.number)
        {
            flow.used = now;
            flow.ended.0 |= segment.has(FIN);
            // Whoever goes on was not broken off.
            flow.until = match flow.ended == (true, true) || segment.has(RST) {
                true => Some(flow.until.unwrap_or(now + LINGERS)),
                false => None,
            };
            return true;
        }
        let begins = segment.has(SYN) && self.peers.lives(&peer, now);
        if begins {
            self.make_room(now);
            let flow = Flow {
                number: segment.number,
                ended: (false, false),
                until: None,
                used: now,
            };
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
        match self.flows.get_mut(&(peer, own)) {
            Some(flow) if flow.lives(now) => {
                let is_broken = segment.is_some_and(|segment| segment.has(RST));
                flow.ended.1 |= segment.is_some_and(|segment| segment.has(FIN));
                if is_broken || flow.ended == (true, true) {
                    flow.until = Some(flow.until.unwrap_or(now + LINGERS));
                }
                true
            }
            _ => false,
        }
    }

    /// Whether somebody at this address is spoken with.
    pub(super) fn knows(&self, address: IpAddr, now: Instant) -> bool {
        let mut flows = self.flows.iter();
        self.peers.any(now, |peer| peer.1 == address)
            || flows.any(|((peer, _), flow)| peer.1 == address && flow.lives(now))
    }

    fn goes_on(&mut self, peer: Peer, now: Instant) -> bool {
        let lives = self.peers.lives(&peer, now);
        if lives {
            self.peers.extend(peer, Some(now + PAUSES));
        }
        lives
    }

    /// Who is over goes, and if nobody is, who was not used for longest.
    fn make_room(&mut self, now: Instant) {
        if self.flows.len() < MOST_FLOWS {
            return;
        }
        self.flows.retain(|_, flow| flow.lives(now));
        if self.flows.len() >= MOST_FLOWS {
            let oldest = self.flows.iter().min_by_key(|(_, flow)| flow.used);
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
}

/// As long as an answer that holds once (`ask::ONCE`).
pub(super) const BEGINS: Duration = Duration::from_secs(10);
/// Between two packets of what has no connection.
pub(super) const PAUSES: Duration = Duration::from_secs(300);
/// Last words of a connection that has ended: the kernel answers them for a minute.
pub(super) const LINGERS: Duration = Duration::from_secs(60);
const MOST_PEERS: usize = 4096;
const MOST_FLOWS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::super::flow::ACK;
    use super::*;

    const PEER: Peer = (
        Transport::Tcp,
        IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)),
        443,
    );
    const UDP: Peer = (Transport::Udp, PEER.1, 53);

    fn here(port: u16) -> SocketAddr {
        SocketAddr::new([10, 0, 0, 1].into(), port)
    }

    struct Clocked(Brief, Instant);

    impl Clocked {
        /// One who was permitted just now.
        fn new() -> Self {
            let (mut brief, now) = (Brief::new(), Instant::now());
            brief.permit(PEER, now);
            brief.permit(UDP, now);
            Self(brief, now)
        }

        fn later(&mut self, time: Duration) {
            self.1 += time;
        }

        fn segment(number: u32, flags: u8) -> Option<Segment<'static>> {
            Some(Segment {
                number,
                acknowledged: 0,
                flags,
                options: &[],
                data: &[],
            })
        }

        fn sends(&mut self, own: u16, number: u32, flags: u8) -> bool {
            let segment = Self::segment(number, flags);
            self.0.sent(PEER, here(own), segment, self.1)
        }

        fn takes(&mut self, own: u16, flags: u8) -> bool {
            let segment = Self::segment(9, flags);
            self.0.received(PEER, here(own), segment, self.1)
        }
    }

    #[test]
    fn a_connection_begins_in_time_and_passes_until_it_ends() {
        let mut it = Clocked::new();
        assert!(!it.sends(1, 8, ACK), "it never began");
        assert!(it.sends(1, 7, SYN) && it.takes(1, SYN | ACK) && it.sends(1, 8, ACK));
        it.later(BEGINS);
        assert!(it.sends(1, 7, SYN), "the same once more");
        // Hours later it still stands, and nothing else begins.
        it.later(Duration::from_secs(36_000));
        assert!(it.sends(1, 8, ACK) && it.takes(1, ACK));
        assert!(!it.sends(2, 7, SYN) && !it.takes(2, ACK), "another one");
        assert!(!it.sends(1, 99, SYN), "another one from the same port");
        let other = SocketAddr::new([10, 0, 0, 9].into(), 1);
        let segment = Clocked::segment(8, ACK);
        assert!(
            !it.0.sent(PEER, other, segment, it.1),
            "from another address"
        );
        assert!(it.0.knows(PEER.1, it.1));
        assert!(it.sends(1, 8, ACK | FIN) && it.takes(1, ACK));
        it.later(Duration::from_secs(3600));
        assert!(it.takes(1, ACK | FIN) && it.sends(1, 9, ACK));
        it.later(LINGERS);
        assert!(!it.sends(1, 9, ACK) && !it.takes(1, ACK));
        assert!(!it.0.knows(PEER.1, it.1));
    }

    #[test]
    fn one_that_is_broken_off_ends_unless_the_program_goes_on() {
        let mut it = Clocked::new();
        assert!(it.sends(1, 7, SYN) && it.takes(1, RST | ACK));
        it.later(LINGERS);
        assert!(!it.sends(1, 8, ACK) && !it.takes(1, ACK));
        // Somebody else said so, and the kernel does not care.
        let mut it = Clocked::new();
        assert!(it.sends(1, 7, SYN) && it.takes(1, RST) && it.sends(1, 8, ACK));
        it.later(LINGERS);
        assert!(it.sends(1, 8, ACK));
        assert!(it.sends(1, 8, RST));
        it.later(LINGERS);
        assert!(!it.sends(1, 8, ACK));
    }

    #[test]
    fn what_has_no_connection_passes_as_long_as_it_is_sent() {
        let mut it = Clocked::new();
        for _ in 0..5 {
            it.later(PAUSES / 2);
            assert!(it.0.sent(UDP, here(1), None, it.1) && it.0.received(UDP, here(1), None, it.1));
        }
        // What comes does not count.
        it.later(PAUSES / 2);
        assert!(it.0.received(UDP, here(1), None, it.1));
        it.later(PAUSES / 2);
        assert!(!it.0.sent(UDP, here(1), None, it.1) && !it.0.received(UDP, here(1), None, it.1));
    }

    #[test]
    fn any_number_of_connections_takes_bounded_memory() {
        let mut it = Clocked::new();
        for own in 0..MOST_FLOWS as u16 + 500 {
            assert!(it.sends(own, 7, SYN));
            it.later(Duration::from_micros(1));
            assert!(it.sends(0, 7, SYN), "it is used: {own}");
            assert!(it.0.flows.len() <= MOST_FLOWS);
        }
    }
}
