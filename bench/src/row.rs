//! What a row is, and the table of rows.

use std::path::PathBuf;
use std::time::Duration;

use crate::handoff::{self, Reading};
use crate::{
    attached, capture, fanout, filter, group, latency, limit, pcap, scale, stage, supervise, uml,
};

/// Any error of a row: it is printed and ends that row, not the others.
pub(crate) type Error = Box<dyn std::error::Error>;
/// The result of a row.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// One line of the bench's plan: a name, a sentence and a function.
pub(crate) struct Row {
    /// Selected by any prefix of it.
    pub(crate) name: &'static str,
    /// What is measured, in one line.
    pub(crate) about: &'static str,
    /// Measures; ours and the peer's in turns.
    pub(crate) run: fn(&Plan) -> Result<Vec<Figure>>,
}

/// Every row, in the order of the table.
pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "capture-host",
        about: "by frame size: a reader on the host, against libpcap",
        run: capture::on_host,
    },
    Row {
        name: "capture-uml",
        about: "by frame size: a reader in User-mode Linux, against the guest's own NIC and the host",
        run: capture::one_uml,
    },
    Row {
        name: "capture-uml-two",
        about: "by frame size: two readers in one User-mode Linux, against the guest's own NIC",
        run: capture::two_in_uml,
    },
    Row {
        name: "capture-umls",
        about: "by frame size: readers in two User-mode Linux, against the guests' own NICs",
        run: capture::two_umls,
    },
    Row {
        name: "capture-qemu",
        about: "by frame size: a reader in QEMU, against virtio-net",
        run: capture::qemu,
    },
    Row {
        name: "afxdp",
        about: "a reader of the source af_xdp, against libpcap and the source af_packet",
        run: capture::af_xdp,
    },
    Row {
        name: ON_INTERFACE,
        about: "readers on the interface that IFACE names, against libpcap; traffic is the user's",
        run: capture::on_interface,
    },
    Row {
        name: "handoff-60",
        about: "one ring between two processes, 60-byte frames, against DPDK memif and vhost-user",
        run: |plan| handoff::against_dpdk(plan, 60, Reading::InPlace),
    },
    Row {
        name: "handoff-1514",
        about: "one ring between two processes, 1514-byte frames, against DPDK memif and vhost-user",
        run: |plan| handoff::against_dpdk(plan, 1514, Reading::InPlace),
    },
    Row {
        name: "handoff-copied-1514",
        about: "as handoff-1514, our reader copies every byte out as memif's does",
        run: |plan| handoff::against_dpdk(plan, 1514, Reading::CopiedOut),
    },
    Row {
        name: "handoff-imix",
        about: "one ring between two processes, a mix of 60, 590 and 1514 bytes",
        run: handoff::imix,
    },
    Row {
        name: "memory",
        about: "by frame size: two processes in memory, against DPDK memif and vhost-user",
        run: handoff::by_length,
    },
    Row {
        name: "limit",
        about: "what the machine allows: a cache line between two CPUs, copies by one",
        run: limit::machine,
    },
    Row {
        name: "handoff-sizes",
        about: "rings of 16 KiB to 16 MiB, 60 and 1514 bytes",
        run: handoff::sizes,
    },
    Row {
        name: "uml-reader-60",
        about: "one binary reads 60-byte frames in User-mode Linux and on the host",
        run: |plan| uml::against_host(plan, 60),
    },
    Row {
        name: "uml-reader-1514",
        about: "one binary reads 1514-byte frames in User-mode Linux and on the host",
        run: |plan| uml::against_host(plan, 1514),
    },
    Row {
        name: "fanout-1-60",
        about: "one source of 60-byte frames to 1 port, against copying alone",
        run: |plan| fanout::against_copies(plan, 60, 1),
    },
    Row {
        name: "fanout-2-60",
        about: "one source of 60-byte frames to 2 ports, against copying alone",
        run: |plan| fanout::against_copies(plan, 60, 2),
    },
    Row {
        name: "fanout-8-60",
        about: "one source of 60-byte frames to 8 ports, against copying alone",
        run: |plan| fanout::against_copies(plan, 60, 8),
    },
    Row {
        name: "fanout-64-60",
        about: "one source of 60-byte frames to 64 ports, against copying alone",
        run: |plan| fanout::against_copies(plan, 60, 64),
    },
    Row {
        name: "fanout-8-1514",
        about: "one source of 1514-byte frames to 8 ports, against copying alone",
        run: |plan| fanout::against_copies(plan, 1514, 8),
    },
    Row {
        name: "group-1-60",
        about: "one source of 60-byte frames to a group of 1, against private rings",
        run: |plan| group::against_copies(plan, 60, 1),
    },
    Row {
        name: "group-1-1514",
        about: "one source of 1514-byte frames to a group of 1, against private rings",
        run: |plan| group::against_copies(plan, 1514, 1),
    },
    Row {
        name: "group-2-60",
        about: "one source of 60-byte frames to a group of 2, against private rings",
        run: |plan| group::against_copies(plan, 60, 2),
    },
    Row {
        name: "group-2-1514",
        about: "one source of 1514-byte frames to a group of 2, against private rings",
        run: |plan| group::against_copies(plan, 1514, 2),
    },
    Row {
        name: "group-8-60",
        about: "one source of 60-byte frames to a group of 8, against private rings",
        run: |plan| group::against_copies(plan, 60, 8),
    },
    Row {
        name: "group-8-1514",
        about: "one source of 1514-byte frames to a group of 8, against private rings",
        run: |plan| group::against_copies(plan, 1514, 8),
    },
    Row {
        name: "group-64-60",
        about: "one source of 60-byte frames to a group of 64, against private rings",
        run: |plan| group::against_copies(plan, 60, 64),
    },
    Row {
        name: "group-64-1514",
        about: "one source of 1514-byte frames to a group of 64, against private rings",
        run: |plan| group::against_copies(plan, 1514, 64),
    },
    Row {
        name: "filter-one",
        about: "one filter: machine code and interpreter, against libpcap's and the kernel's JIT",
        run: filter::one,
    },
    Row {
        name: "filters-1",
        about: "one port's filter, looked up, against libpcap's and the kernel's JIT",
        run: |plan| filter::many(plan, 1),
    },
    Row {
        name: "filters-10",
        about: "10 ports' filters, looked up, against running them one after the other",
        run: |plan| filter::many(plan, 10),
    },
    Row {
        name: "filters-100",
        about: "100 ports' filters, looked up, against running them one after the other",
        run: |plan| filter::many(plan, 100),
    },
    Row {
        name: "filters-1000",
        about: "1,000 ports' filters, looked up, against running them one after the other",
        run: |plan| filter::many(plan, 1_000),
    },
    Row {
        name: "filters-10000",
        about: "10,000 ports' filters, looked up, against running them one after the other",
        run: |plan| filter::many(plan, 10_000),
    },
    Row {
        name: "targets",
        about: "10,000 targets by address on a full wire, each with a port of its own",
        run: filter::targets,
    },
    Row {
        name: "scale-flows",
        about: "one source and one reader, by number of flows",
        run: scale::flows,
    },
    Row {
        name: "scale-queues",
        about: "queues and as many readers, on as many CPUs as there are",
        run: scale::queues,
    },
    Row {
        name: "stage",
        about: "instructions per packet by stage of the path, counted by callgrind",
        run: stage::by_stage,
    },
    Row {
        name: "latency-host",
        about: "how late a process of the host is, by way of waiting, idle and loaded, against pipes",
        run: latency::host,
    },
    Row {
        name: "latency-uml",
        about: "how late a reader in User-mode Linux is, by way of waiting, idle and loaded",
        run: latency::uml,
    },
    Row {
        name: "latency-qemu",
        about: "how late a reader in QEMU is, by way of waiting, idle and loaded",
        run: latency::qemu,
    },
    Row {
        name: "idle",
        about: "the daemon's processor time while nothing happens",
        run: attached::idle,
    },
    Row {
        name: "attach-1000",
        about: "time to attach and detach 1,000 ports",
        run: attached::attach,
    },
    Row {
        name: "pcap-dispatch-60",
        about: "a pcap_dispatch counter, 60-byte frames, the drop-in against the system's libpcap",
        run: |plan| pcap::dispatch(plan, 60),
    },
    Row {
        name: "pcap-dispatch-1514",
        about: "a pcap_dispatch counter, 1514-byte frames, the drop-in against the system's libpcap",
        run: |plan| pcap::dispatch(plan, 1514),
    },
    Row {
        name: "pcap-tcpdump-60",
        about: "tcpdump -w /dev/null, 60-byte frames, the drop-in against the system's libpcap",
        run: |plan| pcap::tcpdump(plan, 60),
    },
    Row {
        name: "pcap-tcpdump-1514",
        about: "tcpdump -w /dev/null, 1514-byte frames, the drop-in against the system's libpcap",
        run: |plan| pcap::tcpdump(plan, 1514),
    },
    Row {
        name: "pcap-uml-60",
        about: "a pcap_dispatch counter in User-mode Linux, over vNPlug against the guest's NIC",
        run: pcap::in_uml,
    },
    Row {
        name: "pcap-uml-filtered",
        about: "what a guest with a filter pays for the packets it does not want",
        run: pcap::filtered,
    },
];

