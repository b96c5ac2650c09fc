//! Asking for the members of a trust group, who hand frames to each other without the switch.

use super::wire::{Malformed, Reader, Writer};

/// Asks who is in a port's trust group. With the memory of the port's own home as a descriptor it makes the
/// port a member, or a new one in place of what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Direct {
    /// A port that takes part in a switch.
    pub port: u32,
    /// Bytes of each ring's record area in its home.
    pub capacity: u64,
    /// It takes frames that are still to be cut or summed.
    pub merged: bool,
}

/// Who is in a trust group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members {
    /// The asker's slot.
    pub slot: u8,
    /// And generation.
    pub generation: u32,
    /// The first two descriptors are the group's table, readable only, and the end of the asker's bell.
    pub is_first: bool,
    /// The others. Of those that this member was not told of before two descriptors come, in this order: the
    /// home's memory and what rings the bell.
    pub others: Vec<DirectMember>,
}

/// Another member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectMember {
    /// Its slot.
    pub slot: u8,
    /// And generation.
    pub generation: u32,
    /// Bytes of each ring's record area in its home.
    pub capacity: u64,
}

impl Direct {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u32(self.port);
        w.u64(self.capacity);
        w.u8(u8::from(self.merged));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            port: r.u32("port")?,
            capacity: r.u64("capacity")?,
            merged: r.flag("merged")?,
        })
    }
}

impl Members {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u8(self.slot);
        w.u32(self.generation);
        w.u8(u8::from(self.is_first));
        w.list(&self.others, |w, other| {
            w.u8(other.slot);
            w.u32(other.generation);
            w.u64(other.capacity);
        });
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            slot: r.u8("slot")?,
            generation: r.u32("generation")?,
            is_first: r.flag("is_first")?,
            others: r.list("others", |r| {
                Ok(DirectMember {
                    slot: r.u8("slot")?,
                    generation: r.u32("generation")?,
                    capacity: r.u64("capacity")?,
                })
            })?,
        })
    }
}
