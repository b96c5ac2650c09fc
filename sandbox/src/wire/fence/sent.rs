//! Frames of the program.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::*;
use crate::wire::flow::{ACK, SYN};
use crate::wire::initial::LONG;

impl State {
    pub(super) fn sent(
        &mut self,
        (frame, size): (&[u8], usize),
        rules: Option<&Rules>,
        addresses: Option<&Addresses>,
        names: Option<&Names>,
    ) -> Fate {
        if self.all {
            return Fate::Permitted;
        }
        let link = match frame.split_at_checked(6) {
            Some((link, rest)) if rest.starts_with(&self.mac) => link,
            _ => return Fate::Foreign,
        };
        match Seen::of(frame) {
            Seen::Arp(arp) => self.sent_arp(&arp, link),
            Seen::Ip(packet) => {
                let from = packet.from;
                if packet.routes {
                    return Fate::Odd;
                }
                if !from.is_unspecified() && !self.is_own(from, addresses) {
                    return Fate::Foreign;
                }
                let fate = match self.sent_packet(&packet, link, rules, addresses) {
                    // Nobody speaks IPv6 before it has an address, but for what the kernel must ask.
                    Fate::Permitted | Fate::Ruled if from.is_ipv6() && from.is_unspecified() => {
                        Fate::Foreign
                    }
                    fate if fate.passes() && packet.protocol == TCP && !packet.later => {
                        self.sent_on(fate, &packet, names)
                    }
                    fate if fate.passes() && packet.protocol == UDP && !packet.later => {
                        self.sent_datagrams(fate, &packet, size, names)
                    }
                    fate => fate,
                };
                if packet.more && !packet.later {
                    let parts = (from, packet.to, packet.protocol, packet.identity);
                    self.first_of_parts(parts, fate);
                }
                fate
            }
            Seen::Other | Seen::Malformed => Fate::Odd,
        }
    }

    /// What becomes of a packet of TCP that passes so far, by the server that it names.
    fn sent_on(&mut self, fate: Fate, packet: &Packet<'_>, names: Option<&Names>) -> Fate {
        let Some((own, port)) = packet.ports() else {
            return Fate::Odd;
        };
        let peer = SocketAddr::new(packet.to, port);
        if !self.served.is_named(peer) {
            return fate;
        }
        // A segment in parts could be put together as another than is seen.
        let segment = match packet.more {
            true => None,
            false => Segment::of(packet.body),
        };
        let may = |who: Option<&Arc<Who>>, name: &Name| {
            names.is_some_and(|names| names(who, Transport::Tcp, peer, name))
        };
        let (from, now) = (SocketAddr::new(packet.from, own), Instant::now());
        let flow = ((Transport::Tcp, packet.to, port), own);
        // Who came is answered; all others begin by themselves.
        let answers = segment.is_some_and(|segment| segment.has(SYN | ACK));
        let by = match fate {
            Fate::Ruled => By::Rule,
            _ if self.ours.lives(&flow, now) => By::Other,
            _ if answers && self.came.members.contains(&flow) => By::Other,
            _ => By::Call,
        };
        let word = self.served.sent(peer, from, (segment, by), now, may);
        self.unless(word, fate, peer)
    }

    /// What becomes of a packet of UDP that passes so far, by the servers that its datagrams name by QUIC.
    fn sent_datagrams(
        &mut self,
        fate: Fate,
        packet: &Packet<'_>,
        size: usize,
        names: Option<&Names>,
    ) -> Fate {
        let Some((own, port)) = packet.ports() else {
            return Fate::Odd;
        };
        let peer = SocketAddr::new(packet.to, port);
        if !self.quic.is_named(peer) {
            return fate;
        }
        let (flow, now) = (((Transport::Udp, packet.to, port), own), Instant::now());
        if self.ours.lives(&flow, now) || self.came.members.contains(&flow) {
            return fate;
        }
        let may = |who: Option<&Arc<Who>>, name: &Name| {
            names.is_some_and(|names| names(who, Transport::Udp, peer, name))
        };
        let content = packet.unpadded().get(UDP_HEAD..).unwrap_or_default();
        let is_long = content.first().is_some_and(|first| first & LONG != 0);
        let size = if size == 0 { content.len() } else { size };
        let mut word = match packet.more && is_long {
            // Only a part of it is seen.
            true => Word::Refused(None),
            false => Word::Passes,
        };
        let ends = (peer, SocketAddr::new(packet.from, own));
        for datagram in content.chunks(size.max(1)) {
            if word != Word::Passes {
                break;
            }
            word = self.quic.sent(ends, datagram, now, may);
        }
        self.unless(word, fate, peer)
    }

