//! One queue with its ports and its senders, as its thread sees them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use vnplug_ring::layout::Life;

use super::senders::Senders;
use super::worker::{Bell, Line, WorkerOptions};
use super::{Asked, Command, PortSnapshot, Pulse, Snapshot, WAITING, sender};
use crate::batch::Handle;
use crate::fanout::Fanout;
use crate::port::{Port, PortCounters};
use crate::source::transmit::NoWay;
use crate::source::wake::{NOTHING, Seen, Wake, wait};
use crate::source::{Queue, Received, SourceError};
use vnplug_frame::Frame;

pub(super) struct Input {
    queue: Box<dyn Queue>,
    fanout: Fanout,
    senders: Senders,
    /// Senders to detach when their queue is empty.
    leaving: Vec<Leaving>,
    inbox: Receiver<Command>,
    bell: Bell,
    pulse: Arc<Pulse>,
    /// Turns begun.
    turns: u64,
    /// Those of them since the last look where the queue learns what it has, and how many may be.
    unlooked: u32,
    may_be_unlooked: u32,
    /// Several frames came in the last turn.
    is_fast: bool,
    /// What the pulse shows.
    shown: &'static str,
    /// When the thread's clock began.
    started: Instant,
    over: Option<Over>,
    /// How often its turns panicked.
    panics: u32,
    options: WorkerOptions,
    /// Dropped last: then the queue is closed.
    _alive: Sender<()>,
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// It was told to stop.
    Stop,
    /// There were frames, and there may be more.
    Busy,
    /// The queue has nothing, but there is other work, or it must not sleep.
    Dry,
    /// There is nothing to do until an event comes.
    Rest,
}

/// A queue that panics this often, though it is over, is closed.
const MAX_PANICS: u32 = 64;
/// Turns for each look at what a queue watches: while frames come, and when there are none.
const UNLOOKED: [u32; 2] = [5, 2];

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
    /// How the readers' rings end.
    fn life(&self) -> Life {
        match self {
            Self::Ended => Life::Ended,
            Self::Failed(_) => Life::Failed,
        }
    }
}

impl Input {
    /// Serves a queue from its next turn on, and obeys what comes through `inbox`.
    ///
    /// # Errors
    /// The system's, if what wakes the thread cannot be watched with what the queue has.
    pub(super) fn new(
        queue: Box<dyn Queue>,
        options: WorkerOptions,
        started: Instant,
        inbox: Receiver<Command>,
        line: &Line,
        alive: Sender<()>,
    ) -> io::Result<Self> {
        let (bell, pulse) = Bell::of(line);
        let mut senders = Senders::default();
        if let Some(epoll) = queue.epoll() {
            senders.join(epoll, bell.waker.as_fd())?;
        }
        Ok(Self {
            turns: 0,
            unlooked: 0,
            may_be_unlooked: 0,
            is_fast: false,
            shown: pulse.state(),
            pulse,
            queue,
            fanout: Fanout::new(options.source, options.queue),
            senders,
            leaving: Vec::new(),
            inbox,
            bell,
            started,
            over: None,
            panics: 0,
            options,
            _alive: alive,
        })
    }

