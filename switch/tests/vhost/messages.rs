//! Messages that lie, that are too long, or that nobody knows.

use super::*;

#[test]
fn descriptors_that_no_message_takes_are_closed_v2() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let spare = event();
    let sent = Arc::new(spare);
    let before = 1;
    for request in [1, 2, 8, 10, 12, 13, 14, 18, 20, 21, 31, 37, 77] {
        for count in [1, 2, 8, 32] {
            let fds = vec![sent.as_fd(); count];
            let payload = bytes_of(&[500]);
            assert!(guest.front.send(request, 0, &payload, &fds));
            if matches!(request, 1) {
                guest.front.answer().unwrap();
            }
            // NB: who has too many that are still to be closed loses its port, on a busy machine soon.
            eventually("they are closed", || probe(&sent) <= before + 1);
        }
    }
    guest.front.number(GET_QUEUE_NUM);
    // One of them may be kept as the channel of our own requests.
    eventually("they are closed", || probe(&sent) <= before + 1);
    // More than any message may bring end the connection, and are closed, too.
    let fds = vec![sent.as_fd(); 200];
    guest.front.send(1, 0, &[], &fds);
    assert!(guest.front.is_closed());
    eventually("they are closed", || probe(&sent) <= before);
    served.check_alive();
}

#[test]
fn the_same_said_a_thousand_times_costs_nothing_v3_v19() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    eventually("what came with the messages is closed", || {
        probe(&guest.sending.kick) == 2
    });
    // The test's own and the switch's mapping, and the test's descriptor.
    let before = (2, 1);
    for round in 0..300 {
        assert!(guest.front.table(&guest.memory, LEN));
        assert!(guest.front.start(&guest.receiving) && guest.front.start(&guest.sending));
        // Another size while it runs, and the right one again.
        let size = [32_768, 1, 8, SIZE.into()][round % 4];
        guest.front.does(SET_VRING_NUM, &halves(1, size), &[]);
    }
    eventually("as many as before", || {
        probe(&guest.sending.kick) == 2 && uses(&guest.name) == before
    });
    assert!(guest.front.start(&guest.sending));
    guest.send(&frame(0xee, 1, 3));
    assert_eq!(other.next().1, frame(0xee, 1, 3));
    let name = guest.name.clone();
    drop(guest);
    eventually("nothing of it is left", || uses(&name) == (0, 0));
}

#[test]
fn a_log_is_no_longer_than_any_guest_needs_v3() {
    let served = Served::here();
    let log = memfd_create("long", MemfdFlags::CLOEXEC).unwrap();
    let said = |len: u64| bytes_of(&[len, 0]);
    ftruncate(&log, 16 << 40).unwrap();
    for len in [(2 << 30) + 1, 16 << 40] {
        let mut guest = served.guest(PLAIN);
        assert!(
            guest
                .front
                .send(SET_LOG_BASE, 0, &said(len), &[log.as_fd()])
        );
        // What has an answer of its own cannot be refused otherwise.
        assert!(guest.front.is_closed(), "{len}");
    }
    let mut front = Front::connect(&served.path);
    // Before the memory is known, which is longer afterwards.
    assert!(front.send(SET_LOG_BASE, 0, &said(2 << 30), &[log.as_fd()]));
    assert_eq!(front.answer().unwrap(), (SET_LOG_BASE, 5, vec![]));
    drop(front);
    eventually("nothing of it is left", || uses("memfd:long") == (0, 1));
    served.check_alive();
}

