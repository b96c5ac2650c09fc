//! A channel: its two ends, and what is on its way to each.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use vnplug_ring::control::Backend;
use vnplug_ring::control::backend::{MAX_SAID, WINDOW, cost};

use crate::hub::Peer;

/// An application of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct End {
    pub(super) token: u64,
    pub(super) app: u32,
}

/// Which end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    BackEnd = 0,
    Program = 1,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::BackEnd => Self::Program,
            Self::Program => Self::BackEnd,
        }
    }
}

/// A channel.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) number: u32,
    /// The back-end's number.
    pub(super) backend: u32,
    /// Of the program: what waits is charged to it.
    pub(super) owner: Peer,
    ends: [End; 2],
    /// What is on its way to each end.
    flows: [Flow; 2],
}

/// What is on its way to one end.
#[derive(Debug)]
struct Flow {
    queue: VecDeque<Out>,
    /// Comes after the queue, and is the last: nothing is queued any more.
    hangup: Option<String>,
    /// The cost of what was said to this end and that it has not taken.
    untaken: u64,
    /// As much of it is in the queue: it cannot have taken that.
    undelivered: u64,
    /// Of the events that the other end sends.
    totals: Vec<u64>,
    /// They are in the queue.
    events_wait: bool,
    /// What this end may say again, and was not told: if there is any, it is in the queue.
    credit: u64,
    /// Nothing more goes there.
    over: bool,
}

/// Something that goes to an end.
#[derive(Debug)]
enum Out {
    Said(Vec<u8>),
    /// The totals as they are when it goes.
    Events,
    /// The credit likewise.
    Took,
    Other(Backend, Option<OwnedFd>),
}

impl Flow {
    /// Nothing more is queued.
    fn ends(&self) -> bool {
        self.over || self.hangup.is_some()
    }

    fn clear(&mut self) {
        self.queue.clear();
        self.undelivered = 0;
    }
}

impl Channel {
    /// Between a back-end that takes and sends `events`, and a program.
    pub(super) fn new(
        (number, backend): (u32, u32),
        owner: Peer,
        ends: [End; 2],
        events: (u8, u8),
    ) -> Self {
        let flow = |events: u8| Flow {
            queue: VecDeque::new(),
            hangup: None,
            untaken: 0,
            undelivered: 0,
            totals: vec![0; events.into()],
            events_wait: false,
            credit: 0,
            over: false,
        };
        Self {
            number,
            backend,
            owner,
            ends,
            flows: [flow(events.0), flow(events.1)],
        }
    }

    /// One of its ends.
    pub(super) fn end(&self, side: Side) -> End {
        self.ends[side as usize]
    }

    /// Whose end it is, if it is not over for it.
    pub(super) fn side_of(&self, end: End) -> Option<Side> {
        let sides = [Side::BackEnd, Side::Program].into_iter();
        let mut own = sides.filter(|side| self.end(*side) == end);
        own.find(|side| !self.flows[*side as usize].over)
    }

    /// It is over for one end at least, or will be when that has heard the rest.
    pub(super) fn has_ended(&self) -> bool {
        self.flows.iter().any(Flow::ends)
    }

    /// Both ends know that it is over.
    pub(super) fn is_over(&self) -> bool {
        self.flows.iter().all(|flow| flow.over)
    }

    /// How often events happened that go to an end.
    pub(super) fn events_to(&self, side: Side) -> u64 {
        let totals = &self.flows[side as usize].totals;
        totals
            .iter()
            .fold(0, |sum, total| sum.saturating_add(*total))
    }

    /// The cost of what was said and not taken, both ways.
    pub(super) fn waiting(&self) -> u64 {
        self.flows.iter().map(|flow| flow.untaken).sum()
    }

    /// Whether something waits for an end.
    pub(super) fn has_for(&self, side: Side) -> bool {
        let flow = &self.flows[side as usize];
        !flow.queue.is_empty() || flow.hangup.is_some()
    }