    /// One turn: what was asked, what is to be sent, and a batch of what has come. `now_us` is the
    /// thread's clock, which a turn sets.
    pub(super) fn turn(&mut self, now_us: &mut u64) -> Turn {
        self.turns += 1;
        self.pulse.beat(self.turns);
        if !self.obey() {
            return Turn::Stop;
        }
        self.show();
        if self.senders.are_of_queue() {
            self.look_if_due();
        }
        let sending = self.send(*now_us);
        if self.is_idle() {
            *now_us = self.now_us();
            self.fanout.tick(*now_us);
            return if sending { Turn::Busy } else { Turn::Rest };
        }
        self.options.hold = false;
        if self.fanout.has_rivals() {
            self.fanout.press(self.queue.is_pressed());
        }
        self.queue.may_pass(self.fanout.is_unread());
        self.queue.is_watched(self.fanout.is_watched());
        if self.queue.is_behind() {
            self.queue.is_crowded(self.fanout.is_crowded(*now_us));
        }
        let (fanout, now) = (&mut self.fanout, *now_us);
        let received = self
            .queue
            .receive(&mut |frames| fanout.deliver(frames, now));
        *now_us = self.now_us();
        if self.fanout.due_us().is_some_and(|due| due <= *now_us) {
            self.fanout.tick(*now_us);
        }
        let was_fast = self.note(&received);
        match received {
            Ok(Received::Frames(_)) => return Turn::Busy,
            Ok(Received::Passed { frames, bytes }) => {
                self.fanout.pass(frames, bytes);
                return Turn::Busy;
            }
            // More may be there by now, and who is asked to kick before a sleep has to. NB: behind a single frame the
            // sleep alone looks.
            Ok(Received::Nothing) if was_fast && self.unlooked > 1 && !self.senders.is_empty() => {
                self.hear(Some(Duration::ZERO));
                return Turn::Dry;
            }
            Ok(Received::Nothing) if sending || self.options.busy => return Turn::Dry,
            Ok(Received::Nothing) => return Turn::Rest,
            Ok(Received::End) => self.end(Over::Ended),
            Err(error) => self.fail(&error),
        }
        Turn::Busy
    }

    /// Asks senders for a kick before a sleep; true if one of them has frames already.
    #[inline]
    pub(super) fn arm_senders(&mut self) -> bool {
        if self.senders.is_empty() {
            return false;
        }
        let (ready, liar) = self.senders.arm();
        self.quarantine(liar);
        ready
    }

    /// Sleeps where the queue learns what it has: then one call of the system says who ended the sleep. False if it learns it
    /// otherwise.
    pub(super) fn sleep(&mut self, now_us: u64) -> bool {
        if !self.senders.are_of_queue() {
            return false;
        }
        let (_, wake) = self.doze(now_us);
        let within = wake.within;
        self.hear(within);
        self.woke(NOTHING);
        true
    }

    /// The thread goes to sleep: what to wait for, and the descriptor that ends the wait in any case.
    pub(super) fn doze(&mut self, now_us: u64) -> (BorrowedFd<'_>, Wake<'_>) {
        self.pulse.sleep(self.turns);
        let due = [self.fanout.due_us(), self.senders.due_us()];
        let due = due.into_iter().flatten().min();
        let due = due.map(|due| Duration::from_micros(due.saturating_sub(now_us)));
        let mut wake = match self.is_idle() {
            true => Wake::default(),
            false => self.queue.arm(),
        };
        let limits = [wake.within, due, self.senders.settles(now_us)];
        wake.within = limits.into_iter().flatten().min();
        (self.senders.waker(self.bell.waker.as_fd()), wake)
    }

    /// The sleep is over, and this was seen.
    pub(super) fn rouse(&mut self, seen: Seen) {
        self.hear(Some(Duration::ZERO));
        self.woke(seen);
    }

    fn woke(&mut self, seen: Seen) {
        if !self.is_idle() {
            self.queue.woke(seen);
        }
    }

    /// Looks who kicked, and what the queue has; or waits for that so long.
    fn hear(&mut self, within: Option<Duration>) {
        (self.unlooked, self.may_be_unlooked) = (0, UNLOOKED[1]);
        let queue = &mut self.queue;
        let found = &mut |number, flags| queue.found(number, flags);
        let liars = self.senders.hear(within, found);
        self.quarantine(liars);
    }

    /// Notes how many frames came at once: how soon it is to be looked for more. Whether several did in the turn before.
    #[inline]
    fn note(&mut self, received: &Result<Received, SourceError>) -> bool {
        let frames = match received {
            Ok(Received::Frames(frames)) => *frames as u64,
            Ok(Received::Passed { frames, .. }) => *frames,
            _ => 0,
        };
        self.may_be_unlooked = UNLOOKED[usize::from(frames == 0)];
        std::mem::replace(&mut self.is_fast, frames > 1)
    }

