//! A sender that posts places that are not its own, overlap, are used again, and are written over while they are taken.

use std::sync::atomic::Ordering;

use super::hostile::{
    Dice, FOREIGN, OWN, Places, SNAPLEN, Seen, canaries, geometry, locked, while_written,
};
use super::*;
use vnplug_frame::MAX_BATCH;
use vnplug_ring::layout::{DATA_OFFSET, HEAD, Place, RECORD_HEADER, record_size};

const LEN: u64 = 128;
/// Bytes that a record has itself: none, or the Ethernet header and more.
const OWN_BYTES: [usize; 2] = [0, 32];
const SENT: u64 = 1 << 15;
/// The record area that its places may name, and what lies before and behind it.
const AREA: u64 = 1 << 16;
const GUARD: u64 = 1 << 16;
/// Where a record says how many bytes lie at its place, and where that is.
const PLACE_LEN: u64 = 4;
const PLACE_AT: u64 = 8;

/// How posted records are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// As the product does.
    Checked,
    /// Places are believed: a control.
    Believed,
    /// Places are checked, and looked up again for the copy: a control.
    LookedUpAgain,
    /// Frames are judged where they lie, and copied then: a control.
    JudgedInPlace,
}

/// A place: its own, or one that overlaps others, reaches over the end, or is none at all.
fn place(dice: &mut Dice) -> Place {
    let at = match dice.throw(16) {
        0 => AREA - dice.throw(LEN),
        1 => AREA + dice.throw(GUARD),
        2 => 0_u64.wrapping_sub(1 + dice.throw(GUARD)),
        3 => u64::MAX - dice.throw(LEN),
        4 => 1 << dice.throw(64),
        5 | 6 => dice.throw(AREA - LEN),
        _ => dice.throw(AREA / LEN) * LEN,
    };
    let len = match dice.throw(16) {
        0 => dice.throw(u64::from(SNAPLEN) + 2) as u32,
        1 => u32::MAX - dice.throw(LEN) as u32,
        2 => 1 << dice.throw(32),
        _ => LEN as u32,
    };
    let ring = match dice.throw(16) {
        0 => 1 + dice.throw(1 << 15) as u16,
        _ => 0,
    };
    Place { ring, at, len }
}

/// Takes posted `records` of a hostile sender: what was seen on the wire, and how many places were refused.
fn attack(records: u64, own: usize, taken: Taken) -> (Seen, u64) {
    // canaries | record area | canaries | transmit ring | canaries
    let all = canaries(3 * GUARD + AREA + ring_size(SENT));
    let area = all.part(GUARD, AREA).unwrap();
    let mut frame = [7; LEN as usize];
    frame[6..12].copy_from_slice(&OWN);
    for at in (0..AREA).step_by(LEN as usize) {
        area.write(at, &frame);
    }
    let sent = all.part(2 * GUARD + AREA, ring_size(SENT)).unwrap();
    let terms = locked();
    let size = record_size(own as u32);
    let slots = SENT / size;
    let (mut link, mut refused) = (Places::default(), 0);
    let (records_of, received, mut dice) = (sent.clone(), area.clone(), Dice(7));
    // It writes over places and addresses, wherever they may lie: those of a record, and those that it names.
    let writes = move || {
        let record = DATA_OFFSET + dice.throw(slots) * size;
        let named = place(&mut dice);
        let station = [&OWN, &FOREIGN][dice.throw(2) as usize];
        match dice.throw(4) {
            0 => records_of.store_u64(record + PLACE_AT, named.at, Ordering::Relaxed),
            1 => records_of.store_u32(record + PLACE_LEN, named.len, Ordering::Relaxed),
            2 if own > 0 => records_of.write(record + RECORD_HEADER + 6, station),
            _ => received.write(dice.throw(AREA / LEN) * LEN + 6, station),
        }
    };
    while_written(writes, || {
        let mut intake = Intake::create(sent.clone(), geometry(SENT)).unwrap();
        intake.lend([area.clone()]);
        let mut producer = Producer::attach(sent.clone()).unwrap();
        let mut sender = Sender::new(1, intake, None, None);
        sender.set_terms(Arc::clone(&terms), 0);
        let (mut done, mut dice) = (0, Dice(11));
        while done < records {
            let first = sent.load_u64(HEAD, Ordering::Relaxed);
            let count = 1 + dice.throw(64);
            for _ in 0..count {
                let named = place(&mut dice);
                assert_eq!(producer.push_posted(0, &frame[..own], named), Ok(true));
            }
            producer.publish();
            done += count;
            let at = |nth: u64| DATA_OFFSET + (first + nth * size) % SENT;
            let named = |nth: u64| {
                let at = at(nth);
                (
                    sent.load_u64(at + PLACE_AT, Ordering::Relaxed),
                    u64::from(sent.load_u32(at + PLACE_LEN, Ordering::Relaxed)),
                )
            };
            // As it would be read, without what keeps it in its area.
            let copy = |(at, len): (u64, u64)| {
                let len = len.min(u64::from(SNAPLEN));
                let from = GUARD.wrapping_add(at).min(all.len() - len);
                let mut copy = vec![0; len as usize];
                all.read(from, &mut copy);
                copy
            };
            let fits = |(at, len): (u64, u64)| {
                len <= u64::from(SNAPLEN) && len <= AREA && at <= AREA - len
            };
            match taken {
                Taken::Checked => {}
                Taken::Believed => (0..count).for_each(|nth| link.seen.look(&copy(named(nth)))),
                Taken::LookedUpAgain => {
                    let checked: Vec<_> = (0..count).filter(|nth| fits(named(*nth))).collect();
                    checked
                        .iter()
                        .for_each(|nth| link.seen.look(&copy(named(*nth))));
                }
                Taken::JudgedInPlace => {
                    let places = (0..count).map(named).filter(|it| fits(*it));
                    let judged = places.filter(|it| terms.judge(&copy(*it)).is_ok());
                    let judged: Vec<_> = judged.collect();
                    judged.iter().for_each(|it| link.seen.look(&copy(*it)));
                }
            }
            let budget = (MAX_BATCH, u64::MAX / 2);
            let went = sender.serve(&mut link, budget, 0, &mut |_, _| {});
            assert_eq!(
                went.unwrap().frames,
                count as usize,
                "a place is no lie of the ring"
            );
        }
        let counted = sender.counters;
        assert_eq!((counted.taken, counted.accounted()), (done, done));
        link.seen.refused = counted.dropped_station;
        refused = counted.dropped_place;
    });
    (link.seen, refused)
}

#[test]
fn posted_places_bring_nothing_foreign_on_the_wire_whatever_they_are() {
    let records = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 10_000_000,
        None => 1_000_000,
    };
    for own in OWN_BYTES {
        let (seen, refused) = attack(records, own, Taken::Checked);
        eprintln!(
            "{records} posted records, {own} bytes of their own: {seen:?}, {refused} places refused"
        );
        assert_eq!((seen.of_others, seen.foreign), (0, 0));
        let least = [seen.sent, seen.refused, refused].into_iter().min();
        assert!(least >= Some(records / 100_000), "{seen:?} {refused}");
    }
    // The controls.
    assert!(attack(100_000, 0, Taken::Believed).0.foreign > 0);
    let again = (0..50).any(|_| attack(100_000, 0, Taken::LookedUpAgain).0.foreign > 0);
    assert!(again, "no place was ever written over between the looks");
    let judged = (0..50).any(|_| attack(100_000, 0, Taken::JudgedInPlace).0.of_others > 0);
    assert!(judged, "no address was ever written over before the copy");
}
