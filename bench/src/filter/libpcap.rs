//! libpcap's compiler and interpreter.
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use vnplugd::filter::Instruction;

use crate::row::Result;

/// libpcap, loaded until the process ends.
pub(super) struct Library {
    filter: Filter,
    open_dead: OpenDead,
    compile: Compile,
}

type OpenDead = unsafe extern "C" fn(c_int, c_int) -> *mut c_void;
type Compile =
    unsafe extern "C" fn(*mut c_void, *mut RawProgram, *const c_char, c_int, c_uint) -> c_int;
type Filter = unsafe extern "C" fn(*const Instruction, *const u8, c_uint, c_uint) -> c_uint;

/// `struct bpf_program`.
#[repr(C)]
struct RawProgram {
    len: c_uint,
    instructions: *mut Instruction,
}

/// A program that libpcap compiled, and runs.
pub(super) struct Compiled {
    filter: Filter,
    instructions: Vec<Instruction>,
}

impl Library {
    /// Loads `libpcap.so.0.8` from wherever the loader finds it first.
    pub(super) fn load() -> Result<Self> {
        // SAFETY: a NUL-terminated name; libpcap's constructors are those of any user of it.
        let handle = unsafe { libc::dlopen(c"libpcap.so.0.8".as_ptr(), libc::RTLD_NOW) };
        let handle = NonNull::new(handle).ok_or("no libpcap.so.0.8")?;
        let symbol = |name: &CStr| {
            // SAFETY: `handle` came from dlopen and is never closed.
            NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
                .map(NonNull::as_ptr)
                .ok_or_else(|| format!("no {}", name.to_string_lossy()))
        };
        // SAFETY: the types are those of pcap.h 1.10 for these names.
        Ok(unsafe {
            use std::mem::transmute;
            Self {
                filter: transmute::<*mut c_void, Filter>(symbol(c"bpf_filter")?),
                open_dead: transmute::<*mut c_void, OpenDead>(symbol(c"pcap_open_dead")?),
                compile: transmute::<*mut c_void, Compile>(symbol(c"pcap_compile")?),
            }
        })
    }

    /// Compiles an expression, optimised, for Ethernet.
    pub(super) fn compile(&self, expression: &str) -> Result<Compiled> {
        let text = CString::new(expression)?;
        let mut raw = RawProgram {
            len: 0,
            instructions: std::ptr::null_mut(),
        };
        // SAFETY: `raw` is for libpcap to fill in, the text ends with NUL. Handle and program are
        // not freed: a few kilobytes, in a process that ends soon.
        let failed = unsafe {
            let dead = (self.open_dead)(1, 262_144);
            dead.is_null() || (self.compile)(dead, &raw mut raw, text.as_ptr(), 1, u32::MAX) < 0
        };
        if failed || raw.instructions.is_null() {
            return Err(format!("libpcap does not compile {expression:?}").into());
        }
        // SAFETY: on success the program has `len` instructions, which stay.
        let list = unsafe { std::slice::from_raw_parts(raw.instructions, raw.len as usize) };
        Ok(Compiled {
            filter: self.filter,
            instructions: list.to_vec(),
        })
    }
}

impl Compiled {
    pub(super) fn instructions(&self) -> &[Instruction] {
        &self.instructions
    }

    /// `bpf_filter`.
    pub(super) fn run(&self, frame: &[u8]) -> u32 {
        let len = frame.len() as c_uint;
        // SAFETY: a program of libpcap's own, and a frame with the length given.
        unsafe { (self.filter)(self.instructions.as_ptr(), frame.as_ptr(), len, len) }
    }
}
