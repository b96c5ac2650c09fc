//! Third parties' back-ends, and the programs that use them.
//!
//! ```text
//!   BackEnd ── a process on the host ──┐
//!                                      ├── vnplugd ── Channel, a process or a container's
//!   messages, events: by the daemon    │        └──── agent ── Channel, in a guest
//!   memory: mapped by both             ┘
//! ```
//!
//! Both ends are written in the same way: `next` says what happened, `send` and `event` say something. What a
//! side has not taken from `next` is counted; when too much waits, the other side's `send` says
//! [`Error::Full`](crate::Error::Full) and nothing is lost.

mod back_end;
mod channel;
mod credit;
mod shared;

pub use back_end::{BackEnd, BackEndOptions, Heard};
pub use channel::{Channel, ChannelOptions, Told};
pub use shared::SharedMemory;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::connection::{Connection, await_ready};
use crate::error::Error;

/// How long one exchange may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Between attempts to reach a daemon, or a back-end, that is gone.
const RETRY: Duration = Duration::from_millis(100);

/// When a wait of at most this time is over; `None`: never, as far as clocks go.
fn deadline(limit: Option<Duration>) -> Instant {
    const FOREVER: Duration = Duration::from_secs(86_400 * 365);
    Instant::now() + limit.unwrap_or(FOREVER).min(FOREVER)
}

/// Waits until the connection has something to say; false if it has not until then.
fn wait(connection: &Connection, until: Instant) -> Result<bool, Error> {
    if connection.has_unasked() {
        return Ok(true);
    }
    match await_ready(connection.as_fd(), PollFlags::IN, until) {
        Ok(()) => Ok(true),
        Err(Error::TimedOut) => Ok(false),
        Err(error) => Err(error),
    }
}
