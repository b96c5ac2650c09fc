//! `vnplug nic`: a network interface whose cable ends in a switch.
//!
//! What moves its frames is `Cable` of the sandbox, whose programs have such an interface of their own.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use vnplug::{Port, PortOptions};
use vnplug_frame::aggregate::MAX_SEGMENTS;
use vnplug_os::service::Manager;
use vnplug_sandbox::interface::cable::{Cable, Taken, Unguarded};
use vnplug_sandbox::interface::{Tap, TapPlan, in_netns};

use crate::capture::Segments;
use crate::failure::{Failure, OK, Outcome};
use crate::interface::words::{MTUS, gro, interface_name, mac, mtu_of};
use crate::interface::{dropped_json, reasons};
use crate::text::{self, grouped};
use crate::{out, sys};

/// Make a network interface that is a port of a switch
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug nic lan0 --name eth1
  vnplug nic lan0 --name eth0 --netns web            # of `ip netns add web`
  vnplug nic lan0 --netns /proc/4711/ns/net          # of a container's process

The interface is there until the command ends (Ctrl-C, SIGTERM, also kill -9). Give it an address as
any other (ip address add 10.0.0.1/24 dev eth1). While the daemon is away its cable is out.

received = injected + merged (segments that became a part of another) + dropped by the interface, by
reason: link_down, no_room, too_long, too_short, refused; taken = sent + dropped by reason: away, too_long, no_room; ACKs that --acks expand
adds are counted beside. More: docs/switch.md.")]
pub(crate) struct NicArgs {
    /// The switch, as the daemon's --switch names it, or the device of `vnplug list`
    switch: String,
    /// Name of the interface; %d stands for the first free number
    #[arg(long, value_name = "NAME", default_value = "vn%d", value_parser = interface_name)]
    name: String,
    /// Make it in this network namespace: a name that `ip netns` knows, or a path
    #[arg(long, value_name = "NAMESPACE")]
    netns: Option<String>,
    /// Largest frame without its Ethernet header, in bytes [default: the switch's, else 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(MTUS))]
    mtu: Option<u16>,
    /// Hardware address [default: random]
    #[arg(long, value_name = "ADDRESS", value_parser = mac)]
    mac: Option<[u8; 6]>,
    /// Queues in which programs send and receive; a flow stays in one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Leave the interface down
    #[arg(long)]
    down: bool,
    /// Super-frames and checksums left to the switch (merged), or frames as a wire has them
    #[arg(long, value_enum, default_value_t = Segments::Merged)]
    segments: Segments,
    /// The most TCP segments that become one super-frame for the interface, 1 to 44; 1, off: none do [default: 44
    /// with --segments merged]
    #[arg(long, value_name = "SEGMENTS", value_parser = gro)]
    gro: Option<u8>,
    /// ACKs for what was merged: as they are, or up to one for every two segments, where a plain one says no more
    #[arg(long, value_enum, default_value_t = AckMode::AsIs)]
    acks: AckMode,
    /// Size of each of the two rings, for example 4M [default: the daemon's; 1M for sending]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = text::size)]
    ring: u64,
    /// Hand frames to other ports of this user that say so, too, without the switch's work
    #[arg(long)]
    direct: bool,
    /// Print the counters each second
    #[arg(long)]
    stats: bool,
    /// One JSON object per line; the last one is the summary
    #[arg(long)]
    json: bool,
}

/// What becomes of ACKs for what was merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AckMode {
    AsIs,
    Expand,
}

/// The cable, and since when it is there.
struct Nic {
    cable: Cable<Unguarded>,
    start: Instant,
}

