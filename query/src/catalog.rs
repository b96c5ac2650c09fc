//! The segments of recordings, and where their rows are.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use vnplug_store::extract::{Found, find};

use crate::beside::{self, Identity, Trouble};
use crate::failure::Failure;
use crate::scan::{Facts, Sink, scan};

/// What is looked at, and how.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// Directories and capture files.
    pub(crate) places: Vec<PathBuf>,
    /// Times, nanoseconds since 1970 UTC: from the first on, and before the second.
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    /// How many segments are read at once.
    pub(crate) jobs: usize,
    /// Most bytes of rows in memory.
    pub(crate) memory_bytes: usize,
}

/// A segment that may have something in the time that is asked for.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) len_bytes: u64,
    /// It may be written at this moment.
    pub(crate) open: bool,
    pub(crate) facts: Facts,
    pub(crate) rows: RowsAt,
    /// Keeps the recorder from recycling it, and its rows with it.
    _lease: File,
}

/// Where the rows of a segment are.
#[derive(Debug)]
pub(crate) enum RowsAt {
    /// In the file beside it.
    Beside(PathBuf),
    /// Here.
    Memory(Vec<RecordBatch>),
}

/// Segments, and what could not be read.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    pub(crate) segments: Vec<Segment>,
    /// A line each.
    pub(crate) problems: Vec<String>,
}

impl Catalog {
    /// Finds the segments of a scope. Rows that are not beside their segment are read into memory.
    ///
    /// # Errors
    /// [`Failure`] if a place cannot be read, or there is not enough memory.
    pub(crate) fn load(scope: &Scope) -> Result<Self, Failure> {
        let memory = AtomicUsize::new(0);
        let load = |found: Found| {
            let state = State::of(found)?;
            match state.may_be_in(scope) {
                true => state.load(scope, &memory).map(Some),
                false => Ok(None),
            }
        };
        let mut catalog = Self::default();
        for loaded in side_by_side(scope.jobs, find(&scope.places)?, load) {
            match loaded {
                Ok(Some(segment)) => {
                    let damage = segment.facts.damage.clone();
                    catalog.problems.extend(damage);
                    if in_time(scope, segment.facts.first_ns, segment.facts.last_ns) {
                        catalog.segments.push(segment);
                    }
                }
                Ok(None) => {}
                Err(Problem::Segment(failure)) => catalog.problems.push(failure.0),
                Err(Problem::All(failure)) => return Err(failure),
            }
        }
        Ok(catalog)
    }
}

/// What was done for a segment.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// A file was made beside it, of so many packets; the last is what is wrong with the segment.
    Made(PathBuf, u64, Option<String>),
    /// It cannot be read, or nothing can be written beside it.
    Failed(String),
}

/// Makes the files beside closed segments that have none. Each segment is held only while it is read,
/// so that the recorder can go on recycling.
///
/// # Errors
/// [`Failure`] if a place cannot be read.
pub(crate) fn prepare(scope: &Scope, tell: &(impl Fn(Prepared) + Sync)) -> Result<(), Failure> {
    let paths = find(&scope.places)?.into_iter().map(|found| found.path);
    let make = |path: PathBuf| {
        // Gone means recycled since.
        let Some(found) = find(&[path]).ok().and_then(|mut found| found.pop()) else {
            return;
        };
        match State::of(found) {
            Ok(state) => state.prepare(scope).into_iter().for_each(tell),
            Err(Problem::Segment(failure) | Problem::All(failure)) => {
                tell(Prepared::Failed(failure.0));
            }
        }
    };
    side_by_side(scope.jobs, paths.collect(), make);
    Ok(())
}

/// A segment as it was found.
struct State {
    path: PathBuf,
    file: File,
    len_bytes: u64,
    open: bool,
    /// What the file beside it says.
    facts: Option<Facts>,
    /// What is known of its times: not before, and not after.
    low_ns: u64,
    high_ns: u64,
}

enum Problem {
    /// One segment cannot be read; the others can.
    Segment(Failure),
    /// Nothing can be answered.
    All(Failure),
}

impl State {
    fn of(found: Found) -> Result<Self, Problem> {
        let path = found.path;
        let fail = |error: std::io::Error| Problem::Segment(Failure::about(path.display(), error));
        let file = found.file.map_err(fail)?;
        let identity = Identity::of(&file).map_err(fail)?;
        let facts = beside::facts(&path, identity);
        let (low_ns, high_ns) = match (&facts, found.trailer) {
            (Some(facts), _) => (facts.first_ns, facts.last_ns),
            (None, Some(trailer)) => (trailer.low_ns, trailer.high_ns),
            (None, None) => {
                let start = found.start_ns.unwrap_or(0);
                (start.saturating_sub(SLACK_NS), u64::MAX)
            }
        };
        let open = facts.is_none() && found.trailer.is_none() && is_busy(&file);
        Ok(Self {
            file,
            len_bytes: found.len_bytes,
            open,
            facts,
            low_ns,
            high_ns,
            path,
        })
    }

