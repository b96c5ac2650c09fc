//! One way to the packets: its counters, and the processes whose time it costs.

use std::fmt;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::{Guest, Job, Netns};

use super::sent_mpps;
use crate::attached::cpu_time;
use crate::pcap::{COUNTER, Listener, READY, Told};
use crate::row::Result;
use crate::sys;
use crate::wire::{Load, Wire};

/// Counters that all see the same wire.
pub(crate) struct Way<'g> {
    /// Where frames for them are sent.
    far: &'static str,
    counters: Vec<Counter<'g>>,
    guests: Vec<&'g Guest>,
    daemon: Option<&'g Daemon>,
    /// What counters on the host ask for; everything if it is empty.
    filter: &'static str,
}

/// A counter, on the host or in a guest.
enum Counter<'g> {
    Host(Listener),
    Guest {
        guest: &'g Guest,
        job: Job,
        /// How often it has told so far.
        answers: u64,
    },
}

impl<'g> Way<'g> {
    /// A way without counters, from a far end of the wire, maybe by a daemon.
    pub(crate) fn new(far: &'static str, daemon: Option<&'g Daemon>) -> Self {
        Self {
            far,
            counters: Vec::new(),
            guests: Vec::new(),
            daemon,
            filter: "",
        }
    }

    /// The same with a filter for counters on the host.
    pub(super) fn filtered(self, filter: &'static str) -> Self {
        Self { filter, ..self }
    }

    /// How many counters there are.
    pub(super) fn readers(&self) -> usize {
        self.counters.len()
    }

    /// Adds a counter on the host, in a namespace or our own; `command` runs this program.
    pub(super) fn on_host(
        mut self,
        netns: Option<&Netns>,
        mut command: Command,
        device: &str,
    ) -> Result<Self> {
        command.args(["child", COUNTER, device, self.filter]);
        let listener = match netns {
            Some(netns) => {
                netns.enter(|| Listener::start(command).map_err(|error| error.to_string()))??
            }
            None => Listener::start(command)?,
        };
        self.counters.push(Counter::Host(listener));
        Ok(self)
    }

    /// Adds a counter in a guest, whose whole processor time counts; `prefix` sets its environment.
    pub(crate) fn in_guest(mut self, guest: &'g Guest, prefix: &str, device: &str) -> Result<Self> {
        let job = guest.spawn(&format!("{prefix} exec counter child {COUNTER} {device}"))?;
        let deadline = Instant::now() + LIMIT;
        while !job.peek(1000)?.contains(READY) {
            if job.is_done() || Instant::now() > deadline {
                return Err(format!("the counter in the guest: {}", job.peek(1000)?).into());
            }
            sleep(Duration::from_millis(50));
        }
        self.counters.push(Counter::Guest {
            guest,
            job,
            answers: 0,
        });
        if !self.guests.iter().any(|known| std::ptr::eq(*known, guest)) {
            self.guests.push(guest);
        }
        Ok(self)
    }

    /// Sends this many frames, waits until they are worked off, and asks all counters.
    pub(super) fn turn(
        &mut self,
        wire: &Wire,
        frames: u64,
        len: usize,
        load: Load,
    ) -> Result<Turn> {
        let mark = self.mark()?;
        let sent = wire.send_from(Some(sys::cpu(0)), self.far, frames, len, load)?;
        self.settle()?;
        let turn = self.since(&mark, sent.frames, sent.elapsed)?;
        Ok(Turn {
            sent_mpps: sent_mpps(&sent),
            ..turn
        })
    }

    /// Where the counters and the processes are.
    pub(crate) fn mark(&mut self) -> Result<Mark> {
        Ok(Mark {
            told: self.ask()?,
            cpu: self.cpu()?,
            daemon: self.daemon_cpu()?,
            dropped: self.dropped(),
        })
    }

