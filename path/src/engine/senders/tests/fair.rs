//! Turns: bounded, fair by bytes, weighed, held by a rate.

use super::*;
use crate::engine::senders::turns::{LEAST_QUANTUM, TURN};
use vnplug_frame::MAX_BATCH;
use vnplug_ring::layout::Place;

#[test]
fn a_turn_is_bounded_and_nobody_starves() {
    let mut rings: Vec<_> = (1..=6).map(sender).collect();
    let mut senders = attached(&mut rings);
    for (_, producer, _) in &mut rings {
        write(producer, 500, 60);
    }
    let mut link = Link::default();
    for _ in 0..6 {
        let served = senders.serve(&mut link, 0, &mut |_, _| {});
        assert_eq!(served.frames, MAX_BATCH);
    }
    let each = LEAST_QUANTUM / 60;
    assert!(senders.counters().all(|(_, it)| it.taken >= each));
    while senders.serve(&mut link, 0, &mut |_, _| {}).frames > 0 {}
    let total = senders.total();
    assert_eq!((total.taken, total.accounted()), (3000, 3000));
    assert!(total.sent > 2500 && total.dropped_full > 250, "{total:?}");
}

#[test]
fn who_writes_what_is_no_frame_has_no_more_turns_than_others() {
    for is_posted in [false, true] {
        let all = (1..=2).map(|id| sender_that(id, 1 << 17, 200, is_posted));
        let mut rings: Vec<_> = all.collect();
        let mut senders = attached(&mut rings);
        let nowhere = Place {
            ring: u16::MAX,
            at: 0,
            len: 60,
        };
        let mut link = Link::default();
        for _ in 0..50 {
            // It always has more.
            let (_, producer, _) = &mut rings[0];
            while match is_posted {
                true => producer.push_posted(0, &[], nowhere),
                false => producer.push(&Meta::default(), &[]),
            } == Ok(true)
            {}
            producer.publish();
            write(&mut rings[1].1, 10, 60);
            senders.serve(&mut link, 0, &mut |_, _| {});
        }
        let all: Vec<_> = senders.counters().map(|(_, it)| it).collect();
        let taken = [all[0].taken, all[1].taken];
        assert!(taken[0] > 5_000 && taken[1] > 200, "{taken:?}");
        assert_eq!(all[0].bytes, 0);
        let nowhere = if is_posted { taken[0] } else { 0 };
        assert_eq!(all[0].dropped_place, nowhere);
    }
}

/// The bytes of each of these senders (the length of its frames, and its terms) after `turns`, while all of them always
/// have more.
fn shares(senders: &[(usize, Terms)], turns: u64) -> Vec<u64> {
    let ids = 1..=senders.len() as u32;
    let mut rings: Vec<_> = ids.map(|id| sender_of(id, 1 << 18, 1514)).collect();
    let mut all = attached(&mut rings);
    for (id, (_, terms)) in (1..).zip(senders) {
        all.set_terms(id, Arc::new(terms.clone()), 0);
    }
    for turn in 0..turns {
        for ((_, producer, _), (len, _)) in rings.iter_mut().zip(senders) {
            let frame = vec![7; *len];
            while producer.push(&Meta::default(), &frame) == Ok(true) {}
            producer.publish();
        }
        // A turn of 100 us.
        let served = all.serve(&mut Wire, turn * 100, &mut |_, _| {});
        assert!(served.frames <= MAX_BATCH && served.liar.is_none());
    }
    all.counters().map(|(_, it)| it.bytes).collect()
}

/// Jain's index of fairness: 1 if all are equal, 1/n if one has all.
fn jain(shares: impl IntoIterator<Item = f64>) -> f64 {
    let shares: Vec<f64> = shares.into_iter().collect();
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|it| it * it).sum();
    sum * sum / (shares.len() as f64 * squares)
}

#[test]
fn senders_have_equal_parts_by_bytes_whatever_the_length_of_their_frames() {
    for count in [1, 2, 3, 8, 32] {
        let equal = vec![(500, Terms::default()); count];
        let mixed = (0..count).map(|at| ([60, 1514][at % 2], Terms::default()));
        let bytes = |it: u64| it as f64;
        let equal = jain(shares(&equal, 2_000).into_iter().map(bytes));
        let mixed = jain(
            shares(&mixed.collect::<Vec<_>>(), 4_000)
                .into_iter()
                .map(bytes),
        );
        assert!(equal >= 0.99, "{count} equal: {equal}");
        assert!(mixed >= 0.98, "{count} mixed: {mixed}");
    }
    // The control: by frames, which is what it was, 60 against 1514 bytes is no equal part.
    assert!(jain([60.0, 1514.0]) < 0.55);
}

