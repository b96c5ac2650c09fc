//! What `count` and `dump` have in common: opening a port and reading it until something ends it.

pub(crate) mod count;
pub(crate) mod dump;
pub(crate) mod echo;
mod frames;
mod listen;
mod parallel;
mod pcap;
pub(crate) mod send;
mod witness;

use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use vnplug::{Counted, Next, Packet, Port, PortOptions, Ready, flags};

use crate::failure::Failure;
use crate::{sys, text};

/// Which packets, how they are delivered, and when to stop.
#[derive(Debug, Args)]
pub(crate) struct PortArgs {
    /// Device as `vnplug list` names it; DEVICE@Q is receive queue Q alone
    device: String,
    /// Only packets that match this pcap-filter(7) expression; the daemon runs it
    #[arg(
        short,
        long,
        value_name = "EXPRESSION",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,
    /// Stop after this time
    #[arg(short = 't', long, value_name = "TIME", value_parser = text::duration)]
    seconds: Option<Duration>,
    /// Stop after this many packets
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    packets: Option<u64>,
    /// Bytes to capture of each packet [default: all]
    #[arg(
        short,
        long,
        value_name = "BYTES",
        value_parser = text::length,
        default_value_t = 0,
        hide_default_value = true
    )]
    snaplen: u32,
    /// One packet in N of those that pass the filter
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    sample: u32,
    /// Packets the interface received (rx), sent (tx), or both
    #[arg(long, value_enum, default_value_t = Direction::Both)]
    direction: Direction,
    /// Super-frames, and frames whose checksum was left to a NIC: as the wire would have carried them,
    /// or merged as they came
    #[arg(long, value_enum, default_value_t = Segments::Wire)]
    segments: Segments,
    /// Each packet goes through the operator's program of this name (`vnplug programs`), which may drop it or
    /// change it
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    program: String,
    /// Share the device with all readers that name the same cluster
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    cluster: String,
    /// How a cluster shares: a flow stays with one reader, or packet by packet (rr)
    #[arg(long, value_enum, default_value_t = Balance::Flow, requires = "cluster")]
    balance: Balance,
    /// Read one copy of each packet with all readers that name the same group and trust each other
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    group: String,
    /// Size of a new group's arena, for example 16M [default: the daemon's size of a ring]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = text::size, requires = "group")]
    arena: u64,
    /// Size of each ring, for example 16M [default: the daemon's]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = text::size)]
    ring: u64,
    /// Sleep until this many packets are unread
    #[arg(long, value_name = "N", default_value_t = 1)]
    watermark: u32,
    /// Longest time a packet waits for the watermark
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = text::duration)]
    max_delay: Duration,
    /// How to wait for packets: never sleep, and keep one core busy (latency); look a while, sleep a
    /// while, then be woken (balanced); sleep until woken (cpu)
    #[arg(long, value_enum, default_value_t = Waiting::Cpu)]
    wait: Waiting,
    /// The same as --wait latency
    #[arg(long, conflicts_with = "wait")]
    busy_poll: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Waiting {
    Latency,
    Balanced,
    Cpu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Direction {
    Both,
    Rx,
    Tx,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Segments {
    Wire,
    Merged,
}

impl From<Segments> for vnplug::Segments {
    fn from(segments: Segments) -> Self {
        match segments {
            Segments::Wire => Self::Wire,
            Segments::Merged => Self::Merged,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Balance {
    Flow,
    Rr,
}

/// What is done with the packets.
pub(crate) trait Sink {
    /// One packet.
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure>;
    /// Nothing more to read at this moment.
    fn idle(&mut self) -> Result<(), Failure>;
    /// About once a second.
    fn tick(&mut self, port: &mut Port) -> Result<(), Failure>;
}

/// Why reading stopped without a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The source ended, and everything was read.
    Ended,
    /// The time is over, or a signal came.
    Time,
    /// This many packets were asked for; others may lie in the rings.
    Packets,
}

/// What was lost before the daemon saw it: in the kernel, for all its readers.
#[derive(Debug, Default)]
pub(crate) struct BeforeDaemon {
    /// Packets that say that others were lost before them.
    pub(crate) marks: u64,
    port: u32,
    now: u64,
    earlier: u64,
}

impl BeforeDaemon {
    /// Looks at a packet's mark.
    #[inline]
    pub(crate) fn see(&mut self, packet: &Packet<'_>) {
        self.marks += u64::from(packet.meta.flags & flags::SOURCE_LOSS != 0);
    }

    /// Asks the daemon for the number; without an answer the last one stays.
    pub(crate) fn ask(&mut self, port: &mut Port) {
        let host = port.stats().ok().and_then(|stats| stats.host);
        if let Some(host) = host {
            self.hear(port.number(), &host);
        }
    }

    /// Takes the number from the daemon's counters of a port.
    pub(crate) fn hear(&mut self, port: u32, host: &Counted) {
        // A port that was reopened counts from zero.
        if self.port != port {
            self.earlier += std::mem::take(&mut self.now);
            self.port = port;
        }
        let value = host
            .values
            .iter()
            .find(|(key, _)| key == "source_kernel_dropped");
        self.now = value.map_or(self.now, |(_, value)| *value);
    }

    /// Packets lost while this reader was attached.
    pub(crate) fn lost(&self) -> u64 {
        self.earlier + self.now
    }

    /// `, N lost before the daemon (kernel)`, or nothing.
    pub(crate) fn words(&self) -> String {
        match self.lost() {
            0 => String::new(),
            lost => format!(", {} lost before the daemon (kernel)", text::grouped(lost)),
        }
    }
}

impl PortArgs {
    /// Opens the port.
    pub(crate) fn open(&self, socket: &Path) -> Result<Port, Failure> {
        self.opened(self.options(socket).open())
    }

    /// What was opened, or the failure with the device's name.
    pub(crate) fn opened<T>(&self, opened: Result<T, vnplug::Error>) -> Result<T, Failure> {
        opened.map_err(|error| Failure::about(&self.device, Failure::from(error).line()))
    }

    /// The port to be.
    pub(crate) fn options(&self, socket: &Path) -> PortOptions {
        let direction = match self.direction {
            Direction::Both => vnplug::Direction::Both,
            Direction::Rx => vnplug::Direction::Rx,
            Direction::Tx => vnplug::Direction::Tx,
        };
        let balance = match self.balance {
            Balance::Flow => vnplug::Balance::Flow,
            Balance::Rr => vnplug::Balance::RoundRobin,
        };
        let waiting = match self.wait {
            _ if self.busy_poll => vnplug::Waiting::LATENCY,
            Waiting::Latency => vnplug::Waiting::LATENCY,
            Waiting::Balanced => vnplug::Waiting::BALANCED,
            Waiting::Cpu => vnplug::Waiting::CPU,
        };
        PortOptions::new(&self.device)
            .waiting(waiting)
            .socket(socket)
            .filter(&self.filter)
            .snaplen(self.snaplen)
            .sample(self.sample)
            .direction(direction)
            .segments(self.segments.into())
            .program(&self.program)
            .cluster(&self.cluster, balance)
            .group(&self.group)
            .arena_bytes(self.arena)
            .ring_bytes(self.ring)
            .watermark(self.watermark)
            .max_delay(self.max_delay)
    }

    /// How long a wait may be: one that does not sleep notices no signal.
    fn longest_wait(&self) -> Duration {
        match self.wait {
            Waiting::Cpu if !self.busy_poll => Duration::MAX,
            _ => AWAKE,
        }
    }

    /// Whether it looks for packets all the time.
    fn never_sleeps(&self) -> bool {
        self.busy_poll || matches!(self.wait, Waiting::Latency)
    }

    /// True if this reader gets every packet of the device.
    pub(crate) fn gets_everything(&self) -> bool {
        self.filter.trim().is_empty()
            && self.sample == 1
            && self.direction == Direction::Both
            && self.cluster.is_empty()
            && self.program.is_empty()
            && !self.device.contains('@')
    }

    /// Reads until a limit, a signal, the end of the source or a failure.
    ///
    /// # Errors
    /// Why the port or the sink failed; everything before was delivered.
    pub(crate) fn drive(&self, port: &mut Port, sink: &mut impl Sink) -> Result<Stop, Failure> {
        let start = Instant::now();
        let end = self.seconds.map(|seconds| start + seconds);
        let mut left = self.packets.unwrap_or(u64::MAX);
        let mut tick = start + TICK;
        let mut steps = 0;
        // Nothing came for a while.
        let mut quiet = false;
        loop {
            let mut taken = 0;
            for packet in port.batch(BATCH) {
                sink.packet(&packet?)?;
                taken += 1;
                left -= 1;
                if left == 0 {
                    return Ok(Stop::Packets);
                }
            }
            if sys::stop().is_some() {
                return Ok(Stop::Time);
            }
            steps += 1 + taken;
            if steps >= STEPS {
                steps = 0;
                let now = Instant::now();
                if end.is_some_and(|end| now >= end) {
                    return Ok(Stop::Time);
                }
                if now >= tick {
                    sink.tick(port)?;
                    tick = (tick + TICK).max(now);
                }
            }
            if taken > 0 {
                continue;
            }
            sink.idle()?;
            match port.next()? {
                Next::Packet(packet) => {
                    sink.packet(&packet)?;
                    left -= 1;
                    if left == 0 {
                        return Ok(Stop::Packets);
                    }
                }
                Next::Ended => return Ok(Stop::Ended),
                // NB: the clock is a system call in User-mode Linux, while 512 KiB of ring are full of
                // 1514-byte frames in 18 us: who looked at it whenever the ring was empty had 0.80 to
                // 0.88 of the host's rate there.
                Next::Nothing if self.never_sleeps() && !quiet => {
                    steps += STEPS / LULLS;
                    quiet = port.wait(Some(LULL))? != Ready::Now;
                }
                Next::Nothing => {
                    // The clock is looked at before and after a sleep.
                    steps = STEPS;
                    let until = end.map_or(tick, |end| end.min(tick));
                    let timeout = until.saturating_duration_since(Instant::now());
                    let timeout = timeout.min(self.longest_wait());
                    quiet = port.wait(Some(timeout))? != Ready::Now;
                }
            }
        }
    }
}

const BATCH: usize = 256;
const TICK: Duration = Duration::from_secs(1);
/// While a reader that never sleeps waits no longer than this at a time, it looks at the clock once in
/// this many times.
const LULL: Duration = Duration::from_millis(1);
const LULLS: usize = 64;
const AWAKE: Duration = Duration::from_millis(50);
/// Packets and rounds between two looks at the clock.
///
/// NB: in User-mode Linux the clock is a system call, and a slow one. With a look per batch a reader
/// there had half the rate of the same reader on the host; now it has the same (row `uml-reader`).
const STEPS: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_before_the_daemon_add_up_over_a_reopened_port() {
        let host = |value| Counted {
            kind: "port".into(),
            name: "1".into(),
            labels: Vec::new(),
            values: vec![("source_kernel_dropped".into(), value)],
        };
        let mut before = BeforeDaemon::default();
        assert_eq!(before.words(), "");
        for (port, value, lost) in [(1, 0, 0), (1, 1500, 1500), (4, 0, 1500), (4, 7, 1507)] {
            before.hear(port, &host(value));
            assert_eq!(before.lost(), lost);
        }
        assert_eq!(before.words(), ", 1,507 lost before the daemon (kernel)");
    }
}
