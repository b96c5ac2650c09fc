//! Front-ends of vhost-user that are honest and that are not, on a switch that a thread of the test
//! serves. The classes V1 to V21 are those of bugs that other back-ends had; what needs no socket is
//! tested beside the code (V1, V5, V11).
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cost;
mod front;
mod left;
mod merged;

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
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
use vnplug_switch::{Access, Switch, SwitchConfig, VhostConfig};
use vnplug_testing::{TestDir, eventually};

use front::*;

/// A switch that is served until this is dropped, and what was captured on it.
struct Served {
    _home: TestDir,
    path: PathBuf,
    stop: Arc<AtomicBool>,
    turns: Arc<AtomicU64>,
    counters: Arc<Mutex<Vec<(String, u64)>>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn here() -> Self {
        Self::set("")
    }

    /// One with these settings.
    fn set(settings: &str) -> Self {
        Self::open(settings, |_| Vec::new())
    }

    /// One that connects to these sockets, in its directory.
    fn with(connect: impl FnOnce(&TestDir) -> Vec<PathBuf>) -> Self {
        Self::open("", connect)
    }

    fn open(settings: &str, connect: impl FnOnce(&TestDir) -> Vec<PathBuf>) -> Self {
        let home = TestDir::new("vhost");
        let path = home.path("lan0.sock");
        let mut config = SwitchConfig::new("lan0");
        config.settings.apply(settings).unwrap();
        config.vhost = VhostConfig {
            path: Some(path.clone()),
            connect: connect(&home),
            access: Access::default(),
        };
        let (mut queue, _) = Switch::open(config).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (counters, turns) = (Arc::default(), Arc::new(AtomicU64::new(0)));
        let (stopped, told) = (Arc::clone(&stop), Arc::clone(&counters));
        let turned = Arc::clone(&turns);
        let thread = std::thread::spawn(move || serve(&mut *queue, &stopped, &told, &turned));
        Self {
            _home: home,
            path,
            stop,
            turns,
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

fn serve(
    queue: &mut dyn Queue,
    stop: &AtomicBool,
    counters: &Mutex<Vec<(String, u64)>>,
    turns: &AtomicU64,
) {
    let waker = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    while !stop.load(Ordering::Relaxed) {
        // Both ways to take frames, in turns: as if a reader came and went.
        queue.may_pass(!turns.load(Ordering::Relaxed).is_multiple_of(4));
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

#[test]
fn frames_go_between_guests_and_each_is_counted() {
    let served = Served::here();
    for features in [PLAIN, PLAIN | EVENT_IDX, PROTOCOL, PROTOCOL | EVENT_IDX] {
        // Without virtio 1 and mergeable buffers the header has two bytes less: not these guests'.
        let features = features | VERSION_1 | MRG_RXBUF;
        let (mut one, mut two) = (served.guest(features), served.guest(features));
        let mut three = served.guest(PLAIN);
        for number in 0..1000 {
            one.send(&frame(2, 1, number));
            let (header, bytes) = two.next();
            assert_eq!(bytes, frame(2, 1, number));
            assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            two.send(&frame(1, 2, number));
            assert_eq!(one.next().1, frame(1, 2, number));
        }
        // Only the first, to a stranger.
        assert_eq!(three.drain(), 1);
        eventually("all came back", || one.has_sent() && two.has_sent());
        let mut calls = [0; 8];
        rustix::io::read(&two.receiving.call, &mut calls).unwrap();
    }
    served.check_sums();
}

#[test]
fn super_frames_are_whole_for_a_guest_that_takes_them_and_cut_and_summed_for_another() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let mut sums = served.guest(PLAIN | GUEST_CSUM);
    let mut plain = served.guest(PLAIN);
    let (bytes, offload) = super_frame(0xee, 1, 20_000);
    sender.send_offloaded(&bytes, &offload);
    let (header, whole) = takes.next();
    assert_eq!(whole, bytes);
    let mut expected = offload.to_header(&bytes);
    // In so many buffers of 2,048 bytes.
    expected[10] = 10;
    assert_eq!(header, expected);
    for guest in [&mut sums, &mut plain] {
        let mut payload = Vec::new();
        while payload.len() < 20_000 {
            let (header, cut) = guest.next();
            assert_eq!(header[0] & flags::NEEDS_CSUM, 0);
            assert_eq!(header[1], gso::NONE);
            payload.extend_from_slice(&cut[54..]);
        }
        assert_eq!(payload, bytes[54..]);
    }
    // A missing sum alone.
    let (bytes, offload) = super_frame(0xee, 1, 100);
    let partial = Offload {
        gso_type: gso::NONE,
        gso_size: 0,
        ..offload
    };
    sender.send_offloaded(&bytes, &partial);
    assert_eq!(takes.next().1, bytes);
    let (header, left) = sums.next();
    assert_eq!((header[0], &left), (flags::NEEDS_CSUM, &bytes));
    let (header, summed) = plain.next();
    assert_eq!(header[0], 0);
    assert_ne!(summed[50..52], bytes[50..52]);
    served.check_sums();
}

#[test]
fn headers_that_lie_cost_the_frame_and_not_the_port_v8_v10() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let (bytes, good) = super_frame(0xee, 1, 4000);
    let lies = [
        Offload {
            csum_start: 0xffff,
            ..good
        },
        Offload {
            csum_offset: 0xffff,
            ..good
        },
        Offload {
            csum_start: 33,
            ..good
        },
        Offload {
            gso_size: 0,
            ..good
        },
        Offload {
            gso_type: 2,
            ..good
        },
        Offload {
            gso_type: 0x85,
            ..good
        },
        Offload {
            gso_type: gso::TCPV6,
            ..good
        },
        Offload {
            gso_type: gso::UDP_L4,
            ..good
        },
        Offload {
            gso_type: 0,
            csum_start: 4100,
            ..good
        },
        Offload {
            gso_type: 0,
            csum_start: 4053,
            csum_offset: 0,
            ..good
        },
    ];
    for lie in &lies {
        sender.send_offloaded(&bytes, lie);
    }
    // On no TCP at all.
    sender.send_offloaded(&frame(2, 1, 0), &good);
    sender.send(&frame(0xee, 1, 7));
    assert_eq!(other.next().1, frame(0xee, 1, 7));
    assert_eq!(served.count("in_dropped_offload"), lies.len() as u64 + 1);
    served.check_sums();
}

#[test]
fn a_header_is_fetched_once_v9_v13() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut other = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let (bytes, good) = super_frame(0xee, 1, 100);
    let partial = Offload {
        gso_type: gso::NONE,
        ..good
    };
    let stop = AtomicBool::new(false);
    let region = sender.region.clone();
    std::thread::scope(|scope| {
        // csum_start of all of the sender's buffers, to and fro.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for at in 0..u64::from(SIZE) {
                    for start in [0xfff0_u16, 34] {
                        region.store_u16(0x20_0006 + 0x8000 * at, start, Ordering::Relaxed);
                    }
                }
            }
        });
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            sender.send_offloaded(&bytes, &partial);
            eventually("it is taken", || sender.has_sent());
            while let Some((header, _)) = other.received() {
                assert_eq!(header[6..8], 34_u16.to_le_bytes());
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    served.check_alive();
}

#[test]
fn chains_of_no_sense_are_given_back_and_counted_v6_v7() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let region = sender.region.clone();
    let buffer = 0x20_0000;
    region.write(buffer, &[0; 12]);
    region.write(buffer + 12, &frame(0xee, 1, 5));
    // Nothing but (a part of) a header, nothing at all, outside, around the end, a loop, one to be written.
    let bad: [(u64, u32, u16, u16); 9] = [
        (buffer, 12, 0, 0),
        (buffer, 11, 0, 0),
        (buffer, 0, 0, 0),
        (LEN, 72, 0, 0),
        (LEN - 71, 72, 0, 0),
        (u64::MAX - 10, 72, 0, 0),
        (buffer, 72, 1, 0),
        (buffer, 72, 1, SIZE),
        (buffer, 72, 2, 0),
    ];
    for it in bad {
        sender.sending.desc(&region, 0, it);
        sender.sending.offer(&region, 0);
        sender.sending.kick();
        eventually("it comes back", || sender.has_sent());
    }
    // Longer than any frame may be.
    sender.sending.desc(&region, 0, (buffer, 0x11_0000, 0, 0));
    sender.sending.offer(&region, 0);
    sender.sending.kick();
    eventually("it comes back", || sender.has_sent());
    assert_eq!(served.count("in_dropped_chain"), bad.len() as u64);
    assert_eq!(served.count("in_dropped_long"), 1);
    // The header in pieces of five bytes, and some of none.
    for at in 0..15_u16 {
        let len = if at % 3 == 2 { 0 } else { 5 };
        let begin = buffer + 5 * u64::from(at - at / 3);
        let next = if at < 14 { 1 } else { 0 };
        let it = match at {
            14 => (buffer + 50, 22, 0, 0),
            _ => (begin, len, next, at + 1),
        };
        sender.sending.desc(&region, at, it);
    }
    sender.sending.offer(&region, 0);
    sender.sending.kick();
    assert_eq!(other.next().1, frame(0xee, 1, 5));
    // Buffers to receive in that make no sense: the frame is lost, and the next one comes.
    let full = served.count("out_dropped_full");
    for (number, it) in [
        (LEN, 2048, 2, 0),
        (0x10_0000, 2048, 0, 0),
        (0x10_0000, 0, 2, 0),
        (0x10_0000, 2048, 3, SIZE),
        (u64::MAX - 3, 2048, 2, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let head = other.receiving.taken % SIZE;
        let its_region = other.region.clone();
        other.receiving.desc(&its_region, head, it);
        sender.send(&frame(0xee, 1, 100));
        let mut back = None;
        eventually("it comes back", || {
            back = other.receiving.back(&its_region);
            back.is_some()
        });
        assert_eq!(back, Some((head.into(), 0)), "{it:x?}");
        other.post(head);
        sender.send(&frame(0xee, 1, 200));
        assert_eq!(other.next().1, frame(0xee, 1, 200));
        assert_eq!(served.count("out_dropped_full"), full + 1 + number as u64);
    }
    served.check_alive();
}

#[test]
fn a_ring_without_sense_stops_and_can_be_started_again_v12() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let region = sender.region.clone();
    for broken in [true, false] {
        match broken {
            // Far ahead.
            true => region.store_u16(sender.sending.at + 0x1002, 0x4000, Ordering::Release),
            // A head that there is not.
            false => sender.sending.offer(&region, SIZE),
        }
        sender.sending.kick();
        served.count("entered");
        assert_eq!(sender.front.stop(1), 0);
        // As a guest that boots again.
        sender.sending.next = 0;
        sender.sending.taken = 0;
        region.write(sender.sending.at, &[0; 0x3000]);
        assert!(sender.front.start(&sender.sending));
        sender.send(&frame(0xee, 1, 9));
        assert_eq!(other.next().1, frame(0xee, 1, 9));
        eventually("it is back", || sender.has_sent());
        sender.front.stop(1);
        sender.sending.next = 0;
        sender.sending.taken = 0;
        region.write(sender.sending.at, &[0; 0x3000]);
        assert!(sender.front.start(&sender.sending));
    }
    served.check_sums();
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

#[test]
fn descriptors_that_no_message_takes_are_closed_v2() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let spare = event();
    let sent = Arc::new(spare);
    let before = 1;
    for request in [1, 2, 8, 10, 12, 13, 14, 18, 20, 21, 31, 37, 77] {
        for count in [1, 2, 8, 32] {
            let fds = vec![sent.as_fd(); count];
            let payload = bytes_of(&[500]);
            assert!(guest.front.send(request, 0, &payload, &fds));
            if matches!(request, 1) {
                guest.front.answer().unwrap();
            }
        }
        // NB: who has too many that are still to be closed loses its port, on a busy machine soon.
        eventually("they are closed", || probe(&sent) <= before + 1);
    }
    guest.front.number(GET_QUEUE_NUM);
    // One of them may be kept as the channel of our own requests.
    eventually("they are closed", || probe(&sent) <= before + 1);
    // More than any message may bring end the connection, and are closed, too.
    let fds = vec![sent.as_fd(); 200];
    guest.front.send(1, 0, &[], &fds);
    assert!(guest.front.is_closed());
    eventually("they are closed", || probe(&sent) <= before);
    served.check_alive();
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

#[test]
fn the_same_said_a_thousand_times_costs_nothing_v3_v19() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    eventually("what came with the messages is closed", || {
        probe(&guest.sending.kick) == 2
    });
    // The test's own and the switch's mapping, and the test's descriptor.
    let before = (2, 1);
    for round in 0..300 {
        assert!(guest.front.table(&guest.memory, LEN));
        assert!(guest.front.start(&guest.receiving) && guest.front.start(&guest.sending));
        // Another size while it runs, and the right one again.
        let size = [32_768, 1, 8, SIZE.into()][round % 4];
        guest.front.does(SET_VRING_NUM, &halves(1, size), &[]);
    }
    eventually("as many as before", || {
        probe(&guest.sending.kick) == 2 && uses(&guest.name) == before
    });
    assert!(guest.front.start(&guest.sending));
    guest.send(&frame(0xee, 1, 3));
    assert_eq!(other.next().1, frame(0xee, 1, 3));
    let name = guest.name.clone();
    drop(guest);
    eventually("nothing of it is left", || uses(&name) == (0, 0));
}

