//! Who made a call: the process, the file it runs, its command line and its ancestors.
//!
//! A call's thread is held while it is looked at, so its number means this thread until the call is answered. What
//! was learnt counts only if the call still waited afterwards; the caller asks (`Listener::waits`). A process (where the
//! kernel does not say which one, a thread) that was seen before is known again by a directory of `/proc` that was opened
//! then (it never means another one), by the file that it runs, and by its command line: exec changes one of them, for
//! all of its threads. A file that was changed a moment ago can be changed once more and have the same times: of it nothing
//! is remembered.
//!
//! A file is read piece by piece ([`Known::go_on`]), so that whoever looks up can look up others between: some programs are long,
//! and those that their users may write are read anew for each process.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::act::{Ancestor, Who};
use crate::sys::lock;
use crate::sys::process::{field, group_of};

/// What is known of threads, and of files that were read.
#[derive(Debug, Default)]
pub(crate) struct Known {
    threads: Mutex<HashMap<u32, Entry>>,
    /// The process of the thread that was looked up last, of each process: its other threads are the same.
    processes: Mutex<HashMap<u32, Process>>,
    hashes: Mutex<HashMap<Version, Option<[u8; 32]>>>,
}

/// The file that a process runs, its command line, and who it is.
type Process = (Version, Vec<u8>, Arc<Who>);

#[derive(Debug)]
struct Entry {
    directory: OwnedFd,
    /// `cmdline` in it, which is read anew each time.
    lines: File,
    version: Version,
    line: Vec<u8>,
    who: Arc<Who>,
}

/// How far it is known who made a call.
#[derive(Debug)]
pub(crate) enum Looked {
    Whole(Arc<Who>),
    /// The file that runs is not read to its end.
    Part(Box<Look>),
}

/// A look at a thread whose file is being read.
#[derive(Debug)]
pub(crate) struct Look {
    thread: u32,
    directory: OwnedFd,
    /// The file that runs, if it may be read: its name leads nowhere once the process' first thread has ended.
    exe: Option<File>,
    version: Version,
    line: Vec<u8>,
    is_settled: bool,
    keeps: bool,
    /// All but the hash.
    who: Who,
    hash: Sha256,
    /// How much of the file is in it.
    read: u64,
}

/// A file in one state: written to, it is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Version {
    device: u64,
    number: u64,
    length: u64,
    changed: (i64, i64),
    written: (i64, i64),
}

/// How many are remembered at most; each costs two descriptors.
const MOST_THREADS: u64 = 4096;
/// They may take this part of the descriptors that this process may have: one in 8.
const SHARE: u64 = 8;
const MOST_HASHES: usize = 4096;
const MOST_PROCESSES: usize = 1024;
/// The most of a command line that is kept.
const MOST_LINE_BYTES: usize = 4096;
/// Longest file that is read.
const MOST_FILE_BYTES: u64 = 256 << 20;
/// The most of a file that is read in one go: about a millisecond.
const PIECE_BYTES: u64 = 1 << 20;
/// The most ancestors that are looked up.
const MOST_ANCESTORS: usize = 16;
/// Two ticks of the slowest clock by which the kernel stamps files (100 a second): a file that was changed longer ago gets
/// another time when it is changed again. Linux 6.13 stamps finer on most file systems, and nobody says on which.
const TICKS: Duration = Duration::from_millis(20);
/// The same where times have no fractions of a second, or of two (FAT).
const SECONDS: Duration = Duration::from_secs(3);

impl Known {
    /// Who a thread is, if nothing has to be read for it but what changes.
    pub(crate) fn seen(&self, thread: u32) -> Option<Arc<Who>> {
        let threads = lock(&self.threads);
        let entry = threads.get(&thread)?;
        let version = version_in(&entry.directory).ok()?;
        let mut room = [0; MOST_LINE_BYTES];
        let line = line_of(&entry.lines, &mut room).ok()?;
        let is_same = version == entry.version && line == entry.line;
        is_same.then(|| Arc::clone(&entry.who))
    }

