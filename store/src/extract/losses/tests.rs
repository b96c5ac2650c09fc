use std::fs::File;

use vnplug::{Meta, flags};
use vnplug_frame::capfile::write::Interface as Device;

use super::*;
use crate::disk::{Buffer, Real};
use crate::extract::{Extract, Format, Output, Query};
use crate::filter::Filter;
use crate::index::{Sidecar, rebuild};
use crate::read::{Interface, Reader};
use crate::record::{Recorder, Settings};
use vnplug_testing::TestDir;

use crate::testing::Traffic;

/// What an extract writes, and what it says of losses.
fn extract(place: &TestDir, range: (u64, u64), filter: &str) -> (PathBuf, Losses) {
    let query = Query {
        from_ns: range.0,
        to_ns: range.1,
        filter: Filter::new(filter).unwrap(),
    };
    let dirs = [place.0.join("rec")];
    let mut search = Extract::open(&dirs, query).unwrap();
    let path = place.0.join("found.pcapng");
    let mut output = Output::new(File::create(&path).unwrap(), Format::Pcapng);
    while let Some(packet) = search.read().unwrap() {
        output.write(&packet).unwrap();
    }
    assert!(search.problems().is_empty());
    output.tell(search.losses()).unwrap();
    output.finish().unwrap();
    (path, search.losses().clone())
}

/// All that a file says is missing: the sum of what packets tell, gaps, and the statistics.
fn told(path: &Path) -> (u64, usize, Vec<Note>) {
    let mut reader = Reader::open(path).unwrap();
    let (mut notes, mut lost, mut gaps) = (reader.notes(), 0, 0);
    while let Some(packet) = reader.read().unwrap() {
        lost += packet.lost;
        gaps += packet
            .comment
            .lines()
            .filter(|it| *it == GAP_COMMENT)
            .count();
    }
    notes.extend(reader.notes());
    (lost, gaps, notes)
}

/// A recorder writes 4000 packets, one each millisecond, half of them to port 53. Some were lost before the
/// packets 1000 (to port 53) and 2001 (to port 9); at 3001 is a gap, and the disk did not take some behind.
fn record(place: &TestDir, keep_state: bool) {
    let dir = place.0.join("rec");
    std::fs::create_dir(&dir).unwrap();
    let device = Device {
        name: "lab".into(),
        link_type: 1,
        snaplen: 0,
        filter: String::new(),
    };
    let settings = Settings {
        chunk_bytes: 1 << 20,
        ..Settings::new("r", vec![device])
    };
    let buffers = (0..8).map(|id| Buffer::new(1 << 20, id)).collect();
    let disk = Box::new(Real::new(false).0);
    let mut recorder = Recorder::start(settings, vec![(dir.clone(), disk)], buffers).unwrap();
    for n in 0..4000_u64 {
        let port = if n % 2 == 0 { 53 } else { 9 };
        let bytes = Traffic::udp(1, 2, 3, port, 1000);
        let meta = Meta {
            ts_ns: START + n * MS,
            wire_len: bytes.len() as u32,
            flow_hash: 0,
            lost: [(1000, 5), (2001, 70)]
                .iter()
                .find(|it| it.0 == n)
                .map_or(0, |it| it.1),
            flags: if n == 3001 { flags::GAP } else { 0 },
            vlan_tci: 0,
            source: 0,
            queue: 0,
            ..Meta::default()
        };
        let packet = vnplug::Packet {
            meta,
            bytes: &bytes,
        };
        assert!(recorder.take(0, &packet, &mut || false));
    }
    recorder.ledger().untell(vec![Loss {
        from_ns: START + 3500 * MS,
        to_ns: START + 3600 * MS,
        packets: 1234,
        kind: "disk".to_owned(),
        reason: "it was full".to_owned(),
        ..Loss::default()
    }]);
    recorder.finish();
    if !keep_state {
        std::fs::remove_file(dir.join("r.state")).unwrap();
    }
}

