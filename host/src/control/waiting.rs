//! Requests that wait for a filter to be compiled, for memory to be made, or for queues' threads.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_ring::control::{FilterSpec, Open, VmSpec, code};
use vnplug_ring::layout::MAX_SNAPLEN;

use super::backends::{Growing, RegionWish};
use super::compile::{CHEAP, CompileThread, Compiled, Job, Ticket};
use super::grants::Regrant;
use super::memory::{Completed, Contents, Made, MemoryThread, Want};
use super::request::cut;
use super::session::Over;
use super::{ANSWERED, Control};
use crate::hub::{Grown, Peer, Programs, Refusal, Step, no_memory};
use vnplug_filter::{Compiler, Jit, Trust};

/// A request that waits for its filter to be compiled or for its memory.
struct Pending {
    whom: Whom,
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
    Regrant(Box<Regrant>),
    Region(RegionWish),
    Grow(Box<Growing>),
}

/// Who is to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whom {
    /// The connection.
    pub(super) token: u64,
    /// The request's number.
    pub(super) id: u32,
    /// The application, of a channel.
    pub(super) app: u32,
}

/// A request that waits for queues' threads. It goes on when they have answered also if its
/// connection is gone: what it began is to be finished.
struct Asking {
    whom: Whom,
    step: Step,
    /// Go with the answer.
    fds: Vec<OwnedFd>,
}

/// Threads of their own for what takes long, and the requests that wait for them or for queues' threads.
pub(super) struct Jobs {
    compiler: CompileThread,
    memory: MemoryThread,
    /// By connection.
    pending: HashMap<u64, Pending>,
    asking: Vec<Asking>,
}

/// How long a request's answers are waited for before others are served: a thread that is awake
/// answers in microseconds.
pub(super) const AT_ONCE: Duration = Duration::from_millis(2);

/// As many bytes of a filter's text as lists show.
const SHOWN_FILTER: usize = 256;

impl Jobs {
    /// Starts the threads; `bell` rings when one of them is done with something.
    pub(super) fn start(compiler: Compiler, jit: Jit, bell: &Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            compiler: CompileThread::start(compiler, jit, Arc::clone(bell))?,
            memory: MemoryThread::start(Arc::clone(bell))?,
            pending: HashMap::new(),
            asking: Vec::new(),
        })
    }

    /// How soon queues' threads are to be looked at again, if they have to answer.
    pub(super) fn look_again(&self) -> Option<Duration> {
        (!self.asking.is_empty()).then_some(ANSWERED)
    }

    /// The connection is over: nobody waits for what it asked.
    pub(super) fn forget(&mut self, token: u64) {
        self.pending.remove(&token);
    }

    /// Empties what a back-end shares, elsewhere. False: nobody does.
    pub(super) fn empty(&self, number: u32, contents: Contents, bytes: u64) -> bool {
        self.memory.empty(number, contents, bytes)
    }

    /// Drops something that holds so much memory, elsewhere.
    pub(super) fn discard(&self, what: impl Send + 'static, bytes: u64) {
        self.memory.discard(what, bytes);
    }
}

impl Control {
    /// Has the operator's and the reader's filter compiled; the request goes on in
    /// [`compiled`](Self::compiled).
    pub(super) fn compile(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        then: Then,
        (guard, sends, filter, link_type): (String, String, FilterSpec, u32),
    ) -> Result<(), Over> {
        let trust = if self.policy.is_operator(viewer) {
            Trust::Operator
        } else {
            Trust::Guest
        };
        let submitted = self.jobs.compiler.submit(Job {
            session: whom.token,
            owner: viewer.clone(),
            trust,
            guard,
            sends,
            filter,
            snaplen: MAX_SNAPLEN,
            link_type,
        });
        match submitted {
            Ok(ticket) => {
                self.wait(whom, then, ticket);
                Ok(())
            }
            Err(refusal) => self.sessions.answer(whom, Err(refusal)),
        }
    }

    /// Has memory made; the request goes on in [`made`](Self::made).
    pub(super) fn make(&mut self, whom: Whom, want: Want, then: Then) -> Result<(), Over> {
        match self.jobs.memory.make(whom.token, want) {
            Ok(ticket) => {
                self.wait(whom, then, ticket);
                Ok(())
            }
            Err(refusal) => {
                if let Then::Attach(spec) = &then {
                    self.vms.never_made(spec);
                }
                self.sessions.answer(whom, Err(refusal))
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
                self.sessions.answer(whom, told)
            }
            step => {
                self.sessions.set_busy(whom.token, true);
                self.jobs.asking.push(Asking { whom, step, fds });
                Ok(())
            }
        }
    }

    /// Goes on with requests whose threads have answered.
    pub(super) fn heard(&mut self) {
        for Asking { whom, step, fds } in std::mem::take(&mut self.jobs.asking) {
            match step.carry_on(&mut self.hub, Instant::now()) {
                Step::Done(told) => {
                    self.sessions.set_busy(whom.token, false);
                    let told = told.map(|message| (message, fds));
                    let went = self.sessions.answer(whom, told);
                    self.went_on(whom.token, went);
                }
                step => self.jobs.asking.push(Asking { whom, step, fds }),
            }
        }
    }