#[test]
fn numbers_are_checked_before_they_become_shorter_v4_v15() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let front = &mut guest.front;
    for (ring, size) in [
        (0x1_0000, 64),
        (33, 64),
        (257, 64),
        (u32::MAX, 64),
        (0, 0x1_0040),
        (0, 0x1_0000),
        (0, 0),
        (0, 63),
        (0, u32::MAX),
    ] {
        let said = halves(ring, size);
        assert!(!front.does(SET_VRING_NUM, &said, &[]), "{ring} {size}");
    }
    for ring in [33_u32, 256, 0x1_0001] {
        assert!(!front.does(SET_VRING_ENABLE, &halves(ring, 1), &[]));
        assert!(!front.does(SET_VRING_BASE, &halves(ring, 0), &[]));
    }
    for ring in [33_u64, 0xff] {
        let fd = event();
        assert!(!front.does(SET_VRING_KICK, &bytes_of(&[ring]), &[fd.as_fd()]));
        assert!(!front.does(SET_VRING_CALL, &bytes_of(&[ring]), &[fd.as_fd()]));
    }
    // Payloads of the wrong length.
    for request in [SET_FEATURES, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_KICK] {
        for len in [0, 7, 9, 41] {
            assert!(!front.does(request, &vec![0; len], &[]), "{request} {len}");
        }
    }
    let mut other = served.guest(PLAIN);
    guest.send(&frame(0xee, 1, 3));
    assert_eq!(other.next().1, frame(0xee, 1, 3));
}

