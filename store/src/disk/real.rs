//! One directory of a real file system.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    Advice, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec,
    Timestamps, UTIME_OMIT, fadvise, fallocate, fcntl_getfl, fcntl_setfl, fdatasync, flock, fstat,
    fsync, ftruncate, futimens, lstat, open, renameat_with, stat, statvfs,
};
use rustix::io::{Errno, pread, pwrite};

use super::directory::sync_directory;
use super::lease::{Recycled, open_regular};
use super::uring::Uring;
use super::{Buffer, Disk, Entry, Space, Write, Written, errno, remove_unless_leased};

/// How bytes get to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// O_DIRECT by io_uring, from registered buffers where the limit of locked memory allows it.
    Uring,
    /// O_DIRECT by pwrite(2): io_uring is forbidden here, or was not asked for.
    Direct,
    /// Through the page cache, since the file system has no O_DIRECT (tmpfs); what is written is
    /// dropped from the cache after each sync.
    Cached,
}

/// A directory of a real file system.
#[derive(Debug)]
pub struct Real {
    file: Option<OwnedFd>,
    ring: Option<Uring>,
    started: VecDeque<Write>,
    finished: VecDeque<Written>,
    /// A write failed; those that were started after it are not done.
    broke: bool,
    cached: bool,
    /// The small file that was appended to last.
    small: Option<(PathBuf, std::fs::File)>,
    lock: Option<OwnedFd>,
    recycled: Recycled,
}

impl Real {
    /// With io_uring if it is wanted and the kernel lets us; why it is not, in words, is the second.
    pub fn new(want_uring: bool) -> (Self, Option<String>) {
        let (ring, why_not) = match want_uring.then(Uring::new) {
            Some(Ok(ring)) => (Some(ring), None),
            Some(Err(error)) => (
                None,
                Some(format!("no io_uring, writing by pwrite: {error}")),
            ),
            None => (None, None),
        };
        let disk = Self {
            file: None,
            ring,
            started: VecDeque::new(),
            finished: VecDeque::new(),
            broke: false,
            cached: false,
            small: None,
            lock: None,
            recycled: Recycled::default(),
        };
        (disk, why_not)
    }

    /// Registers buffers with io_uring, so that their pages are not looked up at each write. Their
    /// ids must be 0, 1, …; if the kernel refuses, they are written all the same.
    pub fn register(&mut self, buffers: &[Buffer]) {
        if let Some(ring) = &mut self.ring
            && let Err(error) = ring.register(buffers)
        {
            log::info!("buffers are not registered with io_uring: {error}");
        }
    }

    /// How the open file is written.
    pub fn way(&self) -> Way {
        match (&self.ring, self.cached) {
            (_, true) => Way::Cached,
            (Some(_), false) => Way::Uring,
            (None, false) => Way::Direct,
        }
    }

    /// What is under way, or else what was started, when it is done.
    fn settle(&mut self) -> VecDeque<Written> {
        match (&self.file, &mut self.ring) {
            (Some(file), Some(ring)) if ring.is_busy() => return ring.settle(file),
            (Some(file), _) if !self.broke => {
                // One by one: the others can still be started meanwhile.
                let oldest = self.started.pop_front();
                return write_in_turn(file, oldest.into_iter().collect());
            }
            _ => {}
        }
        let why = match self.broke {
            true => Errno::CANCELED,
            false => Errno::BADF,
        };
        let none = |write| Written {
            write,
            result: Err(errno(why)),
        };
        self.started.drain(..).map(none).collect()
    }

    /// Gives back what is reserved beyond the open file's end, when nothing is on its way there.
    fn give_back(&mut self) -> io::Result<()> {
        if let (Some(file), Some(ring)) = (&self.file, &mut self.ring)
            && ring.is_busy()
        {
            self.finished.extend(ring.settle(file));
        }
        let file = self.file()?;
        cut(file, fstat(file).map_err(errno)?.st_size as u64)
    }

    fn file(&self) -> io::Result<&OwnedFd> {
        self.file.as_ref().ok_or_else(|| errno(Errno::BADF))
    }
}

