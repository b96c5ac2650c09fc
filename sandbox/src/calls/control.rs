//! Control messages: which of them the program may send along, and its descriptors, which become copies here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::address::Kind;
use crate::sys::identity::may_claim;
use crate::sys::process;

/// Control messages ready to be sent.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// As the kernel takes them.
    pub(super) bytes: Vec<u8>,
    /// What the descriptors in `bytes` are; they must live until the message is sent.
    files: Vec<Held>,
}

/// A descriptor of a program's. It is closed before another one may take its place.
#[derive(Debug)]
struct Held {
    _file: OwnedFd,
    _share: Share,
}

/// The right to hold one descriptor.
#[derive(Debug)]
struct Share;

/// What of control messages the kernel takes at most (`net.core.optmem_max` is 20 KiB or 128 KiB).
pub(super) const LONGEST_BYTES: u64 = 128 * 1024;

impl Control {
    /// Understands the program's control messages, of `thread`, which `thread_fd` names.
    ///
    /// # Errors
    /// The number of an error: of the kernel's for what is malformed, `EPERM` for what would have another
    /// effect than the address that was judged, and for who says that it is somebody else.
    pub(super) fn of(
        kind: Kind,
        thread: u32,
        thread_fd: BorrowedFd<'_>,
        bytes: &[u8],
    ) -> Result<Self, i32> {
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
                    let numbers = control.take(thread_fd, body)?;
                    control.put(level, name, &numbers);
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if kind.domain == libc::AF_UNIX => {
                    control.put(level, name, &as_ourselves(thread, body)?);
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
            let _share = Share::of(most_held()).ok_or(libc::ETOOMANYREFS)?;
            let number = i32::from_ne_bytes(number.try_into().expect("four bytes"));
            let file = process::file_of(thread, number).map_err(number_of)?;
            numbers.extend(file.as_raw_fd().to_ne_bytes());
            self.files.push(Held {
                _file: file,
                _share,
            });
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

impl Share {
    /// One of at most `most`.
    fn of(most: usize) -> Option<Self> {
        let more = |held: usize| (held < most).then(|| held + 1);
        let taken = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        // One that was not taken is not given back either.
        taken.is_ok().then(|| Self)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        HELD.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many descriptors of programs are held by messages that are not sent yet.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// The most that may be: a share of those that this process may have, the rest is for other calls.
fn most_held() -> usize {
    const MOST: u64 = 4096;
    const SHARE: u64 = 4;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    (limit.current.unwrap_or(u64::MAX) / SHARE).min(MOST) as usize
}

/// `struct ucred` with our own process instead of the thread's: the kernel lets nobody name another one. We may name
/// any user, the thread only those that it is.
fn as_ourselves(thread: u32, body: &[u8]) -> Result<Vec<u8>, i32> {
    if body.len() != size_of::<libc::ucred>() {
        return Err(libc::EINVAL);
    }
    let word = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().expect("four bytes"));
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).map_err(number_of)?;
    let is_its = process::field(&status, "Tgid:") == Some(word(0));
    if !is_its || !may_claim(&status, word(4), word(8)) {
        return Err(libc::EPERM);
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
        Control::of(UDP, std::process::id(), own.as_fd(), &written.bytes)
            .map(|control| control.bytes.clone())
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
            let result = Control::of(UDP, std::process::id(), own.as_fd(), &bytes);
            assert_eq!(result.map(|_| ()), Err(libc::EINVAL), "{length}");
        }
    }

    const UNIX: Kind = Kind {
        domain: libc::AF_UNIX,
        kind: libc::SOCK_DGRAM,
        protocol: 0,
    };

    #[test]
    fn nobody_says_that_it_is_somebody_else() {
        let own = std::process::id();
        let status = "Uid:\t1000\t1001\t1002\t1001\nGid:\t7\t7\t8\t7\n";
        for (user, group, may) in [
            (1000, 7, true),
            (1002, 8, true),
            (0, 7, false),
            (1000, 0, false),
        ] {
            assert_eq!(may_claim(status, user, group), may, "{user} {group}");
        }
        let root = "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n";
        assert!(may_claim(root, 7, 7));
        let user = rustix::process::getuid().as_raw();
        let group = rustix::process::getgid().as_raw();
        let claim = |pid: u32| [pid, user, group].map(u32::to_ne_bytes).concat();
        assert!(as_ourselves(own, &claim(own)).is_ok());
        assert_eq!(as_ourselves(own, &claim(1)), Err(libc::EPERM));
    }

    #[test]
    fn descriptors_of_messages_that_wait_do_not_take_all() {
        let own = process::thread_fd(std::process::id()).unwrap();
        let mut written = Control::default();
        written.put(libc::SOL_SOCKET, libc::SCM_RIGHTS, &[0; 4 * 253]);
        let of = || Control::of(UNIX, std::process::id(), own.as_fd(), &written.bytes);
        let mut waiting = Vec::new();
        let refused = loop {
            assert!(waiting.len() <= 17);
            match of() {
                Ok(control) => waiting.push(control),
                Err(number) => break number,
            }
        };
        assert_eq!(refused, libc::ETOOMANYREFS);
        drop(waiting);
        assert!(of().is_ok());
        // From several threads at once it is not one more.
        let taken = std::thread::scope(|scope| {
            let take = || std::iter::from_fn(|| of().ok()).collect::<Vec<_>>();
            let takers = [(); 8].map(|()| scope.spawn(take));
            takers.map(|taker| taker.join().unwrap())
        });
        let files = taken.iter().flatten().map(|control| control.files.len());
        assert!(files.sum::<usize>() <= most_held());
    }
}
