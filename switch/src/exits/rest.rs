//! How often segments are looked for that can be merged, where none can be.

/// Whether the next batch for a port is looked at. All are, until [`IN_VAIN`] frames in a row could not be merged; then one
/// in [`ONE_IN`] is, until one of those has what can be. So a flood of flows costs next to nothing, and a stream that begins behind it
/// is merged after a few batches.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rest {
    /// Frames in a row of which none was merged.
    in_vain: usize,
    /// Batches that pass before the next is looked at.
    left: u8,
}

impl Rest {
    /// The next batch passes as it is.
    #[inline]
    pub(super) fn goes_on(self) -> bool {
        self.left > 0
    }

    /// A batch passed.
    pub(super) fn pass(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// A batch of so many frames was looked at, of which so many are a part of another now.
    pub(super) fn looked(&mut self, frames: usize, merged: u64) {
        if merged > 0 {
            *self = Self::default();
            return;
        }
        self.in_vain = self.in_vain.saturating_add(frames);
        if self.in_vain >= IN_VAIN {
            self.left = ONE_IN - 1;
        }
    }
}

const IN_VAIN: usize = 1024;
const ONE_IN: u8 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many batches of 64 are looked at, if so many frames of each are merged.
    fn looked(rest: &mut Rest, batches: usize, merged: u64) -> usize {
        let mut looked = 0;
        for _ in 0..batches {
            if rest.goes_on() {
                rest.pass();
            } else {
                looked += 1;
                rest.looked(64, merged);
            }
        }
        looked
    }

    #[test]
    fn all_batches_are_looked_at_as_long_as_some_are_merged() {
        let mut rest = Rest::default();
        assert_eq!(looked(&mut rest, 1_000, 1), 1_000);
        // A few without are none yet.
        for _ in 0..100 {
            assert_eq!(looked(&mut rest, 15, 0), 15);
            assert_eq!(looked(&mut rest, 1, 1), 1);
        }
    }

    #[test]
    fn where_none_is_one_in_sixteen_is_looked_at_until_one_is_merged() {
        let mut rest = Rest::default();
        assert_eq!(looked(&mut rest, 16, 0), 16);
        assert_eq!(looked(&mut rest, 1_600, 0), 100);
        // The next that is looked at is the sixteenth, and from then on all are.
        assert_eq!(looked(&mut rest, 100, 1), 85);
        assert_eq!(looked(&mut rest, 100, 1), 100);
    }
}
