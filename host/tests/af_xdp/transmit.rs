//! Frames go out through a queue, of AF_XDP and of packet sockets alike.

use std::time::Duration;

use vnplug_path::source::af_xdp::{AfXdpConfig, Mode};
use vnplug_path::source::{Flushed, Queue, Transmit};
use vnplug_testing::PATIENCE;

use crate::net::{self, frame, ip, isolated, out, read, read_all};
use crate::{config, one, veth};

fn sends_and_counts(mut queue: Box<dyn Queue>) {
    let mut other_end = net::open(net::rx("vb"));
    let sent: Vec<_> = (0..3000)
        .map(|seq| frame(60 + (seq % 1455), seq as u32))
        .collect();
    let mut got = Vec::new();
    for batch in sent.chunks(100) {
        for frame in batch {
            assert_eq!(out(&mut *queue).transmit(frame), Transmit::Taken);
        }
        let flushed = out(&mut *queue).flush(&mut |_| {});
        assert_eq!(
            flushed,
            Flushed {
                sent: batch.len() as u64,
                ..Flushed::default()
            }
        );
        got.extend(read(other_end.as_mut(), batch.len(), PATIENCE));
    }
    assert_eq!(out(&mut *queue).flush(&mut |_| {}), Flushed::default());
    assert_eq!(got.len(), sent.len());
    assert!(got.iter().zip(&sent).all(|(got, sent)| &got.bytes == sent));

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

/// Nothing that was told as lost comes later, nothing comes twice, and all that is sent afterwards comes.
fn a_lost_carrier_spoils_nothing(mode: Mode) {
    veth(1);
    let mut queue = one(AfXdpConfig {
        mode,
        ..config("va")
    });
    for round in 0..3 {
        let mut send = |first: u32, count: u32| {
            for seq in first..first + count {
                assert_eq!(out(&mut *queue).transmit(&frame(60, seq)), Transmit::Taken);
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
        assert_eq!(send(7_000_000, 200), sent(0, 200), "round {round}");
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
        assert!(frames.eq((0..1000).map(|seq| frame(60, seq))), "{round}");
    }
}

#[test]
fn a_carrier_that_was_lost_under_an_xdp_socket() {
    for mode in [Mode::Auto, Mode::Generic] {
        isolated(move || a_lost_carrier_spoils_nothing(mode));
    }
}

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
