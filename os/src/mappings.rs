//! How many mappings the memory shared with readers takes, of those that the kernel allows a process.
//!
//! At `vm.max_map_count` nothing can be mapped any more: no pool, no ring, no stack of a thread. A ring
//! of a process takes two mappings or three, so readers could cause that. Shared memory leaves
//! `HELD_BACK` mappings to the rest of the daemon; one user has at most half of the shared part
//! ([`most_each`]).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use vnplug_ring::control::apart::Piece;

/// Mappings that this process has for shared memory.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// For what is not shared: libraries, stacks, packet sockets, machine code.
const HELD_BACK: u64 = 4_096;
/// The kernel's own limit if it cannot be read (`DEFAULT_MAX_MAP_COUNT`).
const USUAL: u64 = 65_530;

/// Mappings that count until this is dropped.
#[derive(Debug)]
pub struct Taken(u64);

impl Taken {
    /// Takes `count` mappings.
    ///
    /// # Errors
    /// `QuotaExceeded` if fewer are left.
    pub fn take(count: u64) -> io::Result<Self> {
        let most = most();
        // Relaxed: a number alone.
        let taken = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            taken.checked_add(count).filter(|&sum| sum <= most)
        });
        taken.map(|_| Self(count)).map_err(|taken| {
            let what = format!(
                "the daemon's rings have {taken} of {most} mappings; raise vm.max_map_count (sysctl)"
            );
            io::Error::new(io::ErrorKind::QuotaExceeded, what)
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The most mappings that the ports of one user may take who is not an operator.
pub fn most_each() -> u64 {
    most() / 2
}

/// The most that shared memory may take. The operator may change the limit while we run.
fn most() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    let allowed = text.ok().and_then(|text| text.trim().parse::<u64>().ok());
    let allowed = allowed.unwrap_or(USUAL);
    allowed - HELD_BACK.min(allowed / 2)
}

/// How many a layout takes: one for each piece, and one for each gap before a piece.
pub fn of<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> u64 {
    let (mut count, mut end) = (0, 0);
    for piece in pieces {
        count += 1 + u64::from(piece.at > end);
        end = piece.at + piece.len;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_ring::control::apart::Shape;

    #[test]
    fn a_ring_takes_two_mappings_and_a_large_one_three() {
        let shape = |rings, capacity, transmit| {
            let shape = Shape {
                rings,
                capacity,
                transmit,
            };
            of(&shape.pieces())
        };
        assert_eq!(shape(1, 4096, 0), 2);
        assert_eq!(shape(3, 1 << 20, 8192), 7);
        assert_eq!(shape(3, 4 << 20, 8192), 10);
    }

    #[test]
    fn more_than_there_are_are_refused_and_not_counted() {
        let before = TAKEN.load(Ordering::Relaxed);
        let error = Taken::take(1 << 40).unwrap_err();
        assert!(error.to_string().contains("vm.max_map_count"), "{error}");
        // Other tests take and give a few meanwhile.
        assert!(TAKEN.load(Ordering::Relaxed) < before + (1 << 20));
    }
}
