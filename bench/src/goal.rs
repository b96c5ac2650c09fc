//! The goals, and whether a figure meets its own.

use crate::row::Figure;

/// What a figure should reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// At least this many times the peer's.
    TimesPeer(f64),
    /// At most this share of the peer's.
    ShareOfPeer(f64),
    /// At most this value.
    AtMost(f64),
    /// At least this value.
    AtLeast(f64),
}

impl Goal {
    /// The goal of a figure, if it has one.
    pub(crate) fn of(figure: &Figure) -> Option<Self> {
        let named = |(name, _): &&(&str, Self)| *name == figure.name;
        GOALS.iter().find(named).map(|(_, goal)| *goal)
    }

    /// Whether the figure's median meets it; `None` where the peer has no figure. Ratios count as
    /// exactly as they are told, to two digits: 1514-byte frames at a sender's limit are equal to
    /// the packet, and their rates are not.
    pub(crate) fn is_met(self, figure: &Figure) -> Option<bool> {
        let value = figure.ours.median();
        let told = |ratio: f64| (ratio * 100.0).round() / 100.0;
        Some(match self {
            Self::TimesPeer(times) => told(figure.ratio()?) >= times,
            Self::ShareOfPeer(share) => told(figure.ratio()?) <= share,
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        })
    }

    /// The goal in the figure's own unit.
    pub(crate) fn value(self, figure: &Figure) -> Option<f64> {
        let peer = || figure.peer.as_ref().map(|(_, samples)| samples.median());
        match self {
            Self::TimesPeer(factor) | Self::ShareOfPeer(factor) => Some(factor * peer()?),
            Self::AtMost(value) | Self::AtLeast(value) => Some(value),
        }
    }

    /// In words: `>= 2x`.
    pub(crate) fn words(self) -> String {
        match self {
            Self::TimesPeer(times) => format!(">= {times}x"),
            Self::ShareOfPeer(share) => format!("<= {share}x"),
            Self::AtMost(value) => format!("<= {value}"),
            Self::AtLeast(value) => format!(">= {value}"),
        }
    }
}

