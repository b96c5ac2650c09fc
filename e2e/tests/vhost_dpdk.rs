//! Front-ends of DPDK's virtio-user on a switch by vhost-user.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::Running;
use vnplug_testing::{PATIENCE, eventually};

/// A testpmd whose only port is a front-end of ours; `device` follows its path.
fn testpmd(lab: &Lab, name: &str, socket: &Path, device: &str, more: &[&str]) -> Running {
    let mut command = Command::new("dpdk-testpmd");
    let device = format!("net_virtio_user0,path={},{device}", socket.display());
    // What DPDK keeps by this name is the machine's: tests of other trees run there, too.
    let name = &format!("{name}-{}", std::process::id());
    command.args(["--no-huge", "--no-pci", "-m", "512", "-l", "0,1"]);
    command.args(["--file-prefix", name, "--vdev", &device, "--"]);
    command.arg("--total-num-mbufs=8192");
    command.args(more);
    Running::start(command, lab, name).unwrap()
}

fn count(daemon: &Daemon, name: &str) -> u64 {
    value(counted(&daemon.counters(), "source"), name)
}

#[test]
fn virtio_user_of_dpdk_sends_and_receives() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let start = |name: &str, mode: &str| {
        let more = ["--no-lsc-interrupt", mode];
        testpmd(&lab, name, &socket, "queues=1", &more)
    };
    let receiver = start("vnplug-rx", "--forward-mode=rxonly");
    eventually("it is there", || count(&daemon, "switch_ports") == 1);
    let sender = start("vnplug-tx", "--forward-mode=txonly");
    eventually("frames go", || count(&daemon, "out_enqueued") > 10_000);
    drop((sender, receiver));
    eventually("both are gone", || count(&daemon, "switch_ports") == 0);
    daemon.audit();
}

/// Kills the daemon under a virtio-user that listens, and starts another one; whether frames come again within a
/// time, and what the virtio-user said.
fn comes_again(queues: u32, more: &[&str], within: Duration) -> (bool, String) {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("guest.sock");
    let spec = format!("lan0,vhostconnect={}", socket.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let device = format!("server=1,queues={queues}");
    let [rx, tx] = ["rx", "tx"].map(|way| format!("--{way}q={queues}"));
    let all = [&["--forward-mode=txonly", &rx, &tx], more].concat();
    // Of each a name of its own: tests run beside each other.
    let name = format!("vnplug-server-{queues}-{}", more.len());
    let sender = testpmd(&lab, &name, &socket, &device, &all);
    eventually("frames come", || count(&daemon, "entered") > 10_000);
    daemon.kill();
    daemon.launch().unwrap();
    let begin = Instant::now();
    let mut again = false;
    while !again && begin.elapsed() < within {
        std::thread::sleep(Duration::from_millis(100));
        again = count(&daemon, "entered") > 10_000;
    }
    daemon.audit();
    if again {
        // NB: its queues are started before it says so. That it expected a descriptor before, it says each time: it
        // disconnects once for each interrupt of a connection that has ended.
        eventually("it says so, too", || sender.errors().contains(COMES_BACK));
    }
    (again, sender.errors())
}

/// What a virtio-user says that has another back-end.
const COMES_BACK: &str = "reconnection succeeds";

#[test]
fn a_virtio_user_that_listens_comes_back_to_the_next_daemon() {
    for queues in [1, 2] {
        let (again, said) = comes_again(queues, &[], PATIENCE);
        assert!(again, "{queues} queues: {said}");
    }
}

/// It looks at its connection when it is asked for the state of its link, and testpmd asks for that in interrupts
/// alone: without them it neither sees that the first daemon is gone nor accepts the second one.
#[test]
fn a_virtio_user_that_is_never_asked_for_its_link_does_not() {
    for queues in [1, 2] {
        let (again, said) = comes_again(queues, &["--no-lsc-interrupt"], Duration::from_secs(3));
        assert!(!again && !said.contains("is down"), "{queues}: {said}");
    }
}
