//! Ports of a switch that are rings: each is given the frames that are due to it.

use vnplug_filter::FrameSet;
use vnplug_frame::Frame;

/// The members among the ports, by their number on the switch.
#[derive(Debug, Default)]
pub(super) struct Members {
    /// The seat of each.
    seats: Vec<Option<u32>>,
    /// What is due to each of this batch.
    due: Vec<FrameSet>,
    /// Those to whom something is due.
    touched: Vec<u16>,
    count: usize,
}

impl Members {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn add(&mut self, number: u16, seat: u32) {
        let at = usize::from(number);
        if self.seats.len() <= at {
            self.seats.resize(at + 1, None);
            self.due.resize(at + 1, FrameSet::default());
        }
        self.count += usize::from(self.seats[at].replace(seat).is_none());
    }

    /// Forgets a member, if this is still its seat.
    pub(super) fn remove(&mut self, number: u16, seat: u32) {
        if let Some(place) = self.seats.get_mut(usize::from(number))
            && *place == Some(seat)
        {
            *place = None;
            self.count -= 1;
        }
    }

    /// Finds out what is due to whom.
    #[inline]
    pub(super) fn sort(&mut self, frames: &[Frame<'_>]) {
        // Frames that follow each other mostly go to one member.
        let mut last = usize::MAX;
        for (place, frame) in frames.iter().enumerate() {
            for &number in frame.due {
                let at = usize::from(number);
                if at != last {
                    let Some(Some(_)) = self.seats.get(at) else {
                        continue;
                    };
                    if self.due[at].is_empty() {
                        self.touched.push(number);
                    }
                    last = at;
                }
                self.due[at].insert(place);
            }
        }
    }

    /// The next member to whom something is due: its seat, and which frames.
    #[inline]
    pub(super) fn next(&mut self) -> Option<(u32, FrameSet)> {
        let at = usize::from(self.touched.pop()?);
        let due = std::mem::take(&mut self.due[at]);
        Some((self.seats[at]?, due))
    }
}
