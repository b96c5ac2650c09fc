//! What is said once more, and what old connections leave, by whomever: it is compared with what was judged.

use super::*;
use crate::wire::flow::FIN;

#[test]
fn a_first_segment_with_words_is_said_again_before_its_answer_is_taken() {
    let bytes = hello(&["a.org"], 9000);
    let (first, rest) = bytes.split_at(20);
    let mut talk = Talk::new();
    talk.next.1 = 0;
    assert_eq!(talk.segment(OWN, OURS, SYN, first), Word::Passes);
    // The peer takes all of it, and its answer meets the same again, as the kernel says it: without words.
    let has = OURS.wrapping_add(1 + first.len() as u32);
    assert!(talk.comes(OWN, THEIRS, has, SYN | ACK, &[]));
    assert_eq!(talk.segment(OWN, OURS, SYN, &[]), Word::Passes);
    talk.next = (has, THEIRS + 1);
    assert_eq!(talk.says(rest), Word::Passes);
    talk.hears(&answer([7; 32], 9000));
    assert!(!talk.is_looked_at());
    // One that stands does not begin again: it is another one.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(first), Word::Passes);
    assert_eq!(talk.begins(OWN), Word::Passes);
    assert_eq!(talk.again(0, rest), WAITS);
}

/// Old segments of the peer's, which enter with its answer, are reset by a kernel that goes on.
#[test]
fn a_reset_of_what_is_old_does_not_end_the_looking_of_what_begins() {
    let mut talk = Talk::new();
    assert_eq!(talk.begins(OWN), Word::Passes);
    assert!(talk.comes(OWN, THEIRS - 5000, OURS - 5000, ACK, b"old"));
    assert!(talk.is_answered(OWN));
    assert_eq!(talk.segment(OWN, OURS - 5000, RST, &[]), Word::Passes);
    assert!(talk.is_looked_at());
    talk.next = (OURS.wrapping_add(1), THEIRS + 1);
    assert_eq!(talk.again(0, &[]), Word::Passes);
    let refused = talk.says(&hello(&["c.org"], 9000));
    assert!(matches!(refused, Word::Refused(_)), "{refused:?}");
}

/// What gets past the calls may use the ends of an old connection; it is not that.
#[test]
fn ends_that_were_used_before_give_a_connection_no_name() {
    for names in [Some("a.org"), None] {
        let mut talk = Talk::new();
        match names {
            Some(name) => talk.calls(OWN, &[name]),
            None => talk.calls_address(OWN),
        }
        talk.connect();
        let hello = hello(&["a.org"], 9000);
        assert_eq!(talk.says(&hello), Word::Passes);
        // Nobody's, with another number.
        talk.next = (OURS.wrapping_add(77), THEIRS);
        assert_eq!(talk.segment(OWN, talk.next.0, SYN, &[]), Word::Passes);
        assert!(talk.comes(OWN, THEIRS, talk.next.0.wrapping_add(1), SYN | ACK, &[]));
        talk.next = (talk.next.0.wrapping_add(1), THEIRS + 1);
        assert_eq!(talk.again(0, &[]), Word::Passes);
        assert_eq!(talk.says(&hello), WAITS, "{names:?}");
        // A call's.
        match names {
            Some(name) => talk.calls(OWN, &[name]),
            None => talk.calls_address(OWN),
        }
        assert_eq!(talk.again(hello.len(), &hello), Word::Passes, "{names:?}");
    }
}

#[test]
fn what_is_said_again_is_the_same_and_what_comes_too_early_waits() {
    let (good, bad) = (hello(&["a.org"], 9000), hello(&["c.org"], 9000));
    let mut talk = Talk::connected();
    let first = talk.next.0;
    assert_eq!(
        talk.segment(OWN, first.wrapping_add(20), ACK, &good[20..]),
        WAITS
    );
    assert_eq!(talk.says(&good[..20]), Word::Passes);
    assert_eq!(talk.again(20, &good[..20]), Word::Passes, "once more");
    let mut other = bad.clone();
    other[12] ^= 1;
    assert_eq!(talk.again(20, &other), WAITS, "another text");
    assert_eq!(talk.again(10, b"0123456789"), WAITS);
    // A part of what was said, and what follows it.
    assert_eq!(talk.again(5, &good[15..]), Word::Passes);
    talk.next.0 = first.wrapping_add(good.len() as u32);
    // It was judged, but the peer does not have it.
    assert_eq!(talk.again(good.len(), &bad), WAITS);
    assert_eq!(talk.again(good.len(), &good), Word::Passes);
    talk.hears(&answer([7; 32], 9000));
    assert!(!talk.is_looked_at());
}

#[test]
fn what_was_judged_is_what_arrives_whatever_it_was() {
    let bad = hello(&["c.org"], 9000);
    for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], &hello(&["a.org"], 9000)] {
        let mut talk = Talk::connected();
        assert_eq!(talk.says(said), Word::Passes);
        assert_eq!(talk.segment(OWN, talk.next.0, ACK | FIN, &[]), Word::Passes);
        // It never arrived: it had too few hops. Now the file that it was sent from is another.
        let changed = &bad[..said.len().min(bad.len())];
        assert_eq!(talk.again(said.len(), changed), WAITS);
        assert_eq!(talk.again(said.len(), &said[..4]), Word::Passes);
        // Somebody else says that it has arrived.
        let (ours, theirs) = talk.next;
        for (number, acknowledged) in [
            (theirs.wrapping_sub(1), ours),
            (theirs + 1, ours),
            (theirs + 100_000, ours),
            (theirs, ours.wrapping_add(2)),
            (theirs, OURS),
        ] {
            assert!(talk.comes(OWN, number, acknowledged, ACK, &[]));
            assert_eq!(talk.again(said.len(), changed), WAITS);
        }
        // The peer has it, and the end: whatever comes again it does not take.
        assert!(talk.comes(OWN, theirs, ours.wrapping_add(1), ACK, &[]));
        assert_eq!(talk.again(said.len(), changed), Word::Passes);
        assert!(!talk.is_looked_at());
    }
}

#[test]
fn what_is_far_behind_is_of_no_connection() {
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    assert_eq!(talk.again(1 << 30, &hello(&["c.org"], 9000)), WAITS);
}
