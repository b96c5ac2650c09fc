//! One capture in a guest: by its own NIC with tcpdump, or by vNPlug.

use std::thread;
use std::time::{Duration, Instant};

use vnplug_ring::control::Counted;

use super::LIMIT;
use super::compare::{self, Comparison};
use super::reference::Reference;
use super::report::{Run, Traffic, Via, grouped};
use super::talk::Talkers;
use super::wire::{Wire, until};
use crate::attached::summary;
use crate::channel::Job;
use crate::daemon::{self, Daemon, value};
use crate::error::{LabError, Result};
use crate::guest::Guest;

/// A guest that captures by one way.
pub(super) struct Subject<'a> {
    pub(super) wire: &'a Wire,
    pub(super) talkers: &'a Talkers,
    pub(super) guest: &'a Guest,
    /// `uml`, `qemu-tcg` or `qemu-kvm`.
    pub(super) name: &'a str,
    pub(super) way: Way<'a>,
}

/// By which way, and what belongs to it.
#[derive(Clone, Copy)]
pub(super) enum Way<'a> {
    /// This interface of the guest.
    Nic(&'a str),
    /// The daemon's source `wire`.
    Vnplug(&'a Daemon),
}

/// A run, what else is to be said about it, and what is wrong with it.
pub(super) struct Finding {
    pub(super) run: Run,
    pub(super) note: String,
    pub(super) faults: Vec<String>,
}

impl Subject<'_> {
    /// Lets programs talk and compares the guest's packets with those tcpdump saw on the host.
    pub(super) fn real(&self) -> Result<Finding> {
        self.wire.far_end(true)?;
        let file = self.guest.dir().join("host.pcap");
        let reference = Reference::start(self.wire, &file)?;
        let watch = self.watch(Traffic::Real)?;
        let elapsed = self.talkers.converse()?;
        let (_, cpu, counters) = watch.end()?;
        reference.end()?;
        let host = compare::read(&file)?;
        let offered = host.len() as u64;
        let copy = self.guest.dir().join("guest.pcap");
        self.guest.pull(REAL_FILE, &copy, LIMIT)?;
        let guest = compare::read(&copy)?;
        let mut finding = self.finding(Traffic::Real, offered, elapsed, cpu);
        match self.way {
            Way::Nic(_) => {
                finding.run.captured = compare::on_the_wire(&guest);
                if finding.run.captured != guest.len() as u64 {
                    finding.note = format!(
                        "tcpdump in the guest got {}, partly merged by the guest's NIC (GRO); they \
                         count as what they were merged of",
                        grouped(guest.len() as u64)
                    );
                }
            }
            Way::Vnplug(_) => {
                let result = Comparison::of(&host, &guest);
                finding.run.captured = guest.len() as u64;
                finding.note = format!(
                    "{} of {} packets identical byte for byte to tcpdump's on the host, {} \
                     missing, {} extra, {} in another order; time stamps at most {:.1} µs apart",
                    grouped(result.identical),
                    grouped(offered),
                    result.missing,
                    result.extra,
                    result.moved,
                    result.apart_ns as f64 / 1000.0
                );
                if !result.is_complete() {
                    finding.faults.push(finding.note.clone());
                }
                finding.account(&counters);
            }
        }
        Ok(finding)
    }

    /// Sends `count` small frames of run `run` at a rate and sees how many the guest gets.
    pub(super) fn small(&self, pps: Option<u64>, count: u64, run: u32) -> Result<Finding> {
        self.wire.far_end(false)?;
        let watch = self.watch(Traffic::Small)?;
        let passed = self.wire.send(pps, count, run)?;
        let (output, cpu, counters) = watch.end()?;
        let mut finding = self.finding(Traffic::Small, passed.frames, passed.elapsed, cpu);
        finding.run.asked_pps = pps;
        if passed.frames != count {
            let (frames, sent) = (grouped(passed.frames), grouped(count));
            finding.note =
                format!("{frames} of {sent} frames reached the host's end of the wire; ");
        }
        match self.way {
            Way::Nic(_) => finding.run.captured = captured_by_tcpdump(&output)?,
            Way::Vnplug(_) => {
                let summary = summary(&output)?;
                let bad = || LabError::Protocol(format!("vnplug count said {summary}"));
                finding.run.captured = summary["packets"].as_u64().ok_or_else(bad)?;
                let witness = &summary["witness"];
                finding.note += &format!(
                    "the frames' numbers and checksums prove {} received, {} missing, {} twice, \
                     {} out of order, {} damaged",
                    witness["received"],
                    witness["missing"],
                    witness["duplicates"],
                    witness["reordered"],
                    witness["corrupt"]
                );
                let wrong = ["duplicates", "reordered", "corrupt"];
                if wrong.iter().any(|what| witness[what] != 0) {
                    finding.faults.push(finding.note.clone());
                }
                finding.account(&counters);
            }
        }
        Ok(finding)
    }

    fn finding(&self, traffic: Traffic, offered: u64, elapsed: Duration, cpu: Duration) -> Finding {
        let via = match self.way {
            Way::Nic(_) => Via::Nic,
            Way::Vnplug(_) => Via::Vnplug,
        };
        let run = Run {
            guest: self.name.to_owned(),
            via,
            traffic,
            asked_pps: None,
            offered,
            captured: 0,
            elapsed,
            host_cpu: cpu,
        };
        Finding {
            run,
            note: String::new(),
            faults: Vec::new(),
        }
    }

    /// Starts the capturing program and waits until it listens.
    fn watch(&self, traffic: Traffic) -> Result<Watch<'_>> {
        let command = match (self.way, traffic) {
            (Way::Nic(interface), Traffic::Real) => tcpdump(interface, REAL_FILE),
            // Nothing is written: only capturing is compared.
            (Way::Nic(interface), Traffic::Small) => tcpdump(interface, "/dev/null"),
            (Way::Vnplug(_), Traffic::Real) => {
                format!("exec vnplug dump host:wire --ring {RING} -w {REAL_FILE}")
            }
            (Way::Vnplug(_), Traffic::Small) => {
                format!("exec vnplug count host:wire --ring {RING} --witness --json")
            }
        };
        let before = self.counters();
        let job = self.guest.spawn(&command)?;
        until("the capture in the guest begins", || {
            if job.is_done() {
                let output = job.wait(LIMIT)?.text();
                return Err(LabError::Command {
                    command: command.clone(),
                    text: output,
                });
            }
            match self.way {
                Way::Nic(_) => Ok(job.peek(2000)?.contains("listening on")),
                Way::Vnplug(_) => Ok(self.counters().iter().any(|entry| entry.kind == "port")),
            }
        })?;
        Ok(Watch {
            subject: self,
            job,
            before,
            cpu: self.cpu(),
        })
    }

    fn counters(&self) -> Vec<Counted> {
        match self.way {
            Way::Nic(_) => Vec::new(),
            Way::Vnplug(daemon) => daemon.counters(),
        }
    }

    /// Processor time so far of everything that captures, on the host.
    fn cpu(&self) -> Duration {
        let daemon = match self.way {
            Way::Nic(_) => Duration::ZERO,
            Way::Vnplug(daemon) => daemon.cpu_time(),
        };
        self.guest.cpu_time() + daemon
    }
}

