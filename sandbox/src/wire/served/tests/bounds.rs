//! All that is kept is counted and bounded: connections, peers, what a client said.

use super::*;
use crate::wire::flow::{FIN, MOST_FLOWS, MOST_KEPT};

#[test]
fn all_that_is_kept_of_connections_is_counted() {
    let mut talk = Talk::new();
    // Messages that are not whole, of which the peer has every byte.
    let mut bytes = hello(&["a.org"], 9000);
    (bytes[3], bytes[4], bytes[7], bytes[8]) = (0x3f, 0xff, 0x3f, 0xf0);
    bytes.resize(16_000, 0);
    for own in 0..MOST_FLOWS as u16 {
        talk.calls(own, &["a.org"]);
        talk.next = (OURS, THEIRS);
        assert_eq!(talk.begins(own), Word::Passes);
        assert!(talk.is_answered(own));
        talk.next = (OURS.wrapping_add(1), THEIRS + 1);
        for piece in bytes.chunks(1400) {
            assert_eq!(talk.segment(own, talk.next.0, ACK, piece), Word::Passes);
            talk.next.0 = talk.next.0.wrapping_add(piece.len() as u32);
            assert!(talk.comes(own, talk.next.1, talk.next.0, ACK, &[]));
        }
    }
    let kept = MOST_KEPT - talk.served.flows.room();
    let least = MOST_FLOWS * (bytes.len() - 5);
    assert!((least..2 * least).contains(&kept), "{kept}");
    for own in 0..MOST_FLOWS as u16 {
        assert!(talk.served.flows.take(&(peer(), here(own))).is_some());
    }
    assert_eq!(talk.served.flows.room(), MOST_KEPT);
}

#[test]
fn more_peers_than_can_be_compared_are_not_permitted() {
    let mut served = Served::default();
    let at = |port| SocketAddr::new(peer().ip(), port);
    let noted = (1..=u16::MAX).filter(|port| served.allow(at(*port), true).is_some());
    assert_eq!(noted.count(), MOST_PEERS);
    // Those that are known, and those that need no name, are.
    let is_allowed = |known: (u16, bool)| served.allow(at(known.0), known.1).is_some();
    assert!([(1, true), (u16::MAX, false)].into_iter().all(is_allowed));
}

#[test]
fn what_is_no_tls_passes_and_what_never_ends_does_not() {
    let mut talk = Talk::connected();
    assert_eq!(talk.says(b"SSH-2.0"), Word::Passes);
    assert_eq!(talk.says(b"x"), Word::Passes);
    let endless = [22, 3, 1, 0, 1, 1].repeat(4000);
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&endless[..6]), Word::Passes);
    assert_eq!(talk.says(&endless), UNREAD);
}

#[test]
fn a_client_that_says_more_than_is_kept_waits_for_its_server() {
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    let early = [&[23, 3, 3, 0x40, 0][..], &[0; 0x4000]].concat();
    let passed = (0..100).take_while(|_| talk.says(&early) == Word::Passes);
    assert_eq!(passed.count(), 4, "64 KiB are on their way");
    talk.next.0 = talk.next.0.wrapping_sub(early.len() as u32);
    talk.hears(&[]);
    assert_eq!(talk.says(&early), Word::Passes);
    // The server has taken the name: nothing is kept.
    talk.hears(&answer([7; 32], 9000));
    for _ in 0..100 {
        assert_eq!(talk.says(&early), Word::Passes);
    }
    assert!(!talk.is_looked_at());
}

#[test]
fn connections_that_nobody_answers_make_room_and_those_that_stand_stay() {
    let mut talk = Talk::connected();
    let first = hello(&["a.org"], 9000);
    assert_eq!(talk.says(&first[..20]), Word::Passes);
    let next = talk.next;
    for own in 0..5000 {
        talk.now += Duration::from_millis(1);
        assert_eq!(talk.begins(own), Word::Passes, "{own}");
    }
    // The oldest ones are not known any more: they cannot begin to speak. The youngest can.
    assert!(!talk.is_answered(0));
    assert!(talk.is_answered(4999));
    // The kernel asks again, and it is known again.
    assert_eq!(talk.begins(0), Word::Passes);
    assert!(talk.is_answered(0));
    // The one that stands was compared all the time.
    talk.next = next;
    assert_eq!(talk.again(20, &[0; 20]), WAITS);
    assert_eq!(talk.says(&first[20..]), Word::Passes);
}

#[test]
fn connections_that_stand_and_say_nothing_are_as_many_as_there_can_be() {
    let mut talk = Talk::new();
    let most = u16::try_from(MOST_FLOWS).unwrap();
    for own in 0..most {
        assert_eq!(talk.begins(own), Word::Passes);
        assert!(talk.is_answered(own));
    }
    assert_eq!(talk.begins(most), WAITS);
    // One ends, and one whose kernel has given up what it said.
    talk.next = (OURS.wrapping_add(1), THEIRS + 1);
    for own in [0, 1, most, most + 1, most + 2] {
        talk.calls(own, &["a.org"]);
    }
    assert_eq!(talk.segment(0, talk.next.0, ACK | FIN, &[]), Word::Passes);
    assert_eq!(talk.begins(most), Word::Passes);
    assert_eq!(talk.begins(most), Word::Passes, "the same once more");
    assert!(talk.is_answered(most));
    assert_eq!(talk.begins(most + 1), WAITS);
    assert_eq!(talk.segment(1, talk.next.0, ACK, b"\x16\x03"), Word::Passes);
    talk.now += Duration::from_secs(301);
    assert_eq!(talk.begins(most + 1), Word::Passes);
    assert_eq!(
        talk.begins(most + 2),
        Word::Passes,
        "nobody answered the one before"
    );
    // One that was broken off, and is silent since.
    assert!(talk.is_answered(most + 2));
    assert_eq!(talk.begins(most + 3), WAITS);
    assert!(talk.comes(2, THEIRS + 1, OURS.wrapping_add(1), RST, &[]));
    assert_eq!(talk.begins(most + 3), WAITS);
    talk.now += Duration::from_secs(61);
    assert_eq!(talk.begins(most + 3), Word::Passes);
}
