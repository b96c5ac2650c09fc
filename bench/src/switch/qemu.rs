//! System calls of a QEMU, and of the switch, for a frame of its guest's bulk stream.
//!
//! ```text
//!   a guest of QEMU   eth0 ── -netdev vde ── sockets ──── vde_switch     the peer
//!                     eth1 ── -netdev vde ── sockets ──── lan0 ┐
//!                     eth2 ── -netdev vde ── vnplug:// ── lan1 ├ one daemon
//!                     eth3 ── -netdev vhost-user ──────── lan2 ┘
//! ```
//!
//! At the other end of each switch is a TAP of `vde_plug2tap`, so that the frames which are counted are those of a wire,
//! also where a guest's card gives super-frames. A thesis on VDE gained 1.08 to 1.31 times by shared memory: QEMU makes
//! system calls of its own for each frame, whatever lies below. How many is what this shows.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::{Running, Station, module_environment};
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig};

use super::arm::PEER;
use super::calls::Calls;
use super::guests::ran;
use crate::row::{Figure, Plan, Result, Samples};
use crate::streams;

/// The ways into a switch: name, and what it is. The peer's first.
const WAYS: [(&str, &str); 4] = [
    (PEER, "its sockets"),
    ("sockets", "our sockets of VDE"),
    ("module", "vnplug://"),
    ("vhost", "vhost-user"),
];
const DIRECTIONS: [&str; 2] = ["in", "out"];
/// Whose system calls are counted.
const WHOSE: [&str; 2] = ["qemu", "switch"];

struct Site {
    guest: Guest,
    /// The other end of each way.
    stations: Vec<Station>,
    daemon: Daemon,
    switch: Running,
    _lab: Lab,
}

/// All ways in turns.
pub(crate) fn calls(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut all: [[[Samples; 2]; 2]; 4] = Default::default();
    for round in 1..=plan.rounds {
        for (way, series) in all.iter_mut().enumerate() {
            for (direction, series) in DIRECTIONS.into_iter().zip(series) {
                let (calls, mbps) = site.count(way, direction, plan.time)?;
                let [qemu, switch] = calls;
                let name = WAYS[way].0;
                eprintln!(
                    "  round {round}: {name}, {direction}: {qemu:.2} calls of QEMU per frame, {switch:.2} of \
                     the switch, about {mbps:.0} Mb/s"
                );
                for (samples, calls) in series.iter_mut().zip(calls) {
                    samples.push(calls);
                }
            }
        }
    }
    let [theirs, ours @ ..] = all;
    let mut figures = Vec::new();
    for ((way, what), ours) in WAYS[1..].iter().zip(ours) {
        for ((direction, ours), theirs) in DIRECTIONS.into_iter().zip(ours).zip(&theirs) {
            for ((whose, ours), theirs) in WHOSE.into_iter().zip(ours).zip(theirs) {
                figures.push(Figure {
                    name: format!("switch-calls-{way}-{direction}-{whose}"),
                    unit: "calls per frame",
                    ours,
                    peer: Some((PEER.to_owned(), theirs.clone())),
                    limit: None,
                    note: format!(
                        "one stream of TCP between a guest of QEMU and a TAP of vde_plug2tap, for {} s after it \
                         began; QEMU by {what}, the peer by sockets; system calls by perf \
                         (raw_syscalls:sys_enter) per frame that the TAP gave and was given, acknowledgements \
                         included: a super-frame counts as the frames that become of it",
                        plan.time.as_secs_f64()
                    ),
                });
            }
        }
    }
    Ok(figures)
}

impl Site {
    fn new() -> Result<Self> {
        let lab = Lab::new()?;
        let [theirs, lan0, lan1, lan2] =
            ["vde.ctl", "lan0.ctl", "lan1.ctl", "lan2.ctl"].map(|name| lab.dir().join(name));
        let vhost = lab.dir().join("lan2.sock");
        let switch = Running::vde_switch(&lab, None, &theirs, &[])?;
        let mut specs = Vec::new();
        for (name, dir) in [("lan0", &lan0), ("lan1", &lan1), ("lan2", &lan2)] {
            specs.push("--switch".to_owned());
            specs.push(format!("{name},vde={}", dir.display()));
        }
        if let Some(last) = specs.last_mut() {
            *last = format!("{last},vhost={}", vhost.display());
        }
        let specs: Vec<_> = specs.iter().map(String::as_str).collect();
        let daemon = Daemon::start(&lab, None, &specs)?;
        let mut qemu_args = Vec::new();
        let socks = [
            theirs.display().to_string(),
            lan0.display().to_string(),
            "vnplug://lan1".to_owned(),
        ];
        for (way, sock) in socks.iter().enumerate() {
            qemu_args.push("-netdev".to_owned());
            qemu_args.push(format!("vde,id=n{way},sock={sock}"));
            qemu_args.push("-device".to_owned());
            qemu_args.push(format!("virtio-net-pci,netdev=n{way},mac={}", mac(way)));
        }
        qemu_args.extend(QemuConfig::vhost_user(
            &vhost.display().to_string(),
            1,
            &mac(3),
        ));
        let config = QemuConfig {
            image: Image::default().module("virtio_net"),
            qemu_args,
            env: module_environment(&lab, &daemon)?,
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&lab, config)?;
        let mut stations = Vec::new();
        for (way, dir) in [theirs, lan0, lan1, lan2].iter().enumerate() {
            let station = Station::by_vde(&lab, dir, &format!("10.83.{way}.1"))?;
            ran(
                &guest,
                &format!(
                    "ip addr add {}/24 dev eth{way} && ip link set eth{way} up",
                    address(way)
                ),
            )?;
            if !station.pings(&address(way)) {
                return Err(format!("the guest does not answer by {}", WAYS[way].0).into());
            }
            stations.push(station);
        }
        Ok(Self {
            guest,
            stations,
            daemon,
            switch,
            _lab: lab,
        })
    }

