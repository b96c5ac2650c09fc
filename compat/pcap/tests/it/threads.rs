//! One handle in several threads, as programs have it: statistics, filters, breaks and frames to be
//! sent beside a reader. Counts are exact. Needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{DropIn, built, limited, said_ok, until_sent};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

const COUNT: &str = "50000";
const ENDS: &str = "lab=gen,pps=25000,count=50000,run=1,protocols=udp4+tcp4";
const SLOW: &str = "slow=gen,pps=200";

fn threads(lab: &Lab) -> PathBuf {
    built(lab, "threads.c")
}

fn run(drop_in: &DropIn, daemon: &Daemon, mut command: Command, args: &[&str]) -> String {
    command.env("LD_LIBRARY_PATH", &drop_in.dir);
    said_ok(command.env("VNPLUG_SOCKET", daemon.socket()).args(args))
}

#[test]
fn statistics_from_another_thread_lose_no_packet() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let program = threads(&lab);
    for interval_us in ["1000", "10000", "100000"] {
        let daemon = Daemon::start(&lab, None, &["--source", ENDS]).unwrap();
        let args = ["stats", "vnplug:lab", COUNT, interval_us];
        run(&drop_in, &daemon, limited(&program), &args);
    }
    let daemon = Daemon::start(&lab, None, &["--source", ENDS]).unwrap();
    let args = ["signal", "vnplug:lab", COUNT, "1000"];
    run(&drop_in, &daemon, limited(&program), &args);
}

#[test]
fn every_call_may_be_made_beside_a_reader() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let program = threads(&lab);
    for interval_us in ["300", "5000"] {
        let daemon = Daemon::start(&lab, None, &["--source", ENDS]).unwrap();
        let args = ["all", "vnplug:lab", COUNT, interval_us];
        run(&drop_in, &daemon, limited(&program), &args);
    }
    let daemon = Daemon::start(&lab, None, &["--source", SLOW]).unwrap();
    run(&drop_in, &daemon, limited(&program), &["idle", "host:slow"]);
}

#[test]
fn two_threads_send_beside_a_reader() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let program = threads(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", SLOW]).unwrap();
    run(
        &drop_in,
        &daemon,
        limited(&program),
        &["inject", "host:slow", "3000"],
    );
    until_sent(&daemon, 6000);
}

#[test]
fn gopacket_asks_for_statistics_in_another_goroutine() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let program = lab.dir().join("gopacket");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gopacket");
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(".")
        .current_dir(source)
        // Debian's packages of the sources, and no network.
        .envs([
            ("GO111MODULE", "off"),
            ("GOPATH", "/usr/share/gocode"),
            ("GOFLAGS", ""),
        ])
        .env("GOCACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("go"))
        .status();
    assert!(
        built.is_ok_and(|built| built.success()),
        "Go, gopacket and libpcap-dev are needed: ./setup.sh installs them"
    );
    for interval in ["1ms", "10ms", "100ms"] {
        let daemon = Daemon::start(&lab, None, &["--source", ENDS]).unwrap();
        let args = ["vnplug:lab", COUNT, interval];
        run(&drop_in, &daemon, limited(&program), &args);
    }
}

#[test]
fn valgrind_finds_no_fault_in_threads() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let program = threads(&lab);
    let slowly = "lab=gen,pps=2000,count=6000,run=1,protocols=udp4+tcp4";
    for (command, source) in [("stats", slowly), ("all", slowly), ("close", SLOW)] {
        let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
        let mut valgrind = limited("valgrind".as_ref());
        valgrind
            .args(["--error-exitcode=9", "-q", "--fair-sched=yes"])
            .arg(&program);
        let device = format!("vnplug:{}", source.split_once('=').unwrap().0);
        let count = match command {
            "close" => daemon.pid().to_string(),
            _ => "6000".to_owned(),
        };
        run(
            &drop_in,
            &daemon,
            valgrind,
            &[command, &device, &count, "1000"],
        );
    }
}
