//! One rule, and which acts it is about.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use crate::act::{Act, Doing, Target, Transport, Who};
use crate::floor::{Floor, Network, embedded};
use crate::name::Name;
use crate::rules::glob::Glob;

/// What a rule, or a default, says of an act. In this order each is stricter than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Say {
    /// It is done.
    Allow,
    /// Somebody is asked.
    Ask,
    /// It is refused.
    Deny,
}

/// A rule: what it says of those acts that fulfil all of its conditions. A condition that is empty or `None`
/// is fulfilled by every act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What it says.
    pub say: Say,
    /// The program's file.
    pub program: Option<Glob>,
    /// SHA-256 of the program's file.
    pub sha256: Option<[u8; 32]>,
    /// The command line, its words with blanks between. The program itself says what it is.
    pub arguments: Option<Glob>,
    /// The file that any of its ancestors runs.
    pub parent: Option<Glob>,
    /// The protocols; empty: TCP, UDP, ICMP and others that have addresses, or what `to` says.
    pub protocols: Vec<Protocol>,
    /// The other side; empty: any that is not on the floor.
    pub to: Vec<Place>,
    /// The ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// What is done.
    pub direction: Direction,
    /// For a rule with a name: addresses of the floor are accepted, too, if the name has them.
    pub local: bool,
    /// The rule holds before this time.
    pub until: Option<SystemTime>,
    /// The rule holds for this process alone (pid and start): an answer that is to hold once.
    pub process: Option<(u32, u64)>,
    /// Why the rule is there.
    pub note: Option<String>,
    /// Where it stands.
    pub origin: Origin,
}

/// What is done, as rules say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Direction {
    /// Connecting, sending, resolving names, making sockets of special kinds.
    #[default]
    Out,
    /// Binding to an address, to be found there.
    Listen,
    /// Taking connections.
    Accept,
    /// Changing files.
    Write,
    /// Running programs.
    Execute,
}

/// A protocol, as rules say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// This one.
    Is(Transport),
    /// Netlink sockets of any protocol.
    AnyNetlink,
}

/// The other side, as rules say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Every address and name; for addresses on the floor it does not hold.
    Any,
    /// A network, or one address.
    Network(Network),
    /// All addresses of that floor.
    Floor(Floor),
    /// This name, and the addresses that the sandbox gave for it, while they live.
    Name(Name),
    /// All names below this one, and their addresses.
    Below(Name),
    /// Unix sockets by path.
    Unix(Glob),
    /// Unix sockets by abstract name.
    Abstract(Glob),
    /// `AF_VSOCK` by context id; `None`: any.
    Vsock(Option<u32>),
    /// Files by path.
    File(Glob),
}

/// Where a rule stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file, and the line where the rule begins.
    File(Arc<PathBuf>, usize),
    /// A profile that is part of this program, and the number of the rule there.
    Builtin(&'static str, usize),
    /// An answer of this session.
    Answer,
    /// The command line, or a program that uses this crate.
    Given,
}

impl Rule {
    /// A rule that says this of every act on the network.
    pub fn new(say: Say) -> Self {
        Self {
            say,
            program: None,
            sha256: None,
            arguments: None,
            parent: None,
            protocols: Vec::new(),
            to: Vec::new(),
            ports: Vec::new(),
            direction: Direction::Out,
            local: false,
            until: None,
            process: None,
            note: None,
            origin: Origin::Given,
        }
    }

    /// True if the rule is about `act`; `names` are those by which the address of `act` is known now.
    pub fn matches(&self, act: &Act, names: &[Name], now: SystemTime) -> bool {
        self.is_of(&act.who) && self.is_about(act, names, now)
    }

    /// True if the rule asks who it is.
    pub fn asks_who(&self) -> bool {
        self.program.is_some()
            || self.sha256.is_some()
            || self.arguments.is_some()
            || self.parent.is_some()
            || self.process.is_some()
    }

