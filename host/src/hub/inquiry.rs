//! What interfaces are like, asked by a thread that may wait.
//!
//! ```text
//!   control thread ── look at these ──► vnplug-inquiry ── rtnetlink, ethtool ── the kernel's lock of all interfaces
//!                 ◄── done, or nobody waits any longer ──┘
//! ```
//!
//! The kernel answers such questions under one lock (`rtnl`) of all interfaces of all network namespaces. Whoever makes or deletes
//! a thousand of them holds it for seconds, and may be anybody who has a user namespace. So the control thread waits for the answers
//! a moment, and tells what was known before if they do not come; while they are on their way it does not wait again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vnplug_os::interface;
use vnplug_path::source::af_packet::Interface;

/// Addresses by the name of their interface.
type Addresses = Arc<BTreeMap<String, Vec<String>>>;

/// Asks about interfaces.
#[derive(Default)]
pub(super) struct Inquiry {
    desk: RefCell<Desk>,
    addresses: Arc<Mutex<Addresses>>,
}

/// Where the control thread waits for the other one.
struct Desk {
    /// How long it waits.
    patience: Duration,
    /// What the other thread is to do, once it was needed.
    jobs: Option<SyncSender<Job>>,
    /// What was not done when it waited no longer.
    late: Option<Late>,
    /// Until when it does not wait: it did in vain.
    rests_until: Instant,
}

/// Something to ask, and who waits for it.
struct Job {
    work: Box<dyn FnOnce() + Send>,
    done: SyncSender<()>,
}

struct Late {
    done: Receiver<()>,
    since: Instant,
    is_told: bool,
}

impl Inquiry {
    /// Has these interfaces looked at, `with_addresses` of this host too, and waits for it: not for long.
    pub(super) fn look(&self, interfaces: Vec<Arc<Interface>>, with_addresses: bool) {
        if interfaces.is_empty() {
            return;
        }
        let addresses = Arc::clone(&self.addresses);
        self.desk.borrow_mut().have_done(move || {
            for interface in &interfaces {
                interface.look();
            }
            if !with_addresses {
                return;
            }
            match interface::addresses() {
                Ok(now) => *lock(&addresses) = Arc::new(now),
                Err(error) => {
                    log::warn!(target: "source", "cannot list addresses: {error}");
                }
            }
        });
    }

    /// The addresses of this host at the last look at them.
    pub(super) fn addresses(&self) -> Addresses {
        Arc::clone(&lock(&self.addresses))
    }
}

impl Default for Desk {
    fn default() -> Self {
        Self::new(PATIENCE)
    }
}

impl Desk {
    fn new(patience: Duration) -> Self {
        Self {
            patience,
            jobs: None,
            late: None,
            rests_until: Instant::now(),
        }
    }

    /// Has the thread do something, and waits for its end as long as it has patience; not at all while it is busy with what took
    /// longer, nor soon after that. Whether it is done.
    fn have_done(&mut self, work: impl FnOnce() + Send + 'static) -> bool {
        if self.is_busy() {
            return false;
        }
        let jobs = match &self.jobs {
            Some(jobs) => jobs,
            None => match start() {
                Ok(jobs) => self.jobs.insert(jobs),
                Err(error) => {
                    log::error!(target: "source", "interfaces are not looked at: {error}");
                    return false;
                }
            },
        };
        let (done, awaited) = sync_channel(1);
        let (work, since) = (Box::new(work), Instant::now());
        // It has room: there is one job at a time.
        if jobs.try_send(Job { work, done }).is_err() {
            self.jobs = None;
            return false;
        }
        let patience = match since < self.rests_until {
            true => Duration::ZERO,
            false => self.patience,
        };
        match awaited.recv_timeout(patience) {
            Ok(()) => true,
            Err(RecvTimeoutError::Timeout) => {
                if !patience.is_zero() {
                    self.rests_until = since + REST;
                }
                self.late = Some(Late {
                    done: awaited,
                    since,
                    is_told: false,
                });
                false
            }
            // It panicked, which is a bug; the next one has another thread.
            Err(RecvTimeoutError::Disconnected) => {
                self.jobs = None;
                false
            }
        }
    }

