//! Frames of the switch.

use std::time::Instant;

use super::*;

impl State {
    pub(super) fn received(&mut self, frame: &[u8], rules: Option<&Rules>) -> Fate {
        if self.all {
            return Fate::Permitted;
        }
        match frame.get(..6) {
            Some(to) if to == self.mac || to[0] & 1 == 1 => {}
            _ => return Fate::Foreign,
        }
        let packet = match Seen::of(frame) {
            Seen::Arp(arp) => {
                if arp.is_request && self.own.contains(&arp.target.into()) {
                    self.askers.add(arp.sender.1.into());
                }
                return Fate::Kept;
            }
            Seen::Ip(packet) => packet,
            Seen::Other | Seen::Malformed => return Fate::Odd,
        };
        if packet.routes {
            return Fate::Odd;
        }
        let parts = (packet.from, packet.to, packet.protocol, packet.identity);
        if packet.later {
            return self.of_parts(parts, packet.from);
        }
        let fate = self.received_packet(&packet, rules);
        if packet.more {
            self.first_of_parts(parts, fate);
        }
        fate
    }

    fn received_packet(&mut self, packet: &Packet<'_>, rules: Option<&Rules>) -> Fate {
        let from = packet.from;
        let segment = Segment::of(packet.unpadded());
        // Of a segment in parts what follows its head is not known.
        let segment = segment.map(|it| if packet.more { it.head() } else { it });
        if let (TCP, Some((port, own))) = (packet.protocol, packet.ports()) {
            let now = Instant::now();
            let is_ours = self.ours.lives(&((Transport::Tcp, from, port), own), now);
            let (peer, own) = (SocketAddr::new(from, port), SocketAddr::new(packet.to, own));
            if !is_ours && !self.served.received(peer, own, segment, now) {
                return Fate::Denied((Transport::Tcp, from, port));
            }
        }
        let icmp = (Transport::Icmp, from, 0);
        match packet.protocol {
            IGMP => Fate::Kept,
            ICMPV6 if from.is_ipv6() => match packet.body.first() {
                Some(&(130..=137 | 143)) if packet.hops == 255 || packet.hops == 1 => {
                    match packet.body[0] {
                        ROUTER_ADVERTISEMENT
                            if packet.hops == 255 && self.routers.len() < MOST_ROUTERS =>
                        {
                            self.routers.insert(from);
                        }
                        NEIGHBOUR_SOLICITATION if packet.hops == 255 => self.askers.add(from),
                        _ => {}
                    }
                    Fate::Kept
                }
                Some(&(1..=4)) => self.error(packet.body.get(8..).and_then(ipv6), icmp),
                _ => self.enter(icmp, (packet.to, 0), None, rules),
            },
            ICMP => match packet.body.first() {
                Some(&(3 | 11 | 12)) => self.error(packet.body.get(8..).and_then(ipv4), icmp),
                _ => self.enter(icmp, (packet.to, 0), None, rules),
            },
            protocol => match peer(protocol, packet.ports()) {
                Some((transport, port, own)) => {
                    self.enter((transport, from, port), (packet.to, own), segment, rules)
                }
                None => Fate::Odd,
            },
        }
    }

    /// An error about a packet that was sent: it says something only of peers that are permitted.
    fn error(&mut self, about: Option<Packet<'_>>, from: Peer) -> Fate {
        let Some(about) = about else {
            return Fate::Odd;
        };
        match self.is_known(about.to) {
            true => Fate::Permitted,
            false => Fate::Denied(from),
        }
    }

    /// A packet of that peer to this own port.
    fn enter(
        &mut self,
        peer: Peer,
        (to, own): (IpAddr, u16),
        segment: Option<Segment<'_>>,
        rules: Option<&Rules>,
    ) -> Fate {
        let now = Instant::now();
        let own_end = SocketAddr::new(to, own);
        let fate = match self.judge(peer, Some(own), rules) {
            Fate::Denied(_) if self.brief.received(peer, own_end, segment, now) => Fate::Permitted,
            fate => fate,
        };
        // Who answers a connection of the program's has not come by itself.
        if !matches!(fate, Fate::Denied(_)) {
            return fate;
        }
        let is_chosen = matches!(own, CHOSEN_FIRST..=CHOSEN_LAST);
        let chosen = if is_chosen { 0 } else { own };
        let listens = [(peer.0, own), (peer.0, chosen), (Transport::Raw, 0)];
        if !listens.iter().any(|key| self.listening.lives(key, now)) {
            return Fate::Denied(peer);
        }
        self.came.add((peer, own));
        self.known.extend(peer.1, Some(now + ANSWER));
        Fate::Permitted
    }
}
