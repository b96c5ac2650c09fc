//! A context of a guest beside its own network card: tables 5.1 and 5.2 of Menon's dissertation in kind.
//!
//! ```text
//!   far0 ── up0 ── vnplugd ── rings in the guest's memory ── port ┐ one guest of
//!   far1 ── up1 ── bridge ── tap0 ──────────────────────── vec0 ┘ User-mode Linux
//! ```
//!
//! Frames, not streams of TCP: a context is a pair of rings, and what is measured is the way of a frame between the
//! wire and a program in the guest. Two rates: flat out, and one that both ways reach, at which processor time is
//! compared. Streams of TCP over both kinds of card have the row `tcp-stage`.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use vnplug::{Port, PortOptions};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Guest, Job, Lab, Netns, UmlConfig};
use vnplug_os::interface;
use vnplug_os::packet::Socket;

use super::owner::{Owner, owner};
use super::perf::{HERTZ, Pids, Recording, WARM_UP, all_cpus, now_s};
use super::site::of_group;
use super::symbols::Symbols;
use crate::capture::{OVER_VNPLUG, Way};
use crate::pcap::image;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
use crate::uml::AttachedUml;

/// The words that start the guest's sender: `child context-send KIND DEVICE PPS`.
pub(crate) const CHILD: &str = "context-send";

/// The program in the guest: sends frames by a `port` or a `socket` until it is killed, many with a look at the clock; 0 packets
/// a second is flat out.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let [kind, device, pps] = words else {
        return Err("KIND DEVICE PPS".into());
    };
    let pps: f64 = pps.parse()?;
    let mut way = match kind.as_str() {
        "port" => {
            let options = PortOptions::new(device).ring_bytes(4096).enabled(false);
            Sender::Port(Box::new(options.transmit(RING).open()?))
        }
        _ => {
            let socket = Socket::open()?;
            socket.bind(interface::link(&socket, device)?.index)?;
            Sender::Socket(socket, frame().repeat(BATCH))
        }
    };
    let (frame, begun) = (frame(), Instant::now());
    for batch in 1_u64.. {
        if pps > 0.0 {
            let due = Duration::from_secs_f64((batch * BATCH as u64) as f64 / pps);
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        way.send(&frame)?;
    }
    Ok(())
}

/// How the guest's program sends.
enum Sender {
    Port(Box<Port>),
    /// With a batch of frames.
    Socket(Socket, Vec<u8>),
}

impl Sender {
    /// Sends a batch, and waits for room if there is none.
    fn send(&mut self, frame: &[u8]) -> Result<()> {
        match self {
            Self::Port(port) => {
                let mut left = BATCH;
                while left > 0 {
                    let outbox = port.outbox()?;
                    while left > 0 && outbox.push(frame)? {
                        left -= 1;
                    }
                    outbox.flush();
                    if left > 0 {
                        port.wait_for_room(frame.len(), LIMIT)?;
                    }
                }
            }
            Self::Socket(socket, frames) => {
                let lens = [LEN as u32; BATCH];
                let mut at = 0;
                while at < BATCH {
                    let (sent, stopped) = socket.send(&frames[at * LEN..], &lens[at..]);
                    at += sent;
                    match stopped.map(|error| error.raw_os_error()) {
                        None => {}
                        // No room.
                        Some(Some(libc::EAGAIN | libc::ENOBUFS)) => std::thread::yield_now(),
                        Some(other) => return Err(format!("{other:?}").into()),
                    }
                }
            }
        }
        Ok(())
    }
}

fn frame() -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
    frame.resize(LEN, 7);
    frame
}

pub(super) struct Site {
    pub(super) guests: Vec<AttachedUml>,
    pub(super) daemon: Daemon,
    far: Netns,
    pub(super) here: Netns,
    lab: Lab,
}

