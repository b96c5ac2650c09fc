//! A network of a test's own: a private namespace, veth pairs, a raw sender, a reader.
#![expect(
    unsafe_code,
    reason = "unshare and bind to a packet address have no safe wrapper"
)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::thread::UnshareFlags;
use vnplug_frame::Frame;
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction};
use vnplug_path::source::early::EarlyDrop;
use vnplug_path::source::{Queue, Received, Transmitter, wait};
use vnplug_ring::offload::Offload;
use vnplug_testing::{Deadline, PATIENCE, eventually, until};

/// Runs a test in a thread with a network namespace of its own, which ends with the thread.
pub(crate) fn isolated(test: impl FnOnce() + Send + 'static) {
    let run = move || {
        // SAFETY: only the network namespace of this thread changes; no descriptor table is split.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .expect("these tests need root");
        for which in ["all", "default"] {
            // No neighbour discovery among the test's frames.
            std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1")
                .expect("disable IPv6");
        }
        test();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `ip` with these words.
pub(crate) fn ip(words: &str) {
    let output = Command::new("ip")
        .args(words.split(' '))
        .output()
        .expect("run ip");
    assert!(
        output.status.success(),
        "ip {words}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Makes a veth pair, `va` and `vb`, both up.
pub(crate) fn veth() {
    ip("link add va type veth peer name vb");
    ip("link set vb up");
    ip("link set va up");
    until_up();
}

/// Waits until both ends of the pair have a carrier: before, what is sent is refused. The kernel tells
/// them by a thread of its own, which waits for a processor as others do.
pub(crate) fn until_up() {
    until_state("va", "state UP");
    until_state("vb", "state UP");
}

/// Waits until `ip link` says this of an interface.
pub(crate) fn until_state(interface: &str, state: &str) {
    eventually(&format!("{interface} has {state:?}"), || {
        let words = ["-o", "link", "show", "dev", interface];
        let shown = Command::new("ip").args(words).output().expect("run ip");
        String::from_utf8_lossy(&shown.stdout).contains(state)
    });
}

/// Reads until the queue is in this state; how long it took.
pub(crate) fn until_queue_state(queue: &mut dyn Queue, state: &str) -> Duration {
    let (start, deadline) = (Instant::now(), Deadline::new(format!("it is {state}")));
    while queue.state() != state {
        deadline.check_seen(&queue.state());
        read(queue, 1, Duration::from_millis(5));
    }
    start.elapsed()
}

/// Sends raw frames by an interface.
pub(crate) struct Sender(OwnedFd);

impl Sender {
    pub(crate) fn new(interface: &str) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)
            .expect("packet socket");
        let index = rustix::net::netdevice::name_to_index(&fd, interface).expect("interface");
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: 0,
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: the address is a whole sockaddr_ll and the length says so.
        let result = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        assert_eq!(result, 0, "bind to {interface}");
        Self(fd)
    }

    /// Sends one frame; `false` if the interface takes none now. Where the other end's queue is full, as
    /// nobody had a processor to empty it, it is sent again.
    pub(crate) fn send(&self, frame: &[u8]) -> bool {
        let deadline = Deadline::new("the other end's queue has room");
        loop {
            match rustix::net::send(&self.0, frame, SendFlags::empty()) {
                Err(rustix::io::Errno::NOBUFS) if !deadline.is_over() => std::thread::yield_now(),
                sent => return sent.is_ok(),
            }
        }
    }
}

/// The first queue of a source.
pub(crate) fn open(config: AfPacketConfig) -> Box<dyn Queue> {
    AfPacket::open(config).expect("open").remove(0)
}

/// Small rings, as these tests send little.
pub(crate) fn config(interface: &str) -> AfPacketConfig {
    AfPacketConfig {
        blocks: 96,
        ..AfPacketConfig::new(interface)
    }
}

/// What it receives, and not what it sends.
pub(crate) fn rx(interface: &str) -> AfPacketConfig {
    AfPacketConfig {
        direction: Direction::Rx,
        ..config(interface)
    }
}

/// A frame of a private EtherType that nothing answers, `seq` in its bytes.
pub(crate) fn frame(len: usize, seq: u32) -> Vec<u8> {
    let mut frame = vec![0u8; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    for (i, byte) in frame.iter_mut().enumerate().skip(14) {
        *byte = (i as u32 ^ seq.rotate_left(i as u32 % 32)) as u8;
    }
    frame
}

/// A UDP datagram over IPv4 whose checksums nobody looks at; the reply has the ports swapped.
pub(crate) fn udp(from: u16, to: u16) -> Vec<u8> {
    let mut frame = frame(60, 0);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..24].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17]);
    let (client, server) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let (source, destination) = if from > to {
        (client, server)
    } else {
        (server, client)
    };
    frame[26..30].copy_from_slice(&source);
    frame[30..34].copy_from_slice(&destination);
    frame[34..36].copy_from_slice(&from.to_be_bytes());
    frame[36..38].copy_from_slice(&to.to_be_bytes());
    frame[38..40].copy_from_slice(&26u16.to_be_bytes());
    frame
}

