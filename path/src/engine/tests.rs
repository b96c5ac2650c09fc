//! A queue that must be looked at, and one that panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Bell, Consumer, Producer, Region};

use super::senders::tests::sleep::kicking;
use super::*;
use crate::port::doorbell::Doorbell;
use crate::source::{Queue, Received, Seen, SourceError, Wake};
use vnplug_frame::Frame;
use vnplug_testing::{PATIENCE, eventually};

/// An interface that was deleted, which its queue sees after a wait alone.
struct Deleted(Arc<AtomicBool>);

impl Queue for Deleted {
    fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        Ok(Received::Nothing)
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::default()
    }

    fn woke(&mut self, _: Seen) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

#[test]
fn a_thread_that_never_sleeps_has_its_queue_look_at_the_interface() {
    let looked = Arc::new(AtomicBool::new(false));
    let options = WorkerOptions {
        busy: true,
        ..WorkerOptions::default()
    };
    let worker = Worker::start(Box::new(Deleted(Arc::clone(&looked))), options).unwrap();
    eventually("it looks", || looked.load(Ordering::Relaxed));
    drop(worker);
}

/// A source with a bug.
struct Broken;

impl Queue for Broken {
    fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        panic!("on purpose")
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::default()
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

#[test]
fn a_source_that_panics_has_failed_and_its_readers_are_told() {
    let options = WorkerOptions {
        hold: true,
        ..WorkerOptions::default()
    };
    let worker = Worker::start(Box::new(Broken), options).unwrap();
    let mut consumers = Vec::new();
    for id in [1, 2] {
        let (port, consumer) = port(id);
        consumers.push(consumer);
        worker.send(Command::Attach(port, Vec::new()));
        // The first port starts it; the second one comes when it has failed.
        let last = consumers.len() - 1;
        let told = || consumers[last].life() == Life::Failed;
        eventually(&format!("port {id} is told"), told);
    }
    let (reply, answer) = channel();
    worker.send(Command::Snapshot(Asked::All, reply));
    let snapshot = answer.recv().unwrap();
    assert_eq!(
        (snapshot.state.as_str(), snapshot.ports.len()),
        ("failed", 2)
    );
    assert!(snapshot.failure.unwrap().contains("panicked"));
}

/// A port whose ring holds some frames, and its reader.
fn port(id: u32) -> (Box<Port>, Consumer) {
    let geometry = Geometry {
        capacity: 4096,
        snaplen: 64,
        link_type: 1,
        epoch: 256,
        port: id,
        queue: 0,
    };
    let region = Region::heap(ring_size(geometry.capacity));
    let producer = Producer::create(region.clone(), geometry).unwrap();
    let port = Port::new(id, producer, Doorbell::Silent);
    (Box::new(port), Consumer::attach(region).unwrap())
}

/// A queue that learns by an epoll instance when its bell is rung, has a frame for that, and fails when told so.
struct Watching {
    epoll: Arc<OwnedFd>,
    bell: Arc<OwnedFd>,
    has: bool,
    fails: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
}

/// What a test has of one.
struct Watched {
    bell: Arc<OwnedFd>,
    fails: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
}

impl Watching {
    fn new() -> (Self, Watched) {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let bell = Arc::new(eventfd(0, flags).unwrap());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(
            &epoll,
            &bell,
            epoll::EventData::new_u64(NUMBER),
            EventFlags::IN,
        )
        .unwrap();
        let (fails, asked) = (Arc::default(), Arc::default());
        let watched = Watched {
            bell: Arc::clone(&bell),
            fails: Arc::clone(&fails),
            asked: Arc::clone(&asked),
        };
        let epoll = Arc::new(epoll);
        let queue = Self {
            epoll,
            bell,
            has: false,
            fails,
            asked,
        };
        (queue, watched)
    }
}

impl Queue for Watching {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        assert!(!self.fails.load(Ordering::Relaxed), "on purpose");
        if !std::mem::take(&mut self.has) {
            return Ok(Received::Nothing);
        }
        rustix::io::read(&self.bell, &mut [0; 8]).unwrap();
        sink(&[Frame {
            bytes: &[7; 60],
            wire_len: 60,
            ts_ns: 1,
            ..Frame::default()
        }]);
        Ok(Received::Frames(1))
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::default()
    }

    fn woke(&mut self, _: Seen) {}

    fn epoll(&self) -> Option<Arc<OwnedFd>> {
        Some(Arc::clone(&self.epoll))
    }

