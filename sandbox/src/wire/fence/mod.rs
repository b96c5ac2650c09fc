//! The fence: which frames go through a program's cable.
//!
//! A call that was allowed tells the fence with whom the program may speak now ([`Fence::permit`]), or where it may be found
//! ([`Fence::listen`]). A packet passes if it belongs to that, or if a rule that asks for no program allows it. All
//! others are dropped and counted, whatever way the program found to send them: what gets past the calls meets a
//! closed port.
//!
//! | frame of the program | passes if |
//! |---|---|
//! | IP with a destination that was permitted | its protocol, address and port are those of the permission |
//! | IP that answers who came to a port that listens | its flow is that one |
//! | ICMP errors, answers to pings | they go to an address that was permitted or came |
//! | ARP, neighbour solicitation | it asks for the router, an own address, or one that was permitted or came |
//! | ARP answers | who asked gets them |
//! | router solicitation, neighbour advertisement, MLD, IGMP | it has the form that the kernel gives it, and goes where the kernel sends it |
//! | anything else: other protocols, tags, a foreign sender, a packet that says its own route | never |
//!
//! The other way it is the same with the ends swapped; ARP and neighbour discovery pass, and broadcasts to ports that
//! listen.
//!
//! `sent = permitted + ruled + kept + denied`, to the frame.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::brief::Brief;
use super::counts::{Counts, Fate, Peer};
use super::flow::{Segment, Word};
use super::kept;
use super::seen::{Arp, Packet, Seen, ipv4, ipv6};
use super::served::Served;
use super::sets::{Bounded, Lasting};
use crate::act::{Act, Doing, Target, Transport};
use crate::interface::cable::Guard;
use crate::name::Name;

/// Judges frames. All threads of the supervisor share it.
pub struct Fence {
    state: Mutex<State>,
    rules: OnceLock<Rules>,
    addresses: OnceLock<Addresses>,
    names: OnceLock<Names>,
}

/// Whether a rule that needs to know no program allows packets of this kind to, and from, this address.
pub type Rules = Box<dyn Fn(Transport, SocketAddr) -> bool + Send + Sync>;

/// Whether a rule that needs to know no program allows a server of this name.
pub type Names = Box<dyn Fn(SocketAddr, &Name) -> bool + Send + Sync>;

/// The IPv6 addresses that the interface has now, if that can be found out.
pub type Addresses = Box<dyn Fn() -> Option<Vec<IpAddr>> + Send + Sync>;

#[derive(Debug)]
struct State {
    mac: [u8; 6],
    /// The interface's own addresses, as they were given to it.
    own: Vec<IpAddr>,
    /// What the kernel made of itself, and when it was asked.
    made: Vec<IpAddr>,
    asked: Option<Instant>,
    routers: HashSet<IpAddr>,
    permitted: Lasting<Peer>,
    /// Addresses of those, so that they can be found.
    known: Lasting<IpAddr>,
    /// What was permitted and ends.
    brief: Brief,
    listening: Lasting<(Transport, u16)>,
    /// Who came to a port that listens: peer and own port.
    came: Bounded<(Peer, u16)>,
    /// Peers of the supervisor's own sockets, and these sockets' ports.
    ours: Lasting<(Peer, u16)>,
    /// Who asked for an address of ours.
    askers: Bounded<IpAddr>,
    /// Datagrams in parts whose first part passed, by who receives them.
    parts: Bounded<(IpAddr, IpAddr, u8, u32)>,
    /// Whom clients of TLS may name.
    served: Served,
    /// A packet socket was allowed: everything passes.
    all: bool,
    counts: Counts,
    told: HashSet<Peer>,
}

