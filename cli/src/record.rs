//! `vnplug record`: packets to disk.

mod closed;
mod trigger;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use vnplug::{Port, PortOptions};
use vnplug_store::disk::{Buffer, Disk, Real, make_directory};
use vnplug_store::encode::Interface;
use vnplug_store::name;
use vnplug_store::record::{LaneStatus, Quota, Recorder, Session, Settings, Source, Status};

use crate::failure::{Failure, OK, Outcome};
use crate::text::{self, grouped};
use crate::{out, sys};

/// Records the packets of devices in capture files.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug record host:eth1 --to /data/rec
  vnplug record host:eth1 host:eth2 --to /disk1/rec --to /disk2/rec --quota 90%
  vnplug record host:eth1 --to /data/rec --rotate-time 10m --slice 'tcp port 443=128'
  vnplug record host:eth1 --to /data/rec --trigger 'tcp[13] & 4 != 0' --before 30s --after 10s
  vnplug record --trigger-now /data/rec
  vnplug record --status /data/rec

Files can be opened while they are written. Ends at Ctrl-C with everything on the disk.")]
pub(crate) struct Record {
    /// Devices as `vnplug list` names them
    #[arg(value_name = "SOURCE", required_unless_present_any = ["status", "trigger_now"])]
    sources: Vec<String>,
    /// Directory for the files; several (of several disks) are written in turn
    #[arg(long, value_name = "DIR", required_unless_present_any = ["status", "trigger_now"])]
    to: Vec<PathBuf>,
    /// Name of the recording
    #[arg(long, value_name = "NAME", default_value = "rec", value_parser = recording_name)]
    name: String,
    /// Only packets that match this pcap-filter(7) expression; the daemon runs it
    #[arg(
        short,
        long,
        value_name = "EXPRESSION",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,
    /// Bytes to keep of each packet [default: 0, all]
    #[arg(
        short,
        long,
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true
    )]
    snaplen: u32,
    /// Bytes to keep of packets that match an expression; may be given several times, the first that
    /// matches counts
    #[arg(long, value_name = "EXPRESSION=BYTES", value_parser = slice)]
    slice: Vec<(String, u32)>,
    /// Format of the files
    #[arg(long, value_enum, default_value_t = Format::Pcapng)]
    format: Format,
    /// Size at which the next file begins; 0 = never
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = text::size)]
    rotate_size: u64,
    /// Time after which the next file begins [default: 0, never]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    rotate_time: Option<Duration>,
    /// Packets after which the next file begins [default: 0, never]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    rotate_count: u64,
    /// Room the recording may take in each directory, as a size or as percent of the disk that may be
    /// used; the oldest files make room [default: no limit, and nothing is removed]
    #[arg(long, value_name = "SIZE|N%", value_parser = quota)]
    quota: Option<Quota>,
    /// Longest time until a packet is given to the disk, and between two syncs; 0 = each write is synced
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = text::duration)]
    flush: Duration,
    /// Memory for packets that wait for the disk
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = text::size)]
    buffer: u64,
    /// Size of each ring, for example 64M, 64K at least; packets are cut to a little less than half of it
    /// [default: the daemon's]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = ring)]
    ring: u64,
    /// Write by pwrite even where io_uring is allowed
    #[arg(long)]
    no_uring: bool,
    /// Write no index; `vnplug index` makes it later
    #[arg(long)]
    no_index: bool,
    /// Keep no manifest of closed files
    #[arg(long)]
    no_manifest: bool,
    /// Stop after this time
    #[arg(short = 't', long, value_name = "TIME", value_parser = text::duration)]
    seconds: Option<Duration>,
    /// How often a line says how it goes; 0 = never [default: 1s on a terminal, else never]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    report: Option<Duration>,
    /// Show the state of the recordings in a directory, as JSON
    #[arg(long, value_name = "DIR", conflicts_with_all = ["sources", "to"])]
    status: Option<PathBuf>,
    /// Leave out packets that came before within this time, through whichever source; 0 = those of the same
    /// stamp [10ms if no time is given]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "10ms", value_parser = text::duration)]
    dedup: Option<Duration>,
    #[command(flatten)]
    trigger: trigger::TriggerOptions,
    #[command(flatten)]
    closed: closed::ClosedOptions,
}

