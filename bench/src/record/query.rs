//! Row `query-20g`: one host in one hour of a recording of 20 GB, beside `tcpdump -r`.
//!
//! The recording is made here, by the recorder itself, with stamps over six hours. One host speaks in the
//! first, the fifth and the last of them; asked for is the fifth. tcpdump knows no time: it gets the
//! files that overlap the hour, as somebody would give it who looks at their names, and once all of them.

use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vnplug::{Meta, Packet};
use vnplug_e2e::daemon::guest_program;
use vnplug_frame::capfile::write::Interface;
use vnplug_frame::witness::{Protocol, Shape};
use vnplug_store::disk::{Buffer, Real};
use vnplug_store::name::{SegmentName, time};
use vnplug_store::read::Reader;
use vnplug_store::record::{Recorder, Settings};

use super::files;
use super::place::DiskDir;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// Time to the first packet, cold and warm.
pub(crate) fn in_20g(plan: &Plan) -> Result<Vec<Figure>> {
    sys::ordinary()?;
    let bytes = (FULL_BYTES as f64 * plan.time.as_secs_f64().clamp(0.05, 1.0)) as u64;
    let place = DiskDir::with_room(plan, bytes + bytes / 4)?;
    let dir = place.fresh("recorded")?;
    let begin = Instant::now();
    let made = make(&dir, bytes)?;
    eprintln!(
        "  {:.1} GB of {} packets in {} files made in {:.0} s",
        made.bytes as f64 / 1e9,
        made.packets,
        files::captures(&dir)?.len(),
        begin.elapsed().as_secs_f64()
    );
    let ours = || -> Result<Vec<Command>> {
        let mut command = Command::new(guest_program()?);
        command.args(["extract", "--format", "pcap", "--from", &seconds(FROM_NS)]);
        command
            .args(["--to", &seconds(TO_NS)])
            .arg(&dir)
            .arg(filter());
        Ok(vec![command])
    };
    let hour = overlapping(&files::captures(&dir)?)?;
    let all = files::captures(&dir)?;
    let tcpdump = |files: &[PathBuf]| -> Vec<Command> {
        let each = |file: &PathBuf| {
            let mut command = Command::new("tcpdump");
            command
                .args(["-n", "-U", "-w", "-", "-r"])
                .arg(file)
                .arg(filter());
            command
        };
        files.iter().map(each).collect()
    };
    let found = everything(ours()?)?;
    let expected = everything(tcpdump(&hour))?;
    if (found, expected) != (SPOKEN, SPOKEN) {
        return Err(format!(
            "{SPOKEN} packets are wanted: vnplug found {found}, tcpdump {expected}"
        )
        .into());
    }
    let [
        mut cold,
        mut warm,
        mut cold_hour,
        mut warm_hour,
        mut cold_all,
        mut cold_one,
    ] = [(); 6].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        files::forget(&dir)?;
        cold.push(first(ours()?)?.as_secs_f64());
        warm.push(first(ours()?)?.as_secs_f64());
        files::forget(&dir)?;
        cold_hour.push(first(tcpdump(&hour))?.as_secs_f64());
        warm_hour.push(first(tcpdump(&hour))?.as_secs_f64());
        eprintln!(
            "  round {round}: first packet, cold {:.3} s, warm {:.3} s; tcpdump {:.2} s, {:.2} s",
            cold.last(),
            warm.last(),
            cold_hour.last(),
            warm_hour.last()
        );
    }
    // Once is enough of what takes so long.
    files::forget(&dir)?;
    cold_one.push(first(ours()?)?.as_secs_f64());
    files::forget(&dir)?;
    cold_all.push(first(tcpdump(&all))?.as_secs_f64());
    eprintln!("  tcpdump over all files, cold: {:.1} s", cold_all.last());
    let note = |what: &str| {
        format!(
            "seconds from the start of the program to the first of {SPOKEN} packets of one host within \
             one hour, in a recording of {:.1} GB, {} packets of six hours, {} files, mean {} bytes; {what}",
            made.bytes as f64 / 1e9,
            made.packets,
            all.len(),
            made.frame_bytes / made.packets.max(1),
        )
    };
    let row = format!("query-{}g", made.bytes.div_euclid(1_000_000_000));
    let figure = |suffix: &str, ours, peer: &str, theirs, what: &str| Figure {
        name: format!("{row}-{suffix}"),
        unit: "s",
        ours,
        peer: Some((peer.to_owned(), theirs)),
        limit: None,
        note: note(what),
    };
    let of_hour = "tcpdump -r, files of that hour";
    let nothing_cached = "nothing of the recording is in the page cache";
    Ok(vec![
        figure("cold", cold, of_hour, cold_hour, nothing_cached),
        figure("warm", warm, of_hour, warm_hour, "a second time at once"),
        figure(
            "cold-all",
            cold_one,
            "tcpdump -r, all files",
            cold_all,
            nothing_cached,
        ),
    ])
}

