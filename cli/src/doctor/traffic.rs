//! Do packets come, from the wire to the application, and where do they stop?
//!
//! Who may see all counters (root, the daemon's user) reads them twice, a second apart, and disturbs nobody. Everybody
//! else, a guest too, sees no counters of others: there the check opens a port of its own on each device, until the
//! first packet comes.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Client, Counted, Device, Error, Next, PortOptions};
use vnplug_ring::counters::label;

use super::Role;
use super::check::{Finding, State};
use super::live::LEAVE_QUARANTINE;
use super::machine::Machine;
use super::wire::Wire;
use crate::failure::Failure;
use crate::list::value;
use crate::text::grouped;

/// How long it counts packets.
const COUNTED: Duration = Duration::from_secs(1);

/// Looks at the way of a second's packets. `before`: the counters of a moment ago.
pub(super) fn look(
    machine: &Machine,
    socket: &Path,
    role: Role,
    interfaces: &[Wire],
    before: &[Counted],
    devices: &[Device],
) -> Finding {
    if !before.iter().any(|it| it.kind == "daemon") {
        return tried(role, &try_devices(socket, devices));
    }
    let wires = || {
        interfaces
            .iter()
            .map(|it| (it.clone(), received(machine, &it.interface)))
    };
    let was: Vec<_> = wires().collect();
    thread::sleep(COUNTED);
    let later = match Client::connect_to(socket).and_then(|mut it| it.stats()) {
        Ok(later) => later,
        Err(error) => return Finding::skipped(Failure::from(error).line()),
    };
    let arrived =
        { wires().zip(was) }.map(|((wire, now), (_, was))| (wire, now.saturating_sub(was)));
    counted(&arrived.collect::<Vec<_>>(), before, &later)
}

/// What an interface has received.
fn received(machine: &Machine, interface: &str) -> u64 {
    let text = machine.read(&format!("/sys/class/net/{interface}/statistics/rx_packets"));
    text.ok().and_then(|it| it.parse().ok()).unwrap_or(0)
}

/// A place behind which there are no packets.
struct Stop {
    state: State,
    text: String,
    cure: String,
}

impl Stop {
    fn warn(text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self {
            state: State::Warn,
            text: text.into(),
            cure: cure.into(),
        }
    }
}

/// Two looks at the counters.
struct Looks<'a> {
    before: &'a [Counted],
    later: &'a [Counted],
}

