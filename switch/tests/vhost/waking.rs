//! Guests that do not read, that kick without end, and calls that block.

use super::*;

#[test]
fn a_guest_that_never_reads_costs_itself_only() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut deaf = served.guest(PLAIN);
    let mut other = served.guest(PLAIN);
    deaf.send(&frame(0xee, 3, 0));
    other.send(&frame(0xee, 2, 0));
    eventually("they are known", || deaf.has_sent() && other.has_sent());
    sender.drain();
    other.drain();
    for number in 0..5_000 {
        sender.send(&frame(3, 1, number));
        sender.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    // What it has buffers for, what waits for it, and no more.
    let full = served.count("out_dropped_full");
    assert_eq!(full, 5_000 - (u64::from(SIZE) - 1) - 512);
    served.check_sums();
    // Now it reads, in order and all that was kept.
    let mut number = 0;
    assert_eq!(deaf.next().1, frame(0xee, 2, 0));
    while number < u32::from(SIZE) - 1 + 512 {
        assert_eq!(deaf.next().1, frame(3, 1, number));
        number += 1;
    }
    served.check_alive();
}

#[test]
fn what_waited_for_a_guest_and_never_came_is_counted_as_dropped() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    other.send(&frame(0xee, 2, 0));
    eventually("it is known", || served.count("out_enqueued") == 1);
    for number in 0..u32::from(SIZE) + 10 {
        sender.send(&frame(2, 1, number));
        eventually("it is taken", || sender.has_sent());
    }
    eventually("all are counted", || {
        served.count("out_enqueued") == 1 + u64::from(SIZE) + 10
    });
    let came = std::iter::from_fn(|| other.receiving.back(&other.region));
    assert_eq!(came.count(), usize::from(SIZE));
    // Buffers that are nowhere.
    other
        .receiving
        .desc(&other.region, 0, (1 << 40, 2048, 2, 0));
    (0..10).for_each(|_| other.receiving.offer(&other.region, 0));
    other.receiving.kick();
    eventually("they are lost", || served.count("out_dropped_gone") == 10);
    assert_eq!(served.count("out_enqueued"), 1 + u64::from(SIZE));
    served.check_sums();
}

#[test]
fn what_is_longer_than_all_buffers_of_a_guest_is_dropped_and_what_follows_comes() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut narrow = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    for at in 0..SIZE {
        let buffer = (0x30_0000 + u64::from(at) * 256, 256, 2, 0);
        narrow.receiving.desc(&narrow.region, at, buffer);
    }
    let (bytes, offload) = super_frame(0xee, 1, 20_000);
    sender.send_offloaded(&bytes, &offload);
    eventually("it is dropped", || served.count("out_dropped_full") == 1);
    let came = || narrow.receiving.back(&narrow.region);
    let came: Vec<_> = std::iter::from_fn(came).collect();
    assert!(came.len() == usize::from(SIZE) && came.iter().all(|it| it.1 == 0));
    (0..SIZE).for_each(|at| narrow.receiving.offer(&narrow.region, at));
    narrow.receiving.kick();
    sender.send(&frame(0xee, 1, 7));
    let back = until(
        "the next one comes",
        || narrow.receiving.back(&narrow.region),
        Option::is_some,
    );
    assert_eq!(back.map(|it| it.1), Some(12 + 60));
    served.check_sums();
}

#[test]
fn a_guest_that_kicks_without_end_stops_nobody() {
    let served = Served::here();
    let noisy = served.guest(PLAIN);
    let (mut one, mut two) = (served.guest(PLAIN), served.guest(PLAIN));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                noisy.sending.kick();
                noisy.receiving.kick();
            }
        });
        for number in 0..2_000 {
            one.send(&frame(2, 1, number));
            assert_eq!(two.next().1, frame(2, 1, number));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_guest_is_asked_to_kick_when_the_switch_sleeps_and_only_then() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let region = guest.region.clone();
    eventually("it sleeps", || guest.sending.wants_kicks(&region));
    // No kick is asked for buffers that nobody waits for.
    assert!(!guest.receiving.wants_kicks(&region));
    guest.send(&frame(0xee, 1, 1));
    eventually("it is back", || guest.has_sent());
    eventually("it sleeps", || guest.sending.wants_kicks(&region));
}

