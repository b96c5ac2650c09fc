//! An interface that goes down, is renamed, or is deleted and made again.

use std::time::{Duration, Instant};

use vnplug_path::source::Queue;
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig};
use vnplug_ring::layout::flags;
use vnplug_testing::PATIENCE;

use crate::net::{
    Sender, drain, ip, isolated, open, read_shared, rx, udp, until_queue_state, until_received,
    until_seen, veth,
};

#[test]
fn goes_on_after_the_link_was_down() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        assert_eq!(until_received(&sender, queue.as_mut()).flags, 0);
        let mut soonest = PATIENCE;
        for times in 1..=3 {
            ip("link set va down");
            until_queue_state(queue.as_mut(), "down");
            ip("link set va up");
            soonest = soonest.min(until_queue_state(queue.as_mut(), "up"));
            assert_eq!(
                until_received(&sender, queue.as_mut()).flags,
                flags::SOURCE_LOSS
            );
            assert_eq!(queue.counters().rebinds, times);
        }
        // Less than a tenth of a second on an idle machine.
        assert!(soonest < Duration::from_secs(30), "{soonest:?}");
    });
}

#[test]
fn opens_an_interface_that_is_still_down() {
    isolated(|| {
        veth();
        ip("link set va down");
        let mut queue = open(rx("va"));
        assert_eq!(queue.state(), "down");
        ip("link set va up");
        until_received(&Sender::new("vb"), queue.as_mut());
        until_queue_state(queue.as_mut(), "up");
    });
}

#[test]
fn goes_on_when_the_interface_is_renamed() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        ip("link set va down");
        ip("link set va name vx");
        until_queue_state(queue.as_mut(), "down");
        ip("link set vx up");
        until_queue_state(queue.as_mut(), "up");
        until_received(&Sender::new("vb"), queue.as_mut());
    });
}

#[test]
fn finds_an_interface_that_was_deleted_and_made_again() {
    isolated(|| {
        veth();
        let mut queues = AfPacket::open(AfPacketConfig {
            queues: 2,
            ..rx("va")
        })
        .expect("open");
        let mut taken = [0; 2];
        let mut sent = 0;
        let mut soonest = PATIENCE;
        let mut send = |queues: &mut [Box<dyn Queue>]| {
            let sender = Sender::new("vb");
            (1000..1100).for_each(|port| assert!(sender.send(&udp(port, 53))));
            sent += 100;
            until_seen(queues, sent);
            sent
        };
        for times in 1..=3 {
            let sent = send(&mut queues);
            // Deleted with frames unread: they still come, and are still counted.
            ip("link del va");
            drain(&mut queues, &mut taken, sent);
            for queue in &mut queues {
                until_queue_state(queue.as_mut(), "gone");
            }
            std::thread::sleep(Duration::from_millis(150));
            veth();
            let back = Instant::now();
            for queue in &mut queues {
                until_queue_state(queue.as_mut(), "up");
                assert_eq!(queue.counters().rebinds, times);
            }
            soonest = soonest.min(back.elapsed());
        }
        // Less than half a second on an idle machine.
        assert!(soonest < Duration::from_secs(30), "{soonest:?}");
        let sent = send(&mut queues);
        let got = read_shared(&mut queues, 100);
        for (i, got) in got.iter().enumerate() {
            assert_eq!(got[0].flags, flags::SOURCE_LOSS);
            taken[i] += got.len() as u64;
            let counters = queues[i].counters();
            assert_eq!((counters.seen, counters.dropped), (taken[i], 0));
        }
        assert_eq!(taken.iter().sum::<u64>(), sent, "each frame once");
    });
}

#[test]
fn waits_for_an_interface_that_was_never_there() {
    isolated(|| {
        assert!(AfPacket::open(rx("va")).is_err(), "it is there");
        let mut queues = AfPacket::open_when_there(AfPacketConfig {
            queues: 2,
            ..rx("va")
        })
        .expect("open");
        for queue in &mut queues {
            until_queue_state(queue.as_mut(), "missing");
            assert!(
                queue.transmitter().is_some(),
                "ports may send once it is there"
            );
        }
        veth();
        for queue in &mut queues {
            until_queue_state(queue.as_mut(), "up");
        }
        let sender = Sender::new("vb");
        (1000..1100).for_each(|port| assert!(sender.send(&udp(port, 53))));
        let got = read_shared(&mut queues, 100);
        // Each came to one queue, and nothing was lost that a reader would have to know of.
        for (queue, got) in queues.iter_mut().zip(got) {
            assert!(got.iter().all(|it| it.flags == 0));
            let counters = queue.counters();
            assert_eq!((counters.seen, counters.rebinds), (got.len() as u64, 0));
        }
        // From now on it is a queue like others.
        ip("link del va");
        for queue in &mut queues {
            until_queue_state(queue.as_mut(), "gone");
        }
    });
}
