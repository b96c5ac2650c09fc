//! The operator's programs: which there are, and what lies in their maps.
//!
//! ```text
//! List                            → All
//! Change                          → Done        by operators
//! Read { program, map, first, … } → Values      as they lie there at this moment, entry by entry
//! ```

use super::wire::{Malformed, Reader, Writer};

/// Something about the operator's programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Programs {
    /// Asks for those that may be used.
    List,
    /// They are these.
    All(Vec<ProgramInfo>),
    /// Operators: a change of the programs, until the daemon ends.
    Change(ProgramChange),
    /// Asks for values of a map.
    Read {
        /// Name of the program.
        program: String,
        /// Name of the map.
        map: String,
        /// The first entry.
        first: u32,
        /// How many entries.
        count: u32,
    },
    /// The values, one after the other.
    Values {
        /// Bytes of each.
        value_bytes: u32,
        /// Entries of the map in all.
        entries: u32,
        /// The bytes, in the order of the machine's.
        bytes: Vec<u8>,
    },
}

/// A change of the programs. One that is refused changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgramChange {
    /// One more, which is written as on the daemon's command line.
    Add {
        /// `NAME=FILE.o[:FUNCTION],open=…,attach=…`
        text: String,
    },
    /// Another version of one, for all that go through it.
    Replace {
        /// As for `Add`; or its name alone, and what it was loaded from is read again.
        text: String,
    },
    /// None of this name any more. Ports that go through it are over.
    Remove {
        /// Its name.
        name: String,
    },
}

/// The most bytes of values in one answer.
pub const MAX_VALUES: usize = 64 << 10;

/// A program.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramInfo {
    /// Its name, by which ports ask for it.
    pub name: String,
    /// What kind of program it is: `xdp` or `tc`.
    pub kind: String,
    /// Where the kernel runs it: `xdp:eth1 native`, `tc:eth1`; of sources' nothing is said.
    pub runs: Vec<String>,
    /// Its number in the kernel.
    pub id: u32,
    /// Its maps.
    pub maps: Vec<ProgramMap>,
    /// Ports whose frames go through it.
    pub ports: u32,
    /// Frames that the daemon ran it on.
    pub frames: u64,
    /// Those that it dropped.
    pub dropped: u64,
    /// Those for which it was stopped, or failed.
    pub aborted: u64,
}

/// A map of a program: an array that the kernel, the daemon and who may see it share.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramMap {
    /// Its name.
    pub name: String,
    /// Its number in the kernel.
    pub id: u32,
    /// Bytes of a value.
    pub value_bytes: u32,
    /// How many values.
    pub entries: u32,
    /// Programs only read it.
    pub constant: bool,
}

impl Programs {
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::List => 62,
            Self::All(_) => 63,
            Self::Read { .. } => 64,
            Self::Values { .. } => 65,
            Self::Change(_) => 66,
        }
    }

    /// Whether a header of this number is one of these.
    pub(super) fn has(kind: u8) -> bool {
        (62..=66).contains(&kind)
    }

    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::List => {}
            Self::All(all) => w.list(all, |w, it| it.write(w)),
            Self::Change(change) => change.write(w),
            Self::Read {
                program,
                map,
                first,
                count,
            } => {
                w.text(program);
                w.text(map);
                w.u32(*first);
                w.u32(*count);
            }
            Self::Values {
                value_bytes,
                entries,
                bytes,
            } => {
                w.u32(*value_bytes);
                w.u32(*entries);
                w.bytes(bytes);
            }
        }
    }

    pub(super) fn read(kind: u8, r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match kind {
            62 => Self::List,
            63 => Self::All(r.list("programs", ProgramInfo::read)?),
            64 => Self::Read {
                program: r.text("program")?,
                map: r.text("map")?,
                first: r.u32("first")?,
                count: r.u32("count")?,
            },
            65 => Self::Values {
                value_bytes: r.u32("value_bytes")?,
                entries: r.u32("entries")?,
                bytes: r.bytes("bytes")?.to_vec(),
            },
            66 => Self::Change(ProgramChange::read(r)?),
            kind => return Err(Malformed::Kind(kind)),
        })
    }
}

impl ProgramChange {
    fn write(&self, w: &mut Writer) {
        let (what, text) = match self {
            Self::Add { text } => (ADD, text),
            Self::Replace { text } => (REPLACE, text),
            Self::Remove { name } => (REMOVE, name),
        };
        w.u8(what);
        w.text(text);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let what = r.u8("what")?;
        let text = r.text("text")?;
        Ok(match what {
            ADD => Self::Add { text },
            REPLACE => Self::Replace { text },
            REMOVE => Self::Remove { name: text },
            other => return Err(Malformed::Value("what", u64::from(other))),
        })
    }
}

const ADD: u8 = 1;
const REPLACE: u8 = 2;
const REMOVE: u8 = 3;

impl ProgramInfo {
    fn write(&self, w: &mut Writer) {
        w.text(&self.name);
        w.text(&self.kind);
        w.list(&self.runs, |w, text| w.text(text));
        w.u32(self.id);
        w.list(&self.maps, |w, map| map.write(w));
        w.u32(self.ports);
        w.u64(self.frames);
        w.u64(self.dropped);
        w.u64(self.aborted);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("name")?,
            kind: r.text("kind")?,
            runs: r.list("runs", |r| r.text("where it runs"))?,
            id: r.u32("id")?,
            maps: r.list("maps", ProgramMap::read)?,
            ports: r.u32("ports")?,
            frames: r.u64("frames")?,
            dropped: r.u64("dropped")?,
            aborted: r.u64("aborted")?,
        })
    }
}

impl ProgramMap {
    fn write(&self, w: &mut Writer) {
        w.text(&self.name);
        w.u32(self.id);
        w.u32(self.value_bytes);
        w.u32(self.entries);
        w.u8(u8::from(self.constant));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("name")?,
            id: r.u32("id")?,
            value_bytes: r.u32("value_bytes")?,
            entries: r.u32("entries")?,
            constant: r.flag("constant")?,
        })
    }
}
