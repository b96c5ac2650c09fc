//! Processor time of a packet by part: figures 4.6 and 4.7 of Menon's dissertation in kind, for the twin of a switch.
//!
//! One stream of TCP without super-frames, so that a packet is a frame, between two containers: by the kernel instance,
//! by a Linux bridge, by a bare veth (the host's own); and between a container and a guest of User-mode Linux whose
//! TAP is on a bridge. One recording has both ends and the way: what is asked about when it sends is the sender and the
//! way, when it receives the way and the receiver. Of a guest it is the guest, its hypervisor (here ptrace, signals,
//! switching of tasks) and the way; the container at the other end is left out.

use std::cell::RefCell;
use std::time::Duration;

use rustix::process::getpid;
use vnplug_e2e::{Netns, UmlConfig};

use super::super::guests::{Bulk, Guests, Lan};
use super::super::lans::{Lans, pair};
use super::super::talk::Talk;
use super::super::twin::{Site, tcp};
use super::owner::own_part;
use super::perf::{HERTZ, Recording, Sample, WARM_UP, now_s};
use super::site::of_group;
use crate::row::{Figure, Plan, Result, Samples};

/// Where a processor was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// TCP and IP of who sends, with what its program does in the kernel.
    Sender,
    /// Of who receives.
    Receiver,
    /// The twin: the packet socket's filter and the program at the interface.
    Program,
    Bridge,
    /// veth, TAP, and the queues between them.
    Driver,
    /// User mode of the guest: its kernel and its program.
    Guest,
    /// The host's kernel, for the guest, but for the parts above.
    Hypervisor,
    /// Programs of the ends in user mode, and what belongs to neither end.
    Rest,
}

const PARTS: [(Part, &str); 8] = [
    (Part::Sender, "sender"),
    (Part::Receiver, "receiver"),
    (Part::Program, "program"),
    (Part::Bridge, "bridge"),
    (Part::Driver, "driver"),
    (Part::Guest, "guest"),
    (Part::Hypervisor, "hypervisor"),
    (Part::Rest, "rest"),
];

/// Beginnings of functions, by part. The innermost function that is here decides.
const FUNCTIONS: [(Part, &[&str]); 5] = [
    (
        Part::Program,
        &[
            "bpf_prog_",
            "tcx_",
            "cls_bpf",
            "tcf_",
            "skb_do_redirect",
            "bpf_redirect",
            "tpacket_rcv",
            "packet_rcv",
            "run_filter",
        ],
    ),
    (Part::Bridge, &["br_"]),
    // Before the receiver's, which acknowledgements come through.
    (
        Part::Sender,
        &[
            "tcp_ack",
            "tcp_sendmsg",
            "tcp_write_xmit",
            "tcp_push",
            "tcp_rack",
            "tcp_clean_rtx",
            "tcp_wfree",
            "tcp_tsq",
            "tcp_tasklet",
            "tcp_v4_send_check",
            "sock_write_iter",
            "__sys_sendto",
            "sock_wfree",
            "sk_stream_write",
        ],
    ),
    (
        Part::Receiver,
        &[
            "tcp_v4_rcv",
            "tcp_rcv_",
            "tcp_data_queue",
            "tcp_recvmsg",
            "tcp_cleanup_rbuf",
            "__tcp_send_ack",
            "tcp_send_ack",
            "ip_rcv",
            "ip_list_rcv",
            "ip_sublist_rcv",
            "ip_local_deliver",
            "inet_recvmsg",
            "sock_read_iter",
            "__sys_recvfrom",
            "tcp_delack",
            "sock_def_readable",
        ],
    ),
    (
        Part::Driver,
        &[
            "veth_",
            "tun_",
            "process_backlog",
            "net_rx_action",
            "__netif_receive_skb",
            "netif_rx",
            "__dev_queue_xmit",
            "dev_hard_start_xmit",
            "enqueue_to_backlog",
        ],
    ),
];

/// Nanoseconds of a packet by part.
#[derive(Clone, Copy, Default)]
struct Told {
    ns: [f64; PARTS.len()],
    gbps: f64,
}

impl Told {
    fn sum(&self, parts: &[Part]) -> f64 {
        let of = |(at, (part, _)): (usize, &(Part, &str))| match parts.contains(part) {
            true => self.ns[at],
            false => 0.0,
        };
        PARTS.iter().enumerate().map(of).sum()
    }
}

const WAY: [Part; 3] = [Part::Program, Part::Bridge, Part::Driver];

/// What is asked about when it sends, and when it receives.
fn asked(arm: &str, sends: bool) -> Vec<Part> {
    let own: &[Part] = match (arm.starts_with("guest"), sends) {
        (true, _) => &[Part::Guest, Part::Hypervisor],
        (false, true) => &[Part::Sender],
        (false, false) => &[Part::Receiver],
    };
    [own, &WAY].concat()
}

