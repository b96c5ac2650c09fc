//! Reads capture files back: pcapng and classic pcap, of any byte order and resolution, whichever program wrote
//! them, also while somebody still writes.
//!
//! A [`Reader`] goes through a file block by block and can continue anywhere a block begins
//! ([`Reader::seek`]). Files are hostile input: memory stays below 48 MiB whatever a file says (a block
//! of [`MAX_BLOCK_BYTES`], 65,536 sections and as many interfaces), every whole packet before a damaged place is handed over, and the error names
//! the file and the byte.
//!
//! A file that ends within a block is not damaged: its writer may be at work, or was killed. Then
//! [`Reader::read`] says `None` and [`Reader::end`] says where the last whole block ended; reading
//! again goes on from there if the file has grown. The same holds for zeros where a block should
//! begin: room that a writer has allocated. An end and damage are believed only in bytes that were read
//! for that call: those read before may be older than what the writer has written since.

//!
//! Files that were packed ([`crate::archive`]) are read as what they were; all offsets are of that.

mod input;
mod legacy;
mod ng;
mod source;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use vnplug_frame::capfile::classic::{Classic, HEADER_BYTES};
use vnplug_frame::capfile::ng::{Description, SECTION};
use vnplug_frame::capfile::write::pcapng;
use vnplug_frame::capfile::{Bad, Clock};

use crate::archive::Keys;
use crate::manifest::Hole;
use input::Input;
pub(crate) use source::{At, Source, open as open_source};

/// The largest block that is read whole; longer ones that hold packets are damage, others are skipped.
pub const MAX_BLOCK_BYTES: usize = 16 << 20;

/// A packet, as long as the reader is not asked for the next one.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    /// Nanoseconds since 1970; what lies outside of 64 bits is clamped.
    pub ts_ns: u64,
    /// What was captured.
    pub bytes: &'a [u8],
    /// Length on the wire in bytes.
    pub wire_len: u32,
    /// Which of [`Reader::interfaces`].
    pub interface: usize,
    /// LINKTYPE_… of its interface; 1 is Ethernet.
    pub link_type: u32,
    /// `epb_flags` (direction and so on), 0 if the file says nothing.
    pub flags: u32,
    /// How many packets were lost just before it (`epb_dropcount`), as the file says.
    pub lost: u64,
    /// Its comments, one in a line; empty if it has none.
    pub comment: &'a str,
    /// Where its block begins in the file.
    pub offset: u64,
}

/// What a file says of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// LINKTYPE_…; 1 is Ethernet.
    pub link_type: u32,
    /// Most bytes kept of a packet; 0 is no limit.
    pub snaplen: u32,
    /// `if_name`, empty if it has none.
    pub name: String,
    /// How its timestamps count.
    clock: Clock,
}

impl Interface {
    /// One that a file says nothing of but that it is Ethernet.
    pub fn ethernet() -> Self {
        Self {
            link_type: 1,
            snaplen: 0,
            name: String::new(),
            clock: Clock::NANOS,
        }
    }

    fn described(described: Description) -> Self {
        Self {
            link_type: described.link_type,
            snaplen: described.snaplen,
            name: described.name,
            clock: described.clock,
        }
    }

    /// Whether it is described in the same words, however its timestamps count.
    pub fn is_same(&self, other: &Self) -> bool {
        let of = |i: &Self| (i.link_type, i.snaplen);
        of(self) == of(other) && self.name == other.name
    }
}

/// How the file ended when [`Reader::read`] said `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// After a whole block.
    Clean,
    /// Within the block that begins here; its writer is at work or was killed.
    Torn(u64),
    /// From here on there are only allocated zeros.
    Unwritten(u64),
}

/// Statistics of a capture file (an interface statistics block).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Note {
    /// When they were true, nanoseconds since 1970.
    pub at_ns: u64,
    /// Begin and end of what they count, if they say so.
    pub range_ns: Option<(u64, u64)>,
    /// Packets that came (`isb_ifrecv`).
    pub received: Option<u64>,
    /// Packets that were lost (`isb_ifdrop`).
    pub dropped: Option<u64>,
    /// Their first comment.
    pub comment: String,
}

