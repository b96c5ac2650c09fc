//! libpcap's filter compiler, loaded when it is there.
//!
//! The library is C code that parses what strangers write. Call [`Library::compile`] on an
//! expression of the user whose process this is, or in a process that may do nothing else, as the
//! daemon does (`vnplug-filter`).
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use crate::Instruction;

type OpenDead = unsafe extern "C" fn(c_int, c_int) -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void);
type Compile =
    unsafe extern "C" fn(*mut c_void, *mut RawProgram, *const c_char, c_int, c_uint) -> c_int;
type FreeCode = unsafe extern "C" fn(*mut RawProgram);
type LastError = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type Filter = unsafe extern "C" fn(*const Instruction, *const u8, c_uint, c_uint) -> c_uint;
type Validate = unsafe extern "C" fn(*const Instruction, c_int) -> c_int;

/// libpcap, loaded until the process ends.
pub struct Library {
    open_dead: OpenDead,
    close: Close,
    compile: Compile,
    free_code: FreeCode,
    last_error: LastError,
    filter: Filter,
    validate: Validate,
}

/// `struct bpf_program`.
#[repr(C)]
struct RawProgram {
    len: c_uint,
    instructions: *mut Instruction,
}

impl Library {
    /// Says that there is none: to link the dynamic loader into a static program would be in vain.
    ///
    /// # Errors
    /// Always.
    #[cfg(target_feature = "crt-static")]
    pub fn load() -> Result<Self, String> {
        Err("a statically linked program loads no libraries".to_owned())
    }

    /// Loads the first library of `NAMES` that is there.
    ///
    /// # Errors
    /// The dynamic loader's words, for people.
    #[cfg(not(target_feature = "crt-static"))]
    pub fn load() -> Result<Self, String> {
        let open = |name: &CStr| {
            // SAFETY: a NUL-terminated name; the constructors of libpcap and of what it links to
            // are those of any program that uses it.
            NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) })
        };
        let handle = NAMES.into_iter().find_map(open).ok_or_else(loader_error)?;
        let symbol = |name: &CStr| {
            // SAFETY: `handle` came from dlopen and is never closed.
            NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
                .map(NonNull::as_ptr)
                .ok_or_else(loader_error)
        };
        // SAFETY: each type is that of the function in <pcap/pcap.h>, stable since libpcap 0.8.
        unsafe {
            Ok(Self {
                open_dead: std::mem::transmute::<*mut c_void, OpenDead>(symbol(c"pcap_open_dead")?),
                close: std::mem::transmute::<*mut c_void, Close>(symbol(c"pcap_close")?),
                compile: std::mem::transmute::<*mut c_void, Compile>(symbol(c"pcap_compile")?),
                free_code: std::mem::transmute::<*mut c_void, FreeCode>(symbol(c"pcap_freecode")?),
                last_error: std::mem::transmute::<*mut c_void, LastError>(symbol(c"pcap_geterr")?),
                filter: std::mem::transmute::<*mut c_void, Filter>(symbol(c"bpf_filter")?),
                validate: std::mem::transmute::<*mut c_void, Validate>(symbol(c"bpf_validate")?),
            })
        }
    }

    /// Compiles `expression`, optimised, for frames of `link_type` cut to `snaplen` bytes, with the
    /// netmask unknown.
    ///
    /// # Errors
    /// libpcap's own message.
    pub fn compile(
        &self,
        expression: &CStr,
        snaplen: u32,
        link_type: u32,
    ) -> Result<Vec<Instruction>, String> {
        let snaplen = c_int::try_from(snaplen).unwrap_or(c_int::MAX);
        let link_type = c_int::try_from(link_type).map_err(|_| "no such link type".to_owned())?;
        // SAFETY: plain numbers; the result is checked.
        let dead = NonNull::new(unsafe { (self.open_dead)(link_type, snaplen) })
            .ok_or_else(|| "pcap_open_dead: out of memory".to_owned())?
            .as_ptr();
        let mut raw = RawProgram {
            len: 0,
            instructions: std::ptr::null_mut(),
        };
        // SAFETY: `dead` is open, `raw` is for libpcap to fill in, `expression` ends with NUL.
        let code = unsafe {
            (self.compile)(
                dead,
                &raw mut raw,
                expression.as_ptr(),
                OPTIMIZE,
                NETMASK_UNKNOWN,
            )
        };
        let result = if code == 0 && !raw.instructions.is_null() {
            // SAFETY: on success the program has `len` instructions, ours until `free_code`.
            let list = unsafe { std::slice::from_raw_parts(raw.instructions, raw.len as usize) };
            let list = list.to_vec();
            // SAFETY: `raw` was filled in by a compile that succeeded.
            unsafe { (self.free_code)(&raw mut raw) };
            Ok(list)
        } else {
            // SAFETY: `dead` is open; the message lives as long as it.
            let message = unsafe { CStr::from_ptr((self.last_error)(dead)) };
            Err(message.to_string_lossy().into_owned())
        };
        // SAFETY: `dead` is open and not used again.
        unsafe { (self.close)(dead) };
        result
    }

    /// libpcap's interpreter for a program, to compare ours with; `None` if libpcap refuses it.
    pub fn reference<'a>(&'a self, program: &'a [Instruction]) -> Option<Reference<'a>> {
        let len = c_int::try_from(program.len()).ok()?;
        // SAFETY: the list has the length given and is only read.
        let valid = unsafe { (self.validate)(program.as_ptr(), len) } != 0;
        valid.then_some(Reference {
            filter: self.filter,
            program,
        })
    }
}

/// A program that libpcap's `bpf_validate` accepted.
pub struct Reference<'a> {
    filter: Filter,
    program: &'a [Instruction],
}

impl Reference<'_> {
    /// As [`Program::run`](crate::Program::run), by libpcap.
    pub fn run(&self, bytes: &[u8], wire_len: u32) -> u32 {
        let len = c_uint::try_from(bytes.len()).unwrap_or(c_uint::MAX);
        // SAFETY: a valid program, and a frame with the length given.
        unsafe { (self.filter)(self.program.as_ptr(), bytes.as_ptr(), wire_len, len) }
    }
}

#[cfg(not(target_feature = "crt-static"))]
fn loader_error() -> String {
    // SAFETY: no arguments; the text is valid until the next dl call of this thread.
    let Some(text) = NonNull::new(unsafe { libc::dlerror() }) else {
        return "the dynamic loader gave no reason".to_owned();
    };
    // SAFETY: as above, and it ends with NUL.
    unsafe { CStr::from_ptr(text.as_ptr()) }
        .to_string_lossy()
        .into_owned()
}

/// The library's names: Debian's, then everybody else's.
#[cfg(not(target_feature = "crt-static"))]
const NAMES: [&CStr; 2] = [c"libpcap.so.0.8", c"libpcap.so.1"];

const OPTIMIZE: c_int = 1;

/// `PCAP_NETMASK_UNKNOWN`.
const NETMASK_UNKNOWN: c_uint = 0xffff_ffff;
