//! Control messages: which of them the program may send along, and its descriptors, which become copies here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use super::address::Kind;
use crate::sys::process;

/// Control messages ready to be sent.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// As the kernel takes them.
    pub(super) bytes: Vec<u8>,
    /// What the descriptors in `bytes` are; they must live until the message is sent.
    files: Vec<OwnedFd>,
}

/// What of control messages the kernel takes at most (`net.core.optmem_max` is 20 KiB or 128 KiB).
pub(super) const LONGEST_BYTES: u64 = 128 * 1024;

impl Control {
    /// Understands the program's control messages. `thread` names the program's thread.
    ///
    /// # Errors
    /// The number of an error: of the kernel's for what is malformed, `EPERM` for what would have another
    /// effect than the address that was judged.
    pub(super) fn of(kind: Kind, thread: BorrowedFd<'_>, bytes: &[u8]) -> Result<Self, i32> {
        let mut control = Self::default();
        let mut rest = bytes;
        while rest.len() >= HEADER_BYTES {
            let length = usize::from_ne_bytes(rest[..8].try_into().expect("eight bytes"));
            let word =
                |at: usize| i32::from_ne_bytes(rest[at..at + 4].try_into().expect("four bytes"));
            let (level, name) = (word(8), word(12));
            if length < HEADER_BYTES || length > rest.len() {
                return Err(libc::EINVAL);
            }
            let body = &rest[HEADER_BYTES..length];
            match (level, name) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) if kind.domain == libc::AF_UNIX => {
                    let numbers = control.take(thread, body)?;
                    control.put(level, name, &numbers);
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if kind.domain == libc::AF_UNIX => {
                    control.put(level, name, &as_ourselves(body)?);
                }
                _ if is_harmless(kind, level, name) => control.put(level, name, body),
                _ => return Err(libc::EPERM),
            }
            rest = &rest[length.next_multiple_of(ALIGNMENT).min(rest.len())..];
        }
        Ok(control)
    }

    fn take(&mut self, thread: BorrowedFd<'_>, body: &[u8]) -> Result<Vec<u8>, i32> {
        const MOST: usize = 253; // SCM_MAX_FD
        let mut numbers = Vec::with_capacity(body.len());
        for number in body.chunks_exact(4) {
            if self.files.len() == MOST {
                return Err(libc::EINVAL);
            }
            let number = i32::from_ne_bytes(number.try_into().expect("four bytes"));
            let file = process::file_of(thread, number).map_err(number_of)?;
            numbers.extend(file.as_raw_fd().to_ne_bytes());
            self.files.push(file);
        }
        Ok(numbers)
    }

    fn put(&mut self, level: i32, name: i32, body: &[u8]) {
        let length = HEADER_BYTES + body.len();
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(level.to_ne_bytes());
        self.bytes.extend(name.to_ne_bytes());
        self.bytes.extend(body);
        self.bytes
            .resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
}

/// `struct ucred` with our own process: the kernel lets nobody name another one.
fn as_ourselves(body: &[u8]) -> Result<Vec<u8>, i32> {
    if body.len() != size_of::<libc::ucred>() {
        return Err(libc::EINVAL);
    }
    let mut bytes = body.to_vec();
    bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    Ok(bytes)
}

/// What changes how a packet looks, but not where it goes. Source routes (`IP_RETOPTS`, `IPV6_RTHDR`) are not here.
fn is_harmless(kind: Kind, level: i32, name: i32) -> bool {
    const SOL_TLS: i32 = 282;
    const SOL_ALG: i32 = 279;
    const SOL_SCTP: i32 = 132;
    const UDP_SEGMENT: i32 = 103;
    match level {
        libc::SOL_SOCKET => matches!(name, libc::SO_TIMESTAMPING | libc::SCM_TXTIME),
        libc::IPPROTO_IP => matches!(name, libc::IP_TOS | libc::IP_TTL | libc::IP_PKTINFO),
        libc::IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_PKTINFO | libc::IPV6_HOPLIMIT | libc::IPV6_TCLASS | libc::IPV6_DONTFRAG
        ),
        libc::IPPROTO_UDP => name == UDP_SEGMENT,
        SOL_TLS => name == 1,
        SOL_SCTP => matches!(name, 0..=2),
        SOL_ALG => kind.domain == libc::AF_ALG,
        _ => false,
    }
}

pub(super) fn number_of(error: io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
const ALIGNMENT: usize = size_of::<usize>();

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const UDP: Kind = Kind {
        domain: libc::AF_INET6,
        kind: libc::SOCK_DGRAM,
        protocol: libc::IPPROTO_UDP,
    };

    fn understood(level: i32, name: i32, body: &[u8]) -> Result<Vec<u8>, i32> {
        let mut written = Control::default();
        written.put(level, name, body);
        let own = process::thread_fd(std::process::id()).unwrap();
        Control::of(UDP, own.as_fd(), &written.bytes).map(|control| control.bytes)
    }

    #[test]
    fn a_source_route_is_refused() {
        assert_eq!(understood(41, libc::IPV6_RTHDR, &[0; 24]), Err(libc::EPERM));
        assert_eq!(understood(0, libc::IP_RETOPTS, &[0; 8]), Err(libc::EPERM));
        assert!(understood(41, libc::IPV6_HOPLIMIT, &7_i32.to_ne_bytes()).is_ok());
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let own = process::thread_fd(std::process::id()).unwrap();
        for length in [0_usize, 15, 25, usize::MAX] {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend([0; 16]);
            let result = Control::of(UDP, own.as_fd(), &bytes);
            assert_eq!(result.map(|_| ()), Err(libc::EINVAL), "{length}");
        }
    }
}
