//! Which files are shown: those that are downloaded, each once; and what cannot be read is told.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vnplug_store::archive::{How, Recipients, Worker};
use vnplug_store::record::Ledger;
use vnplug_testing::eventually;

use crate::browser::Browser;
use crate::support::*;

fn packets(count: u64) -> Vec<(u64, Vec<u8>)> {
    let packet = |n| (START + n * SECOND / 100, udp(53, 1000));
    (0..count).map(packet).collect()
}

fn write(dir: &Path, sequence: u64, count: u64) -> PathBuf {
    let packets = packets(count);
    segment(
        dir,
        sequence,
        packets.iter().map(|(at, bytes)| (*at, &bytes[..])),
    )
}

/// Has the segments of a directory compressed, as a recorder does it; what this one is called then.
fn compress(dir: &Path, path: &Path) -> PathBuf {
    let how = How {
        level: Some(1),
        recipients: Recipients::default(),
    };
    let ledger = Arc::new(Ledger::new("rec", &[dir.display().to_string()]));
    let dirs = vec![(dir.to_owned(), None)];
    let worker = Worker::start(Some(how), "rec".into(), dirs, 1_000_000, ledger).unwrap();
    eventually("it is packed", || !path.exists());
    worker.finish();
    let mut packed = path.as_os_str().to_owned();
    packed.push(".zst");
    packed.into()
}

/// Cuts a hole into the middle of a segment, of which the index knows nothing.
fn damage(path: &Path) {
    let mut file = fs::File::options().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.seek(SeekFrom::Start(len / 2)).unwrap();
    file.write_all(&[0xee; 3000]).unwrap();
}

fn shown(server: &Server) -> u64 {
    server.timeline("")["total"]["packets"].as_u64().unwrap()
}

/// How many packets a download has.
fn downloaded(server: &Server, scratch: &TestDir) -> u64 {
    let answer = server.get("/api/extract");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let file = scratch.0.join("downloaded");
    fs::write(&file, &answer.body).unwrap();
    by_tcpdump(&file, "") as u64
}

#[test]
fn a_segment_that_is_missing_in_the_middle_is_told() {
    let place = TestDir::new("web");
    let frame = udp(9, 100);
    let segments: Vec<_> = (0..3)
        .map(|n| segment(&place.0, n, [(START + n * SECOND, &frame[..])]))
        .collect();
    let problems = || Server::start(&[&place.0]).timeline("")["problems"].to_string();
    assert_eq!(problems(), "[]");
    fs::remove_file(&segments[1]).unwrap();
    assert!(
        problems().contains("sequence 1 is missing between"),
        "{}",
        problems()
    );
}

#[test]
fn what_is_shown_is_what_is_downloaded_and_each_file_once() {
    let (place, scratch) = (TestDir::new("web"), TestDir::new("web"));
    // A packed file of somebody else.
    let other = write(&place.0, 7, 20);
    fs::rename(compress(&place.0, &other), place.0.join("old.pcapng.zst")).unwrap();
    let first = write(&place.0, 0, 100);
    write(&place.0, 1, 50);
    symlink(first.file_name().unwrap(), place.0.join("latest.pcapng")).unwrap();
    let again = scratch.0.join("again");
    symlink(&place.0, &again).unwrap();
    let server = Server::start(&[&place.0, &again, &first]);
    assert_eq!(shown(&server), 170);
    assert_eq!(downloaded(&server, &scratch), 170);
    assert_eq!(server.timeline("")["files"], 3);
}

#[test]
fn a_file_that_the_recorder_packs_stays_where_it_was() {
    let (place, scratch) = (TestDir::new("web"), TestDir::new("web"));
    let file = write(&place.0, 0, 100);
    let server = Server::start(&[&file]);
    assert_eq!(shown(&server), 100);
    compress(&place.0, &file);
    eventually("it is seen packed", || {
        let all = server.timeline("");
        let name = all["segments"][0]["name"].as_str().unwrap_or_default();
        name.ends_with(".zst")
    });
    assert_eq!((shown(&server), downloaded(&server, &scratch)), (100, 100));
    // And is served from the start by the name that it had.
    assert_eq!(shown(&Server::start(&[&file])), 100);
}

