//! The thread of one queue: receive, fan out, and between two batches do as told.
//!
//! The thread owns its queue, its ports and every counter; nobody else touches them. The control
//! thread speaks to it by [`Command`]s and rings its eventfd, so that a thread that sleeps on its
//! queue hears them at once. Under load it makes no system call per packet and none per batch
//! beyond what its queue needs.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnplug_ring::control::Tuning;
use vnplug_ring::layout::Life;

use super::early::Loaded;
use super::senders::Senders;
use super::{Latency, Queue, QueueCounters, Received};
use crate::fanout::{Fanout, FanoutCounters};
use crate::filter::{IndexSize, Program};
use crate::port::sender::{self, SendCounters};
use crate::port::{Port, PortCounters, Share};
use crate::rules::{Change, Changed};
use crate::sys::event;

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
    /// Let everything through to the daemon, from now on and as long as this generation lasts.
    Widen(u64, Sender<()>),
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
#[derive(Debug, Clone)]
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
}

/// Speaks to a queue's thread.
#[derive(Debug, Clone)]
pub struct Line {
    commands: Sender<Command>,
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
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
        let run = Run {
            queue,
            fanout: Fanout::new(options.source, options.queue),
            senders: Senders::default(),
            leaving: Vec::new(),
            inbox,
            pending: Arc::clone(&pending),
            waker: Arc::clone(&waker),
            started: Instant::now(),
            over: None,
            generation: 0,
            options,
        };
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || run.run())?;
        let line = Line {
            commands,
            pending,
            waker,
        };
        Ok(Self {
            line,
            thread: Some(thread),
        })
    }

    /// Sends a command; false if the thread is gone.
    pub fn send(&self, command: Command) -> bool {
        self.line.send(command)
    }

    /// Another handle, for sending only.
    pub(crate) fn line(&self) -> Line {
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

impl Drop for Worker {
    fn drop(&mut self) {
        self.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!(target: "source", "a source's thread panicked");
        }
    }
}

struct Run {
    queue: Box<dyn Queue>,
    fanout: Fanout,
    senders: Senders,
    /// Senders that are to go when they have sent their last.
    leaving: Vec<Leaving>,
    inbox: Receiver<Command>,
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    started: Instant,
    over: Option<Over>,
    /// How often the kernel's filter was widened.
    generation: u64,
    options: WorkerOptions,
}

/// A sender that is to go.
struct Leaving {
    id: u32,
    /// How many frames it may have sent by then.
    last: u64,
    reply: Sender<Option<Box<sender::Sender>>>,
}

enum Over {
    Ended,
    Failed(String),
}

impl Over {
    /// What the readers' rings say of it.
    fn life(&self) -> Life {
        match self {
            Self::Ended => Life::Ended,
            Self::Failed(_) => Life::Failed,
        }
    }
}

impl Run {
    /// Serves until told to stop.
    ///
    /// A panic outside a port's own code, which the fanout catches, is a bug in the source's: the
    /// source has failed, its readers are told, and the thread goes on answering.
    fn run(mut self) {
        if let Some(cpu) = self.options.cpu {
            pin(cpu);
        }
        for _ in 0..MAX_PANICS {
            if catch_unwind(AssertUnwindSafe(|| self.serve())).is_ok() {
                return;
            }
            let what = "its thread panicked, which is a bug in vnplugd: restart the daemon";
            log::error!(target: "source", "{}: {what}", self.options.name);
            if self.over.is_none() {
                self.end(Over::Failed(what.into()));
            }
        }
    }

    fn serve(&mut self) {
        let mut now_us = self.now_us();
        let mut looked_us = now_us;
        loop {
            if !self.obey() {
                break;
            }
            let sending = self.send();
            if self.over.is_some() || self.holds() {
                if !sending {
                    self.sleep_without_queue();
                }
                continue;
            }
            self.options.hold = false;
            let fanout = &mut self.fanout;
            let received = self
                .queue
                .receive(&mut |frames| fanout.deliver(frames, now_us));
            now_us = self.now_us();
            match received {
                Ok(Received::Frames(_)) => {
                    if self.fanout.due_us().is_some_and(|due| due <= now_us) {
                        self.fanout.tick(now_us);
                    }
                }
                Ok(Received::Nothing) => {
                    self.fanout.tick(now_us);
                    if !self.options.busy && !sending && !self.arm_senders() {
                        let due = self.fanout.due_us();
                        let timeout = due.map(|due| Duration::from_micros(due - now_us.min(due)));
                        let waker = self.senders.waker(self.waker.as_fd());
                        self.queue.wait(waker, timeout);
                        self.senders.hush();
                        now_us = self.now_us();
                        looked_us = now_us;
                    } else if now_us - looked_us >= LOOK_US {
                        // NB: only here does a queue learn that its interface has gone or is back.
                        // A sender that never rests must not keep it from that.
                        self.queue.wait(self.waker.as_fd(), Some(Duration::ZERO));
                        looked_us = now_us;
                    }
                }
                Ok(Received::End) => self.end(Over::Ended),
                Err(error) => {
                    log::error!(target: "source", "{}: {error}", self.options.name);
                    self.end(Over::Failed(error.to_string()));
                }
            }
        }
        self.fanout.finish(Life::Closed);
        self.senders.finish(Life::Closed);
    }

