//! Numbers for randomized tests.

/// Throws the same numbers again for the same seed (SplitMix64: Steele, Lea, Flood 2014). All 64 bits of each are good,
/// and every seed is, 0 too.
///
/// ```
/// let mut dice = vnplug_testing::Dice(7);
/// assert!(dice.below(6) < 6);
/// assert_eq!(dice.roll(), { let mut again = vnplug_testing::Dice(7); again.roll(); again.roll() });
/// ```
#[derive(Debug, Clone)]
pub struct Dice(pub u64);

impl Dice {
    /// Any number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `limit`, which is not 0. Those of a large limit are not all as likely.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit
    }

    /// One of these, of which there are some.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::Dice;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        // Of the reference implementation (Vigna, splitmix64.c), for the seed 1234567.
        let mut dice = Dice(1_234_567);
        let first = [(); 3].map(|()| dice.roll());
        let known = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(first, known);
        let mut thrown = [0; 6];
        for _ in 0..600 {
            thrown[dice.one_of(&[0, 1, 2, 3, 4, 5])] += 1;
        }
        assert!(thrown.iter().all(|it| (50..150).contains(it)), "{thrown:?}");
    }
}
