//! A byte stream of frames, as QEMU's `-netdev stream` and `socket`, passt and socket_vmnet speak it:
//! before each frame its length, four bytes, the highest first.
//!
//! A stream has no bounds to fall back to: a frame is written whole or not at all, and who sends a length
//! that no frame has is closed. Frames in a read or a write are as many as there are.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use vnplug_os::closer::PeerFd;
use vnplug_os::datagrams::Rest;
use vnplug_os::socket::{self, Heard};
use vnplug_ring::offload::Offload;

use crate::backlog::Backlog;
use crate::batch::Batch;
use crate::exits::Due;
use crate::forward::Fault;
use crate::link::{Given, Link, hung_up};

/// One client's connection.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: PeerFd,
    /// The kernel refuses descriptors there.
    refuses: bool,
    /// What came: from `begin` to `end`.
    came: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Bytes still to come of a frame that is too long.
    skip: usize,
    /// Each with its length before it.
    backlog: Backlog,
    /// Bytes of the first of them that are written.
    written: usize,
    is_gone: bool,
}

/// What comes next in the stream.
enum Next {
    /// Not all of it is there.
    Part,
    /// A frame, of which this many bytes are there.
    Frame(usize),
    /// The length in bytes of a frame that is too long for the switch.
    Long(usize),
}

impl Stream {
    /// By this connection, which does not block, for frames of up to `longest` bytes.
    pub(crate) fn new(socket: PeerFd, longest: usize) -> Self {
        let refuses = socket::refuses_rights(&socket);
        socket::pass_rights(&socket, false);
        let room = (PREFIX + longest).max(ROOM);
        Self {
            socket,
            refuses,
            came: vec![0; room].into_boxed_slice(),
            begin: 0,
            end: 0,
            skip: 0,
            backlog: Backlog::default(),
            written: 0,
            is_gone: false,
        }
    }

    fn next(&mut self, longest: usize) -> io::Result<Next> {
        let skipped = self.skip.min(self.end - self.begin);
        self.skip -= skipped;
        self.begin += skipped;
        let there = &self.came[self.begin..self.end];
        let Some((prefix, frame)) = there.split_first_chunk::<PREFIX>() else {
            return Ok(Next::Part);
        };
        let len = u32::from_be_bytes(*prefix) as usize;
        if len == 0 || len > MAX_FRAME {
            let what = format!("it sent a length of {len}; a frame has 1 to {MAX_FRAME} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(match len {
            len if len > longest => Next::Long(len),
            len if len > frame.len() => Next::Part,
            len => Next::Frame(len),
        })
    }

    /// Takes what the buffer has; says whether there may be more, here.
    fn take(&mut self, batch: &mut Batch, left: &mut usize) -> io::Result<bool> {
        while *left > 0 {
            match self.next(batch.longest())? {
                Next::Part => return Ok(false),
                Next::Frame(len) => {
                    let begin = self.begin + PREFIX;
                    let frame = &self.came[begin..begin + len];
                    let fill = |place: &mut [u8]| {
                        place.copy_from_slice(frame);
                        true
                    };
                    if !batch.push(len, Offload::default(), fill) {
                        return Ok(true);
                    }
                    self.begin = begin + len;
                }
                Next::Long(len) => {
                    if !batch.push_fault(Fault::Long) {
                        return Ok(true);
                    }
                    self.begin += PREFIX;
                    self.skip = len;
                }
            }
            *left -= 1;
        }
        Ok(true)
    }

    /// Reads as much as there is room for.
    fn read(&mut self) -> io::Result<Heard> {
        self.came.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let room = &mut self.came[self.end..];
        match self.refuses {
            true => socket::receive_bytes(&self.socket, room),
            false => socket::receive(&self.socket, room),
        }
    }

    /// Writes parts, each frame's length before it; how many bytes, 0: none now.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> usize {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(
            &self.socket,
            parts,
            &mut SendAncillaryBuffer::default(),
            flags,
        ) {
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => 0,
            // Its next read says so, too.
            Err(_) => {
                self.is_gone = true;
                0
            }
        }
    }
}

