//! An Ethernet interface, received through AF_XDP sockets (Linux ≥ 5.9).
//!
//! A program at the interface's XDP hook sends frames to a socket for each receive queue of the
//! NIC; the driver, or the kernel for it, puts them into packet memory of ours and their places
//! into a ring. A frame costs no system call and none of the host's receive path.
//!
//! - **Takes, does not mirror.** Frames sent to a socket do not reach the host's stack. `take` is a
//!   filter of the frames that we take; everything else passes to the host as if we were not there.
//!   The packet-socket source mirrors: the host also receives what we capture.
//! - **Modes**, best first, chosen by what the driver can do: the NIC writes into our memory
//!   (zero-copy); the driver runs the program and copies (native); the kernel runs it after the
//!   driver and copies (generic), which works with every interface and saves least.
//! - **Received frames alone.** XDP does not see what this host sends.
//! - **Time.** The program stamps each frame with the kernel's clock, where the driver leaves room
//!   before the frame; else, or if not wanted, a frame has the time at which its batch was read.
//! - **Cost** on a veth (docs/measuring.md): more than over a packet socket with short frames, as much
//!   with long ones, and always more than a reader of libpcap. This source alone, without a port, takes
//!   half of it: the wait for two cache lines that another CPU wrote, and a wake-up every 2 ms; flow hash,
//!   port and ring are the rest.
//! - **The sender's side** of a veth: the kernel copies a frame twice, and once for libpcap.
//!   Elsewhere XDP saves the work of driver and stack after the program; on a veth that work is
//!   done before a frame reaches the program.
//! - **VLAN.** Tags are in the frame, as on the wire, unless the NIC takes them out: XDP then does
//!   not see them, which is logged with what to do.
//! - **Long frames** come in pieces and are joined by a copy (Linux ≥ 6.6, driver permitting).
//!   Without that the MTU must fit into a chunk of packet memory.
//! - **Detached** when the process ends in whatever way: a descriptor holds the program.
//! - **Early drop**, if asked for: the program drops and counts (`early`) taken frames that no port
//!   wants; it is one program for all queues.
//! - **The operator's program**, if there is one, is a part of ours, before early drop.
//! - **Counting.** The program counts what it sends to sockets (with `early`, `seen`); the sockets count what
//!   found no room (`dropped`). Frames that pass to the host are not counted.

mod fault;
mod flow;
mod lending;
mod netlink;
mod program;
mod queue;
mod socket;

use std::sync::Arc;

pub use fault::Unfit;
pub(crate) use program::{ProgramPlan, Programs};

use lending::Lending;

use super::lent::PacketPath;
use super::{Queue, SourceError};
use vnplug_filter::Program;
use vnplug_os::umem::{HEADROOM, LENT_HEADROOM};
use vnplug_os::xdp::KERNEL_HEADROOM;

/// How frames come into packet memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The best that works.
    #[default]
    Auto,
    /// The NIC writes them; the driver runs the program.
    ZeroCopy,
    /// The driver runs the program; the kernel copies.
    Native,
    /// The kernel runs the program after the driver, and copies.
    Generic,
}

/// How to receive from an interface.
#[derive(Debug, Clone)]
pub struct AfXdpConfig {
    /// The interface's name in this network namespace.
    pub interface: String,
    /// The NIC's receive queues, each for a thread of its own; none: all that it has.
    pub queues: Vec<u32>,
    /// How frames are to come.
    pub mode: Mode,
    /// Which frames to take; the others pass to the host. `None`: all.
    pub take: Option<Arc<Program>>,
    /// The operator's program, through which frames go that are taken; what it does not let pass is not received.
    pub program: Option<Arc<vnplug_twin::Program>>,
    /// Also frames addressed to other stations.
    pub promiscuous: bool,
    /// Chunks to receive into for each queue, a power of two from 64 to 2^20; `None`:
    /// [`MANY_FRAMES`], or fewer where there are more than four queues.
    pub frames: Option<u32>,
    /// Bytes of a chunk: 2048 or 4096. 400 of them are not for the frame, 416 if it is lent.
    pub frame_size: u32,
    /// Receive frames that need several chunks.
    pub multi_buffer: bool,
    /// Each frame is stamped in the kernel; else the batch is when it is read.
    pub stamps: bool,
    /// Microseconds for which frames gather after some were read, instead of waking the reader one
    /// by one; 0: not at all. The latency of a wire that is neither idle nor full; less than this
    /// where packet memory would fill meanwhile, and when frames begin to come.
    pub coalesce_us: u32,
    /// Microseconds for which a read may poll the driver instead of waiting for its interrupt; 0:
    /// never. Needs `CAP_NET_ADMIN`, a driver with NAPI, and a CPU for each queue to be of use.
    pub busy_poll_us: u32,
    /// Let the kernel drop what no port wants ([`early`](super::early)); loading such programs takes
    /// `CAP_BPF` and `CAP_NET_ADMIN` at any time.
    pub early: bool,
    /// Lend packet memory to the groups of this source as their arena: frames reach their members
    /// without a copy. A member then sees whatever this source receives, so this states that
    /// everybody who may have its packets unfiltered may have all of them. Takes as many chunks
    /// again, in which frames stay while they are read.
    pub lends: bool,
    /// Lend it in this file, so that VMs can map it, too, and the next daemon uses it again.
    pub lends_in: Option<PacketPath>,
}