impl Note {
    /// Whether they tell a loss that no packet tells.
    pub(crate) fn is_loss(&self) -> bool {
        self.received.is_none() && !self.comment.is_empty() && !self.comment.contains(pcapng::HERE)
    }
}

/// Reads one capture file.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    input: Input,
    format: Format,
    interfaces: Vec<Interface>,
    end: End,
    /// The comments of the packet that was read last.
    comment: String,
    /// Statistics that were passed since they were asked for; `None`: nobody will.
    notes: Option<Vec<Note>>,
}

/// What a file is, and what of it must be remembered between blocks.
#[derive(Debug)]
enum Format {
    /// Nothing was read yet.
    Unknown,
    Ng(ng::Section),
    Classic(Classic),
}

/// A packet's place in the input's buffer.
struct Found {
    ts_ns: u64,
    wire_len: u32,
    interface: usize,
    flags: u32,
    lost: u64,
    offset: u64,
    /// Bytes from the beginning of the buffered block.
    skip: usize,
    len: usize,
}

/// What stands at the current place.
enum Step {
    Packet(Found),
    /// Something else, which was passed over.
    Other,
    End(End),
}

impl Reader {
    /// Opens a capture file. What is in it is first looked at by [`read`](Self::read).
    ///
    /// # Errors
    /// [`ReadError`] if it cannot be opened or is no regular file.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ReadError> {
        Self::open_with(path, &Keys::default())
    }

    /// As [`open`](Self::open); one that is encrypted is opened with these keys.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: impl Into<PathBuf>, keys: &Keys) -> Result<Self, ReadError> {
        let path = path.into();
        // NB: without O_NONBLOCK the open of a pipe waits until somebody writes into it.
        let mut options = File::options();
        options
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let opened = options.open(&path).and_then(|file| {
            if file.metadata()?.is_file() {
                Ok(file)
            } else {
                Err(io::Error::other("not a regular file"))
            }
        });
        match opened {
            Ok(file) => Ok(Self::of_with(file, path, keys)),
            Err(error) => Err(ReadError::io(&path, 0, error)),
        }
    }

    /// Reads an open file; `path` is for messages.
    pub fn of(file: File, path: PathBuf) -> Self {
        Self::of_with(file, path, &Keys::default())
    }

    /// As [`of`](Self::of); one that is encrypted is opened with these keys. If none fits, each read says
    /// so.
    pub fn of_with(file: File, path: PathBuf, keys: &Keys) -> Self {
        let source = source::open(file, keys);
        let source = source.unwrap_or_else(|error| Box::new(source::Closed(error)));
        Self::with(Input::file(source), path)
    }

    /// Reads a pipe or whatever else cannot be sought in; `path` is for messages.
    pub fn stream(stream: Box<dyn io::Read + Send>, path: PathBuf) -> Self {
        Self::with(Input::stream(stream), path)
    }

    fn with(input: Input, path: PathBuf) -> Self {
        Self {
            path,
            input,
            format: Format::Unknown,
            interfaces: Vec::new(),
            end: End::Clean,
            comment: String::new(),
            notes: None,
        }
    }

    /// The next packet; `None` at the end ([`end`](Self::end) says which). May be called again then.
    ///
    /// # Errors
    /// [`ReadError`] if the file cannot be read, or is damaged where the error says. Then reading goes
    /// on elsewhere by [`seek`](Self::seek); read again, a file says what is there by then.
    pub fn read(&mut self) -> Result<Option<Packet<'_>>, ReadError> {
        self.read_until(u64::MAX)
    }

    /// As [`read`](Self::read), but says `None` at a block that begins at `limit` or after it.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_until(&mut self, limit: u64) -> Result<Option<Packet<'_>>, ReadError> {
        let found = loop {
            if self.input.offset() >= limit {
                self.end = End::Clean;
                return Ok(None);
            }
            match self.step()? {
                Step::Packet(found) => break found,
                Step::Other => {}
                Step::End(end) => {
                    self.end = end;
                    return Ok(None);
                }
            }
        };
        Ok(Some(Packet {
            ts_ns: found.ts_ns,
            bytes: self.input.taken(found.skip, found.len),
            wire_len: found.wire_len,
            interface: found.interface,
            link_type: self.interfaces[found.interface].link_type,
            flags: found.flags,
            lost: found.lost,
            comment: &self.comment,
            offset: found.offset,
        }))
    }

    /// The statistics that were passed since the last call, at most 4096 of them; from the first call on they
    /// are kept.
    pub fn notes(&mut self) -> Vec<Note> {
        std::mem::take(self.notes.get_or_insert_default())
    }

    /// How the file ended.
    pub fn end(&self) -> End {
        self.end
    }

    /// Where the next block begins.
    pub fn offset(&self) -> u64 {
        self.input.offset()
    }

    /// What is known of interfaces by now; those of all sections, in the order they were read.
    pub fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How long the file is now, in bytes; `None` for a stream.
    pub fn len_bytes(&self) -> Option<u64> {
        self.input.len_bytes()
    }

    /// Where section headers and interface descriptions were found so far.
    pub fn definitions(&self) -> &[u64] {
        match &self.format {
            Format::Ng(state) => &state.definitions,
            _ => &[],
        }
    }

    /// Goes on at `offset`, where a block begins. `definitions` are the places of all section headers
    /// and interface descriptions of the file before it, in order; none for classic pcap.
    ///
    /// # Errors
    /// [`ReadError`] if what is there cannot be read. A stream cannot be sought in.
    pub fn seek(&mut self, offset: u64, definitions: &[u64]) -> Result<(), ReadError> {
        if matches!(self.format, Format::Unknown) {
            self.input.seek(0);
            self.begin()?;
        }
        let known = self.definitions().len();
        let wanted = definitions.partition_point(|&at| at < offset);
        if let Format::Ng(_) = self.format {
            // Definitions already known stay; others are read in order.
            if wanted < known || self.definitions()[..known] != definitions[..known] {
                self.interfaces.clear();
                self.format = Format::Ng(ng::Section::default());
            }
            let from = self.definitions().len();
            for &at in &definitions[from..wanted] {
                self.input.seek(at);
                if let Step::End(_) = self.step()? {
                    return Err(ReadError::bad(
                        &self.path,
                        at,
                        "no block where one was noted",
                    ));
                }
            }
        }
        let offset = match &self.format {
            Format::Classic(_) => offset.max(HEADER_BYTES as u64),
            _ => offset,
        };
        self.input.seek(offset);
        Ok(())
    }

    fn step(&mut self) -> Result<Step, ReadError> {
        let mut is_fresh = self.input.buffered() == 0;
        loop {
            let step = self.block();
            if matches!(step, Ok(Step::Packet(_) | Step::Other)) {
                return step;
            }
            if !self.input.forget() || is_fresh {
                return step;
            }
            is_fresh = true;
        }
    }

    fn block(&mut self) -> Result<Step, ReadError> {
        if matches!(self.format, Format::Unknown)
            && let Some(end) = self.begin()?
        {
            return Ok(Step::End(end));
        }
        let at = self.input.offset();
        let result = match &mut self.format {
            Format::Ng(state) => {
                let (comment, notes) = (&mut self.comment, self.notes.as_mut());
                state.step(&mut self.input, &mut self.interfaces, comment, notes)
            }
            Format::Classic(file) => legacy::step(file, &mut self.input),
            Format::Unknown => return Ok(Step::End(End::Clean)),
        };
        result.map_err(|problem| problem.at(&self.path, at))
    }

    /// Finds out what the file is.
    fn begin(&mut self) -> Result<Option<End>, ReadError> {
        let fail = |problem: Problem| problem.at(&self.path, 0);
        let Some(start) = self.input.peek(4).map_err(|e| fail(e.into()))? else {
            let end = match self.input.buffered() {
                0 => End::Clean,
                _ => End::Torn(0),
            };
            return Ok(Some(end));
        };
        let magic = [start[0], start[1], start[2], start[3]];
        if magic == [0; 4] {
            return Ok(Some(End::Unwritten(0)));
        }
        if magic == SECTION.to_le_bytes() {
            self.format = Format::Ng(ng::Section::default());
            return Ok(None);
        }
        match legacy::begin(&mut self.input, magic).map_err(fail)? {
            Some((file, interface)) => {
                self.interfaces.push(interface);
                self.format = Format::Classic(file);
                Ok(None)
            }
            None => Ok(Some(End::Torn(0))),
        }
    }
}

