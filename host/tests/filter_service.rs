//! The compiling process seen from outside: what it may do, and what happens when it is killed.
//!
//! One test in a file of its own, because it looks for its child among all processes.

use std::path::PathBuf;

use vnplug_filter::{COMPILE_FILTER_ARG, Compiler};

#[test]
fn the_service_holds_no_power_and_is_replaced_when_it_is_killed() {
    let mut compiler = Compiler::new(PathBuf::from(env!("CARGO_BIN_EXE_vnplugd")));
    compiler.compile("ip", 96, 1).unwrap();
    let pids = services();
    assert_eq!(pids.len(), 1);
    for pid in pids {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        let value = |key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap();
            line.split_whitespace()
                .skip(1)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(value("NoNewPrivs:"), "1");
        assert_eq!(value("CapEff:"), "0000000000000000");
        assert_eq!(value("CapPrm:"), "0000000000000000");
        if rustix::process::geteuid().is_root() {
            assert_eq!(value("Uid:"), "65534 65534 65534 65534");
            assert_eq!(value("Groups:"), "");
        }
    }
    for round in 0..5 {
        compiler.compile("udp", 100 + round, 1).unwrap();
        let pids = services();
        assert_eq!(pids.len(), 1);
        for pid in pids {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
    }
    drop(compiler);
    assert_eq!(services(), []);
}

/// Process ids of the ready services that this test program started.
fn services() -> Vec<i32> {
    let me = std::process::id().to_string();
    let numbered = std::fs::read_dir("/proc")
        .expect("proc is mounted")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    numbered
        .filter(|pid| {
            let read =
                |name| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let status = read("status");
            let is_ours = status.lines().any(|line| {
                line.strip_prefix("PPid:")
                    .is_some_and(|parent| parent.trim() == me)
            });
            let ready = status
                .lines()
                .any(|line| line == "CapPrm:\t0000000000000000");
            is_ours && ready && read("cmdline").contains(COMPILE_FILTER_ARG)
        })
        .collect()
}