/// The row that is left out unless an interface is named.
pub(crate) const ON_INTERFACE: &str = "interface";

/// Runs the part of a row that needs a process of its own.
pub(crate) fn child(words: &[String]) -> Result<()> {
    match words.split_first() {
        Some((name, rest)) if name == "row" => supervise::child(rest),
        Some((name, rest)) if name == "handoff-producer" => handoff::producer(rest),
        Some((name, _)) if name == "latency-pong" => latency::pong(),
        Some((name, rest)) if name == "attach" => attached::client(rest),
        Some((name, rest)) if name == "stage-reader" => stage::child(rest),
        Some((name, rest)) if name == "pcap-count" => pcap::child(rest),
        _ => Err(format!("no such child: {words:?}").into()),
    }
}

/// How often and how long to measure.
pub(crate) struct Plan {
    /// Rounds of ours and the peer's in turns.
    pub(crate) rounds: usize,
    /// Length of one measurement.
    pub(crate) time: Duration,
    /// The file of the figures.
    pub(crate) out: PathBuf,
    /// A real interface, for the row that measures on one.
    pub(crate) interface: Option<String>,
}

impl Plan {
    /// Reads `ROUNDS`, `SECONDS` and `OUT`.
    pub(crate) fn from_env() -> Result<Self> {
        let word = |name, default: &str| std::env::var(name).unwrap_or(default.to_owned());
        // NB: bash has a variable SECONDS of its own but does not export it.
        let seconds = word("SECONDS", "2.0").parse::<f64>();
        let seconds = seconds.map_err(|error| format!("SECONDS: {error}"))?;
        let rounds = word("ROUNDS", "5").parse::<usize>();
        let rounds = rounds.map_err(|error| format!("ROUNDS: {error}"))?;
        Ok(Self {
            rounds: rounds.max(1),
            time: Duration::try_from_secs_f64(seconds.max(0.1))?,
            out: word("OUT", "target/bench/results.json").into(),
            interface: std::env::var(capture::INTERFACE)
                .ok()
                .filter(|name| !name.is_empty()),
        })
    }
}

