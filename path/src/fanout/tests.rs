//! The sums close whatever comes and goes.

mod ends;
mod members;
mod panics;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::control::{Balance, Direction, Tuning};
use vnplug_ring::layout::{Geometry, TAIL, flags, ring_size};
use vnplug_ring::{Consumer, Producer, Region, Wait};

use super::Fanout;
use crate::batch::{BatchInfo, Handle};
use crate::packets::{self, Random};
use crate::port::doorbell::Doorbell;
use crate::port::{Offered, Port, PortCounters, Share};
use crate::rules::Change;
use vnplug_filter::libpcap::Library;
use vnplug_filter::{IndexSize, Program, Trust};
use vnplug_frame::{Frame, MAX_BATCH};

fn port(id: u32) -> Box<Port> {
    port_and_region(id).0
}

fn port_and_region(id: u32) -> (Box<Port>, Region) {
    let capacity = 1 << 14;
    let region = Region::heap(ring_size(capacity));
    let geometry = Geometry {
        capacity,
        snaplen: 128,
        link_type: 1,
        epoch: 256,
        port: id,
        queue: 0,
    };
    let producer = Producer::create(region.clone(), geometry).unwrap();
    (Box::new(Port::new(id, producer, Doorbell::Silent)), region)
}

fn offered(fanout: &Fanout) -> u64 {
    let mut sum = PortCounters::default();
    sum.add(&fanout.counters().departed);
    for (_, counters) in fanout.accounts() {
        assert_eq!(counters.offered, counters.accounted());
        sum.add(&counters);
    }
    sum.offered
}

#[test]
fn what_passed_by_before_a_port_came_is_read_and_not_offered_to_it() {
    let mut fanout = Fanout::new(0, 0);
    assert!(fanout.is_unread());
    fanout.pass(3, 180);
    fanout.attach(port(1));
    assert!(!fanout.is_unread());
    let bytes = [5; 60];
    let frame = Frame {
        bytes: &bytes,
        wire_len: 60,
        ..Frame::default()
    };
    fanout.deliver(&[frame; 2], 0);
    let counters = fanout.counters();
    assert_eq!(
        (counters.read, counters.bytes, counters.duties),
        (5, 300, 2)
    );
    assert_eq!(offered(&fanout), 2);
    fanout.detach(1);
    assert!(fanout.is_unread());
    fanout.pass(1, 60);
    assert_eq!((fanout.counters().duties, offered(&fanout)), (2, 2));
}

#[test]
fn duties_equal_offers_through_churn_of_ports_and_clusters() {
    let mut fanout = Fanout::new(0, 0);
    let bytes = [5; 60];
    let frame = Frame {
        bytes: &bytes,
        wire_len: 60,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    };
    let frames = vec![frame; 256];
    let mut members: Vec<u32> = Vec::new();
    let mut state = 7_u64;
    for id in 0..2_000_u32 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        match state >> 61 {
            0 | 1 => fanout.attach(port(id)),
            2 | 3 => {
                fanout.attach(port(id));
                members.push(id);
            }
            4 | 5 => {
                let ids: Vec<u32> = fanout.ports().map(|port| port.id).collect();
                if let Some(&gone) = ids.get((state >> 32) as usize % ids.len().max(1)) {
                    fanout.detach(gone);
                    members.retain(|member| *member != gone);
                }
            }
            _ => {}
        }
        let of = members.len() as u32;
        let shares: Vec<(u32, Share)> = members
            .iter()
            .zip(0..)
            .map(|(&id, index)| {
                (
                    id,
                    Share::Member {
                        cluster: 1,
                        index,
                        of,
                        balance: Balance::RoundRobin,
                    },
                )
            })
            .collect();
        fanout.reshare(&shares);
        fanout.deliver(&frames[..(state >> 40) as usize % 257], u64::from(id));
        assert_eq!(fanout.counters().duties, offered(&fanout), "round {id}");
    }
    assert!(fanout.counters().duties > 1_000_000);
}

