//! An interface that goes down, is reset, or is deleted and made again.

use std::time::Duration;

use vnplug_ring::layout::flags;

use crate::net::{
    Sender, ip, isolated, read_shared, udp, until_queue_state, until_received, until_seen,
};
use crate::{attached, config, ethtool, one, open, veth};

#[test]
fn goes_on_after_the_link_was_down() {
    isolated(|| {
        veth(1);
        let mut queue = one(config("va"));
        let sender = Sender::new("vb");
        assert_eq!(until_received(&sender, queue.as_mut()).flags, 0);
        for times in 1..=3 {
            ip("link set va down");
            until_queue_state(queue.as_mut(), "down");
            ip("link set va up");
            until_queue_state(queue.as_mut(), "up");
            let got = until_received(&sender, queue.as_mut());
            assert_eq!(got.flags, flags::SOURCE_LOSS);
            assert_eq!(queue.counters().rebinds, times);
        }
    });
}

#[test]
fn opens_an_interface_that_is_still_down() {
    isolated(|| {
        veth(1);
        ip("link set va down");
        let mut queue = one(config("va"));
        assert_eq!(queue.state(), "down");
        ip("link set va up");
        until_received(&Sender::new("vb"), queue.as_mut());
        until_queue_state(queue.as_mut(), "up");
    });
}

#[test]
fn goes_on_when_the_nic_is_reset_or_has_other_channels_and_offloads() {
    isolated(|| {
        veth(4);
        ethtool("-L vb rx 1 tx 1");
        ethtool("-L va rx 2 tx 2");
        let mut queues = open(config("va"));
        let sender = Sender::new("vb");
        let mut sent = 0;
        let steps = [
            "-L va rx 4 tx 4",
            "-L va rx 2 tx 2",
            "-K va gro on",
            "-K va gro off",
            "-K vb tso off",
        ];
        for step in steps {
            ethtool(step);
            // The driver stops and starts; what comes meanwhile is its own loss.
            std::thread::sleep(Duration::from_millis(20));
            (1000..1100).for_each(|port| assert!(sender.send(&udp(port, 53))));
            sent += 100;
            let got = read_shared(&mut queues, 100);
            let got: usize = got.iter().map(Vec::len).sum();
            assert_eq!(got, 100, "after {step}");
        }
        let seen: u64 = queues.iter_mut().map(|queue| queue.counters().seen).sum();
        assert_eq!(seen, sent);
    });
}

#[test]
fn finds_an_interface_that_was_deleted_and_made_again() {
    isolated(|| {
        veth(2);
        let mut queues = open(config("va"));
        let mut sent = 0;
        let mut taken = [0; 2];
        for times in 0..=3 {
            let sender = Sender::new("vb");
            (1000..1100).for_each(|port| assert!(sender.send(&udp(port, 53))));
            sent += 100;
            until_seen(&mut queues, sent);
            if times % 2 == 1 {
                // Deleted with frames unread: they still come.
                ip("link del va");
            }
            let got = read_shared(&mut queues, 100);
            for (i, got) in got.iter().enumerate() {
                taken[i] += got.len() as u64;
                let counters = queues[i].counters();
                assert_eq!((counters.seen, counters.dropped), (taken[i], 0));
                assert_eq!(counters.rebinds, times);
                let flag = if times > 0 { flags::SOURCE_LOSS } else { 0 };
                assert_eq!(got[0].flags, flag);
            }
            if times % 2 == 0 {
                ip("link del va");
            }
            for queue in &mut queues {
                until_queue_state(queue.as_mut(), "gone");
            }
            std::thread::sleep(Duration::from_millis(50));
            veth(2);
            for queue in &mut queues {
                until_queue_state(queue.as_mut(), "up");
            }
            assert!(attached("va").is_some());
        }
        assert_eq!(taken.iter().sum::<u64>(), sent, "each frame once");
    });
}
