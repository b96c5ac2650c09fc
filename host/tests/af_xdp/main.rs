//! The AF_XDP source on real interfaces; needs root, `ip`, `ethtool`, `prlimit` and veth.
//!
//! Every test has a network namespace of its own, so they run side by side and leave nothing.

mod coexist;
mod daemon;
mod early;
mod fault;
mod link;
#[expect(dead_code, reason = "the packet-socket tests use more of it")]
#[path = "../../../path/tests/af_packet/net.rs"]
mod net;
mod sockets;
mod transmit;

use std::process::Command;

use net::{
    QUIET, Sender, frame, ip, isolated, read, read_all, read_shared, udp, until_received,
    until_seen,
};
use vnplug_path::source::Queue;
use vnplug_path::source::af_xdp::{AfXdp, AfXdpConfig, Mode};
use vnplug_ring::layout::flags;
use vnplug_testing::{Deadline, PATIENCE};

/// Small packet memory, as these tests send little.
fn config(interface: &str) -> AfXdpConfig {
    AfXdpConfig {
        frames: Some(4096),
        ..AfXdpConfig::new(interface)
    }
}

fn open(config: AfXdpConfig) -> Vec<Box<dyn Queue>> {
    match AfXdp::open(config) {
        Ok(opened) => opened.queues,
        Err(error) => panic!("{error}"),
    }
}

fn one(config: AfXdpConfig) -> Box<dyn Queue> {
    let mut queues = open(config);
    assert_eq!(queues.len(), 1);
    queues.remove(0)
}

/// The XDP program of an interface, as `ip` shows it.
fn attached(interface: &str) -> Option<String> {
    let output = Command::new("ip")
        .args(["link", "show", "dev", interface])
        .output()
        .expect("run ip");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let at = text.find("prog/xdp")?;
    Some(text[at..].lines().next().unwrap_or_default().to_owned())
}