/// The programs of the tests: hosts, a range, what accepts and what refuses everything.
fn programs() -> Vec<Option<Arc<Program>>> {
    let library = Library::load().unwrap();
    let texts = [
        "host 10.0.0.1",
        "host 10.0.0.2",
        "src host 10.0.0.1",
        "net 10.0.0.0/24",
        "port 80",
        "tcp",
        "portrange 20-500",
        "not host 10.0.0.1",
        "vlan 5 and host 10.0.0.1",
        "ip6 host 2001:db8::1",
        "ether host 02:00:00:00:00:01",
        "len >= 0",
        "less 0",
    ];
    let compile = |text: &str| {
        let text = std::ffi::CString::new(text).unwrap();
        let list = library.compile(&text, 262_144, 1).unwrap();
        Some(Arc::new(
            Program::from_instructions(&list, Trust::Operator).unwrap(),
        ))
    };
    texts.into_iter().map(compile).chain([None, None]).collect()
}

/// A fanout in which every port sees every frame itself.
#[derive(Default)]
struct Model {
    ports: BTreeMap<u32, (Box<Port>, Consumer)>,
    read: u64,
}

impl Model {
    fn deliver(&mut self, frames: &[Frame<'_>], now_us: u64) {
        let hashes: Vec<u32> = frames
            .iter()
            .map(|frame| super::flow::flow_hash(frame.bytes))
            .collect();
        let batch = BatchInfo {
            frames,
            hashes: &hashes,
            first: self.read,
            source: 0,
            queue: 0,
            now_us,
            sender: None,
            cuts: &RefCell::default(),
        };
        for (port, _) in self.ports.values_mut() {
            port.take(&batch, Offered::Whole);
        }
        self.read += frames.len() as u64;
    }
}

fn drain(consumer: &mut Consumer) -> Vec<(Vec<u8>, u32, u32, u16)> {
    let mut all = Vec::new();
    while let Some(packet) = consumer.next().unwrap() {
        let meta = packet.meta;
        all.push((packet.bytes.to_vec(), meta.flow_hash, meta.lost, meta.flags));
    }
    consumer.release();
    all
}

/// What a port looked up gets and counts is what it would get and count if it judged every frame,
/// through all that may happen to it.
#[test]
fn looked_up_ports_get_and_count_what_ports_that_judge_every_frame_do() {
    let programs = programs();
    let packets = packets::frames(4_000, 0xfa);
    let mut random = Random(0x5ea7);
    let mut fanout = Fanout::new(0, 0);
    let mut model = Model::default();
    let mut consumers: BTreeMap<u32, (Consumer, Region)> = BTreeMap::new();
    let mut lied: BTreeSet<u32> = BTreeSet::new();
    let (mut id, mut delivered, mut indexed) = (0, 0, 0);
    for round in 0..1_500_u64 {
        let ids: Vec<u32> = consumers.keys().copied().collect();
        let some = (!ids.is_empty()).then(|| ids[random.below(ids.len().max(1))]);
        match (random.below(12), some) {
            (0..=3, _) if ids.len() < 40 => {
                id += 1;
                let [(mut port, region), (mut twin, twins)] =
                    [port_and_region(id), port_and_region(id)];
                let guard = random.one_in(2).then(|| random.below(programs.len()));
                let filter = random.below(programs.len());
                for port in [&mut port, &mut twin] {
                    port.judge
                        .set_guard(guard.and_then(|guard| programs[guard].clone()));
                    port.judge.set_filter(programs[filter].clone());
                }
                consumers.insert(id, (Consumer::attach(region.clone()).unwrap(), region));
                model
                    .ports
                    .insert(id, (twin, Consumer::attach(twins).unwrap()));
                fanout.attach(port);
            }
            (4, Some(id)) => {
                consumers.remove(&id);
                let (twin, _) = model.ports.remove(&id).unwrap();
                let mut gone = fanout.detach(id).unwrap();
                gone.counters.rings = twin.counters.rings;
                if !lied.remove(&id) {
                    assert_eq!(gone.counters, twin.counters, "round {round}");
                }
            }
            (5, Some(id)) => {
                let filter = &programs[random.below(programs.len())];
                fanout.set_filter(id, filter.clone());
                model
                    .ports
                    .get_mut(&id)
                    .unwrap()
                    .0
                    .judge
                    .set_filter(filter.clone());
            }
            (6 | 7, Some(id)) => {
                let tuning = Tuning {
                    enabled: !random.one_in(3),
                    direction: random.pick(&[Direction::Both, Direction::Rx, Direction::Tx]),
                    sample: random.pick(&[1, 1, 3]),
                };
                fanout.tune(id, tuning);
                model.ports.get_mut(&id).unwrap().0.judge.tune(tuning);
            }
            (8, Some(id)) if random.one_in(4) => {
                fanout
                    .port_mut(id)
                    .unwrap()
                    .judge
                    .change_rules(Change::Default(false), 0);
                model
                    .ports
                    .get_mut(&id)
                    .unwrap()
                    .0
                    .judge
                    .change_rules(Change::Default(false), 0);
            }
            (9, Some(id)) if random.one_in(6) => {
                // The reader's word becomes impossible; noticed when the ring looks full.
                let (_, region) = &consumers[&id];
                region.store_u64(TAIL, 1 << 40, Ordering::Relaxed);
                lied.insert(id);
            }
            _ => {}
        }
        let frames: Vec<Frame<'_>> = (0..random.pick(&[0, 1, 30, 256, 300]))
            .map(|_| {
                let (bytes, wire_len) = &packets[random.below(packets.len())];
                Frame {
                    bytes,
                    wire_len: *wire_len,
                    ts_ns: 0,
                    flags: random.pick(&[0, 0, flags::OUTBOUND]),
                    vlan_tci: 0,
                    ..Frame::default()
                }
            })
            .collect();
        fanout.deliver(&frames, round);
        for part in frames.chunks(MAX_BATCH) {
            model.deliver(part, round);
        }
        indexed += fanout
            .seats
            .iter()
            .flatten()
            .filter(|seat| matches!(seat.place, super::seat::Delivery::Indexed(_)))
            .count();
        assert_eq!(fanout.counters().duties, offered(&fanout), "round {round}");
        for (id, (consumer, _)) in &mut consumers {
            let (twin, theirs) = model.ports.get_mut(id).unwrap();
            if lied.contains(id) {
                continue;
            }
            let mut counters = fanout.account(*id).unwrap().1;
            counters.rings = twin.counters.rings;
            assert_eq!(counters, twin.counters, "port {id} in round {round}");
            if random.one_in(3) {
                let ours = drain(consumer);
                delivered += ours.len();
                assert_eq!(ours, drain(theirs), "port {id} in round {round}");
            }
        }
    }
    let quarantined = lied
        .iter()
        .filter(|id| fanout.port_mut(**id).unwrap().quarantined().is_some());
    assert!(
        delivered > 20_000 && indexed > 10_000 && quarantined.count() > 0,
        "{delivered} {indexed}"
    );
    for id in consumers.into_keys() {
        fanout.detach(id);
    }
    assert_eq!(fanout.index().size(), IndexSize::default());
    assert_eq!(fanout.counters().duties, fanout.counters().departed.offered);
    assert_eq!(
        fanout.counters().departed.accounted(),
        fanout.counters().duties
    );
}

#[test]
fn a_member_that_no_frame_comes_for_is_rung_when_others_turn_the_arena_over() {
    let mut fanout = Fanout::new(0, 0);
    let (_commons, members) = crate::port::tests::members(2);
    let mut consumers = Vec::new();
    for (mut port, consumer, _) in members {
        if port.id == 2 {
            // ldb [0]; jeq #1, 0, 1; ret 65535; ret 0
            let code = [
                0x30, 0, 0, 0, 0, 0, 0, 0, 0x15, 0, 0, 1, 1, 0, 0, 0, 6, 0, 0, 0, 0xff, 0xff, 0, 0,
                6, 0, 0, 0, 0, 0, 0, 0,
            ];
            let program = Program::from_bytes(&code, Trust::Guest).unwrap();
            port.judge.set_filter(Some(Arc::new(program)));
        }
        consumers.push(consumer);
        fanout.attach(Box::new(port));
    }
    let frame = |bytes: &'static [u8]| Frame {
        bytes,
        wire_len: bytes.len() as u32,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    };
    let [all, few] = &mut consumers[..] else {
        panic!("two members");
    };
    let rings = |fanout: &Fanout| fanout.account(2).unwrap().1.rings;
    for round in 1..=5 {
        assert_eq!(few.arm(1_000_000, u32::MAX), Wait::Sleep);
        fanout.deliver(&[frame(&[1; 1480])], 0);
        assert_eq!(fanout.due_us(), Some(u64::from(u32::MAX)));
        // All but one of those that half of the arena holds.
        for _ in 0..20 {
            fanout.deliver(&[frame(&[0; 1480])], 0);
        }
        assert_eq!(rings(&fanout), round - 1);
        fanout.deliver(&[frame(&[0; 1480])], 0);
        assert_eq!((rings(&fanout), fanout.due_us()), (round, None));
        assert!(few.next().unwrap().is_some() && few.next().unwrap().is_none());
        assert_eq!(few.dropped(), 0);
        while all.next().unwrap().is_some() {}
        all.release();
    }
    assert_eq!(few.arm(1_000_000, u32::MAX), Wait::Sleep);
    fanout.deliver(&[frame(&[1; 1480])], 0);
    assert!(fanout.detach(2).is_some());
    for _ in 0..50 {
        fanout.deliver(&[frame(&[0; 1480])], 0);
    }
    assert_eq!(fanout.due_us(), None);
}

