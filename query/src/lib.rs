//! vnplug-query: SQL over who spoke with whom in recordings, by embedded DataFusion.
//!
//! ```text
//! segment ── scan ── rows ──┬─ STEM.flows.parquet, beside it (closed segments) ─┐
//!            frame: who     └─ memory (the open one, and read-only directories) ─┴─ engine ── output
//! NAME.state ── losses ──────────────────────────────────────────────────────────┘
//! ```
//!
//! A program of its own, since DataFusion is larger than all the rest of vNPlug; `vnplug query` runs it.
//! It reads segments as `vnplug extract` does, with a lease, and writes nothing but the files beside
//! them, which follow from the segments and are made again whenever they do not fit. It is no server: one
//! query, one process, for reading only, with limits for memory and for what is put on the disk.

mod args;
mod beside;
mod catalog;
mod community;
mod engine;
mod failure;
mod frame;
mod leftover;
mod losses;
mod net;
mod out;
mod output;
mod rows;
mod scan;

use std::collections::HashSet;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use futures::StreamExt;

pub use self::args::Arguments;
use self::catalog::{Catalog, Prepared, Scope, prepare, unprepared};
use self::engine::{Engine, explained};
use self::failure::Failure;
use self::leftover::Leftover;
use self::output::Output;

/// Does what the command line says; what goes wrong is told on stderr.
pub fn run(arguments: &Arguments) -> ExitCode {
    if let Err(error) = leftover::watch() {
        out::note(&format!("an interrupt leaves files behind: {error}"));
    }
    if arguments.is_backwards() {
        out::note("--from is later than --to: nothing is between them");
        return ExitCode::from(USAGE);
    }
    let done = match arguments.sql() {
        Ok(Some(sql)) => answer(arguments, sql),
        Ok(None) => prepare_all(arguments),
        Err(failure) => Err(failure),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Failure(text)) if text.is_empty() => ExitCode::SUCCESS,
        Err(Failure(text)) => {
            out::note(&text);
            ExitCode::FAILURE
        }
    }
}

/// Answers a query; false if something could not be read.
fn answer(arguments: &Arguments, sql: &str) -> Result<bool, Failure> {
    let format = arguments.answer_format()?;
    let (scope, limits) = (arguments.scope(), arguments.limits());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(limits.threads)
        // DataFusion's plans are deep, and so are its stacks where nothing is inlined.
        .thread_stack_size(STACK_BYTES)
        .build()?;
    let spill = &limits.spill;
    let spill = Leftover::directory(spill).map_err(|e| Failure::about(spill.display(), e))?;
    let engine = Engine::new(sql, &limits, spill.path())?;
    let needs = engine.needs()?;
    let mut catalog = Catalog::default();
    if needs.segments {
        if !arguments.no_files {
            let unprepared = unprepared(&scope);
            if unprepared > 0 && io::stderr().is_terminal() {
                out::note(&format!(
                    "{unprepared} segments have no flows yet: reading them"
                ));
            }
            // What fails is told when it is read.
            prepare(&scope, &|_| ())?;
        }
        catalog = Catalog::load(&scope)?;
    }
    let mut losses = RecordBatch::new_empty(losses::schema());
    if needs.losses {
        let (told, problems) = losses::load(&scope)?;
        losses = told;
        catalog.problems.extend(problems);
    }
    engine.register(&scope, &catalog, losses)?;
    runtime.block_on(async {
        let mut rows = engine.answer().await?;
        let file = arguments.output.as_deref();
        let mut output = Output::open(file, format, &rows.schema(), &scope.places)?;
        while let Some(batch) = rows.next().await {
            output.write(batch.map_err(|error| explained(sql, &error))?)?;
        }
        output.finish()
    })?;
    for problem in &catalog.problems {
        out::note(problem);
    }
    Ok(catalog.problems.is_empty())
}

/// Makes the files beside segments; false if something went wrong.
fn prepare_all(arguments: &Arguments) -> Result<bool, Failure> {
    let scope: Scope = arguments.scope();
    let told = Mutex::new(HashSet::new());
    let failed = AtomicBool::new(false);
    let tell = |prepared: Prepared| {
        let wrong = match prepared {
            Prepared::Made(path, packets, damage) => {
                // Without a reader the work goes on.
                let _ = out::line(&format!("{}: made, {packets} packets", path.display()));
                damage
            }
            Prepared::Failed(why) => {
                failed.store(true, Ordering::Relaxed);
                Some(why)
            }
        };
        if let Some(why) = wrong {
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.insert(why.clone()) {
                out::note(&why);
            }
        }
    };
    loop {
        prepare(&scope, &tell)?;
        if !arguments.follow {
            let told = told.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(told.is_empty());
        }
        // What could not be written is not read again and again, beside a recorder.
        thread::sleep(match failed.swap(false, Ordering::Relaxed) {
            true => AFTER_FAILURE,
            false => FOLLOW_EVERY,
        });
    }
}

/// Exit code: wrong usage; clap's own.
const USAGE: u8 = 2;
const STACK_BYTES: usize = 8 << 20;
const FOLLOW_EVERY: Duration = Duration::from_secs(5);
const AFTER_FAILURE: Duration = Duration::from_secs(300);