impl NicArgs {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let segments = self.merged()?;
        let device = match self.switch.contains(':') {
            true => self.switch.clone(),
            false => format!("host:{}", self.switch),
        };
        let mut options = PortOptions::new(&device)
            .socket(socket)
            .segments(self.segments.into())
            .label("vnplug nic")
            .ring_bytes(self.ring);
        if self.ring > 0 {
            options = options.transmit(self.ring);
        }
        let options = match self.direct {
            true => options.direct(),
            false => options.join(),
        };
        let port = options.open();
        let mut port =
            port.map_err(|error| Failure::about(&device, Failure::from(error).line()))?;
        let mtu = self.mtu.unwrap_or_else(|| mtu_of(socket, port.device()));
        let plan = TapPlan {
            name: &self.name,
            queues: self.queues.into(),
            mtu,
            mac: self.mac,
            up: !self.down,
            silent: false,
            merged: self.segments == Segments::Merged,
        };
        let tap = match &self.netns {
            None => Tap::new(&plan)?,
            Some(netns) => in_netns(netns, || Tap::new(&plan))?,
        };
        out::note(&format!(
            "{} is a port of {}: MTU {mtu}; Ctrl-C removes it",
            tap.name(),
            port.device(),
        ));
        let mut nic = Nic {
            cable: Cable::new(tap, Unguarded, segments, self.acks == AckMode::Expand),
            start: Instant::now(),
        };
        sys::catch_signals();
        let manager = Manager::here();
        let name = nic.cable.tap().name();
        manager.say_ready(&format!("{name} is a port of {}", port.device()));
        let driven = self.drive(&mut nic, &mut port);
        manager.say_stopping();
        // The totals come whatever ended it.
        nic.cable.end();
        nic.tell(&port, self.json, true)?;
        driven.map(|()| OK)
    }

    /// How many segments become one; 0: none do.
    fn merged(&self) -> Result<u8, Failure> {
        let segments = match (self.segments, self.gro) {
            (Segments::Merged, asked) => asked.unwrap_or(MAX_SEGMENTS as u8),
            (Segments::Wire, None | Some(0)) => 0,
            (Segments::Wire, Some(_)) => {
                return Err(Failure::about(
                    "--gro",
                    "what is merged is a super-frame: it needs --segments merged",
                ));
            }
        };
        match self.acks {
            AckMode::Expand if segments == 0 => Err(Failure::about(
                "--acks expand",
                "nothing is merged, so that ACKs are as many as they should be: it needs --gro",
            )),
            _ => Ok(segments),
        }
    }

    fn drive(&self, nic: &mut Nic, port: &mut Port) -> Result<(), Failure> {
        let mut tick = Instant::now() + TICK;
        let mut turns = 0;
        while sys::stop().is_none() {
            let moved = nic.cable.turn(port)?;
            turns += 1;
            // NB: the clock is a system call in User-mode Linux.
            if moved > 0 && turns < TURNS {
                continue;
            }
            turns = 0;
            let now = Instant::now();
            if now >= tick {
                tick = (tick + TICK).max(now);
                if self.stats {
                    nic.tell(port, self.json, false)?;
                }
            }
            if moved == 0 && !nic.cable.idle(port, tick - now, None)? {
                break;
            }
        }
        Ok(())
    }
}

impl Nic {
    fn tell(&self, port: &Port, json: bool, is_last: bool) -> Result<(), Failure> {
        if !json {
            return out::line(&self.words(port));
        }
        let mut line = self.to_json(port);
        if is_last {
            line["summary"] = json!(true);
        }
        out::raw(&format!("{line}\n"))
    }

    /// `10 received = 6 injected + 3 merged + 1 dropped (1 no_room); 5 taken = 4 sent + 1 dropped (1 away); …`
    fn words(&self, port: &Port) -> String {
        let (received, taken) = (self.cable.received(), self.cable.taken());
        format!(
            "{} received = {} injected + {} merged + {} dropped{}, {} lost in the ring; {} taken = {} sent + {} dropped{}{}{}",
            grouped(received.received),
            grouped(received.injected),
            grouped(received.merged),
            grouped(received.dropped()),
            reasons(received),
            grouped(port.dropped()),
            grouped(taken.all),
            grouped(taken.sent),
            grouped(taken.dropped()),
            send_reasons(taken),
            match taken.acks {
                0 => String::new(),
                acks => format!("; {} ACKs added", grouped(acks)),
            },
            if self.cable.is_away() {
                "; waiting for the daemon"
            } else {
                ""
            },
        )
    }

    fn to_json(&self, port: &Port) -> Value {
        let (received, taken) = (self.cable.received(), self.cable.taken());
        let seconds = self.start.elapsed().as_secs_f64();
        json!({
            "seconds": (seconds * 1000.0).round() / 1000.0,
            "interface": self.cable.tap().name(), "device": port.device(), "away": self.cable.is_away(),
            "received": received.received, "injected": received.injected,
            "merged": received.merged,
            "dropped": received.dropped(), "dropped_by_reason": dropped_json(received),
            "lost": port.dropped(), "reopened": port.counts().reopened,
            "taken": taken.all, "sent": taken.sent, "acks_added": taken.acks,
            "held": u64::from(self.cable.holds()),
            "send_dropped": taken.dropped(),
            "send_dropped_by_reason": {
                "away": taken.away, "too_long": taken.too_long, "no_room": taken.no_room,
            },
        })
    }
}

/// ` (3 away, 1 too_long)`, or nothing.
fn send_reasons(taken: &Taken) -> String {
    let named = [
        (taken.away, "away"),
        (taken.too_long, "too_long"),
        (taken.no_room, "no_room"),
    ];
    let words = named.iter().filter(|(count, _)| *count > 0);
    let words = words.map(|(count, name)| format!("{} {name}", grouped(*count)));
    match words.collect::<Vec<_>>().join(", ") {
        words if words.is_empty() => words,
        words => format!(" ({words})"),
    }
}

/// Turns with frames between two looks at the clock.
const TURNS: u32 = 64;
/// How often the counters are told.
const TICK: Duration = Duration::from_secs(1);
