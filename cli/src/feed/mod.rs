//! `vnplug feed`: what another machine captures, onto a wire here.
//!
//! ```text
//!   a server of pcap-over-IP ── TCP ──┐
//!   a mirror that speaks TZSP ── UDP ─┼─► frames ──► an interface, or a device of the daemon
//!   a capture program ── pipe ────────┘
//! ```

mod stream;
mod tzsp;

use std::net::SocketAddr;
use std::path::Path;

use clap::Args;
use serde_json::json;
use vnplug_sandbox::floor::Network;
use vnplug_store::replay::{BATCH, Exit, Obstacle, Outlet, Refused, Wire};

use crate::failure::{Failure, OK, Outcome};
use crate::replay::{Target, all_left, refusals, target};
use crate::text::{escape, grouped};
use crate::{out, sys};

/// Sends what another machine captures into a device or an interface.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug feed tcp://sensor:57012 --to port:mirror
  vnplug feed tzsp://192.0.2.7 --from 192.0.2.1 --to port:mirror
  tcpdump -i eth0 -U -w - | ssh collector vnplug feed - --to port:mirror

A switch of the daemon (vnplugd --switch mirror) is a wire without an interface: what is fed into it is received as
host:mirror. Sending by the daemon needs a grant. Ctrl-C ends it. docs/replay.md.")]
pub(crate) struct Feed {
    /// tcp://HOST:PORT (pcap or pcapng, \"pcap-over-IP\"), tzsp://ADDRESS[:PORT] (by UDP; port 37008), or - (standard input)
    #[arg(value_name = "FROM", value_parser = origin)]
    from: Origin,
    /// Where to: an interface, or port:DEVICE for a device of the daemon (host:… is one, too)
    #[arg(long, value_name = "IFACE|port:DEVICE", value_parser = target)]
    to: Target,
    /// TZSP: take only what such an address sends (several times: any of them). By itself this is no proof: UDP's senders can lie
    #[arg(long = "from", value_name = "ADDRESS[/PREFIX]")]
    senders: Vec<Network>,
    /// End when the server ends, instead of connecting again
    #[arg(long)]
    once: bool,
    /// To a port: size of the transmit ring
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = crate::text::size)]
    ring: u64,
    /// One JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Where frames come from.
#[derive(Debug, Clone, PartialEq)]
enum Origin {
    /// A server of pcap-over-IP, as it was written.
    Server(String),
    /// TZSP, at this address.
    Tzsp(SocketAddr),
    /// Standard input.
    Input,
}

/// What became of it all.
#[derive(Debug, Default)]
struct Report {
    frames: u64,
    bytes: u64,
    refused: Refused,
    /// Connections that were made.
    connections: u64,
    /// Datagrams that are no TZSP, by reason.
    unread: tzsp::Unread,
    /// Datagrams that the kernel had no room for.
    overrun: u64,
    /// A capture is damaged, or the connection failed.
    broken: u64,
}

/// Where frames go.
struct Sink<'a> {
    exit: &'a mut dyn Exit,
    /// A signal came.
    told: bool,
    report: Report,
}

impl Feed {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if !self.senders.is_empty() && !matches!(self.from, Origin::Tzsp(_)) {
            return Err(Failure::new(
                "--from is for tzsp://: others have one sender",
            ));
        }
        sys::catch_signals();
        match &self.to {
            Target::Interface(name) => {
                let mut wire = Wire::open(name, false)?;
                let longest = format!("the MTU of {name} is {}", wire.mtu());
                let (report, ended) = self.take(&mut wire);
                self.tell(&report, &longest)?;
                ended.map(|()| OK)
            }
            Target::Device(device) => {
                let about = |error| Failure::about(device, Failure::from(error).line());
                let mut outlet = Outlet::open(device, socket, self.ring).map_err(about)?;
                let (report, ended) = self.take(&mut outlet);
                let counted = outlet.finish();
                self.tell(&report, "the ring takes no longer ones; see --ring")?;
                ended?;
                all_left(&counted.map_err(about)?)
            }
        }
    }

    fn take(&self, exit: &mut dyn Exit) -> (Report, Result<(), Failure>) {
        let mut sink = Sink {
            exit,
            told: false,
            report: Report::default(),
        };
        let ended = match &self.from {
            Origin::Server(server) => stream::follow(server, self.once, &mut sink),
            Origin::Tzsp(address) => tzsp::listen(*address, &self.senders, &mut sink),
            Origin::Input => stream::read_input(&mut sink),
        };
        (sink.report, ended)
    }

    fn tell(&self, report: &Report, longest: &str) -> Result<(), Failure> {
        let Report {
            frames,
            bytes,
            refused,
            connections,
            unread,
            overrun,
            broken,
        } = report;
        if self.json {
            let line = json!({
                "summary": true, "frames": frames, "bytes": bytes,
                "refused": {
                    "total": refused.total(), "too_long": refused.too_long, "snapped": refused.snapped,
                    "link_type": refused.foreign, "short": refused.short, "by_kernel": refused.by_kernel,
                },
                "connections": connections, "broken": broken, "unread": unread.to_json(), "overrun": overrun,
            });
            return out::raw(&format!("{line}\n"));
        }
        out::line(&format!(
            "{} frames, {} bytes sent",
            grouped(*frames),
            grouped(*bytes)
        ))?;
        let unread = unread.lines();
        let overrun = (*overrun > 0).then(|| {
            let count = grouped(*overrun);
            format!("{count} datagrams lost by the kernel: this process is too slow, or net.core.rmem_max too small")
        });
        for line in refusals(refused, longest, "only their beginning was captured")
            .into_iter()
            .chain(unread)
            .chain(overrun)
        {
            out::line(&escape(&line))?;
        }
        Ok(())
    }
}

