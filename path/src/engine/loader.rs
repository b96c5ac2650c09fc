//! The thread that makes filters for the kernel.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::{Command, Line};
use crate::source::early::{Seat, Standing};
use vnplug_filter::ebpf::Wanted;
use vnplug_os::peer_log;

/// Which frames the queues of a source must pass.
#[derive(Debug)]
pub struct Narrowing {
    /// For which filters; what was made for an older one drops nothing.
    pub generation: u64,
    /// What their filters want.
    pub wants: Vec<Wanted>,
    /// The queues.
    pub places: Vec<QueueSeat>,
    /// Where to report the result.
    pub standing: Arc<Standing>,
}

/// A queue's seat and its thread.
#[derive(Debug, Clone)]
pub struct QueueSeat {
    /// Where the kernel can drop frames before it.
    pub seat: Seat,
    /// To its thread.
    pub line: Line,
}

/// The thread, as the control thread sees it; it ends when this is dropped.
#[derive(Debug)]
pub struct Loader {
    shared: Arc<Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    state: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Pending {
    /// The latest of each source; it replaces an earlier one that was not begun.
    waiting: BTreeMap<usize, Narrowing>,
    closed: bool,
}

impl Loader {
    /// Starts the thread; `begin` is the first thing it does.
    pub fn start(begin: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Requests::default());
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("vnplug-early".into())
            .spawn(move || {
                begin();
                theirs.work();
            })?;
        Ok(Self { shared })
    }

    /// Asks for a source's filters, soon.
    pub fn ask(&self, source: usize, narrowing: Narrowing) {
        self.shared.lock().waiting.insert(source, narrowing);
        self.shared.changed.notify_one();
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
    }
}

impl Requests {
    fn work(&self) {
        let mut pause = SETTLE;
        loop {
            let mut state = self.lock();
            while state.waiting.is_empty() && !state.closed {
                let woken = self.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
            }
            drop(state);
            // Changes come in bursts; each costs the verifier's time, at most a fifth of a CPU's.
            std::thread::sleep(pause);
            let mut state = self.lock();
            if state.closed {
                return;
            }
            let Some((_, narrowing)) = state.waiting.pop_first() else {
                continue;
            };
            drop(state);
            let begun = Instant::now();
            if catch_unwind(AssertUnwindSafe(|| narrow(&narrowing))).is_err() {
                log::error!(target: "source", "making a kernel filter panicked");
                narrowing.standing.say(
                    narrowing.generation,
                    Err("off: the daemon failed to make it"),
                );
            }
            pause = SETTLE.max(begun.elapsed() * 4);
        }
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a filter for each queue and hands it over. Queues that got none pass everything.
fn narrow(narrowing: &Narrowing) {
    let generation = narrowing.generation;
    let mut failure = None;
    for place in &narrowing.places {
        if !narrowing.standing.is_at(generation) {
            // Another one is on its way.
            return;
        }
        match place.seat.load(generation as u32, &narrowing.wants) {
            Ok(loaded) => {
                let (reply, answer) = channel();
                place.line.send(Command::Narrow(Box::new(loaded), reply));
                match within_patience(&place.line, &answer) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => failure = Some(error),
                    // The source is going.
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        failure = Some("a source's thread does not answer".into())
                    }
                }
            }
            Err(error) => failure = Some(error),
        }
        if failure.is_some() {
            break;
        }
    }
    match failure {
        None => narrowing.standing.say(generation, Ok(())),
        Some(why) => {
            // Guests' filters lead here, so it may be often.
            peer_log!(log::Level::Warn, "source", "no early drop: {why}");
            let why = format!("off: {why}");
            narrowing.standing.say(generation, Err(&why));
        }
    }
}

/// The answer of a queue's thread, unless it is stalled: other sources wait, too.
fn within_patience<T>(line: &Line, answer: &Receiver<T>) -> Result<T, RecvTimeoutError> {
    loop {
        match answer.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) if line.pulse().stalled().is_none() => {}
            heard => return heard,
        }
    }
}

/// How long changes are awaited before a filter is made.
const SETTLE: Duration = Duration::from_millis(10);
/// How often it is looked whether a thread that does not answer is stalled.
const LOOK: Duration = Duration::from_millis(100);
