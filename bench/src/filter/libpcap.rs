//! libpcap's compiler and interpreter.
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CString, c_int, c_uint, c_void};

use vnplug_filter::Instruction;

use crate::libpcap::{Compile, Library, Program};
use crate::row::Result;

/// The functions that judge.
pub(super) struct Judges {
    filter: Filter,
    open_dead: OpenDead,
    compile: Compile,
}

type OpenDead = unsafe extern "C" fn(c_int, c_int) -> *mut c_void;
type Filter = unsafe extern "C" fn(*const Instruction, *const u8, c_uint, c_uint) -> c_uint;

/// A program that libpcap compiled, and runs.
pub(super) struct Compiled {
    filter: Filter,
    instructions: Vec<Instruction>,
}

impl Judges {
    /// Finds them.
    pub(super) fn load() -> Result<Self> {
        let library = Library::load()?;
        // SAFETY: the types are those of pcap.h 1.10 for these names.
        unsafe {
            Ok(Self {
                filter: library.function(c"bpf_filter")?,
                open_dead: library.function(c"pcap_open_dead")?,
                compile: library.function(c"pcap_compile")?,
            })
        }
    }

    /// Compiles an expression, optimised, for Ethernet.
    pub(super) fn compile(&self, expression: &str) -> Result<Compiled> {
        let text = CString::new(expression)?;
        let mut raw = Program::EMPTY;
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
