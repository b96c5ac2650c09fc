//! What is sent under a lock: forged frames never reach the wire, whatever they forge, and the others all do.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug::{Error, GrantAction, GrantKind, Next, Port, Segments, code};
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_e2e::wire::Wire;
use vnplug_e2e::{Guest, Lab, Netns};
use vnplug_ring::control::{Counted, Direction};
use vnplug_testing::{Deadline, PATIENCE, until};

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];
/// What the sender may.
const TERMS: &str = "mac=02:00:00:00:00:01,vlan=no,ip=10.0.0.5+fd00::5,filter=not udp port 53";
/// Frames that it may not send, in all.
const FORGED: usize = 1_000_000;

/// A frame, and which counter has it if it is refused.
struct Sent {
    frame: Vec<u8>,
    refused: Option<&'static str>,
}

fn ethernet(from: [u8; 6], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [
        &[2, 0, 0, 0, 0, 2],
        &from[..],
        &ethertype.to_be_bytes(),
        packet,
    ]
    .concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

fn udp(from: [u8; 4], port: u8) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
    packet.extend(from);
    packet.extend([10, 0, 0, 1, 0, port, 0, port, 0, 8, 0, 0]);
    packet
}

fn six(from: [u8; 16], next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next, 255];
    packet.extend(from);
    packet.extend([0xfd; 16]);
    packet.extend(payload);
    packet
}

fn arp(station: [u8; 6], sender: [u8; 4]) -> Vec<u8> {
    [
        &[0, 1, 8, 0, 6, 4, 0, 2],
        &station[..],
        &sender,
        &[0; 6],
        &[10, 0, 0, 1],
    ]
    .concat()
}

fn advertisement(target: [u8; 16], station: [u8; 6]) -> Vec<u8> {
    [&[136, 0, 0, 0, 0, 0, 0, 0], &target[..], &[2, 1], &station].concat()
}

/// The sender's own frames, one of each kind that is let through.
fn own() -> Vec<Sent> {
    let six_own = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
    let frames = [
        ethernet(OWN, 0x0800, &udp([10, 0, 0, 5], 7)),
        ethernet(OWN, 0x0806, &arp(OWN, [10, 0, 0, 5])),
        ethernet(OWN, 0x86dd, &six(six_own, 17, &[0; 8])),
        ethernet(OWN, 0x86dd, &six(six_own, 58, &advertisement(six_own, OWN))),
    ];
    let sent = |frame| Sent {
        frame,
        refused: None,
    };
    frames.map(sent).into()
}

/// One of each kind that is not.
fn forged() -> Vec<Sent> {
    let six_own = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
    let six_other = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6];
    let tagged = [&[0, 10, 8, 0][..], &udp([10, 0, 0, 5], 7)].concat();
    let all = [
        ("station", ethernet(OTHER, 0x0800, &udp([10, 0, 0, 5], 7))),
        ("station", ethernet(OWN, 0x0806, &arp(OTHER, [10, 0, 0, 5]))),
        (
            "station",
            ethernet(
                OWN,
                0x86dd,
                &six(six_own, 58, &advertisement(six_own, OTHER)),
            ),
        ),
        ("vlan", ethernet(OWN, 0x8100, &tagged)),
        ("network", ethernet(OWN, 0x0800, &udp([10, 0, 0, 6], 7))),
        ("network", ethernet(OWN, 0x0806, &arp(OWN, [10, 0, 0, 6]))),
        (
            "network",
            ethernet(OWN, 0x86dd, &six(six_other, 17, &[0; 8])),
        ),
        (
            "network",
            ethernet(
                OWN,
                0x86dd,
                &six(six_own, 58, &advertisement(six_other, OWN)),
            ),
        ),
        ("network", ethernet(OWN, 0x88cc, &[0; 46])),
        ("filter", ethernet(OWN, 0x0800, &udp([10, 0, 0, 5], 53))),
    ];
    let sent = |(refused, frame)| Sent {
        frame,
        refused: Some(refused),
    };
    all.map(sent).into()
}

/// The port that sends, as the daemon counts it.
fn sender(all: &[Counted]) -> &Counted {
    let sends = |it: &&Counted| it.kind == "port" && it.values.iter().any(|(key, _)| key == "sent");
    all.iter().find(sends).unwrap()
}

fn refused(of: &Counted, why: &str) -> u64 {
    value(of, &format!("send_dropped_{why}"))
}

