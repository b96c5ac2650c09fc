//! Socket calls on addresses and control messages that are bytes of ours already.
//!
//! rustix speaks of addresses by family; here any family must pass, as the program wrote it.
#![expect(
    unsafe_code,
    reason = "socket calls with addresses and control messages as bytes"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// An address of any family, as the kernel takes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    bytes: [u8; ROOM_BYTES],
    length: usize,
}

/// Largest address: `struct sockaddr_storage`.
pub(crate) const ROOM_BYTES: usize = size_of::<libc::sockaddr_storage>();

impl Address {
    /// These bytes; `None` if they are too many.
    pub(crate) fn new(from: &[u8]) -> Option<Self> {
        let mut bytes = [0; ROOM_BYTES];
        bytes.get_mut(..from.len())?.copy_from_slice(from);
        Some(Self {
            bytes,
            length: from.len(),
        })
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn parts(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        (self.bytes.as_ptr().cast(), self.length as libc::socklen_t)
    }
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Address({:02x?})", self.bytes())
    }
}

/// connect(2).
///
/// # Errors
/// The system's.
pub(crate) fn connect(socket: BorrowedFd<'_>, to: &Address) -> io::Result<()> {
    let (address, length) = to.parts();
    // SAFETY: the kernel reads `length` bytes of `to`.
    done(unsafe { libc::connect(socket.as_raw_fd(), address, length) })
}

/// bind(2).
///
/// # Errors
/// The system's.
pub(crate) fn bind(socket: BorrowedFd<'_>, to: &Address) -> io::Result<()> {
    let (address, length) = to.parts();
    // SAFETY: the kernel reads `length` bytes of `to`.
    done(unsafe { libc::bind(socket.as_raw_fd(), address, length) })
}

/// accept4(2): the connection and who made it.
///
/// # Errors
/// The system's.
pub(crate) fn accept(socket: BorrowedFd<'_>, flags: i32) -> io::Result<(OwnedFd, Address)> {
    let mut bytes = [0_u8; ROOM_BYTES];
    let mut length = ROOM_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `bytes`.
    let number = unsafe {
        libc::accept4(
            socket.as_raw_fd(),
            bytes.as_mut_ptr().cast(),
            &raw mut length,
            flags,
        )
    };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor for us.
    let connection = unsafe { OwnedFd::from_raw_fd(number) };
    let length = (length as usize).min(ROOM_BYTES);
    Ok((connection, Address { bytes, length }))
}

/// The socket's own address.
///
/// # Errors
/// The system's.
pub(crate) fn own_address(socket: BorrowedFd<'_>) -> io::Result<Address> {
    let mut bytes = [0_u8; ROOM_BYTES];
    let mut length = ROOM_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `bytes`.
    done(unsafe {
        libc::getsockname(
            socket.as_raw_fd(),
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    })?;
    let length = (length as usize).min(ROOM_BYTES);
    Ok(Address { bytes, length })
}

/// A number that the socket has as option `name` of `SOL_SOCKET`.
///
/// # Errors
/// `ENOTSOCK`, and the system's.
pub(crate) fn option(socket: BorrowedFd<'_>, name: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    done(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    })?;
    Ok(value)
}

/// The kernel's name of the socket (`SO_COOKIE`), never used again while the kernel runs.
///
/// # Errors
/// The system's.
pub(crate) fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut value: u64 = 0;
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    done(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut value).cast(),
            &raw mut length,
        )
    })?;
    Ok(value)
}

/// How long a blocking send may wait (`SO_SNDTIMEO`) or an accept (`SO_RCVTIMEO`); `None`: for ever.
pub(crate) fn patience(socket: BorrowedFd<'_>, name: i32) -> Option<std::time::Duration> {
    // SAFETY: all-zero is a time.
    let mut value: libc::timeval = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    done(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    })
    .ok()?;
    let whole = std::time::Duration::from_secs(u64::try_from(value.tv_sec).ok()?)
        + std::time::Duration::from_micros(u64::try_from(value.tv_usec).ok()?);
    (!whole.is_zero()).then_some(whole)
}

/// sendmsg(2) of bytes and control messages of ours.
///
/// # Errors
/// The system's.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    to: Option<&Address>,
    data: &[u8],
    control: &[u8],
    flags: i32,
) -> io::Result<usize> {
    let mut part = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all-zero is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    if let Some(to) = to {
        let (address, length) = to.parts();
        message.msg_name = address.cast_mut().cast();
        message.msg_namelen = length;
    }
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !control.is_empty() {
        message.msg_control = control.as_ptr().cast_mut().cast();
        message.msg_controllen = control.len();
    }
    // SAFETY: the kernel only reads what the message names, all of which outlives the call.
    let length = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(length).map_err(|_| io::Error::last_os_error())
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
