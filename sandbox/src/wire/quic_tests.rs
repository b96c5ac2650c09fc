//! Servers' names in the packets of QUIC.

use std::cell::RefCell;

use super::*;
use crate::wire::hello::tests::hello;
use crate::wire::initial::tests::{ID, crypto, packet};

fn at(last: u8) -> SocketAddr {
    SocketAddr::new([203, 0, 113, last].into(), 443)
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::new([10, 0, 0, 1].into(), port)
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A client's first message, without the head of its record.
fn said(name: &str) -> Vec<u8> {
    hello(&[name], 9000).split_off(5)
}

struct Wire {
    quic: Quic,
    now: Instant,
    /// Which names were judged by rules.
    judged: RefCell<Vec<(bool, Name)>>,
}

impl Wire {
    /// A peer that was allowed by one name.
    fn new() -> Self {
        let mut quic = Quic::default();
        assert!(quic.allow(&Arc::default(), at(1), Some(vec![name("a.org")])));
        Self {
            quic,
            now: Instant::now(),
            judged: RefCell::default(),
        }
    }

    fn sends(&mut self, peer: SocketAddr, own: u16, datagram: &[u8]) -> Word {
        let may = |who: Option<&Arc<Who>>, other: &Name| {
            let judged = (who.is_some(), other.clone());
            self.judged.borrow_mut().push(judged);
            *other == name("ruled.org")
        };
        self.quic.sent((peer, here(own)), datagram, self.now, may)
    }

    fn says(&mut self, at_byte: usize, piece: &[u8]) -> Word {
        self.sends(at(1), 1, &packet(&ID, &ID, 0, &crypto(at_byte, piece)))
    }
}

fn refused(text: &str) -> Word {
    Word::Refused(Some(name(text)))
}

#[test]
fn a_name_that_is_allowed_passes_and_another_does_not() {
    for (text, word) in [
        ("a.org", Word::Passes),
        ("ruled.org", Word::Passes),
        ("c.org", refused("c.org")),
    ] {
        let mut wire = Wire::new();
        assert_eq!(wire.says(0, &said(text)), word);
        // What follows goes the same way; other kinds of packets pass.
        let after = if word == Word::Passes {
            Word::Passes
        } else {
            Word::Waits
        };
        let reply = packet(&ID, &[9; 8], 1, &[1]);
        assert_eq!(wire.sends(at(1), 1, &reply), after, "{text}");
        assert_eq!(wire.sends(at(1), 1, &[0x40; 50]), Word::Passes);
        // The control: a peer that was not allowed by a name.
        assert_eq!(
            wire.sends(at(2), 1, &packet(&ID, &ID, 0, &crypto(0, &said(text)))),
            Word::Passes
        );
    }
}

#[test]
fn pieces_come_in_any_order_and_the_one_that_completes_a_name_decides() {
    for text in ["a.org", "c.org"] {
        let bytes = said(text);
        let (cut, end) = (20, bytes.len() - 3);
        let mut wire = Wire::new();
        assert_eq!(wire.says(end, &bytes[end..]), Word::Passes);
        assert_eq!(wire.says(0, &bytes[..cut]), Word::Passes);
        let word = if text == "a.org" {
            Word::Passes
        } else {
            refused(text)
        };
        // In one packet, in the wrong order and with an overlap.
        let both = [
            crypto(cut + 9, &bytes[cut + 9..end]),
            crypto(cut - 4, &bytes[cut - 4..cut + 9]),
        ];
        let both = packet(&ID, &ID, 5, &both.concat());
        assert_eq!(wire.sends(at(1), 1, &both), word);
        let after = if text == "a.org" {
            Word::Passes
        } else {
            Word::Waits
        };
        assert_eq!(wire.sends(at(1), 1, &both), after, "said once more");
    }
}

#[test]
fn what_is_said_again_is_the_same() {
    let (good, bad) = (said("a.org"), said("c.org"));
    let mut wire = Wire::new();
    assert_eq!(wire.says(0, &good), Word::Passes);
    // The first one is lost on its way, and from another port another one is said.
    let other = packet(&ID, &ID, 0, &crypto(0, &bad));
    assert_eq!(wire.sends(at(1), 2, &other), Word::Waits);
    assert_eq!(wire.says(0, &good), Word::Passes);
    // Half of the one and half of the other.
    let mut wire = Wire::new();
    assert_eq!(wire.says(0, &good[..good.len() - 3]), Word::Passes);
    assert_eq!(wire.says(0, &bad), Word::Waits);
    // A second first message, which a server may want, to its own id.
    let mut wire = Wire::new();
    assert_eq!(wire.says(0, &good), Word::Passes);
    let again = packet(&ID, &[5; 9], 1, &crypto(good.len(), &bad));
    assert_eq!(wire.sends(at(1), 1, &again), refused("c.org"));
}

#[test]
fn what_one_peer_may_be_told_another_may_not() {
    let bytes = said("b.org");
    let mut wire = Wire::new();
    assert!(
        wire.quic
            .allow(&Arc::default(), at(2), Some(vec![name("b.org")]))
    );
    let whole = packet(&ID, &ID, 0, &crypto(0, &bytes));
    assert_eq!(wire.sends(at(2), 1, &whole), Word::Passes);
    assert_eq!(wire.sends(at(1), 1, &whole), refused("b.org"));
}

#[test]
fn all_calls_to_a_peer_count_together_and_a_name_is_judged_for_one_process_or_for_none() {
    let mut wire = Wire::new();
    assert_eq!(wire.says(0, &said("c.org")), refused("c.org"));
    let other = Arc::new(Who {
        pid: 7,
        ..Who::default()
    });
    assert!(wire.quic.allow(&other, at(1), Some(vec![name("b.org")])));
    for (id, text, word) in [(1, "b.org", Word::Passes), (2, "c.org", refused("c.org"))] {
        let id = [id; 8];
        let first = packet(&id, &id, 0, &crypto(0, &said(text)));
        assert_eq!(wire.sends(at(1), 1, &first), word);
    }
    let judged = [(true, name("c.org")), (false, name("c.org"))];
    assert_eq!(*wire.judged.borrow(), judged);
    // By its address: nothing is compared.
    assert!(wire.quic.allow(&other, at(1), None));
    assert!(wire.quic.allow(&other, at(1), Some(vec![name("b.org")])));
    assert_eq!(wire.says(0, &said("d.org")), Word::Passes);
}

#[test]
fn what_cannot_be_read_goes_no_further() {
    let mut wire = Wire::new();
    let first = packet(&ID, &ID, 0, &crypto(0, &said("a.org")));
    // With keys of nobody's; another version; what no client says first.
    let mut odd = first.clone();
    odd[30] ^= 1;
    assert_eq!(wire.sends(at(1), 1, &odd), Word::Waits);
    odd[1..5].copy_from_slice(&0x6b33_43cf_u32.to_be_bytes());
    assert_eq!(wire.sends(at(1), 1, &odd), Word::Refused(None));
    for text in [&[8; 9][..], &crypto(0, &[22, 3, 1, 0, 1])] {
        let mut wire = Wire::new();
        assert_eq!(
            wire.sends(at(1), 1, &packet(&ID, &ID, 0, text)),
            Word::Refused(None)
        );
    }
    assert_eq!(wire.says(MOST_SAID - 3, b"end"), Word::Passes);
    assert_eq!(wire.says(MOST_SAID - 2, b"end"), Word::Waits);
    assert_eq!(wire.says(usize::MAX >> 34, b"end"), Word::Waits);
    // Behind another one in the same datagram.
    let behind = [
        &packet(&ID, &ID, 1, &[1])[..],
        &packet(&[4; 8], &[4; 8], 0, &crypto(0, &said("c.org"))),
    ];
    assert_eq!(wire.sends(at(1), 1, &behind.concat()), refused("c.org"));
}

#[test]
fn many_connections_of_one_socket_begin_at_once() {
    let mut wire = Wire::new();
    let (first, ids) = (crypto(0, &said("a.org")), 0..MOST_TRIES as u8);
    for id in ids.clone() {
        let id = [id; 8];
        assert_eq!(
            wire.sends(at(1), 1, &packet(&id, &id, 0, &first)),
            Word::Passes
        );
    }
    // To the ids that their server has chosen; and one whose first packet nobody saw.
    for id in ids.chain([200]) {
        let word = if id == 200 { Word::Waits } else { Word::Passes };
        assert_eq!(
            wire.sends(at(1), 1, &packet(&[id; 8], &[id; 9], 1, &[1])),
            word
        );
    }
}

#[test]
fn connections_that_begin_and_peers_are_bounded() {
    let mut wire = Wire::new();
    let begins = |wire: &mut Wire, number: usize| {
        let id = (number as u64).to_be_bytes();
        wire.sends(at(1), 1, &packet(&id, &id, 0, &crypto(0, b"\x01\0")))
    };
    for number in 0..MOST_TALKS {
        assert_eq!(begins(&mut wire, number), Word::Passes);
    }
    assert_eq!(begins(&mut wire, MOST_TALKS), Word::Waits);
    assert_eq!(begins(&mut wire, 1), Word::Passes);
    wire.now += SILENCE;
    assert_eq!(begins(&mut wire, MOST_TALKS), Word::Passes);
    let by_name = |wire: &mut Wire, port| {
        let peer = SocketAddr::new([203, 0, 113, 9].into(), port);
        wire.quic
            .allow(&Arc::default(), peer, Some(vec![name("a.org")]))
    };
    let allowed = (1..=u16::MAX)
        .filter(|port| by_name(&mut wire, *port))
        .count();
    assert_eq!(allowed, MOST_PEERS - 1);
    // Those that are not compared make room.
    for port in 1..=u16::MAX {
        let peer = SocketAddr::new([203, 0, 113, 10].into(), port);
        assert!(wire.quic.allow(&Arc::default(), peer, None));
    }
    assert!(wire.quic.peers.len() <= MOST_PEERS && wire.quic.is_named(at(1)));
    for number in 0..1000 {
        let more = Some(vec![name(&format!("n{number}.org"))]);
        assert!(wire.quic.allow(&Arc::default(), at(1), more));
    }
    let names = wire.quic.peers[&at(1)].names.as_ref().unwrap();
    assert_eq!(
        (names.len(), &names[MOST_NAMES - 1]),
        (MOST_NAMES, &name("n999.org"))
    );
}
