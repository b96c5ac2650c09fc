//! What the kernel allows to a switch by sockets: a thread that takes datagrams from one client and gives
//! them to the other, as many as there are with a system call, and does not look at them.

use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vnplug_os::datagrams::{AT_ONCE, Inbox, send_many};

use super::client::{Carried, Client, FROM, TO, carry, frame};
use crate::row::Result;
use crate::sys;

/// What bounds a switch by sockets.
pub(super) const RELAY: &str = "a bare relay";

/// What a relay on one CPU carries, and nanoseconds of its processor time for a frame; the calling thread is
/// both clients.
pub(super) fn relay(len: usize, time: Duration, cpu: usize) -> Result<(Carried, f64)> {
    let [(from, one), (to, other)] = [UnixDatagram::pair()?, UnixDatagram::pair()?];
    let (from, to) = (Client::of(from), Client::of(to));
    let over = AtomicBool::new(false);
    let (carried, spent_ns) = scope(|threads| {
        let relay = threads.spawn(|| {
            sys::pin(cpu)
                .and_then(|()| work(&one, &other, &over))
                .map_err(|error| error.to_string())
        });
        let carried = carry((&from, &to), &frame(len, TO, FROM), time, None);
        over.store(true, Ordering::Relaxed);
        (carried, relay.join())
    });
    let (carried, spent_ns) = (carried?, spent_ns.map_err(|_| "the relay panicked")??);
    Ok((carried, spent_ns as f64 / carried.came.max(1) as f64))
}

/// Relays until it is over; the processor time that it took.
fn work(from: &UnixDatagram, to: &UnixDatagram, over: &AtomicBool) -> Result<u64> {
    let mut inbox = Inbox::new(AT_ONCE, 1 << 14);
    let begin = sys::thread_ns();
    while !over.load(Ordering::Relaxed) {
        inbox.clear();
        inbox.receive(from, AT_ONCE, true)?;
        if inbox.is_empty() {
            let wait = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&wait))?;
            continue;
        }
        let nothing: &[u8] = &[];
        let mut given = 0;
        while given < inbox.len() && !over.load(Ordering::Relaxed) {
            let frames = (given..inbox.len()).map(|at| (inbox.get(at).0, nothing));
            given += send_many(to, frames)?;
        }
    }
    Ok(sys::thread_ns() - begin)
}
