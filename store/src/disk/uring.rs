//! Ordered direct writes by io_uring.
//!
//! One submission is under way at a time: a single write from a registered buffer, or several that lie
//! one after the other in the file as one vectored write. So there is no order between submissions that a
//! kernel which takes only a part of them could break, and the disk has all of it at once: up to
//! 32 MiB, which the block layer cuts as the device wants them. A file system would not do better with
//! several writes beyond the end of a file: ext4 does those one after the other. Several writes before the
//! end of one that was made longer first are faster, by a third on a disk where that was measured; but
//! a program that opens it meanwhile, or after the recorder was killed, finds zeros in it.
//!
//! | io_uring_enter(2) | what happens |
//! |---|---|
//! | fails before the kernel took the submission | tried again with growing pauses, for about half a second; then io_uring is given up, and nothing that it knew of is touched any more |
//! | fails while the write is under way | the memory is the kernel's: its completion is waited for, with a pause between looks, however long it takes. Then io_uring is given up |

#![expect(
    unsafe_code,
    reason = "the kernel reads memory that a submission names by its address"
)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

use super::real::{write_all, write_in_turn};
use super::{Buffer, Write, Written, errno};

/// An io_uring of one thread.
pub(super) struct Uring {
    ring: IoUring,
    /// How many buffers are registered: those with smaller ids.
    registered: u16,
    batch: Option<Batch>,
    /// The kernel does not let us any more.
    broken: bool,
    /// Calls of io_uring_enter that fail.
    #[cfg(test)]
    refusals: u32,
}

/// Writes that are under way.
struct Batch {
    writes: VecDeque<Write>,
    /// Where they are, for the kernel. A box: it stays where it is.
    vectors: Box<[Vector]>,
}

/// `struct iovec`: address and length. Numbers, for they go from thread to thread with the batch.
#[repr(C)]
#[derive(Clone, Copy)]
struct Vector {
    base: usize,
    len: usize,
}