    /// True if the rule is about what `act` does, whoever does it.
    pub fn is_about(&self, act: &Act, names: &[Name], now: SystemTime) -> bool {
        self.until.is_none_or(|until| now < until)
            && self.direction == Direction::of(act.doing)
            && match act.doing {
                Doing::Resolve => self.is_about_name(&act.target),
                Doing::Create => self.is_about_kind(act.transport),
                _ => self.is_about_target(act, names),
            }
    }

    /// True if the rule names this address of the floor, or this name with leave for such addresses.
    pub fn opens(&self, address: IpAddr, name: &Name) -> bool {
        self.direction == Direction::Out
            && self.to.iter().any(|place| match place {
                Place::Network(network) => {
                    network.contains(address) && Floor::of_network(*network).is_some()
                }
                Place::Floor(floor) => Floor::of_itself(address) == Some(*floor),
                Place::Name(_) | Place::Below(_) => self.local && place.is_name(name),
                _ => false,
            })
    }

    fn is_of(&self, who: &Who) -> bool {
        let runs = |glob: &Glob, program: &PathBuf| glob.matches(&program.to_string_lossy());
        self.process
            .is_none_or(|process| process == (who.pid, who.started))
            && self.sha256.is_none_or(|hash| who.hash == Some(hash))
            && self
                .program
                .as_ref()
                .is_none_or(|glob| runs(glob, &who.program))
            && self
                .arguments
                .as_ref()
                .is_none_or(|glob| glob.matches(&who.arguments.join(" ")))
            && self.parent.as_ref().is_none_or(|glob| {
                who.ancestors
                    .iter()
                    .any(|ancestor| runs(glob, &ancestor.program))
            })
    }

    /// A name may be resolved if it may be reached by some protocol on some port, and must not be if it must not
    /// be reached at all.
    fn is_about_name(&self, target: &Target) -> bool {
        let Target::Name(text) = target else {
            return false;
        };
        let Ok(name) = Name::new(text) else {
            return false;
        };
        if self.say == Say::Deny && !(self.ports.is_empty() && self.protocols.is_empty()) {
            return false;
        }
        let internet = |protocol: &Protocol| matches!(protocol, Protocol::Is(transport) if has_addresses(*transport));
        (self.protocols.is_empty() || self.protocols.iter().any(internet))
            && self.is_to(|place| match place {
                Place::Any => true,
                Place::Name(_) | Place::Below(_) => place.is_name(&name),
                _ => false,
            })
    }

    /// A socket of a special kind may be made if it may be used for something.
    fn is_about_kind(&self, transport: Transport) -> bool {
        let named = self.protocols.iter().any(|protocol| protocol.is(transport));
        let vsock = transport == Transport::Vsock
            && self.to.iter().any(|place| matches!(place, Place::Vsock(_)));
        match self.say {
            Say::Deny => {
                named && self.ports.is_empty() && self.to.iter().all(|place| *place == Place::Any)
            }
            Say::Allow | Say::Ask => named || vsock,
        }
    }

    fn is_about_target(&self, act: &Act, names: &[Name]) -> bool {
        let spoken = |usual: bool| {
            self.protocols
                .iter()
                .any(|protocol| protocol.is(act.transport))
                || (self.protocols.is_empty() && usual)
        };
        match &act.target {
            Target::Internet(to) => {
                let address = to.ip().to_canonical();
                spoken(has_addresses(act.transport) && act.transport != Transport::Raw)
                    && self.has_port(u32::from(to.port()))
                    && self.is_to_address(address, names, act.doing)
            }
            Target::Path(path) => {
                let path = path.to_string_lossy();
                let is = |glob: &Glob| glob.matches(&path);
                match act.doing {
                    // These have a direction of their own, and need no word in `to`.
                    Doing::Write | Doing::Execute => {
                        self.to.is_empty()
                            || self.is_to(|place| matches!(place, Place::File(glob) if is(glob)))
                    }
                    _ => self.is_to_unix(
                        spoken(false),
                        |place| matches!(place, Place::Unix(glob) if is(glob)),
                    ),
                }
            }
            Target::Abstract(name) => {
                let name = String::from_utf8_lossy(name);
                let is =
                    |place: &Place| matches!(place, Place::Abstract(glob) if glob.matches(&name));
                self.is_to_unix(spoken(false), is)
            }
            Target::Vsock { cid, port } => {
                let is = |place: &Place| matches!(place, Place::Vsock(of) if of.is_none_or(|of| of == *cid));
                self.is_to_unix(spoken(false), is) && self.has_port(*port)
            }
            Target::Nobody => spoken(false) && self.is_to(|place| *place == Place::Any),
            Target::Name(_) => false,
        }
    }

