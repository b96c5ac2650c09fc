//! `vnplug record`: packets to disk.

mod closed;
mod options;
mod report;
mod status;
mod trigger;

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use vnplug::{Port, PortOptions};
use vnplug_frame::capfile::write::Interface;
use vnplug_os::service::Manager;
use vnplug_store::disk::{Buffer, Disk, Real, make_directory};
use vnplug_store::name;
use vnplug_store::record::{Quota, Recorder, Session, Settings, Source};

use crate::failure::{Failure, OK, Outcome, USAGE};
use crate::text::{self, counted, grouped};
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
  vnplug record host:eth1 --to /data/rec --max-age 30d --rotate-time 1h

Files can be opened while they are written. Ends at Ctrl-C with everything on the disk.")]
pub(crate) struct Record {
    /// Devices as `vnplug list` names them
    #[arg(value_name = "SOURCE", required_unless_present_any = ["status", "trigger_now"])]
    sources: Vec<String>,
    /// Directory for the files; several (of several disks) are written in turn
    #[arg(long, value_name = "DIR", required_unless_present_any = ["status", "trigger_now"])]
    to: Vec<PathBuf>,
    /// Name of the recording
    #[arg(long, value_name = "NAME", default_value = "rec", value_parser = options::recording_name)]
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
        value_parser = text::length,
        default_value_t = 0,
        hide_default_value = true
    )]
    snaplen: u32,
    /// Bytes to keep of packets that match an expression; may be given several times, the first that
    /// matches counts
    #[arg(long, value_name = "EXPRESSION=BYTES", value_parser = options::slice)]
    slice: Vec<(String, u32)>,
    /// Format of the files
    #[arg(long, value_enum, default_value_t = Format::Pcapng)]
    format: Format,
    /// Size at which the next file begins; 0 = never
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = text::size)]
    rotate_size: u64,
    /// Time after which the next file begins, for example 90s or 1h30m [default: 0, never]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    rotate_time: Option<Duration>,
    /// Packets after which the next file begins [default: 0, never]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    rotate_count: u64,
    /// Disk space for the recording in each directory, as a size or as percent of what is usable; the
    /// oldest files are removed [default: no limit, and nothing is removed]
    #[arg(long, value_name = "SIZE|N%", value_parser = options::quota)]
    quota: Option<Quota>,
    /// Retention: remove files last written longer ago than this, for example 30d [default: never]
    #[arg(long, value_name = "TIME", value_parser = options::age)]
    max_age: Option<Duration>,
    /// Longest time until a packet is given to the disk, and between two syncs; 0 = each write is synced
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = text::duration)]
    flush: Duration,
    /// Memory for packets that wait for the disk
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = text::size)]
    buffer: u64,
    /// Size of each ring, for example 64M, 64K at least; packets are cut to a little less than half of it
    /// [default: the daemon's]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = options::ring)]
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
    /// How often to print a progress line; 0 = never [default: 1s on a terminal, else 10s and only if packets were lost]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    report: Option<Duration>,
    /// Also make the missing parent directories of --to
    #[arg(long)]
    parents: bool,
    /// One JSON object on standard output: the state at the end, or with --status each state as it is
    #[arg(long)]
    json: bool,
    /// Show the state of the recordings in a directory
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
            return status::show(dir, self.json);
        }
        if let Some(dir) = &self.trigger.trigger_now {
            return trigger::now(dir, &self.name);
        }
        self.each_source_once()?;
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
        let what = format!("{} to {}", self.sources.join(", "), self.place());
        let since = name::time(ledger.status().run.since_ns);
        out::note(&format!("recording since {since}: {what}"));
        let manager = Manager::here();
        manager.say_ready(&format!("Recording {what}"));
        let mut reports = report::Reports::new(self.report);
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
        manager.say_stopping();
        let waiting = || {
            let status = ledger.status();
            let waits = counted(status.buffered, "packet");
            let at = options::since(status.run.since_ns);
            out::note(&format!(
                "ending, {at} after the beginning: {waits} on the way to the disk"
            ));
        };
        if ledger.status().buffered > MANY {
            waiting();
        }
        let status = report::ending(EACH, waiting, || session.finish());
        let summary = report::summary(&status);
        match status.lost() + status.gaps {
            0 => out::note(&summary),
            _ => out::warn(&summary),
        }
        if self.json {
            out::raw(&status::line(&status))?;
        }
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

    /// A source that is named twice would be recorded twice.
    fn each_source_once(&self) -> Result<(), Failure> {
        for (n, source) in self.sources.iter().enumerate() {
            if self.sources[..n].contains(source) {
                return Err(twice(source));
            }
        }
        Ok(())
    }

    /// One port for each source and slice, and the interfaces that they stand for.
    fn open_ports(&self, socket: &Path) -> Result<(Vec<Source>, Vec<Interface>), Failure> {
        let mut sources = Vec::new();
        let mut interfaces = Vec::new();
        for device in &self.sources {
            let before = interfaces.len();
            for (filter, snaplen) in options::parts(&self.filter, &self.slice, self.snaplen) {
                let port = self.open_port(socket, device, &filter, snaplen)?;
                // Under another name: `lab` is `host:lab`.
                if interfaces[..before]
                    .iter()
                    .any(|it: &Interface| it.name == port.device())
                {
                    return Err(twice(device));
                }
                if snaplen == 0 && port.snaplen() < LONGEST {
                    out::warn(&format!(
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
        settings.max_age = self.max_age;
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
            make_directory(dir, self.parents).map_err(|error| match error.kind() {
                ErrorKind::NotFound => Failure::about(
                    dir.display(),
                    "the directory above is missing: is its disk mounted? --parents makes it",
                ),
                _ => about(error),
            })?;
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

fn twice(source: &str) -> Failure {
    Failure::with_code(
        USAGE,
        format!("{source}: named twice: its packets would be recorded twice"),
    )
}

fn same_device(interfaces: &[Interface], port: &Port) -> bool {
    interfaces
        .last()
        .is_some_and(|interface| interface.name == port.device())
}

/// This many take a while at the end.
const MANY: u64 = 100_000;
/// How often an end that lasts says what it waits for.
const EACH: Duration = Duration::from_secs(2);
const WATERMARK: u32 = 512;
const MAX_DELAY: Duration = Duration::from_millis(10);
const SMALLEST_SEGMENT: u64 = 2 << 20;
/// What segmentation offload makes of an IP packet of 64 KiB, with two VLAN tags.
const LONGEST: u32 = (64 << 10) - 1 + 14 + 8;
