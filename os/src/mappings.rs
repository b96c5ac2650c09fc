//! How many mappings the memory shared with readers takes, of those that the kernel allows a process.
//!
//! At `vm.max_map_count` nothing can be mapped any more: no pool, no ring, no stack of a thread. A ring
//! of a process takes two mappings or three, so readers could cause that. Shared memory leaves
//! `HELD_BACK` mappings to the rest of the daemon; one user has at most half of the shared part
//! ([`most_each`]). Addresses are bounded where users say how much memory is to be mapped: [`Space`].

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// Addresses for memory that users share with us, who say how much it is: a file's length costs them nothing.
#[derive(Debug)]
pub struct Space {
    /// Bytes for all users, and for each.
    most: u64,
    most_each: u64,
    /// Bytes that each user has.
    taken: Mutex<BTreeMap<u32, u64>>,
}

/// The memory of users who are neither root nor the daemon's own. A process has 128 TiB of addresses (x86-64 with
/// four levels of page tables): half of them are left to all others.
pub static STRANGERS: Space = Space::new(1 << 46, 1 << 44);

/// Addresses that count until this is dropped.
#[derive(Debug)]
pub struct Room {
    space: &'static Space,
    user: u32,
    bytes: u64,
}

impl Space {
    /// With `most` for all users together, and `most_each` for each.
    pub const fn new(most: u64, most_each: u64) -> Self {
        Self {
            most,
            most_each,
            taken: Mutex::new(BTreeMap::new()),
        }
    }

    /// Takes `bytes` for this user.
    ///
    /// # Errors
    /// `QuotaExceeded` if fewer are left.
    pub fn take(&'static self, user: u32, bytes: u64) -> io::Result<Room> {
        let mut taken = self.taken();
        let of_user = taken.get(&user).copied().unwrap_or(0);
        let of_all: u64 = taken.values().sum();
        let fits = |taken: u64, most: u64| bytes <= most - taken;
        if !fits(of_user, self.most_each) || !fits(of_all, self.most) {
            let what = format!(
                "{bytes} bytes more: user {user} shares {of_user} of at most {}, all users {of_all} of {}",
                self.most_each, self.most
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        *taken.entry(user).or_default() += bytes;
        Ok(Room {
            space: self,
            user,
            bytes,
        })
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u32, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.space.taken();
        if let Some(of_user) = taken.get_mut(&self.user) {
            *of_user -= self.bytes;
            if *of_user == 0 {
                taken.remove(&self.user);
            }
        }
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

    #[test]
    fn addresses_are_bounded_for_each_user_and_for_all() {
        static SPACE: Space = Space::new(100, 40);
        let one = SPACE.take(1, 30).unwrap();
        assert!(SPACE.take(1, 11).is_err() && SPACE.take(1, u64::MAX).is_err());
        let two = SPACE.take(1, 10).unwrap();
        let others = [2, 3].map(|user| SPACE.take(user, 30).unwrap());
        let error = SPACE.take(4, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        drop(one);
        assert!(SPACE.take(4, 30).is_ok() && SPACE.take(1, 31).is_err());
        drop((two, others));
        assert!(SPACE.taken().is_empty());
    }
}
