//! The thread that makes filters for the kernel, and seats for them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::{Command, Line};
use crate::source::early::{Seat, SeatOffice, Standing};
use vnplug_filter::ebpf::{SocketShape, Wanted};
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
    /// Seats that somebody waits for.
    seats: VecDeque<(SocketShape, Sender<io::Result<Seat>>)>,
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

    /// From now on seats of this office are made by this thread, at once unless it has a filter verified.
    pub fn staff(&self, office: &SeatOffice) {
        let shared = Arc::clone(&self.shared);
        office.move_to(move |shape| {
            let (tell, made) = channel();
            shared.lock().seats.push_back((shape, tell));
            shared.changed.notify_one();
            made.recv_timeout(PATIENCE).map_err(|_| {
                let what = "the thread that may do it does not answer";
                io::Error::new(io::ErrorKind::TimedOut, what)
            })?
        });
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
        // Changes come in bursts; each costs the verifier's time, at most a fifth of a CPU's.
        while let Some(narrowing) = self.next(pause) {
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

    /// What is to be made next, so long after it is known that there is something; `None`: the thread is to end. Makes seats
    /// meanwhile.
    fn next(&self, pause: Duration) -> Option<Narrowing> {
        let mut state = self.lock();
        let mut due = None;
        loop {
            if state.closed {
                return None;
            }
            if let Some((shape, tell)) = state.seats.pop_front() {
                drop(state);
                // Who asked may wait no longer.
                let _ = tell.send(Seat::socket(shape));
                state = self.lock();
                continue;
            }
            if state.waiting.is_empty() {
                let woken = self.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let now = Instant::now();
            let due = *due.get_or_insert(now + pause);
            if now >= due {
                return state.waiting.pop_first().map(|(_, narrowing)| narrowing);
            }
            let woken = self.changed.wait_timeout(state, due - now);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
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
/// How long a seat is waited for: filters may be verified before it, and a queue's thread be stalled.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether a thread that does not answer is stalled.
const LOOK: Duration = Duration::from_millis(100);
