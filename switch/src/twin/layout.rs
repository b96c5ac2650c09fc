//! What both instances share beside the table: one array of one entry, by byte.
//!
//! ```text
//!      0  header                                          writer
//!           magic, sizes, secrets, age, longest frame     the daemon
//!           aside: not 0, every frame is an upcall        the daemon
//!           lost: frames that nobody was there for        the kernel instance, adding
//!    256  doors: interface number | port << 32            the daemon
//!         slots of processors, 64 bytes each              the kernel instance, on that processor
//!           what the gate decided of a frame: its addresses, and the verdict
//!         ports, 128 bytes each                           by field, below
//! ```

use std::io;

use vnplug_os::bpf::{Shape, Shared, possible_cpus};

use crate::forward::Number;

/// The sizes of its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Slots of the table.
    pub(super) slots: u32,
    /// Ports and processors; powers of two.
    pub(super) ports: u32,
    pub(super) cpus: u32,
}

impl Layout {
    /// For a table of this number of `slots` and a switch whose ports have numbers up to `most`.
    pub(super) fn new(slots: usize, most: usize) -> io::Result<Self> {
        let cpus = possible_cpus()?.next_power_of_two().min(1024);
        Ok(Self {
            slots: slots as u32,
            ports: (most as u32 + 1).next_power_of_two(),
            cpus: cpus as u32,
        })
    }

    /// Of the array.
    pub(super) fn shape(self) -> Shape {
        Shape {
            entry_bytes: self.ports_at() + self.ports * PORT_BYTES,
            entries: 1,
        }
    }

    pub(super) fn ports_at(self) -> u32 {
        CPUS_AT + self.cpus * CPU_BYTES
    }

    pub(super) fn port(self, number: Number) -> u64 {
        u64::from(self.ports_at() + u32::from(number) % self.ports * PORT_BYTES)
    }

    /// Says in a new array what it is.
    pub(super) fn found(self, state: &Shared, secret: (u64, u64), netns: u64) {
        let Self { slots, ports, cpus } = self;
        let words = [
            (header::SLOTS, u64::from(slots)),
            (header::PORTS, ports.into()),
            (header::CPUS, cpus.into()),
            (header::SECRET, secret.0),
            (header::SECRET + 8, secret.1),
            (header::MASK, u64::from(slots) - 1),
            (header::NETNS, netns),
            // Last: an array without it is nobody's.
            (header::MAGIC, MAGIC),
        ];
        words.iter().for_each(|(at, word)| state.write(*at, *word));
    }

    /// The secrets of an array that is like this one.
    pub(super) fn known(self, state: &Shared, netns: u64) -> Option<(u64, u64)> {
        let Self { slots, ports, cpus } = self;
        let want = [
            (header::MAGIC, MAGIC),
            (header::SLOTS, slots.into()),
            (header::PORTS, ports.into()),
            (header::CPUS, cpus.into()),
            (header::NETNS, netns),
        ];
        let is = want.iter().all(|(at, word)| state.read(*at) == *word);
        is.then(|| {
            let secret = |at| state.read(header::SECRET + at);
            (secret(0), secret(8))
        })
    }
}

/// Where words of the header are.
pub(super) mod header {
    pub(in super::super) const MAGIC: u64 = 0;
    pub(in super::super) const SLOTS: u64 = 8;
    pub(in super::super) const PORTS: u64 = 16;
    pub(in super::super) const CPUS: u64 = 24;
    pub(in super::super) const SECRET: u64 = 32;
    pub(in super::super) const MASK: u64 = 48;
    pub(in super::super) const AGE: u64 = 56;
    pub(in super::super) const LONGEST: u64 = 64;
    pub(in super::super) const ASIDE: u64 = 72;
    pub(in super::super) const LOST: u64 = 80;
    /// The network namespace that interface numbers are of.
    pub(in super::super) const NETNS: u64 = 88;
}

/// Where a port has its parts, from its begin.
pub(super) mod port {
    /// Its interface's number, 0 if the kernel cannot reach it; and flags << 32. The daemon's.
    pub(in super::super) const WORD: u64 = 0;
    /// What the kernel instance forwarded from it and to it; it adds.
    pub(in super::super) const IN_FRAMES: u64 = 8;
    pub(in super::super) const IN_BYTES: u64 = 16;
    /// What it may send: nanoseconds of 1024 bytes, 0 for any number; and how many may go too early. The daemon's.
    pub(in super::super) const RATE: u64 = 24;
    pub(in super::super) const BURST: u64 = 32;
    /// When what it sent so far would have been sent at this rate. Both instances move it on.
    pub(in super::super) const SENT: u64 = 40;
    /// What the kernel instance dropped as too much.
    pub(in super::super) const POLICED_FRAMES: u64 = 48;
    pub(in super::super) const POLICED_BYTES: u64 = 56;
    pub(in super::super) const OUT_FRAMES: u64 = 64;
    pub(in super::super) const OUT_BYTES: u64 = 72;
}

/// What is in the array; another number for another layout, also of the table's slots.
const MAGIC: u64 = 0x7477_696e_0000_0002;
pub(super) const DOORS_AT: u32 = 256;
/// A power of two.
pub(super) const DOORS: u32 = 4096;
/// How many doors are looked at for one interface.
pub(super) const DOOR_PROBES: u32 = 8;
pub(super) const CPUS_AT: u32 = DOORS_AT + DOORS * 8;
pub(super) const CPU_BYTES: u32 = 64;
pub(super) const PORT_BYTES: u32 = 128;
/// Flags of a port: every frame from it or to it is an upcall.
pub(super) const UPCALL: u32 = 1;
/// The highest number of a port.
pub(super) const MOST_PORTS: usize = 8191;
