//! `vnplug-bench`: ours and the peers, measured in turns on the same machine, in one table.
//!
//! What it understands is in [`usage`]. On a machine that does other work at the same time run it as
//! `nice -n -20 vnplug-bench`: the children inherit the priority, ours and the peers alike. Not in a
//! real-time class: the kernel gives the ordinary one 50 ms of each second in which it would get nothing,
//! so a CPU that is full of real-time work is paused that long, which no buffer of ours or a peer's is
//! sized for.
//!
//! Beside the figures lie a table (`results.md`), plots (`*.svg`) and a page of them (`index.html`).
//!
//! A row is a function in a table ([`rows`]); it returns figures, [`report`] prints and stores
//! them, [`plot`] draws them. Rows run in processes of their own ([`supervise`]), and some start this
//! program again as a second process, with `child NAME ARGS…`.

mod attached;
mod backend;
mod capture;
mod context;
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
mod sandbox;
mod scale;
mod stage;
mod streams;
mod supervise;
mod switch;
mod sys;
mod twin;
mod uml;
mod uplink;
mod usage;
mod vhost;
mod wire;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use supervise::Outcome;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.split_first() {
        Some((first, _)) if first == "--help" || first == "-h" => {
            print!("{}", usage::help());
            return ExitCode::SUCCESS;
        }
        Some((first, rest)) if first == "child" => rows::child(rest),
        Some((first, rest)) if first == "plot" => replot(rest),
        Some((first, rest)) if first == "publish" => publish::publish(rest),
        _ => match usage::rows(words) {
            Ok((wanted, plan)) => run(&wanted, &plan),
            Err(error) => {
                eprintln!("vnplug-bench: {error}");
                return ExitCode::from(usage::WRONG);
            }
        },
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

fn run(wanted: &[String], plan: &row::Plan) -> row::Result<()> {
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
        match supervise::run(row, plan) {
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
