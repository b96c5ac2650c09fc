//! A web server at rising rates of requests: nginx, asked by httperf (Menon's figure 4.8 in kind).
//!
//! ```text
//!   container ── veth ── twin ──── veth ── nginx in a container
//!   container ── veth ── bridge ── TAP ─── nginx in a guest of User-mode Linux (vec0)
//!   container ── vde_plug2tap ── vde_switch ── the same guest (eth0)
//!   container ── vnplug nic ──── our switch ── the same guest (eth1), by vhost-user
//!   container ── lo ── nginx there
//! ```
//!
//! Each request is a connection. httperf keeps its rate whatever comes back, so a server that cannot is seen by what
//! is not answered.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vnplug_e2e::containers::address;
use vnplug_e2e::station::{Running, Station, pings};
use vnplug_e2e::{Image, Netns, UmlConfig};

use super::guests::{Guests, Lan};
use super::lans::{Lans, pair};
use super::twin::Site;
use crate::row::{Figure, Plan, Result, Samples};

const SWITCH: Lan = Lan {
    interface: "eth1",
    net: 1,
};
const BRIDGE: Lan = Lan {
    interface: "vec0",
    net: 2,
};
const VDE: Lan = Lan {
    interface: "eth0",
    net: 3,
};

/// Who asks whom.
struct Arm<'a> {
    name: &'static str,
    peer: &'static str,
    from: &'a Netns,
    server: String,
}

/// What came at each rate.
struct Sweep {
    /// Answers a second.
    answers: [f64; RATES.len()],
}

impl Sweep {
    /// The most answers a second.
    fn peak(&self) -> f64 {
        self.answers.into_iter().fold(0.0, f64::max)
    }

    /// The highest rate of which all but a twentieth was answered.
    fn holds(&self) -> f64 {
        let held = RATES.iter().zip(self.answers);
        let held = held.take_while(|(rate, came)| *came >= 0.95 * f64::from(**rate));
        held.last().map_or(0.0, |(rate, _)| f64::from(*rate))
    }
}

/// Sweeps in turns; the peak of each, and the rate until which it held.
pub(crate) fn web(plan: &Plan) -> Result<Vec<Figure>> {
    let (nginx, httperf) = (unpacked("usr/sbin/nginx")?, unpacked("usr/bin/httperf")?);
    let site = Site::new(1, "/twin=on")?;
    let lans = Lans::new(1)?;
    let files = Files::new(lans.lab.dir())?;
    let dir = lans.lab.dir().join("vde.ctl");
    let _vde_switch = Running::vde_switch(&lans.lab, None, &dir, &[])?;
    let inner = Netns::new()?;
    pair(&lans.netns, "ct0", &inner, "in0", &BRIDGE.address(ASKER))?;
    lans.netns.ip(&["link", "set", "ct0", "master", "br0"])?;
    let guests = Guests::boot(&lans.lab, 1, |guest| UmlConfig {
        image: files.image(&nginx),
        kernel_args: [format!("eth0=vde,{}", dir.display())]
            .into_iter()
            .chain(lans.cards(guest))
            .collect(),
        netns: Some(lans.netns.name().to_owned()),
        ..UmlConfig::default()
    })?;
    for lan in [SWITCH, BRIDGE, VDE] {
        guests.join(lan)?;
    }
    guests.ran(
        0,
        "/usr/bin/nginx -e /tmp/nginx.err -p /web -c /web/nginx.conf",
    )?;
    let vde = Station::by_vde(&lans.lab, &dir, &VDE.address(ASKER))?;
    let (lab, daemon) = (&lans.lab, &lans.daemon);
    let nic = Station::by_nic(lab, daemon, "lan0", &SWITCH.address(ASKER), &[])?;
    let alone = Netns::new()?;
    alone.ip(&["link", "set", "lo", "up"])?;
    let [asker, server] = [&site.ours.all[0], &site.ours.all[1]];
    let _servers = [
        files.serve(&lans, server, &nginx)?,
        files.serve(&lans, &alone, &nginx)?,
    ];
    let arms = [
        Arm {
            name: "",
            peer: "twin",
            from: asker,
            server: address(2),
        },
        Arm {
            name: "-tap",
            peer: "guest, TAP on a bridge",
            from: &inner,
            server: BRIDGE.address(0),
        },
        Arm {
            name: "-vde",
            peer: "guest, vde_switch",
            from: &vde.netns,
            server: VDE.address(0),
        },
        Arm {
            name: "-switch",
            peer: "guest, our switch",
            from: &nic.netns,
            server: SWITCH.address(0),
        },
        Arm {
            name: "-host",
            peer: "loopback",
            from: &alone,
            server: "127.0.0.1".to_owned(),
        },
    ];
    let [mut peaks, mut holds] = [(); 2].map(|()| arms.each_ref().map(|_| Samples::default()));
    for arm in &arms {
        if !pings(arm.from, &arm.server, &["-c", "3", "-i", "0.2"]) {
            return Err(format!("{}: its server is not reached", arm.peer).into());
        }
        // As many connections as a rate wants, each of which is remembered for a minute.
        for setting in ["ip_local_port_range=1024 65535", "tcp_tw_reuse=1"] {
            let setting = format!("net.ipv4.{setting}");
            arm.from.exec(&["sysctl", "-qw", &setting])?;
        }
    }
    for round in 1..=plan.rounds {
        for (at, arm) in arms.iter().enumerate() {
            let mut answers = [0.0; RATES.len()];
            for (came, rate) in answers.iter_mut().zip(RATES) {
                *came = asked(arm, &httperf, rate, plan.time)?;
            }
            let sweep = Sweep { answers };
            eprintln!(
                "  round {round}, {}: {:.0?} of {RATES:?} a second",
                arm.peer, sweep.answers
            );
            peaks[at].push(sweep.peak());
            holds[at].push(sweep.holds());
        }
    }
    if site.forwarded() < 1000 {
        return Err("the kernel instance forwarded nothing".into());
    }
    let mut figures = Vec::new();
    for (at, arm) in arms.iter().enumerate().skip(1) {
        let kinds = [
            ("", "requests/s", &peaks, "the most answers a second"),
            (
                "-holds",
                "requests/s",
                &holds,
                "the highest rate of which 95 % was answered",
            ),
        ];
        figures.extend(kinds.map(|(suffix, unit, samples, what)| Figure {
            name: format!("twin-web{}{suffix}", arm.name),
            unit,
            ours: samples[0].clone(),
            peer: Some((arm.peer.to_owned(), samples[at].clone())),
            limit: None,
            note: format!(
                "{what}; httperf asks nginx for pages of {PAGE} bytes, a connection for each, at {RATES:?} a second, \
                 for {} s each; ours between two containers by the kernel instance",
                plan.time.as_secs_f64()
            ),
        }));
    }
    Ok(figures)
}