type Directories = Vec<(PathBuf, Box<dyn Disk>)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Pcapng,
    Pcap,
}

impl Record {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if let Some(dir) = &self.status {
            return self.show_status(dir);
        }
        if let Some(dir) = &self.trigger.trigger_now {
            return trigger::now(dir, &self.name);
        }
        let mut settings = self.settings()?;
        sys::catch_trigger(settings.trigger.is_some());
        let buffers: Vec<Buffer> = (0..settings.buffers)
            .map(|id| Buffer::new(settings.chunk_bytes, id))
            .collect();
        let directories = self.directories(&buffers)?;
        // What begins from here on has an end.
        sys::catch_signals();
        sys::ignore_long_files();
        // Last: from now on packets come, and wait in the ring.
        let (ports, interfaces) = self.open_ports(socket)?;
        settings.interfaces = interfaces;
        let recorder = Recorder::start(settings, directories, buffers)
            .map_err(|error| Failure::about(self.place(), self.explain(error)))?;
        let remote = recorder.remote();
        let mut session = Session::new(ports, recorder);
        let ledger = std::sync::Arc::clone(session.recorder().ledger());
        out::note(&format!(
            "recording since {}: {} to {}",
            name::time(ledger.status().run.since_ns),
            self.sources.join(", "),
            self.place(),
        ));
        let mut reports = Reports::new(self.report);
        let end = self.seconds.map(|seconds| Instant::now() + seconds);
        let mut stopped = false;
        let driven = session.run(&mut || {
            let now = Instant::now();
            reports.tick(now, || ledger.status());
            if sys::triggered() {
                remote.trigger("command");
            }
            stopped |= sys::stop().is_some() || end.is_some_and(|end| now >= end);
            stopped
        });
        let waiting = ledger.status().buffered();
        if waiting > MANY {
            out::note(&format!(
                "ending; {} packets are still on their way to the disk",
                grouped(waiting)
            ));
        }
        let status = session.finish();
        out::note(&summary(&status));
        driven?;
        match status.lost_disk + status.lost_unknown {
            0 => Ok(OK),
            lost => {
                let lost = grouped(lost);
                Err(Failure::about(
                    self.place(),
                    format!("the disk failed: {lost} packets are not on it for certain"),
                ))
            }
        }
    }

    /// One port for each source and slice, and the interfaces that they stand for.
    fn open_ports(&self, socket: &Path) -> Result<(Vec<Source>, Vec<Interface>), Failure> {
        let mut sources = Vec::new();
        let mut interfaces = Vec::new();
        for device in &self.sources {
            for (filter, snaplen) in parts(&self.filter, &self.slice, self.snaplen) {
                let port = self.open_port(socket, device, &filter, snaplen)?;
                if snaplen == 0 && port.snaplen() < LONGEST {
                    out::note(&format!(
                        "{device}: packets longer than {} bytes are cut, as this ring takes no longer ones; a \
                         --ring of 1M takes all",
                        grouped(port.snaplen().into())
                    ));
                }
                let interface = interfaces.len();
                if sources.is_empty() || !same_device(&interfaces, &port) {
                    interfaces.push(Interface {
                        name: port.device().to_owned(),
                        link_type: port.link_type(),
                        snaplen: if self.slice.is_empty() {
                            port.snaplen()
                        } else {
                            0
                        },
                        filter: self.filter.clone(),
                    });
                    sources.push(Source::new(port, interface));
                } else {
                    sources.push(Source::new(port, interface - 1));
                }
            }
        }
        let types = interfaces.iter().map(|interface| interface.link_type);
        if self.format == Format::Pcap && types.collect::<std::collections::BTreeSet<_>>().len() > 1
        {
            return Err(Failure::new(
                "the devices have several link types, and a pcap file has one: use --format pcapng",
            ));
        }
        Ok((sources, interfaces))
    }

    fn open_port(
        &self,
        socket: &Path,
        device: &str,
        filter: &str,
        snaplen: u32,
    ) -> Result<Port, Failure> {
        let options = PortOptions::new(device)
            .socket(socket)
            .filter(filter)
            .snaplen(snaplen)
            .ring_bytes(self.ring)
            .watermark(WATERMARK)
            .max_delay(MAX_DELAY)
            .label(format!("record {}[{}]", self.name, std::process::id()));
        options
            .open()
            .map_err(|error| Failure::about(device, Failure::from(error).line()))
    }

    fn settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::new(&self.name, Vec::new());
        settings.format = match self.format {
            Format::Pcapng => name::Format::Pcapng,
            Format::Pcap => name::Format::Pcap,
        };
        settings.rotate_bytes = match self.rotate_size {
            0 => 0,
            size if size < SMALLEST_SEGMENT => {
                return Err(Failure::new("--rotate-size: 2M or more, or 0"));
            }
            size => size,
        };
        settings.rotate_time = self.rotate_time.unwrap_or_default();
        settings.rotate_packets = self.rotate_count;
        settings.quota = self.quota;
        settings.flush_every = self.flush;
        settings.sync_every = self.flush;
        settings.index = !self.no_index;
        let buffers = self.buffer / settings.chunk_bytes as u64;
        settings.buffers = u16::try_from(buffers)
            .ok()
            .filter(|buffers| (4..=4096).contains(buffers))
            .ok_or_else(|| Failure::new("--buffer: between 16M and 16G"))?;
        self.trigger.triggers(&mut settings)?;
        self.closed.archive(&mut settings)?;
        settings.dedup = self.dedup;
        settings.manifest = !self.no_manifest;
        Ok(settings)
    }

    fn directories(&self, buffers: &[Buffer]) -> Result<Directories, Failure> {
        let mut directories = Directories::new();
        let mut seen = Vec::new();
        for dir in &self.to {
            let about = |error| Failure::about(dir.display(), error);
            make_directory(dir).map_err(about)?;
            let place = dir.metadata().map_err(about)?;
            let place = (place.dev(), place.ino());
            if seen.contains(&place) {
                return Err(Failure::about(dir.display(), "named twice by --to"));
            }
            seen.push(place);
            let (mut disk, why_not) = Real::new(!self.no_uring);
            if let Some(why_not) = why_not {
                log::warn!("{}: {why_not}", dir.display());
            }
            disk.register(buffers);
            directories.push((dir.clone(), Box::new(disk)));
        }
        Ok(directories)
    }

    fn show_status(&self, dir: &Path) -> Outcome {
        let about = |error| Failure::about(dir.display(), error);
        let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
            .map_err(about)?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "state")
            })
            .collect();
        files.sort();
        if files.is_empty() {
            return Err(Failure::about(
                dir.display(),
                "no recording has its state here",
            ));
        }
        for file in files {
            let text = std::fs::read_to_string(&file)
                .map_err(|error| Failure::about(file.display(), error))?;
            let state: serde_json::Value = serde_json::from_str(&text)
                .map_err(|error| Failure::about(file.display(), error))?;
            out::raw(&format!("{state:#}\n"))?;
        }
        Ok(OK)
    }

    fn place(&self) -> String {
        let dirs: Vec<String> = self
            .to
            .iter()
            .map(|dir| dir.display().to_string())
            .collect();
        dirs.join(", ")
    }

    fn explain(&self, error: std::io::Error) -> String {
        match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                format!(
                    "another recorder is writing the recording `{}` here; give this one another --name",
                    self.name
                )
            }
            _ => error.to_string(),
        }
    }
}

