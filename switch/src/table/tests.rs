use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;

fn key(number: u32) -> Key {
    let [a, b, c, d] = number.to_be_bytes();
    Key::new([2, 0, a, b, c, d], 0)
}

fn limits(all: usize, each: usize) -> Limits {
    Limits {
        all,
        each,
        ..Limits::default()
    }
}

#[test]
fn a_key_is_its_address_and_vlan() {
    let key = Key::new([0x02, 1, 2, 3, 4, 0xff], 4095);
    assert_eq!((key.address(), key.vlan()), ([2, 1, 2, 3, 4, 255], 4095));
    assert_ne!(key, Key::new([2, 1, 2, 3, 4, 255], 0));
}

#[test]
fn a_station_is_where_it_was_heard_and_moves_not_too_often() {
    let mut table = Table::new(Limits::default());
    assert_eq!(table.find(key(1), 0), None);
    assert_eq!(table.learn(key(1), 3, 10), Learned::New);
    assert_eq!(table.learn(key(1), 3, 11), Learned::Known);
    assert_eq!(table.learn(key(1), 4, 11), Learned::Held { stray: 4 });
    assert_eq!(table.find(key(1), 11), Some(3));
    assert_eq!(table.learn(key(1), 4, 12), Learned::Moved { stray: 4 });
    // It is not at home there yet.
    assert_eq!(table.learn(key(1), 3, 13), Learned::Held { stray: 4 });
    assert_eq!(table.find(key(1), 312), Some(4));
    assert_eq!(table.find(key(1), 313), None);
    assert_eq!(table.learn(key(1), 5, 313), Learned::Moved { stray: 5 });
    table.forget(5);
    assert!(table.is_empty() && table.find(key(1), 313).is_none());
}

#[test]
fn a_port_that_makes_up_addresses_makes_nobody_forgotten() {
    let mut table = Table::new(limits(1000, 100));
    for station in 0..50 {
        assert_eq!(table.learn(key(station), 1, 0), Learned::New);
    }
    let mut full = 0;
    for number in 1000..1_001_000 {
        full += u32::from(table.learn(key(number), 2, 0) == Learned::Full);
    }
    assert_eq!((table.len(), full), (150, 999_900));
    assert!((0..50).all(|station| table.find(key(station), 0) == Some(1)));
    // Nor takes what is others', beyond its part.
    assert_eq!(table.learn(key(1), 2, 100), Learned::Full);
    // In time there is room again.
    assert_eq!(table.learn(key(7_000_000), 2, 302), Learned::New);
}

#[test]
fn many_ports_that_make_up_addresses_leave_room_for_others_and_for_uplinks() {
    let bounds = Limits {
        own: 2,
        ..limits(1000, 100)
    };
    let mut table = Table::new(bounds);
    table.set_uplink(200, true);
    let fill = |table: &mut Table, port: u16| {
        let base = u32::from(port) << 16;
        let new = (0..1000).filter(|n| table.learn(key(base + n), port, 0) == Learned::New);
        new.count()
    };
    let taken: usize = (1..=50).map(|port| fill(&mut table, port)).sum();
    assert_eq!(taken, 500 + 100, "half of the table, and each port's own");
    // Who comes now is known.
    assert!((51..=60).all(|port| fill(&mut table, port) == 2));
    assert_eq!(
        fill(&mut table, 200),
        100,
        "what stands behind an uplink is"
    );
    // A station that comes from a port of those is found where it is now.
    let base = 1 << 16;
    assert_eq!(table.learn(key(base), 60, 50), Learned::Moved { stray: 60 });
    assert_eq!(table.learn(key(base + 1), 2, 50), Learned::Full);
    // Uplinks leave them their own, too.
    for port in 201..=210 {
        table.set_uplink(port, true);
        fill(&mut table, port);
    }
    assert_eq!(table.len(), 750 + 60 * 2 + 11 * 2);
    assert_eq!((fill(&mut table, 61), fill(&mut table, 211)), (2, 2));
    for port in 1..=211 {
        table.forget(port);
        table.set_uplink(port, false);
    }
    assert_eq!((table.len(), table.beyond), (0, [0, 0]));
}

