//! Servers' names, segment by segment.

mod again;
mod bounds;

use std::time::Duration;

use super::super::flow::URG;
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

fn by(names: &[&str]) -> Names {
    Some(names.iter().copied().map(name).collect())
}

const WAITS: Word = Word::Waits;
/// It cannot be understood whom it means.
const UNREAD: Word = Word::Refused(None);

/// A program's connection, and its peer's side.
struct Talk {
    served: Served,
    now: Instant,
    /// The next byte of each side.
    next: (u32, u32),
}

impl Talk {
    /// A peer whose calls from this port are allowed by two names; a third one is allowed by a rule.
    fn new() -> Self {
        let (now, next) = (Instant::now(), (OURS, THEIRS));
        let served = Served::default();
        let mut talk = Self { served, now, next };
        talk.calls(OWN, &["a.org", "b.org"]);
        talk
    }

    /// A call to the peer was allowed, by a name or as an address.
    fn allows(&mut self, is_named: bool) -> Ticket {
        self.served.allow(peer(), is_named).unwrap()
    }

    /// It has made a connection from this port, allowed by these names.
    fn tells(&mut self, call: Ticket, own: u16, names: Names) {
        self.served
            .begins((peer(), call), Some(here(own)), (Arc::default(), names));
    }

    fn calls_by(&mut self, own: u16, names: Names) {
        let call = self.allows(names.is_some());
        self.tells(call, own, names);
    }

    /// A call was allowed by these names, and has made a connection from this port.
    fn calls(&mut self, own: u16, names: &[&str]) {
        self.calls_by(own, by(names));
    }

    /// The same as an address.
    fn calls_address(&mut self, own: u16) {
        self.calls_by(own, None);
    }

    fn segment(&mut self, own: u16, number: u32, flags: u8, data: &[u8]) -> Word {
        let segment = Segment {
            number,
            acknowledged: self.next.1,
            flags,
            options: &[],
            data,
        };
        self.sent(own, segment, By::Call)
    }

    fn sent(&mut self, own: u16, segment: Segment<'_>, by: By) -> Word {
        let may = |_: Option<&Arc<Who>>, other: &Name| *other == name("ruled.org");
        self.served
            .sent(peer(), here(own), (Some(segment), by), self.now, may)
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
}

#[test]
fn each_connection_has_the_names_of_its_own_call() {
    // Another one to the same peer is by the address, or by another name: it has no say about this one.
    for other in [None, by(&["c.org"])] {
        let mut talk = Talk::connected();
        talk.calls_by(OWN + 1, other);
        assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
    }
    // The controls: it is by the address itself; or by that name.
    for own in [None, by(&["c.org"])] {
        let mut talk = Talk::new();
        talk.calls_by(OWN, own);
        talk.connect();
        assert_eq!(talk.says(&hello(&["c.org"], 9000)), Word::Passes);
    }
    // From the same port once more, by another name.
    let mut talk = Talk::connected();
    talk.calls(OWN, &["c.org"]);
    assert_eq!(talk.segment(OWN, 99, SYN, &[]), Word::Passes);
    let first = hello(&["a.org"], 9000);
    assert_eq!(talk.segment(OWN, 100, ACK, &first), refused("a.org"));
}

#[test]
fn what_is_said_before_the_call_says_whose_it_is_waits() {
    let bytes = hello(&["c.org"], 9000);
    // An old connection from the same port was another's.
    for old in [None, by(&["c.org"])] {
        let mut talk = Talk::new();
        talk.calls_by(OWN, old);
        let call = talk.allows(true);
        talk.connect();
        assert_eq!(talk.again(0, &bytes), WAITS);
        // Others are not held up by it.
        assert_eq!(talk.says(&[]), Word::Passes);
        talk.tells(call, OWN, by(&["a.org"]));
        assert_eq!(talk.again(0, &bytes), refused("c.org"));
    }
    // With the words in its first segment.
    let mut talk = Talk::new();
    let call = talk.allows(true);
    let named = hello(&["d.org"], 9000);
    assert_eq!(talk.segment(OWN, OURS, SYN, &named), WAITS);
    talk.tells(call, OWN, by(&["d.org"]));
    assert_eq!(talk.segment(OWN, OURS, SYN, &named), Word::Passes);
}

/// Another call to the same peer, before, while and after the own one is told of and the connection begins.
#[test]
fn a_call_of_another_program_does_not_hold_up_a_connection_that_it_cannot_have_made() {
    let said = hello(&["a.org"], 9000);
    // It is allowed when the connection was seen.
    let mut talk = Talk::connected();
    talk.allows(true);
    assert_eq!(talk.says(&said), Word::Passes);
    // It was under way when the connection was first seen, and another is when it speaks.
    let mut talk = Talk::new();
    let other = talk.allows(true);
    talk.connect();
    talk.served
        .begins((peer(), other), None, (Arc::default(), None));
    talk.allows(true);
    assert_eq!(talk.says(&said), Word::Passes);
    // It was allowed before, and the own call is told of when the connection was seen.
    let mut talk = Talk::new();
    talk.allows(true);
    let call = talk.allows(true);
    talk.connect();
    talk.tells(call, OWN, by(&["a.org"]));
    assert_eq!(talk.says(&said), Word::Passes);
    // The control: one that was allowed before the connection was seen may have made it, from a port that was used before.
    let mut talk = Talk::new();
    let call = talk.allows(true);
    talk.connect();
    talk.allows(true);
    assert_eq!(talk.says(&said), WAITS);
    talk.tells(call, OWN, by(&["c.org"]));
    assert_eq!(talk.again(said.len(), &said), refused("a.org"));
}

#[test]
fn what_no_call_has_begun_says_nothing_to_a_peer_that_was_allowed_by_name() {
    let speaks = |who: By, said: &str| {
        let mut talk = Talk::new();
        let mut segment = Segment {
            number: OURS,
            acknowledged: 0,
            flags: SYN,
            options: &[],
            data: &[],
        };
        assert_eq!(talk.sent(1, segment, who), Word::Passes);
        let bytes = hello(&[said], 9000);
        (segment.number, segment.flags) = (OURS.wrapping_add(1), ACK);
        segment.data = &bytes;
        talk.sent(1, segment, who)
    };
    assert_eq!(speaks(By::Call, "a.org"), WAITS);
    // A rule lets it pass; or it is no connection of the program's making.
    assert_eq!(speaks(By::Rule, "a.org"), refused("a.org"));
    assert_eq!(speaks(By::Rule, "ruled.org"), Word::Passes);
    assert_eq!(speaks(By::Other, "a.org"), Word::Passes);
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
    // From somebody who does not see the numbers, or one of them.
    assert!(talk.comes(OWN, theirs, ours.wrapping_add(1), ACK, &takes));
    assert!(talk.comes(OWN, theirs, OURS, ACK, &takes));
    let long = [&[0; 1000], &takes[..]].concat();
    let early = theirs.wrapping_sub(1000);
    assert!(talk.comes(OWN, early, ours.wrapping_add(1), ACK, &long));
    for number in [theirs + 1, theirs.wrapping_sub(1), 0] {
        assert!(talk.comes(OWN, number, ours, ACK, &takes));
        assert!(talk.comes(OWN, number, 0, RST, &[]));
    }
    assert!(talk.is_looked_at());
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
    // Whoever breaks it off has no say: if the program's kernel believes it, nothing follows.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    let (ours, theirs) = talk.next;
    assert!(talk.comes(OWN, theirs, ours, RST, &[]));
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
    // The control: the peer's own.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    talk.hears(&takes);
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), Word::Passes);
    assert!(!talk.is_looked_at());
}

