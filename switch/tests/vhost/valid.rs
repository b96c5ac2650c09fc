//! Checksums that a card found right: an uplink says so, and nobody checks them again.

use std::sync::mpsc::{Receiver, Sender, channel};

use vnplug_frame::Frame;
use vnplug_path::source::{QueueCounters, Seen, SourceError, Wake};
use vnplug_switch::Uplink;

use super::*;

/// Frames that arrive together, each with what the kernel says of it.
type Arrival = Vec<(Vec<u8>, Offload)>;

/// An interface at which arrives what a test says.
struct Wire(Receiver<Arrival>);

impl Queue for Wire {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        let Ok(arrival) = self.0.try_recv() else {
            return Ok(Received::Nothing);
        };
        let frames = arrival.iter().map(|(bytes, offload)| Frame {
            bytes,
            wire_len: bytes.len() as u32,
            offload: *offload,
            ..Frame::default()
        });
        sink(&frames.collect::<Vec<_>>());
        Ok(Received::Frames(arrival.len()))
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake {
            within: Some(Duration::from_millis(5)),
            ..Wake::default()
        }
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

/// A switch with such an interface.
fn wired(settings: &str) -> (Served, Sender<Arrival>) {
    let home = TestDir::new("valid");
    let path = home.path("lan0.sock");
    let mut config = SwitchConfig::new("lan0");
    config.settings.apply(settings).unwrap();
    config.vhost = VhostConfig {
        path: Some(path.clone()),
        connect: Vec::new(),
        access: Access::default(),
    };
    let (arrives, wire) = channel();
    let mut wire = Some(wire);
    let uplink = Uplink {
        interface: "eth1".into(),
        text: "eth1".into(),
        how: "a test",
        is_twin: false,
        open: Box::new(move || {
            let queue = wire
                .take()
                .map(|wire| Box::new(Wire(wire)) as Box<dyn Queue>);
            Ok(queue.map(|it| vec![it]))
        }),
    };
    let opened = Switch::open_with(config, vec![uplink], None).unwrap();
    (Served::opened(home, path, opened), arrives)
}

/// What the kernel says of a frame whose checksum it, or a card, found right.
const VALID: Offload = Offload {
    flags: flags::DATA_VALID,
    gso_type: gso::NONE,
    gso_size: 0,
    csum_start: 0,
    csum_offset: 0,
};

#[test]
fn a_guest_that_takes_it_is_told_and_no_other_guest_is_believed() {
    let (served, wire) = wired("");
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let mut plain = served.guest(PLAIN);
    for (number, told) in [(1, VALID), (2, Offload::default())] {
        let sent = frame(0xee, 9, number);
        wire.send(vec![(sent.clone(), told)]).unwrap();
        for (guest, takes) in [(&mut takes, true), (&mut plain, false)] {
            let (header, came) = guest.next();
            assert_eq!(came, sent);
            let is_told = takes && told.is_valid();
            assert_eq!(header[0], if is_told { flags::DATA_VALID } else { 0 });
        }
    }
    // A driver must not say that (virtio 1.2, 5.1.6.2), and may have computed nothing.
    let sent = frame(0xee, 1, 3);
    plain.send_offloaded(&sent, &VALID);
    let (header, came) = takes.next();
    assert_eq!((header[0], came), (0, sent));
    served.check_sums();
}

#[test]
fn who_merges_does_not_check_again_what_a_card_found_right() {
    let (served, wire) = wired("default.gro=20");
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let good = segments(0, 4, 1000);
    // Where nobody looks that need not: had a card said so of this one it would have been wrong, so who merges
    // it has believed that. As a cut writes the sum anew, it is right then.
    let mut bad = good.clone();
    bad[2][50] ^= 1;
    // 0xffff is the same sum as 0, and a cut writes 0.
    let mut other = good.clone();
    other[2][50..52].copy_from_slice(&[0xff; 2]);
    for (frames, told, merges) in [
        (&good, Offload::default(), true),
        (&good, VALID, true),
        (&bad, Offload::default(), false),
        (&bad, VALID, true),
        (&other, VALID, false),
    ] {
        let before = served.count("out_merged");
        let all = frames.iter().map(|it| (it.clone(), told));
        wire.send(all.collect()).unwrap();
        let mut came = Vec::new();
        while came.len() < frames.len() {
            let (header, frame) = takes.next();
            came.extend(cut(&header, frame));
        }
        let gone = served.count("out_merged") - before;
        assert_eq!(gone, if merges { 3 } else { 1 });
        assert!(came == *if merges { &good } else { frames });
    }
    served.check_sums();
}
