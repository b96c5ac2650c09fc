//! The segments of recordings, and where their rows are.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use datafusion::arrow::array::{AsArray, BooleanArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::TimestampNanosecondType;
use datafusion::arrow::error::ArrowError;
use vnplug_store::extract::{Found, captures, find};

use crate::beside::{self, Identity, Trouble};
use crate::failure::Failure;
use crate::losses;
use crate::rows::{MOST_ROWS, ROW_BYTES, stamp};
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

impl Scope {
    /// How many rows each job holds at most while it reads.
    fn most_rows(&self) -> usize {
        (self.memory_bytes / self.jobs / ROW_BYTES).clamp(LEAST_ROWS, MOST_ROWS)
    }
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
        // All have their lease before the first is read.
        let at_work = losses::at_work(scope);
        let look = |found| FoundSegment::of(found, &at_work);
        let mut states = side_by_side(scope.jobs, find(&scope.places)?.rev(), look);
        states.reverse();
        let is_asked = |state: &Result<FoundSegment, Problem>| {
            state.as_ref().is_ok_and(|state| state.may_be_in(scope)) || state.is_err()
        };
        let states = states.into_iter().filter(is_asked);
        let load = |state: Result<FoundSegment, Problem>| state?.load(scope, &memory);
        let mut catalog = Self::default();
        for loaded in side_by_side(scope.jobs, states, load) {
            match loaded {
                Ok(segment) => {
                    let damage = segment.facts.damage.clone();
                    catalog.problems.extend(damage);
                    if in_time(scope, segment.facts.first_ns, segment.facts.last_ns) {
                        catalog.segments.push(segment);
                    }
                }
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
    /// A file was made beside it, of this many packets; the last is what is wrong with the segment.
    Made(PathBuf, u64, Option<String>),
    /// It cannot be read, or nothing can be written beside it.
    Failed(String),
}

/// How many segments have no file beside them.
pub(crate) fn unprepared(scope: &Scope) -> usize {
    let (captures, _) = captures(&scope.places);
    let paths = captures.iter().map(|capture| &capture.path);
    paths.filter(|path| !beside::path_of(path).exists()).count()
}

/// Makes the files beside closed segments that have none. Each segment is held only while it is read,
/// so that the recorder can go on recycling.
///
/// # Errors
/// [`Failure`] if a place cannot be read.
pub(crate) fn prepare(scope: &Scope, tell: &(impl Fn(Prepared) + Sync)) -> Result<(), Failure> {
    let at_work = losses::at_work(scope);
    let make = |found: Found| match FoundSegment::of(found, &at_work) {
        Ok(state) => state.prepare(scope).into_iter().for_each(tell),
        Err(Problem::Segment(failure) | Problem::All(failure)) => {
            tell(Prepared::Failed(failure.0));
        }
    };
    side_by_side(scope.jobs, find(&scope.places)?, make);
    Ok(())
}

/// A segment as it was found.
struct FoundSegment {
    path: PathBuf,
    file: File,
    len_bytes: u64,
    identity: Identity,
    open: bool,
    /// What is wrong with the file as a whole.
    problem: Option<String>,
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

impl FoundSegment {
    /// `at_work` are the names of segments that recorders write to.
    fn of(found: Found, at_work: &HashSet<String>) -> Result<Self, Problem> {
        let problem = found.problem().map(|problem| problem.to_string());
        let path = found.path;
        let fail = |error: std::io::Error| Problem::Segment(Failure::about(path.display(), error));
        let file = found.file.map_err(fail)?;
        let identity = Identity::of(&file).map_err(fail)?;
        let facts = beside::facts(&path, identity);
        let closed = found.trailer.or(found.longer);
        let (low_ns, high_ns) = match (&facts, closed) {
            (Some(facts), _) if problem.is_none() => (facts.first_ns, facts.last_ns),
            (_, Some(trailer)) => (trailer.low_ns, trailer.high_ns),
            (_, None) => {
                let start = found.start_ns.unwrap_or(0);
                (start.saturating_sub(SLACK_NS), u64::MAX)
            }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let quiet = match at_work.contains(&*name) {
            true => AT_WORK,
            false => BUSY,
        };
        let open = facts.is_none() && closed.is_none() && is_busy(&file, quiet);
        Ok(Self {
            file,
            identity,
            len_bytes: found.len_bytes,
            open,
            problem,
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
        Some(
            match beside::make(&self.path, &self.file, self.identity, scope.most_rows()) {
                Ok(facts) => Prepared::Made(path, facts.packets, facts.damage.or(self.problem)),
                Err(Trouble::Changed) => return None,
                Err(Trouble::Beside(why)) => Prepared::Failed(format!("{}: {why}", path.display())),
                Err(Trouble::Segment(failure)) => Prepared::Failed(failure.0),
            },
        )
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
            scope,
            full: false,
        };
        let scanned = self.file.try_clone().map_err(Failure::from);
        match scanned.and_then(|file| scan(&self.path, file, scope.most_rows(), &mut sink)) {
            Ok(facts) => {
                let rows = RowsAt::Memory(sink.batches);
                Ok(self.segment(facts, rows))
            }
            Err(failure) if sink.full => Err(Problem::All(failure)),
            Err(failure) => Err(Problem::Segment(failure)),
        }
    }

    fn segment(self, mut facts: Facts, rows: RowsAt) -> Segment {
        facts.damage = facts.damage.or(self.problem);
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
    scope: &'a Scope,
    full: bool,
}

impl Sink for Memory<'_> {
    fn take(&mut self, rows: RecordBatch) -> Result<(), Failure> {
        let rows = in_scope(&rows, self.scope)?;
        let bytes = rows.get_array_memory_size();
        self.bytes += bytes;
        self.full = self.all.fetch_add(bytes, Ordering::Relaxed) + bytes > self.scope.memory_bytes;
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

/// The rows that may be asked for.
fn in_scope(rows: &RecordBatch, scope: &Scope) -> Result<RecordBatch, ArrowError> {
    let times = |name: &str| {
        let column = rows.column_by_name(name);
        column.and_then(|column| column.as_primitive_opt::<TimestampNanosecondType>())
    };
    let (Some(first), Some(last)) = (times("first"), times("last")) else {
        return Ok(rows.clone());
    };
    let (from, to) = (stamp(scope.from_ns), stamp(scope.to_ns));
    let is_in: BooleanArray = (0..rows.num_rows())
        .map(|row| Some(last.value(row) >= from && (first.value(row) < to || to == i64::MAX)))
        .collect();
    filter_record_batch(rows, &is_in)
}

/// Runs `work` on each item, on this many threads; the results in order.
fn side_by_side<T: Send, R: Send>(
    threads: usize,
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let waiting = Mutex::new(items.enumerate());
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
fn is_busy(file: &File, quiet: Duration) -> bool {
    let changed = file.metadata().and_then(|about| about.modified());
    changed.is_ok_and(|at| at.elapsed().unwrap_or(Duration::ZERO) < quiet)
}

/// A file that was written to so recently may be at work.
const BUSY: Duration = Duration::from_secs(10);
/// The same of a segment that a recorder says it is writing: the wire may be quiet. Then it is taken for
/// killed.
const AT_WORK: Duration = Duration::from_secs(3600);
/// With less it would be more writing than counting.
const LEAST_ROWS: usize = 1 << 12;
/// How much earlier than the first packet of a segment others may be.
const SLACK_NS: u64 = 1_000_000_000;
