//! libpcap as a program meets it: by name, through the dynamic loader.
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use vnplug_filter::Instruction;

use crate::row::Result;

/// libpcap, loaded until the process ends.
pub(crate) struct Library(NonNull<c_void>);

/// `pcap_compile`.
pub(crate) type Compile =
    unsafe extern "C" fn(*mut c_void, *mut Program, *const c_char, c_int, c_uint) -> c_int;

/// `struct bpf_program`, for libpcap to fill in.
#[repr(C)]
pub(crate) struct Program {
    pub(crate) len: c_uint,
    pub(crate) instructions: *mut Instruction,
}

impl Program {
    /// Without instructions.
    pub(crate) const EMPTY: Self = Self {
        len: 0,
        instructions: std::ptr::null_mut(),
    };
}

impl Library {
    /// Loads `libpcap.so.0.8` from wherever the loader finds it first.
    pub(crate) fn load() -> Result<Self> {
        // SAFETY: a NUL-terminated name; libpcap's constructors are those of any user of it.
        let handle = unsafe { libc::dlopen(c"libpcap.so.0.8".as_ptr(), libc::RTLD_NOW) };
        Ok(Self(NonNull::new(handle).ok_or("no libpcap.so.0.8")?))
    }

    /// A function by its name.
    ///
    /// # Safety
    /// `F` is a pointer to a function of the type that pcap.h 1.10 gives this name.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle came from dlopen and is never closed.
        let address = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        if address.is_null() {
            return Err(format!("no {}", name.to_string_lossy()).into());
        }
        // SAFETY: not null, of the same size, and by the caller's word of this type.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}
