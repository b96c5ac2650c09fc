//! Ports that go: one at once, thousands a few in each turn of the control thread.
//!
//! ```text
//!   a connection ends ─────────┐
//!   an application in a guest ─┤── doomed ── closing (a lot, told to the queues' threads) ── freed
//!   an agent comes again ──────┘
//! ```
//!
//! The last two are messages of a channel, and what the agent asks for next may need the memory of the
//! ports. So such a message waits, and its channel with it, until those are closed; then it is served
//! as if it came now.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use vnplug_ring::control::Message;
use vnplug_ring::control::wire::Header;

use super::memory::LARGE;
use super::session::Over;
use super::sessions::Answer;
use super::waiting::{AT_ONCE, Whom};
use super::{ANSWERED, Control};
use crate::hub::{Closed, Closing, Peer};

/// Ports on their way out.
#[derive(Default)]
pub(super) struct Leaving {
    /// Ports to be closed, and whose they are.
    doomed: VecDeque<(Peer, u32)>,
    /// Ports that queues' threads were told to let go.
    closing: Vec<Parting>,
    /// By connection the message that waits for the ports of its VM.
    parked: HashMap<u64, (Header, Vec<u8>)>,
}

/// A port that queues' threads were told to let go.
struct Parting {
    /// Whose it is; `None`: a VM's that is no more, and the memory with it.
    viewer: Option<Peer>,
    closing: Closing,
    /// Who is to be answered when it is closed.
    whom: Option<Whom>,
}

impl Leaving {
    /// How soon threads are to be looked at again, if any have to answer.
    pub(super) fn look_again(&self) -> Option<Duration> {
        let waits = self.closing.iter().map(|it| match it.closing.is_stalled() {
            true => STALLED,
            false => ANSWERED,
        });
        waits.min()
    }

    /// Forgets the message of a connection that ended.
    pub(super) fn forget(&mut self, token: u64) {
        self.parked.remove(&token);
    }

    /// Whether ports of somebody are still to be closed, other than by a thread that is stalled:
    /// their memory is free when that goes on.
    fn has_some_of(&self, viewer: &Peer) -> bool {
        let is_own = |it: &Parting| it.viewer.as_ref() == Some(viewer) && !it.closing.is_stalled();
        self.closing.iter().any(is_own) || self.doomed.iter().any(|(it, _)| it == viewer)
    }
}

impl Control {
    /// Closes ports and gives their memory back: those of a VM's pool are free for what the agent
    /// asks for next, unless a thread takes its time.
    pub(super) fn close_ports(&mut self, viewer: &Peer, ports: Vec<u32>) {
        // All are told before the first is looked at: the threads take them in one go.
        let closing: Vec<Closing> = ports
            .into_iter()
            .filter_map(|port| self.hub.begin_close(port))
            .collect();
        let until = Instant::now() + AT_ONCE;
        for mut closing in closing {
            if closing.is_over(until) {
                self.finish_close(Some(viewer), closing, LARGE);
            } else {
                self.leaving.closing.push(Parting {
                    viewer: Some(viewer.clone()),
                    closing,
                    whom: None,
                });
            }
        }
    }

    /// Closes a port, and answers when it is closed, or its thread is stalled.
    pub(super) fn close_one(&mut self, whom: Whom, viewer: &Peer, port: u32) -> Result<(), Over> {
        let before = self.leaving.closing.len();
        self.close_ports(viewer, vec![port]);
        match self.leaving.closing.get_mut(before) {
            None => self.sessions.answer(whom, done()),
            Some(parting) => {
                parting.whom = Some(whom);
                self.sessions.set_busy(whom.token, true);
                Ok(())
            }
        }
    }

    /// Closes ports whose reader is gone; many of them a few in each turn.
    pub(super) fn close_soon(&mut self, viewer: &Peer, ports: Vec<u32>) {
        if ports.len() <= FEW {
            self.close_ports(viewer, ports);
            return;
        }
        if let Some(vm) = self.vms.of_mut(viewer) {
            // Nobody is left to be woken.
            ports.iter().for_each(|&port| vm.forget_port(port, &[]));
        }
        let doomed = ports.into_iter().map(|port| (viewer.clone(), port));
        self.leaving.doomed.extend(doomed);
        self.close_doomed();
    }

