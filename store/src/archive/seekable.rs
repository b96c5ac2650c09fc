//! zstd in frames that can be decompressed one by one: the [seekable format] of zstd's own repository.
//!
//! ```text
//! frame | frame | … | seek table: a skippable frame with the lengths of all, and how many there are
//! ```
//!
//! `zstd -d` and all else that reads zstd passes over the table and reads the frames one after the
//! other. Each frame has zstd's checksum of its content.
//!
//! [seekable format]: https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md

use std::io::{self, Write};

use zstd::bulk::{Compressor, Decompressor};

use crate::read::Source;

/// Compresses what is written to it.
pub(super) struct Frames<W: Write> {
    to: W,
    compressor: Compressor<'static>,
    frame: Vec<u8>,
    table: Vec<u8>,
}

impl<W: Write> Frames<W> {
    pub(super) fn new(to: W, level: i32) -> io::Result<Self> {
        let mut compressor = Compressor::new(level)?;
        compressor.include_checksum(true)?;
        Ok(Self {
            to,
            compressor,
            frame: Vec::with_capacity(FRAME_BYTES),
            table: Vec::new(),
        })
    }

    /// Writes the rest and the table.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.end_frame()?;
        let count = (self.table.len() / ENTRY) as u32;
        let len = (self.table.len() + FOOTER) as u32;
        self.to.write_all(&SKIPPABLE.to_le_bytes())?;
        self.to.write_all(&len.to_le_bytes())?;
        self.to.write_all(&self.table)?;
        self.to.write_all(&count.to_le_bytes())?;
        // Its entries have no checksums: the frames have.
        self.to.write_all(&[0])?;
        self.to.write_all(&SEEKABLE.to_le_bytes())?;
        Ok(self.to)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.frame.is_empty() {
            return Ok(());
        }
        let packed = self.compressor.compress(&self.frame)?;
        self.to.write_all(&packed)?;
        self.table.extend((packed.len() as u32).to_le_bytes());
        self.table.extend((self.frame.len() as u32).to_le_bytes());
        self.frame.clear();
        Ok(())
    }
}