impl Plan {
    /// The same with measurements of at most this time.
    pub(crate) fn lasting(&self, time: Duration) -> Self {
        Self {
            rounds: self.rounds,
            time: self.time.min(time),
            out: self.out.clone(),
            interface: self.interface.clone(),
        }
    }
}

/// One result: ours, and the peer's from the same rounds.
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    /// One sample per round.
    pub(crate) ours: Samples,
    /// Name and samples of the peer, where there is one.
    pub(crate) peer: Option<(String, Samples)>,
    /// What exactly both sides did.
    pub(crate) note: String,
}

/// Samples of one quantity.
#[derive(Clone, Default)]
pub(crate) struct Samples {
    sorted: Vec<f64>,
    last: f64,
}

impl Samples {
    pub(crate) fn push(&mut self, sample: f64) {
        self.last = sample;
        self.sorted.push(sample);
        self.sorted.sort_by(f64::total_cmp);
    }

    /// The sample that was pushed last.
    pub(crate) fn last(&self) -> f64 {
        self.last
    }

    /// All of them, the lowest first.
    pub(crate) fn all(&self) -> &[f64] {
        &self.sorted
    }

    /// The middle sample, 0 without samples.
    pub(crate) fn median(&self) -> f64 {
        self.sorted
            .get(self.sorted.len() / 2)
            .copied()
            .unwrap_or(0.0)
    }

    /// Lowest and highest sample.
    pub(crate) fn range(&self) -> (f64, f64) {
        (
            self.sorted.first().copied().unwrap_or(0.0),
            self.sorted.last().copied().unwrap_or(0.0),
        )
    }
}

impl Figure {
    /// Ours divided by the peer's, medians.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let (_, peer) = self.peer.as_ref()?;
        (peer.median() > 0.0).then(|| self.ours.median() / peer.median())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_and_ranges() {
        let mut figure = Figure {
            name: String::new(),
            unit: "Mpps",
            ours: Samples::default(),
            peer: Some((String::new(), Samples::default())),
            note: String::new(),
        };
        assert_eq!((figure.ours.median(), figure.ratio()), (0.0, None));
        for sample in [9.0, 1.0, 4.0] {
            figure.ours.push(sample);
        }
        if let Some((_, peer)) = &mut figure.peer {
            peer.push(2.0);
        }
        assert_eq!(figure.ours.range(), (1.0, 9.0));
        assert_eq!(figure.ratio(), Some(2.0));
    }

    #[test]
    fn row_names_are_unique() {
        for (at, row) in ROWS.iter().enumerate() {
            assert!(ROWS[at + 1..].iter().all(|other| other.name != row.name));
        }
    }
}
