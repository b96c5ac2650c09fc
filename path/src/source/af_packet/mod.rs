//! An Ethernet interface, received through packet sockets (`AF_PACKET`, TPACKET_V3; Linux ≥ 4.20).
//!
//! The kernel writes frames into blocks of a ring that it shares with us and hands over whole
//! blocks; a queue lends the frames from there, so a frame costs no system call and no copy here.
//! A block goes back once its last frame was handed out. Works with every driver; costs a copy and
//! the kernel's receive path per frame.
//!
//! - **Block timeout.** A block that does not fill is handed over after `block_timeout_ms`: the
//!   latency of a quiet wire, half of it in the median. Measured on a busy 2-core machine, lone
//!   frames at 1, 2, 4 and 8 ms took 0.6, 1.1, 2.2 and 6.2 ms, and a trickle of 7,000 frames/s
//!   woke the reader 959, 483, 250 and 125 times a second (1.4, 1.8, 0.5 and 0.1 % of a core). On a
//!   quiet wire a few frames use up every such block, so a ring is used up in
//!   `blocks × block_timeout_ms`.
//! - **Reserve.** Hence two thirds of the blocks are a second ring, which takes over when the first is
//!   nearly full, and whose blocks close much later (`rings.rs`). One queue has it; several are a group
//!   of the kernel's already, and there are no groups of groups.
//! - **Queues** share the interface's frames by a symmetric flow hash (`PACKET_FANOUT_HASH`): both
//!   directions of a flow come to one queue, in order. Frames without an IP flow come to the first
//!   queue; later fragments of a datagram hash by address alone; tunnels hash by their innermost
//!   flow where the kernel can see it. The kernel does not put fragments together and a full queue
//!   does not spill into another: both would change what was on the wire or its order.
//! - **Direction** is decided by a filter in the kernel, before anything is queued or counted.
//!   With it goes what the ports together want ([`early`](super::early)).
//!   On loopback every frame passes twice, out and in; [`Direction::Both`] takes the way in alone.
//! - **Offloads.** Frames that the kernel merged (GRO) or has not yet cut (GSO) arrive whole, up to
//!   [`AfPacketConfig::snaplen`]; `ethtool -K IF gro off` shows what is on the wire.
//! - **Sending** goes through the same sockets, a batch per system call. The kernel shows none of them what
//!   one of them sends, so the queue shows it to the fanout by itself (`outbox.rs`), unless it is of a
//!   direction that is not captured or, on loopback, comes back.

mod awaited;
mod block;
mod held;
mod interfaces;
mod kept;
mod load;
mod namespace;
mod outbox;
mod queue;
mod rings;
mod socket;

use std::sync::Arc;

pub use interfaces::{Facts, Interface, InterfaceInfo, interfaces};
pub use kept::Lasting;
pub use namespace::Namespace;
use vnplug_os::bpf::Program;
use vnplug_ring::layout::MAX_SNAPLEN;

use self::rings::Shares;
use super::early::SeatOffice;
use super::{Queue, SourceError};

/// Frames of which direction are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direction {
    /// Frames that the interface received.
    Rx,
    /// Frames that this host sent by the interface.
    Tx,
    /// Both.
    #[default]
    Both,
}

/// How to receive from an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AfPacketConfig {
    /// The interface's name in its network namespace.
    pub interface: String,
    /// The network namespace, if it is not that of the calling threads.
    pub namespace: Option<Arc<Namespace>>,
    /// Which frames.
    pub direction: Direction,
    /// Also frames addressed to other stations.
    pub promiscuous: bool,
    /// Queues, each for a thread of its own: 1 to [`MAX_QUEUES`].
    pub queues: u32,
    /// Bytes of a ring block; rounded up to whole pages. A frame longer than a block, less about
    /// 200 bytes of headers, is cut to fit.
    pub block_size: u32,
    /// Ring blocks of each queue, at least 2; a queue takes `block_size × blocks` bytes of kernel
    /// memory, committed at once.
    pub blocks: u32,
    /// Let two thirds of the blocks be a reserve, which takes over when the rest is nearly full. Is
    /// there with one queue, at least 96 blocks and no hardware timestamps.
    pub reserve: bool,
    /// The longest time in milliseconds that a frame waits for its block to fill: 1 to 1000.
    pub block_timeout_ms: u32,
    /// Captured bytes of each frame, VLAN tag included: 64 to `MAX_SNAPLEN`. `Frame::wire_len`
    /// tells how long a cut frame was.
    pub snaplen: u32,
    /// Ask the NIC to stamp every frame and take its stamps (`flags::HW_TIMESTAMP`). Where it
    /// cannot, this is logged and the kernel stamps. Off, NIC stamps are not used even if something
    /// else (a PTP daemon) switched them on, as their clock may be another, and not every frame
    /// has one. Needs `CAP_NET_ADMIN`; concerns the whole NIC and stays on afterwards.
    pub hardware_timestamps: bool,
    /// Learn of each frame what is still to be cut or summed (`flags::OFFLOAD`), and let ports send such
    /// frames.
    ///
    /// NB: by default from Linux 6.2 on. Older kernels drop UDP super-frames for a socket that asks
    /// (`virtio_net_hdr_from_skb`); all of them drop those of SCTP.
    pub offload: bool,
    /// Let the kernel drop what no port wants ([`early`](super::early)).
    pub early: bool,
    /// Who makes what that needs.
    pub seats: SeatOffice,
    /// Bytes of frames that may be on their way out; `None`: what the system gives everybody
    /// (`net.core.wmem_default`), which three super-frames fill. More than `net.core.wmem_max` only while
    /// the process has `CAP_NET_ADMIN`.
    pub send_bytes: Option<u32>,
    /// A program that decides what is received, instead of what the direction says.
    pub gate: Option<Gate>,
    /// Who keeps the sockets over a restart, if somebody does. Not those of another network namespace.
    pub lasting: Option<Lasting>,
}

