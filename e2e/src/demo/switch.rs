//! The demo of the switch: machines of six kinds on one wire, which captures like any other.
//!
//! ```text
//!   User-mode Linux, vhost-user ─┐                                ┌─ tcpdump on one port, unchanged
//!   User-mode Linux, VDE ────────┤                                │
//!   QEMU, vhost-user ────────────┼── vnplugd --switch lan0 ──ring─┴─ vnplug record ──▶ files
//!   a container, vnplug nic ─────┤
//!   vde_plug2tap ────────────────┤
//!   a machine beyond the uplink ─┘
//! ```
//!
//! Then the same two programs of VDE move the same bytes over Debian's `vde_switch` and over ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::recorder::output;
use super::report::grouped;
use super::wire::until;
use crate::child::cpu_time;
use crate::daemon::{Daemon, program};
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::image::Image;
use crate::lab::Lab;
use crate::netns::Netns;
use crate::plot::svg::{Anchor, COLORS, GRID, LABEL, Svg, Text};
use crate::station::{Running, Station, content, pings};
use crate::{Qemu, QemuConfig, Uml, UmlConfig};

/// A machine on the switch.
struct Machine {
    what: &'static str,
    address: String,
    end: End,
}

enum End {
    Guest(Guest),
    Station(Station),
    /// Beyond the uplink.
    Far(Netns),
}

/// One quantity of what moved.
type Value = fn(&Bulk) -> f64;

/// What moved over one way.
struct Bulk {
    way: &'static str,
    /// Megabits a second, the middle one of the rounds.
    mbps: f64,
    /// Seconds of the switch's processor time for a gigabyte.
    cpu_s: f64,
}

/// Runs the whole demo with these programs and tells about it on standard output; `out` is where the
/// picture and the recording are put. What went wrong: empty is a success.
///
/// # Errors
/// Why it could not be carried through: something is missing on the machine, or a program failed.
pub fn switch(vnplug: &Path, out: &Path) -> Result<Vec<String>> {
    let stage = Stage {
        vnplug: vnplug.to_owned(),
        out: out.to_owned(),
        lab: Lab::new()?,
        start: Instant::now(),
    };
    fs::create_dir_all(out).map_err(LabError::io(format!("make {}", out.display())))?;
    let dir = stage.lab.dir().join("lan0.ctl");
    let vhost = stage.lab.dir().join("lan0.sock");
    let (here, far) = (Netns::new()?, Netns::new()?);
    let peer = ["peer", "name", "far0", "netns", far.name()];
    here.ip(&[&["link", "add", "eth1", "type", "veth"][..], &peer].concat())?;
    far.ip(&["addr", "add", "10.77.2.6/24", "dev", "far0"])?;
    far.ip(&["link", "set", "far0", "up"])?;
    here.ip(&["link", "set", "eth1", "up"])?;
    let spec = format!(
        "lan0,vde={},vhost={},uplink=eth1",
        dir.display(),
        vhost.display()
    );
    let daemon = Daemon::start(&stage.lab, Some(&here), &["--switch", &spec])?;
    stage.say("$ vnplugd --switch lan0,vde=/run/lan0.ctl,vhost=/run/lan0.sock,uplink=eth1");
    let mut faults = Vec::new();
    let mut machines = stage.machines(&daemon, &dir, &vhost)?;
    machines.push(Machine {
        what: "beyond the uplink",
        address: "10.77.2.6".to_owned(),
        end: End::Far(far),
    });
    let recording = out.join("recording");
    let _ = fs::remove_dir_all(&recording);
    let mut recorder = stage.record(&daemon, &recording)?;
    stage.matrix(&machines, &mut faults)?;
    stage.tcpdump(&daemon, &machines)?;
    if !recorder.finish().success() {
        faults.push(format!("the recorder failed: {}", recorder.errors()));
    }
    stage.find(&recording, &machines[0].address, &mut faults)?;
    daemon.audit();
    drop(machines);
    let bulks = stage.bulk(&daemon, &dir)?;
    let picture = out.join("switch.svg");
    fs::write(&picture, svg(&bulks)).map_err(LabError::io("write the picture"))?;
    Ok(faults)
}