#[test]
fn a_guest_learns_of_a_long_frame_before_the_next_is_copied_and_of_short_ones_together() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    takes.send(&frame(0xee, 2, 0));
    eventually("it is known", || takes.has_sent());
    let calls = |guest: &Guest| {
        let mut count = [0; 8];
        match rustix::io::read(&guest.receiving.call, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    };
    for (payload, expected) in [(20_000, 3), (8_000, 1)] {
        let (bytes, offload) = super_frame(2, 1, payload);
        let region = sender.region.clone();
        eventually("it sleeps", || sender.sending.wants_kicks(&region));
        calls(&takes);
        // All in one turn.
        sender.send_together(3, &bytes, &offload);
        (0..3).for_each(|_| assert_eq!(takes.next().1, bytes));
        // When a turn has ended, its calls are made.
        served.count("entered");
        assert_eq!(calls(&takes), expected, "{payload} bytes");
    }
    served.check_sums();
}

#[test]
fn a_call_by_a_stream_socket_is_whole_and_a_full_one_stops_nobody() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let fd = OwnedFd::from(theirs);
    let number = bytes_of(&[0]);
    assert!(other.front.does(SET_VRING_CALL, &number, &[fd.as_fd()]));
    drop(fd);
    for number in 0..3_000 {
        sender.send(&frame(2, 1, number));
        assert_eq!(other.next().1, frame(2, 1, number));
    }
    ours.set_nonblocking(true).unwrap();
    let mut calls = Vec::new();
    let _ = (&ours).read_to_end(&mut calls);
    assert!(calls.len() >= 8 && calls.len() % 8 == 0);
    // Gone.
    drop(ours);
    sender.send(&frame(2, 1, 1));
    assert_eq!(other.next().1, frame(2, 1, 1));
}

#[test]
fn a_call_that_is_made_to_block_costs_its_own_port() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let mut bad = served.guest(PLAIN);
    let call = &bad.receiving.call;
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap_or(0);
    let mut count = [0; 8];
    // It was called when it was started; full it is only when it is empty before.
    let _ = rustix::io::read(call, &mut count);
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(call, rustix::fs::OFlags::empty()).unwrap();
    sender.send(&frame(2, 1, 1));
    assert_eq!(other.next().1, frame(2, 1, 1));
    assert!(bad.front.is_closed());
    served.check_alive();
}

#[test]
fn what_is_no_eventfd_is_no_kick() {
    let served = Served::here();
    let mut guest = served.guest(PLAIN);
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (socket, _) = UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    let number = bytes_of(&[1]);
    for fd in [&file, &socket, &guest.memory] {
        assert!(!guest.front.does(SET_VRING_KICK, &number, &[fd.as_fd()]));
    }
    assert!(!guest.front.does(SET_VRING_CALL, &number, &[file.as_fd()]));
    assert!(!guest.front.does(SET_VRING_KICK, &bytes_of(&[0x101]), &[]));
    // No memory that could make a page fault wait.
    let words = bytes_of(&[1, 0, 4096, USER, 0]);
    let exe = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    assert!(!guest.front.does(SET_MEM_TABLE, &words, &[exe.as_fd()]));
}

#[test]
fn a_guest_that_does_not_read_a_call_by_a_socket_is_called_three_times_more() {
    let served = Served::here();
    let (mut sender, mut guest) = (served.guest(PLAIN), served.guest(PLAIN));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs
        .set_read_timeout(Some(vnplug_testing::PATIENCE))
        .unwrap();
    let ring = bytes_of(&[0]);
    assert!(guest.front.does(SET_VRING_CALL, &ring, &[ours.as_fd()]));
    drop(ours);
    // It is called when its ring is set up, too.
    for number in 0..=3 {
        if number > 0 {
            sender.send(&frame(0xee, 1, number));
        }
        eventually("it is called again", || {
            served.count("called_again") == 3 * (1 + u64::from(number))
        });
        let mut calls = [0; 4 * 8];
        theirs.read_exact(&mut calls).unwrap();
        assert_eq!(calls, [1_u64.to_ne_bytes(); 4].concat()[..]);
        if number > 0 {
            assert_eq!(guest.next().1, frame(0xee, 1, number));
        }
    }
    // The other one has an eventfd, which nobody reads either.
    guest.send(&frame(1, 2, 0));
    assert_eq!(sender.next().1, frame(1, 2, 0));
    served.check_sums();
    assert_eq!(served.count("called_again"), 12);
}