impl Fence {
    /// A fence around the interface with this hardware address and these addresses; nothing is permitted yet.
    #[must_use]
    pub fn new(mac: [u8; 6], own: &[IpAddr], routers: &[IpAddr]) -> Self {
        let state = State {
            mac,
            own: own.to_vec(),
            made: Vec::new(),
            asked: None,
            routers: routers.iter().copied().collect(),
            permitted: Lasting::new(MOST_PERMITTED),
            known: Lasting::new(MOST_PERMITTED),
            brief: Brief::new(),
            listening: Lasting::new(MOST_LISTENING),
            came: Bounded::new(MOST_CAME),
            ours: Lasting::new(MOST_OURS),
            askers: Bounded::new(MOST_ASKERS),
            parts: Bounded::new(MOST_PARTS),
            served: Served::default(),
            all: false,
            counts: Counts::default(),
            told: HashSet::new(),
        };
        Self {
            state: Mutex::new(state),
            rules: OnceLock::new(),
            addresses: OnceLock::new(),
            names: OnceLock::new(),
        }
    }

    /// The interface has this address no more.
    pub(super) fn lose(&self, address: IpAddr) {
        self.lock().own.retain(|own| *own != address);
    }

    /// From now on these rules let packets pass, too.
    pub fn ask_rules(&self, rules: Rules) {
        // The first ones stay.
        let _ = self.rules.set(rules);
    }

    /// IPv6 addresses besides those that were given: the kernel makes some of its own. Nobody else's is a sender's.
    pub fn ask_addresses(&self, addresses: Addresses) {
        // The first ones stay.
        let _ = self.addresses.set(addresses);
    }

    /// From now on clients of TLS may name servers that these rules allow, too.
    pub fn ask_names(&self, names: Names) {
        // The first ones stay.
        let _ = self.names.set(names);
    }

    /// Connections to this peer are allowed by these names, and clients of TLS must name one of them; `None`: by its
    /// address. False if there are too many such peers: this one is not to be [allowed](Self::allow).
    pub fn name(&self, peer: SocketAddr, names: Option<Vec<Name>>) -> bool {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        self.lock().served.allow(peer, names)
    }

    /// An act was allowed: its packets may pass. Told before the act is done, since its first packet may leave at
    /// once.
    pub fn allow(&self, act: &Act) {
        match (act.doing, &act.target) {
            (Doing::Connect, Target::Internet(peer)) => self.permit(act.transport, *peer),
            // Who may take a connection has bound before; the answer to who came passes.
            (Doing::Bind, Target::Internet(own))
                if own.port() == 0 && act.transport != Transport::Tcp =>
            {
                // So does every client. Its peers are permitted one by one.
            }
            (Doing::Bind, Target::Internet(own)) => self.listen(act.transport, own.port()),
            (Doing::Create, _) if act.transport == Transport::Packet => self.open(),
            _ => {}
        }
    }

    /// As [`allow`](Self::allow), by what holds once or until some time: the packets of one connection pass, as long as it
    /// stands.
    pub fn allow_briefly(&self, act: &Act) {
        match (act.doing, &act.target) {
            (Doing::Connect, Target::Internet(peer)) => {
                if let Some(peer) = peer_of(act.transport, *peer) {
                    self.lock().brief.permit(peer, Instant::now());
                }
            }
            _ => self.allow(act),
        }
    }

    /// A program may speak with this peer from now on. ICMP and protocols without ports: port 0. A raw socket may
    /// send any packet to the address; with a packet socket everything passes.
    pub fn permit(&self, transport: Transport, peer: SocketAddr) {
        let mut state = self.lock();
        state.all |= transport == Transport::Packet;
        if let Some(peer) = peer_of(transport, peer) {
            state.permitted.extend(peer, None);
            state.known.extend(peer.1, None);
        }
    }

    /// A socket of the supervisor's own on this port speaks with that peer; no other socket may.
    pub fn permit_port(&self, transport: Transport, peer: SocketAddr, own: u16) {
        let peer = (transport, peer.ip().to_canonical(), peer.port());
        self.lock().ours.extend((peer, own), None);
    }