    /// Who a thread is, as far as that is known without reading the file that it runs. `root` is the supervisor, whose
    /// children have no more ancestors.
    ///
    /// # Errors
    /// If it is gone, or may not be looked at.
    pub(crate) fn look(&self, thread: u32, root: u32) -> io::Result<Looked> {
        if let Some(who) = self.seen(thread) {
            return Ok(Looked::Whole(who));
        }
        let directory = openat(
            CWD,
            format!("/proc/{thread}"),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let version = version_in(&directory)?;
        // Of the time before the file is read: what changes it later has another time than this version.
        let is_settled = version.is_settled(SystemTime::now());
        let keeps = is_settled && is_of_others(&directory)?;
        let line = line_of(&lines_in(&directory)?, &mut [0; MOST_LINE_BYTES])?.to_vec();
        let pid = group_of(thread)?;
        let started = started(pid)?;
        let process = lock(&self.processes).get(&pid).cloned();
        let same = process.filter(|(its_version, its_line, who)| {
            who.started == started && *its_version == version && *its_line == line
        });
        if let Some((_, _, who)) = same {
            self.remember(thread, directory, (version, line, Arc::clone(&who)))?;
            return Ok(Looked::Whole(who));
        }
        let exe = exe_in(&directory)?;
        let who = Who {
            pid,
            started,
            program: fs::read_link(format!("/proc/{thread}/exe"))?,
            hash: None,
            arguments: words_of(&line),
            ancestors: ancestors(pid, root),
        };
        self.start(Look {
            thread,
            directory,
            keeps: keeps && exe.is_some(),
            exe,
            version,
            line,
            is_settled,
            who,
            hash: Sha256::new(),
            read: 0,
        })
    }

    /// Nothing is read of a file that was read before, is too long, or may not be read.
    fn start(&self, look: Look) -> io::Result<Looked> {
        let known = match look.version.length > MOST_FILE_BYTES || look.exe.is_none() {
            true => Some(None),
            false => lock(&self.hashes).get(&look.version).copied(),
        };
        match known {
            Some(hash) => self.finish(look, hash),
            None => Ok(Looked::Part(Box::new(look))),
        }
    }

    /// Reads on, a piece of the file.
    ///
    /// # Errors
    /// If the thread is gone.
    pub(crate) fn go_on(&self, mut look: Box<Look>) -> io::Result<Looked> {
        match look.read_on() {
            Ok(false) => Ok(Looked::Part(look)),
            Ok(true) => {
                let hash = look.hash.finalize_reset();
                self.finish(*look, Some(hash.into()))
            }
            // It changes while it runs, or its disk fails: nothing is known of it but that.
            Err(_) => {
                look.keeps = false;
                self.finish(*look, None)
            }
        }
    }

    fn finish(&self, look: Look, hash: Option<[u8; 32]>) -> io::Result<Looked> {
        if look.keeps {
            let mut hashes = lock(&self.hashes);
            if hashes.len() >= MOST_HASHES {
                hashes.clear();
            }
            hashes.insert(look.version, hash);
        }
        let who = Arc::new(Who { hash, ..look.who });
        if look.is_settled {
            let process = (look.version, look.line, Arc::clone(&who));
            let mut processes = lock(&self.processes);
            if processes.len() >= MOST_PROCESSES {
                processes.clear();
            }
            processes.insert(who.pid, process.clone());
            drop(processes);
            self.remember(look.thread, look.directory, process)?;
        }
        Ok(Looked::Whole(who))
    }

    /// The thread is known again by this directory.
    fn remember(
        &self,
        thread: u32,
        directory: OwnedFd,
        (version, line, who): Process,
    ) -> io::Result<()> {
        let lines = lines_in(&directory)?;
        let mut threads = lock(&self.threads);
        if threads.len() >= most_threads() {
            // Threads that are gone first; if all live, whoever comes again is looked up again.
            threads.retain(|_, entry| version_in(&entry.directory).is_ok());
            if threads.len() >= most_threads() {
                threads.clear();
            }
        }
        let entry = Entry {
            directory,
            lines,
            version,
            line,
            who,
        };
        threads.insert(thread, entry);
        Ok(())
    }

    /// Forgets a thread of which something was learnt that does not count.
    pub(crate) fn forget(&self, thread: u32) {
        if let Some(entry) = lock(&self.threads).remove(&thread) {
            lock(&self.processes).remove(&entry.who.pid);
        }
    }
}

impl Look {
    /// Which file is read: its device and number.
    pub(crate) fn file(&self) -> (u64, u64) {
        (self.version.device, self.version.number)
    }

    /// How much of it is read.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }

