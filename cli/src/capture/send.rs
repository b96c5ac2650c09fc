//! `vnplug send`: frames onto a device's wire, at a chosen rate.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use vnplug::{Error, Port, PortOptions};
use vnplug_frame::witness::{Protocol, Shape};
use vnplug_ring::control::FilterSpec;

use super::frames::read_frames;
use crate::failure::{Failure, OK, Outcome};
use crate::text::{self, grouped};
use crate::{out, sys};

/// Sends frames; those of a file as they are, without their pace.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug send host:eth1 --count 1000 --pps 100
  vnplug send host:eth1 trace.pcap --pps max
  vnplug send host:lab -t 10s --size 1514

Without a file it sends the generator's numbered frames, which `vnplug count --witness` judges at the
other end. It needs a grant to send; see docs/vnplugd.md.")]
pub(crate) struct Send {
    /// Device as `vnplug list` names it; DEVICE@Q is queue Q
    device: String,
    /// Capture file (pcap) to send, from its first frame to its last [default: generated frames]
    file: Option<PathBuf>,
    /// Frames per second, or max
    #[arg(long, value_name = "N", default_value = "max", value_parser = rate)]
    pps: Rate,
    /// Stop after this many frames; a file begins again [default: the file once; generated: no end]
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this time
    #[arg(short = 't', long, value_name = "TIME", value_parser = text::duration)]
    seconds: Option<Duration>,
    /// Bytes of a generated frame, FCS excluded
    #[arg(long, value_name = "BYTES", default_value_t = 60, value_parser = clap::value_parser!(u16).range(60..=9000), conflicts_with = "file")]
    size: u16,
    /// Size of the transmit ring
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = text::size)]
    ring: u64,
    /// One JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Frames per second.
#[derive(Debug, Clone, Copy)]
struct Rate(Option<u64>);

fn rate(text: &str) -> Result<Rate, String> {
    match text.parse() {
        _ if text == "max" => Ok(Rate(None)),
        Ok(rate) if rate > 0 => Ok(Rate(Some(rate))),
        _ => Err("a number of frames per second, or max".into()),
    }
}

/// Where the frames come from.
enum Frames {
    File(Vec<Vec<u8>>),
    Generated {
        shape: Shape,
        run: u32,
        frame: Vec<u8>,
    },
}

impl Frames {
    /// The frame with this number, from 0.
    fn get(&mut self, number: u64) -> Result<&[u8], Failure> {
        match self {
            Self::File(frames) => Ok(&frames[(number % frames.len() as u64) as usize]),
            Self::Generated { shape, run, frame } => {
                let stamp = shape.write(*run, frame);
                let stamp = stamp.map_err(|bad| Failure::new(bad.to_string()))?;
                stamp.put(frame, number);
                Ok(frame)
            }
        }
    }
}

impl Send {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let mut count = self.count.unwrap_or(u64::MAX);
        let mut frames = match &self.file {
            Some(file) => {
                let frames = read_frames(file)?;
                if self.count.is_none() {
                    count = frames.len() as u64;
                }
                Frames::File(frames)
            }
            None => self.generated(),
        };
        let options = PortOptions::new(&self.device)
            .socket(socket)
            .ring_bytes(4096)
            .enabled(false)
            // Else the source would have to hand over everything (early drop).
            .filter_spec(FilterSpec::Program(NOTHING.to_vec()))
            .transmit(self.ring);
        let opened = options.open();
        let mut port =
            opened.map_err(|error| Failure::about(&self.device, Failure::from(error).line()))?;
        sys::catch_signals();
        let start = Instant::now();
        let sent = self.send(&mut port, &mut frames, count)?;
        // Taken by the host, or it is told what is not.
        let waited = Instant::now() + DRAIN;
        while port.outbox()?.waiting_bytes() > 0 && Instant::now() < waited {
            std::thread::sleep(Duration::from_millis(1));
        }
        let seconds = start.elapsed().as_secs_f64();
        let host = port.stats()?.host;
        let value = |name: &str| {
            let values = host.iter().flat_map(|host| &host.values);
            values
                .into_iter()
                .find(|(key, _)| key == name)
                .map_or(0, |(_, value)| *value)
        };
        let (on_wire, taken) = (value("sent"), value("send_taken"));
        if self.json {
            let line = json!({
                "summary": true, "seconds": seconds, "written": sent, "taken": taken,
                "sent": on_wire, "host": host.as_ref().map(crate::stats::to_json),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            let mut line = format!(
                "{} frames written in {seconds:.3} s: {} frames/s; {} sent, {} dropped by the host",
                grouped(sent),
                grouped((sent as f64 / seconds).round() as u64),
                grouped(on_wire),
                grouped(taken - on_wire)
            );
            for (name, count) in host.iter().flat_map(|host| &host.values) {
                if *count > 0 && name.starts_with("send_dropped_") {
                    line += &format!("; {name} {}", grouped(*count));
                }
            }
            out::line(&line)?;
        }
        match on_wire {
            0 if taken > 0 => Err(Failure::about(
                &self.device,
                "none of the frames was sent; see the counters above, and docs/vnplugd.md",
            )),
            _ => Ok(OK),
        }
    }

    fn generated(&self) -> Frames {
        let shape = Shape {
            len_bytes: usize::from(self.size),
            flow: 0,
            protocol: Protocol::Udp4,
            vlan_tci: None,
        };
        Frames::Generated {
            shape,
            run: std::process::id(),
            frame: vec![0; usize::from(self.size)],
        }
    }

    fn send(&self, port: &mut Port, frames: &mut Frames, count: u64) -> Result<u64, Failure> {
        let start = Instant::now();
        let mut sent = 0;
        while sent < count && sys::stop().is_none() {
            let elapsed = start.elapsed();
            if self.seconds.is_some_and(|limit| elapsed >= limit) {
                break;
            }
            let due = match self.pps.0 {
                None => count,
                Some(pps) => count.min((elapsed.as_secs_f64() * pps as f64) as u64 + 1),
            };
            if let (true, Some(pps)) = (due <= sent, self.pps.0) {
                let next = Duration::from_secs_f64(sent as f64 / pps as f64);
                std::thread::sleep(next.saturating_sub(start.elapsed()).min(LOOK));
                continue;
            }
            let outbox = match port.outbox() {
                Ok(outbox) => outbox,
                Err(Error::Disconnected) => {
                    port.wait(Some(LOOK))?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let batch = due.min(sent + BATCH);
            let mut full = None;
            while sent < batch {
                let frame = frames.get(sent)?;
                if !outbox.push(frame)? {
                    full = Some(frame.len());
                    break;
                }
                sent += 1;
            }
            outbox.flush();
            if let Some(len) = full {
                match port.wait_for_room(len, LOOK) {
                    Ok(_) | Err(Error::Disconnected) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(sent)
    }
}

const BATCH: u64 = 64;
/// A classic BPF program that accepts nothing: `ret #0`.
const NOTHING: [u8; 8] = 0x0006_u64.to_le_bytes();
/// How often signals and the clock are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long the host may take for what is in the ring at the end.
const DRAIN: Duration = Duration::from_secs(5);