fn frames_of(bytes: &[u8], count: usize) -> Vec<Frame<'_>> {
    let frame = Frame {
        bytes,
        wire_len: bytes.len() as u32,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    };
    vec![frame; count]
}

fn account(fanout: &Fanout, id: u32) -> PortCounters {
    fanout.account(id).unwrap().1
}

#[test]
fn while_a_source_is_pressed_the_dearest_owner_misses_frames_and_nobody_else() {
    const GREEDY: u32 = 1_000;
    let mut fanout = Fanout::new(0, 0);
    let (honest, region) = port_and_region(0);
    fanout.attach(honest);
    let filter = Arc::new(Program::accept(1));
    for id in 1..=GREEDY {
        let mut port = port(id);
        port.owner = 1;
        // Some are looked up, some are offered everything.
        port.judge
            .set_filter((id % 3 == 0).then(|| Arc::clone(&filter)));
        fanout.attach(port);
    }
    let mut consumer = Consumer::attach(region).unwrap();
    let bytes = [5; 60];
    let frames = frames_of(&bytes, 64);
    let mut read = 0;
    for turn in 0..100 {
        assert!(fanout.has_rivals());
        fanout.press(true);
        fanout.deliver(&frames, turn);
        while let Ok(Some(record)) = consumer.next() {
            assert_eq!(record.meta.lost, 0);
            read += 1;
        }
        consumer.release();
    }
    let honest = account(&fanout, 0);
    assert_eq!((honest.delivered, honest.dropped_budget), (6_400, 0));
    assert_eq!(read, 6_400);
    let greedy: Vec<PortCounters> = (1..=GREEDY).map(|id| account(&fanout, id)).collect();
    let missed: u64 = greedy.iter().map(|it| it.dropped_budget).sum();
    assert!(missed > 6_400 * u64::from(GREEDY) / 2, "{missed}");
    // Nobody of them is always the last.
    let served = greedy.iter().filter(|it| it.dropped_budget < 6_400).count();
    assert_eq!(served, GREEDY as usize);
    assert_eq!(fanout.counters().duties, offered(&fanout));
    // When it is over, all have everything again.
    for turn in 100..1_000 {
        fanout.press(false);
        fanout.deliver(&frames, turn);
    }
    let before = account(&fanout, 1).dropped_budget;
    fanout.press(false);
    fanout.deliver(&frames, 1_000);
    assert_eq!(account(&fanout, 1).dropped_budget, before);
    // Who is alone has everything, pressed or not.
    fanout.detach(0);
    assert!(!fanout.has_rivals());
    assert_eq!(fanout.counters().duties, offered(&fanout));
}

