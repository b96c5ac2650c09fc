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
use vnplugd::source::{Queue, Received};

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

    /// Sends one frame; `false` if the interface takes none now.
    pub(crate) fn send(&self, frame: &[u8]) -> bool {
        rustix::net::send(&self.0, frame, SendFlags::empty()).is_ok()
    }
}

/// A frame, copied out.
#[derive(Debug, Clone)]
pub(crate) struct Got {
    pub(crate) bytes: Vec<u8>,
    pub(crate) wire_len: u32,
    pub(crate) ts_ns: u64,
    pub(crate) flags: u16,
    pub(crate) vlan_tci: u16,
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
                got.extend(frames.iter().map(|frame| Got {
                    bytes: frame.bytes.to_vec(),
                    wire_len: frame.wire_len,
                    ts_ns: frame.ts_ns,
                    flags: frame.flags,
                    vlan_tci: frame.vlan_tci,
                }));
            })
            .expect("receive");
        if received == Received::Nothing {
            queue.wait(waker.as_fd(), Some(left));
        }
    }
    got
}

/// Counts frames until none came for `quiet`.
pub(crate) fn drain(queue: &mut dyn Queue, quiet: Duration) -> u64 {
    let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
    let mut read = 0;
    let mut last = Instant::now();
    while last.elapsed() < quiet {
        match queue.receive(&mut |_| ()).expect("receive") {
            Received::Frames(frames) => {
                read += frames as u64;
                last = Instant::now();
            }
            _ => queue.wait(waker.as_fd(), Some(quiet / 4)),
        }
    }
    read
}
