//! Who is at the other end of a Unix socket.
#![expect(unsafe_code, reason = "an option, and a message, that rustix misreads")]

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};

/// Who was at the other end of a connection when it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its process; `None`: one that has no number here, in another namespace of processes.
    pub pid: Option<NonZeroU32>,
}

/// Who is at the other end of a Unix socket (`SO_PEERCRED`).
///
/// NB: not rustix's `socket_peercred`, whose process is never 0: here it is where the peer is in a
/// namespace that ours does not see, and an answer with it is taken for an error.
///
/// # Errors
/// The system's.
pub fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the option's value is a live ucred, and its length is given; any bytes are one.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    match result {
        0 => Ok(peer(found)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Who wrote what is to be read next from a Unix socket (`SCM_CREDENTIALS`), and leaves that there. The socket had the option
/// `SO_PASSCRED` when it was written.
///
/// # Errors
/// Nothing is there, or the other end is closed; or the system's.
pub(crate) fn writer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut byte = [0_u8; 1];
    let mut part = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: byte.len(),
    };
    let mut control = Control([0; CREDENTIALS]);
    // SAFETY: numbers and pointers may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // NB: no room for descriptors, so the kernel makes none.
    message.msg_controllen = CREDENTIALS;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: all buffers are live and as long as the message says.
    let read = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    match read {
        1 => {}
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        _ => return Err(io::Error::last_os_error()),
    }
    // SAFETY: the kernel filled in the message, whose control buffer is live.
    let head = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: null, or the header of a control message that lies in the buffer.
    let found = match unsafe { head.as_ref() } {
        Some(head)
            if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) =>
        {
            // SAFETY: a control message of this type has a ucred; any bytes are one.
            unsafe { libc::CMSG_DATA(head).cast::<libc::ucred>().read_unaligned() }
        }
        _ => return Err(io::Error::other("the kernel does not say who wrote it")),
    };
    Ok(peer(found))
}

fn peer(found: libc::ucred) -> Peer {
    Peer {
        uid: found.uid,
        gid: found.gid,
        pid: u32::try_from(found.pid).ok().and_then(NonZeroU32::new),
    }
}

/// Control messages, as the kernel aligns them.
#[repr(C, align(8))]
struct Control([u8; CREDENTIALS]);

/// Bytes of a control message with credentials.
// SAFETY: it calculates.
const CREDENTIALS: usize = unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) } as usize;

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use rustix::process::{getegid, geteuid};

    use super::*;

    /// Set in the process of the test that looks from another namespace.
    const LOOKS: &str = "VNPLUG_TEST_PEER";

    #[test]
    fn a_peer_whose_process_has_no_number_here_has_its_user_all_the_same() {
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        let of_us = |pid| Peer { uid, gid, pid };
        if std::env::var_os(LOOKS).is_some() {
            assert_eq!(peer_of(std::io::stdin()).unwrap(), of_us(None));
            return println!("seen");
        }
        let (ours, _theirs) = UnixStream::pair().unwrap();
        // The control: it has one.
        let pid = NonZeroU32::new(std::process::id());
        assert_eq!(peer_of(&ours).unwrap(), of_us(pid));
        let unshared = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child"])
            .arg(std::env::current_exe().unwrap())
            .args(["--nocapture", "--exact"])
            .arg(std::thread::current().name().unwrap())
            .env(LOOKS, "1")
            .stdin(Stdio::from(OwnedFd::from(ours)))
            .output();
        let Ok(output) = unshared else {
            return eprintln!("SKIPPED: no unshare(1)");
        };
        let (said, erred) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        if erred.contains("unshare failed") {
            return eprintln!("SKIPPED: {erred}");
        }
        assert!(
            output.status.success() && said.contains("seen"),
            "{said}{erred}"
        );
    }

    #[test]
    fn who_wrote_is_told_also_where_the_connection_is_of_another_user() {
        use std::io::Read;
        use std::os::unix::process::CommandExt;
        const NOBODY: u32 = 65534;
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_passcred(&ours, true).unwrap();
        assert_eq!(
            writer_of(&ours).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let uid = geteuid().as_raw();
        let writer = if uid == 0 { NOBODY } else { uid };
        let written = Command::new("printf")
            .arg("said")
            .uid(writer)
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .status();
        assert!(written.unwrap().success());
        assert_eq!(peer_of(&ours).unwrap().uid, uid);
        assert_eq!(writer_of(&ours).unwrap().uid, writer);
        // It is still there.
        let mut said = String::new();
        ours.read_to_string(&mut said).unwrap();
        assert_eq!(said, "said");
        assert_eq!(
            writer_of(&ours).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_of(null).is_err());
    }
}
