//! Sleeping until a descriptor is ready or a time is reached, to the nanosecond.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Sleeps until `waker` or `input` is readable or `limit` has passed; returns what is to be said
/// of `input`. Returns early on a signal, and after an hour.
pub(super) fn sleep(
    waker: BorrowedFd<'_>,
    input: Option<BorrowedFd<'_>>,
    limit: Option<Duration>,
) -> PollFlags {
    let limit = limit.unwrap_or(LONGEST).min(LONGEST);
    let timeout = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    let mut fds = [
        PollFd::from_borrowed_fd(waker, PollFlags::IN),
        PollFd::from_borrowed_fd(input.unwrap_or(waker), PollFlags::IN),
    ];
    // An error (a signal) is an early return: the flags stay empty.
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) if input.is_some() => fds[1].revents(),
        _ => PollFlags::empty(),
    }
}

const LONGEST: Duration = Duration::from_secs(3600);
