//! Containers on a switch whose twin forwards in the kernel, beside the same on a Linux bridge.
//!
//! All containers are network namespaces with one end of a veth; the other ends are uplinks of our switch, or ports of
//! the bridge. Nobody cuts or merges on the way.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::scope;
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;
use vnplug_e2e::containers::{Containers, address, wire};
use vnplug_e2e::daemon::{Daemon, counted, value};

use crate::row::{Figure, Plan, Result, Samples};
use crate::streams;

/// Pairs of containers, each with a stream; none to all of the streams are upcalls.
const PAIRS: usize = 9;
const PEER: &str = "Linux bridge, veths";

pub(super) struct Site {
    pub(super) ours: Containers,
    daemon: Daemon,
    _bridge: Netns,
    pub(super) bridged: Vec<Netns>,
}

impl Site {
    pub(super) fn new(pairs: usize, options: &str) -> Result<Self> {
        let ours = Containers::new(2 * pairs)?;
        let switch = ours.switch(options, "");
        let daemon = Daemon::start(&ours.lab, Some(&ours.here), &["--switch", &switch])?;
        let (bridge, mut bridged) = (Netns::new()?, Vec::new());
        bridge.bridge("br0", &[])?;
        for number in 1..=2 * pairs {
            let netns = Netns::new()?;
            wire(&bridge, &netns, number)?;
            bridge.ip(&["link", "set", &format!("c{number}"), "master", "br0"])?;
            bridged.push(netns);
        }
        Ok(Self {
            ours,
            daemon,
            _bridge: bridge,
            bridged,
        })
    }

    /// What the kernel instance forwarded so far.
    pub(super) fn forwarded(&self) -> u64 {
        value(counted(&self.daemon.counters(), "source"), "twin_forwarded")
    }
}

/// Gb/s of payload of one stream of TCP in each pair, all together.
pub(super) fn tcp(containers: &[&Netns], time: Duration) -> Result<f64> {
    let mut ends = Vec::new();
    for (at, pair) in containers.chunks_exact(2).enumerate() {
        let to = format!("{}:7000", address(2 * at + 2));
        let listener = pair[1].enter(|| TcpListener::bind(&to))??;
        let sender = pair[0].enter(|| TcpStream::connect(&to))??;
        ends.push((sender, listener.accept()?.0));
    }
    let begin = Instant::now() + WARM_UP;
    let end = begin + time;
    let bytes = scope(|threads| {
        let mut takers = Vec::new();
        for (sender, mut taker) in ends {
            let over = move || Instant::now() > end;
            threads.spawn(move || streams::fill(sender, over).map_err(|error| error.to_string()));
            takers.push(threads.spawn(move || {
                let taken =
                    streams::drain(&mut taker, begin).and_then(|_| streams::drain(&mut taker, end));
                taken.map_err(|error| error.to_string())
            }));
        }
        let all = takers.into_iter().map(|taker| taker.join());
        let all = all.map(|it| -> Result<u64> { Ok(it.map_err(|_| "a receiver panicked")??) });
        all.sum::<Result<u64>>()
    })?;
    Ok(bytes as f64 * 8.0 / time.as_secs_f64() / 1e9)
}

/// Microseconds of a request of one byte and its answer, by TCP.
pub(super) fn round_trip(containers: &[&Netns], time: Duration) -> Result<f64> {
    let to = format!("{}:7001", address(2));
    let listener = containers[1].enter(|| TcpListener::bind(&to))??;
    let mut asker = containers[0].enter(|| TcpStream::connect(&to))??;
    let answerer = listener.accept()?.0;
    for end in [&asker, &answerer] {
        end.set_nodelay(true)?;
    }
    // Whatever happens, the asker is dropped, so that the other ends.
    scope(move |threads| {
        threads.spawn(move || streams::answer(answerer).map_err(|error| error.to_string()));
        let (begin, mut count, mut byte) = (Instant::now(), 0_u64, [0]);
        while begin.elapsed() < time {
            asker.write_all(&byte)?;
            asker.read_exact(&mut byte)?;
            count += 1;
        }
        let mean = begin.elapsed().as_secs_f64() * 1e6 / count as f64;
        Ok(mean)
    })
}