/// Says how it goes, now and then.
struct Reports {
    every: Option<Duration>,
    at: Instant,
    before: (u64, u64),
}

impl Reports {
    fn new(every: Option<Duration>) -> Self {
        use std::io::IsTerminal;
        let every = every.or_else(|| {
            std::io::stderr()
                .is_terminal()
                .then_some(Duration::from_secs(1))
        });
        Self {
            every: every.filter(|every| !every.is_zero()),
            at: Instant::now(),
            before: (0, 0),
        }
    }

    fn tick(&mut self, now: Instant, status: impl FnOnce() -> Status) {
        let Some(every) = self.every else { return };
        let passed = now.saturating_duration_since(self.at);
        if passed < every {
            return;
        }
        let status = status();
        let per_second = |count: u64, before: u64| (count - before) as f64 / passed.as_secs_f64();
        let packets = per_second(status.taken, self.before.0);
        let bytes = per_second(status.taken_bytes, self.before.1);
        out::note(&format!(
            "{} packets, {} packets/s, {:.1} MB/s, {} lost{}, {}{}{}{}{}",
            grouped(status.taken),
            grouped(packets as u64),
            bytes / 1e6,
            grouped(status.lost()),
            gaps(&status),
            mark(&status),
            duplicates(&status),
            events(&status),
            closed::told(&status),
            paused(&status),
        ));
        self.at = now;
        self.before = (status.taken, status.taken_bytes);
    }
}