#[test]
fn unknown_requests_are_answered_and_malformed_messages_end_the_connection() {
    let served = Served::here();
    let mut front = Front::connect(&served.path);
    for request in [
        0,
        22,
        23,
        26,
        28,
        30,
        31,
        32,
        33,
        35,
        39,
        40,
        41,
        43,
        1000,
        u32::MAX,
    ] {
        assert!(!front.does(request, &[0; 16], &[]), "{request}");
    }
    assert_eq!(front.number(GET_QUEUE_NUM), 32);
    assert!(front.number(GET_MAX_MEM_SLOTS) >= 509);
    // A configuration in exactly the size that was asked for.
    let mut asked = [0_u32, 60, 0].map(u32::to_le_bytes).concat();
    asked.resize(12 + 60, 0xff);
    let config = front.ask(GET_CONFIG, &asked);
    assert_eq!(config.len(), 72);
    assert_eq!(config[12] & 3, 2);
    assert!(config[24..].iter().all(|byte| *byte == 0));
    for bytes in [
        // A version that there is not, an answer, and more than there may be.
        [1_u32, 2, 0],
        [1, 5, 0],
        [1, 1, 4097],
        [1, 1, u32::MAX],
    ] {
        let mut front = Front::connect(&served.path);
        pour(&front.socket, &bytes.map(u32::to_le_bytes).concat());
        assert!(front.is_closed());
    }
    // Byte by byte.
    let mut front = Front::connect(&served.path);
    for byte in [1_u32, 1, 0].map(u32::to_le_bytes).concat() {
        pour(&front.socket, &[byte]);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(front.answer().is_some());
    served.check_alive();
}

#[test]
fn a_ring_that_was_stopped_has_no_addresses_v17() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    guest.send(&frame(0xee, 1, 1));
    assert_eq!(other.next().1, frame(0xee, 1, 1));
    eventually("it is back", || guest.has_sent());
    assert_eq!(guest.front.stop(1), 1);
    // All but the addresses is said again: it is not served.
    let (kick, number) = (event(), bytes_of(&[1]));
    assert!(guest.front.does(SET_VRING_KICK, &number, &[kick.as_fd()]));
    assert!(guest.front.does(SET_VRING_ENABLE, &halves(1, 1), &[]));
    guest.send(&frame(0xee, 1, 2));
    vnplug_os::event::ring(&kick);
    served.count("entered");
    assert!(!guest.has_sent());
    assert!(
        guest
            .front
            .does(SET_VRING_ADDR, &guest.sending.addresses(), &[])
    );
    assert_eq!(other.next().1, frame(0xee, 1, 2));
}

