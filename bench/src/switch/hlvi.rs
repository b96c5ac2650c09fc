//! What a guest gains whose card cuts and sums nothing: a stream of TCP from it to a wire that can all of that, or less.
//!
//! The guest's program sends a file (`sendfile`), as Menon's did (netperf's `TCP_SENDFILE`, and Apache): where its card
//! takes pieces (`sg`), its bytes are copied nowhere in the guest. Where it does not, as in the arms `own`, the guest's kernel copies them
//! on their way into the socket. One pair of arms writes instead, and copies them once in any case.

use super::stages::{Site, Way};
use super::talk::Talk;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// One way to send.
struct Arm {
    name: &'static str,
    way: Way,
    /// What the guest's card, and the wire's, do not offer; `ethtool -K` of those features.
    guest_lacks: &'static [&'static str],
    wire_lacks: &'static [&'static str],
    /// The guest writes, and does not send a file.
    writes: bool,
}

const fn arm(name: &'static str, way: Way) -> Arm {
    Arm {
        name,
        way,
        guest_lacks: &[],
        wire_lacks: &[],
        writes: false,
    }
}

/// A figure: its name, the arms of ours and of the peer, and what that is.
type Beside = (&'static str, &'static str, &'static str, &'static str);

/// As Menon's figures 3.3, 3.5 and 3.6 have them.
const ARMS: [Arm; 9] = [
    Arm {
        guest_lacks: FEATURES,
        ..arm("own", Way::Ours)
    },
    arm("whole", Way::Ours),
    Arm {
        wire_lacks: &["tso", "gso"],
        ..arm("sg-csum", Way::Ours)
    },
    Arm {
        wire_lacks: &["tso", "gso", "sg"],
        ..arm("csum", Way::Ours)
    },
    Arm {
        wire_lacks: FEATURES,
        ..arm("bare", Way::Ours)
    },
    Arm {
        guest_lacks: FEATURES,
        writes: true,
        ..arm("own-write", Way::Ours)
    },
    Arm {
        writes: true,
        ..arm("write", Way::Ours)
    },
    arm("bridge", Way::Bridge),
    arm("vde", Way::Vde),
];
const FIGURES: [Beside; 8] = [
    ("hlvi", "whole", "own", OWN),
    ("hlvi-sg-csum", "sg-csum", "own", OWN),
    ("hlvi-csum", "csum", "own", OWN),
    ("hlvi-bare", "bare", "own", OWN),
    (
        "hlvi-write",
        "write",
        "own-write",
        "ours, the guest cuts and sums, and writes",
    ),
    ("hlvi-file", "whole", "write", "ours, the guest writes"),
    (
        "hlvi-bridge",
        "whole",
        "bridge",
        "the same guest, TAP on a bridge",
    ),
    ("hlvi-vde", "whole", "vde", "the same guest, vde_switch"),
];

/// The same by an uplink that takes frames of the wire alone, so that the switch cuts and sums.
const XDP_ARMS: [Arm; 3] = [
    // The kernel cuts and sums, last.
    Arm {
        wire_lacks: FEATURES,
        ..arm("bare", Way::Ours)
    },
    arm("xdp", Way::Xdp),
    Arm {
        guest_lacks: FEATURES,
        ..arm("xdp-own", Way::Xdp)
    },
];
const XDP_FIGURES: [Beside; 2] = [
    (
        "hlvi-xdp",
        "xdp",
        "bare",
        "ours, uplink by af_packet, for which the kernel cuts",
    ),
    ("hlvi-xdp-own", "xdp", "xdp-own", OWN),
];

/// Rates and processor time by what cards offer.
pub(crate) fn hlvi(plan: &Plan) -> Result<Vec<Figure>> {
    measured(&Site::new()?, &ARMS, &FIGURES, plan)
}

/// The same by uplinks of two kinds.
pub(crate) fn xdp(plan: &Plan) -> Result<Vec<Figure>> {
    measured(&Site::with_xdp()?, &XDP_ARMS, &XDP_FIGURES, plan)
}

fn measured(site: &Site, arms: &[Arm], figures: &[Beside], plan: &Plan) -> Result<Vec<Figure>> {
    let mut all: Vec<_> = arms
        .iter()
        .map(|_| (Samples::default(), Samples::default()))
        .collect();
    for round in 1..=plan.rounds {
        for (arm, (rates, costs)) in arms.iter().zip(&mut all) {
            site.offers(arm.way, arm.guest_lacks, arm.wire_lacks)?;
            let to = arm.way.far_address();
            let talk = match arm.writes {
                true => Talk::Send(to),
                false => Talk::SendFile(to),
            };
            let bulk = site.guests.gives(&talk, &site.far, plan.time, || {
                let switch = site.switch(arm.way).map(cpu_time).transpose()?;
                Ok(switch.unwrap_or_default() + site.guests.cpu_time())
            })?;
            rates.push(bulk.gbps);
            costs.push(bulk.cpu_s);
            let (name, gbps, cpu_s) = (arm.name, bulk.gbps, bulk.cpu_s);
            eprintln!("  round {round}, {name}: {gbps:.2} Gb/s, {cpu_s:.2} CPU s per GB");
        }
    }
    let of = |name: &str| {
        let at = arms.iter().position(|arm| arm.name == name);
        at.map(|at| &all[at]).ok_or("there is no such arm")
    };
    let mut told = Vec::new();
    for (name, ours, theirs, peer) in figures {
        let (ours, theirs) = (of(ours)?, of(theirs)?);
        for (suffix, unit, ours, theirs) in [
            ("", "Gb/s", &ours.0, &theirs.0),
            ("-cpu", "CPU s per GB", &ours.1, &theirs.1),
        ] {
            told.push(Figure {
                name: format!("{name}{suffix}"),
                unit,
                ours: ours.clone(),
                peer: Some(((*peer).to_owned(), theirs.clone())),
                limit: None,
                note: NOTE.to_owned(),
            });
        }
    }
    Ok(told)
}

/// All that a card may offer a sender.
const FEATURES: &[&str] = &["tso", "gso", "sg", "tx"];
const OWN: &str = "ours, the guest cuts and sums";
const NOTE: &str = "one stream of TCP from a guest of User-mode Linux by vhost-user over the switch to a veth, whose card \
     offers all, all but TSO, checksums only, or nothing, or by an AF_XDP uplink, for which the switch cuts and sums; the \
     guest's program sends a file (but where the name says that it writes); beside the same guest whose own card offers \
     nothing; processor time of the guest and the switch (of a bridge: of the guest's process, in which it forwards)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_its_arms_and_every_arm_a_figure() {
        for (arms, figures) in [(&ARMS[..], &FIGURES[..]), (&XDP_ARMS, &XDP_FIGURES)] {
            let used: Vec<_> = figures.iter().flat_map(|it| [it.1, it.2]).collect();
            let names: Vec<_> = arms.iter().map(|arm| arm.name).collect();
            assert!(used.iter().all(|name| names.contains(name)), "{used:?}");
            assert!(names.iter().all(|name| used.contains(name)), "{names:?}");
        }
    }
}