/// The bytes that others have sent when each of 64 senders has its first frame taken, all of which begin at once after a rest,
/// one of them after it was alone.
fn waits_after_a_rest(count: u32) -> Vec<u64> {
    let mut rings: Vec<_> = (1..=count).map(|id| sender_of(id, 1 << 18, 1514)).collect();
    let mut all = attached(&mut rings);
    let mut now_us = 0;
    let mut serve = |all: &mut Senders| {
        now_us += 100;
        all.serve(&mut Wire, now_us, &mut |_, _| {}).frames
    };
    // One alone, and its turns are long.
    write(&mut rings[0].1, 150, 1514);
    while serve(&mut all) > 0 {}
    // All rest.
    for _ in 0..1_000 {
        assert_eq!(serve(&mut all), 0);
    }
    let before = all.total().bytes;
    for (_, producer, _) in &mut rings {
        write(producer, 150, 1514);
    }
    let ids: Vec<u32> = (1..=count).collect();
    all.wake(&ids);
    let mut waited: Vec<Option<u64>> = vec![None; count as usize];
    while waited.iter().any(Option::is_none) {
        assert!(serve(&mut all) > 0);
        let total = all.total().bytes - before;
        for (id, it) in all.counters() {
            let had = if id == 1 { 150 } else { 0 };
            if it.taken > had {
                waited[id as usize - 1].get_or_insert(total - (it.bytes - had * 1514));
            }
        }
    }
    waited.into_iter().flatten().collect()
}

#[test]
fn of_64_that_begin_at_once_after_a_rest_the_last_waits_for_a_little_of_each() {
    let waited = waits_after_a_rest(64);
    let most = *waited.iter().max().unwrap();
    // For 4 KiB and a frame of each, and what its own turn of the thread took beside it.
    assert!(most <= 64 * ((4 << 10) + 1514) + TURN, "{most}");
    // The control: each has many times that waiting, and one alone would have it taken in a turn.
    const { assert!(64 * 150 * 1514 > 16 * (64 * ((4 << 10) + 1514) + TURN)) };
}

#[test]
fn weights_are_kept_and_rates_not_exceeded() {
    let weighed = |weight| Terms {
        weight,
        ..Terms::default()
    };
    let senders = [(60, weighed(1)), (1514, weighed(2)), (500, weighed(5))];
    let bytes = shares(&senders, 4_000);
    let parts = bytes.iter().zip([1.0, 2.0, 5.0]);
    let index = jain(parts.map(|(bytes, weight)| *bytes as f64 / weight));
    assert!(index >= 0.98, "{bytes:?}");
    // 4,000 turns are 0.4 s, in which it may send 400 KB, and 64 KiB at once.
    let held = Terms {
        bytes_per_s: 1_000_000,
        ..Terms::default()
    };
    let bytes = shares(&[(1000, held), (1000, Terms::default())], 4_000);
    let most = 400_000 + (64 << 10) + 1000;
    assert!((380_000..=most).contains(&bytes[0]), "{bytes:?}");
    assert!(bytes[1] > 100 * bytes[0], "{bytes:?}");
}

#[test]
fn who_is_held_by_its_rate_wakes_the_thread_in_time_and_not_before() {
    let mut rings = [sender_of(1, 1 << 18, 200)];
    let mut senders = attached(&mut rings);
    let terms = Terms {
        bytes_per_s: 1_000_000,
        ..Terms::default()
    };
    senders.set_terms(1, Arc::new(terms), 0);
    write(&mut rings[0].1, 1_000, 100);
    let mut now_us = 0;
    let mut idle = 0;
    let mut taken = 0;
    while taken < 1_000 {
        let served = senders.serve(&mut Wire, now_us, &mut |_, _| {});
        taken += served.frames;
        if served.frames == 0 {
            // It rests, and nothing but the time ends that.
            assert_eq!(senders.arm(), (false, None));
            let due_us = senders.due_us().unwrap();
            assert!(due_us > now_us);
            (now_us, idle) = (due_us, idle + 1);
        }
    }
    // 100,000 bytes, of which 64 KiB at once.
    assert!((33_000..39_000).contains(&now_us), "{now_us}");
    assert!(idle <= 10, "{idle} times looked in vain");
    // A port that closes does not wait for its rate.
    write(&mut rings[0].1, 1_000, 100);
    while senders.serve(&mut Wire, now_us, &mut |_, _| {}).frames > 0 {}
    assert!(senders.is_done(1, u64::MAX));
}

#[test]
fn long_frames_end_a_turn_sooner() {
    let mut rings = [sender_of(1, 1 << 20, 9000)];
    let mut senders = attached(&mut rings);
    write(&mut rings[0].1, 100, 9000);
    let turn = || {
        senders
            .serve(&mut Link::default(), 0, &mut |_, _| {})
            .frames
    };
    let turns: Vec<usize> = std::iter::repeat_with(turn).take(5).collect();
    assert_eq!(turns, [30, 30, 30, 10, 0]);
}
