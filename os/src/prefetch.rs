//! Hints to the processor that memory is needed soon; they affect only speed.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "an instruction that has no safe form yet")
)]

/// Asks for the cache lines of a value, the first eight at most.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    let at = std::ptr::from_ref(value).cast::<u8>();
    for line in 0..size_of::<T>().div_ceil(LINE).min(8) {
        address(at.wrapping_add(line * LINE));
    }
}

/// Asks for the cache line at an address, whatever it is.
#[inline(always)]
pub fn address(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching reads nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

const LINE: usize = 64;