    /// Looks there if that was not done for some turns.
    #[inline]
    fn look_if_due(&mut self) {
        if self.unlooked >= self.may_be_unlooked {
            self.hear(Some(Duration::ZERO));
        }
        self.unlooked += 1;
    }

    /// Makes the queue look at its interface, without a sleep. NB: a queue learns only when it is
    /// woken that the interface has gone or is back. A sender that never rests must not prevent
    /// that.
    pub(super) fn look(&mut self) {
        if self.is_idle() {
            return;
        }
        if self.senders.are_of_queue() {
            // What it watches of an interface it asks for anew each time.
            let _ = self.queue.arm();
            return self.rouse(NOTHING);
        }
        let waker = self.bell.waker.as_fd();
        wait(&mut *self.queue, waker, Some(Duration::ZERO));
    }

    /// Whether nothing is received now.
    fn is_idle(&self) -> bool {
        self.over.is_some() || self.holds()
    }

    /// Closes the rings of all ports.
    pub(super) fn close(mut self) {
        self.fanout.finish(Life::Closed);
        self.senders.finish(Life::Closed);
    }

    /// A panic outside a port's own code, which the fanout catches, is a bug in the source's: it has
    /// failed, its readers are told, and it goes on answering. False if that, too, panics again and again.
    #[cold]
    pub(super) fn panicked(&mut self) -> bool {
        let what = "its thread panicked, which is a bug in vnplugd: restart the daemon";
        log::error!(target: "source", "{}: {what}", self.options.name);
        self.panics += 1;
        let first = self.over.is_none();
        // What fails of that is over all the same.
        let ends = AssertUnwindSafe(|| first.then(|| self.end(Over::Failed(what.into()))));
        if catch_unwind(ends).is_err() {
            self.over = Some(Over::Failed(what.into()));
        }
        self.panics < MAX_PANICS
    }

    #[cold]
    fn fail(&mut self, error: &SourceError) {
        log::error!(target: "source", "{}: {error}", self.options.name);
        self.end(Over::Failed(error.to_string()));
    }

