//! A TAP: made, kept silent or not, written to and read; gone with its last descriptor.

pub mod cable;
pub mod cut;
pub mod header;
mod merge;
pub mod tally;
mod tun;

use std::fmt::{self, Display};
use std::fs;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use self::tun::Interface;

/// Why there is no interface, and what to do about it.
#[derive(Debug)]
pub struct InterfaceError(String);

impl InterfaceError {
    /// `what: why`.
    pub(crate) fn about(what: impl Display, why: impl Display) -> Self {
        Self(format!("{what}: {why}"))
    }
}

impl Display for InterfaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InterfaceError {}

/// What the interface is to be like.
#[derive(Debug)]
pub struct TapPlan<'a> {
    /// Its name; with `%d`, the kernel puts a number there.
    pub name: &'a str,
    /// Receive queues.
    pub queues: usize,
    /// Largest frame without its Ethernet header.
    pub mtu: u16,
    /// Hardware address; else the kernel makes one up.
    pub mac: Option<[u8; 6]>,
    /// Ready to receive at once.
    pub up: bool,
    /// The kernel makes nothing of what it receives, and says nothing on it.
    pub silent: bool,
    /// What programs send may be left to us to be cut and summed, as a NIC would.
    pub merged: bool,
}

/// An interface whose received frames we write, and whose sent frames we may read. Dropping it removes it, as does our death.
#[derive(Debug)]
pub struct Tap {
    name: String,
    queues: Vec<OwnedFd>,
}

/// What the interface has counted, as `ip -s link` shows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Frames received, which is to say injected.
    pub received: u64,
    /// Frames that the kernel threw away on receipt. Those of an Ethernet type that nobody listens
    /// to are among them, so it is no measure of what readers missed.
    pub dropped: u64,
}

