//! Memory that shrinks, that changes under traffic, whose writes are logged, or that is scribbled over.

use super::*;

#[test]
fn a_file_that_shrinks_costs_its_own_port_v20() {
    let served = Served::here();
    let mut guests = [(); 3].map(|()| served.guest(PLAIN));
    guests[0].send(&frame(0xee, 1, 1));
    eventually("it is back", || guests[0].has_sent());
    ftruncate(&guests[0].memory, 4096).unwrap();
    // NB: the test's own mapping of it is not touched any more.
    guests[0].sending.kick();
    guests[1].send(&frame(0xee, 2, 2));
    let [victim, one, two] = &mut guests;
    eventually("it came", || two.next().1 == frame(0xee, 2, 2));
    eventually("its port is closed", || {
        // Whatever else comes to it is found out, too.
        one.send(&frame(0xee, 2, 2));
        two.drain();
        served.count("switch_ports") == 2
    });
    assert!(victim.front.is_closed());
    served.check_alive();
}

#[test]
fn memory_changes_under_traffic_and_nothing_is_lost_and_old_memory_goes() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let spare = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&spare, LEN).unwrap();
    let piece = bytes_of(&[0, 1 << 32, LEN, USER + (1 << 32), 0]);
    for number in 0..3_000 {
        sender.send(&frame(2, 1, number));
        // Also where the frame goes.
        let guest = if number % 2 == 0 {
            &mut sender
        } else {
            &mut other
        };
        match number % 6 {
            0 | 1 => assert!(guest.front.does(ADD_MEM_REG, &piece, &[spare.as_fd()])),
            2 | 3 => assert!(guest.front.does(REM_MEM_REG, &piece, &[])),
            _ => assert!(guest.front.table(&guest.memory, LEN)),
        }
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    // Front-ends with several pairs of queues say everything again for each of them.
    for _ in 0..2 {
        assert!(other.front.does(ADD_MEM_REG, &piece, &[spare.as_fd()]));
    }
    let overlaps = bytes_of(&[0, LEN - 4096, 8192, USER + (2 * LEN), 0]);
    assert!(!other.front.does(ADD_MEM_REG, &overlaps, &[spare.as_fd()]));
    for _ in 0..2 {
        assert!(other.front.does(REM_MEM_REG, &piece, &[]));
    }
    let now = || [&sender, &other].map(|guest| uses(&guest.name));
    eventually("old memory is unmapped", || {
        now() == [(2, 1); 2] && uses("memfd:spare") == (0, 1)
    });
    served.check_sums();
}

#[test]
fn a_stopped_guest_says_where_it_is_and_what_is_written_is_logged() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&log, 4096).unwrap();
    let bits = vnplug_os::memory::mapped(&log, 4096).unwrap();
    let said = bytes_of(&[4096, 0]);
    assert!(guest.front.send(SET_LOG_BASE, 0, &said, &[log.as_fd()]));
    assert_eq!(guest.front.answer().unwrap(), (SET_LOG_BASE, 5, vec![]));
    let all = bytes_of(&[PLAIN | LOG_ALL]);
    assert!(guest.front.does(SET_FEATURES, &all, &[]));
    other.send(&frame(0xee, 2, 1));
    assert_eq!(guest.next().1, frame(0xee, 2, 1));
    let mut logged = [0; 4096];
    bits.read(0, &mut logged);
    // The page of the first buffer.
    let mut expected = [0; 4096];
    expected[0x10_0000 / 4096 / 8] = 1;
    assert_eq!(logged, expected);
    // Off again.
    assert!(guest.front.does(SET_FEATURES, &bytes_of(&[PLAIN]), &[]));
    bits.write(0, &[0; 4096]);
    other.send(&frame(0xee, 2, 2));
    assert_eq!(guest.next().1, frame(0xee, 2, 2));
    bits.read(0, &mut logged);
    assert_eq!(logged, [0; 4096]);
    // Other features are not changed while rings run; logs beyond their file are none.
    let other_bits = bytes_of(&[PLAIN | EVENT_IDX]);
    assert!(!guest.front.does(SET_FEATURES, &other_bits, &[]));
    for bad in [[8192, 0], [4096, 4096], [u64::MAX, 4096], [0, 0]] {
        let mut front = Front::connect(&served.path);
        assert!(!front.does(SET_LOG_BASE, &bytes_of(&bad), &[log.as_fd()]));
    }
    assert_eq!(guest.front.stop(0), 2);
    // It is told where the guest is now.
    let mac = u64::from_le_bytes([2, 0, 0, 0, 0, 9, 0, 0]);
    assert!(guest.front.does(SEND_RARP, &bytes_of(&[mac]), &[]));
    let told = other.next().1;
    assert_eq!(
        told[..14],
        [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 9, 0x80, 0x35]
    );
}

