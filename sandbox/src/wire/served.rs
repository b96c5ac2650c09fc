//! Which server a TLS client names, on connections that were allowed because of a name.
//!
//! One address can serve many names. Whoever may reach one of them may not say another to the server: a connection
//! that names a server that no rule allows goes no further. What was sent of that message before its end has left by then; no
//! server answers it. A connection is looked at until its server has taken what was said, since it may want it said anew.
//!
//! Each connection has the names of its own call, which says as soon as its socket has an address whose connection that is. If its
//! first words are quicker than that, they wait: the kernel says them once more.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::begun::{Begun, Names};
use super::flow::{ACK, Ends, Flow, Flows, RST, SYN, Segment, Word};
use crate::act::Who;
use crate::name::Name;

/// Peers that were allowed by name, and connections that have not said yet whom they mean.
#[derive(Debug, Default)]
pub(super) struct Served {
    named: HashSet<SocketAddr>,
    /// The tickets of the calls to each peer that were allowed and have made no connection yet.
    calls: HashMap<SocketAddr, BTreeSet<Ticket>>,
    begun: Begun,
    flows: Flows,
}

/// Says which of the calls that were allowed it is; a later one has a higher number.
pub(super) type Ticket = u64;

/// Why a segment of the program's passes so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A call was allowed.
    Call,
    /// A rule that needs no program.
    Rule,
    /// It answers who came, or is the supervisor's.
    Other,
}

impl Served {
    /// A call was allowed that connects to this peer; by a name, or by the address. It is to be followed by
    /// [`begins`](Self::begins) with this ticket.
    ///
    /// `None` if so many peers have names that this one's cannot be compared: then it is not to be permitted, and nothing follows.
    pub(super) fn allow(&mut self, peer: SocketAddr, is_named: bool) -> Option<Ticket> {
        if is_named {
            if self.named.len() >= MOST_PEERS && !self.named.contains(&peer) {
                return None;
            }
            self.named.insert(peer);
        }
        let ticket = self.begun.number();
        self.calls.entry(peer).or_default().insert(ticket);
        Some(ticket)
    }

    /// This one's call with this ticket has made a connection from this address and port, allowed by these names or as an address;
    /// or it has made none.
    pub(super) fn begins(
        &mut self,
        (peer, ticket): (SocketAddr, Ticket),
        own: Option<SocketAddr>,
        (who, names): (Arc<Who>, Names),
    ) {
        if let Some(calls) = self.calls.get_mut(&peer) {
            calls.remove(&ticket);
            if calls.is_empty() {
                self.calls.remove(&peer);
            }
        }
        if let Some(own) = own {
            self.begun.note((peer, own), who, names);
        }
    }

    /// Whether some connections to this peer are looked at.
    pub(super) fn is_named(&self, peer: SocketAddr) -> bool {
        self.named.contains(&peer)
    }

    /// By what a connection was allowed that was first seen at this mark, and began with a segment of this number, if its call has
    /// said so. What was said before may be about an old one, as long as a call is under way that can have made this one: one that
    /// was allowed before it was seen.
    fn names_of(&mut self, ends: &Ends, mark: u64, began_with: u32) -> Option<Names> {
        let first = self.calls.get(&ends.0).and_then(BTreeSet::first);
        let since = match first.is_some_and(|ticket| *ticket < mark) {
            true => mark,
            false => 0,
        };
        self.begun.find(ends, since, began_with).cloned()
    }

    /// A segment of the program's from this address and port to that peer. `may` says whether rules allow another name there to
    /// this one, if it is known whose connection it is.
    pub(super) fn sent(
        &mut self,
        peer: SocketAddr,
        own: SocketAddr,
        (segment, by): (Option<Segment<'_>>, By),
        now: Instant,
        may: impl Fn(Option<&Arc<Who>>, &Name) -> bool,
    ) -> Word {
        if !self.is_named(peer) {
            return Word::Passes;
        }
        let key = (peer, own);
        let Some(segment) = segment else {
            return Word::Refused(None);
        };
        let begins = segment.has(SYN);
        if begins && segment.joins() {
            return Word::Refused(None);
        }
        let known = self.flows.take(&key);
        let known = known.filter(|flow| !begins || flow.began_with(segment.number));
        let mut flow = match known {
            Some(flow) => flow,
            None if !begins || by == By::Other => return Word::Passes,
            None => {
                let mark = self.begun.mark();
                let names = self.names_of(&key, mark, segment.number);
                if names == Some(None) {
                    return Word::Passes;
                }
                if !self.flows.has_room(now) {
                    // Later, when others have said whom they mean.
                    return Word::Waits;
                }
                Flow::new(segment.number, mark, names.flatten(), now)
            }
        };
        if segment.has(RST) {
            // Until the kernel has taken an answer it resets what is not of this connection, and goes on. What entered before this
            // left shows nothing: it may be what the reset is about.
            if !flow.stands() {
                self.flows.put(key, flow);
            }
            return Word::Passes;
        }
        if !segment.data.is_empty() && !flow.is_named() {
            match self.names_of(&key, flow.mark(), flow.number()) {
                Some(None) => return Word::Passes,
                Some(Some(names)) => flow.name(names),
                None if by == By::Rule => flow.name(Arc::default()),
                None => {
                    self.flows.put(key, flow);
                    return Word::Waits;
                }
            }
        }
        let who = self.begun.maker(&key, flow.number());
        let may = |name: &Name| may(who, name);
        let word = flow.sent(&segment, self.flows.room(), now, may);
        if !flow.is_over() {
            self.flows.put(key, flow);
        }
        word
    }

    /// Whether a segment in the peer's name may enter. It can show that what was said has arrived.
    pub(super) fn received(
        &mut self,
        peer: SocketAddr,
        own: SocketAddr,
        segment: Option<Segment<'_>>,
        now: Instant,
    ) -> bool {
        if self.named.is_empty() {
            return true;
        }
        let Some(segment) = segment else {
            // It has no whole head, and what completes it is not seen.
            return !self.is_named(peer);
        };
        let key = (peer, own);
        match self.flows.take(&key) {
            Some(mut flow) => {
                flow.received(&segment, now);
                if !flow.is_over() {
                    self.flows.put(key, flow);
                }
                true
            }
            // It had to make room for others: it begins anew, and is known again.
            None => !segment.has(SYN | ACK) || !self.is_named(peer) || self.begun.is_bare(&key),
        }
    }
}

/// Peers whose names are known, at once.
const MOST_PEERS: usize = 16_384;

#[cfg(test)]
mod tests;
