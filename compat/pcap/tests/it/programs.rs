//! A C program written for libpcap runs over the rings, however the drop-in is loaded. Needs root,
//! as captures on real interfaces do.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{DropIn, limited, said_ok, signal, text, until_sent};
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::eventually;

const MIXED: &str = "lab=gen,pps=20000,size=128,protocols=udp4+tcp4,flows=8";
const SLOW: &str = "slow=gen,pps=200";

#[test]
fn linked_preloaded_and_opened_by_dlopen_it_reads_the_ring() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    drop_in.ok(&daemon, &["count", "vnplug:lab", "2000"]);
    // The program is linked to the first name; the others are found as files.
    for name in ["libpcap.so.0.8", "libpcap.so.1", "libpcap.so"] {
        drop_in.ok(&daemon, &["dlopen", "host:lab", name]);
    }
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
fn frames_are_sent_and_each_is_counted() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", SLOW]).unwrap();
    drop_in.ok(&daemon, &["inject", "host:slow", "3000"]);
    // The program is gone at once; what it wrote last is still sent.
    until_sent(&daemon, 6000);
}

#[test]
fn two_calls_of_pf_rings_libpcap_set_the_name_and_the_watermark() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", SLOW]).unwrap();
    let mut command = limited(&drop_in.program);
    command.env("LD_PRELOAD", drop_in.file());
    command.env("VNPLUG_SOCKET", daemon.socket());
    command.args(["pfring", "host:slow"]).stdin(Stdio::piped());
    let mut running = command.spawn().unwrap();
    let is_named = |one: &vnplug::Counted| label(one, "label").starts_with("counter[");
    eventually("it has its name", || daemon.counters().iter().any(is_named));
    // The end of its input lets it go.
    drop(running.stdin.take());
    assert!(running.wait().unwrap().success());
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
fn what_a_filter_returns_cuts_the_packet() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    drop_in.ok(&daemon, &["cut", "host:lab"]);
}

#[test]
fn a_daemon_that_does_not_answer_holds_nobody_up() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", SLOW]).unwrap();
    let file = lab.dir().join("f.pcap");
    let tcpdump = |args: &[&str]| {
        let mut command = limited("tcpdump".as_ref());
        command.env("LD_LIBRARY_PATH", &drop_in.dir);
        command.env("VNPLUG_SOCKET", daemon.socket());
        command
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let path = file.to_str().unwrap();
    let mut reads = tcpdump(&["-Z", "root", "-U", "-ni", "vnplug:slow", "-w", path]);
    let reads = reads.spawn().unwrap();
    eventually("it reads", || {
        std::fs::metadata(&file).is_ok_and(|file| file.len() >= 1000)
    });
    signal(daemon.pid(), "STOP");
    let begun = Instant::now();
    let listed = text(&tcpdump(&["-D"]).output().unwrap());
    assert!(listed.contains("lo ["), "{listed}");
    assert!(listed.contains("the daemon does not answer"), "{listed}");
    let listing = begun.elapsed();
    let begun = Instant::now();
    signal(reads.id(), "INT");
    let said = text(&reads.wait_with_output().unwrap());
    let ending = begun.elapsed();
    signal(daemon.pid(), "CONT");
    assert!(said.contains("packets captured"), "{said}");
    // Seconds before; much less than that now, also on a busy machine.
    let limit = Duration::from_secs(4);
    assert!(listing < limit && ending < limit, "{listing:?} {ending:?}");
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
fn a_member_of_a_group_is_told_what_was_overwritten() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let source = "lab=gen,pps=50000,count=50000,run=1";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    // Its arena turns many times before it reads.
    drop_in.ok(&daemon, &["overflow", "vnplug:lab@0/slow", "50000"]);
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
        // It reads; of what it wants most is still to come.
        eventually(&format!("{command:?} reads"), || {
            let counters = daemon.counters();
            let mut ports = counters.iter().filter(|it| it.kind == "port");
            ports.any(|port| value(port, "delivered") > 0)
        });
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

#[test]
fn without_a_real_library_ours_works_and_the_rest_says_what_is_missing() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    let empty = lab.dir().join("empty");
    std::fs::write(&empty, "").unwrap();
    let real = std::fs::canonicalize("/usr/lib/x86_64-linux-gnu/libpcap.so.0.8").unwrap();
    // In a mount namespace of its own the system's library is an empty file.
    let run = |command: &str| {
        let hide = format!("mount --bind {} {}", empty.display(), real.display());
        let output = limited(Path::new("unshare"))
            .args(["-m", "sh", "-c", &format!("{hide} && {command}")])
            .env("LD_LIBRARY_PATH", &drop_in.dir)
            .env("VNPLUG_SOCKET", daemon.socket())
            .output()
            .unwrap();
        text(&output)
    };
    let program = drop_in.program.display();
    assert!(run(&format!("{program} count host:lab 1000")).contains("ok"));
    let said = run("tcpdump -n -i host:lab -c 5");
    assert!(said.contains("5 packets captured"), "{said}");
    for other in ["tcpdump -n -i lo -c 1", "tcpdump -n -i host:lab -c 1 udp"] {
        let said = run(other);
        assert!(
            said.contains("the real libpcap is not there: install"),
            "{said}"
        );
    }
}

#[test]
fn a_program_that_would_fail_without_a_word_is_named() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    let said = |name: &str, quiet: &str| {
        let program = lab.dir().join(name);
        std::fs::copy(&drop_in.program, &program).unwrap();
        let mut command = limited(&program);
        command.args(["count", "vnplug:lab", "10"]);
        command.env("LD_LIBRARY_PATH", &drop_in.dir);
        command.env("VNPLUG_QUIET", quiet);
        said_ok(command.env("VNPLUG_SOCKET", daemon.socket()))
    };
    let told = said("knockd", "");
    assert_eq!(told.matches("vnplug: knockd ").count(), 1, "{told}");
    for (name, quiet) in [("knockd", "1"), ("knocker", "")] {
        let told = said(name, quiet);
        assert!(!told.contains("vnplug: "), "{told}");
    }
}

#[test]
fn two_programs_on_one_device_see_all_of_it() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let daemon = Daemon::start(&lab, None, &["--source", MIXED]).unwrap();
    std::thread::scope(|scope| {
        for command in [
            ["count", "host:lab", "20000"],
            ["poll", "vnplug:lab", "20000"],
        ] {
            let (drop_in, daemon) = (&drop_in, &daemon);
            scope.spawn(move || drop_in.ok(daemon, &command));
        }
    });
    daemon.audit();
}
