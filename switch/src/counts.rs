//! What became of the frames that entered a switch, and of the copies that were due.

use crate::exits::Noted;

/// Why a frame that entered went to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It is shorter than an Ethernet header.
    Short,
    /// It is longer than the switch takes.
    Long,
    /// What is said to be left to do with it (a virtio-net header) does not fit it.
    Offload,
    /// The descriptors of a guest's ring that should have it make no sense.
    Chain,
    /// A group's address is its source.
    Source,
    /// It is of no VLAN that the port is in, or for a port that is not in its VLAN.
    Vlan,
    /// The port is locked to other stations, or the station is another port's for good.
    Lock,
    /// One of too many for many.
    Storm,
    /// It is more than the port may send.
    Police,
    /// It is from one isolated port to another.
    Isolated,
    /// The link is down, or shut because of a loop.
    Down,
}

impl Reason {
    /// How many there are.
    pub const COUNT: usize = 11;
    /// The counters' public names, in order.
    pub const NAMES: [&str; Self::COUNT] = [
        "in_dropped_short",
        "in_dropped_long",
        "in_dropped_offload",
        "in_dropped_chain",
        "in_dropped_source",
        "in_dropped_vlan",
        "in_dropped_lock",
        "in_dropped_storm",
        "in_dropped_police",
        "in_dropped_isolated",
        "in_dropped_down",
    ];
}

/// Frames by the reason for which they were dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refused([u64; Reason::COUNT]);

impl Refused {
    /// One more.
    #[inline]
    pub fn add(&mut self, reason: Reason) {
        self.0[reason as usize] += 1;
    }

    /// `count` more.
    pub(crate) fn add_all(&mut self, reason: Reason, count: u64) {
        self.0[reason as usize] += count;
    }

    /// Those of a reason.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// With the counters' public names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Reason::NAMES.into_iter().zip(self.0)
    }
}

/// What became of the frames that entered, and of the copies that were due.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames that entered.
    pub entered: u64,
    /// For one port, where the station is known to be.
    pub unicast: u64,
    /// For all other ports: a group's address, or a station that is not known.
    pub flooded: u64,
    /// For nobody: the station is where the frame came from, or there is no other port.
    pub consumed: u64,
    /// Dropped.
    pub refused: Refused,
    /// Copies that were due to ports.
    pub due: u64,
    /// Of these, what super-frames became beyond one packet for each port.
    pub cut: u64,
    /// Of these, copies that were due to ports with rings, which count what became of them.
    pub rings: u64,
    /// Of the frames that entered, ACKs that one of a guest's became.
    pub acks_expanded: u64,
    /// Of the copies that were due, those that left within a super-frame that was made of several, beyond one for each.
    pub merged: u64,
    /// Super-frames that were made.
    pub super_frames: u64,
    /// Of the copies that were due, those that went into the port's way out.
    pub enqueued: u64,
    /// Of these, copies that were dropped because the port's way out was full.
    pub dropped_full: u64,
    /// Of these, copies that were dropped because nobody was at the port's other end.
    pub dropped_gone: u64,
    /// Of these, copies that were dropped because they are longer than the far end can carry.
    pub dropped_too_long: u64,
    /// Of these, copies that were lost on purpose.
    pub dropped_loss: u64,
    /// Addresses that were not learned because the port, or the table, has as many as it may.
    pub unlearned: u64,
    /// Times a station moved from one port to another.
    pub moves: u64,
    /// Times one was heard at another port too soon to move.
    pub moves_held: u64,
    /// Times a loop was found at a port.
    pub loops: u64,
}

impl Counters {
    /// `frames` more entered, each for one port.
    pub(crate) fn carried(&mut self, frames: u64) {
        self.entered += frames;
        self.unicast += frames;
        self.due += frames;
    }

    /// `frames` that were given to ports, and waited there, are dropped after all.
    pub(crate) fn lost(&mut self, frames: u64) {
        self.enqueued -= frames;
        self.dropped_gone += frames;
    }

    /// Frames whose fate is counted: `entered`, or we have a bug.
    pub fn accounted(&self) -> u64 {
        self.unicast + self.flooded + self.consumed + self.refused.total()
    }

    /// Copies whose fate is counted: `due`, or we have a bug.
    pub fn accounted_copies(&self) -> u64 {
        let dropped =
            self.dropped_full + self.dropped_gone + self.dropped_too_long + self.dropped_loss;
        self.rings + self.merged + self.enqueued + dropped
    }

    /// What was noted of a batch.
    pub(crate) fn noted(&mut self, noted: &Noted) {
        self.rings += noted.rings;
        self.cut += noted.cut;
        self.due += noted.cut;
    }

    /// The counters with their public names.
    pub fn named(&self) -> Vec<(String, u64)> {
        let Self {
            entered,
            unicast,
            flooded,
            consumed,
            refused,
            due,
            cut,
            rings,
            acks_expanded,
            merged,
            super_frames,
            enqueued,
            dropped_full,
            dropped_gone,
            dropped_too_long,
            dropped_loss,
            unlearned,
            moves,
            moves_held,
            loops,
        } = *self;
        let fates = [
            ("entered", entered),
            ("acks_expanded", acks_expanded),
            ("unicast", unicast),
            ("flooded", flooded),
            ("consumed", consumed),
        ];
        let copies = [
            ("due", due),
            ("out_cut", cut),
            ("out_rings", rings),
            ("out_merged", merged),
            ("out_super_frames", super_frames),
            ("out_enqueued", enqueued),
            ("out_dropped_full", dropped_full),
            ("out_dropped_gone", dropped_gone),
            ("out_dropped_long", dropped_too_long),
            ("out_dropped_loss", dropped_loss),
            ("unlearned", unlearned),
            ("moves", moves),
            ("moves_held", moves_held),
            ("loops", loops),
        ];
        let all = fates.into_iter().chain(refused.named()).chain(copies);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
