//! `guest/examples/raw_reader.c`, written from the documents alone, against the daemon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_testing::eventually;

fn compile(lab: &Lab) -> PathBuf {
    let source = "../guest/examples/raw_reader.c";
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let program = lab.dir().join("raw_reader");
    let flags = "-std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pedantic";
    let status = Command::new("cc")
        .args(flags.split(' '))
        .arg("-o")
        .args([&program, &source])
        .status();
    assert!(status.unwrap().success());
    program
}

fn start(program: &Path, daemon: &Daemon, args: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.arg("-s").arg(daemon.socket()).args(args);
    let pipes = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    pipes.spawn().unwrap()
}

fn text(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8(all).unwrap()
}

/// Its line of results.
fn line(program: &Path, daemon: &Daemon, args: &[&str]) -> String {
    let output = start(program, daemon, args).wait_with_output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    text(&output)
}

fn number(line: &str, name: &str) -> u64 {
    let mut words = line.split_whitespace();
    let found = words.find(|word| *word == name).and_then(|_| words.next());
    found.unwrap_or_else(|| panic!("{line}")).parse().unwrap()
}

#[test]
fn every_frame_comes_at_every_rate_and_with_every_way_to_sleep() {
    let lab = Lab::new().unwrap();
    let program = compile(&lab);
    // Rings hold all of a source's frames, so nobody is too late for them.
    let ways: [(&str, u64, &[&str]); 4] = [
        ("pps=1000", 1500, &["-w", "1", "-d", "0"]),
        ("pps=1000", 1500, &["-w", "64", "-d", "2500"]),
        ("pps=100000", 200_000, &["-w", "256", "-r", "33554432"]),
        ("pps=max", 1_000_000, &["-w", "1024", "-r", "134217728"]),
    ];
    let sources: Vec<String> = (ways.iter().enumerate())
        .map(|(at, (rate, count, _))| format!("g{at}=gen,{rate},count={count}"))
        .collect();
    let args: Vec<&str> = (sources.iter())
        .flat_map(|source| ["--source", source])
        .collect();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    for (at, (rate, count, args)) in ways.into_iter().enumerate() {
        let device = format!("host:g{at}");
        let line = line(&program, &daemon, &[args, &[&device]].concat());
        assert_eq!(number(&line, "received"), count, "{rate}: {line}");
        for none in ["lost", "missing", "strange", "dropped"] {
            assert_eq!(number(&line, none), 0, "{rate}: {line}");
        }
        assert_eq!(number(&line, "life"), 1, "the source ended: {line}");
    }
    daemon.audit();
}

#[test]
fn what_is_missing_is_what_lost_and_dropped_say() {
    let lab = Lab::new().unwrap();
    let program = compile(&lab);
    let sources = [
        "small=gen,pps=100000,count=200000",
        "slow=gen,pps=100000,count=200000",
    ];
    let args = ["--source", sources[0], "--source", sources[1]];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let ways: [&[&str]; 2] = [
        &["-r", "4096", "-p", "1", "small"],
        &["-r", "65536", "-p", "20", "slow"],
    ];
    for args in ways {
        let line = line(&program, &daemon, args);
        let is = |name| number(&line, name);
        assert!(is("lost") > 0, "nothing was lost: {line}");
        assert_eq!((is("missing"), is("strange")), (is("lost"), 0), "{line}");
        // What was lost after the last record no record tells of.
        assert!(is("lost") <= is("dropped"), "{line}");
        assert_eq!(is("received") + is("dropped"), 200_000, "{line}");
    }
    daemon.audit();
}

#[test]
fn a_filter_is_replaced_and_the_port_closed() {
    let lab = Lab::new().unwrap();
    let program = compile(&lab);
    let source = "mix=gen,pps=20000,size=100,flows=2,protocols=udp4+tcp4";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let args = ["-n", "2000", "-f", "udp", "-g", "tcp", "mix"];
    let first = line(&program, &daemon, &args);
    // Of the second filter alone, and no frame of the first among them.
    assert_eq!((number(&first, "tcp"), number(&first, "udp")), (2000, 0));
    assert_eq!(number(&first, "life"), 2, "closed: {first}");
    daemon.await_no_ports();
    let refusals = [
        (["-f", "udp and and", "mix"], "refused (5): "),
        (["-n", "1", "nosuch"], "refused (2): "),
        (["-r", "99999999999", "mix"], "refused (4): "),
    ];
    for (args, refused) in refusals {
        let output = start(&program, &daemon, &args).wait_with_output().unwrap();
        assert!(text(&output).starts_with(refused), "{}", text(&output));
    }
}

#[test]
fn a_daemon_that_is_killed_is_noticed() {
    let lab = Lab::new().unwrap();
    let program = compile(&lab);
    let mut daemon = Daemon::start(&lab, None, &["--source", "g=gen,pps=10"]).unwrap();
    let reader = start(&program, &daemon, &["g"]);
    eventually("there is a port", || {
        daemon.counters().iter().any(|one| one.kind == "port")
    });
    daemon.kill();
    let output = reader.wait_with_output().unwrap();
    assert_eq!(text(&output), "the daemon is gone\n");
}