    /// What came since then, of this many packets on the wire in such a time.
    pub(crate) fn since(&mut self, mark: &Mark, wire: u64, elapsed: Duration) -> Result<Turn> {
        let cpu = self.cpu()?.saturating_sub(mark.cpu);
        let after = self.ask()?;
        let captured = mark.told.iter().zip(&after);
        let captured = captured.map(|(before, after)| after.packets - before.packets);
        let busy = after.iter().map(|told| told.busy).max().unwrap_or_default();
        Ok(Turn {
            sent_mpps: wire as f64 / elapsed.as_secs_f64().max(1e-9) / 1e6,
            sent: wire * self.counters.len() as u64,
            readers: self.counters.len(),
            captured: captured.sum(),
            seconds: elapsed.max(busy).as_secs_f64(),
            cpu_s: cpu.as_secs_f64(),
            daemon_s: self.daemon_cpu()?.saturating_sub(mark.daemon).as_secs_f64(),
            dropped: match (mark.dropped, self.dropped()) {
                (Some(before), Some(after)) => Some(Dropped {
                    kernel: (after.kernel - before.kernel) * self.counters.len() as u64,
                    ring: after.ring - before.ring,
                }),
                _ => None,
            },
        })
    }

    /// What the daemon counted as lost so far, if there is one.
    fn dropped(&self) -> Option<Dropped> {
        let counters = self.daemon?.counters();
        let sum = |kind: &str, name: &str| {
            let counted = counters.iter().filter(|counted| counted.kind == kind);
            counted.map(|counted| value(counted, name)).sum()
        };
        Some(Dropped {
            kernel: sum("source", "kernel_dropped"),
            ring: sum("port", "dropped_full"),
        })
    }

    /// Processor time of the daemon alone.
    fn daemon_cpu(&self) -> Result<Duration> {
        self.daemon
            .map_or(Ok(Duration::ZERO), |daemon| cpu_time(daemon.pid()))
    }

    fn ask(&mut self) -> Result<Vec<Told>> {
        self.counters.iter_mut().map(Counter::ask).collect()
    }

    /// Waits until neither the daemon nor a counter has anything left to do.
    fn settle(&self) -> Result<()> {
        let deadline = Instant::now() + SETTLED;
        loop {
            let before = self.cpu()?;
            sleep(LOOK);
            if self.cpu()?.saturating_sub(before) < LOOK / 5 || Instant::now() > deadline {
                return Ok(());
            }
        }
    }

    /// Processor time of everything that captures.
    fn cpu(&self) -> Result<Duration> {
        let mut sum: Duration = self.guests.iter().map(|guest| guest.cpu_time()).sum();
        for counter in &self.counters {
            if let Counter::Host(listener) = counter {
                sum += cpu_time(listener.pid())?;
            }
        }
        Ok(sum + self.daemon_cpu()?)
    }
}

impl Counter<'_> {
    fn ask(&mut self) -> Result<Told> {
        let (guest, job, answers) = match self {
            Self::Host(listener) => return listener.ask(),
            Self::Guest {
                guest,
                job,
                answers,
            } => (guest, job, answers),
        };
        let deadline = Instant::now() + LIMIT;
        let mut output = job.answer("USR1", 200)?;
        loop {
            match Told::last_in(&output) {
                Some(told) if told.answers > *answers => {
                    *answers = told.answers;
                    return Ok(told);
                }
                _ if job.is_done() || Instant::now() > deadline => {
                    let console = guest.console_tail(3);
                    return Err(format!("the counter in the guest: {output} {console}").into());
                }
                _ => sleep(Duration::from_millis(20)),
            }
            output = job.peek(200)?;
        }
    }
}

/// A moment, to count from.
pub(crate) struct Mark {
    told: Vec<Told>,
    cpu: Duration,
    daemon: Duration,
    dropped: Option<Dropped>,
}

/// Where the daemon lost packets, over all counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dropped {
    /// The kernel's receive ring was full.
    pub(super) kernel: u64,
    /// A reader's ring was full.
    pub(super) ring: u64,
}

