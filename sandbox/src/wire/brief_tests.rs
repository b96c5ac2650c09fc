//! What ends, packet by packet.

use super::*;

const PEER: Peer = (
    Transport::Tcp,
    IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)),
    443,
);
const UDP: Peer = (Transport::Udp, PEER.1, 53);
/// The first numbers of both sides.
const OURS: u32 = u32::MAX - 1;
const THEIRS: u32 = 5000;

fn here(port: u16) -> SocketAddr {
    SocketAddr::new([10, 0, 0, 1].into(), port)
}

fn segment(number: u32, acknowledged: u32, flags: u8) -> Segment<'static> {
    Segment {
        number,
        acknowledged,
        flags,
        options: &[],
        data: &[],
    }
}

struct Clocked(Brief, Instant);

impl Clocked {
    /// One who was permitted just now.
    fn new() -> Self {
        let (mut brief, now) = (Brief::new(), Instant::now());
        brief.permit(PEER, now);
        brief.permit(UDP, now);
        Self(brief, now)
    }

    /// One with a connection from this port that stands.
    fn connected(own: u16) -> Self {
        let mut it = Self::new();
        assert!(it.begins(own, OURS) && it.is_answered(own));
        it
    }

    fn later(&mut self, time: Duration) {
        self.1 += time;
    }

    fn sends(&mut self, own: u16, segment: Segment<'_>) -> bool {
        self.0.sent(PEER, here(own), Some(segment), self.1)
    }

    fn takes(&mut self, own: u16, segment: Segment<'_>) -> bool {
        self.0.received(PEER, here(own), Some(segment), self.1)
    }

    fn begins(&mut self, own: u16, number: u32) -> bool {
        self.sends(own, segment(number, 0, SYN))
    }

    /// The peer answers, and the program's kernel takes that.
    fn is_answered(&mut self, own: u16) -> bool {
        let answer = segment(THEIRS - 1, OURS.wrapping_add(1), SYN | ACK);
        self.takes(own, answer) && self.goes_on(own)
    }

    /// The program acknowledges all that the peer has said.
    fn goes_on(&mut self, own: u16) -> bool {
        self.sends(own, segment(OURS.wrapping_add(1), THEIRS, ACK))
    }
}

#[test]
fn a_connection_begins_in_time_and_passes_until_it_ends() {
    let mut it = Clocked::new();
    assert!(!it.goes_on(1), "it never began");
    assert!(it.begins(1, OURS) && it.is_answered(1));
    it.later(BEGINS);
    assert!(it.begins(1, OURS), "the same once more");
    // Hours later it still stands, and nothing else begins.
    it.later(Duration::from_secs(36_000));
    assert!(it.goes_on(1) && it.takes(1, segment(THEIRS, OURS, ACK)));
    assert!(!it.begins(2, 7), "another one");
    assert!(!it.takes(2, segment(0, 0, ACK)), "another one");
    assert!(!it.begins(1, 99), "another one from the same port");
    let other = SocketAddr::new([10, 0, 0, 9].into(), 1);
    let same = segment(OURS.wrapping_add(1), THEIRS, ACK);
    assert!(
        !it.0.sent(PEER, other, Some(same), it.1),
        "from another address"
    );
    assert!(it.0.knows(PEER.1, it.1));
    let ours = OURS.wrapping_add(1);
    assert!(it.sends(1, segment(ours, THEIRS, ACK | FIN)));
    it.later(Duration::from_secs(3600));
    assert!(it.takes(1, segment(THEIRS, ours.wrapping_add(1), ACK | FIN)));
    let last = segment(ours.wrapping_add(1), THEIRS + 1, ACK);
    assert!(it.sends(1, last));
    it.later(LINGERS);
    assert!(!it.sends(1, last) && !it.takes(1, segment(THEIRS, 0, ACK)));
    assert!(!it.0.knows(PEER.1, it.1));
    assert!(
        it.0.flows.is_empty(),
        "it is forgotten as soon as it is met"
    );
}

