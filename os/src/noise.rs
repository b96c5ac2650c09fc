//! A bound on how much peers can make the daemon log.
//!
//! Whatever a peer can provoke at will (a connection cut off, a port in quarantine, a channel that
//! comes and goes) is logged with [`peer_log!`](crate::peer_log): at most `LINES` lines in one second in all, and
//! then how many were held back. Counters tell the rest; they hold nothing back.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Lines about peers in one second.
const LINES: u64 = 20;

/// Counts the lines of the running second.
#[derive(Debug, Default)]
pub struct Noise {
    /// The second (upper half) and the lines said in it (lower half).
    said: AtomicU64,
    held_back: AtomicU64,
}

/// Lines about all peers.
pub static PEERS: Noise = Noise {
    said: AtomicU64::new(0),
    held_back: AtomicU64::new(0),
};

impl Noise {
    /// Whether one more line may be said now; if so, how many were held back since the last.
    pub fn may_say(&self) -> Option<u64> {
        static START: OnceLock<Instant> = OnceLock::new();
        self.may_say_in(START.get_or_init(Instant::now).elapsed().as_secs())
    }

    fn may_say_in(&self, second: u64) -> Option<u64> {
        let next = |said: u64| match (said >> 32, said & 0xffff_ffff) {
            (now, lines) if now == second && lines >= LINES => None,
            (now, _) if now == second => Some(said + 1),
            _ => Some((second << 32) + 1),
        };
        // Relaxed: two counters, nothing else is published through them.
        match self
            .said
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
        {
            Ok(_) => Some(self.held_back.swap(0, Ordering::Relaxed)),
            Err(_) => {
                self.held_back.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }
}

/// Logs something that a peer caused; see the module.
#[macro_export]
macro_rules! peer_log {
    ($level:expr, $target:literal, $($text:tt)+) => {
        if let Some(held_back) = $crate::noise::PEERS.may_say() {
            if held_back > 0 {
                $crate::log::warn!(target: $target, "{held_back} lines about peers were held back");
            }
            $crate::log::log!(target: $target, $level, $($text)+);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_and_counted() {
        let noise = Noise::default();
        let said = |second| (0..100).filter_map(|_| noise.may_say_in(second)).count();
        assert_eq!(said(7) as u64, LINES);
        assert_eq!(noise.may_say_in(8), Some(100 - LINES));
        assert_eq!(noise.may_say_in(8), Some(0));
    }
}
