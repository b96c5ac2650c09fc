//! Whole ports that an operator takes again and again under load: at once, for good, and at nobody else's cost.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, yield_now};
use std::time::{Duration, Instant};

use vnplug::{Client, Error, Next, Port, Revoke, Whose};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::reading::end_of;
use vnplug_e2e::times::Times;
use vnplug_e2e::traffic::sequence;
use vnplug_ring::control::{Counted, REVOKED};
use vnplug_testing::until;

/// Packets a second.
const LOAD: u64 = 50_000;

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
fn rounds() -> usize {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000,
        None => 50,
    }
}

fn whole(whose: Whose) -> Revoke {
    Revoke {
        whose,
        receiving: true,
        sending: true,
    }
}

fn of_source(all: &[Counted], name: &str) -> u64 {
    value(counted(all, "source"), name)
}

/// Reads on: how many packets, of which none is missing.
fn reads_all(port: &mut Port, over: &AtomicBool) -> u64 {
    let mut next = None;
    let mut read = 0;
    while !over.load(Ordering::Relaxed) {
        match port.next().unwrap() {
            Next::Packet(packet) => {
                let number = sequence(packet.bytes);
                assert_eq!(number, *next.get_or_insert(number), "after {read} packets");
                (next, read) = (Some(number + 1), read + 1);
            }
            _ => drop(port.wait(Some(Duration::from_millis(20))).unwrap()),
        }
    }
    read
}

/// Sends on: how many frames.
fn sends_on(port: &mut Port, over: &AtomicBool) -> u64 {
    let mut sent = 0;
    while !over.load(Ordering::Relaxed) {
        match port.send(&[8; 200]).unwrap() {
            true => sent += 1,
            false => yield_now(),
        }
    }
    sent
}

/// Takes something again and again, beside a reader and a sender that lose nothing. `takes` is told how often it was done and
/// says how long it took.
fn under_load(
    daemon: &Daemon,
    what: &str,
    rounds: usize,
    mut takes: impl FnMut(usize, &mut Client) -> Duration,
) {
    // All of some seconds: a reader that has no processor for a while loses nothing.
    let mut reader = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    let sender = daemon.port("lab").transmit(1 << 16).enabled(false);
    let mut sender = sender.open().unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let over = AtomicBool::new(false);
    let mut times = Times::default();
    let (read, sent) = scope(|threads| {
        let reads = threads.spawn(|| reads_all(&mut reader, &over));
        let sends = threads.spawn(|| sends_on(&mut sender, &over));
        for round in 0..rounds {
            times.push(takes(round, &mut operator));
        }
        over.store(true, Ordering::Relaxed);
        (reads.join().unwrap(), sends.join().unwrap())
    });
    assert!(read > 1_000 && sent > 1_000, "{read} read, {sent} sent");
    assert_eq!(reader.counts().lost, 0, "of {read}");
    let number = sender.number().to_string();
    let all = until(
        "all that the bystander wrote is sent",
        || daemon.audit(),
        |all| {
            let own = all.iter().find(|it| it.kind == "port" && it.name == number);
            value(own.unwrap(), "sent") == sent
        },
    );
    // The fault is real: frames waited in what was taken.
    let dropped = of_source(&all, "send_dropped_revoked");
    assert!(dropped > rounds as u64, "{dropped}");
    eprintln!(
        "{what}, {} times: {:?} in the median, 99 of 100 at most {:?}, the worst {:?}; {read} packets read beside it, \
         {sent} sent, {dropped} that waited dropped",
        rounds,
        times.at(50),
        times.at(99),
        times.at(100)
    );
    times.are_within(Duration::from_millis(10), what);
}

/// What was sent through the source, but for what the bystander sends.
fn others_sent(daemon: &Daemon) -> u64 {
    let all = daemon.counters();
    let ports = all.iter().filter(|it| it.kind == "port");
    of_source(&all, "sent") - ports.map(|it| value(it, "sent")).sum::<u64>()
}

#[test]
fn whole_ports_are_taken_again_and_again_and_others_lose_nothing() {
    let lab = Lab::new().unwrap();
    let source = format!("lab=gen,pps={LOAD}");
    let daemon = Daemon::start(&lab, None, &["--source", &source]).unwrap();
    under_load(&daemon, "a whole port", rounds(), |_, operator| {
        let port = daemon.port("lab").ring_bytes(1 << 20).transmit(1 << 18);
        let mut port = port.open().unwrap();
        let outbox = port.outbox().unwrap();
        while outbox.push(&[7; 1400]).unwrap() {}
        outbox.flush();
        let begun = Instant::now();
        operator.revoke(whole(Whose::Port(port.number()))).unwrap();
        let took = begun.elapsed();
        let sent = others_sent(&daemon);
        let told = end_of(&mut port);
        assert!(
            matches!(&told, Error::Gone(why) if why == REVOKED),
            "{told:?}"
        );
        // What it got ends with what was there then.
        let read = port.counts().received;
        assert!(matches!(port.next(), Err(Error::Gone(_))));
        assert_eq!(port.counts().received, read);
        assert!(matches!(port.send(&[7; 60]), Err(Error::Gone(_))));
        assert_eq!(others_sent(&daemon), sent, "nothing of it is sent later");
        took
    });
}