/// In whose time the processors were, in per cent of one.
#[derive(Clone, Copy, Default)]
struct Told {
    mbps: f64,
    /// Guest, daemon, host's kernel, far machine.
    cpu: [f64; 4],
    /// Nobody needed them.
    idle: f64,
    /// Programs that have nothing to do with it.
    others: f64,
}

impl Told {
    /// Processor time of guest, daemon and the host's kernel, for a gigabyte.
    fn cost(&self) -> f64 {
        let own: f64 = self.cpu[..3].iter().sum();
        own / 100.0 / (self.mbps / 8e3).max(1e-9)
    }
}

impl Site {
    /// A number of guests, each with a context on one wire and a card on a bridge with the other.
    pub(super) fn new(guests: usize) -> Result<Self> {
        let (lab, here, far) = (Lab::new()?, Netns::new()?, Netns::new()?);
        for netns in [&here, &far] {
            let silent = || std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
            netns.enter(silent)??;
        }
        for wire in 0..2 {
            let [up, there] = ["up", "far"].map(|it| format!("{it}{wire}"));
            here.veth(&up, &there)?;
            here.ip(&["link", "set", &there, "netns", far.name()])?;
            far.ip(&[
                "link",
                "set",
                &there,
                "arp",
                "off",
                "multicast",
                "off",
                "up",
            ])?;
        }
        let taps: Vec<_> = (0..guests).map(|nth| format!("tap{nth}")).collect();
        for tap in &taps {
            here.tap(tap)?;
        }
        let members: Vec<_> = ["up1"]
            .into_iter()
            .chain(taps.iter().map(String::as_str))
            .collect();
        here.bridge("br0", &members)?;
        // All send to the far machine, which is silent, as the same station: no frame is for another guest.
        here.exec(&[
            "bridge", "fdb", "replace", TO, "dev", "up1", "master", "static",
        ])?;
        for tap in &taps {
            here.ip(&[
                "link",
                "set",
                tap,
                "type",
                "bridge_slave",
                "learning",
                "off",
            ])?;
        }
        let senders: Vec<_> = (0..guests)
            .map(|nth| format!("vm:bench{nth}=up0"))
            .collect();
        let senders = senders.iter().flat_map(|it| ["--allow-send", it]);
        let args: Vec<_> = ["--source", "up0"].into_iter().chain(senders).collect();
        let daemon = Daemon::start(&lab, Some(&here), &args)?;
        let image = image(&lab)?;
        let boot = |(nth, tap): (usize, &String)| {
            let config = UmlConfig {
                image: image.clone(),
                kernel_args: vec![
                    "ipv6.disable=1".into(),
                    format!("vec0:transport=tap,ifname={tap},depth=128,gro=1"),
                ],
                netns: Some(here.name().to_owned()),
                ..UmlConfig::default()
            };
            let uml = AttachedUml::boot_as(&lab, &daemon, &format!("bench{nth}"), config)?;
            let up = uml.guest().run("ip link set vec0 promisc on up", LIMIT)?;
            match up.success() {
                true => Ok(uml),
                false => Err(up.text().into()),
            }
        };
        Ok(Self {
            guests: taps.iter().enumerate().map(boot).collect::<Result<_>>()?,
            daemon,
            far,
            here,
            lab,
        })
    }

    fn guest(&self) -> &Guest {
        self.guests[0].guest()
    }

