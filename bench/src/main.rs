//! `vnplug-bench`: ours and the peers, measured in turns on the same machine, in one table.
//!
//! ```text
//! vnplug-bench [ROW…]        rows whose names start with one of the words; all without words
//! vnplug-bench plot FILE     draws the plots of a results.json again
//! vnplug-bench publish FILE DOCUMENT WHEN   puts its tables and plots into a document
//! vnplug-bench --interface eth1   readers on a real interface; you provide the traffic (IFACE=eth1)
//!   ROWS="handoff"           the same, by environment
//!   ROUNDS=5 SECONDS=1.0     rounds of ours and the peer's in turns; seconds per measurement
//!   OUT=target/bench/results.json
//!   DISK=target/bench/disk   where recordings are written, and removed again
//! ```
//!
//! On a machine that does other work at the same time run it as `chrt -r 10 vnplug-bench`: the
//! children inherit the priority, ours and the peers alike.
//!
//! Beside the figures lie a table (`results.md`), plots (`*.svg`) and a page of them (`index.html`).
//!
//! A row is a function in a table ([`rows`]); it returns figures, [`report`] prints and stores
//! them, [`plot`] draws them. Rows run in processes of their own ([`supervise`]), and some start this
//! program again as a second process, with `child NAME ARGS…`.

mod attached;
mod capture;
mod dpdk;
mod fanout;
mod filter;
mod goal;
mod group;
mod handoff;
mod latency;
mod libpcap;
mod limit;
mod memif;
mod pcap;
mod plot;
mod publish;
mod record;
mod report;
mod row;
mod rows;
mod scale;
mod stage;
mod supervise;
mod sys;
mod uml;
mod vhost;
mod wire;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use supervise::Outcome;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.split_first() {
        Some((first, rest)) if first == "child" => rows::child(rest),
        Some((first, rest)) if first == "plot" => replot(rest),
        Some((first, rest)) if first == "publish" => publish::publish(rest),
        _ => run(words),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnplug-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Draws the plots again beside a file of figures.
fn replot(words: &[String]) -> row::Result<()> {
    let [file] = words else {
        return Err("plot FILE".into());
    };
    let file = Path::new(file);
    draw(&report::load(file)?, file)
}

/// Plots and a table beside a file of figures.
fn draw(figures: &[row::Figure], file: &Path) -> row::Result<()> {
    let table = format!("{}\n\n{}", report::machine(), report::markdown(figures));
    std::fs::write(file.with_extension("md"), table)?;
    plot::all(figures, file.parent().unwrap_or(Path::new(".")))
}

/// An error if no row begins with this word.
fn known(word: &str) -> row::Result<()> {
    if rows::all().any(|row| row.name.starts_with(word)) {
        return Ok(());
    }
    let names: Vec<&str> = rows::all().map(|row| row.name).collect();
    let names = names.join(", ");
    Err(format!("no row begins with {word:?}; there are {names}").into())
}

fn run(mut wanted: Vec<String>) -> row::Result<()> {
    let mut plan = row::Plan::from_env()?;
    if let Some(at) = wanted.iter().position(|word| word == "--interface") {
        let name = wanted
            .drain(at..(at + 2).min(wanted.len()))
            .nth(1)
            .ok_or("--interface NAME")?;
        plan.interface = Some(name);
    }
    let rows = std::env::var("ROWS").unwrap_or_default();
    wanted.extend(rows.split_whitespace().map(str::to_owned));
    wanted.iter().try_for_each(|word| known(word))?;
    // Other rows stay on wires of their own; a real interface is used only by its row, when named.
    let named = plan.interface.is_some();
    let wanted = |row: &&row::Row| {
        let begins = |word: &String| row.name.starts_with(word.as_str());
        match wanted.is_empty() {
            true => (row.name == rows::ON_INTERFACE) == named,
            false => wanted.iter().any(begins),
        }
    };
    sys::catch_signals()?;
    let (mut figures, mut failed) = (Vec::new(), Vec::new());
    let mut interrupted = false;
    for row in rows::all().filter(wanted) {
        eprintln!("# {}: {}", row.name, row.about);
        let begin = Instant::now();
        match supervise::run(row, &plan) {
            Outcome::Measured(measured) => {
                eprintln!("  took {:.0} s", begin.elapsed().as_secs_f64());
                figures.extend(measured);
            }
            Outcome::Failed(reason) => {
                eprintln!("  failed: {reason}");
                failed.push((row.name, reason));
            }
            Outcome::Interrupted(signal) => {
                failed.push((row.name, format!("interrupted by signal {signal}")));
                interrupted = true;
            }
        }
        // After every row: an end in between loses nothing.
        report::save(&figures, &failed, &plan.out)?;
        if interrupted {
            break;
        }
    }
    report::print(&figures, &failed);
    draw(&figures, &plan.out)?;
    match failed.len() {
        0 => Ok(()),
        many => Err(format!("{many} row(s) failed").into()),
    }
}