    /// What becomes of a packet with this fate, by what was made of its content.
    fn unless(&mut self, word: Word, fate: Fate, peer: SocketAddr) -> Fate {
        match word {
            Word::Passes => fate,
            Word::Waits => Fate::Unsaid,
            Word::Refused(name) => {
                // Whoever judged a name has written it down.
                if name.is_none()
                    && self.told_unread.len() < MOST_TOLD
                    && self.told_unread.insert(peer)
                {
                    log::warn!(
                        "{peer} was allowed by name, and it cannot be read which server is meant there: that is dropped at the wire"
                    );
                }
                Fate::Unsaid
            }
        }
    }

    fn sent_arp(&mut self, arp: &Arp, link: &[u8]) -> Fate {
        let (mac, address) = arp.sender;
        let is_own = self.own.contains(&address.into()) || address.is_unspecified();
        if mac != self.mac || !is_own {
            return Fate::Foreign;
        }
        // An answer goes to who asked, and says no more than who we are.
        let target = IpAddr::from(arp.target);
        let (is_formed, may) = match arp.is_request {
            true => (arp.target_mac == [0; 6], self.may_find(target)),
            false => (
                arp.target_mac == link,
                self.askers.members.contains(&target) || self.own.contains(&target),
            ),
        };
        match (arp.is_exact && is_formed, may) {
            (false, _) => Fate::Odd,
            (true, true) => Fate::Kept,
            (true, false) => Fate::Denied((Transport::Other(0), target, 0)),
        }
    }

    fn sent_packet(
        &mut self,
        packet: &Packet<'_>,
        link: &[u8],
        rules: Option<&Rules>,
        addresses: Option<&Addresses>,
    ) -> Fate {
        let to = packet.to;
        let parts = (packet.from, to, packet.protocol, packet.identity);
        let first = match packet.later {
            true => return self.of_parts(parts, to),
            false => packet,
        };
        match first.protocol {
            IGMP if to.is_ipv4() && kept::is_report(first, link) => Fate::Kept,
            ICMPV6 if to.is_ipv6() => match first.body.first() {
                Some(&(130..=137 | 143)) => self.sent_neighbourly(first, link, rules, addresses),
                Some(&(1..=4 | ECHO6_REPLY)) if self.is_known(to) => Fate::Permitted,
                _ => self.judge_sent((Transport::Icmp, to, 0), None, first, rules),
            },
            ICMP => match first.body.first() {
                Some(&(ECHO_REPLY | 3 | 11 | 12)) if self.is_known(to) => Fate::Permitted,
                _ => self.judge_sent((Transport::Icmp, to, 0), None, first, rules),
            },
            protocol => match peer(protocol, first.ports()) {
                Some((transport, own, port)) => {
                    self.judge_sent((transport, to, port), Some(own), first, rules)
                }
                None => Fate::Odd,
            },
        }
    }

    /// A packet of the program's to that peer.
    fn judge_sent(
        &mut self,
        peer: Peer,
        own: Option<u16>,
        packet: &Packet<'_>,
        rules: Option<&Rules>,
    ) -> Fate {
        match self.judge(peer, own, rules) {
            Fate::Denied(_) => {
                let own = SocketAddr::new(packet.from, own.unwrap_or(0));
                let now = Instant::now();
                match self.brief.sent(peer, own, Segment::of(packet.body), now) {
                    true => Fate::Permitted,
                    false => Fate::Denied(peer),
                }
            }
            fate => fate,
        }
    }

    /// What neighbours and routers of IPv6 are told and asked, groups too.
    fn sent_neighbourly(
        &mut self,
        packet: &Packet<'_>,
        link: &[u8],
        rules: Option<&Rules>,
        addresses: Option<&Addresses>,
    ) -> Fate {
        let (mac, to) = (self.mac, packet.to);
        if kept::is_report(packet, link) || kept::is_router_solicitation(packet, link, mac) {
            return Fate::Kept;
        }
        if let Some(target) = kept::solicited(packet, link, mac) {
            // From nobody: is the address that the kernel wants still free?
            let may = match packet.from.is_unspecified() {
                true => self.is_own(target, addresses),
                false => self.may_find(target) || self.is_own(target, addresses),
            };
            return match may {
                true => Fate::Kept,
                false => Fate::Denied((Transport::Icmp, target, 0)),
            };
        }
        if let Some(target) = kept::advertised(packet, link, mac)
            && self.is_own(target, addresses)
            && (to.is_multicast() || self.askers.members.contains(&to) || self.may_find(to))
        {
            return Fate::Kept;
        }
        self.judge((Transport::Other(ICMPV6), to, 0), None, rules)
    }
}

/// Bytes of a head of UDP.
const UDP_HEAD: usize = 8;
