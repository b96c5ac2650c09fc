//! Bystanders: readers of a generated run that must not lose a packet, whatever somebody else does
//! beside them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use vnplug::{Next, Port, Tuning, map_apart};
use vnplug_frame::witness::{Checker, View};
use vnplug_ring::Region;
use vnplug_ring::control::{Counted, Message};
use vnplug_ring::layout::{HEAD, MAX_DELAY_US, TAIL, WAKE_AT, WAKE_SEQ};

use crate::Lab;
use crate::daemon::{Daemon, value};
use crate::raw::{Raw, open};

/// The exact books of a bystander; its port is still counted.
pub struct Books {
    /// Its port.
    pub port: Port,
    /// Packets it read.
    pub packets: u64,
    /// Packets it was told of as lost.
    pub lost: u64,
    /// What it saw of the run.
    pub checker: Checker,
}

/// A bystander: reads until it is over and everything was read.
///
/// # Panics
/// If its port is over.
pub fn bystand(mut port: Port, over: &AtomicBool) -> Books {
    let mut checker = Checker::new(View::Whole);
    let (mut packets, mut lost, mut paused) = (0, 0, false);
    loop {
        if !paused && over.load(Ordering::Relaxed) {
            let pause = Tuning {
                enabled: false,
                ..Tuning::default()
            };
            // What is in the ring now is all.
            port.tune(pause).expect("a bystander's port is paused");
            paused = true;
        }
        match port.next().expect("a bystander's port lives") {
            Next::Packet(packet) => {
                checker.feed(packet.bytes);
                lost += u64::from(packet.meta.lost);
                packets += 1;
            }
            Next::Nothing if paused => {
                lost = lost.max(port.dropped());
                return Books {
                    port,
                    packets,
                    lost,
                    checker,
                };
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).expect("sleep");
            }
            Next::Ended => panic!("ended after {packets} packets"),
        }
    }
}

/// Ends threads when it is dropped, also by a test that fails.
pub struct Ends<'a>(pub [&'a AtomicBool; 2]);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0
            .iter()
            .for_each(|end| end.store(true, Ordering::Relaxed));
    }
}

/// A reader that maps its ring itself, and may do there what it likes.
pub struct Liar {
    /// The port lives as long as this.
    pub raw: Raw,
    /// Its port's number.
    pub port: u32,
    /// Its ring.
    pub region: Region,
    /// What wakes it.
    pub wake: OwnedFd,
}

/// Opens a port of the source `lab` by hand.
///
/// # Panics
/// If it is refused.
#[must_use]
pub fn liar(daemon: &Daemon, ring_bytes: u64) -> Liar {
    let mut raw = Raw::greeted(&daemon.socket());
    let Message::Opened(opened) = raw.ask(&Message::Open(open("lab", ring_bytes)), 0) else {
        panic!("not opened");
    };
    let mut fds = raw.take_fds();
    assert_eq!(fds.len(), 3);
    let wake = fds.pop().expect("a doorbell");
    let region = map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).expect("the ring is mapped");
    Liar {
        raw,
        port: opened.port,
        region,
        wake,
    }
}

/// What is counted of a port.
///
/// # Panics
/// If there is none of this number.
#[must_use]
pub fn port_of<'a>(counters: &'a [Counted], number: &str) -> &'a Counted {
    counters
        .iter()
        .find(|counted| counted.kind == "port" && counted.name == number)
        .expect("the port is counted")
}

/// Has bystanders read a source of this rate, lets `attack` run beside it, which is told after `least`
/// that it is enough, and checks that nobody lost a packet and that the books close, all the time.
///
/// # Panics
/// If they did.
pub fn beside<T: Send>(
    rate: u64,
    least: Duration,
    attack: impl FnOnce(&Daemon, &AtomicBool) -> T + Send,
) -> T {
    let lab = Lab::new().expect("a lab");
    // The first port starts the run. A reader that is kept waiting would lose: rings hold all that
    // comes in some seconds.
    let source = format!("lab=gen,pps={rate},start=attach,size=64,run=5");
    let daemon = Daemon::start(&lab, None, &["--source", &source]).expect("the daemon starts");
    let ports: Vec<Port> = (0..3)
        .map(|_| {
            daemon
                .port("lab")
                .ring_bytes(32 << 20)
                .open()
                .expect("a port")
        })
        .collect();
    let (enough, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _ends = Ends([&enough, &over]);
        let (daemon, enough, over) = (&daemon, &enough, &over);
        let attack = scope.spawn(move || attack(daemon, enough));
        let auditor = scope.spawn(move || {
            let mut audits = 0;
            while audits < 5 || !over.load(Ordering::Relaxed) {
                daemon.audit();
                audits += 1;
                thread::sleep(Duration::from_millis(5));
            }
        });
        let readers: Vec<_> = ports
            .into_iter()
            .map(|port| scope.spawn(move || bystand(port, over)))
            .collect();
        thread::sleep(least);
        enough.store(true, Ordering::Relaxed);
        let outcome = attack.join().expect("the attacker runs to its end");
        over.store(true, Ordering::Relaxed);
        auditor.join().expect("every audit closes");
        let readers = readers.into_iter().map(|reader| reader.join());
        let results: Vec<Books> = readers
            .map(|books| books.expect("bystanders read to the end"))
            .collect();
        let counters = daemon.audit();
        for (at, books) in results.into_iter().enumerate() {
            let host = port_of(&counters, &books.port.number().to_string());
            assert_eq!(books.lost, 0, "a bystander lost packets: {host:?}");
            println!("figure: G-12 lost by others = {}", books.lost);
            assert_eq!(books.packets, value(host, "delivered"), "{host:?}");
            let report = books.checker.report(5).expect("frames of the run");
            assert_eq!(
                (report.duplicates, books.checker.corrupt()),
                (0, 0),
                "{report:?}"
            );
            // The first port started the run: it has all of it.
            assert!(at > 0 || report.is_perfect(), "{report:?}");
        }
        outcome
    })
}

impl Liar {
    /// Takes all packets there are and asks to be woken for the next one, at once.
    pub fn arm(&self, seq: u32) {
        self.region.store_u64(WAKE_AT, 0, Ordering::Relaxed);
        self.region.store_u32(MAX_DELAY_US, 0, Ordering::Relaxed);
        self.region.store_u32(WAKE_SEQ, seq, Ordering::SeqCst);
        let head = self.region.load_u64(HEAD, Ordering::Acquire);
        self.region.store_u64(TAIL, head, Ordering::Release);
    }
}