impl Uring {
    /// # Errors
    /// The kernel has none (`ENOSYS`), or forbids it (`EPERM`).
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::new(2)?,
            registered: 0,
            batch: None,
            broken: false,
            #[cfg(test)]
            refusals: 0,
        })
    }

    /// Registers buffers; their ids must be their places.
    ///
    /// # Errors
    /// `ENOMEM`: more than the limit of locked memory.
    pub(super) fn register(&mut self, buffers: &[Buffer]) -> io::Result<()> {
        let entry = |buffer: &Buffer| libc::iovec {
            iov_base: buffer.as_ptr().cast_mut().cast(),
            iov_len: buffer.len(),
        };
        let entries: Vec<libc::iovec> = buffers.iter().map(entry).collect();
        // SAFETY: the ranges are those of live allocations. The kernel pins their pages, so that it
        // never touches memory of others, whenever they are freed; it only reads them.
        unsafe { self.ring.submitter().register_buffers(&entries)? };
        self.registered = buffers.len() as u16;
        Ok(())
    }

    /// Whether it is of no more use.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether writes are under way.
    pub(super) fn is_busy(&self) -> bool {
        self.batch.is_some()
    }

    /// Whether the kernel is done with what was begun: [`settle`](Self::settle) waits at most for the rest of a
    /// short write.
    pub(super) fn is_done(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Begins writes that lie one after the other in the file. None may be under way.
    pub(super) fn begin(&mut self, file: &OwnedFd, writes: VecDeque<Write>) {
        debug_assert!(self.batch.is_none());
        let vector = |write: &Write| Vector {
            base: write.buffer.as_ptr().expose_provenance(),
            len: write.len,
        };
        let vectors: Box<[Vector]> = writes.iter().map(vector).collect();
        let Some(first) = writes.front() else {
            return;
        };
        let (fd, start) = (types::Fd(file.as_raw_fd()), first.buffer.as_ptr());
        let (len, id, offset) = (first.len as u32, first.buffer.id(), first.offset);
        let entry = match vectors.len() {
            1 if id < self.registered => opcode::WriteFixed::new(fd, start, len, id)
                .offset(offset)
                .build(),
            count => opcode::Writev::new(fd, vectors.as_ptr().cast(), count as u32)
                .offset(offset)
                .build(),
        };
        // SAFETY: the buffers and the vectors are owned by the batch, which lives, and is not written
        // to, until `settle` has seen the completion or that the kernel never took the entry.
        let queued = unsafe { self.ring.submission().push(&entry) };
        // The queue is empty whenever no batch is under way.
        self.broken |= queued.is_err();
        self.batch = Some(Batch { writes, vectors });
        if queued.is_ok() {
            // Its error comes again, and is dealt with, in `settle`.
            let _ = self.enter(0);
        }
    }

    /// Waits for what was begun.
    pub(super) fn settle(&mut self, file: &OwnedFd) -> VecDeque<Written> {
        let Some(batch) = self.batch.take() else {
            return VecDeque::new();
        };
        let all: usize = batch.vectors.iter().map(|vector| vector.len).sum();
        let result = match self.broken {
            true => None,
            false => self.completion(),
        };
        let done = match result {
            Some(Ok(done)) => done.min(all),
            Some(Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED)) => 0,
            Some(Err(error)) => return failed(batch.writes, error),
            None => return write_in_turn(file, batch.writes),
        };
        finish_short(file, batch.writes, done)
    }

    /// What became of the one entry; `None` if the kernel never took it, and never will.
    fn completion(&mut self) -> Option<Result<usize, Errno>> {
        let mut failures = 0;
        loop {
            if let Some(done) = self.ring.completion().next() {
                return Some(match done.result() {
                    bytes @ 0.. => Ok(bytes as usize),
                    code => Err(Errno::from_raw_os_error(-code)),
                });
            }
            let error = match self.enter(1) {
                Ok(_) => continue,
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => continue,
                Err(error) => error,
            };
            failures += 1;
            let taken = self.ring.submission().is_empty();
            if failures == TRIES {
                log::error!("io_uring_enter: {error}; what follows is written by pwrite");
                self.broken = true;
            }
            if failures >= TRIES && !taken {
                return None;
            }
            // NB: giving up on what the kernel has would free memory that it may still read.
            let pause = PAUSE.saturating_mul(1 << failures.min(8));
            std::thread::sleep(pause.min(LONGEST_PAUSE));
        }
    }

    /// io_uring_enter(2), and waits for this many completions.
    fn enter(&mut self, wait: usize) -> io::Result<usize> {
        #[cfg(test)]
        if self.refusals > 0 {
            self.refusals -= 1;
            return Err(errno(Errno::NOMEM));
        }
        self.ring.submit_and_wait(wait)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.batch.is_some() && !self.broken {
            let _ = self.completion();
        }
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("registered", &self.registered)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

/// Nothing is known of any of them.
fn failed(writes: VecDeque<Write>, error: Errno) -> VecDeque<Written> {
    let mut error = Some(error);
    let each = |write| Written {
        write,
        result: Err(errno(error.take().unwrap_or(Errno::CANCELED))),
    };
    writes.into_iter().map(each).collect()
}

/// The kernel wrote the first `done` bytes of them all; the rest is written here, in order, and its errno
/// comes with that.
fn finish_short(file: &OwnedFd, writes: VecDeque<Write>, mut done: usize) -> VecDeque<Written> {
    let mut broke = false;
    let each = |write: Write| {
        let there = done.min(write.len);
        done -= there;
        let result = match broke {
            true => Err(errno(Errno::CANCELED)),
            false => {
                let rest = &write.buffer[there..write.len];
                write_all(file, rest, write.offset + there as u64)
            }
        };
        broke |= result.is_err();
        Written { write, result }
    };
    writes.into_iter().map(each).collect()
}

/// How often io_uring_enter may fail for one submission, and the pauses between: half a second together.
const TRIES: u32 = 9;
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::BLOCK;

    /// Three writes one after the other, and what the file is to hold.
    fn writes() -> (VecDeque<Write>, Vec<u8>) {
        let mut whole = Vec::new();
        let writes = (0..3_u8).map(|number| {
            let mut buffer = Buffer::new(2 * BLOCK, number.into());
            buffer.fill(number + 1);
            let offset = whole.len() as u64;
            let len = BLOCK * (1 + usize::from(number) % 2);
            whole.extend_from_slice(&buffer[..len]);
            Write {
                buffer,
                len,
                offset,
            }
        });
        (writes.collect(), whole)
    }

    struct TestDir(std::path::PathBuf);

    impl TestDir {
        fn new(what: &str) -> (Self, OwnedFd) {
            let name = format!("vnplug-uring-{}-{what}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let file = std::fs::File::create(&path).unwrap();
            (Self(path), file.into())
        }

        fn content(&self) -> Vec<u8> {
            std::fs::read(&self.0).unwrap()
        }
    }

    impl Drop for TestDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn all_written(written: &VecDeque<Written>) -> bool {
        written.iter().all(|written| written.result.is_ok())
    }

    #[test]
    fn several_writes_are_one_submission() {
        let (place, file) = TestDir::new("several");
        let mut uring = Uring::new().expect("this test needs io_uring");
        let (writes, whole) = writes();
        uring.begin(&file, writes);
        assert!(uring.is_busy());
        while !uring.is_done() {
            std::thread::yield_now();
        }
        let written = uring.settle(&file);
        assert!(written.len() == 3 && all_written(&written));
        assert_eq!(place.content(), whole);
        assert!(!uring.is_broken() && !uring.is_busy() && !uring.is_done());
    }

    #[test]
    fn a_kernel_that_refuses_for_a_while_is_asked_again() {
        let (place, file) = TestDir::new("while");
        let mut uring = Uring::new().expect("this test needs io_uring");
        uring.refusals = 3;
        let (writes, whole) = writes();
        uring.begin(&file, writes);
        assert!(all_written(&uring.settle(&file)));
        assert_eq!(place.content(), whole);
        assert!(!uring.is_broken());
    }

    #[test]
    fn a_kernel_that_refuses_for_ever_is_left_alone() {
        let (place, file) = TestDir::new("ever");
        let mut uring = Uring::new().expect("this test needs io_uring");
        uring.refusals = u32::MAX;
        let (writes, whole) = writes();
        uring.begin(&file, writes);
        assert!(all_written(&uring.settle(&file)));
        assert_eq!(place.content(), whole);
        assert!(uring.is_broken());
        assert_eq!(u32::MAX - uring.refusals, 1 + TRIES);
    }

    #[test]
    fn a_short_write_is_finished_in_order() {
        for done in [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK] {
            let (place, file) = TestDir::new(&format!("short-{done}"));
            let (writes, mut whole) = writes();
            assert!(all_written(&finish_short(&file, writes, done)));
            // What the kernel is said to have written is not there in this test.
            whole[..done].fill(0);
            assert_eq!(
                place.content().len(),
                if done < whole.len() { whole.len() } else { 0 }
            );
            assert!(whole.starts_with(&place.content()));
        }
    }
}