    /// That socket is closed: another one may get its port. A connection says good-bye a moment longer.
    pub fn revoke_port(&self, transport: Transport, peer: SocketAddr, own: u16) {
        let flow = ((transport, peer.ip().to_canonical(), peer.port()), own);
        let mut state = self.lock();
        match transport {
            Transport::Tcp => state.ours.end(&flow, Instant::now() + CLOSING),
            _ => state.ours.remove(&flow),
        }
    }

    /// What comes to this port of the program may enter and be answered. Port 0: to each of those from which the
    /// kernel chooses one.
    pub fn listen(&self, transport: Transport, port: u16) {
        let port = port_of(transport, port);
        self.lock().listening.extend((transport, port), None);
    }

    /// Everything passes from now on: the calls alone decide.
    pub fn open(&self) {
        self.lock().all = true;
    }

    /// What passed so far, and what did not.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Whether a frame that a program sent goes on.
    pub fn leaves(&self, frame: &[u8]) -> bool {
        let mut state = self.lock();
        let mut fate = state.sent(frame, self.rules.get(), self.addresses.get());
        if fate.passes() && !state.all {
            fate = state.sent_on(fate, frame, self.names.get());
        }
        state.counts.sent.count(fate);
        if let Fate::Denied(peer) = fate {
            state.tell(peer);
        }
        fate.passes()
    }

    /// Whether a frame of the switch goes on to the program.
    pub fn enters(&self, frame: &[u8]) -> bool {
        let mut state = self.lock();
        let fate = state.received(frame, self.rules.get());
        state.counts.received.count(fate);
        fate.passes()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guard for std::sync::Arc<Fence> {
    fn leaves(&mut self, frame: &[u8]) -> bool {
        Fence::leaves(self, frame)
    }

    fn enters(&mut self, frame: &[u8]) -> bool {
        Fence::enters(self, frame)
    }
}

impl State {
    fn sent(&mut self, frame: &[u8], rules: Option<&Rules>, addresses: Option<&Addresses>) -> Fate {
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
                match self.sent_packet(&packet, link, rules, addresses) {
                    // Nobody speaks IPv6 before it has an address, but for what the kernel must ask.
                    Fate::Permitted | Fate::Ruled if from.is_ipv6() && from.is_unspecified() => {
                        Fate::Foreign
                    }
                    fate => fate,
                }
            }
            Seen::Other | Seen::Malformed => Fate::Odd,
        }
    }

