//! Applications of libpcap over the drop-in, against the same programs over the real library.
//!
//! The wire is a veth in a namespace. Frames go in at a rate that both sides keep up with, to tell
//! the cost of a packet, then flat out, to tell the loss. The daemon runs only in its own turns:
//! its socket would cost the other side's sender a copy.

mod counter;
mod guest;
mod host;
mod library;

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use vnplug_e2e::Lab;

use crate::handoff::{Reading, Sizes};
use crate::limit::{self, Bare};
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::wire::{Load, Wire};

pub(crate) use counter::{BARE, IN_PLACE, Listener, NAME as COUNTER, READY, Told, child};
pub(crate) use guest::{filtered, image, in_uml, stripped};
pub(crate) use host::{dispatch, tcpdump};

/// One turn of one side.
#[derive(Clone, Copy)]
struct Turn {
    sent: u64,
    captured: u64,
    /// Processor time of the application, in seconds.
    own_s: f64,
    /// Processor time of the daemon, in seconds; 0 in the peer's turns.
    daemon_s: f64,
}

impl Turn {
    fn lost_percent(&self) -> f64 {
        let lost = self.sent.saturating_sub(self.captured);
        lost as f64 / self.sent.max(1) as f64 * 100.0
    }

    /// Seconds of the application per million packets it got.
    fn own_cost(&self) -> f64 {
        self.own_s * 1e6 / self.captured.max(1) as f64
    }

    /// The same, with the daemon's.
    fn whole_cost(&self) -> f64 {
        (self.own_s + self.daemon_s) * 1e6 / self.captured.max(1) as f64
    }
}

/// The turns of both sides.
#[derive(Default)]
struct Turns {
    ours: Vec<Turn>,
    theirs: Vec<Turn>,
    /// Packets per microsecond of a bare transfer.
    bare: Samples,
}

impl Turns {
    /// A figure of one quantity of all turns.
    fn figure(
        &self,
        name: String,
        unit: &'static str,
        quantity: fn(&Turn) -> f64,
        peer: &str,
        note: String,
    ) -> Figure {
        let samples = |turns: &[Turn]| turns.iter().map(quantity).collect();
        Figure {
            name,
            unit,
            ours: samples(&self.ours),
            peer: Some((peer.to_owned(), samples(&self.theirs))),
            limit: None,
            note,
        }
    }

    /// Measures what passing on the bytes costs alone: our reader looks at headers where they lie,
    /// tcpdump copies the bytes.
    fn push_bare(&mut self, plan: &Plan, len: usize, reading: Reading) -> Result<()> {
        let bare = Bare::one(Sizes::One(len), BARE_RING, reading);
        self.bare.push(bare.mpps(plan.time / 8)?);
        Ok(())
    }

    /// The figure of a cost with its limit: what a bare transfer takes of this many CPUs.
    fn bounded(&self, figure: Figure, cpus: f64) -> Figure {
        // Microseconds per packet are seconds per million packets.
        let limit = Limit::converted(limit::BARE, &self.bare, |mpps| cpus / mpps);
        Figure {
            limit: Some(limit),
            ..figure
        }
    }
}

/// A folder with the drop-in under the name that programs ask for.
pub(crate) fn drop_in(lab: &Lab) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let built = program.with_file_name("libvnplug_pcap.so");
    if !built.exists() {
        return Err(format!("no {}: run `make build`", built.display()).into());
    }
    let dir = lab.dir().join("pcap");
    if !dir.exists() {
        std::fs::create_dir(&dir)?;
        symlink(built, dir.join(LIBRARY))?;
    }
    Ok(dir)
}

/// Bytes of the ring of a bare transfer.
const BARE_RING: u64 = 1 << 19;
/// What programs are linked to.
const LIBRARY: &str = "libpcap.so.0.8";
/// Unit of what a packet costs.
const COST: &str = "CPU s/Mpkt";
