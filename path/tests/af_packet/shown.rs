//! What a queue sends is shown as other packet sockets on the interface see it, and once.

use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_frame::Frame;
use vnplug_path::source::af_packet::{AfPacketConfig, Direction};
use vnplug_path::source::{Flushed, Queue, Transmit};

use crate::net::{Got, Sender, config, frame, ip, isolated, open, out, read_all, veth};

/// Sends frames; says what became of them and which were shown.
fn send(queue: &mut dyn Queue, frames: &[Vec<u8>]) -> (Flushed, Vec<Got>) {
    for frame in frames {
        assert_eq!(out(queue).transmit(frame), Transmit::Taken);
    }
    let mut shown = Vec::new();
    let flushed = out(queue).flush(&mut |frames: &[Frame<'_>]| {
        assert!(!frames.is_empty());
        shown.extend(frames.iter().map(Got::of));
    });
    (flushed, shown)
}

fn now_ns() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock after 1970")
        .as_nanos() as u64
}

#[test]
fn what_was_sent_is_shown_as_another_socket_sees_it() {
    isolated(|| {
        veth();
        let mut tagged = frame(80, 2);
        tagged.splice(12..12, [0x81, 0x00, 0x00, 0x2a]);
        let frames = [frame(60, 0), frame(1514, 1), tagged];
        let mut other = open(config("va"));
        let mut queue = open(config("va"));
        let before = now_ns();
        let (flushed, shown) = send(queue.as_mut(), &frames);
        assert_eq!(flushed.sent, 3);
        let other = read_all(other.as_mut(), 3);
        assert_eq!(shown.len(), 3);
        assert_eq!(shown[2].vlan_tci, 42);
        for (shown, other) in shown.iter().zip(&other) {
            let told = |it: &Got| (it.bytes.clone(), it.wire_len, it.flags, it.vlan_tci);
            assert_eq!(told(shown), told(other));
            assert!((before..=other.ts_ns).contains(&shown.ts_ns));
        }
        // It does not receive them besides, and the sum closes.
        assert!(Sender::new("vb").send(&frame(60, 9)));
        assert_eq!(read_all(queue.as_mut(), 1)[0].bytes, frame(60, 9));
        let counters = queue.counters();
        assert_eq!((counters.seen, counters.shown, counters.dropped), (4, 3, 0));
    });
}

#[test]
fn what_the_wire_refuses_is_not_shown() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            snaplen: 100,
            ..config("va")
        });
        let frames = [frame(60, 0), frame(9_000, 1), frame(500, 2)];
        let (flushed, shown) = send(queue.as_mut(), &frames);
        assert_eq!((flushed.sent, flushed.bad_length), (2, 1));
        let lens: Vec<_> = shown
            .iter()
            .map(|it| (it.bytes.len(), it.wire_len))
            .collect();
        assert_eq!(lens, [(60, 60), (100, 500)]);
        ip("link set va down");
        let (flushed, shown) = send(queue.as_mut(), &frames[..1]);
        assert_eq!((flushed.sent, flushed.link_down, shown.len()), (0, 1, 0));
        // Nor what was shown before.
        assert_eq!(send(queue.as_mut(), &[]).1.len(), 0);
        assert_eq!(queue.counters().shown, 2);
    });
}

#[test]
fn a_direction_and_a_loopback_decide_whether_it_is_shown() {
    isolated(|| {
        veth();
        ip("link set lo up");
        let cases = [
            ("va", Direction::Both, 1, 0),
            ("va", Direction::Tx, 1, 0),
            ("va", Direction::Rx, 0, 0),
            // It comes back, and is received.
            ("lo", Direction::Both, 0, 1),
            ("lo", Direction::Rx, 0, 1),
            ("lo", Direction::Tx, 1, 0),
        ];
        for (interface, direction, shown, received) in cases {
            let mut queue = open(AfPacketConfig {
                direction,
                ..config(interface)
            });
            let (flushed, got) = send(queue.as_mut(), &[frame(60, 0)]);
            assert_eq!(
                (flushed.sent, got.len()),
                (1, shown),
                "{interface} {direction:?}"
            );
            let got = read_all(queue.as_mut(), received);
            assert_eq!(got.len(), received, "{interface} {direction:?}");
            assert_eq!(queue.counters().seen, 1 - u64::from(shown + received == 0));
        }
    });
}

/// Point K, while frames come: what was shown never was in the ring.
#[test]
fn what_waits_is_told_apart_from_what_was_shown() {
    isolated(|| {
        veth();
        let mut queue = open(config("va"));
        let (_, shown) = send(queue.as_mut(), &vec![frame(60, 0); 100]);
        assert_eq!(shown.len(), 100);
        std::thread::scope(|scope| {
            let flood = scope.spawn(|| {
                let sender = Sender::new("vb");
                (0..50_000).for_each(|number| assert!(sender.send(&frame(60, number))));
            });
            while !flood.is_finished() {
                let now = queue.counters();
                assert_eq!(now.seen, 100 + now.dropped + now.waiting, "{now:?}");
            }
            flood.join().expect("it sends");
        });
        assert!(queue.counters().waiting > 0);
    });
}