/// What was made.
struct Made {
    packets: u64,
    frame_bytes: u64,
    /// Of the capture files.
    bytes: u64,
}

/// Records this many bytes of a mix with timestamps over six hours, through the recorder itself.
fn make(dir: &Path, bytes: u64) -> Result<Made> {
    let frames = mix()?;
    let mean: usize = frames.iter().map(Vec::len).sum::<usize>() / frames.len();
    let packets = bytes / (mean as u64 + HEAD);
    let step_ns = SPAN_NS / packets;
    let interface = Interface {
        name: "made".to_owned(),
        link_type: 1,
        snaplen: 0,
        filter: String::new(),
    };
    let settings = Settings {
        // As many files as a recording of 20 GB has by default.
        rotate_bytes: (bytes / 20).max(2 << 20),
        ..Settings::new("rec", vec![interface])
    };
    let buffers: Vec<Buffer> = (0..settings.buffers)
        .map(|id| Buffer::new(settings.chunk_bytes, id))
        .collect();
    let (mut disk, _) = Real::new(true);
    disk.register(&buffers);
    let mut recorder = Recorder::start(settings, vec![(dir.to_owned(), Box::new(disk))], buffers)?;
    let wanted = wanted()?;
    let (mut spoken, mut frame_bytes) = (0, 0);
    for number in 0..packets {
        let ts_ns = START_NS + number * step_ns;
        // 7 and the number of frames have no divisor in common.
        let mut bytes = &frames[number as usize * 7 % frames.len()];
        if SPEAKS_NS
            .iter()
            .any(|&from| (from..from + SPOKEN * EVERY_NS).contains(&ts_ns))
            && (ts_ns - START_NS) % EVERY_NS < step_ns
        {
            bytes = &wanted;
            spoken += 1;
        }
        let meta = Meta {
            ts_ns,
            wire_len: bytes.len() as u32,
            flow_hash: 0,
            lost: 0,
            flags: 0,
            vlan_tci: 0,
            source: 0,
            queue: 0,
            ..Meta::default()
        };
        frame_bytes += bytes.len() as u64;
        recorder.take(0, &Packet { meta, bytes }, &mut || false);
    }
    let status = recorder.finish();
    if status.durable != packets || spoken != SPOKEN * SPEAKS_NS.len() as u64 {
        return Err(
            format!("the recording failed: {status:?}, {spoken} packets of the host").into(),
        );
    }
    let mut made = Made {
        packets,
        frame_bytes,
        bytes: 0,
    };
    for file in files::captures(dir)? {
        made.bytes += std::fs::metadata(file)?.len();
    }
    Ok(made)
}

/// Frames of 60, 590 and 1514 bytes, 2 to 3 to 7, of UDP and TCP.
fn mix() -> Result<Vec<Vec<u8>>> {
    (0..FLOWS)
        .map(|flow| {
            let (len_bytes, protocol) = match flow * 5 % 12 {
                0..2 => (60, Protocol::Udp4),
                2..5 => (590, Protocol::Tcp4),
                _ => (1514, Protocol::Tcp4),
            };
            frame(len_bytes, flow, protocol)
        })
        .collect()
}

fn frame(len_bytes: usize, flow: u32, protocol: Protocol) -> Result<Vec<u8>> {
    let shape = Shape {
        len_bytes,
        flow,
        protocol,
        vlan_tci: None,
    };
    let mut frame = vec![0; len_bytes];
    shape
        .write(1, &mut frame)
        .map_err(|error| error.to_string())?;
    Ok(frame)
}

/// A frame of the host that is looked for.
fn wanted() -> Result<Vec<u8>> {
    let mut frame = frame(1514, 0, Protocol::Udp4)?;
    // The source address of IPv4 (RFC 791, section 3.1). Nobody looks at the header's checksum here.
    frame[26..30].copy_from_slice(&HOST);
    Ok(frame)
}

fn filter() -> String {
    let [a, b, c, d] = HOST;
    format!("host {a}.{b}.{c}.{d}")
}

fn seconds(ns: u64) -> String {
    format!("{}", ns / NS)
}

