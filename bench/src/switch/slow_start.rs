//! What merging costs a sender that counts ACKs, and whether ACKs that are restored give it back.
//!
//! ```text
//!   server ── slirp ── vde_plug ─────── port 1 ┐ delay: each is given      our switch ── vnplug nic ── container
//!   server ── Linux ── vde_plug2tap ─── port 2 ┘ what it is given later
//! ```
//!
//! slirp's TCP lets its window grow by a segment for each ACK, as BSD's did; Linux counts the bytes that an ACK is
//! for, and has several ways to control congestion. All begin anew for each transfer. The delay is on the way of the
//! ACKs, so that the container's port, which has none, merges.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread::scope;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_tcp_congestion;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Running, Station};

use super::talk::{AGAIN, Tcp};
use crate::row::{Figure, Plan, Result, Samples};

/// What is moved at once.
#[derive(Clone, Copy)]
struct Load {
    /// Transfers beside each other, by a connection each.
    count: usize,
    /// KiB of each of them.
    kib: usize,
}

const SHORT: [Load; 4] = [one(64), one(128), one(256), one(1024)];
const LONG: [Load; 4] = [
    one(256),
    one(1024),
    one(10 << 10),
    Load {
        count: 4,
        kib: 2560,
    },
];

const fn one(kib: usize) -> Load {
    Load { count: 1, kib }
}

/// How the container's interface merges; what is compared with comes first.
const ARMS: [&[&str]; 3] = [
    &["--gro", "off"],
    &["--gro", "44"],
    &["--gro", "44", "--acks", "expand"],
];

struct Site {
    daemon: Daemon,
    linux: Station,
    lab: Lab,
    _slirp: Running,
}

/// Whose TCP sends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sender {
    Slirp,
    /// By this control of congestion, or the machine's default.
    Linux(Option<&'static str>),
}

/// What was measured of a load.
#[derive(Default, Clone)]
struct Measured {
    /// Milliseconds from the begin of the connections until all of it came.
    took: Samples,
    /// Segments that the kernel sent again, of a thousand.
    again: Samples,
}

impl Site {
    fn new() -> Result<Self> {
        let lab = Lab::new()?;
        let dir = lab.dir().join("lan0.ctl");
        let daemon = Daemon::start(
            &lab,
            None,
            &["--switch", &format!("lan0,vde={}", dir.display())],
        )?;
        let mut slirp = Command::new("vde_plug");
        slirp
            .arg("slirp://")
            .arg(format!("vde://{}", dir.display()));
        let slirp = Running::start(slirp, &lab, "slirp")?;
        joined(&daemon, 1)?;
        let linux = Station::by_vde(&lab, &dir, "10.0.2.21")?;
        joined(&daemon, 2)?;
        for port in ["lan0/port1", "lan0/port2"] {
            let set = ["switch", "set", port, DELAY];
            if let (code, said) = daemon.vnplug(&set)
                && code != Some(0)
            {
                return Err(said.into());
            }
        }
        Ok(Self {
            daemon,
            linux,
            lab,
            _slirp: slirp,
        })
    }

    /// A container whose interface merges so.
    fn container(&self, arm: &[&str]) -> Result<Station> {
        let station = Station::by_nic(&self.lab, &self.daemon, "lan0", "10.0.2.15", arm)?;
        match station.pings("10.0.2.2") && station.pings("10.0.2.21") {
            true => Ok(station),
            false => Err("the container does not reach its servers".into()),
        }
    }

    /// Moves a load; milliseconds from the connections' begin until all of it came, and how many of a thousand
    /// segments Linux sent again.
    fn transfer(&self, to: &Station, sender: Sender, load: Load) -> Result<(f64, f64)> {
        let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0));
        let (listener, host) = match sender {
            // It connects to the host's loopback interface for whoever connects to it.
            Sender::Slirp => (listen()?, [10, 0, 2, 2]),
            Sender::Linux(_) => (self.linux.netns.enter(listen)??, [10, 0, 2, 21]),
        };
        if let Sender::Linux(Some(control)) = sender {
            // Of the connections, too: they have it from who listens.
            set_tcp_congestion(&listener, control)?;
        }
        let address = SocketAddr::from((host, listener.local_addr()?.port()));
        let content = vec![0x5a; load.kib << 10];
        let give = || -> std::io::Result<()> {
            let mut stream = listener.accept()?.0;
            stream.write_all(&content)
        };
        let take = || -> std::io::Result<usize> {
            let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
            stream.set_read_timeout(Some(LIMIT))?;
            let (mut bytes, mut all) = (vec![0; 64 << 10], 0);
            while all < content.len() {
                match stream.read(&mut bytes)? {
                    0 => break,
                    count => all += count,
                }
            }
            Ok(all)
        };
        let sent = || Tcp::of(&self.linux.netns);
        let before = sent()?;
        let (bytes, took) = scope(|threads| -> Result<_> {
            let givers: Vec<_> = (0..load.count).map(|_| threads.spawn(give)).collect();
            let all = to.netns.enter(|| {
                let begin = Instant::now();
                let takers: Vec<_> = (0..load.count).map(|_| threads.spawn(take)).collect();
                let all = takers.into_iter().map(|taker| taker.join());
                let all = all.map(|taken| taken.unwrap_or(Ok(0)));
                let bytes = all.sum::<std::io::Result<usize>>();
                bytes.map(|bytes| (bytes, begin.elapsed()))
            });
            for giver in givers {
                giver.join().map_err(|_| "the server panicked")??;
            }
            Ok(all??)
        })?;
        if bytes != load.count * content.len() {
            return Err(format!(
                "{bytes} bytes came of {} times {} KiB",
                load.count, load.kib
            )
            .into());
        }
        Ok((took.as_secs_f64() * 1e3, sent()?.again_since(before)))
    }
}

