//! What comes out, its pace, and what cannot be generated.

use super::*;
use vnplug_frame::witness::{Checker, View};

fn drain(queue: &mut dyn Queue, checker: &mut Checker) -> (u64, u64) {
    let (mut frames, mut bytes) = (0, 0);
    while let Received::Frames(count) = queue
        .receive(&mut |batch| {
            assert!(!batch.is_empty() && batch.len() <= MAX_BATCH);
            for frame in batch {
                checker.feed(frame.bytes);
                assert_eq!(frame.wire_len as usize, frame.bytes.len());
                bytes += frame.bytes.len() as u64;
            }
        })
        .unwrap()
    {
        frames += count as u64;
    }
    assert_eq!(
        queue.receive(&mut |_| unreachable!()).unwrap(),
        Received::End
    );
    assert_eq!((queue.counters().seen, queue.state()), (frames, "ended"));
    (frames, bytes)
}

#[test]
fn counted_run_is_perfect_for_every_mix() {
    for (sizes, flows, protocols, vlan_tci) in [
        (Sizes::Fixed(60), 1, vec![Protocol::Udp4], None),
        (Sizes::Fixed(9000), 3, Protocol::ALL.to_vec(), Some(100)),
        (
            Sizes::Range(108, 1514),
            1000,
            Protocol::ALL.to_vec(),
            Some(1),
        ),
        (Sizes::Range(60, 61), 2, vec![Protocol::Udp4], None),
        (Sizes::Imix, 10_007, Protocol::ALL.to_vec(), None),
    ] {
        let config = GenConfig {
            sizes,
            flows,
            protocols,
            vlan_tci,
            count: Some(70_001),
            ..GenConfig::default()
        };
        let mut checker = Checker::new(View::Whole);
        checker.expect(config.run, 0..70_001);
        let mut queues = Gen::open(&config).unwrap();
        assert_eq!(drain(queues[0].as_mut(), &mut checker).0, 70_001);
        assert!(checker.is_perfect() && checker.foreign() == 0, "{config:?}");
    }
}

#[test]
fn queues_together_carry_every_sequence_once() {
    let config = GenConfig {
        queues: 3,
        flows: 7,
        count: Some(10_000),
        ..GenConfig::default()
    };
    let mut checker = Checker::new(View::Part);
    for mut queue in Gen::open(&config).unwrap() {
        drain(queue.as_mut(), &mut checker);
    }
    assert_eq!(checker.set(config.run).unwrap().gaps(0..10_000).count, 0);
    assert_eq!(checker.report(config.run).unwrap().duplicates, 0);
}

#[test]
fn imix_has_its_shares() {
    let config = GenConfig {
        sizes: Sizes::Imix,
        count: Some(12_000),
        ..GenConfig::default()
    };
    let mut queues = Gen::open(&config).unwrap();
    let (_, bytes) = drain(queues[0].as_mut(), &mut Checker::new(View::Whole));
    assert_eq!(bytes, 1000 * (7 * 60 + 4 * 590 + 1514));
}

#[test]
fn due_follows_the_rate_exactly_on_average() {
    let config = GenConfig {
        pps: Some(3),
        queues: 2,
        ..GenConfig::default()
    };
    let mut queue = GenQueue::new(&config, 1, Arc::default()).unwrap();
    for (millis, due) in [
        (0, 0),
        (333, 0),
        (334, 1),
        (999, 1),
        (1000, 2),
        (1_000_000, 1500),
    ] {
        assert_eq!(queue.due(Duration::from_millis(millis)), due, "{millis} ms");
    }
    assert_eq!(queue.due(Duration::MAX), u64::MAX / 2);
    // What `wait` sleeps for is never too short: a frame is due then.
    for pps in [1, 3, 7, 999_999_937, u64::MAX] {
        queue.pps = Some(pps);
        for seq in [1, 1001, 123_456_789] {
            queue.next_seq = seq;
            assert!(queue.due(queue.next_due(pps)) >= 1, "{pps} {seq}");
        }
    }
}

#[test]
fn a_late_generator_says_so_and_skips_nothing() {
    let config = GenConfig {
        pps: Some(100_000),
        ..GenConfig::default()
    };
    let start = Arc::new(OnceLock::new());
    let second_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    start.set(second_ago).unwrap();
    let mut queue = GenQueue::new(&config, 0, start).unwrap();
    assert_eq!(
        queue.receive(&mut |_| ()).unwrap(),
        Received::Frames(MAX_BATCH)
    );
    assert_eq!(
        (queue.state(), queue.next_seq),
        ("behind", MAX_BATCH as u64)
    );
    queue.next_seq = u64::from(u32::MAX);
    assert_eq!(
        queue.receive(&mut |_| unreachable!()).unwrap(),
        Received::Nothing
    );
    assert_eq!(queue.state(), "up");
}

#[test]
fn impossible_configurations_are_refused_in_words() {
    let base = GenConfig::default();
    for (config, word) in [
        (
            GenConfig {
                sizes: Sizes::Fixed(59),
                ..base.clone()
            },
            "60 to 9000",
        ),
        (
            GenConfig {
                sizes: Sizes::Fixed(9001),
                ..base.clone()
            },
            "60 to 9000",
        ),
        (
            GenConfig {
                sizes: Sizes::Range(100, 99),
                ..base.clone()
            },
            "60 to 9000",
        ),
        (
            GenConfig {
                protocols: vec![Protocol::Tcp6],
                ..base.clone()
            },
            "104",
        ),
        (
            GenConfig {
                vlan_tci: Some(1),
                ..base.clone()
            },
            "64",
        ),
        (
            GenConfig {
                flows: 0,
                ..base.clone()
            },
            "flows",
        ),
        (
            GenConfig {
                pps: Some(0),
                ..base.clone()
            },
            "rate",
        ),
        (
            GenConfig {
                queues: 0,
                ..base.clone()
            },
            "queues",
        ),
        (
            GenConfig {
                flows: 1 << 24,
                sizes: Sizes::Fixed(9000),
                ..base.clone()
            },
            "MiB",
        ),
    ] {
        let error = Gen::open(&config).err().expect(word);
        assert!(error.what.contains(word), "{error}");
    }
    assert_eq!("imix".parse::<Sizes>().unwrap(), Sizes::Imix);
    assert_eq!("64-1500".parse::<Sizes>().unwrap(), Sizes::Range(64, 1500));
    assert_eq!("60".parse::<Sizes>().unwrap(), Sizes::Fixed(60));
    assert!("big".parse::<Sizes>().is_err());
}
