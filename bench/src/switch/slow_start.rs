//! What merging costs a sender that counts ACKs, and whether ACKs that are restored give it back.
//!
//! ```text
//!   server ── slirp ── vde_plug ─────── port 1 ┐ delay: each is given      our switch ── vnplug nic ── container
//!   server ── Linux ── vde_plug2tap ─── port 2 ┘ what it is given later
//! ```
//!
//! slirp's TCP lets its window grow by a segment for each ACK, as BSD's did; Linux counts the bytes that an ACK is
//! for. Both begin anew for each transfer. The delay is on the way of the ACKs, so that the container's port, which
//! has none, merges.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread::scope;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Running, Station};

use crate::row::{Figure, Plan, Result, Samples};

/// KiB of a transfer.
const SIZES: [usize; 4] = [64, 128, 256, 1024];
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
    Linux,
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

    /// Milliseconds from the connection's begin until all of a transfer came.
    fn transfer(&self, to: &Station, sender: Sender, kib: usize) -> Result<f64> {
        let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0));
        let (listener, host) = match sender {
            // It connects to the host's loopback interface for whoever connects to it.
            Sender::Slirp => (listen()?, [10, 0, 2, 2]),
            Sender::Linux => (self.linux.netns.enter(listen)??, [10, 0, 2, 21]),
        };
        let address = SocketAddr::from((host, listener.local_addr()?.port()));
        let content = vec![0x5a; kib << 10];
        let give = || -> std::io::Result<()> { listener.accept()?.0.write_all(&content) };
        let take = || -> std::io::Result<(usize, Duration)> {
            let begin = Instant::now();
            let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
            stream.set_read_timeout(Some(LIMIT))?;
            let (mut bytes, mut all) = (vec![0; 64 << 10], 0);
            while all < content.len() {
                match stream.read(&mut bytes)? {
                    0 => break,
                    count => all += count,
                }
            }
            Ok((all, begin.elapsed()))
        };
        scope(|threads| {
            let giver = threads.spawn(give);
            let (bytes, took) = to.netns.enter(take)??;
            giver.join().map_err(|_| "the server panicked")??;
            match bytes == content.len() {
                true => Ok(took.as_secs_f64() * 1e3),
                false => Err(format!("{bytes} bytes came of {kib} KiB").into()),
            }
        })
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

/// Milliseconds of transfers by size, for both senders.
pub(crate) fn slow_start(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let senders = [Sender::Slirp, Sender::Linux];
    let mut all = senders.map(|_| ARMS.map(|_| SIZES.map(|_| Samples::default())));
    for round in 1..=plan.rounds {
        for (arm, words) in ARMS.into_iter().enumerate() {
            let container = site.container(words)?;
            for (sender, all) in senders.into_iter().zip(&mut all) {
                for (kib, samples) in SIZES.into_iter().zip(&mut all[arm]) {
                    samples.push(site.transfer(&container, sender, kib)?);
                }
            }
            let told = all.each_ref().map(|all| {
                let told = all[arm].each_ref().map(|it| format!("{:.0}", it.last()));
                told.join(" ")
            });
            eprintln!(
                "  round {round}, {}: slirp, Linux {told:?} ms",
                words.join(" ")
            );
        }
    }
    let mut figures = Vec::new();
    for (sender, [off, as_is, expanded]) in senders.into_iter().zip(&all) {
        let (whose, what) = match sender {
            Sender::Slirp => ("", "slirp, whose TCP counts ACKs"),
            Sender::Linux => ("linux-", "Linux, whose TCP counts bytes"),
        };
        for (at, kib) in SIZES.into_iter().enumerate() {
            for (suffix, ours) in [("", expanded), ("-as-is", as_is)] {
                figures.push(Figure {
                    name: format!("acks-slow-start-{whose}{kib}{suffix}"),
                    unit: "ms",
                    ours: ours[at].clone(),
                    peer: Some(("ours, --gro off".to_owned(), off[at].clone())),
                    limit: None,
                    note: format!(
                        "{kib} KiB from {what}, by a new connection to a container by vnplug nic --gro 44 {}; ACKs are \
                         {DELAY_MS} ms on their way; from the connection's begin until all of it came",
                        if suffix.is_empty() { "--acks expand" } else { "" }
                    ),
                });
            }
        }
    }
    Ok(figures)
}

/// The setting of the senders' ports.
const DELAY: &str = "delay=20ms";
const DELAY_MS: u32 = 20;
/// The longest that a step may take.
const LIMIT: Duration = Duration::from_secs(20);
