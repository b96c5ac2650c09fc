//! The same from guests: a program in a guest, whose agent carries what it says, beside the same request by TCP over the guest's
//! card to a process of the host.
//!
//! ```text
//! program ── agent ── serial line ── daemon ── back-end      ours
//! program ── TCP ── card, TAP ────────────── process          the peer
//! ```

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use vnplug::{BackEnd, BackEndOptions, ChannelOptions, Heard, Told};
use vnplug_e2e::attached::plug;
use vnplug_e2e::daemon::{Daemon, guest_program};
use vnplug_e2e::{Guest, Image, Lab, Netns, Qemu, QemuConfig, UmlConfig};

use super::{LIMIT, trips};
use crate::pcap::stripped;
use crate::row::{Figure, Plan, Result, Samples};
use crate::uml::{AttachedUml, LIMIT as PATIENCE, serve};

/// The name of the program's part that guests run.
pub(crate) const CHILD: &str = "backend-guest";
/// Where guests have this program.
const PROGRAM: &str = "/bin/bench";
/// The host's end of the TAP, the guest's, and where the process answers.
const HOST: &str = "10.85.0.1";
const GUEST: &str = "10.85.0.2";
const PORT: u16 = 7085;
/// What is asked: its name, and the bytes that its peer says.
const WHAT: [(&str, usize); 3] = [("message-64", 64), ("message-64k", 64 << 10), ("event", 1)];

/// A message to a back-end and its answer, and an event and one back, from User-mode Linux and from QEMU.
pub(crate) fn guest(plan: &Plan) -> Result<Vec<Figure>> {
    let mut all = in_place(plan, "uml", |site| {
        let config = UmlConfig {
            image: site.image.clone(),
            netns: Some(site.netns.name().to_owned()),
            kernel_args: vec!["vec0:transport=tap,ifname=tap0,depth=128,gro=1".into()],
            ..UmlConfig::default()
        };
        let uml = AttachedUml::boot_as(&site.lab, &site.daemon, "bench", config)?;
        Ok(Place::Uml(uml))
    })?;
    all.extend(in_place(plan, "qemu", |site| {
        let vnplug = site
            .image
            .clone()
            .file(guest_program()?, "/bin/vnplug", 0o755);
        let config = QemuConfig {
            image: vnplug,
            netns: Some(site.netns.name().to_owned()),
            taps: vec!["tap0".into()],
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&site.lab, config)?;
        plug(&site.daemon, &guest, "bench", &[])?;
        // As long as the guest runs.
        std::mem::forget(serve(&guest)?);
        Ok(Place::Qemu(guest))
    })?);
    Ok(all)
}

/// A daemon with a back-end, and a TAP for a guest.
struct Site {
    lab: Lab,
    netns: Netns,
    daemon: Daemon,
    /// This program.
    image: Image,
}

/// A guest that is there.
enum Place {
    Uml(AttachedUml),
    Qemu(Guest),
}

impl Place {
    /// The guest, and what it calls its card.
    fn guest(&self) -> (&Guest, &'static str) {
        match self {
            Self::Uml(uml) => (uml.guest(), "vec0"),
            Self::Qemu(guest) => (guest, "eth0"),
        }
    }

    fn run(&self, command: &str) -> Result<String> {
        let output = self.guest().0.run(&format!("{command} 2>&1"), PATIENCE)?;
        match output.success() {
            true => Ok(output.text()),
            false => Err(format!("{command}: {}", output.text()).into()),
        }
    }

    /// The median and the 99th percentile of how long something takes in the guest, in microseconds.
    fn takes(&self, what: &str, len: usize, time: Duration) -> Result<[f64; 2]> {
        let command = format!("{PROGRAM} child {CHILD} {what} {len} {}", time.as_micros());
        let said = self.run(&command)?;
        let times: Vec<f64> = said.split_whitespace().flat_map(str::parse).collect();
        match times[..] {
            [half, late] => Ok([half, late]),
            _ => Err(format!("{command}: {said}").into()),
        }
    }
}

