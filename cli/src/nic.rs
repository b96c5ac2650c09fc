//! `vnplug nic`: a network interface whose cable ends in a switch.
//!
//! A TAP at one end, a pair of rings at the other. What programs send on the interface is read from the
//! TAP and written into the port's ring; what is due to the port is written into the TAP from where it
//! lies in its ring. Super-frames go both ways uncut, and checksums are left to who needs them.
//!
//! A ring without room holds one frame here and the others in the interface's own queue, as a slow
//! NIC does. While the daemon is away the cable is out, and what is sent is dropped.
//!
//! Segments of a batch that follow each other are merged before the TAP has them, as a NIC's driver does
//! (the kernel does it for no TAP).

use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use vnplug::{Error, Next, Offload, Packet, Port, PortOptions};

use vnplug_frame::acks::Acks;
use vnplug_frame::aggregate::MAX_SEGMENTS;
use vnplug_frame::flow::flow_hash;
use vnplug_frame::segment::{Look, look};

use crate::capture::Segments;
use crate::failure::{Failure, OK, Outcome};
use crate::interface::merge::{Given, Merge, gro};
use crate::interface::tally::{Reason, Tally};
use crate::interface::words::{MTUS, interface_name, mac, mtu_of};
use crate::interface::{Tap, TapPlan, header, in_netns, queue_of};
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
    /// So many TCP segments become one super-frame for the interface at most, 2 to 44; off: none do [default: 44
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

/// Both ends, and what moved between them.
struct Nic {
    tap: Tap,
    /// A frame of the TAP, its vnet header before it.
    frame: Box<[u8]>,
    /// Bytes of a frame in there that the ring had no room for.
    held: Option<usize>,
    /// The queue that is read next.
    turn: usize,
    is_away: bool,
    /// None: segments stay single.
    merge: Option<Merge>,
    /// None: ACKs leave as they are.
    acks: Option<Box<Acks>>,
    received: Tally,
    taken: Taken,
    start: Instant,
}

/// What became of the frames that programs sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Taken {
    /// Read from the TAP.
    all: u64,
    /// Written into the ring.
    sent: u64,
    /// ACKs that were added to those.
    acks: u64,
    /// Dropped: the daemon was away.
    away: u64,
    /// Dropped: longer than a record of the ring.
    too_long: u64,
    /// Dropped: the ring had no room until the end.
    no_room: u64,
}

/// What sending a frame came to.
enum Pushed {
    Sent,
    /// The ring has no room now.
    Full,
    Dropped,
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
            tap,
            frame: vec![0; LONGEST].into_boxed_slice(),
            held: None,
            turn: 0,
            is_away: false,
            merge: (segments > 0).then(|| Merge::new(segments)),
            acks: (self.acks == AckMode::Expand).then(Box::default),
            received: Tally::default(),
            taken: Taken::default(),
            start: Instant::now(),
        };
        sys::catch_signals();
        let driven = self.drive(&mut nic, &mut port);
        // The totals come whatever ended it.
        nic.taken.no_room += u64::from(nic.held.take().is_some());
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
            let moved = nic.receive(port)? + nic.send(port)?;
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
            if moved == 0 && !nic.idle(port, tick - now)? {
                break;
            }
        }
        Ok(())
    }
}

impl Nic {
    /// Lets the interface receive what is in the port's rings, a batch of it.
    fn receive(&mut self, port: &mut Port) -> Result<usize, Failure> {
        let Some(mut merge) = self.merge.take() else {
            let mut count = 0;
            for packet in port.batch(BATCH) {
                self.inject(&packet?)?;
                count += 1;
            }
            return Ok(count);
        };
        let mut packets = Vec::with_capacity(BATCH);
        let mut ended = Ok(());
        for packet in port.batch(BATCH) {
            match packet {
                Ok(packet) => packets.push(packet),
                Err(error) => ended = Err(error.into()),
            }
        }
        let injected = self.inject_all(&mut merge, &packets);
        self.merge = Some(merge);
        injected.and(ended).map(|()| packets.len())
    }

