//! Losses: all that the recorder counts is shown, each once, in its time.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use vnplug_store::read::Reader;
use vnplug_store::record::{LaneStatus, Loss, Run, Status};

use crate::support::*;

fn lost(server: &Server) -> Value {
    server.timeline("")["total"]["lost"].clone()
}

/// What the state of a finished recording counts.
fn counted(status: &Status) -> Value {
    json!(status.lost_ring + status.lost_source + status.lost_disk)
}

#[test]
fn a_download_carries_what_its_range_lost() {
    let place = TestDir::new("web");
    let mut recorder = recorder(&place.0);
    for n in 0..100 {
        let lost = u32::from(n == 50) * 7;
        take(&mut recorder, START + n * SECOND / 1000, &udp(9, 100), lost);
    }
    let last = START + 99 * SECOND / 1000;
    let ledger = recorder.ledger();
    ledger.lost_in_ring(last, last + 5 * SECOND, 66_262, "the ring was full", false);
    recorder.finish();
    let server = Server::start(&[&place.0]);
    for filter in ["", "arp"] {
        let answer = server.get(&format!("/api/extract?filter={filter}"));
        let file = place.0.join("found");
        fs::write(&file, &answer.body).unwrap();
        let mut reader = Reader::open(&file).unwrap();
        let (mut notes, mut lost) = (reader.notes(), 0);
        while let Some(packet) = reader.read().unwrap() {
            lost += packet.lost;
        }
        notes.extend(reader.notes());
        lost += notes.iter().filter_map(|note| note.dropped).sum::<u64>();
        assert_eq!(lost, 7, "{filter}");
        assert!(
            notes
                .iter()
                .any(|note| note.comment.starts_with("66269 packets")),
            "{notes:?}"
        );
        let count = server.json(&format!("/api/count?filter={filter}"));
        assert!(
            count["losses"].to_string().contains("66269 packets (ring)"),
            "{count}"
        );
    }
}

#[test]
fn losses_behind_the_last_packet_are_counted_and_told_ones_once() {
    let place = TestDir::new("web");
    let mut recorder = recorder(&place.0);
    for n in 0..100 {
        let lost = u32::from(n == 50) * 7;
        take(&mut recorder, START + n * SECOND / 1000, &udp(9, 100), lost);
    }
    let last = START + 99 * SECOND / 1000;
    let ledger = recorder.ledger();
    ledger.lost_in_ring(last, last + 5 * SECOND, 66_262, "the ring was full", false);
    ledger.lost_at_source(START, last + 2 * SECOND, 30);
    let status = recorder.finish();
    assert_eq!(counted(&status), 66_299);
    let server = Server::start(&[&place.0]);
    let all = server.timeline("");
    assert_eq!(
        all["total"],
        json!({ "packets": 100, "bytes": 10_000, "lost": 66_299 })
    );
    assert_eq!(all["all"]["from_ns"], START.to_string());
    assert_eq!(all["all"]["to_ns"], (last + 5 * SECOND + 1).to_string());
    // The longest lasts for 5.05 s; of that the last 3.099 s are shown.
    let end = server.timeline(&format!("from={}&bins=1", START / SECOND + 2));
    let end = end["lost"][0].as_u64().unwrap();
    assert!((40_600..40_700).contains(&end), "{end}");
    // However the directory is called.
    let scratch = TestDir::new("web");
    let again = scratch.0.join("again");
    symlink(&place.0, &again).unwrap();
    assert_eq!(lost(&Server::start(&[&place.0, &again])), 66_299);
    let svg = picture(&place.0);
    assert!(
        svg.contains("100 packets") && svg.contains("66299 lost"),
        "{svg}"
    );
}

#[test]
fn losses_that_the_state_has_no_times_of_any_more_are_counted() {
    let place = TestDir::new("web");
    let mut recorder = recorder(&place.0);
    for n in 0..450 {
        let ts_ns = START + n * 10 * SECOND;
        // One in three is told by a packet.
        take(
            &mut recorder,
            ts_ns,
            &udp(9, 100),
            u32::from(n % 3 == 0) * 4,
        );
        if n % 3 == 1 {
            let (from, to) = (ts_ns + SECOND, ts_ns + 2 * SECOND);
            recorder
                .ledger()
                .lost_in_ring(from, to, 3, "the ring was full", false);
        }
        if n % 3 == 2 {
            let (from, to) = (ts_ns + 3 * SECOND, ts_ns + 4 * SECOND);
            recorder
                .ledger()
                .lost_in_ring(from, to, 2, "the ring was full", false);
        }
        recorder.flush();
    }
    let status = recorder.finish();
    assert!(status.older_losses > 0);
    assert_eq!(counted(&status), 1350);
    assert_eq!(lost(&Server::start(&[&place.0])), 1350);
}

#[test]
fn what_was_lost_before_segments_that_are_gone_is_gone_too() {
    let place = TestDir::new("web");
    let loss = |from_s: i64, packets| Loss {
        run: 1,
        from_ns: START.saturating_add_signed(from_s * SECOND as i64),
        to_ns: START.saturating_add_signed((from_s + 10) * SECOND as i64),
        packets,
        kind: "disk".into(),
        ..Loss::default()
    };
    let state = |recycled| {
        let status = Status {
            recording: "rec".into(),
            run: Run {
                number: 1,
                ..Run::default()
            },
            lost_disk: 1005,
            lanes: vec![LaneStatus {
                recycled,
                ..LaneStatus::default()
            }],
            losses: vec![loss(-100, 1000), loss(20, 5)],
            ..Status::default()
        };
        fs::write(place.0.join("rec.state"), status.to_json(1)).unwrap();
    };
    state(0);
    // Nothing was ever written.
    let none = Server::start(&[&place.0]).timeline("");
    assert_eq!(
        none["total"],
        json!({ "packets": 0, "bytes": 0, "lost": 1005 })
    );
    assert!(picture(&place.0).contains("0 packets, "));
    segment(
        &place.0,
        3,
        [
            (START, &udp(9, 100)[..]),
            (START + SECOND, &udp(9, 100)[..]),
        ],
    );
    let all = Server::start(&[&place.0]).timeline("");
    assert_eq!(all["total"]["lost"], 1005);
    assert_eq!(all["from_ns"], (START - 100 * SECOND).to_string());
    state(3);
    let all = Server::start(&[&place.0]).timeline("");
    assert_eq!(all["total"]["lost"], 5);
    assert_eq!(all["from_ns"], START.to_string());
}

#[test]
fn recordings_of_one_name_have_their_own_losses() {
    let places = [TestDir::new("web"), TestDir::new("web")];
    for (place, told) in places.iter().zip([0, 9]) {
        let mut recorder = recorder(&place.0);
        take(&mut recorder, START, &udp(9, 100), 0);
        take(&mut recorder, START + SECOND, &udp(9, 100), told);
        let to_ns = START + SECOND;
        recorder
            .ledger()
            .lost_in_ring(START, to_ns, 11, "the recorder ended", false);
        recorder.finish();
    }
    assert_eq!(lost(&Server::start(&[&places[0].0, &places[1].0])), 31);
}

/// The picture of a recording.
fn picture(place: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
    let output = command.args(["--svg", "-"]).arg(place).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}
