//! A disk in memory, for tests: it fails the Nth call, and remembers every operation, so that what a
//! loss of power would have left can be looked at after each of them.
//!
//! Model of a crash: what was synced is there. Of writes that were not synced since, any part may be
//! there. A file's name is there once its directory was synced.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::{Disk, Entry, Space, Write, Written, errno};

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
    shared: Arc<Mutex<Shared>>,
    open: Option<PathBuf>,
    started: VecDeque<Write>,
    /// A write of this batch failed; those behind it are not begun.
    broken: bool,
}

impl Clone for Sim {
    fn clone(&self) -> Self {
        Self::of(Arc::clone(&self.shared))
    }
}

#[derive(Debug)]
struct Shared {
    log: Vec<Step>,
    calls: u64,
    fault: Option<Fault>,
    sync_errno: Option<i32>,
    files: Image,
    capacity: u64,
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
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncNames,
    Failed,
}

impl Sim {
    /// An empty disk of so many bytes.
    pub fn new(capacity: u64) -> Self {
        let shared = Shared {
            log: Vec::new(),
            calls: 0,
            fault: None,
            sync_errno: None,
            files: Image::new(),
            capacity,
            promise: Promise(Box::new(|| 0)),
        };
        Self::of(Arc::new(Mutex::new(shared)))
    }

    fn of(shared: Arc<Mutex<Shared>>) -> Self {
        Self {
            shared,
            open: None,
            started: VecDeque::new(),
            broken: false,
        }
    }

    /// Makes calls fail.
    pub fn fail(&self, fault: Option<Fault>) {
        self.with(|shared| shared.fault = fault);
    }

    /// Makes each fdatasync fail from now on.
    pub fn fail_syncs(&self, errno: Option<i32>) {
        self.with(|shared| shared.sync_errno = errno);
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
    /// all of it; with others in between some writes are torn and some missing.
    pub fn crash(&self, operations: usize, part: u32) -> (u64, Image) {
        let log = self.with(|shared| shared.log[..operations].to_vec());
        let note = log.last().map_or(0, |step| step.note);
        let mut named = Image::new(); // what is there whatever happens
        let mut seen = Image::new(); // what a program saw
        let mut stable = Image::new(); // contents that were synced
        for (index, step) in log.iter().enumerate() {
            match &step.operation {
                Operation::Create(path) => {
                    seen.insert(path.clone(), Vec::new());
                    stable.insert(path.clone(), Vec::new());
                }
                Operation::Write(path, offset, bytes) => {
                    put(seen.entry(path.clone()).or_default(), *offset, bytes);
                    let kept = kept(bytes.len(), part, index);
                    if kept > 0 {
                        let file = stable.entry(path.clone()).or_default();
                        put(file, *offset, &bytes[..kept]);
                    }
                }
                Operation::Truncate(path, len) => {
                    seen.entry(path.clone())
                        .or_default()
                        .resize(*len as usize, 0);
                    if part == 1000 {
                        stable
                            .entry(path.clone())
                            .or_default()
                            .resize(*len as usize, 0);
                    }
                }
                Operation::Sync(path) => {
                    let content = seen.get(path).cloned().unwrap_or_default();
                    stable.insert(path.clone(), content);
                }
                Operation::Rename(from, to) => {
                    for files in [&mut seen, &mut stable] {
                        if let Some(content) = files.remove(from) {
                            files.insert(to.clone(), content);
                        }
                    }
                }
                Operation::Remove(path) => {
                    for files in [&mut seen, &mut stable, &mut named] {
                        files.remove(path);
                    }
                }
                Operation::SyncNames => {
                    named = seen.keys().map(|path| (path.clone(), Vec::new())).collect();
                }
                Operation::Failed => {}
            }
        }
        for (path, content) in stable {
            if part == 1000 || named.contains_key(&path) {
                named.insert(path, content);
            }
        }
        (note, named)
    }

    fn with<R>(&self, work: impl FnOnce(&mut Shared) -> R) -> R {
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

    fn path(&self) -> io::Result<PathBuf> {
        self.open.clone().ok_or_else(|| errno(Errno::BADF))
    }

    fn write(&self, path: PathBuf, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let failed = self.call().err();
        let len = failed.map_or(bytes.len(), |fault| fault.short.min(bytes.len()));
        let room = self.with(|shared| {
            let used: u64 = shared.files.values().map(|file| file.len() as u64).sum();
            let old = shared.files.get(&path).map_or(0, |file| file.len() as u64);
            used - old + old.max(offset + len as u64) <= shared.capacity
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

impl Shared {
    fn step(&mut self, operation: Operation) {
        match &operation {
            Operation::Create(path) => {
                self.files.insert(path.clone(), Vec::new());
            }
            Operation::Write(path, offset, bytes) => {
                put(self.files.entry(path.clone()).or_default(), *offset, bytes);
            }
            Operation::Truncate(path, len) => {
                self.files
                    .entry(path.clone())
                    .or_default()
                    .resize(*len as usize, 0);
            }
            Operation::Rename(from, to) => {
                let content = self.files.remove(from).unwrap_or_default();
                self.files.insert(to.clone(), content);
            }
            Operation::Remove(path) => {
                self.files.remove(path);
            }
            Operation::Sync(_) | Operation::SyncNames | Operation::Failed => {}
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
        self.operation(Operation::Create(path.to_owned()))?;
        self.open = Some(path.to_owned());
        Ok(())
    }

    fn allocate(&mut self, _offset: u64, _bytes: u64) -> io::Result<()> {
        self.call().map_err(fault_error)
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
        if let Some(errno) = self.with(|shared| shared.sync_errno) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.operation(Operation::Sync(self.path()?))
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
        if !self.with(|shared| shared.files.contains_key(path)) {
            self.operation(Operation::Create(path.to_owned()))?;
        }
        self.write(path.to_owned(), 0, bytes)?;
        self.operation(Operation::Truncate(path.to_owned(), bytes.len() as u64))?;
        self.operation(Operation::Sync(path.to_owned()))
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

    fn remove(&mut self, path: &Path) -> io::Result<bool> {
        self.operation(Operation::Remove(path.to_owned()))?;
        Ok(true)
    }

    fn sync_dir(&mut self, _dir: &Path) -> io::Result<()> {
        self.operation(Operation::SyncNames)
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
        };
        let inside = |(path, _): &(&PathBuf, &Vec<u8>)| path.parent() == Some(dir);
        Ok(self.with(|shared| shared.files.iter().filter(inside).map(entry).collect()))
    }

    fn space(&mut self, _dir: &Path) -> io::Result<Space> {
        self.call().map_err(fault_error)?;
        self.with(|shared| {
            let used: u64 = shared.files.values().map(|file| file.len() as u64).sum();
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

/// How many of a write's bytes are there, in whole sectors; `salt` tells writes apart.
fn kept(len: usize, part: u32, salt: usize) -> usize {
    match part {
        0 => 0,
        1000 => len,
        _ => {
            let share = mixed((salt as u64) << 32 | u64::from(part)) >> 33 & 1023;
            // One in eight is whole, one in eight is missing.
            match share % 8 {
                0 => len,
                1 => 0,
                _ => (len as u64 * share / 1024) as usize / SECTOR * SECTOR,
            }
        }
    }
}

/// splitmix64: each bit of the seed changes half of the bits.
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const SECTOR: usize = 512;
