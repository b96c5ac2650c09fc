//! VLANs at every entrance of one switch: whatever tags a frame has, it reaches nobody of a VLAN that its port is not
//! in. The rule by itself is tested beside the code, with a million frames; rings and uplinks in `e2e/tests/hopping.rs`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;

use vnplug_switch::{Access, VhostConfig};
use vnplug_testing::{Dice, TestDir, eventually};

use self::clients::Client as Program;
use self::front::{Guest, PLAIN, SIZE};
use self::plain::{Client, Named, Packets, Stream};
use self::served::{ALL, Served, frame};

#[expect(dead_code, reason = "for tests with programs of VDE alone")]
mod clients;
#[expect(dead_code, reason = "for tests of what front-ends say")]
#[path = "vhost/front.rs"]
mod front;
#[expect(dead_code, reason = "for tests of these entrances alone")]
mod plain;
#[expect(dead_code, reason = "for tests that look at what is captured")]
mod served;

/// A virtual machine by vhost-user.
struct Machine(RefCell<Guest>);

impl Client for Machine {
    fn send(&self, frame: &[u8]) {
        let mut guest = self.0.borrow_mut();
        guest.send(frame);
        eventually("there is room for more", || {
            guest.has_sent() || guest.sending.next.wrapping_sub(guest.sending.taken) < SIZE / 2
        });
    }

    fn next(&self) -> Vec<u8> {
        self.0.borrow_mut().next().1
    }
}

impl Client for Program {
    fn send(&self, frame: &[u8]) {
        self.send(frame);
    }

    fn next(&self) -> Vec<u8> {
        self.next()
    }
}

/// One by each entrance, in this order.
fn join(home: &TestDir, kind: usize, name: &str) -> Box<dyn Client> {
    match kind {
        0 => Box::new(Program::join(&home.path("vde"))),
        1 => Box::new(Stream::join(home)),
        2 => Box::new(Packets::join(home)),
        3 => Box::new(Named::join(home, name)),
        _ => {
            let guest = Guest::boot(&home.path("vhost"), PLAIN);
            Box::new(Machine(RefCell::new(guest)))
        }
    }
}

const KINDS: usize = 5;

/// Settings of the ports, of each a port by each entrance: who sends, whom it must not reach, and who sends tags.
const ROLES: [&str; 3] = ["vlan=10", "vlan=20", "trunk=10 native=30"];

/// With these tags: EtherType and TCI.
fn tagged(frame: &[u8], tags: &[(u16, u16)]) -> Vec<u8> {
    let bytes = |(kind, tci): &(u16, u16)| [kind.to_be_bytes(), tci.to_be_bytes()].concat();
    let tags: Vec<u8> = tags.iter().flat_map(bytes).collect();
    [&frame[..12], &tags, &frame[12..]].concat()
}

#[test]
fn no_tag_leads_into_another_vlan_by_any_entrance() {
    let home = TestDir::new("hopping");
    let mut config = plain::config(&home);
    config.vde = clients::config(&home.path("vde")).vde;
    config.vhost = VhostConfig {
        path: Some(home.path("vhost")),
        connect: Vec::new(),
        access: Access::default(),
    };
    config.lanes = 2;
    let (switch, board) = Served::new(config);
    let mut all = Vec::new();
    for role in ROLES {
        for kind in 0..KINDS {
            all.push(join(&home, kind, &format!("{kind}-{}", all.len())));
            eventually("it has joined", || {
                switch.count("switch_ports") == all.len() as u64
            });
            board.set(Some(all.len() as u16), role).unwrap();
        }
    }
    assert_eq!(board.show().unwrap().ports.len(), 3 * KINDS);
    let (senders, victims) = (&all[..KINDS], &all[KINDS..2 * KINDS]);
    let trunks = &all[2 * KINDS..];
    let address = |at: usize| at as u8 + 1;
    let victim = |at: usize| address(KINDS + at);
    // They know each other, and the switch knows where they are.
    let rings = |number: u32| {
        for (at, one) in victims.iter().enumerate() {
            let hello = frame(ALL, victim(at), number, 60);
            one.send(&hello);
            for (other, it) in victims.iter().enumerate().filter(|(it, _)| *it != at) {
                assert_eq!(it.next(), hello, "from {at} to {other}: nothing else came");
            }
        }
    };
    rings(1);
    let before = KINDS as u64;
    eventually("all greetings are counted", || {
        switch.count("entered") == before
    });
    let seed = vnplug_frame::witness::seed("hopping");
    let mut dice = Dice(seed);
    let count = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 100_000,
    };
    for number in 0..count {
        let (from, sender) = match dice.below(2 * KINDS as u64) as usize {
            at if at < KINDS => (address(at), &senders[at]),
            at => (address(KINDS + at), &trunks[at - KINDS]),
        };
        let to = match dice.below(4) {
            0 => ALL,
            1 => address(dice.below(3 * KINDS as u64) as usize),
            _ => victim(dice.below(KINDS as u64) as usize),
        };
        let mut tags = Vec::new();
        for _ in 0..dice.below(4) {
            let kind = dice.one_of(&[0x8100, 0x8100, 0x8100, 0x88a8, 0x9100]);
            let id = dice.one_of(&[0, 10, 20, 20, 20, 30, 4095]);
            tags.push((kind, (dice.below(16) << 12) as u16 | id));
        }
        sender.send(&tagged(&frame(to, from, number, 60), &tags));
    }
    eventually("all is counted", || {
        switch.count("entered") == before + u64::from(count)
    });
    let refused = switch.count("in_dropped_vlan");
    assert!(refused > u64::from(count) / 4, "seed {seed}: {refused}");
    rings(2);
    switch.check_sums();
    // The control: where the port is in that VLAN, too, the same tag leads there, from each entrance to each.
    for (at, sender) in senders.iter().enumerate() {
        let port = at as u16 + 1;
        board.set(Some(port), "default trunk=10+20").unwrap();
        let sent = frame(ALL, address(at), 3, 60);
        sender.send(&tagged(&sent, &[(0x8100, 20)]));
        victims.iter().for_each(|it| assert_eq!(it.next(), sent));
    }
    switch.check_sums();
}
