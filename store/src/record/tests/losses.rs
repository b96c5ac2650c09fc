//! What is missing is told in the files.

use super::*;

/// The text of all segments, in their order.
pub(super) fn text(sim: &Sim) -> String {
    let files = sim.files();
    let segments = files
        .iter()
        .filter(|(path, _)| path.extension().unwrap() == "pcapng");
    segments
        .map(|(_, content)| String::from_utf8_lossy(content).into_owned())
        .collect()
}

/// How many lost packets all segments tell of: where it happened, and between two moments.
pub(super) fn told(sim: &Sim) -> u64 {
    let mut packets = 0;
    for content in sim
        .files()
        .into_iter()
        .filter(|(path, _)| path.extension().unwrap() == "pcapng")
    {
        let text = String::from_utf8_lossy(&content.1).into_owned();
        for words in [" packets are missing here", " packets between "] {
            for (at, _) in text.match_indices(words) {
                let digits = text[..at].rsplit(|c: char| !c.is_ascii_digit()).next();
                packets += digits.unwrap().parse::<u64>().unwrap();
            }
        }
    }
    packets
}

fn take_after_loss(recorder: &mut Recorder, number: u64, lost: u32) {
    take_after(recorder, number, lost, 0);
}

fn take_after(recorder: &mut Recorder, number: u64, lost: u32, flags: u16) {
    let bytes = bytes(number);
    let mut meta = meta(number, bytes.len());
    (meta.lost, meta.flags) = (lost, flags);
    let packet = Packet {
        meta,
        bytes: &bytes,
    };
    assert!(recorder.take(0, &packet, &mut || false));
}

#[test]
fn a_loss_in_the_ring_is_told_where_it_happened() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcapng);
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 0..10);
    take_after_loss(&mut recorder, 500, 7);
    take(&mut recorder, 501..510);
    let status = recorder.finish();
    assert_eq!(status.lost_ring, 7);
    let files = sim.files();
    assert_eq!(packets(&files).len(), 20);
    let (_, segment) = files
        .iter()
        .find(|(path, _)| path.extension().unwrap() == "pcapng")
        .unwrap();
    let words = b"7 packets are missing here: the ring was full";
    let at = segment.windows(words.len()).position(|part| part == words);
    let at = at.expect("a comment");
    let behind = &segment[at..];
    // The block's range: from the packet before to the one after it (isb_starttime, isb_endtime).
    let stamp = |number: u64| {
        let ns = START_NS + number * 1000;
        [((ns >> 32) as u32).to_le_bytes(), (ns as u32).to_le_bytes()].concat()
    };
    let option = |code: u8, number| [&[code, 0, 8, 0][..], &stamp(number)].concat();
    let block = &behind[..200];
    for option in [option(2, 9), option(3, 500)] {
        assert!(block.windows(option.len()).any(|part| part == option));
    }
}

#[test]
fn a_restart_of_the_daemon_is_in_the_books() {
    for dedup in [None, Some(Duration::from_secs(1))] {
        let sim = Sim::new(1 << 30);
        let settings = Settings {
            dedup,
            ..settings(Format::Pcapng)
        };
        let mut first = recorder(&settings, alone(&sim));
        take(&mut first, 0..10);
        // A duplicate, if those are left out.
        take_after(&mut first, 9, 0, vnplug::flags::GAP);
        take_after(&mut first, 500, 2, vnplug::flags::GAP);
        let status = first.finish();
        assert_eq!((status.gaps, status.lost()), (2, 2));
        let gap = status.losses.iter().find(|loss| loss.kind == "gap");
        let gap = gap.unwrap();
        let stamp = |number: u64| START_NS + number * 1000;
        assert_eq!((gap.from_ns, gap.to_ns), (stamp(9), stamp(500)));
        assert_eq!(gap.reason, "the daemon was started again");
        let told = sim.files()[&Path::new("/disk0").join("t.state")].clone();
        let told: serde_json::Value = serde_json::from_slice(&told).unwrap();
        assert_eq!(told["gaps"], 2);
        let losses = told["losses"].as_array().unwrap();
        let gap = losses.iter().find(|loss| loss["kind"] == "gap").unwrap();
        assert!(gap["packets"].is_null(), "{gap}");
        // The next run has them, too.
        let next = recorder(&settings, sims(&[sim])).finish();
        assert_eq!((next.gaps, next.earlier.gaps), (0, 2));
        assert_eq!(next.losses, status.losses);
    }
}

