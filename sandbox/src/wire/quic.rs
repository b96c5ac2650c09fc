//! Which server a QUIC client names, at peers that were allowed because of a name.
//!
//! As with TLS over TCP, and with less: a packet does not say whose socket it left, so the names of all calls to a peer count
//! together, and a call by the address frees it for all.
//!
//! A client's messages come in pieces, in any order and in several packets. What is a part of a name that is not whole passes: no server
//! can read it. The piece that completes a name that is refused does not, nor anything after it. A server knows a connection by the id of its
//! first packet, so pieces belong to that id, and each byte of them is the same each time it is said.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flow::Word;
use super::hello::{self, Hello};
use super::initial::{self, Initial, Keys, Piece};
use crate::act::Who;
use crate::name::Name;

/// Peers that were allowed, and connections that begin there.
#[derive(Debug, Default)]
pub(super) struct Quic {
    peers: HashMap<SocketAddr, Peer>,
    /// By the connection id of their first packet.
    talks: HashMap<Vec<u8>, Talk>,
}

/// By what a peer was allowed, and to whom.
#[derive(Debug)]
struct Peer {
    /// `None`: by its address.
    names: Option<Vec<Name>>,
    /// `None`: to several processes.
    who: Option<Arc<Who>>,
}

/// A connection that begins.
#[derive(Debug)]
struct Talk {
    keys: Keys,
    ends: (SocketAddr, SocketAddr),
    /// What its client said, where it is known.
    said: Vec<Option<u8>>,
    /// Messages up to here were judged.
    judged: usize,
    is_refused: bool,
    seen: Instant,
}

