//! How numbers and sets of chunks are written in an index.

/// Appends numbers to bytes.
pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// LEB128: seven bits a byte, the lowest first.
    pub(super) fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A set of chunks, not empty; `all` is the set of all chunks of the block.
    pub(super) fn chunks(&mut self, set: u64, all: u64) {
        let lowest = set.trailing_zeros() as u8;
        let count = set.count_ones() as u8;
        if count == 1 {
            self.0.push(lowest);
        } else if set == all {
            self.0.push(ALL);
        } else if count <= MAX_LIST {
            self.0.push(LIST + count);
            let mut rest = set;
            while rest != 0 {
                self.0.push(rest.trailing_zeros() as u8);
                rest &= rest - 1;
            }
        } else {
            self.0.push(BITS);
            self.u64(set);
        }
    }
}

/// Takes numbers from bytes; `None` where they end or make no sense.
pub(super) struct Parser<'a>(pub(super) &'a [u8]);

impl Parser<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub(super) fn number(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        // The tenth byte has one bit left.
        match self.byte()? {
            last @ 0..=1 => Some(value | u64::from(last) << 63),
            _ => None,
        }
    }

    pub(super) fn chunks(&mut self, all: u64) -> Option<u64> {
        let set = match self.byte()? {
            single @ 0..64 => 1 << single,
            ALL => all,
            BITS => self.u64()?,
            list => {
                let count = list
                    .checked_sub(LIST)
                    .filter(|n| (2..=MAX_LIST).contains(n))?;
                let mut set = 0;
                for _ in 0..count {
                    set |= 1_u64.checked_shl(u32::from(self.byte()?))?;
                }
                set
            }
        };
        (set != 0 && set & !all == 0).then_some(set)
    }
}

const ALL: u8 = 64;
const BITS: u8 = 65;
/// Plus the number of chunks that follow.
const LIST: u8 = 66;
const MAX_LIST: u8 = 7;
