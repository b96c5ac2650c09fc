//! What became of the packets: `received = injected + merged + denied + Σ dropped by reason`, to the packet.

use rustix::io::Errno;

/// Why a packet is not in the TAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Reason {
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
pub struct Tally {
    /// Packets that were to be injected.
    pub received: u64,
    /// Packets, and super-frames made of them, that the interface took.
    pub injected: u64,
    /// Packets that whoever guards the cable did not let in.
    pub denied: u64,
    /// Packets that became a part of another, which was injected or dropped.
    pub merged: u64,
    /// Of those injected, how many are longer than the interface's MTU allows (super-frames of
    /// segmentation offload; readers get them whole).
    pub above_mtu: u64,
    /// Of those injected, how many were cut by the snaplen before.
    pub cut: u64,
    dropped: [u64; REASONS.len()],
}

impl Reason {
    /// What the driver means by an error; `None` if the interface is gone.
    pub fn of(errno: Errno) -> Option<Self> {
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
    pub fn drop(&mut self, reason: Reason) {
        self.dropped[reason as usize] += 1;
    }

    /// All drops by the TAP.
    pub fn dropped(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// The drops by reason, zeros included.
    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REASONS.into_iter().zip(self.dropped)
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
        let counts: Vec<u64> = tally.by_reason().map(|(_, count)| count).collect();
        assert_eq!(counts, [1, 2, 1, 0, 1]);
    }
}