#[test]
fn a_strangers_front_ends_take_a_bounded_part_of_the_daemons_addresses_v3() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: becomes other users, which takes root");
    }
    let served = Served::here();
    for path in [served.path.parent().unwrap(), &served.path] {
        std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let of_user = |uid: u32, count: usize| {
        let path = served.path.clone();
        let fronts = std::thread::spawn(move || {
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_uid(uid).unwrap();
            (0..count)
                .map(|_| Front::connect(&path))
                .collect::<Vec<_>>()
        });
        fronts.join().unwrap()
    };
    let memory = memfd_create("huge", MemfdFlags::CLOEXEC).unwrap();
    let most = 256_u64 << 30;
    ftruncate(&memory, most).unwrap();
    let mut all = Vec::new();
    // Few at a time: no more may be silent.
    for _ in 0..8 {
        let mut fronts = of_user(4001, 8);
        for front in &mut fronts {
            assert!(front.table(&memory, most));
        }
        all.extend(fronts);
    }
    let mut more = of_user(4001, 1).remove(0);
    assert!(!more.table(&memory, most), "16 TiB are his");
    let mut other = of_user(4002, 1).remove(0);
    assert!(other.table(&memory, most), "another user's are left");
    // What is given back may be had again.
    drop(all.pop());
    eventually("it is unmapped", || more.table(&memory, most));
    drop((all, more, other));
    eventually("nothing of it is left", || uses("memfd:huge") == (0, 1));
    served.check_alive();
}

#[test]
fn numbers_are_checked_before_they_become_shorter_v4_v15() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let front = &mut guest.front;
    for (ring, size) in [
        (0x1_0000, 64),
        (33, 64),
        (257, 64),
        (u32::MAX, 64),
        (0, 0x1_0040),
        (0, 0x1_0000),
        (0, 0),
        (0, 63),
        (0, u32::MAX),
    ] {
        let said = halves(ring, size);
        assert!(!front.does(SET_VRING_NUM, &said, &[]), "{ring} {size}");
    }
    for ring in [33_u32, 256, 0x1_0001] {
        assert!(!front.does(SET_VRING_ENABLE, &halves(ring, 1), &[]));
        assert!(!front.does(SET_VRING_BASE, &halves(ring, 0), &[]));
    }
    for ring in [33_u64, 0xff] {
        let fd = event();
        assert!(!front.does(SET_VRING_KICK, &bytes_of(&[ring]), &[fd.as_fd()]));
        assert!(!front.does(SET_VRING_CALL, &bytes_of(&[ring]), &[fd.as_fd()]));
    }
    // Payloads of the wrong length.
    for request in [SET_FEATURES, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_KICK] {
        for len in [0, 7, 9, 41] {
            assert!(!front.does(request, &vec![0; len], &[]), "{request} {len}");
        }
    }
    let mut other = served.guest(PLAIN);
    guest.send(&frame(0xee, 1, 3));
    assert_eq!(other.next().1, frame(0xee, 1, 3));
}

#[test]
fn unknown_requests_are_answered_and_malformed_messages_end_the_connection() {
    let served = Served::here();
    let mut front = Front::connect(&served.path);
    for request in [
        0,
        22,
        23,
        26,
        28,
        30,
        31,
        32,
        33,
        35,
        39,
        40,
        41,
        43,
        1000,
        u32::MAX,
    ] {
        assert!(!front.does(request, &[0; 16], &[]), "{request}");
    }
    assert_eq!(front.number(GET_QUEUE_NUM), 32);
    assert!(front.number(GET_MAX_MEM_SLOTS) >= 509);
    // A configuration in exactly the size that was asked for.
    let mut asked = [0_u32, 60, 0].map(u32::to_le_bytes).concat();
    asked.resize(12 + 60, 0xff);
    let config = front.ask(GET_CONFIG, &asked);
    assert_eq!(config.len(), 72);
    assert_eq!(config[12] & 3, 2);
    assert!(config[24..].iter().all(|byte| *byte == 0));
    for bytes in [
        // A version that there is not, an answer, and more than there may be.
        [1_u32, 2, 0],
        [1, 5, 0],
        [1, 1, 4097],
        [1, 1, u32::MAX],
    ] {
        let mut front = Front::connect(&served.path);
        pour(&front.socket, &bytes.map(u32::to_le_bytes).concat());
        assert!(front.is_closed());
    }
    // Byte by byte.
    let mut front = Front::connect(&served.path);
    for byte in [1_u32, 1, 0].map(u32::to_le_bytes).concat() {
        pour(&front.socket, &[byte]);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(front.answer().is_some());
    served.check_alive();
}

#[test]
fn a_ring_that_was_stopped_has_no_addresses_v17() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    guest.send(&frame(0xee, 1, 1));
    assert_eq!(other.next().1, frame(0xee, 1, 1));
    eventually("it is back", || guest.has_sent());
    assert_eq!(guest.front.stop(1), 1);
    // All but the addresses is said again: it is not served.
    let (kick, number) = (event(), bytes_of(&[1]));
    assert!(guest.front.does(SET_VRING_KICK, &number, &[kick.as_fd()]));
    assert!(guest.front.does(SET_VRING_ENABLE, &halves(1, 1), &[]));
    guest.send(&frame(0xee, 1, 2));
    vnplug_os::event::ring(&kick);
    served.count("entered");
    assert!(!guest.has_sent());
    assert!(
        guest
            .front
            .does(SET_VRING_ADDR, &guest.sending.addresses(), &[])
    );
    assert_eq!(other.next().1, frame(0xee, 1, 2));
}

