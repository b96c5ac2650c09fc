//! The demo of recording: a busy wire, a recorder that is killed, and what is found afterwards.
//!
//! ```text
//!   programs that talk, and a generator ──▶ wire ──▶ vnplugd ──ring──▶ vnplug record ──▶ files
//!                                        kill -9, another recorder ──────────┘            │
//!            a picture of the timeline, and one conversation for tshark ◀── vnplug ◀──────┘
//! ```

use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::recorder::{Numbered, Told, beside, output, start};
use super::report::grouped;
use super::talk::Talkers;
use super::wire::{FAR, TAPPED, Wire};
use crate::daemon::{Daemon, value};
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::recorder::segments;
use crate::traffic::Stream;

/// What was recorded, and with what.
#[derive(Debug)]
struct Stage {
    vnplug: PathBuf,
    /// `vnplug-web`, which draws.
    web: PathBuf,
    lab: Lab,
    wire: Wire,
    talkers: Talkers,
    daemon: Daemon,
    /// The recording.
    dir: PathBuf,
    start: Instant,
}

/// Runs the whole demo with these programs and tells about it on standard output; `out` is where what is
/// found, and the picture, are put. What vNPlug did wrong: empty is a success.
///
/// # Errors
/// Why it could not be carried through: something is missing on the machine, or a program failed.
pub fn record(vnplug: &Path, web: &Path, out: &Path) -> Result<Vec<String>> {
    let start = Instant::now();
    fs::create_dir_all(out).map_err(LabError::io(format!("make {}", out.display())))?;
    let lab = Lab::new()?;
    let wire = Wire::new(&lab)?;
    let talkers = Talkers::start(&lab, &wire)?;
    let daemon = Daemon::start(&lab, Some(&wire.here), &["--source", TAPPED])?;
    let stage = Stage {
        vnplug: vnplug.to_owned(),
        web: web.to_owned(),
        dir: lab.dir().join("recording"),
        lab,
        wire,
        talkers,
        daemon,
        start,
    };
    stage.say("a wire between two namespaces, with HTTP, DNS and bulk servers at one end");
    let mut faults = Vec::new();
    stage.fill(&mut faults)?;
    stage.find(out, &mut faults)?;
    stage.draw(out, &mut faults)?;
    Ok(faults)
}

impl Stage {
    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    /// Records, kills, records on.
    fn fill(&self, faults: &mut Vec<String>) -> Result<()> {
        let stream = Stream {
            pps: NonZeroU64::new(PPS),
            len_bytes: 512,
            flows: 100,
            ..Stream::new("wire0", PPS * SECONDS)
        };
        let generator = || {
            let sent = self.wire.near.enter(|| stream.send())?;
            sent.map(drop)
        };
        self.say(&format!(
            "the wire gets busy: {} numbered frames a second for {SECONDS} s, and the programs talk",
            grouped(PPS)
        ));
        let (killed, left, (said, ended)) = beside(generator, || {
            let mut first = start(&self.vnplug, &self.daemon, &self.dir)?;
            self.say("$ vnplug record host:wire1 --to recording");
            self.talkers.converse()?;
            thread::sleep(PAUSE);
            self.say(&format!(
                "  acknowledged: durable up to packet {}",
                grouped(first.mark())
            ));
            first.kill();
            let killed = Told::by(&first);
            self.say(&format!(
                "$ kill -9: the recorder is dead; the mark it left says {}",
                grouped(killed.mark)
            ));
            let left = segments(&self.dir);
            let mut second = start(&self.vnplug, &self.daemon, &self.dir)?;
            self.say("$ vnplug record host:wire1 --to recording    (another one, same place)");
            self.talkers.converse()?;
            thread::sleep(PAUSE);
            self.say(&format!(
                "  acknowledged by the second one: durable up to packet {} of its own",
                grouped(second.mark())
            ));
            let said = second.end()?;
            Ok((killed, left, (said, Told::by(&second))))
        })?;
        for line in said.lines() {
            self.say(&format!("  Ctrl-C: {line}"));
        }
        self.judge(killed, ended, &left, faults)
    }