/// What is wrong, without the place.
#[derive(Debug)]
enum Problem {
    Io(io::Error),
    Bad(Bad),
}

impl Problem {
    fn at(self, path: &Path, offset: u64) -> ReadError {
        match self {
            Self::Io(error) => ReadError::io(path, offset, error),
            Self::Bad(bad) => ReadError::bad(path, offset, bad.what),
        }
    }
}

impl From<Bad> for Problem {
    fn from(bad: Bad) -> Self {
        Self::Bad(bad)
    }
}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A file cannot be read on.
#[derive(Debug)]
pub struct ReadError {
    /// Which file.
    pub path: PathBuf,
    /// Where in it the block begins that is wrong.
    pub offset: u64,
    /// What is wrong.
    pub cause: Cause,
}

/// Why a file cannot be read on.
#[derive(Debug)]
pub enum Cause {
    /// The system could not read it.
    Io(io::Error),
    /// It says what cannot be.
    Damaged(String),
    /// It ends at the offset, and was of this length in bytes when it was closed.
    Cut(u64),
    /// The recorder removed it to make room, and took it from its reader at the offset.
    Taken,
    /// Segments are missing, or are not those that were closed; in words.
    Hole(String),
}

impl ReadError {
    pub(crate) fn io(path: &Path, offset: u64, error: io::Error) -> Self {
        Self {
            path: path.to_owned(),
            offset,
            cause: Cause::Io(error),
        }
    }

