//! Options of `vnplug record` on a real daemon and a real wire: triggers, closed files, duplicates.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::recorder::{Recorder, number, segments};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_store::read::Reader;

/// One that is at work.
fn start(daemon: &Daemon, dir: &Path, source: &str, args: &[&str]) -> Recorder {
    let args = [&[source, "--flush", "50ms", "--ring", "32M"], args].concat();
    let recorder = Recorder::start(daemon, &args, &[dir]).unwrap();
    // Its ports were opened before.
    recorder.until("it records", || dir.join("rec.lock").exists());
    recorder
}

/// As Ctrl-C does; the account must close.
fn stop(mut recorder: Recorder) -> Value {
    recorder.end().unwrap();
    let state = recorder.state();
    let count = |at| number(&state, at);
    let settled = count("/durable") + count("/trigger/passed_over");
    assert_eq!(count("/taken"), settled, "{state}");
    assert_eq!(count("/lost/ring") + count("/lost/source"), 0, "{state}");
    state
}

/// A witness frame: its stamp, run and number.
type Seen = (u64, u32, u64);

fn frames(files: &[PathBuf]) -> Vec<Seen> {
    let mut seen = Vec::new();
    for file in files {
        let mut reader = Reader::open(file).unwrap();
        while let Some(packet) = reader.read().unwrap() {
            match parse(packet.bytes) {
                Parsed::Witness(witness) => seen.push((packet.ts_ns, witness.run, witness.seq)),
                // The kernel's own.
                Parsed::Corrupt => panic!("a corrupt frame in {}", file.display()),
                _ => {}
            }
        }
    }
    seen
}

