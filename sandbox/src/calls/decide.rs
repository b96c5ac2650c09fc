//! From the act that a call proposes to what was decided about it.

use std::sync::Arc;

use super::prepare::{self, Proposal};
use super::serve::{Asked, DOES, Job, Server};
use super::task::{Pending, Task};
use crate::act::Act;
use crate::gate::Verdict;
use crate::sys::lock;
use crate::sys::seccomp::Answer;

impl Server {
    /// Has an act judged.
    pub(super) fn propose(self: &Arc<Self>, pending: Pending, proposal: Proposal) {
        let who = self.known.seen(pending.process);
        let Some(who) = who else {
            // Nobody takes it only if this process ends.
            let _ = lock(&self.lookups).send((pending, proposal));
            return;
        };
        if !self.listener.waits(pending.id) {
            return self.release(pending.slot);
        }
        self.ask(pending, &proposal.act(who));
    }

    /// Has an act judged whose maker is known.
    pub(super) fn ask(self: &Arc<Self>, mut pending: Pending, act: &Act) {
        if let Some(to) = self.judging.detour_of(act) {
            match pending.task.go_to(to) {
                Ok(()) => {
                    pending.detoured = Some((Arc::clone(&act.who), act.transport));
                    return self.carry_on(pending);
                }
                Err(number) => return self.answer(pending.id, pending.slot, Answer::Error(number)),
            }
        }
        let id = pending.id;
        // A name can die before the question is answered.
        let names = || self.judging.gate.names_of(act);
        let kept = self
            .judging
            .permit
            .is_some()
            .then(|| (act.clone(), names()));
        lock(&self.asked).insert(id, Asked { pending, act: kept });
        let server = Arc::clone(self);
        self.judging
            .gate
            .judge(act, move |verdict| server.judged(id, verdict));
        if lock(&self.asked).contains_key(&id) {
            // Whoever holds what waits looks whether it still does.
            self.ring();
        }
    }

    fn judged(self: &Arc<Self>, id: u64, verdict: Verdict) {
        if DOES.get() {
            self.decided(id, verdict);
        } else {
            self.hand_over(Job::Judged(id, verdict));
        }
    }

    /// Does what was allowed, and refuses what was not.
    pub(super) fn decided(self: &Arc<Self>, id: u64, verdict: Verdict) {
        // Whoever is gone was taken out.
        let Some(Asked { mut pending, act }) = lock(&self.asked).remove(&id) else {
            return;
        };
        let mut verdict = verdict;
        if let (Verdict::Allow, Some((act, names)), Some(permit)) =
            (verdict, act, &self.judging.permit)
        {
            match permit(&act, &names) {
                Ok(begins) => pending.begins = begins,
                Err(why) => {
                    self.judging.gate.refused(&act, why);
                    verdict = Verdict::Deny;
                }
            }
        }
        match (verdict, &mut pending.task) {
            (Verdict::Allow, Task::Change(looked)) => {
                match prepare::writing(looked, self.writable.as_deref()) {
                    // A change of two names has two questions.
                    Some(next) => self.propose(pending, next),
                    None => self.carry_on(pending),
                }
            }
            (Verdict::Allow, _) => self.carry_on(pending),
            (Verdict::Deny, Task::Accepted { .. }) => self.turn_away(pending),
            (Verdict::Deny, _) => {
                self.answer(id, pending.slot, Answer::Error(libc::EACCES));
            }
        }
    }
}