    /// Compares what both recorders told with what is in their files.
    fn judge(
        &self,
        killed: Told,
        ended: Told,
        left: &[PathBuf],
        faults: &mut Vec<String>,
    ) -> Result<()> {
        let counters = self.daemon.audit();
        let sources = counters.iter().filter(|counted| counted.kind == "source");
        let kernel = sources.map(|source| value(source, "kernel_dropped")).sum();
        let copy = self.lab.dir().join("copy.pcap");
        let found = Numbered::of(&self.vnplug, left, &copy)?;
        self.say(&format!("what the dead one left: {}", found.told()));
        let wrong = found.faults(&killed, kernel);
        if wrong.is_empty() {
            self.say(&format!(
                "  nothing that was acknowledged is missing: {} promised, {} more were on their way",
                grouped(killed.mark),
                grouped(found.packets - killed.mark)
            ));
        }
        let whose = |wrong| format!("the recorder that was killed: {wrong}");
        faults.extend(wrong.into_iter().map(whose));
        // Others read what it left, too.
        let torn = left.last().ok_or_else(|| nothing("no segment is there"))?;
        let mut tcpdump = Command::new("tcpdump");
        tcpdump.args(["-n", "-r"]).arg(torn);
        let packets = output(tcpdump)?.lines().count() as u64;
        self.say(&format!(
            "  tcpdump -r opens its last file as it is: {} packets",
            grouped(packets)
        ));
        let rest: Vec<PathBuf> = segments(&self.dir)
            .into_iter()
            .filter(|file| !left.contains(file))
            .collect();
        let found = Numbered::of(&self.vnplug, &rest, &copy)?;
        self.say(&format!("what the second one recorded: {}", found.told()));
        let wrong = found.faults(&ended, kernel).into_iter();
        faults.extend(wrong.map(|wrong| format!("the second recorder: {wrong}")));
        Ok(())
    }

    /// Extracts one conversation and has tshark read it.
    fn find(&self, out: &Path, faults: &mut Vec<String>) -> Result<()> {
        let downloads = format!("src host {FAR} and tcp src port 80");
        self.say(&format!(
            "$ vnplug flows recording -f '{downloads}' --top 3"
        ));
        let flows = |json: &[&str]| {
            let mut command = Command::new(&self.vnplug);
            command.arg("flows").arg(&self.dir);
            command.args(["-f", &downloads, "--top", "3"]).args(json);
            output(command)
        };
        print!("{}", flows(&[])?);
        let told = flows(&["--json"])?;
        let largest = told.lines().next().unwrap_or_default();
        let largest: Value = serde_json::from_str(largest).unwrap_or_default();
        let (Some(to), Some(port)) = (largest["to"].as_str(), largest["to_port"].as_u64()) else {
            return Err(nothing("no download was recorded"));
        };
        let filter = format!("host {to} and host {FAR} and tcp port 80 and port {port}");
        let file = out.join("conversation.pcapng");
        let mut command = Command::new(&self.vnplug);
        command.arg("extract").arg(&self.dir).arg(&filter);
        command.arg("-w").arg(&file);
        let begin = Instant::now();
        output(command)?;
        self.say(&format!(
            "$ vnplug extract recording '{filter}' -w conversation.pcapng    ({:.2} s)",
            begin.elapsed().as_secs_f64()
        ));
        let tshark = |args: &[&str]| {
            let mut command = Command::new("tshark");
            // Two processors carry the wire: a burst of TCP may arrive out of order, and was recorded so.
            command.args(["-o", "tcp.reassemble_out_of_order:TRUE"]);
            command.args(["-n", "-r"]).arg(&file).args(args);
            output(command)
        };
        self.say("$ tshark -o tcp.reassemble_out_of_order:TRUE -r conversation.pcapng");
        let packets = tshark(&[])?;
        packets
            .lines()
            .take(6)
            .for_each(|line| println!("    {line}"));
        self.say(&format!(
            "  and so on: {} packets, from the first SYN to the last FIN",
            grouped(packets.lines().count() as u64)
        ));
        let spoken = tshark(&["-Y", "http"])?;
        spoken.lines().for_each(|line| println!("    {line}"));
        let whole = spoken.contains("GET /") && spoken.contains("200 OK");
        if !whole {
            faults.push(format!(
                "tshark reads no whole conversation of HTTP: {spoken}"
            ));
        }
        Ok(())
    }

    /// Has the timeline drawn.
    fn draw(&self, out: &Path, faults: &mut Vec<String>) -> Result<()> {
        let picture = out.join("timeline.svg");
        let mut command = Command::new(&self.web);
        command.arg("--svg").arg(&picture).arg(&self.dir);
        output(command)?;
        self.say("$ vnplug-web --svg timeline.svg recording");
        let drawn = fs::read_to_string(&picture).map_err(LabError::io("read the picture"))?;
        if !shows_packets(&drawn) || !drawn.contains("is durable up to here") {
            faults.push("the picture shows no packets, or no durable mark".to_owned());
        }
        Ok(())
    }
}

/// Whether a picture says of how many packets it is.
fn shows_packets(picture: &str) -> bool {
    let before = picture.split_once(" packets, ").map(|(before, _)| before);
    let count = before.and_then(|before| before.rsplit('>').next()?.parse().ok());
    count.is_some_and(|count: u64| count > 0)
}

fn nothing(text: &str) -> LabError {
    LabError::Protocol(text.to_owned())
}

/// Numbered frames per second, and for how long.
const PPS: u64 = 20_000;
const SECONDS: u64 = 12;
/// Lets the last packets of a talk become durable.
const PAUSE: Duration = Duration::from_millis(500);