/// The part of a sample, if it has one.
fn part(sample: &Sample, guest: &[u32], own: u32) -> Option<Part> {
    let first = sample.frames.first()?;
    let is_guest = guest.contains(&sample.pid);
    if !first.is_kernel() {
        return match (is_guest, sample.pid == own) {
            (true, _) => Some(Part::Guest),
            (_, true) => Some(Part::Rest),
            _ => None,
        };
    }
    let chain = own_part(&sample.frames);
    let is_softirq = chain.iter().any(|name| name.starts_with("net_rx_action"));
    if !is_guest && sample.pid != own && !is_softirq {
        return None;
    }
    let of = |name: &&str| {
        let has = |names: &&(Part, &[&str])| names.1.iter().any(|it| name.starts_with(it));
        FUNCTIONS.iter().find(has).map(|(part, _)| *part)
    };
    Some(match chain.iter().find_map(of) {
        Some(part) => part,
        None if is_guest => Part::Hypervisor,
        None => Part::Rest,
    })
}

/// What was sampled between two moments while payload came at this rate.
fn told(samples: &[Sample], (begin, end): (f64, f64), guest: &[u32], gbps: f64) -> Told {
    let mut told = Told {
        gbps,
        ..Told::default()
    };
    let packets = gbps * 1e9 / 8.0 * (end - begin) / MSS;
    let own = getpid().as_raw_nonzero().get().cast_unsigned();
    let within = samples
        .iter()
        .filter(|it| (begin..end).contains(&it.time_s));
    let sample_ns = 1e9 / f64::from(HERTZ);
    for part in within.filter_map(|it| part(it, guest, own)) {
        let at = PARTS.iter().position(|it| it.0 == part).unwrap_or(0);
        told.ns[at] += sample_ns / packets.max(1.0);
    }
    told
}

/// No end of it makes or merges super-frames.
fn single(netns: &Netns, name: &str) -> Result<()> {
    let off = ["tso", "off", "gso", "off", "gro", "off"];
    netns.exec(&[&["ethtool", "-K", name][..], &off].concat())?;
    Ok(())
}

/// All ways in turns.
pub(crate) fn parts(plan: &Plan) -> Result<Vec<Figure>> {
    super::perf::is_there()?;
    let site = Site::new(1, "/twin=on")?;
    let veth = [Netns::new()?, Netns::new()?];
    // As the others are called, at either end.
    pair(
        &veth[0],
        "eth0",
        &veth[1],
        "eth0",
        &vnplug_e2e::containers::address(2),
    )?;
    let address = format!("{}/24", vnplug_e2e::containers::address(1));
    veth[0].ip(&["addr", "add", &address, "dev", "eth0"])?;
    let containers = [
        ("twin", [&site.ours.all[0], &site.ours.all[1]]),
        ("bridge", [&site.bridged[0], &site.bridged[1]]),
        ("veth", [&veth[0], &veth[1]]),
    ];
    for (_, pair) in &containers {
        pair.iter().try_for_each(|netns| single(netns, "eth0"))?;
    }
    let lans = Lans::new(1)?;
    let inner = Netns::new()?;
    pair(&lans.netns, "ct0", &inner, "in0", &LAN.address(ASKER))?;
    lans.netns.ip(&["link", "set", "ct0", "master", "br0"])?;
    single(&inner, "in0")?;
    let guests = Guests::boot(&lans.lab, 1, |guest| UmlConfig {
        kernel_args: lans.cards(guest).to_vec(),
        netns: Some(lans.netns.name().to_owned()),
        ..UmlConfig::default()
    })?;
    guests.join(LAN)?;
    guests.ran(0, "ethtool -K vec0 tso off gso off gro off")?;

    let names = ["twin", "bridge", "veth", "guest-tx", "guest-rx"];
    let mut all: [Vec<Told>; 5] = Default::default();
    for round in 1..=plan.rounds {
        for (at, (_, pair)) in containers.iter().enumerate() {
            let recording = Recording::begin(lans.lab.dir())?;
            std::thread::sleep(WARM_UP);
            let gbps = tcp(pair, plan.time)?;
            let end = now_s();
            let window = (end - plan.time.as_secs_f64(), end);
            all[at].push(told(&recording.end()?, window, &[], gbps));
        }
        for (at, sends) in [(3, true), (4, false)] {
            all[at].push(of_guest(&guests, &lans, &inner, sends, plan.time)?);
        }
        for (name, told) in names.iter().zip(&all) {
            let Some(last) = told.last() else { continue };
            let parts = PARTS.iter().zip(last.ns).filter(|(_, ns)| *ns > 0.5);
            let parts: Vec<_> = parts
                .map(|((_, name), ns)| format!("{name} {ns:.0}"))
                .collect();
            eprintln!(
                "  round {round}, {name}: {:.2} Gb/s; ns: {}",
                last.gbps,
                parts.join(", ")
            );
        }
    }
    if site.forwarded() < 1000 {
        return Err("the kernel instance forwarded nothing".into());
    }
    Ok(figures(&all))
}