    fn wait(&mut self, whom: Whom, then: Then, ticket: Ticket) {
        let pending = Pending {
            whom,
            then,
            _ticket: ticket,
        };
        self.jobs.pending.insert(whom.token, pending);
        self.sessions.set_busy(whom.token, true);
    }

    /// Goes on with what the threads are done with.
    pub(super) fn done(&mut self) {
        while let Some(compiled) = self.jobs.compiler.next_done() {
            self.compiled(compiled);
        }
        while let Some(completed) = self.jobs.memory.next_done() {
            self.made(completed);
        }
    }

    /// Goes on with a request whose filter is compiled.
    fn compiled(&mut self, compiled: Compiled) {
        let Compiled {
            session: token,
            mut programs,
            took,
        } = compiled;
        if let Ok(programs) = &mut programs {
            programs.text = cut(std::mem::take(&mut programs.text), SHOWN_FILTER);
        }
        let Some(pending) = self.jobs.pending.remove(&token) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(token) else {
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
        let Pending { whom, then, .. } = pending;
        let programs = programs.and_then(|programs| {
            let (device, port) = match &then {
                Then::Filter { port } => ("", Some(*port)),
                Then::Open(open) | Then::Rings(open, _) => (open.device.as_str(), None),
                Then::Attach(_) | Then::Regrant(_) | Then::Region(_) | Then::Grow(_) => {
                    return Ok(programs);
                }
            };
            self.bears(&viewer, device, port, &programs)?;
            Ok(programs)
        });
        let went = match (programs, then) {
            (Err(refusal), _) => self.sessions.answer(whom, Err(refusal)),
            (Ok(programs), Then::Open(open)) => self.open_with(whom, &viewer, open, programs),
            (Ok(programs), Then::Filter { port }) => {
                let step = self.hub.set_filter(port, programs.filter, programs.text);
                self.carry_on(whom, Ok(step))
            }
            (Ok(programs), Then::Regrant(mut regrant)) => {
                regrant.add(programs.filter);
                self.regrant(whom, &viewer, *regrant)
            }
            (Ok(_), Then::Rings(..) | Then::Attach(_) | Then::Region(_) | Then::Grow(_)) => Ok(()),
        };
        self.went_on(token, went);
    }

    /// Goes on with a request whose memory is made.
    fn made(&mut self, completed: Completed) {
        let token = completed.session;
        if let Made::Emptied(region) = completed.made {
            return self.emptied(region);
        }
        if let Made::Pool(plan, _) = &completed.made {
            self.vms.made(plan);
        }
        let (Some(pending), Some(session)) = (
            self.jobs.pending.remove(&token),
            self.sessions.get_mut(token),
        ) else {
            // Who asked for it is gone.
            completed.abandon(&self.jobs.memory);
            return;
        };
        session.busy = false;
        let viewer = session.viewer.clone();
        let Pending { whom, then, .. } = pending;
        let went = match (completed.made, then) {
            (Made::Pool(plan, pool), Then::Attach(spec)) => {
                let ready = self.attached(token, &spec, *plan, pool);
                self.sessions
                    .answer(whom, ready.map(|ready| (ready, Vec::new())))
            }
            (Made::Shared(_, memory), Then::Region(wish)) => self.shared(whom, wish, memory),
            (Made::Device(_, memory), Then::Grow(growing)) => {
                self.grow_for(whom, &viewer, growing, memory)
            }
            (Made::Rings(need, memory), Then::Rings(open, programs)) => {
                let opening = memory
                    .map_err(|error| no_memory(need.total(), &error))
                    .and_then(|memory| {
                        let (memory, grown) = (Some(memory), Grown::default());
                        self.opened(whom, &viewer, &open, programs, memory, grown)
                    });
                self.tell_opened(whom, opening)
            }
            _ => {
                let refusal = Refusal::new(code::INTERNAL, "not what was asked for");
                self.sessions.answer(whom, Err(refusal))
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

    /// Ports whose rings are being made for a user, on whatever connection, and their bytes, with those that may
    /// wait in its channels to back-ends.
    pub(super) fn awaited(&self, viewer: &Peer, owner: &Peer) -> (usize, u64) {
        let rings = self.jobs.pending.iter().filter_map(|(token, pending)| {
            let own = self.sessions.get(*token)?.viewer == *viewer;
            match &pending.then {
                Then::Rings(open, programs) if own => {
                    let need = self.hub.need(open, owner, programs).unwrap_or_default();
                    Some(need.total())
                }
                _ => None,
            }
        });
        let windows = self.backends.windows_of(owner);
        rings.fold((0, windows), |(count, sum), bytes| (count + 1, sum + bytes))
    }
}