    /// Takes what an end says to the other one. False: nothing goes there any more, and it is dropped.
    ///
    /// # Errors
    /// What it did that no peer may: the channel is to end.
    pub(super) fn take(&mut self, from: Side, said: Backend) -> Result<bool, &'static str> {
        let there = &mut self.flows[from.other() as usize];
        match said {
            _ if there.ends() => return Ok(false),
            Backend::Say { bytes, .. } => {
                if bytes.len() > MAX_SAID {
                    return Err("a message of more than 64 KiB");
                }
                let cost = cost(bytes.len());
                if there.untaken + cost > WINDOW {
                    return Err("more messages than the other side took");
                }
                there.untaken += cost;
                there.undelivered += cost;
                there.queue.push_back(Out::Said(bytes));
            }
            Backend::Events { totals, .. } => {
                if totals.len() != there.totals.len() {
                    return Err("another number of events than there are");
                }
                if totals.iter().zip(&there.totals).any(|(new, old)| new < old) {
                    return Err("events that happened less often than before");
                }
                let is_news = totals != there.totals;
                there.totals = totals;
                if is_news && !std::mem::replace(&mut there.events_wait, true) {
                    there.queue.push_back(Out::Events);
                }
            }
            Backend::Took { cost, .. } => {
                let here = &mut self.flows[from as usize];
                if cost > here.untaken - here.undelivered {
                    return Err("that it took more than it was given");
                }
                here.untaken -= cost;
                let there = &mut self.flows[from.other() as usize];
                if there.credit == 0 && cost > 0 {
                    there.queue.push_back(Out::Took);
                }
                there.credit += cost;
            }
            _ => return Err("something that does not go to the other side"),
        }
        Ok(true)
    }

    /// Tells an end something, perhaps with a descriptor.
    pub(super) fn tell(&mut self, side: Side, what: Backend, fd: Option<OwnedFd>) {
        let flow = &mut self.flows[side as usize];
        if !flow.ends() {
            flow.queue.push_back(Out::Other(what, fd));
        }
    }

    /// What an end was not told yet, other than what the other one says to it.
    pub(super) fn untold(&self, side: Side) -> usize {
        let queue = self.flows[side as usize].queue.iter();
        let others = queue.filter(|out| matches!(out, Out::Other(..)));
        others.count()
    }

    /// A region is no more: what waits to be told to the program of it is no news, and a descriptor of it is
    /// not kept.
    pub(super) fn forget_region(&mut self, region: u32) {
        let queue = &mut self.flows[Side::Program as usize].queue;
        queue.retain(|out| match out {
            Out::Other(Backend::Mapped(mapped), _) => mapped.region != region,
            Out::Other(Backend::Withdraw { region: other, .. }, _) => *other != region,
            _ => true,
        });
    }

    /// An end wants no more, or is gone: the other one is told after all that was said to it.
    pub(super) fn hang_up(&mut self, by: Side, reason: &str) {
        let here = &mut self.flows[by as usize];
        here.over = true;
        here.hangup = None;
        here.clear();
        let there = &mut self.flows[by.other() as usize];
        if !there.ends() {
            there.hangup = Some(reason.to_owned());
        }
    }

    /// It ends for both, and both are told.
    pub(super) fn end_for_both(&mut self, reason: &str) {
        for flow in self.flows.iter_mut().filter(|flow| !flow.over) {
            flow.clear();
            flow.hangup = Some(reason.to_owned());
        }
    }

    /// What goes to an end next.
    pub(super) fn next(&mut self, side: Side) -> Option<(Backend, Option<OwnedFd>)> {
        let channel = self.number;
        let flow = &mut self.flows[side as usize];
        let Some(next) = flow.queue.pop_front() else {
            let reason = flow.hangup.take()?;
            flow.over = true;
            return Some((Backend::Hangup { channel, reason }, None));
        };
        Some(match next {
            Out::Said(bytes) => {
                flow.undelivered -= cost(bytes.len());
                (Backend::Say { channel, bytes }, None)
            }
            Out::Events => {
                flow.events_wait = false;
                let totals = flow.totals.clone();
                (Backend::Events { channel, totals }, None)
            }
            Out::Took => {
                let cost = std::mem::take(&mut flow.credit);
                (Backend::Took { channel, cost }, None)
            }
            Out::Other(what, fd) => (what, fd),
        })
    }
}

#[cfg(test)]
mod tests {
    use vnplug_ring::control::backend::Mapped;

    use super::*;

    const BACK: End = End { token: 1, app: 0 };
    const PROGRAM: End = End { token: 2, app: 7 };

    fn channel() -> Channel {
        Channel::new((9, 85), Peer::User(1), [BACK, PROGRAM], (2, 1))
    }

    fn say(len: usize) -> Backend {
        let bytes = vec![7; len];
        Backend::Say { channel: 9, bytes }
    }

    fn events(totals: &[u64]) -> Backend {
        let totals = totals.to_vec();
        Backend::Events { channel: 9, totals }
    }

