//! One network act of a program: who does what, with whom.
//!
//! Made from copied arguments, and never looked up again in the program's memory.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// What a program wants to do, with all that a rule can ask about.
#[derive(Clone, Debug)]
pub struct Act {
    /// The process.
    pub who: Arc<Who>,
    /// What it does.
    pub doing: Doing,
    /// By which protocol.
    pub transport: Transport,
    /// With whom, or on which address of its own.
    pub target: Target,
}

/// A process, as it was when it did something. The default one is nobody: it is not known who it was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// Process id (of the thread group) in the sandbox's PID namespace.
    pub pid: u32,
    /// Start of the process in clock ticks since boot: with the pid it names one process, also if the pid is used
    /// again.
    pub started: u64,
    /// The file it runs.
    pub program: PathBuf,
    /// SHA-256 of that file; `None` if it could not be read.
    pub hash: Option<[u8; 32]>,
    /// Its command line, as it shows it itself: a program can change this one.
    pub arguments: Vec<String>,
    /// Its parents, the nearest first, up to the program that the sandbox started.
    pub ancestors: Vec<Ancestor>,
}

impl Who {
    /// Bytes of it in memory.
    pub(crate) fn bytes(&self) -> usize {
        let words = self
            .arguments
            .iter()
            .map(|word| word.len() + size_of_val(word));
        let parents = self.ancestors.iter();
        let parents = parents.map(|it| it.program.as_os_str().len() + size_of_val(it));
        let own = size_of_val(self) + self.program.as_os_str().len();
        own + words.sum::<usize>() + parents.sum::<usize>()
    }
}

/// A parent of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Process id.
    pub pid: u32,
    /// The file it runs.
    pub program: PathBuf,
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Doing {
    /// Makes a socket of a kind that is judged when it is made: raw, packet, netlink, vsock.
    Create,
    /// Connects, or sends to an address.
    Connect,
    /// Binds to an address to be found there.
    Bind,
    /// Takes a connection; the target is the peer's address.
    Accept,
    /// Asks for the addresses of a name.
    Resolve,
    /// Opens a file for writing, or makes, removes or renames one (`--files`).
    Write,
    /// Runs a program (`--files`).
    Execute,
}

/// A protocol as rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP (stream sockets of `AF_INET`, `AF_INET6`; MPTCP too).
    Tcp,
    /// UDP and UDP-Lite.
    Udp,
    /// ICMP and ICMPv6 by datagram sockets (`ping`).
    Icmp,
    /// SCTP, DCCP and others of `AF_INET`, `AF_INET6`, by their number of IANA.
    Other(u8),
    /// Raw sockets of `AF_INET`, `AF_INET6`: any IP packet.
    Raw,
    /// Packet sockets: any frame.
    Packet,
    /// Unix sockets, with a path or with an abstract name.
    Unix,
    /// Netlink, by protocol (`NETLINK_ROUTE` is 0).
    Netlink(u8),
    /// `AF_VSOCK`.
    Vsock,
    /// Any other address family, by its number.
    Family(u16),
    /// Not a network: a file.
    File,
}

/// The other side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// An address and port (port 0: none, as with ICMP).
    Internet(SocketAddr),
    /// A name that is to be resolved.
    Name(String),
    /// A file, or a Unix socket's path.
    Path(PathBuf),
    /// A Unix socket's abstract name, without its leading zero byte.
    Abstract(Vec<u8>),
    /// A context id and port of `AF_VSOCK`.
    Vsock {
        /// Context id.
        cid: u32,
        /// Port.
        port: u32,
    },
    /// Nothing: the act names nobody (making a socket).
    Nobody,
}