/// `durable up to packet N (TIME)`.
fn mark(status: &Status) -> String {
    let stopped = match status.mark < status.settled {
        true => " and, but for what was lost, beyond",
        false => "",
    };
    match status.mark {
        0 => "nothing durable yet".into(),
        mark => format!(
            "durable up to packet {} ({}){stopped}",
            grouped(mark),
            name::time(status.mark_ns)
        ),
    }
}

/// What triggers did, if there are any.
fn events(status: &Status) -> String {
    let Some(trigger) = &status.trigger else {
        return String::new();
    };
    let early = match trigger.early {
        0 => String::new(),
        early => format!(", {} too early for want of memory", grouped(early)),
    };
    let writing = if trigger.writing { " (one now)" } else { "" };
    format!(
        "; {} events{writing}, {} packets passed over{early}",
        grouped(trigger.events),
        grouped(trigger.passed_over),
    )
}

/// What was left out, if that was asked for.
fn duplicates(status: &Status) -> String {
    let Some(duplicates) = &status.duplicates else {
        return String::new();
    };
    let forgotten = match duplicates.forgotten {
        0 => String::new(),
        forgotten => format!(", {} forgotten too early", grouped(forgotten)),
    };
    format!(", {} duplicates{forgotten}", grouped(duplicates.packets))
}

/// Where an unknown number is missing.
fn gaps(status: &Status) -> String {
    match status.gaps {
        0 => String::new(),
        1 => ", 1 gap of unknown size".to_owned(),
        gaps => format!(", {} gaps of unknown size", grouped(gaps)),
    }
}

fn paused(status: &Status) -> String {
    let paused = status.lanes.iter().filter(|lane| !lane.paused.is_empty());
    paused
        .map(|lane| format!("; {} PAUSED: {}", lane.directory, lane.paused))
        .collect()
}

fn summary(status: &Status) -> String {
    let part = |count: u64, words: &str| match count {
        0 => String::new(),
        _ => format!(", {} {words}", grouped(count)),
    };
    let sum = |of: fn(&LaneStatus) -> u64| status.lanes.iter().map(of).sum();
    format!(
        "{} packets recorded, {}{}{}{}{}{}{}{}{}{}{}{}",
        grouped(status.durable),
        mark(status),
        part(status.lost_ring, "lost in the ring"),
        part(status.lost_source, "lost before the daemon"),
        part(status.lost_disk, "not taken by the disk"),
        part(
            status.lost_unknown,
            "written but never confirmed by the disk"
        ),
        gaps(status),
        part(sum(|lane| lane.recycled), "old files recycled"),
        part(
            sum(|lane| lane.recycled_read),
            "of them while somebody read them"
        ),
        part(
            sum(|lane| lane.readers_cut),
            "taken from their readers for want of room"
        ),
        duplicates(status),
        events(status),
        closed::told(status),
    )
}

/// The filters and lengths of the ports that together deliver each packet once.
fn parts(filter: &str, slices: &[(String, u32)], snaplen: u32) -> Vec<(String, u32)> {
    let and = |terms: &[String]| terms.join(" and ");
    let mut before: Vec<String> = match filter.trim() {
        "" => Vec::new(),
        filter => vec![format!("({filter})")],
    };
    let mut parts = Vec::new();
    for (expression, bytes) in slices {
        let mut terms = before.clone();
        terms.push(format!("({expression})"));
        parts.push((and(&terms), *bytes));
        before.push(format!("not ({expression})"));
    }
    parts.push((and(&before), snaplen));
    parts
}

