//! The books by themselves.

use super::*;

const DIR: &str = "/rec";

fn ledger() -> Ledger {
    Ledger::new("t", &[DIR.to_owned(), "/other".to_owned()])
}

/// Packets with these stamps.
fn tally(stamps: &[u64]) -> Tally {
    let mut tally = Tally::default();
    for &ns in stamps {
        tally.add(0, ns, 60, 0);
    }
    tally
}

fn fill(ledger: &Ledger, serial: u64, stamps: &[u64]) {
    ledger.filling(*stamps.iter().min().unwrap());
    ledger.taken(serial, &tally(stamps));
}

#[test]
fn nothing_with_an_earlier_stamp_than_the_marks_waits_for_the_disk() {
    let ledger = ledger();
    let time = || ledger.status().mark_ns;
    assert_eq!(time(), 0);
    fill(&ledger, 0, &[100, 120]);
    assert_eq!(time(), 100);
    fill(&ledger, 1, &[110, 130]);
    ledger.filling(115);
    // A later chunk on a faster disk: the number waits, and so does the time.
    ledger.durable(1, 4096, &[(1, tally(&[110, 130]))]);
    assert_eq!((ledger.status().mark, time()), (0, 100));
    ledger.durable(0, 4096, &[(0, tally(&[100, 120]))]);
    // All that was given to the disk is there; what is being filled is not.
    assert_eq!((ledger.status().mark, time()), (4, 115));
    ledger.taken(2, &tally(&[115]));
    ledger.durable(0, 8192, &[(2, tally(&[115]))]);
    assert_eq!((ledger.status().mark, time()), (5, 131));
    assert_eq!(ledger.status().late_ns, 0);
}

#[test]
fn a_late_stamp_takes_the_marks_time_back_and_is_counted() {
    let ledger = ledger();
    fill(&ledger, 0, &[100, 200]);
    ledger.durable(0, 4096, &[(0, tally(&[100, 200]))]);
    assert_eq!(ledger.status().mark_ns, 201);
    ledger.filling(250);
    ledger.filling(180);
    let status = ledger.status();
    assert_eq!((status.mark_ns, status.late_ns), (180, 70));
    ledger.taken(1, &tally(&[250, 180]));
    ledger.durable(0, 8192, &[(1, tally(&[250, 180]))]);
    let status = ledger.status();
    assert_eq!((status.mark, status.mark_ns, status.late_ns), (4, 251, 70));
}

#[test]
fn what_a_writer_leaves_behind_is_counted() {
    let ledger = ledger();
    for serial in 0..3 {
        fill(&ledger, serial, &[serial]);
    }
    let under_way = |ledger: &Ledger| {
        let status = ledger.status();
        (status.buffered, status.unexplained())
    };
    assert_eq!(under_way(&ledger), (3, 0));
    ledger.durable(0, 4096, &[(1, tally(&[1]))]);
    assert_eq!(under_way(&ledger), (2, 0));
    // Counted twice is not the same as counted.
    ledger.durable(0, 4096, &[(1, tally(&[1]))]);
    assert_eq!(under_way(&ledger), (2, -1));
    ledger.books().status.durable -= 1;
    ledger.give_up("gone");
    let status = ledger.status();
    assert_eq!((status.durable, status.lost_unknown), (1, 2));
    assert_eq!((status.buffered, status.settled), (0, 3));
}

#[test]
fn a_lost_chunk_takes_what_it_told_with_it() {
    let ledger = ledger();
    let mut told = tally(&[5]);
    told.add(0, 9, 60, 7);
    ledger.taken(0, &told);
    ledger.lost_in_ring(5, 9, 7, crate::record::RING_FULL, true);
    assert_eq!(ledger.take_untold(), []);
    ledger.lost(0, &told, None, "the disk is gone");
    let untold = ledger.take_untold();
    let packets: Vec<(&str, u64)> = untold
        .iter()
        .map(|loss| (loss.kind.as_str(), loss.packets))
        .collect();
    assert_eq!(packets, [("ring", 7), ("disk", 2)]);
    // It is counted once.
    assert_eq!(ledger.status().lost_ring, 7);
    ledger.untell(untold);
    assert_eq!(ledger.take_untold().len(), 2);
}

#[test]
fn the_state_file_is_read_as_it_was_written() {
    let ledger = ledger();
    ledger.go_on(None, 7, 1_795_268_701_000_000_000);
    assert_eq!(ledger.sequence(), Some(7));
    fill(&ledger, 0, &[1000, 2000]);
    fill(&ledger, 1, &[3000]);
    ledger.durable(1, 4096, &[(0, tally(&[1000, 2000]))]);
    ledger.lost(
        1,
        &tally(&[3000]),
        Some("t-0000000007"),
        "fdatasync: broken",
    );
    ledger.lost_at_source(1000, 3000, 4);
    ledger.lane(0, |lane| "No space left".clone_into(&mut lane.paused));
    let status = ledger.status();
    let text = status.to_json(5);
    assert_eq!(Status::from_json(text.as_bytes()), Some(status));
    for text in ["", "{}", "[]", "{\"version\": 2, \"recording\": \"t\"}"] {
        assert_eq!(Status::from_json(text.as_bytes()), None, "{text}");
    }
    for cut in 0..text.len() - 2 {
        assert_eq!(Status::from_json(&text.as_bytes()[..cut]), None);
    }
}