impl Sink<'_> {
    /// Whether a signal came, now or before: the system's answer is told once.
    fn stops(&mut self) -> bool {
        self.told |= sys::stop().is_some();
        self.told
    }

    /// Sends frames, as soon as there is room; what cannot be sent is counted. Ends early if a signal came.
    fn send(&mut self, frames: &[&[u8]]) -> Result<(), Failure> {
        let mut left = frames;
        while let Some((first, rest)) = left.split_first() {
            let refused = &mut self.report.refused;
            if first.len() < ETHERNET_HEADER {
                refused.short += 1;
                left = rest;
                continue;
            }
            if !self.exit.fits(first) {
                refused.too_long += 1;
                left = rest;
                continue;
            }
            let fit = |frame: &&&[u8]| frame.len() >= ETHERNET_HEADER && self.exit.fits(frame);
            let run = left.iter().take(BATCH).take_while(fit).count();
            match self.exit.send(&left[..run]) {
                Ok(0) => {
                    if self.stops() {
                        return Ok(());
                    }
                }
                Ok(sent) => {
                    self.report.frames += sent as u64;
                    let bytes = left[..sent].iter().map(|frame| frame.len() as u64);
                    self.report.bytes += bytes.sum::<u64>();
                    left = &left[sent..];
                }
                Err(Obstacle::TooLong) => {
                    refused.too_long += 1;
                    left = rest;
                }
                Err(Obstacle::Frame(_)) => {
                    refused.by_kernel += 1;
                    left = rest;
                }
                Err(Obstacle::Gone(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn origin(text: &str) -> Result<Origin, String> {
    if text == "-" {
        return Ok(Origin::Input);
    }
    if let Some(server) = text.strip_prefix("tcp://") {
        let port = server.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        return match port {
            Some(Ok(_)) => Ok(Origin::Server(server.to_owned())),
            _ => Err("tcp:// wants HOST:PORT, for example tcp://192.0.2.1:57012".into()),
        };
    }
    if let Some(address) = text.strip_prefix("tzsp://") {
        let bare = address.trim_start_matches('[').trim_end_matches(']');
        let alone = bare.parse().map(|ip| SocketAddr::new(ip, tzsp::PORT));
        let found = address.parse().or(alone);
        return found.map(Origin::Tzsp).map_err(|_| {
            "tzsp:// wants an address of this machine, and a port if it is not 37008: tzsp://0.0.0.0".into()
        });
    }
    Err("write tcp://HOST:PORT, tzsp://ADDRESS[:PORT], or - for standard input".into())
}

const ETHERNET_HEADER: usize = 14;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_frames_come_from_is_read() {
        let tzsp = |text: &str| Origin::Tzsp(text.parse().unwrap());
        for (text, wanted) in [
            ("-", Origin::Input),
            ("tcp://sensor:57012", Origin::Server("sensor:57012".into())),
            ("tcp://[::1]:1", Origin::Server("[::1]:1".into())),
            ("tzsp://0.0.0.0", tzsp("0.0.0.0:37008")),
            ("tzsp://192.0.2.1:9", tzsp("192.0.2.1:9")),
            ("tzsp://[::]", tzsp("[::]:37008")),
            ("tzsp://[::1]:9", tzsp("[::1]:9")),
        ] {
            assert_eq!(origin(text), Ok(wanted), "{text}");
        }
        for wrong in [
            "",
            "x",
            "tcp://",
            "tcp://host",
            "tcp://host:x",
            "tzsp://",
            "tzsp://host",
            "udp://1",
        ] {
            origin(wrong).unwrap_err();
        }
    }
}
