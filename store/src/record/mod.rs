//! The recorder: an ordinary reader of ports that writes what it reads.
//!
//! ```text
//!   ports ── Recorder (the caller's thread) ── chunks ──┬── Writer of directory 0 (a thread) ── Disk
//!                 ^   encodes where it is written from  └── Writer of directory 1 (a thread) ── Disk
//!                 └────────────── empty buffers ────────────┘
//! ```
//!
//! There are so many buffers and no more. When the disks are slow, chunks wait in them; then packets
//! wait in the ring; then the daemon counts what this port loses. Nobody else is held up.

mod chunk;
mod ledger;
mod room;
mod session;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vnplug::Packet;

use crate::disk::{BLOCK, Buffer, Disk};
use crate::encode::{Interface, pcap, pcapng};
use crate::name::{self, Format, SegmentName};

pub use chunk::{Chunk, Tally};
pub use ledger::{LaneStatus, Ledger, Loss, Status};
pub use room::Quota;
pub use session::{Session, Source};
pub use writer::Writer;

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
    /// Longest time until a packet is given to the disk.
    pub flush_every: Duration,
    /// Longest time between two syncs while packets are written.
    pub sync_every: Duration,
    /// Bytes of a buffer.
    pub chunk_bytes: usize,
    /// How many there are.
    pub buffers: u16,
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
            flush_every: Duration::from_secs(1),
            sync_every: Duration::from_secs(1),
            chunk_bytes: 4 << 20,
            buffers: 16,
        }
    }

    /// Bytes that are reserved at once.
    fn reserve(&self) -> u64 {
        let most = match self.rotate_bytes {
            0 => RESERVE,
            bytes => bytes.min(RESERVE),
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
    fn fit(&mut self, directories: &mut [(PathBuf, Box<dyn Disk>)]) -> io::Result<()> {
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
    fn fill(&self) -> usize {
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

    fn comment(&self) -> String {
        format!("recording {}", self.recording)
    }
}

/// A recorder at work.
#[derive(Debug)]
pub struct Recorder {
    settings: Settings,
    ledger: Arc<Ledger>,
    lanes: Vec<Lane>,
    pool: Receiver<Buffer>,
    filling: Option<Filling>,
    serial: u64,
    /// The latest stamp of each interface, for the time of losses.
    last_ns: Vec<u64>,
    began_ns: u64,
    fill: usize,
    threads: Vec<JoinHandle<Writer>>,
}

/// What the reader knows of a directory.
#[derive(Debug)]
struct Lane {
    chunks: Sender<Chunk>,
    given: u64,
    written: Arc<AtomicU64>,
    /// Of the segment as it is meant to be.
    bytes: u64,
    packets: u64,
    start_ns: u64,
}

#[derive(Debug)]
struct Filling {
    buffer: Buffer,
    len: usize,
    tally: Tally,
    lane: usize,
    begins_segment: bool,
    began: Instant,
}

impl Recorder {
    /// Begins to record into directories, each with the disk it is on. The numbers of segments go on
    /// behind those that are there.
    ///
    /// # Errors
    /// A directory cannot be read, or another recorder of this name is at work in it.
    pub fn start(
        settings: Settings,
        directories: Vec<(PathBuf, Box<dyn Disk>)>,
        buffers: Vec<Buffer>,
    ) -> io::Result<Self> {
        let names: Vec<String> = directories
            .iter()
            .map(|(dir, _)| dir.display().to_string())
            .collect();
        let ledger = Arc::new(Ledger::new(&settings.recording, &names));
        let (give_back, pool) = channel();
        for buffer in buffers {
            // The receiver is at hand.
            let _ = give_back.send(buffer);
        }
        let mut first = 0;
        let (mut settings, mut directories) = (settings, directories);
        for (dir, disk) in &mut directories {
            disk.lock(&dir.join(format!("{}.lock", settings.recording)))?;
            room::give_back(disk.as_mut(), dir, &settings.recording)?;
            first = first.max(next_sequence(disk.as_mut(), dir, &settings.recording)?);
        }
        settings.fit(&mut directories)?;
        let next = Arc::new(AtomicU64::new(first));
        let mut recorder = Self {
            fill: settings.fill(),
            last_ns: vec![0; settings.interfaces.len()],
            began_ns: now_ns(),
            ledger: Arc::clone(&ledger),
            lanes: Vec::new(),
            pool,
            filling: None,
            serial: 0,
            threads: Vec::new(),
            settings,
        };
        for (lane, (dir, disk)) in directories.into_iter().enumerate() {
            let settings = recorder.settings.clone();
            let (ledger, next) = (Arc::clone(&ledger), Arc::clone(&next));
            let mut writer =
                Writer::new(disk, dir, lane, settings, ledger, next, give_back.clone());
            let (chunks, inbox) = channel();
            let written = Arc::new(AtomicU64::new(0));
            let done = Arc::clone(&written);
            let thread = std::thread::Builder::new().name(format!("vnplug-disk{lane}"));
            let work = move || {
                drive(&mut writer, &inbox, &done);
                writer
            };
            recorder.threads.push(thread.spawn(work)?);
            recorder.lanes.push(Lane {
                chunks,
                given: 0,
                written,
                bytes: 0,
                packets: 0,
                start_ns: 0,
            });
        }
        Ok(recorder)
    }

    /// The books.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Takes a packet of an interface. Without a free buffer it waits for one, and asks `stop` ten
    /// times a second whether to give up: then false, and the packet is counted as lost.
    pub fn take(
        &mut self,
        interface: usize,
        packet: &Packet<'_>,
        stop: &mut dyn FnMut() -> bool,
    ) -> bool {
        let ts_ns = packet.meta.ts_ns;
        loop {
            if self.filling.is_none() && !self.begin(ts_ns, stop) {
                self.refuse(
                    interface,
                    packet,
                    "no buffer was free when the recorder ended",
                );
                return false;
            }
            let Some(filling) = &mut self.filling else {
                return false;
            };
            if filling.tally.packets > 0
                && self.lanes[filling.lane].is_over(&self.settings, filling, ts_ns)
            {
                self.flush();
                continue;
            }
            let room = self.fill
                - match self.settings.format {
                    Format::Pcapng => pcapng::PADDING_ROOM,
                    Format::Pcap => 0,
                };
            let memory = &mut filling.buffer[..room];
            let end = match self.settings.format {
                Format::Pcapng => pcapng::packet(memory, filling.len, interface as u32, packet),
                Format::Pcap => pcap::packet(memory, filling.len, packet),
            };
            match end {
                Some(end) => {
                    filling.len = end;
                    let lost = packet.meta.lost;
                    filling
                        .tally
                        .add(interface, ts_ns, packet.bytes.len(), lost);
                    self.lost_before(interface, packet);
                    return true;
                }
                None if filling.tally.packets > 0 => self.flush(),
                // No frame of a port is so long.
                None => {
                    self.refuse(interface, packet, "longer than a buffer");
                    return true;
                }
            }
        }
    }

    /// Counts a packet that was read and cannot be taken.
    pub(crate) fn refuse(&mut self, interface: usize, packet: &Packet<'_>, reason: &str) {
        self.lost_before(interface, packet);
        let ts_ns = packet.meta.ts_ns;
        self.ledger.lost_in_ring(ts_ns, ts_ns, 1, reason);
    }

    /// Counts what the ring lost before a packet.
    fn lost_before(&mut self, interface: usize, packet: &Packet<'_>) {
        let (ts_ns, lost) = (packet.meta.ts_ns, u64::from(packet.meta.lost));
        let Some(last) = self.last_ns.get_mut(interface) else {
            return;
        };
        if lost > 0 {
            let from = match *last {
                0 => self.began_ns.min(ts_ns),
                last => last,
            };
            self.ledger.lost_in_ring(from, ts_ns, lost, RING_FULL);
        }
        *last = ts_ns;
    }

    /// Gives the disk what was taken, if it is time for that.
    pub fn flush_due(&mut self, now: Instant) {
        let began = self.filling.as_ref().map(|filling| filling.began);
        if began
            .is_some_and(|began| now.saturating_duration_since(began) >= self.settings.flush_every)
        {
            self.flush();
        }
    }

    /// Gives the disk what was taken.
    pub fn flush(&mut self) {
        let Some(mut filling) = self.filling.take() else {
            return;
        };
        let len = match self.settings.format {
            Format::Pcapng => pcapng::pad(&mut filling.buffer, filling.len, BLOCK),
            Format::Pcap => filling.len,
        };
        let lane = &mut self.lanes[filling.lane];
        if filling.begins_segment {
            (lane.bytes, lane.packets, lane.start_ns) = (0, 0, filling.tally.first_ns);
        }
        lane.bytes += len as u64;
        lane.packets += filling.tally.packets;
        lane.given += 1;
        self.ledger.taken(self.serial, &filling.tally);
        let chunk = Chunk {
            buffer: filling.buffer,
            from: 0,
            len,
            serial: self.serial,
            tally: filling.tally,
            begins_segment: filling.begins_segment,
        };
        self.serial += 1;
        if let Err(refused) = lane.chunks.send(chunk) {
            let chunk = refused.0;
            self.ledger
                .lost(chunk.serial, &chunk.tally, false, "the writer ended");
        }
    }

    /// Writes everything, closes the segments, and gives the last state of the books.
    pub fn finish(mut self) -> Status {
        self.flush();
        self.lanes.clear();
        let ended: Vec<_> = self.threads.drain(..).map(JoinHandle::join).collect();
        if ended.iter().any(Result::is_err) {
            log::error!("a writer panicked");
            self.ledger.give_up("the writer of its directory panicked");
        }
        // Only now the books are closed.
        for mut writer in ended.into_iter().flatten() {
            writer.save_state();
        }
        self.ledger.status()
    }

    /// Begins a chunk for the directory that is least behind.
    fn begin(&mut self, ts_ns: u64, stop: &mut dyn FnMut() -> bool) -> bool {
        let buffer = loop {
            match self.pool.recv_timeout(PULSE) {
                Ok(buffer) => break buffer,
                Err(RecvTimeoutError::Timeout) if !stop() => {}
                Err(_) => return false,
            }
        };
        // Relaxed: a count that may be a little old.
        let behind =
            |lane: &Lane| lane.given - lane.written.load(std::sync::atomic::Ordering::Relaxed);
        let turn = self.serial as usize % self.lanes.len();
        let order = (turn..self.lanes.len()).chain(0..turn);
        let Some(lane) = order.min_by_key(|&lane| behind(&self.lanes[lane])) else {
            return false;
        };
        let begins_segment = self.lanes[lane].is_full(&self.settings, self.fill, ts_ns);
        self.filling = Some(Filling {
            buffer,
            len: 0,
            tally: Tally::default(),
            lane,
            begins_segment,
            began: Instant::now(),
        });
        true
    }
}

impl Lane {
    /// Whether the next chunk begins a segment.
    fn is_full(&self, settings: &Settings, fill: usize, ts_ns: u64) -> bool {
        let bytes = settings.rotate_bytes > 0 && self.bytes + fill as u64 > settings.rotate_bytes;
        let packets = settings.rotate_packets > 0 && self.packets >= settings.rotate_packets;
        self.given == 0 || bytes || packets || self.is_late(settings, self.start_ns, ts_ns)
    }

    /// Whether the chunk ends before a packet of this stamp, since its segment does.
    fn is_over(&self, settings: &Settings, filling: &Filling, ts_ns: u64) -> bool {
        let (before, start) = match filling.begins_segment {
            true => (0, filling.tally.first_ns),
            false => (self.packets, self.start_ns),
        };
        let packets = before + filling.tally.packets;
        settings.rotate_packets > 0 && packets >= settings.rotate_packets
            || self.is_late(settings, start, ts_ns)
    }

    fn is_late(&self, settings: &Settings, start_ns: u64, ts_ns: u64) -> bool {
        let limit = settings.rotate_time.as_nanos() as u64;
        // Also when the clock was set back: else the segment would last until it catches up.
        limit > 0 && ts_ns.abs_diff(start_ns) >= limit
    }
}

/// A writer's thread: until the recorder hangs up.
fn drive(writer: &mut Writer, inbox: &Receiver<Chunk>, done: &AtomicU64) {
    let mut taken = 0;
    loop {
        let now = Instant::now();
        let due = writer.due();
        let pause = due.map_or(IDLE, |due| due.saturating_duration_since(now));
        match inbox.recv_timeout(pause) {
            Ok(chunk) => {
                writer.push(chunk);
                taken += 1;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        while let Ok(chunk) = inbox.try_recv() {
            writer.push(chunk);
            taken += 1;
        }
        writer.work(Instant::now());
        let written = taken - writer.waiting() as u64;
        done.store(written, std::sync::atomic::Ordering::Relaxed);
    }
    let limit = Instant::now() + LAST_TRY;
    while writer.waiting() > 0 && Instant::now() < limit {
        writer.work(Instant::now());
        std::thread::sleep(Duration::from_millis(50));
    }
    writer.end(Instant::now());
}

/// The number behind the last segment of a recording in a directory.
///
/// # Errors
/// The directory cannot be read.
pub fn next_sequence(disk: &mut dyn Disk, dir: &Path, recording: &str) -> io::Result<u64> {
    let entries = disk.list(dir)?;
    let names = entries
        .iter()
        .filter_map(|entry| SegmentName::parse(&entry.name));
    let ours = names.filter(|name| name.recording == recording);
    Ok(ours.map(|name| name.sequence + 1).max().unwrap_or(0))
}

/// Where a recording's state is.
pub fn state_path(dir: &Path, recording: &str) -> PathBuf {
    dir.join(name::state_file(recording))
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

const RING_FULL: &str = "the ring was full";
const RESERVE: u64 = 256 << 20;
const SMALLEST_SEGMENT: u64 = 1 << 20;
/// Room for the longest frame, twice.
const SMALLEST_CHUNK: usize = 512 << 10;
const PULSE: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);
/// How long a disk in trouble may take to take the rest when the recorder ends.
const LAST_TRY: Duration = Duration::from_secs(2);
