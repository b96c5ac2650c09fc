//! What the thread does: turn after turn, until told to stop.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use vnplug_ring::layout::Life;

use super::{Asked, Command, PortSnapshot, Pulse, Snapshot, WAITING, WorkerOptions};
use crate::engine::sender;
use crate::engine::senders::Senders;
use crate::engine::stuck::Stuck;
use crate::fanout::Fanout;
use crate::port::{Port, PortCounters};
use crate::source::{Queue, Received};
use vnplug_os::event;

pub(super) struct Run {
    queue: Box<dyn Queue>,
    fanout: Fanout,
    senders: Senders,
    /// Senders that are to go when they have sent their last.
    leaving: Vec<Leaving>,
    inbox: Receiver<Command>,
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    pulse: Arc<Pulse>,
    /// Turns begun.
    turns: u64,
    /// What the pulse shows.
    shown: &'static str,
    started: Instant,
    over: Option<Over>,
    /// How often the kernel's filter was widened.
    generation: u64,
    /// Whether that is still to be done.
    stuck: Stuck,
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
    /// Ready to serve a queue; obeys what comes through `inbox`.
    pub(crate) fn new(
        queue: Box<dyn Queue>,
        options: WorkerOptions,
        inbox: Receiver<Command>,
        pending: Arc<AtomicBool>,
        waker: Arc<OwnedFd>,
        pulse: Arc<Pulse>,
    ) -> Self {
        Self {
            turns: 0,
            shown: pulse.state(),
            pulse,
            queue,
            fanout: Fanout::new(options.source, options.queue),
            senders: Senders::default(),
            leaving: Vec::new(),
            inbox,
            pending,
            waker,
            started: Instant::now(),
            over: None,
            generation: 0,
            stuck: Stuck::new(options.queue, &options.name),
            options,
        }
    }

    /// Serves until told to stop.
    ///
    /// A panic outside a port's own code, which the fanout catches, is a bug in the source's: the
    /// source has failed, its readers are told, and the thread goes on answering.
    pub(super) fn run(mut self) {
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
            self.turns += 1;
            self.pulse.beat(self.turns);
            if !self.obey() {
                break;
            }
            self.show();
            self.stuck.try_again(&mut *self.queue, now_us);
            let sending = self.send(now_us);
            if self.over.is_some() || self.holds() {
                if !sending {
                    self.sleep_without_queue();
                }
                continue;
            }
            self.options.hold = false;
            if self.fanout.has_rivals() {
                self.fanout.press(self.queue.is_pressed());
            }
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
                        let due = self.due_us();
                        let timeout = due.map(|due| Duration::from_micros(due - now_us.min(due)));
                        let waker = self.senders.waker(self.waker.as_fd());
                        self.pulse.sleep(self.turns);
                        self.queue.wait(waker, timeout);
                        self.hush_senders();
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

    /// Sends what waits in transmit rings, and shows it to the other ports; true if there was anything.
    #[inline]
    fn send(&mut self, now_us: u64) -> bool {
        if self.senders.is_empty() {
            return false;
        }
        let fanout = &mut self.fanout;
        // A panic of the fanout is the source's fault and not that of the sender, as which it would
        // be taken where it is sent.
        let mut went = Ok(());
        let served = self.senders.serve(&mut *self.queue, &mut |sender, frames| {
            let show = || fanout.show(frames, now_us, sender);
            if went.is_ok() {
                went = catch_unwind(AssertUnwindSafe(show));
            }
        });
        if let Err(panic) = went {
            resume_unwind(panic);
        }
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

    /// Hears the kicks that ended a sleep.
    #[inline]
    fn hush_senders(&mut self) {
        let liar = self.senders.hush();
        self.quarantine(liar);
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
        // Acquire: pairs with the Release in Line::send.
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
                Command::Widen(generation, standing, reply) => {
                    self.generation = generation;
                    let now_us = self.now_us();
                    self.stuck.widen(&mut *self.queue, &standing, now_us);
                    tell(&reply, ());
                }
                Command::Narrow(generation, loaded, reply) => {
                    let narrowed = match generation == self.generation {
                        true => self.queue.narrow(Some(loaded)).map(|()| true),
                        // The ports changed meanwhile.
                        false => Ok(false),
                    };
                    if matches!(narrowed, Ok(true)) {
                        self.stuck.over();
                    }
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

    /// How the queue is, in a word.
    #[inline]
    fn state(&self) -> &'static str {
        match &self.over {
            Some(Over::Ended) => "ended",
            Some(Over::Failed(_)) => "failed",
            None if self.options.hold => WAITING,
            None => self.queue.state(),
        }
    }

    /// Shows that to others, if it is not what they see.
    #[inline]
    fn show(&mut self) {
        let state = self.state();
        // NB: not the words: of each there is one in memory, and a second one costs only time.
        if !std::ptr::eq(state, self.shown) {
            self.shown = state;
            self.pulse.show(state);
        }
    }

    fn snapshot(&mut self, asked: &Asked) -> Snapshot {
        let state = self.state();
        let failure = match &self.over {
            Some(Over::Failed(why)) => Some(why.clone()),
            _ => None,
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

    /// When there is something to do at the latest, if nothing else happens.
    #[inline]
    fn due_us(&self) -> Option<u64> {
        let due = [self.fanout.due_us(), self.stuck.due_us()];
        due.into_iter().flatten().min()
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
        self.pulse.sleep(self.turns);
        // A signal or an impossible error: the loop looks at its commands and comes back.
        let _ = poll(
            &mut [PollFd::new(
                &self.senders.waker(self.waker.as_fd()),
                PollFlags::IN,
            )],
            timeout.as_ref(),
        );
        self.hush_senders();
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
        log::debug!(target: "source", "an answer came too late for the control thread");
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