/// A program of a packet socket that somebody else made. What it drops it counts itself: the kernel counts it
/// nowhere.
#[derive(Debug, Clone)]
pub struct Gate(pub Arc<Program>);

impl PartialEq for Gate {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gate {}

impl AfPacketConfig {
    /// Everything that passes `interface`, by one queue with 96 MiB for its rings.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            namespace: None,
            direction: Direction::Both,
            promiscuous: true,
            queues: 1,
            block_size: 256 << 10,
            blocks: 384,
            reserve: true,
            block_timeout_ms: 2,
            snaplen: MAX_SNAPLEN,
            hardware_timestamps: false,
            offload: tells_of_super_frames(),
            early: true,
            seats: SeatOffice::default(),
            send_bytes: None,
            gate: None,
            lasting: None,
        }
    }

    /// How the blocks are shared, if there is a reserve. Frames are brought in order by their stamps,
    /// so these must be of one clock.
    fn shares(&self) -> Option<Shares> {
        let has = self.reserve && self.queues == 1 && !self.hardware_timestamps;
        (has && self.blocks >= MIN_SHARED_BLOCKS)
            .then(|| Shares::of(self.blocks, self.block_timeout_ms))
    }

    fn check(&self) -> Result<(), SourceError> {
        let limits = [
            ("queues", self.queues, 1, MAX_QUEUES),
            ("blocks", self.blocks, 2, 1 << 20),
            ("block_size", self.block_size, 4096, 1 << 30),
            ("block_timeout_ms", self.block_timeout_ms, 1, 1000),
            ("snaplen", self.snaplen, 64, MAX_SNAPLEN),
        ];
        // The kernel counts a ring's bytes in 32 bits.
        if u64::from(self.block_size) * u64::from(self.blocks) >= 1 << 32 {
            return Err(SourceError::new(format!(
                "a ring of {} blocks of {} bytes is too large; it must be less than 4 GiB",
                self.blocks, self.block_size
            )));
        }
        match limits
            .into_iter()
            .find(|&(_, value, low, high)| value < low || value > high)
        {
            None => Ok(()),
            Some((name, value, low, high)) => Err(SourceError::new(format!(
                "{name} is {value}; it must be {low} to {high}"
            ))),
        }
    }
}

/// Whether the kernel can say of super-frames of TCP and UDP what they are, and takes both; older ones
/// (before Linux 6.2) know those of TCP.
pub fn tells_of_super_frames() -> bool {
    kernel() >= (6, 2)
}

/// The kernel's version, as far as it says one.
fn kernel() -> (u32, u32) {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|it| it.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The most queues of an interface.
pub const MAX_QUEUES: u32 = 64;

/// With fewer the kernel's idea of room is too coarse.
const MIN_SHARED_BLOCKS: u32 = 96;

/// The packet-socket source.
#[derive(Debug)]
pub struct AfPacket;

impl AfPacket {
    /// As [`open`](Self::open), but an interface that does not exist is waited for: until there is one of that name, the queues
    /// are `missing` and have nothing.
    ///
    /// # Errors
    /// As of [`open`](Self::open), of what is there.
    pub fn open_when_there(config: AfPacketConfig) -> Result<Vec<Box<dyn Queue>>, SourceError> {
        config.check()?;
        let opener = Arc::new(socket::Opener::new(config));
        if opener.is_there()? {
            return Self::open(opener.config().clone());
        }
        let queue = |number| Box::new(awaited::Awaited::new(Arc::clone(&opener), number)) as Box<_>;
        Ok((0..opener.config().queues).map(queue).collect())
    }

    /// Starts to receive; gives one [`Queue`] for each of `config.queues`.
    ///
    /// An interface that goes down, or is deleted and made again, does not end a queue: it goes on
    /// when the interface is back (found by name, in the configuration's network namespace or that of the thread that
    /// calls [`Queue::woke`]).
    ///
    /// # Errors
    /// [`SourceError`] if the configuration is out of range, the interface does not exist or is
    /// not Ethernet, the process lacks `CAP_NET_RAW`, or the kernel has no memory for the rings.
    pub fn open(config: AfPacketConfig) -> Result<Vec<Box<dyn Queue>>, SourceError> {
        config.check()?;
        let resumed = socket::Opener::resumable(&config)
            .find_map(|opener| opener.resume().map(|queues| (opener, queues)));
        if resumed.is_some() {
            let name = &config.interface;
            log::info!(target: "source", "goes on receiving from {name:?} where an earlier daemon stopped");
        }
        let (opener, queues) = match resumed {
            Some(resumed) => resumed,
            None => {
                let opener = Arc::new(socket::Opener::new(config));
                let queues = 0..opener.config().queues;
                let queues = queues.map(|queue| opener.open(queue));
                let queues = queues.collect::<Result<Vec<_>, _>>()?;
                (opener, queues)
            }
        };
        // Filters open last: no frame arrives twice while the group gains its members.
        for bound in &queues {
            opener.start(bound)?;
        }
        let queue = |bound| queue::PacketQueue::new(Arc::clone(&opener), bound);
        let queue = |bound| match opener.config().namespace {
            None => Box::new(queue(bound)) as Box<_>,
            // Which may go, and another one come.
            Some(_) => Box::new(awaited::Awaited::found(queue(bound))) as Box<_>,
        };
        Ok(queues.into_iter().map(queue).collect())
    }
}

pub(super) fn is_capturable(hardware: u16) -> bool {
    matches!(hardware, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK)
}
