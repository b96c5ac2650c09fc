//! VLANs of a switch where its ports are rings and uplinks: whatever tags a frame has, it reaches nobody of a VLAN that
//! its port is not in. Other entrances are in `switch/tests/hopping.rs`. With `VNPLUG_LONG=1` a million frames, not 8,000.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::streamer::{Streamer, frame};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{Dice, eventually};

/// Sends a frame, as soon as there is room.
fn send(port: &mut Port, frame: &[u8]) {
    eventually("there is room", || port.send(frame).unwrap());
}

/// All that a port has now, and is no other station's than the test's.
fn heard(port: &mut Port) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        if packet.bytes[6..11] == [2, 0, 0, 0, 0] {
            all.push(packet.bytes.to_vec());
        }
    }
    all
}

/// The next frame, before which no other came.
fn next(port: &mut Port) -> Vec<u8> {
    let mut all = Vec::new();
    eventually("a frame comes", || {
        all.extend(heard(port));
        !all.is_empty()
    });
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn tagged(frame: &[u8], tags: &[(u16, u16)]) -> Vec<u8> {
    let bytes = |(kind, tci): &(u16, u16)| [kind.to_be_bytes(), tci.to_be_bytes()].concat();
    let tags: Vec<u8> = tags.iter().flat_map(bytes).collect();
    [&frame[..12], &tags, &frame[12..]].concat()
}

fn set(daemon: &Daemon, port: u32, text: &str) {
    let (code, said) = daemon.vnplug(&["switch", "set", &format!("lan0/port{port}"), text]);
    assert_eq!(code, Some(0), "{text}: {said}");
}

fn of_switch(daemon: &Daemon, name: &str) -> u64 {
    value(counted(&daemon.counters(), "source"), name)
}

#[test]
fn no_tag_leads_into_another_vlan_by_rings_or_uplinks() {
    let lab = Lab::new().unwrap();
    let [here, far] = [(); 2].map(|()| Netns::new().unwrap());
    for at in 0..2 {
        let (up, end) = (format!("up{at}"), format!("far{at}"));
        let peer = ["peer", "name", &end, "netns", far.name()];
        here.ip(&[&["link", "add", &up, "type", "veth"], &peer[..]].concat())
            .unwrap();
        far.ip(&["link", "set", &end, "up"]).unwrap();
        here.ip(&["link", "set", &up, "up"]).unwrap();
    }
    let entrance = lab.dir().join("lan0.stream");
    let spec = format!("lan0,uplink=up0+up1,stream={}", entrance.display());
    let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec]).unwrap();
    // The far machine sends and hears raw frames.
    let sources = ["--source", "far0", "--source", "far1"];
    let there = Daemon::start(&lab, Some(&far), &sources).unwrap();
    let [mut uplink, mut far_victim] = ["far0", "far1"].map(|end| {
        let port = there.port(end).direction(vnplug::Direction::Rx);
        port.transmit(1 << 20).open().unwrap()
    });
    let mut stream = Streamer::join(&entrance);
    eventually("it has joined", || of_switch(&daemon, "switch_ports") == 3);
    let [mut ring, mut ring_victim] = [4, 5].map(|port| {
        daemon
            .port(&format!("lan0/port{port}"))
            .join()
            .open()
            .unwrap()
    });
    for (port, text) in [
        (1, "vlan=10"),
        (4, "vlan=10"),
        (2, "vlan=20"),
        (3, "vlan=20"),
        (5, "vlan=20"),
    ] {
        set(&daemon, port, text);
    }
    // Whom no frame may reach: each says where it is, and hears nothing but the others.
    let mut hello = |far_victim: &mut Port, ring_victim: &mut Port, number| {
        let said = [2, 3, 5].map(|from| frame(from, 0xfe, number, 60));
        send(far_victim, &said[0]);
        assert_eq!(next(ring_victim), said[0]);
        assert_eq!(stream.frame().unwrap(), said[0]);
        stream.put(&said[1]).unwrap();
        assert_eq!(next(ring_victim), said[1]);
        assert_eq!(next(far_victim), said[1]);
        send(ring_victim, &said[2]);
        assert_eq!(next(far_victim), said[2]);
        assert_eq!(stream.frame().unwrap(), said[2]);
    };
    hello(&mut far_victim, &mut ring_victim, 1);
    let mut dice = Dice(vnplug_frame::witness::seed("hopping"));
    let mut entered = of_switch(&daemon, "entered");
    let lots = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 2_500,
        None => 20,
    };
    for (round, role) in ["vlan=10", "trunk=10 native=30"].into_iter().enumerate() {
        for port in [1, 4] {
            set(&daemon, port, &format!("default {role}"));
        }
        for lot in 0..lots {
            for number in 0..200 {
                let (from, sender) = match number % 2 {
                    0 => (1, &mut uplink),
                    _ => (4, &mut ring),
                };
                let to = dice.one_of(&[2, 3, 5, 4, 0xfe]);
                let mut tags = Vec::new();
                for _ in 0..dice.below(4) {
                    let kind = dice.one_of(&[0x8100, 0x8100, 0x8100, 0x88a8]);
                    let id = dice.one_of(&[0, 10, 20, 20, 20, 30]);
                    tags.push((kind, (dice.below(8) << 13) as u16 | id));
                }
                send(sender, &tagged(&frame(from, to, number, 60), &tags));
            }
            entered += 200;
            eventually("all of it came in", || {
                of_switch(&daemon, "entered") >= entered
            });
            // What passes within a VLAN is read, so that there is room.
            heard(&mut uplink);
            heard(&mut ring);
            assert_eq!(
                of_switch(&daemon, "entered"),
                entered,
                "round {round}, lot {lot}"
            );
        }
        hello(&mut far_victim, &mut ring_victim, 2);
        entered += 3;
    }
    let refused = of_switch(&daemon, "in_dropped_vlan");
    assert!(refused > 100 * lots, "{refused}");
    // The control: where the port is in that VLAN, too, the same tag leads there.
    for (port, from, sender) in [(1, 1, &mut uplink), (4, 4, &mut ring)] {
        set(&daemon, port, "default trunk=10+20");
        let sent = frame(from, 0xfe, 3, 60);
        send(sender, &tagged(&sent, &[(0x8100, 20)]));
        assert_eq!(next(&mut far_victim), sent);
        assert_eq!(next(&mut ring_victim), sent);
        assert_eq!(stream.frame().unwrap(), sent);
    }
    daemon.audit();
}
