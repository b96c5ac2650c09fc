//! Who is at the other end of a Unix socket.
#![expect(unsafe_code, reason = "an option that rustix misreads")]

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
        0 => Ok(Peer {
            uid: found.uid,
            gid: found.gid,
            pid: u32::try_from(found.pid).ok().and_then(NonZeroU32::new),
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

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
    fn what_is_no_socket_has_no_peer() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_of(null).is_err());
    }
}
