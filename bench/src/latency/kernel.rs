//! Wake-ups by the kernel alone: what no reader that sleeps can be ahead of.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::{PER_SECOND, READER_CPU, SOURCE_CPU};
use crate::row::Result;
use crate::sys;

/// The kernel's own: a byte to a process that sleeps in `read`, and back.
pub(super) fn pipes(time: Duration) -> Result<[f64; 4]> {
    // On the reader's CPU, where this thread is.
    let mut child = Command::new(std::env::current_exe()?)
        .args(["child", "latency-pong"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (mut to, mut from) = (
        child.stdin.take().ok_or("no pipe")?,
        child.stdout.take().ok_or("no pipe")?,
    );
    let times = std::thread::scope(|scope| {
        let pinger = scope.spawn(|| {
            sys::pin(sys::cpu(SOURCE_CPU)).map_err(|error| error.to_string())?;
            ping(&mut to, &mut from, time).map_err(|error| error.to_string())
        });
        pinger
            .join()
            .map_err(|_| "the pinger panicked".to_owned())?
    });
    drop(to);
    child.wait()?;
    percentiles(times?)
}

fn ping(
    to: &mut impl Write,
    from: &mut std::process::ChildStdout,
    time: Duration,
) -> Result<Vec<u64>> {
    rustix::io::ioctl_fionbio(&*from, true)?;
    let start = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || start.elapsed() < time {
        let begin = Instant::now();
        to.write_all(&[1])?;
        loop {
            match from.read(&mut [0]) {
                Ok(0) => return Err("the other process is gone".into()),
                Ok(_) => break,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        times.push(begin.elapsed().as_nanos() as u64);
        // It spins between two, as the generator does.
        while begin.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
    }
    Ok(times)
}

/// The other process: answers each byte.
pub(crate) fn pong() -> Result<()> {
    let (mut from, mut to) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut byte = [0];
    while from.read(&mut byte)? > 0 {
        to.write_all(&byte)?;
        to.flush()?;
    }
    Ok(())
}

/// The least that a wake-up can be: a word in memory that one thread changes, and another, which
/// sleeps on it, changes back.
pub(super) fn futexes(time: Duration) -> Result<[f64; 4]> {
    let (there, back) = (&AtomicU32::new(0), &AtomicU32::new(0));
    let times = std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            sys::pin(sys::cpu(READER_CPU)).map_err(|error| error.to_string())?;
            let mut seen = 0;
            while seen != OVER {
                // Whatever ends the sleep, the word is looked at.
                let _ = futex::wait(there, futex::Flags::PRIVATE, seen, None);
                // Acquire, Release: each word is the other side's answer.
                seen = there.load(Ordering::Acquire);
                back.store(seen, Ordering::Release);
            }
            Ok::<_, String>(())
        });
        let pinger = scope.spawn(move || {
            let pinned = sys::pin(sys::cpu(SOURCE_CPU)).map_err(|error| error.to_string());
            let mut times = Vec::new();
            let start = Instant::now();
            while pinned.is_ok() && (times.is_empty() || start.elapsed() < time) {
                let begin = Instant::now();
                let number = times.len() as u32 + 1;
                there.store(number, Ordering::Release);
                // The sleeper may be awake.
                let _ = futex::wake(there, futex::Flags::PRIVATE, 1);
                while back.load(Ordering::Acquire) != number {
                    std::hint::spin_loop();
                    if sleeper.is_finished() {
                        return Err("the sleeper is gone".to_owned());
                    }
                }
                times.push(begin.elapsed().as_nanos() as u64);
                while begin.elapsed() < PAUSE {
                    std::hint::spin_loop();
                }
            }
            there.store(OVER, Ordering::Release);
            let _ = futex::wake(there, futex::Flags::PRIVATE, 1);
            pinned.map(|()| times)
        });
        pinger
            .join()
            .map_err(|_| "the pinger panicked".to_owned())?
    });
    percentiles(times?)
}

/// Half, 99 %, 99.9 % and all of them took no longer than these microseconds.
fn percentiles(mut nanos: Vec<u64>) -> Result<[f64; 4]> {
    nanos.sort_unstable();
    let last = nanos.len().checked_sub(1).ok_or("nothing was measured")?;
    let at = |share: f64| {
        let place = (nanos.len() as f64 * share) as usize;
        nanos[place.min(last)] as f64 / 1e3
    };
    Ok([at(0.5), at(0.99), at(0.999), at(1.0)])
}

const PAUSE: Duration = Duration::from_micros(1_000_000 / PER_SECOND);
/// Ends the sleeper.
const OVER: u32 = u32::MAX;
