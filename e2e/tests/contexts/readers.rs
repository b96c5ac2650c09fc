//! Readers with many ports each, one of which has news: its reader alone is woken, and told of it alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, scope};

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
    /// How often it was told of a port, packets or not.
    told: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self {
            packets: (0..EACH).map(|_| AtomicU64::new(0)).collect(),
            told: AtomicU64::new(0),
        }
    }

    fn packets(&self, at: usize) -> u64 {
        self.packets[at].load(Ordering::Acquire)
    }

    fn all(&self) -> u64 {
        (0..EACH).map(|at| self.packets(at)).sum()
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
            heard.told.fetch_add(1, Ordering::AcqRel);
            while let Next::Packet(_) = bundle.ports()[at].next().unwrap() {
                heard.packets[at].fetch_add(1, Ordering::AcqRel);
            }
        }
    }
}

/// Tells all ports, and waits until all readers have heard it as often as this and sleep.
fn tell_all(teller: &mut Port, heard: &[Heard], readers: &[Vec<u32>], times: u64) {
    assert!(teller.send(&news(ALL)).unwrap());
    for (heard, reader) in heard.iter().zip(readers) {
        eventually("each port has heard it", || {
            (0..EACH).all(|at| heard.packets(at) >= times)
        });
        eventually("the reader sleeps", || {
            status(reader[0], "State").starts_with('S')
        });
    }
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
        tell_all(&mut teller, &heard, &readers, 1);
        for (busy, at) in BUSY {
            let look = || {
                let all = heard.iter().zip(&readers).map(|(heard, reader)| {
                    let told = heard.told.load(Ordering::Acquire);
                    [sleeps(reader), told, heard.all()]
                });
                all.collect::<Vec<_>>()
            };
            let before = look();
            for round in heard[busy].packets(at)..heard[busy].packets(at) + ROUNDS {
                assert!(teller.send(&news((busy * EACH + at) as u16)).unwrap());
                eventually("it is heard", || heard[busy].packets(at) == round + 1);
            }
            for (reader, (before, now)) in before.into_iter().zip(look()).enumerate() {
                let [slept, told, packets] = [0, 1, 2].map(|it| now[it] - before[it]);
                println!(
                    "reader {reader}: slept {slept} times, told {told} times of a port, {packets} packets"
                );
                match reader == busy {
                    // All of them looked at would be 80 in each round.
                    true => assert!(slept > 0 && packets == ROUNDS && told <= 3 * ROUNDS),
                    false => assert_eq!([slept, told, packets], [0; 3], "reader {reader}"),
                }
            }
        }
        // The control: those that slept on were not deaf. It also wakes them to end.
        tell_all(&mut teller, &heard, &readers, 2);
        drop(ends);
        assert!(teller.send(&news(ALL)).unwrap());
    });
}