#[test]
fn what_is_known_of_a_place_that_cannot_be_read_stays() {
    let place = TestDir::new("web");
    let dir = place.0.join("disk");
    fs::create_dir(&dir).unwrap();
    write(&dir, 0, 100);
    let server = Server::start(&[&dir]);
    assert_eq!(shown(&server), 100);
    fs::rename(&dir, place.0.join("away")).unwrap();
    // Nobody can read a link to itself, root neither.
    symlink(&dir, &dir).unwrap();
    eventually("it is told", || {
        !server.timeline("")["problems"]
            .as_array()
            .unwrap()
            .is_empty()
    });
    assert_eq!(shown(&server), 100);
    fs::remove_file(&dir).unwrap();
    eventually("what is gone is forgotten", || shown(&server) == 0);
    fs::rename(place.0.join("away"), &dir).unwrap();
    eventually("it is back", || shown(&server) == 100);
    assert_eq!(server.timeline("")["problems"].as_array().unwrap().len(), 0);
}

#[test]
fn what_a_download_found_damaged_is_told() {
    let (place, scratch) = (TestDir::new("web"), TestDir::new("web"));
    let file = write(&place.0, 0, 3000);
    write(&place.0, 1, 10);
    fs::write(place.0.join("x.pcapng.zst"), "not compressed").unwrap();
    damage(&file);
    let server = Server::start(&[&place.0]);
    let told = || {
        let problems = server.json("/api/recordings")["problems"].clone();
        let problems = problems.as_array().unwrap().clone();
        let of = file.file_name().unwrap().to_str().unwrap();
        problems
            .iter()
            .filter(|text| text.as_str().unwrap().contains(of))
            .count()
    };
    assert_eq!(server.timeline("bins=1")["total"]["packets"], 3010);
    assert_eq!(told(), 0, "the index says nothing of it");
    let answer = server.get("/api/extract");
    assert_eq!(answer.header("vnplug-unread"), "1");
    let packets = downloaded(&server, &scratch);
    // A chunk is missing, and nothing else.
    assert!((2000..3010).contains(&packets), "{packets}");
    eventually("it is told", || told() == 1);
    fs::remove_file(&file).unwrap();
    eventually("what is gone is no problem", || told() == 0);
}

#[test]
fn the_page_tells_damage_without_a_filter_too() {
    let place = TestDir::new("web");
    let file = write(&place.0, 0, 3000);
    damage(&file);
    let server = Server::start(&[&place.0]);
    let browser = Browser::open(1200, 1000, false);
    browser.go(&format!("http://{}/", server.address));
    let name = file.file_name().unwrap().to_str().unwrap();
    eventually("the problem is shown", || {
        browser.text("problems").contains(name)
    });
    // What changes each second is not read aloud.
    let live = "return [...document.querySelectorAll('[role=status]')].map((e) => e.id).join()";
    assert_eq!(browser.run(live), "news");
    eventually("its kind is", || {
        browser.run("return document.getElementById('news').textContent") == "Up to date"
    });
    // The links have a filter as soon as it is typed.
    let typed = "const field = document.getElementById('filter'); field.value = 'arp';
        field.dispatchEvent(new Event('input'));
        return document.getElementById('pcapng').getAttribute('href').includes('filter=arp')";
    assert_eq!(browser.run(typed), true);
}

#[test]
fn more_files_than_may_be_open_at_first_are_downloaded() {
    let (place, scratch) = (TestDir::new("web"), TestDir::new("web"));
    (0..40).for_each(|n| drop(write(&place.0, n, 10)));
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -Sn 40; exec \"$@\"", "sh"]);
    shell.arg(env!("CARGO_BIN_EXE_vnplug-web"));
    let server = Server::start_by(shell, &[&place.0]);
    assert_eq!((shown(&server), downloaded(&server, &scratch)), (400, 400));
}