impl AfXdpConfig {
    /// Everything that `interface` receives, by all of its queues, in the best mode.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            queues: Vec::new(),
            mode: Mode::Auto,
            take: None,
            program: None,
            promiscuous: true,
            frames: None,
            frame_size: 2048,
            multi_buffer: true,
            stamps: true,
            coalesce_us: 2000,
            busy_poll_us: 0,
            early: false,
            lends: false,
            lends_in: None,
        }
    }

    fn check(&self) -> Result<(), SourceError> {
        let power = |name: &str, value: u32, low: u32, high: u32| {
            if value.is_power_of_two() && (low..=high).contains(&value) {
                return Ok(());
            }
            Err(SourceError::new(format!(
                "{name} is {value}; it must be a power of two from {low} to {high}"
            )))
        };
        if let Some(frames) = self.frames {
            power("frames", frames, 64, 1 << 20)?;
        }
        power("frame_size", self.frame_size, 2048, 4096)?;
        for (name, micros) in [
            ("busy_poll", self.busy_poll_us),
            ("coalesce", self.coalesce_us),
        ] {
            if micros > MAX_MICROS {
                return Err(SourceError::new(format!(
                    "{name} is {micros} microseconds; it must be at most {MAX_MICROS}"
                )));
            }
        }
        let mut queues = self.queues.clone();
        queues.sort_unstable();
        match queues.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => {
                let what = format!("receive queue {} is given twice", pair[0]);
                Err(SourceError::new(what))
            }
        }
    }

    /// Chunks of each of this many queues.
    fn frames(&self, queues: usize) -> u32 {
        let share = 4 * MANY_FRAMES / (queues.max(4) as u32).next_power_of_two();
        self.frames.unwrap_or(share)
    }

    /// Bytes before each frame that are ours.
    fn headroom(&self) -> u32 {
        match self.lends {
            true => LENT_HEADROOM,
            false => HEADROOM,
        }
    }

    /// The longest frame that fits into one chunk, Ethernet header included.
    fn room(&self) -> u32 {
        self.frame_size - KERNEL_HEADROOM - self.headroom()
    }
}

/// The AF_XDP source.
#[derive(Debug)]
pub struct AfXdp;

/// An interface that is received.
pub struct Opened {
    /// One for each receive queue.
    pub queues: Vec<Box<dyn Queue>>,
    /// The mode, and what happens to frames, for people.
    pub how: String,
}

impl AfXdp {
    /// Starts to receive; gives one [`Queue`] for each receive queue of the NIC.
    ///
    /// Needs `CAP_NET_RAW`, `CAP_BPF` and `CAP_NET_ADMIN` (root); afterwards `CAP_NET_RAW` is
    /// enough to go on when the interface was down, or was deleted and made again.
    ///
    /// # Errors
    /// [`Unfit`], which says whether a packet socket may do instead.
    pub fn open(config: AfXdpConfig) -> Result<Opened, Unfit> {
        config.check()?;
        let (opener, queues) = socket::Opener::open(config)?;
        let opener = Arc::new(opener);
        let (umems, lending) = opener.umems(queues.len())?;
        let mut bound = Vec::new();
        for (queue, umem) in queues.iter().zip(umems) {
            let socket = opener.bind(*queue, umem, PATIENCE);
            bound.push((*queue, socket.map_err(|(error, _)| error)?));
        }
        let lends = match lending.map(Lending::lay).transpose() {
            Ok(lends) => lends.unwrap_or_default(),
            Err(cause) => return Err(opener.no_memory(cause)),
        };
        let mut lends = lends.into_iter();
        let how = opener.describe(&bound);
        // Last of all, so that a source that does not open takes nothing from the host.
        for (queue, bound) in &bound {
            opener.start(*queue, bound)?;
        }
        let mut queues = Vec::<Box<dyn Queue>>::new();
        for (queue, bound) in bound {
            let queue = queue::XdpQueue::new(Arc::clone(&opener), queue, bound, lends.next());
            queues.push(Box::new(queue.map_err(Unfit::other)?));
        }
        log::info!(target: "source", "interface {:?}: {how}", opener.config().interface);
        opener.look_at_tags();
        Ok(Opened { queues, how })
    }
}

/// Chunks of a queue, if nothing else is said: 1.1 ms of 10 Gbit/s of 64-byte frames, 11 of 1 Gbit/s.
pub const MANY_FRAMES: u32 = 16_384;

/// The most receive queues.
pub const MAX_QUEUES: u32 = 256;

const MAX_MICROS: u32 = 10_000;

/// How long an opening waits for what a process that ended a moment ago still holds.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(3);
