//! A C program written for libpcap runs over the rings, however the drop-in is loaded. Needs root,
//! as captures on real interfaces do.

use std::process::Stdio;
use std::time::Duration;

use crate::support::{DropIn, limited, said_ok};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns};

const MIXED: &str = "lab=gen,pps=20000,size=128,protocols=udp4+tcp4,flows=8";
const SLOW: &str = "slow=gen,pps=200";

#[test]
fn linked_preloaded_and_opened_by_dlopen_it_reads_the_ring() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    drop_in.ok(&daemon, &["count", "vnplug:lab", "2000"]);
    drop_in.ok(&daemon, &["dlopen", "host:lab"]);
    for command in [&["count", "host:lab", "2000"][..], &["dlopen", "host:lab"]] {
        let mut preloaded = limited(&drop_in.program);
        preloaded.env("LD_PRELOAD", drop_in.file());
        said_ok(
            preloaded
                .env("VNPLUG_SOCKET", daemon.socket())
                .args(command),
        );
    }
}

#[test]
fn every_way_to_wait_sees_every_packet() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED, "--source", SLOW]).unwrap();
    for how in ["select", "poll", "epoll-lt", "epoll-et"] {
        for per_call in ["-1", "1", "3", "next"] {
            drop_in.ok(&daemon, &[how, "host:lab", "3000", per_call]);
        }
        drop_in.ok(&daemon, &[how, "host:slow", "50", "next"]);
        drop_in.ok(&daemon, &[how, "host:slow", "50", "1", "immediate"]);
    }
}

#[test]
fn loops_end_by_signals_threads_and_time() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    for command in [
        "break-signal",
        "break-thread",
        "timeout",
        "close-thread",
        "close-callback",
    ] {
        drop_in.ok(&daemon, &[command, "host:lab"]);
    }
    drop_in.ok(&daemon, &["fork", "host:lab", "5000"]);
}

#[test]
fn a_filter_is_replaced_live_and_no_packet_of_the_old_one_is_seen() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    drop_in.ok(&daemon, &["filter", "host:lab", "40"]);
    daemon.audit();
}

#[test]
fn counts_are_exact_at_the_end_of_the_source() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    for command in ["ended", "overflow"] {
        let source = "lab=gen,pps=50000,count=50000,run=1";
        let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
        drop_in.ok(&daemon, &[command, "host:lab", "50000"]);
    }
}

#[test]
fn absurd_options_and_bad_calls_are_answered_as_the_manual_says() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    drop_in.ok(&daemon, &["absurd", "host:lab"]);
}

#[test]
fn a_restart_of_the_daemon_is_survived() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    for command in [
        &["count", "host:lab", "10000"][..],
        &["epoll-et", "host:lab", "10000", "7"],
    ] {
        let mut reader = limited(&drop_in.program);
        reader
            .env("LD_LIBRARY_PATH", &drop_in.dir)
            .env("VNPLUG_SOCKET", daemon.socket())
            .args(command)
            .stdout(Stdio::piped());
        let reader = reader.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        daemon.kill();
        daemon.launch().unwrap();
        let output = reader.wait_with_output().unwrap();
        assert!(output.status.success(), "{command:?}");
    }
}

#[test]
fn real_devices_work_beside_ours_and_without_a_daemon() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let netns = Netns::new().unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", MIXED]).unwrap();
    let inside = |socket: &std::path::Path, args: &[&str]| {
        let mut command = netns.command("timeout");
        command
            .args(["-s", "KILL", "120"])
            .arg(&drop_in.program)
            .args(args);
        command
            .env("LD_LIBRARY_PATH", &drop_in.dir)
            .env("VNPLUG_SOCKET", socket);
        said_ok(&mut command)
    };
    inside(&daemon.socket(), &["both", "vnplug:lab"]);
    let listed = inside(&daemon.socket(), &["list"]);
    assert!(
        listed.contains("vnplug:lab (vNPlug gen: generated frames"),
        "{listed}"
    );
    let nobody = lab.dir().join("nobody");
    assert!(!inside(&nobody, &["list"]).contains("vnplug:"));
    inside(&nobody, &["unreachable", "vnplug:lab"]);
}
