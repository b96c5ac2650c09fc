//! The symbol that libvdeplug looks up, and the six functions behind it.
//!
//! No panic crosses into C: it becomes -1 and `EIO`.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::abi::{Conn, INTERFACE_VERSION, Module, OpenArgs};
use crate::address::Address;
use crate::plug::{Plug, errno_of, tell};

/// The module, by the name that libvdeplug looks for.
#[unsafe(no_mangle)]
pub(crate) static vdeplug_ops: Module = Module {
    flags: 0,
    open,
    recv,
    send,
    datafd,
    ctlfd,
    close,
};

/// # Safety
/// `url` and `descr` are strings or null, `args` is a `struct vde_open_args` of that version or null.
unsafe extern "C" fn open(
    url: *const c_char,
    descr: *const c_char,
    version: c_int,
    args: *const OpenArgs,
) -> *mut Conn {
    guarded(ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let [url, descr] = [url, descr].map(|text| unsafe { text_of(text) });
        // SAFETY: the caller's promise.
        let port = match unsafe { args.as_ref() } {
            Some(_) if version != INTERFACE_VERSION => return Err(Errno::INVAL),
            Some(args) => args.port,
            None => 0,
        };
        let opened = joined(url, descr, port);
        let plug = opened.map_err(|(errno, text)| {
            tell(&format!(
                "vnplug://{}: {text}",
                String::from_utf8_lossy(url)
            ));
            errno
        })?;
        Ok(Box::into_raw(Box::new(Conn {
            handle: ptr::null_mut(),
            module: ptr::null(),
            plug,
        })))
    })
}

fn joined(url: &[u8], descr: &[u8], port: c_int) -> Result<Plug, (Errno, String)> {
    if port != 0 {
        let text = "a ring cannot ask for a port by its number: leave it out";
        return Err((Errno::INVAL, text.into()));
    }
    let address = Address::parse(url).map_err(|text| (Errno::INVAL, text))?;
    let label = String::from_utf8_lossy(descr);
    Plug::open(&address, &label).map_err(|error| (errno_of(&error), error.to_string()))
}

/// # Safety
/// `conn` is open, and `buf` has room for `len` bytes.
unsafe extern "C" fn recv(conn: *mut Conn, buf: *mut c_void, len: usize, flags: c_int) -> isize {
    guarded(-1, || {
        if buf.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise; a buffer is not larger than `isize::MAX`.
        let (plug, into) = unsafe {
            let into = slice::from_raw_parts_mut(buf.cast::<MaybeUninit<u8>>(), len);
            (plug(conn), into)
        };
        Ok(plug.receive(into, waits(flags))? as isize)
    })
}

/// # Safety
/// `conn` is open, and `buf` has `len` bytes.
unsafe extern "C" fn send(conn: *mut Conn, buf: *const c_void, len: usize, flags: c_int) -> isize {
    guarded(-1, || {
        if buf.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller's promise; a buffer is not larger than `isize::MAX`.
        let (plug, frame) = unsafe { (plug(conn), slice::from_raw_parts(buf.cast::<u8>(), len)) };
        Ok(plug.send(frame, waits(flags))? as isize)
    })
}

/// # Safety
/// `conn` is open.
unsafe extern "C" fn datafd(conn: *mut Conn) -> c_int {
    // SAFETY: the caller's promise.
    guarded(-1, || Ok(unsafe { plug(conn) }.data_fd()))
}

/// # Safety
/// `conn` is open.
unsafe extern "C" fn ctlfd(conn: *mut Conn) -> c_int {
    // SAFETY: the caller's promise.
    guarded(-1, || Ok(unsafe { plug(conn) }.control_fd()))
}

/// # Safety
/// `conn` is open, and nobody uses it any more.
unsafe extern "C" fn close(conn: *mut Conn) -> c_int {
    guarded(-1, || {
        // SAFETY: `open` made it of a Box, and it is closed once.
        drop(unsafe { Box::from_raw(conn) });
        Ok(0)
    })
}

/// Makes the descriptor's number stand for a file that is never readable. Who waits for the old file
/// by epoll waits for nothing then.
pub(crate) fn silence(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let silent = eventfd(0, EventfdFlags::CLOEXEC)?;
    // SAFETY: two descriptors, both open; their owners go on owning their numbers.
    match unsafe { libc::dup3(silent.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) } {
        -1 => Err(last_errno()),
        _ => Ok(()),
    }
}

/// # Safety
/// `conn` is open, for as long as the reference is used.
unsafe fn plug<'a>(conn: *mut Conn) -> &'a Plug {
    // SAFETY: the caller's promise. libvdeplug writes the words before it while nobody else has it.
    unsafe { &(*conn).plug }
}

/// # Safety
/// `text` is null or a string that outlives the result.
unsafe fn text_of<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return b"";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

fn waits(flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0
}

/// Runs `call`; an error becomes `bad` and errno.
#[inline]
fn guarded<T>(bad: T, call: impl FnOnce() -> Result<T, Errno>) -> T {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Errno::IO));
    match result {
        Ok(value) => value,
        Err(errno) => {
            // SAFETY: the calling thread's errno.
            unsafe { *libc::__errno_location() = errno.raw_os_error() };
            bad
        }
    }
}

fn last_errno() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
