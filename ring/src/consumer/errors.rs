//! What is wrong with a ring, or a record of it.

use crate::layout::VERSION_MAJOR;

/// The memory is not a ring this reader can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachError {
    /// It does not start with the magic number of this kind of ring.
    Magic(u64),
    /// Its major version is not [`VERSION_MAJOR`]; the host and this library do not match.
    Version(u16),
    /// A field of the header is impossible, or the ring is larger than the region.
    Geometry(&'static str, u64),
}

/// A record that cannot be: the memory was overwritten by somebody. Close the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt {
    /// Position of the record.
    pub at: u64,
    /// Its captured length.
    pub cap_len: u32,
    /// Bytes published from there on.
    pub available: u64,
}

impl std::fmt::Display for AttachError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic(found) => write!(f, "not a ring: it starts with {found:#018x}"),
            Self::Version(found) => {
                write!(
                    f,
                    "ring layout {found}, this library reads {VERSION_MAJOR}: update one"
                )
            }
            Self::Geometry(field, value) => write!(f, "the ring's {field} cannot be {value}"),
        }
    }
}

impl std::error::Error for AttachError {}

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            at,
            cap_len,
            available,
        } = self;
        write!(
            f,
            "corrupt record at {at}: length {cap_len} with {available} bytes published"
        )
    }
}

impl std::error::Error for Corrupt {}
