//! The demo: two guests capture the same wire by their own NIC and by vNPlug, side by side.
//!
//! [`run`] makes the wire, boots the guests and measures; the report is a table,
//! a picture and a file for programs. Who offers, who captures, and who is compared with whom:
//!
//! ```text
//!   programs that talk, or a generator ──▶ wire ──▶ tcpdump on the host (reference)
//!                                           ├────▶ guest's own NIC ──▶ tcpdump in the guest
//!                                           └────▶ vnplugd ──ring──▶ vnplug dump|count in it
//! ```
//!
//! At the end of each guest, unmodified tcpdump prints a few packets of the wire in it.
//!
//! Only one of the guest's two ways works at a time, so neither pays for the other.

mod capture;
mod compare;
mod guests;
mod picture;
mod record;
mod recorder;
mod reference;
mod report;
mod sandbox;
mod switch;
mod talk;
mod unchanged;
mod wire;

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use picture::svg;
pub use record::record;
pub use report::{Run, Traffic, Via, beaten, sentences, table, to_json};
pub use sandbox::sandbox;
pub use switch::switch;

use self::capture::{Finding, Subject};
use self::talk::Talkers;
use self::wire::Wire;
use crate::error::Result;
use crate::lab::Lab;

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// The runs, in order.
    pub runs: Vec<Run>,
    /// What was proved beside the numbers.
    pub notes: Vec<String>,
    /// What vNPlug lost of the real traffic or miscounted, or lost where the NIC did not; empty is a
    /// success.
    pub faults: Vec<String>,
}

/// What all guests share.
#[derive(Debug)]
struct Stage {
    lab: Lab,
    wire: Wire,
    talkers: Talkers,
    start: Instant,
}

/// Runs the whole demo and tells about it on standard output.
///
/// # Errors
/// Why it could not be carried through: something is missing on the machine, or a guest or a
/// talking program failed. That vNPlug loses something is no error but a fault in the findings.
pub fn run() -> Result<Findings> {
    let start = Instant::now();
    let lab = Lab::new()?;
    let wire = Wire::new(&lab)?;
    let talkers = Talkers::start(&lab, &wire)?;
    let stage = Stage {
        lab,
        wire,
        talkers,
        start,
    };
    stage.say("a wire between two namespaces, with HTTP, DNS and bulk servers at one end");
    let mut findings = Findings::default();
    guests::uml(&stage, &mut findings)?;
    guests::qemu(&stage, &mut findings)?;
    findings.faults.extend(beaten(&findings.runs));
    Ok(findings)
}

/// What a demo was told: `--vnplug PROGRAM`, and `--out DIR` or this.
///
/// # Errors
/// An argument that is not known, or has no value.
pub fn arguments(out: &str) -> std::result::Result<(Option<PathBuf>, PathBuf), String> {
    let (mut vnplug, mut out) = (None, PathBuf::from(out));
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = PathBuf::from(args.next().ok_or(format!("{flag} needs a value"))?);
        match flag.as_str() {
            "--vnplug" => vnplug = Some(value),
            "--out" => out = value,
            _ => return Err(format!("unknown argument {flag}")),
        }
    }
    Ok((vnplug, out))
}

impl Stage {
    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    /// All loads, by one way; `run` numbers the guest's ways.
    fn measure(&self, subject: &Subject<'_>, run: u32, findings: &mut Findings) -> Result<()> {
        findings.take(self, subject.real()?);
        for (at, (pps, frames)) in (0..).zip(LADDER) {
            let number = run * LADDER.len() as u32 + at;
            findings.take(self, subject.small(pps, frames, number)?);
        }
        Ok(())
    }
}

impl Findings {
    fn take(&mut self, stage: &Stage, finding: Finding) {
        let Finding { run, note, faults } = finding;
        let what = format!(
            "{} {} via {}",
            run.guest,
            run.traffic.word(),
            run.via.word()
        );
        stage.say(&format!(
            "  {} traffic: {} packets at {}/s (asked: {}), {} captured, {:.2} % lost",
            run.traffic.word(),
            report::grouped(run.offered),
            report::grouped(run.pps().round() as u64),
            run.asked(),
            report::grouped(run.captured),
            run.lost_pct()
        ));
        if !note.is_empty() {
            println!("            {note}");
            self.notes.push(format!("{what}: {note}"));
        }
        self.faults
            .extend(faults.into_iter().map(|fault| format!("{what}: {fault}")));
        self.runs.push(run);
    }
}

/// Small frames: how many per second, or as many as can be, and how many in all. Both ways get each.
const LADDER: [(Option<u64>, u64); 4] = [
    (Some(50_000), 75_000),
    (Some(200_000), 300_000),
    (Some(500_000), 750_000),
    (None, 1_000_000),
];
/// Longest wait for anything that is not a boot or a load.
const LIMIT: Duration = Duration::from_secs(90);
