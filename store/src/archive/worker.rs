//! The thread that packs segments while a recorder is at work.

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::How;
use super::pack::{Packed, is_bare_index, pack};
use crate::disk::remove_unless_leased;
use crate::name::{SegmentName, unpacked};
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
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
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
    /// There is no thread to be had.
    pub fn start(
        how: How,
        recording: String,
        directories: Vec<PathBuf>,
        first: u64,
        ledger: Arc<Ledger>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            began: Instant::now(),
            pressed: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        ledger.archive(|_| {});
        let mut job = Job {
            how,
            recording,
            directories,
            first,
            ledger,
            shared: Arc::clone(&shared),
            left: HashSet::new(),
            leased: HashMap::new(),
        };
        let thread = std::thread::Builder::new().name("vnplug-archive".into());
        let thread = thread.spawn(move || job.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
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
        let limit = Instant::now() + LAST;
        while let Some(thread) = self.thread.take_if(|thread| !thread.is_finished()) {
            if Instant::now() >= limit {
                self.shared.stop.store(true, Ordering::Relaxed);
            }
            sleep(Duration::from_millis(10));
            self.thread = Some(thread);
        }
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            log::error!("the thread that packs segments panicked");
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Relaxed: nothing else is handed over.
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
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
}

struct Job {
    how: How,
    recording: String,
    directories: Vec<PathBuf>,
    first: u64,
    ledger: Arc<Ledger>,
    shared: Arc<Shared>,
    /// Segments that are left as they are.
    left: HashSet<SegmentName>,
    /// Segments that somebody reads, and when to look again.
    leased: HashMap<SegmentName, Instant>,
}

impl Job {
    fn run(&mut self) {
        // Without it, it is as important as the recorder; the machine decides.
        let _ = rustix::process::setpriority_process(None, LOWEST);
        let mut not_before = Instant::now();
        while !self.shared.stops() {
            // Before looking: what is closed until then is seen.
            let ended = self.shared.ended.load(Ordering::Relaxed);
            let waiting = self.waiting();
            self.ledger
                .archive(|status| status.waiting = waiting.len() as u64);
            let now = Instant::now();
            let is_leased = |segment| self.leased.get(segment).is_some_and(|&until| now < until);
            let next = waiting.iter().find(|(_, segment)| !is_leased(segment));
            let next = next.filter(|_| ended || now >= not_before);
            let Some((lane, segment)) = next else {
                if ended {
                    break;
                }
                self.nap();
                continue;
            };
            let hurries = waiting.len() > MOST_WAITING && !ended;
            match self.one(*lane, segment, hurries) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let what = format!("{segment}: {error}");
                    log::warn!("{what}");
                    self.ledger.archive(|status| status.trouble = what);
                    if ended {
                        break;
                    }
                    not_before = Instant::now() + AGAIN;
                }
            }
        }
        let waiting = self.waiting().len() as u64;
        self.ledger.archive(|status| status.waiting = waiting);
    }

    fn nap(&self) {
        for _ in 0..NAPS {
            if self.shared.stops() || self.shared.ended.load(Ordering::Relaxed) {
                return;
            }
            sleep(STEP);
        }
    }

    /// Packs one segment.
    fn one(&mut self, lane: usize, segment: &SegmentName, hurries: bool) -> io::Result<()> {
        let mut how = self.how.clone();
        if hurries {
            if how.recipients.is_empty() {
                self.left.insert(segment.clone());
                let left = self.left.len() as u64;
                log::warn!("{segment} stays as it is: compression is slower than the recording");
                self.ledger.archive(|status| status.left = left);
                return Ok(());
            }
            how.level = None;
        }
        let dir = &self.directories[lane];
        let known = is_packed(dir, segment);
        let packed = pack(dir, segment, &how, &mut || self.shared.pulse())?;
        if let Packed::Leased(..) = packed {
            self.leased.insert(segment.clone(), Instant::now() + LEASED);
        } else {
            self.leased.remove(segment);
        }
        let (Packed::Done(before, after) | Packed::Leased(before, after)) = packed else {
            return Ok(());
        };
        if !known {
            let hurried = u64::from(hurries && self.how.level.is_some());
            self.ledger.archive(|status| {
                status.segments += 1;
                status.bytes_before += before;
                status.bytes_after += after;
                status.hurried += hurried;
                status.trouble.clear();
            });
        }
        Ok(())
    }

    /// The closed segments that are not packed, the oldest first.
    fn waiting(&self) -> Vec<(usize, SegmentName)> {
        let status = self.ledger.status();
        let mut found = Vec::new();
        for (lane, dir) in self.directories.iter().enumerate() {
            let known = status.lanes.get(lane);
            let at_work = known.and_then(|known| SegmentName::parse(&known.segment));
            let is_open = known.is_some_and(|known| known.open);
            let is_closed = |segment: &SegmentName| match &at_work {
                _ if segment.sequence < self.first => true,
                Some(at_work) if segment.sequence == at_work.sequence => !is_open,
                Some(at_work) => segment.sequence < at_work.sequence,
                None => false,
            };
            let Ok(entries) = std::fs::read_dir(dir) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name();
                let Some(name) = name.to_str() else { continue };
                if self.how.packing().age
                    && is_ours(name, &self.recording)
                    && is_bare_index(dir, name)
                {
                    // Its recorder was killed between the segment and this.
                    let _ = remove_unless_leased(&dir.join(name));
                }
                let plain = unpacked(name).0 == name;
                let segment = SegmentName::parse(name).filter(|_| plain);
                let ours = |segment: &SegmentName| {
                    segment.recording == self.recording
                        && is_closed(segment)
                        && !self.left.contains(segment)
                };
                found.extend(segment.filter(ours).map(|segment| (lane, segment)));
            }
        }
        found.sort_by_key(|(_, segment)| segment.sequence);
        found
    }
}

/// Whether an index is of this recording.
fn is_ours(index: &str, recording: &str) -> bool {
    let stem = index.strip_suffix(crate::name::INDEX);
    let segment = stem.and_then(|stem| SegmentName::parse(&format!("{stem}.pcapng")));
    segment.is_some_and(|segment| segment.recording == recording)
}

fn is_packed(dir: &Path, segment: &SegmentName) -> bool {
    let mut packings = crate::name::Packing::ALL.into_iter().skip(1);
    packings.any(|packing| dir.join(format!("{segment}{}", packing.suffix())).exists())
}

const LOWEST: i32 = 19;
const PRESSED_MS: u64 = 1000;
const STEP: Duration = Duration::from_millis(50);
/// A look at the directories every second.
const NAPS: u32 = 20;
/// A segment that somebody reads.
const LEASED: Duration = Duration::from_secs(1);
/// After an error.
const AGAIN: Duration = Duration::from_secs(10);
/// With more segments waiting, the oldest stay as they are, or are encrypted only.
const MOST_WAITING: usize = 16;
/// How long the end may take.
const LAST: Duration = Duration::from_secs(30);
