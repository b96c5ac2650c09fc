//! Servers' names, segment by segment.

use std::time::Duration;

use super::super::flow::{FIN, MOST_FLOWS, URG};
use super::super::hello::tests::{ANOTHER, answer, hello};
use super::*;

const OWN: u16 = 40_000;
/// The first numbers of both sides.
const OURS: u32 = u32::MAX - 3;
const THEIRS: u32 = 7_000_000;

fn peer() -> SocketAddr {
    "203.0.113.2:443".parse().unwrap()
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::new([10, 0, 0, 1].into(), port)
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn refused(text: &str) -> Word {
    Word::Refused(Some(name(text)))
}

const WAITS: Word = Word::Refused(None);

/// A program's connection, and its peer's side.
struct Talk {
    served: Served,
    now: Instant,
    /// The next byte of each side.
    next: (u32, u32),
}

impl Talk {
    /// A peer that was allowed by two names; a third one is allowed by a rule.
    fn new() -> Self {
        let mut served = Served::default();
        served.allow(peer(), Some(vec![name("a.org"), name("b.org")]), None);
        let (now, next) = (Instant::now(), (OURS, THEIRS));
        Self { served, now, next }
    }

    fn segment(&mut self, own: u16, number: u32, flags: u8, data: &[u8]) -> Word {
        let segment = Segment {
            number,
            acknowledged: self.next.1,
            flags,
            options: &[],
            data,
        };
        let may = |other: &Name| *other == name("ruled.org");
        self.served
            .sent(peer(), here(own), Some(segment), self.now, may)
    }

    /// A segment of the program's that is `back` bytes before the next one.
    fn again(&mut self, back: usize, data: &[u8]) -> Word {
        self.segment(OWN, self.next.0.wrapping_sub(back as u32), ACK, data)
    }

    /// The next bytes of the program's.
    fn says(&mut self, data: &[u8]) -> Word {
        let word = self.segment(OWN, self.next.0, ACK, data);
        self.next.0 = self.next.0.wrapping_add(data.len() as u32);
        word
    }

    fn comes(&mut self, own: u16, number: u32, acknowledged: u32, flags: u8, data: &[u8]) -> bool {
        let segment = Segment {
            number,
            acknowledged,
            flags,
            options: &[],
            data,
        };
        let segment = Some(segment);
        self.served.received(peer(), here(own), segment, self.now)
    }

    /// The next bytes of the peer's, who has everything so far.
    fn hears(&mut self, data: &[u8]) {
        let (ours, theirs) = self.next;
        assert!(self.comes(OWN, theirs, ours, ACK, data));
        self.next.1 = theirs.wrapping_add(data.len() as u32);
    }

    fn begins(&mut self, own: u16) -> Word {
        self.segment(own, OURS, SYN, &[])
    }

    fn is_answered(&mut self, own: u16) -> bool {
        self.comes(own, THEIRS, OURS.wrapping_add(1), SYN | ACK, &[])
    }

    /// A connection that stands.
    fn connect(&mut self) {
        self.next = (OURS, THEIRS);
        assert_eq!(self.begins(OWN), Word::Passes);
        assert!(self.is_answered(OWN));
        self.next = (OURS.wrapping_add(1), THEIRS + 1);
        assert_eq!(self.again(0, &[]), Word::Passes);
    }

    fn connected() -> Self {
        let mut talk = Self::new();
        talk.connect();
        talk
    }

    fn is_looked_at(&mut self) -> bool {
        let flow = self.served.flows.take(&(peer(), here(OWN)));
        flow.map(|flow| self.served.flows.put((peer(), here(OWN)), flow))
            .is_some()
    }
}

#[test]
fn a_name_that_is_allowed_passes_and_another_does_not() {
    for (text, passes) in [
        ("a.org", true),
        ("b.org", true),
        ("ruled.org", true),
        ("c.org", false),
    ] {
        let mut talk = Talk::connected();
        let bytes = hello(&[text], 9000);
        let (first, rest) = bytes.split_at(20);
        assert_eq!(talk.says(first), Word::Passes);
        if passes {
            assert_eq!(talk.says(rest), Word::Passes, "{text}");
            talk.hears(&answer([7; 32], 9000));
            assert_eq!(talk.says(b"more"), Word::Passes, "{text}");
            assert!(!talk.is_looked_at());
        } else {
            assert_eq!(talk.says(rest), refused(text));
            assert_eq!(talk.says(b"more"), WAITS);
            assert_eq!(talk.again(4, b"more"), WAITS);
        }
    }
    // As an address it was allowed before or is now: nothing is compared.
    let mut talk = Talk::connected();
    talk.served.allow(peer(), None, None);
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), Word::Passes);
    assert!(!talk.is_looked_at());
}

#[test]
fn a_message_that_the_server_wants_anew_is_judged_as_the_first() {
    let early = [23, 3, 3, 0, 3, 1, 1, 1];
    for (first, second, word) in [
        ("a.org", "b.org", Word::Passes),
        ("a.org", "c.org", refused("c.org")),
    ] {
        for between in [&[][..], &early, &[20, 3, 3, 0, 1, 1]] {
            let mut talk = Talk::connected();
            assert_eq!(talk.says(&hello(&[first], 9000)), Word::Passes);
            assert_eq!(talk.says(between), Word::Passes);
            talk.hears(&answer(ANOTHER, 9000));
            assert_eq!(talk.says(&hello(&[second], 9000)), word);
        }
    }
    // One that names nobody is followed by one that names somebody.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&[], 9000)), Word::Passes);
    talk.hears(&answer(ANOTHER, 9000));
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
    // The control: a server that took the first one is not asked to take another.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    talk.hears(&answer([7; 32], 9000));
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), Word::Passes);
}

