//! Requests of a few bytes by TCP, one after the other: how many a second, and how long the slow ones take.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::scope;
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;

use crate::row::Result;
use crate::switch::guests::{Guests, Lan};
use crate::switch::talk::{ECHO_PORT, WARM_UP, send_until};

/// What requests were like.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Requests {
    pub(super) per_s: f64,
    /// Microseconds of the one in a hundred.
    pub(super) p99_us: f64,
    /// By how much what was counted beside them grew meanwhile.
    pub(super) counted: u64,
}

/// Requests from a namespace to the first guest; `is_beside`: a stream goes the same way, of so few bytes a second
/// that the guest keeps up with single segments, too. What `count` says is looked at when they begin and when they have ended.
pub(super) fn to_guest(
    guests: &Guests,
    from: &Netns,
    lan: Lan,
    time: Duration,
    is_beside: bool,
    count: impl Fn() -> u64,
) -> Result<Requests> {
    guests.answers(time, is_beside, |begin, end| {
        let to = lan.address(0);
        let ask = || ask(&to, begin, end).map_err(|error| error.to_string());
        let fill = || fill(&to, begin, end).map_err(|error| error.to_string());
        scope(|threads| {
            let stream = is_beside.then(|| threads.spawn(|| from.enter(fill)));
            let asked = threads.spawn(|| from.enter(ask));
            let at = |instant: Instant| {
                std::thread::sleep(instant.saturating_duration_since(Instant::now()));
                count()
            };
            let before = at(begin);
            let counted = at(end) - before;
            if let Some(stream) = stream {
                stream.join().map_err(|_| "the sender panicked")???;
            }
            let asked = asked.join().map_err(|_| "the asker panicked")???;
            Ok(Requests { counted, ..asked })
        })
    })
}

/// Sends a block each millisecond until this instant.
fn fill(to: &str, begin: Instant, end: Instant) -> Result<()> {
    let next = Cell::new(begin - WARM_UP);
    send_until(to, None, begin, || {
        std::thread::sleep(next.get().saturating_duration_since(Instant::now()));
        next.set(next.get() + TICK);
        Instant::now() > end
    })
}

/// Asks from this instant on until that one.
fn ask(to: &str, begin: Instant, end: Instant) -> Result<Requests> {
    std::thread::sleep((begin - WARM_UP).saturating_duration_since(Instant::now()));
    let address = format!("{to}:{ECHO_PORT}").parse()?;
    let mut stream = TcpStream::connect_timeout(&address, WARM_UP)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let (mut request, mut took) = ([0; 64], Vec::new());
    loop {
        let now = Instant::now();
        if now > end {
            break;
        }
        stream.write_all(&request)?;
        stream.read_exact(&mut request)?;
        if now >= begin {
            took.push(now.elapsed());
        }
    }
    took.sort();
    let p99 = took
        .get(took.len() * 99 / 100)
        .ok_or("no request was answered")?;
    Ok(Requests {
        per_s: took.len() as f64 / (end - begin).as_secs_f64(),
        p99_us: p99.as_secs_f64() * 1e6,
        counted: 0,
    })
}

/// Between two blocks of 128 KiB: 1 Gb/s.
const TICK: Duration = Duration::from_millis(1);
/// The longest that a request may take.
const LIMIT: Duration = Duration::from_secs(10);
