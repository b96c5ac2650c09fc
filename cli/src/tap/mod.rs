//! `vnplug tap`: a device as a network interface, for programs that want one.
//!
//! A TAP is an interface whose received frames a process writes. Each packet is one `writev` of a
//! vnet header and the bytes where they lie in the ring: no copy and no allocation on our side.
//!
//! NB: a write of a 60-byte packet takes 0.47 µs, with `IFF_NAPI` 0.73 µs. That mode is not used; it
//! would also let the kernel merge TCP segments (GRO) before anybody reads them.

use std::path::Path;
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Packet, Port};
use vnplug_os::service::Manager;
use vnplug_sandbox::interface::cut::Cutter;
use vnplug_sandbox::interface::tally::{Reason, Tally};
use vnplug_sandbox::interface::{LinkCounters, Tap, TapPlan, header, queue_of};

use crate::capture::{BeforeDaemon, PortArgs, Sink};
use crate::failure::{Failure, OK, Outcome};
use crate::interface::words::{MTUS, interface_name, mac, mtu_of};
use crate::interface::{dropped_json, reasons};
use crate::text::grouped;
use crate::{out, sys};

/// Feed a device into a network interface (TAP), for programs that want one
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug tap host:eth1 --name vn0
  vnplug tap host:eth1 --name vn0 --queues 4 --stats
  tcpdump -ni vn0          # or suricata --af-packet=vn0, zeek -i vn0, ip -s link show vn0

The interface is there until the command ends (Ctrl-C, SIGTERM, also kill -9). It is silent: no ARP,
no IPv6, and what a program sends on it goes nowhere. Readers see the time of injection, not of
capture; packets that the host sent look received. With --snaplen packets are injected as captured,
that is, cut.

received = injected + dropped by the TAP, by reason: link_down, no_room, too_long, too_short,
refused. What the ring lost before, and what readers of the interface lose after (they have counters
of their own), is told apart. More: docs/tap.md.")]
pub(crate) struct TapArgs {
    #[command(flatten)]
    port: PortArgs,
    /// Name of the interface; %d stands for the first free number
    #[arg(long, value_name = "NAME", default_value = "vn%d", value_parser = interface_name)]
    name: String,
    /// Receive queues; a flow stays in one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Largest frame without its Ethernet header, in bytes [default: the device's, else 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(MTUS))]
    mtu: Option<u16>,
    /// Hardware address [default: random]
    #[arg(long, value_name = "ADDRESS", value_parser = mac)]
    mac: Option<[u8; 6]>,
    /// Leave the interface down; packets are dropped and counted until somebody sets it up
    #[arg(long)]
    down: bool,
    /// Print the counters each second
    #[arg(long)]
    stats: bool,
    /// One JSON object per line; the last one is the summary
    #[arg(long)]
    json: bool,
}

struct TapSink {
    tap: Tap,
    /// Frames longer than this are above the MTU, one VLAN tag granted.
    cutter: Cutter,
    longest: usize,
    stats: bool,
    json: bool,
    start: Instant,
    now: Tally,
    before: (Instant, Tally),
    before_daemon: BeforeDaemon,
}

impl TapArgs {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let mut port = self.port.open(socket)?;
        if port.link_type() != ETHERNET {
            let text = format!(
                "its frames are not Ethernet (link type {}); a TAP takes nothing else",
                port.link_type()
            );
            return Err(Failure::about(port.device(), text));
        }
        let mtu = self.mtu.unwrap_or_else(|| mtu_of(socket, port.device()));
        let tap = Tap::new(&TapPlan {
            name: &self.name,
            queues: self.queues.into(),
            mtu,
            mac: self.mac,
            up: !self.down,
            silent: true,
            merged: false,
        })?;
        out::note(&format!(
            "{} receives {}: MTU {}, {}; Ctrl-C removes it",
            tap.name(),
            port.device(),
            mtu,
            match tap.queues() {
                1 => "1 queue".to_owned(),
                queues => format!("{queues} queues"),
            },
        ));
        let start = Instant::now();
        let mut sink = TapSink {
            tap,
            cutter: Cutter::default(),
            longest: usize::from(mtu) + ETHERNET_HEADER + VLAN_TAG,
            stats: self.stats,
            json: self.json,
            start,
            now: Tally::default(),
            before: (start, Tally::default()),
            before_daemon: BeforeDaemon::default(),
        };
        sys::catch_signals();
        let manager = Manager::here();
        manager.say_ready(&format!("{} receives {}", sink.tap.name(), port.device()));
        let driven = self.port.drive(&mut port, &mut sink);
        manager.say_stopping();
        // The totals come whatever ended it.
        sink.before_daemon.ask(&mut port);
        sink.summary(&port)?;
        driven.map(|_| OK)
    }
}

