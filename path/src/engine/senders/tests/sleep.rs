//! Who sleeps, who is woken, and what one of many costs.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug_os::closer::PeerFd;
use vnplug_ring::Bell;

use super::*;
use crate::engine::sender::PATIENCE;
use crate::engine::senders::kicks::{Kick, LOOK_US};

/// A sender that kicks by a socket, as a process does, and the other end of it.
pub(in crate::engine) fn kicking(id: u32) -> (Sender, Producer, UnixStream) {
    let (mut sender, producer, _) = sender_of(id, 1 << 14, 200);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    // Room for a hundred kicks or two, whatever the system's settings are.
    rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1 << 16).unwrap();
    // As the hub makes it.
    vnplug_os::socket::pass_rights(&ours, false);
    sender.kick = Some(Kick::new(PeerFd::alone(ours.into())));
    (sender, producer, theirs)
}

fn many(count: u32, of_queue: bool) -> (Senders, Vec<(Producer, UnixStream)>) {
    let mut senders = Senders::default();
    let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    if of_queue {
        let flags = rustix::event::epoll::CreateFlags::CLOEXEC;
        let epoll = rustix::event::epoll::create(flags).unwrap();
        senders.join(Arc::new(epoll), nobody.as_fd()).unwrap();
    }
    let mut rings = Vec::new();
    for id in 0..count {
        let (mut sender, producer, kick) = kicking(id);
        if of_queue {
            // As newer kernels do it: others have each kick read at once.
            sender.kick.as_mut().unwrap().refuses = true;
        }
        senders.attach(sender, nobody.as_fd());
        rings.push((producer, kick));
    }
    (senders, rings)
}

/// Turns until those that have nothing to send sleep.
fn settle(senders: &mut Senders) {
    for _ in 0..=PATIENCE {
        senders.serve(&mut Wire, 0, &mut |_, _| {});
    }
}

#[test]
fn who_has_nothing_to_send_sleeps_until_it_kicks_and_is_heard_then() {
    let (mut senders, mut rings) = many(1_000, false);
    settle(&mut senders);
    assert_eq!(senders.awake.count(), 0);
    assert_eq!(senders.arm(), (false, None));
    let (producer, kick) = &mut rings[700];
    write(producer, 3, 60);
    // It is asked to kick, and without a kick nobody looks at it: that is what sleeping saves.
    assert_eq!(producer.bell(0), Bell::Ring);
    let mut now_us = LOOK_US;
    assert_eq!(senders.listen(now_us), []);
    assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 0);
    kick.write_all(&[1]).unwrap();
    now_us += LOOK_US;
    assert_eq!(senders.listen(now_us), []);
    assert_eq!(senders.awake.count(), 1);
    assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 3);
    // By a command, as a VM's kicks come; and when it goes, what it has left is sent.
    write(&mut rings[3].0, 2, 60);
    senders.wake(&[3, 4711]);
    assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 2);
    settle(&mut senders);
    write(&mut rings[5].0, 4, 60);
    let last = senders.last_of(5);
    while !senders.is_done(5, last) {
        senders.serve(&mut Wire, 0, &mut |_, _| {});
    }
    assert_eq!(senders.detach(5, Life::Closed).unwrap().counters.taken, 4);
    // Its place is another's then, which is awake.
    let (sender, ..) = kicking(5_000);
    let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    senders.attach(sender, nobody.as_fd());
    assert!(senders.awake.iter().any(|at| at == 5));
    assert_eq!(senders.all.len(), 1_000);
}

/// Kicks as long as there is room.
fn fill(kick: &mut UnixStream) {
    while kick.write(&[1]).is_ok() {}
}

#[test]
fn a_socket_that_is_full_of_kicks_is_read_when_nothing_comes_and_also_when_something_always_does() {
    let (mut senders, mut rings) = many(2, true);
    let [one, two] = &mut rings[..] else {
        panic!("there are two");
    };
    let hear = |senders: &mut Senders| {
        assert_eq!(
            senders.hear(Some(Duration::ZERO), &mut |_, _| panic!("of the queue")),
            []
        );
    };
    assert_eq!(senders.settles(0), None);
    fill(&mut one.1);
    hear(&mut senders);
    // The control: one look reads nothing, and a kick that finds no room tells nobody.
    assert!(one.1.write(&[1]).is_err());
    assert_eq!(senders.settles(5), Some(Duration::from_millis(10)));
    assert_eq!(senders.settles(4_005), Some(Duration::from_millis(6)));
    settle(&mut senders);
    senders.awake.clear(0);
    write(&mut one.0, 3, 60);
    hear(&mut senders);
    assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 3);
    assert_eq!(senders.settles(4_010), None);
    // Whose ring has nothing is not looked at again. What is written and kicked for before the socket is read is: the kernel
    // tells nobody of that kick.
    for writes in [false, true] {
        assert!(one.1.write(&[1]).is_ok());
        hear(&mut senders);
        senders.awake.clear(0);
        assert_eq!(senders.all[0].as_mut().unwrap().arm(), Ok(false));
        if writes {
            write(&mut one.0, 2, 60);
            assert!(one.1.write(&[1]).is_ok());
        }
        senders.settle(&mut Vec::new());
        hear(&mut senders);
        assert_eq!(senders.awake.iter().any(|at| at == 0), writes);
        assert_eq!(senders.settles(5_000), None, "it is read");
    }
    assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 2);

    fill(&mut one.1);
    for now_us in (10_000..).step_by(100) {
        two.1.write_all(&[1]).unwrap();
        assert_eq!(senders.listen(now_us), []);
        hear(&mut senders);
        if one.1.write(&[1]).is_ok() {
            assert!((20_000..20_300).contains(&now_us), "{now_us}");
            break;
        }
        assert!(now_us < 20_300, "it is never read");
    }
}

