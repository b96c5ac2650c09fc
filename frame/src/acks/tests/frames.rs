//! Whole frames of a receiver: which of them are expanded.

use vnplug_ring::offload::gso;

use super::*;

/// A frame from the sender to the receiver, or back; its checksum is not right.
#[derive(Debug, Clone, Copy)]
struct Recipe {
    is_back: bool,
    is_ipv6: bool,
    seq: u32,
    ack: u32,
    flags: u8,
    reserved: u8,
    window: u16,
    options: &'static [u8],
    /// The word of IPv4 that has DF in it.
    fragment: u16,
    payload: usize,
}

/// An ACK of a receiver that says nothing else.
const ACK: Recipe = Recipe {
    is_back: true,
    is_ipv6: false,
    seq: 5,
    ack: 0,
    flags: flag::ACK,
    reserved: 0,
    window: 50,
    options: STAMP,
    fragment: 0x4000,
    payload: 0,
};

const STAMP: &[u8] = &[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
const SACK: &[u8] = &[1, 1, 5, 10, 0, 0, 9, 0, 0, 0, 10, 0];

impl Recipe {
    fn frame(&self) -> Vec<u8> {
        let (from, to) = if self.is_back { (1, 2) } else { (2, 1) };
        let mut frame = vec![2; 12];
        let carries = (20 + self.options.len() + self.payload) as u16;
        if self.is_ipv6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(carries.to_be_bytes());
            frame.extend([6, 64]);
            frame.extend([[from; 16], [to; 16]].concat());
        } else {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((20 + carries).to_be_bytes());
            frame.extend([0, 7]);
            frame.extend(self.fragment.to_be_bytes());
            frame.extend([64, 6, 0, 0]);
            frame.extend([[from; 4], [to; 4]].concat());
        }
        frame.extend([0, from, 0, to]);
        frame.extend([self.seq.to_be_bytes(), self.ack.to_be_bytes()].concat());
        let words = 5 + self.options.len() as u8 / 4;
        frame.extend([words << 4 | self.reserved, self.flags]);
        frame.extend(self.window.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(self.options);
        frame.resize(frame.len() + self.payload, 9);
        frame
    }
}

/// A receiver that has acknowledged everything that it was given.
struct Receiver {
    acks: Acks,
    is_ipv6: bool,
    at: u32,
}

/// Segments of a super-frame of [`Receiver::given`], of 100 bytes each.
const SEGMENTS: u32 = 20;

impl Receiver {
    /// A flow that was there before.
    fn new(is_ipv6: bool) -> Self {
        Self::after(is_ipv6, &[])
    }

    /// A flow that begins with these.
    fn after(is_ipv6: bool, first: &[Recipe]) -> Self {
        let mut it = Self {
            acks: Acks::default(),
            is_ipv6,
            at: 0,
        };
        for recipe in first {
            match recipe.is_back {
                true => assert_eq!(it.send(*recipe), 0),
                false => it.give(*recipe, None),
            }
        }
        // Whose edge is known after the first ACK.
        it.given();
        assert_eq!(it.acknowledge(), 0);
        it
    }

    fn give(&mut self, recipe: Recipe, size: Option<u16>) {
        let frame = Recipe {
            is_ipv6: self.is_ipv6,
            ..recipe
        }
        .frame();
        self.acks.given(&segment(&frame), size);
    }

    /// The next bytes, merged.
    fn given(&mut self) {
        let recipe = Recipe {
            is_back: false,
            seq: self.at,
            payload: SEGMENTS as usize * 100,
            ..ACK
        };
        self.give(recipe, Some(100));
        self.at += SEGMENTS * 100;
    }

    fn send(&mut self, recipe: Recipe) -> u64 {
        self.send_with(recipe, &Offload::default())
    }

    /// It sends this. How many ACKs go before it; each one differs from it by its number alone.
    fn send_with(&mut self, recipe: Recipe, offload: &Offload) -> u64 {
        let recipe = Recipe {
            is_ipv6: self.is_ipv6,
            ..recipe
        };
        let mut copies = 0;
        let frame = recipe.frame();
        let added = self.acks.expand(&frame, offload, |copy| {
            let ack = segment(copy).ack();
            assert!(is_after(recipe.ack, ack));
            let mut expected = Recipe { ack, ..recipe }.frame();
            let sum = segment(copy).transport + 16;
            expected[sum..sum + 2].copy_from_slice(&copy[sum..sum + 2]);
            assert_eq!(copy, expected);
            copies += 1;
            true
        });
        assert_eq!(added, copies);
        added
    }

    /// It sends an ACK of everything that says nothing else.
    fn acknowledge(&mut self) -> u64 {
        let ack = self.at;
        self.send(Recipe { ack, ..ACK })
    }
}

/// ACKs that are added to one of [`SEGMENTS`].
const COPIES: u64 = SEGMENTS as u64 / 2 - 1;

#[test]
fn an_ack_that_says_something_else_is_alone() {
    type Change = fn(&mut Recipe);
    // And whether the flow's next plain ACK is expanded.
    let cases: &[(&str, Change, bool)] = &[
        ("payload", |it| it.payload = 10, true),
        ("SACK", |it| it.options = SACK, true),
        ("another option", |it| it.options = &[254, 4, 1, 2], true),
        (
            "another option beside a timestamp",
            |it| it.options = &[8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 254, 2],
            true,
        ),
        ("another window", |it| it.window = 51, false),
        ("ECE", |it| it.flags |= flag::ECE, true),
        ("CWR", |it| it.flags |= flag::CWR, false),
        (
            "data with CWR",
            |it| (it.flags, it.payload) = (flag::ACK | flag::CWR, 10),
            true,
        ),
        ("AE", |it| it.reserved = 1, false),
        ("reserved: 2", |it| it.reserved = 2, true),
        ("reserved: 4", |it| it.reserved = 4, true),
        ("reserved: 8", |it| it.reserved = 8, true),
        ("FIN", |it| it.flags |= flag::FIN, true),
        ("PSH", |it| it.flags |= flag::PSH, true),
        ("URG", |it| it.flags |= flag::URG, true),
        ("RST", |it| it.flags |= flag::RST, false),
        ("SYN", |it| it.flags |= flag::SYN, false),
    ];
    let ipv4: &[(&str, Change, bool)] = &[
        ("without DF", |it| it.fragment = 0, true),
        ("the reserved bit of IPv4", |it| it.fragment = 0xc000, true),
    ];
    for is_ipv6 in [false, true] {
        let of_ipv4 = if is_ipv6 { &[] } else { ipv4 };
        for (what, change, goes_on) in cases.iter().chain(of_ipv4) {
            let what = format!("{what}, IPv6 {is_ipv6}");
            // The same without the change is expanded.
            let mut plain = Receiver::new(is_ipv6);
            plain.given();
            assert_eq!(plain.acknowledge(), COPIES, "{what}");
            let mut it = Receiver::new(is_ipv6);
            it.given();
            let mut recipe = Recipe { ack: it.at, ..ACK };
            change(&mut recipe);
            assert_eq!(it.send(recipe), 0, "{what}");
            it.given();
            let copies = if *goes_on { COPIES } else { 0 };
            assert_eq!(it.acknowledge(), copies, "after {what}");
        }
    }
}

#[test]
fn what_a_receiver_lacks_is_not_acknowledged_for_it() {
    // What it says in between, and whether it has everything.
    type Say = fn(&mut Receiver) -> Recipe;
    let cases: &[(&str, Say, bool)] = &[
        ("nothing", |_| Recipe { flags: 0, ..ACK }, true),
        (
            "a number that is none",
            |it| Recipe {
                flags: flag::PSH,
                ack: it.at,
                ..ACK
            },
            true,
        ),
        ("an old ACK", |_| Recipe { ack: 1, ..ACK }, true),
        (
            "SACK",
            |it| Recipe {
                ack: it.at - SEGMENTS * 100,
                options: SACK,
                // Not a duplicate, but for its options.
                payload: 10,
                ..ACK
            },
            false,
        ),
        (
            "a duplicate",
            |it| Recipe {
                ack: it.at - SEGMENTS * 100,
                ..ACK
            },
            false,
        ),
        (
            "data, with the same number",
            |it| Recipe {
                ack: it.at - SEGMENTS * 100,
                payload: 10,
                ..ACK
            },
            true,
        ),
    ];
    for is_ipv6 in [false, true] {
        for (what, say, has_all) in cases {
            let mut it = Receiver::new(is_ipv6);
            it.given();
            let said = say(&mut it);
            assert_eq!(it.send(said), 0, "{what}");
            let copies = if *has_all { COPIES } else { 0 };
            assert_eq!(it.acknowledge(), copies, "after {what}");
        }
    }
}

#[test]
fn a_window_that_changes_is_the_next_ones() {
    let mut it = Receiver::new(false);
    it.given();
    // An update of the window, no duplicate.
    let ack = it.at - SEGMENTS * 100;
    let update = Recipe {
        window: 60,
        ack,
        ..ACK
    };
    assert_eq!(it.send(update), 0);
    let next = Recipe {
        ack: it.at,
        ..update
    };
    assert_eq!(it.send(next), COPIES);
    it.given();
    assert_eq!(it.acknowledge(), 0);
}

#[test]
fn an_ack_whose_offload_is_something_else_is_alone() {
    let sum = |csum_start, csum_offset| Offload {
        flags: flags::NEEDS_CSUM,
        csum_start,
        csum_offset,
        ..Offload::default()
    };
    for (offload, copies) in [
        (Offload::default(), COPIES),
        (sum(34, 16), COPIES),
        (sum(34, 6), 0),
        (sum(14, 16), 0),
        (
            Offload {
                gso_type: gso::TCPV4,
                gso_size: 100,
                ..sum(34, 16)
            },
            0,
        ),
    ] {
        let mut it = Receiver::new(false);
        it.given();
        let ack = Recipe { ack: it.at, ..ACK };
        assert_eq!(it.send_with(ack, &offload), copies, "{offload:?}");
    }
}

/// The flags of an ACK whose count of CE marks is this (ACE: AE, CWR, ECE).
fn with_count(count: u8) -> Recipe {
    Recipe {
        reserved: count >> 2,
        flags: flag::ACK | (count & 3) << 6,
        ..ACK
    }
}

#[test]
fn acks_that_count_marks_are_not_expanded_where_the_count_is_0() {
    // ACE begins at 5 (RFC 9768, 3.2.1): two marks, and another one.
    for (counts, copies) in [
        (&[5, 7, 0][..], [0, 0, 0]),
        // ECE alone is that of RFC 3168.
        (&[0, 1, 0], [COPIES, 0, COPIES]),
        (&[0, 0, 0], [COPIES; 3]),
        (&[0, 2, 0], [COPIES, 0, 0]),
        (&[0, 4, 0], [COPIES, 0, 0]),
    ] {
        let mut it = Receiver::new(false);
        let sent = counts.iter().map(|count| {
            it.given();
            let ack = it.at;
            it.send(Recipe {
                ack,
                ..with_count(*count)
            })
        });
        assert_eq!(sent.collect::<Vec<_>>(), copies, "{counts:?}");
    }
}

#[test]
fn data_of_a_sender_that_counts_marks_tells_it_too() {
    for (count, copies) in [(4, 0), (5, 0), (1, COPIES), (2, COPIES)] {
        for is_first in [false, true] {
            let mut it = match is_first {
                true => Receiver {
                    acks: Acks::default(),
                    is_ipv6: false,
                    at: 0,
                },
                false => Receiver::new(false),
            };
            let seq = it.at;
            let data = Recipe {
                is_back: false,
                seq,
                payload: 100,
                ..with_count(count)
            };
            it.give(data, Some(100));
            it.at += 100;
            assert_eq!(it.acknowledge(), 0);
            it.given();
            assert_eq!(it.acknowledge(), copies, "{count} {is_first}");
        }
    }
}

#[test]
fn a_flow_that_agreed_on_counting_marks_is_not_expanded_from_its_first_ack_on() {
    // RFC 9768, table 2: what a SYN/ACK answers to a SYN with all three.
    for (answer, copies) in [
        (0, COPIES),
        (1, COPIES),
        (2, 0),
        (3, 0),
        (4, 0),
        (5, COPIES),
        (6, 0),
        (7, COPIES),
    ] {
        for is_back in [false, true] {
            let syn = Recipe {
                is_back: !is_back,
                flags: flag::SYN | with_count(7).flags & !flag::ACK,
                ..with_count(7)
            };
            let mut answer = Recipe {
                is_back,
                ..with_count(answer)
            };
            answer.flags |= flag::SYN;
            let mut it = Receiver::after(false, &[syn, answer]);
            it.given();
            assert_eq!(it.acknowledge(), copies, "{answer:?}");
            // Another flow of these ports.
            let mut again = Recipe {
                flags: flag::SYN,
                is_back: true,
                ..ACK
            };
            again.seq = 9;
            assert_eq!(it.send(again), 0);
            it.given();
            assert_eq!(it.acknowledge(), 0);
            it.given();
            assert_eq!(it.acknowledge(), COPIES, "{answer:?}");
        }
    }
}