fn same_device(interfaces: &[Interface], port: &Port) -> bool {
    interfaces
        .last()
        .is_some_and(|interface| interface.name == port.device())
}

fn recording_name(text: &str) -> Result<String, String> {
    match name::is_recording_name(text) {
        true => Ok(text.to_owned()),
        false => Err("1 to 64 letters, digits, `.`, `_` and `-`; not `.` or `-` first".into()),
    }
}

fn slice(text: &str) -> Result<(String, u32), String> {
    let wrong = || format!("`{text}`: write for example 'tcp port 443=128'");
    let (expression, bytes) = text.rsplit_once('=').ok_or_else(wrong)?;
    let bytes: u32 = bytes.trim().parse().map_err(|_| wrong())?;
    match (expression.trim(), bytes) {
        ("", _) | (_, 0) => Err(wrong()),
        (expression, bytes) => Ok((expression.to_owned(), bytes)),
    }
}

fn ring(text: &str) -> Result<u64, String> {
    match text::size(text)? {
        bytes if bytes == 0 || bytes >= SMALLEST_RING => Ok(bytes),
        _ => Err("64K or more, or 0 for the daemon's".into()),
    }
}

fn quota(text: &str) -> Result<Quota, String> {
    match text.trim().strip_suffix('%') {
        Some(percent) => match percent.trim().parse() {
            Ok(percent @ 1..=100) => Ok(Quota::Percent(percent)),
            _ => Err(format!("`{text}`: 1% to 100%")),
        },
        None => match text::size(text)? {
            bytes if bytes >= 8 << 20 => Ok(Quota::Bytes(bytes)),
            _ => Err("8M or more".into()),
        },
    }
}

/// So many take a while at the end.
const MANY: u64 = 100_000;
const WATERMARK: u32 = 512;
const MAX_DELAY: Duration = Duration::from_millis(10);
const SMALLEST_SEGMENT: u64 = 2 << 20;
const SMALLEST_RING: u64 = 64 << 10;
/// What segmentation offload makes of an IP packet of 64 KiB, with two VLAN tags.
const LONGEST: u32 = (64 << 10) - 1 + 14 + 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_deliver_each_packet_once() {
        let owned = |parts: &[(&str, u32)]| -> Vec<(String, u32)> {
            parts
                .iter()
                .map(|(filter, bytes)| ((*filter).to_owned(), *bytes))
                .collect()
        };
        assert_eq!(parts("", &[], 0), owned(&[("", 0)]));
        assert_eq!(parts(" ip ", &[], 64), owned(&[("(ip)", 64)]));
        let slices = owned(&[("udp", 128), ("port 443", 96)]);
        let expected = owned(&[
            ("(ip) and (udp)", 128),
            ("(ip) and not (udp) and (port 443)", 96),
            ("(ip) and not (udp) and not (port 443)", 0),
        ]);
        assert_eq!(parts("ip", &slices, 0), expected);
    }

    #[test]
    fn a_slice_needs_both_halves() {
        assert_eq!(slice("ether[0] = 1=64"), Ok(("ether[0] = 1".into(), 64)));
        for text in ["", "udp", "=64", "udp=", "udp=0", "udp=-1"] {
            assert!(slice(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_ring_holds_jumbo_frames() {
        assert_eq!((ring("0"), ring("64K")), (Ok(0), Ok(64 << 10)));
        for text in ["1", "63K", "-1", "x"] {
            assert!(ring(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_quota_is_a_size_or_a_share() {
        assert_eq!(quota("90%"), Ok(Quota::Percent(90)));
        assert_eq!(quota("10G"), Ok(Quota::Bytes(10 << 30)));
        for text in ["0%", "101%", "1K", "x"] {
            assert!(quota(text).is_err(), "{text}");
        }
    }
}