#[test]
fn a_file_that_shrinks_costs_its_own_port_v20() {
    let served = Served::here();
    let mut guests = [(); 3].map(|()| served.guest(PLAIN));
    guests[0].send(&frame(0xee, 1, 1));
    eventually("it is back", || guests[0].has_sent());
    ftruncate(&guests[0].memory, 4096).unwrap();
    // NB: the test's own mapping of it is not touched any more.
    guests[0].sending.kick();
    guests[1].send(&frame(0xee, 2, 2));
    let [victim, one, two] = &mut guests;
    eventually("it came", || two.next().1 == frame(0xee, 2, 2));
    eventually("its port is closed", || {
        // Whatever else comes to it is found out, too.
        one.send(&frame(0xee, 2, 2));
        two.drain();
        served.count("switch_ports") == 2
    });
    assert!(victim.front.is_closed());
    served.check_alive();
}

#[test]
fn memory_changes_under_traffic_and_nothing_is_lost_and_old_memory_goes() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let spare = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&spare, LEN).unwrap();
    let piece = bytes_of(&[0, 1 << 32, LEN, USER + (1 << 32), 0]);
    for number in 0..3_000 {
        sender.send(&frame(2, 1, number));
        // Also where the frame goes.
        let guest = if number % 2 == 0 {
            &mut sender
        } else {
            &mut other
        };
        match number % 6 {
            0 | 1 => assert!(guest.front.does(ADD_MEM_REG, &piece, &[spare.as_fd()])),
            2 | 3 => assert!(guest.front.does(REM_MEM_REG, &piece, &[])),
            _ => assert!(guest.front.table(&guest.memory, LEN)),
        }
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    assert!(!other.front.does(REM_MEM_REG, &piece, &[]));
    let now = || [&sender, &other].map(|guest| uses(&guest.name));
    eventually("old memory is unmapped", || {
        now() == [(2, 1); 2] && uses("memfd:spare") == (0, 1)
    });
    served.check_sums();
}

