//! What a frame from guest to guest costs the thread that forwards, by its length; not run by default:
//! `cargo test --release -p vnplug-switch --test vhost -- --ignored --nocapture of_a_frame`.

use super::*;

/// A switch that is served while guests start, then by who measures.
fn with_guests(count: usize, features: u64) -> (TestDir, Box<dyn Queue>, Vec<Guest>) {
    let home = TestDir::new("cost");
    let path = home.path("lan0.sock");
    let mut config = SwitchConfig::new("lan0");
    config.vhost.path = Some(path.clone());
    let (mut queue, _) = Switch::open(config).unwrap();
    let stop = AtomicBool::new(false);
    let guests = std::thread::scope(|scope| {
        scope.spawn(|| {
            serve(
                &mut *queue,
                &stop,
                &Mutex::default(),
                &AtomicU64::new(0),
                &[Arc::default(), Arc::new(AtomicBool::new(true))],
            )
        });
        let guests = (0..count).map(|_| Guest::boot(&path, features)).collect();
        stop.store(true, Ordering::Relaxed);
        guests
    });
    (home, queue, guests)
}

/// Nanoseconds of a frame, the median of turns of `count`. `sets`: in how many places each lies in
/// turn, at both ends; more than one are not in the second cache level.
fn of_turns(
    queue: &mut dyn Queue,
    guests: &mut [Guest],
    (frame, offload): &(Vec<u8>, Offload),
    (count, sets): (usize, u64),
) -> u128 {
    let [one, two] = guests else { unreachable!() };
    for at in 0..count as u64 {
        for set in 0..sets {
            let place = 0x20_0000 + 0x8000 * at + 0x800 * set;
            one.region.write(place, &offload.to_header(frame));
            one.region.write(place + 12, frame);
        }
    }
    let mut times = Vec::new();
    for turn in 0..TURNS as u64 {
        let set = turn % sets;
        for at in 0..count as u16 {
            let place = 0x20_0000 + 0x8000 * u64::from(at) + 0x800 * set;
            let len = 12 + frame.len() as u32;
            one.sending.desc(&one.region, at, (place, len, 0, 0));
            one.sending.offer(&one.region, at);
        }
        one.sending.kick();
        look(queue);
        let begin = Instant::now();
        let received = queue.receive(&mut |_| {}).unwrap();
        times.push(begin.elapsed().as_nanos() / count as u128);
        assert_ne!(received, Received::Nothing);
        assert!(two.take_back(0x2_0000 * (turn % sets.min(8))) >= count);
        assert!(one.has_sent());
    }
    times.sort_unstable();
    times[TURNS / 2]
}

/// Has it learn who has frames, as a thread that serves it does.
fn look(queue: &mut dyn Queue) {
    let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    wait(queue, nobody.as_fd(), Some(Duration::ZERO));
}

#[test]
#[ignore = "measures, and takes its time"]
fn of_a_frame() {
    let (_home, mut queue, mut guests) = with_guests(2, PLAIN | GUEST_CSUM | GUEST_TSO4);
    // The switch learns where the receiver is.
    guests[1].send(&frame(1, 2, 0));
    while queue.receive(&mut |_| {}).unwrap() == Received::Nothing {
        look(&mut *queue);
    }
    guests[0].drain();
    println!("bytes  copied twice  copied once (ns)  from L3: twice  once");
    for len in [64, 128, 256, 384, 512, 768, 1024, 1514, 9000, 65_000] {
        let mut all = (frame(2, 1, 0), Offload::default());
        all.0.resize(len, 0x5a);
        if len == 65_000 {
            all = super_frame(2, 1, len - 54);
        }
        let (count, sets) = match len {
            0..=1600 => (64, 16),
            1601..=10_000 => (8, 16),
            _ => (1, 16),
        };
        let mut of = |may_pass, sets| {
            queue.may_pass(may_pass);
            of_turns(&mut *queue, &mut guests, &all, (count, sets))
        };
        let all = [(false, 1), (true, 1), (false, sets), (true, sets)];
        let [a, b, c, d] = all.map(|(may_pass, sets)| of(may_pass, sets));
        println!("{len:5} {a:13} {b:12} {c:20} {d:5}");
    }
}

const TURNS: usize = 4001;
