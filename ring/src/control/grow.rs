//! Memory that a VM gets while it runs: devices that an operator's process plugs for the daemon.

use super::wire::{Malformed, Reader, Writer};

/// `VNPLUGRG` in memory order: what a plugged device's first page begins with. Its number follows.
pub const PLUGGED_MAGIC: u64 = u64::from_le_bytes(*b"VNPLUGRG");
/// Where what is shared begins in it.
pub const PLUGGED_OFFSET: u64 = 4096;

/// What is said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grow {
    /// An operator's process plugs devices for this VM, which it attached over the same connection, as long as
    /// the connection lasts. Answer: Done.
    Offer {
        /// The VM.
        name: String,
        /// Bytes of all of them, at most.
        most_bytes: u64,
        /// Each port of the VM gets a device of its own, and no place in the pool.
        apart: bool,
    },
    /// To that process, unasked, with a descriptor: plug this memory. Answered by
    /// [`Plugged`](Self::Plugged).
    Plug {
        /// Its number.
        number: u32,
        /// Its bytes, a power of two.
        len: u64,
        /// The VM is not to write it.
        readonly: bool,
    },
    /// Unasked: it is plugged, or why not. Of one that was not asked for: an earlier process left it.
    Plugged {
        /// Its number.
        number: u32,
        /// Empty: it is.
        error: String,
    },
    /// To that process, unasked: nobody uses it any more. Answered by [`Unplugged`](Self::Unplugged).
    Unplug {
        /// Its number.
        number: u32,
    },
    /// Unasked: it is gone, or why not.
    Unplugged {
        /// Its number.
        number: u32,
        /// Empty: it is.
        error: String,
    },
}

impl Grow {
    /// The number of the message in a header.
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Offer { .. } => 57,
            Self::Plug { .. } => 58,
            Self::Plugged { .. } => 59,
            Self::Unplug { .. } => 60,
            Self::Unplugged { .. } => 61,
        }
    }

    /// Whether a header of this number is one of these.
    pub(super) fn has(kind: u8) -> bool {
        (57..=61).contains(&kind)
    }

    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::Offer {
                name,
                most_bytes,
                apart,
            } => {
                w.text(name);
                w.u64(*most_bytes);
                if *apart {
                    w.u8(1);
                }
            }
            Self::Plug {
                number,
                len,
                readonly,
            } => {
                w.u32(*number);
                w.u64(*len);
                w.u8(u8::from(*readonly));
            }
            Self::Plugged { number, error } | Self::Unplugged { number, error } => {
                w.u32(*number);
                w.text(error);
            }
            Self::Unplug { number } => w.u32(*number),
        }
    }

    pub(super) fn read(kind: u8, r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match kind {
            57 => Self::Offer {
                name: r.text("name")?,
                most_bytes: r.u64("most_bytes")?,
                apart: !r.is_over() && r.flag("apart")?,
            },
            58 => Self::Plug {
                number: r.u32("number")?,
                len: r.u64("len")?,
                readonly: r.flag("readonly")?,
            },
            59 => Self::Plugged {
                number: r.u32("number")?,
                error: r.text("error")?,
            },
            60 => Self::Unplug {
                number: r.u32("number")?,
            },
            61 => Self::Unplugged {
                number: r.u32("number")?,
                error: r.text("error")?,
            },
            kind => return Err(Malformed::Kind(kind)),
        })
    }
}
