//! Messages of a front-end as they come, with their descriptors; answers as they go.
//!
//! A message is a header of 12 bytes, then at most [`MAX_PAYLOAD`], all little-endian:
//!
//! ```text
//! +0 u32 request   +4 u32 flags: version 1, 4 an answer, 8 needs an answer   +8 u32 bytes after the header
//! ```

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};
use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::socket;

/// A message of a front-end, in memory of our own.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: u32,
    /// The front-end waits for an answer, whatever the request is.
    pub(crate) needs_answer: bool,
    pub(crate) payload: Vec<u8>,
    /// Descriptors that came with it; who does not take one has it closed aside.
    pub(crate) fds: Vec<PeerFd>,
}

/// Puts messages together.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    bytes: Vec<u8>,
    fds: Vec<PeerFd>,
}

/// What was read.
#[derive(Debug)]
pub(crate) enum Read {
    Message(Message),
    /// Nothing more is there now.
    Nothing,
    /// The front-end is gone.
    End,
}

impl Message {
    /// The payload, if it has exactly these bytes.
    pub(crate) fn exactly<const N: usize>(&self) -> Option<[u8; N]> {
        self.payload.as_slice().try_into().ok()
    }

    /// The payload, if it is a number of 64 bits.
    pub(crate) fn number(&self) -> Option<u64> {
        self.exactly().map(u64::from_le_bytes)
    }

    /// The payload, if it is two numbers of 32 bits.
    pub(crate) fn pair(&self) -> Option<(u32, u32)> {
        let [a, b, c, d, e, f, g, h] = self.exactly()?;
        let half = u32::from_le_bytes;
        Some((half([a, b, c, d]), half([e, f, g, h])))
    }

    /// The only descriptor, if there is exactly one.
    pub(crate) fn only_fd(&mut self) -> Option<PeerFd> {
        match self.fds.len() {
            1 => self.fds.pop(),
            _ => None,
        }
    }
}

impl Reader {
    /// Reads on. Never blocks; descriptors are `closer`'s to close.
    ///
    /// # Errors
    /// What no front-end may send, or the system's: the connection is to be closed.
    pub(crate) fn read(&mut self, socket: impl AsFd, closer: &Closer) -> io::Result<Read> {
        loop {
            let missing = match self.bytes.first_chunk() {
                None => HEADER - self.bytes.len(),
                Some(header) => {
                    let (_, flags, len) = split(header);
                    if flags & VERSION_MASK != VERSION || flags & ANSWER != 0 {
                        return Err(bad(format!("a message with flags {flags:#x}")));
                    }
                    if len > MAX_PAYLOAD {
                        return Err(bad(format!("a message of {len} bytes")));
                    }
                    HEADER + len as usize - self.bytes.len()
                }
            };
            if missing == 0 {
                return Ok(self.take());
            }
            let mut space = [0; HEADER + MAX_PAYLOAD as usize];
            let into = &mut space[..missing];
            let count = match receive(&socket, into, &mut self.fds, closer) {
                Ok(0) => return Ok(Read::End),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Read::Nothing);
                }
                Err(error) => return Err(error),
            };
            if self.fds.len() > MAX_FDS {
                return Err(bad(format!("more than {MAX_FDS} descriptors")));
            }
            self.bytes.extend_from_slice(&into[..count]);
        }
    }

    fn take(&mut self) -> Read {
        let bytes = std::mem::take(&mut self.bytes);
        let Some((header, payload)) = bytes.split_first_chunk() else {
            return Read::Nothing;
        };
        let (request, flags, _) = split(header);
        Read::Message(Message {
            request,
            needs_answer: flags & NEEDS_ANSWER != 0,
            payload: payload.to_vec(),
            fds: std::mem::take(&mut self.fds),
        })
    }
}

fn split(header: &[u8; HEADER]) -> (u32, u32, u32) {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *header;
    let word = u32::from_le_bytes;
    (word([a, b, c, d]), word([e, f, g, h]), word([i, j, k, l]))
}

fn bad(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads bytes, and the descriptors that come with them: all, so that the kernel drops none here.
fn receive(
    socket: impl AsFd,
    into: &mut [u8],
    fds: &mut Vec<PeerFd>,
    closer: &Closer,
) -> io::Result<usize> {
    if socket::has_urgent(&socket)? {
        return Err(bad("out-of-band bytes".into()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNELS_MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags);
    let got = got.map_err(|error| match error {
        Errno::INTR => io::ErrorKind::WouldBlock.into(),
        error => io::Error::from(error),
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came.map(|fd: OwnedFd| PeerFd::gift(fd, closer.clone())));
        }
    }
    match got.flags.contains(ReturnFlags::CTRUNC) {
        true => Err(bad("more descriptors than the daemon can have".into())),
        false => Ok(got.bytes),
    }
}

/// Answers a request.
///
/// # Errors
/// The front-end does not take it: the connection is to be closed.
pub(crate) fn answer(socket: impl AsFd, request: u32, payload: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    // Exactly these flags: QEMU and User-mode Linux compare them.
    for word in [request, VERSION | ANSWER, payload.len() as u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    match send(socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(bad("it does not take answers".into())),
        Err(error) => Err(error.into()),
    }
}

/// Bytes of a header.
const HEADER: usize = 12;
/// Bytes after it, at most.
pub(crate) const MAX_PAYLOAD: u32 = 4096;
/// Descriptors of one message, at most.
pub(crate) const MAX_FDS: usize = 32;
/// Those that the kernel passes at once (`SCM_MAX_FD`).
const KERNELS_MOST: usize = 253;

const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const ANSWER: u32 = 4;
const NEEDS_ANSWER: u32 = 8;
