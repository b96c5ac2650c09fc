//! The calls that wait for an answer, in memory that two processes share.
//!
//! The kernel itself writes a call into the table when it hands it over, so there is no moment at which the
//! supervisor has a call that the keeper does not see. If the supervisor is stopped, the keeper answers what
//! stands here.
//!
//! ```text
//!  head   program: u32 · ended: u32 · status: i32                 written by the supervisor, read by the keeper
//!  slot   one seccomp_notif each; `id` 0: nothing waits           written by the kernel and the supervisor
//! ```
#![expect(
    unsafe_code,
    reason = "memory that is shared with another process and written by the kernel"
)]

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::seccomp::{Listener, Notice};

/// The most calls that can wait at once. The supervisor leaves the last ones free, to refuse what is too much.
pub(crate) const SLOTS: usize = 16_384;

/// The shared table.
#[derive(Debug)]
pub(crate) struct Table {
    base: NonNull<u8>,
}

/// What the supervisor tells the keeper beside calls.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Head {
    /// Process id of the program, once it runs.
    pub(crate) program: AtomicU32,
    /// 1 if the program has ended.
    pub(crate) ended: AtomicU32,
    /// Its wait status then.
    pub(crate) status: AtomicI32,
}

impl Table {
    /// Makes an empty table. Processes that are forked from this one share it.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a new mapping, which nobody else uses. Its pages are zero and come when they are written.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                LENGTH_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base })
    }

    /// What is told beside calls.
    pub(crate) fn head(&self) -> &Head {
        // SAFETY: the mapping begins with it, lives as long as `self`, and is only used by atomics.
        unsafe { self.base.cast().as_ref() }
    }

    /// Waits for a call, which then stands in `slot`. The slot must be free and this thread's.
    ///
    /// # Errors
    /// As `Listener::receive`.
    pub(crate) fn receive(&self, listener: &Listener, slot: usize) -> io::Result<Notice> {
        let place = self.place(slot);
        let received = listener.receive_into(place.as_ptr());
        if let Err(error) = received {
            self.clear(slot);
            return Err(error);
        }
        // SAFETY: the kernel has written a whole structure there; the keeper only reads.
        Ok(Notice::from(unsafe { place.as_ptr().read_volatile() }))
    }

    /// The call in `slot` has been answered, or is gone.
    pub(crate) fn clear(&self, slot: usize) {
        // Release: pairs with the Acquire in `waiting`; the answer was given before.
        self.id(slot).store(0, Ordering::Release);
    }

    /// The calls that wait.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = u64> {
        // Acquire: pairs with the Release in `clear`.
        (0..SLOTS)
            .map(|slot| self.id(slot).load(Ordering::Acquire))
            .filter(|id| *id != 0)
    }

    fn place(&self, slot: usize) -> NonNull<libc::seccomp_notif> {
        assert!(slot < SLOTS, "the table has {SLOTS} slots");
        // SAFETY: inside the mapping, by the assertion and LENGTH_BYTES.
        unsafe { self.base.byte_add(HEAD_BYTES + slot * SLOT_BYTES).cast() }
    }

    fn id(&self, slot: usize) -> &AtomicU64 {
        const { assert!(std::mem::offset_of!(libc::seccomp_notif, id) == 0) }
        // SAFETY: a slot begins with its id, aligned to eight bytes. All of the keeper's looks are atomic; the
        // kernel writes it with the call.
        unsafe { self.place(slot).cast().as_ref() }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), LENGTH_BYTES) };
    }
}

// SAFETY: the table is used by atomics, and a slot by the one thread that it belongs to.
unsafe impl Send for Table {}
// SAFETY: as for Send.
unsafe impl Sync for Table {}

const HEAD_BYTES: usize = 64;
const SLOT_BYTES: usize = size_of::<libc::seccomp_notif>().next_multiple_of(64);
const LENGTH_BYTES: usize = HEAD_BYTES + SLOTS * SLOT_BYTES;

const _: () = assert!(size_of::<Head>() <= HEAD_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cleared_does_not_wait() {
        let table = Table::new().unwrap();
        table.id(0).store(7, Ordering::Relaxed);
        table.id(SLOTS - 1).store(8, Ordering::Relaxed);
        assert_eq!(table.waiting().collect::<Vec<_>>(), [7, 8]);
        table.clear(0);
        assert_eq!(table.waiting().collect::<Vec<_>>(), [8]);
    }
}
