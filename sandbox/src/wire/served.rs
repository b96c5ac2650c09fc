//! Which server a TLS client names, on connections that were allowed because of a name.
//!
//! One address can serve many names. Whoever may reach one of them may not say another to the server: a connection whose
//! first message names a server that no rule allows goes no further. What was sent of that message before its end
//! has left by then; no server answers it.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::hello::{Hello, MOST_BYTES};
use crate::name::Name;

/// Names of peers, and connections that have not said yet whom they mean.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// By which names a peer was allowed; others were allowed as addresses.
    names: HashMap<SocketAddr, Vec<Name>>,
    flows: HashMap<(SocketAddr, u16), Flow>,
}

#[derive(Debug)]
enum Flow {
    /// So far it has said this; the next byte has this number.
    Reading { said: Vec<u8>, next: u32 },
    /// It named a server that it may not reach.
    Refused,
}

/// A segment of TCP, as far as it counts here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    number: u32,
    flags: u8,
    data: &'a [u8],
}

/// What becomes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// It goes on.
    Passes,
    /// It does not; a new refusal names the server.
    Refused(Option<Name>),
}

impl<'a> Segment<'a> {
    pub(super) fn of(body: &'a [u8]) -> Option<Self> {
        let head = body.first_chunk::<20>()?;
        let data = body.get(usize::from(head[12] >> 4) * 4..)?;
        Some(Self {
            number: u32::from_be_bytes([head[4], head[5], head[6], head[7]]),
            flags: head[13],
            data,
        })
    }
}

impl Served {
    /// A peer is allowed: by these names, or by its address.
    ///
    /// False if so many have names that this one's cannot be compared: then it is not to be permitted.
    pub(super) fn allow(&mut self, peer: SocketAddr, names: Option<Vec<Name>>) -> bool {
        match names {
            None => drop(self.names.remove(&peer)),
            Some(_) if self.names.len() >= MOST_PEERS && !self.names.contains_key(&peer) => {
                return false;
            }
            Some(names) => {
                let known = self.names.entry(peer).or_default();
                known.retain(|name| !names.contains(name));
                known.splice(0..0, names);
                known.truncate(MOST_NAMES);
            }
        }
        true
    }

    /// A segment of the program's from this port to that peer. `may` says whether a rule allows another name there.
    pub(super) fn sent(
        &mut self,
        peer: SocketAddr,
        own: u16,
        segment: Option<Segment<'_>>,
        may: impl Fn(&Name) -> bool,
    ) -> Word {
        let Some(names) = self.names.get(&peer) else {
            return Word::Passes;
        };
        let key = (peer, own);
        let Some(segment) = segment else {
            return Word::Refused(None);
        };
        if segment.flags & SYN != 0 {
            if self.flows.len() >= MOST_FLOWS && !self.flows.contains_key(&key) {
                // Later, when others have said whom they mean.
                return Word::Refused(None);
            }
            let next = segment.number.wrapping_add(1);
            let said = Vec::new();
            self.flows.insert(key, Flow::Reading { said, next });
        }
        let (said, next) = match self.flows.get_mut(&key) {
            None => return Word::Passes,
            Some(_) if segment.flags & RST != 0 => {
                self.flows.remove(&key);
                return Word::Passes;
            }
            Some(Flow::Refused) => {
                return match segment.data {
                    [] => Word::Passes,
                    _ => Word::Refused(None),
                };
            }
            Some(Flow::Reading { said, next }) => (said, next),
        };
        if segment.data.is_empty() {
            if segment.flags & FIN != 0 {
                self.flows.remove(&key);
            }
            return Word::Passes;
        }
        let first = segment
            .number
            .wrapping_add(u32::from(segment.flags & SYN != 0));
        let ahead = first.wrapping_sub(*next);
        if ahead != 0 {
            // Sent once more: the same again, or nothing. What is missing before it comes first.
            let back = next.wrapping_sub(first) as usize;
            let before = said.len().checked_sub(back).map(|at| &said[at..]);
            return match before {
                Some(before) if before.starts_with(segment.data) => Word::Passes,
                _ => Word::Refused(None),
            };
        }
        if segment.flags & URG != 0 {
            // The peer may take a byte of it out of the stream.
            self.flows.insert(key, Flow::Refused);
            return Word::Refused(None);
        }
        said.extend_from_slice(segment.data);
        *next = next.wrapping_add(segment.data.len() as u32);
        let refused = match Hello::read(said) {
            Hello::More if said.len() <= MOST_BYTES + MOST_HEADS => return Word::Passes,
            Hello::Unnamed => None,
            Hello::Named(name) if names.contains(&name) || may(&name) => None,
            Hello::Named(name) => Some(Some(name)),
            Hello::More | Hello::Wrong => Some(None),
        };
        match refused {
            None => {
                self.flows.remove(&key);
                Word::Passes
            }
            Some(name) => {
                self.flows.insert(key, Flow::Refused);
                Word::Refused(name)
            }
        }
    }

