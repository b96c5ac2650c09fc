//! Processes: forked, waited for, and named so that a name cannot come to mean another one.
#![expect(
    unsafe_code,
    reason = "fork, pidfds of threads and signals, which rustix does not have"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What fork(2) returned.
#[derive(Debug)]
pub(crate) enum Forked {
    /// In the new process.
    Child,
    /// In the old one: the new one's process id.
    Parent(u32),
}

/// Forks. The process must have one thread: what other threads held would be held for ever in the child.
///
/// # Errors
/// The system's, and if there are other threads.
pub(crate) fn fork() -> io::Result<Forked> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with threads cannot fork"));
    }
    // SAFETY: there is one thread, so the child has all that the parent has, and nothing is half done.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent(pid as u32)),
    }
}

/// Names a thread by a descriptor. On kernels before 6.9 only the first thread of a process can be named; the filter
/// then keeps all threads of a process on one table of descriptors (`filter::Threads`), and the descriptor
/// of the process does.
///
/// # Errors
/// `ESRCH` if it is gone.
pub(crate) fn thread_fd(thread: u32) -> io::Result<OwnedFd> {
    const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;
    match pidfd_open(thread, PIDFD_THREAD) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            pidfd_open(group_of(thread)?, 0)
        }
        result => result,
    }
}

/// What the kernel tells of a thread by its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The process that it is in.
    pub(crate) process: u32,
    /// Real user, effective user, and the one for files.
    pub(crate) users: [u32; 3],
}

/// Asks the descriptor of a thread; `None` if the kernel does not tell (before Linux 6.13), or tells of another thread
/// of the process. To read `/proc/THREAD/status` took a third of a call.
pub(crate) fn told_of(thread: u32, fd: BorrowedFd<'_>) -> Option<Told> {
    // SAFETY: all-zero is a value of this structure of integers.
    let mut told: libc::pidfd_info = unsafe { std::mem::zeroed() };
    told.mask = u64::from(libc::PIDFD_INFO_PID | libc::PIDFD_INFO_CREDS);
    let asked = told.mask;
    // SAFETY: the request reads and writes the one structure whose size its number says.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut told) };
    (result == 0 && told.mask & asked == asked && told.pid == thread).then_some(Told {
        process: told.tgid,
        users: [told.ruid, told.euid, told.fsuid],
    })
}

/// Whether the kernel names single threads by descriptors (Linux 6.9).
pub(crate) fn threads_have_fds() -> bool {
    const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;
    pidfd_open(std::process::id(), PIDFD_THREAD).is_ok()
}

/// A copy of the file that `number` is in the thread's table of descriptors.
///
/// # Errors
/// `EBADF` if it is none there; `EPERM` if the thread may not be looked at.
pub(crate) fn file_of(thread: BorrowedFd<'_>, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, thread.as_raw_fd(), number, 0) };
    match i32::try_from(copy) {
        // SAFETY: the call has just made this descriptor for us.
        Ok(copy) if copy >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(copy) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal to the thread (or process) that the descriptor names.
pub(crate) fn signal(target: BorrowedFd<'_>, number: i32) {
    // SAFETY: the call takes numbers and no structure. Whoever is gone needs no signal.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            target.as_raw_fd(),
            number,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
}

/// Sends a signal to a child of ours that was not waited for.
pub(crate) fn signal_child(pid: u32, number: i32) {
    // SAFETY: the call takes numbers.
    unsafe { libc::kill(pid as libc::pid_t, number) };
}

/// This process dies with its parent. A parent that died before counts too.
///
/// # Errors
/// If the parent is gone already.
pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: the calls take numbers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() as u32 != parent {
            return Err(io::Error::other("the parent has ended"));
        }
    }
    Ok(())
}

/// No other process of this user can read this one's memory or take its descriptors.
pub(crate) fn become_undumpable() {
    // SAFETY: the call takes numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
}

/// Processes below this one that lose their parent become its children.
pub(crate) fn become_subreaper() {
    // SAFETY: the call takes numbers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Neither these signals nor what they do by default.
pub(crate) fn ignore(signals: &[i32]) {
    for number in signals {
        // SAFETY: SIG_IGN is a disposition, and no handler of ours is replaced.
        unsafe { libc::signal(*number, libc::SIG_IGN) };
    }
}

/// Signals that a process takes one by one, by a descriptor, instead of being interrupted.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
}

