//! The questions that are open, who waits for them, and who answers them.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::act::Act;
use crate::ask::{Event, OPEN, Question, WAITING};
use crate::gate::Verdict;
use crate::name::Name;

/// Told what was decided, once: refused if whoever should have decided is gone.
pub(crate) struct Then(Option<Box<dyn FnOnce(Verdict) + Send>>);

impl Then {
    pub(crate) fn new(then: impl FnOnce(Verdict) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    pub(crate) fn tell(mut self, verdict: Verdict) {
        if let Some(then) = self.0.take() {
            then(verdict);
        }
    }
}

impl Drop for Then {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Verdict::Deny);
        }
    }
}

/// An act that waits for an answer.
pub(crate) struct Waiter {
    pub(crate) act: Act,
    pub(crate) names: Vec<Name>,
    pub(crate) since: Instant,
    pub(crate) then: Then,
}

/// A question and all that wait for it.
pub(crate) struct Open {
    pub(crate) question: Arc<Question>,
    pub(crate) waiting: Vec<Waiter>,
}

/// What is open, and who asks.
#[derive(Default)]
pub(crate) struct Questions {
    last: u64,
    pub(crate) open: Vec<Open>,
    fronts: Vec<SyncSender<Event>>,
    /// A thread looks at their deadlines.
    pub(crate) watched: bool,
    /// Questions wait for a front also while there is none: one can come.
    pub(crate) waits_for_fronts: bool,
}

#[derive(Default)]
pub(crate) struct Desk {
    questions: Mutex<Questions>,
    changed: Condvar,
}

impl Desk {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Questions> {
        self.questions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a question's time is over, one is new, or `longest` is over; takes those whose time is over.
    pub(crate) fn overdue(&self, longest: Duration) -> Vec<Open> {
        let mut questions = self.lock();
        let now = Instant::now();
        let next = questions
            .open
            .iter()
            .map(|open| open.question.deadline)
            .min();
        let wait = next
            .map_or(longest, |next| next.saturating_duration_since(now))
            .min(longest);
        if !wait.is_zero() {
            let waited = self.changed.wait_timeout(questions, wait);
            questions = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        questions.take(|open| open.question.deadline <= now)
    }

    /// True if no question is left, and so nobody has to look any more.
    pub(crate) fn is_done(&self) -> bool {
        let mut questions = self.lock();
        questions.watched = !questions.open.is_empty();
        !questions.watched
    }

    /// Whoever waits in [`Desk::overdue`] looks again.
    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }
}

impl Questions {
    /// True if somebody can answer.
    pub(crate) fn has_fronts(&self) -> bool {
        self.waits_for_fronts || !self.fronts.is_empty()
    }

    /// A new front, which is told of what is open already. One that does not read is dropped.
    pub(crate) fn subscribe(&mut self) -> Receiver<Event> {
        // All that can be open fits, so that a new front starts with room.
        let (send, receive) = sync_channel(4 * OPEN);
        for open in &self.open {
            // There is room for it.
            let _ = send.try_send(Event::Asked(open.question.clone()));
        }
        self.fronts.push(send);
        receive
    }

    /// Lets `waiter` wait for the question that `make` makes of the number it gets, or for one that is equal to it.
    /// Gives it back if there is no room.
    pub(crate) fn wait(
        &mut self,
        waiter: Box<Waiter>,
        make: impl FnOnce(u64) -> Question,
    ) -> Result<(), Box<Waiter>> {
        let question = make(self.last + 1);
        let equal = |open: &&mut Open| {
            open.question.offers == question.offers && open.question.lasts == question.lasts
        };
        if let Some(open) = self.open.iter_mut().find(equal) {
            if open.waiting.len() >= WAITING {
                return Err(waiter);
            }
            open.waiting.push(*waiter);
            return Ok(());
        }
        if self.open.len() >= OPEN {
            return Err(waiter);
        }
        self.last += 1;
        let question = Arc::new(question);
        self.open.push(Open {
            question: question.clone(),
            waiting: vec![*waiter],
        });
        let id = question.id;
        self.tell(&Event::Asked(question));
        // Fronts that are gone are noticed when they are told something.
        if self.has_fronts() {
            return Ok(());
        }
        let unasked = self.take(|open| open.question.id == id);
        match unasked.into_iter().flat_map(|open| open.waiting).next() {
            Some(waiter) => Err(Box::new(waiter)),
            None => Ok(()),
        }
    }

    /// Takes the questions for which `is` holds.
    pub(crate) fn take(&mut self, mut is: impl FnMut(&Open) -> bool) -> Vec<Open> {
        self.open.extract_if(.., |open| is(open)).collect()
    }

    /// Tells every front.
    pub(crate) fn tell(&mut self, event: &Event) {
        self.fronts
            .retain(|front| front.try_send(event.clone()).is_ok());
    }
}
