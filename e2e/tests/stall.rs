//! A source whose thread hangs, here in a file that never answers: it stops nobody else, it is told,
//! and the daemon ends when it is to.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Client, Next};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, audit, label};

const LIMIT: Duration = Duration::from_secs(60);

/// A file, mounted by FUSE, that can be opened, and whose reader waits for ever.
struct Silent {
    path: PathBuf,
    /// While this is open, and the thread that answers lives.
    device: File,
}

impl Silent {
    /// `None` where there is no FUSE.
    fn mount(dir: &Path) -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.ok()?;
        let path = dir.join("silent.pcap");
        fs::write(&path, "").unwrap();
        let mount = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o"])
            .arg("fd=0,rootmode=100644,user_id=0,group_id=0,allow_other")
            .args(["vnplug-silent".as_ref(), path.as_os_str()])
            .stdin(Stdio::from(device.try_clone().unwrap()))
            .status();
        if !mount.is_ok_and(|status| status.success()) {
            return None;
        }
        let served = device.try_clone().unwrap();
        thread::spawn(move || serve(served));
        Some(Self { path, device })
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // The thread that reads goes on with an error.
        let unmounted = Command::new("umount")
            .arg("-f")
            .arg("-l")
            .arg(&self.path)
            .status();
        let _ = (unmounted, &self.device);
    }
}

/// Answers what opening a file asks (linux/fuse.h, version 7.19), and nothing afterwards: a read that
/// nobody has taken can be killed with its process.
fn serve(mut device: File) {
    const GETATTR: u32 = 3;
    const OPEN: u32 = 14;
    const INIT: u32 = 26;
    const NO_ANSWER: [u32; 3] = [2, 36, 42]; // forget, interrupt, forget many
    const NO_SUCH_CALL: i32 = -38;
    let mut request = vec![0; 1 << 17];
    let (mut told, mut opened) = (false, false);
    while !(told && opened)
        && let Ok(len) = device.read(&mut request)
    {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let opcode = word(4);
        if len < 40 || NO_ANSWER.contains(&opcode) {
            continue;
        }
        let mut body = Vec::new();
        let mut put = |words: &[u32]| {
            let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
            body.extend(bytes);
        };
        let mut error = 0;
        match opcode {
            // Version, read-ahead, flags, queue lengths, longest write.
            INIT => put(&[7, 19, 0, 0, 0, 4096]),
            // Valid for an hour; inode 1, 1 MiB, regular file.
            GETATTR => {
                told = true;
                put(&[3600, 0, 0, 0, 1, 0, 1 << 20, 0, 2048, 0]);
                put(&[0; 6]);
                put(&[0; 3]);
                put(&[0o100_644, 1, 0, 0, 0, 4096, 0]);
            }
            // Not from the page cache.
            OPEN => {
                opened = true;
                put(&[1, 0, 1, 0]);
            }
            _ => error = NO_SUCH_CALL,
        }
        let mut answer = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        answer.extend(i32::to_ne_bytes(error));
        answer.extend(&request[8..16]);
        answer.extend(body);
        // A request that was interrupted wants no answer any more.
        let _ = device.write(&answer);
    }
}

/// A daemon with a source that hangs when its first port is opened, and one that does not.
fn with_a_silent_source(lab: &Lab) -> Option<(Silent, Daemon)> {
    let Some(silent) = Silent::mount(lab.dir()) else {
        eprintln!("skipped: no FUSE here");
        return None;
    };
    let slow = format!("slow=pcap:{}", silent.path.display());
    let good = "good=gen,pps=5000,start=attach,size=64";
    let daemon = Daemon::start(lab, None, &["--source", &slow, "--source", good]).unwrap();
    Some((silent, daemon))
}

fn state(client: &mut Client, name: &str) -> String {
    let devices = client.devices().unwrap();
    let is_it = |name: &str| format!("host:{name}");
    let found = devices.into_iter().find(|it| it.name == is_it(name));
    found.unwrap().state
}

