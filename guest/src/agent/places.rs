//! Where ports lie: what the host is told that applications map.

use vnplug_ring::control::{ArenaHome, Opened, RingPlace};

/// Where all rings of a port lie, and the arenas that go with its group: in the pool, or in devices.
pub(super) fn places_of(opened: &Opened) -> Vec<RingPlace> {
    let transmit = (opened.transmit.len > 0).then_some(opened.transmit);
    let mut places = match opened.memory {
        0 => opened.rings.iter().copied().chain(transmit).collect(),
        device => vec![RingPlace::device(device)],
    };
    match (opened.arenas.home, opened.arenas.memory) {
        (ArenaHome::WithTheRings, _) | (ArenaHome::Apart, 0) => {
            places.extend(&opened.arenas.places);
        }
        (ArenaHome::Plugged, device) => places.push(RingPlace::device(device)),
        _ => {}
    }
    places
}

/// The same places as at most this many; those nearest to each other are joined if need be, with what
/// lies between them.
pub(super) fn coalesce(mut places: Vec<RingPlace>, most: usize) -> Vec<RingPlace> {
    let is_device = |place: &mut RingPlace| place.as_device().is_some();
    let mut devices: Vec<RingPlace> = places.extract_if(.., is_device).collect();
    devices.sort_unstable_by_key(|place| place.offset);
    devices.dedup();
    // There are a few dozen at most.
    devices.truncate(most / 2);
    let most = most - devices.len();
    places.sort_unstable_by_key(|place| place.offset);
    let mut gap = 0_u64;
    loop {
        places.dedup_by(|next, place| {
            let end = place.offset.saturating_add(place.len);
            let joined = next.offset <= end.saturating_add(gap);
            if joined {
                let end = end.max(next.offset.saturating_add(next.len));
                place.len = end - place.offset;
            }
            joined
        });
        if places.len() <= most.max(1) {
            places.append(&mut devices);
            return places;
        }
        gap = gap.saturating_mul(2).max(4096);
    }
}

/// Places in one message; it has to be shorter than `MAX_REQUEST`.
pub(super) const MAX_NAMED: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_ring::control::Message;
    use vnplug_ring::control::wire::MAX_REQUEST;

    fn every_third_page(count: u64) -> Vec<RingPlace> {
        let place = |page| RingPlace {
            offset: page * 3 * 4096,
            len: 4096,
        };
        (0..count).map(place).collect()
    }

    #[test]
    fn adjacent_places_are_one_and_others_stay() {
        let mut places: Vec<RingPlace> = (0..100)
            .map(|page| RingPlace {
                offset: page * 4096,
                len: 4096,
            })
            .collect();
        places.reverse();
        let all = RingPlace {
            offset: 0,
            len: 100 * 4096,
        };
        assert_eq!(coalesce(places, 10), [all]);
        assert_eq!(coalesce(every_third_page(10), 10), every_third_page(10));
        assert!(coalesce(Vec::new(), 10).is_empty());
        let device = RingPlace::device(8192);
        assert_eq!(coalesce(vec![device, all, device], 10), [all, device]);
    }

    #[test]
    fn however_many_places_there_are_a_message_takes_them() {
        let places = every_third_page(100_000);
        let named = coalesce(places.clone(), MAX_NAMED);
        assert!(named.len() <= MAX_NAMED);
        let covers = |place: &RingPlace| {
            named.iter().any(|named| {
                named.offset <= place.offset && place.offset + place.len <= named.offset + named.len
            })
        };
        assert!(places.iter().step_by(997).all(covers));
        let full = every_third_page(MAX_NAMED as u64);
        assert!(Message::Release(full).encode(1, 0).len() < MAX_REQUEST / 2 + 100);
    }
}