#[test]
fn a_loss_at_the_end_is_told_in_the_last_segment() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcapng);
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 0..10);
    recorder
        .ledger()
        .lost_in_ring(START_NS, START_NS + 5, 9, "the recorder ended", false);
    recorder.finish();
    let text = text(&sim);
    assert!(text.contains("9 packets between 20261121T134501.000000000Z and"));
    assert!(text.contains("are missing: the recorder ended"));
    let files = sim.files();
    let segments = files
        .keys()
        .filter(|path| path.extension().unwrap() == "pcapng");
    assert_eq!(segments.count(), 1);
    assert_eq!(packets(&sim.files()).len(), 10);
}

#[test]
fn what_the_last_segment_lost_is_told_in_one_more() {
    let sim = Sim::new(1 << 30);
    let never = Settings {
        sync_every: Duration::from_secs(3600),
        ..settings(Format::Pcapng)
    };
    let mut bench = Bench::new(&sim, never);
    bench.chunk(true);
    bench.work(0);
    sim.fail_syncs(Some(EIO));
    bench.writer.end(Instant::now());
    assert_eq!(bench.ledger.status().lost_unknown, PER_CHUNK);
    assert!(!text(&sim).contains("may be missing"));
    // Not as long as nothing can be written for certain.
    assert!(!bench.writer.tell_losses());
    sim.fail_syncs(None);
    assert!(bench.writer.tell_losses());
    assert!(text(&sim).contains("may be missing in t-0000000000"));
    assert_no_duplicates(&packets(&sim.files()));
}

#[test]
fn classic_pcap_has_no_words_for_losses_and_needs_none() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcap);
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 0..10);
    take_after_loss(&mut recorder, 500, 7);
    let status = recorder.finish();
    assert_eq!((status.durable, status.lost_ring), (11, 7));
    assert_eq!(packets(&sim.files()).len(), 11);
}

/// The packet that would have told a loss is a duplicate, and none comes after it.
#[test]
fn a_loss_before_a_duplicate_is_told_also_at_the_end() {
    let sim = Sim::new(1 << 30);
    let settings = Settings {
        dedup: Some(Duration::from_secs(1)),
        ..settings(Format::Pcapng)
    };
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 0..10);
    take_after_loss(&mut recorder, 5, 7);
    take_after_loss(&mut recorder, 10, 1);
    take_after_loss(&mut recorder, 6, 4);
    let status = recorder.finish();
    assert_eq!((status.taken, status.lost_ring), (11, 12));
    assert_eq!(told(&sim), 12);
}

#[test]
fn a_loss_told_in_a_segment_that_goes_is_told_in_the_next() {
    let record = |fault| {
        let sim = Sim::new(1 << 30);
        sim.fail(fault);
        let mut bench = Bench::new(&sim, settings(Format::Pcapng));
        let ledger = Arc::clone(&bench.ledger);
        ledger.lost_in_ring(START_NS, START_NS + 5, 9, "early", false);
        bench.chunk(true);
        (0..5).for_each(|later| bench.work(10 * later));
        bench.writer.end(Instant::now() + Duration::from_secs(60));
        assert!(text(&sim).contains("9 packets between"), "{fault:?}");
        sim.calls()
    };
    for at in 0..record(None) {
        record(Some(Fault {
            at,
            calls: 1,
            errno: EIO,
            short: 0,
        }));
    }
}