struct Stage {
    vnplug: PathBuf,
    out: PathBuf,
    lab: Lab,
    start: Instant,
}

impl Stage {
    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    /// Brings all machines of this host onto the switch.
    fn machines(&self, daemon: &Daemon, dir: &Path, vhost: &Path) -> Result<Vec<Machine>> {
        let lab = &self.lab;
        let uml = |image: Image, arg: String| {
            let config = UmlConfig {
                image,
                kernel_args: vec![arg],
                ..UmlConfig::default()
            };
            Uml::boot(lab, config)
        };
        let card = |image: Image| image.module("virtio_net");
        let chardev = format!("{},reconnect=1", vhost.display());
        let qemu = QemuConfig {
            image: card(Image::default()),
            qemu_args: QemuConfig::vhost_user(&chardev, 1, "52:54:00:77:02:03"),
            ..QemuConfig::default()
        };
        let by_vhost = format!("virtio_uml.device={}:1", vhost.display());
        let by_vde = format!("eth0=vde,{}", dir.display());
        let guests = [
            (
                "User-mode Linux, vhost",
                "10.77.2.1",
                uml(card(Image::default()), by_vhost)?,
            ),
            (
                "User-mode Linux, VDE",
                "10.77.2.2",
                uml(Image::default(), by_vde)?,
            ),
            ("QEMU, vhost-user", "10.77.2.3", Qemu::boot(lab, qemu)?),
        ];
        let mut machines = Vec::new();
        for (what, address, guest) in guests {
            let up = format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up");
            let done = guest.run(&up, LIMIT)?;
            if !done.success() {
                return Err(LabError::Command {
                    command: up,
                    text: done.text(),
                });
            }
            machines.push(Machine {
                what,
                address: address.to_owned(),
                end: End::Guest(guest),
            });
        }
        let container = Station::by_nic(lab, daemon, "lan0", "10.77.2.4", &[])?;
        let old = Station::by_vde(lab, dir, "10.77.2.5")?;
        for (what, station) in [("container, vnplug nic", container), ("vde_plug2tap", old)] {
            machines.push(Machine {
                what,
                address: station.address.clone(),
                end: End::Station(station),
            });
        }
        self.say("on it: two User-mode Linux, QEMU, a container, vde_plug2tap, and a machine beyond eth1");
        Ok(machines)
    }

    fn record(&self, daemon: &Daemon, dir: &Path) -> Result<Running> {
        let mut record = Command::new(&self.vnplug);
        record.arg("--socket").arg(daemon.socket());
        record
            .args(["record", "host:lan0", "--flush", "200ms", "--to"])
            .arg(dir);
        let running = Running::start(record, &self.lab, "record")?;
        until("the recorder records", || {
            Ok(dir.join("recorder.json").exists() || dir.exists())
        })?;
        self.say("$ vnplug record host:lan0 --to recording");
        Ok(running)
    }

    /// Everybody pings everybody.
    fn matrix(&self, machines: &[Machine], faults: &mut Vec<String>) -> Result<()> {
        self.say("who reaches whom (3 pings each):");
        print!("{:38}", "");
        (1..=machines.len()).for_each(|at| print!(" .{at} "));
        println!();
        for (at, machine) in machines.iter().enumerate() {
            print!("            .{} {:23}", at + 1, machine.what);
            for (other, it) in machines.iter().enumerate() {
                let reached = at == other || machine.pings(&it.address)?;
                print!(
                    "{}",
                    if at == other {
                        "  - "
                    } else if reached {
                        " yes"
                    } else {
                        "  NO"
                    }
                );
                if !reached {
                    faults.push(format!("{} does not reach {}", machine.address, it.address));
                }
            }
            println!();
        }
        Ok(())
    }