impl Quic {
    /// This one's call was allowed that speaks with this peer by UDP, by these names or as an address. False if so many peers have
    /// names that this one's cannot be compared: then it is not to be permitted.
    pub(super) fn allow(
        &mut self,
        who: &Arc<Who>,
        at: SocketAddr,
        names: Option<Vec<Name>>,
    ) -> bool {
        if self.peers.len() >= MOST_PEERS && !self.peers.contains_key(&at) {
            // What is not compared can be found out anew.
            self.peers.retain(|_, peer| peer.names.is_some());
            if self.peers.len() >= MOST_PEERS {
                return names.is_none();
            }
        }
        let peer = match self.peers.entry(at) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let who = Some(Arc::clone(who));
                place.insert(Peer { names, who });
                return true;
            }
        };
        let is_same = |it: &Arc<Who>| (it.pid, it.started) == (who.pid, who.started);
        peer.who.take_if(|it| !is_same(it));
        let (Some(known), Some(names)) = (&mut peer.names, names) else {
            peer.names = None;
            return true;
        };
        for name in names {
            if !known.contains(&name) {
                known.push(name);
            }
        }
        let too_many = known.len().saturating_sub(MOST_NAMES);
        known.drain(..too_many);
        true
    }

    /// Whether what is sent to this peer is looked at.
    pub(super) fn is_named(&self, at: SocketAddr) -> bool {
        self.peers.get(&at).is_some_and(|it| it.names.is_some())
    }

    /// A datagram of the program's from this address and port to that peer. `may` says whether rules allow another name there.
    pub(super) fn sent(
        &mut self,
        ends: (SocketAddr, SocketAddr),
        datagram: &[u8],
        now: Instant,
        may: impl Fn(Option<&Arc<Who>>, &Name) -> bool,
    ) -> Word {
        if !self.is_named(ends.0) {
            return Word::Passes;
        }
        let Ok(initials) = initial::initials(datagram) else {
            return Word::Refused(None);
        };
        for packet in initials {
            let word = self.begins(ends, &packet, now, &may);
            if word != Word::Passes {
                return word;
            }
        }
        Word::Passes
    }

    fn begins(
        &mut self,
        ends: (SocketAddr, SocketAddr),
        packet: &Initial<'_>,
        now: Instant,
        may: impl Fn(Option<&Arc<Who>>, &Name) -> bool,
    ) -> Word {
        let Some((id, text)) = self.open(ends, packet, now) else {
            return Word::Waits;
        };
        let (Some(talk), Some(peer)) = (self.talks.get_mut(&id), self.peers.get(&ends.0)) else {
            return Word::Waits;
        };
        if talk.ends.0 != ends.0 {
            // What one peer may be told is not what another one may.
            talk.judged = 0;
        }
        (talk.seen, talk.ends) = (now, ends);
        let Some(pieces) = initial::pieces(&text) else {
            return Word::Refused(None);
        };
        if talk.is_refused || !talk.says(&pieces) {
            return Word::Waits;
        }
        while let Some(hello) = talk.next() {
            let names = peer.names.as_deref().unwrap_or_default();
            let refused = match hello {
                Hello::Unnamed => continue,
                Hello::Named(name) if names.contains(&name) => continue,
                Hello::Named(name) if may(peer.who.as_ref(), &name) => continue,
                Hello::Named(name) => Some(name),
                _ => None,
            };
            talk.is_refused = true;
            return Word::Refused(refused);
        }
        Word::Passes
    }

    /// Whose packet it is, and what it carries; `None`: no server can read it, or it has to wait.
    fn open(
        &mut self,
        ends: (SocketAddr, SocketAddr),
        packet: &Initial<'_>,
        now: Instant,
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        let own = self.talks.get(packet.to);
        if let Some(text) = own.and_then(|talk| talk.keys.open(packet)) {
            return Some((packet.to.to_vec(), text));
        }
        if own.is_none()
            && let Some(keys) = Keys::of(packet.to)
            && let Some(text) = keys.open(packet)
        {
            if self.talks.len() >= MOST_TALKS {
                self.talks
                    .retain(|_, talk| now.duration_since(talk.seen) < SILENCE);
            }
            if self.talks.len() >= MOST_TALKS {
                return None;
            }
            let talk = Talk {
                keys,
                ends,
                said: Vec::new(),
                judged: 0,
                is_refused: false,
                seen: now,
            };
            self.talks.insert(packet.to.to_vec(), talk);
            return Some((packet.to.to_vec(), text));
        }
        // The server has answered, and has chosen another id.
        let mut same: Vec<_> = self
            .talks
            .iter()
            .filter(|(_, talk)| talk.ends == ends)
            .collect();
        same.sort_by_key(|(_, talk)| std::cmp::Reverse(talk.seen));
        let mut opened = same.into_iter().take(MOST_TRIES);
        opened.find_map(|(id, talk)| Some((id.clone(), talk.keys.open(packet)?)))
    }
}

impl Talk {
    /// Takes what its client says; false: it is not what was said there before, or too much.
    fn says(&mut self, pieces: &[Piece<'_>]) -> bool {
        let mut said = self.said.clone();
        for &(at, piece) in pieces {
            let Some(end) = at.checked_add(piece.len()).filter(|end| *end <= MOST_SAID) else {
                return false;
            };
            if said.len() < end {
                said.resize(end, None);
            }
            for (known, &byte) in said[at..end].iter_mut().zip(piece) {
                if *known.get_or_insert(byte) != byte {
                    return false;
                }
            }
        }
        self.said = said;
        true
    }

    /// The next message that is whole.
    fn next(&mut self) -> Option<Hello> {
        let said = self.said[self.judged..].iter().map_while(|byte| *byte);
        let said: Vec<u8> = said.collect();
        let (hello, length) = hello::whole(&said)?;
        self.judged += length;
        Some(hello)
    }
}

/// Peers whose names are known, and names of each, at once.
const MOST_PEERS: usize = 16_384;
const MOST_NAMES: usize = 256;
/// Connections that begin, at once; more have to wait.
const MOST_TALKS: usize = 1024;
/// The most of them between the same ends that are tried.
const MOST_TRIES: usize = 128;
/// The most that a client says before it has keys of its server's: two first messages.
const MOST_SAID: usize = 2 * hello::MOST_BYTES;
/// Longer than any server waits for the rest of what a client says first.
const SILENCE: Duration = Duration::from_secs(120);

#[cfg(test)]
#[path = "quic_tests.rs"]
mod tests;
