//! The real libpcap: found by path, opened once, its functions in one table.
//!
//! It is opened by an absolute path, so that the dynamic loader does not answer with this library,
//! which has the same SONAME. It is opened `RTLD_LOCAL`, so its symbols disturb nobody's. It is not
//! opened `RTLD_DEEPBIND`: sanitizers refuse that, and it would part it from the program's malloc,
//! while lists of both libraries are freed by one. Where the real library calls itself through its
//! PLT it may therefore come through here; that ends after one step, since every function here asks
//! only the table for the function of the same name.
//!
//! Without a real library the table holds functions that fail and say so.
#![expect(unsafe_code, reason = "calls into the real libpcap through dlopen")]

mod find;
mod table;

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use crate::abi::ERRBUF_SIZE;

pub(crate) use table::Real;

/// The real library's functions; loaded by the first call.
#[inline]
pub(crate) fn real() -> &'static Real {
    &loaded().table
}

/// True if there is no real library on this machine.
pub(crate) fn is_missing() -> bool {
    loaded().missing
}

struct Loaded {
    table: Real,
    missing: bool,
}

fn loaded() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| match find::open() {
        Some(library) => Loaded {
            table: Real::resolve(|name| {
                // SAFETY: the handle came from dlopen and is never closed; the name ends with 0.
                unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) }
            }),
            missing: false,
        },
        None => Loaded {
            table: Real::resolve(|_| std::ptr::null_mut()),
            missing: true,
        },
    })
}

/// Writes [`MISSING`] to a program's error buffer and returns -1.
///
/// # Safety
/// `errbuf` is null or points to `PCAP_ERRBUF_SIZE` bytes.
unsafe fn say_missing(errbuf: *mut c_char) -> c_int {
    if !errbuf.is_null() {
        let bytes = MISSING.to_bytes_with_nul();
        let len = bytes.len().min(ERRBUF_SIZE);
        // SAFETY: the text, its 0 included, is shorter than the buffer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), errbuf, len) };
    }
    -1
}

/// Why a call that the real library should have served fails.
pub(crate) const MISSING: &CStr = c"the real libpcap is not there: install it (Debian: \
    libpcap0.8), or name it in VNPLUG_REAL_LIBPCAP";

const _: () = assert!(MISSING.count_bytes() < ERRBUF_SIZE);