fn becomes(client: &mut Client, name: &str, wanted: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = state(client, name);
        if state == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{name} is {state}, not {wanted}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_source_that_hangs_stops_nobody_else_and_is_told() {
    let lab = Lab::new().unwrap();
    let Some((silent, daemon)) = with_a_silent_source(&lab) else {
        return;
    };
    let mut good = daemon.port("good").ring_bytes(16 << 20).open().unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let slow = daemon.port("slow").open().unwrap();
    // From here on its thread hangs: nobody knows it yet, then everybody.
    let begun = Instant::now();
    let mut took = Vec::new();
    let (mut packets, mut lost) = (0_u64, 0);
    while begun.elapsed() < Duration::from_secs(3) || state(&mut client, "slow") != "stalled" {
        let asked = Instant::now();
        client.devices().unwrap();
        took.push(asked.elapsed());
        while let Next::Packet(packet) = good.next().unwrap() {
            packets += 1;
            lost += u64::from(packet.meta.lost);
        }
        assert!(begun.elapsed() < LIMIT, "it is never told");
        thread::sleep(Duration::from_millis(5));
    }
    took.sort_unstable();
    let (median, longest) = (took[took.len() / 2], took[took.len() - 1]);
    eprintln!("List beside a thread that hangs: median {median:?}, longest {longest:?}");
    assert!(median < Duration::from_millis(10), "median {median:?}");
    assert!(longest < Duration::from_secs(3), "longest {longest:?}");
    assert_eq!(lost, 0, "of {packets}");
    assert!(packets > 1000, "{packets}");

    let asked = Instant::now();
    let counters = daemon.counters();
    assert!(
        asked.elapsed() < Duration::from_secs(3),
        "{:?}",
        asked.elapsed()
    );
    audit(&counters);
    let is_slow = |name: &str| name == "slow";
    let source = counters.iter().find(|it| is_slow(&it.name)).unwrap();
    assert_eq!(label(source, "state"), "stalled");
    let says = "source \"slow\"'s queue 0 has not answered for";
    assert!(label(source, "stalled").contains(says), "{source:?}");
    let refused = daemon.port("slow").open().err().unwrap().to_string();
    assert!(refused.contains(says), "{refused}");
    let asked = Instant::now();
    drop(slow);
    client.devices().unwrap();
    assert!(
        asked.elapsed() < Duration::from_secs(3),
        "{:?}",
        asked.elapsed()
    );

    // It goes on, with an error, and what waited for it is done.
    drop(silent);
    becomes(&mut client, "slow", "failed");
    let log = daemon.log();
    assert!(log.contains("slow@0: its thread has not turned"), "{log}");
    let deadline = Instant::now() + LIMIT;
    while !daemon.log().contains("slow@0: its thread goes on") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        thread::sleep(Duration::from_millis(20));
    }
    drop(good);
    daemon.await_no_ports();
    daemon.audit();
}

#[test]
fn a_daemon_whose_thread_hangs_ends_when_it_is_told_to() {
    let lab = Lab::new().unwrap();
    let Some((silent, daemon)) = with_a_silent_source(&lab) else {
        return;
    };
    // Dropped first: a test that fails must not wait for the daemon's read.
    let daemon = daemon;
    let _silent = silent;
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let _slow = daemon.port("slow").open().unwrap();
    becomes(&mut client, "slow", "stalled");
    let pid = daemon.pid();
    let told = Instant::now();
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::TERM).unwrap();
    // A zombie has no threads but the one that nobody has waited for.
    let runs = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.trim_start().as_bytes()[0]);
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        threads > 1 || state.is_some_and(|state| state != b'Z')
    };
    while runs() {
        assert!(told.elapsed() < Duration::from_secs(20), "{}", daemon.log());
        thread::sleep(Duration::from_millis(5));
    }
    eprintln!("ended {:?} after SIGTERM", told.elapsed());
    // Two seconds, and what a loaded machine adds.
    assert!(
        told.elapsed() < Duration::from_secs(4),
        "{:?}",
        told.elapsed()
    );
    assert!(!daemon.socket().exists());
    let log = daemon.log();
    assert!(log.contains("slow@0: its thread does not end"), "{log}");
}