/// Reads what has come to the other end of the wire.
fn arrived(port: &mut Port, own: &[Sent]) -> usize {
    let mut count = 0;
    while let Next::Packet(packet) = port.next().unwrap() {
        let is_own = own.iter().any(|it| it.frame == packet.bytes);
        assert!(is_own, "a forged frame is on the wire: {:?}", packet.bytes);
        count += 1;
    }
    count
}

#[test]
fn a_million_forged_frames_put_none_on_the_wire_and_all_others_arrive() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let config = open_to_all(&lab, "");
    let (see, send) = (
        format!("uid:{USER}=wire1"),
        format!("uid:{USER}=wire1,{TERMS}"),
    );
    let args = [
        "--config", &config, "--source", "wire1", "--source", "wire0",
    ];
    let grants = ["--allow", &see, "--allow-send", &send];
    let daemon = Daemon::start(&lab, Some(&netns), &[&args[..], &grants].concat()).unwrap();
    let mut far = daemon
        .port("wire0")
        .ring_bytes(1 << 22)
        .direction(Direction::Rx);
    far = far.filter("ether src 02:00:00:00:00:01 or ether src 02:00:00:00:00:09");
    let mut far = far.open().unwrap();
    let options = daemon.port("wire1").transmit(1 << 20).enabled(false);
    let mut port = as_user(move || options.open().unwrap());
    let (own, forged) = (own(), forged());
    let deadline = Deadline::new("all are sent");
    let (mut sent, mut came) = (0, 0);
    let push = |port: &mut Port, frame: &[u8]| {
        while !port.send(frame).unwrap() {
            deadline.check();
            std::thread::yield_now();
        }
    };
    for round in 0..FORGED / forged.len() {
        for it in &forged {
            push(&mut port, &it.frame);
        }
        // The control, now and then.
        if round % 100 == 0 {
            for it in &own {
                push(&mut port, &it.frame);
                sent += 1;
            }
            came += arrived(&mut far, &own);
        }
    }
    let all = until(
        "all are taken",
        || daemon.audit(),
        |all| value(sender(all), "send_taken") == (FORGED + sent) as u64,
    );
    let deadline = Deadline::new("its own frames arrive");
    while came < sent {
        deadline.check_seen(&came);
        far.wait(Some(PATIENCE)).unwrap();
        came += arrived(&mut far, &own);
    }
    let of = sender(&all);
    assert_eq!(value(of, "sent"), sent as u64);
    for why in ["station", "vlan", "network", "filter"] {
        let kinds = forged.iter().filter(|it| it.refused == Some(why)).count();
        let expected = FORGED / forged.len() * kinds;
        assert_eq!(refused(of, why), expected as u64, "{why}");
    }
    assert_eq!(came, sent);
    // The port is as alive as before.
    assert_eq!(label(of, "state"), "open");
}

#[test]
fn what_is_left_to_a_nic_is_judged_as_it_is_sent() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let (see, send) = (format!("uid:{USER}=lab"), format!("uid:{USER}=lab,{TERMS}"));
    let args = [
        "--config",
        &config,
        "--source",
        "lab=gen,count=1",
        "--allow",
        &see,
    ];
    let grants = [&args[..], &["--allow-send", &send]].concat();
    let daemon = Daemon::start(&lab, None, &grants).unwrap();
    let options = daemon.port("lab").transmit(1 << 16).enabled(false);
    let options = options.segments(Segments::Merged);
    let mut port = as_user(move || options.open().unwrap());
    let mut sum = |frame: &[u8], start, offset| {
        let offload = vnplug::Offload {
            flags: vnplug::offload::flags::NEEDS_CSUM,
            csum_start: start,
            csum_offset: offset,
            ..vnplug::Offload::default()
        };
        let outbox = port.outbox().unwrap();
        assert!(outbox.push_offloaded(frame, &offload).unwrap());
        outbox.flush();
    };
    let frame = ethernet(OWN, 0x0800, &udp([10, 0, 0, 5], 7));
    // The checksum of UDP, and one that would be put over the sender's address, in two ways.
    sum(&frame, 34, 6);
    sum(&frame, 0, 6);
    sum(&frame, 14, 12);
    let arp = ethernet(OWN, 0x0806, &arp(OWN, [10, 0, 0, 5]));
    sum(&arp, 14, 14);
    let all = until(
        "all are taken",
        || daemon.audit(),
        |all| value(sender(all), "send_taken") == 4,
    );
    let of = sender(&all);
    assert_eq!(
        (value(of, "sent"), value(of, "send_dropped_offload")),
        (1, 2)
    );
    assert_eq!(refused(of, "network"), 1);
}