fn vnplug(args: &[&str], places: &[&Path]) -> Output {
    let mut command = Command::new(program("vnplug").unwrap());
    command.args(args).args(places).stdin(Stdio::null());
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A shell command that must succeed; what it says.
fn shell(script: &str, args: &[&Path]) -> String {
    let mut command = Command::new("sh");
    command.args(["-ec", script, "sh"]).args(args);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{script}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_is_around_a_trigger_is_recorded_and_nothing_else() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let dir = |name: &str| lab.dir().join(name);
    let start = |name: &str, args: &[&str]| start(&daemon, &dir(name), "host:wire1", args);
    // One records all: what the others must have follows from its stamps.
    let all = start("all", &[]);
    let some = start(
        "some",
        &["--trigger", "len = 777", "--before", "2s", "--after", "1s"],
    );
    let small = start(
        "small",
        &[
            "--trigger",
            "len = 777",
            "--before",
            "10m",
            "--after",
            "1s",
            "--before-memory",
            "8M",
        ],
    );
    let asked = start("asked", &["--before", "10m", "--after", "10m"]);
    let mut total = 0;
    let mut send = |run, count, len_bytes| {
        let stream = Stream {
            run,
            len_bytes,
            pps: NonZeroU64::new(4000),
            ..Stream::new("wire0", count)
        };
        total += netns.enter(|| stream.send()).unwrap().unwrap().frames;
        total
    };
    send(1, 12_000, 1514);
    // More than what `some` has before its trigger.
    sleep(Duration::from_secs(3));
    send(2, 500, 300);
    send(3, 1, 777);
    send(4, 500, 300);
    asked.until("an event ends without packets", || {
        [&some, &small].iter().all(|recorder| {
            let state = recorder.state();
            let event = &state["trigger"];
            event["events"] == 1 && event["writing"] == false
        })
    });
    let before = send(5, 500, 300);

    // On command: nothing happens without one.
    asked.until("it has taken all", || asked.number("/taken") >= before);
    assert!(segments(&dir("asked")).is_empty());
    let refused = vnplug(&["record", "--trigger-now"], &[&dir("all")]);
    assert!(!refused.status.success() && said(&refused).contains("without --trigger"));
    let refused = vnplug(
        &["record", "--name", "other", "--trigger-now"],
        &[&dir("all")],
    );
    assert!(!refused.status.success() && said(&refused).contains("no recorder of `other`"));
    let told = vnplug(&["record", "--trigger-now"], &[&dir("asked")]);
    assert!(told.status.success(), "{}", said(&told));
    asked.until("an event", || asked.number("/trigger/events") == 1);
    let sent = send(6, 500, 300);
    for recorder in [&all, &some, &small, &asked] {
        recorder.until("all is taken", || recorder.number("/taken") >= sent);
    }
    let [_, some, small, asked] = [all, some, small, asked].map(stop);
    let refused = vnplug(&["record", "--trigger-now"], &[&dir("asked")]);
    assert!(!refused.status.success() && said(&refused).contains("no recorder of `rec`"));

    let all = frames(&segments(&dir("all")));
    assert_eq!(all.len() as u64, sent);
    let at = all.iter().find(|(_, run, _)| *run == 3).unwrap().0;
    let around: Vec<Seen> = all
        .iter()
        .copied()
        .filter(|(ts, ..)| (at - 2_000_000_000..=at + 1_000_000_000).contains(ts))
        .collect();
    assert!(around.len() < 1600, "{}", around.len());
    assert_eq!(frames(&segments(&dir("some"))), around, "{some}");
    assert_eq!(some["trigger"]["events"], 1);
    assert_eq!(some["trigger"]["passed_over_early"], 0, "{some}");

    // 18 MB came before, of which 8 MiB had room: without a gap up to the trigger.
    let found = frames(&segments(&dir("small")));
    let end = all
        .iter()
        .position(|(ts, ..)| *ts > at + 1_000_000_000)
        .unwrap();
    assert_eq!(found, all[end - found.len()..end], "{small}");
    assert!(found.len() > 1500 && found.len() < 7000, "{}", found.len());
    assert!(
        small["trigger"]["passed_over_early"].as_u64().unwrap() > 5000,
        "{small}"
    );

    assert_eq!(frames(&segments(&dir("asked"))), all, "{asked}");
    let comment = shell("capinfos -k \"$1\"", &[&segments(&dir("some"))[0]]);
    assert!(
        comment.contains("filter 'len = 777' matched at 2"),
        "{comment}"
    );
    let comment = shell("capinfos -k \"$1\"", &[&segments(&dir("asked"))[0]]);
    assert!(comment.contains("command at 2"), "{comment}");
    let comment = shell("capinfos -k \"$1\"", &[&segments(&dir("small"))[0]]);
    assert!(comment.contains("memory held no more"), "{comment}");
}

#[test]
fn closed_files_are_packed_and_standard_programs_open_them() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=60-1514,pps=5000"]).unwrap();
    let new_key = |name: &str| {
        let key = lab.dir().join(name);
        let public = shell(
            "age-keygen -o \"$1\" 2> /dev/null; age-keygen -y \"$1\" | tee \"$1.pub\"",
            &[&key],
        );
        (key, public.trim().to_owned())
    };
    // One is named in a file, and the other as it is.
    let ((other, _), (key, public)) = (new_key("other"), new_key("key"));
    let others = lab.dir().join("other.pub");
    for (name, sealed, suffix) in [("zst", false, ".zst"), ("age", true, ".zst.age")] {
        let dir = lab.dir().join(name);
        let mut args = vec!["--rotate-size", "2M", "--compress", "zstd:1"];
        if sealed {
            let others = others.to_str().unwrap();
            args.extend(["--encrypt-to-file", others, "--encrypt-to", &public]);
        }
        let recorder = start(&daemon, &dir, "host:lab", &args);
        recorder.until("three files are packed", || {
            recorder.number("/archive/segments") >= 3
        });
        // The one that is being written is as it is, and all is found meanwhile.
        let last = segments(&dir).pop().unwrap();
        assert!(
            last.extension().is_some_and(|ext| ext == "pcapng"),
            "{}",
            last.display()
        );
        let keys = [
            "extract",
            "--identity",
            key.to_str().unwrap(),
            "-w",
            "/dev/null",
        ];
        let live = vnplug(&keys, &[&dir]);
        assert!(live.status.success(), "{}", said(&live));
        let state = stop(recorder);
        assert_eq!(state["archive"]["waiting"], 0, "{state}");
        assert_eq!(state["archive"]["trouble"], "", "{state}");
        let files = segments(&dir);
        for file in &files {
            assert!(
                file.to_str()
                    .unwrap()
                    .ends_with(&format!(".pcapng{suffix}"))
            );
        }
        // What is in them, by other programs and by ours.
        let open = match sealed {
            true => "age -d -i \"$0\" \"$1\" | zstd -dcq",
            false => "zstd -dcq \"$1\"",
        };
        let script = format!(
            "{open} > \"$2\"; tcpdump -nr \"$2\" 2> /dev/null | wc -l; capinfos -cMT -r \"$2\" > /dev/null"
        );
        let copy = lab.dir().join("copy.pcapng");
        let mut found = 0;
        for file in &files {
            let output = Command::new("sh")
                .args(["-ec", &script])
                .args([&other, file, &copy])
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", said(&output));
            found += String::from_utf8(output.stdout)
                .unwrap()
                .trim()
                .parse::<u64>()
                .unwrap();
        }
        assert_eq!(found, state["durable"].as_u64().unwrap(), "{state}");
        let flows = vnplug(
            &["flows", "--json", "--identity", key.to_str().unwrap()],
            &[&dir],
        );
        assert!(flows.status.success(), "{}", said(&flows));
        let counted: u64 = String::from_utf8(flows.stdout)
            .unwrap()
            .lines()
            .map(|line| {
                serde_json::from_str::<Value>(line).unwrap()["packets"]
                    .as_u64()
                    .unwrap()
            })
            .sum();
        assert!(counted > 0 && counted <= found);
        let indexes: BTreeSet<bool> = fs::read_dir(&dir)
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter(|name| name.contains(".vnx"))
            .map(|name| name.ends_with(".vnx.age"))
            .collect();
        assert_eq!(
            indexes,
            BTreeSet::from([sealed]),
            "an index that anybody can read"
        );
        let bare = vnplug(&["extract", "-w", "/dev/null"], &[&dir]);
        assert_eq!(bare.status.success(), !sealed, "{}", said(&bare));
        if sealed {
            assert!(
                said(&bare).contains("is encrypted: name the file"),
                "{}",
                said(&bare)
            );
        }
    }
}

