//! Frames go out through a queue, of AF_XDP and of packet sockets alike.

use std::time::Duration;

use vnplug_path::source::af_xdp::{AfXdpConfig, Mode};
use vnplug_path::source::{Flushed, Queue, Transmit};
use vnplug_testing::PATIENCE;

use crate::net::{self, frame, ip, isolated, out, read, read_all};
use crate::{config, one, veth};

/// Sends frames, `flush` of them before each flush: all of them arrive, whole and in order.
fn carries(queue: &mut dyn Queue, other_end: &mut dyn Queue, sent: &[Vec<u8>], flush: usize) {
    let mut got = Vec::new();
    for batch in sent.chunks(flush) {
        for frame in batch {
            assert_eq!(out(queue).transmit(frame), Transmit::Taken);
        }
        let flushed = Flushed {
            sent: batch.len() as u64,
            ..Flushed::default()
        };
        assert_eq!(out(queue).flush(&mut |_| {}), flushed);
        got.extend(read(other_end, batch.len(), PATIENCE));
    }
    assert_eq!(got.len(), sent.len());
    assert!(got.iter().zip(sent).all(|(got, sent)| &got.bytes == sent));
}

/// Both ends of the veth have an MTU of `bytes`.
fn set_mtu(bytes: u32) {
    for end in ["va", "vb"] {
        ip(&format!("link set {end} mtu {bytes}"));
    }
}

fn sends_and_counts(mut queue: Box<dyn Queue>) {
    let mut other_end = net::open(net::rx("vb"));
    let sent: Vec<_> = (0..3000)
        .map(|seq| frame(60 + (seq % 1455), seq as u32))
        .collect();
    carries(&mut *queue, &mut *other_end, &sent, 100);
    assert_eq!(out(&mut *queue).flush(&mut |_| {}), Flushed::default());

    assert_eq!(out(&mut *queue).transmit(&[0; 13]), Transmit::BadLength);
    assert_eq!(
        out(&mut *queue).transmit(&frame(70_000, 1)),
        Transmit::BadLength
    );
    // Longer than the MTU, told by one or the other.
    let told = match out(&mut *queue).transmit(&frame(1600, 1)) {
        Transmit::Taken => out(&mut *queue).flush(&mut |_| {}).bad_length,
        Transmit::BadLength => 1,
        other => panic!("{other:?}"),
    };
    assert_eq!(told, 1);
    // So many that a flush is due.
    let taken = (0..)
        .take_while(|&seq| out(&mut *queue).transmit(&frame(60, seq)) == Transmit::Taken)
        .count();
    assert!((64..10_000).contains(&taken), "{taken}");
    assert_eq!(out(&mut *queue).flush(&mut |_| {}).sent, taken as u64);

    ip("link set va down");
    let told = match out(&mut *queue).transmit(&frame(60, 1)) {
        Transmit::Taken => out(&mut *queue).flush(&mut |_| {}).link_down,
        Transmit::LinkDown => 1,
        other => panic!("{other:?}"),
    };
    assert_eq!(told, 1);
    ip("link set va up");
    // The queue learns of it when it waits.
    net::read(queue.as_mut(), 1, std::time::Duration::from_millis(200));
    read_all(other_end.as_mut(), taken);
    assert_eq!(out(&mut *queue).transmit(&frame(60, 77)), Transmit::Taken);
    assert_eq!(out(&mut *queue).flush(&mut |_| {}).sent, 1);
    let got = read_all(other_end.as_mut(), 1);
    assert_eq!(got.len(), 1, "what was told as lost is not sent later");
    assert_eq!(got[0].bytes, frame(60, 77));
}

/// Nothing that was told as lost comes later, nothing comes twice, and all that is sent afterwards comes: of frames of
/// this length.
fn a_lost_carrier_spoils_nothing(mode: Mode, len: usize) {
    veth(1);
    set_mtu(9000);
    let mut queue = one(AfXdpConfig {
        mode,
        ..config("va")
    });
    for round in 0..3 {
        let mut send = |first: u32, count: u32| {
            for seq in first..first + count {
                assert_eq!(out(&mut *queue).transmit(&frame(len, seq)), Transmit::Taken);
            }
            out(&mut *queue).flush(&mut |_| {})
        };
        let sent = |sent, link_down| Flushed {
            sent,
            link_down,
            ..Flushed::default()
        };
        // More than the kernel takes in one call, and in two flushes.
        ip("link set vb down");
        // The kernel says so by a thread of its own; before that, what is refused found no room.
        net::until_state("va", "state LOWERLAYERDOWN");
        assert_eq!(send(7_000_000, 100), sent(0, 100), "round {round}");
        assert_eq!(send(7_000_200, 2), sent(0, 2), "round {round}");
        ip("link set vb up");
        net::until_up();
        let mut other_end = net::open(net::rx("vb"));
        let mut got = Vec::new();
        for first in (0..1000).step_by(100) {
            assert_eq!(send(first, 100), sent(100, 0), "round {round}");
            got.extend(read(other_end.as_mut(), 100, PATIENCE));
        }
        got.extend(read(other_end.as_mut(), 1, Duration::from_millis(100)));
        let frames = got.iter().map(|got| got.bytes.clone());
        assert!(frames.eq((0..1000).map(|seq| frame(len, seq))), "{round}");
    }
}

