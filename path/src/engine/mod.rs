//! The thread that serves queues: receive, fan out, and execute commands between two batches.
//!
//! A thread has one queue, or several in turn. It owns them, their ports and every counter; nobody
//! else touches them. The control thread speaks to each queue by [`Command`]s and rings its eventfd,
//! so that a thread that sleeps hears them at once. Under load it makes no system call per packet and
//! none per batch beyond what its queues need.
//!
//! | file | what it has |
//! |---|---|
//! | `run.rs` | the loop, and the sleep |
//! | `input.rs` | one queue with its ports and senders: what a turn is, what commands do |
//! | `worker.rs` | the control thread's handle |
//! | `pulse.rs` | whether the thread still turns, as others see it |
//! | `senders.rs`, `sender.rs`, `terms.rs` | the transmit rings of a queue, what may be sent by them, and which of them are looked at |
//! | `loader.rs` | filters on their way into the kernel |

mod input;
pub mod loader;
mod pulse;
mod run;
pub mod sender;
mod senders;
pub mod terms;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use vnplug_ring::Region;
use vnplug_ring::control::Tuning;
use vnplug_ring::layout::Life;

use crate::engine::sender::SendCounters;
use crate::fanout::FanoutCounters;
use crate::port::{Port, PortCounters, PortProgram, Share};
use crate::rules::{Change, Changed};
use crate::source::early::Loaded;
use crate::source::{Latency, Queue, QueueCounters};
use vnplug_filter::{IndexSize, Program};
use vnplug_twin::Instance;

use terms::Terms;

pub use pulse::Pulse;
pub use worker::{Line, ThreadOptions, Worker, WorkerOptions, start};

/// What the control thread asks of a queue's thread.
pub enum Command {
    /// Serve this port from the next batch on, and redistribute its cluster's shares.
    Attach(Box<Port>, Vec<(u32, Share)>),
    /// Stop serving a port, whose ring ends with this life, and redistribute its cluster's shares.
    /// The port is handed back: unmapping a large ring takes longer than a queue can wait.
    Detach(u32, Life, Vec<(u32, Share)>, Sender<Option<Box<Port>>>),
    /// Judge with this filter from the next batch on. The old one is handed back: the queue's thread
    /// frees as little memory as possible.
    Filter(u32, Option<Arc<Program>>, Sender<Option<Arc<Program>>>),
    /// Judge with this filter of the operator's from the next batch on. The old one is handed back.
    Guard(u32, Option<Arc<Program>>, Sender<Option<Arc<Program>>>),
    /// End a port's rings by an operator's word: the one that it reads, whose frames this program rejects
    /// from now on, and if asked for the one that it sends by. What waits there is not sent.
    Revoke(u32, Option<Arc<Program>>, bool, Sender<()>),
    /// Send for a port on these terms from now on. The old ones are handed back.
    Terms(u32, Arc<Terms>, Sender<Arc<Terms>>),
    /// What the port of the first number sends may be posted in these record areas of another port, too, whose first has that
    /// number there. What had these numbers before is handed back.
    Lend(u32, (u32, u16, Vec<Region>), Sender<Vec<Region>>),
    /// No port that sends here may post what this one received any more; of the port of the first number, its record areas
    /// are handed back.
    Withdraw(u32, u32, Sender<Vec<Region>>),
    /// Use this tuning of a port from the next batch on.
    Tune(u32, Tuning, Sender<()>),
    /// Make the kernel drop what this filter rejects, as long as its generation lasts.
    Narrow(Box<Loaded>, Sender<Result<(), String>>),
    /// Change a port's rules from the next batch on.
    Rules(u32, Change, Sender<Changed>),
    /// Run other versions of operators' programs from the next batch on.
    Exchange(Vec<Exchange>, Sender<()>),
    /// Report the queue's counters and those of these ports.
    Snapshot(Asked, Sender<Snapshot>),
    /// Send the frames of this port's transmit ring, from now on.
    AttachSender(Box<sender::Sender>),
    /// Stop sending for a port.
    DetachSender(u32, Sender<Option<Box<sender::Sender>>>),
    /// Frames wait in the transmit rings of these ports: look at them.
    Kick(Vec<u32>),
    /// End.
    Stop,
}

/// Another version of an operator's program.
pub struct Exchange {
    /// Of the ports that have this one; `None`: of the source itself.
    pub at: Option<Arc<Mutex<PortProgram>>>,
    /// Brings the new one, and takes the old one back: the queue's thread frees as little memory as possible.
    pub parcel: Parcel,
}

impl Exchange {
    /// Puts the new version where the old one was. Nothing else has a lock of these for long: ports hold theirs
    /// during a batch of the same thread, and who sent the parcel looks at it afterwards.
    fn run(self, queue: &mut dyn Queue) {
        let mut parcel = self.parcel.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(new) = parcel.take() else {
            return;
        };
        *parcel = match (&self.at, queue.program()) {
            (Some(port), _) => {
                let mut port = port.lock().unwrap_or_else(PoisonError::into_inner);
                Some(port.exchange(new))
            }
            (None, Some(there)) => Some(std::mem::replace(there, new)),
            (None, None) => Some(new),
        };
    }
}

/// An instance on its way to a queue's thread or back.
pub type Parcel = Arc<Mutex<Option<Instance>>>;

/// Which ports a snapshot contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// All; takes the queue's thread about a tenth of a microsecond each.
    All,
    /// Those of these numbers that exist.
    These(Vec<u32>),
}

/// The state of one queue between two batches.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Counters below the daemon.
    pub queue: QueueCounters,
    /// Counters that only its kind of source has.
    pub own: Vec<(String, u64)>,
    /// Counters of the fanout.
    pub fanout: FanoutCounters,
    /// The ports asked for.
    pub ports: Vec<PortSnapshot>,
    /// Filters of ports that are looked up.
    pub filters: IndexSize,
    /// The fates of the frames of each port that sends through this queue.
    pub senders: Vec<(u32, SendCounters)>,
    /// The fates of all frames sent through this queue.
    pub sends: SendCounters,
    /// How long frames took to a reader and back.
    pub latency: Option<Latency>,
    /// `up`, `down`, `gone`, `waiting`, `ended`, `failed`.
    pub state: String,
    /// Why it failed.
    pub failure: Option<String>,
}

/// One port's part in a queue.
#[derive(Debug, Clone, Default)]
pub struct PortSnapshot {
    /// The port's number.
    pub id: u32,
    /// The fates of its frames.
    pub counters: PortCounters,
    /// What the kernel dropped of this queue since the port was attached.
    pub kernel_dropped: u64,
    /// Why it is in quarantine, if it is.
    pub quarantined: Option<String>,
}

/// The state of a queue that waits for its first port.
const WAITING: &str = "waiting";