impl Disk for Real {
    fn create(&mut self, path: &Path) -> io::Result<()> {
        self.close();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o640);
        // NB: not in one step: tmpfs refuses O_DIRECT only after it has made the file.
        let file = open(path, flags, mode).map_err(errno)?;
        let status = fcntl_getfl(&file).map_err(errno)?;
        let direct = fcntl_setfl(&file, status | OFlags::DIRECT);
        // tmpfs before Linux 6.6 and some FUSE file systems refuse.
        if direct.is_err() && !self.cached {
            log::warn!(
                "{}: no O_DIRECT here, writing through the page cache",
                path.display()
            );
        }
        self.cached = direct.is_err();
        // It is at work on it: see `trim`. Where there are no locks a second recorder is not kept off.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        self.file = Some(file);
        self.small = None;
        Ok(())
    }

    fn allocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        let reserved = fallocate(self.file()?, FallocateFlags::KEEP_SIZE, offset, bytes);
        // ext4 keeps what it found before the disk was full.
        if let Err(Errno::NOSPC | Errno::DQUOT) = reserved {
            self.give_back()?;
        }
        reserved.map_err(errno)
    }

    fn start(&mut self, write: Write) {
        self.started.push_back(write);
    }

    fn submit(&mut self) {
        let (Some(file), Some(ring)) = (&self.file, &mut self.ring) else {
            return;
        };
        if ring.is_busy() && ring.is_done() {
            self.finished.extend(ring.settle(file));
        }
        // Also what nobody asked for yet.
        self.broke |= self.finished.iter().any(|written| written.result.is_err());
        let count = follow_on(&self.started);
        if count > 0 && !self.cached && !self.broke && !ring.is_busy() {
            ring.begin(file, self.started.drain(..count).collect());
        }
    }

    fn finish(&mut self) -> Option<Written> {
        if self.finished.is_empty() {
            self.submit();
        }
        if self.finished.is_empty() {
            self.finished = self.settle();
            if self.ring.as_ref().is_some_and(Uring::is_broken) {
                self.ring = None;
            }
        }
        let next = self.finished.pop_front();
        self.broke = match &next {
            Some(written) => self.broke || written.result.is_err(),
            None => false,
        };
        next
    }

    fn sync(&mut self) -> io::Result<()> {
        let file = self.file()?;
        fdatasync(file).map_err(errno)?;
        // Removed under us: what is written goes nowhere.
        if fstat(file).map_err(errno)?.st_nlink == 0 {
            return Err(errno(Errno::NOENT));
        }
        if self.cached {
            // Advice: a refusal changes nothing that was promised.
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
        Ok(())
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        cut(self.file()?, bytes)
    }

    fn trim(&mut self, path: &Path) -> io::Result<()> {
        // O_NONBLOCK: a FIFO of this name must not hold us.
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let file = open(path, flags, Mode::empty()).map_err(errno)?;
        let about = fstat(&file).map_err(errno)?;
        if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
            return Err(errno(Errno::INVAL));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Somebody writes to it, whatever became of the recording's lock, or reads it.
            Err(Errno::WOULDBLOCK) => Ok(()),
            _ => cut(&file, about.st_size as u64),
        }
    }

    fn close(&mut self) {
        if self.ring.as_ref().is_some_and(Uring::is_busy) {
            // Nobody asked what became of it.
            let _ = self.settle();
        }
        self.file = None;
    }

    fn store(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let flags = OFlags::CREATE | OFlags::WRONLY;
        let file = open_ours(path, flags)?;
        ftruncate(&file, 0).map_err(errno)?;
        write_all(&file, bytes, 0)?;
        fsync(&file).map_err(errno)
    }

    fn load(&mut self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        use std::io::Read as _;
        let file = match open_regular(path, OFlags::RDONLY) {
            Err(Errno::NOENT) => return Ok(None),
            file => file.map_err(errno)?,
        };
        let mut bytes = Vec::new();
        std::fs::File::from(file).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn read(&mut self, path: &Path, offset: u64, into: &mut Buffer) -> io::Result<usize> {
        let file = open_regular(path, OFlags::RDONLY).map_err(errno)?;
        let status = fcntl_getfl(&file).map_err(errno)?;
        // Where there is no O_DIRECT the page cache is all there is (tmpfs), or is emptied of it first.
        if fcntl_setfl(&file, status | OFlags::DIRECT).is_err() {
            let len = NonZeroU64::new(into.len() as u64);
            let _ = fadvise(&file, offset, len, Advice::DontNeed);
        }
        let rest = (fstat(&file).map_err(errno)?.st_size as u64).saturating_sub(offset);
        let wanted = usize::try_from(rest).map_or(into.len(), |rest| rest.min(into.len()));
        let read = loop {
            match pread(&file, &mut into[..], offset) {
                Err(Errno::INTR) => {}
                read => break read.map_err(errno)?,
            }
        };
        match read >= wanted {
            true => Ok(wanted),
            false => Err(errno(Errno::IO)),
        }
    }

    fn date(&mut self, like: &Path) -> io::Result<()> {
        let about = stat(like).map_err(errno)?;
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: Timespec {
                tv_sec: about.st_mtime,
                tv_nsec: about.st_mtime_nsec as _,
            },
        };
        futimens(self.file()?, &times).map_err(errno)
    }

    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        use std::io::Write as _;
        let mut file = match self.small.take().filter(|(last, _)| last == path) {
            Some((_, file)) => file,
            None => {
                let flags = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY;
                open_ours(path, flags)?.into()
            }
        };
        file.write_all(bytes)?;
        self.small = Some((path.to_owned(), file));
        Ok(())
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        rustix::fs::rename(from, to).map_err(errno)
    }

    fn publish(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // NFS and some FUSE file systems cannot do both in one step.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match lstat(to) {
                Ok(_) => Err(errno(Errno::EXIST)),
                Err(Errno::NOENT) => self.rename(from, to),
                Err(error) => Err(errno(error)),
            },
            renamed => renamed.map_err(errno),
        }
    }

    fn remove(&mut self, path: &Path) -> io::Result<bool> {
        remove_unless_leased(path)
    }

    fn recycle(&mut self, path: &Path) -> io::Result<bool> {
        self.recycled.recycle(path)
    }

    fn held(&mut self) -> u64 {
        self.recycled.bytes()
    }

    fn cut_held(&mut self) -> Option<io::Result<u64>> {
        self.recycled.cut()
    }

    fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        sync_directory(dir)
    }

    fn list(&mut self, dir: &Path) -> io::Result<Vec<Entry>> {
        use std::os::unix::fs::MetadataExt;
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            // Recycled by another at this moment, or no name of ours.
            let (Ok(about), Ok(name)) = (entry.metadata(), entry.file_name().into_string()) else {
                continue;
            };
            let (len, bytes) = (about.len(), about.blocks() * 512);
            let seconds = u64::try_from(about.mtime()).unwrap_or(0);
            entries.push(Entry {
                name,
                len,
                bytes,
                written_ns: seconds.saturating_mul(1_000_000_000) + about.mtime_nsec() as u64,
            });
        }
        Ok(entries)
    }

    fn space(&mut self, dir: &Path) -> io::Result<Space> {
        let name = CString::new(dir.as_os_str().as_encoded_bytes())?;
        let all = statvfs(name.as_c_str()).map_err(errno)?;
        Ok(Space {
            total: all.f_blocks * all.f_frsize,
            free: all.f_bavail * all.f_frsize,
        })
    }

    fn lock(&mut self, path: &Path) -> io::Result<()> {
        if let (Some(held), Ok(there)) = (&self.lock, stat(path)) {
            let held = fstat(held).map_err(errno)?;
            if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino) {
                return Ok(());
            }
        }
        let file = open_ours(path, OFlags::CREATE | OFlags::RDWR)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(errno)?;
        self.lock = Some(file);
        Ok(())
    }
}