#[test]
fn whoever_is_refused_again_and_again_costs_one_look_at_the_table_in_a_second() {
    let mut table = Table::new(limits(4096, 100));
    for second in 1..=2 {
        for number in 0..1_101 {
            table.learn(key(number), 1, second);
        }
        // As often as the table has slots, which is a whole number of rounds.
        assert_eq!(table.hand, 0, "in second {second}");
    }
}

#[test]
fn who_is_pinned_never_moves_and_is_not_forgotten_for_its_age() {
    let mut table = Table::new(limits(4, 4));
    assert_eq!(table.learn(key(1), 5, 0), Learned::New);
    assert!(table.pin(key(1), 3, 0) && table.pin(key(1), 3, 0));
    assert_eq!(table.learn(key(1), 5, 1000), Learned::Pinned);
    assert_eq!(table.find(key(1), 10_000), Some(3));
    table.unpin(key(1), 5);
    assert_eq!(table.pinned(key(1)), Some(3));
    assert!((2..5).all(|station| table.pin(key(station), 3, 0)) && !table.pin(key(5), 3, 0));
    table.unpin(key(1), 3);
    assert_eq!((table.find(key(1), 0), table.len()), (None, 3));
    table.forget(3);
    assert!(table.is_empty());
}

#[test]
fn a_port_may_have_fewer_than_others() {
    let mut table = Table::new(limits(100, 50));
    table.set_most(1, Some(2));
    let learned = |table: &mut Table, port| {
        let base = u32::from(port) * 1000;
        let new = (0..60).filter(|n| table.learn(key(base + n), port, 0) == Learned::New);
        new.count()
    };
    assert_eq!((learned(&mut table, 1), learned(&mut table, 2)), (2, 50));
}

#[test]
fn what_a_writer_left_that_died_is_taken_over_but_for_what_it_was_writing() {
    let limits = Limits {
        all: 256,
        ..Limits::default()
    };
    let slots = Table::places_of(limits) as u64;
    let memory = Region::heap(slots * Slots::BYTES);
    let secret = Table::new_secret();
    let mut first = Table::take_over(limits, memory.clone(), secret, |_| true);
    for station in 0..120 {
        first.learn(key(station), (station % 4) as u16 + 1, 100);
    }
    let place = |station| first.place(key(station)).unwrap() as u64 * Slots::BYTES;
    let word = |at: u64| memory.load_u64(at, Ordering::Relaxed);
    let put = |at: u64, value: u64| memory.store_u64(at, value, Ordering::Relaxed);
    // It died while it wrote one, and while it moved another, which is there twice.
    put(place(0), word(place(0)) | 1);
    let free = (0..slots).map(|it| it * Slots::BYTES);
    let free: Vec<u64> = free.filter(|at| word(at + Slots::KEY) == 0).collect();
    for part in [Slots::WORD, Slots::KEY, Slots::HEARD] {
        put(free[7] + part, word(place(1) + part));
    }
    // And before it had a key.
    put(free[20], word(free[20]) | 1);
    let mut next = Table::take_over(limits, memory.clone(), secret, |port| port != 4);
    for station in 0..120 {
        let port = (station % 4) as u16 + 1;
        let is_known = station != 0 && port != 4;
        let found = next.find(key(station), 100);
        assert_eq!(found, is_known.then_some(port), "{station}");
    }
    assert_eq!((next.len(), next.entries(100).count()), (89, 89));
    assert!((0..next.slots.len()).all(|at| !next.shared.is_torn(at)));
    // Its lists are whole, and it goes on.
    assert_eq!(next.learn(key(0), 2, 101), Learned::New);
    assert_eq!(next.of_port(2).count(), 31);
    (1..4).for_each(|port| next.forget(port));
    assert!(next.is_empty() && (0..next.slots.len()).all(|at| next.shared.key(at) == 0));
}

