//! A queue that must be looked at, and one that panics.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use vnplug_ring::layout::{Geometry, ring_size};
use vnplug_ring::{Consumer, Producer, Region};

use super::*;
use crate::port::doorbell::Doorbell;
use crate::source::{Received, SourceError};
use vnplug_frame::Frame;

/// An interface that was deleted, which its queue sees in `wait` alone.
struct Deleted(Arc<AtomicBool>);

impl Queue for Deleted {
    fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        Ok(Received::Nothing)
    }

    fn wait(&mut self, _: BorrowedFd<'_>, timeout: Option<Duration>) {
        assert_eq!(timeout, Some(Duration::ZERO), "it must not sleep");
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
    let deadline = Instant::now() + Duration::from_secs(60);
    while !looked.load(Ordering::Relaxed) {
        assert!(Instant::now() < deadline, "it never looks");
        std::thread::yield_now();
    }
    drop(worker);
}

/// A source with a bug.
struct Broken;

impl Queue for Broken {
    fn receive(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        panic!("on purpose")
    }

    fn wait(&mut self, _: BorrowedFd<'_>, _: Option<Duration>) {}

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
        let geometry = Geometry {
            capacity: 4096,
            snaplen: 64,
            link_type: 1,
            epoch: 256,
            port: id,
            queue: 0,
        };
        let region = Region::heap(ring_size(4096));
        let producer = Producer::create(region.clone(), geometry).unwrap();
        consumers.push(Consumer::attach(region).unwrap());
        let port = Port::new(id, producer, Doorbell::Silent);
        worker.send(Command::Attach(Box::new(port), Vec::new()));
        // The first port starts it; the second one comes when it has failed.
        let deadline = Instant::now() + Duration::from_secs(60);
        while consumers[consumers.len() - 1].life() != Life::Failed {
            assert!(Instant::now() < deadline, "port {id} is not told");
            std::thread::yield_now();
        }
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