    #[test]
    fn the_window_bounds_what_waits_and_credit_opens_it_again() {
        let mut it = channel();
        let mut said = 0;
        while it.take(Side::Program, say(MAX_SAID)).is_ok() {
            said += 1;
        }
        assert_eq!(said, WINDOW / cost(MAX_SAID));
        assert!(
            it.take(
                Side::BackEnd,
                Backend::Took {
                    channel: 9,
                    cost: 1 << 40
                }
            )
            .is_err()
        );
        let took = Backend::Took {
            channel: 9,
            cost: cost(MAX_SAID),
        };
        it.next(Side::BackEnd).unwrap();
        it.take(Side::BackEnd, took.clone()).unwrap();
        assert_eq!(it.next(Side::Program).unwrap().0, took);
        it.take(Side::Program, say(MAX_SAID)).unwrap();
        assert!(it.take(Side::Program, say(MAX_SAID + 1)).is_err());
    }

    #[test]
    fn what_was_not_delivered_cannot_be_taken() {
        let mut it = channel();
        let took = |cost| Backend::Took { channel: 9, cost };
        it.take(Side::BackEnd, say(1000)).unwrap();
        it.take(Side::BackEnd, say(2000)).unwrap();
        it.next(Side::Program).unwrap();
        it.take(Side::Program, took(cost(1000))).unwrap();
        assert_eq!(it.waiting(), cost(2000));
        assert!(it.take(Side::Program, took(1)).is_err());
    }

    #[test]
    fn after_the_end_nothing_waits_but_the_end() {
        let mut it = channel();
        it.take(Side::Program, say(1)).unwrap();
        it.end_for_both("a lie");
        for _ in 0..1000 {
            it.take(Side::Program, say(MAX_SAID)).unwrap();
            it.tell(Side::BackEnd, say(1), None);
        }
        it.hang_up(Side::Program, "later");
        let (last, _) = it.next(Side::BackEnd).unwrap();
        assert!(matches!(last, Backend::Hangup { reason, .. } if reason == "a lie"));
        assert!(it.next(Side::BackEnd).is_none() && it.is_over());
    }

    #[test]
    fn of_a_region_that_is_no_more_the_program_is_told_nothing() {
        let mut it = channel();
        let withdraw = |region| Backend::Withdraw {
            channel: 9,
            region,
            within_ms: 0,
        };
        let mapped = |region| {
            Backend::Mapped(Mapped {
                channel: 9,
                region,
                memory: 0,
                offset: 0,
                len: 4096,
                writable: true,
            })
        };
        it.take(Side::BackEnd, say(1)).unwrap();
        for region in [1, 2] {
            it.tell(Side::Program, mapped(region), None);
            it.tell(Side::Program, withdraw(region), None);
        }
        assert_eq!((it.untold(Side::Program), it.untold(Side::BackEnd)), (4, 0));
        it.forget_region(1);
        let told = std::iter::from_fn(|| it.next(Side::Program));
        let told: Vec<_> = told.map(|(what, _)| what).collect();
        assert_eq!(told, [say(1), mapped(2), withdraw(2)]);
    }

    #[test]
    fn events_are_counted_and_wait_once() {
        let mut it = channel();
        for count in 1..=1000 {
            it.take(Side::Program, events(&[count, 3])).unwrap();
        }
        assert_eq!(it.next(Side::BackEnd).unwrap().0, events(&[1000, 3]));
        assert!(it.next(Side::BackEnd).is_none());
        // The same again is no news; fewer, or others than there are, is nonsense.
        it.take(Side::Program, events(&[1000, 3])).unwrap();
        assert!(!it.has_for(Side::BackEnd));
        assert!(it.take(Side::Program, events(&[999, 3])).is_err());
        assert!(it.take(Side::Program, events(&[1000])).is_err());
        assert!(it.take(Side::BackEnd, events(&[1, 1])).is_err());
    }

    #[test]
    fn the_end_comes_after_what_was_said() {
        let mut it = channel();
        it.take(Side::Program, say(1)).unwrap();
        it.hang_up(Side::Program, "closed");
        assert_eq!(it.side_of(PROGRAM), None);
        assert!(!it.is_over());
        assert_eq!(it.next(Side::BackEnd).unwrap().0, say(1));
        let (last, _) = it.next(Side::BackEnd).unwrap();
        assert!(matches!(last, Backend::Hangup { channel: 9, .. }));
        assert!(it.is_over() && it.side_of(BACK).is_none());
    }
}