#[test]
fn the_control_queue_answers_everything_v14() {
    let served = Served::here();
    let wants = PLAIN | GUEST_CSUM | GUEST_TSO4 | CTRL_VQ | GUEST_OFFLOADS;
    let (mut guest, mut sender) = (served.guest(wants), served.guest(PLAIN));
    let mut control = Ring::new(2, 0x3_0000);
    assert!(guest.front.start(&control));
    let region = guest.region.clone();
    let (asked, answered) = (0x8_0000, 0x8_1000);
    let mut ask = |bytes: &[u8], answer: (u64, u32, u16, u16)| {
        region.write(asked, bytes);
        region.write(answered, &[0x77]);
        control.desc(&region, 0, (asked, bytes.len() as u32, 1, 1));
        control.desc(&region, 1, answer);
        control.offer(&region, 0);
        control.kick();
        let mut back = None;
        eventually("it is answered", || {
            back = control.back(&region);
            back.is_some()
        });
        let mut said = [0];
        region.read(answered, &mut said);
        (said[0], back.unwrap())
    };
    let place = (answered, 1, 2, 0);
    let offloads = |bits: u64| [&[5, 0][..], &bits.to_le_bytes()].concat();
    assert_eq!(ask(&[0, 0, 1], place), (0, (0, 1)));
    assert_eq!(ask(&[4, 0, 1, 0], place), (0, (0, 1)));
    for bad in [
        &[4, 0, 0, 0][..],
        &[4, 0, 17, 0],
        &[9, 9, 9],
        &[5, 0, 1],
        &[7],
    ] {
        assert_eq!(ask(bad, place), (1, (0, 1)), "{bad:?}");
    }
    // A loop, no place for an answer, one outside, one that is not to be written.
    for bad in [
        (answered, 1, 1, 0),
        (answered, 0, 2, 0),
        (LEN, 1, 2, 0),
        (answered, 1, 0, 0),
    ] {
        assert_eq!(ask(&[0, 0, 1], bad).0, 0x77, "{bad:?}");
    }
    assert_eq!(ask(&[0, 0, 1], (answered, 1, 3, SIZE)), (1, (0, 1)));
    // What the guest does not take any more it does not get.
    let (bytes, offload) = super_frame(0xee, 1, 4000);
    sender.send_offloaded(&bytes, &offload);
    assert_eq!(guest.next().1, bytes);
    assert_eq!(ask(&offloads(0), place), (0, (0, 1)));
    sender.send_offloaded(&bytes, &offload);
    let lens: Vec<usize> = (0..3).map(|_| guest.next().1.len()).collect();
    assert_eq!(lens, [54 + 1448, 54 + 1448, 54 + 4000 - 2 * 1448]);
    assert_eq!(ask(&offloads(GUEST_CSUM | GUEST_TSO4), place), (0, (0, 1)));
    sender.send_offloaded(&bytes, &offload);
    assert_eq!(guest.next().1, bytes);
}