    /// With addresses that are no internet addresses: a place of that kind says it all; without one the protocol
    /// must be named.
    fn is_to_unix(&self, is_spoken: bool, is: impl Fn(&Place) -> bool) -> bool {
        self.to.iter().any(is) || (is_spoken && self.is_to(|place| *place == Place::Any))
    }

    fn is_to(&self, is: impl Fn(&Place) -> bool) -> bool {
        self.to.is_empty() || self.to.iter().any(is)
    }

    /// The floor: what opens an address there must name it. What closes it need not.
    fn is_to_address(&self, address: IpAddr, names: &[Name], doing: Doing) -> bool {
        let is_floor =
            doing == Doing::Connect && self.say != Say::Deny && Floor::of(address).is_some();
        let is = |address: IpAddr, place: &Place| match place {
            Place::Any => !is_floor,
            Place::Network(network) => {
                network.contains(address) && (!is_floor || Floor::of_network(*network).is_some())
            }
            Place::Floor(floor) => Floor::of_itself(address) == Some(*floor),
            Place::Name(_) | Place::Below(_) => {
                (!is_floor || self.local) && names.iter().any(|name| place.is_name(name))
            }
            _ => false,
        };
        let is_about = |address: IpAddr| {
            if self.to.is_empty() {
                is(address, &Place::Any)
            } else {
                self.to.iter().any(|place| is(address, place))
            }
        };
        is_about(address) || self.say == Say::Deny && embedded(address).any(is_about)
    }

    fn has_port(&self, port: u32) -> bool {
        let within = |range: &RangeInclusive<u16>| {
            u16::try_from(port).is_ok_and(|port| range.contains(&port))
        };
        self.ports.is_empty() || self.ports.iter().any(within)
    }
}

impl Place {
    /// True if a place that is a name, or all below one, has `name`.
    fn is_name(&self, name: &Name) -> bool {
        match self {
            Self::Name(is) => is == name,
            Self::Below(domain) => name.is_below(domain),
            _ => false,
        }
    }
}

impl Protocol {
    fn is(self, transport: Transport) -> bool {
        match self {
            Self::Is(is) => is == transport,
            Self::AnyNetlink => matches!(transport, Transport::Netlink(_)),
        }
    }
}

impl Direction {
    /// The direction of what is done.
    pub fn of(doing: Doing) -> Self {
        match doing {
            Doing::Create | Doing::Connect | Doing::Resolve => Self::Out,
            Doing::Bind => Self::Listen,
            Doing::Accept => Self::Accept,
            Doing::Write => Self::Write,
            Doing::Execute => Self::Execute,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Builtin(profile, number) => write!(f, "profile {profile}, rule {number}"),
            Self::Answer => write!(f, "an answer of this session"),
            Self::Given => write!(f, "the command line"),
        }
    }
}

/// True of protocols whose other side is an internet address.
fn has_addresses(transport: Transport) -> bool {
    use Transport as T;
    matches!(transport, T::Tcp | T::Udp | T::Icmp | T::Other(_) | T::Raw)
}
