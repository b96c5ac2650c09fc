//! How often segments are looked for that can be merged, where none can be.

/// Whether the next batch for a port is looked at. All are, until [`IN_VAIN`] frames in a row could not be merged; then about
/// one in sixteen is, until one of those has what can be. So a flood of flows costs next to nothing, and a stream that begins
/// behind it is merged after some batches.
///
/// Ports take turns, so what batches have may come again and again after so many of them. The distance between two looks
/// changes, or all of them could fall on the batches of one sender.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Glance {
    /// Frames in a row of which none was merged.
    in_vain: usize,
    /// Batches that pass before the next is looked at.
    left: u8,
    /// Where the sequence of distances is.
    seed: u32,
}

impl Glance {
    /// The next batch passes as it is.
    #[inline]
    pub(super) fn passes_by(self) -> bool {
        self.left > 0
    }

    /// A batch came, looked at or not.
    pub(super) fn came(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// That batch of `frames` was looked at; `merged` of them are a part of another now.
    pub(super) fn looked(&mut self, frames: usize, merged: u64) {
        if merged > 0 {
            self.in_vain = 0;
            return;
        }
        self.in_vain = self.in_vain.saturating_add(frames);
        if self.in_vain >= IN_VAIN {
            self.left = self.distance() - 1;
        }
    }

    /// The next of a fixed sequence, which has no period that matters: each of [`NEAREST`] to [`FARTHEST`] as often.
    fn distance(&mut self) -> u8 {
        // The generator of Numerical Recipes. Its low bits have short periods, and are not used.
        self.seed = self
            .seed
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        let span = u32::from(FARTHEST - NEAREST) + 1;
        NEAREST + (((self.seed >> 16) * span) >> 16) as u8
    }
}

const IN_VAIN: usize = 1024;
/// Batches from one that is looked at to the next, sixteen on average. They differ by as much as common periods are long.
const NEAREST: u8 = 8;
const FARTHEST: u8 = 24;

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of 64 comes, of which `merged` frames could be merged: whether it is looked at.
    fn comes(glance: &mut Glance, merged: u64) -> bool {
        let passes = glance.passes_by();
        glance.came();
        if !passes {
            glance.looked(64, merged);
        }
        !passes
    }

    /// How many of these `batches` are looked at.
    fn looked(glance: &mut Glance, batches: usize, merged: u64) -> usize {
        (0..batches).filter(|_| comes(glance, merged)).count()
    }

    #[test]
    fn all_batches_are_looked_at_as_long_as_some_are_merged() {
        let mut glance = Glance::default();
        assert_eq!(looked(&mut glance, 1_000, 1), 1_000);
        // A few without are none yet.
        for _ in 0..100 {
            assert_eq!(looked(&mut glance, 15, 0), 15);
            assert_eq!(looked(&mut glance, 1, 1), 1);
        }
    }

    #[test]
    fn where_none_is_about_one_in_sixteen_is_looked_at_until_one_is_merged() {
        let mut glance = Glance::default();
        assert_eq!(looked(&mut glance, 16, 0), 16);
        let all = looked(&mut glance, 16_000, 0);
        assert!((990..=1_010).contains(&all), "{all}");
        for _ in 0..100 {
            // From the first that is looked at on all are.
            let before = (0..).take_while(|_| !comes(&mut glance, 1)).count();
            assert!(before < usize::from(FARTHEST), "{before}");
            assert_eq!(looked(&mut glance, 100, 1), 100);
            assert_eq!(looked(&mut glance, 16, 0), 16);
            // The next begins elsewhere.
            looked(&mut glance, 50, 0);
        }
    }

    #[test]
    fn all_distances_are_as_often() {
        let (mut glance, mut times) = (Glance::default(), [0; 256]);
        for _ in 0..17_000 {
            times[usize::from(glance.distance())] += 1;
        }
        let wanted = usize::from(NEAREST)..=usize::from(FARTHEST);
        for (distance, times) in times.iter().enumerate() {
            let range = match wanted.contains(&distance) {
                true => 900..=1_100,
                false => 0..=0,
            };
            assert!(range.contains(times), "{distance}: {times}");
        }
    }

    #[test]
    fn no_period_of_batches_hides_from_it() {
        for period in [2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32] {
            let (mut sum, mut most, mut times) = (0, 0, 0);
            for phase in 0..period {
                let mut glance = Glance::default();
                looked(&mut glance, 16, 0);
                for _ in 0..20 {
                    let has = |at| u64::from(at % period == phase);
                    // Found if it was looked at, and had something.
                    let found = (0..10_000).find(|at| comes(&mut glance, has(*at)) && has(*at) > 0);
                    let found = found.unwrap_or_else(|| panic!("{phase} of {period} is hidden"));
                    (sum, most, times) = (sum + found, most.max(found), times + 1);
                    looked(&mut glance, 16, 0);
                }
            }
            // One look in `period` falls on it.
            let mean = sum as f64 / (times * period) as f64;
            assert!((8.0..=24.0).contains(&mean), "{period}: {mean}");
            assert!(most < 160 * period, "{period}: {most}");
        }
    }
}
