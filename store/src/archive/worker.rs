//! The thread that packs segments while a recorder is at work.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::How;
use super::job::Job;
use crate::disk::Real;
use crate::manifest::Manifest;
use crate::record::Ledger;

/// What was packed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArchiveStatus {
    /// Segments.
    pub segments: u64,
    /// Their bytes before,
    pub bytes_before: u64,
    /// and after.
    pub bytes_after: u64,
    /// Segments that wait.
    pub waiting: u64,
    /// Segments that stay as they are: it is slower than the recording.
    pub left: u64,
    /// Segments that are encrypted but not compressed, for the same reason.
    pub hurried: u64,
    /// What is wrong at the moment; empty = nothing.
    pub trouble: String,
}

/// The thread.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<WorkerState>,
    thread: Option<JoinHandle<()>>,
    ledger: Arc<Ledger>,
    /// It packs; else it only takes files into manifests.
    packs: bool,
}

#[derive(Debug)]
struct WorkerState {
    began: Instant,
    /// When the recorder last had no buffer, in milliseconds since then, plus one.
    pressed: AtomicU64,
    /// The recorder has ended.
    ended: AtomicBool,
    /// Nothing is begun any more.
    stop: AtomicBool,
}

impl Worker {
    /// Packs the closed segments of a recording in the ledger's directories; those with numbers below
    /// `first` are of recorders before.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        how: Option<How>,
        recording: String,
        directories: Vec<(PathBuf, Option<Arc<Manifest>>)>,
        first: u64,
        ledger: Arc<Ledger>,
    ) -> io::Result<Self> {
        let disk = Box::new(Real::new(false).0);
        let packs = how.is_some();
        let job = Job::new(
            how,
            recording,
            directories,
            first,
            Arc::clone(&ledger),
            disk,
        );
        let mut worker = Self::of(job, ledger)?;
        worker.packs = packs;
        Ok(worker)
    }

    pub(super) fn of(mut job: Job, ledger: Arc<Ledger>) -> io::Result<Self> {
        let shared = Arc::new(WorkerState {
            began: Instant::now(),
            pressed: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let (inside, books) = (Arc::clone(&shared), Arc::clone(&ledger));
        let thread = std::thread::Builder::new().name("vnplug-archive".into());
        let thread = thread.spawn(move || {
            let _told = Told(books);
            inside.drive(&mut job);
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
            ledger,
            packs: true,
        })
    }

    /// The recorder has no buffer: nothing is packed for a second.
    pub fn pressed(&self) {
        let now = self.shared.began.elapsed().as_millis() as u64 + 1;
        // Relaxed: a hint.
        self.shared.pressed.store(now, Ordering::Relaxed);
    }

    /// The recorder has ended and its segments are closed: packs what is left, as far as that goes.
    pub fn finish(mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        let patience = if self.packs { LAST } else { LAST_NOTED };
        self.end(patience, GRACE);
    }

    /// Has it stop after this time, and leaves it where it is if it does not.
    pub(super) fn end(&mut self, patience: Duration, grace: Duration) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let limit = Instant::now() + patience;
        while !thread.is_finished() {
            let now = Instant::now();
            if now >= limit {
                // Relaxed: nothing else is handed over.
                self.shared.stop.store(true, Ordering::Relaxed);
            }
            if now >= limit + grace {
                let what = "the disk stands still: what is packed at the moment is left";
                log::error!("{what}");
                if self.packs {
                    self.ledger.archive(|status| status.trouble = what.into());
                }
                return;
            }
            sleep(Duration::from_millis(10));
        }
        // What a panic said is told.
        let _ = thread.join();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end(Duration::ZERO, GRACE);
    }
}

/// Tells of a panic of the thread.
struct Told(Arc<Ledger>);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "the thread that packs segments panicked";
            log::error!("{what}");
            self.0.archive(|status| status.trouble = what.into());
        }
    }
}

impl WorkerState {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits while the recorder is pressed; false if nothing is to be done any more.
    fn pulse(&self) -> bool {
        loop {
            if self.stops() {
                return false;
            }
            let pressed = self.pressed.load(Ordering::Relaxed);
            let now = self.began.elapsed().as_millis() as u64;
            if self.ended.load(Ordering::Relaxed) || pressed == 0 || now > pressed + PRESSED_MS {
                return true;
            }
            sleep(STEP);
        }
    }

    fn drive(&self, job: &mut Job) {
        // Without it, it is as important as the recorder; the machine decides.
        let _ = rustix::process::setpriority_process(None, LOWEST);
        while !self.stops() {
            // Before looking: what is closed until then is seen.
            let ended = self.ended.load(Ordering::Relaxed);
            if !job.round(Instant::now(), ended, &mut || self.pulse()) {
                if ended {
                    return;
                }
                self.nap();
            }
        }
        job.tell();
    }

    fn nap(&self) {
        for _ in 0..NAPS {
            if self.stops() || self.ended.load(Ordering::Relaxed) {
                return;
            }
            sleep(STEP);
        }
    }
}

const LOWEST: i32 = 19;
const PRESSED_MS: u64 = 1000;
const STEP: Duration = Duration::from_millis(50);
/// A look at the directories every second.
const NAPS: u32 = 20;
/// How long the end may take where nothing is packed: the next recorder notes what is left.
const LAST_NOTED: Duration = Duration::from_secs(3);
/// How long it may take,
const LAST: Duration = Duration::from_secs(30);
/// and a call of the disk, or a frame of zstd's, then.
const GRACE: Duration = Duration::from_secs(10);