impl Sink for TapSink {
    #[inline]
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.now.received += 1;
        self.before_daemon.see(packet);
        let bytes = packet.bytes;
        if bytes.len() < ETHERNET_HEADER {
            self.now.drop(Reason::TooShort);
            return Ok(());
        }
        let queue = queue_of(packet.meta.flow_hash, self.tap.queues());
        let header = header::of(packet);
        match self.cutter.inject(&self.tap, queue, &header, bytes) {
            Ok(()) => {
                self.now.injected += 1;
                self.now.above_mtu += u64::from(bytes.len() > self.longest);
                self.now.cut += u64::from(bytes.len() < packet.meta.wire_len as usize);
            }
            Err(errno) => match Reason::of(errno) {
                Some(reason) => self.now.drop(reason),
                None => {
                    self.now.drop(Reason::LinkDown);
                    let name = self.tap.name();
                    return Err(Failure::about(name, "somebody removed the interface"));
                }
            },
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn tick(&mut self, port: &mut Port) -> Result<(), Failure> {
        let Some(link) = self.tap.counters() else {
            let name = self.tap.name();
            return Err(Failure::about(name, "somebody removed the interface"));
        };
        if self.before_daemon.marks > 0 {
            self.before_daemon.ask(port);
        }
        if !self.stats {
            return Ok(());
        }
        let now = Instant::now();
        let (then, before) = self.before;
        let injected = (self.now.injected - before.injected) as f64;
        let rate = (injected / (now - then).as_secs_f64()).round() as u64;
        self.before = (now, self.now);
        if self.json {
            let mut line = self.to_json(port, Some(link));
            line["packets_per_second"] = json!(rate);
            line["away"] = json!(port.is_away());
            return out::raw(&format!("{line}\n"));
        }
        out::line(&format!(
            "{} packets/s; {}{}",
            grouped(rate),
            self.words(port, Some(link)),
            if port.is_away() {
                "; waiting for the daemon"
            } else {
                ""
            }
        ))
    }
}

impl TapSink {
    fn summary(&self, port: &Port) -> Result<(), Failure> {
        let link = self.tap.counters();
        if self.json {
            let mut line = self.to_json(port, link);
            line["summary"] = json!(true);
            return out::raw(&format!("{line}\n"));
        }
        out::line(&self.words(port, link))
    }

    /// `10 received = 9 injected + 1 dropped by vn0 (1 link_down); …`
    fn words(&self, port: &Port, link: Option<LinkCounters>) -> String {
        let now = &self.now;
        let mut text = format!(
            "{} received = {} injected + {} dropped by {}{}; {} lost in the ring{}",
            grouped(now.received),
            grouped(now.injected),
            grouped(now.dropped()),
            self.tap.name(),
            reasons(now),
            grouped(port.dropped()),
            self.before_daemon.words(),
        );
        for (count, what) in [
            (now.above_mtu, "above the MTU"),
            (now.cut, "cut by the snaplen"),
        ] {
            if count > 0 {
                text += &format!("; {} injected {what}", grouped(count));
            }
        }
        if let Some(link) = link {
            text += &format!(
                "; the interface counts {} received, {} dropped",
                grouped(link.received),
                grouped(link.dropped)
            );
        }
        text
    }

    fn to_json(&self, port: &Port, link: Option<LinkCounters>) -> Value {
        let seconds = self.start.elapsed().as_secs_f64();
        json!({
            "seconds": (seconds * 1000.0).round() / 1000.0,
            "interface": self.tap.name(),
            "received": self.now.received, "injected": self.now.injected,
            "dropped": self.now.dropped(), "dropped_by_reason": dropped_json(&self.now),
            "above_mtu": self.now.above_mtu, "cut": self.now.cut,
            "lost": port.dropped(), "lost_before_daemon": self.before_daemon.lost(),
            "gaps": port.counts().gaps, "reopened": port.counts().reopened,
            "interface_received": link.map(|link| link.received),
            "interface_dropped": link.map(|link| link.dropped),
        })
    }
}

/// Link type of Ethernet (LINKTYPE_ETHERNET).
const ETHERNET: u32 = 1;
const ETHERNET_HEADER: usize = 14;
const VLAN_TAG: usize = 4;
