//! Everything a guest's disk was told to write, in the order in which the disk had done it (dm-log-writes,
//! Linux 4.1 and later): a test can have the disk as it was after any of its flushes, as if the power had gone
//! at that moment.
//!
//! ```text
//!   ext4 ── dm-log-writes ── ubda, the disk
//!                     └───── ubdb, the log, a file of the host ── WriteLog ── an image per moment
//! ```
//!
//! The log is as drivers/md/dm-log-writes.c has it, little endian. Sector 0: `magic`, `version`, `entries`
//! (64 bits each), `bytes per sector` (32). After it the entries, each a sector with `sector`, `sectors`,
//! `flags`, `length of a mark` (64 bits each) and the mark's text, then the data, but for a discard. A write
//! that was not flushed comes with the next flush that is.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::disk::{DM, DiskFault, UBD, create, run};
use crate::error::{LabError, Result};
use crate::guest::Guest;

/// A guest's disk of which every write is logged.
#[derive(Debug)]
pub struct LoggedDisk<'a> {
    guest: &'a Guest,
    disk: DiskFault<'a>,
}

impl<'a> LoggedDisk<'a> {
    /// What makes two files the guest's disk and its log.
    #[must_use]
    pub fn kernel_args(disk: &Path, log: &Path) -> Vec<String> {
        let log = format!("ubd1={}", log.display());
        vec![DiskFault::kernel_arg(disk), log]
    }

    /// Maps the guest's disk; it will be mounted at `dir`.
    ///
    /// # Errors
    /// [`LabError::Command`] with what `dmsetup` says.
    pub fn new(guest: &'a Guest, dir: &str) -> Result<Self> {
        let target = format!("log-writes /dev/{UBD} /dev/{LOG}");
        let disk = create(guest, dir, |sectors| format!("0 {sectors} {target}\\n"))?;
        Ok(Self { guest, disk })
    }

    /// Mounts the file system.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn mount(&self) -> Result<()> {
        self.disk.mount()
    }

    /// Puts a word into the log, after all that the disk has flushed.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn mark(&self, word: &str) -> Result<()> {
        run(self.guest, &format!("{DM} message disk 0 mark {word}")).map(drop)
    }

    /// Unmounts the file system and ends the log; programs that use it must have ended.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn end(self) -> Result<()> {
        self.disk.unmount()?;
        run(self.guest, &format!("{DM} remove disk && sync")).map(drop)
    }
}

/// A log, read on the host.
#[derive(Debug)]
pub struct WriteLog {
    file: File,
    sector_bytes: u64,
    entries: u64,
    /// The next entry.
    at: u64,
}

/// One entry of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// What a test put there.
    pub mark: Option<String>,
    /// The disk had everything before it, and it: a FLUSH, or a write with FUA.
    pub is_flushed: bool,
    /// Where on the disk, in bytes.
    offset: u64,
    /// What is there, and where it is in the log.
    bytes: u64,
    data: Option<u64>,
}

