//! The recorder: an ordinary reader of ports that writes what it reads.
//!
//! ```text
//!   ports ── Recorder (the caller's thread) ── chunks ──┬── Writer of directory 0 (a thread) ── Disk
//!                 ^   encodes where it is written from  └── Writer of directory 1 (a thread) ── Disk
//!                 └────────────── empty buffers ────────────┘
//! ```
//!
//! The number of buffers is fixed. When the disks are slow, chunks wait in them; then packets
//! wait in the ring; then the daemon counts what this port loses. Nobody else is held up.
//!
//! A directory whose disk fails or stands still gets nothing while another works, and what waits for it
//! goes to the others.

mod chunk;
mod dedup;
mod lane;
mod ledger;
mod loss;
mod queue;
mod room;
mod session;
mod settings;
mod state;
/// No segment has these numbers.
fn note_unused(manifest: Option<&Manifest>, numbers: impl Iterator<Item = u64>) {
    let Some(manifest) = manifest else { return };
    for number in numbers {
        if let Err(error) = manifest.unused(number) {
            log::warn!("the manifest: segment {number} is not noted as unused: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
mod trigger;
mod writer;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vnplug::{Packet, flags};
use vnplug_frame::capfile::write::{pcap, pcapng};

use crate::archive::Worker;
use crate::disk::{BLOCK, Buffer, Disk};
use crate::manifest::Manifest;
use crate::name::{self, Format, LAST_SEQUENCE};

pub use chunk::{Chunk, Tally};
pub use dedup::DedupStatus;
pub use ledger::{Earlier, LaneStatus, Ledger, Loss, Run, Status, TriggerStatus};
pub use room::{Quota, Room};
pub use session::{Session, Source};
pub use settings::Settings;
pub use state::{next_sequence, read_state, state_path};
pub use trigger::{Remote, Triggers};
pub use writer::Writer;

use lane::{Lane, drive};
use loss::{RingLoss, tell_loss};
use queue::{Gone, Queue};
use state::{last_state, lock_path};

/// A recorder at work.
#[derive(Debug)]
pub struct Recorder {
    settings: Settings,
    ledger: Arc<Ledger>,
    lanes: Vec<Lane>,
    pool: Receiver<Buffer>,
    /// Taken out of the pool; the last is the warmest in the CPU's cache.
    free: Vec<Buffer>,
    filling: Option<Filling>,
    serial: u64,
    /// The latest stamp of each interface, for the time of losses.
    last_ns: Vec<u64>,
    began_ns: u64,
    fill: usize,
    threads: Vec<JoinHandle<Writer>>,
    /// With triggers.
    hold: Option<trigger::Hold>,
    archive: Option<Worker>,
    dedup: Option<dedup::Dedup>,
}

#[derive(Debug)]
struct Filling {
    buffer: Buffer,
    len: usize,
    tally: Tally,
    lane: usize,
    begins_segment: bool,
    note: Option<Arc<str>>,
    began: Instant,
}

impl Recorder {
    /// Begins to record into directories, each with the disk it is on. The numbers of segments go on
    /// after those that are there.
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
        let free = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            // The receiver is at hand.
            let _ = give_back.send(buffer);
        }
        let (mut first, mut unnamed) = (0, Vec::new());
        let (mut settings, mut directories) = (settings, directories);
        for (dir, disk) in &mut directories {
            disk.lock(&lock_path(dir, &settings.recording))?;
            unnamed.push(room::give_back(disk.as_mut(), dir, &settings.recording)?);
            first = first.max(next_sequence(disk.as_mut(), dir, &settings.recording)?);
        }
        let before = last_state(&mut directories, &settings.recording)?;
        ledger.go_on(before.as_ref(), first, now_ns());
        if ledger.status().next_sequence > LAST_SEQUENCE {
            return Err(io::Error::other(ALL_NUMBERS));
        }
        settings.fit(&mut directories)?;
        let triggers = settings.trigger.as_ref();
        let hold = triggers
            .map(|triggers| trigger::Hold::new(triggers, &settings.interfaces, settings.dedup));
        if hold.is_some() {
            ledger.trigger(|_| {});
        }
        let mut recorder = Self {
            fill: settings.fill(),
            last_ns: vec![0; settings.interfaces.len()],
            began_ns: now_ns(),
            ledger: Arc::clone(&ledger),
            lanes: Vec::new(),
            pool,
            free,
            filling: None,
            serial: 0,
            threads: Vec::new(),
            hold: hold.transpose()?,
            archive: None,
            dedup: settings
                .dedup
                .map(|window| dedup::Dedup::new(window, settings.interfaces.len())),
            settings,
        };
        let manifests = recorder.manifests(&directories);
        for (manifest, numbers) in manifests.iter().zip(unnamed) {
            // Others went on with higher numbers meanwhile: nobody has these any more.
            let next = ledger.status().next_sequence;
            let lost = numbers.into_iter().filter(|number| *number < next);
            note_unused(manifest.as_deref(), lost);
        }
        let how = recorder.settings.archive.clone();
        if how.is_some() || recorder.settings.manifest {
            let name = recorder.settings.recording.clone();
            let dirs = directories.iter().map(|(dir, _)| dir.clone());
            let dirs = dirs.zip(manifests.clone()).collect();
            let first = ledger.status().next_sequence;
            let books = Arc::clone(&ledger);
            recorder.archive = Some(Worker::start(how, name, dirs, first, books)?);
        }
        for ((lane, (dir, disk)), manifest) in directories.into_iter().enumerate().zip(manifests) {
            let settings = recorder.settings.clone();
            let ledger = Arc::clone(&ledger);
            let books = Arc::clone(&ledger);
            let mut writer = Writer::new(disk, dir, lane, settings, ledger, give_back.clone());
            writer.keep_manifest(manifest);
            let queue = Arc::new(Queue::default());
            let inbox = Arc::clone(&queue);
            let thread = std::thread::Builder::new().name(format!("vnplug-disk{lane}"));
            let work = move || {
                let (queue, ledger) = (&inbox, &books);
                let _gone = Gone {
                    queue,
                    ledger,
                    lane,
                };
                // It has its blocks before the packets have theirs, and tells of a run that is killed.
                writer.save_state();
                drive(&mut writer, queue);
                writer
            };
            recorder.threads.push(thread.spawn(work)?);
            recorder.lanes.push(Lane {
                queue,
                begins: true,
                bytes: 0,
                packets: 0,
                start_ns: 0,
            });
        }
        Ok(recorder)
    }

    /// The manifest of each directory, if there are to be any. Without one recording goes on.
    fn manifests(&self, directories: &[(PathBuf, Box<dyn Disk>)]) -> Vec<Option<Arc<Manifest>>> {
        let open = |dir: &PathBuf| {
            if !self.settings.manifest {
                return None;
            }
            Manifest::open(dir, &self.settings.recording)
                .inspect_err(|error| log::error!("{}: no manifest: {error}", dir.display()))
                .ok()
                .map(Arc::new)
        };
        directories.iter().map(|(dir, _)| open(dir)).collect()
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
        let mut loss = self.loss_before(interface, packet);
        let mut kept = *packet;
        if let Some(dedup) = &mut self.dedup {
            match dedup.once(interface, packet) {
                Some(packet) => kept = packet,
                None => {
                    self.lost_before(interface, packet, &loss);
                    return true;
                }
            }
        }
        // The file tells here what was lost before duplicates, too.
        loss.packets = u64::from(kept.meta.lost);
        self.watch(interface, packet);
        let waits = self.waits();
        loop {
            if self.filling.is_none() && !self.begin(ts_ns, stop) {
                self.refuse(&loss, packet, interface, NO_BUFFER);
                return false;
            }
            let Some(filling) = &mut self.filling else {
                return false;
            };
            if filling.tally.packets > 0
                && !waits
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
            let begin = match kept.meta.lost {
                0 => Some(filling.len),
                _ => tell_loss(memory, filling.len, interface, &loss, self.settings.format),
            };
            let end = begin.and_then(|begin| match self.settings.format {
                Format::Pcapng => pcapng::packet(memory, begin, interface as u32, &kept),
                Format::Pcap => pcap::packet(memory, begin, &kept),
            });
            match end {
                Some(end) => {
                    filling.len = end;
                    let lost = kept.meta.lost;
                    if filling.tally.packets == 0 || ts_ns < filling.tally.first_ns {
                        self.ledger.filling(ts_ns);
                    }
                    filling
                        .tally
                        .add(interface, ts_ns, packet.bytes.len(), lost);
                    loss.packets = u64::from(packet.meta.lost);
                    self.lost_before(interface, packet, &loss);
                    return true;
                }
                None if filling.tally.packets > 0 => self.flush(),
                // No frame of a port is so long.
                None => {
                    self.refuse(&loss, packet, interface, "longer than a buffer");
                    return true;
                }
            }
        }
    }

    /// Counts a packet that was read and cannot be taken, and what the file would have told before it.
    fn refuse(&mut self, before: &RingLoss, packet: &Packet<'_>, interface: usize, reason: &str) {
        let mut loss = self.loss_before(interface, packet);
        let carried = before.packets - loss.packets;
        self.tell_losses(carried, loss.from_ns, loss.to_ns);
        loss.told = false;
        self.lost_before(interface, packet, &loss);
        let ts_ns = packet.meta.ts_ns;
        self.ledger.lost_in_ring(ts_ns, ts_ns, 1, reason, false);
    }

    /// Losses in the ring that are counted and that no packet tells, since none is recorded after them.
    fn tell_losses(&self, packets: u64, from_ns: u64, to_ns: u64) {
        if packets > 0 && self.settings.format == Format::Pcapng {
            self.ledger.untell(vec![Loss {
                from_ns,
                to_ns,
                packets,
                kind: "ring".to_owned(),
                reason: RING_FULL.to_owned(),
                ..Loss::default()
            }]);
        }
    }

    /// What the ring lost before a packet.
    #[inline]
    fn loss_before(&self, interface: usize, packet: &Packet<'_>) -> RingLoss {
        let to_ns = packet.meta.ts_ns;
        let from_ns = match self.last_ns.get(interface) {
            None | Some(0) => self.began_ns.min(to_ns),
            // Slices and rings of one interface are read in their turns.
            Some(&last) => last.min(to_ns),
        };
        RingLoss {
            from_ns,
            to_ns,
            packets: u64::from(packet.meta.lost),
            told: self.settings.format == Format::Pcapng,
        }
    }

    /// Counts it.
    #[inline]
    fn lost_before(&mut self, interface: usize, packet: &Packet<'_>, loss: &RingLoss) {
        if loss.packets > 0 {
            let (from_ns, to_ns) = (loss.from_ns, loss.to_ns);
            self.ledger
                .lost_in_ring(from_ns, to_ns, loss.packets, RING_FULL, loss.told);
        }
        if packet.meta.flags & flags::GAP != 0 {
            self.gap(interface, loss.from_ns, loss.to_ns, loss.told);
        }
        if let Some(last) = self.last_ns.get_mut(interface) {
            *last = packet.meta.ts_ns;
        }
    }

    /// Nobody knows how many packets of an interface are missing.
    #[cold]
    fn gap(&self, interface: usize, from_ns: u64, to_ns: u64, told: bool) {
        let device = self.settings.interfaces.get(interface);
        log::warn!(
            "{}: an unknown number of packets is missing between {} and {}: {RESTART}",
            device.map_or("?", |device| &device.name),
            name::time(from_ns),
            name::time(to_ns),
        );
        self.ledger.gap(from_ns, to_ns, told);
    }

    /// Gives the disk what was taken, if it is time for that.
    pub fn flush_due(&mut self, now: Instant) {
        self.share(now);
        self.tend();
        self.tell_of_duplicates();
        if self.waits() {
            return;
        }
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
        self.ledger.taken(self.serial, &self.untold(&filling.tally));
        let chunk = Chunk {
            buffer: filling.buffer,
            from: 0,
            len,
            serial: self.serial,
            tally: filling.tally,
            begins_segment: filling.begins_segment,
            note: filling.note,
        };
        self.serial += 1;
        match self.waits() {
            true => self.keep(chunk),
            false => self.give(filling.lane, chunk),
        }
    }

    /// Gives a chunk to the writer of a directory.
    fn give(&mut self, lane: usize, mut chunk: Chunk) {
        let lane = match self.lanes[lane].queue.is_stuck(Instant::now()) {
            true => self.least_behind(),
            false => lane,
        };
        let lane = &mut self.lanes[lane];
        if chunk.begins_segment || lane.begins {
            (lane.bytes, lane.packets, lane.start_ns) = (0, 0, chunk.tally.first_ns);
            (lane.begins, chunk.begins_segment) = (false, true);
        }
        lane.bytes += chunk.len as u64;
        lane.packets += chunk.tally.packets;
        if let Err(chunk) = lane.queue.push(chunk) {
            self.ledger
                .lost(chunk.serial, &chunk.tally, None, "the writer ended");
        }
    }

    /// Writes everything, closes the segments, and gives the last state of the books. What is on its way
    /// to a disk that stands still is given up after ten seconds.
    pub fn finish(self) -> Status {
        self.finish_within(STANDS_STILL)
    }

    fn finish_within(mut self, patience: Duration) -> Status {
        self.let_go();
        self.flush();
        self.tell_of_duplicates();
        let carried = self.dedup.as_mut().map(dedup::Dedup::let_go);
        for (lost, &last_ns) in carried.into_iter().flatten().zip(&self.last_ns) {
            self.tell_losses(lost, last_ns, last_ns);
        }
        self.wait_for_writers();
        self.lanes.clear();
        let mut writers = self.writers(patience);
        // One that works tells what others lost at their end.
        let _ = writers.iter_mut().any(Writer::tell_losses);
        if let Some(archive) = self.archive.take() {
            archive.finish();
        }
        // Only now the books are closed.
        self.ledger.end();
        for mut writer in writers {
            writer.save_state();
        }
        self.ledger.status()
    }

    fn tell_of_duplicates(&mut self) {
        if let Some((news, each)) = self.dedup.as_mut().map(dedup::Dedup::news) {
            self.ledger.duplicates(news, &each);
        }
    }

    /// Begins a chunk for the directory that is least behind.
    fn begin(&mut self, ts_ns: u64, stop: &mut dyn FnMut() -> bool) -> bool {
        let buffer = match self.spare() {
            Some(buffer) => buffer,
            None => loop {
                self.free.extend(self.pool.try_iter());
                if let Some(buffer) = self.free.pop() {
                    break buffer;
                }
                if let Some(archive) = &self.archive {
                    archive.pressed();
                }
                match self.pool.recv_timeout(PULSE) {
                    Ok(buffer) => break buffer,
                    Err(RecvTimeoutError::Timeout) if !stop() => {
                        self.ledger.beat(now_ns());
                        self.share(Instant::now());
                    }
                    Err(_) => return false,
                }
            },
        };
        let lane = self.least_behind();
        let begins_segment = self.lanes[lane].is_full(&self.settings, self.fill, ts_ns);
        self.filling = Some(Filling {
            buffer,
            len: 0,
            tally: Tally::default(),
            lane,
            begins_segment,
            note: self.note(),
            began: Instant::now(),
        });
        true
    }
}

pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

const RING_FULL: &str = "the ring was full";
const RESTART: &str = "the daemon was started again";
const NO_BUFFER: &str = "no buffer was free when the recorder ended";
const PULSE: Duration = Duration::from_millis(100);
const SHORT: Duration = Duration::from_millis(20);
const ALL_NUMBERS: &str =
    "segments have used all numbers up to 9999999999: record under another name";
/// How long a disk in trouble may take to take the rest when the recorder ends.
const LAST_TRY: Duration = Duration::from_secs(2);
/// How long nothing may go on at the end.
const STANDS_STILL: Duration = Duration::from_secs(10);