/// A capture that runs.
struct Watch<'a> {
    subject: &'a Subject<'a>,
    job: Job,
    before: Vec<Counted>,
    cpu: Duration,
}

impl Watch<'_> {
    /// Lets the guest finish what waits for it, ends the capture; gives what it printed, the
    /// processor time, and the daemon's counters before and after.
    fn end(self) -> Result<(String, Duration, [Vec<Counted>; 2])> {
        self.settle();
        let cpu = self.subject.cpu() - self.cpu;
        let after = self.subject.counters();
        self.job.signal("INT")?;
        let output = self.job.wait(LIMIT)?;
        Ok((output.text(), cpu, [self.before, after]))
    }

    /// Waits until those who capture are idle, a second long.
    fn settle(&self) {
        let deadline = Instant::now() + LIMIT;
        let mut quiet = 0;
        while quiet < 4 && Instant::now() < deadline {
            let before = self.subject.cpu();
            thread::sleep(Duration::from_millis(250));
            let busy = self.subject.cpu() - before;
            quiet = if busy <= Duration::from_millis(20) {
                quiet + 1
            } else {
                0
            };
        }
    }
}

impl Finding {
    /// Says where packets were lost, and checks that every packet is accounted for.
    fn account(&mut self, [before, after]: &[Vec<Counted>; 2]) {
        let source = |counters: &[Counted], name| {
            let source = counters.iter().find(|entry| entry.kind == "source");
            source.map_or(0, |source| value(source, name))
        };
        let during = |name| source(after, name) - source(before, name);
        let port = |name| {
            let port = after.iter().find(|entry| entry.kind == "port");
            port.map_or(0, |port| value(port, name))
        };
        let (offered, captured) = (self.run.offered, self.run.captured);
        let places = [
            (
                "before the daemon's socket",
                offered.abs_diff(during("seen")),
            ),
            (
                "by the host's kernel (socket full)",
                during("kernel_dropped"),
            ),
            ("at the ring (full)", port("dropped_full")),
            ("unread in the ring", port("delivered").abs_diff(captured)),
        ];
        for (place, lost) in places.into_iter().filter(|(_, lost)| *lost > 0) {
            let text = format!("{} lost {place}", grouped(lost));
            match self.run.traffic {
                Traffic::Real => self.faults.push(text),
                // A rate at which it loses is a finding.
                Traffic::Small => self.note += &format!("; {text}"),
            }
        }
        if let Err(text) = daemon::closes(after) {
            self.faults.push(text);
        }
        let accounted = captured + places.iter().map(|(_, lost)| lost).sum::<u64>();
        if accounted != offered {
            let text = format!("accounts do not close: {offered} offered, {accounted} accounted");
            self.faults.push(text);
        }
    }
}

fn tcpdump(interface: &str, file: &str) -> String {
    format!("exec tcpdump -n -Z root -i {interface} -s 0 -B 32768 -w {file}")
}

fn captured_by_tcpdump(output: &str) -> Result<u64> {
    let line = output.lines().find_map(|line| {
        let words = line.strip_suffix(" packets captured");
        words.or_else(|| line.strip_suffix(" packet captured"))
    });
    let number = line.and_then(|words| words.trim().parse().ok());
    number.ok_or_else(|| LabError::Protocol(format!("tcpdump in the guest said {output:?}")))
}

/// Where real traffic goes in the guest.
const REAL_FILE: &str = "/tmp/real.pcap";
/// Size of the ring: what a slow guest may be behind.
const RING: &str = "128M";