/// What one turn brought.
pub(crate) struct Turn {
    sent_mpps: f64,
    /// Over all counters: what each should have got.
    sent: u64,
    captured: u64,
    readers: usize,
    /// From the first frame to the last, as sent or as read, whichever took longer.
    seconds: f64,
    cpu_s: f64,
    daemon_s: f64,
    /// Unknown where there is no daemon.
    dropped: Option<Dropped>,
}

impl Turn {
    /// Where the daemon lost packets, if there is one.
    pub(super) fn dropped(&self) -> Option<Dropped> {
        self.dropped
    }

    /// What all counters should have got and did not.
    pub(super) fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.captured)
    }

    /// Seconds of processor time per million packets captured.
    pub(super) fn cost(&self) -> f64 {
        self.cpu_s * 1e6 / self.captured.max(1) as f64
    }

    /// The daemon's part of it.
    pub(super) fn daemon_cost(&self) -> f64 {
        self.daemon_s * 1e6 / self.captured.max(1) as f64
    }

    /// Packets captured per microsecond, by all counters together.
    pub(crate) fn mpps(&self) -> f64 {
        self.captured as f64 / self.seconds.max(1e-9) / 1e6
    }

    /// Packets sent per microsecond.
    pub(super) fn sent_mpps(&self) -> f64 {
        self.sent_mpps
    }

    /// What all counters together could have captured: every packet, as fast as they came.
    pub(super) fn offered_mpps(&self) -> f64 {
        self.sent_mpps * self.readers as f64
    }

    /// Seconds of processor time per million packets on the wire.
    pub(super) fn cost_on_wire(&self) -> f64 {
        self.cpu_s * 1e6 * self.readers as f64 / self.sent.max(1) as f64
    }

    /// The share of the packets on the wire that was captured.
    pub(super) fn kept(&self) -> f64 {
        self.captured as f64 / self.sent.max(1) as f64
    }

    /// Percent of what all counters should have got.
    pub(super) fn lost_percent(&self) -> f64 {
        self.lost() as f64 / self.sent.max(1) as f64 * 100.0
    }

    /// Percent of the capturing CPUs' time that nothing of this way needed.
    pub(super) fn idle_percent(&self) -> f64 {
        let all = self.seconds.max(1e-9) * (sys::cpus().len().max(2) - 1) as f64;
        (100.0 * (1.0 - self.cpu_s / all)).max(0.0)
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, lost, idle) = (self.mpps(), self.lost_percent(), self.idle_percent());
        write!(f, "{rate:.3} Mpps, {lost:.2} % lost, {idle:.0} % idle")?;
        match self.dropped {
            Some(dropped) if self.lost() > 0 => write!(f, " ({})", dropped.of(self.lost())),
            _ => Ok(()),
        }
    }
}

impl Dropped {
    /// Says at which stage packets were lost.
    pub(super) fn of(self, lost: u64) -> String {
        let Self { kernel, ring } = self;
        let rest = lost.saturating_sub(kernel + ring);
        format!(
            "of {lost} lost packets {kernel} in the kernel's ring, {ring} at a reader's ring, {rest} elsewhere"
        )
    }
}

/// Longest wait for a counter's word.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest wait until a side has worked off its rings.
const SETTLED: Duration = Duration::from_secs(10);
/// How long a side must be at rest.
const LOOK: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_readers_lower_the_rate_and_the_idle_share() {
        let turn = Turn {
            sent_mpps: 1.0,
            sent: 1_000_000,
            captured: 500_000,
            readers: 1,
            seconds: 2.0,
            cpu_s: 1e9,
            daemon_s: 0.25,
            dropped: Some(Dropped {
                kernel: 100_000,
                ring: 400_000,
            }),
        };
        assert!(turn.to_string().ends_with(
            "(of 500000 lost packets 100000 in the kernel's ring, 400000 at a reader's ring, 0 elsewhere)"
        ));
        assert_eq!((turn.mpps(), turn.lost_percent()), (0.25, 50.0));
        assert_eq!((turn.idle_percent(), turn.daemon_cost()), (0.0, 0.5));
    }
}
