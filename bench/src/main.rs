//! `vnplug-bench`: ours and the peers, measured in turns on the same machine, in one table.
//!
//! ```text
//! vnplug-bench [ROW…]        rows whose names start with one of the words; all without words
//!   ROWS="handoff"           the same, by environment
//!   ROUNDS=5 SECONDS=2.0     rounds of ours and the peer's in turns; seconds per measurement
//!   OUT=target/bench/results.json
//! ```
//!
//! On a machine that does other work at the same time run it as `chrt -r 10 vnplug-bench`: the
//! children inherit the priority, ours and the peers alike.
//!
//! A row is a function in a table ([`row::ROWS`]); it returns figures, [`report`] prints and stores
//! them. Some rows start this program again as a second process, with `child NAME ARGS…`.

mod attached;
mod capture;
mod fanout;
mod handoff;
mod memif;
mod pcap;
mod report;
mod row;
mod sys;
mod uml;
mod wire;

use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.split_first() {
        Some((first, rest)) if first == "child" => row::child(rest),
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

fn run(mut wanted: Vec<String>) -> row::Result<()> {
    let rows = std::env::var("ROWS").unwrap_or_default();
    wanted.extend(rows.split_whitespace().map(str::to_owned));
    let plan = row::Plan::from_env()?;
    let mut figures = Vec::new();
    let mut failed = Vec::new();
    for row in row::ROWS {
        if wanted.is_empty()
            || wanted
                .iter()
                .any(|word| row.name.starts_with(word.as_str()))
        {
            eprintln!("# {}: {}", row.name, row.about);
            match (row.run)(&plan) {
                Ok(measured) => figures.extend(measured),
                Err(error) => failed.push(format!("{}: {error}", row.name)),
            }
        }
    }
    report::print(&figures);
    report::save(&figures, &plan.out)?;
    if failed.is_empty() {
        Ok(())
    } else {
        Err(failed.join("; ").into())
    }
}
