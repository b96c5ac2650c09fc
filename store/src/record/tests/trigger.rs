//! Triggers: what was before and after, exactly; what memory could not hold; who asked.

use vnplug_testing::until;

use super::*;
use crate::record::{Triggers, now_ns};

/// A recorder with triggers, of packets a microsecond apart.
struct Triggered {
    recorder: Recorder,
    sims: Vec<Sim>,
    base_ns: u64,
}

impl Triggered {
    fn new(format: Format, disks: usize, triggers: Triggers) -> Self {
        Self::with(settings(format), disks, triggers)
    }

    fn with(mut settings: Settings, disks: usize, triggers: Triggers) -> Self {
        settings.chunk_bytes = 512 << 10;
        settings.buffers = 6 + triggers.buffers;
        settings.trigger = Some(triggers);
        let sims: Vec<Sim> = (0..disks).map(|_| Sim::new(1 << 30)).collect();
        let lanes = sims.iter().enumerate().map(|(lane, sim)| {
            let disk: Box<dyn Disk> = Box::new(sim.clone());
            (PathBuf::from(format!("{DIR}{lane}")), disk)
        });
        let buffers = (0..settings.buffers).map(|id| Buffer::new(settings.chunk_bytes, id));
        let buffers = buffers.collect();
        Self {
            recorder: Recorder::start(settings, lanes.collect(), buffers).unwrap(),
            sims,
            base_ns: now_ns(),
        }
    }

    fn take(&mut self, numbers: std::ops::Range<u64>) {
        for number in numbers {
            self.take_at(number, number, 0);
            if number % 100 == 0 {
                self.recorder.flush_due(Instant::now());
            }
        }
    }

    /// A packet that was stamped this many microseconds after the first, after a loss.
    fn take_at(&mut self, number: u64, us: u64, lost: u32) {
        let bytes = bytes(number);
        let mut meta = meta(number, bytes.len());
        (meta.ts_ns, meta.lost) = (self.base_ns + us * 1000, lost);
        let packet = Packet {
            meta,
            bytes: &bytes,
        };
        assert!(self.recorder.take(0, &packet, &mut || false));
    }

    /// The numbers of what is in the files, sorted, and the books.
    fn finish(self) -> (Vec<u64>, super::super::Status) {
        let status = self.recorder.finish();
        let passed_over = status.trigger.as_ref().unwrap().passed_over;
        assert_eq!(
            (status.buffered, status.unexplained()),
            (0, 0),
            "{status:?}"
        );
        let settled = status.durable + passed_over + status.lost_disk + status.lost_unknown;
        assert_eq!(status.taken, settled, "{status:?}");
        assert_eq!(status.settled, status.taken);
        let mut numbers = Vec::new();
        for sim in &self.sims {
            for (path, content) in sim.files() {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if SegmentName::parse(&name).is_some() {
                    let stream = Box::new(Cursor::new(content));
                    let mut reader = Reader::stream(stream, path);
                    while let Some(packet) = reader.read().unwrap() {
                        let number = u64::from_le_bytes(*packet.bytes.first_chunk().unwrap());
                        assert_eq!(packet.bytes, bytes(number));
                        numbers.push(number);
                    }
                }
            }
        }
        numbers.sort_unstable();
        assert_eq!(numbers.len() as u64, status.durable);
        (numbers, status)
    }

    fn notes(&self) -> Vec<String> {
        let images = self.sims.iter().map(Sim::files);
        let segments = images.flatten().filter(|(path, _)| {
            let name = path.file_name().unwrap().to_string_lossy();
            SegmentName::parse(&name).is_some()
        });
        let head = |content: Vec<u8>| {
            String::from_utf8_lossy(&content[..content.len().min(4096)]).into_owned()
        };
        segments.map(|(_, content)| head(content)).collect()
    }
}

fn triggers(number: u64, before: u64, after: u64, buffers: u16) -> Triggers {
    let [low, high, ..] = number.to_le_bytes();
    Triggers {
        filters: vec![
            "ether[0:2] = 0xffff".into(),
            format!("ether[0:2] = {low:#04x}{high:02x}"),
        ],
        before: Duration::from_micros(before),
        after: Duration::from_micros(after),
        buffers,
    }
}

#[test]
fn what_is_around_a_match_is_recorded_exactly() {
    for format in [Format::Pcapng, Format::Pcap] {
        for disks in [1, 2] {
            // 4500 packets are several chunks.
            let mut it = Triggered::new(format, disks, triggers(9000, 4500, 3000, 16));
            it.take(0..20_000);
            let (numbers, status) = it.finish();
            let expected: Vec<u64> = (4500..=12_000).collect();
            assert_eq!(numbers, expected, "{format:?} {disks} {status:?}");
            let trigger = status.trigger.unwrap();
            assert_eq!((trigger.events, trigger.triggers), (1, 1));
            assert_eq!((trigger.early, trigger.writing), (0, false));
            assert!(trigger.last_event.contains("0x2823' matched at "));
            assert!(trigger.last_event.contains("4500 packets before it"));
        }
    }
}