    /// System calls for a frame, of QEMU and of the switch, and megabits of frames a second.
    fn count(&self, way: usize, direction: &str, time: Duration) -> Result<([f64; 2], f64)> {
        let station = &self.stations[way];
        let switch = match way {
            0 => self.switch.pid(),
            _ => self.daemon.pid(),
        };
        let of = |what: &str| {
            station.statistic(&format!("rx_{what}")) + station.statistic(&format!("tx_{what}"))
        };
        self.streaming(way, direction, || {
            sleep(WARM_UP);
            let [qemu, switch] = [self.guest.pid(), switch].map(Calls::of);
            let counting = [qemu?, switch?];
            let (begin, before) = (Instant::now(), [of("packets"), of("bytes")]);
            sleep(time);
            let (frames, bytes) = (of("packets") - before[0], of("bytes") - before[1]);
            let took = begin.elapsed();
            let [qemu, switch] = counting.map(Calls::finish);
            if frames < FEWEST {
                return Err(format!("{frames} frames only by {}, {direction}", WAYS[way].0).into());
            }
            let per_frame = [qemu?, switch?].map(|calls| calls as f64 / frames as f64);
            Ok((per_frame, bytes as f64 * 8e-6 / took.as_secs_f64()))
        })
    }

    /// Does something while a stream runs into the guest, or out of it.
    fn streaming<T>(
        &self,
        way: usize,
        direction: &str,
        within: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let station = &self.stations[way];
        let (mut stream, job) = match direction {
            "in" => {
                let job = self.guest.spawn("nc -l -p 7000 </dev/null >/dev/null")?;
                let to = (address(way), 7000);
                let begin = Instant::now();
                loop {
                    match station.netns.enter(|| TcpStream::connect(&to))? {
                        Ok(stream) => break (stream, job),
                        Err(error) if begin.elapsed() > PATIENCE => return Err(error.into()),
                        // It does not listen yet.
                        Err(_) => sleep(STEP),
                    }
                }
            }
            _ => {
                let at = (station.address.as_str(), 0);
                let listener = station.netns.enter(|| TcpListener::bind(at))??;
                let port = listener.local_addr()?.port();
                let command = format!("nc {} {port} </dev/zero >/dev/null", station.address);
                let job = self.guest.spawn(&command)?;
                let stream = streams::accept(&listener, PATIENCE)?;
                (stream.ok_or("the guest does not connect")?, job)
            }
        };
        let over = AtomicBool::new(false);
        let done = scope(|threads| {
            let ends = Ends([&over; 2]);
            let is_over = || over.load(Ordering::Relaxed);
            let moves = threads.spawn(move || -> std::result::Result<(), String> {
                let moved = match direction {
                    "in" => streams::fill(stream, is_over),
                    _ => loop {
                        match streams::drain(&mut stream, Instant::now() + STEP) {
                            Ok(_) if is_over() => break Ok(()),
                            Ok(_) => {}
                            Err(error) => break Err(error),
                        }
                    },
                };
                moved.map_err(|error| error.to_string())
            });
            let done = within();
            drop(ends);
            moves.join().map_err(|_| "the stream panicked")??;
            done
        })?;
        job.wait(PATIENCE)?;
        Ok(done)
    }
}

fn mac(way: usize) -> String {
    format!("52:54:00:83:{way:02x}:02")
}

/// The guest's address on a way.
fn address(way: usize) -> String {
    format!("10.83.{way}.2")
}

const PATIENCE: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(100);
/// From the first byte until the stream is as fast as it gets.
const WARM_UP: Duration = Duration::from_millis(500);
/// Frames in a measurement: with fewer, what a program does beside them would count.
const FEWEST: u64 = 100;
