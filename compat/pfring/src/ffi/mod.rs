//! The exported calls, in the order of `pfring.h`.
//!
//! Every call goes through [`with`]: a NULL ring is an argument error, a panic stays inside, and the
//! ring is not freed while the call is in it.

#![expect(unsafe_code, reason = "the C ABI")]

mod about;
mod calls;
mod devices;
mod life;
mod packet;
mod receive;
mod rules;
mod select;
mod send;
mod unsupported;

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use crate::abi::ring::Ring;
use crate::error::{GENERIC, INVALID_ARGUMENT};
use crate::handle::{Failure, Handle};

/// Runs `act` on the ring, or returns `wrong` if it is NULL or `act` panics.
///
/// # Safety
/// `ring` is NULL or a ring of `pfring_open` that was not closed when this call began.
unsafe fn with<T>(ring: *mut Ring, wrong: T, act: impl FnOnce(&Handle) -> T) -> T {
    let handle = ring.cast::<Handle>();
    if handle.is_null() {
        set_errno(libc::EINVAL);
        return wrong;
    }
    // SAFETY: `ring` is the first member of a Handle, which lives until its last call has left it,
    // and this one is entered now.
    let inside = unsafe { Inside::enter(handle) };
    let handle = &inside;
    catch_unwind(AssertUnwindSafe(|| act(handle))).unwrap_or(wrong)
}

/// As [`with`], for calls that return 0 or an error number.
///
/// # Safety
/// As [`with`].
unsafe fn attempt(ring: *mut Ring, act: impl FnOnce(&Handle) -> Result<(), Failure>) -> c_int {
    let run = |handle: &Handle| code(act(handle).map(|()| 0));
    let wrong = if ring.is_null() {
        INVALID_ARGUMENT
    } else {
        GENERIC
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, wrong, run) }
}

/// A result as C has it.
fn code(result: Result<c_int, Failure>) -> c_int {
    result.unwrap_or_else(|failure| {
        set_errno(failure.errno);
        failure.code
    })
}

fn set_errno(errno: c_int) {
    // SAFETY: the C library's own variable of this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// One call inside a handle.
struct Inside(*mut Handle);

impl Inside {
    /// # Safety
    /// The handle is there, and stays at least until this call is counted.
    unsafe fn enter(handle: *mut Handle) -> Self {
        // SAFETY: the caller's promise.
        unsafe { &*handle }.inside.fetch_add(1, Ordering::Relaxed);
        Self(handle)
    }
}

impl std::ops::Deref for Inside {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        // SAFETY: counted, so it is freed after this value is dropped.
        unsafe { &*self.0 }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // SAFETY: this call was counted.
        unsafe { leave(self.0) };
    }
}

/// Takes one call, or the program's own hold, away; the last one frees the handle.
///
/// # Safety
/// The hold was counted, and the handle is not used by it any more.
unsafe fn leave(handle: *mut Handle) {
    // SAFETY: the hold that is given up kept the handle so far.
    let count = unsafe { &*handle }.inside.fetch_sub(1, Ordering::AcqRel);
    if count == 1 {
        // SAFETY: made by Box::into_raw in `pfring_open`, and this was the last hold.
        let handle = unsafe { Box::from_raw(handle) };
        // A panic of closing ports stays inside.
        let _closed = catch_unwind(AssertUnwindSafe(|| drop(handle)));
    }
}
