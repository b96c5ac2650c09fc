//! On which terms a port sends: whose frames, which frames, and how many of them.

use std::sync::Arc;

use crate::bucket::Bucket;
use vnplug_filter::Program;
use vnplug_frame::lock::{Against, SourceLock};

/// What an operator says of what a port sends.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Whose frames it may send.
    pub lock: SourceLock,
    /// Which frames it may send.
    pub filter: Option<Arc<Program>>,
    /// Its part of what its source sends, in proportion to those of others; 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// Bytes that it may send in a second; 0: any number.
    pub bytes_per_s: u64,
}

/// The largest weight of a sender.
pub const MAX_WEIGHT: u32 = 100;

/// Why a frame is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// Whose it says it is.
    Lock(Against),
    /// The operator's filter.
    Filter,
}

impl Default for Terms {
    /// Anything may be sent.
    fn default() -> Self {
        Self {
            lock: SourceLock::default(),
            filter: None,
            weight: 1,
            bytes_per_s: 0,
        }
    }
}

impl Terms {
    /// What limits how much is sent.
    pub(super) fn bucket(&self, now_us: u64) -> Option<Bucket> {
        let rate = self.bytes_per_s;
        // Ten milliseconds' at once, and a super-frame at least.
        (rate > 0).then(|| Bucket::new(rate, (rate / 100).max(64 << 10), now_us))
    }

    /// Whether no frame has to be looked at.
    pub(super) fn are_open(&self) -> bool {
        self.lock.is_open() && self.filter.is_none()
    }

    /// Whether a frame may be sent as it is.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub(super) fn judge(&self, frame: &[u8]) -> Result<(), Refused> {
        self.lock.judge(frame).map_err(Refused::Lock)?;
        let passes = |program: &Arc<Program>| program.run(frame, frame.len() as u32) != 0;
        match self.filter.as_ref().is_none_or(passes) {
            true => Ok(()),
            false => Err(Refused::Filter),
        }
    }
}
