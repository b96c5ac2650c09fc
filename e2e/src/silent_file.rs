//! A file whose server never answers a close, or an open (FUSE): that blocks.
//!
//! Nothing of it is left when its server goes: the file system is mounted nowhere, and what waits for
//! an answer goes on with an error.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

/// The server of one file.
#[derive(Debug)]
pub struct SilentFile {
    root: Option<OwnedFd>,
    over: Arc<AtomicBool>,
    unanswered: Arc<AtomicU64>,
    server: Option<JoinHandle<()>>,
}

impl SilentFile {
    /// Begins to serve a file of which a close is never answered.
    ///
    /// # Errors
    /// The system's: there is no FUSE, or the user may not mount.
    pub fn new() -> io::Result<Self> {
        Self::without(FLUSH)
    }

    /// Begins to serve a file of which an open is never answered.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn that_never_opens() -> io::Result<Self> {
        Self::without(OPEN)
    }

    /// Begins to serve a file of which requests of this kind are never answered.
    fn without(opcode: u32) -> io::Result<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let system = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let fd = device.as_raw_fd().to_string();
        // The root of it is no directory but the file itself.
        let options = [
            ("fd", fd.as_str()),
            ("rootmode", "100000"),
            ("user_id", "0"),
            ("group_id", "0"),
        ];
        for (key, value) in options {
            fsconfig_set_string(&system, key, value)?;
        }
        fsconfig_create(&system)?;
        // Children have it, too: whoever gave up rights may not look into this process.
        let root = fsmount(&system, FsMountFlags::empty(), MountAttrFlags::empty())?;
        let (over, unanswered) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (theirs, counted) = (Arc::clone(&over), Arc::clone(&unanswered));
        let server = std::thread::spawn(move || serve(&device, opcode, &theirs, &counted));
        Ok(Self {
            root: Some(root),
            over,
            unanswered,
            server: Some(server),
        })
    }

    /// Opens it. NB: to close that waits here, too.
    ///
    /// # Errors
    /// The system's.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.path(), flags, Mode::empty())?)
    }

    /// Where this process finds it, and those that it starts from now on.
    #[must_use]
    pub fn path(&self) -> String {
        let root = self.root.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        format!("/proc/self/fd/{root}")
    }

    /// How many wait for the answer, or waited.
    #[must_use]
    pub fn unanswered(&self) -> u64 {
        self.unanswered.load(Ordering::Relaxed)
    }
}

impl Drop for SilentFile {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // With the device the kernel gives up what is not answered.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        self.root = None;
    }
}

/// Answers (`linux/fuse.h`): a request is length, opcode, number and five words more; an answer is
/// length, error, number and what belongs to the opcode.
fn serve(device: &File, silent_on: u32, over: &AtomicBool, unanswered: &AtomicU64) {
    let mut request = vec![0; 1 << 17];
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    while !over.load(Ordering::Relaxed) {
        if poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&time)) != Ok(1) {
            continue;
        }
        let Ok(count) = rustix::io::read(device, &mut request) else {
            return;
        };
        let (Some(opcode), Some(number)) =
            (request[..count].get(4..8), request[..count].get(8..16))
        else {
            return;
        };
        let mut body = Vec::new();
        let mut error = 0_i32;
        let opcode = u32::from_le_bytes(opcode.try_into().expect("four bytes"));
        if opcode == silent_on {
            unanswered.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        match opcode {
            // GETATTR: a regular file.
            3 => {
                body.resize(104, 0);
                body[76..80].copy_from_slice(&0o100_666_u32.to_le_bytes());
            }
            OPEN => body.resize(16, 0),
            // RELEASE.
            18 | FLUSH => {}
            // INIT: version 7.31, and 4096 bytes for each write.
            26 => {
                body.resize(64, 0);
                for (at, word) in [(0, 7_u32), (4, 31), (20, 4096)] {
                    body[at..at + 4].copy_from_slice(&word.to_le_bytes());
                }
            }
            _ => error = -libc::ENOSYS,
        }
        let mut answer = (16 + body.len() as u32).to_le_bytes().to_vec();
        answer.extend(error.to_le_bytes());
        answer.extend_from_slice(number);
        answer.extend(body);
        let _ = rustix::io::write(device, &answer);
    }
}

const OPEN: u32 = 14;
/// By every close.
const FLUSH: u32 = 25;