#[test]
fn the_books_of_earlier_runs_are_kept() {
    let first = ledger();
    first.go_on(None, 0, 10);
    fill(&first, 0, &[1000, 2000]);
    fill(&first, 1, &[3000]);
    first.durable(0, 4096, &[(0, tally(&[1000, 2000]))]);
    first.lost_in_ring(1000, 2000, 5, "the ring was full", false);
    assert_eq!(first.sequence(), Some(0));
    // It is killed.
    let second = ledger();
    second.go_on(Some(&first.status()), 0, 20);
    let status = second.status();
    assert_eq!((status.run.number, status.run.first_sequence), (2, 1));
    assert_eq!((status.taken, status.lost_ring), (0, 0));
    assert_eq!((status.earlier.taken, status.earlier.durable), (3, 2));
    assert_eq!((status.earlier.open, status.earlier.cut), (1, 1));
    assert_eq!(status.losses[0].run, 1);
    second.lost_in_ring(1000, 2000, 5, "the ring was full", false);
    second.end();
    let third = ledger();
    third.go_on(Some(&second.status()), 9, 30);
    let status = third.status();
    assert_eq!((status.run.number, status.run.first_sequence), (3, 9));
    assert_eq!((status.earlier.runs, status.earlier.cut), (2, 1));
    assert_eq!(status.earlier.lost_ring, 10);
    let runs: Vec<u64> = status.losses.iter().map(|loss| loss.run).collect();
    assert_eq!(runs, [1, 2]);
}

#[test]
fn a_number_has_ten_digits_at_most() {
    let ledger = ledger();
    ledger.go_on(None, LAST_SEQUENCE, 0);
    assert_eq!(ledger.sequence(), Some(9_999_999_999));
    assert_eq!(ledger.sequence(), None);
    assert_eq!(ledger.sequence(), None);
}

#[test]
fn a_chunk_that_is_stuck_costs_nothing_behind_it() {
    let ledger = ledger();
    let one = |serial: u64| tally(&[serial * 10, serial * 10 + 1]);
    for serial in 0..1000 {
        fill(&ledger, serial, &[serial * 10, serial * 10 + 1]);
        // Two of them stay; the others are settled in an order of their own.
        let settled = serial ^ 1;
        let early = serial % 2 == 1 && ![0, 500].contains(&settled);
        for serial in [Some(serial), early.then_some(settled)]
            .into_iter()
            .flatten()
        {
            if serial % 2 == 1 || early {
                ledger.durable(1, 4096, &[(serial, one(serial))]);
            }
        }
    }
    assert!(
        ledger.lock().open.len() <= 4,
        "{}",
        ledger.lock().open.len()
    );
    let status = ledger.status();
    assert_eq!((status.mark, status.mark_ns, status.durable), (0, 0, 1996));
    ledger.durable(0, 4096, &[(0, one(0))]);
    assert_eq!(
        (ledger.status().mark, ledger.status().mark_ns),
        (1000, 5000)
    );
    ledger.lost(500, &one(500), None, "refused");
    let status = ledger.status();
    assert_eq!(
        (status.settled, status.settled_ns, status.buffered),
        (2000, 9992, 0)
    );
    assert_eq!((status.mark, status.mark_ns), (1000, 5000));
    assert!(ledger.lock().open.is_empty() && ledger.lock().waits.is_empty());
}

#[test]
fn the_durable_mark_stops_at_the_first_packet_that_the_disk_did_not_take() {
    let ledger = ledger();
    for serial in 0..4 {
        fill(&ledger, serial, &[serial * 10, serial * 10 + 1]);
    }
    let one = |serial: u64| tally(&[serial * 10, serial * 10 + 1]);
    ledger.durable(0, 4096, &[(0, one(0))]);
    // Lost on the way to the recorder: never taken.
    ledger.lost_in_ring(1, 2, 100, "the ring was full", true);
    ledger.durable(0, 8192, &[(3, one(3))]);
    ledger.lost(2, &one(2), Some("r"), "fdatasync");
    let status = ledger.status();
    assert_eq!((status.mark, status.mark_ns), (2, 10));
    ledger.durable(0, 8192, &[(1, one(1))]);
    let status = ledger.status();
    assert_eq!((status.mark, status.mark_ns, status.durable), (4, 20, 6));
    assert_eq!((status.settled, status.settled_ns), (8, 32));
    fill(&ledger, 4, &[40, 41]);
    ledger.durable(0, 8192, &[(4, one(4))]);
    assert_eq!(ledger.status().mark, 4);
    assert_eq!(ledger.status().settled, 10);
}

#[test]
fn what_was_passed_over_is_in_the_books_of_the_next_run() {
    let before = ledger();
    fill(&before, 0, &[100, 120, 140]);
    before.passed_over(0, 2, false);
    before.durable(0, 4096, &[(0, tally(&[140]))]);
    let last = Status::from_json(before.status().to_json(7).as_bytes()).unwrap();
    let ledger = ledger();
    ledger.go_on(Some(&last), 0, 7);
    let earlier = Status::from_json(ledger.status().to_json(8).as_bytes())
        .unwrap()
        .earlier;
    let settled = earlier.durable + earlier.passed_over + earlier.open;
    assert_eq!((earlier.taken, settled, earlier.passed_over), (3, 3, 2));
}
