//! A daemon that is killed, with the configuration that the documentation shows, leaves no memory, no
//! process, no interface and no namespace; of the VMs' pools it leaves those that the next one serves.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use vnplug::Client;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::huge_pages::HugePages;
use vnplug_e2e::raw::Raw;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{Message, VmKind, VmSpec};
use vnplug_testing::eventually;

const DOCUMENT: &str = include_str!("../../docs/vnplugd.md");

/// The example of the documentation, for users and directories that there are here.
fn example(state: &Path) -> String {
    let begin = DOCUMENT.find("```toml\n").expect("an example") + 8;
    let len = DOCUMENT[begin..].find("```").expect("its end");
    let text = &DOCUMENT[begin..begin + len];
    let state_dir = format!("state_dir = {state:?}");
    let replaced = [
        ("state_dir = \"/var/lib/vnplug\"", state_dir.as_str()),
        ("socket_group = \"vnplug\"", "socket_group = \"nogroup\""),
        ("user = \"vnplug\"", "user = \"nobody\""),
        (
            "observers = [\"vnplug-metrics\", \"vnplug-web\"]",
            "observers = [\"nobody\"]",
        ),
    ];
    replaced.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "the example has no {from}");
        text.replace(from, to)
    })
}

/// The files in /dev/shm that a daemon of this state directory made.
fn shared(before: &[PathBuf]) -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev/shm").expect("a tmpfs").flatten();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("vnplug-") && path.is_file() && !before.contains(path)
    };
    entries.map(|entry| entry.path()).filter(is_ours).collect()
}

/// Removes what a failed test would leave.
struct Sweeps(Vec<PathBuf>);

impl Drop for Sweeps {
    fn drop(&mut self) {
        for path in shared(&self.0) {
            let _ = fs::remove_file(path);
        }
    }
}

fn spec(name: &str, pool_bytes: u64) -> VmSpec {
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes,
        vectors: 2,
        allow: Vec::new(),
        owner: 3,
        groups: Vec::new(),
        stays_for: None,
    }
}

/// The processes that a process started, and theirs.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let lists = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    let own = lists.iter().flat_map(|list| list.split_whitespace());
    let own = own.filter_map(|pid| pid.parse().ok());
    own.flat_map(|child| [vec![child], children(child)].concat())
        .collect()
}

/// It runs, and is no zombie.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z") && !stat.contains(") X"))
}

fn kill_it_alone(daemon: &mut Daemon) {
    let pid = daemon.pid();
    let helpers = children(pid);
    assert!(!helpers.is_empty(), "filters are compiled by a process");
    kill_process(Pid::from_raw(pid as i32).expect("a process"), Signal::KILL).expect("it is ours");
    eventually("it and all it started are gone", || {
        !is_alive(pid) && !helpers.iter().any(|&pid| is_alive(pid))
    });
    daemon.kill();
}

#[test]
fn a_killed_daemon_leaves_nothing_but_what_the_next_one_serves() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("eth0", "eth1").unwrap();
    let before = shared(&[]);
    let _sweeps = Sweeps(before.clone());
    fs::set_permissions(lab.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let state = lab.dir().join("state");
    let config = lab.dir().join("vnplug.toml");
    // A veth has one receive queue.
    fs::write(&config, example(&state).replace("queues = 2", "queues = 1")).unwrap();
    let args = [
        "--config",
        config.to_str().unwrap(),
        "--pool-dir",
        "/dev/shm",
    ];
    let pages = HugePages::reserve(8);
    let free = || pages.as_ref().map(HugePages::free);
    let at_first = free();
    let mut daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    operator.attach_vm(spec("probe", 4 << 20)).unwrap();
    let port = daemon
        .port("eth1")
        .ring_bytes(8 << 20)
        .filter("tcp")
        .open()
        .unwrap();
    // The control: these pages are taken.
    assert!(free() < at_first || pages.is_none());
    // It dies while it makes another pool.
    let mut other = Raw::greeted(&daemon.socket());
    let attach = Message::AttachVm(spec("large", 2 << 30));
    other.send(&attach.encode(1, 0)).unwrap();
    eventually("a second pool is begun", || shared(&before).len() == 2);
    kill_it_alone(&mut daemon);
    drop((port, operator, other));
    // What its readers had is free with them.
    eventually("huge pages are free", || free() == at_first);
    daemon
        .launch()
        .expect("the next one starts where a socket was left");
    let left = shared(&before);
    assert!(
        left.len() == 1 && left[0].to_string_lossy().contains("probe"),
        "{left:?}"
    );
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    operator.detach_vm("probe").unwrap();
    drop(operator);
    kill_it_alone(&mut daemon);
    assert!(shared(&before).is_empty(), "{:?}", shared(&before));
    let vms: Vec<_> = fs::read_dir(state.join("vms")).unwrap().flatten().collect();
    assert!(vms.is_empty(), "{vms:?}");
    // Nobody is in the namespace, and nothing holds its interface.
    let there = Command::new("ip")
        .args(["netns", "pids", netns.name()])
        .output()
        .unwrap();
    assert!(
        there.status.success() && there.stdout.is_empty(),
        "{there:?}"
    );
    netns.ip(&["link", "del", "eth0"]).unwrap();
    let links = netns.ip(&["-o", "link"]).unwrap();
    assert!(!links.contains("eth1"), "{links}");
}
