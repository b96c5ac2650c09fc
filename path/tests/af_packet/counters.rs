//! Every frame is handed out or counted as dropped.

use vnplug_path::source::Queue;
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig};
use vnplug_ring::layout::flags;
use vnplug_testing::PATIENCE;

use crate::net::{Sender, drain, frame, isolated, read, rx, udp, until_seen, veth};

#[test]
fn overflow_is_counted_to_the_packet() {
    const BURST: u64 = 20_000;
    const BURSTS: u64 = 20;
    for count in [1, 2] {
        isolated(move || {
            veth();
            let mut queues = AfPacket::open(AfPacketConfig {
                queues: count,
                block_size: 4096,
                blocks: 4,
                snaplen: 512,
                ..rx("va")
            })
            .expect("open");
            let sender = Sender::new("vb");
            let payloads = [udp(1000, 53), udp(1001, 53), udp(1002, 53), udp(1003, 53)];
            let mut taken = vec![0; count as usize];
            let (mut lossy, mut waited) = (0, 0);
            for burst in 1..=BURSTS / u64::from(count) {
                let send = || {
                    for payload in payloads.iter().cycle().take(BURST as usize) {
                        assert!(sender.send(payload));
                    }
                };
                let before = dropped(&mut queues);
                // Half of the bursts meet a reader that sleeps, half one that reads along.
                if burst % 2 == 0 {
                    send();
                    // What waits is counted in the ring, and closes the account of what the kernel says.
                    for (queue, taken) in queues.iter_mut().zip(&taken) {
                        let now = queue.counters();
                        assert_eq!(now.seen, taken + now.dropped + now.waiting, "{now:?}");
                        waited += now.waiting;
                    }
                    drain(&mut queues, &mut taken, burst * BURST);
                } else {
                    std::thread::scope(|scope| {
                        scope.spawn(send);
                        drain(&mut queues, &mut taken, burst * BURST);
                    });
                }
                let after: Vec<_> = queues.iter_mut().map(|queue| queue.counters()).collect();
                assert_eq!(after.iter().map(|c| c.seen).sum::<u64>(), burst * BURST);
                for (counters, taken) in after.iter().zip(&taken) {
                    assert_eq!(counters.seen, taken + counters.dropped);
                }
                lossy += u64::from(dropped(&mut queues) > before);
            }
            assert!(waited > 0, "frames must wait to prove it");
            assert!(
                lossy >= BURSTS / u64::from(count) / 2,
                "the ring must overflow to prove it"
            );
        });
    }
}

fn dropped(queues: &mut [Box<dyn Queue>]) -> u64 {
    queues
        .iter_mut()
        .map(|queue| queue.counters().dropped)
        .sum()
}

#[test]
fn first_frame_after_a_loss_says_so() {
    isolated(|| {
        veth();
        let tiny = AfPacketConfig {
            block_size: 4096,
            blocks: 2,
            snaplen: 512,
            ..rx("va")
        };
        let mut queues = AfPacket::open(tiny).expect("open");
        let sender = Sender::new("vb");
        let one = |queue: &mut dyn Queue| {
            assert!(sender.send(&frame(60, 5)));
            read(queue, 1, PATIENCE).remove(0)
        };
        assert_eq!(one(queues[0].as_mut()).flags, 0);
        (0..1000).for_each(|seq| assert!(sender.send(&frame(60, seq))));
        until_seen(&mut queues, 1001);
        let got = read(queues[0].as_mut(), 1, PATIENCE);
        assert_eq!(got[0].flags, flags::SOURCE_LOSS);
        let mut taken = [1 + got.len() as u64];
        drain(&mut queues, &mut taken, 1001);
        assert_eq!(one(queues[0].as_mut()).flags, 0);
    });
}
