//! Durations counted by size: quantiles in constant memory.

/// Counts durations in classes that are at most 1/16 wide.
#[derive(Debug, Clone)]
pub struct Spread {
    classes: Vec<u64>,
    count: u64,
    max: u64,
}

impl Spread {
    /// Nothing was counted.
    pub fn new() -> Self {
        Self {
            classes: vec![0; CLASSES],
            count: 0,
            max: 0,
        }
    }

    /// Counts one.
    pub fn add(&mut self, ns: u64) {
        self.classes[class(ns)] += 1;
        self.count += 1;
        self.max = self.max.max(ns);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest.
    pub fn max_ns(&self) -> u64 {
        self.max
    }

    /// So many of a thousand were not longer than this (to 1/16, rounded up); 0 if none was counted.
    pub fn permille_ns(&self, permille: u64) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(permille)).div_ceil(1000);
        let mut seen = 0_u128;
        for (index, &count) in self.classes.iter().enumerate() {
            seen += u128::from(count);
            if count > 0 && seen >= wanted {
                return upper(index).min(self.max);
            }
        }
        self.max
    }
}

impl Default for Spread {
    fn default() -> Self {
        Self::new()
    }
}

/// Below 16 each value has a class; above, each power of two has 16.
fn class(ns: u64) -> usize {
    let Some(power) = ns.checked_ilog2().filter(|&power| power >= 4) else {
        return ns as usize;
    };
    let part = (ns >> (power - 4)) & 15;
    ((power - 3) as usize) * 16 + part as usize
}

/// The largest value of a class.
fn upper(class: usize) -> u64 {
    if class < 16 {
        return class as u64;
    }
    let (power, part) = (class as u32 / 16 + 3, class as u64 % 16);
    let from = (16 + part) << (power - 4);
    from + ((1 << (power - 4)) - 1)
}

const CLASSES: usize = 61 * 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_in_its_class() {
        let mut ns = 0_u64;
        while ns < u64::MAX / 3 {
            let at = class(ns);
            assert!(ns <= upper(at) && (at == 0 || ns > upper(at - 1)), "{ns}");
            ns += ns / 16 + 1;
        }
        assert_eq!(class(u64::MAX), CLASSES - 1);
        assert_eq!(upper(CLASSES - 1), u64::MAX);
    }

    #[test]
    fn quantiles_are_within_a_sixteenth() {
        let mut spread = Spread::new();
        assert_eq!(spread.permille_ns(990), 0);
        for ns in 1..=1000 {
            spread.add(ns * 1000);
        }
        for (permille, exact) in [(500, 500_000), (990, 990_000), (1000, 1_000_000)] {
            let found = spread.permille_ns(permille);
            assert!(
                (exact..=exact + exact / 16).contains(&found),
                "{permille}: {found}"
            );
        }
        assert_eq!((spread.count(), spread.max_ns()), (1000, 1_000_000));
    }
}