/// By the figure's name.
const GOALS: &[(&str, Goal)] = &[
    ("capture-uml-64-host", Goal::TimesPeer(0.95)),
    ("capture-uml-1514-host", Goal::TimesPeer(0.95)),
    ("capture-uml-64", Goal::TimesPeer(10.0)),
    ("capture-uml-64-lossless", Goal::TimesPeer(10.0)),
    ("capture-uml-64-loss", Goal::AtMost(0.0)),
    ("capture-uml-512-loss", Goal::AtMost(0.0)),
    ("capture-uml-1514-loss", Goal::AtMost(0.0)),
    ("capture-qemu-64", Goal::TimesPeer(10.0)),
    ("capture-qemu-64-lossless", Goal::TimesPeer(10.0)),
    ("capture-qemu-64-loss", Goal::AtMost(0.0)),
    ("capture-qemu-512-loss", Goal::AtMost(0.0)),
    ("capture-qemu-1514-loss", Goal::AtMost(0.0)),
    ("afxdp-64", Goal::TimesPeer(1.0)),
    ("afxdp-64-daemon", Goal::ShareOfPeer(0.5)),
    ("afxdp-64-cpu", Goal::ShareOfPeer(0.5)),
    ("afxdp-1514", Goal::TimesPeer(1.0)),
    ("afxdp-1514-daemon", Goal::ShareOfPeer(0.5)),
    ("afxdp-1514-cpu", Goal::ShareOfPeer(0.5)),
    ("afxdp-64-lent", Goal::TimesPeer(1.0)),
    ("afxdp-64-lent-cpu", Goal::ShareOfPeer(0.5)),
    ("afxdp-1514-lent", Goal::TimesPeer(1.0)),
    ("afxdp-1514-lent-cpu", Goal::ShareOfPeer(0.5)),
    // A copy that is not made must show where there is much to copy, and may cost nothing elsewhere.
    ("afxdp-group-64-daemon", Goal::ShareOfPeer(1.0)),
    ("afxdp-group-1514-daemon", Goal::ShareOfPeer(0.5)),
    ("afxdp-guest-64", Goal::TimesPeer(1.0)),
    ("afxdp-guest-64-daemon", Goal::ShareOfPeer(1.0)),
    ("afxdp-guest-1514", Goal::TimesPeer(1.0)),
    ("afxdp-guest-1514-daemon", Goal::ShareOfPeer(0.5)),
    // Every target's packets, at whatever the sender sends.
    ("targets-wire-64-loss", Goal::AtMost(0.0)),
    ("targets-wire-1514-loss", Goal::AtMost(0.0)),
    // 5 Mpps on one CPU.
    ("filters-10000-host", Goal::AtMost(200.0)),
    ("filters-10000-net", Goal::AtMost(200.0)),
    ("filters-10000-port", Goal::AtMost(200.0)),
    ("filters-10000-mixed", Goal::AtMost(200.0)),
    ("filters-10000-range", Goal::AtMost(200.0)),
    ("filters-10000-not", Goal::AtMost(200.0)),
    ("filters-10000-deliver", Goal::AtMost(200.0)),
    ("group-2-60-further", Goal::AtMost(5.0)),
    ("group-8-60-further", Goal::AtMost(5.0)),
    ("group-64-60-further", Goal::AtMost(5.0)),
    ("group-2-1514-further", Goal::AtMost(5.0)),
    ("group-8-1514-further", Goal::AtMost(5.0)),
    ("group-64-1514-further", Goal::AtMost(5.0)),
    ("group-2-imix-further", Goal::AtMost(5.0)),
    ("group-8-imix-further", Goal::AtMost(5.0)),
    ("group-64-imix-further", Goal::AtMost(5.0)),
    // The kernel's filter must save the daemon most of its work, and nothing that is wanted.
    ("early-thousandth-cpu-off", Goal::ShareOfPeer(0.5)),
    // The path keeps nothing for each flow.
    ("scale-flows-10000", Goal::ShareOfPeer(1.5)),
    // Only where there are as many pairs of CPUs.
    ("scale-queues-2", Goal::TimesPeer(1.8)),
    ("scale-queues-4", Goal::TimesPeer(3.6)),
    ("scale-queues-8", Goal::TimesPeer(7.2)),
    ("latency-host-cpu-idle-p99", Goal::AtMost(50.0)),
    ("latency-awake-cpu-idle-p99", Goal::AtMost(50.0)),
    ("latency-host-latency-idle-p99", Goal::AtMost(50.0)),
    ("handoff-60", Goal::TimesPeer(2.0)),
    ("handoff-1514", Goal::TimesPeer(1.5)),
    ("uml-reader-60", Goal::TimesPeer(0.95)),
    ("uml-reader-1514", Goal::TimesPeer(0.95)),
    ("idle-64", Goal::AtMost(1.0)),
    ("idle-64-uml", Goal::AtMost(1.0)),
    ("attach-1000-by-1", Goal::AtMost(10.0)),
    ("attach-1000-by-4", Goal::AtMost(10.0)),
    ("pcap-dispatch-60", Goal::ShareOfPeer(0.5)),
    ("pcap-dispatch-1514", Goal::ShareOfPeer(0.5)),
    ("pcap-tcpdump-60", Goal::ShareOfPeer(0.5)),
    ("pcap-tcpdump-1514", Goal::ShareOfPeer(0.5)),
    ("record-64-flat-loss", Goal::AtMost(0.0)),
    ("record-512-flat-loss", Goal::AtMost(0.0)),
    ("record-1400-flat-loss", Goal::AtMost(0.0)),
    ("record-imix-flat-loss", Goal::AtMost(0.0)),
    ("record-disk", Goal::TimesPeer(0.9)),
    ("record-disk-loss", Goal::AtMost(0.0)),
    ("record-disk-two", Goal::TimesPeer(0.9)),
    ("record-disk-two-loss", Goal::AtMost(0.0)),
    // What n2disk reaches with an FPGA's help.
    ("record-disk-core", Goal::AtLeast(8.3)),
    ("record-disk-core-whole", Goal::AtLeast(8.3)),
    ("record-index-1400", Goal::TimesPeer(0.9)),
    ("record-index-imix", Goal::TimesPeer(0.9)),
    ("record-index-64", Goal::TimesPeer(0.9)),
    ("replay-gap-busy-p50", Goal::ShareOfPeer(1.0)),
    ("replay-gap-busy-p99", Goal::ShareOfPeer(1.0)),
    ("replay-top-60", Goal::TimesPeer(1.0)),
    ("query-20g-cold", Goal::AtMost(1.0)),
    ("query-20g-warm", Goal::AtMost(1.0)),
    // What Menon's twin drivers were beside a guest's own way, in 2009.
    ("twin-guest-receives", Goal::TimesPeer(2.4)),
    ("twin-guest-sends", Goal::TimesPeer(2.4)),
    // As many system calls of a client's for a frame, but fewer of the switch's.
    ("switch-ring-60", Goal::AtLeast(20.0)),
    // 70 Gb/s.
    ("switch-ring-1514", Goal::AtLeast(5.78)),
    ("switch-direct-60", Goal::AtLeast(20.0)),
    ("switch-direct-1514", Goal::AtLeast(5.78)),
    ("switch-vhost-64", Goal::TimesPeer(1.0)),
    ("switch-vhost-64-ovs", Goal::TimesPeer(2.0)),
    ("switch-vhost-64-bridge", Goal::TimesPeer(10.0)),
    // One copy.
    ("switch-vhost-1514", Goal::TimesPeer(1.5)),
    ("switch-vhost-1514-ovs", Goal::TimesPeer(2.0)),
    ("switch-vhost-1514-bridge", Goal::TimesPeer(10.0)),
    ("switch-vde-1514", Goal::TimesPeer(2.0)),
    ("switch-vde-1514-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-plugs", Goal::TimesPeer(1.5)),
    ("switch-plugs-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-pairs-2-sockets", Goal::TimesPeer(1.5)),
    ("switch-pairs-2-sockets-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-pairs-2-module", Goal::TimesPeer(1.3)),
    ("switch-pairs-2-direct", Goal::TimesPeer(1.3)),
    ("switch-pairs-2-vhost", Goal::TimesPeer(5.0)),
    ("switch-pairs-2-sockets-udp", Goal::AtMost(0.0)),
    ("switch-pairs-2-module-udp", Goal::AtMost(0.0)),
    ("switch-pairs-2-direct-udp", Goal::AtMost(0.0)),
    ("switch-pairs-2-vhost-udp", Goal::AtMost(0.0)),
    ("switch-pairs-4-sockets", Goal::TimesPeer(1.5)),
    ("switch-pairs-4-sockets-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-pairs-4-module", Goal::TimesPeer(1.3)),
    ("switch-pairs-4-direct", Goal::TimesPeer(1.3)),
    ("switch-pairs-4-vhost", Goal::TimesPeer(5.0)),
    ("switch-pairs-4-sockets-udp", Goal::AtMost(0.0)),
    ("switch-pairs-4-module-udp", Goal::AtMost(0.0)),
    ("switch-pairs-4-direct-udp", Goal::AtMost(0.0)),
    ("switch-pairs-4-vhost-udp", Goal::AtMost(0.0)),
    ("switch-pairs-6-sockets", Goal::TimesPeer(1.5)),
    ("switch-pairs-6-sockets-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-pairs-6-module", Goal::TimesPeer(1.3)),
    ("switch-pairs-6-direct", Goal::TimesPeer(1.3)),
    ("switch-pairs-6-vhost", Goal::TimesPeer(5.0)),
    ("switch-pairs-6-sockets-udp", Goal::AtMost(0.0)),
    ("switch-pairs-6-module-udp", Goal::AtMost(0.0)),
    ("switch-pairs-6-direct-udp", Goal::AtMost(0.0)),
    ("switch-pairs-6-vhost-udp", Goal::AtMost(0.0)),
    ("switch-pairs-8-sockets", Goal::TimesPeer(1.5)),
    ("switch-pairs-8-sockets-cpu", Goal::ShareOfPeer(0.5)),
    ("switch-pairs-8-module", Goal::TimesPeer(1.3)),
    ("switch-pairs-8-direct", Goal::TimesPeer(1.3)),
    ("switch-pairs-8-vhost", Goal::TimesPeer(5.0)),
    ("switch-pairs-8-sockets-udp", Goal::AtMost(0.0)),
    ("switch-pairs-8-module-udp", Goal::AtMost(0.0)),
    ("switch-pairs-8-direct-udp", Goal::AtMost(0.0)),
    ("switch-pairs-8-vhost-udp", Goal::AtMost(0.0)),
    // Menon's figures 3.3 and 3.5.
    ("cutter", Goal::ShareOfPeer(1.3)),
    ("hlvi", Goal::TimesPeer(3.0)),
    ("hlvi-bare", Goal::TimesPeer(1.9)),
    // Menon's receive aggregation alone, and with ACKs; Mb/s per CPU is what is asked for.
    ("aggregate-guest-20-cpu", Goal::ShareOfPeer(0.69)),
    ("aggregate-container-20-cpu", Goal::ShareOfPeer(0.69)),
    ("aggregate-merging-guest-20-cpu", Goal::ShareOfPeer(0.69)),
    ("acks-guest-cpu", Goal::ShareOfPeer(0.59)),
    ("acks-merging-guest-cpu", Goal::ShareOfPeer(0.59)),
    ("acks-container-cpu", Goal::ShareOfPeer(0.59)),
    ("acks-slow-start-1024", Goal::ShareOfPeer(1.05)),
    ("acks-guest-price", Goal::ShareOfPeer(1.1)),
    ("acks-merging-guest-price", Goal::ShareOfPeer(1.1)),
    ("acks-container-price", Goal::ShareOfPeer(1.1)),
    // A flood that nothing can be merged of costs nothing, and neither do ACKs that are looked at.
    ("aggregate-flood-ring-130", Goal::ShareOfPeer(1.05)),
    ("aggregate-flood-ring-1514", Goal::ShareOfPeer(1.05)),
    ("aggregate-flood-guest-130", Goal::ShareOfPeer(1.05)),
    ("aggregate-flood-guest-1514", Goal::ShareOfPeer(1.05)),
    ("aggregate-flood-memory", Goal::AtMost(1024.0)),
    ("acks-only-ring", Goal::ShareOfPeer(1.05)),
    ("acks-only-guest", Goal::ShareOfPeer(1.05)),
    ("acks-only-guest-set", Goal::ShareOfPeer(1.05)),
    ("tcp-rr", Goal::TimesPeer(0.99)),
    ("tcp-rr-beside-p99", Goal::ShareOfPeer(1.05)),
    // No pair is slower than its slower end is among its like.
    ("switch-mixed-to-without", Goal::TimesPeer(1.0)),
    ("switch-mixed-from-without", Goal::TimesPeer(1.0)),
    ("switch-mixed-without-bridge", Goal::TimesPeer(1.0)),
    ("switch-mixed-to-without-bridge", Goal::TimesPeer(1.0)),
    ("switch-mixed-from-without-bridge", Goal::TimesPeer(1.0)),
    // Who keeps super-frames keeps its rate, but for processors that all share: those without need more of them.
    ("switch-mixed-change", Goal::TimesPeer(0.7)),
    ("switch-mixed-beside", Goal::TimesPeer(0.7)),
    ("switch-curve-1", Goal::TimesPeer(1.0)),
    ("switch-curve-2", Goal::TimesPeer(1.0)),
    ("switch-curve-3", Goal::TimesPeer(1.0)),
    ("switch-curve-4", Goal::TimesPeer(1.0)),
    ("switch-curve-5", Goal::TimesPeer(1.0)),
    ("switch-curve-6", Goal::TimesPeer(1.0)),
    ("switch-curve-7", Goal::TimesPeer(1.0)),
    ("switch-curve-1-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-2-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-3-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-4-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-5-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-6-ovs", Goal::TimesPeer(1.0)),
    ("switch-curve-7-ovs", Goal::TimesPeer(1.0)),
    // A port that says nothing costs a frame of others nothing.
    ("switch-many-1000-growth", Goal::ShareOfPeer(1.2)),
    ("switch-many-9000-growth", Goal::ShareOfPeer(2.0)),
    ("switch-many-1000-churn", Goal::AtMost(0.0)),
    // Figures 4.6 and 4.7 of Menon's dissertation: 9972 of 21159 cycles, 20089 of 35905. NB: beside a virtual guest; the one
    // here is traced. So the twin is to cost no more than a bridge, too.
    ("twin-parts-tx", Goal::ShareOfPeer(0.47)),
    ("twin-parts-rx", Goal::ShareOfPeer(0.56)),
    ("twin-parts-tx-bridge", Goal::ShareOfPeer(1.0)),
    ("twin-parts-rx-bridge", Goal::ShareOfPeer(1.0)),
    // Containers through the kernel instance are to be no slower than through a bridge.
    ("twin-containers", Goal::TimesPeer(1.0)),
    // Tables 5.1 and 5.2 of Menon's dissertation.
    ("context-guest-tx", Goal::TimesPeer(1.15)),
    ("context-guest-rx", Goal::TimesPeer(1.7)),
    ("context-rx-1", Goal::TimesPeer(1.7)),
    ("context-fair-equal-2", Goal::AtLeast(0.99)),
    ("context-fair-equal-8", Goal::AtLeast(0.99)),
    ("context-fair-equal-16", Goal::AtLeast(0.99)),
    ("context-fair-equal-32", Goal::AtLeast(0.99)),
    ("context-fair-mixed-2", Goal::AtLeast(0.98)),
    ("context-fair-mixed-8", Goal::AtLeast(0.98)),
    ("context-fair-mixed-16", Goal::AtLeast(0.98)),
    ("context-fair-mixed-32", Goal::AtLeast(0.98)),
    // One port with news among many costs what it costs among ten.
    ("context-news-10000-growth", Goal::AtMost(1.2)),
    ("twin-count-60-confined", Goal::AtMost(1.3)),
    ("twin-count-1514-confined", Goal::AtMost(1.3)),
    ("twin-first-60-confined", Goal::AtMost(1.3)),
    ("twin-first-1514-confined", Goal::AtMost(1.3)),
    ("twin-headers-60-confined", Goal::AtMost(1.3)),
    ("twin-headers-1514-confined", Goal::AtMost(1.3)),
    // Of a frame's whole way confinement is 15 per cent at most.
    ("twin-path-count-60", Goal::ShareOfPeer(1.15)),
    ("twin-path-count-1514", Goal::ShareOfPeer(1.15)),
    ("twin-path-headers-60", Goal::ShareOfPeer(1.15)),
    ("twin-path-headers-1514", Goal::ShareOfPeer(1.15)),
    // Table 5.3 of Menon's dissertation: 10.2 per cent of a processor with protection, 1.9 without.
    ("context-zero-copy-1514-validation", Goal::AtMost(9.0)),
    ("uplink-speed-vde-in-cpu", Goal::ShareOfPeer(0.5)),
    ("uplink-speed-vde-out-cpu", Goal::ShareOfPeer(0.5)),
    ("sandbox-call-connect", Goal::AtMost(30.0)),
    ("sandbox-call-send", Goal::AtMost(30.0)),
    ("sandbox-call-bind", Goal::AtMost(30.0)),
    ("sandbox-start", Goal::AtMost(20.0)),
    ("sandbox-start-offline", Goal::AtMost(20.0)),
    ("sandbox-start-net", Goal::AtMost(20.0)),
    ("sandbox-data", Goal::TimesPeer(0.99)),
    ("sandbox-threads-p99-floor", Goal::AtMost(1000.0)),
    ("sandbox-threads-spread-p99-floor", Goal::AtMost(1000.0)),
    // The wire gives 95.6 to a stream of TCP.
    ("uplink-puzzle-gso-gro-tcp-in", Goal::AtLeast(90.0)),
    ("uplink-puzzle-gso-gro-tcp-out", Goal::AtLeast(90.0)),
    ("uplink-puzzle-gso-nogro-tcp-in", Goal::AtLeast(90.0)),
    ("uplink-puzzle-gso-nogro-tcp-out", Goal::AtLeast(90.0)),
    ("uplink-puzzle-cut-gro-tcp-in", Goal::AtLeast(90.0)),
    ("uplink-puzzle-cut-gro-tcp-out", Goal::AtLeast(90.0)),
    ("uplink-puzzle-cut-nogro-tcp-in", Goal::AtLeast(90.0)),
    ("uplink-puzzle-cut-nogro-tcp-out", Goal::AtLeast(90.0)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Samples;

    #[test]
    fn a_figure_has_one_goal() {
        for (at, (name, _)) in GOALS.iter().enumerate() {
            assert!(
                GOALS[at + 1..].iter().all(|(other, _)| other != name),
                "{name}"
            );
        }
    }

    #[test]
    fn a_goal_is_judged_by_the_medians() {
        let samples = |value| {
            let mut samples = Samples::default();
            samples.push(value);
            samples
        };
        let mut figure = Figure {
            name: "handoff-60".into(),
            unit: "Mpps",
            ours: samples(50.0),
            peer: Some(("memif".into(), samples(20.0))),
            limit: None,
            note: String::new(),
        };
        let goal = Goal::of(&figure).unwrap();
        assert_eq!(goal.is_met(&figure), Some(true));
        assert_eq!(goal.value(&figure), Some(40.0));
        figure.peer = None;
        assert_eq!(goal.is_met(&figure), None);
        assert_eq!(Goal::AtMost(9.0).is_met(&figure), Some(false));
        assert_eq!(Goal::AtLeast(9.0).is_met(&figure), Some(true));
    }
}