#[test]
fn terms_change_under_an_open_port_and_wrong_ones_are_refused() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let grant = format!("uid:{USER}=lab");
    let args = [
        "--config",
        &config,
        "--source",
        "lab=gen,count=1",
        "--allow",
        &grant,
    ];
    let daemon =
        Daemon::start(&lab, None, &[&args[..], &["--allow-send", &grant]].concat()).unwrap();
    let options = daemon.port("lab").transmit(1 << 16).enabled(false);
    let mut port = as_user(move || options.open().unwrap());
    let mut operator = vnplug::Client::connect_to(&daemon.socket()).unwrap();
    let mut set = |terms: &str| {
        let text = format!("{grant},{terms}");
        operator.change_grant(GrantAction::Set, GrantKind::Send, &text, false)
    };
    let frame = ethernet(OTHER, 0x0800, &udp([10, 0, 0, 5], 7));
    let mut taken = 0;
    let mut sends = |port: &mut Port| {
        assert_eq!(port.send(&frame), Ok(true));
        taken += 1;
        let all = until(
            "it is taken",
            || daemon.audit(),
            |all| value(sender(all), "send_taken") == taken,
        );
        let of = sender(&all);
        (
            value(of, "sent"),
            refused(of, "station"),
            refused(of, "filter"),
        )
    };
    assert_eq!(sends(&mut port), (1, 0, 0));
    set("mac=02:00:00:00:00:01").unwrap();
    assert_eq!(sends(&mut port), (1, 1, 0));
    set("mac=02:00:00:00:00:09,filter=tcp").unwrap();
    assert_eq!(sends(&mut port), (1, 1, 1));
    set("filter=udp").unwrap();
    assert_eq!(sends(&mut port), (2, 1, 1));
    for (wrong, why) in [
        ("mac=x", code::INVALID),
        ("color=blue", code::INVALID),
        ("filter=udp prot 5", code::FILTER),
    ] {
        let refused = set(wrong).unwrap_err();
        assert!(
            matches!(refused, Error::Refused { code, .. } if code == why),
            "{refused:?}"
        );
    }
    assert_eq!(sends(&mut port), (3, 1, 1));
}

/// Has a guest send the frames of a file until there are `count`.
fn send(lab: &Lab, guest: &Guest, frames: &[Sent], count: usize) -> String {
    let file = lab.dir().join("sent.pcap");
    std::fs::write(&file, pcap(frames)).unwrap();
    guest.push(&file, "/tmp/sent.pcap", PATIENCE).unwrap();
    let send = format!("vnplug send host:wire1 /tmp/sent.pcap -c {count} --pps max --ring 1M 2>&1");
    let output = guest.run(&send, PATIENCE).unwrap();
    output.text()
}

/// A capture file of these frames.
fn pcap(frames: &[Sent]) -> Vec<u8> {
    let word = |word: u32| word.to_le_bytes();
    let head = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, 1];
    let mut file: Vec<u8> = head.into_iter().flat_map(word).collect();
    for Sent { frame, .. } in frames {
        let len = frame.len() as u32;
        file.extend([0, 0, len, len].into_iter().flat_map(word));
        file.extend(frame);
    }
    file
}

#[test]
fn a_guest_that_spoofs_puts_nothing_on_the_wire_and_what_is_its_own_goes() {
    let send_grant = format!("vm:uml=wire1,{TERMS}");
    let args = [
        "--source",
        "wire1",
        "--source",
        "wire0",
        "--allow-send",
        &send_grant,
    ];
    let wire = Wire::new("1500", &args);
    let daemon = &wire.daemon;
    let uml = AttachedUml::boot(&wire.lab, daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let far = daemon
        .port("wire0")
        .ring_bytes(1 << 22)
        .direction(Direction::Rx);
    let far = far.filter("ether src 02:00:00:00:00:01 or ether src 02:00:00:00:00:09");
    let mut far = far.open().unwrap();
    let (own, forged) = (own(), forged());
    eprintln!("{}", send(&wire.lab, &uml.guest, &forged, FORGED));
    eprintln!("{}", send(&wire.lab, &uml.guest, &own, 400));
    let mut came = 0;
    let deadline = Deadline::new("its own frames arrive");
    while came < 400 {
        deadline.check_seen(&came);
        far.wait(Some(PATIENCE)).unwrap();
        came += arrived(&mut far, &own);
    }
    let all = daemon.audit();
    let source = all
        .iter()
        .find(|it| it.kind == "source" && it.name == "wire1")
        .unwrap();
    assert_eq!(value(source, "sent"), 400);
    let dropped = ["station", "vlan", "network", "filter"].map(|why| refused(source, why));
    assert_eq!(dropped.iter().sum::<u64>(), FORGED as u64);
}
