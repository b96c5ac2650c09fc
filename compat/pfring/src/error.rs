//! PF_RING's error numbers, and what libvnplug's errors become.

use std::ffi::c_int;

use vnplug::{Error, code};

/// `PF_RING_ERROR_GENERIC`.
pub(crate) const GENERIC: c_int = -1;
/// `PF_RING_ERROR_INVALID_ARGUMENT`.
pub(crate) const INVALID_ARGUMENT: c_int = -2;
/// `PF_RING_ERROR_NO_PKT_AVAILABLE`.
pub(crate) const NO_PKT_AVAILABLE: c_int = -3;
/// `PF_RING_ERROR_NO_TX_SLOT_AVAILABLE`.
pub(crate) const NO_TX_SLOT: c_int = -4;
/// `PF_RING_ERROR_WRONG_CONFIGURATION`.
pub(crate) const WRONG_CONFIGURATION: c_int = -5;
/// `PF_RING_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: c_int = -7;
/// `PF_RING_ERROR_NOT_ENOUGH_MEMORY`.
pub(crate) const NOT_ENOUGH_MEMORY: c_int = -10;
/// `PF_RING_ERROR_INVALID_STATUS`.
pub(crate) const INVALID_STATUS: c_int = -11;
/// `PF_RING_ERROR_RING_NOT_ENABLED`.
pub(crate) const RING_NOT_ENABLED: c_int = -12;
/// `PF_RING_ERROR_BAD_IFNAME`.
pub(crate) const BAD_IFNAME: c_int = -13;
/// `PF_RING_ERROR_UNABLE_TO_GET_INFO`.
pub(crate) const UNABLE_TO_GET_INFO: c_int = -16;

/// The PF_RING number for a failure.
pub(crate) fn number(error: &Error) -> c_int {
    match error {
        Error::Invalid(_) => INVALID_ARGUMENT,
        Error::Refused { code, .. } => match *code {
            code::NOT_FOUND => BAD_IFNAME,
            code::FILTER | code::INVALID => INVALID_ARGUMENT,
            code::NO_MEMORY | code::LIMIT => NOT_ENOUGH_MEMORY,
            code::UNAVAILABLE => INVALID_STATUS,
            _ => GENERIC,
        },
        _ => GENERIC,
    }
}

/// The `errno` for a failure, for calls that return NULL and for those that return -1.
pub(crate) fn errno(error: &Error) -> c_int {
    match error {
        Error::Unreachable { errno, .. } | Error::System { errno, .. } => errno.raw_os_error(),
        Error::Permission { .. } => libc::EACCES,
        Error::Disconnected | Error::Gone(_) => libc::ENETDOWN,
        Error::TimedOut => libc::ETIMEDOUT,
        Error::Refused { code, .. } => match *code {
            code::NOT_FOUND => libc::ENODEV,
            code::DENIED => libc::EACCES,
            code::FILTER | code::INVALID => libc::EINVAL,
            code::NO_MEMORY => libc::ENOMEM,
            code::LIMIT => libc::EUSERS,
            code::UNAVAILABLE => libc::EAGAIN,
            _ => libc::EPROTO,
        },
        Error::Invalid(_) => libc::EINVAL,
        Error::Protocol(_) | Error::Version { .. } => libc::EPROTO,
        _ => libc::EIO,
    }
}