#[test]
fn a_carrier_that_was_lost_under_an_xdp_socket() {
    for mode in [Mode::Auto, Mode::Generic] {
        // The second in three chunks of packet memory each.
        for len in [60, 5000] {
            isolated(move || a_lost_carrier_spoils_nothing(mode, len));
        }
    }
}

#[test]
fn frames_that_need_several_chunks_leave_whole_and_in_order() {
    for mode in [Mode::Auto, Mode::Generic] {
        isolated(move || {
            veth(1);
            let mut queue = one(AfXdpConfig {
                mode,
                ..config("va")
            });
            set_mtu(12000);
            // The queue learns of it when it waits.
            net::read(queue.as_mut(), 1, Duration::from_millis(200));
            let mut other_end = net::open(net::rx("vb"));
            let lens = [60, 2048, 2049, 4096, 4097, 9014, 61, LONGEST];
            let sent: Vec<_> = (0..400)
                .map(|seq| frame(lens[seq % lens.len()], seq as u32))
                .collect();
            carries(&mut *queue, &mut *other_end, &sent, 40);

            let longer = frame(LONGEST + 1, 1);
            assert_eq!(out(&mut *queue).transmit(&longer), Transmit::BadLength);
            // What does not fit as a whole takes no chunk, and a short one fits behind it.
            let taken = (0..)
                .map(|seq| out(&mut *queue).transmit(&frame(LONGEST, seq)))
                .take_while(|taken| *taken == Transmit::Taken)
                .count();
            assert!((64..=512 / 5).contains(&taken), "{taken}");
            assert_eq!(out(&mut *queue).transmit(&frame(60, 1)), Transmit::Taken);
            let flushed = out(&mut *queue).flush(&mut |_| {});
            assert_eq!(flushed.sent, taken as u64 + 1);
            let got = read(other_end.as_mut(), taken + 1, PATIENCE);
            let lens = got.iter().map(|got| got.bytes.len());
            assert!(lens.eq(std::iter::repeat_n(LONGEST, taken).chain([60])));
        });
    }
}

#[test]
fn frames_of_several_chunks_are_taken_back_whole_when_the_interface_is_down() {
    for mode in [Mode::Auto, Mode::Generic] {
        isolated(move || {
            veth(1);
            set_mtu(9000);
            let mut queue = one(AfXdpConfig {
                mode,
                ..config("va")
            });
            let mut send = |seqs: std::ops::Range<u32>| {
                for seq in seqs {
                    let frame = frame(5000, seq);
                    assert_eq!(out(&mut *queue).transmit(&frame), Transmit::Taken);
                }
                out(&mut *queue).flush(&mut |_| {})
            };
            ip("link set va down");
            let lost = Flushed {
                link_down: 20,
                ..Flushed::default()
            };
            // More than there are chunks for, if those of a lost frame stayed away.
            for _ in 0..20 {
                assert_eq!(send(7_000_000..7_000_020), lost);
            }
            ip("link set va up");
            net::until_up();
            let mut other_end = net::open(net::rx("vb"));
            assert_eq!(send(0..20).sent, 20);
            let mut got = read(other_end.as_mut(), 20, PATIENCE);
            got.extend(read(other_end.as_mut(), 1, Duration::from_millis(100)));
            let frames = got.iter().map(|got| got.bytes.clone());
            assert!(frames.eq((0..20).map(|seq| frame(5000, seq))));
        });
    }
}

/// The control of those above.
#[test]
fn where_a_frame_has_one_chunk_a_longer_one_is_refused() {
    isolated(|| {
        veth(1);
        let mut queue = one(AfXdpConfig {
            multi_buffer: false,
            ..config("va")
        });
        set_mtu(3000);
        // The queue learns of it when it waits.
        net::read(queue.as_mut(), 1, Duration::from_millis(200));
        let mut sends = |len| out(&mut *queue).transmit(&frame(len, 1));
        assert_eq!(sends(2048), Transmit::Taken);
        assert_eq!(sends(2049), Transmit::BadLength);
    });
}

/// Five chunks of 2048 bytes.
const LONGEST: usize = 10_240;

#[test]
fn through_an_xdp_socket() {
    isolated(|| {
        veth(1);
        sends_and_counts(one(config("va")));
    });
}

#[test]
fn through_a_packet_socket() {
    isolated(|| {
        veth(1);
        sends_and_counts(net::open(net::config("va")));
    });
}