impl Tap {
    /// Makes the interface.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub fn new(plan: &TapPlan<'_>) -> Result<Self, InterfaceError> {
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
        let about =
            |what: String| move |error| InterfaceError::about(format!("cannot set {what}"), error);
        let interface = Interface::new(&tap.name).map_err(about("it".to_owned()))?;
        if plan.silent {
            silence(&tap.name);
        }
        if plan.merged {
            tap.take_super_frames()?;
        }
        if let Some(mac) = plan.mac {
            let set = interface.set_mac(mac);
            set.map_err(about(format!("the address of {}", tap.name)))?;
        }
        let set = interface.set_mtu(plan.mtu);
        set.map_err(about(format!("an MTU of {} on {}", plan.mtu, tap.name)))?;
        let set = interface.set_flags(plan.up, plan.silent);
        set.map_err(about(format!("{} up", tap.name)))?;
        Ok(tap)
    }

    /// An interface that another process made: its name, and its one queue.
    pub(crate) fn of(name: &str, queue: OwnedFd) -> Self {
        Self {
            name: name.to_owned(),
            queues: vec![queue],
        }
    }

    /// The queues, for another process; the interface lives as long as one of them.
    pub(crate) fn into_queues(self) -> Vec<OwnedFd> {
        self.queues
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many queues it has.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Lets the interface receive a frame in two parts in this queue: one system call, no copy on our side.
    ///
    /// # Errors
    /// The driver's; [`tally::Reason::of`] says what they mean.
    #[inline]
    pub(crate) fn inject(
        &self,
        queue: usize,
        header: &[u8],
        [head, body]: [&[u8]; 2],
    ) -> Result<(), Errno> {
        let parts = [header, head, body].map(IoSlice::new);
        loop {
            match rustix::io::writev(&self.queues[queue], &parts) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Takes the next frame that a program sent, with its vnet header before it; its bytes with the
    /// header, or nothing if there is none now.
    ///
    /// # Errors
    /// The driver's: `EBADFD` and `ENODEV` if the interface is gone.
    #[inline]
    pub fn take(&self, queue: usize, into: &mut [u8]) -> Result<Option<usize>, Errno> {
        loop {
            match rustix::io::read(&self.queues[queue], &mut *into) {
                Ok(count) => return Ok(Some(count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// What to wait for until a program sends.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().map(AsFd::as_fd)
    }

    /// Plugs the cable in or out; a driver that cannot shows it in all the time.
    pub fn set_carrier(&self, is_in: bool) {
        let set = tun::set_carrier(self.queues[0].as_fd(), is_in);
        if let Err(error) = set {
            log::debug!("the carrier of {} cannot be set: {error}", self.name);
        }
    }

    /// Its network namespace takes the interface down when it ends, and nobody waits for that: closing the last queue
    /// of one that is not left takes until all processors have forgotten it (12 to 44 ms on two of them).
    pub fn leave(&self) {
        if let Err(error) = tun::set_persistent(self.queues[0].as_fd()) {
            log::debug!("{} is removed now: {error}", self.name);
        }
    }

    /// Offers what the kernel knows: UDP super-frames since Linux 6.2.
    fn take_super_frames(&self) -> Result<(), InterfaceError> {
        let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
        let udp = libc::TUN_F_USO4 | libc::TUN_F_USO6;
        let queue = self.queues[0].as_fd();
        let set = tun::set_offload(queue, tcp | udp).or_else(|_| tun::set_offload(queue, tcp));
        let what = || {
            format!(
                "cannot have super-frames of {}; try --segments wire",
                self.name
            )
        };
        set.map_err(|error| InterfaceError::about(what(), error))
    }

    /// The interface's own counters; `None` if it is gone.
    pub fn counters(&self) -> Option<LinkCounters> {
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

/// Does this in another network namespace: one that `ip netns` knows by this name, or that of a path,
/// as `/proc/PID/ns/net`.
///
/// # Errors
/// What is missing to enter it, or what `work` says.
pub fn in_netns<T: Send>(
    name: &str,
    work: impl FnOnce() -> Result<T, InterfaceError> + Send,
) -> Result<T, InterfaceError> {
    let path = match name.contains('/') {
        true => Path::new(name).to_owned(),
        false => Path::new("/run/netns").join(name),
    };
    let what = || format!("network namespace {}", path.display());
    let file = fs::File::open(&path).map_err(|error| InterfaceError::about(what(), error))?;
    std::thread::scope(|scope| {
        let entered = scope.spawn(move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(file.as_fd(), kind).map_err(|errno| match errno {
                Errno::PERM => {
                    InterfaceError::about(what(), "entering it needs CAP_SYS_ADMIN: run as root")
                }
                Errno::INVAL => InterfaceError::about(what(), "it is no network namespace"),
                _ => InterfaceError::about(what(), errno),
            })?;
            work()
        });
        let done = entered.join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The queue of a flow.
///
/// NB: the hash is mixed once more, since a cluster shares by it already: the flows of one member
/// must not all fall into one queue.
#[inline]
pub fn queue_of(flow_hash: u32, queues: usize) -> usize {
    let mixed = u64::from(flow_hash.wrapping_mul(0x9e37_79b1));
    ((mixed * queues as u64) >> 32) as usize
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
            Err(error) => log::warn!(
                "{} cannot be set to {value} ({error}): the kernel may act on packets of {name}",
                path.display()
            ),
        }
    }
}

fn no_driver(errno: Errno) -> InterfaceError {
    let remedy = match errno {
        Errno::NOENT => {
            "load the driver (modprobe tun), or give the container the device (--device /dev/net/tun)"
        }
        Errno::NODEV | Errno::NXIO => "the kernel has no TUN driver: modprobe tun",
        Errno::ACCESS | Errno::PERM => "run it as root",
        _ => return InterfaceError::about(DRIVER, errno),
    };
    InterfaceError::about(DRIVER, format!("{errno}; {remedy}"))
}

fn not_made(plan: &TapPlan<'_>, error: &io::Error) -> InterfaceError {
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
    InterfaceError::about(format!("cannot make {name}"), reason)
}

const DRIVER: &str = "/dev/net/tun";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_stays_in_its_queue_and_all_queues_are_used() {
        for queues in [1, 2, 3, 4, 256] {
            let mut used = vec![0; queues];
            for hash in 0..65_536_u32 {
                used[queue_of(hash, queues)] += 1;
            }
            let fair = 65_536 / queues;
            assert!(
                used.iter().all(|&n| n > fair / 2 && n < fair * 2),
                "{queues}"
            );
            // Also when a cluster gave this member every second hash.
            let mut used = vec![0; queues];
            for hash in (0..65_536_u32).step_by(2) {
                used[queue_of(hash, queues)] += 1;
            }
            assert!(used.iter().all(|&n| n > 0), "{queues}");
        }
        assert_eq!(queue_of(u32::MAX, 256), queue_of(u32::MAX, 256));
    }

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
