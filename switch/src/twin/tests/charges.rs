//! What both instances charge and count when they have frames of one port at once.

use super::*;

#[test]
fn both_instances_take_from_one_bucket_what_a_port_may_send() {
    let Some(mut both) = Both::new() else {
        return;
    };
    let now = now_s();
    for (station, port) in [(1, 1), (2, 2)] {
        both.table.learn(key(station), port, now);
    }
    let port = both.layout.port(1);
    // So slow that nothing is added meanwhile; a hundred frames of 64 bytes at once.
    let ns_per_kib = 1_000_000_000 * 16;
    both.state.write(port + part::RATE, ns_per_kib);
    both.state
        .write(port + part::BURST, ns_per_kib / 16 * 99 + 1);
    let (mut sent, mut dropped) = ([0, 0], [0, 0]);
    for round in 0..400 {
        let at = round % 2;
        let may = match at {
            0 => both.classifier.test(&frame(1, 2)).unwrap() == REDIRECT,
            _ => both.judge.ask(1, (&frame(1, 2), 64)) == Verdict::Forward(2),
        };
        match may {
            true => sent[at] += 1,
            false => dropped[at] += 1,
        }
    }
    assert_eq!((sent, dropped), ([50, 50], [150, 150]));
    let counted = both.state.read(port + part::POLICED_FRAMES);
    // The daemon counts its own.
    assert_eq!(counted, 150);
    // The control: without a rate all go.
    both.state.write(port + part::RATE, 0);
    assert_eq!(both.judge(1, 2), Some(2));
    assert_eq!(both.run(1, 2), Some(2));
}

/// Runs this on two threads at once; what both say.
fn two_at_once<T: Send>(run: impl Fn() -> T + Sync) -> [T; 2] {
    let start = std::sync::Barrier::new(2);
    let begin = || {
        start.wait();
        run()
    };
    std::thread::scope(|threads| {
        let both = [threads.spawn(begin), threads.spawn(begin)];
        both.map(|it| it.join().expect("it runs"))
    })
}

#[test]
fn two_processors_at_once_count_and_charge_every_frame() {
    const RUNS: u64 = 2_000;
    const TIMES: u32 = 250;
    const FRAMES: u64 = 2 * RUNS * TIMES as u64;
    let Some(mut both) = Both::new() else {
        return;
    };
    // Both hear a station that was not heard for long.
    let now = now_s();
    for (station, port) in [(1, 1), (2, 2)] {
        both.table.learn(key(station), port, now - 200);
    }
    // A nanosecond for a byte, and room for all: the bucket is never empty, nor full.
    let port = both.layout.port(1);
    let begin = u64::from(now) * 1_000_000_000 + (1 << 60);
    both.state.write(port + part::SENT, begin);
    both.state.write(port + part::RATE, 1024);
    both.state.write(port + part::BURST, 1 << 62);
    let program = &both.classifier;
    two_at_once(|| {
        for _ in 0..RUNS {
            let (verdict, _) = program
                .test_repeatedly(&frame(1, 2), TIMES)
                .expect("it runs");
            assert_eq!(verdict, REDIRECT);
        }
    });
    let of_port = |what| both.state.read(port + what);
    assert_eq!(
        of_port(part::SENT) - begin,
        FRAMES * 64,
        "not all are charged"
    );
    assert_eq!(both.out(2), FRAMES);
    let counted = [part::IN_FRAMES, part::IN_BYTES, part::POLICED_FRAMES].map(of_port);
    assert_eq!(counted, [FRAMES, FRAMES * 64, 0]);
    assert_eq!(both.state.read(header::LOST), 0);
    let heard = both.table.entries(now).find(|it| it.key == key(1));
    assert!(heard.is_some_and(|it| it.age_s <= 1));
}

#[test]
fn two_processors_at_once_send_one_frame_more_than_the_burst_at_most() {
    const BURST: u64 = 50_000;
    const EACH: u64 = 40_000;
    let Some(mut both) = Both::new() else {
        return;
    };
    let now = now_s();
    for (station, port) in [(1, 1), (2, 2)] {
        both.table.learn(key(station), port, now);
    }
    // So slow that nothing is added meanwhile: a frame takes 100 s.
    const COST_NS: u64 = 100_000_000_000;
    let port = both.layout.port(1);
    both.state.write(port + part::RATE, COST_NS * 16);
    let burst = COST_NS * (BURST - 1) + 1;
    both.state.write(port + part::BURST, burst);
    let program = &both.classifier;
    let sent = two_at_once(|| {
        let may = || program.test(&frame(1, 2)).expect("it runs") == REDIRECT;
        (0..EACH).filter(|_| may()).count() as u64
    });
    let all = sent.iter().sum::<u64>();
    assert!((BURST..=BURST + 1).contains(&all), "{sent:?}");
    assert!(sent.iter().all(|it| *it > 0), "{sent:?}");
    assert_eq!(both.out(2), all);
    let policed = both.state.read(port + part::POLICED_FRAMES);
    assert_eq!(policed, 2 * EACH - all);
}