fn joined(daemon: &Daemon, ports: u64) -> Result<()> {
    let begin = Instant::now();
    while value(counted(&daemon.counters(), "source"), "switch_ports") < ports {
        if begin.elapsed() > LIMIT {
            return Err("a sender does not join".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Milliseconds of short transfers by size, from slirp and from Linux as it is.
pub(crate) fn slow_start(plan: &Plan) -> Result<Vec<Figure>> {
    let figures = by_sender(
        plan,
        "acks-slow-start",
        &[Sender::Slirp, Sender::Linux(None)],
        &SHORT,
    )?;
    Ok(figures.into_iter().filter(|it| it.unit == MS).collect())
}

/// The same of longer transfers and of several at once, by how Linux controls congestion, and what it sent again.
pub(crate) fn senders(plan: &Plan) -> Result<Vec<Figure>> {
    let controls = CONTROLS.map(|control| Sender::Linux(Some(control)));
    by_sender(
        plan,
        "acks-senders",
        &[&[Sender::Slirp], &controls[..]].concat(),
        &LONG,
    )
}

fn by_sender(plan: &Plan, name: &str, senders: &[Sender], loads: &[Load]) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut all = vec![ARMS.map(|_| vec![Measured::default(); loads.len()]); senders.len()];
    for round in 1..=plan.rounds {
        for (arm, words) in ARMS.into_iter().enumerate() {
            let container = site.container(words)?;
            let mut told = Vec::new();
            for (sender, all) in senders.iter().zip(&mut all) {
                for (load, measured) in loads.iter().zip(&mut all[arm]) {
                    let (took, again) = site.transfer(&container, *sender, *load)?;
                    measured.took.push(took);
                    measured.again.push(again);
                }
                let took = all[arm].iter().map(|it| format!("{:.0}", it.took.last()));
                told.push(took.collect::<Vec<_>>().join(" "));
            }
            eprintln!("  round {round}, {}: {told:?} ms", words.join(" "));
        }
    }
    let mut figures = Vec::new();
    for (sender, [off, as_is, expanded]) in senders.iter().zip(&all) {
        let (whose, what) = match sender {
            Sender::Slirp => (String::new(), "slirp, whose TCP counts ACKs".to_owned()),
            Sender::Linux(None) => (
                "linux-".to_owned(),
                "Linux, whose TCP counts bytes".to_owned(),
            ),
            Sender::Linux(Some(control)) => (
                format!("{control}-"),
                format!("Linux, whose TCP counts bytes, by {control}"),
            ),
        };
        for (at, Load { count, kib }) in loads.iter().enumerate() {
            let size = match count {
                1 => kib.to_string(),
                _ => format!("{kib}x{count}"),
            };
            for (suffix, ours) in [("", expanded), ("-as-is", as_is)] {
                let note = format!(
                    "{kib} KiB from {what}, by each of {count} new connection(s) to a container by vnplug nic --gro 44 \
                     {}; ACKs are {DELAY_MS} ms on their way; from the connections' begin until all of it came",
                    if suffix.is_empty() {
                        "--acks expand"
                    } else {
                        ""
                    }
                );
                let (ours, off) = (&ours[at], &off[at]);
                let mut figure = |name: String, unit, ours: &Samples, off: &Samples| {
                    figures.push(Figure {
                        name,
                        unit,
                        ours: ours.clone(),
                        peer: Some(("ours, --gro off".to_owned(), off.clone())),
                        limit: None,
                        note: note.clone(),
                    });
                };
                let row = format!("{name}-{whose}{size}{suffix}");
                figure(row.clone(), MS, &ours.took, &off.took);
                // What slirp sends again nobody counts.
                if *sender != Sender::Slirp {
                    figure(format!("{row}-again"), AGAIN, &ours.again, &off.again);
                }
            }
        }
    }
    Ok(figures)
}

const MS: &str = "ms";
/// How Linux controls congestion where it has all of these.
pub(super) const CONTROLS: [&str; 3] = ["cubic", "reno", "bbr"];
/// The setting of the senders' ports.
const DELAY: &str = "delay=20ms";
const DELAY_MS: u32 = 20;
/// The longest that a step may take.
const LIMIT: Duration = Duration::from_secs(20);
