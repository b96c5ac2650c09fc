//! Calls of this very process.

use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;

use super::*;

#[test]
fn a_socket_of_a_family_that_nobody_understands_is_judged_wherever_it_comes_from() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};
    let address = [libc::AF_NETLINK as u16, 0, 0, 0, 0, 0];
    let address = Span {
        at: address.as_ptr() as u64,
        length: 12,
    };
    for (protocol, is_judged) in [(None, false), (Some(netlink::GENERIC), true)] {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol);
        let socket = socket.unwrap();
        let call = Call::Bind {
            socket: socket.as_raw_fd(),
            address,
        };
        let around = Around {
            threads: &Threads::default(),
            own: &Own::default(),
            private: &|_| None,
        };
        let prepared = prepare(call, std::process::id(), around, |_| false, None).unwrap();
        let doing = prepared.proposal.map(|proposal| proposal.doing);
        assert_eq!(doing, is_judged.then_some(Doing::Create));
    }
}

/// Has a bind to a path prepared, has the directory of the path replaced by a link to another, and does it.
fn bind_while_the_directory_changes(writable: Option<&[PathBuf]>) -> (bool, bool) {
    let dir = vnplug_testing::TestDir::new("sandbox-bind");
    for name in ["judged", "closed"] {
        std::fs::create_dir(dir.path(name)).unwrap();
    }
    let path = dir.path("judged/socket");
    let path = path.as_os_str().as_bytes();
    let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    address.extend(path);
    address.push(0);
    let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let call = Call::Bind {
        socket: socket.as_raw_fd(),
        address: Span {
            at: address.as_ptr() as u64,
            length: address.len() as u64,
        },
    };
    let around = Around {
        threads: &Threads::default(),
        own: &Own::default(),
        private: &|_| None,
    };
    let thread = std::process::id();
    let prepared = prepare(call, thread, around, |_| false, writable).unwrap();
    std::fs::rename(dir.path("judged"), dir.path("moved")).unwrap();
    std::os::unix::fs::symlink("closed", dir.path("judged")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            crate::sys::process::own_directory();
            match &prepared.task {
                Task::BindPath { socket, path } => {
                    super::super::task::bind_path(thread, socket.as_fd(), path).unwrap()
                }
                Task::BindSpot { socket, spot } => {
                    super::super::task::bind_spot(thread, socket.as_fd(), spot).unwrap()
                }
                other => panic!("{other:?}"),
            }
        });
    });
    let is_there = |name: &str| dir.path(name).join("socket").exists();
    (is_there("moved"), is_there("closed"))
}

#[test]
fn a_socket_is_bound_in_the_directory_that_was_judged() {
    assert_eq!(bind_while_the_directory_changes(Some(&[])), (true, false));
    // Without `--files` the program could do the same by itself.
    assert_eq!(bind_while_the_directory_changes(None), (false, true));
}