    /// Unchanged tcpdump on one port of the switch: that of QEMU, with what others say not to it.
    fn tcpdump(&self, daemon: &Daemon, machines: &[Machine]) -> Result<()> {
        let library = self.lab.dir().join("lib");
        let place = library.join("libpcap.so.0.8");
        let put = || {
            fs::create_dir_all(&library)?;
            std::os::unix::fs::symlink(
                program("libvnplug_pcap.so").map_err(std::io::Error::other)?,
                &place,
            )
        };
        put().map_err(LabError::io("place the library"))?;
        self.say("$ vnplug switch show lan0");
        let mut show = Command::new(&self.vnplug);
        show.arg("--socket").arg(daemon.socket());
        show.args(["switch", "show", "lan0"]);
        output(show)?
            .lines()
            .skip_while(|line| !line.starts_with("PORT"))
            .for_each(|line| println!("            {line}"));
        self.say(&format!(
            "$ tcpdump -ni {PORT} -c 4 icmp      (unchanged, by vNPlug's libpcap, on QEMU's port)"
        ));
        let mut tcpdump = Command::new("tcpdump");
        tcpdump
            .env("LD_LIBRARY_PATH", &library)
            .env("VNPLUG_SOCKET", daemon.socket());
        tcpdump.args(["-Z", "root", "-l", "-n", "-i", PORT, "-c", "4", "icmp"]);
        let mut running = Running::start(tcpdump, &self.lab, "tcpdump")?;
        until("tcpdump listens", || {
            Ok(running.errors().contains("listening on") || running.status().is_some())
        })?;
        // Not on that port, and then on it.
        machines[0].pings(&machines[1].address)?;
        machines[0].pings(&machines[2].address)?;
        until("tcpdump has them", || Ok(running.status().is_some()))?;
        let printed = running.output();
        let of_port = printed
            .lines()
            .filter(|line| line.contains(&machines[2].address));
        if of_port.count() != 4 {
            return Err(LabError::Command {
                command: "tcpdump".to_owned(),
                text: format!("{printed}{}", running.errors()),
            });
        }
        printed
            .lines()
            .for_each(|line| println!("            {line}"));
        Ok(())
    }

    /// Finds one machine's conversations in the recording.
    fn find(&self, recording: &Path, address: &str, faults: &mut Vec<String>) -> Result<()> {
        let found = self.out.join("found.pcapng");
        let _ = fs::remove_file(&found);
        let mut extract = Command::new(&self.vnplug);
        extract
            .arg("extract")
            .arg(recording)
            .arg(format!("host {address} and icmp"));
        extract.arg("-w").arg(&found);
        output(extract)?;
        let mut count = Command::new("tcpdump");
        count.args(["-n", "--count", "-r"]).arg(&found);
        let said = output(count)?;
        let packets = said
            .split_whitespace()
            .next()
            .and_then(|it| it.parse::<u64>().ok());
        self.say(&format!(
            "$ vnplug extract recording 'host {address} and icmp' -w found.pcapng: {} packets",
            grouped(packets.unwrap_or(0))
        ));
        // Three pings and answers to and from five others, and tcpdump's.
        if packets.unwrap_or(0) < 60 {
            faults.push(format!(
                "the recording has {packets:?} packets of {address}, not 60"
            ));
        }
        Ok(())
    }

