//! Where the daemon or agent is.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vnplug_ring::control::DEFAULT_SOCKET;

use crate::error::Error;

/// Where to connect: `explicit`, else `$VNPLUG_SOCKET`, else [`DEFAULT_SOCKET`].
///
/// A program that gained rights by being executed does not look at the variable: its environment is
/// a stranger's, and who names the daemon chooses the memory that the program reads.
pub(crate) fn socket_path(explicit: Option<&Path>) -> PathBuf {
    if let Some(path) = explicit {
        return path.to_owned();
    }
    let named = std::env::var_os("VNPLUG_SOCKET").filter(|_| !is_privileged());
    named.map_or_else(|| DEFAULT_SOCKET.into(), Into::into)
}

/// True in a set-user-ID program, one with file capabilities and the like (`AT_SECURE`, ld.so(8)).
#[expect(unsafe_code, reason = "getauxval")]
fn is_privileged() -> bool {
    unsafe extern "C" {
        fn getauxval(kind: std::ffi::c_ulong) -> std::ffi::c_ulong;
    }
    const AT_SECURE: std::ffi::c_ulong = 23;
    // SAFETY: a plain question.
    unsafe { getauxval(AT_SECURE) != 0 }
}

/// Connects to a daemon or agent.
pub(super) fn dial(path: &Path, deadline: Instant) -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Error::system("cannot make a socket"))?;
    let address = SocketAddrUnix::new(path).map_err(|errno| Error::Unreachable {
        path: path.into(),
        errno,
    })?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // The listener's queue is full; unlike TCP there is nothing to poll for.
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::ACCESS | Errno::PERM) => {
                return Err(Error::Permission { path: path.into() });
            }
            Err(errno) => {
                return Err(Error::Unreachable {
                    path: path.into(),
                    errno,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::process::Command;

    const NAMED: &str = "/tmp/a-strangers.sock";

    #[test]
    #[ignore = "run by the next test, as another program"]
    fn prints_its_socket() {
        println!("socket={}", socket_path(None).display());
    }

    #[test]
    fn a_program_that_gained_rights_does_not_ask_a_strangers_daemon() {
        if !rustix::process::geteuid().is_root() {
            // Only root can make a program another user's.
            return;
        }
        let copy = std::env::temp_dir().join(format!("vnplug-setuid-{}", std::process::id()));
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        let socket_as = |user: u32, mode: u32| {
            chown(&copy, Some(user), None).unwrap();
            std::fs::set_permissions(&copy, PermissionsExt::from_mode(mode)).unwrap();
            let mut command = Command::new(&copy);
            command.args(["--ignored", "--nocapture", "prints_its_socket"]);
            let output = command.env("VNPLUG_SOCKET", NAMED).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let (_, socket) = text.split_once("socket=").expect(&text);
            socket.lines().next().unwrap().to_owned()
        };
        let (plain, privileged) = (socket_as(0, 0o755), socket_as(65534, 0o4755));
        std::fs::remove_file(&copy).unwrap();
        assert_eq!(plain, NAMED);
        assert_eq!(privileged, DEFAULT_SOCKET);
    }
}