/// Opens a small file of the recording, or makes it. Neither a link nor a FIFO that somebody put there leads
/// elsewhere.
fn open_ours(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::from_raw_mode(0o640)).map_err(|error| match error {
        Errno::LOOP => io::Error::other(format!(
            "{}: a symbolic link is in the place of this file",
            path.display()
        )),
        error => errno(error),
    })?;
    match FileType::from_raw_mode(fstat(&file).map_err(errno)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(errno(Errno::INVAL)),
    }
}

/// Sets a file's length, and gives back its blocks beyond.
fn cut(file: &OwnedFd, bytes: u64) -> io::Result<()> {
    ftruncate(file, bytes).map_err(errno)?;
    // Blocks beyond the end: XFS keeps them when the length does not change.
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let beyond = bytes.next_multiple_of(super::BLOCK as u64);
    match fallocate(file, flags, beyond, BEYOND) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(errno(error)),
    }
}

/// How many writes from the first on lie one after the other in the file, as far as one submission goes.
fn follow_on(writes: &VecDeque<Write>) -> usize {
    let behind = |(one, next): (&Write, &Write)| one.offset + one.len as u64 == next.offset;
    let pairs = writes.iter().zip(writes.iter().skip(1));
    let more = pairs.take(TOGETHER - 1).take_while(|&pair| behind(pair));
    more.count() + usize::from(!writes.is_empty())
}

/// Writes one after the other; after one that failed the others are not tried.
pub(super) fn write_in_turn(file: &OwnedFd, writes: VecDeque<Write>) -> VecDeque<Written> {
    let mut failed = false;
    let each = |write: Write| {
        let result = match failed {
            true => Err(errno(Errno::CANCELED)),
            false => write_all(file, &write.buffer[..write.len], write.offset),
        };
        failed |= result.is_err();
        Written { write, result }
    };
    writes.into_iter().map(each).collect()
}

/// Writes all, however the kernel cuts it.
pub(super) fn write_all(file: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match pwrite(file, bytes, offset) {
            Ok(0) => return Err(errno(Errno::IO)),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(errno(error)),
        }
    }
    Ok(())
}

/// Writes of one submission.
const TOGETHER: usize = 8;
/// Farther than any preallocation reaches.
const BEYOND: u64 = 1 << 40;

#[cfg(test)]
mod tests;