#[test]
fn a_client_does_not_say_itself_that_its_server_has_taken_a_name() {
    let keys = [22, 3, 3, 0, 4, 16, 0, 0, 0];
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    talk.hears(&answer(ANOTHER, 9000));
    assert_eq!(talk.says(&keys), UNREAD);
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), WAITS);
    // What the server says comes in another order, and the program has all of it: it is not known what the server has taken.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    let (ours, theirs) = talk.next;
    let takes = answer([7; 32], 9000);
    assert!(talk.comes(OWN, theirs + 10, ours, ACK, &takes[10..]));
    assert!(talk.comes(OWN, theirs, ours, ACK, &takes[..10]));
    talk.next.1 = theirs + takes.len() as u32;
    assert_eq!(talk.says(&keys), Word::Passes);
    // A part of it comes once more, with what follows: that is read.
    let mut talk = Talk::connected();
    assert_eq!(talk.says(&hello(&["a.org"], 9000)), Word::Passes);
    assert!(talk.comes(OWN, theirs, ours, ACK, &takes[..10]));
    assert!(talk.comes(OWN, theirs + 4, ours, ACK, &takes[4..]));
    assert!(!talk.is_looked_at());
}

#[test]
fn an_urgent_byte_does_not_hide_what_the_server_reads() {
    let bytes = hello(&["a.org"], 9000);
    for (flags, word) in [(URG, UNREAD), (0, Word::Passes)] {
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
    for (kind, word) in [(0, Word::Passes), (1, UNREAD)] {
        let options = multipath(kind);
        let segment = Segment {
            number: OURS,
            acknowledged: 0,
            flags: SYN,
            options: &options,
            data: &[],
        };
        assert_eq!(talk.sent(OWN, segment, By::Call), word);
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
    let may = |_: Option<&Arc<Who>>, _: &Name| false;
    let call = talk.allows(true);
    let ends = (peer(), call);
    let by = (Arc::default(), by(&["a.org"]));
    talk.served.begins(ends, Some(other), by);
    // It begins and is broken off: what is looked at of the first one stays.
    for (number, flags) in [(77, SYN), (78, RST)] {
        let segment = (Some(segment(number, flags)), By::Call);
        let word = talk.served.sent(peer(), other, segment, talk.now, may);
        assert_eq!(word, Word::Passes);
    }
    assert_eq!(talk.says(&hello(&["c.org"], 9000)), refused("c.org"));
}

#[test]
fn a_name_that_was_allowed_once_is_said_by_the_connection_of_that_call_alone() {
    let mut talk = Talk::new();
    talk.calls(OWN, &["once.org"]);
    talk.connect();
    talk.now += Duration::from_secs(3600);
    assert_eq!(talk.says(&hello(&["once.org"], 9000)), Word::Passes);
    talk.calls(OWN, &["a.org"]);
    talk.next = (77, THEIRS);
    assert_eq!(talk.segment(OWN, 76, SYN, &[]), Word::Passes);
    assert_eq!(talk.says(&hello(&["once.org"], 9000)), refused("once.org"));
}
