//! Requests that wait for a filter to be compiled, for memory to be made, or for queues' threads.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use vnplug_ring::control::{FilterSpec, Open, VmSpec, code};
use vnplug_ring::layout::MAX_SNAPLEN;

use super::Control;
use super::compile::{CHEAP, Compiled, Job, Ticket};
use super::memory::{Completed, Made, Want};
use super::request::cut;
use super::session::Over;
use crate::hub::policy::Viewer;
use crate::hub::{Owner, Programs, Refusal, Step, no_memory};
use vnplug_filter::Trust;

/// A request that waits for its filter to be compiled or for its memory.
pub(super) struct Pending {
    id: u32,
    app: u32,
    then: Then,
    /// Dropped with this when the connection ends.
    _ticket: Ticket,
}

/// What such a request goes on with.
pub(super) enum Then {
    Open(Open),
    Filter { port: u32 },
    Rings(Open, Programs),
    Attach(VmSpec),
}

/// A request: the connection's token, its number, the application.
pub(super) type Whom = (u64, u32, u32);

/// A request that waits for queues' threads. It goes on when they have answered also if its
/// connection is gone: what it began is to be finished.
pub(super) struct Asking {
    whom: Whom,
    step: Step,
    /// Go with the answer.
    fds: Vec<OwnedFd>,
}

/// How long a request's answers are waited for before others are served: a thread that is awake
/// answers in microseconds.
pub(super) const AT_ONCE: Duration = Duration::from_millis(2);

/// As many bytes of a filter's text as lists show.
const SHOWN_FILTER: usize = 256;

impl Control {
    /// Has the operator's and the reader's filter compiled; the request goes on in
    /// [`compiled`](Self::compiled).
    pub(super) fn compile(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        viewer: &Viewer,
        then: Then,
        (guard, filter, link_type): (String, FilterSpec, u32),
    ) -> Result<(), Over> {
        let trust = if self.policy.is_operator(viewer) {
            Trust::Operator
        } else {
            Trust::Guest
        };
        let submitted = self.compiler.submit(Job {
            session: token,
            owner: viewer.clone(),
            trust,
            guard,
            filter,
            snaplen: MAX_SNAPLEN,
            link_type,
        });
        let ticket = match submitted {
            Ok(ticket) => ticket,
            Err(refusal) => return self.answer(token, id, app, Err(refusal)),
        };
        self.wait(token, id, app, then, ticket);
        Ok(())
    }

    /// Has memory made; the request goes on in [`made`](Self::made).
    pub(super) fn make(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        want: Want,
        then: Then,
    ) -> Result<(), Over> {
        match self.memory.make(token, want) {
            Ok(ticket) => {
                self.wait(token, id, app, then, ticket);
                Ok(())
            }
            Err(refusal) => {
                if let Then::Attach(spec) = &then {
                    self.attaching.remove(&spec.name);
                    for group in &spec.groups {
                        self.making_groups.remove(&group.name);
                    }
                }
                self.answer(token, id, app, Err(refusal))
            }
        }
    }

    /// Answers a request when queues' threads have.
    pub(super) fn carry_on(&mut self, whom: Whom, step: Result<Step, Refusal>) -> Result<(), Over> {
        let step = step.unwrap_or_else(|refusal| Step::Done(Err(refusal)));
        self.carry_on_with(whom, step, Vec::new())
    }

