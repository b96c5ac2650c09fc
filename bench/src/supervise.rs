//! Each row in a process of its own.
//!
//! What a row starts (daemons, guests, DPDK, namespaces) must not outlive it, however it ends: by an
//! error, a panic, its time limit, SIGINT or SIGTERM. So a row runs in a child with a process group
//! of its own. The parent waits, kills the group when it must, and sweeps what the dead owned; guests
//! and daemons are tethered to the row's process and die with it ([`vnplug_e2e`]).

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use vnplug_e2e::Lab;

use crate::capture::INTERFACE;
use crate::report;
use crate::row::{Figure, Plan, Result, Row};
use crate::rows;
use crate::sys;

/// How a row ended.
pub(crate) enum Outcome {
    /// With these figures.
    Measured(Vec<Figure>),
    /// Without, for this reason.
    Failed(String),
    /// By this signal, which also ends the bench.
    Interrupted(i32),
}

/// Runs a row in a process of its own.
pub(crate) fn run(row: &Row, plan: &Plan) -> Outcome {
    match attempt(row, plan) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn attempt(row: &Row, plan: &Plan) -> Result<Outcome> {
    let part = plan.out.with_extension(format!("{}.part", row.name));
    if let Some(folder) = part.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["child", "row", row.name]).arg(&part);
    if let Some(interface) = &plan.interface {
        command.env(INTERFACE, interface);
    }
    let mut group = Group(command.process_group(0).spawn()?);
    let begin = Instant::now();
    let end = loop {
        if let Some(status) = group.0.try_wait()? {
            break Ok(status);
        }
        if let Some(signal) = sys::caught() {
            break Err(Outcome::Interrupted(signal));
        }
        if begin.elapsed() > LIMIT {
            let text = format!("took longer than {} s", LIMIT.as_secs());
            break Err(Outcome::Failed(text));
        }
        sleep(Duration::from_millis(20));
    };
    drop(group);
    let written = read(&part);
    // It may never have been made.
    let _ = fs::remove_file(&part);
    match (end, written) {
        (Ok(_), Ok(outcome)) => Ok(outcome),
        (Ok(status), Err(_)) => {
            sweep(plan);
            Ok(Outcome::Failed(format!(
                "its process ended without a result: {status}"
            )))
        }
        (Err(outcome), _) => {
            sweep(plan);
            Ok(outcome)
        }
    }
}

/// The row's process: measures and writes the figures, or why there are none.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let [name, part] = words else {
        return Err("ROW FILE".into());
    };
    let row = rows::all()
        .find(|row| row.name == name)
        .ok_or("no such row")?;
    let result = match (row.run)(&Plan::from_env()?) {
        Ok(figures) => json!({ "figures": figures.iter().map(report::whole).collect::<Vec<_>>() }),
        Err(error) => json!({ "failed": error.to_string() }),
    };
    Ok(fs::write(part, serde_json::to_vec(&result)?)?)
}

fn read(part: &Path) -> Result<Outcome> {
    let value: Value = serde_json::from_slice(&fs::read(part)?)?;
    if let Some(reason) = value["failed"].as_str() {
        return Ok(Outcome::Failed(reason.to_owned()));
    }
    let figures = value["figures"].as_array().ok_or("no figures")?;
    let figures: Option<Vec<Figure>> = figures.iter().map(report::parse).collect();
    Ok(Outcome::Measured(figures.ok_or("not a figure")?))
}

/// A row's process and what it started without a tether of its own.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        // Errors mean that nobody is left.
        if let Some(group) = Pid::from_raw(self.0.id().cast_signed()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

/// Removes directories and namespaces of rows that did not come to do it themselves.
fn sweep(plan: &Plan) {
    // The guests' watchdogs come first.
    sleep(Duration::from_secs(1));
    let recordings = match plan.disk.is_dir() {
        true => Lab::within(&plan.disk).map(drop),
        false => Ok(()),
    };
    if let Err(error) = Lab::new().map(drop).and(recordings) {
        eprintln!("vnplug-bench: cannot sweep: {error}");
    }
}

/// Longest time for one row.
const LIMIT: Duration = Duration::from_secs(1800);
