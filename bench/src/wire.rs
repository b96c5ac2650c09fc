//! The wire that the bench makes for itself, and who sends into it.

use std::num::NonZeroU64;

use vnplug_e2e::traffic::{Sent, Stream};
use vnplug_e2e::{Lab, Netns};

use crate::row::Result;
use crate::sys;

/// A silent wire in a namespace of its own: what enters at `far0` comes out of `wire0`.
pub(crate) struct Wire {
    pub(crate) lab: Lab,
    pub(crate) netns: Netns,
}

impl Wire {
    /// Makes it.
    pub(crate) fn new() -> Result<Self> {
        let (lab, netns) = (Lab::new()?, Netns::new()?);
        // Nothing speaks unasked on this wire.
        netns.enter(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"))??;
        netns.veth("wire0", "far0")?;
        Ok(Self { lab, netns })
    }

    /// Makes another one beside it: `farN` to `wireN`.
    pub(crate) fn add(&self, number: usize) -> Result<()> {
        let (wire, far) = (format!("wire{number}"), format!("far{number}"));
        Ok(self.netns.veth(&wire, &far)?)
    }

    /// Sends frames into the far end.
    pub(crate) fn send(&self, count: u64, len: usize, load: Load) -> Result<Sent> {
        self.send_from(None, "far0", count, len, load)
    }

    /// Sends frames into one far end, from one CPU if it is given.
    pub(crate) fn send_from(
        &self,
        cpu: Option<usize>,
        far: &str,
        count: u64,
        len: usize,
        load: Load,
    ) -> Result<Sent> {
        let stream = Stream {
            len_bytes: len,
            pps: load.pps(),
            flows: load.flows(),
            ..Stream::new(far, count)
        };
        Ok(self.netns.enter(|| {
            cpu.map_or(Ok(()), sys::pin)
                .map_err(|error| error.to_string())?;
            stream.send().map_err(|error| error.to_string())
        })??)
    }
}

/// How fast frames come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// This many per second, which every side keeps up with.
    Steady(u64),
    /// The same, of this many flows in turn.
    Flows(u64, u32),
    /// As fast as the sender can.
    FlatOut,
}

impl Load {
    /// Frames per second, if there is a bound.
    pub(crate) fn pps(self) -> Option<NonZeroU64> {
        match self {
            Self::Steady(pps) | Self::Flows(pps, _) => NonZeroU64::new(pps),
            Self::FlatOut => None,
        }
    }

    /// How many flows.
    pub(crate) fn flows(self) -> u32 {
        match self {
            Self::Flows(_, flows) => flows,
            Self::Steady(_) | Self::FlatOut => 1,
        }
    }
}
