//! What no port wants is dropped where the interface's program is, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vnplug_filter::Program;
use vnplug_filter::ebpf::Wanted;
use vnplug_path::source::Queue;
use vnplug_path::source::af_xdp::{AfXdpConfig, Mode};
use vnplug_testing::until;

use crate::coexist::filter;
use crate::net::{
    Sender, early, frame, ip, isolated, read_all, udp, until_queue_state, until_seen,
};
use crate::{config, one, veth};

fn narrow(queue: &mut dyn Queue, programs: &[Arc<Program>]) {
    let wants: Vec<_> = programs
        .iter()
        .map(|it| Wanted::new(None, Some(it)))
        .collect();
    let seat = early(queue).seat().expect("early drop works here");
    // Another program than the one before, which passes everything from now on.
    static GENERATION: AtomicU32 = AtomicU32::new(1);
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    seat.set(generation, u64::MAX);
    let loaded = seat.load(generation, &wants).expect("the kernel takes it");
    early(queue).narrow(Box::new(loaded)).expect("narrow");
}

/// Sends 300 datagrams of 100 flows, no faster than the driver hands them on, and as many frames
/// that the source does not take.
fn send(sender: &Sender, queue: &mut Box<dyn Queue>, seen: &mut u64) {
    for number in 0..300_u16 {
        assert!(sender.send(&udp(1_000 + number % 100, 53)));
        assert!(sender.send(&frame(60, number.into())));
        *seen += 1;
        if number % 30 == 29 {
            until_seen(std::slice::from_mut(queue), *seen);
        }
    }
}

#[test]
fn one_frame_in_a_hundred_comes_and_the_others_are_counted() {
    for mode in [Mode::Auto, Mode::Generic] {
        isolated(move || {
            veth(1);
            let mut queue = one(AfXdpConfig {
                mode,
                take: Some(filter("udp")),
                early: true,
                ..config("va")
            });
            let mut seen = 0;
            let counts = |queue: &mut Box<dyn Queue>| {
                let counters = queue.counters();
                (counters.seen, counters.dropped, counters.early)
            };
            let sender = Sender::new("vb");
            narrow(queue.as_mut(), &[filter("udp port 1042")]);
            send(&sender, &mut queue, &mut seen);
            let got = read_all(queue.as_mut(), 3);
            assert_eq!(got.len(), 3);
            assert!(got.iter().all(|got| got.bytes == udp(1_042, 53)));
            assert_eq!(counts(&mut queue), (300, 0, 297));
            // The interface is made again: the filter is there again.
            ip("link del va");
            until_queue_state(queue.as_mut(), "gone");
            veth(1);
            until_queue_state(queue.as_mut(), "up");
            let sender = Sender::new("vb");
            send(&sender, &mut queue, &mut seen);
            assert_eq!(read_all(queue.as_mut(), 3).len(), 3);
            assert_eq!(counts(&mut queue), (600, 0, 594));
            // Nobody wants anything.
            narrow(queue.as_mut(), &[]);
            send(&sender, &mut queue, &mut seen);
            assert!(read_all(queue.as_mut(), 0).is_empty());
            assert_eq!(counts(&mut queue), (900, 0, 894));
            // The control.
            early(&mut *queue).seat().expect("a seat").set(0, 0);
            send(&sender, &mut queue, &mut seen);
            assert_eq!(read_all(queue.as_mut(), 300).len(), 300);
            assert_eq!(counts(&mut queue), (1_200, 0, 894));
        });
    }
}

#[test]
fn queues_that_are_not_read_pass_to_the_host_whatever_is_wanted() {
    isolated(|| {
        veth(2);
        let mut queue = one(AfXdpConfig {
            queues: vec![0],
            early: true,
            ..config("va")
        });
        narrow(queue.as_mut(), &[]);
        let mut host = crate::net::open(crate::net::rx("va"));
        let sender = Sender::new("vb");
        for port in 1_000..1_200 {
            assert!(sender.send(&udp(port, 53)));
        }
        // Every frame is either dropped as unwanted or the host's.
        let both = |queue: &mut Box<dyn Queue>, host: &mut Box<dyn Queue>| {
            (queue.counters().early, host.counters().seen)
        };
        let look = || both(&mut queue, &mut host);
        let (early, passed) = until("all are counted", look, |(early, passed)| {
            early + passed >= 200
        });
        assert_eq!((early + passed, queue.counters().seen), (200, early));
        assert!(passed > 0 && early > 0, "{early} + {passed}");
    });
}