#[test]
fn an_event_is_extended_and_the_next_has_a_file_of_its_own() {
    // Numbers repeat in their lower two bytes: none here. Two filters, two matches within an event.
    let mut wanted = triggers(1000, 100, 500, 4);
    wanted.filters.push("ether[0:2] = 0x4c04".into()); // 1100
    wanted.filters.push("ether[0:2] = 0x8813".into()); // 5000
    let mut it = Triggered::new(Format::Pcapng, 1, wanted);
    it.take(0..8000);
    it.recorder.let_go();
    let notes = until("two events are noted", || it.notes(), |it| it.len() >= 2);
    let (numbers, status) = it.finish();
    let expected: Vec<u64> = (900..=1600).chain(4900..=5500).collect();
    assert_eq!(numbers, expected);
    let trigger = status.trigger.unwrap();
    assert_eq!((trigger.events, trigger.triggers), (2, 3));
    assert_eq!(notes.len(), 2);
    assert!(notes[0].contains("0xe803' matched at "), "{}", notes[0]);
    assert!(notes[1].contains("0x8813' matched at "), "{}", notes[1]);
    assert!(notes[1].contains("0.000 s back of 0.000 s"), "{}", notes[1]);
}

#[test]
fn short_memory_costs_the_oldest_and_says_so() {
    let mut it = Triggered::new(Format::Pcapng, 1, triggers(9000, 1_000_000, 100, 3));
    it.take(0..10_000);
    let (numbers, status) = it.finish();
    let first = numbers[0];
    assert!((6000..9000).contains(&first), "{first}");
    assert_eq!(numbers, (first..=9100).collect::<Vec<u64>>());
    let trigger = status.trigger.unwrap();
    assert_eq!(trigger.early, first, "{trigger:?}");
    assert!(trigger.last_event.contains("memory held no more"));
}

#[test]
fn a_command_triggers_and_without_one_nothing_is_written() {
    let quiet = || Triggers {
        filters: Vec::new(),
        before: Duration::from_secs(100_000),
        after: Duration::from_secs(100_000),
        buffers: 4,
    };
    let mut it = Triggered::new(Format::Pcapng, 1, quiet());
    it.take(0..1000);
    it.recorder.flush_due(Instant::now());
    // The books know of packets whose chunk is not full.
    assert_eq!(it.recorder.ledger().status().taken, 1000);
    let sims = it.sims.clone();
    let (numbers, status) = it.finish();
    assert!(numbers.is_empty());
    assert_eq!(status.trigger.unwrap().passed_over, 1000);
    assert!(
        !sims[0]
            .files()
            .keys()
            .any(|path| path.extension().is_some_and(|e| e == "pcapng"))
    );

    let mut it = Triggered::new(Format::Pcapng, 1, quiet());
    it.take(0..1000);
    it.recorder.remote().trigger("somebody asked");
    it.take(1000..2000);
    let (numbers, status) = it.finish();
    assert_eq!(numbers, (0..2000).collect::<Vec<u64>>());
    let said = status.trigger.unwrap().last_event;
    assert!(said.starts_with("somebody asked at "), "{said}");
}

#[test]
fn the_account_closes_on_a_disk_that_takes_nothing() {
    let mut it = Triggered::new(Format::Pcapng, 1, triggers(3000, 500, 2000, 4));
    it.sims[0].fail(Some(Fault {
        at: it.sims[0].calls(),
        calls: u64::MAX,
        errno: ENOSPC,
        short: 0,
    }));
    it.take(0..8000);
    let (numbers, status) = it.finish();
    assert!(numbers.is_empty());
    assert_eq!(status.lost_disk + status.lost_unknown, 2501, "{status:?}");
}