    fn found(&mut self, number: u64, flags: EventFlags) {
        assert_eq!((number, flags), (NUMBER, EventFlags::IN));
        self.has = true;
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

const NUMBER: u64 = 5;

impl Watched {
    fn ring(&self) {
        vnplug_os::event::ring(&self.bell);
    }

    /// How often its queue was asked for frames.
    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// That nobody asks while nothing happens.
    fn rests(&self) {
        let before = self.asked();
        std::thread::sleep(Duration::from_millis(50));
        let asked = self.asked() - before;
        assert!(asked <= 2, "it never sleeps: asked {asked} times");
    }
}

#[test]
fn a_thread_sleeps_where_its_queue_learns_what_it_has_and_so_do_two_queues_of_one() {
    for count in [1, 2] {
        let (queues, watched): (Vec<_>, Vec<_>) = (0..count).map(|_| Watching::new()).unzip();
        let queues = queues.into_iter().map(|queue| {
            let queue: Box<dyn Queue> = Box::new(queue);
            (queue, WorkerOptions::default())
        });
        let workers = start(queues.collect(), ThreadOptions::default()).unwrap();
        let mut consumers = Vec::new();
        for worker in &workers {
            let (port, consumer) = port(1);
            consumers.push(consumer);
            worker.send(Command::Attach(port, Vec::new()));
        }
        let taken = |consumer: &mut Consumer| {
            let taken = consumer.next().unwrap().is_some();
            consumer.release();
            taken
        };
        for (watched, consumer) in watched.iter().zip(&mut consumers) {
            watched.rests();
            let before = watched.asked();
            for _ in 0..100 {
                watched.ring();
                eventually("the frame is there", || taken(consumer));
            }
            watched.rests();
            // A turn for each, and one that finds nothing more.
            let asked = watched.asked() - before;
            assert!(asked <= 210, "asked {asked} times");
            // Several at once are taken, too.
            (0..20).for_each(|_| watched.ring());
            let mut came = 0;
            eventually("all are there", || {
                came += usize::from(taken(consumer));
                came == 20
            });
        }
        // One that has failed is not slept on, whatever it watches, and answers.
        watched[0].fails.store(true, Ordering::Relaxed);
        watched[0].ring();
        eventually("its reader is told", || consumers[0].life() == Life::Failed);
        let turns = workers[0].pulse().turns();
        std::thread::sleep(Duration::from_millis(50));
        let turned = workers[0].pulse().turns() - turns;
        assert!(turned <= 4, "it never sleeps: {turned}");
        let (reply, answer) = channel();
        workers[0].send(Command::Snapshot(Asked::All, reply));
        assert_eq!(answer.recv_timeout(PATIENCE).unwrap().state, "failed");
        if let (Some(watched), Some(consumer)) = (watched.get(1), consumers.get_mut(1)) {
            watched.ring();
            eventually("the other goes on", || taken(consumer));
        }
    }
}

#[test]
fn a_kick_ends_the_sleep_where_the_queue_learns_what_it_has_and_a_queue_that_is_busy_keeps_nobody()
{
    let (queue, watched) = Watching::new();
    let worker = Worker::start(Box::new(queue), WorkerOptions::default()).unwrap();
    let (port, mut consumer) = port(1);
    worker.send(Command::Attach(port, Vec::new()));
    // More than are looked at in every turn, whether they send or not.
    let mut rings: Vec<_> = (0..40).map(kicking).collect();
    let mut senders = Vec::new();
    for (sender, producer, kick) in rings.drain(..) {
        worker.send(Command::AttachSender(Box::new(sender)));
        senders.push((producer, kick));
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        for is_busy in [false, true] {
            if is_busy {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        watched.ring();
                        std::thread::yield_now();
                    }
                });
            }
            for number in 0..400 {
                let (producer, kick) = &mut senders[number % 40];
                assert_eq!(producer.push(&Meta::default(), &[7; 60]), Ok(true));
                producer.publish();
                if producer.bell(0) == Bell::Ring {
                    std::io::Write::write_all(kick, &[1]).unwrap();
                }
                eventually("it is sent", || producer.used() == 0);
                while consumer.next().unwrap().is_some() {}
                consumer.release();
            }
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// Who kicks unasked fills his socket, and what he writes then is sent all the same: when the thread has slept a while, also if
/// its queue wakes it all the time.
#[test]
fn what_is_written_when_a_socket_is_full_of_kicks_is_sent_soon() {
    let (queue, watched) = Watching::new();
    let worker = Worker::start(Box::new(queue), WorkerOptions::default()).unwrap();
    // More than are looked at in every turn.
    let mut senders = Vec::new();
    for (mut sender, producer, kick) in (0..40).map(kicking) {
        // As newer kernels do it: others have each kick read at once.
        sender.kick.as_mut().unwrap().refuses = true;
        worker.send(Command::AttachSender(Box::new(sender)));
        senders.push((producer, kick));
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        for is_woken in [false, true] {
            if is_woken {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        watched.ring();
                        std::thread::sleep(Duration::from_millis(3));
                    }
                });
            }
            let (mut longest, mut was_full) = (Duration::ZERO, false);
            for (producer, kick) in &mut senders {
                // It rests, and is heard once for all of these.
                std::thread::sleep(Duration::from_millis(3));
                let is_full = (0..100_000).any(|_| std::io::Write::write(kick, &[1]).is_err());
                assert!(is_full, "it reads all the time");
                assert_eq!(producer.push(&Meta::default(), &[7; 60]), Ok(true));
                producer.publish();
                was_full |=
                    producer.bell(0) == Bell::Ring && std::io::Write::write(kick, &[1]).is_err();
                let begun = Instant::now();
                eventually("it is sent", || producer.used() == 0);
                longest = longest.max(begun.elapsed());
            }
            println!("woken by others: {is_woken}, the longest {longest:?}");
            // The control: there was no room for the kick that was asked for.
            assert!(was_full);
            assert!(longest < Duration::from_millis(500), "{longest:?}");
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// A queue that has one frame for each time its descriptor was rung, and fails when told so.
struct Rung {
    bell: Arc<OwnedFd>,
    fails: Arc<AtomicBool>,
    /// From now on it panics also when it is counted, and when it goes.
    breaks: Arc<AtomicBool>,
    /// How often it was asked for frames: a thread that sleeps does not ask.
    asked: Arc<AtomicU64>,
}

impl Queue for Rung {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        assert!(!self.fails.load(Ordering::Relaxed), "on purpose");
        let mut count = [0; 8];
        if rustix::io::read(&self.bell, &mut count).is_err() {
            return Ok(Received::Nothing);
        }
        sink(&[Frame {
            bytes: &[7; 60],
            wire_len: 60,
            ts_ns: 1,
            flags: 0,
            vlan_tci: 0,
            ..Frame::default()
        }]);
        Ok(Received::Frames(1))
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake {
            fds: [None, Some(self.bell.as_fd())],
            within: None,
        }
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        assert!(!self.breaks.load(Ordering::Relaxed), "on purpose");
        QueueCounters::default()
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

impl Drop for Rung {
    fn drop(&mut self) {
        assert!(!self.breaks.load(Ordering::Relaxed), "on purpose");
    }
}

#[test]
fn one_thread_serves_several_queues_sleeps_on_all_of_them_and_outlives_the_failure_of_one() {
    let flags = EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    let bells: Vec<_> = (0..3)
        .map(|_| Arc::new(eventfd(0, flags).unwrap()))
        .collect();
    let flags = || (0..3).map(|_| Arc::new(AtomicBool::new(false)));
    let (fails, breaks): (Vec<_>, Vec<_>) = (flags().collect(), flags().collect());
    let asked = Arc::new(AtomicU64::new(0));
    let queues = (0..3).map(|at| {
        let queue = Rung {
            bell: Arc::clone(&bells[at]),
            fails: Arc::clone(&fails[at]),
            breaks: Arc::clone(&breaks[at]),
            asked: Arc::clone(&asked),
        };
        let queue: Box<dyn Queue> = Box::new(queue);
        (queue, WorkerOptions::default())
    });
    let thread = ThreadOptions {
        name: "three".into(),
        cpu: None,
    };
    let mut workers = start(queues.collect(), thread).unwrap();
    let mut consumers = Vec::new();
    for worker in &workers {
        let (port, consumer) = port(1);
        consumers.push(consumer);
        worker.send(Command::Attach(port, Vec::new()));
    }
    let ring = |at: usize| assert_eq!(rustix::io::write(&bells[at], &1_u64.to_ne_bytes()), Ok(8));
    // Each frame comes to the port of its own queue, whichever queue ended the sleep.
    for at in [0, 2, 1, 1, 0, 2] {
        ring(at);
        eventually("the frame is there", || {
            let taken = consumers[at].next().unwrap().is_some();
            consumers[at].release();
            taken
        });
        for consumer in &mut consumers {
            assert!(consumer.next().unwrap().is_none());
        }
    }
    // It sleeps when all are silent.
    let before = asked.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        asked.load(Ordering::Relaxed) - before <= 3,
        "it never sleeps"
    );
    // One that panics has failed, and the others go on.
    fails[1].store(true, Ordering::Relaxed);
    ring(1);
    eventually("its reader is told", || consumers[1].life() == Life::Failed);
    assert_eq!([0, 2].map(|at| consumers[at].life()), [Life::Open; 2]);
    // It may panic on and on: in the end it is closed, and answers nobody.
    breaks[1].store(true, Ordering::Relaxed);
    for _ in 0..200 {
        let (reply, _) = channel();
        workers[1].send(Command::Snapshot(Asked::All, reply));
    }
    // One that is closed leaves the thread to the others, also if it panics at that.
    breaks[0].store(true, Ordering::Relaxed);
    drop(workers.remove(0));
    assert_eq!(consumers[0].life(), Life::Closed);
    ring(2);
    eventually("the last one is served", || {
        consumers[2].next().unwrap().is_some()
    });
    assert_eq!(consumers[2].life(), Life::Open);
    drop(workers);
    assert_eq!(consumers[2].life(), Life::Closed);
}
