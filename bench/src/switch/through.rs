//! Short frames the whole way through a switch, from one port to another: by rings, or between cards by vhost-user.
//!
//! One thread of ours is both ends; it sends what comes from a [`Frames`] and takes what comes out. What is measured is
//! the processor time of the daemon for a frame that came out, beside the rate.

use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};

use super::card::Card;
use super::frames::Frames;
use super::ring::RING;
use crate::attached::cpu_time;
use crate::row::{Result, Samples};
use crate::sys;

/// CPU of the switch's thread.
pub(super) const SWITCH_CPU: usize = 0;
/// CPU of the thread that sends and receives.
pub(super) const ENDS_CPU: usize = 1;
/// Frames between two looks at what came.
const BURST: usize = 64;

/// How a port joins.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Way {
    Ring,
    Guest,
}

enum End {
    Ring(Box<Port>),
    Guest(Box<Card>),
}

/// A switch with two ports; the first sends to the second.
pub(super) struct Path {
    daemon: Daemon,
    from: End,
    to: End,
    _lab: Lab,
}

/// What was carried.
#[derive(Clone, Copy, Default)]
pub(super) struct Carried {
    came: u64,
    time: Duration,
    /// The daemon's processor time meanwhile.
    spent: Duration,
}

/// Samples of one way.
#[derive(Default, Clone)]
pub(super) struct Series {
    /// Nanoseconds of the daemon's processor time for a frame.
    pub(super) cost: Samples,
    /// Millions of frames in a second.
    pub(super) rate: Samples,
}

impl Path {
    /// Ports 1 and 2 of a switch, which knows where both are.
    pub(super) fn new(from: Way, to: Way) -> Result<Self> {
        sys::pin(sys::cpu(ENDS_CPU))?;
        let lab = Lab::new()?;
        let socket = lab.dir().join("lan0.sock");
        let cpu = sys::cpu(SWITCH_CPU);
        let spec = format!("lan0,cpus={cpu},vhost={}", socket.display());
        let daemon = Daemon::start(&lab, None, &["--switch", &spec])?;
        let end = |way| -> Result<End> {
            Ok(match way {
                Way::Guest => End::Guest(Box::new(Card::join(&socket)?)),
                Way::Ring => {
                    let options = daemon.port("lan0").join();
                    let port = options.transmit(RING).ring_bytes(RING).open()?;
                    End::Ring(Box::new(port))
                }
            })
        };
        let (from, to) = (end(from)?, end(to)?);
        let mut path = Self {
            daemon,
            from,
            to,
            _lab: lab,
        };
        path.from.send_one(&Frames::hello(true))?;
        path.settle()?;
        path.to.send_one(&Frames::hello(false))?;
        path.settle()?;
        Ok(path)
    }

    /// Settings of a port.
    pub(super) fn set(&self, port: usize, text: &str) -> Result<()> {
        let port = format!("lan0/port{port}");
        match self.daemon.vnplug(&["switch", "set", &port, text]) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    }

    /// A counter of the switch.
    pub(super) fn count(&self, name: &str) -> u64 {
        value(counted(&self.daemon.counters(), "source"), name)
    }

    /// Bytes of memory that the daemon has.
    pub(super) fn resident(&self) -> Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.pid()))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        Ok(kib.ok_or("no VmRSS")?.parse::<u64>()? * 1024)
    }

    /// The second port answers with these frames, all at once.
    pub(super) fn answers(&mut self, frames: &[Vec<u8>]) -> Result<()> {
        self.to.burst(&mut frames.iter().map(Vec::as_slice))?;
        self.settle()
    }

    /// The first port sends these, all at once.
    pub(super) fn says(&mut self, frames: &[Vec<u8>]) -> Result<()> {
        self.from.burst(&mut frames.iter().map(Vec::as_slice))?;
        self.settle()
    }

    /// Takes everything that comes in a while.
    fn settle(&mut self) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < SETTLED {
            self.from.take()?;
            self.to.take()?;
            std::thread::sleep(SETTLED / 20);
        }
        Ok(())
    }

    /// Sends and receives for some time.
    pub(super) fn carry(&mut self, frames: &mut Frames, time: Duration) -> Result<Carried> {
        self.turns(frames, time / 8)?;
        let (begin, before) = (Instant::now(), cpu_time(self.daemon.pid())?);
        let came = self.turns(frames, time)?;
        let carried = Carried {
            came,
            time: begin.elapsed(),
            spent: cpu_time(self.daemon.pid())?.saturating_sub(before),
        };
        match came {
            0 => Err("no frame came".into()),
            _ => Ok(carried),
        }
    }

    fn turns(&mut self, frames: &mut Frames, time: Duration) -> Result<u64> {
        let (begin, mut came) = (Instant::now(), 0);
        while begin.elapsed() < time {
            for _ in 0..16 {
                self.from.send(frames)?;
                came += self.to.take()?;
            }
        }
        Ok(came)
    }
}

impl End {
    /// Sends as many frames as come between two looks, or as there is room for.
    fn send(&mut self, frames: &mut Frames) -> Result<()> {
        match self {
            Self::Ring(port) => {
                let outbox = port.outbox()?;
                for _ in 0..BURST {
                    if !outbox.push(frames.this())? {
                        break;
                    }
                    frames.advance();
                }
                outbox.flush();
            }
            Self::Guest(card) => {
                for _ in 0..BURST {
                    if !card.push(frames.this()) {
                        break;
                    }
                    frames.advance();
                }
                card.flush();
            }
        }
        Ok(())
    }

    /// Sends all of these at once.
    fn burst(&mut self, frames: &mut dyn Iterator<Item = &[u8]>) -> Result<()> {
        match self {
            Self::Ring(port) => {
                let outbox = port.outbox()?;
                for frame in frames {
                    if !outbox.push(frame)? {
                        return Err(NO_ROOM.into());
                    }
                }
                outbox.flush();
            }
            Self::Guest(card) => {
                // What the switch has sent is free again.
                card.flush();
                for frame in frames {
                    if !card.push(frame) {
                        return Err(NO_ROOM.into());
                    }
                }
                card.flush();
            }
        }
        Ok(())
    }

    fn send_one(&mut self, frame: &[u8]) -> Result<()> {
        self.burst(&mut std::iter::once(frame))
    }

    /// Takes all frames that are there; how many.
    fn take(&mut self) -> Result<u64> {
        match self {
            Self::Ring(port) => super::ring::take(port),
            Self::Guest(card) => Ok(card.take()),
        }
    }
}

impl Carried {
    /// Both together.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            came: self.came + other.came,
            time: self.time + other.time,
            spent: self.spent + other.spent,
        }
    }
}

impl Series {
    /// Adds what was carried in a round, and tells it.
    pub(super) fn push(&mut self, carried: Carried) -> String {
        let Carried { came, time, spent } = carried;
        self.cost.push(spent.as_nanos() as f64 / came.max(1) as f64);
        self.rate.push(came as f64 / time.as_secs_f64() / 1e6);
        format!("{:.1} ns, {:.2} Mpps", self.cost.last(), self.rate.last())
    }
}

const NO_ROOM: &str = "a ring has no room for all of these frames at once";
/// Until everything that was sent has come.
const SETTLED: Duration = Duration::from_millis(100);