/// One pair: a stream, and requests; by the kernel instance, by the daemon, and by a bridge.
pub(crate) fn containers(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new(1, "/twin=on")?;
    let plain = Site::new(1, "")?;
    let arms = [&site.ours.all, &plain.ours.all, &site.bridged];
    let arms = arms.map(|all| all.iter().collect::<Vec<_>>());
    let mut rates: [Samples; 3] = Default::default();
    let mut trips = rates.clone();
    for round in 1..=plan.rounds {
        for (at, arm) in arms.iter().enumerate() {
            rates[at].push(tcp(arm, plan.time)?);
            trips[at].push(round_trip(arm, plan.time)?);
        }
        let told = |all: &[Samples; 3]| all.each_ref().map(Samples::last);
        eprintln!(
            "  round {round}, twin, daemon, bridge: {:.2?} Gb/s, {:.1?} us",
            told(&rates),
            told(&trips)
        );
    }
    if site.forwarded() < 1000 {
        return Err("the kernel instance forwarded nothing".into());
    }
    let figure = |name: &str, unit, ours: &Samples, peer: &Samples, note: &str| Figure {
        name: name.to_owned(),
        unit,
        ours: ours.clone(),
        peer: Some((PEER.to_owned(), peer.clone())),
        limit: None,
        note: format!(
            "{note}, between two network namespaces, for {} s",
            plan.time.as_secs_f64()
        ),
    };
    let (stream, request) = (
        "one stream of TCP",
        "requests of one byte by TCP, one after the other",
    );
    Ok(vec![
        figure(
            "twin-containers",
            "Gb/s",
            &rates[0],
            &rates[2],
            &format!("{stream}, by the kernel instance"),
        ),
        figure(
            "twin-containers-daemon",
            "Gb/s",
            &rates[1],
            &rates[2],
            &format!("{stream}, by the daemon, without a twin"),
        ),
        figure(
            "twin-containers-rtt",
            "us",
            &trips[0],
            &trips[2],
            &format!("{request}, by the kernel instance"),
        ),
        figure(
            "twin-containers-daemon-rtt",
            "us",
            &trips[1],
            &trips[2],
            &format!("{request}, by the daemon, without a twin"),
        ),
    ])
}

/// Nine pairs, of which none to all are forwarded by the daemon: Menon's figure 4.9 in kind.
pub(crate) fn upcalls(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new(PAIRS, "/twin=on")?;
    let set = |pair: usize, setting: &str| -> Result<()> {
        // A port with a rule is the daemon's, though the rule keeps nothing from this pair.
        let port = format!("{}/port{}", site.ours.here.name(), 2 * pair + 1);
        match site.daemon.vnplug(&["switch", "set", &port, setting]) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    };
    let all: Vec<&Netns> = site.ours.all.iter().collect();
    let bridged: Vec<&Netns> = site.bridged.iter().collect();
    let mut rates: Vec<Samples> = vec![Samples::default(); PAIRS + 1];
    let mut bridge = Samples::default();
    for round in 1..=plan.rounds {
        for (upcalls, rates) in rates.iter_mut().enumerate() {
            if upcalls > 0 {
                set(upcalls - 1, "isolated=yes")?;
            }
            rates.push(tcp(&all, plan.time)?);
        }
        for pair in 0..PAIRS {
            set(pair, "isolated=no")?;
        }
        bridge.push(tcp(&bridged, plan.time)?);
        let told: Vec<f64> = rates.iter().map(Samples::last).collect();
        eprintln!(
            "  round {round}, 0 to {PAIRS} of {PAIRS} by upcalls: {told:.2?}, bridge {:.2} Gb/s",
            bridge.last()
        );
    }
    let figure = |(upcalls, ours): (usize, Samples)| Figure {
        name: format!("twin-upcalls-{upcalls}"),
        unit: "Gb/s",
        ours,
        peer: Some((PEER.to_owned(), bridge.clone())),
        limit: None,
        note: format!(
            "{PAIRS} pairs of network namespaces, one stream of TCP in each for {} s, all together; the frames of \
             {upcalls} of them go by the daemon, the others by the kernel instance",
            plan.time.as_secs_f64()
        ),
    };
    Ok(rates.into_iter().enumerate().map(figure).collect())
}

/// How long a stream runs before it is measured.
const WARM_UP: Duration = Duration::from_millis(200);