    fn may_be_in(&self, scope: &Scope) -> bool {
        in_time(scope, self.low_ns, self.high_ns)
    }

    /// Makes the file beside it, if that is to be done.
    fn prepare(self, scope: &Scope) -> Option<Prepared> {
        let due = self.facts.is_none() && !self.open && self.may_be_in(scope);
        if !due || !may_be_beside(&self.path) {
            return None;
        }
        let path = beside::path_of(&self.path);
        Some(match beside::make(&self.path, &self.file) {
            Ok(facts) => Prepared::Made(path, facts.packets, facts.damage),
            Err(Trouble::Beside(why)) => Prepared::Failed(format!("{}: {why}", path.display())),
            Err(Trouble::Segment(failure)) => Prepared::Failed(failure.0),
        })
    }

    fn load(self, scope: &Scope, memory: &AtomicUsize) -> Result<Segment, Problem> {
        if let Some(facts) = self.facts.clone() {
            let rows = RowsAt::Beside(beside::path_of(&self.path));
            return Ok(self.segment(facts, rows));
        }
        let mut sink = Memory {
            batches: Vec::new(),
            bytes: 0,
            all: memory,
            most: scope.memory_bytes,
            full: false,
        };
        let scanned = self.file.try_clone().map_err(Failure::from);
        match scanned.and_then(|file| scan(&self.path, file, &mut sink)) {
            Ok(facts) => {
                let rows = RowsAt::Memory(sink.batches);
                Ok(self.segment(facts, rows))
            }
            Err(failure) if sink.full => Err(Problem::All(failure)),
            Err(failure) => Err(Problem::Segment(failure)),
        }
    }

    fn segment(self, facts: Facts, rows: RowsAt) -> Segment {
        Segment {
            path: self.path,
            len_bytes: self.len_bytes,
            open: self.open,
            facts,
            rows,
            _lease: self.file,
        }
    }
}

/// Holds rows in memory.
struct Memory<'a> {
    batches: Vec<RecordBatch>,
    bytes: usize,
    /// What all of them hold.
    all: &'a AtomicUsize,
    most: usize,
    full: bool,
}

impl Sink for Memory<'_> {
    fn take(&mut self, rows: RecordBatch) -> Result<(), Failure> {
        let bytes = rows.get_array_memory_size();
        self.bytes += bytes;
        self.full = self.all.fetch_add(bytes, Ordering::Relaxed) + bytes > self.most;
        if self.full {
            return Err(Failure::new(
                "the rows of segments that have no .flows.parquet beside them need more memory \
                 than --memory allows: narrow --from and --to, or run `vnplug query --prepare`",
            ));
        }
        self.batches.push(rows);
        Ok(())
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
        self.batches.clear();
        self.bytes = 0;
        Ok(())
    }
}

/// Runs `work` on each item, on so many threads; the results in order.
fn side_by_side<T: Send, R: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let threads = threads.clamp(1, items.len().max(1));
    let waiting = Mutex::new(items.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = waiting
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .next();
                    let Some((number, item)) = next else { break };
                    let result = work(item);
                    done.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((number, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Whether times from `low_ns` to `high_ns` may be asked for. A segment without packets always is.
fn in_time(scope: &Scope, low_ns: u64, high_ns: u64) -> bool {
    low_ns > high_ns || (low_ns < scope.to_ns && high_ns >= scope.from_ns)
}

/// Who encrypted a segment does not want its flows beside it in clear. And the name must be one that can
/// be written in a URL of DataFusion's.
fn may_be_beside(segment: &Path) -> bool {
    let plain = |name: &str| !name.contains(|c: char| c.is_ascii_control());
    segment
        .extension()
        .is_none_or(|extension| extension != "age")
        && fs::canonicalize(segment).is_ok_and(|path| path.to_str().is_some_and(plain))
}

/// True of a file that was written to so recently that it may be written on.
fn is_busy(file: &File) -> bool {
    let changed = file.metadata().and_then(|about| about.modified());
    changed.is_ok_and(|at| at.elapsed().unwrap_or(Duration::ZERO) < BUSY)
}

/// A file that was written to so recently may be at work.
const BUSY: Duration = Duration::from_secs(10);
/// How much earlier than the first packet of a segment others may be.
const SLACK_NS: u64 = 1_000_000_000;