    /// Sends what waits in transmit rings, and shows it to the other ports; true if there was anything.
    #[inline]
    fn send(&mut self, now_us: u64) -> bool {
        if self.senders.is_empty() {
            return false;
        }
        let liars = self.senders.listen(now_us);
        self.quarantine(liars);
        let fanout = &mut self.fanout;
        // A panic of the fanout is the source's fault; caught where frames are sent, it would count
        // as the sender's.
        let mut went = Ok(());
        let shown: &mut dyn FnMut(&Handle, &[Frame<'_>]) = &mut |sender, frames| {
            let show = || fanout.show(frames, now_us, sender);
            if went.is_ok() {
                went = catch_unwind(AssertUnwindSafe(show));
            }
        };
        let served = match self.queue.transmitter() {
            Some(out) => self.senders.serve(out, now_us, shown),
            None => self.senders.serve(&mut NoWay, now_us, shown),
        };
        if let Err(panic) = went {
            resume_unwind(panic);
        }
        self.quarantine(served.liar);
        self.see_off();
        served.frames > 0 || !self.leaving.is_empty()
    }

    /// Detaches senders whose queue is empty. Until then they have their turns as before: closing a
    /// port does not keep the queue from its frames (R4).
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

    /// A port that lies in one ring is not served in the other.
    fn quarantine(&mut self, liars: impl IntoIterator<Item = (u32, String)>) {
        for (id, why) in liars {
            self.fanout.quarantine(id, why);
        }
    }

    /// True while the source waits for a first reader that is not paused.
    fn holds(&self) -> bool {
        self.options.hold && !self.fanout.ports().any(|port| port.judge.is_enabled())
    }

    /// Does what was asked; false when asked to stop.
    #[inline]
    fn obey(&mut self) -> bool {
        if !self.bell.take() {
            return true;
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.bell.took();
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
                Command::Guard(id, guard, reply) => {
                    let old = self.fanout.set_guard(id, guard);
                    tell(&reply, old);
                }
                Command::Revoke(id, nothing, sending, reply) => {
                    if sending {
                        self.senders.revoke(id);
                    }
                    if let Some(nothing) = nothing {
                        self.fanout.revoke(id, nothing);
                    }
                    tell(&reply, ());
                }
                Command::Terms(id, terms, reply) => {
                    let now_us = self.now_us();
                    let old = self.senders.set_terms(id, terms, now_us);
                    tell(&reply, old);
                }
                Command::Lend(id, lent, reply) => tell(&reply, self.senders.lend(id, lent)),
                Command::Withdraw(id, port, reply) => {
                    tell(&reply, self.senders.withdraw(id, port));
                }
                Command::Tune(id, tuning, reply) => {
                    self.fanout.tune(id, tuning);
                    tell(&reply, ());
                }
                Command::Narrow(loaded, reply) => {
                    let narrowed = match self.queue.early() {
                        Some(early) => early.narrow(loaded),
                        None => Err(SourceError::new("this queue takes no filter")),
                    };
                    tell(&reply, narrowed.map_err(|error| error.to_string()));
                }
                Command::Rules(id, change, reply) => {
                    let now_us = self.now_us();
                    let port = self.fanout.port_mut(id);
                    let changed = port.map(|port| port.judge.change_rules(change, now_us));
                    tell(&reply, changed.unwrap_or_default());
                }
                Command::Exchange(all, reply) => {
                    for exchange in all {
                        exchange.run(&mut *self.queue);
                    }
                    tell(&reply, ());
                }
                Command::Snapshot(asked, reply) => tell(&reply, self.snapshot(&asked)),
                Command::AttachSender(mut sender) => {
                    if let Some(failed @ Over::Failed(_)) = &self.over {
                        sender.finish(failed.life());
                    }
                    if self.senders.is_empty()
                        && let Some(echoes) = self.queue.echoes()
                    {
                        echoes.begin();
                    }
                    self.senders.attach(*sender, self.bell.waker.as_fd());
                }
                Command::DetachSender(id, reply) => {
                    let last = self.senders.last_of(id);
                    self.leaving.push(Leaving { id, last, reply });
                    self.see_off();
                }
                // The turn that follows looks.
                Command::Kick(ids) => self.senders.wake(&ids),
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
        // First: what a queue that is over has is not slept on, whatever fails below.
        self.senders.part(self.bell.waker.as_fd());
        self.fanout.finish(over.life());
        // Ports can still send through a source that has ended.
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

    /// Shows the state to others, if it has changed.
    #[inline]
    fn show(&mut self) {
        let state = self.state();
        // NB: compares addresses, not words: each word is in memory once, and a false difference
        // only costs time.
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
            own: self.queue.own_counters(),
            fanout: self.fanout.counters(),
            ports: match asked {
                Asked::All => self.fanout.accounts().map(told).collect(),
                Asked::These(ids) => {
                    let accounts = ids.iter().filter_map(|id| self.fanout.account(*id));
                    accounts.map(told).collect()
                }
            },
            senders: self.senders.counters().collect(),
            sends: self.senders.total(),
            latency: self.queue.echoes().and_then(|it| it.latency()),
            filters: self.fanout.index().size(),
            state: state.to_owned(),
            failure,
        }
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }
}

/// Answers the control thread, which may have given up waiting.
fn tell<T>(reply: &Sender<T>, answer: T) {
    if reply.send(answer).is_err() {
        log::debug!(target: "source", "an answer came too late for the control thread");
    }
}
