//! Which server a TLS client names, on connections that were allowed because of a name.
//!
//! One address can serve many names. Whoever may reach one of them may not say another to the server: a connection
//! that names a server that no rule allows goes no further. What was sent of that message before its end has left by then; no
//! server answers it. A connection is looked at until its server has taken what was said, since it may want it said anew.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use super::flow::{ACK, Flow, Flows, RST, SYN, Segment, Word};
use crate::name::Name;

/// Names of peers, and connections that have not said yet whom they mean.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// By which names a peer was allowed; others were allowed as addresses.
    names: HashMap<SocketAddr, Vec<Allowed>>,
    flows: Flows,
}

/// A name, and until when a connection may begin that says it; `None`: for ever.
type Allowed = (Name, Option<Instant>);

impl Served {
    /// A peer is allowed: by these names, or by its address; to connections that begin until that time.
    ///
    /// False if so many have names that this one's cannot be compared: then it is not to be permitted.
    pub(super) fn allow(
        &mut self,
        peer: SocketAddr,
        names: Option<Vec<Name>>,
        until: Option<Instant>,
    ) -> bool {
        match names {
            None => {
                if self.names.remove(&peer).is_some() {
                    self.flows.forget(peer);
                }
            }
            Some(_) if self.names.len() >= MOST_PEERS && !self.names.contains_key(&peer) => {
                return false;
            }
            Some(names) => {
                let known = self.names.entry(peer).or_default();
                let mut new: Vec<Allowed> = names.into_iter().map(|name| (name, until)).collect();
                for (name, until) in &mut new {
                    if let Some((_, before)) = known.iter().find(|(known, _)| known == name) {
                        *until = before.zip(*until).map(|(before, until)| before.max(until));
                    }
                }
                known.retain(|(name, _)| new.iter().all(|(other, _)| other != name));
                known.splice(0..0, new);
                known.truncate(MOST_NAMES);
            }
        }
        true
    }

    /// A segment of the program's from this address and port to that peer. `may` says whether a rule allows another name there.
    pub(super) fn sent(
        &mut self,
        peer: SocketAddr,
        own: SocketAddr,
        segment: Option<Segment<'_>>,
        now: Instant,
        may: impl Fn(&Name) -> bool,
    ) -> Word {
        let Some(names) = self.names.get(&peer) else {
            return Word::Passes;
        };
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
            None if !begins => return Word::Passes,
            None if self.flows.has_room(now) => {
                let live = |until: &Option<Instant>| until.is_none_or(|until| until > now);
                let named = names.iter().filter(|(_, until)| live(until));
                let named = named.map(|(name, _)| name.clone()).collect();
                Flow::new(segment.number, named, now)
            }
            // Later, when others have said whom they mean.
            None => return Word::Refused(None),
        };
        if segment.has(RST) {
            // While nobody has answered, the kernel resets what is not of this connection, and goes on.
            if !flow.is_answered() {
                self.flows.put(key, flow);
            }
            return Word::Passes;
        }
        let word = flow.sent(&segment, self.flows.room(), now, may);
        if !flow.is_over() {
            self.flows.put(key, flow);
        }
        word
    }

    /// Whether a segment of the peer's may enter. It can end the connection, or show that what was said has arrived.
    pub(super) fn received(
        &mut self,
        peer: SocketAddr,
        own: SocketAddr,
        segment: Option<Segment<'_>>,
        now: Instant,
    ) -> bool {
        if self.names.is_empty() {
            return true;
        }
        let Some(segment) = segment else {
            // It has no whole head, and what completes it is not seen.
            return !self.names.contains_key(&peer);
        };
        let key = (peer, own);
        match self.flows.take(&key) {
            Some(mut flow) => {
                if flow.received(&segment, now) && !flow.is_over() {
                    self.flows.put(key, flow);
                }
                true
            }
            // It had to make room for others: it begins anew, and is known again.
            None => !(segment.has(SYN | ACK) && self.names.contains_key(&peer)),
        }
    }
}

/// Peers whose names are known, at once.
const MOST_PEERS: usize = 16_384;
/// Names of a peer.
const MOST_NAMES: usize = 16;

#[cfg(test)]
#[path = "served_tests.rs"]
mod tests;
