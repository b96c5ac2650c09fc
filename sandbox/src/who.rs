//! Who made a call: the process, the file it runs, its command line and its ancestors.
//!
//! A call's thread is held while it is looked at, so its number means this thread until the call is answered. What
//! was learnt counts only if the call still waited afterwards; the caller asks (`Listener::waits`). A process (where the
//! kernel does not say which one, a thread) that was seen before is known again by a directory of `/proc` that was opened
//! then (it never means another one), by the file that it runs, and by its command line: exec changes one of them, for
//! all of its threads. A file that was changed a moment ago can be changed once more and have the same times: of it nothing
//! is remembered.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};
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
    /// Held while a file is read; whoever only asks for what was seen does not need it.
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
/// They may take so many of the descriptors that this process may have: one in this number.
const SHARE: u64 = 8;
const MOST_HASHES: usize = 4096;
const MOST_PROCESSES: usize = 1024;
/// So much of a command line is kept.
const MOST_LINE_BYTES: usize = 4096;
/// Longest file that is read.
const MOST_FILE_BYTES: u64 = 256 << 20;
/// So many ancestors are looked up.
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

    /// Who a thread is; the file that it runs is read if it was not before. `root` is the supervisor, whose
    /// children have no more ancestors. It ends early if nobody `waits`.
    ///
    /// # Errors
    /// If it is gone, may not be looked at, or nobody waits.
    pub(crate) fn look(
        &self,
        thread: u32,
        root: u32,
        waits: impl Fn() -> bool,
    ) -> io::Result<Arc<Who>> {
        if let Some(who) = self.seen(thread) {
            return Ok(who);
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
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let lines = File::from(openat(&directory, "cmdline", flags, Mode::empty())?);
        let line = line_of(&lines, &mut [0; MOST_LINE_BYTES])?.to_vec();
        let pid = group_of(thread)?;
        let started = started(pid)?;
        let process = lock(&self.processes).get(&pid).cloned();
        let same = process.filter(|(its_version, its_line, who)| {
            who.started == started && *its_version == version && *its_line == line
        });
        let who = match same {
            Some((_, _, who)) => who,
            None => {
                let who = Arc::new(Who {
                    pid,
                    started,
                    program: fs::read_link(format!("/proc/{thread}/exe"))?,
                    hash: self.hash(&directory, version, keeps, waits)?,
                    arguments: words_of(&line),
                    ancestors: ancestors(pid, root),
                });
                if !is_settled {
                    return Ok(who);
                }
                let mut processes = lock(&self.processes);
                if processes.len() >= MOST_PROCESSES {
                    processes.clear();
                }
                processes.insert(pid, (version, line.clone(), Arc::clone(&who)));
                who
            }
        };
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
            who: Arc::clone(&who),
        };
        threads.insert(thread, entry);
        Ok(who)
    }

    /// Forgets a thread of which something was learnt that does not count.
    pub(crate) fn forget(&self, thread: u32) {
        if let Some(entry) = lock(&self.threads).remove(&thread) {
            lock(&self.processes).remove(&entry.who.pid);
        }
    }

    fn hash(
        &self,
        directory: &OwnedFd,
        version: Version,
        keeps: bool,
        waits: impl Fn() -> bool,
    ) -> io::Result<Option<[u8; 32]>> {
        let mut hashes = lock(&self.hashes);
        if let Some(hash) = hashes.get(&version) {
            return Ok(*hash);
        }
        let hash = match read_hash(directory, version, waits) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            hash => hash.ok(),
        };
        if !keeps {
            return Ok(hash);
        }
        if hashes.len() >= MOST_HASHES {
            hashes.clear();
        }
        hashes.insert(version, hash);
        Ok(hash)
    }
}

