//! A disk in memory, for tests: it fails the Nth call, and remembers every operation, so that what a
//! loss of power would have left can be looked at after each of them.
//!
//! Model of a crash ([`platter`]): what was synced is there. Of what was written since, any part may be
//! there, and what a sync that failed was about is never synced by a later one. A name is there, or gone,
//! for certain once its directory was synced.

mod platter;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use self::platter::Platter;
use super::{Buffer, Disk, Entry, Space, Write, Written, errno};

/// What the disk does to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The first call that fails, counted from 0.
    pub at: u64,
    /// How many calls fail from there on.
    pub calls: u64,
    /// With this errno.
    pub errno: i32,
    /// A write leaves this many bytes nevertheless.
    pub short: usize,
}

/// The files as a reader finds them.
pub type Image = BTreeMap<PathBuf, Vec<u8>>;

/// A disk in memory. Clones are the same disk.
#[derive(Debug)]
pub struct Sim {
    shared: Arc<Mutex<Simulation>>,
    stands: Arc<Mutex<()>>,
    open: Option<PathBuf>,
    started: VecDeque<Write>,
    /// A write of this batch failed; those after it are not begun.
    broken: bool,
}

impl Clone for Sim {
    fn clone(&self) -> Self {
        Self::of(Arc::clone(&self.shared), Arc::clone(&self.stands))
    }
}

#[derive(Debug)]
struct Simulation {
    log: Vec<Step>,
    calls: u64,
    fault: Option<Fault>,
    sync_errno: Option<i32>,
    store_errno: Option<i32>,
    write_errno: Option<i32>,
    files: Image,
    capacity: u64,
    /// The file that room was reserved for, and up to where.
    reserved: Option<(PathBuf, u64)>,
    /// Bytes of files that are gone and not given back, if they are counted.
    kept: Option<u64>,
    promise: Promise,
}

/// Tells what is promised at the moment.
struct Promise(Box<dyn Fn() -> u64 + Send>);

impl std::fmt::Debug for Promise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Promise")
    }
}

#[derive(Debug, Clone)]
struct Step {
    operation: Operation,
    note: u64,
}