    /// Sends what waits in transmit rings; true if there was anything.
    #[inline]
    fn send(&mut self) -> bool {
        if self.senders.is_empty() {
            return false;
        }
        let served = self.senders.serve(&mut *self.queue);
        self.quarantine(served.liar);
        self.see_off();
        served.frames > 0 || !self.leaving.is_empty()
    }

    /// Lets those go that have sent their last. Until then they have their turns as ever: whoever
    /// closes a port does not keep the queue from its frames (R4).
    #[inline]
    fn see_off(&mut self) {
        let senders = &mut self.senders;
        self.leaving.retain(|leaving| {
            let done = senders.is_done(leaving.id, leaving.last);
            if done {
                let sender = senders.detach(leaving.id, Life::Closed);
                tell(&leaving.reply, sender.map(Box::new));
            }
            !done
        });
    }

    /// Arms the transmit rings before a sleep; true if somebody has frames already.
    #[inline]
    fn arm_senders(&mut self) -> bool {
        if self.senders.is_empty() {
            return false;
        }
        let (ready, liar) = self.senders.arm();
        self.quarantine(liar);
        ready
    }

    /// Who lies in one ring is not served in the other.
    fn quarantine(&mut self, liar: Option<(u32, String)>) {
        if let Some((id, why)) = liar {
            self.fanout.quarantine(id, why);
        }
    }

    /// True while nobody wants a packet of a source that waits for somebody.
    fn holds(&self) -> bool {
        self.options.hold && !self.fanout.ports().any(|port| port.is_enabled())
    }

    /// Does what was asked; false when asked to stop.
    #[inline]
    fn obey(&mut self) -> bool {
        // Acquire: pairs with the Release in Worker::send.
        if !self.pending.load(Ordering::Relaxed) || !self.pending.swap(false, Ordering::Acquire) {
            return true;
        }
        event::clear(&self.waker);
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Attach(port, shares) => {
                    self.attach(port);
                    self.fanout.reshare(&shares);
                }
                Command::Detach(id, life, shares, reply) => {
                    let port = self.fanout.detach(id).map(|mut port| {
                        port.finish(life);
                        port
                    });
                    self.fanout.reshare(&shares);
                    tell(&reply, port);
                }
                Command::Filter(id, filter, reply) => {
                    let old = self.fanout.set_filter(id, filter);
                    tell(&reply, old);
                }
                Command::Tune(id, tuning, reply) => {
                    self.fanout.tune(id, tuning);
                    tell(&reply, ());
                }
                Command::Widen(generation, reply) => {
                    self.generation = generation;
                    if let Err(error) = self.queue.narrow(None) {
                        log::error!(target: "source", "{}: {error}", self.options.name);
                    }
                    tell(&reply, ());
                }
                Command::Narrow(generation, loaded, reply) => {
                    let narrowed = match generation == self.generation {
                        true => self.queue.narrow(Some(loaded)).map(|()| true),
                        // The ports changed meanwhile.
                        false => Ok(false),
                    };
                    tell(&reply, narrowed.map_err(|error| error.to_string()));
                }
                Command::Rules(id, change, reply) => {
                    let now_us = self.now_us();
                    let port = self.fanout.port_mut(id);
                    let changed = port.map(|port| port.rules.change(change, now_us));
                    tell(&reply, changed.unwrap_or_default());
                }
                Command::Snapshot(asked, reply) => tell(&reply, self.snapshot(&asked)),
                Command::AttachSender(mut sender) => {
                    if let Some(failed @ Over::Failed(_)) = &self.over {
                        sender.finish(failed.life());
                    }
                    if self.senders.is_empty() {
                        self.queue.listen();
                    }
                    self.senders.attach(*sender, self.waker.as_fd());
                }
                Command::DetachSender(id, reply) => {
                    let last = self.senders.last_of(id);
                    self.leaving.push(Leaving { id, last, reply });
                    self.see_off();
                }
                // The turn that follows looks.
                Command::Kick => {}
                Command::Stop => return false,
            }
        }
        true
    }

    fn attach(&mut self, mut port: Box<Port>) {
        if let Some(over) = &self.over {
            port.finish(over.life());
        }
        port.dropped_before = self.queue.counters().dropped;
        self.fanout.attach(port);
    }

    fn end(&mut self, over: Over) {
        self.fanout.finish(over.life());
        // Through a source that has ended can still be sent.
        if matches!(over, Over::Failed(_)) {
            self.senders.finish(over.life());
        }
        self.over = Some(over);
    }

    fn snapshot(&mut self, asked: &Asked) -> Snapshot {
        let (state, failure) = match &self.over {
            Some(Over::Ended) => ("ended", None),
            Some(Over::Failed(why)) => ("failed", Some(why.clone())),
            None if self.options.hold => ("waiting", None),
            None => (self.queue.state(), None),
        };
        let queue = self.queue.counters();
        let told = |(port, counters): (&Port, PortCounters)| PortSnapshot {
            id: port.id,
            counters,
            kernel_dropped: queue.dropped - port.dropped_before,
            quarantined: port.quarantined().map(str::to_owned),
        };
        Snapshot {
            queue,
            fanout: *self.fanout.counters(),
            ports: match asked {
                Asked::All => self.fanout.accounts().map(told).collect(),
                Asked::These(ids) => {
                    let accounts = ids.iter().filter_map(|id| self.fanout.account(*id));
                    accounts.map(told).collect()
                }
            },
            senders: self.senders.counters().collect(),
            sends: self.senders.total(),
            latency: self.queue.latency(),
            filters: self.fanout.index().size(),
            state: state.to_owned(),
            failure,
        }
    }

    fn sleep_without_queue(&mut self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        if self.arm_senders() {
            return;
        }
        let now_us = self.now_us();
        self.fanout.tick(now_us);
        let timeout = self.fanout.due_us().map(|due| {
            let nanos = (due - now_us.min(due)) as i64 * 1_000;
            Timespec {
                tv_sec: nanos / 1_000_000_000,
                tv_nsec: nanos % 1_000_000_000,
            }
        });
        // A signal or an impossible error: the loop looks at its commands and comes back.
        let _ = poll(
            &mut [PollFd::new(
                &self.senders.waker(self.waker.as_fd()),
                PollFlags::IN,
            )],
            timeout.as_ref(),
        );
        self.senders.hush();
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }
}

