//! Descriptors that a service manager keeps while this process is replaced by the next: `FDSTORE=1` of `sd_notify(3)`, and
//! `sd_listen_fds(3)` by which they come back. Sockets that the manager made for this process come the same way.
//!
//! Whoever started the process names them, and is trusted. A manager that does not listen costs a restart what would have
//! been kept, and nothing else.
#![expect(
    unsafe_code,
    reason = "the environment says which descriptors are the process' own"
)]

mod later;

use std::env;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use later::Later;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::service::Manager;

/// What a service manager keeps for this process, and for the next.
#[derive(Debug, Default)]
pub struct Kept {
    manager: Arc<Later>,
    /// What was kept for this process and nobody has taken yet.
    passed: Mutex<Vec<(String, OwnedFd)>>,
    phase: Mutex<Phase>,
    /// Tells apart what has one name, also of earlier processes.
    number: AtomicU64,
}

/// What becomes of what is let go.
#[derive(Debug)]
enum Phase {
    /// It is forgotten. What was passed is so once the process serves: if it fails, the next has another look.
    Starts(Vec<String>),
    /// It is forgotten.
    Serves,
    /// It is for the next process.
    Ends,
}

impl Default for Phase {
    fn default() -> Self {
        Self::Starts(Vec::new())
    }
}

/// A descriptor that is kept as long as this lives, or until the process is over.
#[derive(Debug)]
pub struct Keeping {
    kept: Arc<Kept>,
    name: String,
    /// It was kept for this process, and not by it.
    is_passed: bool,
}

impl Kept {
    /// What the environment says was passed (`LISTEN_FDS`, `LISTEN_FDNAMES` and `LISTEN_PID`). Once in a process.
    pub fn of_environment(manager: Arc<Manager>) -> Self {
        static TAKEN: AtomicBool = AtomicBool::new(false);
        let text = |name| env::var(name).unwrap_or_default();
        let names = text("LISTEN_FDNAMES");
        let ours = text("LISTEN_PID").parse() == Ok(std::process::id());
        let ours = ours && !TAKEN.swap(true, Ordering::Relaxed);
        let count = text("LISTEN_FDS").parse().unwrap_or(0);
        let mut passed = Vec::new();
        let mut names = names.split(':');
        for number in (FIRST..).take(if ours { count } else { 0 }) {
            let name = names.next().unwrap_or_default().to_owned();
            if !is_open(number) {
                continue;
            }
            // SAFETY: it has been open since the process began: the manager, which named this very process, passed it for whoever
            // asks here (`sd_listen_fds(3)`), and nobody else has asked.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            // What this process starts must not have it.
            if let Err(error) = fcntl_setfd(&fd, FdFlags::CLOEXEC) {
                log::warn!(target: "control", "descriptor {number} of the service manager: {error}");
            }
            passed.push((name, fd));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            manager: Arc::new(Later::new(manager)),
            passed: Mutex::new(passed),
            phase: Mutex::default(),
            number: AtomicU64::new(since.map_or(0, |since| since.as_nanos() as u64)),
        }
    }