#[derive(Debug, Clone)]
enum Operation {
    Create(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Truncate(PathBuf, u64),
    Sync(PathBuf),
    SyncFailed(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncNames(PathBuf),
    Failed,
}

impl Sim {
    /// An empty disk of this many bytes.
    pub fn new(capacity: u64) -> Self {
        let shared = Simulation {
            log: Vec::new(),
            calls: 0,
            fault: None,
            sync_errno: None,
            store_errno: None,
            write_errno: None,
            files: Image::new(),
            capacity,
            reserved: None,
            kept: None,
            promise: Promise(Box::new(|| 0)),
        };
        Self::of(Arc::new(Mutex::new(shared)), Arc::default())
    }

    fn of(shared: Arc<Mutex<Simulation>>, stands: Arc<Mutex<()>>) -> Self {
        Self {
            shared,
            stands,
            open: None,
            started: VecDeque::new(),
            broken: false,
        }
    }

    /// Makes calls fail.
    pub fn fail(&self, fault: Option<Fault>) {
        self.with(|shared| shared.fault = fault);
    }

    /// The disk stands still while this is held: fdatasync does not come back.
    pub fn stands(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.stands)
    }

    /// Makes each fdatasync fail from now on.
    pub fn fail_syncs(&self, errno: Option<i32>) {
        self.with(|shared| shared.sync_errno = errno);
    }

    /// Makes each write, and each file that is made, fail.
    pub fn fail_writes(&self, errno: Option<i32>) {
        self.with(|shared| shared.write_errno = errno);
    }

    /// Makes each small file fail that is written as a whole.
    pub fn fail_stores(&self, errno: Option<i32>) {
        self.with(|shared| shared.store_errno = errno);
    }

    /// From now on a file that is removed gives no room back: there is a snapshot.
    pub fn keep_room(&self) {
        self.with(|shared| shared.kept = Some(0));
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.with(|shared| shared.calls)
    }

    /// Remembers a number with each operation: what is promised at the moment before it.
    pub fn watch(&self, promise: impl Fn() -> u64 + Send + 'static) {
        self.with(|shared| shared.promise = Promise(Box::new(promise)));
    }

    /// The files now.
    pub fn files(&self) -> Image {
        self.with(|shared| shared.files.clone())
    }

    /// Operations so far.
    pub fn operations(&self) -> usize {
        self.with(|shared| shared.log.len())
    }

    /// What was promised when the last of `operations` was begun, and the files that a loss of power then
    /// leaves. `part` (0 to 1000 ‰) says how much of each write that was not synced: 0 nothing, 1000
    /// all of it; with others in between some writes are torn and some missing, and so with names and
    /// lengths.
    pub fn crash(&self, operations: usize, part: u32) -> (u64, Image) {
        let log = self.with(|shared| shared.log[..operations].to_vec());
        let note = log.last().map_or(0, |step| step.note);
        let mut platter = Platter::default();
        for (index, step) in log.iter().enumerate() {
            platter.step(&step.operation, part, index);
        }
        (note, platter.image(part))
    }

    fn with<R>(&self, work: impl FnOnce(&mut Simulation) -> R) -> R {
        work(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts a call; the fault if it is its turn.
    fn call(&self) -> Result<(), Fault> {
        self.with(|shared| {
            let call = shared.calls;
            shared.calls += 1;
            match shared.fault {
                Some(fault) if (fault.at..fault.at.saturating_add(fault.calls)).contains(&call) => {
                    shared.step(Operation::Failed);
                    Err(fault)
                }
                _ => Ok(()),
            }
        })
    }

    fn operation(&self, operation: Operation) -> io::Result<()> {
        self.call().map_err(fault_error)?;
        self.with(|shared| shared.step(operation));
        Ok(())
    }

    fn sync_file(&self, path: PathBuf, errno: Option<i32>) -> io::Result<()> {
        let error = match (errno, self.call()) {
            (Some(errno), _) => io::Error::from_raw_os_error(errno),
            (None, Err(fault)) => fault_error(fault),
            (None, Ok(())) => {
                self.with(|shared| shared.step(Operation::Sync(path)));
                return Ok(());
            }
        };
        self.with(|shared| shared.step(Operation::SyncFailed(path)));
        Err(error)
    }

    fn path(&self) -> io::Result<PathBuf> {
        self.open.clone().ok_or_else(|| errno(Errno::BADF))
    }

    fn write(&self, path: PathBuf, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if let Some(errno) = self.with(|shared| shared.write_errno) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let failed = self.call().err();
        let len = failed.map_or(bytes.len(), |fault| fault.short.min(bytes.len()));
        let room = self.with(|shared| {
            let old = shared.taken(&path);
            let new = old.max(offset + len as u64);
            shared.used() - old + new <= shared.capacity
        });
        if !room {
            return Err(errno(Errno::NOSPC));
        }
        if len > 0 {
            let write = Operation::Write(path, offset, bytes[..len].to_vec());
            self.with(|shared| shared.step(write));
        }
        failed.map_or(Ok(()), |fault| Err(fault_error(fault)))
    }
}

impl Simulation {
    fn used(&self) -> u64 {
        let files: u64 = self.files.keys().map(|path| self.taken(path)).sum();
        files + self.kept.unwrap_or(0)
    }

    /// Bytes of a file, with what is reserved.
    fn taken(&self, path: &Path) -> u64 {
        let len = self.files.get(path).map_or(0, |file| file.len() as u64);
        let reserved = self.reserved.as_ref().filter(|(of, _)| of == path);
        len.max(reserved.map_or(0, |&(_, end)| end))
    }

    fn step(&mut self, operation: Operation) {
        match &operation {
            Operation::Create(path) => {
                self.files.insert(path.clone(), Vec::new());
            }
            Operation::Write(path, offset, bytes) => {
                put(self.files.entry(path.clone()).or_default(), *offset, bytes);
            }
            Operation::Truncate(path, len) => {
                self.reserved.take_if(|(of, _)| of == path);
                self.files
                    .entry(path.clone())
                    .or_default()
                    .resize(*len as usize, 0);
            }
            Operation::Rename(from, to) => {
                let content = self.files.remove(from).unwrap_or_default();
                self.files.insert(to.clone(), content);
                if let Some((of, _)) = &mut self.reserved
                    && of == from
                {
                    *of = to.clone();
                }
            }
            Operation::Remove(path) => {
                let gone = self.taken(path);
                self.reserved.take_if(|(of, _)| of == path);
                self.files.remove(path);
                self.kept = self.kept.map(|kept| kept + gone);
            }
            Operation::Sync(_)
            | Operation::SyncFailed(_)
            | Operation::SyncNames(_)
            | Operation::Failed => {}
        }
        let note = (self.promise.0)();
        self.log.push(Step { operation, note });
    }
}

impl Disk for Sim {
    fn create(&mut self, path: &Path) -> io::Result<()> {
        self.close();
        if self.with(|shared| shared.files.contains_key(path)) {
            return Err(errno(Errno::EXIST));
        }
        if let Some(errno) = self.with(|shared| shared.write_errno) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.operation(Operation::Create(path.to_owned()))?;
        self.open = Some(path.to_owned());
        Ok(())
    }

    fn allocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.call().map_err(fault_error)?;
        let path = self.path()?;
        self.with(|shared| {
            let more = (offset + bytes).saturating_sub(shared.taken(&path));
            if shared.used() + more > shared.capacity {
                return Err(errno(Errno::NOSPC));
            }
            shared.reserved = Some((path, offset + bytes));
            Ok(())
        })
    }

    fn start(&mut self, write: Write) {
        self.started.push_back(write);
    }

    fn finish(&mut self) -> Option<Written> {
        let Some(write) = self.started.pop_front() else {
            self.broken = false;
            return None;
        };
        let result = match self.broken {
            true => Err(errno(Errno::CANCELED)),
            false => self
                .path()
                .and_then(|path| self.write(path, write.offset, &write.buffer[..write.len])),
        };
        self.broken |= result.is_err();
        Some(Written { write, result })
    }

    fn sync(&mut self) -> io::Result<()> {
        drop(self.stands.lock());
        let errno = self.with(|shared| shared.sync_errno);
        self.sync_file(self.path()?, errno)
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        self.operation(Operation::Truncate(self.path()?, bytes))
    }

    fn trim(&mut self, _path: &Path) -> io::Result<()> {
        self.call().map_err(fault_error)
    }

    fn close(&mut self) {
        self.open = None;
    }

    fn store(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if let Some(errno) = self.with(|shared| shared.store_errno) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if !self.with(|shared| shared.files.contains_key(path)) {
            self.operation(Operation::Create(path.to_owned()))?;
        }
        self.write(path.to_owned(), 0, bytes)?;
        self.operation(Operation::Truncate(path.to_owned(), bytes.len() as u64))?;
        self.sync_file(path.to_owned(), None)
    }

    fn load(&mut self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        self.call().map_err(fault_error)?;
        Ok(self.with(|shared| shared.files.get(path).cloned()))
    }

    fn read(&mut self, path: &Path, offset: u64, into: &mut Buffer) -> io::Result<usize> {
        self.call().map_err(fault_error)?;
        self.with(|shared| {
            let file = shared.files.get(path).ok_or_else(|| errno(Errno::NOENT))?;
            let rest = file.get(offset as usize..).unwrap_or_default();
            let len = rest.len().min(into.len());
            into[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        })
    }

    fn date(&mut self, _like: &Path) -> io::Result<()> {
        self.call().map_err(fault_error)
    }

    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let len = self.with(|shared| shared.files.get(path).map(Vec::len));
        if len.is_none() {
            self.operation(Operation::Create(path.to_owned()))?;
        }
        self.write(path.to_owned(), len.unwrap_or(0) as u64, bytes)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.operation(Operation::Rename(from.to_owned(), to.to_owned()))
    }

    fn publish(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        if self.with(|shared| shared.files.contains_key(to)) {
            return Err(errno(Errno::EXIST));
        }
        self.rename(from, to)?;
        self.open = Some(to.to_owned());
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> io::Result<bool> {
        self.operation(Operation::Remove(path.to_owned()))?;
        Ok(true)
    }

    fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        self.operation(Operation::SyncNames(dir.to_owned()))
    }

    fn list(&mut self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.call().map_err(fault_error)?;
        let entry = |(path, content): (&PathBuf, &Vec<u8>)| Entry {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            len: content.len() as u64,
            bytes: content.len() as u64,
            // It has no clock: everything is new.
            written_ns: u64::MAX,
        };
        let inside = |(path, _): &(&PathBuf, &Vec<u8>)| path.parent() == Some(dir);
        Ok(self.with(|shared| shared.files.iter().filter(inside).map(entry).collect()))
    }

    fn space(&mut self, _dir: &Path) -> io::Result<Space> {
        self.call().map_err(fault_error)?;
        self.with(|shared| {
            let used = shared.used();
            Ok(Space {
                total: shared.capacity,
                free: shared.capacity.saturating_sub(used),
            })
        })
    }

    fn lock(&mut self, _path: &Path) -> io::Result<()> {
        self.call().map_err(fault_error)
    }
}

fn fault_error(fault: Fault) -> io::Error {
    io::Error::from_raw_os_error(fault.errno)
}

fn put(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset as usize..end].copy_from_slice(bytes);
}
