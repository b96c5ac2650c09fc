//! The calls of libvdeplug, by a C program.

use std::path::Path;
use std::process::{Command, Stdio};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_testing::eventually;

use crate::support::{environment, ports};

/// The C program, ready to be started with these arguments.
fn calls(lab: &Lab, daemon: &Daemon, args: &[&str]) -> Command {
    let program = lab.dir().join("calls");
    if !program.exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/calls.c");
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"]);
        cc.arg(&program)
            .arg(source)
            .args(["-lvdeplug", "-lpthread"]);
        assert!(cc.status().unwrap().success(), "libvdeplug-dev is needed");
    }
    let mut command = Command::new("timeout");
    command.arg("-k5").arg("120").arg(program).args(args);
    command.envs(environment(lab, daemon));
    command
}

fn ok(mut command: Command) {
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success() && text.ends_with("ok\n"), "{text}");
}

#[test]
fn the_descriptor_is_readable_exactly_while_there_are_frames() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    ok(calls(&lab, &daemon, &["readable", "vnplug://lan0"]));
    daemon.audit();
}

#[test]
fn a_call_waits_unless_the_program_wants_none_to() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    ok(calls(&lab, &daemon, &["waits", "vnplug://lan0"]));
}

#[test]
fn two_threads_send_and_receive_at_once() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    ok(calls(&lab, &daemon, &["threads", "vnplug://lan0"]));
    daemon.audit();
}

#[test]
fn a_daemon_that_hangs_holds_a_sender_up_for_a_moment() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let pid = daemon.pid().to_string();
    ok(calls(
        &lab,
        &daemon,
        &["full", "vnplug://lan0[ring=64K]", &pid],
    ));
}

#[test]
fn a_switch_that_is_gone_for_good_ends_the_control_descriptor() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut command = calls(&lab, &daemon, &["gone", "vnplug://lan0"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn().unwrap();
    eventually("it has joined", || ports(&daemon) == 1);
    daemon.kill();
    // The next one at that socket has no such switch.
    let pools = lab.dir().join("pools");
    std::fs::create_dir(&pools).unwrap();
    let mut other = Command::new(program("vnplugd").unwrap());
    other.arg("--socket").arg(daemon.socket());
    other.arg("--pool-dir").arg(pools);
    other
        .args(["--source", "lab=gen,pps=1"])
        .stderr(Stdio::null());
    let mut other = other.spawn().unwrap();
    let done = running.wait_with_output().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    let [out, errors] = [&done.stdout, &done.stderr].map(|it| String::from_utf8_lossy(it));
    assert!(out.ends_with("ok\n"), "{out}{errors}");
    assert!(errors.contains("host:lan0"), "{errors}");
}