/// A frame, copied out.
#[derive(Debug, Clone)]
pub(crate) struct Got {
    pub(crate) bytes: Vec<u8>,
    pub(crate) wire_len: u32,
    pub(crate) ts_ns: u64,
    pub(crate) flags: u16,
    pub(crate) vlan_tci: u16,
    pub(crate) offload: Offload,
}

impl Got {
    pub(crate) fn of(frame: &Frame<'_>) -> Self {
        Self {
            bytes: frame.bytes.to_vec(),
            wire_len: frame.wire_len,
            ts_ns: frame.ts_ns,
            flags: frame.flags,
            vlan_tci: frame.vlan_tci,
            offload: frame.offload,
        }
    }
}

/// The way out through a queue.
pub(crate) fn out(queue: &mut dyn Queue) -> &mut dyn Transmitter {
    queue.transmitter().expect("it can send")
}

/// The kernel's part in a queue.
pub(crate) fn early(queue: &mut dyn Queue) -> &mut dyn EarlyDrop {
    queue.early().expect("the kernel can drop frames before it")
}

/// Reads until `enough` frames came or `limit` passed.
pub(crate) fn read(queue: &mut dyn Queue, enough: usize, limit: Duration) -> Vec<Got> {
    let end = Instant::now() + limit;
    let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    let mut got = Vec::new();
    while got.len() < enough {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let received = queue
            .receive(&mut |frames| {
                got.extend(frames.iter().map(Got::of));
            })
            .expect("receive");
        if received == Received::Nothing {
            wait(queue, waker.as_fd(), Some(left));
        }
    }
    got
}

/// Sends by `sender` until `queue` hands out a frame; what was sent before it is read, too.
pub(crate) fn until_received(sender: &Sender, queue: &mut dyn Queue) -> Got {
    let deadline = Deadline::new("a frame is received");
    let mut sent = 0;
    loop {
        deadline.check_seen(&queue.state());
        sent += usize::from(sender.send(&frame(60, 5)));
        // Long, so that one that is under way is not sent again.
        let mut got = read(queue, 1, Duration::from_millis(500));
        if !got.is_empty() {
            if got.len() < sent {
                read(queue, sent - got.len(), Duration::from_millis(500));
            }
            return got.remove(0);
        }
    }
}

/// Reads `expected` frames, and one more if there are too many.
pub(crate) fn read_all(queue: &mut dyn Queue, expected: usize) -> Vec<Got> {
    let mut got = read(queue, expected, PATIENCE);
    got.extend(read(queue, 1, QUIET));
    got
}

/// Reads `expected` frames from all queues together, and more if there are too many.
pub(crate) fn read_shared(queues: &mut [Box<dyn Queue>], expected: usize) -> Vec<Vec<Got>> {
    let deadline = Deadline::new("as many are read as expected");
    let mut got = vec![Vec::new(); queues.len()];
    while got.iter().map(Vec::len).sum::<usize>() < expected && !deadline.is_over() {
        for (queue, got) in queues.iter_mut().zip(&mut got) {
            got.extend(read(queue.as_mut(), usize::MAX, Duration::from_millis(5)));
        }
    }
    for (queue, got) in queues.iter_mut().zip(&mut got) {
        got.extend(read(queue.as_mut(), 1, QUIET));
    }
    got
}

/// Counts frames into `taken` until all `total` were taken or dropped.
pub(crate) fn drain(queues: &mut [Box<dyn Queue>], taken: &mut [u64], total: u64) {
    let deadline = Deadline::new(format!("{total} frames are taken or dropped"));
    let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    loop {
        let mut dropped = 0;
        for (queue, taken) in queues.iter_mut().zip(taken.iter_mut()) {
            match queue.receive(&mut |_| ()).expect("receive") {
                Received::Frames(frames) => *taken += frames as u64,
                _ => wait(&mut **queue, waker.as_fd(), Some(Duration::from_millis(2))),
            }
            dropped += queue.counters().dropped;
        }
        let known = taken.iter().sum::<u64>() + dropped;
        if known >= total {
            return;
        }
        deadline.check_seen(&known);
    }
}

/// Waits until the kernel has counted `total` frames.
pub(crate) fn until_seen(queues: &mut [Box<dyn Queue>], total: u64) {
    let look = || queues.iter_mut().map(|queue| queue.counters().seen).sum();
    until("all frames are seen", look, |seen: &u64| *seen >= total);
}

/// The wait for what must not come.
pub(crate) const QUIET: Duration = Duration::from_millis(50);