/// SHA-256 of the file that a process runs. It cannot be written to while it runs; the version is compared all the same.
/// All programs wait for the thread that reads: too long files are not read, and none for nobody.
fn read_hash(
    directory: &OwnedFd,
    version: Version,
    waits: impl Fn() -> bool,
) -> io::Result<[u8; 32]> {
    if version.length > MOST_FILE_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let file = openat(
        directory,
        "exe",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut file = File::from(file).take(version.length);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        if !waits() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match file.read(&mut buffer)? {
            0 => break,
            length => hash.update(&buffer[..length]),
        }
    }
    if Version::of(&file.get_ref().metadata()?) != version {
        return Err(io::Error::other("the file has changed"));
    }
    Ok(hash.finalize().into())
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
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_with_its_file_and_its_parents() {
        let known = Known::default();
        let pid = std::process::id();
        let who = known.look(pid, 1, || true).unwrap();
        assert_eq!(who.pid, pid);
        assert_eq!(who.program, std::env::current_exe().unwrap());
        let text = fs::read(&who.program).unwrap();
        assert_eq!(who.hash.unwrap(), <[u8; 32]>::from(Sha256::digest(text)));
        assert!(!who.ancestors.is_empty());
        assert_eq!(who.arguments[0], std::env::args().next().unwrap());
        assert!(Arc::ptr_eq(&known.seen(pid).unwrap(), &who));
    }

    /// A file that is written twice within one tick, on a file system whose times are those of ticks, and what is known of it
    /// after the first and the second time.
    fn hashes_of_two(now: impl Fn() -> SystemTime) -> Option<[[u8; 32]; 2]> {
        let dir = vnplug_testing::TestDir::new("sandbox-racy");
        let mount = |words: &[&str]| {
            let mut command = std::process::Command::new(words[0]);
            command
                .args(&words[1..])
                .arg(&dir.0)
                .status()
                .unwrap()
                .success()
        };
        // Others have finer times since Linux 6.13.
        assert!(mount(&["mount", "-t", "ramfs", "ramfs"]));
        let directory = OwnedFd::from(File::open(&dir.0).unwrap());
        let found = (0..1000).find_map(|_| {
            let known = Known::default();
            let mut seen = Vec::new();
            for text in ["one", "two"] {
                fs::write(dir.path("exe"), text).unwrap();
                let version = version_in(&directory).unwrap();
                let is_settled = version.is_settled(now());
                let hash = known.hash(&directory, version, is_settled, || true);
                seen.push((version, hash.unwrap().unwrap()));
            }
            (seen[0].0 == seen[1].0).then(|| [seen[0].1, seen[1].1])
        });
        drop(directory);
        assert!(mount(&["umount"]));
        found
    }

    #[test]
    fn a_file_that_changes_twice_in_a_tick_is_not_taken_for_the_first_one() {
        let texts = ["one", "two"].map(|text| <[u8; 32]>::from(Sha256::digest(text)));
        let found = hashes_of_two(SystemTime::now);
        assert_eq!(found.expect("two changes have one time"), texts);
        // The control: who believes that the time is long past is wrong.
        let found = hashes_of_two(|| SystemTime::now() + Duration::from_secs(9));
        assert_eq!(found.expect("two changes have one time"), [texts[0]; 2]);
    }

    #[test]
    fn a_time_is_past_when_no_change_can_have_it() {
        let at = |seconds, nanoseconds| Version {
            device: 0,
            number: 0,
            length: 0,
            changed: (seconds, nanoseconds),
            written: (0, 0),
        };
        let now = SystemTime::UNIX_EPOCH + Duration::new(1000, 30_000_000);
        for (seconds, nanoseconds, is_settled) in [
            (1000, 10_000_000, true),
            (1000, 10_000_001, false),
            (1000, 40_000_000, false),
            (1000, 0, false),
            (998, 0, false),
            (997, 0, true),
            (-1, 5, true),
        ] {
            let version = at(seconds, nanoseconds);
            assert_eq!(version.is_settled(now), is_settled, "{version:?}");
        }
    }

    #[test]
    fn a_long_file_is_not_read_and_none_for_nobody() {
        let dir = vnplug_testing::TestDir::new("sandbox-who");
        let file = File::create(dir.path("exe")).unwrap();
        let directory = OwnedFd::from(File::open(&dir.0).unwrap());
        let read = |length: u64, waits: bool| {
            file.set_len(length).unwrap();
            let version = version_in(&directory).unwrap();
            read_hash(&directory, version, || waits).map_err(|error| error.kind())
        };
        assert!(read(1 << 20, true).is_ok());
        assert_eq!(read(1 << 20, false), Err(io::ErrorKind::Interrupted));
        assert_eq!(read(1 << 40, true), Err(io::ErrorKind::FileTooLarge));
    }
}