/// What a while of kicks came to.
#[derive(Debug)]
struct Kicked {
    /// Frames that were not taken.
    lost: u64,
    /// How often the thread that serves slept.
    slept: u64,
}

/// Threads that write a frame each, kick if they are asked to, and wait until it is taken, against one that serves,
/// looks for kicks and sleeps. Nobody makes up for a kick that is lost: its writer, and with it the whole, waits for ever.
/// `of_queue`: as where kicks are heard with the queue's descriptors, and what lies unread is read at each look.
fn kicked(writers: u32, each: u64, kicks: bool, of_queue: bool) -> Kicked {
    let (mut senders, rings) = many(writers, of_queue);
    settle(&mut senders);
    // For who waits in vain.
    let is_over = Arc::new(AtomicBool::new(false));
    let write = |nth: u64, (mut producer, mut kick): (Producer, UnixStream)| {
        let is_over = Arc::clone(&is_over);
        move || {
            let mut dice = nth + 1;
            for _ in 0..each {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                // As often meets the thread before it sleeps, while it does, and after.
                match dice % 4 {
                    0 => std::thread::sleep(Duration::from_micros(dice >> 8 & 0xff)),
                    1 => std::thread::yield_now(),
                    _ => {}
                }
                assert_eq!(producer.push(&Meta::default(), &[7; 60]), Ok(true));
                producer.publish();
                if producer.bell(0) == Bell::Ring && kicks {
                    let _ = kick.write(&[1]);
                }
                let mut looks = 0_u32;
                while producer.used() > 0 {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    looks += 1;
                    match looks % 16 {
                        0 => std::thread::sleep(Duration::from_micros(50)),
                        _ => std::thread::yield_now(),
                    }
                }
            }
        }
    };
    let threads = (0..)
        .zip(rings)
        .map(|(nth, ring)| std::thread::spawn(write(nth, ring)));
    let threads: Vec<_> = threads.collect();
    let started = Instant::now();
    let (limit, tick) = match kicks {
        true => (Duration::from_secs(60), Duration::from_secs(5)),
        false => (Duration::from_millis(300), Duration::from_millis(100)),
    };
    let tick = rustix::event::Timespec::try_from(tick).unwrap();
    let all = u64::from(writers) * each;
    let mut slept = 0;
    while senders.total().taken < all && started.elapsed() < limit {
        let now_us = started.elapsed().as_micros() as u64;
        assert_eq!(senders.listen(now_us), []);
        if of_queue {
            senders.is_old = true;
            assert_eq!(senders.hear(Some(Duration::ZERO), &mut |_, _| {}), []);
        }
        if senders.serve(&mut Wire, now_us, &mut |_, _| {}).frames == 0 && !senders.arm().0 {
            let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
            let waker = senders.waker(nobody.as_fd());
            let mut events = [rustix::event::PollFd::new(
                &waker,
                rustix::event::PollFlags::IN,
            )];
            let woken = rustix::event::poll(&mut events, Some(&tick)).unwrap();
            // The time must not make up for it either: of few rings each turn looks at all.
            if woken == 0 && kicks {
                break;
            }
            slept += 1;
            assert_eq!(senders.hear(Some(Duration::ZERO), &mut |_, _| {}), []);
        }
    }
    is_over.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|it| it.join().unwrap());
    let lost = all - senders.total().taken;
    Kicked { lost, slept }
}

#[test]
fn no_kick_is_lost_between_looking_arming_and_sleeping() {
    // Many, of which one kicks while the thread looks at others; and so few that it sleeps between most frames.
    for of_queue in [false, true] {
        for (writers, each) in [(64, 300), (2, 3_000)] {
            let kicked = kicked(writers, each, true, of_queue);
            eprintln!("{writers} writers, of the queue: {of_queue}: {kicked:?}");
            assert_eq!(
                kicked.lost, 0,
                "{writers} writers, of the queue: {of_queue}"
            );
            assert!(writers > 2 || kicked.slept > 100, "{kicked:?}");
        }
        // The control: without kicks, what comes for a ring that sleeps stays there.
        assert!(kicked(64, 300, false, of_queue).lost > 0);
    }
}

/// Nanoseconds of a turn in which one of `count` senders sends a frame.
fn cost(count: u32) -> f64 {
    const TURNS: u32 = 20_000;
    let mut rings: Vec<_> = (0..count).map(|id| sender_of(id, 1 << 12, 200)).collect();
    let mut senders = attached(&mut rings);
    settle(&mut senders);
    let mut took = Duration::ZERO;
    for _ in 0..TURNS {
        write(&mut rings[count as usize / 2].1, 1, 60);
        let started = Instant::now();
        // As the engine does: a turn, and arming before a sleep.
        senders.wake(&[count / 2]);
        assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 1);
        assert_eq!(senders.arm(), (false, None));
        took += started.elapsed();
    }
    took.as_secs_f64() * 1e9 / f64::from(TURNS)
}

#[test]
fn one_of_ten_thousand_costs_what_one_of_ten_costs() {
    let (few, many) = (cost(10), cost(10_000));
    eprintln!("a turn with one active sender: of 10 {few:.0} ns, of 10,000 {many:.0} ns");
    assert!(many <= 2.0 * few, "{few} {many}");
}