impl WriteLog {
    /// Opens the log of a disk that has [ended](LoggedDisk::end).
    ///
    /// # Errors
    /// [`LabError::Io`]; [`LabError::Protocol`] if it is no log.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(LabError::io("open a log of writes"))?;
        let mut head = [0; 28];
        read(&file, &mut head, 0)?;
        let sector_bytes = u64::from(u32::from_le_bytes(word(&head, 24)));
        let is_log = number(&head, 0) == MAGIC && number(&head, 8) == VERSION;
        if !is_log || !(512..=4096).contains(&sector_bytes) {
            return Err(LabError::Protocol(format!(
                "{} is no log of writes: {head:02x?}",
                path.display()
            )));
        }
        Ok(Self {
            file,
            sector_bytes,
            entries: number(&head, 16),
            at: sector_bytes,
        })
    }

    /// The next entry; `None` after the last.
    ///
    /// # Errors
    /// [`LabError::Io`].
    pub fn step(&mut self) -> Result<Option<Logged>> {
        let Some(left) = self.entries.checked_sub(1) else {
            return Ok(None);
        };
        self.entries = left;
        let mut head = [0; 32];
        read(&self.file, &mut head, self.at)?;
        let [offset, bytes] = [0, 8].map(|field| number(&head, field) * self.sector_bytes);
        let (flags, mark_bytes) = (number(&head, 16), number(&head, 24));
        let mut mark = None;
        if flags & MARK != 0 {
            let mut text = vec![0; mark_bytes.min(self.sector_bytes - 32) as usize];
            read(&self.file, &mut text, self.at + 32)?;
            mark = Some(
                String::from_utf8_lossy(&text)
                    .trim_end_matches('\0')
                    .to_owned(),
            );
        }
        self.at += self.sector_bytes;
        let data = (flags & DISCARD == 0).then_some(self.at);
        self.at += data.map_or(0, |_| bytes);
        Ok(Some(Logged {
            mark,
            is_flushed: flags & (FLUSH | FUA) != 0,
            offset,
            bytes,
            data,
        }))
    }

    /// Does an entry's write to an image of the disk. What was discarded stays: a disk may keep it.
    ///
    /// # Errors
    /// [`LabError::Io`].
    pub fn apply(&self, entry: &Logged, image: &File) -> Result<()> {
        if let Some(data) = entry.data.filter(|_| entry.bytes > 0) {
            let mut bytes = vec![0; entry.bytes as usize];
            read(&self.file, &mut bytes, data)?;
            let written = image.write_all_at(&bytes, entry.offset);
            written.map_err(LabError::io("write to a disk's image"))?;
        }
        Ok(())
    }
}

fn read(file: &File, into: &mut [u8], at: u64) -> Result<()> {
    file.read_exact_at(into, at)
        .map_err(LabError::io("read a log of writes"))
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(word(bytes, at))
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

const LOG: &str = "ubdb";
const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Lab;

    #[test]
    fn a_log_is_read_and_done_again() {
        let lab = Lab::new().unwrap();
        let (path, image) = (lab.dir().join("log"), lab.dir().join("image"));
        let entry = |fields: [u64; 4]| {
            let mut sector: Vec<u8> = fields.iter().flat_map(|it| it.to_le_bytes()).collect();
            sector.resize(512, 0);
            sector
        };
        let mut log: Vec<u8> = [MAGIC, VERSION, 4, 512]
            .iter()
            .flat_map(|field| field.to_le_bytes())
            .collect();
        log.resize(512, 0);
        log.extend(entry([2, 1, 0, 0]));
        log.extend([7; 512]);
        // A discard has a length and no data.
        log.extend(entry([0, 100, DISCARD, 0]));
        log.extend(entry([0, 0, FLUSH, 0]));
        let mut mark = entry([0, 0, MARK, 4]);
        mark[32..36].copy_from_slice(b"here");
        log.extend(mark);
        std::fs::write(&path, &log).unwrap();
        let mut log = WriteLog::open(&path).unwrap();
        let disk = File::create(&image).unwrap();
        let mut found = Vec::new();
        while let Some(entry) = log.step().unwrap() {
            log.apply(&entry, &disk).unwrap();
            found.push((entry.mark, entry.is_flushed));
        }
        let none = |flushed| (None, flushed);
        let here = (Some("here".to_owned()), false);
        assert_eq!(found, [none(false), none(false), none(true), here]);
        let mut holds = vec![0; 1024];
        holds.extend([7; 512]);
        assert_eq!(std::fs::read(&image).unwrap(), holds);
    }

    #[test]
    fn what_is_no_log_is_refused() {
        let lab = Lab::new().unwrap();
        let path = lab.dir().join("log");
        std::fs::write(&path, [0; 512]).unwrap();
        let error = WriteLog::open(&path).unwrap_err().to_string();
        assert!(error.contains("is no log of writes"), "{error}");
    }
}
