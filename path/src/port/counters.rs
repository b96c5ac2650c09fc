//! What becomes of the frames that a port is offered.

/// The fate of every frame offered to a port, or of each packet that it became. Exactly one counter
/// goes up for each, so `offered` and `cut` are the sum of all the others but `bytes` and `rings`
/// (point S).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames this port had to judge.
    pub offered: u64,
    /// Refused by the operator's obligatory filter.
    pub refused: u64,
    /// Skipped while the reader had paused the port.
    pub paused: u64,
    /// Not the wanted direction, or sent by the port's own program.
    pub direction: u64,
    /// Not wanted by the reader's filter.
    pub filtered: u64,
    /// Not wanted by the reader's rules.
    pub ruled_out: u64,
    /// Passed the filter and was left out by 1-in-N sampling.
    pub sampled_out: u64,
    /// Dropped by the operator's program.
    pub program: u64,
    /// Published in the ring.
    pub delivered: u64,
    /// Dropped: the ring was full.
    pub dropped_full: u64,
    /// Dropped unseen: the source had more than its thread could do, and the owner's ports had used
    /// up their part of it.
    pub dropped_budget: u64,
    /// Dropped: the port is in quarantine.
    pub dropped_quarantine: u64,
    /// Packets that super-frames became, beyond one for each: they are in the fates, and not in
    /// `offered`.
    pub cut: u64,
    /// Captured bytes delivered.
    pub bytes: u64,
    /// Times the reader was rung.
    pub rings: u64,
}

impl PortCounters {
    /// Adds another queue's part.
    pub fn add(&mut self, other: &Self) {
        self.offered += other.offered;
        self.refused += other.refused;
        self.paused += other.paused;
        self.direction += other.direction;
        self.filtered += other.filtered;
        self.ruled_out += other.ruled_out;
        self.sampled_out += other.sampled_out;
        self.program += other.program;
        self.delivered += other.delivered;
        self.dropped_full += other.dropped_full;
        self.dropped_budget += other.dropped_budget;
        self.dropped_quarantine += other.dropped_quarantine;
        self.cut += other.cut;
        self.bytes += other.bytes;
        self.rings += other.rings;
    }

    /// Frames whose fate is counted; a super-frame is one, whatever it became. Equal to `offered` or we
    /// have a bug.
    pub fn accounted(&self) -> u64 {
        self.refused
            + self.paused
            + self.direction
            + self.filtered
            + self.ruled_out
            + self.sampled_out
            + self.program
            + self.delivered
            + self.dropped_full
            + self.dropped_budget
            + self.dropped_quarantine
            - self.cut
    }
}