impl<W: Write> Write for Frames<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(FRAME_BYTES - self.frame.len());
        self.frame.extend_from_slice(&bytes[..len]);
        if self.frame.len() == FRAME_BYTES {
            self.end_frame()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Reads such a file anywhere: a read decompresses the frame it lies in, and the latest is kept.
pub(crate) struct Seekable {
    packed: Box<dyn Source>,
    /// Where each frame begins, packed and not; the last is the end of all.
    places: Vec<(u64, u64)>,
    decompressor: Decompressor<'static>,
    frame: Vec<u8>,
    /// Which one that is; `usize::MAX`: none.
    number: usize,
    input: Vec<u8>,
}

impl Seekable {
    /// Whether a file that begins so is zstd's.
    pub(crate) fn is_magic(magic: [u8; 4]) -> bool {
        let magic = u32::from_le_bytes(magic);
        magic == ZSTD || magic & !0xf == SKIPPABLE & !0xf
    }

    /// # Errors
    /// Those of reading; a file without a seek table, or with one that cannot be.
    pub(crate) fn open(mut packed: Box<dyn Source>) -> io::Result<Self> {
        let len = packed.len_bytes()?;
        let none = || bad("zstd without a seek table: decompress it by zstd -d");
        let mut footer = [0; FOOTER];
        let at = len.checked_sub(FOOTER as u64).ok_or_else(none)?;
        packed.read_exact_at(&mut footer, at)?;
        let word = |bytes: &[u8], at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (count, descriptor) = (word(&footer, 0) as usize, footer[4]);
        if word(&footer, 5) != SEEKABLE {
            return Err(none());
        }
        let wrong = || bad("the seek table is damaged: zstd -d may still read the file");
        if count > MOST_FRAMES || descriptor & 0x7c != 0 {
            return Err(wrong());
        }
        let entry = if descriptor & 0x80 == 0 {
            ENTRY
        } else {
            ENTRY + 4
        };
        let bytes = count * entry + FOOTER;
        let end = len.checked_sub(bytes as u64 + 8).ok_or_else(wrong)?;
        let mut table = vec![0; bytes + 8];
        packed.read_exact_at(&mut table, end)?;
        if word(&table, 0) != SKIPPABLE || word(&table, 4) as usize != bytes {
            return Err(wrong());
        }
        let mut places = Vec::with_capacity(count + 1);
        let mut place = (0, 0);
        for number in 0..count {
            places.push(place);
            let (short, long) = (
                word(&table, 8 + number * entry),
                word(&table, 12 + number * entry),
            );
            if long as usize > MOST_FRAME_BYTES || short as usize > MOST_FRAME_BYTES {
                return Err(wrong());
            }
            place = (place.0 + u64::from(short), place.1 + u64::from(long));
        }
        places.push(place);
        if place.0 > end {
            return Err(wrong());
        }
        Ok(Self {
            packed,
            places,
            decompressor: Decompressor::new()?,
            frame: Vec::new(),
            number: usize::MAX,
            input: Vec::new(),
        })
    }

    fn load(&mut self, number: usize) -> io::Result<()> {
        if self.number == number {
            return Ok(());
        }
        self.number = usize::MAX;
        let ((from, start), (to, end)) = (self.places[number], self.places[number + 1]);
        self.input.resize((to - from) as usize, 0);
        self.packed.read_exact_at(&mut self.input, from)?;
        let len = (end - start) as usize;
        self.frame.clear();
        self.frame.reserve_exact(len);
        let got = self
            .decompressor
            .decompress_to_buffer(&self.input, &mut self.frame)
            .map_err(|error| bad(&format!("zstd frame {number} is damaged: {error}")))?;
        if got != len {
            return Err(bad("a zstd frame is not as long as the seek table says"));
        }
        self.number = number;
        Ok(())
    }
}

impl Source for Seekable {
    fn read_at(&mut self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        // Behind frames that are empty.
        let number = self.places.partition_point(|&(_, at)| at <= offset);
        if number == self.places.len() || into.is_empty() {
            return Ok(0);
        }
        let number = number - 1;
        self.load(number)?;
        let inside = (offset - self.places[number].1) as usize;
        let rest = &self.frame[inside..];
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.places.last().map_or(0, |&(_, end)| end))
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Bytes of the file in a frame.
pub(super) const FRAME_BYTES: usize = 1 << 20;
/// RFC 8878, 3.1.1.
const ZSTD: u32 = 0xfd2f_b528;
/// RFC 8878, 3.1.2; this one is the seek table's.
const SKIPPABLE: u32 = 0x184d_2a5e;
/// At the end of a file with a seek table.
const SEEKABLE: u32 = 0x8f92_eab1;
const FOOTER: usize = 9;
const ENTRY: usize = 8;
/// No file of others makes us take more memory.
const MOST_FRAME_BYTES: usize = 16 << 20;
const MOST_FRAMES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    impl Source for Vec<u8> {
        fn read_at(&mut self, into: &mut [u8], offset: u64) -> io::Result<usize> {
            let rest = self.get(offset as usize..).unwrap_or_default();
            let len = rest.len().min(into.len());
            into[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        }

        fn len_bytes(&self) -> io::Result<u64> {
            Ok(self.len() as u64)
        }
    }

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 7 * at / 1000) as u8).collect()
    }

    fn packed(content: &[u8]) -> Vec<u8> {
        let mut frames = Frames::new(Vec::new(), 3).unwrap();
        frames.write_all(content).unwrap();
        frames.finish().unwrap()
    }

    #[test]
    fn what_was_compressed_is_read_anywhere() {
        for len in [
            0,
            1,
            FRAME_BYTES - 1,
            FRAME_BYTES,
            FRAME_BYTES + 1,
            3_500_000,
        ] {
            let content = content(len);
            let packed = packed(&content);
            assert_eq!(zstd::decode_all(&packed[..]).unwrap(), content);
            let mut seekable = Seekable::open(Box::new(packed)).unwrap();
            assert_eq!(seekable.len_bytes().unwrap(), len as u64);
            for at in (0..len).step_by(333_333).chain([len.saturating_sub(1)]) {
                let mut some = vec![0; 100_000.min(len - at)];
                seekable.read_exact_at(&mut some, at as u64).unwrap();
                assert_eq!(some, content[at..at + some.len()]);
            }
            assert_eq!(seekable.read_at(&mut [0; 8], len as u64).unwrap(), 0);
            assert_eq!(seekable.read_at(&mut [0; 8], u64::MAX).unwrap(), 0);
        }
    }

    #[test]
    fn damage_is_an_error_and_never_other_bytes() {
        let content = content(2_500_000);
        let good = packed(&content);
        for at in (0..good.len())
            .step_by(good.len() / 400 + 1)
            .chain(good.len() - 60..good.len())
        {
            let mut broken = good.clone();
            broken[at] ^= 0x41;
            let Ok(mut seekable) = Seekable::open(Box::new(broken)) else {
                continue;
            };
            let mut all = vec![0; content.len()];
            if seekable.read_exact_at(&mut all, 0).is_ok() {
                assert_eq!(all, content, "byte {at}");
            }
        }
        for len in [0, 8, 9, good.len() / 2, good.len() - 1] {
            assert!(Seekable::open(Box::new(good[..len].to_vec())).is_err());
        }
        let one_frame = zstd::encode_all(&content[..], 1).unwrap();
        let refused = Seekable::open(Box::new(one_frame)).err().unwrap();
        assert!(refused.to_string().contains("zstd -d"));
    }
}