/// The files that may have packets of the hour, by their names.
fn overlapping(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut starts = Vec::new();
    for file in files {
        let name = file.file_name().and_then(|name| name.to_str());
        let name = name.and_then(SegmentName::parse);
        starts.push(name.ok_or("a file that is no segment")?.start_ns);
    }
    let after = starts.iter().skip(1).chain([&u64::MAX]);
    let each = files.iter().zip(&starts).zip(after);
    let files: Vec<PathBuf> = each
        .filter(|((_, start), after)| **start < TO_NS && **after > FROM_NS)
        .map(|((file, _), _)| file.clone())
        .collect();
    match files.is_empty() {
        true => Err(format!("no file from {} on", time(FROM_NS)).into()),
        false => Ok(files),
    }
}

/// Runs commands that write pcap, one after the other, until the first packet of the hour is there.
fn first(commands: Vec<Command>) -> Result<Duration> {
    let begin = Instant::now();
    for command in commands {
        let mut reading = Reading::start(command)?;
        while reading.more()? {
            if reading.stamps().any(|ns| (FROM_NS..TO_NS).contains(&ns)) {
                return Ok(begin.elapsed());
            }
        }
    }
    Err("no packet was found".into())
}

/// How many packets of the hour they write.
fn everything(commands: Vec<Command>) -> Result<u64> {
    let mut count = 0;
    for command in commands {
        let mut reading = Reading::start(command)?;
        while reading.more()? {}
        let hour = reading.stamps().filter(|ns| (FROM_NS..TO_NS).contains(ns));
        count += hour.count() as u64;
    }
    Ok(count)
}

/// A program that writes a capture file to a pipe.
struct Reading {
    child: Child,
    bytes: Vec<u8>,
}

impl Reading {
    fn start(mut command: Command) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self {
            child,
            bytes: Vec::new(),
        })
    }

    /// Reads what comes next; false at the end.
    fn more(&mut self) -> Result<bool> {
        let mut bytes = [0; 1 << 16];
        let pipe = self.child.stdout.as_mut().ok_or("no pipe")?;
        let read = pipe.read(&mut bytes)?;
        self.bytes.extend_from_slice(&bytes[..read]);
        if read == 0 {
            let status = self.child.wait()?;
            if !status.success() {
                return Err(format!("a reader ended with {status}").into());
            }
        }
        Ok(read > 0)
    }

    /// The stamps of the packets that are there.
    fn stamps(&self) -> impl Iterator<Item = u64> {
        let bytes = Cursor::new(self.bytes.clone());
        let mut reader = Reader::stream(Box::new(bytes), PathBuf::from("pipe"));
        // What is not whole yet is no packet.
        std::iter::from_fn(move || Some(reader.read().ok()??.ts_ns))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const NS: u64 = 1_000_000_000;
const HOUR_NS: u64 = 3600 * NS;
const FULL_BYTES: u64 = 20_100_000_000;
/// 2026-11-21T08:00Z.
const START_NS: u64 = 1_795_248_000 * NS;
const SPAN_NS: u64 = 6 * HOUR_NS;
const FROM_NS: u64 = START_NS + 4 * HOUR_NS;
const TO_NS: u64 = FROM_NS + HOUR_NS;
/// When the host speaks.
const SPEAKS_NS: [u64; 3] = [START_NS + 600 * NS, FROM_NS + 1800 * NS, TO_NS + 1800 * NS];
/// How many packets each time, and how far apart.
const SPOKEN: u64 = 25;
const EVERY_NS: u64 = 20 * NS;
/// TEST-NET-1 (RFC 5737): no frame of the mix has it.
const HOST: [u8; 4] = [192, 0, 2, 77];
/// Odd, so that successive frames are far apart.
const FLOWS: u32 = 100_003;
/// Bytes of a packet's block beside it.
const HEAD: u64 = 33;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_hour_are_chosen_by_their_names() {
        let at = |hours: u64| {
            PathBuf::from(format!(
                "rec-{hours:010}-{}.pcapng",
                time(START_NS + hours * HOUR_NS)
            ))
        };
        let files: Vec<PathBuf> = (0..6).map(at).collect();
        assert_eq!(overlapping(&files).unwrap(), files[4..5]);
        assert!(overlapping(&files[..0]).is_err());
    }

    #[test]
    fn the_wanted_host_is_none_of_the_mix() {
        let wanted = wanted().unwrap();
        assert!(
            (0..FLOWS)
                .step_by(997)
                .all(|flow| frame(60, flow, Protocol::Udp4).unwrap()[26..30] != wanted[26..30])
        );
    }
}