#[test]
fn a_ring_that_is_ahead_takes_nothing_from_an_event() {
    const S: u64 = 1_000_000;
    let mut it = Triggered::new(Format::Pcapng, 1, triggers(1005, 3 * S, 2 * S, 16));
    it.recorder.rings_were_read();
    // The one ring is at 30 s when the other has its trigger of 5 s to tell.
    for tenth in 0..300 {
        it.take_at(tenth, tenth * S / 10, 0);
        if tenth % 30 == 0 {
            it.recorder.flush();
            it.recorder.flush_due(Instant::now());
        }
    }
    it.take_at(1005, 5 * S, 0);
    it.take_at(300, 30 * S, 0);
    (1..=20).for_each(|tenth| it.take_at(1005 + tenth, (50 + tenth) * S / 10, 0));
    it.recorder.rings_were_read();
    it.take_at(301, 30 * S + 1, 0);
    it.recorder.rings_were_read();
    assert!(it.recorder.waits(), "all rings have passed the end");
    it.take_at(302, 30 * S + 2, 0);
    let (numbers, status) = it.finish();
    let expected: Vec<u64> = (20..=301).chain(1005..=1025).collect();
    assert_eq!(numbers, expected, "{status:?}");
    assert_eq!(status.trigger.unwrap().early, 0);
}

#[test]
fn a_trigger_behind_the_end_of_an_event_begins_another() {
    const HOUR: u64 = 3_600_000_000;
    for several in [false, true] {
        let mut it = Triggered::new(Format::Pcapng, 1, triggers(1005, 100, 1000, 8));
        if several {
            it.recorder.rings_were_read();
        }
        it.take_at(1005, HOUR, 0);
        // The clock is set back, and the first packet after that is a trigger.
        (1005..1305).for_each(|number| it.take_at(number, number, 0));
        if several {
            it.recorder.rings_were_read();
            it.recorder.rings_were_read();
        }
        (1305..1400).for_each(|number| it.take_at(number, number, 0));
        let (numbers, status) = it.finish();
        let expected: Vec<u64> = [1005].into_iter().chain(1005..1400).collect();
        assert_eq!(numbers, expected, "{status:?}");
        let events = status.trigger.unwrap().events;
        assert_eq!(events, if several { 1 } else { 2 });
    }
}

/// In a guest the clock may be another than the host's.
#[test]
fn a_command_is_of_the_packets_time_where_the_clock_is_another() {
    let wanted = Triggers {
        before: Duration::from_secs(10),
        after: Duration::from_secs(10),
        buffers: 4,
        ..Triggers::default()
    };
    for late in [-3_600_000_000_000, 3_600_000_000_000] {
        let mut it = Triggered::new(Format::Pcapng, 1, wanted.clone());
        it.base_ns = it.base_ns.saturating_add_signed(late);
        it.take(0..1000);
        it.recorder.remote().trigger("somebody asked");
        it.recorder.flush_due(Instant::now());
        it.recorder.idle();
        it.take(1000..2000);
        let (numbers, status) = it.finish();
        assert_eq!(numbers, (0..2000).collect::<Vec<u64>>(), "{status:?}");
        assert_eq!(status.trigger.unwrap().events, 1);
    }
}

#[test]
fn a_loss_in_a_time_that_nobody_asked_for_is_told() {
    // In a chunk that goes as a whole, in one that is cut, in one that is recorded, and at the end.
    let mut it = Triggered::new(Format::Pcapng, 1, triggers(9000, 10, 10, 16));
    for number in 0..12_000 {
        let lost = match number {
            100 => 3,
            8980 => 5,
            8995 => 7,
            11_000 => 11,
            _ => 0,
        };
        it.take_at(number, number, lost);
    }
    let sim = it.sims[0].clone();
    let (numbers, status) = it.finish();
    assert_eq!(numbers, (8990..=9010).collect::<Vec<u64>>());
    assert_eq!(status.lost_ring, 26);
    assert_eq!(losses::told(&sim), 26, "{status:?}");
}

/// The first of two is passed over, the second one is in the event.
#[test]
fn a_duplicate_of_what_was_passed_over_is_not_missing() {
    let settings = Settings {
        dedup: Some(Duration::from_micros(500)),
        ..settings(Format::Pcapng)
    };
    let mut it = Triggered::with(settings, 1, triggers(9000, 1000, 10, 16));
    (0..7900).for_each(|number| it.take_at(number, number, 0));
    it.take_at(7990, 7990, 0);
    it.take_at(7990, 8010, 0);
    (8011..9100).for_each(|number| it.take_at(number, number, 0));
    let (numbers, status) = it.finish();
    let expected: Vec<u64> = (7500..7900).chain([7990]).chain(8011..=9010).collect();
    assert_eq!(numbers, expected, "{status:?}");
}

#[test]
fn a_filter_that_is_none_is_refused() {
    let mut settings = settings(Format::Pcapng);
    settings.trigger = Some(Triggers {
        filters: vec!["no such filter".into()],
        buffers: 2,
        ..Triggers::default()
    });
    let disk: Box<dyn Disk> = Box::new(Sim::new(1 << 20));
    let refused = Recorder::start(settings, vec![(DIR.into(), disk)], Vec::new()).unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("trigger 'no such filter'"), "{said}");
}
