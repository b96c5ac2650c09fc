//! Requests that wait for a filter to be compiled or for memory to be made.

use vnplug_ring::control::{FilterSpec, Message, Open, VmSpec, code};
use vnplug_ring::layout::MAX_SNAPLEN;

use super::Control;
use super::compile::{CHEAP, Compiled, Job, Ticket};
use super::memory::{Completed, Made, Want};
use super::request::cut;
use super::session::Over;
use crate::filter::Trust;
use crate::hub::policy::Viewer;
use crate::hub::{Owner, Programs, Refusal, no_memory};

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
            session.bucket.charge(took.as_secs_f64() * 10_000.0);
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
                self.hub.set_filter(port, programs.filter, programs.text);
                self.answer(token, id, app, Ok((Message::Done, Vec::new())))
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
        let result = match (completed.made, then) {
            (Made::Pool(plan, pool), Then::Attach(spec)) => self
                .attached(token, &spec, plan, pool)
                .map(|ready| (ready, Vec::new())),
            (Made::Rings(need, memory), Then::Rings(open, programs)) => memory
                .map_err(|error| no_memory(need.total(), &error))
                .and_then(|memory| self.opened(token, app, &viewer, &open, programs, Some(memory))),
            _ => Err(Refusal::new(code::INTERNAL, "not what was asked for")),
        };
        let went = self.answer(token, id, app, result);
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