impl Link for Stream {
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest> {
        let mut left = most;
        // Who sends frames too long, or single bytes, has no more of a turn than others.
        for _ in 0..READS {
            if self.take(batch, &mut left)? {
                return Ok(Rest::More);
            }
            let room = self.came.len() - (self.end - self.begin);
            match self.read()? {
                Heard::Bytes(0) => return Err(hung_up()),
                Heard::Nothing => return Ok(Rest::Nothing),
                Heard::Rights => return Ok(Rest::Rights),
                Heard::Bytes(count) => {
                    self.end += count;
                    if count < room && !self.take(batch, &mut left)? {
                        return Ok(Rest::Nothing);
                    }
                }
            }
        }
        Ok(Rest::More)
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        let mut given = Given::default();
        let mut rest = due.iter().map(|out| (out.head, out.body));
        while !self.is_waiting() && !self.is_gone {
            let mut prefixes = [[0; PREFIX]; AT_ONCE];
            let lens = rest.clone().map(|(head, body)| head.len() + body.len());
            let mut count = 0;
            for (prefix, len) in prefixes.iter_mut().zip(lens) {
                // A super-frame's length is the longest that there is.
                *prefix = (len as u32).to_be_bytes();
                count += 1;
            }
            if count == 0 {
                break;
            }
            let mut parts = [IoSlice::new(&[]); AT_ONCE * 3];
            let places = parts.as_chunks_mut::<3>().0;
            for ((place, prefix), (head, body)) in
                places.iter_mut().zip(&prefixes).zip(rest.clone())
            {
                *place = [prefix, head, body].map(IoSlice::new);
            }
            let mut written = self.write(&parts[..count * 3]);
            if written == 0 {
                break;
            }
            for prefix in &prefixes[..count] {
                let len = u32::from_be_bytes(*prefix) as usize;
                if written == 0 {
                    break;
                }
                let Some((head, body)) = rest.next() else {
                    break;
                };
                given.enqueued += 1;
                given.bytes += len as u64;
                if written < PREFIX + len {
                    self.backlog.keep(&[prefix, head, body]);
                    self.written = written;
                    break;
                }
                written -= PREFIX + len;
            }
        }
        for (head, body) in rest {
            let len = head.len() + body.len();
            if self.is_gone {
                given.gone += 1;
            } else if self
                .backlog
                .push(&[&(len as u32).to_be_bytes(), head, body])
            {
                given.enqueued += 1;
                given.bytes += len as u64;
            } else {
                given.full += 1;
            }
        }
        given
    }

    fn is_waiting(&self) -> bool {
        !self.backlog.is_empty()
    }

    fn go_on(&mut self) -> u64 {
        while self.is_waiting() && !self.is_gone {
            let mut parts = [IoSlice::new(&[]); AT_ONCE];
            let backlog = std::mem::take(&mut self.backlog);
            let mut count = 0;
            let mut skip = self.written;
            for (part, frame) in parts.iter_mut().zip(backlog.iter()) {
                *part = IoSlice::new(&frame[skip..]);
                skip = 0;
                count += 1;
            }
            let written = self.write(&parts[..count]);
            self.backlog = backlog;
            if written == 0 {
                break;
            }
            self.written += written;
            let mut done = 0;
            for frame in self.backlog.iter().take(count) {
                if self.written < frame.len() {
                    break;
                }
                self.written -= frame.len();
                done += 1;
            }
            self.backlog.forget(done);
        }
        if !self.is_gone {
            return 0;
        }
        let dropped = self.backlog.len();
        self.backlog.forget(dropped);
        dropped as u64
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Bytes of a length.
const PREFIX: usize = 4;
/// Bytes of the longest frame that QEMU sends (`NET_BUFSIZE`), which ends connections for longer ones, too.
const MAX_FRAME: usize = 4096 + (64 << 10);
/// Bytes that are read at once, at least.
const ROOM: usize = 64 << 10;
/// Frames that are written at once.
const AT_ONCE: usize = 64;
/// Reads in one turn.
const READS: usize = 4;