impl<'a> Looks<'a> {
    fn of(&self, kind: &'static str) -> impl Iterator<Item = &'a Counted> {
        self.later.iter().filter(move |it| it.kind == kind)
    }

    /// By how much a counter has grown.
    fn grown(&self, one: &Counted, name: &str) -> u64 {
        let is_it = |it: &&Counted| it.kind == one.kind && it.name == one.name;
        let was = self.before.iter().find(is_it);
        value(one, name).saturating_sub(was.map_or(0, |it| value(it, name)))
    }
}

/// Where packets stop. `arrived`: what the interfaces that are here received meanwhile.
pub(super) fn counted(arrived: &[(Wire, u64)], before: &[Counted], later: &[Counted]) -> Finding {
    let looks = Looks { before, later };
    let total = |kind, name| looks.of(kind).map(|it| looks.grown(it, name)).sum::<u64>();
    let on_wires: u64 = arrived.iter().map(|(_, count)| count).sum();
    let ports = looks.of("port").count();
    let seen = total("source", "seen");
    let summary = format!(
        "in 1 s: {} on the wires, {} at the sources, {} to {ports} ports",
        grouped(on_wires),
        grouped(seen),
        grouped(total("port", "delivered"))
    );
    let mut stops: Vec<Stop> = looks
        .of("source")
        .flat_map(|source| match source_stop(&looks, arrived, source) {
            Some(stop) => vec![stop],
            None => ports_of(&looks, source)
                .filter_map(|port| port_stop(&looks, source, port))
                .collect(),
        })
        .collect();
    if stops.is_empty() && seen > 0 && ports == 0 {
        stops.push(Stop::warn(
            "no application has a port",
            "start it with the name that `vnplug list` shows; programs with libpcap need the drop-in: \
             LD_LIBRARY_PATH=/usr/lib/vnplug tcpdump -D lists our devices (after make install: /usr/local/lib/vnplug)",
        ));
    }
    // The worst comes first, and of those the first on the way.
    stops.sort_by_key(|it| it.state != State::Fail);
    let Some(Stop { state, cure, .. }) = stops.first() else {
        return Finding::ok(summary);
    };
    let told: Vec<_> = stops.iter().take(TOLD).map(|it| it.text.as_str()).collect();
    let more = match stops.len().saturating_sub(TOLD) {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    let text = format!("{}{more} ({summary})", told.join("; "));
    match state {
        State::Fail => Finding::fail(text, cure),
        _ => Finding::warn(text, cure),
    }
}

fn source_stop(looks: &Looks<'_>, arrived: &[(Wire, u64)], source: &Counted) -> Option<Stop> {
    // A file that has ended, or a generator, has no wire. One of another network namespace is not looked at.
    let wire = Wire::of(label(source, "description"))?;
    let (Wire { interface, .. }, on_wire) = arrived.iter().find(|(it, _)| *it == wire)?;
    let on_wire = *on_wire;
    let seen = looks.grown(source, "seen");
    // GRO makes one frame of up to 45 packets, and the first packets of all may have come between two looks.
    if on_wire > FEW && seen.saturating_mul(100) < on_wire {
        let count = match seen {
            0 => "none".to_owned(),
            seen => format!("only {}", grouped(seen)),
        };
        return Some(Stop {
            state: State::Fail,
            text: format!(
                "{} packets came to {interface}, and {count} to the source {}",
                grouped(on_wire),
                source.name
            ),
            cure: format!(
                "an XDP program may take them (see xdp-{interface}); journalctl -u vnplugd"
            ),
        });
    }
    (seen == 0).then(|| {
        Stop::warn(
            format!("nothing comes to {interface}"),
            format!(
                "is the mirror port on, is the cable in the right place? tcpdump -ni {interface} shows the same nothing"
            ),
        )
    })
}

/// The ports on a source, or on a port of it if it is a switch.
fn ports_of<'a>(looks: &Looks<'a>, source: &Counted) -> impl Iterator<Item = &'a Counted> {
    let device = format!("host:{}", source.name);
    looks.of("port").filter(move |it| {
        let rest = label(it, "device").strip_prefix(&device);
        rest.is_some_and(|it| it.is_empty() || it.starts_with('/'))
    })
}

fn port_stop(looks: &Looks<'_>, source: &Counted, port: &Counted) -> Option<Stop> {
    let grown = |name| looks.grown(port, name);
    if grown("delivered") > 0 {
        return None;
    }
    let who = match (label(port, "label"), label(port, "owner")) {
        ("", "") => format!("port {}", port.name),
        (program, owner) => format!("port {} ({program}, {owner})", port.name),
    };
    let stop = |why: &str, cure: &str| Some(Stop::warn(format!("{who} gets nothing: {why}"), cure));
    if let Some(why) = label(port, "state").strip_prefix("quarantined: ") {
        return stop(why, LEAVE_QUARANTINE);
    }
    let filter = match label(port, "filter") {
        "" => "its filter takes none".to_owned(),
        filter => format!("its filter takes none: {filter}"),
    };
    const OWN: &str =
        "vnplug count shows what comes without it; tagged packets need `vlan and (FILTER)`";
    const GRANT: &str = "vnplug grant list shows it; vnplug grant set changes it";
    const FULL: &str = "its ring is full, its reader does not read";
    let reasons: [(&str, &str, &str); 9] = [
        (
            "dropped_full",
            FULL,
            "look at the process that has the port: vnplug list",
        ),
        (
            "dropped_budget",
            "the source has more than its thread can do",
            "more queues for the source, or a CPU of its own (cpus=)",
        ),
        ("refused", "the grant of its owner takes none", GRANT),
        ("filtered", &filter, OWN),
        (
            "paused",
            "its reader has paused it",
            "the application has to go on",
        ),
        ("direction", "none is of its direction", "--direction both"),
        (
            "ruled_out",
            "its rules take none",
            "the rules that the application has set",
        ),
        (
            "sampled_out",
            "sampling leaves them out",
            "a smaller --sample",
        ),
        (
            "program",
            "the operator's program drops them",
            "docs/programs.md",
        ),
    ];
    let counts = reasons.map(|(name, why, cure)| (grown(name), why, cure));
    if let Some((_, why, cure)) = { counts.into_iter() }
        .filter(|it| it.0 > 0)
        .max_by_key(|it| it.0)
    {
        return stop(why, cure);
    }
    // What no port wants the kernel drops, and no port has to judge. In a cluster others may have it all.
    let is_early = looks.grown(source, "early") > 0 && label(port, "cluster").is_empty();
    match (is_early, label(port, "filter")) {
        (false, _) => None,
        (true, "") => stop("the grant of its owner takes none", GRANT),
        (true, _) => stop(&filter, OWN),
    }
}

