//! The thread of one queue: receive, fan out, and between two batches do as told.
//!
//! The thread owns its queue, its ports and every counter; nobody else touches them. The control
//! thread speaks to it by [`Command`]s and rings its eventfd, so that a thread that sleeps on its
//! queue hears them at once. Under load it makes no system call per packet and none per batch
//! beyond what its queue needs.

pub mod loader;
mod pulse;
mod run;
pub mod sender;
mod senders;
mod stuck;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnplug_ring::control::Tuning;
use vnplug_ring::layout::Life;

use crate::engine::sender::SendCounters;
use crate::fanout::FanoutCounters;
use crate::port::{Port, PortCounters, Share};
use crate::rules::{Change, Changed};
use crate::source::early::{Loaded, Standing};
use crate::source::{Latency, Queue, QueueCounters};
pub use pulse::Pulse;
use run::Run;
use vnplug_filter::{IndexSize, Program};
use vnplug_os::event;

/// What the control thread asks of a queue's thread.
pub enum Command {
    /// Serve this port from the next batch on, and share its cluster anew.
    Attach(Box<Port>, Vec<(u32, Share)>),
    /// Stop serving a port, whose ring ends with this life, and share its cluster anew. The port is
    /// handed back: unmapping a large ring takes longer than a queue can wait.
    Detach(u32, Life, Vec<(u32, Share)>, Sender<Option<Box<Port>>>),
    /// Judge with this filter from the next batch on. The old one is handed back: the queue's thread
    /// frees no memory that it need not.
    Filter(u32, Option<Arc<Program>>, Sender<Option<Arc<Program>>>),
    /// Tune a port so from the next batch on.
    Tune(u32, Tuning, Sender<()>),
    /// Let everything through to the daemon, from now on and as long as this generation lasts; if
    /// that fails, its standing says so until it is done.
    Widen(u64, Arc<Standing>, Sender<()>),
    /// Have the kernel drop what this does not let through, if the generation is still this one
    /// (true).
    Narrow(u64, Box<Loaded>, Sender<Result<bool, String>>),
    /// Change a port's rules from the next batch on.
    Rules(u32, Change, Sender<Changed>),
    /// Report the queue's counters and those of these ports.
    Snapshot(Asked, Sender<Snapshot>),
    /// Send what this port transmits, from now on.
    AttachSender(Box<sender::Sender>),
    /// Stop sending for a port.
    DetachSender(u32, Sender<Option<Box<sender::Sender>>>),
    /// Frames wait in transmit rings: look, as every turn does.
    Kick,
    /// End.
    Stop,
}

/// Which ports a snapshot is to tell of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// All; takes the queue's thread about a tenth of a microsecond each.
    All,
    /// Those with these numbers, as far as they are there.
    These(Vec<u32>),
}

/// The state of one queue between two batches.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Counters below the daemon.
    pub queue: QueueCounters,
    /// Counters of the fanout.
    pub fanout: FanoutCounters,
    /// The ports asked for.
    pub ports: Vec<PortSnapshot>,
    /// Filters of ports that are looked up.
    pub filters: IndexSize,
    /// What became of the frames of each port that sends through this queue.
    pub senders: Vec<(u32, SendCounters)>,
    /// What became of all frames sent through this queue.
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
    /// What became of its frames.
    pub counters: PortCounters,
    /// What the kernel dropped of this queue since the port was attached.
    pub kernel_dropped: u64,
    /// Why it is in quarantine, if it is.
    pub quarantined: Option<String>,
}

/// The control thread's handle of a queue's thread.
#[derive(Debug)]
pub struct Worker {
    line: Line,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    /// When it was told to end.
    told: Option<Instant>,
}

/// Speaks to a queue's thread.
#[derive(Debug, Clone)]
pub struct Line {
    commands: Sender<Command>,
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    pulse: Arc<Pulse>,
}

/// How a queue's thread is to run.
#[derive(Debug, Clone, Default)]
pub struct WorkerOptions {
    /// Thread name, at most 15 bytes are shown by the system.
    pub name: String,
    /// The source's number.
    pub source: u16,
    /// The queue's number.
    pub queue: u16,
    /// CPU to run on.
    pub cpu: Option<usize>,
    /// Do not receive before the first port that is not paused is attached (files, counted
    /// generators).
    pub hold: bool,
    /// Never sleep: poll the queue (lowest latency, one whole core).
    pub busy: bool,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, when threads or descriptors are short.
    pub fn start(queue: Box<dyn Queue>, options: WorkerOptions) -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (commands, inbox) = channel();
        let pending = Arc::new(AtomicBool::new(false));
        let name = options.name.clone();
        let state = if options.hold { WAITING } else { queue.state() };
        let pulse = Arc::new(Pulse::new(&name, state));
        let line = Line {
            commands,
            pending: Arc::clone(&pending),
            waker: Arc::clone(&waker),
            pulse: Arc::clone(&pulse),
        };
        let run = Run::new(queue, options, inbox, pending, waker, pulse);
        let (alive, ended) = channel();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            run.run();
            drop::<Sender<()>>(alive);
        })?;
        Ok(Self {
            line,
            thread: Some(thread),
            ended,
            told: None,
        })
    }

    /// Tells the thread to end, without waiting for that.
    pub fn stop(&mut self) {
        if self.told.is_none() {
            self.told = Some(Instant::now());
            self.send(Command::Stop);
        }
    }

    /// What is seen of the thread from outside.
    pub fn pulse(&self) -> &Pulse {
        &self.line.pulse
    }

    /// Sends a command; false if the thread is gone.
    pub fn send(&self, command: Command) -> bool {
        self.line.send(command)
    }

    /// Another handle, for sending only.
    pub fn line(&self) -> Line {
        self.line.clone()
    }
}

impl Line {
    /// Sends a command; false if the thread is gone.
    pub fn send(&self, command: Command) -> bool {
        let sent = self.commands.send(command).is_ok();
        // NB: rung before the flag is set. The other way round, a thread that is awake may take the
        // command and clear the bell before it rings, and then finds it ringing for ever.
        event::ring(&self.waker);
        // Release: pairs with the Acquire in Run::obey; the command is in the channel.
        self.pending.store(true, Ordering::Release);
        sent
    }
}

impl Line {
    /// What is seen of the thread from outside.
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Whether a command waits for the thread.
    pub fn has_commands(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
        let told = self.told.map_or(Duration::ZERO, |told| told.elapsed());
        // A thread that hangs in its queue is left behind: the process ends without it.
        if let Err(RecvTimeoutError::Timeout) = self.ended.recv_timeout(ENDING.saturating_sub(told))
        {
            let name = self.pulse().name();
            log::error!(target: "source", "{name}: its thread does not end; it is left behind");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!(target: "source", "a source's thread panicked");
        }
    }
}

/// What a queue is that waits for its first port.
const WAITING: &str = "waiting";
/// How long a thread may take to end.
const ENDING: Duration = Duration::from_secs(1);