#[test]
fn the_end_of_looking_is_said_by_the_server_and_nobody_else() {
    let takes = answer([7; 32], 9000);
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    let (ours, theirs) = talk.next;
    // From somebody who does not see the numbers.
    for number in [theirs + 1, theirs.wrapping_sub(1), 0] {
        assert!(talk.comes(OWN, number, ours, ACK, &takes));
        assert!(talk.comes(OWN, number, 0, RST, &[]));
    }
    assert!(talk.is_looked_at());
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
    // The control: the peer's own.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    let (ours, theirs) = talk.next;
    assert!(talk.comes(OWN, theirs, ours, RST, &[]));
    assert!(!talk.is_looked_at());
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
fn an_urgent_byte_does_not_hide_what_the_server_reads() {
    let bytes = hello(&["a.org"], 9000);
    for (flags, word) in [(URG, WAITS), (0, Word::Passes)] {
        let mut talk = Talk::connected();
        assert_eq!(talk.segment(OWN, talk.next.0, ACK | flags, &bytes), word);
    }
}

#[test]
fn no_connection_carries_a_part_of_another() {
    let mut talk = Talk::new();
    let multipath = |kind: u8| {
        [
            2,
            4,
            5,
            180,
            1,
            30,
            12,
            kind << 4,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ]
    };
    for (kind, word) in [(0, Word::Passes), (1, WAITS)] {
        let options = multipath(kind);
        let segment = Segment {
            number: OURS,
            acknowledged: 0,
            flags: SYN,
            options: &options,
            data: &[],
        };
        let may = |_: &Name| false;
        let said = talk
            .served
            .sent(peer(), here(OWN), Some(segment), talk.now, may);
        assert_eq!(said, word);
    }
}

#[test]
fn connections_from_two_addresses_are_two() {
    let mut talk = Talk::connected();
    let other = SocketAddr::new([10, 0, 0, 9].into(), OWN);
    let segment = |number, flags| Segment {
        number,
        acknowledged: 0,
        flags,
        options: &[],
        data: &[],
    };
    let may = |_: &Name| false;
    // It begins and is broken off: what is looked at of the first one stays.
    for (number, flags) in [(77, SYN), (78, RST)] {
        let segment = Some(segment(number, flags));
        let word = talk.served.sent(peer(), other, segment, talk.now, may);
        assert_eq!(word, Word::Passes);
    }
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
}

#[test]
fn what_is_far_behind_is_of_no_connection() {
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    assert_eq!(talk.again(1 << 30, &hello(&["c.org"], 9000)), WAITS);
}

#[test]
fn a_name_that_was_allowed_once_is_said_by_connections_that_begin_then() {
    let mut talk = Talk::new();
    let until = talk.now + Duration::from_secs(10);
    let once = Some(vec![name("once.org")]);
    assert!(talk.served.allow(peer(), once.clone(), Some(until)));
    talk.connect();
    talk.now += Duration::from_secs(3600);
    assert_eq!(talk.says(&hello(&["once.org"], 9000)), Word::Passes);
    // The next one is too late; the names that last are still there.
    let late = |said: &str, talk: &mut Talk| {
        let mut next = Talk::new();
        std::mem::swap(&mut next.served, &mut talk.served);
        next.now = talk.now;
        next.connect();
        let word = next.says(&hello(&[said], 9000));
        std::mem::swap(&mut next.served, &mut talk.served);
        word
    };
    assert_eq!(late("once.org", &mut talk), refused("once.org"));
    assert_eq!(late("a.org", &mut talk), Word::Passes);
    // What was allowed for ever is not for less afterwards.
    assert!(talk.served.allow(peer(), once.clone(), None));
    assert!(talk.served.allow(peer(), once, Some(until)));
    assert_eq!(late("once.org", &mut talk), Word::Passes);
}

#[test]
fn more_peers_than_can_be_compared_are_not_permitted() {
    let mut served = Served::default();
    let at = |port| SocketAddr::new(peer().ip(), port);
    let names = || Some(vec![name("a.org")]);
    let noted = (1..=u16::MAX).filter(|port| served.allow(at(*port), names(), None));
    assert_eq!(noted.count(), MOST_PEERS);
    // Those that are known, and those that need no name, are.
    assert!(served.allow(at(1), names(), None) && served.allow(at(u16::MAX), None, None));
}

#[test]
fn what_is_no_tls_passes_and_what_never_ends_does_not() {
    let mut talk = Talk::connected();
    assert_eq!(talk.says(b"SSH-2.0"), Word::Passes);
    assert_eq!(talk.says(b"x"), Word::Passes);
    let endless = [22, 3, 1, 0, 1, 1].repeat(4000);
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&endless[..6]), Word::Passes);
    assert_eq!(talk.says(&endless), WAITS);
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
}
