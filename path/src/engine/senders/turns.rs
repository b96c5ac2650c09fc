//! Whose turn it is, and how much it may take: by bytes, weighed, and held by a rate.

use std::panic::{AssertUnwindSafe, catch_unwind};

use vnplug_frame::{Frame, MAX_BATCH};

use super::{Senders, Served, quarantine};
use crate::batch::Handle;
use crate::engine::sender::Sender;
use crate::source::Transmitter;

impl Senders {
    /// Sends what waits: at most [`MAX_BATCH`] frames in all, and about [`TURN`] bytes. What other readers of the wire
    /// are to see goes to `shown`, with the ports that are of its sender.
    ///
    /// Senders have turns by bytes (deficit round robin): each may take a turn's bytes, times its weight, and what it takes
    /// too much is missing in its next turn. A turn goes on where the last one ended. How many bytes that is depends on how many
    /// sent something when all had their turn; whoever did not, after a rest, has few first: all may begin at once.
    pub(in crate::engine) fn serve(
        &mut self,
        out: &mut dyn Transmitter,
        now_us: u64,
        shown: &mut dyn FnMut(&Handle, &[Frame<'_>]),
    ) -> Served {
        let mut served = Served::default();
        let (mut dry, mut bytes) = (0, 0);
        while served.frames < MAX_BATCH && bytes < TURN && dry < self.awake.count() {
            match self.awake.next_from(self.next) {
                Some(at) if at == self.next => {}
                Some(at) => (self.next, self.is_within) = (at, false),
                None => {
                    (self.next, self.is_within) = (0, false);
                    // Known when all had their turn: few that send have long turns, and few flushes.
                    self.quantum = (TURN / self.active.max(1)).max(LEAST_QUANTUM);
                    self.active = 0;
                    continue;
                }
            }
            let Some(sender) = self.all.get_mut(self.next).and_then(Option::as_mut) else {
                self.awake.clear(self.next);
                continue;
            };
            if !self.is_within {
                let quantum = match sender.is_active {
                    true => self.quantum,
                    false => first_quantum(self.places.len() as u64),
                };
                sender.deficit += (quantum * u64::from(sender.weight())) as i64;
                self.is_within = true;
            }
            let most = (sender.deficit.max(0) as u64).min(TURN - bytes);
            let budget = (MAX_BATCH - served.frames, most);
            // A panic here would be a bug of ours that a sender triggers: it costs that port, and
            // nobody else anything (R10).
            let serve = || sender.serve(out, budget, now_us, shown);
            let went = catch_unwind(AssertUnwindSafe(serve));
            let why = match went {
                Ok(Ok(visit)) => {
                    served.frames += visit.frames;
                    bytes += visit.cost;
                    sender.deficit -= visit.cost as i64;
                    let is_dry = visit.is_dry && visit.frames == 0;
                    dry = if is_dry { dry + 1 } else { 0 };
                    if visit.is_dry {
                        // Who has nothing to send saves nothing up.
                        sender.deficit = sender.deficit.min(0);
                    }
                    let rests = match is_dry && self.places.len() > FEW {
                        true => sender.rests(),
                        false => sender.goes_on(),
                    };
                    let at = self.next;
                    if visit.is_dry || sender.deficit <= 0 {
                        sender.is_active = visit.frames > 0;
                        self.active += u64::from(visit.frames > 0);
                        (self.next, self.is_within) = (at + 1, false);
                    }
                    match rests {
                        Ok(false) => continue,
                        Ok(true) => {
                            self.awake.clear(at);
                            dry -= 1;
                            continue;
                        }
                        Err(lie) => lie.to_string(),
                    }
                }
                Ok(Err(lie)) => lie.to_string(),
                Err(_) => {
                    sender.settle(out.flush(&mut |_| {}));
                    "the daemon failed while sending for it; please report this".to_owned()
                }
            };
            served.liar = Some(quarantine(sender, why));
            (self.next, self.is_within) = (self.next + 1, false);
            break;
        }
        served
    }

    /// When a sender may send again that may not now because of its rate.
    pub(in crate::engine) fn due_us(&self) -> Option<u64> {
        self.present().filter_map(|sender| sender.held_us).min()
    }

    /// Those that are awake.
    fn present(&self) -> impl Iterator<Item = &Sender> {
        let at = self.awake.iter();
        at.filter_map(|at| self.all.get(at)?.as_ref())
    }
}

/// Bytes of the first turn of a sender that rested, where `places` may send.
fn first_quantum(places: u64) -> u64 {
    match places {
        // Nobody waits for it.
        0 | 1 => TURN,
        many => (TURN / many).clamp(LONGEST_FRAME, LEAST_QUANTUM),
    }
}

/// The most that are looked at in every turn: that costs less than a kick.
const FEW: usize = 16;
/// Bytes that are taken in a turn: a copy of some ten microseconds.
pub(super) const TURN: u64 = 256 << 10;
/// Bytes of a frame with the usual MTU: a turn is one such frame at least.
const LONGEST_FRAME: u64 = 1518;
/// Bytes of one sender's turn, of many.
pub(super) const LEAST_QUANTUM: u64 = 8 << 10;