#[test]
fn a_guest_that_never_reads_costs_itself_only() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut deaf = served.guest(PLAIN);
    let mut other = served.guest(PLAIN);
    deaf.send(&frame(0xee, 3, 0));
    other.send(&frame(0xee, 2, 0));
    eventually("they are known", || deaf.has_sent() && other.has_sent());
    sender.drain();
    other.drain();
    for number in 0..5_000 {
        sender.send(&frame(3, 1, number));
        sender.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    // What it has buffers for, what waits for it, and no more.
    let full = served.count("out_dropped_full");
    assert_eq!(full, 5_000 - (u64::from(SIZE) - 1) - 512);
    served.check_sums();
    // Now it reads, in order and all that was kept.
    let mut number = 0;
    assert_eq!(deaf.next().1, frame(0xee, 2, 0));
    while number < u32::from(SIZE) - 1 + 512 {
        assert_eq!(deaf.next().1, frame(3, 1, number));
        number += 1;
    }
    served.check_alive();
}

#[test]
fn what_waited_for_a_guest_and_never_came_is_counted_as_dropped() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    other.send(&frame(0xee, 2, 0));
    eventually("it is known", || other.has_sent());
    let before = served.count("out_enqueued");
    for number in 0..u32::from(SIZE) + 10 {
        sender.send(&frame(2, 1, number));
        eventually("it is taken", || sender.has_sent());
    }
    assert_eq!(served.count("out_enqueued"), before + u64::from(SIZE) + 10);
    let came = std::iter::from_fn(|| other.receiving.back(&other.region));
    assert_eq!(came.count(), usize::from(SIZE));
    // Buffers that are nowhere.
    other
        .receiving
        .desc(&other.region, 0, (1 << 40, 2048, 2, 0));
    (0..10).for_each(|_| other.receiving.offer(&other.region, 0));
    other.receiving.kick();
    eventually("they are lost", || served.count("out_dropped_gone") == 10);
    assert_eq!(served.count("out_enqueued"), before + u64::from(SIZE));
    served.check_sums();
}

#[test]
fn a_guest_that_kicks_without_end_stops_nobody() {
    let served = Served::here();
    let noisy = served.guest(PLAIN);
    let (mut one, mut two) = (served.guest(PLAIN), served.guest(PLAIN));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                noisy.sending.kick();
                noisy.receiving.kick();
            }
        });
        for number in 0..2_000 {
            one.send(&frame(2, 1, number));
            assert_eq!(two.next().1, frame(2, 1, number));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_guest_is_asked_to_kick_when_the_switch_sleeps_and_only_then() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let region = guest.region.clone();
    eventually("it sleeps", || guest.sending.wants_kicks(&region));
    // No kick is asked for buffers that nobody waits for.
    assert!(!guest.receiving.wants_kicks(&region));
    guest.send(&frame(0xee, 1, 1));
    eventually("it is back", || guest.has_sent());
    eventually("it sleeps", || guest.sending.wants_kicks(&region));
}

