//! Filters of system calls, and the listener that is asked about the calls which a filter hands over.
#![expect(
    unsafe_code,
    reason = "seccomp(2) and the requests to its listener, which rustix does not have"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The listener of a filter: who holds it answers the calls that the filter hands over. When the last
/// copy is closed, all of them fail with `ENOSYS`.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

/// A system call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// Names the call; 0 is none.
    pub(crate) id: u64,
    /// The thread that made it.
    pub(crate) thread: u32,
    /// Number of the call.
    pub(crate) number: i64,
    /// Its arguments: registers, which nobody can change while the call waits.
    pub(crate) arguments: [u64; 6],
}

/// What a call that was handed over returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It was done, with this result.
    Done(i64),
    /// It fails with this number of an error.
    Error(i32),
    /// The program's own call goes on. **Only** where nothing depends on memory that can change: `tests/continues.rs`
    /// knows the places.
    Continue,
}

/// Installs a filter for this thread and all that it starts; returns its listener. The thread must have set
/// `no_new_privs`.
///
/// Where the kernel can, a call that was received is interrupted by fatal signals alone (Linux 5.19), and an answer
/// wakes the program on the processor where it is given (6.6).
///
/// # Errors
/// The system's.
pub(crate) fn install(filter: &[libc::sock_filter]) -> io::Result<Listener> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: filter.as_ptr().cast_mut(),
    };
    let set = |flags: libc::c_ulong| {
        // SAFETY: `program` names `filter`, which the kernel reads and does not keep.
        let listener = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            )
        };
        match i32::try_from(listener) {
            // SAFETY: the call has just made this descriptor for us.
            Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let plain = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let fd = match set(plain | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => set(plain)?,
        result => result?,
    };
    let wakes_here: u64 = 1; // SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP
    // SAFETY: this request takes a number. Without it the answer only takes longer.
    unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS,
            wakes_here,
        )
    };
    Ok(Listener(fd))
}

/// Whether the kernel hands calls over, with structures of the sizes known here.
pub(crate) fn is_supported() -> bool {
    let action = libc::SECCOMP_RET_USER_NOTIF;
    let mut sizes = libc::seccomp_notif_sizes {
        seccomp_notif: 0,
        seccomp_notif_resp: 0,
        seccomp_data: 0,
    };
    // SAFETY: both calls read or write the one structure they are given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            &raw const action,
        ) == 0
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_GET_NOTIF_SIZES,
                0,
                &raw mut sizes,
            ) == 0
    };
    done && usize::from(sizes.seccomp_notif) == size_of::<libc::seccomp_notif>()
        && usize::from(sizes.seccomp_notif_resp) == size_of::<libc::seccomp_notif_resp>()
}

/// Whether a call that was received waits for its answer, whatever signals come but fatal ones (Linux 5.19).
pub(crate) fn waits_for_us() -> bool {
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: without a program the call can only fail, and says which flags it knows before that.
    unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            std::ptr::null::<libc::sock_fprog>(),
        )
    };
    io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}

impl Listener {
    /// The same listener, by another descriptor.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Waits for a call and has the kernel write it to `place`; see `Table::receive`.
    ///
    /// # Errors
    /// `ENOENT` if the caller was gone by then, `EINTR`; other errors end the listener.
    pub(super) fn receive_into(&self, place: *mut libc::seccomp_notif) -> io::Result<()> {
        // SAFETY: whoever gives `place` owns it (this is private to `sys`); the kernel wants it zeroed and
        // fills it.
        let received = unsafe {
            place.write_bytes(0, 1);
            libc::ioctl(self.0.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, place)
        };
        if received == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Waits for a call, for who keeps no table.
    ///
    /// # Errors
    /// As `receive_into`.
    pub(crate) fn receive(&self) -> io::Result<Notice> {
        // SAFETY: all-zero is a value of this structure of integers.
        let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        self.receive_into(&raw mut notice)?;
        Ok(Notice::from(notice))
    }

    /// Whether nobody is below the filter any more: no call comes then, and `receive` fails at once.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Answers a call.
    ///
    /// # Errors
    /// `ENOENT` if nobody waits for it any more.
    pub(crate) fn answer(&self, id: u64, answer: Answer) -> io::Result<()> {
        let (val, error, flags) = match answer {
            Answer::Done(value) => (value, 0, 0),
            Answer::Error(number) => (0, -number, 0),
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        };
        let response = libc::seccomp_notif_resp {
            id,
            val,
            error,
            flags,
        };
        // SAFETY: the kernel reads the one structure it is given.
        let sent = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND,
                &raw const response,
            )
        };
        if sent == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Answers a call with a descriptor: gives the program a copy of `file`, whose number the call returns.
    ///
    /// # Errors
    /// `ENOENT` if nobody waits for it any more, `EMFILE` if the program may have no more; then the call
    /// still waits.
    pub(crate) fn answer_with(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        closes_on_exec: bool,
    ) -> io::Result<()> {
        let request = libc::seccomp_notif_addfd {
            id,
            flags: libc::SECCOMP_ADDFD_FLAG_SEND as u32,
            srcfd: file.as_raw_fd() as u32,
            newfd: 0,
            newfd_flags: if closes_on_exec {
                libc::O_CLOEXEC as u32
            } else {
                0
            },
        };
        // SAFETY: the kernel reads the one structure it is given.
        let number = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ADDFD,
                &raw const request,
            )
        };
        if number >= 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Whether the call still waits. If so, its thread's number still means that thread, and what was read
    /// from it before this question was its own.
    pub(crate) fn waits(&self, id: u64) -> bool {
        // SAFETY: the kernel reads the one number it is given.
        let valid = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ID_VALID,
                &raw const id,
            )
        };
        valid == 0
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<libc::seccomp_notif> for Notice {
    fn from(notice: libc::seccomp_notif) -> Self {
        Self {
            id: notice.id,
            thread: notice.pid,
            number: i64::from(notice.data.nr),
            arguments: notice.data.args,
        }
    }
}
