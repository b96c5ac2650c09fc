//! Private eventfds by which the daemon's threads wake each other, and random numbers.

use std::os::fd::{AsFd, OwnedFd};

use rustix::rand::{GetRandomFlags, getrandom};

/// Makes an eventfd readable: a private one, or one of which the thread that asks may wait.
#[inline]
pub(crate) fn ring(eventfd: impl AsFd) {
    // The only possible error is EAGAIN: the count is at its end, so it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Makes it unreadable again.
#[inline]
pub(crate) fn clear(eventfd: &OwnedFd) {
    // The only possible error is EAGAIN: it was not readable.
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// A random number that nobody can guess.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Eight bytes come whole once the system's pool is seeded, long before we run.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
