//! Recorded frames back onto a wire, when they are due.
//!
//! ```text
//!   files ── pieces (read ahead by a thread) ── schedule (when?) ── exit (wire or port)
//! ```
//!
//! `Player::play` is the loop: it takes the clock and the exit as arguments, so that tests play in no
//! time to nowhere. A frame is handed over as soon as the clock has reached its due time; frames that
//! are due already go together, up to [`BATCH`] in one call. It never sends early, and it measures how
//! late it was: the time of a frame is that of the call that handed it over. What the kernel, the driver
//! or the daemon do with it afterwards is not seen.

mod clock;
mod exit;
mod files;
mod pieces;
mod port;
mod schedule;
mod spread;
mod sys;
mod wire;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

pub use self::clock::{Clock, Monotonic};
pub use self::exit::{Exit, ExitError, Obstacle};
pub use self::files::{File, files};
pub use self::pieces::Snapped;
pub use self::port::{Counted, Outlet};
pub use self::schedule::{Pace, Schedule};
pub use self::spread::Spread;
pub use self::wire::{Wire, WireError};

use self::pieces::{Frame, Item, Kind, Piece};
use crate::archive::Keys;
use crate::read::ReadError;

/// What is to be played, and how.
#[derive(Debug, Clone)]
pub struct Order {
    /// The files, one after the other.
    pub files: Vec<File>,
    /// How the frames follow each other.
    pub pace: Pace,
    /// How often the files are played; `None`: without end.
    pub rounds: Option<u64>,
    /// Ends after this many frames were sent.
    pub limit: Option<u64>,
    /// What becomes of frames of which only the beginning was recorded.
    pub snapped: Snapped,
    /// What opens files that are encrypted.
    pub keys: Keys,
}

/// What became of it all.
#[derive(Debug, Default)]
pub struct Report {
    /// Frames handed over.
    pub frames: u64,
    /// Their bytes, FCS excluded.
    pub bytes: u64,
    /// Frames that were not sent.
    pub refused: Refused,
    /// How often there was no room and a frame had to wait.
    pub waits: u64,
    /// From the first frame's due time to the end of the last one, nanoseconds.
    pub elapsed_ns: u64,
    /// By how much the distance of two successive frames was not the scheduled one, either way.
    pub gap_error: Spread,
    /// By how much frames were handed over after they were due.
    pub late: Spread,
    /// Frames recorded before their predecessor; they followed at once.
    pub backwards: u64,
    /// Files that end within a block, and where it begins: what a writer leaves that was killed.
    pub torn: Vec<(PathBuf, u64)>,
    /// Files that could not be read to their end; what came before was sent, and then the next file.
    pub failed: Vec<ReadError>,
}

/// Frames that were not sent, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refused {
    /// Longer than the MTU (or the daemon's ring) allows.
    pub too_long: u64,
    /// Only their beginning was recorded.
    pub snapped: u64,
    /// No Ethernet, by link type.
    pub foreign: BTreeMap<u32, u64>,
    /// Shorter than an Ethernet header.
    pub short: u64,
    /// Refused by the kernel, for no reason that we know.
    pub by_kernel: u64,
}

impl Refused {
    /// All of them.
    pub fn total(&self) -> u64 {
        let foreign: u64 = self.foreign.values().sum();
        self.too_long + self.snapped + foreign + self.short + self.by_kernel
    }
}

/// Plays files by a clock to an exit. `stop` is asked at least every 50 ms, and between two batches;
/// while one read from the disk lasts, it is told but waits for it. A round in which nothing could be
/// sent is the last.
///
/// However it ends, the report says what was done until then.
///
/// # Errors
/// [`ExitError`]: nothing can be sent any more. Files that cannot be read are [told](Report::failed).
pub fn play(
    order: &Order,
    clock: &mut impl Clock,
    exit: &mut impl Exit,
    stop: &dyn Fn() -> bool,
) -> (Report, Result<(), ExitError>) {
    let (to, items) = sync_channel(pieces::AHEAD);
    let (back, used) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            pieces::read(order, &to, &used);
        });
        let mut player = Player {
            limit: order.limit.unwrap_or(u64::MAX),
            is_paced: order.pace != Pace::Top,
            schedule: Schedule::new(order.pace),
            first_ns: None,
            last: None,
            report: Report::default(),
            clock,
            exit,
            stop,
        };
        let result = player.play(&items, &back);
        // The reading thread ends when nobody wants more.
        drop(items);
        player.report.backwards = player.schedule.backwards();
        (player.report, result)
    })
}

/// The loop and its accounts.
struct Player<'a, C, E> {
    limit: u64,
    is_paced: bool,
    schedule: Schedule,
    /// When the first frame was due.
    first_ns: Option<u64>,
    /// When the last frame was due and when it was handed over, since the first.
    last: Option<(u64, u64)>,
    report: Report,
    clock: &'a mut C,
    exit: &'a mut E,
    stop: &'a dyn Fn() -> bool,
}

/// Frames that are due, and since when.
type Batch<'a> = (Vec<&'a [u8]>, Vec<u64>);

