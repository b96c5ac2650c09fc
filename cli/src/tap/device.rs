//! The TAP itself: made, kept silent, written to; gone with its last descriptor.

use std::fs;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::out;
use crate::sys::tun::{self, Interface};

/// What the interface is to be like.
#[derive(Debug)]
pub(super) struct TapPlan<'a> {
    /// Its name; with `%d`, the kernel puts a number there.
    pub(super) name: &'a str,
    /// Receive queues.
    pub(super) queues: usize,
    /// Largest frame without its Ethernet header.
    pub(super) mtu: u16,
    /// Hardware address; else the kernel makes one up.
    pub(super) mac: Option<[u8; 6]>,
    /// Ready to receive at once.
    pub(super) up: bool,
}

/// An interface whose received frames we write. Dropping it removes it, as does our death.
#[derive(Debug)]
pub(super) struct Tap {
    name: String,
    queues: Vec<OwnedFd>,
}

/// What the interface has counted, as `ip -s link` shows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct LinkCounters {
    /// Frames received, which is to say injected.
    pub(super) received: u64,
    /// Frames that the kernel threw away on receipt. Those of an Ethernet type that nobody listens
    /// to are among them, so it is no measure of what readers missed.
    pub(super) dropped: u64,
}

impl Tap {
    /// Makes the interface.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub(super) fn new(plan: &TapPlan<'_>) -> Result<Self, Failure> {
        let mut name = plan.name.to_owned();
        let mut queues = Vec::with_capacity(plan.queues);
        for index in 0..plan.queues {
            // Never blocks: a queue without room is a counted drop.
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let queue = rustix::fs::open(DRIVER, flags, Mode::empty()).map_err(no_driver)?;
            let made = tun::open_queue(queue.as_fd(), &name, plan.queues, index == 0);
            name = made.map_err(|error| not_made(plan, &error))?;
            queues.push(queue);
        }
        let tap = Self { name, queues };
        let about = |what: String| move |error| Failure::about(format!("cannot set {what}"), error);
        let interface = Interface::new(&tap.name)?;
        silence(&tap.name);
        if let Some(mac) = plan.mac {
            let set = interface.set_mac(mac);
            set.map_err(about(format!("the address of {}", tap.name)))?;
        }
        let set = interface.set_mtu(plan.mtu);
        set.map_err(about(format!("an MTU of {} on {}", plan.mtu, tap.name)))?;
        let set = interface.set_silent(plan.up);
        set.map_err(about(format!("{} up", tap.name)))?;
        Ok(tap)
    }

    /// The interface's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// How many queues it has.
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Lets the interface receive a frame in this queue: one system call, no copy on our side.
    #[inline]
    pub(super) fn inject(&self, queue: usize, header: &[u8], frame: &[u8]) -> Result<(), Errno> {
        let parts = [IoSlice::new(header), IoSlice::new(frame)];
        loop {
            match rustix::io::writev(&self.queues[queue], &parts) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The interface's own counters; `None` if it is gone.
    pub(super) fn counters(&self) -> Option<LinkCounters> {
        // Of the caller's namespace, unlike /sys, which stays where it was mounted.
        let table = fs::read_to_string("/proc/thread-self/net/dev").ok()?;
        counters(&table, &self.name)
    }
}

/// The row of an interface in /proc/net/dev (proc(5)).
fn counters(table: &str, name: &str) -> Option<LinkCounters> {
    let row = table
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
    let values: Vec<u64> = row
        .split_whitespace()
        .filter_map(|value| value.parse().ok())
        .collect();
    // bytes, packets, errs, drop, …
    Some(LinkCounters {
        received: *values.get(1)?,
        dropped: *values.get(3)?,
    })
}

/// Tells the kernel to make nothing of the frames, but for those who read the interface itself.
/// Frames for other machines it ignores anyway; these are the exceptions.
fn silence(name: &str) {
    for (setting, value) in [
        ("ipv6/conf/NAME/disable_ipv6", "1"),
        ("ipv6/conf/NAME/accept_ra", "0"),
        ("ipv4/conf/NAME/rp_filter", "1"),
        ("ipv4/conf/NAME/arp_ignore", "8"),
        ("ipv4/conf/NAME/forwarding", "0"),
    ] {
        let path = Path::new("/proc/sys/net").join(setting.replace("NAME", name));
        match fs::write(&path, value) {
            Ok(()) => {}
            // A kernel without that protocol makes nothing of its packets.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => out::note(&format!(
                "{} cannot be set to {value} ({error}): the kernel may act on packets of {name}",
                path.display()
            )),
        }
    }
}

fn no_driver(errno: Errno) -> Failure {
    let remedy = match errno {
        Errno::NOENT => {
            "load the driver (modprobe tun), or give the container the device (--device /dev/net/tun)"
        }
        Errno::NODEV | Errno::NXIO => "the kernel has no TUN driver: modprobe tun",
        Errno::ACCESS | Errno::PERM => "run it as root",
        _ => return Failure::about(DRIVER, errno),
    };
    Failure::about(DRIVER, format!("{errno}; {remedy}"))
}

fn not_made(plan: &TapPlan<'_>, error: &io::Error) -> Failure {
    let name = plan.name;
    let reason = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM | Errno::ACCESS) => {
            "making an interface needs CAP_NET_ADMIN: run it as root".to_owned()
        }
        Some(Errno::BUSY | Errno::EXIST) => {
            "an interface of this name exists; choose another with --name".to_owned()
        }
        Some(Errno::TOOBIG) => format!("the kernel allows fewer than {} queues", plan.queues),
        Some(Errno::INVAL) => format!("{error}: not a name for an interface, or it is taken"),
        _ => error.to_string(),
    };
    Failure::about(format!("cannot make {name}"), reason)
}

const DRIVER: &str = "/dev/net/tun";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_of_the_interface_is_read_and_no_other() {
        let table = "Inter-|   Receive\n face |bytes    packets errs drop fifo\n\
            vn01: 1 2 3 4 5 6 7 8 9\n  vn0:   600      10    1    2    0     0 0 0 9 9\n";
        let expected = LinkCounters {
            received: 10,
            dropped: 2,
        };
        assert_eq!(counters(table, "vn0"), Some(expected));
        assert_eq!(counters(table, "vn"), None);
        assert_eq!(counters("vn0: 1\n", "vn0"), None);
    }
}