    /// A segment of the peer's: it can end the connection.
    pub(super) fn received(&mut self, peer: SocketAddr, own: u16, segment: Option<Segment<'_>>) {
        if segment.is_some_and(|segment| segment.flags & RST != 0) {
            self.flows.remove(&(peer, own));
        }
    }
}

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const URG: u8 = 0x20;
/// Peers whose names are known, at once.
const MOST_PEERS: usize = 16_384;
/// Names of a peer.
const MOST_NAMES: usize = 16;
/// Connections that have not said whom they mean, at once; more have to wait.
const MOST_FLOWS: usize = 1024;
/// Heads of the records that a message comes in.
const MOST_HEADS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::super::hello::tests::hello;
    use super::*;

    const OWN: u16 = 40_000;

    fn peer() -> SocketAddr {
        "203.0.113.2:443".parse().unwrap()
    }

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn segment(number: u32, flags: u8, data: &[u8]) -> Option<Segment<'_>> {
        Some(Segment {
            number,
            flags,
            data,
        })
    }

    /// A connection's begin, and then these pieces.
    fn say(served: &mut Served, pieces: &[&[u8]]) -> Vec<Word> {
        let may = |other: &Name| *other == name("ruled.org");
        let mut number = u32::MAX - 3;
        assert_eq!(
            served.sent(peer(), OWN, segment(number, SYN, &[]), may),
            Word::Passes
        );
        number = number.wrapping_add(1);
        let mut words = Vec::new();
        for piece in pieces {
            words.push(served.sent(peer(), OWN, segment(number, 0, piece), may));
            number = number.wrapping_add(piece.len() as u32);
        }
        words
    }

    fn named() -> Served {
        let mut served = Served::default();
        served.allow(peer(), Some(vec![name("a.org"), name("b.org")]));
        served
    }

    #[test]
    fn a_name_that_is_allowed_passes_and_another_does_not() {
        let mut served = named();
        for (text, passes) in [
            ("a.org", true),
            ("b.org", true),
            ("ruled.org", true),
            ("c.org", false),
        ] {
            let bytes = hello(&[text], 9000);
            let (first, rest) = bytes.split_at(20);
            let expected = match passes {
                true => [Word::Passes, Word::Passes, Word::Passes],
                false => [
                    Word::Passes,
                    Word::Refused(Some(name(text))),
                    Word::Refused(None),
                ],
            };
            assert_eq!(
                say(&mut served, &[first, rest, b"more"]),
                expected,
                "{text}"
            );
        }
        // As an address it was allowed before or is now: nothing is compared.
        served.allow(peer(), None);
        let bytes = hello(&["c.org"], 9000);
        assert_eq!(say(&mut served, &[&bytes]), [Word::Passes]);
    }

    #[test]
    fn what_is_said_again_is_the_same_and_what_comes_too_early_waits() {
        let mut served = named();
        let (good, bad) = (hello(&["a.org"], 9000), hello(&["c.org"], 9000));
        let may = |_: &Name| false;
        let mut sent =
            |number, flags, data| served.sent(peer(), OWN, segment(number, flags, data), may);
        assert_eq!(sent(0, SYN, &[]), Word::Passes);
        assert_eq!(sent(21, 0, &good[20..]), Word::Refused(None), "too early");
        assert_eq!(sent(1, 0, &good[..20]), Word::Passes);
        assert_eq!(sent(1, 0, &good[..20]), Word::Passes, "once more");
        assert_eq!(sent(1, 0, &bad[..]), Word::Refused(None), "another text");
        assert_eq!(sent(11, 0, b"0123456789"), Word::Refused(None));
        assert_eq!(sent(21, 0, &good[20..]), Word::Passes);
        assert_eq!(sent(500, 0, b"what follows"), Word::Passes);
    }

    #[test]
    fn an_urgent_byte_does_not_hide_what_the_server_reads() {
        let mut served = named();
        let may = |_: &Name| false;
        let bytes = hello(&["a.org"], 9000);
        for flags in [URG, 0] {
            let mut sent =
                |number, flags, data| served.sent(peer(), OWN, segment(number, flags, data), may);
            assert_eq!(sent(0, SYN, &[]), Word::Passes);
            let expected = [(URG, Word::Refused(None)), (0, Word::Passes)];
            let expected = expected.into_iter().find(|(it, _)| *it == flags).unwrap().1;
            assert_eq!(sent(1, flags, &bytes), expected);
        }
    }

    #[test]
    fn more_peers_than_can_be_compared_are_not_permitted() {
        let mut served = Served::default();
        let at = |port| SocketAddr::new(peer().ip(), port);
        let names = || Some(vec![name("a.org")]);
        let noted = (1..=u16::MAX).filter(|port| served.allow(at(*port), names()));
        assert_eq!(noted.count(), MOST_PEERS);
        // Those that are known, and those that need no name, are.
        assert!(served.allow(at(1), names()) && served.allow(at(u16::MAX), None));
    }

    #[test]
    fn what_is_no_tls_passes_and_what_never_ends_does_not() {
        let mut served = named();
        assert_eq!(
            say(&mut served, &[b"SSH-2.0", b"x"]),
            [Word::Passes, Word::Passes]
        );
        let endless = [22, 3, 1, 0, 1, 1].repeat(4000);
        let words = say(&mut served, &[&endless[..6], &endless[..]]);
        assert_eq!(words[1], Word::Refused(None));
        let may = |_: &Name| false;
        // Connections that say nothing are bounded, and those that end make room.
        for own in 0..2000 {
            let word = served.sent(peer(), own, segment(0, SYN, &[]), may);
            let expected = usize::from(own) < MOST_FLOWS - 1;
            assert_eq!(word == Word::Passes, expected, "{own}");
        }
        served.received(peer(), 0, segment(0, RST, &[]));
        assert_eq!(
            served.sent(peer(), 3000, segment(0, SYN, &[]), may),
            Word::Passes
        );
    }
}