fn of_guest(
    guests: &Guests,
    lans: &Lans,
    inner: &Netns,
    sends: bool,
    time: Duration,
) -> Result<Told> {
    let group = guests.first()?.pid();
    // When it began and ended, and the guest's processes.
    let marks: RefCell<Vec<(f64, Vec<u32>)>> = RefCell::default();
    let mark = || {
        marks.borrow_mut().push((now_s(), of_group(group)?));
        Ok(Duration::ZERO)
    };
    let recording = Recording::begin(lans.lab.dir())?;
    let Bulk { gbps, .. } = match sends {
        true => guests.gives(&Talk::Send(LAN.address(ASKER)), inner, time, mark)?,
        false => guests.takes(inner, LAN, None, time, mark)?,
    };
    let samples = recording.end()?;
    let mut marks = marks.into_inner();
    // A stream that was late was measured again: the last two count.
    let (Some((end, mut pids)), Some((begin, earlier))) = (marks.pop(), marks.pop()) else {
        return Err("the stream was not measured".into());
    };
    pids.extend(earlier);
    Ok(told(&samples, (begin, end), &pids, gbps))
}

fn figures(all: &[Vec<Told>; 5]) -> Vec<Figure> {
    let [twin, bridge, veth, guest_tx, guest_rx] = all;
    let mut figures = Vec::new();
    for (word, sends, guest, guest_name) in [
        ("tx", true, guest_tx, "guest-tx"),
        ("rx", false, guest_rx, "guest-rx"),
    ] {
        let sums = |told: &[Told], arm: &str| -> Samples {
            let parts = asked(arm, sends);
            told.iter().map(|it| it.sum(&parts)).collect()
        };
        for (suffix, peer, told, arm) in [
            ("", "a guest, TAP on a bridge", guest, guest_name),
            ("-own", "the host's own, a veth", veth, "veth"),
            ("-bridge", "Linux bridge, veths", bridge, "bridge"),
        ] {
            figures.push(Figure {
                name: format!("twin-parts-{word}{suffix}"),
                unit: UNIT,
                ours: sums(twin, "twin"),
                peer: Some((peer.to_owned(), sums(told, arm))),
                limit: None,
                note: format!(
                    "processor time of a packet of {MSS} bytes of payload where it is {}, by samples of the clock \
                     ({HERTZ} a second) of all processors: that end and the way, not the other end; one stream of TCP \
                     without super-frames; ours by the kernel instance between two containers",
                    if sends { "sent" } else { "received" }
                ),
            });
        }
    }
    let names = ["twin", "bridge", "veth", "guest-tx", "guest-rx"];
    for (name, told) in names.iter().zip(all) {
        for (at, (_, part)) in PARTS.iter().enumerate() {
            let samples: Samples = told.iter().map(|it| it.ns[at]).collect();
            if samples.median() < 0.5 {
                continue;
            }
            figures.push(Figure {
                name: format!("twin-parts-{name}-{part}"),
                unit: UNIT,
                ours: samples,
                peer: None,
                limit: None,
                note: "the part of one stream of TCP, both ends and the way".to_owned(),
            });
        }
    }
    figures
}

const LAN: Lan = Lan {
    interface: "vec0",
    net: 2,
};
/// The number of the container on the network of the guest.
const ASKER: usize = 49;
/// Bytes of payload of a packet.
const MSS: f64 = 1448.0;
const UNIT: &str = "ns CPU/packet";

#[cfg(test)]
mod tests {
    use super::super::perf::Frame;
    use super::*;

    #[test]
    fn the_innermost_function_that_is_known_decides() {
        let sample = |pid, names: &[&str]| Sample {
            pid,
            time_s: 0.0,
            frames: names
                .iter()
                .map(|name| Frame {
                    address: 0xffff_ffff_8100_0000,
                    symbol: (*name).to_owned(),
                    object: String::new(),
                })
                .collect(),
        };
        let of = |pid, names: &[&str]| part(&sample(pid, names), &[10], 30);
        let softirq = ["__netif_receive_skb_core", "net_rx_action", "do_softirq"];
        let with = |names: &[&'static str]| [names, &softirq].concat();
        assert_eq!(
            of(30, &with(&["memcpy", "bpf_prog_1234_x"])),
            Some(Part::Program)
        );
        assert_eq!(of(0, &with(&["br_handle_frame"])), Some(Part::Bridge));
        assert_eq!(
            of(30, &with(&["tcp_ack", "tcp_v4_rcv", "ip_rcv"])),
            Some(Part::Sender)
        );
        assert_eq!(
            of(10, &["ptrace_request", "ksys_ptrace"]),
            Some(Part::Hypervisor)
        );
        assert_eq!(
            of(10, &["copy_from_iter", "tun_get_user"]),
            Some(Part::Driver)
        );
        assert_eq!(of(0, &["pv_native_safe_halt", "do_idle"]), None);
        assert_eq!(of(99, &["vfs_read"]), None);
    }
}
