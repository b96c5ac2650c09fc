//! Filters as machine code, made in the background; the interpreter until it is ready.
//!
//! ```text
//!  compile thread                    vnplug-jit (low priority)                 queue's thread
//!  Program --submit--> Queue -----> Translator --> pages, executable --.
//!     |               by owner       (Cranelift)                       | set once
//!     `-- Slot <-------------------------------------------------------'---> Program::run
//! ```
//!
//! - [`translate`], [`emit`]: a verified program that does not loop becomes one function.
//! - [`code`]: functions lie together in pages that are executable and never writable again; the
//!   pages go with the last program in them.
//! - [`workshop`]: equal programs share one function; limits; a panic costs one program its speed.
//!
//! A program that is not translated gives the same verdicts, only slower, so nothing here is an
//! error for a reader. Programs stay interpreted on other processors than x86-64, where
//! executable memory is forbidden, beyond the bytes that the operator allows, and if they loop
//! (`protochain`), because their steps are metered.
//!
//! Translating takes 0.1 to 1 ms for what people write. The time grows linearly with the length:
//! the hardest of the longest programs (4,096 instructions) take 0.2 s, so that is the most by
//! which one owner can delay another's program in each turn.

mod budget;
mod code;
mod emit;
mod queue;
mod reach;
mod translate;
mod workshop;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::Program;
use budget::Gauge;
use code::Native;
use queue::{Job, TERMS, Wanted};
use translate::Translator;
use vnplug_os::fair::Fair;
use workshop::Workshop;

/// Where a program's native code appears.
#[derive(Debug, Default)]
pub(super) struct NativeSlot {
    /// It was handed in.
    asked: AtomicBool,
    native: OnceLock<Native>,
}

impl NativeSlot {
    /// The native code, once it is there.
    #[inline(always)]
    pub(super) fn get(&self) -> Option<&Native> {
        self.native.get()
    }
}

/// Hands programs to the thread that translates them; clones hand them to the same one.
#[derive(Debug, Clone, Default)]
pub struct Jit(Option<Arc<Handle>>);

#[derive(Debug)]
struct Handle(Arc<Backlog>);

#[derive(Debug)]
struct Backlog {
    queue: Fair<String, Job>,
    counters: Arc<Counters>,
}

/// The fates of programs.
#[derive(Debug, Default)]
struct Counters {
    /// Programs that run natively now.
    programs: Gauge,
    /// Bytes of their pages.
    bytes: Gauge,
    /// Over a limit.
    refused: AtomicU64,
    /// The translator or the system failed.
    failed: AtomicU64,
}

impl Jit {
    /// One that translates nothing: every program is interpreted.
    pub fn off() -> Self {
        Self::default()
    }

    /// Starts the thread; all native code together may take `limit_bytes`, one owner's a fourth.
    ///
    /// If this processor or the system cannot use it, this says so in the log and is
    /// [`off`](Self::off).
    pub fn start(limit_bytes: u64) -> Self {
        let shared = Arc::new(Backlog {
            queue: Fair::new(TERMS),
            counters: Arc::default(),
        });
        let theirs = Arc::clone(&shared);
        let started = Translator::new().and_then(|translator| {
            let counters = Arc::clone(&shared.counters);
            let workshop = Workshop::new(translator, counters, limit_bytes);
            std::thread::Builder::new()
                .name("vnplug-jit".into())
                .stack_size(STACK_BYTES)
                .spawn(move || work(&theirs, workshop))
                .map_err(|error| error.to_string())
        });
        match started {
            Ok(_) => Self(Some(Arc::new(Handle(shared)))),
            Err(why) => {
                log::info!(target: "filter", "filters are interpreted: {why}");
                Self::off()
            }
        }
    }

    /// Queues a program for translation in its owner's turn; does not wait.
    pub fn submit(&self, owner: &str, program: &Program) {
        let Some(Handle(shared)) = self.0.as_deref() else {
            return;
        };
        let (instructions, slot) = program.parts();
        if program.loops() || instructions.len() < 2 {
            return;
        }
        // Relaxed: it only keeps us from doing things twice.
        if slot.asked.swap(true, Ordering::Relaxed) {
            return;
        }
        let job = Job::new(instructions, slot);
        if !shared.queue.add(owner.to_owned(), job) {
            slot.asked.store(false, Ordering::Relaxed);
            shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Names and values for people, none if it is off.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Some(Handle(shared)) = self.0.as_deref() else {
            return Vec::new();
        };
        let counters = &shared.counters;
        let waiting = shared.queue.len() as u64;
        [
            ("native_filters", counters.programs.now()),
            ("native_bytes", counters.bytes.now()),
            ("native_waiting", waiting),
            ("native_refused", counters.refused.load(Ordering::Relaxed)),
            ("native_failed", counters.failed.load(Ordering::Relaxed)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.queue.close();
    }
}

fn work(shared: &Backlog, mut workshop: Workshop) {
    if let Err(error) = rustix::process::setpriority_process(None, LOW_PRIORITY) {
        log::debug!(target: "filter", "vnplug-jit keeps its priority: {error}");
    }
    while let Some(first) = next(shared, None) {
        // A function is small and a page is not: what comes within a moment shares pages.
        let begun = Instant::now();
        translate(shared, &mut workshop, first);
        while workshop.batch_bytes() < BATCH_BYTES && begun.elapsed() < LONGEST_BATCH {
            let Some(more) = next(shared, Some(begun + GATHER)) else {
                break;
            };
            translate(shared, &mut workshop, more);
        }
        workshop.place();
    }
}

fn translate(shared: &Backlog, workshop: &mut Workshop, wanted: Wanted) {
    let (owner, begun) = (wanted.owner.clone(), processor_time());
    workshop.translate(wanted);
    let took = processor_time().saturating_sub(begun);
    shared.queue.charge(owner, took);
}

/// What this thread has used; on a busy machine, less than has passed.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap_or_default()
}

/// Waits for the next program, until `deadline` if there is one; `None` also when it is to end.
fn next(shared: &Backlog, deadline: Option<Instant>) -> Option<Wanted> {
    loop {
        let (owner, job) = shared.queue.next(deadline)?;
        // It may have gone just now.
        if let Some(wanted) = job.wanted(owner) {
            return Some(wanted);
        }
    }
}

/// Native code of all filters when the operator does not say.
pub const DEFAULT_LIMIT_BYTES: u64 = 32 << 20;

/// How long a program waits for others, to share pages with them.
const GATHER: Duration = Duration::from_millis(20);

/// The longest that a program waits while others keep coming.
const LONGEST_BATCH: Duration = Duration::from_millis(200);

/// Bytes of code that are placed without waiting for more.
const BATCH_BYTES: usize = 128 << 10;

/// Cranelift recurses; address space only.
const STACK_BYTES: usize = 16 << 20;

/// Niceness: after the threads of queues, but not starved, as native filters make those faster.
const LOW_PRIORITY: i32 = 10;

/// Gives programs native code at once, as the thread would in time: for tests that compare verdicts.
/// Those that loop stay interpreted, and all do where there is no translator.
pub fn translate_now(programs: &[Program]) {
    let Ok(translator) = Translator::new() else {
        return;
    };
    let mut workshop = Workshop::new(translator, Arc::default(), u64::MAX);
    for program in programs.iter().filter(|program| !program.loops()) {
        let (instructions, slot) = program.parts();
        workshop.translate(Wanted {
            owner: String::new(),
            instructions: Arc::clone(instructions),
            slot: Arc::clone(slot),
        });
    }
    workshop.place();
}

#[cfg(test)]
mod tests;