/// How often a thread that does not sleep has its queue look at the interface.
const LOOK_US: u64 = 10_000;

/// A thread that panics so often, though its source is over, ends.
const MAX_PANICS: usize = 64;

/// Answers the control thread, which may have given up waiting.
fn tell<T>(reply: &Sender<T>, answer: T) {
    if reply.send(answer).is_err() {
        log::warn!(target: "source", "an answer came too late for the control thread");
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if cpu < rustix::thread::CpuSet::MAX_CPU {
        set.set(cpu);
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        log::warn!(target: "source", "cannot run on CPU {cpu}: {error}; running on any");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use vnplug_ring::layout::{Geometry, ring_size};
    use vnplug_ring::{Consumer, Producer, Region};

    use super::super::{Frame, SourceError};
    use super::*;
    use crate::port::doorbell::Doorbell;

    /// An interface that was deleted, which its queue sees in `wait` alone.
    struct Deleted(Arc<AtomicBool>);

    impl Queue for Deleted {
        fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
            Ok(Received::Nothing)
        }

        fn wait(&mut self, _: BorrowedFd<'_>, timeout: Option<Duration>) {
            assert_eq!(timeout, Some(Duration::ZERO), "it must not sleep");
            self.0.store(true, Ordering::Relaxed);
        }

        fn counters(&mut self) -> QueueCounters {
            QueueCounters::default()
        }

        fn state(&self) -> &'static str {
            "up"
        }
    }

    #[test]
    fn a_thread_that_never_sleeps_has_its_queue_look_at_the_interface() {
        let looked = Arc::new(AtomicBool::new(false));
        let options = WorkerOptions {
            busy: true,
            ..WorkerOptions::default()
        };
        let worker = Worker::start(Box::new(Deleted(Arc::clone(&looked))), options).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !looked.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "it never looks");
            std::thread::yield_now();
        }
        drop(worker);
    }

    /// A source with a bug.
    struct Broken;

    impl Queue for Broken {
        fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
            panic!("on purpose")
        }

        fn wait(&mut self, _: BorrowedFd<'_>, _: Option<Duration>) {}

        fn counters(&mut self) -> QueueCounters {
            QueueCounters::default()
        }

        fn state(&self) -> &'static str {
            "up"
        }
    }

    #[test]
    fn a_source_that_panics_has_failed_and_its_readers_are_told() {
        let options = WorkerOptions {
            hold: true,
            ..WorkerOptions::default()
        };
        let worker = Worker::start(Box::new(Broken), options).unwrap();
        let mut consumers = Vec::new();
        for id in [1, 2] {
            let geometry = Geometry {
                capacity: 4096,
                snaplen: 64,
                link_type: 1,
                epoch: 256,
                port: id,
                queue: 0,
            };
            let region = Region::heap(ring_size(4096));
            let producer = Producer::create(region.clone(), geometry).unwrap();
            consumers.push(Consumer::attach(region).unwrap());
            let port = Port::new(id, producer, Doorbell::Silent);
            worker.send(Command::Attach(Box::new(port), Vec::new()));
            // The first port starts it; the second one comes when it has failed.
            let deadline = Instant::now() + Duration::from_secs(60);
            while consumers[consumers.len() - 1].life() != Life::Failed {
                assert!(Instant::now() < deadline, "port {id} is not told");
                std::thread::yield_now();
            }
        }
        let (reply, answer) = channel();
        worker.send(Command::Snapshot(Asked::All, reply));
        let snapshot = answer.recv().unwrap();
        assert_eq!(
            (snapshot.state.as_str(), snapshot.ports.len()),
            ("failed", 2)
        );
        assert!(snapshot.failure.unwrap().contains("panicked"));
    }
}
