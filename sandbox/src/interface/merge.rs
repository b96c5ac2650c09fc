//! TCP segments of a batch that become super-frames before the interface has them.

use vnplug::{Offload, Packet, flags};
use vnplug_frame::aggregate::{Aggregator, Limits, Outcome, Single};

/// Merges what follows each other; nothing waits for another batch.
#[derive(Debug)]
pub(super) struct Merge {
    aggregator: Aggregator,
    limits: Limits,
}

/// What the interface receives.
pub(super) enum Given<'a> {
    /// A packet as it came.
    Packet(&'a Packet<'a>),
    /// A super-frame, and what is left to do with it.
    Made(&'a [u8], &'a Offload),
}

impl Merge {
    /// Up to `segments` become one.
    pub(super) fn new(segments: u8) -> Self {
        Self {
            aggregator: Aggregator::default(),
            limits: Limits {
                segments: segments.into(),
                ipv4: true,
                ipv6: true,
            },
        }
    }

    /// Merges what can be of these. How many of them are a part of another now.
    pub(super) fn run(&mut self, packets: &[Packet<'_>]) -> u64 {
        let single = |at: usize| {
            let packet: &Packet<'_> = &packets[at];
            Single {
                head: packet.bytes,
                body: &[],
                missing: 0,
                offload: (packet.meta.flags & flags::OFFLOAD != 0).then_some(&packet.meta.offload),
                is_valid: false,
            }
        };
        self.aggregator.run(&self.limits, packets.len(), single) as u64
    }

    /// What the packets of [`run`](Self::run) became, in order.
    pub(super) fn given<'a>(
        &'a self,
        packets: &'a [Packet<'a>],
    ) -> impl Iterator<Item = Given<'a>> {
        self.aggregator.outcomes().map(|outcome| match outcome {
            Outcome::Frame(at) => Given::Packet(&packets[at as usize]),
            Outcome::Made(made, _) => {
                let (bytes, offload) = self.aggregator.get(made);
                Given::Made(bytes, offload)
            }
        })
    }
}
