//! Requests that queues' threads have to answer, without waiting for the threads.
//!
//! ```text
//! request ── asked ──► a command for each queue ── answers ──► what to do with them ──► Step
//! ```
//!
//! A request is a chain of [`Step`]s. Each step tells threads something and says what is to be done
//! when they have answered; the holder of the step looks now and then whether they have. An answer
//! comes between two batches, mostly within microseconds. If a thread is stalled, or gone, its answer
//! is missing, and the request goes on without it: it is refused, or tells what was known before.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use vnplug_ring::control::{Message, code};

use super::{Hub, Refusal};
use vnplug_path::engine::{Command, Line};

/// What a request has come to.
pub(crate) enum Step {
    /// This is the answer.
    Done(Result<Message, Refusal>),
    /// Threads have to answer first.
    Asks(Box<dyn Asks>),
}

/// A request that waits for answers of one type or another.
pub(crate) trait Asks {
    /// True when there is nothing left to wait for; looks at most until `until`.
    fn is_over(&mut self, until: Instant) -> bool;

    /// Goes on with the answers that there are.
    fn go_on(self: Box<Self>, hub: &mut Hub) -> Step;
}

/// The answer of a queue's thread, or why it is missing.
pub(crate) type Heard<T> = Result<T, Missing>;

/// A thread did not answer.
#[derive(Debug, Clone)]
pub(crate) struct Missing {
    /// What to tell who needs it.
    pub(crate) complaint: String,
}

impl Missing {
    /// As a refusal of a request that is done when the thread goes on.
    pub(crate) fn refusal(self) -> Refusal {
        let Self { complaint } = self;
        let what = format!("{complaint}; what was asked for is done when it goes on");
        Refusal::new(code::UNAVAILABLE, what)
    }
}

/// The answer that a queue's thread owes.
#[derive(Debug)]
pub(crate) struct Owed<T> {
    line: Line,
    from: Receiver<T>,
    heard: Option<Heard<T>>,
}

impl<T> Owed<T> {
    /// Tells a thread something that it answers.
    pub(crate) fn ask(
        line: Line,
        command: impl FnOnce(std::sync::mpsc::Sender<T>) -> Command,
    ) -> Self {
        let (reply, from) = channel();
        line.send(command(reply));
        Self {
            line,
            from,
            heard: None,
        }
    }

    /// True when the answer is there, or is not to be waited for; looks at most until `until`.
    pub(crate) fn is_over(&mut self, until: Instant) -> bool {
        if self.heard.is_some() {
            return true;
        }
        match self.look(until) {
            Err(RecvTimeoutError::Timeout) => match self.line.pulse().stalled() {
                None => return false,
                Some(stalled) => {
                    let complaint = self.line.pulse().complaint(stalled);
                    self.heard = Some(Err(Missing { complaint }));
                }
            },
            Ok(answer) => self.heard = Some(Ok(answer)),
            Err(RecvTimeoutError::Disconnected) => self.heard = Some(Err(self.gone())),
        }
        true
    }

    /// As [`is_over`](Self::is_over), for what must not be given up: only the thread's answer or its
    /// end ends the wait.
    pub(crate) fn is_certain(&mut self, until: Instant) -> bool {
        if self.heard.is_none() {
            self.heard = match self.look(until) {
                Ok(answer) => Some(Ok(answer)),
                Err(RecvTimeoutError::Disconnected) => Some(Err(self.gone())),
                Err(RecvTimeoutError::Timeout) => None,
            };
        }
        self.heard.is_some()
    }

    /// Whether it is owed by a thread that is stalled.
    pub(crate) fn is_stalled(&self) -> bool {
        self.heard.is_none() && self.line.pulse().stalled().is_some()
    }

    /// The answer; missing before [`is_over`](Self::is_over).
    pub(crate) fn take(self) -> Heard<T> {
        match self.heard {
            Some(heard) => heard,
            None => Err(Missing {
                complaint: self.line.pulse().complaint(Duration::ZERO),
            }),
        }
    }

    /// Waits for no thread twice: one that was waited for in vain has to move first.
    fn look(&self, until: Instant) -> Result<T, RecvTimeoutError> {
        let pulse = self.line.pulse();
        let patience = match pulse.is_worth_waiting() {
            true => until.saturating_duration_since(Instant::now()),
            false => Duration::ZERO,
        };
        let looked = self.from.recv_timeout(patience);
        if matches!(looked, Err(RecvTimeoutError::Timeout)) && !patience.is_zero() {
            pulse.waited_in_vain();
        }
        looked
    }

    fn gone(&self) -> Missing {
        let name = self.line.pulse().name();
        Missing {
            complaint: format!("the thread of {name} is gone: restart the daemon"),
        }
    }
}

/// A step: answers of one type, and what to do with them.
struct Asking<T, F> {
    owed: Vec<Owed<T>>,
    then: F,
}

impl<T, F> Asks for Asking<T, F>
where
    F: FnOnce(&mut Hub, Vec<Heard<T>>) -> Step,
{
    fn is_over(&mut self, until: Instant) -> bool {
        // All are looked at: one that is slow must not hide that another is stalled.
        let over = self.owed.iter_mut().map(|owed| owed.is_over(until));
        over.fold(true, |all, over| all & over)
    }

    fn go_on(self: Box<Self>, hub: &mut Hub) -> Step {
        let heard = self.owed.into_iter().map(Owed::take).collect();
        (self.then)(hub, heard)
    }
}

/// A step that ends with another answer.
struct Finally {
    asks: Box<dyn Asks>,
    end: Result<Message, Refusal>,
}

impl Asks for Finally {
    fn is_over(&mut self, until: Instant) -> bool {
        self.asks.is_over(until)
    }

    fn go_on(self: Box<Self>, hub: &mut Hub) -> Step {
        Step::finally(self.asks.go_on(hub), self.end)
    }
}

impl Step {
    /// Goes on when these are answered.
    pub(crate) fn after<T: 'static>(
        owed: Vec<Owed<T>>,
        then: impl FnOnce(&mut Hub, Vec<Heard<T>>) -> Step + 'static,
    ) -> Self {
        Self::Asks(Box::new(Asking { owed, then }))
    }

    /// Done, or refused because an answer is missing.
    pub(crate) fn done_if<T>(heard: Vec<Heard<T>>) -> Self {
        let missing = heard.into_iter().find_map(Result::err);
        Self::Done(missing.map_or(Ok(Message::Done), |missing| Err(missing.refusal())))
    }

    /// As another step, and this is the answer when that is done; but if that was refused, and this is no refusal, that one's.
    pub(crate) fn finally(step: Self, end: Result<Message, Refusal>) -> Self {
        match step {
            Self::Done(done) => Self::Done(end.and_then(|end| done.map(|_| end))),
            Self::Asks(asks) => Self::Asks(Box::new(Finally { asks, end })),
        }
    }

    /// Whether it is done, and was not refused.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self, Self::Done(Ok(_)))
    }

    /// Goes on as far as it gets until `until`.
    pub(crate) fn carry_on(self, hub: &mut Hub, until: Instant) -> Self {
        let mut step = self;
        loop {
            let mut asks = match step {
                Self::Asks(asks) => asks,
                done => return done,
            };
            if !asks.is_over(until) {
                return Self::Asks(asks);
            }
            step = asks.go_on(hub);
        }
    }
}
