//! What libvdeplug 4 and its modules agree on (its `libvdeplug.h` and `libvdeplug_mod.h`).

use std::ffi::{c_char, c_int, c_void};

use crate::plug::Plug;

/// `struct vdeconn`. libvdeplug writes the first two words after a connection was opened; what
/// follows is the module's.
#[repr(C)]
pub(crate) struct Conn {
    pub(crate) handle: *mut c_void,
    pub(crate) module: *const Module,
    pub(crate) plug: Plug,
}

/// `struct vdeplug_module`: the functions of a module.
#[repr(C)]
pub(crate) struct Module {
    pub(crate) flags: c_int,
    pub(crate) open:
        unsafe extern "C" fn(*const c_char, *const c_char, c_int, *const OpenArgs) -> *mut Conn,
    pub(crate) recv: unsafe extern "C" fn(*mut Conn, *mut c_void, usize, c_int) -> isize,
    pub(crate) send: unsafe extern "C" fn(*mut Conn, *const c_void, usize, c_int) -> isize,
    pub(crate) datafd: unsafe extern "C" fn(*mut Conn) -> c_int,
    pub(crate) ctlfd: unsafe extern "C" fn(*mut Conn) -> c_int,
    pub(crate) close: unsafe extern "C" fn(*mut Conn) -> c_int,
}

/// `struct vde_open_args`. Group and mode are those of a data socket, which there is not.
#[repr(C)]
pub(crate) struct OpenArgs {
    pub(crate) port: c_int,
    pub(crate) group: *const c_char,
    pub(crate) mode: libc::mode_t,
}

/// The version of `OpenArgs` that libvdeplug 4 names.
pub(crate) const INTERFACE_VERSION: c_int = 1;
