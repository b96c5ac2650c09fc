//! Readers with many ports each, one of which has news: its reader alone is woken, and told of it alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, scope, sleep};
use std::time::Duration;

use vnplug::{Bundle, Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::raw::status;
use vnplug_testing::{PATIENCE, eventually, until};

use super::{ALL, news, of, sleeps, teller, threads};

const READERS: usize = 4;
/// More ports than a word of bits has.
const EACH: usize = 80;
const ROUNDS: u64 = 100;

/// What a reader was told.
struct Heard {
    /// Packets, by port.
    packets: Vec<AtomicU64>,
    /// How often it was told of each port, packets or not.
    told: Vec<AtomicU64>,
}

/// What a reader did until now.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    slept: u64,
    told: Vec<u64>,
    packets: Vec<u64>,
}

impl Heard {
    fn new() -> Self {
        let zeros = || (0..EACH).map(|_| AtomicU64::new(0)).collect();
        Self {
            packets: zeros(),
            told: zeros(),
        }
    }

    fn packets(&self, at: usize) -> u64 {
        self.packets[at].load(Ordering::Acquire)
    }

    fn seen(&self, reader: &[u32]) -> Seen {
        let all = |counts: &[AtomicU64]| {
            let each = counts.iter().map(|it| it.load(Ordering::Acquire));
            each.collect()
        };
        Seen {
            slept: sleeps(reader),
            told: all(&self.told),
            packets: all(&self.packets),
        }
    }
}

fn bundle(daemon: &Daemon, reader: usize) -> Bundle {
    let mut bundle = Bundle::new().unwrap();
    for at in 0..EACH {
        let options = daemon.port("host:lan0").ring_bytes(1 << 12);
        let options = options.filter(&of((reader * EACH + at) as u16));
        bundle.open(options).unwrap();
    }
    bundle
}

/// Reads until it is over, and looks at nothing but what it is told of.
fn read(mut bundle: Bundle, heard: &Heard, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        bundle.wait(Some(PATIENCE)).unwrap();
        while let Some(at) = bundle.next_ready() {
            heard.told[at].fetch_add(1, Ordering::AcqRel);
            while let Next::Packet(_) = bundle.ports()[at].next().unwrap() {
                heard.packets[at].fetch_add(1, Ordering::AcqRel);
            }
        }
    }
}

/// Tells all ports, and waits until all readers have heard it as often as this.
fn tell_all(teller: &mut Port, heard: &[Heard], times: u64) {
    assert!(teller.send(&news(ALL)).unwrap());
    for heard in heard {
        eventually("each port has heard it", || {
            (0..EACH).all(|at| heard.packets(at) >= times)
        });
    }
}

/// What each reader did, once all of them sleep.
///
/// One that has counted its last packet may have to wait for a processor before it sleeps.
fn at_rest(heard: &[Heard], readers: &[Vec<u32>]) -> Vec<Seen> {
    let look = || {
        let all = heard.iter().zip(readers);
        all.map(|(heard, reader)| {
            let rests = status(reader[0], "State").starts_with('S');
            rests.then(|| heard.seen(reader))
        })
        .collect::<Option<Vec<_>>>()
    };
    let twice = || {
        let before = look()?;
        sleep(Duration::from_millis(5));
        look().filter(|now| *now == before)
    };
    until("all sleep", twice, Option::is_some).unwrap()
}

/// How much more each of these is now.
fn more(now: &[u64], before: &[u64]) -> Vec<u64> {
    now.iter().zip(before).map(|(it, had)| it - had).collect()
}

#[test]
fn of_four_readers_the_one_with_packets_is_woken_alone_and_told_of_one_port_of_80() {
    // In the second word of bits, and in the first.
    const BUSY: [(usize, usize); 3] = [(2, 70), (2, 3), (0, 63)];
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut teller = teller(&daemon);
    let heard: Vec<Heard> = (0..READERS).map(|_| Heard::new()).collect();
    let bundles: Vec<Bundle> = (0..READERS).map(|it| bundle(&daemon, it)).collect();
    let over = AtomicBool::new(false);
    scope(|scope| {
        let ends = Ends([&over; 2]);
        for ((reader, bundle), heard) in bundles.into_iter().enumerate().zip(&heard) {
            let (name, over) = (format!("reader{reader}"), &over);
            let thread = Builder::new().name(name);
            let read = move || read(bundle, heard, over);
            thread.spawn_scoped(scope, read).unwrap();
        }
        let own = std::process::id();
        let named = |reader: usize| {
            let look = || threads(own, &format!("reader{reader}"));
            until("it has its name", look, |it| !it.is_empty())
        };
        let readers: Vec<Vec<u32>> = (0..READERS).map(named).collect();
        tell_all(&mut teller, &heard, 1);
        for (busy, at) in BUSY {
            let before = at_rest(&heard, &readers);
            for round in heard[busy].packets(at)..heard[busy].packets(at) + ROUNDS {
                assert!(teller.send(&news((busy * EACH + at) as u16)).unwrap());
                eventually("it is heard", || heard[busy].packets(at) == round + 1);
            }
            let now = at_rest(&heard, &readers);
            for (reader, (before, now)) in before.into_iter().zip(now).enumerate() {
                if reader != busy {
                    assert_eq!(now, before, "reader {reader}");
                    continue;
                }
                let slept = now.slept - before.slept;
                let mut told = more(&now.told, &before.told);
                let mut packets = more(&now.packets, &before.packets);
                let (of_one, of_it) = (told[at], packets[at]);
                println!(
                    "reader {reader}: slept {slept} times, told {of_one} times of a port, {of_it} packets"
                );
                // It may be told of a port again whose packets it has read already.
                assert!(slept > 0 && of_it == ROUNDS && (1..=3 * ROUNDS).contains(&of_one));
                (told[at], packets[at]) = (0, 0);
                assert_eq!([told, packets], [[0; EACH]; 2], "of the other ports");
            }
        }
        // The control: those that slept on were not deaf. It also wakes them to end.
        tell_all(&mut teller, &heard, 2);
        drop(ends);
        assert!(teller.send(&news(ALL)).unwrap());
    });
}
