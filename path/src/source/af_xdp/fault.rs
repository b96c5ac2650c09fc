//! Faults of an interface with XDP, as messages that say what to do.

use std::io;

use super::program;
use crate::source::SourceError;
use vnplug_os::bpf;
use vnplug_os::bpf::{Hook, LoadError};

/// Why an interface cannot be received through AF_XDP.
#[derive(Debug)]
pub struct Unfit {
    /// What is wrong and what to do about it.
    pub error: SourceError,
    /// It concerns XDP: a packet socket may do.
    pub xdp_only: bool,
}

impl Unfit {
    /// It concerns XDP alone.
    pub(super) fn xdp(error: SourceError) -> Self {
        Self {
            error,
            xdp_only: true,
        }
    }

    /// No other kind of source would do.
    pub(super) fn other(error: SourceError) -> Self {
        Self {
            error,
            xdp_only: false,
        }
    }
}

impl From<SourceError> for Unfit {
    fn from(error: SourceError) -> Self {
        Self::other(error)
    }
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Unfit {}

/// Maps, or the program, could not be made.
pub(super) fn no_program(cause: LoadError) -> SourceError {
    let what = match cause.cause.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if cause.log.is_empty() => {
            "no permission to load XDP programs; it needs root, or CAP_BPF and CAP_NET_ADMIN".into()
        }
        Some(libc::ENOSYS | libc::EINVAL) if cause.log.is_empty() => {
            "this kernel has no XDP sockets (CONFIG_BPF_SYSCALL, CONFIG_XDP_SOCKETS)".into()
        }
        _ => format!("the kernel does not take the XDP program: {}", cause.log),
    };
    SourceError::io(what, cause.cause)
}

/// The program could not be attached.
pub(super) fn not_attached(name: &str, mtu: u32, hook: Hook, cause: io::Error) -> SourceError {
    let what = match cause.raw_os_error() {
        Some(libc::EOPNOTSUPP) => format!(
            "the driver of interface {name:?} has no XDP of its own; use mode=generic, or a packet \
             socket (kind af_packet)"
        ),
        // Drivers refuse with one or the other what depends on the interface's settings.
        Some(libc::ERANGE | libc::EINVAL | libc::E2BIG) if hook == Hook::Native => format!(
            "the driver of interface {name:?} refuses XDP with its present settings; most often \
             the MTU of {mtu} is too large for it: ip link set {name} mtu 1500 (or less), or \
             offloads are in the way: ethtool -K {name} lro off"
        ),
        _ => format!("cannot attach an XDP program to interface {name:?}"),
    };
    SourceError::io(what, cause)
}

/// Another program is at the interface.
pub(super) fn already_attached(name: &str, id: u32, cause: io::Error) -> SourceError {
    let called = match bpf::program_name(id) {
        Ok(called) if !called.is_empty() => format!(" ({called:?})"),
        _ => String::new(),
    };
    let ours = match called.contains(program::NAME) {
        true => ": another vnplugd, or this one's other source, receives there",
        false => "",
    };
    let what = format!(
        "interface {name:?} has another XDP program, id {id}{called}{ours}; remove it with \
         'ip link set dev {name} xdp off' (and 'xdpgeneric off'), or end the process that holds \
         it: bpftool link"
    );
    SourceError::io(what, cause)
}

/// Frames can be longer than a chunk, and pieces cannot be had.
pub(super) fn mtu_too_large(name: &str, mtu: u32, room: u32) -> SourceError {
    SourceError::new(format!(
        "interface {name:?} has an MTU of {mtu}, too large for XDP here: frames of more than \
         {room} bytes need several buffers, which this kernel or driver, or multi_buffer=no, rules \
         out; lower it (ip link set {name} mtu {}){}",
        room.saturating_sub(HEADERS),
        match room < 3000 {
            true => ", or use frame_size=4096",
            false => "",
        }
    ))
}

/// There is no such receive queue.
pub(super) fn no_queue(name: &str, queue: u32, count: u32) -> SourceError {
    let has = match count {
        1 => "1 receive queue (0)".to_owned(),
        count => format!("{count} receive queues (0 to {})", count.saturating_sub(1)),
    };
    SourceError::new(format!(
        "interface {name:?} has no receive queue {queue}: it has {has}; see ethtool -l {name}"
    ))
}

/// A socket could not be opened on its packet memory.
pub(super) fn no_socket(name: &str, bytes: u64, cause: io::Error) -> SourceError {
    let what = match cause.raw_os_error() {
        Some(libc::ENOBUFS) => format!(
            "the limit of locked memory is too low for {} KiB of packet memory of a queue of \
             {name:?}; raise it (ulimit -l, LimitMEMLOCK=infinity in a systemd unit), or lower \
             frames",
            bytes >> 10
        ),
        Some(libc::EPERM | libc::EACCES) => {
            "no permission to open an XDP socket; it needs root or CAP_NET_RAW".into()
        }
        Some(libc::EAFNOSUPPORT) => "this kernel has no XDP sockets (CONFIG_XDP_SOCKETS)".into(),
        Some(libc::ENOMEM) => format!(
            "no memory for {} KiB of packet memory of a queue of {name:?}; lower frames",
            bytes >> 10
        ),
        _ => format!("cannot open an XDP socket for {name:?}"),
    };
    SourceError::io(what, cause)
}

/// A socket could not be bound.
pub(super) fn not_bound(name: &str, queue: u32, forced: bool, cause: io::Error) -> SourceError {
    let what = match cause.raw_os_error() {
        Some(libc::EBUSY) => format!(
            "receive queue {queue} of interface {name:?} is in use by another XDP socket; end the \
             program that has it"
        ),
        Some(libc::EOPNOTSUPP | libc::EINVAL) if forced => format!(
            "the driver of interface {name:?} has no zero-copy for queue {queue}; use mode=native \
             or mode=auto"
        ),
        Some(libc::ENETDOWN) => {
            format!("interface {name:?} is down; bring it up first: ip link set {name} up")
        }
        _ => format!("cannot bind an XDP socket to queue {queue} of interface {name:?}"),
    };
    SourceError::io(what, cause)
}

/// Ethernet header and two VLAN tags.
pub(super) const HEADERS: u32 = 14 + 8;
