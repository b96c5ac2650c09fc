//! The smallest application of libpcap: counts what `pcap_dispatch` hands it.
//!
//! A process of its own that loads `libpcap.so.0.8` as any program does: where `LD_LIBRARY_PATH`
//! says so, it gets the drop-in, else the system's library.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Pid, Signal, kill_process};
use vnplug::{NextView, PortOptions};
use vnplug_path::source::af_xdp::{AfXdp, AfXdpConfig};
use vnplug_path::source::{Received, wait};

use super::library::{self, BUFFER_BYTES, Functions, READ_TIMEOUT};
use crate::row::Result;

/// The words that start it: `child pcap-count DEVICE [FILTER]`.
pub(crate) const NAME: &str = "pcap-count";
/// Before the name of an interface that is received without libpcap.
pub(crate) const BARE: &str = "af_xdp:";
/// Before the name of a device of ours whose packets are looked at where they lie, without the drop-in;
/// after it maybe a `/` and a group.
pub(crate) const IN_PLACE: &str = "view:";
/// What it prints when it captures.
pub(crate) const READY: &str = "ready";

/// The process: captures from a device until SIGINT; says how far it is on SIGUSR1.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let (device, filter) = match words {
        [device] => (device, ""),
        [device, filter] => (device, filter.as_str()),
        _ => return Err("DEVICE [FILTER]".into()),
    };
    if let Some(interface) = device.strip_prefix(BARE) {
        return bare(interface);
    }
    if let Some(device) = device.strip_prefix(IN_PLACE) {
        return in_place(device);
    }
    let mut capture = Functions::load()?.open(device, filter)?;
    count(|| capture.dispatch())
}

/// Without libpcap and the daemon: what the source af_xdp hands out, as it is set by default, is
/// counted and forgotten.
fn bare(interface: &str) -> Result<()> {
    let opened = AfXdp::open(AfXdpConfig::new(interface)).map_err(|unfit| unfit.to_string())?;
    let mut queues = opened.queues;
    let [queue] = &mut queues[..] else {
        return Err(format!("{interface} has {} queues", queues.len()).into());
    };
    let nobody = eventfd(0, EventfdFlags::CLOEXEC)?;
    library::catch_signals();
    count(|| {
        match queue.receive(&mut |_| ())? {
            Received::Frames(frames) => return Ok(frames as u64),
            Received::Passed { frames, .. } => return Ok(frames),
            Received::Nothing => wait(&mut **queue, nobody.as_fd(), Some(READ_TIMEOUT)),
            Received::End => return Err("the interface's frames came to an end".into()),
        }
        Ok(0)
    })
}

/// Without the drop-in: the header of each packet, and its first bytes, are looked at where it lies.
///
/// NB: the drop-in hands out a group's packets as copies, for a program of libpcap cannot be told
/// afterwards that one was overwritten.
fn in_place(device: &str) -> Result<()> {
    let options = PortOptions::new(device.split('/').next().unwrap_or(device))
        .watermark(MOST_UNREAD)
        .max_delay(READ_TIMEOUT);
    let options = match device.split_once('/') {
        // Its packets lie elsewhere: the ring has descriptors alone, more than such memory has frames.
        Some((_, group)) => options.group(group).ring_bytes(DESCRIPTOR_BYTES),
        None => options.ring_bytes(BUFFER_BYTES as u64),
    };
    let mut port = options.open()?;
    library::catch_signals();
    count(|| {
        let mut whole = 0;
        for _ in 0..MOST_UNREAD {
            match port.next_view()? {
                NextView::Packet(view) => {
                    let mut first = [0; 16];
                    view.read(0, &mut first);
                    std::hint::black_box(first);
                    whole += u64::from(view.finish());
                }
                NextView::Nothing if whole > 0 => break,
                NextView::Nothing => {
                    port.wait(Some(READ_TIMEOUT))?;
                    break;
                }
                NextView::Ended => return Err("the source ended".into()),
            }
        }
        Ok(whole)
    })
}

/// Takes packets until SIGINT.
fn count(mut take: impl FnMut() -> Result<u64>) -> Result<()> {
    println!("{READY}");
    let (mut packets, mut answers) = (0, 0);
    let mut span = Span::default();
    while !library::ended() {
        let taken = take()?;
        if taken > 0 {
            packets += taken;
            span.mark(Instant::now());
        }
        if library::asked() {
            answers += 1;
            let busy = std::mem::take(&mut span).busy();
            println!("{TOLD} {answers} {packets} {}", busy.as_nanos());
        }
    }
    println!("{packets}");
    Ok(())
}

