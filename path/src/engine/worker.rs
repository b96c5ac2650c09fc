//! The control thread's handle of a queue, and of the thread that serves it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::input::Input;
use super::run::Engine;
use super::{Command, Pulse, WAITING};
use crate::source::Queue;
use vnplug_os::event;

/// The control thread's handle of a queue that a thread serves.
#[derive(Debug)]
pub struct Worker {
    line: Line,
    /// Disconnected when the queue is closed.
    ended: Receiver<()>,
    /// When it was told to end.
    told: Option<Instant>,
    thread: Arc<Thread>,
}

/// A thread, joined when the last of its queues is gone.
#[derive(Debug, Default)]
struct Thread {
    handle: Mutex<Option<JoinHandle<()>>>,
    /// It hangs: the process ends without it.
    left_behind: AtomicBool,
}

/// Speaks to the thread that serves a queue, about this queue.
#[derive(Debug, Clone)]
pub struct Line {
    commands: Sender<Command>,
    /// Those that the thread has not taken.
    waiting: Arc<AtomicUsize>,
    /// It is to look for some.
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    pulse: Arc<Pulse>,
}

/// How to serve a queue.
#[derive(Debug, Clone, Default)]
pub struct WorkerOptions {
    /// `NAME@QUEUE`.
    pub name: String,
    /// The source's number.
    pub source: u16,
    /// The queue's number.
    pub queue: u16,
    /// Do not receive before the first port that is not paused is attached (files, counted
    /// generators).
    pub hold: bool,
    /// Never sleep: poll the queue (lowest latency, one whole core).
    pub busy: bool,
}

/// How to run a thread.
#[derive(Debug, Clone, Default)]
pub struct ThreadOptions {
    /// Its name, of which the system shows at most 15 bytes.
    pub name: String,
    /// The CPU to run on.
    pub cpu: Option<usize>,
}

/// Starts a thread that serves these queues in turn. The handles are in the same order.
///
/// # Errors
/// The system's, when threads or descriptors are short.
pub fn start(
    queues: Vec<(Box<dyn Queue>, WorkerOptions)>,
    options: ThreadOptions,
) -> io::Result<Vec<Worker>> {
    let thread = Arc::new(Thread::default());
    let started = Instant::now();
    let mut workers = Vec::new();
    let mut inputs = Vec::new();
    for (queue, options) in queues {
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (commands, inbox) = channel();
        let (alive, ended) = channel();
        let state = if options.hold { WAITING } else { queue.state() };
        let line = Line {
            commands,
            waiting: Arc::default(),
            pending: Arc::default(),
            waker,
            pulse: Arc::new(Pulse::new(&options.name, state)),
        };
        let input = Input::new(queue, options, started, inbox, &line, alive)?;
        inputs.push(input);
        workers.push(Worker {
            line,
            ended,
            told: None,
            thread: Arc::clone(&thread),
        });
    }
    let engine = Engine::new(inputs, started);
    let ThreadOptions { name, cpu } = options;
    let handle = std::thread::Builder::new()
        .name(name)
        .spawn(move || engine.run(cpu))?;
    *thread.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
    Ok(workers)
}

impl Worker {
    /// Starts a thread for this queue alone, on any CPU.
    ///
    /// # Errors
    /// As of [`start`].
    pub fn start(queue: Box<dyn Queue>, options: WorkerOptions) -> io::Result<Self> {
        let thread = ThreadOptions {
            name: options.name.clone(),
            cpu: None,
        };
        let mut workers = start(vec![(queue, options)], thread)?;
        Ok(workers.remove(0))
    }

    /// Tells the thread to close the queue, without waiting for that.
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
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let sent = self.commands.send(command).is_ok();
        if !sent {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        // NB: rung before the flag is set. The other way round, a thread that is awake may take the
        // command and clear the bell before it rings, and then finds it ringing for ever.
        event::ring(&self.waker);
        // Release: pairs with the Acquire in Line::take_news; the command is in the channel.
        self.pending.store(true, Ordering::Release);
        sent
    }

    /// What is seen of the thread from outside.
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Whether a command waits for the thread. NB: not whether it is to look for some. It may take one and sleep before its
    /// sender says that.
    pub fn has_commands(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// The thread's end of a [`Line`].
#[derive(Debug)]
pub(super) struct Bell {
    waiting: Arc<AtomicUsize>,
    pending: Arc<AtomicBool>,
    pub(super) waker: Arc<OwnedFd>,
}

impl Bell {
    pub(super) fn of(line: &Line) -> (Self, Arc<Pulse>) {
        let bell = Self {
            waiting: Arc::clone(&line.waiting),
            pending: Arc::clone(&line.pending),
            waker: Arc::clone(&line.waker),
        };
        (bell, Arc::clone(&line.pulse))
    }

    /// Whether it was rung since the last call.
    #[inline]
    pub(super) fn take(&self) -> bool {
        // Acquire: pairs with the Release in Line::send.
        let rung =
            self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::Acquire);
        if rung {
            event::clear(&self.waker);
        }
        rung
    }

    /// A command was taken.
    pub(super) fn took(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
        let told = self.told.map_or(Duration::ZERO, |told| told.elapsed());
        // A thread that hangs in a queue is not joined: the process ends without it.
        let patience = ENDING.saturating_sub(told);
        if let Err(RecvTimeoutError::Timeout) = self.ended.recv_timeout(patience) {
            let name = self.pulse().name();
            log::error!(target: "source", "{name}: its thread does not end; it is left behind");
            self.thread.left_behind.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let handle = self
            .handle
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = handle.take()
            && !*self.left_behind.get_mut()
            && handle.join().is_err()
        {
            log::error!(target: "source", "a source's thread panicked");
        }
    }
}

/// How long a thread may take to close a queue.
const ENDING: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_was_taken_before_its_sender_said_so_does_not_wait() {
        let (commands, inbox) = channel();
        let line = Line {
            commands,
            waiting: Arc::default(),
            pending: Arc::default(),
            waker: Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()),
            pulse: Arc::new(Pulse::new("test", "up")),
        };
        let (bell, _) = Bell::of(&line);
        assert!(!line.has_commands());
        assert!(line.send(Command::Kick(Vec::new())));
        assert!(line.has_commands());
        assert!(bell.take());
        while inbox.try_recv().is_ok() {
            bell.took();
        }
        // As another sender does it, whose command was among these.
        line.pending.store(true, Ordering::Release);
        assert!(!line.has_commands());
        drop(inbox);
        assert!(!line.send(Command::Stop));
        assert!(!line.has_commands(), "nobody is to take it");
    }
}
