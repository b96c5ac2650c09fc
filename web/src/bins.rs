//! Equal parts of a range of time, and what came in each of them.

use vnplug_store::index::Chunk;

/// A range of time in parts of equal width, half-open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    /// Nanoseconds of a part; the last one may be shorter.
    pub(crate) bin_ns: u64,
}

impl Axis {
    /// At most `bins` parts, at least one.
    pub(crate) fn new(from_ns: u64, to_ns: u64, bins: u64) -> Self {
        let to_ns = to_ns.max(from_ns.saturating_add(1));
        Self {
            from_ns,
            to_ns,
            bin_ns: (to_ns - from_ns).div_ceil(bins.max(1)),
        }
    }

    /// How many parts there are.
    pub(crate) fn bins(&self) -> usize {
        (self.to_ns - self.from_ns).div_ceil(self.bin_ns) as usize
    }

    /// The part that a time of the range is in.
    pub(crate) fn bin(&self, ns: u64) -> usize {
        ((ns - self.from_ns) / self.bin_ns) as usize
    }

    /// How long a part is.
    pub(crate) fn width_ns(&self, bin: usize) -> u64 {
        let before = (bin as u64).saturating_mul(self.bin_ns);
        let left = (self.to_ns - self.from_ns).saturating_sub(before);
        left.clamp(1, self.bin_ns)
    }

    /// Whether a time is in the range.
    pub(crate) fn has(&self, ns: u64) -> bool {
        (self.from_ns..self.to_ns).contains(&ns)
    }
}

/// What came in each part.
#[derive(Debug, Clone)]
pub(crate) struct Bins {
    axis: Axis,
    packets: Series,
    bytes: Series,
    lost: Series,
    spread_ns: u64,
}

impl Bins {
    pub(crate) fn new(axis: Axis) -> Self {
        let series = Series::new(axis);
        Self {
            axis,
            packets: series.clone(),
            bytes: series.clone(),
            lost: series,
            spread_ns: 0,
        }
    }

    /// Adds a packet.
    pub(crate) fn packet(&mut self, ts_ns: u64, wire_bytes: u32, lost: u64) {
        if self.axis.has(ts_ns) {
            let bin = self.axis.bin(ts_ns);
            self.packets.direct[bin] += 1.0;
            self.bytes.direct[bin] += f64::from(wire_bytes);
            self.lost.direct[bin] += lost as f64;
        }
    }

    /// Whether the parts that a chunk's packets came in are known without reading them.
    pub(crate) fn is_exact(&self, chunk: &Chunk) -> bool {
        let Axis { from_ns, to_ns, .. } = self.axis;
        let outside = chunk.high_ns < from_ns || chunk.low_ns >= to_ns;
        let inside = self.axis.has(chunk.low_ns) && self.axis.has(chunk.high_ns);
        outside || inside && self.axis.bin(chunk.low_ns) == self.axis.bin(chunk.high_ns)
    }

    /// Adds a chunk as if its packets had come evenly in its time.
    pub(crate) fn chunk(&mut self, chunk: &Chunk) {
        if chunk.packets == 0 || chunk.high_ns < chunk.low_ns {
            return;
        }
        if !self.is_exact(chunk) {
            self.spread_ns = self.spread_ns.max(chunk.high_ns - chunk.low_ns);
        }
        let (low, high) = (chunk.low_ns, chunk.high_ns);
        self.packets.spread(low, high, chunk.packets);
        self.bytes.spread(low, high, chunk.wire_bytes);
        self.lost.spread(low, high, chunk.lost);
    }

    /// Adds packets that were lost between two times.
    pub(crate) fn loss(&mut self, from_ns: u64, to_ns: u64, packets: u64) {
        self.lost.spread(from_ns, to_ns, packets);
    }

    /// How far from its place a packet may be counted at most; 0: all is exact.
    pub(crate) fn spread_ns(&self) -> u64 {
        self.spread_ns
    }

    /// Packets, bytes on the wire, and lost packets of each part, as whole numbers with the right sums.
    pub(crate) fn finish(&self) -> [Vec<u64>; 3] {
        [&self.packets, &self.bytes, &self.lost].map(Series::finish)
    }
}

/// One number per part. What fills many parts evenly is kept as where it begins and where it ends.
#[derive(Debug, Clone)]
struct Series {
    axis: Axis,
    direct: Vec<f64>,
    /// Added to all parts from this one on.
    step: Vec<f64>,
}

impl Series {
    fn new(axis: Axis) -> Self {
        let bins = axis.bins();
        Self {
            axis,
            direct: vec![0.0; bins],
            step: vec![0.0; bins + 1],
        }
    }

