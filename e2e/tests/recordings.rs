//! Recordings of several sources on several disks, and what the commands find in them, also while the
//! recorder is at work.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::recorder::{Recorder, segments};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_store::read::Reader;

/// As Ctrl-C does; how many packets it took, all of which are durable.
fn stop(mut recorder: Recorder) -> u64 {
    recorder.end().unwrap();
    let (taken, durable) = (recorder.number("/taken"), recorder.mark());
    assert_eq!(taken, durable, "{:#}", recorder.state());
    taken
}

fn vnplug(words: &[&str]) -> Output {
    let mut command = Command::new(program("vnplug").unwrap());
    command.args(words).stdin(Stdio::null());
    command.output().unwrap()
}

/// Runs a command that must have no complaint; what it prints.
fn works(words: &[&str]) -> String {
    let output = vnplug(words);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// What a command that must fail says.
fn fails(words: &[&str]) -> String {
    let output = vnplug(words);
    assert!(!output.status.success(), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Numbers of the frames in a file, of each run of a generator. The file is in the order of time, and no
/// number of a run is missing between the first and the last, or there twice.
fn numbers(file: &Path) -> BTreeMap<u32, Vec<u64>> {
    let mut reader = Reader::open(file).unwrap();
    let (mut runs, mut last) = (BTreeMap::<u32, Vec<u64>>::new(), 0);
    while let Some(packet) = reader.read().unwrap() {
        assert!(packet.ts_ns >= last, "not in the order of time");
        last = packet.ts_ns;
        match parse(packet.bytes) {
            Parsed::Witness(witness) => runs.entry(witness.run).or_default().push(witness.seq),
            other => panic!("{other:?}"),
        }
    }
    for numbers in runs.values() {
        let jumps: Vec<_> = numbers
            .windows(2)
            .filter(|two| two[0] + 1 != two[1])
            .collect();
        assert!(
            jumps.is_empty(),
            "missing, twice, or in disorder: {jumps:?}"
        );
    }
    runs
}

fn total(runs: &BTreeMap<u32, Vec<u64>>) -> u64 {
    runs.values().map(|numbers| numbers.len() as u64).sum()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn two_sources_on_two_disks_are_one_recording_also_while_it_grows() {
    let lab = Lab::new().unwrap();
    let sources = [
        "left=gen,pps=5000,size=1400,run=1",
        "right=gen,pps=5000,size=1000,run=2",
    ];
    let args: Vec<&str> = sources
        .iter()
        .flat_map(|source| ["--source", source])
        .collect();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let (one, two) = (lab.dir().join("one"), lab.dir().join("two"));
    let words = [
        "host:left",
        "host:right",
        "--flush",
        "100ms",
        "--rotate-size",
        "8M",
    ];
    let words = [&words[..], &["--ring", "32M"]].concat();
    let recorder = Recorder::start(&daemon, &words, &[&one, &two]).unwrap();
    // Several chunks of 4 MiB for each of them.
    recorder.until("30 MB are durable", || recorder.mark() > 25_000);
    let found = lab.dir().join("found.pcapng");
    let extract = ["extract", text(&two), text(&one), "-w", text(&found)];
    for _ in 0..3 {
        let promised = recorder.mark();
        works(&extract);
        let runs = numbers(&found);
        assert!(
            total(&runs) >= promised,
            "{promised} promised, {} found",
            total(&runs)
        );
        assert_eq!(runs.len(), 2);
    }
    let taken = stop(recorder);
    works(&extract);
    let runs = numbers(&found);
    assert_eq!(total(&runs), taken);
    assert!(segments(&one).len() > 1 && segments(&two).len() > 1);

    // Others see through which device each came.
    let mut tshark = Command::new("tshark");
    tshark.args([
        "-nr",
        text(&found),
        "-T",
        "fields",
        "-e",
        "frame.interface_name",
    ]);
    let output = tshark.args(["-e", "frame.len"]).output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    let mut seen = BTreeMap::<&str, u64>::new();
    for line in told.lines() {
        *seen.entry(line).or_default() += 1;
    }
    let wanted = [
        ("host:left\t1400", &runs[&1]),
        ("host:right\t1000", &runs[&2]),
    ];
    let wanted = wanted.map(|(line, numbers)| (line, numbers.len() as u64));
    assert_eq!(seen, BTreeMap::from(wanted));

    // Their packets alternate, so one directory after the other is no recording.
    let said = fails(&[
        "replay",
        text(&one),
        text(&two),
        "--to",
        "lo",
        "--limit",
        "1",
    ]);
    assert!(said.contains("vnplug extract"), "{said}");
}

#[test]
fn a_slow_extract_costs_no_new_packet_and_says_what_was_taken_from_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000,size=1400"]).unwrap();
    let dir = lab.dir().join("rec");
    let words = [
        "host:lab",
        "--flush",
        "50ms",
        "--rotate-size",
        "4M",
        "--quota",
        "40M",
    ];
    let words = [&words[..], &["--ring", "32M"]].concat();
    let recorder = Recorder::start(&daemon, &words, &[&dir]).unwrap();
    recorder.until("segments are recycled", || {
        recorder.number("/disks/0/recycled") > 0
    });
    let mut extract = Command::new(program("vnplug").unwrap());
    extract.args(["extract", text(&dir)]).stdout(Stdio::piped());
    let mut extract = extract.stderr(Stdio::piped()).spawn().unwrap();
    let mut output = extract.stdout.take().unwrap();
    let mut bytes = vec![0; 100_000];
    output.read_exact(&mut bytes).unwrap();
    let oldest = segments(&dir).remove(0);
    // It has begun, and waits for us; meanwhile more is recorded than the quota.
    let before = recorder.mark();
    recorder.until("the quota was turned over", || {
        recorder.mark() > before + 60_000
    });
    // It costs no new packet; what it has open beyond a quarter of the quota is taken from it, and told.
    assert!(!oldest.exists());
    output.read_to_end(&mut bytes).unwrap();
    let ended = extract.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("removed by its recorder"), "{said}");
    stop(recorder);
    let found = lab.dir().join("found.pcapng");
    works(&["extract", text(&dir), "-w", text(&found)]);
    assert_eq!(numbers(&found).len(), 1);
}

#[test]
fn the_page_cache_is_left_alone_with_io_uring_and_where_it_is_forbidden() {
    // On the disk that the project is built on; /tmp may be memory.
    let lab = Lab::within(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let sockets = Lab::new().unwrap();
    let source = "lab=gen,pps=20000,size=1400";
    let daemon = Daemon::start(&sockets, None, &["--source", source]).unwrap();
    let script = lab.dir().join("forbid.py");
    fs::write(&script, FORBID).unwrap();
    let vnplug = || Command::new(program("vnplug").unwrap());
    let mut forbidden = Command::new("python3");
    forbidden.arg(&script).arg(program("vnplug").unwrap());
    for (name, command, more) in [
        ("uring", vnplug(), &[][..]),
        ("pwrite", vnplug(), &["--no-uring"]),
        ("forbidden", forbidden, &[]),
    ] {
        let dir = lab.dir().join(name);
        let words = [
            "host:lab",
            "--flush",
            "100ms",
            "--ring",
            "64M",
            "--no-index",
        ];
        let words = [&words[..], more].concat();
        let recorder = Recorder::start_by(command, &daemon, &words, &[&dir]).unwrap();
        recorder.until("50 MB are durable", || recorder.mark() > 40_000);
        let said = recorder.said();
        assert_eq!(said.contains("io_uring"), name == "forbidden", "{said}");
        stop(recorder);
        for file in segments(&dir) {
            let fincore = ["-nbo", "RES", text(&file)];
            let output = Command::new("fincore").args(fincore).output().unwrap();
            let cached = String::from_utf8(output.stdout).unwrap();
            let cached: u64 = cached.trim().parse().unwrap();
            assert!(
                cached < 1 << 20,
                "{name}: {cached} bytes of {}",
                file.display()
            );
            // The control: whoever reads it puts it there.
            let len = fs::read(&file).unwrap().len() as u64;
            let output = Command::new("fincore").args(fincore).output().unwrap();
            let cached = String::from_utf8(output.stdout).unwrap();
            assert!(
                cached.trim().parse::<u64>().unwrap() > len / 2,
                "{name}: {cached}"
            );
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn times_indexes_and_outputs_of_the_commands() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=10000,size=200,flows=10,count=20000,start=attach";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let dir = lab.dir().join("rec");
    let words = ["host:lab", "--flush", "100ms", "--rotate-count", "4000"];
    let words = [&words[..], &["--ring", "32M", "--report", "100ms"]].concat();
    let mut recorder = Recorder::start(&daemon, &words, &[&dir]).unwrap();
    // It ends with its source.
    let said = recorder.wait().unwrap();
    assert!(said.matches("durable up to").count() > 1, "{said}");
    let files = segments(&dir);
    assert!(files.len() >= 5, "{files:?}");

    // Two parts of the time are the whole.
    let found = lab.dir().join("found.pcapng");
    let mut reader = Reader::open(&files[2]).unwrap();
    let middle = reader.read().unwrap().unwrap().ts_ns;
    let middle = format!("{}.{:09}", middle / 1_000_000_000, middle % 1_000_000_000);
    let mut parts = Vec::new();
    for (option, time) in [("--to", &middle), ("--from", &middle)] {
        works(&["extract", option, time, text(&dir), "-w", text(&found)]);
        parts.push(numbers(&found).into_values().next().unwrap());
    }
    assert_eq!(parts[0].len() as u64, parts[1][0]);
    assert_eq!(parts.concat().len(), 20_000);

    // An index that is gone is made again, and is what it was.
    let index = files[0].with_extension("vnx");
    let before = fs::read(&index).unwrap();
    fs::remove_file(&index).unwrap();
    // One that was written to a moment ago is left to its recorder.
    let old = ["-d", "1 minute ago", text(&files[0])];
    assert!(Command::new("touch").args(old).status().unwrap().success());
    works(&["index", text(&dir)]);
    let after = fs::read(&index).unwrap();
    assert!(
        after.len().abs_diff(before.len()) <= before.len() / 10,
        "{}",
        after.len()
    );
    works(&["extract", text(&dir), "udp", "-w", text(&found)]);
    assert_eq!(total(&numbers(&found)), 20_000);

    // Nothing that is read is written to.
    let content = fs::read(&files[0]).unwrap();
    let said = fails(&["extract", text(&dir), "-w", text(&files[0])]);
    assert!(
        said.contains(files[0].file_name().unwrap().to_str().unwrap()),
        "{said}"
    );
    assert_eq!(fs::read(&files[0]).unwrap(), content);

    // A reader that goes away is no failure.
    let vnplug = program("vnplug").unwrap();
    let script = "\"$0\" extract \"$1\" | head -c 1000 >/dev/null; echo ${PIPESTATUS[0]}";
    let mut bash = Command::new("bash");
    bash.args(["-c", script]).arg(vnplug).arg(&dir);
    let output = bash.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((&output.stdout[..], said.as_ref()), (&b"0\n"[..], ""));

    // The largest flows, by either measure.
    for by in ["bytes", "packets"] {
        let told = works(&["flows", text(&dir), "--by", by, "--top", "3", "--json"]);
        let flows: Vec<Value> = told
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .filter(|flow: &Value| flow["from_port"].is_number())
            .collect();
        assert_eq!(flows.len(), 3, "{told}");
        assert_eq!(flows[0]["packets"], 2000, "{told}");
    }
    let missing = fails(&[
        "extract",
        text(&dir),
        text(&lab.dir().join("missing")),
        "udp",
    ]);
    assert!(missing.contains("missing"), "{missing}");
}

#[test]
fn what_is_recorded_is_what_was_asked_for() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=10000,size=500,flows=2,protocols=udp4+tcp4";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let dir = lab.dir().join("rec");
    let words = [
        "host:lab",
        "--filter",
        "tcp",
        "--snaplen",
        "100",
        "--rotate-time",
        "300ms",
    ];
    let words = [
        &words[..],
        &["--ring", "16M", "--seconds", "2s", "--quota", "99%"],
    ]
    .concat();
    let mut recorder = Recorder::start(&daemon, &words, &[&dir]).unwrap();
    recorder.wait().unwrap();
    let files = segments(&dir);
    assert!(files.len() >= 4, "{files:?}");
    let mut packets = 0;
    for file in &files {
        let mut reader = Reader::open(file).unwrap();
        let mut times = Vec::new();
        while let Some(packet) = reader.read().unwrap() {
            assert_eq!(
                (packet.bytes.len(), packet.wire_len, packet.bytes[23]),
                (100, 500, 6)
            );
            times.push(packet.ts_ns);
        }
        if let [first, .., last] = times[..] {
            assert!(last - first <= 301_000_000, "{} ns", last - first);
        }
        packets += times.len() as u64;
    }
    assert_eq!(packets, recorder.mark());
    assert!(packets > 1000, "{packets}");
}

/// Runs a program for which io_uring_setup(2), number 425, fails with EPERM, as containers have it.
const FORBID: &str = r#"
import ctypes, os, struct, sys
def step(code, jt, jf, k):
    return struct.pack("HBBI", code, jt, jf, k)
program = b"".join([
    step(0x20, 0, 0, 0),            # the call's number
    step(0x15, 0, 1, 425),
    step(0x06, 0, 0, 0x00050001),   # SECCOMP_RET_ERRNO, EPERM
    step(0x06, 0, 0, 0x7fff0000),   # SECCOMP_RET_ALLOW
])
steps = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps))
filter = ctypes.create_string_buffer(filter, len(filter))
prctl = ctypes.CDLL(None, use_errno=True).prctl
zero = ctypes.c_ulong(0)
assert prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0   # PR_SET_NO_NEW_PRIVS
assert prctl(22, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(filter)), zero, zero) == 0
os.execv(sys.argv[1], sys.argv[1:])
"#;
