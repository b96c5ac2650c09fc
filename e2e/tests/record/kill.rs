//! What a recorder promised is there after it was killed, or ended at a bad moment.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::recorder::{MARK, Recorder, number, packets_by_others, segments};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_store::read::Reader;

use crate::numbers;

#[test]
fn a_killed_recorder_has_what_it_promised() {
    kill_again_and_again("pcapng", &["rec"], 12);
}

#[test]
fn a_killed_recorder_of_classic_pcap_has_what_it_promised() {
    kill_again_and_again("pcap", &["rec"], 10);
}

#[test]
fn a_killed_recorder_in_two_directories_has_what_it_promised() {
    kill_again_and_again("pcapng", &["rec", "other"], 10);
}

#[test]
fn a_signal_before_the_first_packet_ends_a_recorder_as_any_other() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=300,pps=100"]).unwrap();
    for round in 1..=10 {
        let dir = lab.dir().join("rec");
        let mut recorder = Recorder::start(&daemon, &["host:lab"], &[&dir]).unwrap();
        recorder.until("its port is there", || {
            let counters = daemon.counters();
            counters.iter().any(|it| it.kind == "port")
        });
        recorder.end().unwrap();
        let state = recorder.state();
        assert_eq!(number(&state, "/run/number"), round, "{state:#}");
        assert_eq!(state["run"]["ended"], true, "{state:#}");
        assert_eq!(number(&state, "/earlier/cut"), 0, "{state:#}");
    }
}

/// Starts a recorder and kills it, again and again: each time everything it acknowledged is there, and
/// everything that was acknowledged in the rounds before.
fn kill_again_and_again(format: &str, directories: &[&str], rounds: u64) {
    let lab = Lab::new().unwrap();
    let daemon =
        Daemon::start(&lab, None, &["--source", "lab=gen,size=60-1514,pps=20000"]).unwrap();
    let dirs: Vec<PathBuf> = directories.iter().map(|dir| lab.dir().join(dir)).collect();
    let mut args = vec!["host:lab", "--format", format, "--flush", "20ms"];
    args.extend(["--rotate-size", "4M", "--ring", "16M"]);
    let mut acknowledged: BTreeSet<u64> = BTreeSet::new();
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    for round in 1..=rounds {
        let mut recorder = Recorder::start(&daemon, &args, &dirs).unwrap();
        recorder.until("something is durable", || {
            let state = recorder.state();
            number(&state, "/run/number") == round && number(&state, MARK) > 0
        });
        sleep(Duration::from_millis(37 * (round % 8)));
        recorder.kill();
        let state = recorder.state();
        let promised = number(&state, MARK);
        assert_eq!(number(&state, "/earlier/cut"), round - 1, "{state:#}");
        let files: Vec<PathBuf> = dirs.iter().flat_map(|dir| segments(dir)).collect();
        let new: Vec<&PathBuf> = files.iter().filter(|file| !seen.contains(*file)).collect();
        let mut found: Vec<u64> = Vec::new();
        for file in &new {
            let numbers = numbers_after_a_kill(file);
            assert!(numbers.is_sorted_by(|one, next| one < next));
            if fs::metadata(file).unwrap().len() == 0 {
                // Killed when it had made the file and not yet begun it; the state says nothing of it.
                let mut beside = new.iter().filter(|it| it.parent() == file.parent());
                assert!(beside.all(|it| it <= file), "{state:#}");
                continue;
            }
            if format == "pcapng" {
                let [tcpdump, tshark, capinfos] = packets_by_others(file);
                assert_eq!([tshark, capinfos], [tcpdump; 2], "{}", file.display());
            } else if Some(file) == new.last() {
                assert_eq!(numbers_at_worst(file), [&numbers[..]; 3]);
            }
            found.extend(numbers);
        }
        found.sort_unstable();
        assert!(found.is_sorted_by(|one, next| one < next), "twice");
        assert!(found.len() as u64 >= promised, "{promised}: {state:#}");
        found.truncate(promised as usize);
        // What is missing between them never came to the recorder, and was counted.
        let span = found[found.len() - 1] - found[0] + 1;
        let lost = number(&state, "/lost/ring") + number(&state, "/lost/source");
        assert!(span - promised <= lost, "{span}, {promised}: {state:#}");
        acknowledged.extend(found);
        seen.extend(files);
    }
    let files: Vec<PathBuf> = dirs.iter().flat_map(|dir| segments(dir)).collect();
    let all: BTreeSet<u64> = files
        .iter()
        .flat_map(|file| numbers_after_a_kill(file))
        .collect();
    assert!(all.is_superset(&acknowledged));
}

/// The numbers of all frames of a segment that a killed recorder left. Classic pcap may end in damage:
/// what was behind the last write that was finished.
fn numbers_after_a_kill(file: &Path) -> Vec<u64> {
    if file.extension().unwrap() == "pcapng" {
        return numbers(&[file.to_owned()]);
    }
    let mut reader = Reader::open(file).unwrap();
    let mut numbers = Vec::new();
    while let Ok(Some(packet)) = reader.read() {
        match parse(packet.bytes) {
            Parsed::Witness(witness) => numbers.push(witness.seq),
            _ => break,
        }
    }
    numbers
}

/// The numbers of all frames that we, tcpdump and tshark read of such a classic pcap before they complain,
/// if they do; as the worst moment of a kill, which is rare, leaves it: not cut after its last write, so
/// with ones from its end to that of the disk's block.
fn numbers_at_worst(file: &Path) -> [Vec<u64>; 3] {
    let mut bytes = fs::read(file).unwrap();
    bytes.resize(bytes.len().next_multiple_of(4096), 0xff);
    let torn = file.with_extension("torn");
    fs::write(&torn, bytes).unwrap();
    let by = |program: &str| {
        let copy = file.with_extension(program);
        let mut command = Command::new(program);
        command.args(["-w", "-", "-r"]).arg(&torn);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(fs::File::create(&copy).unwrap());
        command.status().unwrap();
        numbers_after_a_kill(&copy)
    };
    [numbers_after_a_kill(&torn), by("tcpdump"), by("tshark")]
}