impl<C: Clock, E: Exit> Player<'_, C, E> {
    fn play(&mut self, items: &Receiver<Item>, used: &Sender<Piece>) -> Result<(), ExitError> {
        let mut sent_before = 0;
        loop {
            if (self.stop)() {
                return Ok(());
            }
            let item = match items.recv_timeout(LOOK) {
                Ok(item) => item,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            match item {
                Item::Piece(piece) => {
                    if !self.piece(&piece)? {
                        return Ok(());
                    }
                    // NB: at the end of the last file nobody takes pieces back.
                    let _ = used.send(piece);
                }
                Item::Torn(path, at) => {
                    if !self.report.torn.iter().any(|(known, _)| *known == path) {
                        self.report.torn.push((path, at));
                    }
                }
                Item::Failed(error) => {
                    let failed = &mut self.report.failed;
                    if !failed.iter().any(|known| known.path == error.path) {
                        failed.push(error);
                    }
                }
                Item::Round => {
                    if self.report.frames == sent_before {
                        return Ok(());
                    }
                    sent_before = self.report.frames;
                }
            }
        }
    }

    /// False: no more.
    fn piece(&mut self, piece: &Piece) -> Result<bool, ExitError> {
        let mut batch: Batch<'_> = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let mut now = self.clock.now_ns();
        for frame in &piece.frames {
            if self.report.frames + batch.0.len() as u64 >= self.limit {
                self.send(&mut batch)?;
                return Ok(false);
            }
            if frame.begins {
                self.schedule.begin_file();
            }
            let bytes = piece.bytes(frame);
            if self.refuses(frame, bytes) {
                continue;
            }
            let due = self.schedule.due(frame.recorded_ns, bytes.len());
            // The first frame is due at once, and all others follow from it.
            let first = *self.first_ns.get_or_insert(now);
            let at = first.saturating_add(due);
            if at <= now {
                if batch.0.len() == BATCH {
                    if !self.send(&mut batch)? {
                        return Ok(false);
                    }
                    now = self.clock.now_ns();
                }
            } else {
                if !self.send(&mut batch)? {
                    return Ok(false);
                }
                now = self.clock.now_ns();
                while now < at {
                    if (self.stop)() {
                        return Ok(false);
                    }
                    self.clock.wait(at);
                    now = self.clock.now_ns();
                }
            }
            batch.0.push(bytes);
            batch.1.push(due);
        }
        self.send(&mut batch)
    }

    /// Counts a frame that cannot be sent.
    fn refuses(&mut self, frame: &Frame, bytes: &[u8]) -> bool {
        let refused = &mut self.report.refused;
        match frame.kind {
            Kind::Whole if self.exit.fits(bytes) => return false,
            Kind::Whole | Kind::TooLong => refused.too_long += 1,
            Kind::Snapped => refused.snapped += 1,
            Kind::Foreign(link_type) => *refused.foreign.entry(link_type).or_default() += 1,
            Kind::Short => refused.short += 1,
        }
        true
    }

    /// Hands over all frames of the batch. False: it was told to stop.
    fn send(&mut self, (frames, dues): &mut Batch<'_>) -> Result<bool, ExitError> {
        let mut done = 0;
        let mut stuck_since = None;
        while done < frames.len() {
            if (self.stop)() {
                return Ok(false);
            }
            let now = self.clock.now_ns();
            match self.exit.send(&frames[done..]) {
                Ok(0) => {
                    self.report.waits += 1;
                    let since = *stuck_since.get_or_insert(now);
                    if now - since > STUCK_S * 1_000_000_000 {
                        return Err(ExitError::Stuck(STUCK_S));
                    }
                }
                Ok(sent) => {
                    stuck_since = None;
                    for (frame, due) in frames.iter().zip(&*dues).skip(done).take(sent) {
                        self.account(frame.len(), *due, now);
                    }
                    done += sent;
                }
                Err(Obstacle::TooLong) => {
                    self.report.refused.too_long += 1;
                    done += 1;
                }
                Err(Obstacle::Frame(_)) => {
                    self.report.refused.by_kernel += 1;
                    done += 1;
                }
                Err(Obstacle::Gone(error)) => return Err(error),
            }
        }
        if !frames.is_empty() {
            let first = self.first_ns.unwrap_or_default();
            self.report.elapsed_ns = self.clock.now_ns().saturating_sub(first);
        }
        frames.clear();
        dues.clear();
        Ok(true)
    }

    /// A frame that was due then was handed over at `now`.
    fn account(&mut self, len: usize, due: u64, now: u64) {
        let at = now.saturating_sub(self.first_ns.unwrap_or(now));
        self.report.frames += 1;
        self.report.bytes += len as u64;
        if !self.is_paced {
            return;
        }
        self.report.late.add(at.saturating_sub(due));
        if let Some((due_before, at_before)) = self.last.replace((due, at)) {
            let (wanted, real) = (due - due_before, at - at_before);
            self.report.gap_error.add(wanted.abs_diff(real));
        }
    }
}

/// Frames handed over in one call.
pub const BATCH: usize = sys::MOST;
/// How long the next frames are waited for before `stop` is asked again.
const LOOK: Duration = Duration::from_millis(50);
/// After this time an exit that takes nothing is given up.
const STUCK_S: u64 = 10;
