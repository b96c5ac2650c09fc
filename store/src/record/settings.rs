//! How to record.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vnplug_frame::capfile::write::Interface;

use super::{Quota, Triggers};
use crate::archive::How;
use crate::disk::{BLOCK, Disk};
use crate::name::Format;

/// How to record.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The recording's name.
    pub recording: String,
    /// The files' format.
    pub format: Format,
    /// The interfaces that packets refer to.
    pub interfaces: Vec<Interface>,
    /// Bytes after which a segment ends; 0 = never.
    pub rotate_bytes: u64,
    /// Time after which a segment ends, by the packets' stamps; zero = never.
    pub rotate_time: Duration,
    /// Packets after which a segment ends; 0 = never.
    pub rotate_packets: u64,
    /// How much room may be used in each directory.
    pub quota: Option<Quota>,
    /// Segments that were written last longer ago than this are removed.
    pub max_age: Option<Duration>,
    /// Longest time until a packet is given to the disk.
    pub flush_every: Duration,
    /// Longest time between two syncs while packets are written.
    pub sync_every: Duration,
    /// Bytes of a buffer.
    pub chunk_bytes: usize,
    /// How many there are.
    pub buffers: u16,
    /// Whether segments get an index beside them.
    pub index: bool,
    /// Only what is around triggers is recorded.
    pub trigger: Option<Triggers>,
    /// What is done with closed segments.
    pub archive: Option<How>,
    /// Whether closed segments get a manifest.
    pub manifest: bool,
    /// A packet that comes again within this time is not recorded.
    pub dedup: Option<Duration>,
}

impl Settings {
    /// What suits most: pcapng, segments of 1 GiB, on the disk within a second or two.
    pub fn new(recording: impl Into<String>, interfaces: Vec<Interface>) -> Self {
        Self {
            recording: recording.into(),
            format: Format::Pcapng,
            interfaces,
            rotate_bytes: 1 << 30,
            rotate_time: Duration::ZERO,
            rotate_packets: 0,
            quota: None,
            max_age: None,
            flush_every: Duration::from_secs(1),
            sync_every: Duration::from_secs(1),
            chunk_bytes: 4 << 20,
            buffers: 16,
            index: true,
            trigger: None,
            archive: None,
            manifest: false,
            dedup: None,
        }
    }

    /// Bytes that are reserved at once.
    pub(super) fn reserve(&self) -> u64 {
        let most = match self.rotate_bytes {
            0 => RESERVE,
            bytes => bytes.saturating_add(BESIDE).min(RESERVE),
        };
        match (self.format, self.quota) {
            // It is cut at its end after each chunk, which gives back what is beyond.
            (Format::Pcap, _) => 0,
            (_, Some(Quota::Bytes(quota))) => most.min(quota / 8),
            (_, Some(Quota::Percent(_))) => most.min(self.rotate_bytes / 2),
            (_, None) => most,
        }
    }

    /// Segments are so small that recycling one leaves most of the recording there: a quarter of
    /// what the quota gives in the directory that has the least.
    pub(super) fn fit(&mut self, directories: &mut [(PathBuf, Box<dyn Disk>)]) -> io::Result<()> {
        let Some(quota) = self.quota else {
            return Ok(());
        };
        for (dir, disk) in directories {
            let room = quota.room(disk.as_mut(), dir, &self.recording)?;
            let most = (room / 4).max(SMALLEST_SEGMENT);
            if self.rotate_bytes == 0 || self.rotate_bytes > most {
                self.rotate_bytes = most;
                log::info!("{}: segments of {most} bytes, for the quota", dir.display());
            }
        }
        Ok(())
    }

    /// Bytes of a chunk that are filled: several make up a segment.
    pub(super) fn fill(&self) -> usize {
        let most = match self.rotate_bytes {
            0 => usize::MAX,
            bytes => usize::try_from(bytes / 2).unwrap_or(usize::MAX),
        };
        let fill = self.chunk_bytes.min(most).max(SMALLEST_CHUNK) / BLOCK * BLOCK;
        match self.format {
            Format::Pcapng => fill,
            Format::Pcap => fill - 2 * BLOCK,
        }
    }

    pub(super) fn comment(&self, note: Option<&str>) -> String {
        match note {
            Some(note) => format!("recording {}: {note}", self.recording),
            None => format!("recording {}", self.recording),
        }
    }
}

const RESERVE: u64 = (1 << 30) + BESIDE;
/// What a segment has beside its packets.
const BESIDE: u64 = 1 << 20;
const SMALLEST_SEGMENT: u64 = 1 << 20;
/// Room for the longest frame, twice.
const SMALLEST_CHUNK: usize = 512 << 10;