    /// Takes what was passed under this very name: a socket that the manager made.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        let mut passed = self.passed();
        let at = passed.iter().position(|(known, _)| known == name)?;
        Some(passed.swap_remove(at).1)
    }

    /// Takes what an earlier process had kept as this: the last, if there are several.
    pub fn take_kept(self: &Arc<Self>, name: &str) -> Option<(OwnedFd, Keeping)> {
        let number = |known: &str| {
            let (front, number) = known.rsplit_once(NUMBERED)?;
            let number = u64::from_str_radix(number, 16).ok()?;
            (front == name).then_some(number)
        };
        let mut found = Vec::new();
        let mut passed = self.passed();
        for (known, fd) in std::mem::take(&mut *passed) {
            match number(&known) {
                Some(number) => found.push((number, known, fd)),
                None => passed.push((known, fd)),
            }
        }
        drop(passed);
        found.sort_unstable_by_key(|(number, ..)| *number);
        let (_, name, fd) = found.pop()?;
        let keeping = |name| Keeping {
            kept: Arc::clone(self),
            name,
            is_passed: true,
        };
        // What is older nobody wants: it was to be forgotten, and nobody heard it.
        found
            .into_iter()
            .for_each(|(_, name, _)| drop(keeping(name)));
        Some((fd, keeping(name)))
    }

    /// Has a descriptor kept for the next process. `name`: printable characters of ASCII without a colon, at most 200 of them.
    /// `None`: nobody keeps it. A manager that has no room for it now hears of it when there is, and this does not wait for that.
    pub fn keep(self: &Arc<Self>, name: &str, fd: BorrowedFd<'_>) -> Option<Keeping> {
        if !self.manager.is_heard() {
            return None;
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let name = format!("{name}{NUMBERED}{number:x}");
        match self.manager.keep(&name, fd) {
            Ok(()) => Some(Keeping {
                kept: Arc::clone(self),
                name,
                is_passed: false,
            }),
            Err(error) => {
                not_heard(&name, true, &error);
                None
            }
        }
    }

    /// The process serves: what it let go is of no more use. A manager that has no room for what is to be kept is waited for a
    /// moment: a process that ends soon could not say it any more.
    pub fn settle(&self) {
        let phase = std::mem::replace(&mut *self.phase(), Phase::Serves);
        if let Phase::Starts(stale) = phase {
            stale.iter().for_each(|name| self.forget(name));
        }
        if !self.manager.settle(SETTLES) {
            log::warn!(target: "control", "the service manager is busy, and does not keep everything over a restart yet");
        }
    }

    /// What nobody took is of no more use.
    pub fn let_go(&self) {
        for (name, fd) in std::mem::take(&mut *self.passed()) {
            log::info!(target: "control", "{name:?}, which an earlier daemon had kept, is let go");
            self.forget(&name);
            drop(fd);
        }
    }

    /// The process ends: what is let go now is for the next.
    pub fn leave(&self) {
        *self.phase() = Phase::Ends;
        self.finish();
    }

    /// The process is about to end: what the manager had no room for is said, if it has soon.
    pub fn finish(&self) {
        if !self.manager.settle(LEAVES) {
            log::warn!(target: "control", "the service manager is busy, and does not hear everything that it is to keep, or to forget");
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, name: &str) {
        if let Err(error) = self.manager.forget(name) {
            not_heard(name, false, &error);
        }
    }

    fn passed(&self) -> MutexGuard<'_, Vec<(String, OwnedFd)>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        let is_forgotten = match &mut *self.kept.phase() {
            Phase::Starts(stale) if self.is_passed => {
                stale.push(std::mem::take(&mut self.name));
                false
            }
            Phase::Starts(_) | Phase::Serves => true,
            Phase::Ends => false,
        };
        // NB: behind the lock. It may close a ring, which takes the kernel a while.
        if is_forgotten {
            self.kept.forget(&self.name);
        }
    }
}

/// Something was said to the manager in vain.
fn not_heard(name: &str, is_kept: bool, error: &std::io::Error) {
    match is_kept {
        true => {
            log::warn!(target: "control", "the service manager does not keep {name:?} over a restart: {error}");
        }
        false => {
            log::warn!(target: "control", "the service manager keeps {name:?} although it is of no use: {error}");
        }
    }
}

fn is_open(number: RawFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok()
}

