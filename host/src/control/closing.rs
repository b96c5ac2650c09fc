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
use std::time::Instant;

use vnplug_ring::control::wire::Header;

use super::Control;
use super::memory::LARGE;
use crate::hub::policy::Viewer;
use crate::hub::{Closed, Closing};

/// Ports on their way out.
#[derive(Default)]
pub(super) struct Leaving {
    /// Of whom they are, and which.
    doomed: VecDeque<(Viewer, u32)>,
    /// Those of which the queues' threads know.
    closing: Vec<(Viewer, Closing)>,
    /// By connection the message that waits for the ports of its VM.
    parked: HashMap<u64, (Header, Vec<u8>)>,
}

impl Leaving {
    /// Whether threads are to answer soon.
    pub(super) fn is_awaited(&self) -> bool {
        !self.closing.is_empty()
    }

    /// Forgets the message of a connection that ended.
    pub(super) fn forget(&mut self, token: u64) {
        self.parked.remove(&token);
    }

    fn has_some_of(&self, viewer: &Viewer) -> bool {
        let mut closing = self.closing.iter().map(|(it, _)| it);
        closing.any(|it| it == viewer) || self.doomed.iter().any(|(it, _)| it == viewer)
    }
}

impl Control {
    /// Closes ports and gives their memory back: those of a VM's pool are free for what the agent
    /// asks for next.
    pub(super) fn close_ports(&mut self, viewer: &Viewer, ports: Vec<u32>) {
        // All are told before the first is waited for: the threads take them in one go.
        let closing: Vec<Closing> = ports
            .into_iter()
            .filter_map(|port| self.hub.begin_close(port))
            .collect();
        for closing in closing {
            self.finish_close(viewer, closing);
        }
    }

    /// Closes ports whose reader is gone; many of them a few in each turn.
    pub(super) fn close_soon(&mut self, viewer: &Viewer, ports: Vec<u32>) {
        if ports.len() <= FEW {
            self.close_ports(viewer, ports);
            return;
        }
        if let Some(vm) = self.vm_of_mut(viewer) {
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
        viewer: &Viewer,
        ports: Vec<u32>,
        message: &(Header, Vec<u8>),
    ) -> bool {
        self.close_soon(viewer, ports);
        let Some(session) = self.sessions.get_mut(&token) else {
            return false;
        };
        let waits = session.channel && self.leaving.has_some_of(viewer);
        if waits {
            session.busy = true;
            self.leaving.parked.insert(token, message.clone());
        }
        waits
    }

    /// Closes what is left of the ports of a VM that is to be no more, and waits for that.
    pub(super) fn close_now(&mut self, viewer: &Viewer) {
        let leaving = &mut self.leaving;
        let begun = leaving.closing.extract_if(.., |(it, _)| it == viewer);
        let begun: Vec<Closing> = begun.map(|(_, closing)| closing).collect();
        let (own, others) = leaving.doomed.drain(..).partition(|(it, _)| it == viewer);
        leaving.doomed = others;
        let own: VecDeque<(Viewer, u32)> = own;
        self.close_ports(viewer, own.into_iter().map(|(_, port)| port).collect());
        for closing in begun {
            self.finish_close(viewer, closing);
        }
    }

    /// Finishes closing what the queues' threads have let go, then tells them of more.
    pub(super) fn close_doomed(&mut self) {
        let now = Instant::now();
        let is_over = |(_, closing): &mut (Viewer, Closing)| closing.is_over(now);
        let over: Vec<_> = self.leaving.closing.extract_if(.., is_over).collect();
        for (viewer, closing) in over {
            let port = closing.id();
            let Closed {
                places, remains, ..
            } = self.hub.finish_close(closing);
            // Unmapping the rings is not this thread's business here.
            let bytes = remains.bytes();
            self.memory.discard(remains, bytes);
            if let Some(vm) = self.vm_of_mut(&viewer) {
                vm.forget_port(port, &places);
            }
        }
        // A thread that hangs holds the others up, but has its time for each lot and not for each port.
        while self.leaving.closing.len() < CLOSES
            && let Some((viewer, port)) = self.leaving.doomed.pop_front()
        {
            let closing = self.hub.begin_close(port);
            self.leaving.closing.extend(closing.map(|it| (viewer, it)));
        }
    }

    /// Serves the messages whose ports are closed.
    pub(super) fn serve_parked(&mut self) {
        let leaving = &self.leaving;
        let is_over = |token: &u64| match self.sessions.get(token) {
            Some(session) => !leaving.has_some_of(&session.viewer),
            None => true,
        };
        let over: Vec<u64> = leaving.parked.keys().copied().filter(is_over).collect();
        for token in over {
            let message = self.leaving.parked.remove(&token);
            if let (Some(session), Some(message)) = (self.sessions.get_mut(&token), message) {
                session.busy = false;
                let went = self.request(token, &message);
                self.went_on(token, went);
            }
        }
    }

    fn finish_close(&mut self, viewer: &Viewer, closing: Closing) {
        let port = closing.id();
        let Closed {
            places, remains, ..
        } = self.hub.finish_close(closing);
        let bytes = remains.bytes();
        if bytes >= LARGE {
            self.memory.discard(remains, bytes);
        }
        if let Some(vm) = self.vm_of_mut(viewer) {
            vm.forget_port(port, &places);
        }
    }
}

/// Ports whose reader is gone: so few are closed at once, and of more of them so many are on their way
/// at a time. A queue's thread takes each in less than a microsecond, between two batches.
const FEW: usize = 4;
const CLOSES: usize = 32;