#[test]
fn packets_that_come_twice_are_recorded_once() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let dir = lab.dir().join("once");
    let recorder = start(&daemon, &dir, "host:wire1", &["--dedup=10m"]);
    // The same frames three times.
    let stream = Stream {
        len_bytes: 700,
        pps: NonZeroU64::new(4000),
        ..Stream::new("wire0", 3000)
    };
    for _ in 0..3 {
        netns.enter(|| stream.send()).unwrap().unwrap();
    }
    recorder.until("all came", || {
        recorder.number("/taken") + recorder.number("/duplicates/packets") >= 9000
    });
    let state = stop(recorder);
    let found = frames(&segments(&dir));
    let numbers: Vec<u64> = found.iter().map(|(_, _, seq)| *seq).collect();
    assert_eq!(numbers, (0..3000).collect::<Vec<u64>>(), "{state}");
    assert!(
        state["duplicates"]["packets"].as_u64().unwrap() >= 6000,
        "{state}"
    );
    assert_eq!(state["duplicates"]["forgotten"], 0, "{state}");
    let bytes = fs::read(&segments(&dir)[0]).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains(" duplicates were left out"), "{state}");
}

#[test]
fn what_is_too_old_is_removed_and_a_manifest_is_what_was_noted_of_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let dir = |name: &str| lab.dir().join(name);
    let rotate = ["--rotate-time", "1s"];
    let kept = start(&daemon, &dir("kept"), "host:lab", &rotate);
    let more = ["--max-age", "1s", "--no-manifest"];
    let aged = start(
        &daemon,
        &dir("aged"),
        "host:lab",
        &[&rotate[..], &more].concat(),
    );
    let first = |recorder: &Recorder, name: &str| {
        let file = || segments(&dir(name)).into_iter().next();
        recorder.until("it writes", || file().is_some());
        file().unwrap()
    };
    let (old, stays) = (first(&aged, "aged"), first(&kept, "kept"));
    aged.until("its first file is removed", || !old.exists());
    // The control has its first file still, and says in a manifest which files it closed.
    assert!(stays.exists());
    let lines = || fs::read_to_string(dir("kept").join("rec.manifest")).unwrap_or_default();
    kept.until("three files are closed", || lines().lines().count() > 3);
    assert!(!dir("aged").join("rec.manifest").exists());
    drop((stop(kept), stop(aged)));

    let verify = |head: &[&str]| vnplug(&[&["verify", "--json"], head].concat(), &[&dir("kept")]);
    let told: Value = serde_json::from_slice(&verify(&[]).stdout).unwrap();
    let head = told["manifest"]["head"].as_str().unwrap();
    assert!(verify(&["--head", head]).status.success(), "{told}");
    // As if it had been written anew: what was noted is in it no more.
    let another = head.chars().rev().collect::<String>();
    let wrong = verify(&["--head", &another]);
    let said = String::from_utf8_lossy(&wrong.stdout);
    assert!(
        !wrong.status.success() && said.contains("no line has the hash"),
        "{said}"
    );
}
