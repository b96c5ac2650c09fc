//! News of devices: the kernel tells whom it may concern what was plugged and unplugged.
//!
//! It is a hint and no more: whoever may send such messages makes the agent look a moment earlier. Where there
//! are none (a kernel without them), the agent looks every 300 ms.

use std::os::fd::OwnedFd;

use rustix::io::{Errno, read};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

/// The group of the kernel's own messages.
const KERNEL: u32 = 1;
/// Messages that are taken in one go; what is more has filled the socket, and tells no more.
const MOST: usize = 4096;

/// A socket that is readable when a device came or went.
pub(super) fn listen() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        flags,
        Some(KOBJECT_UEVENT),
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
    Ok(socket)
}

/// Takes the messages that are there.
pub(super) fn drain(socket: &OwnedFd) {
    let mut bytes = [0; 1024];
    for _ in 0..MOST {
        // NOBUFS: some were lost, which is one more hint.
        match read(socket, &mut bytes) {
            Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn a_device_that_comes_is_told_of() {
        let Ok(socket) = listen() else { return };
        drain(&socket);
        // Needs root, and a device that lets itself be told of again.
        if fs::write("/sys/class/mem/null/uevent", "change").is_err() {
            return;
        }
        let limit = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1));
        drain(&socket);
        assert_eq!(read(&socket, &mut [0; 16]), Err(Errno::AGAIN));
    }
}
