//! The one client protocol: applications to the daemon, applications to a guest agent, agent to
//! daemon over a VM's control channel.
//!
//! A message is a 24-byte header and a payload ([`wire`]); everything is little-endian. A client
//! sends requests and gets exactly one answer to each, in order, with the request's `id`:
//!
//! ```text
//! Hello   → Welcome            first on every connection
//! List    → Devices
//! Open    → Opened   + file descriptors on a Unix socket: the rings' memory, the doorbell
//! Filter  → Done               takes effect between two packets; the old one stays on Error
//! Tune    → Done               direction, sampling, pause; between two packets, too
//! AddRules, RemoveRule, RuleDefault → Done;  PurgeRules → Purged;  RuleStats → RuleCounters
//! Note    → Done             what the reader says of its work; told with the port's counters
//! Stats   → Counters
//! Close   → Done
//! Switch  → Counters or Done  operators: how a switch is, its settings, closing a port of it
//! Sources → Counters           operators: sources that come and go, the configuration read again
//! Direct  → Members + file descriptors: who is in a port's trust group; see `direct`
//! Backend                     third parties' back-ends, and who uses them; see `backend`
//! Grow                        memory that a VM gets while it runs; see `grow`
//! Programs → Programs         the operator's programs, and what lies in their maps; see `program`
//! any     → Error              the request had no effect
//! ```
//!
//! The daemon speaks unasked only with `id` 0: `Wake` (VM channels: these ports' readers are to be
//! woken) and `Gone` (a port ended for a reason).
//!
//! `app` in the header tells one application of a guest from another: an agent numbers its
//! applications, from 1, and relays their messages under that number; the daemon answers under the
//! same one. On a Unix socket there is one application, 0. A port belongs to the application that
//! opened it; nobody else can name it.
//!
//! Reading is total: any bytes give a message or a [`Malformed`]; no length makes the reader
//! allocate more than [`wire::MAX_PAYLOAD`]. A payload may be longer than this version knows; the
//! rest is ignored, so that fields can be appended.

pub mod apart;
pub mod backend;
pub mod grow;
pub mod program;
pub mod wire;

mod device;
mod direct;
mod grant;
mod message;
mod open;
mod rule;
mod source;
mod switch;
mod vm;

pub use backend::Backend;
pub use device::{Counted, Device};
pub use direct::{Direct, DirectMember, Members};
pub use grant::{GrantAction, GrantKind, GrantRequest, Revoke, Whose};
pub use grow::Grow;
pub use message::{Message, Role};
pub use open::{
    ArenaHome, Arenas, Balance, Direction, FilterSpec, Open, Opened, RingPlace, Segments, Tuning,
};
pub use program::{ProgramChange, ProgramInfo, ProgramMap, Programs};
pub use rule::{
    ExactRule, Flow, MAX_EXACT_RULES, MAX_WILDCARD_RULES, NO_VLAN, Network, Pattern, Rule,
    RuleAction, RuleKey, RuleKind, WildcardRule,
};
pub use source::SourceRequest;
pub use switch::{SwitchAsk, SwitchRequest};
pub use vm::{Grant, HostGroup, VmKind, VmReady, VmSpec};
pub use wire::{Header, Malformed};

/// Version of the protocol. `Hello` offers a range, `Welcome` picks one.
pub const VERSION: u8 = 1;

/// Name of the virtio-serial port that carries the protocol into a QEMU guest.
pub const VIRTIO_PORT_NAME: &str = "org.vnplug.control";

/// Bytes that a daemon may have on their way to an agent behind a tty before the agent acknowledges
/// some. A guest's tty holds 4096 bytes (N_TTY_BUF_SIZE); User-mode Linux (6.1) stops reading a
/// line that was full once, and may never begin again.
pub const TTY_WINDOW: usize = 2048;

/// Prefix of the names of the host's devices; required in guests, allowed on the host.
pub const HOST_PREFIX: &str = "host:";
/// What the labels of a switch's counters begin with that say where its entrances are: then comes the name
/// of the entrance's option, and the value is an absolute path.
pub const ENTRANCE_PREFIX: &str = "entrance_";

/// What [`Message::Gone`] says of a port that an operator revoked: its reader does not open it again, also if
/// it reads this before its rings say so, or when they are freed already.
pub const REVOKED: &str = "an operator revoked the port";
/// What [`Backend::Hangup`] says of a channel that an operator revoked: its program does not open it again. The
/// daemon passes no such reason that comes from the other end.
pub const REVOKED_CHANNEL: &str = "an operator revoked the channel";

/// Where the daemon (on a host) or the agent (in a guest) listens, unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/vnplug/vnplug.sock";

/// Codes in [`Message::Error`].
pub mod code {
    /// The message is malformed or does not belong here; the connection may be closed.
    pub const PROTOCOL: u16 = 1;
    /// No device, port or VM of that name or number (or the policy hides it).
    pub const NOT_FOUND: u16 = 2;
    /// The operator's policy forbids it.
    pub const DENIED: u16 = 3;
    /// A value is out of range; the text says which and what is allowed.
    pub const INVALID: u16 = 4;
    /// The filter was refused; the text is libpcap's own.
    pub const FILTER: u16 = 5;
    /// Not enough memory (ring, pool, huge pages) at this moment.
    pub const NO_MEMORY: u16 = 6;
    /// A limit was reached (ports, connections, requests per second).
    pub const LIMIT: u16 = 7;
    /// The name is taken.
    pub const EXISTS: u16 = 8;
    /// The daemon cannot be reached at this moment (an agent says this while it reconnects).
    pub const UNAVAILABLE: u16 = 9;
    /// Something of ours failed; the text says what.
    pub const INTERNAL: u16 = 10;
}
