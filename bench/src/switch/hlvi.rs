//! What a guest gains whose card cuts and sums nothing: a stream of TCP from it to a wire that can all of that, or less.

use super::stages::{Site, Way};
use super::talk::Talk;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// One way to send: what of it is measured.
struct Arm {
    /// The figure's name, and what it is beside.
    name: &'static str,
    peer: Peer,
    way: Way,
    /// What the guest's card, and the wire's, do not offer; `ethtool -K` of those features.
    guest_lacks: &'static [&'static str],
    wire_lacks: &'static [&'static str],
    /// The guest sends a file and copies nothing, or writes.
    is_file: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// It is what others are beside.
    None,
    /// The guest that does all itself.
    Own,
    /// The guest with a card that does it for him.
    Whole,
}

const ARM: Arm = Arm {
    name: "",
    peer: Peer::Own,
    way: Way::Ours,
    guest_lacks: &[],
    wire_lacks: &[],
    is_file: false,
};

/// As Menon's figures 3.3, 3.5 and 3.6 have them.
const ARMS: [Arm; 8] = [
    Arm {
        name: "own",
        peer: Peer::None,
        guest_lacks: FEATURES,
        ..ARM
    },
    Arm {
        name: "hlvi",
        ..ARM
    },
    Arm {
        name: "hlvi-sg-csum",
        wire_lacks: &["tso", "gso"],
        ..ARM
    },
    Arm {
        name: "hlvi-csum",
        wire_lacks: &["tso", "gso", "sg"],
        ..ARM
    },
    Arm {
        name: "hlvi-bare",
        wire_lacks: FEATURES,
        ..ARM
    },
    Arm {
        name: "hlvi-file",
        peer: Peer::Whole,
        is_file: true,
        ..ARM
    },
    Arm {
        name: "hlvi-bridge",
        peer: Peer::Whole,
        way: Way::Bridge,
        ..ARM
    },
    Arm {
        name: "hlvi-vde",
        peer: Peer::Whole,
        way: Way::Vde,
        ..ARM
    },
];

/// Rates and processor time by what cards offer.
pub(crate) fn hlvi(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut all = [(); ARMS.len()].map(|()| (Samples::default(), Samples::default()));
    for round in 1..=plan.rounds {
        for (arm, (rates, costs)) in ARMS.iter().zip(&mut all) {
            site.offers(arm.guest_lacks, arm.wire_lacks)?;
            let to = arm.way.far_address();
            let talk = if arm.is_file {
                Talk::SendFile(to)
            } else {
                Talk::Send(to)
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
    let of = |peer| {
        ARMS.iter()
            .position(|arm| arm.peer == peer)
            .unwrap_or_default()
    };
    let (own, whole) = (&all[of(Peer::None)], &all[of(Peer::Own)]);
    let mut figures = Vec::new();
    for (arm, it) in ARMS.iter().zip(&all) {
        // Others are the peers of ours, never the other way round.
        let is_other = arm.way != Way::Ours;
        let (ours, peer, theirs) = match arm.peer {
            Peer::None => continue,
            Peer::Own => (it, "ours, the guest cuts and sums", own),
            Peer::Whole if is_other => (whole, OTHERS[usize::from(arm.way == Way::Vde)], it),
            Peer::Whole => (it, "ours, the guest writes", whole),
        };
        for (suffix, unit, ours, theirs) in [
            ("", "Gb/s", &ours.0, &theirs.0),
            ("-cpu", "CPU s per GB", &ours.1, &theirs.1),
        ] {
            figures.push(Figure {
                name: format!("{}{suffix}", arm.name),
                unit,
                ours: ours.clone(),
                peer: Some((peer.to_owned(), theirs.clone())),
                limit: None,
                note: NOTE.to_owned(),
            });
        }
    }
    Ok(figures)
}

/// All that a card may offer a sender.
const FEATURES: &[&str] = &["tso", "gso", "sg", "tx"];
const OTHERS: [&str; 2] = [
    "the same guest, TAP on a bridge",
    "the same guest, vde_switch",
];
const NOTE: &str = "one stream of TCP from a guest of User-mode Linux by vhost-user over the switch to a veth, whose card \
     offers all, all but TSO, checksums only, or nothing; beside the same guest whose own card offers nothing; \
     processor time of the guest and the switch (of a bridge: of the guest's process, in which it forwards)";
