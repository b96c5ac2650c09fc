//! Plots of the switch, and of offloads.

use super::super::Panel::{Dots as D, Lines as L, Stacks as S};
use super::super::Plot;
use super::super::lines::Lines;
use super::super::lines::Side::{Ours, Peer};
use super::super::stacks::Stacks;
use super::{curve, dots};

/// Where the time of one stream goes, in one direction.
const fn by_group(title: &'static str, begins: &'static str) -> Stacks {
    Stacks {
        title,
        begins,
        parts: &[
            ("per-byte", "#0072b2"),
            ("non-proto", "#d55e00"),
            ("netback", "#009e73"),
            ("netfront", "#8fd9b6"),
            ("tcp-rx", "#f0e442"),
            ("tcp-tx", "#e69f00"),
            ("buffer", "#cc79a7"),
            ("driver", "#56b4e9"),
            ("hypervisor", "#999999"),
            ("misc", "#cccccc"),
            ("other", "#222222"),
        ],
        unit: "% of the time",
        whole: ("-cpu", "CPU s per GB"),
    }
}

pub(super) const PLOTS: &[Plot] = &[
    Plot {
        name: "switch-pairs",
        title: "Guests in pairs on a switch, by number of guests",
        panels: &[
            &[
                L(Lines {
                    title: "TCP, all pairs together",
                    over: "guests",
                    unit: "Gb/s",
                    log: false,
                    reach: 0.0,
                    curves: &[
                        curve("vhost-user", "switch-pairs-{}-vhost", Ours),
                        curve("direct mode", "switch-pairs-{}-direct", Ours),
                        curve("vnplug://", "switch-pairs-{}-module", Ours),
                        curve("sockets", "switch-pairs-{}-sockets", Ours),
                        curve("vde_switch", "switch-pairs-{}-sockets", Peer),
                    ],
                    levels: &[],
                }),
                L(Lines {
                    title: "Processor time of the switch",
                    over: "guests",
                    unit: "CPU s per GB",
                    log: false,
                    reach: 0.0,
                    curves: &[
                        curve("vhost-user", "switch-pairs-{}-vhost-cpu", Ours),
                        curve("direct mode", "switch-pairs-{}-direct-cpu", Ours),
                        curve("vnplug://", "switch-pairs-{}-module-cpu", Ours),
                        curve("sockets", "switch-pairs-{}-sockets-cpu", Ours),
                        curve("vde_switch", "switch-pairs-{}-sockets-cpu", Peer),
                    ],
                    levels: &[],
                }),
            ],
            &[L(Lines {
                title: "More pairs: vhost-user beside a Linux bridge",
                over: "pairs",
                unit: "Gb/s",
                log: false,
                reach: 0.0,
                curves: &[
                    curve("vNPlug", "switch-curve-{}", Ours),
                    curve("bridge, TAPs", "switch-curve-{}", Peer),
                ],
                levels: &[],
            })],
        ],
    },
    Plot {
        name: "aggregate",
        title: "Segments of a wire merged for their receiver, by the most that become one",
        panels: &[&[
            L(Lines {
                title: "Processor time (as Menon's figure 3.9)",
                over: "segments",
                unit: "CPU s per GB",
                log: false,
                reach: 0.0,
                curves: &[
                    curve("guest", "aggregate-guest-{}-cpu", Ours),
                    curve("its gro=off", "aggregate-guest-{}-cpu", Peer),
                    curve("container", "aggregate-container-{}-cpu", Ours),
                    curve("its --gro off", "aggregate-container-{}-cpu", Peer),
                ],
                levels: &[],
            }),
            L(Lines {
                title: "Rate",
                over: "segments",
                unit: "Gb/s",
                log: false,
                reach: 0.0,
                curves: &[
                    curve("guest", "aggregate-guest-{}", Ours),
                    curve("its gro=off", "aggregate-guest-{}", Peer),
                    curve("container", "aggregate-container-{}", Ours),
                    curve("its --gro off", "aggregate-container-{}", Peer),
                ],
                levels: &[],
            }),
        ]],
    },
    Plot {
        name: "acks-slow-start",
        title: "Short transfers to a container: segments merged or not, and ACKs expanded",
        panels: &[&[
            L(Lines {
                title: "From slirp, which counts ACKs",
                over: "KiB",
                unit: "ms",
                log: false,
                reach: 0.0,
                curves: &[
                    curve("--gro off", "acks-slow-start-{}", Peer),
                    curve("--gro 44", "acks-slow-start-{}-as-is", Ours),
                    curve("--acks expand", "acks-slow-start-{}", Ours),
                ],
                levels: &[],
            }),
            L(Lines {
                title: "From Linux, which counts bytes",
                over: "KiB",
                unit: "ms",
                log: false,
                reach: 0.0,
                curves: &[
                    curve("--gro off", "acks-slow-start-linux-{}", Peer),
                    curve("--gro 44", "acks-slow-start-linux-{}-as-is", Ours),
                    curve("--acks expand", "acks-slow-start-linux-{}", Ours),
                ],
                levels: &[],
            }),
        ]],
    },
    Plot {
        name: "hlvi",
        title: "A guest whose card cuts and sums nothing, and others (as Menon's figures 3.3, 3.5 and 3.6)",
        panels: &[
            &[D(dots("To a wire", &["hlvi"], "Gb/s"))],
            &[D(dots("Processor time", &["hlvi"], "CPU s per GB"))],
        ],
    },
    Plot {
        name: "tcp-stage",
        title: "Where the time of one stream of TCP goes: guest, switch and host kernel",
        panels: &[
            &[S(by_group(
                "From the guest to the wire (as Menon's figure 2.7)",
                "tcp-stage-tx-",
            ))],
            &[S(by_group(
                "From the wire to the guest (as Menon's figure 2.8)",
                "tcp-stage-rx-",
            ))],
        ],
    },
    Plot {
        name: "uplink",
        title: "A switch's uplink of 100 Mbit/s: vNPlug beside vde_pcapplug",
        panels: &[
            &[D(dots(
                "TCP, in one direction and in both at once",
                &["uplink-puzzle-"],
                "Mb/s",
            ))],
            &[D(dots(
                "UDP at 95 Mb/s: lost",
                &["uplink-puzzle-"],
                "% of packets",
            ))],
        ],
    },
    Plot {
        name: "uplink-speed",
        title: "A switch's uplink without a limit",
        panels: &[
            &[D(dots("TCP", &["uplink-speed-"], "Gb/s").by_magnitude())],
            &[D(dots(
                "Processor time",
                &["uplink-speed-"],
                "CPU s per GB",
            ))],
        ],
    },
];