fn in_place(
    plan: &Plan,
    name: &str,
    boot: impl FnOnce(&Site) -> Result<Place>,
) -> Result<Vec<Figure>> {
    let (lab, netns) = (Lab::new()?, Netns::new()?);
    netns.tap("tap0")?;
    netns.ip(&["addr", "add", &format!("{HOST}/24"), "dev", "tap0"])?;
    netns.ip(&["link", "set", "tap0", "arp", "on", "up"])?;
    let args = [
        "--source",
        "lab=gen,count=1",
        "--backend",
        "bench,id=1,uid=0,open=vm:*",
    ];
    let daemon = Daemon::start(&lab, None, &args)?;
    let program = stripped(&lab, &std::env::current_exe()?, "bench")?;
    let site = Site {
        image: Image::default().program_at(program, PROGRAM),
        lab,
        netns,
        daemon,
    };
    let place = boot(&site)?;
    let (_, card) = place.guest();
    place.run(&format!(
        "ip addr add {GUEST}/24 dev {card} && ip link set {card} up"
    ))?;
    place.run(&format!("ping -q -c 2 -W 5 {HOST}"))?;
    let options = BackEndOptions::new(1, "bench").events(1, 1);
    let back = options.socket(site.daemon.socket()).register()?;
    // Both end with this process, or when nobody can reach them any more.
    std::thread::spawn(move || answers(back));
    let listener = site.netns.enter(|| TcpListener::bind((HOST, PORT)))??;
    std::thread::spawn(move || listener.incoming().flatten().try_for_each(echoes));
    in_turns(plan, name, &place)
}

fn in_turns(plan: &Plan, name: &str, place: &Place) -> Result<Vec<Figure>> {
    let mut times = WHAT.map(|_| [(); 4].map(|()| Samples::default()));
    for round in 1..=plan.rounds {
        eprint!("  {name} round {round}:");
        for ((what, len), [half, late, theirs, theirs_late]) in WHAT.iter().zip(&mut times) {
            let kind = if *what == "event" { what } else { &"message" };
            let [p50, p99] = place.takes(kind, *len, plan.time / 2)?;
            half.push(p50);
            late.push(p99);
            eprint!(" {what} {p50:.0}/{p99:.0},");
            let [p50, p99] = place.takes("tcp", *len, plan.time / 2)?;
            theirs.push(p50);
            theirs_late.push(p99);
            eprint!(" TCP {p50:.0}/{p99:.0};");
        }
        eprintln!(" us (p50/p99)");
    }
    let mut figures = Vec::new();
    for ((what, len), [half, late, theirs, theirs_late]) in WHAT.into_iter().zip(times) {
        let note = format!(
            "from a program in a guest ({name}) to a back-end on the host and back, both ends asleep; {}. The peer: \
             {len} bytes by TCP over the guest's card, a TAP, to a process that says them back",
            match what {
                "event" => "an event, and one back".to_owned(),
                _ => format!("{len} bytes"),
            }
        );
        for (end, ours, peer) in [("", half, theirs), ("-p99", late, theirs_late)] {
            figures.push(Figure {
                name: format!("backend-guest-{name}-{what}{end}"),
                unit: "us",
                ours,
                peer: Some(("TCP over a TAP".into(), peer)),
                limit: None,
                note: note.clone(),
            });
        }
    }
    Ok(figures)
}

/// A back-end that answers everything with itself.
fn answers(mut back: BackEnd) -> std::result::Result<(), vnplug::Error> {
    loop {
        match back.next(None)? {
            Some(Heard::Message { channel, bytes }) => back.send(channel, &bytes)?,
            Some(Heard::Event {
                channel,
                event,
                count,
            }) => back.event(channel, event, count)?,
            _ => {}
        }
    }
}

/// A process that does the same, for messages of any length: what came is said back.
fn echoes(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let mut bytes = vec![0; 64 << 10];
        loop {
            match stream.read(&mut bytes)? {
                0 => return Ok(()),
                count => stream.write_all(&bytes[..count])?,
            }
        }
    });
    Ok(())
}

/// The program in the guest.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let [what, len, time] = words else {
        return Err("WHAT LENGTH MICROSECONDS".into());
    };
    let (bytes, time) = (vec![7; len.parse()?], Duration::from_micros(time.parse()?));
    let times = match what.as_str() {
        "tcp" => {
            let mut stream = TcpStream::connect((HOST, PORT))?;
            stream.set_nodelay(true)?;
            let mut answer = vec![0; bytes.len()];
            trips(time, || {
                stream.write_all(&bytes)?;
                Ok(stream.read_exact(&mut answer)?)
            })
        }
        _ => {
            let mut channel = ChannelOptions::new("bench").open()?;
            trips(time, || {
                match what.as_str() {
                    "event" => channel.event(0, 1)?,
                    _ => channel.send(&bytes)?,
                }
                match channel.next(LIMIT)? {
                    Some(Told::Message(_) | Told::Event { .. }) => Ok(()),
                    other => Err(format!("no answer but {other:?}").into()),
                }
            })
        }
    }?;
    println!(
        "{} {}",
        times[times.len() / 2],
        times[times.len() * 99 / 100]
    );
    Ok(())
}