#[test]
fn it_says_what_a_map_says_whatever_comes_and_goes() {
    let mut table = Table::new(Limits {
        age_s: 1000,
        hold_s: 0,
        ..limits(300, 300)
    });
    let mut map: HashMap<u32, u16> = HashMap::new();
    let mut random = 1_u64;
    for round in 0..200_000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let (station, port) = ((random >> 33) as u32 % 250, (random >> 60) as u16);
        match round % 997 {
            0 => {
                table.forget(port);
                map.retain(|_, at| *at != port);
            }
            _ => {
                table.learn(key(station), port, 0);
                map.insert(station, port);
            }
        }
        let other = (random >> 20) as u32 % 250;
        assert_eq!(table.find(key(other), 0), map.get(&other).copied());
    }
    assert_eq!(table.len(), map.len());
    assert_eq!(table.entries(0).count(), map.len());
    // A step frees a slot or goes on to the next.
    (0..2).for_each(|_| table.sweep(1001, usize::MAX));
    assert!(table.is_empty() && (0..table.slots.len()).all(|at| table.shared.key(at) == 0));
    assert!(
        table
            .ports
            .iter()
            .all(|port| (port.count, port.first) == (0, 0))
    );
}

/// Stations come and go in a small table while another thread looks for them. How many it found, and how many of these
/// where they never were.
fn race(is_torn: bool, limit: Duration, is_over: impl Fn(u64, u64) -> bool + Sync) -> (u64, u64) {
    const STATIONS: u32 = 64;
    let home = |station: u32| 1 + (station % 2) as u16;
    let mut table = Table::new(limits(STATIONS as usize, STATIONS as usize));
    let view = table.view();
    let (stop, begin) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut found, mut wrong) = (0_u64, 0);
            for station in (0..STATIONS).cycle() {
                if let Some(seen) = view.find(key(station)) {
                    found += 1;
                    wrong += u64::from(seen.port != home(station));
                }
                if is_over(found, wrong) || begin.elapsed() > limit {
                    stop.store(true, Ordering::Relaxed);
                    return (found, wrong);
                }
            }
            unreachable!("it goes on for ever")
        });
        let mut station = 0;
        while !stop.load(Ordering::Relaxed) {
            station = (station + 7) % STATIONS;
            match is_torn {
                true => table.tear(key(station), home(station), 3 - home(station)),
                false if table.find(key(station), 0).is_some() => table.unlearn(key(station)),
                false => drop(table.learn(key(station), home(station), 0)),
            }
        }
        reader.join().unwrap()
    })
}

#[test]
fn who_reads_beside_the_writer_finds_a_station_where_it_is_or_not_at_all() {
    let (found, wrong) = race(false, Duration::from_secs(60), |found, _| {
        found >= 1_000_000
    });
    assert!(found >= 1_000_000 && wrong == 0, "{wrong} of {found}");
    // The control: a writer that does not say when it writes.
    let (_, wrong) = race(true, Duration::from_secs(60), |_, wrong| wrong > 0);
    assert!(wrong > 0);
}

#[test]
fn a_station_that_is_heard_beside_the_writer_is_not_forgotten() {
    let mut table = Table::new(Limits::default());
    let view = table.view();
    assert_eq!(table.learn(key(1), 3, 10), Learned::New);
    let seen = view.find(key(1)).unwrap();
    assert!(!seen.is_old(310, 300) && seen.is_old(311, 300));
    assert!(view.hear(&seen, 200));
    assert_eq!(table.find(key(1), 500), Some(3));
    assert_eq!(table.find(key(1), 501), None);
    // Who comes too late is told that somebody else must hear it.
    table.unlearn(key(1));
    assert_eq!(table.learn(key(1), 3, 500), Learned::New);
    assert!(!view.hear(&seen, 501));
    // What never moves is never old.
    assert!(table.pin(key(2), 4, 0));
    assert!(!view.find(key(2)).unwrap().is_old(100_000, 300));
    assert_eq!(view.find(key(3)), None);
}