#[test]
fn what_the_operator_refuses_is_no_miss() {
    let mut fanout = Fanout::new(0, 0);
    fanout.attach(port(0));
    for id in 1..50 {
        let mut port = port(id);
        port.owner = 1;
        port.judge.set_guard(Some(Arc::new(Program::accept(0))));
        port.judge.set_share(Share::Member {
            cluster: id,
            index: 0,
            of: 1,
            balance: Balance::Flow,
        });
        fanout.attach(port);
    }
    let bytes = [5; 60];
    for turn in 0..200 {
        fanout.press(true);
        fanout.deliver(&frames_of(&bytes, 256), turn);
    }
    for id in 1..50 {
        let counters = account(&fanout, id);
        assert_eq!(counters.refused, counters.offered);
    }
}

#[test]
fn what_a_port_sends_is_shown_to_all_but_its_own_program() {
    let compile = |text: &str| {
        let text = std::ffi::CString::new(text).unwrap();
        let list = Library::load().unwrap().compile(&text, 262_144, 1).unwrap();
        Program::from_instructions(&list, Trust::Operator).unwrap()
    };
    let mut fanout = Fanout::new(0, 0);
    // By number: the sender, one that its program holds as one with it, twice with filters, and others.
    let ports = [
        (1, 0, 7, None, Direction::Both),
        (2, 0, 7, None, Direction::Both),
        (3, 0, 7, Some("len >= 0"), Direction::Both),
        (4, 0, 8, None, Direction::Both),
        (5, 1, 7, None, Direction::Both),
        (6, 0, 0, Some("len >= 0"), Direction::Both),
        (7, 0, 0, Some("less 0"), Direction::Both),
        (8, 0, 0, None, Direction::Rx),
        (9, 0, 0, Some("len >= 0"), Direction::Tx),
    ];
    for (id, owner, number, filter, direction) in ports {
        let mut port = port(id);
        port.owner = owner;
        port.handle = Handle {
            port: id,
            owner,
            number,
        };
        port.judge
            .set_filter(filter.map(|text| Arc::new(compile(text))));
        port.judge.tune(Tuning {
            direction,
            ..Tuning::default()
        });
        fanout.attach(port);
    }
    let sender = Handle {
        port: 1,
        owner: 0,
        number: 7,
    };
    let frame = Frame {
        bytes: &[5; 60],
        wire_len: 60,
        ts_ns: 0,
        flags: flags::OUTBOUND,
        vlan_tci: 0,
        ..Frame::default()
    };
    for is_pressed in [false, true] {
        fanout.press(is_pressed);
        fanout.show(&[frame; 10], 0, &sender);
    }
    let told: Vec<_> = (1..=9)
        .map(|id| {
            let (_, counters) = fanout.account(id).unwrap();
            (counters.delivered, counters.direction, counters.filtered)
        })
        .collect();
    let (own, seen) = ((0, 20, 0), (20, 0, 0));
    let expected = [own, own, own, seen, seen, seen, (0, 0, 20), own, seen];
    assert_eq!(told, expected);
    assert_eq!(fanout.counters().duties, offered(&fanout));
    // A port that has no number is still not shown its own.
    let alone = Handle {
        port: 6,
        ..Handle::default()
    };
    fanout.show(&[frame], 0, &alone);
    assert_eq!(fanout.account(6).unwrap().1.delivered, 20);
    assert_eq!(fanout.account(9).unwrap().1.delivered, 21);
    assert_eq!(fanout.counters().duties, offered(&fanout));
}