/// From the first batch to the last.
#[derive(Debug, Default)]
struct Span {
    first: Option<Instant>,
    /// The last, and the one before it.
    last: Option<(Instant, Instant)>,
}

impl Span {
    fn mark(&mut self, now: Instant) {
        let first = *self.first.get_or_insert(now);
        let before = self.last.map_or(first, |(last, _)| last);
        self.last = Some((now, before));
    }

    /// How long the reader had something to do.
    ///
    /// The last packets wait for others as long as the reader asked for, and that is not slowness. So
    /// the time before the last batch does not count, as far as it may have been that wait. Of a
    /// reader that was behind it is the time of one batch.
    fn busy(&self) -> Duration {
        let (Some(first), Some((last, before))) = (self.first, self.last) else {
            return Duration::ZERO;
        };
        last - first - READ_TIMEOUT.min(last - before)
    }
}

/// Reads what a counter prints at its end: the packets that its callback got.
pub(super) fn parse(output: &str) -> Result<u64> {
    let last = output.lines().last().and_then(|line| line.parse().ok());
    last.ok_or_else(|| format!("the counter said {output:?}").into())
}

/// A counter's answer to SIGUSR1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// How many answers it has given.
    pub(crate) answers: u64,
    /// Packets since it started.
    pub(crate) packets: u64,
    /// From the first to the last packet since the answer before.
    pub(crate) busy: Duration,
}

impl Told {
    /// The last answer in what a counter has printed so far.
    pub(crate) fn last_in(output: &str) -> Option<Self> {
        let line = output.lines().rev().find(|line| line.starts_with(TOLD))?;
        let mut numbers = line.split(' ').skip(1).map(|word| word.parse().ok());
        Some(Self {
            answers: numbers.next()??,
            packets: numbers.next()??,
            busy: Duration::from_nanos(numbers.next()??),
        })
    }
}

const TOLD: &str = "told";
/// As many packets as the drop-in sleeps for.
const MOST_UNREAD: u32 = 4096;
const DESCRIPTOR_BYTES: u64 = 1 << 20;

/// A child process of ours that says something once it captures.
pub(crate) struct Listener {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Listener {
    /// Starts it and waits for its word.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or("no pipe")?;
        let mut listener = Self {
            child,
            output: BufReader::new(stdout),
        };
        let mut line = String::new();
        while listener.output.read_line(&mut line)? > 0 {
            if line.contains(READY) || line.contains("listening on") {
                return Ok(listener);
            }
            line.clear();
        }
        Err(format!("it ended before it captured: {:?}", listener.child.wait()?).into())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks a counter how far it is.
    pub(crate) fn ask(&mut self) -> Result<Told> {
        let pid = Pid::from_raw(self.pid().cast_signed()).ok_or("no process")?;
        kill_process(pid, Signal::USR1)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Told::last_in(&line).ok_or_else(|| format!("the counter said {line:?}").into())
    }

    /// Interrupts it; everything it says until it ends.
    pub(crate) fn end(mut self) -> Result<String> {
        let pid = Pid::from_raw(self.pid().cast_signed()).ok_or("no process")?;
        kill_process(pid, Signal::INT)?;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest)?;
        self.child.wait()?;
        Ok(rest)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_wait_for_the_last_batch_is_left_out() {
        let begin = Instant::now();
        let busy = |marks_ms: &[u64]| {
            let mut span = Span::default();
            for &ms in marks_ms {
                span.mark(begin + Duration::from_millis(ms));
            }
            span.busy().as_millis()
        };
        assert_eq!(busy(&[]), 0);
        assert_eq!(busy(&[5]), 0);
        // It was done when the sender was, and waited for the rest.
        assert_eq!(busy(&[0, 500, 1000, 1099]), 1000);
        // It was behind for as long, and that counts.
        assert_eq!(busy(&[0, 500, 1000, 1090, 1095, 1099]), 1095);
        // Longer than it asked for nobody waits.
        assert_eq!(busy(&[0, 500, 900]), 800);
    }

    #[test]
    fn the_last_line_is_the_result() {
        assert_eq!(parse("ready\n7\n").unwrap(), 7);
        assert!(parse("").is_err());
        assert!(parse("cannot open").is_err());
    }

    #[test]
    fn the_last_answer_counts() {
        let told = Told::last_in("ready\ntold 1 5 7\ntold 2 9 1000\n").unwrap();
        assert_eq!((told.answers, told.packets), (2, 9));
        assert_eq!(told.busy, Duration::from_micros(1));
        assert_eq!(Told::last_in("told 1 5"), None);
        assert_eq!(Told::last_in("ready"), None);
    }
}