    /// What happens in this time, sampled.
    fn sampled<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<(T, Told)> {
        let recording = Recording::begin(self.lab.dir())?;
        // It has a file before it samples all processors.
        std::thread::sleep(WARM_UP);
        let begin = now_s();
        let done = what()?;
        let end = now_s();
        let pids = Pids {
            guest: of_group(self.guest().pid())?,
            switches: [self.daemon.pid(); 2],
            far: rustix::process::getpid()
                .as_raw_nonzero()
                .get()
                .cast_unsigned(),
        };
        let mut told = Told::default();
        let mut samples = recording.end()?;
        samples.retain(|it| (begin..end).contains(&it.time_s));
        let part = 100.0 / f64::from(HERTZ) / (end - begin);
        for sample in samples {
            let at = match owner(&sample, &pids, &Symbols::default()).0 {
                Owner::Guest => &mut told.cpu[0],
                Owner::Switch => &mut told.cpu[1],
                Owner::Host => &mut told.cpu[2],
                Owner::Far => &mut told.cpu[3],
                Owner::Nobody if sample.pid == 0 => continue,
                Owner::Nobody => &mut told.others,
            };
            *at += part;
        }
        // Processors that are idle are not always sampled.
        told.idle = 100.0 * all_cpus()? - told.cpu.iter().sum::<f64>() - told.others;
        Ok((done, told))
    }