    /// Closes ports as [`close_soon`](Self::close_soon). True if that is not done, for a channel: then
    /// the message is served again when it is.
    pub(super) fn close_first(
        &mut self,
        token: u64,
        viewer: &Peer,
        ports: Vec<u32>,
        message: &(Header, Vec<u8>),
    ) -> bool {
        self.close_soon(viewer, ports);
        let Some(session) = self.sessions.get_mut(token) else {
            return false;
        };
        let waits = session.channel && self.leaving.has_some_of(viewer);
        if waits {
            session.busy = true;
            self.leaving.parked.insert(token, message.clone());
        }
        waits
    }

    /// Closes what is left of the ports of a VM that is to be no more. What a thread has not let go
    /// it may still write to, in memory that then is nobody's.
    pub(super) fn close_now(&mut self, viewer: &Peer) {
        let leaving = &mut self.leaving;
        let (own, others) = leaving.doomed.drain(..).partition(|(it, _)| it == viewer);
        leaving.doomed = others;
        let own: VecDeque<(Peer, u32)> = own;
        self.close_ports(viewer, own.into_iter().map(|(_, port)| port).collect());
        self.close_doomed();
        for parting in &mut self.leaving.closing {
            if parting.viewer.as_ref() == Some(viewer) {
                parting.viewer = None;
            }
        }
    }

    /// Finishes closing what the queues' threads have let go, then tells them of more.
    pub(super) fn close_doomed(&mut self) {
        let now = Instant::now();
        let closing = &mut self.leaving.closing;
        let over: Vec<Parting> = closing
            .extract_if(.., |parting| parting.closing.is_over(now))
            .collect();
        let stalled = closing.iter_mut().filter(|it| it.closing.is_stalled());
        let mut told: Vec<Whom> = stalled.filter_map(|it| it.whom.take()).collect();
        for Parting {
            viewer,
            closing,
            whom,
        } in over
        {
            told.extend(whom);
            self.finish_close(viewer.as_ref(), closing, 0);
        }
        for whom in told {
            self.sessions.set_busy(whom.token, false);
            let went = self.sessions.answer(whom, done());
            self.went_on(whom.token, went);
        }
        // Those that wait for a thread that is stalled hold up nobody else's.
        let moving = |leaving: &Leaving| {
            let moving = leaving.closing.iter();
            moving.filter(|it| !it.closing.is_stalled()).count()
        };
        while moving(&self.leaving) < CLOSES
            && let Some((viewer, port)) = self.leaving.doomed.pop_front()
        {
            let closing = self.hub.begin_close(port);
            self.leaving.closing.extend(closing.map(|closing| Parting {
                viewer: Some(viewer),
                closing,
                whom: None,
            }));
        }
    }

    /// Serves the messages whose ports are closed.
    pub(super) fn serve_parked(&mut self) {
        let leaving = &self.leaving;
        let is_over = |token: &u64| match self.sessions.get(*token) {
            Some(session) => !leaving.has_some_of(&session.viewer),
            None => true,
        };
        let over: Vec<u64> = leaving.parked.keys().copied().filter(is_over).collect();
        for token in over {
            let message = self.leaving.parked.remove(&token);
            if let (Some(session), Some(message)) = (self.sessions.get_mut(token), message) {
                session.busy = false;
                let went = self.request(token, &message);
                self.went_on(token, went);
            }
        }
    }

    /// Frees what the threads let go. Rings of `elsewhere` bytes and more are not unmapped by this
    /// thread.
    fn finish_close(&mut self, viewer: Option<&Peer>, closing: Closing, elsewhere: u64) {
        let port = closing.id();
        let Closed {
            places, remains, ..
        } = self.hub.finish_close(closing);
        let bytes = remains.bytes();
        if bytes >= elsewhere {
            self.jobs.discard(remains, bytes);
        }
        if let Some(vm) = viewer.and_then(|viewer| self.vms.of_mut(viewer)) {
            vm.forget_port(port, &places);
        }
        self.close_devices(&places);
    }
}

/// What is answered when a port is closed.
fn done() -> Answer {
    Ok((Message::Done, Vec::new()))
}

/// The most ports whose reader is gone that are closed at once. Of more, this number are on their way
/// at a time. A queue's thread takes each in less than a microsecond, between two batches.
const FEW: usize = 4;
/// How soon it is looked whether a stalled thread goes on.
const STALLED: Duration = Duration::from_millis(100);
const CLOSES: usize = 32;