/// What a back-end keeps in a region for frames on their way is a lie's best place: sizes that do not belong together, or
/// that change. This one keeps nothing, and so takes no such region, whatever it is said to be.
#[test]
fn a_region_for_frames_on_their_way_is_neither_mapped_nor_written_v18() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let offered = guest.front.number(GET_PROTOCOL_FEATURES);
    assert_eq!(offered & INFLIGHT_SHMFD, 0);
    let more = bytes_of(&[offered | INFLIGHT_SHMFD]);
    assert!(!guest.front.does(SET_PROTOCOL_FEATURES, &more, &[]));

    let name = "on_their_way";
    let region = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&region, 1 << 16).unwrap();
    let bytes = vnplug_os::memory::mapped(&region, 1 << 16).unwrap();
    let mut now = vec![0; 1 << 16];
    let mut number = 0;
    let mut exchange = |guest: &mut Guest| {
        for _ in 0..2 * u32::from(SIZE) {
            number += 1;
            other.send(&frame(0xee, 2, number));
            assert_eq!(guest.next().1, frame(0xee, 2, number));
        }
    };
    // The test's own mapping and descriptor.
    let own = (1, 1);
    let sizes = [
        // A true one, and such as have more rings, longer ones, or none, or lie elsewhere.
        (1 << 16, 0, 2, SIZE),
        (1 << 16, 0, u16::MAX, u16::MAX),
        (1 << 16, 0, 0, 0),
        (0, 0, 2, SIZE),
        (1, 1 << 15, 33, 32_768),
        (1 << 16, u64::MAX - 4095, 2, SIZE),
        (u64::MAX, 4096, 2, SIZE),
    ];
    for (len, offset, rings, entries) in sizes {
        let mut said = bytes_of(&[len, offset]);
        said.extend([rings, entries].map(u16::to_le_bytes).concat());
        // As QEMU pads it, and as it is.
        for said in [&[&said[..], &[0; 4]].concat(), &said] {
            let about = format!("{len} {offset} {rings} {entries}");
            let fds = [region.as_fd()];
            assert!(!guest.front.does(GET_INFLIGHT_FD, said, &[]), "{about}");
            assert!(!guest.front.does(SET_INFLIGHT_FD, said, &fds), "{about}");
            // And by who does not ask whether it is done.
            assert!(guest.front.send(SET_INFLIGHT_FD, 0, said, &fds));
            assert!(guest.front.start(&guest.sending), "{about}");
        }
    }
    bytes.write(0, &[0xa5; 1 << 16]);
    exchange(&mut guest);
    bytes.read(0, &mut now);
    assert!(now.iter().all(|byte| *byte == 0xa5), "somebody wrote");
    // It shrinks: whoever had it mapped would die of that.
    ftruncate(&region, 0).unwrap();
    exchange(&mut guest);
    ftruncate(&region, 1 << 16).unwrap();
    exchange(&mut guest);
    bytes.read(0, &mut now);
    assert!(now.iter().all(|byte| *byte == 0), "somebody wrote");
    eventually("they are closed", || uses(name) == own);

    // The control: the same memory, said to be what is taken, is seen to be mapped and written.
    let said = bytes_of(&[1 << 16, 0]);
    assert!(guest.front.send(SET_LOG_BASE, 0, &said, &[region.as_fd()]));
    assert_eq!(guest.front.answer().unwrap(), (SET_LOG_BASE, 5, vec![]));
    let all = bytes_of(&[PLAIN | LOG_ALL]);
    assert!(guest.front.does(SET_FEATURES, &all, &[]));
    exchange(&mut guest);
    assert_eq!(uses(name).0, 2);
    bytes.read(0, &mut now);
    assert!(now.iter().any(|byte| *byte != 0));
    served.check_alive();
}

