//! Private eventfds by which the daemon's threads wake each other, and random numbers.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::ReadWriteFlags;
use rustix::rand::{GetRandomFlags, getrandom};

/// Makes an eventfd readable: a private one, or one of which the thread that asks may wait.
#[inline]
pub fn ring(eventfd: impl AsFd) {
    // The only possible error is EAGAIN: the count is at its end, so it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Makes it unreadable again.
#[inline]
pub fn clear(eventfd: &OwnedFd) {
    // The only possible error is EAGAIN: it was not readable.
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// Empties an eventfd that a peer shares, whatever its flags are now: a blocked writer goes on.
pub fn drain(eventfd: impl AsFd) {
    let (mut count, flags) = ([0; 8], ReadWriteFlags::NOWAIT);
    let mut into = [IoSliceMut::new(&mut count)];
    // An offset of -1 is "as read(2) does". The errors: it is empty (EAGAIN), or the kernel cannot
    // (EOPNOTSUPP, before Linux 5.8).
    let _ = rustix::io::preadv2(eventfd, &mut into, u64::MAX, flags);
}

/// Whether a descriptor that a peer sent is an eventfd, of which no operation asks a file system that
/// the peer may serve.
pub fn is_eventfd(fd: impl AsFd) -> bool {
    name_of(fd).is_some_and(|name| name.starts_with(b"anon_inode:[eventfd"))
}

/// Whether one is a socket.
pub fn is_socket(fd: impl AsFd) -> bool {
    name_of(fd).is_some_and(|name| name.starts_with(b"socket:["))
}

/// What the kernel calls a file. Of one on a file system that begins with a slash.
fn name_of(fd: impl AsFd) -> Option<Vec<u8>> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let name = rustix::fs::readlink(path, Vec::new()).ok()?;
    Some(name.into_bytes())
}

/// A random number that nobody can guess.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    // Eight bytes come whole once the system's pool is seeded, long before we run.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn eventfds_and_sockets_are_told_from_files() {
        let one = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (two, _) = UnixStream::pair().unwrap();
        let three = std::fs::File::open("/dev/null").unwrap();
        assert_eq!((is_eventfd(&one), is_socket(&one)), (true, false));
        assert_eq!((is_eventfd(&two), is_socket(&two)), (false, true));
        assert_eq!((is_eventfd(&three), is_socket(&three)), (false, false));
    }
}
