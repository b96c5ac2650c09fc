//! A wire with a daemon at its end, which receives what is sent.

use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};

use vnplug_ring::control::Counted;

use crate::daemon::{Daemon, value};
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

const LIMIT: Duration = Duration::from_secs(120);

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

    /// Sends no faster than the driver hands on.
    ///
    /// # Panics
    /// If not all was sent.
    pub fn send(&self, stream: &Stream) {
        let stream = Stream {
            pps: stream.pps.or(NonZeroU64::new(50_000)),
            ..stream.clone()
        };
        let sent = self.netns.enter(|| stream.send());
        let sent = sent.expect("in the namespace").expect("sent");
        assert_eq!(sent.frames, stream.count);
    }

    /// Waits until so many frames were read, and closes the sums.
    ///
    /// # Panics
    /// If they do not come, or some were lost before.
    pub fn read(&self, frames: u64) -> Vec<Counted> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let counters = self.daemon.counters();
            let source = counters.iter().find(|it| it.kind == "source");
            let source = source.expect("a source");
            if value(source, "read") >= frames {
                assert_eq!(value(source, "kernel_dropped"), 0);
                return self.daemon.audit();
            }
            assert!(Instant::now() < deadline, "{source:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}
