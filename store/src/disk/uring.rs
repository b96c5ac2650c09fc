//! Ordered direct writes by io_uring.

#![expect(
    unsafe_code,
    reason = "the kernel reads memory that a submission names by its address"
)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

use super::real::write_all;
use super::{Buffer, Write, Written, errno};

/// An io_uring of one thread.
pub(super) struct Uring {
    ring: IoUring,
    /// How many buffers are registered: those with smaller ids.
    registered: u16,
}

impl Uring {
    /// # Errors
    /// The kernel has none (`ENOSYS`), or forbids it (`EPERM`).
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::new(DEPTH as u32)?,
            registered: 0,
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

    /// Writes all, in their order: they are linked, and after one that failed the others are not
    /// begun. When this returns, no write is under way.
    pub(super) fn write(
        &mut self,
        file: &OwnedFd,
        mut writes: VecDeque<Write>,
    ) -> VecDeque<Written> {
        let mut written = VecDeque::with_capacity(writes.len());
        while !writes.is_empty() {
            let rest = writes.split_off(writes.len().min(DEPTH));
            let broke = self.chain(file, writes, &mut written);
            writes = rest;
            if broke {
                let cancelled = |write| Written {
                    write,
                    result: Err(errno(Errno::CANCELED)),
                };
                written.extend(writes.drain(..).map(cancelled));
            }
        }
        written
    }

    /// One chain; true if it broke.
    fn chain(
        &mut self,
        file: &OwnedFd,
        writes: VecDeque<Write>,
        written: &mut VecDeque<Written>,
    ) -> bool {
        let count = writes.len();
        let mut pushed = 0;
        for (index, write) in writes.iter().enumerate() {
            let (fd, start) = (
                types::Fd(file.as_raw_fd()),
                write.buffer[..write.len].as_ptr(),
            );
            let (len, id) = (write.len as u32, write.buffer.id());
            let entry = if id < self.registered {
                opcode::WriteFixed::new(fd, start, len, id)
                    .offset(write.offset)
                    .build()
            } else {
                opcode::Write::new(fd, start, len)
                    .offset(write.offset)
                    .build()
            };
            let link = if index + 1 < count {
                Flags::IO_LINK
            } else {
                Flags::empty()
            };
            let entry = entry.flags(link).user_data(index as u64);
            // SAFETY: the buffer is owned by `writes`, which lives, and is not written to, until
            // `settle` has seen every completion.
            let queued = unsafe { self.ring.submission().push(&entry) };
            pushed += usize::from(queued.is_ok());
        }
        let mut results = self.settle(pushed);
        // The queue has room for a chain; what it did not take is written one by one.
        results.resize_with(count, || Err(Errno::CANCELED));
        let mut broke = false;
        for (write, result) in writes.into_iter().zip(results) {
            let result = match result {
                _ if broke => Err(errno(Errno::CANCELED)),
                Ok(done) if done == write.len => Ok(()),
                // The kernel breaks the chain at a short write; the others are then written here.
                Ok(done) => finish_short(file, &write, done),
                Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) => finish_short(file, &write, 0),
                Err(error) => Err(errno(error)),
            };
            broke |= result.is_err();
            written.push_back(Written { write, result });
        }
        broke
    }

    /// Submits, and waits until every one of `count` writes is over.
    fn settle(&mut self, count: usize) -> Vec<Result<usize, Errno>> {
        let mut results = vec![Err(Errno::IO); count];
        let mut left = count;
        let mut told = false;
        while left > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                // NB: giving up would free memory that the kernel may still read.
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        log::error!("io_uring_enter: {error}; it is tried again");
                    }
                    std::thread::sleep(AGAIN);
                }
            }
            for done in self.ring.completion() {
                let result = match done.result() {
                    bytes @ 0.. => Ok(bytes as usize),
                    code => Err(Errno::from_raw_os_error(-code)),
                };
                if let Some(place) = results.get_mut(done.user_data() as usize) {
                    *place = result;
                    left -= 1;
                }
            }
        }
        results
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("registered", &self.registered)
            .finish_non_exhaustive()
    }
}

/// The rest of a write that the kernel cut; its errno comes with the next attempt.
fn finish_short(file: &OwnedFd, write: &Write, done: usize) -> io::Result<()> {
    let bytes = &write.buffer[done..write.len];
    write_all(file, bytes, write.offset + done as u64)
}

/// How long to leave a kernel alone that refuses to go on.
const AGAIN: Duration = Duration::from_millis(10);
/// Writes of one chain.
const DEPTH: usize = 8;
