//! Many contexts at once: ports with an address each on a switch, and ports that send and wake the daemon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "contexts/guests.rs"]
mod guests;
#[path = "contexts/readers.rs"]
mod readers;

use std::time::Instant;

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::raw::status;
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{eventually, until};

const CONTEXTS: u8 = 32;
const BROADCAST: u8 = 0xff;
const NOBODY: u8 = 0xee;

/// A frame to a context, or to all, or to nobody.
fn frame(to: u8, from: u8) -> Vec<u8> {
    let to = match to {
        BROADCAST => [0xff; 6],
        to => [2, 0, 0, 0, 0, to],
    };
    let mut frame = [&to, &[2, 0, 0, 0, 0, from][..], &[0x88, 0xb5]].concat();
    frame.resize(60, from);
    frame
}

/// A number of all ports.
const ALL: u16 = 0xffff;

/// A frame to the port of this number.
fn news(to: u16) -> Vec<u8> {
    let [high, low] = to.to_be_bytes();
    let to = [2, 0, 0, 1, high, low];
    let mut frame = [&to, &[2, 0, 0, 2, 0, 0][..], &[0x88, 0xb5]].concat();
    frame.resize(60, 0);
    frame
}

/// The filter of that port.
fn of(number: u16) -> String {
    let station = |number: u16| {
        let [high, low] = number.to_be_bytes();
        format!("ether dst 02:00:00:01:{high:02x}:{low:02x}")
    };
    format!("{} or {}", station(number), station(ALL))
}

/// A port on a switch that sends and is told of nothing.
fn teller(daemon: &Daemon) -> Port {
    let port = daemon.port("host:lan0").join().transmit(1 << 16);
    let port = port.filter("ether dst 02:00:00:02:00:00");
    port.ring_bytes(1 << 12).open().unwrap()
}

/// Senders of the frames that a port has, by whether they were for all.
fn heard(port: &mut Port) -> Vec<(u8, bool)> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        all.push((packet.bytes[11], packet.bytes[0] == 0xff));
    }
    all
}

#[test]
fn each_of_32_contexts_has_its_own_frames_and_each_broadcast_once() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let open = || {
        let port = daemon.port("host:lan0").join().ring_bytes(1 << 16);
        port.transmit(1 << 16).open().unwrap()
    };
    let mut ports: Vec<Port> = (0..CONTEXTS).map(|_| open()).collect();
    let entered = |wanted: u64| {
        until(
            "all have entered",
            || daemon.audit(),
            |all| value(counted(all, "source"), "entered") == wanted,
        )
    };
    // Each speaks to all, and has 31 of the others.
    for (from, port) in (0..).zip(&mut ports) {
        assert!(port.send(&frame(BROADCAST, from)).unwrap());
    }
    entered(CONTEXTS.into());
    for (own, port) in (0..).zip(&mut ports) {
        let mut all = Vec::new();
        eventually("it has heard all others", || {
            all.extend(heard(port));
            all.len() >= usize::from(CONTEXTS) - 1
        });
        all.sort_unstable();
        let others: Vec<_> = (0..CONTEXTS)
            .filter(|from| *from != own)
            .map(|from| (from, true))
            .collect();
        assert_eq!(all, others, "context {own}");
    }
    // Each speaks to the next one, which alone has it.
    for from in 0..CONTEXTS {
        let port = &mut ports[usize::from(from)];
        assert!(port.send(&frame((from + 1) % CONTEXTS, from)).unwrap());
    }
    entered(2 * u64::from(CONTEXTS));
    for (own, port) in (0..).zip(&mut ports) {
        let mut all = Vec::new();
        eventually("it has its own", || {
            all.extend(heard(port));
            !all.is_empty()
        });
        let before = (own + CONTEXTS - 1) % CONTEXTS;
        assert_eq!(all, [(before, false)], "context {own}");
    }
    // To a station that nobody is: to all, and by policy to those alone that are not spared.
    assert!(ports[0].send(&frame(NOBODY, 0)).unwrap());
    entered(2 * u64::from(CONTEXTS) + 1);
    for (own, port) in (1..).zip(&mut ports[1..]) {
        eventually("the unknown is flooded", || !heard(port).is_empty());
        if own % 2 == 0 {
            let name = port.device().to_owned();
            let (code, said) = daemon.vnplug(&["switch", "set", &name, "flood=no"]);
            assert_eq!(code, Some(0), "{said}");
        }
    }
    assert!(ports[0].send(&frame(NOBODY, 0)).unwrap());
    let all = entered(2 * u64::from(CONTEXTS) + 2);
    for (own, port) in (1..).zip(&mut ports[1..]) {
        match own % 2 {
            0 => assert_eq!(heard(port), [], "context {own} is spared"),
            _ => eventually("others are not spared", || !heard(port).is_empty()),
        }
    }
    assert_eq!(
        value(counted(&all, "source"), "stations"),
        u64::from(CONTEXTS)
    );
}

/// The threads of a process whose names begin so.
fn threads(pid: u32, name: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let thread = thread.unwrap();
        // One that ends meanwhile is none.
        let comm = std::fs::read_to_string(thread.path().join("comm"));
        if comm.is_ok_and(|comm| comm.starts_with(name)) {
            found.push(thread.file_name().to_str().unwrap().parse().unwrap());
        }
    }
    found
}

/// How often these threads have slept.
fn sleeps(threads: &[u32]) -> u64 {
    let of = |thread: &u32| status(*thread, "voluntary_ctxt_switches");
    threads
        .iter()
        .map(|it| of(it).parse::<u64>().unwrap())
        .sum()
}

#[test]
fn the_daemon_wakes_at_most_once_for_a_batch_of_64_that_send() {
    const ACTIVE: usize = 64;
    const ROUNDS: usize = 100;
    const BATCH: usize = 8;
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let open = || {
        let port = daemon.port("wire1").transmit(1 << 16).enabled(false);
        port.ring_bytes(1 << 12).open().unwrap()
    };
    let mut ports: Vec<Port> = (0..ACTIVE).map(|_| open()).collect();
    let sent = |wanted: usize| {
        until(
            "all are sent",
            || daemon.audit(),
            |all| value(counted(all, "source"), "sent") == wanted as u64,
        )
    };
    let queue = threads(daemon.pid(), "wire1");
    let mut round = |frames: usize| {
        let before = sleeps(&queue);
        // The batches are there at once, however soon a daemon that ran would take the first.
        let stopped = Stopped::new(&[daemon.pid()]);
        for port in &mut ports {
            let outbox = port.outbox().unwrap();
            for _ in 0..frames {
                assert!(outbox.push(&frame(NOBODY, 1)).unwrap());
            }
            outbox.flush();
        }
        drop(stopped);
        // One that never slept would wake for none.
        eventually("it sleeps again", || sleeps(&queue) > before);
    };
    round(1);
    sent(ACTIVE);
    let (before, began) = (sleeps(&queue), Instant::now());
    (0..ROUNDS).for_each(|_| round(BATCH));
    sent(ACTIVE + ACTIVE * ROUNDS * BATCH);
    let woke = sleeps(&queue) - before;
    let batches = (ACTIVE * ROUNDS) as u64;
    println!(
        "{woke} wake-ups for {batches} batches in {:?}",
        began.elapsed()
    );
    // Each round wakes it once at least, and once more where it was stopped asleep; of a busy processor's rounds each may be
    // cut in several.
    assert!(
        woke >= ROUNDS as u64 && woke <= 10 * ROUNDS as u64,
        "{woke}"
    );
}
