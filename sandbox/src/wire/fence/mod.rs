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

mod received;
mod sent;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::brief::Brief;
use super::counts::{Counts, Fate, Peer};
use super::flow::{Segment, Word};
use super::kept;
use super::quic::Quic;
use super::seen::{Arp, Packet, Seen, ipv4, ipv6};
use super::served::{By, Served};
use super::sets::{Bounded, Lasting};
use crate::act::{Act, Doing, Target, Transport, Who};
use crate::interface::cable::Guard;
use crate::judging::Begins;
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

/// Whether rules allow this one, or anybody if it is not known whose connection it is, a server of this name there. Asked once for
/// each connection and name, so that it can write down what it refuses.
pub type Names = Box<dyn Fn(Option<&Arc<Who>>, Transport, SocketAddr, &Name) -> bool + Send + Sync>;

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
    /// How many of those are at each address.
    ours_at: HashMap<IpAddr, usize>,
    /// Who asked for an address of ours.
    askers: Bounded<IpAddr>,
    /// Datagrams in parts whose first part passed a moment ago.
    parts: Lasting<Parts>,
    /// Whom clients of TLS may name.
    served: Served,
    /// And those of QUIC.
    quic: Quic,
    /// A packet socket was allowed: everything passes.
    all: bool,
    counts: Counts,
    told: HashSet<Peer>,
    /// Peers at which some first words could not be understood, which is told once, too.
    told_unread: HashSet<SocketAddr>,
}

/// A datagram in parts: sender, receiver, protocol, number.
type Parts = (IpAddr, IpAddr, u8, u32);

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
            ours_at: HashMap::new(),
            askers: Bounded::new(MOST_ASKERS),
            parts: Lasting::new(MOST_PARTS),
            served: Served::default(),
            quic: Quic::default(),
            all: false,
            counts: Counts::default(),
            told: HashSet::new(),
            told_unread: HashSet::new(),
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

    /// This one's call was allowed that connects to this peer, by these names, one of which clients of TLS must name; `None`: by its
    /// address. It then says from which address and port it did. `None` if there are too many such peers: this one is not to be
    /// [allowed](Self::allow).
    pub fn connects(
        self: &Arc<Self>,
        who: &Arc<Who>,
        peer: SocketAddr,
        names: Option<Vec<Name>>,
    ) -> Option<Begins> {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        let ticket = self.lock().served.allow(peer, names.is_some())?;
        let (fence, who, names) = (Arc::clone(self), Arc::clone(who), names.map(Arc::from));
        Some(Begins::new(move |own: Option<SocketAddr>| {
            let own = own.map(|own| SocketAddr::new(own.ip().to_canonical(), own.port()));
            fence
                .lock()
                .served
                .begins((peer, ticket), own, (who, names));
        }))
    }

    /// This one's call was allowed that speaks with this peer by UDP, by these names, one of which clients of QUIC must name; `None`:
    /// by its address. False if there are too many such peers: this one is not to be [allowed](Self::allow).
    pub fn speaks(&self, who: &Arc<Who>, peer: SocketAddr, names: Option<Vec<Name>>) -> bool {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        self.lock().quic.allow(who, peer, names)
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
        let mut state = self.lock();
        state.ours.extend((peer, own), None);
        *state.ours_at.entry(peer.1).or_default() += 1;
    }

    /// That socket is closed: another one may get its port. A connection says good-bye a moment longer.
    pub fn revoke_port(&self, transport: Transport, peer: SocketAddr, own: u16) {
        let address = peer.ip().to_canonical();
        let flow = ((transport, address, peer.port()), own);
        let mut state = self.lock();
        if let Some(count) = state.ours_at.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                state.ours_at.remove(&address);
            }
        }
        match transport {
            Transport::Tcp => {
                let until = Instant::now() + CLOSING;
                state.ours.end(&flow, until);
                state.known.extend(address, Some(until));
            }
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
        self.leaves_cut(frame, 0)
    }

    /// The same of a super-frame of UDP that is cut into datagrams of `size` bytes; 0: it is none.
    pub fn leaves_cut(&self, frame: &[u8], size: usize) -> bool {
        let mut state = self.lock();
        let fate = state.sent(
            (frame, size),
            self.rules.get(),
            self.addresses.get(),
            self.names.get(),
        );
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

impl Guard for Arc<Fence> {
    fn leaves(&mut self, frame: &[u8], size: usize) -> bool {
        self.leaves_cut(frame, size)
    }

    fn enters(&mut self, frame: &[u8]) -> bool {
        Fence::enters(self, frame)
    }
}

impl State {
    /// A part of a datagram that is not its first.
    fn of_parts(&mut self, parts: Parts, other: IpAddr) -> Fate {
        match self.parts.lives(&parts, Instant::now()) {
            true => Fate::Permitted,
            false => Fate::Denied((Transport::Other(parts.2), other, 0)),
        }
    }

    /// What became of a first part: the others follow, or do not.
    fn first_of_parts(&mut self, parts: Parts, fate: Fate) {
        match fate.passes() {
            true => self.parts.extend(parts, Some(Instant::now() + PARTS_LAST)),
            false => self.parts.remove(&parts),
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
            || self.ours_at.contains_key(&address)
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
/// How long a receiver waits for the rest of one (`ipfrag_time`).
const PARTS_LAST: Duration = Duration::from_secs(30);
/// Peers that are told of.
const MOST_TOLD: usize = 100;
/// For how long one may look who came.
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
mod tests;
