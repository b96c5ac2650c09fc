//! The exported functions that know our handles. Each asks whose the handle is; one of the real
//! library's goes there, untouched.
//!
//! No panic crosses into C: it becomes `PCAP_ERROR`.
#![expect(unsafe_code, reason = "the C ABI's island")]

mod calls;
mod life;
mod receive;

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::abi::ERROR_NOT_ACTIVATED;
use crate::filter::{INTERRUPTED, fail};
use crate::handle::Handle;
use crate::read::Live;

/// Runs `call`; a panic, which is a defect of this library, becomes `bad`.
///
/// The thread cannot be cancelled (`pthread_cancel`) meanwhile: that unwinds, and ends the program
/// where something catches. It can be in [`Handle::wait`], as in the real library's.
#[inline]
fn guarded<T>(bad: T, call: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: a place for the old state.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(bad);
    // SAFETY: the state that was; no place for the one that is.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

unsafe extern "C" {
    // glibc writes the old state only where there is a place for it (pthread_setcancelstate(3)).
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// bits/pthread.h of glibc.
const CANCEL_DISABLE: c_int = 1;

/// Runs `look` on an activated handle.
fn activated(handle: &Handle, look: impl FnOnce(&mut Live) -> c_int) -> c_int {
    match handle.live(look) {
        Some(status) => status,
        None if handle.is_active() => fail(handle, INTERRUPTED),
        None => {
            handle.set_error("This handle hasn't been activated yet");
            ERROR_NOT_ACTIVATED
        }
    }
}