#[test]
fn an_extract_tells_every_loss_of_its_range_whatever_the_filter() {
    let place = TestDir::new("told-losses");
    record(&place, false);
    let all = (0, u64::MAX);
    for (filter, lost, gaps) in [
        ("", 75, 1),
        ("port 53", 5, 0),
        ("port 9", 70, 1),
        ("arp", 0, 0),
    ] {
        let (path, losses) = extract(&place, all, filter);
        let (in_packets, in_gaps, notes) = told(&path);
        assert_eq!((in_packets, in_gaps), (lost, gaps), "{filter}");
        let beside: u64 = notes.iter().filter_map(|note| note.dropped).sum();
        assert_eq!(in_packets + beside, 75, "{filter}");
        assert_eq!((losses.told.packets, losses.told.gaps), (75, 1), "{filter}");
        let words: Vec<&str> = notes.iter().map(|note| note.comment.as_str()).collect();
        assert!(
            words.iter().any(|text| text.starts_with("1234 packets ")),
            "{filter}: {words:?}"
        );
        assert!(losses.words().concat().contains("75 packets"), "{filter}");
    }
    // What is exported is a recording itself, and exported again.
    let (_, losses) = extract(&place, (START + 500 * MS, START + 1500 * MS), "arp");
    assert_eq!((losses.told.packets, losses.told.gaps), (5, 0));
    let (path, losses) = extract(&place, (START, START + 900 * MS), "");
    assert!(losses.is_none() && told(&path).2.is_empty());
}

#[test]
fn what_the_state_lists_is_told_once() {
    let place = TestDir::new("listed-losses");
    record(&place, true);
    let state = place.0.join("rec/r.state");
    let mut status = Status::from_json(&std::fs::read(&state).unwrap()).unwrap();
    status.losses.push(Loss {
        from_ns: START + 3500 * MS,
        to_ns: START + 3600 * MS,
        packets: 1234,
        kind: "disk".to_owned(),
        reason: "it was full".to_owned(),
        ..Loss::default()
    });
    std::fs::write(&state, status.to_json(0)).unwrap();
    let (path, losses) = extract(&place, (START + 3100 * MS, u64::MAX), "arp");
    assert_eq!((losses.listed.len(), losses.noted.len()), (1, 0));
    let notes = told(&path).2;
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert_eq!(
        notes[0].range_ns,
        Some((START + 3500 * MS, START + 3600 * MS))
    );
    let words = losses.words().concat();
    assert!(words.contains("1234 packets (disk)"), "{words}");
}

#[test]
fn what_an_index_leaves_out_is_told() {
    let place = TestDir::new("skipped-losses");
    let dir = place.0.join("rec");
    std::fs::create_dir(&dir).unwrap();
    let segment = dir.join(format!("r-0000000000-{}.pcapng", time(START)));
    let mut output = Output::new(File::create(&segment).unwrap(), Format::Pcapng);
    let bytes = Traffic::udp(1, 2, 3, 9, 1400);
    for n in 0..2000 {
        let packet = crate::extract::Packet {
            ts_ns: START + n * MS,
            bytes: &bytes,
            wire_len: 1400,
            flags: 0,
            lost: u64::from(n % 100 == 50),
            comment: if n == 1500 { GAP_COMMENT } else { "" },
            interface: &Interface::ethernet(),
        };
        output.write(&packet).unwrap();
    }
    output.finish().unwrap();
    assert!(rebuild(&segment).unwrap());
    let query = Query {
        from_ns: START + 120 * MS,
        to_ns: u64::MAX,
        filter: Filter::new("port 53").unwrap(),
    };
    let mut search = Extract::open(&[dir], query).unwrap();
    assert!(search.read().unwrap().is_none());
    let told = search.losses().left_out;
    assert_eq!((told.packets, told.gaps), (19, 1));
    // The chunk of the gap and the one that begins before the range were read, the others were not.
    let tally = search.tally();
    assert!(
        tally.chunks_skipped >= 5 && tally.bytes_read < 1 << 20,
        "{tally:?}"
    );
    assert!(Sidecar::path_of(&segment).exists());
}

const MS: u64 = 1_000_000;
/// 2026-11-21T13:45:01Z.
const START: u64 = 1_795_268_701_000_000_000;