/// What became of a port that was opened on this device: whether a packet came.
type Tried = (String, Result<bool, String>);

/// Opens a port on each device at the same time, until its first packet comes or the second is over.
fn try_devices(socket: &Path, devices: &[Device]) -> Vec<Tried> {
    // A file or a generator may begin with its first reader: that is not for us to be.
    let live = devices
        .iter()
        .filter(|it| Wire::of(&it.description).is_some() || it.kind == "switch");
    let one = |device: &Device| -> Result<bool, Error> {
        let mut port = PortOptions::new(&device.name)
            .socket(socket)
            .ring_bytes(64 << 10)
            .snaplen(64)
            .label("vnplug doctor")
            .reconnect(false)
            .open()?;
        let end = Instant::now() + COUNTED;
        loop {
            match port.next()? {
                Next::Packet(_) => return Ok(true),
                Next::Ended => return Ok(false),
                Next::Nothing => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            port.wait(Some(left))?;
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = live
            .take(TRIED)
            .map(|device| (device.name.clone(), scope.spawn(move || one(device))))
            .collect();
        let ended = threads.into_iter().map(|(name, thread)| {
            let found = thread
                .join()
                .map_err(|_| "it panicked, which is a bug".to_owned());
            let found = found.and_then(|it| it.map_err(|error| Failure::from(error).line()));
            (name, found)
        });
        ended.collect()
    })
}

/// What is to be said of them.
pub(super) fn tried(role: Role, devices: &[Tried]) -> Finding {
    let names = |came: bool| {
        let those = devices.iter().filter(|(_, it)| *it == Ok(came));
        those
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    if let Some((name, Err(error))) = devices.iter().find(|(_, it)| it.is_err()) {
        let cure = match role {
            Role::Host => "vnplug list; the daemon's log",
            Role::Guest => {
                "on the host: vnplug doctor, and vnplug list for the room in this machine's pool"
            }
        };
        return Finding::fail(format!("a reader gets no port on {name}: {error}"), cure);
    }
    let (some, none) = (names(true), names(false));
    if devices.is_empty() {
        return Finding::skipped("no device is live");
    }
    if none.is_empty() {
        return Finding::ok(format!("within 1 s a reader got packets of {some}"));
    }
    let also = match some.is_empty() {
        true => String::new(),
        false => format!(", but of {some}"),
    };
    let cure = match role {
        Role::Host => {
            "as root, vnplug doctor says whether packets come, and which of them this user's grant lets through"
        }
        Role::Guest => {
            "on the host, vnplug doctor says whether packets come, and vnplug grant list what this machine may see"
        }
    };
    Finding::warn(
        format!("within 1 s a reader got no packet of {none}{also}"),
        cure,
    )
}

/// The most of them that are told, and tried.
const TOLD: usize = 3;
const TRIED: usize = 8;
const FEW: u64 = 5;
