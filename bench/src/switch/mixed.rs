//! Four guests, of which two turn their offloads off while the others' stream runs.
//!
//! ```text
//!   0, 1: whole, with super-frames     eth0: virtio by vhost-user, our switch
//!   2, 3: cut, without                 vec0: the vector driver, a TAP of a Linux bridge
//! ```
//!
//! A switch that agrees with all its guests on one set of offloads has all of them as slow as the worst one.
//! Here a pair should be as fast as its slower end is among its like, and who keeps super-frames should not
//! notice the others.
//!
//! The vector driver cannot tell its TAP that it takes none any more: the TAP is told on the host, and
//! the kernel cuts before it.

use vnplug_e2e::UmlConfig;

use super::guests::{Guests, Lan};
use super::lans::{Lans, tap};
use crate::row::{Figure, Plan, Result, Samples};

const WHOLE: [usize; 2] = [0, 1];
const CUT: [usize; 2] = [2, 3];
const OURS: Lan = Lan {
    interface: "eth0",
    net: 1,
};
const BRIDGE: Lan = Lan {
    interface: "vec0",
    net: 2,
};

struct Site {
    guests: Guests,
    lans: Lans,
}

/// Gb/s on one network in one round.
#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Two whole guests, alone.
    whole: f64,
    /// The same while two others change, in the same time.
    changed: f64,
    /// Two cut guests, alone.
    cut: f64,
    /// From a whole one to a cut one, alone.
    to_cut: f64,
    /// From a cut one to a whole one, alone.
    from_cut: f64,
    /// Two whole guests, while the other two have a stream and are whole.
    beside_whole: f64,
    /// The same while those are cut.
    beside_cut: f64,
}

impl Site {
    fn new() -> Result<Self> {
        let count = WHOLE.len() + CUT.len();
        let lans = Lans::new(count)?;
        let guests = Guests::boot(&lans.lab, count, |guest| UmlConfig {
            kernel_args: lans.cards(guest).to_vec(),
            netns: Some(lans.netns.name().to_owned()),
            ..UmlConfig::default()
        })?;
        for lan in [OURS, BRIDGE] {
            guests.join(lan)?;
        }
        Ok(Self { guests, lans })
    }

    /// Turns the offloads of the cut guests on or off; nothing starts again.
    fn set(&self, lan: Lan, word: &str) -> Result<()> {
        for guest in CUT {
            let interface = lan.interface;
            let mut command = format!("ethtool -K {interface} tx {word} tso {word} gso {word}");
            if lan.interface == OURS.interface {
                command += &format!(" rx-gro-hw {word}");
            } else {
                let tap = tap(guest);
                self.lans
                    .netns
                    .exec(&["ethtool", "-K", &tap, "tx", word, "tso", word])?;
            }
            self.guests.ran(guest, &command)?;
        }
        Ok(())
    }

    fn rates(&self, lan: Lan, plan: &Plan) -> Result<Rates> {
        let streams = |flows: &[(usize, usize)], begun: &dyn Fn() -> Result<()>| {
            let rates = self.guests.streams(flows, lan, plan.time, begun);
            let rates = rates.map_err(|why| format!("{flows:?} on {}: {why}", lan.interface))?;
            let first = rates.first().copied();
            first.ok_or_else(|| crate::row::Error::from("no stream"))
        };
        let nothing = || Ok(());
        let ([a, b], [c, d]) = (WHOLE, CUT);
        let whole = streams(&[(a, b)], &nothing)?;
        let beside_whole = streams(&[(a, b), (c, d)], &nothing)?;
        let changed = streams(&[(a, b)], &|| self.set(lan, "off"))?;
        let rates = Rates {
            whole,
            changed,
            cut: streams(&[(c, d)], &nothing)?,
            to_cut: streams(&[(a, d)], &nothing)?,
            from_cut: streams(&[(c, b)], &nothing)?,
            beside_whole,
            beside_cut: streams(&[(a, b), (c, d)], &nothing)?,
        };
        self.set(lan, "on")?;
        Ok(rates)
    }
}

impl Rates {
    /// What the slower end of a mixed pair can among its like.
    fn slower(&self) -> f64 {
        self.whole.min(self.cut)
    }
}

/// Rates of pairs, and of the one that keeps its super-frames.
pub(crate) fn mixed(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let (mut ours, mut bridge) = (Vec::new(), Vec::new());
    for round in 1..=plan.rounds {
        for (lan, all, name) in [(OURS, &mut ours, "vNPlug"), (BRIDGE, &mut bridge, PEER)] {
            let rates = site.rates(lan, plan)?;
            eprintln!("  round {round}, {name}, Gb/s: {rates:.2?}");
            all.push(rates);
        }
    }
    let samples = |all: &[Rates], of: Of| all.iter().map(of).collect::<Samples>();
    let mut figures = Vec::new();
    for Measure {
        name,
        what,
        of,
        beside,
    } in MEASURES
    {
        let peers = [
            beside.map(|(peer, of)| ("", peer, samples(&ours, of))),
            Some(("-bridge", PEER, samples(&bridge, of))),
        ];
        for (suffix, peer, theirs) in peers.into_iter().flatten() {
            figures.push(Figure {
                name: format!("switch-mixed-{name}{suffix}"),
                unit: "Gb/s",
                ours: samples(&ours, of),
                peer: Some((peer.to_owned(), theirs)),
                limit: None,
                note: format!(
                    "{what}, one stream of TCP for {} s; four guests of User-mode Linux by vhost-user, two of \
                     which turned their offloads off while they ran (ethtool -K eth0 tx, tso, gso, \
                     rx-gro-hw)",
                    plan.time.as_secs_f64()
                ),
            });
        }
    }
    Ok(figures)
}

/// What is told of each round.
struct Measure {
    name: &'static str,
    what: &'static str,
    of: Of,
    /// What else of ours it should reach.
    beside: Option<(&'static str, Of)>,
}

/// One rate of a round.
type Of = fn(&Rates) -> f64;

const MEASURES: [Measure; 6] = [
    Measure {
        name: "with",
        what: "two guests with super-frames",
        of: |rates| rates.whole,
        beside: None,
    },
    Measure {
        name: "without",
        what: "two guests without",
        of: |rates| rates.cut,
        beside: None,
    },
    Measure {
        name: "to-without",
        what: "from a guest with super-frames to one without",
        of: |rates| rates.to_cut,
        beside: Some(("its slower end among its like", Rates::slower)),
    },
    Measure {
        name: "from-without",
        what: "from a guest without super-frames to one with",
        of: |rates| rates.from_cut,
        beside: Some(("its slower end among its like", Rates::slower)),
    },
    Measure {
        name: "change",
        what: "two guests with super-frames, while two others turn theirs off",
        of: |rates| rates.changed,
        beside: Some(("before", |rates| rates.whole)),
    },
    Measure {
        name: "beside",
        what: "two guests with super-frames, beside a stream of two without",
        of: |rates| rates.beside_cut,
        beside: Some(("beside two with", |rates| rates.beside_whole)),
    },
];
const PEER: &str = "Linux bridge, TAPs";