impl Signals {
    /// Takes these from now on.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn take(signals: &[i32]) -> io::Result<Self> {
        // SAFETY: the sets are ours, and sigemptyset makes them valid before they are read.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for number in signals {
                libc::sigaddset(&raw mut set, *number);
            }
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, &raw mut before);
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = OwnedFd::from_raw_fd(fd);
            Ok(Self { fd, before })
        }
    }

    /// The next that came: its number, and whether a process sent it (else the terminal or the kernel did).
    pub(crate) fn next(&self) -> Option<(i32, bool)> {
        // SAFETY: the kernel writes at most one structure to where one has room; all-zero is a value of it.
        unsafe {
            let mut info: libc::signalfd_siginfo = std::mem::zeroed();
            let length = libc::read(
                self.fd.as_raw_fd(),
                (&raw mut info).cast(),
                size_of_val(&info),
            );
            (length == size_of_val(&info) as isize)
                .then_some((info.ssi_signo as i32, info.ssi_code <= 0))
        }
    }

    /// Becomes readable when one is there.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    /// In a child: the signals come as they did before.
    pub(crate) fn restore(&self) {
        // SAFETY: the set was filled by the kernel.
        unsafe {
            libc::sigprocmask(
                libc::SIG_SETMASK,
                &raw const self.before,
                std::ptr::null_mut(),
            )
        };
    }
}

/// What has become of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It ended with this wait status.
    Ended(i32),
    /// It was stopped.
    Stopped,
    /// It goes on.
    Continued,
}

/// The next child of which there is something to say; `None` if there is none now.
///
/// # Errors
/// `ECHILD` if there are no children.
pub(crate) fn wait_any(blocks: bool) -> io::Result<Option<(u32, Fate)>> {
    let mut status = 0;
    let mut flags = libc::WUNTRACED | libc::WCONTINUED;
    if !blocks {
        flags |= libc::WNOHANG;
    }
    // SAFETY: the kernel writes one number.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
    match pid {
        0 => Ok(None),
        pid if pid > 0 => {
            let fate = if libc::WIFSTOPPED(status) {
                Fate::Stopped
            } else if libc::WIFCONTINUED(status) {
                Fate::Continued
            } else {
                Fate::Ended(status)
            };
            Ok(Some((pid as u32, fate)))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// How a shell says a wait status: the exit code, or 128 and the number of the signal.
pub(crate) fn code_of(status: i32) -> u8 {
    if libc::WIFSIGNALED(status) {
        128 + libc::WTERMSIG(status) as u8
    } else {
        libc::WEXITSTATUS(status) as u8
    }
}

/// The process that a thread is in.
///
/// # Errors
/// If it is gone.
pub(crate) fn group_of(thread: u32) -> io::Result<u32> {
    let text = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    field(&text, "Tgid:").ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

/// A number of `/proc/PID/status`.
pub(crate) fn field(status: &str, name: &str) -> Option<u32> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn pidfd_open(pid: u32, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
    match i32::try_from(fd) {
        // SAFETY: the call has just made this descriptor for us.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// This thread has a working directory and a mask for new files of its own.
pub(crate) fn own_directory() {
    // SAFETY: the call takes a number; nothing else of this process relies on sharing them.
    unsafe { libc::unshare(libc::CLONE_FS) };
}

/// Every descriptor from this number on is closed at exec (Linux 5.11).
///
/// # Errors
/// The system's.
pub(crate) fn close_on_exec_from(number: u32) -> io::Result<()> {
    const CLOEXEC: u32 = 4; // CLOSE_RANGE_CLOEXEC
    // SAFETY: the call takes numbers, and closes nothing now.
    match unsafe { libc::syscall(libc::SYS_close_range, number, u32::MAX, CLOEXEC) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Standard input, output or error (0 to 2), if it is open.
///
/// # Errors
/// `EBADF` if it is closed.
pub(crate) fn standard(number: i32) -> io::Result<BorrowedFd<'static>> {
    // SAFETY: the call takes numbers.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and nobody here closes the three.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}