#[test]
fn a_ring_that_is_not_enabled_says_where_it_is() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    (0..5).for_each(|number| guest.send(&frame(0xee, 1, number)));
    eventually("all came back", || guest.has_sent());
    let disable = halves(1, 0);
    assert!(guest.front.does(SET_VRING_ENABLE, &disable, &[]));
    assert_eq!(guest.front.stop(1), 5);
    // It has no addresses any more.
    assert_eq!(guest.front.stop(1), 0);
    served.check_alive();
}

#[test]
fn a_driver_that_scribbles_everywhere_crashes_nobody_v21() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN | EVENT_IDX);
    let (mut one, mut two) = (served.guest(PLAIN), served.guest(PLAIN));
    let mut state = 1_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state >> 33
    };
    for round in 0..20_000_u32 {
        let ring = if random() % 2 == 0 {
            &guest.sending
        } else {
            &guest.receiving
        };
        let at = ring.at + random() % 0x2400;
        // Mostly small numbers, of which more makes sense.
        let word = if random() % 4 == 0 {
            random()
        } else {
            random() % 256
        };
        guest
            .region
            .write(at, &word.to_le_bytes()[..1 + (random() % 8) as usize]);
        ring.kick();
        if round % 500 == 0 {
            for number in [0, 1] {
                guest.front.stop(number);
            }
            for ring in [&guest.sending, &guest.receiving] {
                guest
                    .region
                    .store_u16(ring.at + 0x2002, 0, Ordering::Relaxed);
                guest
                    .region
                    .store_u16(ring.at + 0x1002, 0, Ordering::Relaxed);
            }
            guest.front.start(&guest.receiving);
            guest.front.start(&guest.sending);
            one.send(&frame(2, 1, round));
            eventually("it comes", || {
                let came = two.received();
                came.is_some_and(|(_, bytes)| bytes == frame(2, 1, round))
            });
        }
    }
    served.check_sums();
}

#[test]
fn a_station_that_is_announced_has_its_frames_at_the_new_place_alone() {
    // It has not been long at the old one.
    let served = Served::set("hold=0");
    let (mut sender, mut old) = (served.guest(PLAIN), served.guest(PLAIN));
    let mut new = served.guest(PLAIN);
    old.send(&frame(0xee, 9, 0));
    assert_eq!(sender.next().1, frame(0xee, 9, 0));
    assert_eq!(new.next().1, frame(0xee, 9, 0));
    for number in 1..5 {
        sender.send(&frame(9, 1, number));
        assert_eq!(old.next().1, frame(9, 1, number));
    }
    assert!(new.received().is_none());
    let mac = u64::from_le_bytes([2, 0, 0, 0, 0, 9, 0, 0]);
    assert!(new.front.does(SEND_RARP, &bytes_of(&[mac]), &[]));
    assert_eq!(sender.next().1[12..14], [0x80, 0x35]);
    // It moved at once, and back when the guest speaks from there again.
    assert_eq!(old.next().1[12..14], [0x80, 0x35]);
    for number in 5..9 {
        sender.send(&frame(9, 1, number));
        assert_eq!(new.next().1, frame(9, 1, number));
    }
    assert!(old.received().is_none());
    served.check_sums();
}
