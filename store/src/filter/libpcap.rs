//! libpcap's filter compiler, loaded when it is there.
//!
//! The expression is that of the user who runs the command, with no more rights than theirs.
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use super::FilterError;
use super::program::Instruction;

type OpenDead = unsafe extern "C" fn(c_int, c_int) -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void);
type Compile =
    unsafe extern "C" fn(*mut c_void, *mut RawProgram, *const c_char, c_int, c_uint) -> c_int;
type FreeCode = unsafe extern "C" fn(*mut RawProgram);
type LastError = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// `struct bpf_program`.
#[repr(C)]
struct RawProgram {
    len: c_uint,
    instructions: *mut Instruction,
}

/// Compiles an expression, optimised, for frames of `link_type`, with the netmask unknown.
///
/// # Errors
/// libpcap's words, or that it cannot be loaded.
pub(super) fn compile(expression: &str, link_type: u32) -> Result<Vec<Instruction>, FilterError> {
    let nul = |_| FilterError::Expression("the expression has a NUL in it".to_owned());
    let expression = CString::new(expression).map_err(nul)?;
    // libpcap's own numbers are those of files, but for this one of Linux.
    let link_type = match link_type {
        101 => DLT_RAW,
        other => c_int::try_from(other)
            .map_err(|_| FilterError::Expression(format!("no link type {link_type}")))?,
    };
    let open = |name: &CStr| {
        // SAFETY: a NUL-terminated name; the constructors of libpcap and of what it links to are those
        // of any program that uses it.
        NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) })
    };
    let library = NAMES.into_iter().find_map(open).ok_or_else(loader_error)?;
    let symbol = |name: &CStr| {
        // SAFETY: `library` came from dlopen and is never closed.
        NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) })
            .map(NonNull::as_ptr)
            .ok_or_else(loader_error)
    };
    // SAFETY: each type is that of the function in <pcap/pcap.h>, stable since libpcap 0.8.
    let (open_dead, close, compile, free_code, last_error) = unsafe {
        (
            std::mem::transmute::<*mut c_void, OpenDead>(symbol(c"pcap_open_dead")?),
            std::mem::transmute::<*mut c_void, Close>(symbol(c"pcap_close")?),
            std::mem::transmute::<*mut c_void, Compile>(symbol(c"pcap_compile")?),
            std::mem::transmute::<*mut c_void, FreeCode>(symbol(c"pcap_freecode")?),
            std::mem::transmute::<*mut c_void, LastError>(symbol(c"pcap_geterr")?),
        )
    };
    // SAFETY: plain numbers; the result is checked.
    let dead = NonNull::new(unsafe { open_dead(link_type, SNAPLEN) })
        .ok_or_else(|| FilterError::NoCompiler("out of memory".to_owned()))?
        .as_ptr();
    let mut raw = RawProgram {
        len: 0,
        instructions: std::ptr::null_mut(),
    };
    // SAFETY: `dead` is open, `raw` is for libpcap to fill in, `expression` ends with NUL.
    let code = unsafe { compile(dead, &raw mut raw, expression.as_ptr(), 1, NETMASK_UNKNOWN) };
    let result = if code == 0 && !raw.instructions.is_null() {
        // SAFETY: on success the program has `len` instructions, ours until `free_code`.
        let list = unsafe { std::slice::from_raw_parts(raw.instructions, raw.len as usize) };
        let list = list.to_vec();
        // SAFETY: `raw` was filled in by a compile that succeeded.
        unsafe { free_code(&raw mut raw) };
        Ok(list)
    } else {
        // SAFETY: `dead` is open; the message lives as long as it.
        let message = unsafe { CStr::from_ptr(last_error(dead)) };
        Err(FilterError::Expression(
            message.to_string_lossy().into_owned(),
        ))
    };
    // SAFETY: `dead` is open and not used again.
    unsafe { close(dead) };
    result
}

fn loader_error() -> FilterError {
    // SAFETY: no arguments; the text is valid until the next dl call of this thread.
    let Some(text) = NonNull::new(unsafe { libc::dlerror() }) else {
        return FilterError::NoCompiler("the dynamic loader gave no reason".to_owned());
    };
    // SAFETY: as above, and it ends with NUL.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    FilterError::NoCompiler(text.to_string_lossy().into_owned())
}

/// The library's names: Debian's, then everybody else's.
const NAMES: [&CStr; 2] = [c"libpcap.so.0.8", c"libpcap.so.1"];
/// Frames that begin with an IP header.
const DLT_RAW: c_int = 12;
const SNAPLEN: c_int = 262_144;
/// `PCAP_NETMASK_UNKNOWN`.
const NETMASK_UNKNOWN: c_uint = 0xffff_ffff;
