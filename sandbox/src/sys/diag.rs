//! Which file a Unix socket is bound to, as the kernel says of the socket itself (sock_diag(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::fstat;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::socket::cookie;

/// The device and the number of the file that the socket made when it was bound to a path. Of the number the kernel
/// tells the lower 32 bits.
///
/// # Errors
/// The kernel has no `unix_diag`; the socket has no file, or belongs to another network namespace.
pub(crate) fn file_of(socket: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let kernel = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(SOCK_DIAG),
    )?;
    rustix::net::bind(&kernel, &SocketAddrNetlink::new(0, 0))?;
    let cookie = cookie(socket)?;
    let request = [
        LENGTH,
        u32::from(BY_FAMILY) | (libc::NLM_F_REQUEST as u32) << 16,
        0,
        0,
        libc::AF_UNIX as u32,
        u32::MAX, // whatever state it is in
        fstat(socket)?.st_ino as u32,
        SHOW_FILE,
        cookie as u32,
        (cookie >> 32) as u32,
    ];
    let request: Vec<u8> = request.iter().flat_map(|word| word.to_ne_bytes()).collect();
    rustix::net::send(kernel.as_fd(), &request, SendFlags::empty())?;
    let mut answer = [0; 4096];
    let (count, _) = rustix::net::recv(&kernel, &mut answer, RecvFlags::DONTWAIT)?;
    found_in(&answer[..count]).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn found_in(answer: &[u8]) -> Option<(u64, u64)> {
    let half = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    if half(4)? != BY_FAMILY {
        return None;
    }
    let mut at = ATTRIBUTES;
    while at < answer.len() {
        let (length, name) = (half(at)?, half(at + 2)?);
        if name == FILE {
            let (number, device) = (word(at + 4)?, word(at + 8)?);
            let device = libc::makedev(device >> 20, device & 0xf_ffff);
            return Some((device, u64::from(number)));
        }
        at += usize::from(length.max(4)).next_multiple_of(4);
    }
    None
}

/// `SOCK_DIAG_BY_FAMILY`
const BY_FAMILY: u16 = 20;
/// `UDIAG_SHOW_VFS`
const SHOW_FILE: u32 = 2;
/// `UNIX_DIAG_VFS`
const FILE: u16 = 1;
/// `struct nlmsghdr` and `struct unix_diag_req`.
const LENGTH: u32 = 40;
/// Behind `struct nlmsghdr` and `struct unix_diag_msg`.
const ATTRIBUTES: usize = 32;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener;

    use vnplug_testing::TestDir;

    use super::*;

    #[test]
    fn a_socket_says_which_file_it_made_whatever_lies_at_its_path() {
        let dir = TestDir::new("sandbox-diag");
        let (path, moved) = (dir.path("socket"), dir.path("moved"));
        let socket = UnixListener::bind(&path).unwrap();
        std::fs::rename(&path, &moved).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        let of = |path| {
            std::fs::metadata(path)
                .map(|file| (file.dev(), file.ino()))
                .unwrap()
        };
        let said = file_of(socket.as_fd()).unwrap();
        assert_eq!(said, of(&moved));
        assert_ne!(said, of(&path));
    }
}
