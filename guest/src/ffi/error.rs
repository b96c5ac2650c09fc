//! Texts in and out, and what errors are called.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use vnplug_ring::control::code;

use crate::Error;

/// # Safety
/// `text` is null or ends with 0, and stays for `'a`.
pub(super) unsafe fn text<'a>(
    text: *const c_char,
    bad: &'static str,
) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::Invalid(bad))
}

/// Writes the error's text, cut to the buffer and ended with 0.
///
/// # Safety
/// `errbuf` is null or points to `errlen` bytes.
pub(super) unsafe fn tell(error: &Error, errbuf: *mut c_char, errlen: usize) {
    if errbuf.is_null() || errlen == 0 {
        return;
    }
    let text = c_string(&describe(error));
    let len = text.as_bytes().len().min(errlen - 1);
    // SAFETY: `len + 1 <= errlen` bytes are written; a fresh string does not overlap the buffer.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), errbuf, len);
        errbuf.add(len).write(0);
    }
}

pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Error::Invalid(DEFECT)))
}

pub(super) fn describe(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The text of an error where a program may look at any time: it stays in its place and ends with 0.
#[derive(Debug)]
pub(super) struct Text([AtomicU8; ERRBUF]);

impl Default for Text {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU8::new(0)))
    }
}

impl Text {
    /// Puts another text there, cut to the room.
    pub(super) fn set(&self, text: &str) {
        let bytes = text.bytes().filter(|&byte| byte != 0);
        let bytes = bytes.take(ERRBUF - 1).chain([0]);
        for (place, byte) in self.0.iter().zip(bytes) {
            place.store(byte, Relaxed);
        }
    }

    pub(super) fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

/// Text from the host may hold anything; a C string may not hold a 0.
pub(super) fn c_string(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

pub(super) fn number(error: &Error) -> c_int {
    match error {
        Error::Invalid(DEFECT) => -24,
        Error::Invalid(_) => E_INVALID,
        Error::Unreachable { .. } => -2,
        Error::Permission { .. } => -3,
        Error::Disconnected => -4,
        Error::Full => -17,
        Error::TimedOut => -5,
        Error::Protocol(_) => -6,
        Error::Version { .. } => -7,
        Error::Refused { code, .. } => match *code {
            code::NOT_FOUND => -11,
            code::DENIED => -12,
            code::FILTER => -13,
            code::NO_MEMORY => -14,
            code::LIMIT => -15,
            code::UNAVAILABLE => -16,
            _ => -10,
        },
        Error::Gone(_) => -20,
        Error::Quarantined => -21,
        Error::Corrupt(_) | Error::Ring(_) => -22,
        Error::System { .. } => -23,
        Error::SourceFailed(_) => -25,
    }
}

pub(super) const E_INVALID: c_int = -1;
/// Room for an error's text in bytes.
const ERRBUF: usize = 512;
/// The text of a panic.
pub(super) const DEFECT: &str = "a defect of the library: it panicked";
