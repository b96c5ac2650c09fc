//! Front-ends of vhost-user that are honest and that are not, on a switch that a thread of the test
//! serves. The classes V1 to V21 are those of bugs that other back-ends had; what needs no socket is
//! tested beside the code (V1, V5, V11).
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod changed;
mod coming;
mod cost;
mod flooded;
mod frames;
mod front;
mod lanes;
mod left;
mod lying;
mod memory;
mod merged;
mod messages;
mod segments;
mod touched;
mod valid;
mod waking;

use std::fs::Permissions;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vnplug_path::source::{Queue, Received, wait};
use vnplug_ring::Region;
use vnplug_ring::offload::{Offload, flags, gso};
use vnplug_switch::{Access, Switch, SwitchConfig, Switchboard, VhostConfig};
use vnplug_testing::{TestDir, eventually, until};

use front::*;
use segments::*;

/// A switch that is served until this is dropped, and what was captured on it.
struct Served {
    _home: TestDir,
    path: PathBuf,
    board: Switchboard,
    stop: Arc<AtomicBool>,
    turns: Arc<AtomicU64>,
    /// Somebody captures in some turns.
    flips: Arc<AtomicBool>,
    /// A port by rings is there in some turns.
    reads: Arc<AtomicBool>,
    counters: Arc<Mutex<Vec<(String, u64)>>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn here() -> Self {
        Self::set("")
    }

    /// One with these settings.
    fn set(settings: &str) -> Self {
        Self::open(settings, LANES, |_| Vec::new())
    }

    /// One that connects to these sockets, in its directory.
    fn with(connect: impl FnOnce(&TestDir) -> Vec<PathBuf>) -> Self {
        Self::open("", LANES, connect)
    }

    /// One whose own thread does everything.
    fn alone() -> Self {
        Self::open("", 0, |_| Vec::new())
    }

    fn open(settings: &str, lanes: usize, connect: impl FnOnce(&TestDir) -> Vec<PathBuf>) -> Self {
        let home = TestDir::new("vhost");
        let path = home.path("lan0.sock");
        let mut config = SwitchConfig::new("lan0");
        config.lanes = lanes;
        config.settings.apply(settings).unwrap();
        config.vhost = VhostConfig {
            path: Some(path.clone()),
            connect: connect(&home),
            access: Access::default(),
        };
        Self::opened(home, path, Switch::open(config).unwrap())
    }

    /// What was opened, with this socket.
    fn opened(
        home: TestDir,
        path: PathBuf,
        (mut queue, board): (Box<dyn Queue>, Switchboard),
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (counters, turns) = (Arc::default(), Arc::new(AtomicU64::new(0)));
        let (stopped, told) = (Arc::clone(&stop), Arc::clone(&counters));
        let turned = Arc::clone(&turns);
        let flips = Arc::new(AtomicBool::new(false));
        let reads = Arc::new(AtomicBool::new(true));
        let others = [Arc::clone(&flips), Arc::clone(&reads)];
        let thread = std::thread::spawn(move || {
            serve(&mut *queue, &stopped, &told, &turned, &others);
        });
        Self {
            _home: home,
            path,
            board,
            stop,
            turns,
            flips,
            reads,
            counters,
            thread: Some(thread),
        }
    }

    fn guest(&self, features: u64) -> Guest {
        Guest::boot(&self.path, features)
    }

    /// A counter, as it is when what happened by now is counted.
    fn count(&self, name: &str) -> u64 {
        let now = self.turns.load(Ordering::Acquire);
        eventually("a turn ends", || {
            self.turns.load(Ordering::Acquire) > now + 1
        });
        let counters = self.counters.lock().unwrap();
        let found = counters.iter().find(|(key, _)| key == name);
        found.unwrap_or_else(|| panic!("no {name}")).1
    }

    fn check_sums(&self) {
        self.count("entered");
        let counters = self.counters.lock().unwrap().clone();
        let sum = |is_part: &dyn Fn(&str) -> bool| {
            let parts = counters.iter().filter(|(name, _)| is_part(name));
            parts.map(|it| it.1).sum::<u64>()
        };
        let fates = |name: &str| {
            ["unicast", "flooded", "consumed"].contains(&name) || name.starts_with("in_dropped_")
        };
        let copies = |name: &str| {
            ["out_enqueued", "out_merged"].contains(&name) || name.starts_with("out_dropped_")
        };
        assert_eq!(sum(&|name| name == "entered"), sum(&fates), "{counters:?}");
        assert_eq!(sum(&|name| name == "due"), sum(&copies), "{counters:?}");
    }

    /// That the switch serves others as if nothing had happened.
    fn check_alive(&self) {
        let (mut one, mut two) = (self.guest(PLAIN), self.guest(PLAIN));
        one.send(&frame(0xfe, 0xfd, 1));
        assert_eq!(two.next().1, frame(0xfe, 0xfd, 1));
        two.send(&frame(0xfd, 0xfe, 2));
        assert_eq!(one.next().1, frame(0xfd, 0xfe, 2));
        self.check_sums();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Threads that forward beside the one of the switch, in most tests.
const LANES: usize = 2;

fn serve(
    queue: &mut dyn Queue,
    stop: &AtomicBool,
    counters: &Mutex<Vec<(String, u64)>>,
    turns: &AtomicU64,
    [flips, reads]: &[Arc<AtomicBool>; 2],
) {
    let waker = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    while !stop.load(Ordering::Relaxed) {
        // All ways to take frames, in turns: as if a port by rings came and went, and a capture if it flips.
        let turn = turns.load(Ordering::Relaxed);
        let reads = reads.load(Ordering::Relaxed);
        queue.may_pass(!(reads && turn.is_multiple_of(4)));
        queue.is_watched(flips.load(Ordering::Relaxed) && turn.is_multiple_of(32));
        let received = queue.receive(&mut |_| {});
        *counters.lock().unwrap() = queue.own_counters();
        turns.fetch_add(1, Ordering::Release);
        if received.unwrap() == Received::Nothing {
            wait(queue, waker.as_fd(), Some(Duration::from_millis(20)));
        }
    }
}

/// A frame of 60 bytes that says which it is.
fn frame(to: u8, from: u8, number: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(60, 0xa5);
    frame
}

/// A TCP frame that is left to be cut and summed.
fn super_frame(to: u8, from: u8, payload: usize) -> (Vec<u8>, Offload) {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0, 0x45, 0];
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 3, from, 10, 0, 3, to]);
    frame.extend([0x1b, 0x58, 0x1b, 0x59, 0, 0, 0, 1, 0, 0, 0, 1]);
    frame.extend([0x50, 0x18, 4, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|at| at as u8));
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        gso_type: gso::TCPV4,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    (frame, offload)
}

/// How often this process has a memory of this name mapped, and open.
fn uses(name: &str) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let maps = maps.lines().filter(|line| line.contains(name)).count();
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = all.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    let fds = links.filter(|link| link.to_string_lossy().contains(name));
    (maps, fds.count())
}

/// How many descriptors of this process name the same eventfd.
fn probe(fd: &OwnedFd) -> usize {
    let id = |fd: &str| {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        let line = info.lines().find(|line| line.starts_with("eventfd-id:"))?;
        Some(line.to_owned())
    };
    let own = id(&fd.as_raw_fd().to_string());
    assert!(own.is_some(), "the kernel tells eventfds apart");
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        id(name.to_str().unwrap()) == own
    })
    .count()
}
