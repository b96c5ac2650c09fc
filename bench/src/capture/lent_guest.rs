//! From the wire into a QEMU guest without a copy by the daemon, beside the same guest with copies.
//!
//! ```text
//!            ┌ far0 ── wire0, arena=vm ── packet memory ═══════════╗ a device
//!   sender ──┤ far1 ── wire1 ── packet memory ── copy ── arena ════╬═ one guest, three readers
//!            └ far2 ── wire2 ── packet memory ── copy ── ring ═════╝ its pool
//! ```
//!
//! All three are `af_xdp` sources of one daemon, and the readers are the same loop: it looks at the
//! header and the first bytes of each packet where it lies. In a turn frames go into one wire only. A
//! fourth wire has a bare loop over an AF_XDP socket on the host: what is left for the daemon when it
//! forgets each frame.

use std::process::Command;

use vnplug_e2e::attached::plug;
use vnplug_e2e::daemon::{Daemon, guest_program, label, value};
use vnplug_e2e::{Qemu, QemuConfig, accel_probe};
use vnplug_ring::control::Counted;

use super::{Series, UNHEARD, WARM_UP, Way, frames, line_frames, line_rate, unheard};
use crate::pcap::{BARE, IN_PLACE, image};
use crate::row::{Figure, Plan, Result, Samples};
use crate::uml::serve;
use crate::wire::{Load, Wire};
use crate::{limit, sys};

/// Rate and loss flat out, and processor time at a rate that all keep up with.
pub(crate) fn lent_to_guest(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        [1, 2, 3, UNHEARD]
            .into_iter()
            .try_for_each(|number| wire.add(number))?;
        let netns = Some(&wire.netns);
        let sources = ["wire0=af_xdp,fallback=no,arena=vm"]
            .into_iter()
            .chain(["wire1=af_xdp,fallback=no", "wire2=af_xdp,fallback=no"]);
        let args: Vec<&str> = sources.flat_map(|it| ["--source", it]).collect();
        let daemon = Daemon::start(&wire.lab, netns, &args)?;
        let accel = accel_probe();
        let config = QemuConfig {
            image: image(&wire.lab)?.file(guest_program()?, "/usr/bin/vnplug", 0o755),
            accel: Some(accel),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&wire.lab, config)?;
        let groups = ["--group", "lent=wire0", "--group", "copied=wire1,32M"];
        let more = [&["--pool", "64M"], &groups[..]].concat();
        let said = plug(&daemon, &guest, "bench", &more)?;
        if !said.contains("packet memory of wire0") {
            return Err(format!("wire0 does not lend its packet memory: {said}").into());
        }
        let _agent = serve(&guest)?;
        let way = |far, device: &str| {
            Way::new(far, Some(&daemon)).in_guest(&guest, "", &format!("{IN_PLACE}{device}"))
        };
        let bare = Command::new(std::env::current_exe()?);
        let mut ways = [
            way("far0", "host:wire0/lent")?,
            way("far1", "host:wire1/copied")?,
            way("far2", "host:wire2")?,
            Way::new("far3", None).on_host(netns, bare, &format!("{BARE}wire3"))?,
        ];
        for way in &mut ways {
            way.turn(&wire, WARM_UP, 64, Load::Steady(WARM_UP))?;
        }
        let mut figures = Vec::new();
        for size in [64, 1514] {
            let (mut sides, mut sender): ([Side; 4], Samples) = Default::default();
            let load = Load::Steady(line_rate(size));
            for round in 1..=plan.rounds {
                sender.push(unheard(&wire, frames(plan, size), size, load)?);
                for (way, (side, name)) in ways.iter_mut().zip(sides.iter_mut().zip(NAMES)) {
                    let turn = way.turn(&wire, frames(plan, size), size, load)?;
                    eprintln!("  round {round}, {size} B: {name} {turn}");
                    side.full.push(&turn);
                    let frames = line_frames(plan, PPS);
                    let turn = way.turn(&wire, frames, size, Load::Steady(PPS))?;
                    eprintln!("  round {round}, {size} B, {PPS} packets/s: {name} {turn}");
                    side.paced.push(&turn);
                }
            }
            figures.extend(compared(size, &sides, &sender, accel.name()));
        }
        let counters = daemon.counters();
        let of = |it: &&Counted| it.kind == "port" && label(it, "group") == "lent";
        let (lent, copies) = counters
            .iter()
            .filter(of)
            .fold((0, 0), |(lent, copies), it| {
                (
                    lent + value(it, "arena_lent"),
                    copies + value(it, "arena_copies"),
                )
            });
        match copies {
            0 if lent > 0 => Ok(figures),
            _ => Err(format!("{copies} frames were copied, {lent} were not").into()),
        }
    })
}

/// One way's turns, flat out and at [`PPS`].
#[derive(Default)]
struct Side {
    full: Series,
    paced: Series,
}

fn compared(
    size: usize,
    [lent, copied, private, bare]: &[Side; 4],
    sender: &Samples,
    accel: &str,
) -> Vec<Figure> {
    let readers = format!(
        "readers of one guest of QEMU ({accel}) look at the header and 16 bytes of each packet where \
         it lies, by Port::next_view; ours in the packet memory of an af_xdp source (arena=vm, native \
         XDP)"
    );
    let full = format!("{size}-byte frames flat out, at most 10 Gbit/s, on a veth; {readers}");
    let paced = format!("{size}-byte frames, {PPS} per second, on a veth; {readers}");
    let [_, in_arena, in_ring, loop_alone] = NAMES;
    let figure =
        |suffix: &str, unit, note: &String, ours: &Samples, (peer, theirs): Peer<'_>| Figure {
            name: format!("afxdp-guest-{size}{suffix}"),
            unit,
            ours: ours.clone(),
            peer: Some((peer.to_owned(), theirs.clone())),
            limit: None,
            note: note.clone(),
        };
    let mut figures = Vec::new();
    for (suffix, name, peer) in [("", in_arena, copied), ("-private", in_ring, private)] {
        let rates = (&lent.full.rate, (name, &peer.full.rate));
        figures
            .push(figure(suffix, "Mpps", &full, rates.0, rates.1).limited(limit::SENDER, sender));
        let (ours, theirs) = (&lent.full.lost, &peer.full.lost);
        let suffixed = |what: &str| format!("{suffix}-{what}");
        figures.push(figure(
            &suffixed("loss"),
            "% lost",
            &full,
            ours,
            (name, theirs),
        ));
        let note = format!("{paced}; processor time of the daemon");
        let (ours, theirs) = (&lent.paced.daemon_cost, &peer.paced.daemon_cost);
        figures.push(
            figure(&suffixed("daemon"), COST, &note, ours, (name, theirs))
                .limited(loop_alone, &bare.paced.cost),
        );
        let note = format!("{paced}; processor time of the daemon and of the whole guest");
        let (ours, theirs) = (&lent.paced.cost, &peer.paced.cost);
        figures.push(figure(&suffixed("cpu"), COST, &note, ours, (name, theirs)));
    }
    figures
}

type Peer<'a> = (&'static str, &'a Samples);

const NAMES: [&str; 4] = [
    "packet memory",
    "a group with copies",
    "a private ring",
    "a bare AF_XDP loop",
];
const COST: &str = "CPU s/Mpkt";
/// Frames per second, which readers keep up with beside the sender.
const PPS: u64 = 200_000;
