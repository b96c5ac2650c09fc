//! Filtering rules.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::c_int;

use super::attempt;
use crate::abi::ring::Ring;
use crate::error::{INVALID_ARGUMENT, NOT_SUPPORTED};
use crate::handle::Failure;

/// `pfring_set_filtering_mode`: rules are software everywhere.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_filtering_mode(ring: *mut Ring, mode: u32) -> c_int {
    let set = match mode {
        HARDWARE_AND_SOFTWARE | SOFTWARE_ONLY => Ok(()),
        HARDWARE_ONLY => Err(Failure::new(NOT_SUPPORTED, libc::ENOTSUP)),
        _ => Err(Failure::new(INVALID_ARGUMENT, libc::EINVAL)),
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |_| set) }
}

/// `filtering_mode`.
const HARDWARE_AND_SOFTWARE: u32 = 0;
const HARDWARE_ONLY: u32 = 1;
const SOFTWARE_ONLY: u32 = 2;