#[test]
fn a_call_by_a_stream_socket_is_whole_and_a_full_one_stops_nobody() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let fd = OwnedFd::from(theirs);
    let number = bytes_of(&[0]);
    assert!(other.front.does(SET_VRING_CALL, &number, &[fd.as_fd()]));
    drop(fd);
    for number in 0..3_000 {
        sender.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    ours.set_nonblocking(true).unwrap();
    let mut calls = Vec::new();
    let _ = (&ours).read_to_end(&mut calls);
    assert!(calls.len() >= 8 && calls.len() % 8 == 0);
    // Gone.
    drop(ours);
    sender.send(&frame(2, 1, 1));
    assert_eq!(other.next().1, frame(2, 1, 1));
}

#[test]
fn a_call_that_is_made_to_block_costs_its_own_port() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let mut bad = served.guest(PLAIN);
    let call = &bad.receiving.call;
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap_or(0);
    let mut count = [0; 8];
    // It was called when it was started; full it is only when it is empty before.
    let _ = rustix::io::read(call, &mut count);
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(call, rustix::fs::OFlags::empty()).unwrap();
    sender.send(&frame(2, 1, 1));
    assert_eq!(other.next().1, frame(2, 1, 1));
    assert!(bad.front.is_closed());
    served.check_alive();
}

#[test]
fn what_is_no_eventfd_is_no_kick() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (socket, _) = UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    let number = bytes_of(&[1]);
    for fd in [&file, &socket, &guest.memory] {
        assert!(!guest.front.does(SET_VRING_KICK, &number, &[fd.as_fd()]));
    }
    assert!(!guest.front.does(SET_VRING_CALL, &number, &[file.as_fd()]));
    assert!(!guest.front.does(SET_VRING_KICK, &bytes_of(&[0x101]), &[]));
    // No memory that could make a page fault wait.
    let words = bytes_of(&[1, 0, 4096, USER, 0]);
    let exe = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    assert!(!guest.front.does(SET_MEM_TABLE, &words, &[exe.as_fd()]));
}

#[test]
fn the_control_queue_answers_everything_v14() {
    let served = Served::here();
    let wants = PLAIN | GUEST_CSUM | GUEST_TSO4 | CTRL_VQ | GUEST_OFFLOADS;
    let (mut guest, mut sender) = (served.guest(wants), served.guest(PLAIN));
    let mut control = Ring::new(2, 0x3_0000);
    assert!(guest.front.start(&control));
    let region = guest.region.clone();
    let (asked, answered) = (0x8_0000, 0x8_1000);
    let mut ask = |bytes: &[u8], answer: (u64, u32, u16, u16)| {
        region.write(asked, bytes);
        region.write(answered, &[0x77]);
        control.desc(&region, 0, (asked, bytes.len() as u32, 1, 1));
        control.desc(&region, 1, answer);
        control.offer(&region, 0);
        control.kick();
        let mut back = None;
        eventually("it is answered", || {
            back = control.back(&region);
            back.is_some()
        });
        let mut said = [0];
        region.read(answered, &mut said);
        (said[0], back.unwrap())
    };
    let place = (answered, 1, 2, 0);
    let offloads = |bits: u64| [&[5, 0][..], &bits.to_le_bytes()].concat();
    assert_eq!(ask(&[0, 0, 1], place), (0, (0, 1)));
    assert_eq!(ask(&[4, 0, 1, 0], place), (0, (0, 1)));
    for bad in [
        &[4, 0, 0, 0][..],
        &[4, 0, 17, 0],
        &[9, 9, 9],
        &[5, 0, 1],
        &[7],
    ] {
        assert_eq!(ask(bad, place), (1, (0, 1)), "{bad:?}");
    }
    // A loop, no place for an answer, one outside, one that is not to be written.
    for bad in [
        (answered, 1, 1, 0),
        (answered, 0, 2, 0),
        (LEN, 1, 2, 0),
        (answered, 1, 0, 0),
    ] {
        assert_eq!(ask(&[0, 0, 1], bad).0, 0x77, "{bad:?}");
    }
    assert_eq!(ask(&[0, 0, 1], (answered, 1, 3, SIZE)), (1, (0, 1)));
    // What the guest does not take any more it does not get.
    let (bytes, offload) = super_frame(0xee, 1, 4000);
    sender.send_offloaded(&bytes, &offload);
    assert_eq!(guest.next().1, bytes);
    assert_eq!(ask(&offloads(0), place), (0, (0, 1)));
    sender.send_offloaded(&bytes, &offload);
    let lens: Vec<usize> = (0..3).map(|_| guest.next().1.len()).collect();
    assert_eq!(lens, [54 + 1448, 54 + 1448, 54 + 4000 - 2 * 1448]);
    assert_eq!(ask(&offloads(GUEST_CSUM | GUEST_TSO4), place), (0, (0, 1)));
    sender.send_offloaded(&bytes, &offload);
    assert_eq!(guest.next().1, bytes);
}

