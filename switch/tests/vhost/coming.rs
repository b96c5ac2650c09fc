//! Front-ends that come, go, come again, and have several pairs of queues.

use super::*;

#[test]
fn a_front_end_that_comes_again_has_its_port_and_goes_on_where_it_was() {
    let served = Served::here();
    let (mut guest, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    guest.send(&frame(0xee, 1, 1));
    assert_eq!(other.next().1, frame(0xee, 1, 1));
    other.send(&frame(1, 2, 2));
    assert_eq!(guest.next().1, frame(1, 2, 2));
    // The same rings, used by a connection that says that they begin at 0.
    drop(std::mem::replace(
        &mut guest.front,
        Front::connect(&served.path),
    ));
    guest.front.agree(PLAIN);
    assert!(guest.front.table(&guest.memory, LEN));
    assert!(guest.front.start(&guest.receiving) && guest.front.start(&guest.sending));
    for number in 0..200 {
        guest.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
        other.send(&frame(1, 2, number));
        assert_eq!(guest.next().1, frame(1, 2, number));
    }
    eventually("the port of before is gone", || {
        served.count("switch_ports") == 2
    });
}

#[test]
fn a_front_end_that_listens_is_connected_to_again_and_again() {
    let mut listening = None;
    let served = Served::with(|home| {
        let path = home.path("guest.sock");
        listening = Some(UnixListener::bind(&path).unwrap());
        vec![path, home.path("nobody.sock")]
    });
    let listener = listening.unwrap();
    let mut other = served.guest(PLAIN);
    for number in 0..3 {
        let (socket, _) = listener.accept().unwrap();
        let mut guest = Guest::with(Front::on(socket), PLAIN);
        guest.start();
        guest.send(&frame(0xee, 1, number));
        assert_eq!(other.next().1, frame(0xee, 1, number));
    }
    eventually("its port is free", || served.count("switch_ports") == 1);
}

#[test]
fn flows_keep_to_one_pair_each_and_all_pairs_send() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut guest = served.guest(PLAIN);
    // A second pair, whose buffers are those of the first.
    let mut pair = [Ring::new(2, 0x3_0000), Ring::new(3, 0x4_0000)];
    assert!(guest.front.start(&pair[0]) && guest.front.start(&pair[1]));
    let region = guest.region.clone();
    for at in 0..SIZE {
        let buffer = 0x30_0000 + 2048 * u64::from(at);
        pair[0].desc(&region, at, (buffer, 2048, 2, 0));
        pair[0].offer(&region, at);
    }
    let flow = |port: u8| {
        let mut bytes = super_frame(0xee, 1, 26).0;
        bytes[35] = port;
        bytes
    };
    let mut counts = [0, 0];
    for port in 0..64 {
        for _ in 0..2 {
            sender.send(&flow(port));
        }
        let mut came = [0, 0];
        eventually("both come", || {
            came[0] += guest.drain();
            while pair[0].back(&region).is_some() {
                came[1] += 1;
            }
            came[0] + came[1] == 2
        });
        assert!(came == [2, 0] || came == [0, 2], "{came:?}");
        counts = [counts[0] + came[0], counts[1] + came[1]];
        // Enough for all of them.
        while pair[0].next.wrapping_sub(pair[0].taken) < SIZE {
            let head = pair[0].next % SIZE;
            pair[0].offer(&region, head);
        }
    }
    assert!(counts[0] > 20 && counts[1] > 20, "{counts:?}");
    // By the second pair.
    region.write(0x8_0000, &[0; 12]);
    region.write(0x8_000c, &frame(0xee, 7, 1));
    pair[1].desc(&region, 0, (0x8_0000, 72, 0, 0));
    pair[1].offer(&region, 0);
    pair[1].kick();
    assert_eq!(sender.next().1, frame(0xee, 7, 1));
    // One that is switched off is not used, and what has been for it goes to the first.
    assert!(guest.front.does(SET_VRING_ENABLE, &halves(2, 0), &[]));
    for port in 0..64 {
        sender.send(&flow(port));
        guest.next();
    }
    served.check_sums();
}

#[test]
fn a_switch_that_ends_under_traffic_leaves_nothing_and_crashes_nobody_v16() {
    for _ in 0..5 {
        let served = Served::here();
        let (mut one, two) = (served.guest(PLAIN), served.guest(PLAIN));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if one.has_sent() {
                        one.send(&frame(2, 1, 0));
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            let path = served.path.clone();
            drop(served);
            assert!(!path.exists());
            stop.store(true, Ordering::Relaxed);
        });
        let mut front = two.front;
        assert!(front.is_closed());
    }
}