#[test]
fn one_that_is_broken_off_ends_unless_the_program_goes_on() {
    // Nobody listens there.
    let mut it = Clocked::new();
    assert!(it.begins(1, OURS) && it.takes(1, segment(0, OURS.wrapping_add(1), RST | ACK)));
    it.later(LINGERS);
    assert!(!it.goes_on(1) && !it.is_answered(1));
    // Somebody says so who knows the number, and the kernel does not care.
    let mut it = Clocked::connected(1);
    assert!(it.takes(1, segment(THEIRS, 0, RST)) && it.goes_on(1));
    it.later(LINGERS);
    assert!(it.goes_on(1));
    // The peer; and the program.
    assert!(it.takes(1, segment(THEIRS, 0, RST)));
    it.later(LINGERS);
    assert!(!it.goes_on(1));
    let mut it = Clocked::connected(1);
    assert!(it.sends(1, segment(OURS.wrapping_add(1), 0, RST)));
    it.later(LINGERS);
    assert!(!it.goes_on(1));
}

#[test]
fn who_does_not_know_the_numbers_ends_nothing() {
    // One that is silent, and half closed.
    let ours = OURS.wrapping_add(1);
    for number in [0, THEIRS - 1, THEIRS + 1, THEIRS + 70_000, !THEIRS] {
        let mut it = Clocked::connected(1);
        assert!(it.sends(1, segment(ours, THEIRS, ACK | FIN)));
        for flags in [RST, RST | ACK, FIN | ACK] {
            assert!(it.takes(1, segment(number, ours, flags)), "{number}");
        }
        it.later(10 * LINGERS);
        let data = Segment {
            data: &[1; 1000],
            ..segment(THEIRS, ours, ACK)
        };
        assert!(it.takes(1, data), "{number}: the peer goes on");
        assert!(it.sends(1, segment(ours.wrapping_add(1), THEIRS + 1000, ACK)));
        it.later(10 * LINGERS);
        assert!(it.takes(1, data), "{number}");
    }
    // An end whose number the peer's words reach by chance: more of them follow.
    let mut it = Clocked::connected(1);
    assert!(it.sends(1, segment(ours, THEIRS, ACK | FIN)));
    assert!(it.takes(1, segment(THEIRS + 999, ours, ACK | FIN)));
    for said in [1000, 2000] {
        assert!(it.sends(1, segment(ours.wrapping_add(1), THEIRS + said, ACK)));
    }
    it.later(10 * LINGERS);
    assert!(it.takes(1, segment(THEIRS + 2000, ours, ACK)));
    // One that has no answer yet.
    let mut it = Clocked::new();
    assert!(it.begins(1, OURS));
    for acknowledged in [0, OURS, OURS.wrapping_add(2)] {
        assert!(it.takes(1, segment(0, acknowledged, RST | ACK)));
        // To a wrong answer the kernel says that it knows nothing of it.
        assert!(it.sends(1, segment(acknowledged, 0, RST)));
    }
    it.later(2 * LINGERS);
    assert!(it.is_answered(1));
}

#[test]
fn what_has_no_connection_passes_as_long_as_it_is_sent() {
    let mut it = Clocked::new();
    for _ in 0..5 {
        it.later(PAUSES / 2);
        assert!(it.0.sent(UDP, here(1), None, it.1) && it.0.received(UDP, here(1), None, it.1));
        assert!(it.0.knows(UDP.1, it.1));
    }
    // What comes does not count.
    it.later(PAUSES / 2);
    assert!(it.0.received(UDP, here(1), None, it.1));
    it.later(PAUSES / 2);
    assert!(!it.0.sent(UDP, here(1), None, it.1) && !it.0.received(UDP, here(1), None, it.1));
    assert!(!it.0.knows(UDP.1, it.1));
}

#[test]
fn any_number_of_connections_takes_bounded_memory_and_those_that_nobody_answers_go_first() {
    let mut it = Clocked::connected(0);
    for own in 1..MOST_FLOWS as u16 + 500 {
        it.later(Duration::from_micros(1));
        assert!(it.begins(own, 7));
        assert!(it.0.flows.len() <= MOST_FLOWS);
    }
    assert!(it.goes_on(0), "it was silent for longest");
    assert!(!it.sends(1, segment(8, 0, ACK)), "nobody answered it");
}
