//! What the sandbox asks of Linux that no crate here has: one family of system calls a file.

pub(crate) mod diag;
pub(crate) mod identity;
pub(crate) mod landlock;
pub(crate) mod memory;
pub(crate) mod process;
pub(crate) mod seccomp;
pub(crate) mod socket;
pub(crate) mod table;
pub(crate) mod threads;
pub(crate) mod trace;

use std::sync::{Mutex, MutexGuard};

/// A lock whose holder has panicked is as good as another: the process ends for it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|lock| lock.into_inner())
}
