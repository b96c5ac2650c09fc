//! What was measured: a table for people, the same numbers for programs.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

/// By which way the guest captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Its own virtual NIC.
    Nic,
    /// vNPlug.
    Vnplug,
}

/// What was on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Programs talking HTTP, DNS, ICMP and bulk TCP.
    Real,
    /// Frames of 60 bytes as fast as the generator can.
    Small,
}

/// One capture of one load.
#[derive(Clone, Debug)]
pub struct Run {
    /// `uml`, `qemu-tcg` or `qemu-kvm`.
    pub guest: String,
    /// By which way.
    pub via: Via,
    /// Which load.
    pub traffic: Traffic,
    /// Packets that were on the wire.
    pub offered: u64,
    /// Packets the program in the guest got.
    pub captured: u64,
    /// How long the load took.
    pub elapsed: Duration,
    /// Processor time on the host of the guest and, with vNPlug, of the daemon.
    pub host_cpu: Duration,
}

impl Run {
    /// Packets that were on the wire and not captured.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.offered.saturating_sub(self.captured)
    }

    /// The same in per cent of the offered ones.
    #[must_use]
    pub fn lost_pct(&self) -> f64 {
        100.0 * self.lost() as f64 / self.offered.max(1) as f64
    }

    /// Offered packets per second.
    #[must_use]
    pub fn pps(&self) -> f64 {
        self.offered as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Microseconds of host processor time for each captured packet.
    #[must_use]
    pub fn cpu_us_per_packet(&self) -> f64 {
        self.host_cpu.as_secs_f64() * 1e6 / self.captured.max(1) as f64
    }

    fn to_json(&self) -> Value {
        json!({
            "guest": self.guest, "via": self.via.word(), "traffic": self.traffic.word(),
            "offered": self.offered, "captured": self.captured, "lost": self.lost(),
            "lost_pct": round(self.lost_pct(), 4), "pps": self.pps().round(),
            "host_cpu_s": round(self.host_cpu.as_secs_f64(), 2),
        })
    }
}

impl Via {
    /// `nic` or `vnplug`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Nic => "nic",
            Self::Vnplug => "vnplug",
        }
    }
}

impl Traffic {
    /// `real` or `small`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Small => "small",
        }
    }
}

/// The file for programs.
#[must_use]
pub fn to_json(runs: &[Run], notes: &[String]) -> Value {
    let runs: Vec<Value> = runs.iter().map(Run::to_json).collect();
    json!({ "runs": runs, "notes": notes })
}

/// The table for people.
#[must_use]
pub fn table(runs: &[Run]) -> String {
    let mut text = format!(
        "{:<9} {:<8} {:<8} {:>10} {:>10} {:>10} {:>8} {:>11} {:>7} {:>11}\n",
        "guest",
        "traffic",
        "via",
        "offered",
        "captured",
        "lost",
        "lost %",
        "packets/s",
        "CPU s",
        "CPU µs/pkt"
    );
    for run in pairs(runs).into_iter().flat_map(|(nic, ours)| [nic, ours]) {
        if run.via == Via::Nic {
            text.push('\n');
        }
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<9} {:<8} {:<8} {:>10} {:>10} {:>10} {:>8.2} {:>11} {:>7.2} {:>11.2}",
            run.guest,
            run.traffic.word(),
            run.via.word(),
            grouped(run.offered),
            grouped(run.captured),
            grouped(run.lost()),
            run.lost_pct(),
            grouped(run.pps().round() as u64),
            run.host_cpu.as_secs_f64(),
            run.cpu_us_per_packet(),
        );
    }
    text
}

/// Both ways of every guest and load that has them, in order of the runs.
pub(super) fn pairs(runs: &[Run]) -> Vec<(&Run, &Run)> {
    let other = |nic: &Run| {
        runs.iter().find(|run| {
            run.via == Via::Vnplug && run.guest == nic.guest && run.traffic == nic.traffic
        })
    };
    let nics = runs.iter().filter(|run| run.via == Via::Nic);
    nics.filter_map(|nic| Some((nic, other(nic)?))).collect()
}

/// One sentence for each guest: where its own NIC loses most.
#[must_use]
pub fn sentences(runs: &[Run]) -> Vec<String> {
    let pairs = pairs(runs).into_iter();
    let small = pairs.filter(|(nic, _)| nic.traffic == Traffic::Small);
    small
        .map(|(nic, ours)| {
            let (theirs, us) = (nic.cpu_us_per_packet(), ours.cpu_us_per_packet());
            format!(
                "{}: of {} small frames its own NIC lost {:.1} %, vNPlug {} ({:.2} %); a captured \
                 frame cost the host {theirs:.2} µs of CPU by the NIC and {us:.2} µs by vNPlug \
                 ({:.1} times less), all frames {:.2} s and {:.2} s.",
                nic.guest,
                grouped(nic.offered),
                nic.lost_pct(),
                grouped(ours.lost()),
                ours.lost_pct(),
                theirs / us.max(1e-9),
                nic.host_cpu.as_secs_f64(),
                ours.host_cpu.as_secs_f64(),
            )
        })
        .collect()
}

/// `1234567` as `1,234,567`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn round(number: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (number * factor).round() / factor
}