    /// Lets the interface receive these, of which segments are merged.
    fn inject_all(&mut self, merge: &mut Merge, packets: &[Packet<'_>]) -> Result<(), Failure> {
        if let [packet] = packets {
            return self.inject(packet);
        }
        let merged = merge.run(packets);
        self.received.merged += merged;
        self.received.received += merged;
        for given in merge.given(packets) {
            match given {
                Given::Packet(packet) => self.inject(packet)?,
                Given::Made(bytes, offload) => {
                    self.received.received += 1;
                    let merged = Some(offload.gso_size);
                    self.put(&offload.to_native_header(bytes), bytes, merged)?;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn inject(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.received.received += 1;
        self.put(&header::of(packet), packet.bytes, None)
    }

    #[inline]
    fn put(&mut self, header: &[u8], frame: &[u8], merged: Option<u16>) -> Result<(), Failure> {
        if frame.len() < ETHERNET_HEADER {
            self.received.drop(Reason::TooShort);
            return Ok(());
        }
        let queue = match self.tap.queues() {
            1 => 0,
            // NB: a port of a switch is not told the hash.
            queues => queue_of(flow_hash(frame), queues),
        };
        match self.tap.inject(queue, header, frame) {
            Ok(()) => {
                self.received.injected += 1;
                if let Some(acks) = &mut self.acks
                    && let Look::Tcp(segment) = look(frame, frame.len())
                {
                    acks.given(&segment, merged);
                }
            }
            Err(errno) => match Reason::of(errno) {
                Some(reason) => self.received.drop(reason),
                None => return Err(self.removed()),
            },
        }
        Ok(())
    }

    /// Sends what programs sent, a batch of it.
    fn send(&mut self, port: &mut Port) -> Result<usize, Failure> {
        let mut count = 0;
        if let Some(len) = self.held.take() {
            match self.push(port, len)? {
                Pushed::Full => {
                    self.held = Some(len);
                    return Ok(0);
                }
                Pushed::Sent | Pushed::Dropped => count += 1,
            }
        }
        // A queue that is never empty has one batch of them.
        self.turn = (self.turn + 1) % self.tap.queues();
        for _ in 0..BATCH {
            let Some(len) = self.take()? else {
                break;
            };
            self.taken.all += 1;
            if self.acks.is_some() {
                self.expand(port, len)?;
            }
            match self.push(port, len)? {
                Pushed::Full => {
                    self.held = Some(len);
                    break;
                }
                Pushed::Sent | Pushed::Dropped => count += 1,
            }
        }
        if count > 0
            && let Ok(outbox) = port.outbox()
        {
            outbox.flush();
        }
        Ok(count)
    }

    /// Takes the next frame that a program sent, of whichever queue has one; its bytes with its header.
    fn take(&mut self) -> Result<Option<usize>, Failure> {
        for _ in 0..self.tap.queues() {
            match self.tap.take(self.turn, &mut self.frame) {
                Ok(Some(len)) => return Ok(Some(len)),
                Ok(None) => self.turn = (self.turn + 1) % self.tap.queues(),
                Err(Errno::BADFD | Errno::NODEV) => return Err(self.removed()),
                Err(errno) => return Err(Failure::about(self.tap.name(), errno)),
            }
        }
        Ok(None)
    }

    /// Writes what goes before the frame that was read, of `len` bytes with its header, into the ring.
    fn expand(&mut self, port: &mut Port, len: usize) -> Result<(), Failure> {
        let (Some(acks), Some((header, frame))) =
            (&mut self.acks, self.frame[..len].split_first_chunk())
        else {
            return Ok(());
        };
        let Ok(outbox) = port.outbox() else {
            return Ok(());
        };
        let offload = Offload::from_native_header(header);
        let mut failed = Ok(());
        // NB: where there is no room, fewer ACKs are right, too.
        self.taken.acks += acks.expand(frame, &offload, |ack| {
            let pushed = outbox.push_offloaded(ack, &offload);
            pushed.unwrap_or_else(|error| {
                failed = Err(error.into());
                false
            })
        });
        failed
    }

    /// Writes the frame that was read, of `len` bytes with its header, into the ring.
    #[inline]
    fn push(&mut self, port: &mut Port, len: usize) -> Result<Pushed, Failure> {
        let Some((header, frame)) = self.frame[..len].split_first_chunk() else {
            return Err(Failure::about(
                self.tap.name(),
                "a frame without its header",
            ));
        };
        let outbox = match port.outbox() {
            Ok(outbox) => outbox,
            Err(Error::Disconnected) => {
                self.taken.away += 1;
                return Ok(Pushed::Dropped);
            }
            Err(error) => return Err(error.into()),
        };
        if frame.len() > outbox.max_frame() {
            self.taken.too_long += 1;
            return Ok(Pushed::Dropped);
        }
        if outbox.push_offloaded(frame, &Offload::from_native_header(header))? {
            self.taken.sent += 1;
            return Ok(Pushed::Sent);
        }
        outbox.flush();
        Ok(Pushed::Full)
    }

    /// Waits until one of both has something, at most so long. False: the switch is gone for good.
    fn idle(&mut self, port: &mut Port, limit: Duration) -> Result<bool, Failure> {
        match port.next()? {
            Next::Packet(packet) => {
                self.inject(&packet)?;
                return Ok(true);
            }
            Next::Ended => return Ok(false),
            Next::Nothing => {}
        }
        if port.is_away() != self.is_away {
            self.is_away = !self.is_away;
            self.tap.set_carrier(!self.is_away);
        }
        let limit = match self.held {
            // Nobody tells of room.
            Some(_) => limit.min(PAUSE),
            None => limit,
        };
        let sent = self.tap.descriptors().filter(|_| self.held.is_none());
        let mut fds: Vec<PollFd<'_>> = std::iter::once(port.fd())
            .chain(sent)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(Failure::about("cannot wait", errno)),
        }
    }

    fn removed(&self) -> Failure {
        Failure::about(self.tap.name(), "somebody removed the interface")
    }

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
        let (received, taken) = (&self.received, &self.taken);
        format!(
            "{} received = {} injected + {} merged + {} dropped{}, {} lost in the ring; {} taken = {} sent + {} dropped{}{}{}",
            grouped(received.received),
            grouped(received.injected),
            grouped(received.merged),
            grouped(received.dropped()),
            received.reasons(),
            grouped(port.dropped()),
            grouped(taken.all),
            grouped(taken.sent),
            grouped(taken.dropped()),
            taken.reasons(),
            match taken.acks {
                0 => String::new(),
                acks => format!("; {} ACKs added", grouped(acks)),
            },
            if self.is_away {
                "; waiting for the daemon"
            } else {
                ""
            },
        )
    }

    fn to_json(&self, port: &Port) -> Value {
        let (received, taken) = (&self.received, &self.taken);
        let seconds = self.start.elapsed().as_secs_f64();
        json!({
            "seconds": (seconds * 1000.0).round() / 1000.0,
            "interface": self.tap.name(), "device": port.device(), "away": self.is_away,
            "received": received.received, "injected": received.injected,
            "merged": received.merged,
            "dropped": received.dropped(), "dropped_by_reason": received.dropped_json(),
            "lost": port.dropped(), "reopened": port.counts().reopened,
            "taken": taken.all, "sent": taken.sent, "acks_added": taken.acks,
            "held": u64::from(self.held.is_some()),
            "send_dropped": taken.dropped(),
            "send_dropped_by_reason": {
                "away": taken.away, "too_long": taken.too_long, "no_room": taken.no_room,
            },
        })
    }
}

impl Taken {
    fn dropped(&self) -> u64 {
        self.away + self.too_long + self.no_room
    }

    /// ` (3 away, 1 too_long)`, or nothing.
    fn reasons(&self) -> String {
        let named = [
            (self.away, "away"),
            (self.too_long, "too_long"),
            (self.no_room, "no_room"),
        ];
        let words = named.iter().filter(|(count, _)| *count > 0);
        let words = words.map(|(count, name)| format!("{} {name}", grouped(*count)));
        match words.collect::<Vec<_>>().join(", ") {
            words if words.is_empty() => words,
            words => format!(" ({words})"),
        }
    }
}

/// Frames of one end before the other has its turn.
const BATCH: usize = 64;
/// Turns with frames between two looks at the clock.
const TURNS: u32 = 64;
/// How often the counters are told.
const TICK: Duration = Duration::from_secs(1);
/// Between two looks at a ring without room.
const PAUSE: Duration = Duration::from_micros(100);
const ETHERNET_HEADER: usize = 14;
/// Bytes of the longest frame that a TAP gives: 64 KiB of IP, Ethernet header, tags, vnet header.
const LONGEST: usize = (64 << 10) + 14 + 8 + header::SIZE;