    /// A program of the guest's sends; what comes to a far interface in this time.
    fn sends(&self, command: &str, far: &str, time: Duration) -> Result<Told> {
        let job = self.guest().spawn(command)?;
        let begun = Instant::now();
        let first = self.came(far)?;
        while self.came(far)? < first + SETTLED {
            if begun.elapsed() > LIMIT || job.is_done() {
                return Err(format!("{command}: {}", job.peek(500)?).into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let (frames, mut told) = self.sampled(|| {
            let before = self.came(far)?;
            std::thread::sleep(time);
            Ok(self.came(far)? - before)
        })?;
        told.mbps = mbps(frames, time);
        end(&job)?;
        Ok(told)
    }

    /// Frames that a far interface has received.
    fn came(&self, far: &str) -> Result<u64> {
        let text = self
            .far
            .enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
        let line = text.lines().find_map(|line| line.trim().strip_prefix(far));
        let words = line.ok_or("no such interface")?.trim_start_matches(':');
        let packets = words.split_whitespace().nth(1).ok_or("no packets")?;
        Ok(packets.parse()?)
    }

    /// The far machine sends by this interface; what a counter in the guest takes.
    fn takes(&self, way: &mut Way<'_>, far: &str, pps: u64, time: Duration) -> Result<Told> {
        let count = match pps {
            0 => MOST_PPS,
            _ => pps,
        } as f64
            * time.as_secs_f64();
        let stream = Stream {
            len_bytes: LEN,
            pps: NonZeroU64::new(pps),
            ..Stream::new(far, count as u64)
        };
        let mark = way.mark()?;
        let send = || {
            let sent = self.far.enter(|| {
                sys::pin(sys::cpu(0)).map_err(|error| error.to_string())?;
                stream.send().map_err(|error| error.to_string())
            });
            Ok(sent??)
        };
        let (sent, mut told) = self.sampled(send)?;
        // The last packets wait for others up to a tenth of a second.
        std::thread::sleep(Duration::from_millis(200));
        let turn = way.since(&mark, sent.frames, sent.elapsed)?;
        told.mbps = turn.mpps() * (LEN * 8) as f64;
        Ok(told)
    }
}

fn end(job: &Job) -> Result<()> {
    job.answer("TERM", 0)?;
    let begun = Instant::now();
    while !job.is_done() {
        if begun.elapsed() > LIMIT {
            return Err("the guest's sender does not end".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

pub(super) fn mbps(frames: u64, time: Duration) -> f64 {
    frames as f64 * (LEN * 8) as f64 / time.as_secs_f64() / 1e6
}

/// Both directions, flat out and at a rate, ours and the guest's own card in turns.
pub(crate) fn contexts(plan: &Plan) -> Result<Vec<Figure>> {
    super::perf::is_there()?;
    let site = Site::new(1)?;
    let mut ways = [
        Way::new("far0", Some(&site.daemon)).in_guest(site.guest(), OVER_VNPLUG, "host:up0")?,
        Way::new("far1", None).in_guest(site.guest(), "", "vec0")?,
    ];
    let mut figures = Vec::new();
    for sends in [true, false] {
        // Of ours and the peer: flat out, at a rate.
        let mut told: [[Vec<Told>; 2]; 2] = Default::default();
        for round in 1..=plan.rounds {
            for (side, far) in ["far0", "far1"].into_iter().enumerate() {
                for (at, pps) in [0, PPS].into_iter().enumerate() {
                    let once = match sends {
                        true => site.sends(&sender(side, pps), far, plan.time)?,
                        false => site.takes(&mut ways[side], far, pps, plan.time)?,
                    };
                    let [guest, daemon, host, far] = once.cpu;
                    eprintln!(
                        "  round {round}, {} {}, {}: {:.0} Mb/s, % of a CPU: guest {guest:.0}, daemon {daemon:.0}, host \
                         {host:.0}, far {far:.0}, idle {:.0}, others {:.0}; {:.2} CPU s per GB",
                        if sends { "sends" } else { "takes" },
                        ["ours", "vec0"][side],
                        ["flat out", "paced"][at],
                        once.mbps,
                        once.idle,
                        once.others,
                        once.cost(),
                    );
                    told[side][at].push(once);
                }
            }
        }
        figures.extend(figures_of(sends, &told));
    }
    Ok(figures)
}

fn figures_of(sends: bool, [ours, theirs]: &[[Vec<Told>; 2]; 2]) -> Vec<Figure> {
    let (name, what) = match sends {
        true => ("tx", "sent by a program in"),
        false => ("rx", "taken by a program in"),
    };
    let of = |suffix: &str, unit, at: usize, value: &dyn Fn(&Told) -> f64| {
        let samples = |told: &[Told]| told.iter().map(value).collect::<Samples>();
        let rate = match at {
            0 => "flat out".to_owned(),
            _ => format!("{PPS} a second"),
        };
        Figure {
            name: format!("context-guest-{name}{suffix}"),
            unit,
            ours: samples(&ours[at]),
            peer: Some((PEER.to_owned(), samples(&theirs[at]))),
            limit: None,
            note: format!(
                "frames of {LEN} bytes {what} a guest of User-mode Linux, {rate}; ours by the rings of a port, the peer by a \
                 packet socket on the vector driver's TAP, which is on a Linux bridge; the wire is a veth. Processors \
                 sampled {HERTZ} times a second: guest and daemon in user mode, host: its kernel for both and in \
                 softirqs, without the far machine"
            ),
        }
    };
    let mut figures = vec![
        of("", "Mb/s", 0, &|it| it.mbps),
        of("-cpu", COST, 0, &Told::cost),
        of("-idle", "% CPU", 0, &|it| it.idle),
    ];
    for (at, part) in ["-guest", "-daemon", "-host"].into_iter().enumerate() {
        figures.push(of(part, "% CPU", 0, &|it| it.cpu[at]));
    }
    figures.push(of("-paced", "Mb/s", 1, &|it| it.mbps));
    figures.push(of("-paced-cpu", COST, 1, &Told::cost));
    figures
}

/// The guest's sender of a side.
pub(super) fn sender(side: usize, pps: u64) -> String {
    let by = ["port host:up0", "socket vec0"][side];
    format!("exec counter child {CHILD} {by} {pps}")
}

/// Where a guest's [frames](frame) go.
const TO: &str = "02:00:00:00:00:02";
const COST: &str = "CPU s per GB";
pub(super) const PEER: &str = "vec0, TAP on a Linux bridge";
pub(super) const LEN: usize = 1514;
/// Packets a second that both ways reach, in both directions.
const PPS: u64 = 40_000;
/// More than a sender has sent when it is flat out.
const MOST_PPS: u64 = 700_000;
/// Frames of a look at the clock.
const BATCH: usize = 64;
/// A sender's ring.
const RING: u64 = 1 << 20;
/// Frames until a sender is on its way.
pub(super) const SETTLED: u64 = 5_000;
pub(super) const LIMIT: Duration = Duration::from_secs(60);