    /// What becomes of a frame that passes so far, by the server that it names.
    fn sent_on(&mut self, fate: Fate, frame: &[u8], names: Option<&Names>) -> Fate {
        let Some((packet, own, port)) = tcp(frame) else {
            return fate;
        };
        let peer = SocketAddr::new(packet.to, port);
        // A segment in parts could be put together as another than is seen.
        let segment = match packet.more {
            true => None,
            false => Segment::of(packet.body),
        };
        let may = |name: &Name| names.is_some_and(|names| names(peer, name));
        match self.served.sent(peer, own, segment, Instant::now(), may) {
            Word::Passes => fate,
            Word::Refused(name) => {
                if let Some(name) = name
                    && self.told.len() < MOST_TOLD
                {
                    self.told.insert((Transport::Tcp, peer.ip(), own));
                    log::warn!(
                        "no rule allows {name} at {peer}: what names it by TLS is dropped at the wire"
                    );
                }
                Fate::Denied((Transport::Tcp, peer.ip(), peer.port()))
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
        let fate = match first.protocol {
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
        };
        if packet.more && fate.passes() {
            self.parts.add(parts);
        }
        fate
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
                let (own, now) = (own.unwrap_or(0), Instant::now());
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

    fn received(&mut self, frame: &[u8], rules: Option<&Rules>) -> Fate {
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
        if packet.more && fate.passes() {
            self.parts.add(parts);
        }
        fate
    }

    fn received_packet(&mut self, packet: &Packet<'_>, rules: Option<&Rules>) -> Fate {
        let from = packet.from;
        let segment = Segment::of(packet.body);
        // Of a segment in parts what follows its head is not known.
        let segment = segment.map(|it| if packet.more { it.head() } else { it });
        if let (TCP, Some((port, own))) = (packet.protocol, packet.ports()) {
            let peer = SocketAddr::new(from, port);
            if !self.served.received(peer, own, segment, Instant::now()) {
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
                _ => self.enter(icmp, 0, None, rules),
            },
            ICMP => match packet.body.first() {
                Some(&(3 | 11 | 12)) => self.error(packet.body.get(8..).and_then(ipv4), icmp),
                _ => self.enter(icmp, 0, None, rules),
            },
            protocol => match peer(protocol, packet.ports()) {
                Some((transport, port, own)) => {
                    self.enter((transport, from, port), own, segment, rules)
                }
                None => Fate::Odd,
            },
        }
    }

    /// A part of a datagram that is not its first.
    fn of_parts(&self, parts: (IpAddr, IpAddr, u8, u32), other: IpAddr) -> Fate {
        match self.parts.members.contains(&parts) {
            true => Fate::Permitted,
            false => Fate::Denied((Transport::Other(parts.2), other, 0)),
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
        own: u16,
        segment: Option<Segment<'_>>,
        rules: Option<&Rules>,
    ) -> Fate {
        let now = Instant::now();
        let is_chosen = matches!(own, CHOSEN_FIRST..=CHOSEN_LAST);
        let chosen = if is_chosen { 0 } else { own };
        let listens = [(peer.0, own), (peer.0, chosen), (Transport::Raw, 0)];
        let listens = listens.iter().any(|key| self.listening.lives(key, now));
        if listens {
            self.came.add((peer, own));
            self.known.extend(peer.1, Some(now + ANSWER));
            return Fate::Permitted;
        }
        match self.judge(peer, Some(own), rules) {
            Fate::Denied(_) if self.brief.received(peer, own, segment, now) => Fate::Permitted,
            fate => fate,
        }
    }

    /// A packet to or from this peer, from this own port.
    fn judge(&mut self, peer: Peer, own: Option<u16>, rules: Option<&Rules>) -> Fate {
        let (transport, address, port) = peer;
        let now = Instant::now();
        let is_permitted = self.permitted.lives(&peer, now)
            || self.permitted.lives(&(Transport::Raw, address, 0), now)
            || own.is_some_and(|own| {
                let flow = (peer, own);
                self.came.members.contains(&flow) || self.ours.lives(&flow, now)
            });
        if is_permitted {
            // It is in use, too: it must be found as long as it is spoken with.
            self.known.lives(&address, now);
        }
        match is_permitted {
            true => Fate::Permitted,
            false
                if rules.is_some_and(|rules| rules(transport, SocketAddr::new(address, port))) =>
            {
                Fate::Ruled
            }
            false => Fate::Denied(peer),
        }
    }

    /// Whether the kernel may ask who has this address.
    fn may_find(&mut self, address: IpAddr) -> bool {
        self.own.contains(&address) || self.routers.contains(&address) || self.is_known(address)
    }

    fn is_known(&mut self, address: IpAddr) -> bool {
        let now = Instant::now();
        self.known.lives(&address, now)
            || self.ours.any(now, |&((_, theirs, _), _)| theirs == address)
            || self.brief.knows(address, now)
    }

    /// Whether the interface has this address. The kernel is asked about one of IPv6 that is new, and not for every
    /// frame that is forged.
    fn is_own(&mut self, address: IpAddr, addresses: Option<&Addresses>) -> bool {
        if self.own.contains(&address) || self.made.contains(&address) {
            return true;
        }
        let now = Instant::now();
        let is_late = |asked| now.duration_since(asked) >= ASK_AGAIN;
        match addresses {
            Some(addresses) if address.is_ipv6() && self.asked.is_none_or(is_late) => {
                self.asked = Some(now);
                self.made = addresses().unwrap_or_else(|| std::mem::take(&mut self.made));
                self.made.contains(&address)
            }
            _ => false,
        }
    }

    /// Says once of each peer that its packets are dropped.
    fn tell(&mut self, peer: Peer) {
        if self.told.len() >= MOST_TOLD || !self.told.insert(peer) {
            return;
        }
        let (transport, address, port) = peer;
        let what = match transport {
            Transport::Tcp => format!("TCP to {}", SocketAddr::new(address, port)),
            Transport::Udp => format!("UDP to {}", SocketAddr::new(address, port)),
            Transport::Icmp => format!("ICMP to {address}"),
            Transport::Other(0) => format!("ARP for {address}"),
            Transport::Other(protocol) => format!("IP protocol {protocol} to {address}"),
            _ => format!("{transport:?} to {address}"),
        };
        log::warn!("no call was allowed that says so: {what} is dropped at the wire");
        if self.told.len() == MOST_TOLD {
            log::warn!("more peers are not told of; they are counted");
        }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// A packet of TCP that is no later part of one, and its ports.
fn tcp(frame: &[u8]) -> Option<(Packet<'_>, u16, u16)> {
    match Seen::of(frame) {
        Seen::Ip(packet) if packet.protocol == TCP && !packet.later => {
            let (from, to) = packet.ports()?;
            Some((packet, from, to))
        }
        _ => None,
    }
}

/// How rules name that protocol, and its ports.
fn peer(protocol: u8, ports: Option<(u16, u16)>) -> Option<(Transport, u16, u16)> {
    let transport = match protocol {
        TCP => Transport::Tcp,
        UDP | UDP_LITE => Transport::Udp,
        other => return Some((Transport::Other(other), 0, 0)),
    };
    ports.map(|(from, to)| (transport, from, to))
}

/// Whom an act by this transport speaks with, as packets name it.
fn peer_of(transport: Transport, peer: SocketAddr) -> Option<Peer> {
    match transport {
        Transport::Packet
        | Transport::Unix
        | Transport::Netlink(_)
        | Transport::Vsock
        | Transport::Family(_)
        | Transport::File => None,
        _ => Some((
            transport,
            peer.ip().to_canonical(),
            port_of(transport, peer.port()),
        )),
    }
}

fn port_of(transport: Transport, port: u16) -> u16 {
    match transport {
        Transport::Tcp | Transport::Udp => port,
        _ => 0,
    }
}

/// Who came to ports that listen, at once.
const MOST_CAME: usize = 16_384;
/// Peers that are permitted, at once; those that were not spoken with for longest are forgotten.
const MOST_PERMITTED: usize = 65_536;
/// Ports that listen, at once: all of TCP and of UDP.
const MOST_LISTENING: usize = 2 * 65_536;
/// Who asked for our addresses, at once.
const MOST_ASKERS: usize = 1024;
/// Routers that are learnt.
const MOST_ROUTERS: usize = 64;
/// The kernel is asked for its addresses no more often.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// A connection of the supervisor's own ends within this after its socket is closed.
const CLOSING: Duration = Duration::from_secs(2);
/// Sockets of the supervisor's own, at once: questions for names.
const MOST_OURS: usize = 1024;
/// Datagrams in parts, at once.
const MOST_PARTS: usize = 256;
/// Peers that are told of.
const MOST_TOLD: usize = 100;
/// Who came may be looked for so long.
const ANSWER: Duration = Duration::from_secs(600);
/// Ports from which the kernel chooses (`ip_local_port_range` of a new network namespace).
const CHOSEN_FIRST: u16 = 32_768;
const CHOSEN_LAST: u16 = 60_999;
const ICMP: u8 = 1;
const IGMP: u8 = 2;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const UDP_LITE: u8 = 136;
const ECHO_REPLY: u8 = 0;
const ECHO6_REPLY: u8 = 129;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