    /// As [`carry_on`](Self::carry_on); descriptors go with the answer.
    pub(super) fn carry_on_with(
        &mut self,
        whom: Whom,
        step: Step,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Over> {
        match step.carry_on(&mut self.hub, Instant::now() + AT_ONCE) {
            Step::Done(told) => {
                let told = told.map(|message| (message, fds));
                self.answer(whom.0, whom.1, whom.2, told)
            }
            step => {
                if let Some(session) = self.sessions.get_mut(&whom.0) {
                    session.busy = true;
                }
                self.asking.push(Asking { whom, step, fds });
                Ok(())
            }
        }
    }

    /// Goes on with requests whose threads have answered.
    pub(super) fn heard(&mut self) {
        for Asking { whom, step, fds } in std::mem::take(&mut self.asking) {
            match step.carry_on(&mut self.hub, Instant::now()) {
                Step::Done(told) => {
                    if let Some(session) = self.sessions.get_mut(&whom.0) {
                        session.busy = false;
                    }
                    let told = told.map(|message| (message, fds));
                    let went = self.answer(whom.0, whom.1, whom.2, told);
                    self.went_on(whom.0, went);
                }
                step => self.asking.push(Asking { whom, step, fds }),
            }
        }
    }

    fn wait(&mut self, token: u64, id: u32, app: u32, then: Then, ticket: Ticket) {
        let pending = Pending {
            id,
            app,
            then,
            _ticket: ticket,
        };
        self.pending.insert(token, pending);
        if let Some(session) = self.sessions.get_mut(&token) {
            session.busy = true;
        }
    }

    /// Goes on with a request whose filter is compiled.
    pub(super) fn compiled(&mut self, compiled: Compiled) {
        let Compiled {
            session: token,
            mut programs,
            took,
        } = compiled;
        if let Ok(programs) = &mut programs {
            programs.text = cut(std::mem::take(&mut programs.text), SHOWN_FILTER);
        }
        let Some(pending) = self.pending.remove(&token) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        session.busy = false;
        if took > CHEAP {
            session
                .bucket
                .borrow_mut()
                .charge(took.as_secs_f64() * 10_000.0);
        }
        let viewer = session.viewer.clone();
        let Pending { id, app, then, .. } = pending;
        let programs = programs.and_then(|programs| {
            let (device, port) = match &then {
                Then::Filter { port } => ("", Some(*port)),
                Then::Open(open) | Then::Rings(open, _) => (open.device.as_str(), None),
                Then::Attach(_) => return Ok(programs),
            };
            self.bears(&viewer, device, port, &programs)?;
            Ok(programs)
        });
        let went = match (programs, then) {
            (Err(refusal), _) => self.answer(token, id, app, Err(refusal)),
            (Ok(programs), Then::Open(open)) => {
                self.open_with(token, id, app, &viewer, open, programs)
            }
            (Ok(programs), Then::Filter { port }) => {
                let step = self.hub.set_filter(port, programs.filter, programs.text);
                self.carry_on((token, id, app), Ok(step))
            }
            (Ok(_), Then::Rings(..) | Then::Attach(_)) => Ok(()),
        };
        self.went_on(token, went);
    }

    /// Goes on with a request whose memory is made.
    pub(super) fn made(&mut self, completed: Completed) {
        let token = completed.session;
        if let Made::Pool(plan, _) = &completed.made {
            self.attaching.remove(plan.name());
            for group in plan.new_groups() {
                self.making_groups.remove(&group.name);
            }
        }
        let (Some(pending), Some(session)) =
            (self.pending.remove(&token), self.sessions.get_mut(&token))
        else {
            // Who asked for it is gone.
            completed.abandon(&self.memory);
            return;
        };
        session.busy = false;
        let viewer = session.viewer.clone();
        let Pending { id, app, then, .. } = pending;
        let went = match (completed.made, then) {
            (Made::Pool(plan, pool), Then::Attach(spec)) => {
                let ready = self.attached(token, &spec, plan, pool);
                self.answer(token, id, app, ready.map(|ready| (ready, Vec::new())))
            }
            (Made::Rings(need, memory), Then::Rings(open, programs)) => {
                let opening = memory
                    .map_err(|error| no_memory(need.total(), &error))
                    .and_then(|memory| {
                        self.opened(token, app, &viewer, &open, programs, Some(memory))
                    });
                self.tell_opened((token, id, app), opening)
            }
            _ => {
                let refusal = Refusal::new(code::INTERNAL, "not what was asked for");
                self.answer(token, id, app, Err(refusal))
            }
        };
        self.went_on(token, went);
    }

    /// Goes on with a connection that waited.
    pub(super) fn went_on(&mut self, token: u64, went: Result<(), Over>) {
        match went {
            Ok(()) => self.work(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Ports whose rings are being made for a user, on whatever connection, and their bytes.
    pub(super) fn awaited(&self, viewer: &Viewer, owner: &Owner) -> (usize, u64) {
        let rings = self.pending.iter().filter_map(|(token, pending)| {
            let own = self.sessions.get(token)?.viewer == *viewer;
            match &pending.then {
                Then::Rings(open, programs) if own => {
                    let need = self.hub.need(open, owner, programs).unwrap_or_default();
                    Some(need.total())
                }
                _ => None,
            }
        });
        rings.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }
}