/// Runs `ethtool` with these words.
fn ethtool(words: &str) {
    let output = Command::new("ethtool")
        .args(words.split(' '))
        .output()
        .expect("run ethtool");
    assert!(
        output.status.success(),
        "ethtool {words}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Sends frames no faster than the driver hands them on: it drops what 256 of its places do not
/// hold. `seen`: how many the queues have seen before, and then with these.
fn send_all(sender: &Sender, queues: &mut [Box<dyn Queue>], seen: &mut u64, frames: &[Vec<u8>]) {
    for frames in frames.chunks(100) {
        frames.iter().for_each(|frame| assert!(sender.send(frame)));
        *seen += frames.len() as u64;
        until_seen(queues, *seen);
    }
}

/// Makes a veth pair, `va` and `vb`, both up, with this many queues each way.
fn veth(queues: u32) {
    ip(&format!(
        "link add va numrxqueues {queues} numtxqueues {queues} type veth \
         peer name vb numrxqueues {queues} numtxqueues {queues}"
    ));
    ip("link set vb up");
    ip("link set va up");
    net::until_up();
}

#[test]
fn frames_of_every_size_arrive_byte_for_byte_and_once() {
    for (mode, said) in [(Mode::Auto, "XDP native"), (Mode::Generic, "XDP generic")] {
        isolated(move || {
            veth(1);
            ip("link set va mtu 9000");
            ip("link set vb mtu 9000");
            let opened = AfXdp::open(AfXdpConfig {
                mode,
                ..config("va")
            });
            let mut opened = opened.unwrap_or_else(|error| panic!("{error}"));
            assert!(opened.how.contains(said), "{}", opened.how);
            let sender = Sender::new("vb");
            let sent: Vec<Vec<u8>> = (14..=1514)
                .chain([1648, 1649, 3296, 3297, 9014])
                .map(|len| frame(len, len as u32))
                .collect();
            send_all(&sender, &mut opened.queues, &mut 0, &sent);
            let queue = &mut opened.queues[0];
            let got = read_all(queue.as_mut(), sent.len());
            assert_eq!(got.len(), sent.len());
            let mut before = 1_700_000_000_000_000_000;
            for (got, sent) in got.iter().zip(&sent) {
                assert_eq!(&got.bytes, sent);
                assert_eq!((got.wire_len, got.flags), (sent.len() as u32, 0));
                assert!(got.ts_ns >= before);
                before = got.ts_ns;
            }
            let counters = queue.counters();
            assert_eq!((counters.seen, counters.dropped), (sent.len() as u64, 0));
        });
    }
}

#[test]
fn every_receive_queue_of_the_interface_is_read_and_a_flow_keeps_its_queue() {
    isolated(|| {
        veth(4);
        let mut queues = open(config("va"));
        assert_eq!(queues.len(), 4);
        let sender = Sender::new("vb");
        let sent: Vec<_> = (2000..4000).map(|twice| udp(twice / 2, 53)).collect();
        send_all(&sender, &mut queues, &mut 0, &sent);
        let got = read_shared(&mut queues, 2000);
        let mut all = Vec::new();
        for (got, queue) in got.into_iter().zip(&mut queues) {
            assert!(got.len() > 100, "{} frames of 2000", got.len());
            for pair in got.chunks(2) {
                assert_eq!(pair[0].bytes[34..38], pair[1].bytes[34..38]);
            }
            let counters = queue.counters();
            assert_eq!((counters.seen, counters.dropped), (got.len() as u64, 0));
            all.extend(got.into_iter().map(|got| got.bytes[34..38].to_vec()));
        }
        assert_eq!(all.len(), 2000);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 1000);
    });
}

#[test]
fn overflow_is_counted_to_the_packet_and_marked() {
    for mode in [Mode::Native, Mode::Generic] {
        isolated(move || {
            veth(1);
            let mut queue = one(AfXdpConfig {
                mode,
                frames: Some(64),
                ..config("va")
            });
            let sender = Sender::new("vb");
            // The driver may lose frames before XDP sees them, so `seen` says how many came.
            let burst = || (0..2_000).for_each(|seq| assert!(sender.send(&frame(60, seq))));
            let mut taken = 0;
            for times in 0..10 {
                // Half of the bursts meet a reader that sleeps, half one that reads along.
                if times % 2 == 0 {
                    burst();
                    taken += settle(queue.as_mut(), taken);
                } else {
                    taken += std::thread::scope(|scope| {
                        let sending = scope.spawn(burst);
                        let mut along = 0;
                        while !sending.is_finished() {
                            along += read(queue.as_mut(), 1, QUIET).len() as u64;
                        }
                        along
                    });
                    taken += settle(queue.as_mut(), taken);
                }
                let counters = queue.counters();
                assert_eq!(counters.seen, taken + counters.dropped);
            }
            let dropped = queue.counters().dropped;
            assert!(dropped > 0, "it must overflow to prove it");
            // The first frame after a loss says so.
            burst();
            while queue.counters().dropped == dropped {
                std::thread::sleep(QUIET);
            }
            let got = read(queue.as_mut(), 1, PATIENCE);
            assert_eq!(got[0].flags, flags::SOURCE_LOSS);
            settle(queue.as_mut(), taken + got.len() as u64);
            // What was lost while it was settling is told once.
            until_received(&sender, queue.as_mut());
            assert_eq!(until_received(&sender, queue.as_mut()).flags, 0);
        });
    }
}

/// Reads until every frame that was seen was taken or dropped; gives how many it took.
fn settle(queue: &mut dyn Queue, taken: u64) -> u64 {
    let deadline = Deadline::new("every frame was taken or dropped");
    let mut more = 0;
    loop {
        let got = read(queue, usize::MAX, QUIET).len() as u64;
        more += got;
        let counters = queue.counters();
        if got == 0 && counters.seen == taken + more + counters.dropped {
            return more;
        }
        deadline.check_seen(&(taken, more, counters));
    }
}

#[test]
fn vlan_tags_are_where_they_were_on_the_wire() {
    isolated(|| {
        veth(1);
        let mut queue = one(config("va"));
        let sender = Sender::new("vb");
        let tagged = |tags: &[u8]| {
            let mut tagged = frame(200, 7);
            tagged.splice(12..12, tags.iter().copied());
            tagged
        };
        let sent = [
            tagged(&[0x81, 0x00, 0x60, 0x2a]),
            tagged(&[0x88, 0xa8, 0x01, 0x02, 0x81, 0x00, 0x00, 0x63]),
        ];
        sent.iter().for_each(|frame| assert!(sender.send(frame)));
        let got = read_all(queue.as_mut(), sent.len());
        assert_eq!(got.len(), sent.len());
        for (got, sent) in got.iter().zip(&sent) {
            assert_eq!((&got.bytes, got.flags), (sent, flags::VLAN));
            assert_eq!(got.vlan_tci, u16::from_be_bytes([sent[14], sent[15]]));
        }
    });
}

#[test]
fn a_frame_has_the_time_at_which_it_came_not_that_of_the_reading() {
    isolated(|| {
        veth(1);
        for (mode, stamps) in [
            (Mode::Native, true),
            (Mode::Generic, true),
            (Mode::Native, false),
        ] {
            let mut queue = one(AfXdpConfig {
                mode,
                stamps,
                ..config("va")
            });
            let sender = Sender::new("vb");
            assert!(sender.send(&frame(60, 1)));
            until_seen(std::slice::from_mut(&mut queue), 1);
            std::thread::sleep(std::time::Duration::from_millis(300));
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .expect("a clock after 1970");
            let age_ns = now.as_nanos() as i128 - i128::from(read_all(queue.as_mut(), 1)[0].ts_ns);
            assert_eq!(age_ns >= 299_000_000, stamps, "{age_ns} ns");
        }
    });
}

#[test]
fn a_thread_that_polls_and_never_waits_gets_frames_and_finds_the_interface_again() {
    isolated(|| {
        veth(1);
        let mut queue = one(AfXdpConfig {
            busy_poll_us: 20,
            ..config("va")
        });
        for times in 0..2 {
            let sender = Sender::new("vb");
            let deadline = Deadline::new("it gets frames, and finds that the interface is gone");
            let mut got = 0;
            while got == 0 || queue.state() != "up" {
                deadline.check_seen(&queue.state());
                sender.send(&frame(60, 1));
                queue
                    .receive(&mut |frames| got += frames.len())
                    .expect("receive");
            }
            assert_eq!(queue.counters().rebinds, times);
            ip("link del va");
            while queue.state() != "gone" {
                deadline.check_seen(&queue.state());
                queue.receive(&mut |_| ()).expect("receive");
            }
            veth(1);
        }
    });
}