    pub(crate) fn bad(path: &Path, offset: u64, what: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            offset,
            cause: Cause::Damaged(what.into()),
        }
    }

    /// A closed file that was cut off.
    pub(crate) fn cut(path: &Path, len_bytes: u64, closed_bytes: u64) -> Self {
        Self {
            path: path.to_owned(),
            offset: len_bytes,
            cause: Cause::Cut(closed_bytes),
        }
    }

    /// Segments that should be there and are not, or are others.
    pub fn hole(hole: Hole) -> Self {
        Self {
            path: hole.dir,
            offset: 0,
            cause: Cause::Hole(hole.what),
        }
    }

    /// True if the file is to blame, and not the system or a slow reader.
    pub fn is_damage(&self) -> bool {
        !matches!(self.cause, Cause::Io(_) | Cause::Taken)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            offset,
            cause,
        } = self;
        match cause {
            Cause::Io(error) if *offset == 0 => write!(f, "{}: {error}", path.display()),
            Cause::Io(error) => write!(f, "{}: byte {offset}: {error}", path.display()),
            Cause::Damaged(what) => write!(f, "{}: byte {offset}: {what}", path.display()),
            Cause::Cut(closed) => {
                let path = path.display();
                write!(
                    f,
                    "{path}: is cut off: {offset} bytes of the {closed} with which it was closed"
                )
            }
            Cause::Hole(what) => write!(f, "{}: {what}", path.display()),
            Cause::Taken => {
                let path = path.display();
                write!(
                    f,
                    "{path}: byte {offset}: removed by its recorder, which needed the room before this was \
                     read"
                )
            }
        }
    }
}

impl std::error::Error for ReadError {}

#[cfg(test)]
pub(crate) mod tests;