    /// Whether what nobody waits for any longer is not done yet.
    fn is_busy(&mut self) -> bool {
        let Some(late) = &mut self.late else {
            return false;
        };
        let age = late.since.elapsed();
        let is_busy = matches!(late.done.try_recv(), Err(TryRecvError::Empty));
        if is_busy && !late.is_told && age >= LATE {
            late.is_told = true;
            log::warn!(
                target: "source",
                "the kernel has not said for {} s what the interfaces are like: what was known before is told",
                age.as_secs()
            );
        }
        if !is_busy {
            if late.is_told {
                log::info!(target: "source", "the kernel says again what the interfaces are like");
            }
            self.late = None;
        }
        is_busy
    }
}

/// Starts the thread, which ends with who asks it.
fn start() -> std::io::Result<SyncSender<Job>> {
    let (jobs, asked) = sync_channel::<Job>(1);
    let serve = move || {
        for Job { work, done } in asked {
            work();
            // Nobody may wait for it any longer.
            let _ = done.send(());
        }
    };
    let thread = std::thread::Builder::new().name("vnplug-inquiry".into());
    thread.spawn(serve)?;
    Ok(jobs)
}

fn lock(addresses: &Mutex<Addresses>) -> std::sync::MutexGuard<'_, Addresses> {
    addresses.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long the control thread waits. Of a thousand interfaces the kernel tells within 20 ms what they are like, if nobody has its
/// lock.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long it does not wait after it did in vain. What is told then is not much older.
const REST: Duration = Duration::from_secs(1);
/// After this time the log has it.
const LATE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    use vnplug_testing::{PATIENCE as LONG, eventually};

    use super::*;

    #[test]
    fn nobody_waits_for_long_nor_twice_for_the_same() {
        let mut desk = Desk::new(LONG);
        assert!(desk.have_done(|| {}));
        // Somebody has the lock.
        let (release, held) = channel::<()>();
        desk.patience = PATIENCE;
        let begun = Instant::now();
        assert!(!desk.have_done(move || _ = held.recv()));
        assert!(begun.elapsed() >= PATIENCE);
        // Who waited now would wait for all of these together.
        desk.patience = LONG;
        let runs = Arc::new(AtomicU32::new(0));
        let count = || {
            let runs = Arc::clone(&runs);
            move || _ = runs.fetch_add(1, Ordering::Relaxed)
        };
        let begun = Instant::now();
        for _ in 0..1000 {
            assert!(!desk.have_done(count()));
        }
        assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
        assert_eq!(runs.load(Ordering::Relaxed), 0);
        drop(release);
        eventually("it is answered again", || desk.have_done(count()));
        assert!(runs.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn who_waited_in_vain_does_not_wait_soon_again() {
        let mut desk = Desk::new(PATIENCE);
        let (release, held) = channel::<()>();
        assert!(!desk.have_done(move || _ = held.recv()));
        drop(release);
        eventually("the thread has time", || !desk.is_busy());
        let rests_until = Instant::now() + LONG;
        (desk.patience, desk.rests_until) = (LONG, rests_until);
        let (release, held) = channel::<()>();
        let begun = Instant::now();
        assert!(!desk.have_done(move || _ = held.recv()));
        assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
        // It rests no longer than it was to.
        assert_eq!(desk.rests_until, rests_until);
        drop(release);
        eventually("the thread has time", || !desk.is_busy());
        desk.rests_until = Instant::now();
        assert!(desk.have_done(|| {}));
    }

    #[test]
    fn a_look_that_panics_costs_that_look() {
        let mut desk = Desk::new(LONG);
        assert!(!desk.have_done(|| panic!("a bug")));
        assert!(desk.have_done(|| {}));
    }
}