    /// Reads a piece for the SHA-256 of the file that a process runs; whether that was the last. The file cannot be written
    /// to while it runs; the version is compared all the same.
    fn read_on(&mut self) -> io::Result<bool> {
        let Some(exe) = &self.exe else {
            return Err(io::ErrorKind::PermissionDenied.into());
        };
        let to = self.version.length.min(self.read + PIECE_BYTES);
        let mut buffer = vec![0; 1 << 16];
        while self.read < to {
            let left = usize::try_from(to - self.read).unwrap_or(usize::MAX);
            let most = left.min(buffer.len());
            match exe.read_at(&mut buffer[..most], self.read)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => {
                    self.hash.update(&buffer[..length]);
                    self.read += length as u64;
                }
            }
        }
        if Version::of(&exe.metadata()?) != self.version {
            return Err(io::Error::other("the file has changed"));
        }
        Ok(self.read == self.version.length)
    }
}

impl Version {
    /// Whether whatever changes the file from now on gives it another time. A time that is to come is none.
    fn is_settled(&self, now: SystemTime) -> bool {
        let (seconds, nanoseconds) = self.changed;
        let needed = if nanoseconds == 0 { SECONDS } else { TICKS };
        let changed = u64::try_from(seconds).ok().map(|seconds| {
            SystemTime::UNIX_EPOCH
                + Duration::new(seconds, nanoseconds.clamp(0, 999_999_999) as u32)
        });
        changed.is_none_or(|changed| now.duration_since(changed).is_ok_and(|age| age >= needed))
    }

    fn of(file: &fs::Metadata) -> Self {
        Self {
            device: file.dev(),
            number: file.ino(),
            length: file.size(),
            changed: (file.ctime(), file.ctime_nsec()),
            written: (file.mtime(), file.mtime_nsec()),
        }
    }
}

/// The file that a process runs, if it may be read.
fn exe_in(directory: &OwnedFd) -> io::Result<Option<File>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match openat(directory, "exe", flags, Mode::empty()) {
        Ok(file) => Ok(Some(File::from(file))),
        Err(Errno::ACCESS | Errno::PERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn version_in(directory: &OwnedFd) -> io::Result<Version> {
    let stat = statat(directory, "exe", AtFlags::empty())?;
    Ok(Version {
        device: stat.st_dev,
        number: stat.st_ino,
        length: stat.st_size as u64,
        changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
        written: (stat.st_mtime, stat.st_mtime_nsec as i64),
    })
}

/// Whether the file that a process runs is another user's, and nobody else may write it.
///
/// NB: what the program may write it can change without another time: by memory of a file system in memory that it has mapped
/// and read before (Linux 6.18).
fn is_of_others(directory: &OwnedFd) -> io::Result<bool> {
    let stat = statat(directory, "exe", AtFlags::empty())?;
    let us = rustix::process::geteuid();
    let is_closed = stat.st_mode & 0o022 == 0;
    Ok(is_closed && !us.is_root() && stat.st_uid != us.as_raw())
}

/// `cmdline` of a process.
fn lines_in(directory: &OwnedFd) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(File::from(openat(
        directory,
        "cmdline",
        flags,
        Mode::empty(),
    )?))
}

/// The command line as it is now.
fn line_of<'a>(lines: &File, room: &'a mut [u8; MOST_LINE_BYTES]) -> io::Result<&'a [u8]> {
    let length = lines.read_at(room, 0)?;
    Ok(&room[..length])
}

/// A command line as words.
fn words_of(line: &[u8]) -> Vec<String> {
    let whole = line.strip_suffix(&[0]).unwrap_or(line);
    let words = whole.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn most_threads() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let share = limit.current.unwrap_or(u64::MAX) / SHARE;
    share.min(MOST_THREADS) as usize
}

/// When a process started, in clock ticks since boot: the 22nd field of its `stat`, the 20th after the name.
fn started(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after = text.rsplit_once(')').map_or("", |(_, after)| after);
    let field = after.split_whitespace().nth(19);
    field
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The parents of a process, up to the child of `root`. A parent was still it if its child says so afterwards.
fn ancestors(pid: u32, root: u32) -> Vec<Ancestor> {
    let mut found = Vec::new();
    let mut child = pid;
    while found.len() < MOST_ANCESTORS {
        let Some(parent) = parent_of(child).filter(|parent| *parent != root && *parent > 1) else {
            break;
        };
        let Ok(program) = fs::read_link(format!("/proc/{parent}/exe")) else {
            break;
        };
        if parent_of(child) != Some(parent) {
            break;
        }
        found.push(Ancestor {
            pid: parent,
            program,
        });
        child = parent;
    }
    found
}

fn parent_of(pid: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    field(&text, "PPid:")
}

#[cfg(test)]
#[path = "who_tests.rs"]
mod tests;
