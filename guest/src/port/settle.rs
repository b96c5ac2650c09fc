//! The descriptor tells the truth between two calls, while the last packet is still lent.
//!
//! [`Port::next`] leaves the doorbell alone until it finds nothing, and [`Port::wait`] gives the
//! lent packet back. A reader that takes one packet, keeps it, and then waits for the descriptor
//! together with others (an event loop over libpcap) needs both: [`Port::settle`].

use std::time::{Duration, Instant};

use super::Port;
use super::phase::Phase;
use crate::error::Error;

impl Port {
    /// Makes [`fd`](Self::fd) readable if packets are unread, and otherwise not before there are:
    /// true in the first case. What [`next`](Self::next) lent last stays lent.
    ///
    /// Costs a few loads, and system calls only where the answer differs from the last one: one at the
    /// end of the packets that one ring of the doorbell told of. With a watermark of 1 packets may be
    /// unread for a moment before the host's ring makes the descriptor readable.
    ///
    /// # Errors
    /// Only of the system. A port that is over or has news is readable.
    pub fn settle(&mut self) -> Result<bool, Error> {
        if self.has_unread() {
            if !self.will_ring {
                self.flag();
            }
            return Ok(true);
        }
        if !matches!(self.phase, Phase::Live) {
            self.unflag();
            return Ok(false);
        }
        self.unflag();
        match self.watch.shared() {
            // What else there is to hear keeps the descriptor readable, for `next`.
            None => self.hush(),
            Some(_) => drop(self.attend(Some(Duration::ZERO))?),
        }
        self.arm_all_lent();
        // Asked after arming, so that a packet is either seen here or rings. A ring whose life is
        // over does not ring again, and `attend` may have heard news: both are for `next` to tell.
        let news = !self.all_open() || !matches!(self.phase, Phase::Live);
        let unread = self.has_unread();
        if unread || news {
            self.flag();
        }
        Ok(unread)
    }

    /// As [`settle`](Self::settle); without packets, the descriptor is readable from `alarm` on, for a
    /// reader that has to look after something else then. It stays so until another time is given.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub fn settle_until(&mut self, alarm: Instant) -> Result<bool, Error> {
        if self.alarm != Some(alarm) {
            self.alarm = Some(alarm);
            if !self.flagged && matches!(self.phase, Phase::Live) {
                self.set_alarm();
            }
        }
        self.settle()
    }

    /// For each ring, the number of its queue and how many of its packets were published and not
    /// taken.
    pub fn unread(&self) -> impl Iterator<Item = (u16, u64)> {
        self.hosted()
            .iter()
            .map(|ring| (ring.geometry().queue as u16, ring.unread()))
    }

    /// Bytes of each ring's record area.
    pub fn ring_bytes(&self) -> u64 {
        self.rings
            .first()
            .map_or(0, |ring| ring.geometry().capacity)
    }

    /// Replaces the watermark and the longest wait for it, from the next sleep on; see
    /// [`PortOptions::watermark`](crate::PortOptions::watermark).
    pub fn set_watermark(&mut self, packets: u32, max_delay: Duration) {
        self.options.watermark = packets.max(1);
        self.options.max_delay = max_delay;
    }

    pub(super) fn has_unread(&mut self) -> bool {
        self.rings.iter_mut().any(|ring| !ring.is_drained())
    }

    fn flag(&mut self) {
        if !self.flagged {
            self.flagged = true;
            self.watch.set_timer(Some(Duration::ZERO));
        }
    }

    /// Sets the timer of a port that lives and has nothing.
    pub(super) fn set_alarm(&mut self) {
        let earliest = [self.alarm, self.look_again].into_iter().flatten().min();
        self.watch.set_timer(earliest.map(left));
    }

    /// Sets the timer to what the phase needs.
    pub(super) fn unflag(&mut self) {
        if !self.flagged {
            return;
        }
        self.flagged = false;
        self.watch.set_timer(match &self.phase {
            Phase::Live => return self.set_alarm(),
            Phase::Closing { until } => Some(left(*until)),
            Phase::Away { at, .. } => Some(left(*at)),
            Phase::Ended | Phase::Failed(_) => Some(Duration::ZERO),
        });
    }
}

fn left(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now())
}
