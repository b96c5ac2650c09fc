//! The thread that sees other threads hang, and that ends the daemon when it is told to.
//!
//! | sees | does |
//! |---|---|
//! | a queue's thread that is in the middle of a turn, or has a command, and did not move at [`STALLED`] looks in a row | says so once, and that it goes on when it does; the control thread waits for it no more |
//! | the control thread in the same state | says so, too |
//! | that none of them is stalled | tells the service manager's watchdog, which ends a daemon that hangs for good |
//! | SIGTERM or SIGINT | tells the control thread, which ends in order |
//! | that this took longer than [`ENDING`] | says which threads are left, does what must be done, and ends the process |
//!
//! It waits for nobody: it sleeps, reads words that others write, and logs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use vnplug_os::service::Manager;
use vnplug_os::{event, signals};
use vnplug_path::engine::{Line, Pulse};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(250);
/// A thread that has not moved at this many looks is stalled. Looks and not time: when the whole process
/// was stopped, nobody hung.
const STALLED: u32 = 4;
/// How long the daemon may take to end in order.
const ENDING: Duration = Duration::from_millis(1_500);
/// The exit status of a daemon some thread of which did not end.
const LEFT_BEHIND: i32 = 70;

/// A thread that is watched.
struct Watched {
    thread: Thread,
    turns: u64,
    /// Looks at which it had not moved, though it should have.
    looks: u32,
    stalled_since: Option<Instant>,
}

/// Which thread it is.
enum Thread {
    Queue(Line),
    Control(Arc<Pulse>),
}

/// The threads that are watched.
#[derive(Clone, Default)]
pub(crate) struct Watch(Arc<Mutex<Vec<Watched>>>);

