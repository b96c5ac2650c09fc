//! A queue that must be looked at, and one that panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use vnplug_ring::layout::{Geometry, ring_size};
use vnplug_ring::{Consumer, Producer, Region};

use super::*;
use crate::port::doorbell::Doorbell;
use crate::source::{Queue, Received, Seen, SourceError, Wake};
use vnplug_frame::Frame;
use vnplug_testing::eventually;

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
