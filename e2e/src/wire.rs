//! A wire with a daemon at its end, which receives what is sent.

use std::num::NonZeroU64;

use vnplug_ring::control::Counted;
use vnplug_testing::until;

use crate::daemon::{Daemon, counted, value};
use crate::traffic::Stream;
use crate::{Lab, Netns};

/// `wire0`, on which is sent, and `wire1`, in a namespace with a daemon.
#[derive(Debug)]
pub struct Wire {
    /// Its daemon.
    pub daemon: Daemon,
    /// Where both ends are.
    pub netns: Netns,
    /// Goes last.
    pub lab: Lab,
}

/// The source `wire1` by a packet socket, for tests in which no frame may be lost.
///
/// A daemon that reads in lots of 50 ms takes less of a machine on which much else runs.
pub const PATIENT: &str = "wire1=af_packet,block_timeout_ms=50";
/// Frames on their way to the daemon at most: an AF_XDP source has few places.
const LOT: u64 = 400;

impl Wire {
    /// A wire of this MTU, and a daemon with these arguments.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn new(mtu: &str, args: &[&str]) -> Self {
        let lab = Lab::new().expect("a lab");
        let netns = Netns::new().expect("a namespace");
        netns.veth("wire0", "wire1").expect("a wire");
        for end in ["wire0", "wire1"] {
            let set = netns.ip(&["link", "set", end, "mtu", mtu]);
            set.expect("the MTU");
        }
        let daemon = Daemon::start(&lab, Some(&netns), args).expect("a daemon");
        Self { daemon, netns, lab }
    }

    /// Sends no faster than the daemon receives: what was sent is received before more is.
    ///
    /// # Panics
    /// If not all was sent, or not all but the last few hundred frames was received.
    pub fn send(&self, stream: &Stream) {
        let before = self.received();
        let mut sent = 0;
        while sent < stream.count {
            if sent > 0 {
                self.await_received(before + sent);
            }
            let lot = Stream {
                pps: stream.pps.or(NonZeroU64::new(50_000)),
                count: LOT.min(stream.count - sent),
                first: stream.first + sent,
                ..stream.clone()
            };
            let done = self.netns.enter(|| lot.send());
            let done = done.expect("in the namespace").expect("sent");
            assert_eq!(done.frames, lot.count);
            sent += lot.count;
        }
    }

    fn await_received(&self, frames: u64) {
        let received = || self.received();
        until("the frames are received", received, |now| *now >= frames);
    }

    /// Frames that came to the source, and what became of them is known.
    fn received(&self) -> u64 {
        let counters = self.daemon.counters();
        let source = counted(&counters, "source");
        let parts = ["read", "kernel_dropped", "early"];
        parts.iter().map(|part| value(source, part)).sum()
    }

    /// Waits until this many frames were read, and closes the sums.
    ///
    /// # Panics
    /// If they do not come, or some were lost before.
    pub fn read(&self, frames: u64) -> Vec<Counted> {
        let look = || counted(&self.daemon.counters(), "source").clone();
        let source = until("the frames are read", look, |source| {
            value(source, "read") >= frames
        });
        assert_eq!(value(&source, "kernel_dropped"), 0);
        self.daemon.audit()
    }
}
