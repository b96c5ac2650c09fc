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

use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

/// A page of memory whose first fault is not answered before it is released (userfaultfd(2)): who
/// copies into it waits, holding whatever locks he holds. A page before it is as others are.
#[derive(Debug)]
pub struct UnansweredPage {
    address: u64,
    uffd: OwnedFd,
}

impl UnansweredPage {
    /// One page.
    ///
    /// # Errors
    /// The system's: `EPERM` if the user may not have the kernel's faults (root may).
    pub fn new() -> io::Result<Self> {
        // SAFETY: userfaultfd(2) takes flags only.
        let raw =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is a fresh descriptor nobody else owns.
        let uffd = unsafe { OwnedFd::from_raw_fd(raw as i32) };
        // struct uffdio_api: api, features, ioctls.
        Self::control(&uffd, UFFDIO_API, &mut [0xaa, 0, 0])?;
        // SAFETY: a new mapping, whose place the kernel chooses.
        let page = unsafe {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
            let flags = flags | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, -1, 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = page as u64 + PAGE as u64;
        let page = Self { address, uffd };
        // struct uffdio_register: range, mode (missing pages), ioctls.
        let register = &mut [address, PAGE as u64, 1, 0];
        Self::control(&page.uffd, UFFDIO_REGISTER, register)?;
        Ok(page)
    }

    /// Reads into it: comes back when it was released, if there was anything to read.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self, fd: impl AsFd) -> io::Result<usize> {
        let (fd, page) = (fd.as_fd().as_raw_fd(), self.address as *mut libc::c_void);
        // SAFETY: the page is mapped as long as we live, and nobody has a reference into it.
        let count = unsafe { libc::read(fd, page, PAGE) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Has the kernel tell the state of an interface, the thread's namespace's, into it: comes back when it was released. Until
    /// then the kernel's lock of all interfaces (`rtnl`), under which it tells this, is held.
    ///
    /// # Errors
    /// The system's.
    pub fn hold_interfaces(&self, name: &str) -> io::Result<()> {
        let (kind, protocol) = (rustix::net::SocketType::DGRAM, None);
        let socket = rustix::net::socket(rustix::net::AddressFamily::INET, kind, protocol)?;
        // struct ethtool_value: the command is read before the lock is taken, so it lies in the page before.
        let value = (self.address - 4) as *mut u32;
        // SAFETY: all-zero is a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let room = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
        for (to, from) in room.zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = value.cast();
        // SAFETY: both pages are mapped as long as we live, nobody has a reference into them, and the structure ends in the second.
        let result = unsafe {
            value.write(ETHTOOL_GLINK);
            libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request)
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether somebody waits for it.
    pub fn is_awaited(&self) -> bool {
        let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_ok() && fds[0].revents().contains(PollFlags::IN)
    }

    /// Answers its fault, if there was one, with zeros.
    ///
    /// # Errors
    /// The system's.
    pub fn release(&self) -> io::Result<()> {
        Self::control(
            &self.uffd,
            UFFDIO_UNREGISTER,
            &mut [self.address, PAGE as u64],
        )
    }

    fn control(uffd: &OwnedFd, request: libc::Ioctl, words: &mut [u64]) -> io::Result<()> {
        // SAFETY: `words` is as long as the structure of each request, which has words only.
        let result = unsafe { libc::ioctl(uffd.as_raw_fd(), request, words.as_mut_ptr()) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for UnansweredPage {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which nobody has a reference.
        let unmapped = unsafe { libc::munmap((self.address as usize - PAGE) as *mut _, 2 * PAGE) };
        debug_assert_eq!(unmapped, 0, "a mapping of ours");
    }
}

/// Takes `SO_PASSRIGHTS` (Linux 6.16) from this thread and from all processes that it starts, as if
/// the kernel were older.
///
/// # Errors
/// The system's.
pub fn forget_pass_rights() -> io::Result<()> {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let unless = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // Of struct seccomp_data: the call's number, and the lower halves of arguments 1 and 2.
    let mut program = [
        step(load, 0, 0),
        step(unless, 5, libc::SYS_setsockopt as u32),
        step(load, 0, 24),
        step(unless, 3, libc::SOL_SOCKET as u32),
        step(load, 0, 32),
        step(unless, 1, 83),
        step(end, 0, libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32),
        step(end, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program is alive and as long as it says.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

const PAGE: usize = 4096;
/// `linux/sockios.h` and `linux/ethtool.h`.
const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_GLINK: u32 = 0xa;
/// `linux/userfaultfd.h`.
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01_u32 as libc::Ioctl;
