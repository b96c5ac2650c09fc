//! Arrays that a program and processes share as memory (Linux ≥ 5.5).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::{MAP_INFO_ID, MMAPABLE, Map, MapKind, number};

/// An array of values that lie one after the other, from the begin of a page: what is mapped of its descriptor
/// is what programs see.
#[derive(Debug)]
pub struct Array {
    map: Map,
    entries: u32,
}

impl Array {
    /// Values of `value_bytes` bytes each, all zero. `constant`: programs may not write it.
    ///
    /// # Errors
    /// The system's; `InvalidInput` if it has no entry or is longer than 4 GiB.
    pub fn create(name: &str, value_bytes: u32, entries: u32, constant: bool) -> io::Result<Self> {
        let flags = MMAPABLE | if constant { READ_ONLY_PROGRAM } else { 0 };
        let layout = (4, value_bytes as usize);
        let all = u64::from(entries) * u64::from(value_bytes).next_multiple_of(8);
        if all == 0 || all > u32::MAX.into() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let map = Map::create_with(MapKind::Array, name, layout, entries, flags)?;
        Ok(Self { map, entries })
    }

    /// The same memory, by a descriptor of its own.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let fd = self.map.fd.try_clone()?;
        let Map {
            key_bytes,
            value_bytes,
            ..
        } = self.map;
        let map = Map {
            fd,
            key_bytes,
            value_bytes,
        };
        Ok(Self {
            map,
            entries: self.entries,
        })
    }

    /// Of a map that is one.
    pub(super) fn of(map: Map, entries: u32) -> Self {
        Self { map, entries }
    }

    /// The map, for what is loaded beside it.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Bytes from one value to the next.
    pub fn stride(&self) -> u32 {
        self.value_bytes().next_multiple_of(8)
    }

    /// Bytes of a value.
    pub fn value_bytes(&self) -> u32 {
        self.map.value_bytes as u32
    }

    /// How many values.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Bytes to map: all values.
    pub fn bytes(&self) -> u64 {
        u64::from(self.stride()) * u64::from(self.entries)
    }

    /// Its number in the kernel, as `bpftool map` shows it.
    ///
    /// # Errors
    /// The system's.
    pub fn id(&self) -> io::Result<u32> {
        number(&self.map.fd, MAP_INFO_ID)
    }

    /// The number of its descriptor, which instructions name it by until they are loaded.
    pub fn number(&self) -> i32 {
        self.map.fd.as_raw_fd()
    }

    /// Sets a value.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for a value of another length.
    pub fn set(&self, index: u32, value: &[u8]) -> io::Result<()> {
        self.map.update(&index.to_ne_bytes(), value)
    }

    /// From now on nobody changes it by system calls either (Linux ≥ 5.2).
    ///
    /// # Errors
    /// The system's.
    pub fn freeze(&self) -> io::Result<()> {
        self.map.freeze()
    }
}

impl AsFd for Array {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd.as_fd()
    }
}

/// `BPF_F_RDONLY_PROG`
const READ_ONLY_PROGRAM: u32 = 1 << 7;
