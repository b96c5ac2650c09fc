//! What became of the packets: `received = injected + merged + Σ dropped by reason`, to the packet.

use rustix::io::Errno;
use serde_json::{Map, Value, json};

use crate::text::grouped;

/// Why a packet is not in the TAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Reason {
    /// The interface is not up.
    LinkDown,
    /// The kernel had no room for it: its memory, or the queue's share of it.
    NoRoom,
    /// Longer than the kernel takes (about 64 KiB).
    TooLong,
    /// Shorter than an Ethernet header, for example by `--snaplen`.
    TooShort,
    /// Refused for another reason.
    Refused,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) received: u64,
    pub(crate) injected: u64,
    /// Packets that became a part of another, which was injected or dropped.
    pub(crate) merged: u64,
    /// Of those injected, how many are longer than the interface's MTU allows (super-frames of
    /// segmentation offload; readers get them whole).
    pub(crate) above_mtu: u64,
    /// Of those injected, how many were cut by the snaplen before.
    pub(crate) cut: u64,
    dropped: [u64; REASONS.len()],
}

impl Reason {
    /// What the driver means by an error; `None` if the interface is gone.
    pub(crate) fn of(errno: Errno) -> Option<Self> {
        match errno {
            Errno::IO | Errno::NETDOWN => Some(Self::LinkDown),
            Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM => Some(Self::NoRoom),
            Errno::MSGSIZE | Errno::TOOBIG => Some(Self::TooLong),
            Errno::BADFD | Errno::NODEV => None,
            _ => Some(Self::Refused),
        }
    }
}

impl Tally {
    /// Counts a packet that the TAP did not take.
    #[inline]
    pub(crate) fn drop(&mut self, reason: Reason) {
        self.dropped[reason as usize] += 1;
    }

    /// All drops by the TAP.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// ` (3 link_down, 1 no_room)`, or nothing.
    pub(crate) fn reasons(&self) -> String {
        let words: Vec<String> = REASONS
            .iter()
            .zip(self.dropped)
            .filter(|&(_, count)| count > 0)
            .map(|(name, count)| format!("{} {name}", grouped(count)))
            .collect();
        match words.is_empty() {
            true => String::new(),
            false => format!(" ({})", words.join(", ")),
        }
    }

    /// The drops by reason, zeros included.
    pub(crate) fn dropped_json(&self) -> Value {
        let map: Map<String, Value> = REASONS
            .iter()
            .zip(self.dropped)
            .map(|(name, count)| ((*name).to_owned(), json!(count)))
            .collect();
        Value::Object(map)
    }
}

/// Names of the reasons, in their order.
const REASONS: [&str; 5] = ["link_down", "no_room", "too_long", "too_short", "refused"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_is_a_reason_or_the_end_and_the_sum_closes() {
        let mut tally = Tally::default();
        for (errno, reason) in [
            (Errno::IO, Some(Reason::LinkDown)),
            (Errno::AGAIN, Some(Reason::NoRoom)),
            (Errno::NOBUFS, Some(Reason::NoRoom)),
            (Errno::MSGSIZE, Some(Reason::TooLong)),
            (Errno::INVAL, Some(Reason::Refused)),
            (Errno::BADFD, None),
        ] {
            assert_eq!(Reason::of(errno), reason, "{errno}");
            reason.into_iter().for_each(|reason| tally.drop(reason));
        }
        assert_eq!(tally.dropped(), 5);
        let words = " (1 link_down, 2 no_room, 1 too_long, 1 refused)";
        assert_eq!(tally.reasons(), words);
        assert_eq!(tally.dropped_json()["no_room"], 2);
        assert_eq!(Tally::default().reasons(), "");
    }
}
