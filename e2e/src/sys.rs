#![expect(
    unsafe_code,
    reason = "pre_exec, and sendmmsg on packet sockets, have no safe form"
)]
//! The lab's only unsafe code: what happens between fork and exec, and sending many frames at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, Signal};
use rustix::thread::LinkNameSpaceType;

/// Makes `command` lead a process group of its own, announce that group (a decimal line) on
/// `announce` before anything else, inherit `inherit` under their present numbers and run in
/// `netns`.
pub(crate) fn tether(
    command: &mut Command,
    announce: OwnedFd,
    inherit: Vec<Arc<OwnedFd>>,
    netns: Option<OwnedFd>,
) {
    command.process_group(0);
    let in_child = move || -> io::Result<()> {
        // No allocation between fork and exec: the line is built on the stack, from its end.
        let mut line = [b'\n'; 12];
        let mut start = line.len() - 1;
        let mut number = rustix::process::getpid()
            .as_raw_nonzero()
            .get()
            .unsigned_abs();
        while number > 0 {
            start -= 1;
            line[start] = b'0' + (number % 10) as u8;
            number /= 10;
        }
        rustix::io::write(&announce, &line[start..])?;
        for fd in &inherit {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        if let Some(netns) = &netns {
            rustix::thread::move_into_link_name_space(
                netns.as_fd(),
                Some(LinkNameSpaceType::Network),
            )?;
        }
        Ok(())
    };
    // SAFETY: the closure only makes async-signal-safe system calls and allocates nothing.
    unsafe { command.pre_exec(in_child) };
}

/// Kills the process group led by `pid`; that it is already gone is fine.
pub(crate) fn kill_group(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // NB: ESRCH means there is nobody left to kill, which is what the caller wants.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
}

/// Whether a process group has members, zombies included.
pub(crate) fn group_exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process_group(pid) != Err(Errno::SRCH))
}

/// A packet socket (packet(7)) bound to one interface, for sending only.
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket on `interface` that receives nothing and bypasses the queueing discipline.
    pub(crate) fn open(interface: &str) -> io::Result<Self> {
        let index = rustix::net::netdevice::name_to_index(
            rustix::net::socket(
                rustix::net::AddressFamily::INET,
                rustix::net::SocketType::DGRAM,
                None,
            )?,
            interface,
        )?;
        // SAFETY: socket(2) takes no pointers. Protocol 0: no frame is ever queued to this socket.
        let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is a fresh descriptor nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };

        let on: libc::c_int = 1;
        // SAFETY: the option value is a live c_int and its length is given.
        let status = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_QDISC_BYPASS,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }

        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: 0,
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: the address is a live sockaddr_ll and its length is given.
        let status = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd })
    }

    /// Sends the frames in order; returns how many the kernel took before it refused one.
    ///
    /// # Errors
    /// The kernel's reason for refusing the first frame.
    pub(crate) fn send(&self, frames: &mut [Vec<u8>]) -> io::Result<usize> {
        let mut vectors: Vec<libc::iovec> = frames
            .iter_mut()
            .map(|frame| libc::iovec {
                iov_base: frame.as_mut_ptr().cast(),
                iov_len: frame.len(),
            })
            .collect();
        let mut messages: Vec<libc::mmsghdr> = vectors
            .iter_mut()
            .map(|vector| {
                // SAFETY: all-zero is a valid msghdr: no name, no control data, no flags.
                let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
                header.msg_iov = vector;
                header.msg_iovlen = 1;
                libc::mmsghdr {
                    msg_hdr: header,
                    msg_len: 0,
                }
            })
            .collect();
        // SAFETY: every header points to one live iovec, which points to one live frame.
        let sent = unsafe {
            libc::sendmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                messages.len() as libc::c_uint,
                0,
            )
        };
        if sent < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(sent as usize)
        }
    }
}