    /// Spreads an amount over a range of time, both ends included; what is outside is left out.
    fn spread(&mut self, low_ns: u64, high_ns: u64, amount: u64) {
        let Axis {
            from_ns,
            to_ns,
            bin_ns,
        } = self.axis;
        let (first, last) = (low_ns.max(from_ns), high_ns.min(to_ns - 1));
        if first > last || amount == 0 {
            return;
        }
        let width = (high_ns - low_ns) as f64 + 1.0;
        let rate = amount as f64 / width;
        let (i, j) = (self.axis.bin(first), self.axis.bin(last));
        if i == j {
            let inside = first == low_ns && last == high_ns;
            let share = match inside {
                true => amount as f64,
                false => rate * ((last - first) as f64 + 1.0),
            };
            self.direct[i] += share;
            return;
        }
        let start = |bin: usize| from_ns + bin as u64 * bin_ns;
        self.direct[i] += rate * (start(i + 1) - first) as f64;
        self.direct[j] += rate * ((last - start(j)) as f64 + 1.0);
        self.step[i + 1] += rate * bin_ns as f64;
        self.step[j] -= rate * bin_ns as f64;
    }

    fn finish(&self) -> Vec<u64> {
        let (mut level, mut sum, mut told) = (0.0, 0.0, 0_u64);
        let bins = self.direct.iter().zip(&self.step);
        bins.map(|(direct, step)| {
            level += step;
            sum += direct + level.max(0.0);
            // Rounded sums: what is rounded off one part is in the next.
            let until = (sum.round() as u64).max(told);
            let here = until - told;
            told = until;
            here
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(low_ns: u64, high_ns: u64, packets: u64) -> Chunk {
        Chunk {
            low_ns,
            high_ns,
            packets,
            wire_bytes: packets * 100,
            ..Chunk::default()
        }
    }

    #[test]
    fn the_parts_cover_the_range() {
        for (from, to, bins) in [
            (0, 10, 3),
            (5, 6, 100),
            (7, 7, 1),
            (0, u64::MAX, 7),
            (3, 1003, 1),
        ] {
            let axis = Axis::new(from, to, bins);
            assert!(axis.bins() as u64 <= bins && axis.bins() > 0, "{axis:?}");
            assert_eq!(axis.bin(axis.to_ns - 1), axis.bins() - 1);
            assert!(!axis.has(axis.to_ns) && axis.has(axis.from_ns));
            let widths = (0..axis.bins()).map(|bin| axis.width_ns(bin));
            assert_eq!(widths.sum::<u64>(), axis.to_ns - axis.from_ns);
        }
    }

    #[test]
    fn a_chunk_within_a_part_is_exact_and_a_wide_one_is_spread() {
        let mut bins = Bins::new(Axis::new(100, 200, 10));
        bins.chunk(&chunk(110, 119, 7));
        assert_eq!(bins.spread_ns(), 0);
        bins.chunk(&chunk(120, 159, 40));
        assert_eq!(bins.spread_ns(), 39);
        let [packets, bytes, _] = bins.finish();
        assert_eq!(packets, [0, 7, 10, 10, 10, 10, 0, 0, 0, 0]);
        assert_eq!(bytes.iter().sum::<u64>(), 4700);
    }

    #[test]
    fn sums_stay_whatever_the_width() {
        for bins in [1, 2, 3, 7, 100, 999] {
            let mut list = Bins::new(Axis::new(0, 1000, bins));
            let mut total = 0;
            for n in 0..500 {
                list.chunk(&chunk(n, n + n % 300, n % 5));
                total += n % 5;
            }
            list.packet(999, 60, 2);
            let [packets, bytes, lost] = list.finish();
            assert_eq!(packets.iter().sum::<u64>(), total + 1);
            assert_eq!(bytes.iter().sum::<u64>(), total * 100 + 60);
            assert_eq!(lost.iter().sum::<u64>(), 2);
        }
    }

    #[test]
    fn only_the_part_within_the_range_counts() {
        let mut bins = Bins::new(Axis::new(100, 200, 2));
        bins.chunk(&chunk(0, 99, 5));
        bins.chunk(&chunk(200, 300, 5));
        bins.chunk(&chunk(50, 149, 100));
        bins.chunk(&chunk(0, u64::MAX, 3));
        bins.packet(99, 60, 0);
        bins.packet(200, 60, 0);
        let [packets, ..] = bins.finish();
        assert_eq!(packets, [50, 0]);
    }
}