#[test]
fn a_front_end_that_comes_again_has_its_port_and_goes_on_where_it_was() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    guest.send(&frame(0xee, 1, 1));
    assert_eq!(other.next().1, frame(0xee, 1, 1));
    other.send(&frame(1, 2, 2));
    assert_eq!(guest.next().1, frame(1, 2, 2));
    // The same rings, used by a connection that says that they begin at 0.
    drop(std::mem::replace(
        &mut guest.front,
        Front::connect(&served.path),
    ));
    guest.front.agree(PLAIN);
    assert!(guest.front.table(&guest.memory, LEN));
    assert!(guest.front.start(&guest.receiving) && guest.front.start(&guest.sending));
    for number in 0..200 {
        guest.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
        other.send(&frame(1, 2, number));
        assert_eq!(guest.next().1, frame(1, 2, number));
    }
    eventually("the port of before is gone", || {
        served.count("switch_ports") == 2
    });
}

#[test]
fn a_front_end_that_listens_is_connected_to_again_and_again() {
    let mut listening = None;
    let served = Served::with(|home| {
        let path = home.path("guest.sock");
        listening = Some(UnixListener::bind(&path).unwrap());
        vec![path, home.path("nobody.sock")]
    });
    let listener = listening.unwrap();
    let mut other = served.guest(PLAIN);
    for number in 0..3 {
        let (socket, _) = listener.accept().unwrap();
        let mut guest = Guest::with(Front::on(socket), PLAIN);
        guest.start();
        guest.send(&frame(0xee, 1, number));
        assert_eq!(other.next().1, frame(0xee, 1, number));
    }
    eventually("its port is free", || served.count("switch_ports") == 1);
}

#[test]
fn flows_keep_to_one_pair_each_and_all_pairs_send() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut guest = served.guest(PLAIN);
    // A second pair, whose buffers are those of the first.
    let mut pair = [Ring::new(2, 0x3_0000), Ring::new(3, 0x4_0000)];
    assert!(guest.front.start(&pair[0]) && guest.front.start(&pair[1]));
    let region = guest.region.clone();
    for at in 0..SIZE {
        let buffer = 0x30_0000 + 2048 * u64::from(at);
        pair[0].desc(&region, at, (buffer, 2048, 2, 0));
        pair[0].offer(&region, at);
    }
    let flow = |port: u8| {
        let mut bytes = super_frame(0xee, 1, 26).0;
        bytes[35] = port;
        bytes
    };
    let mut counts = [0, 0];
    for port in 0..64 {
        for _ in 0..2 {
            sender.send(&flow(port));
        }
        let mut came = [0, 0];
        eventually("both come", || {
            came[0] += guest.drain();
            while pair[0].back(&region).is_some() {
                came[1] += 1;
            }
            came[0] + came[1] == 2
        });
        assert!(came == [2, 0] || came == [0, 2], "{came:?}");
        counts = [counts[0] + came[0], counts[1] + came[1]];
        // Enough for all of them.
        while pair[0].next.wrapping_sub(pair[0].taken) < SIZE {
            let head = pair[0].next % SIZE;
            pair[0].offer(&region, head);
        }
    }
    assert!(counts[0] > 20 && counts[1] > 20, "{counts:?}");
    // By the second pair.
    region.write(0x8_0000, &[0; 12]);
    region.write(0x8_000c, &frame(0xee, 7, 1));
    pair[1].desc(&region, 0, (0x8_0000, 72, 0, 0));
    pair[1].offer(&region, 0);
    pair[1].kick();
    assert_eq!(sender.next().1, frame(0xee, 7, 1));
    // One that is switched off is not used, and what has been for it goes to the first.
    assert!(guest.front.does(SET_VRING_ENABLE, &halves(2, 0), &[]));
    for port in 0..64 {
        sender.send(&flow(port));
        guest.next();
    }
    served.check_sums();
}

