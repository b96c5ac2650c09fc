//! What the README tells a reader to type, typed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Output;

use vnplug::Client;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, guest_program, program};
use vnplug_e2e::typed::{self, Shell};

fn script(heading: &str) -> String {
    typed::indented(&typed::page("README.md"), heading)
}

/// Runs a script with the programs that lie beside this one.
fn run(script: &str, dir: &Path, daemon: &Daemon, program: &Path) -> Output {
    let shell = Shell {
        dir,
        socket: &daemon.socket(),
        programs: &[program.parent().unwrap()],
        netns: None,
    };
    shell.run(script)
}

fn run_apart(script: &str) -> Output {
    let programs = program("vnplugd").unwrap();
    typed::run_apart(script, &[programs.parent().unwrap()])
}

#[test]
fn a_wire_is_received_sent_on_dropped_early_shared_and_timed() {
    program("vnplug").unwrap();
    // A veth loses what a busy machine fetches late, and the witness says so with its status.
    let script = script("## On a wire").replace("wait $!", "wait $! || test $? = 3");
    let output = run_apart(&script);
    let told = String::from_utf8_lossy(&output.stdout);
    let said = format!("{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(told.contains("XDP native"), "{said}");
    assert!(said.contains("20,000 frames written"), "{said}");
    assert!(told.contains("0 corrupt"), "{said}");
    let early = told.lines().find(|line| line.contains("source wire1:"));
    let early = early.and_then(|line| line.split(" + ").find(|part| part.contains("early")));
    let count = early.and_then(|part| part.split(' ').next());
    let count: u64 = count.unwrap().replace(',', "").parse().unwrap();
    assert!(count > 0, "{said}");
    assert!(told.contains("echo_p99_ns"), "{said}");
}

#[test]
fn two_containers_are_on_a_switch_and_one_port_of_it_is_read() {
    program("vnplug").unwrap();
    let output = run_apart(&script("## A switch between machines"));
    let told = String::from_utf8_lossy(&output.stdout);
    let said = format!("{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(told.contains("1 packets transmitted, 1 received"), "{said}");
    assert_eq!(told.matches("ICMP echo").count(), 2, "{said}");
    assert!(told.contains("lan0/port2"), "{said}");
}

#[test]
fn user_mode_linux_starts_counts_ends_and_is_forgotten() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000,flows=10"]).unwrap();
    let dir = lab.dir().join("readme");
    fs::create_dir(&dir).unwrap();
    let installed = guest_program().unwrap();
    let output = run(&script("## User-mode Linux"), &dir, &daemon, &installed);
    let console = String::from_utf8_lossy(&output.stdout);
    let said = format!("{console}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(console.contains("host:lab"), "{said}");
    // The summary of `vnplug count --witness`.
    assert!(console.contains("0 lost"), "{said}");
    let vms = Client::connect_to(&daemon.socket())
        .unwrap()
        .stats()
        .unwrap();
    assert!(vms.iter().all(|counted| counted.kind != "vm"), "{vms:?}");
}

#[test]
fn a_wire_is_recorded_and_found_again() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000,flows=100"]).unwrap();
    let dir = lab.dir().join("readme");
    fs::create_dir(&dir).unwrap();
    let built = program("vnplug-web").unwrap();
    program("vnplug").unwrap();
    let output = run(&script("## Recording"), &dir, &daemon, &built);
    let told = String::from_utf8_lossy(&output.stdout);
    let said = format!("{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("durable up to packet"), "{said}");
    assert_eq!(told.matches("IP 10.0.0.7.").count(), 3, "{said}");
    assert_eq!(told.matches(" udp 10.0.0.").count(), 3, "{said}");
    let picture = fs::read_to_string(dir.join("timeline.svg")).unwrap();
    assert!(picture.contains("packets"), "{picture}");
}