/// Asks at a rate; answers a second.
fn asked(arm: &Arm<'_>, httperf: &Path, rate: u32, time: Duration) -> Result<f64> {
    let connections = (f64::from(rate) * time.as_secs_f64()).ceil() as u32;
    let mut output = None;
    for _ in 0..TRIES {
        // NB: httperf does not end, now and then, when the last of its connections are lost.
        let mut command: Command = arm.from.command("timeout");
        command.arg(LIMIT_S.to_string()).arg(httperf);
        command.args(["--hog", "--timeout=1", "--uri=/page", "--port=8000"]);
        command.arg(format!("--server={}", arm.server));
        command
            .arg(format!("--rate={rate}"))
            .arg(format!("--num-conns={connections}"));
        let asked = command.output()?;
        if asked.status.code() != Some(TIMED_OUT) {
            output = Some(asked);
            break;
        }
    }
    let output = output.ok_or("httperf does not end")?;
    let said = String::from_utf8_lossy(&output.stdout);
    // `Total: connections 500 requests 500 replies 500 test-duration 0.999 s`
    let total = said.lines().find(|line| line.starts_with("Total: "));
    let words: Vec<&str> = total.unwrap_or_default().split_whitespace().collect();
    let after = |name: &str| {
        let at = words.iter().position(|word| *word == name)?;
        words.get(at + 1)?.parse::<f64>().ok()
    };
    match (after("replies"), after("test-duration")) {
        (Some(replies), Some(seconds)) => Ok(replies / seconds.max(time.as_secs_f64())),
        _ => Err(format!("httperf: {said}{}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// What nginx needs beside itself.
struct Files {
    dir: PathBuf,
}

impl Files {
    fn new(lab: &Path) -> Result<Self> {
        let dir = lab.join("web");
        std::fs::create_dir(&dir)?;
        std::fs::write(dir.join("page"), vec![b'x'; PAGE])?;
        std::fs::write(
            dir.join("nginx.conf"),
            configuration(Path::new("/web"), Path::new("/tmp")),
        )?;
        std::fs::write(dir.join("passwd"), "root:x:0:0::/:/bin/sh\n")?;
        std::fs::write(dir.join("group"), "root:x:0:\n")?;
        Ok(Self { dir })
    }

    /// The guest's.
    fn image(&self, nginx: &Path) -> Image {
        let file = |image: Image, name: &str, to: &str| image.file(self.dir.join(name), to, 0o644);
        let mut image = Image::default().program_at(nginx, "/usr/bin/nginx");
        for (name, to) in [
            ("page", "/web/page"),
            ("nginx.conf", "/web/nginx.conf"),
            ("passwd", "/etc/passwd"),
            ("group", "/etc/group"),
        ] {
            image = file(image, name, to);
        }
        image
    }

    /// One in a namespace here.
    fn serve(&self, lans: &Lans, netns: &Netns, nginx: &Path) -> Result<Running> {
        let own = self.dir.join(netns.name());
        std::fs::create_dir(&own)?;
        let text = format!("daemon off;\n{}", configuration(&self.dir, &own));
        std::fs::write(own.join("nginx.conf"), text)?;
        let mut command = netns.command(nginx);
        command.arg("-e").arg(own.join("error")).arg("-p").arg(&own);
        command.arg("-c").arg(own.join("nginx.conf"));
        Ok(Running::start(
            command,
            &lans.lab,
            &format!("nginx-{}", netns.name()),
        )?)
    }
}

/// One process that serves the files of `root`; its own are in `own`.
fn configuration(root: &Path, own: &Path) -> String {
    let own = own.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|name| format!("  {name}_temp_path {own}/{name};\n"));
    format!(
        "user root root;\nmaster_process off;\npid {own}/pid;\nevents {{ worker_connections 4096; }}\nhttp {{\n\
         access_log off;\n{}  server {{ listen 8000 backlog=4096; root {}; keepalive_timeout 0; }}\n}}\n",
        temporary.concat(),
        root.display()
    )
}

fn unpacked(name: &str) -> Result<PathBuf> {
    let path = PathBuf::from("target/web").join(name);
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) => Err(format!("{}: {error}; run bench/get-web.sh", path.display()).into()),
    }
}

/// Requests a second.
const RATES: [u32; 6] = [500, 1000, 2000, 4000, 8000, 16_000];
/// Bytes of a page.
const PAGE: usize = 10_240;
/// How often it is asked, and for how many seconds, before that is given up; how `timeout` says so.
const TRIES: u32 = 3;
const LIMIT_S: u32 = 30;
const TIMED_OUT: i32 = 124;
/// The number of the container on a network of the guest.
const ASKER: usize = 49;