#[test]
fn a_stopped_guest_says_where_it_is_and_what_is_written_is_logged() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&log, 4096).unwrap();
    let bits = vnplug_os::memory::mapped(&log, 4096).unwrap();
    let said = bytes_of(&[4096, 0]);
    assert!(guest.front.send(SET_LOG_BASE, 0, &said, &[log.as_fd()]));
    assert_eq!(guest.front.answer().unwrap(), (SET_LOG_BASE, 5, vec![]));
    let all = bytes_of(&[PLAIN | LOG_ALL]);
    assert!(guest.front.does(SET_FEATURES, &all, &[]));
    other.send(&frame(0xee, 2, 1));
    assert_eq!(guest.next().1, frame(0xee, 2, 1));
    let mut logged = [0; 4096];
    bits.read(0, &mut logged);
    // The page of the first buffer.
    let mut expected = [0; 4096];
    expected[0x10_0000 / 4096 / 8] = 1;
    assert_eq!(logged, expected);
    // Off again.
    assert!(guest.front.does(SET_FEATURES, &bytes_of(&[PLAIN]), &[]));
    bits.write(0, &[0; 4096]);
    other.send(&frame(0xee, 2, 2));
    assert_eq!(guest.next().1, frame(0xee, 2, 2));
    bits.read(0, &mut logged);
    assert_eq!(logged, [0; 4096]);
    // Other features are not changed while rings run; logs beyond their file are none.
    let other_bits = bytes_of(&[PLAIN | EVENT_IDX]);
    assert!(!guest.front.does(SET_FEATURES, &other_bits, &[]));
    for bad in [[8192, 0], [4096, 4096], [u64::MAX, 4096], [0, 0]] {
        let mut front = Front::connect(&served.path);
        assert!(!front.does(SET_LOG_BASE, &bytes_of(&bad), &[log.as_fd()]));
    }
    assert_eq!(guest.front.stop(0), 2);
    // It is told where the guest is now.
    let mac = u64::from_le_bytes([2, 0, 0, 0, 0, 9, 0, 0]);
    assert!(guest.front.does(SEND_RARP, &bytes_of(&[mac]), &[]));
    let told = other.next().1;
    assert_eq!(
        told[..14],
        [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 9, 0x80, 0x35]
    );
}

#[test]
fn a_ring_that_is_not_enabled_says_where_it_is() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    (0..5).for_each(|number| guest.send(&frame(0xee, 1, number)));
    eventually("all came back", || guest.has_sent());
    let disable = halves(1, 0);
    assert!(guest.front.does(SET_VRING_ENABLE, &disable, &[]));
    assert_eq!(guest.front.stop(1), 5);
    // It has no addresses any more.
    assert_eq!(guest.front.stop(1), 0);
    served.check_alive();
}

#[test]
fn a_switch_that_ends_under_traffic_leaves_nothing_and_crashes_nobody_v16() {
    for _ in 0..5 {
        let served = Served::here();
        let (mut one, two) = (served.guest(PLAIN), served.guest(PLAIN));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if one.has_sent() {
                        one.send(&frame(2, 1, 0));
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            let path = served.path.clone();
            drop(served);
            assert!(!path.exists());
            stop.store(true, Ordering::Relaxed);
        });
        let mut front = two.front;
        assert!(front.is_closed());
    }
}

#[test]
fn a_driver_that_scribbles_everywhere_crashes_nobody_v21() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN | EVENT_IDX);
    let (mut one, mut two) = (served.guest(PLAIN), served.guest(PLAIN));
    let mut state = 1_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state >> 33
    };
    for round in 0..20_000_u32 {
        let ring = if random() % 2 == 0 {
            &guest.sending
        } else {
            &guest.receiving
        };
        let at = ring.at + random() % 0x2400;
        // Mostly small numbers, of which more makes sense.
        let word = if random() % 4 == 0 {
            random()
        } else {
            random() % 256
        };
        guest
            .region
            .write(at, &word.to_le_bytes()[..1 + (random() % 8) as usize]);
        ring.kick();
        if round % 500 == 0 {
            for number in [0, 1] {
                guest.front.stop(number);
            }
            for ring in [&guest.sending, &guest.receiving] {
                guest
                    .region
                    .store_u16(ring.at + 0x2002, 0, Ordering::Relaxed);
                guest
                    .region
                    .store_u16(ring.at + 0x1002, 0, Ordering::Relaxed);
            }
            guest.front.start(&guest.receiving);
            guest.front.start(&guest.sending);
            one.send(&frame(2, 1, round));
            eventually("it comes", || {
                let came = two.received();
                came.is_some_and(|(_, bytes)| bytes == frame(2, 1, round))
            });
        }
    }
    served.check_sums();
}