    /// The same two programs on Debian's switch and on ours, in turns; then two interfaces on ours.
    fn bulk(&self, daemon: &Daemon, dir: &Path) -> Result<Vec<Bulk>> {
        let theirs = self.lab.dir().join("vde.ctl");
        let real = Running::vde_switch(&self.lab, None, &theirs, &[])?;
        let lab = &self.lab;
        let vde = |dir: &Path, net: u8| -> Result<[Station; 2]> {
            let station = |host| Station::by_vde(lab, dir, &format!("10.77.{net}.{host}"));
            Ok([station(1)?, station(2)?])
        };
        let nic = |host| Station::by_nic(lab, daemon, "lan0", &format!("10.77.5.{host}"), &[]);
        let ways = [
            (OTHER, real.pid(), vde(&theirs, 3)?),
            ("this switch, the same programs", daemon.pid(), vde(dir, 4)?),
            ("this switch, vnplug nic", daemon.pid(), [nic(1)?, nic(2)?]),
        ];
        self.say(&format!(
            "{} MiB by TCP from one namespace to another, {ROUNDS} rounds in turns:",
            BYTES >> 20
        ));
        let bytes = content(BYTES);
        let mut samples = vec![Vec::new(); ways.len()];
        for _ in 0..ROUNDS {
            for ((_, pid, [from, to]), samples) in ways.iter().zip(&mut samples) {
                let (begin, before) = (Instant::now(), cpu_time(*pid));
                let received = from.sends(to, &bytes)?;
                let seconds = begin.elapsed().as_secs_f64();
                if received != bytes {
                    return Err(LabError::Command {
                        command: "a TCP stream".to_owned(),
                        text: "other bytes came than were sent".to_owned(),
                    });
                }
                let spent = (cpu_time(*pid) - before).as_secs_f64();
                let size = BYTES as f64;
                samples.push((size * 8e-6 / seconds, spent * 1e9 / size));
            }
        }
        let bulks: Vec<Bulk> = ways
            .iter()
            .zip(&mut samples)
            .map(|((way, _, _), samples)| {
                samples.sort_by(|one, other| one.0.total_cmp(&other.0));
                let (mbps, cpu_s) = samples[samples.len() / 2];
                Bulk { way, mbps, cpu_s }
            })
            .collect();
        for bulk in &bulks {
            println!(
                "            {:32} {:>6} Mb/s, {:.2} s of the switch's processor time per GB",
                bulk.way,
                grouped(bulk.mbps as u64),
                bulk.cpu_s
            );
        }
        Ok(bulks)
    }
}

impl Machine {
    fn pings(&self, address: &str) -> Result<bool> {
        match &self.end {
            End::Station(station) => Ok(station.pings(address)),
            End::Far(netns) => Ok(pings(netns, address, &[])),
            End::Guest(guest) => Ok(guest
                .run(&format!("ping -q -c 3 -W 5 {address}"), LIMIT)?
                .success()),
        }
    }
}

/// Rates and costs as bars.
fn svg(bulks: &[Bulk]) -> String {
    let height = TOP + bulks.len() as f64 * ROW + 40.0;
    let mut svg = Svg::new(WIDTH, height);
    let title = Text {
        size: 18.0,
        bold: true,
        ..LABEL
    };
    svg.text(
        (24.0, 34.0),
        "A TCP stream from one namespace to another, by switch",
        title,
    );
    let panels: [(&str, f64, Value); 2] = [
        ("Megabits a second", 260.0, |bulk| bulk.mbps),
        (
            "Seconds of the switch's processor time for a gigabyte",
            600.0,
            |bulk| bulk.cpu_s,
        ),
    ];
    for (what, left, value) in panels {
        svg.text((left, TOP - 16.0), what, LABEL);
        let most = bulks.iter().map(value).fold(f64::MIN_POSITIVE, f64::max);
        svg.line((left, TOP - 6.0), (left, height - 40.0), GRID, "");
        for (at, bulk) in bulks.iter().enumerate() {
            let y = TOP + at as f64 * ROW + ROW / 2.0;
            let color = COLORS[usize::from(bulk.way == OTHER)];
            let length = value(bulk) / most * BAR;
            svg.wide_line((left, y), (left + length, y), color, "", 20.0);
            let text = match value(bulk) {
                small if small < 100.0 => format!("{small:.2}"),
                large => grouped(large as u64),
            };
            svg.text((left + length + 6.0, y + 4.0), &text, LABEL);
        }
    }
    for (at, bulk) in bulks.iter().enumerate() {
        let y = TOP + at as f64 * ROW + ROW / 2.0;
        svg.text((250.0, y + 4.0), bulk.way, LABEL.anchored(Anchor::End));
    }
    let note = format!(
        "{} MiB, medians of {ROUNDS} rounds in turns; the bytes that came were compared.",
        BYTES >> 20
    );
    svg.text((24.0, height - 16.0), &note, LABEL);
    svg.finish()
}

/// The fourth port is QEMU's: the first is the uplink's, and two guests came before.
const PORT: &str = "vnplug:lan0/port4";
const OTHER: &str = "vde_switch (Debian)";
const BYTES: usize = 128 << 20;
const ROUNDS: usize = 3;
const LIMIT: Duration = Duration::from_secs(90);
const WIDTH: f64 = 1000.0;
const TOP: f64 = 84.0;
const ROW: f64 = 40.0;
const BAR: f64 = 230.0;