/// How long it is waited until all is said, before the process serves and when it ends.
const SETTLES: Duration = Duration::from_secs(1);
const LEAVES: Duration = Duration::from_millis(500);
/// `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;
/// Stands before the number in a name.
const NUMBERED: char = '#';

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;
    use std::time::Instant;

    use vnplug_testing::TestDir;

    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 512];
        match socket.recv(&mut bytes) {
            Ok(len) => String::from_utf8_lossy(&bytes[..len]).into_owned(),
            Err(_) => String::new(),
        }
    }

    /// A manager that keeps `old` for this process.
    fn kept(dir: &TestDir, old: &[&str]) -> (Arc<Kept>, UnixDatagram) {
        let path = dir.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        let manager = Manager::new(path.as_os_str(), None).unwrap();
        let fd = || std::fs::File::open("/dev/null").unwrap().into();
        let passed = old.iter().map(|&name| (name.to_owned(), fd())).collect();
        let kept = Kept {
            manager: Arc::new(Later::new(Arc::new(manager))),
            passed: Mutex::new(passed),
            ..Kept::default()
        };
        (Arc::new(kept), socket)
    }

    #[test]
    fn what_is_let_go_is_forgotten_when_the_process_serves_but_not_when_it_ends() {
        let dir = TestDir::new("kept");
        let (kept, told) = kept(&dir, &[]);
        let file = std::fs::File::open("/dev/null").unwrap();
        let keep = || kept.keep("eth0 main", file.as_fd()).unwrap();
        drop(keep());
        assert_eq!(heard(&told), "FDSTORE=1\nFDPOLL=0\nFDNAME=eth0 main#0");
        // A start that fails leaves nothing of its own.
        assert_eq!(heard(&told), "FDSTOREREMOVE=1\nFDNAME=eth0 main#0");
        kept.settle();
        assert_eq!(heard(&told), "");
        drop(keep());
        assert_eq!(heard(&told), "FDSTORE=1\nFDPOLL=0\nFDNAME=eth0 main#1");
        assert_eq!(heard(&told), "FDSTOREREMOVE=1\nFDNAME=eth0 main#1");
        let last = keep();
        assert_eq!(heard(&told), "FDSTORE=1\nFDPOLL=0\nFDNAME=eth0 main#2");
        kept.leave();
        drop(last);
        assert_eq!(heard(&told), "");
    }

    #[test]
    fn what_was_passed_is_taken_once_by_its_name_and_the_rest_is_forgotten() {
        let dir = TestDir::new("kept");
        let (kept, told) = kept(
            &dir,
            &[
                "eth0 main#7",
                "control",
                "eth1 main#8",
                "eth0 main",
                "eth0 main#1f",
            ],
        );
        assert!(kept.take("contro").is_none());
        assert!(kept.take("control").is_some());
        assert!(kept.take("control").is_none());
        assert!(kept.take_kept("eth0").is_none());
        let (_fd, keeping) = kept.take_kept("eth0 main").unwrap();
        assert_eq!(keeping.name, "eth0 main#1f", "the last");
        assert!(kept.take_kept("eth0 main").is_none(), "it has no number");
        assert_eq!(heard(&told), "");
        kept.settle();
        assert_eq!(heard(&told), "FDSTOREREMOVE=1\nFDNAME=eth0 main#7");
        kept.let_go();
        let rest = [heard(&told), heard(&told), heard(&told)];
        let mut rest: Vec<_> = rest.iter().filter(|text| !text.is_empty()).collect();
        rest.sort();
        assert_eq!(
            rest,
            [
                "FDSTOREREMOVE=1\nFDNAME=eth0 main",
                "FDSTOREREMOVE=1\nFDNAME=eth1 main#8"
            ]
        );
        assert!(kept.take_kept("eth1 main").is_none());
    }

    /// A manager that reads nothing yet, whose queue is full.
    fn full(dir: &TestDir) -> (Arc<Kept>, UnixDatagram) {
        let (kept, told) = kept(dir, &[]);
        // One socket alone has no memory for as much as there may be room.
        let is_full = (0..1_000).any(|_| {
            let other = Manager::new(dir.path("notify").as_os_str(), None).unwrap();
            let said = (0..100_000).position(|_| other.say("WATCHDOG=1").is_err());
            said == Some(0)
        });
        assert!(is_full);
        (kept, told)
    }

    /// All that the manager is told until this is.
    fn until(told: &UnixDatagram, last: &str) -> Vec<String> {
        let mut all = Vec::new();
        vnplug_testing::eventually(last, || {
            loop {
                let text = heard(told);
                if text.is_empty() {
                    return false;
                }
                if text != "WATCHDOG=1" {
                    all.push(text);
                }
                if all.last().is_some_and(|it| it == last) {
                    return true;
                }
            }
        });
        all
    }

    #[test]
    fn what_a_full_manager_has_no_room_for_is_said_in_its_order_and_nobody_waits() {
        let dir = TestDir::new("kept");
        let (kept, told) = full(&dir);
        let file = std::fs::File::open("/dev/null").unwrap();
        let begun = Instant::now();
        let mut all: Vec<_> = (0..500)
            .map(|_| kept.keep("eth0", file.as_fd()).unwrap())
            .collect();
        // What is let go before it was said is not said.
        drop(all.drain(100..400));
        let took = begun.elapsed();
        assert!(took < SETTLES, "{took:?}");
        let said = until(&told, "FDSTORE=1\nFDPOLL=0\nFDNAME=eth0#1f3");
        let wanted = (0..100).chain(400..500);
        let wanted = wanted.map(|n| format!("FDSTORE=1\nFDPOLL=0\nFDNAME=eth0#{n:x}"));
        assert_eq!(said, wanted.collect::<Vec<_>>());
        // And what was said is forgotten.
        kept.settle();
        drop(all.pop());
        assert_eq!(heard(&told), "FDSTOREREMOVE=1\nFDNAME=eth0#1f3");
    }

    #[test]
    fn a_manager_that_stands_still_costs_a_moment_and_has_bounds() {
        let dir = TestDir::new("kept");
        let (kept, told) = full(&dir);
        let file = std::fs::File::open("/dev/null").unwrap();
        let keeping: Vec<_> = (0..3)
            .map(|_| kept.keep("eth0", file.as_fd()).unwrap())
            .collect();
        let begun = Instant::now();
        kept.settle();
        let took = begun.elapsed();
        assert!(took >= SETTLES, "{took:?}: it was said to nobody");
        kept.leave();
        drop(keeping);
        let took = begun.elapsed();
        assert!(took >= SETTLES + LEAVES, "{took:?}");
        // It would have had them.
        assert_eq!(until(&told, "FDSTORE=1\nFDPOLL=0\nFDNAME=eth0#2").len(), 3);
    }

    #[test]
    fn without_a_manager_nothing_is_kept() {
        let kept = Arc::new(Kept::default());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(kept.keep("eth0 main", file.as_fd()).is_none());
        kept.let_go();
    }
}
