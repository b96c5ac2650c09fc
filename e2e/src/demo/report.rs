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
    /// Frames of 60 bytes at a rate, or as fast as the generator can.
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
    /// Frames per second that were asked of the generator; `None`: as fast as it can.
    pub asked_pps: Option<u64>,
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

    /// Packets per second that were really on the wire.
    #[must_use]
    pub fn pps(&self) -> f64 {
        self.offered as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Microseconds of host processor time for each captured packet.
    #[must_use]
    pub fn cpu_us_per_packet(&self) -> f64 {
        self.host_cpu.as_secs_f64() * 1e6 / self.captured.max(1) as f64
    }

    /// Whether the generator stayed behind what was asked of it.
    #[must_use]
    pub fn fell_short(&self) -> bool {
        self.asked_pps
            .is_some_and(|asked| self.pps() < asked as f64 * 0.97)
    }

    /// The rate that was asked, for a person.
    pub(super) fn asked(&self) -> String {
        match (self.traffic, self.asked_pps) {
            (Traffic::Real, _) => "as it comes".to_owned(),
            (Traffic::Small, None) => "all it can".to_owned(),
            (Traffic::Small, Some(pps)) => grouped(pps),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "guest": self.guest, "via": self.via.word(), "traffic": self.traffic.word(),
            "offered": self.offered, "captured": self.captured, "lost": self.lost(),
            "lost_pct": round(self.lost_pct(), 4), "asked_pps": self.asked_pps,
            "pps": self.pps().round(), "fell_short": self.fell_short(),
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
        "{:<9} {:<8} {:>11} {:<8} {:>11} {:>10} {:>10} {:>8} {:>7} {:>11}\n",
        "guest",
        "traffic",
        "asked /s",
        "via",
        "on wire /s",
        "offered",
        "lost",
        "lost %",
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
            "{:<9} {:<8} {:>11} {:<8} {:>10}{} {:>10} {:>10} {:>8.2} {:>7.2} {:>11.2}",
            run.guest,
            run.traffic.word(),
            run.asked(),
            run.via.word(),
            grouped(run.pps().round() as u64),
            if run.fell_short() { '*' } else { ' ' },
            grouped(run.offered),
            grouped(run.lost()),
            run.lost_pct(),
            run.host_cpu.as_secs_f64(),
            run.cpu_us_per_packet(),
        );
    }
    if runs.iter().any(Run::fell_short) {
        text += "\n* less than was asked: the generator shares the machine's processors with what captures\n";
    }
    text
}

/// Both ways of every guest and load that has them, in order of the runs.
pub(super) fn pairs(runs: &[Run]) -> Vec<(&Run, &Run)> {
    let load = |run: &Run| (run.guest.clone(), run.traffic, run.asked_pps);
    let other = |nic: &Run| {
        let mut runs = runs.iter();
        runs.find(|run| run.via == Via::Vnplug && load(run) == load(nic))
    };
    let nics = runs.iter().filter(|run| run.via == Via::Nic);
    nics.filter_map(|nic| Some((nic, other(nic)?))).collect()
}

/// The guests, in order of the runs.
pub(super) fn guests(runs: &[Run]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for run in runs {
        if !names.contains(&run.guest.as_str()) {
            names.push(&run.guest);
        }
    }
    names
}

/// The loads of small frames of a guest by one way, the slowest first.
pub(super) fn ladder<'r>(runs: &'r [Run], guest: &str, via: Via) -> Vec<&'r Run> {
    let mut ladder: Vec<&Run> = runs
        .iter()
        .filter(|run| run.guest == guest && run.via == via && run.traffic == Traffic::Small)
        .collect();
    ladder.sort_by(|a, b| a.pps().total_cmp(&b.pps()));
    ladder
}

/// The highest rate in packets per second that was on the wire and captured whole; all slower ones were,
/// too. `None`: some were lost of the slowest.
pub(super) fn lossless(ladder: &[&Run]) -> Option<f64> {
    let whole = ladder.iter().take_while(|run| run.lost() == 0);
    whole.last().map(|run| run.pps())
}

/// One sentence for each guest: up to which rate each way loses nothing.
#[must_use]
pub fn sentences(runs: &[Run]) -> Vec<String> {
    let told = |guest: &str, via| match lossless(&ladder(runs, guest, via)) {
        Some(pps) => format!("nothing up to {} frames/s", grouped(pps.round() as u64)),
        None => "some at every rate".to_owned(),
    };
    let sentence = |guest| {
        format!(
            "{guest}: of 60-byte frames its own NIC lost {}, vNPlug {}.",
            told(guest, Via::Nic),
            told(guest, Via::Vnplug)
        )
    };
    guests(runs).into_iter().map(sentence).collect()
}

/// What makes the comparison a bad one for vNPlug: it loses at a rate at which the guest's own NIC loses
/// nothing.
#[must_use]
pub fn beaten(runs: &[Run]) -> Vec<String> {
    let beaten = |guest: &&str| {
        let nic = lossless(&ladder(runs, guest, Via::Nic)).unwrap_or(0.0);
        let ours = ladder(runs, guest, Via::Vnplug);
        ours.iter().any(|run| run.lost() > 0 && run.pps() <= nic)
    };
    let guests = guests(runs).into_iter().filter(beaten);
    guests
        .map(|guest| format!("{guest}: vNPlug loses at a rate at which the NIC does not"))
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