impl Watch {
    /// Starts the thread. Returns a descriptor that becomes readable when the daemon is to end. `control` is
    /// the control thread's pulse. `last` is done before the process ends without its threads.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start(
        &self,
        termination: OwnedFd,
        control: Arc<Pulse>,
        manager: Arc<Manager>,
        last: impl FnOnce() + Send + 'static,
    ) -> io::Result<Arc<OwnedFd>> {
        let told = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let told = Arc::new(told);
        let theirs = Arc::clone(&told);
        self.lock().push(Watched::new(Thread::Control(control)));
        let own = self.clone();
        std::thread::Builder::new()
            .name("vnplug-watch".into())
            .spawn(move || {
                watch(&termination, &own, &manager);
                // Before others end, and the process with them.
                manager.say_stopping();
                event::ring(&theirs);
                std::thread::sleep(ENDING);
                let left = threads().join(", ");
                log::error!(target: "control", "these threads do not end, and are left behind: {left}");
                last();
                signals::leave(LEFT_BEHIND);
            })?;
        Ok(told)
    }

    /// Watches the threads of these queues, too.
    pub(crate) fn add(&self, lines: impl IntoIterator<Item = Line>) {
        let lines = lines.into_iter().map(Thread::Queue);
        self.lock().extend(lines.map(Watched::new));
    }

    /// Watches the thread of this queue no more: it is to end.
    pub(crate) fn forget(&self, line: &Line) {
        self.lock()
            .retain(|it| !std::ptr::eq(it.thread.pulse(), line.pulse()));
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at the threads until the daemon is to end.
fn watch(termination: &OwnedFd, all: &Watch, manager: &Manager) {
    let mut dog = manager.watchdog().map(|within| Dog {
        // Half of it is what sd_watchdog_enabled(3) advises.
        every: within / 2,
        fed: Instant::now(),
    });
    let mut told = Vec::new();
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: LOOK.as_nanos() as i64,
    };
    loop {
        let mut fds = [PollFd::new(termination, PollFlags::IN)];
        match poll(&mut fds, Some(&pause)) {
            Ok(0) => {
                let mut watched = all.lock();
                watched.iter_mut().for_each(Watched::look);
                let hang = watched.iter().filter(|it| it.stalled_since.is_some());
                let hang: Vec<_> = hang.map(|it| it.thread.pulse().name().to_owned()).collect();
                drop(watched);
                if hang != told {
                    match hang.is_empty() {
                        true => manager.say_status("Serving"),
                        false => manager.say_status(&format!("{} hangs", hang.join(", "))),
                    }
                }
                if let Some(dog) = &mut dog
                    && hang.is_empty()
                {
                    dog.feed(manager);
                }
                told = hang;
            }
            // NB: not read: nobody else has it, and it need not become quiet again.
            Ok(_) => return,
            // Interrupted, or out of memory for a moment.
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// The service manager's watchdog.
struct Dog {
    every: Duration,
    fed: Instant,
}

impl Dog {
    /// Feeds it, if that is due. Where the manager has no room for it, it is due again at the next look.
    fn feed(&mut self, manager: &Manager) {
        if self.fed.elapsed() < self.every.saturating_sub(LOOK) {
            return;
        }
        match manager.say("WATCHDOG=1") {
            Ok(()) => self.fed = Instant::now(),
            Err(error) => log::debug!("the watchdog is not fed: {error}"),
        }
    }
}

impl Thread {
    fn pulse(&self) -> &Pulse {
        match self {
            Self::Queue(line) => line.pulse(),
            Self::Control(pulse) => pulse,
        }
    }

    /// Whether there is something that should wake it, if it sleeps.
    fn has_work(&self) -> bool {
        match self {
            Self::Queue(line) => line.has_commands(),
            // It sleeps on all that it has.
            Self::Control(_) => false,
        }
    }

    /// The log's target, and what it means that it hangs.
    fn loss(&self) -> (&'static str, &'static str) {
        match self {
            Self::Queue(_) => ("source", "its readers get nothing"),
            Self::Control(_) => ("control", "no request is answered"),
        }
    }
}

impl Watched {
    fn new(thread: Thread) -> Self {
        Self {
            turns: thread.pulse().turns(),
            thread,
            looks: 0,
            stalled_since: None,
        }
    }

    fn look(&mut self) {
        let pulse = self.thread.pulse();
        let (target, loss) = self.thread.loss();
        let turns = pulse.turns();
        let is_asleep = turns & 1 == 1;
        if turns != self.turns || is_asleep && !self.thread.has_work() {
            (self.turns, self.looks) = (turns, 0);
            if let Some(since) = self.stalled_since.take() {
                pulse.note_stall(None);
                let seconds = since.elapsed().as_secs_f64();
                log::warn!(target: target, "{}: its thread goes on after {seconds:.1} s", pulse.name());
            }
            return;
        }
        self.looks += 1;
        if self.looks >= STALLED && self.stalled_since.is_none() {
            let begun = Instant::now().checked_sub(LOOK * self.looks);
            let since = begun.unwrap_or_else(Instant::now);
            self.stalled_since = Some(since);
            pulse.note_stall(Some(since));
            let seconds = since.elapsed().as_secs_f64();
            log::error!(
                target: target,
                "{}: its thread has not turned for {seconds:.1} s: it hangs, and {loss}",
                pulse.name()
            );
        }
    }
}

/// The threads that there are but this one, with the state that the system says they are in.
fn threads() -> Vec<String> {
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let others = tasks.flatten().filter(|task| *task.file_name() != *own);
    let named = others.filter_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name: &str| {
            let mut lines = status.lines();
            lines.find_map(|line| line.strip_prefix(name).map(|it| it.trim().to_owned()))
        };
        Some(format!("{} ({})", field("Name:")?, field("State:")?))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use vnplug_testing::TestDir;

    use super::*;

    #[test]
    fn a_watchdog_that_was_not_heard_is_due_again() {
        let dir = TestDir::new("watchdog");
        let path = dir.path("notify");
        let hears = UnixDatagram::bind(&path).unwrap();
        hears.set_nonblocking(true).unwrap();
        let manager = Manager::new(path.as_os_str(), None).unwrap();
        let fed = Instant::now();
        // It is due at any time.
        let mut dog = Dog { every: LOOK, fed };
        assert!((0..100_000).any(|_| manager.say("STATUS=x").is_err()));
        dog.feed(&manager);
        assert_eq!(dog.fed, fed);
        while hears.recv(&mut [0; 64]).is_ok() {}
        dog.feed(&manager);
        assert!(dog.fed > fed);
    }
}
