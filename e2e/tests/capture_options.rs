//! Options of `vnplug count`, `dump` and `echo` that shape what a reader gets, and when.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vnplug_e2e::daemon::{counted, value};
use vnplug_e2e::raw::status;
use vnplug_e2e::station::Running;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_testing::{eventually, until};

const MANY: u64 = 1_000_000;

/// A `vnplug` command on the wire that ends after `packets`, once it has its port.
fn reader(wire: &Wire, what: &str, packets: u64, more: &[&str]) -> Running {
    let mut command = wire.daemon.command().unwrap();
    command.args([what, "host:wire1", "--packets"]);
    command.arg(packets.to_string()).args(more);
    let running = Running::start(command, &wire.lab, what).unwrap();
    eventually("it has a port", || {
        wire.daemon.counters().iter().any(|it| it.kind == "port")
    });
    running
}

/// It has ended, with success.
fn ends(reader: &mut Running) {
    let ended = until("it has all", || reader.status(), Option::is_some);
    assert!(ended.unwrap().success(), "{}", reader.errors());
}

#[test]
fn sample_takes_one_packet_in_n_of_those_that_pass_the_filter() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let mut count = reader(
        &wire,
        "count",
        101,
        &["--json", "--filter", "udp", "--sample", "10"],
    );
    wire.send(&Stream::new("wire0", 1000));
    let delivered = || {
        let counters = wire.daemon.counters();
        value(counted(&counters, "port"), "delivered")
    };
    eventually("a hundred are there", || delivered() == 100);
    wire.read(1000);
    // The control: without sampling it had ended long ago.
    assert_eq!(delivered(), 100);
    assert!(count.status().is_none(), "{}", count.output());
    wire.send(&Stream {
        first: 1000,
        ..Stream::new("wire0", 10)
    });
    ends(&mut count);
    let seen = count.last();
    assert_eq!(seen["packets"], 101, "{seen}");
}

#[test]
fn a_reader_sleeps_until_the_watermark_or_for_the_maximum_delay() {
    let wire = Wire::new("1500", &["--source", "wire1=af_packet"]);
    // Three times each: `count` looks every second by itself, and a busy machine is late.
    let waits = |sent: u64, more: &[&str]| {
        let took = [(); 3].map(|()| {
            let mut count = reader(&wire, "count", 1, more);
            let begun = Instant::now();
            wire.send(&Stream::new("wire0", sent));
            ends(&mut count);
            let took = begun.elapsed();
            eventually("its port is closed", || {
                wire.daemon.counters().iter().all(|it| it.kind != "port")
            });
            took
        });
        println!("{sent} packets, {more:?}: {took:?}");
        took
    };
    let soon = Duration::from_millis(300);
    let lazy = ["--watermark", "50", "--max-delay", "600ms"];
    let took = waits(1, &lazy);
    assert!(took.iter().filter(|it| *it > &soon).count() > 1, "{took:?}");
    // The controls: the watermark is reached, and the delay is short.
    let took = waits(50, &lazy);
    assert!(took.iter().min().unwrap() < &soon, "{took:?}");
    let took = waits(1, &["--watermark", "50", "--max-delay", "10ms"]);
    assert!(took.iter().min().unwrap() < &soon, "{took:?}");
}

#[test]
fn a_cluster_shares_one_flow_packet_by_packet_if_it_is_told_to() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let shares = |balance: &[&str]| {
        let args = [&["--filter", "udp", "--cluster", "ids"], balance].concat();
        let readers = [(); 2].map(|()| reader(&wire, "count", MANY, &args));
        let delivered = || {
            let counters = wire.daemon.counters();
            let ports = counters.iter().filter(|it| it.kind == "port");
            let mut shares: Vec<u64> = ports.map(|it| value(it, "delivered")).collect();
            shares.sort_unstable();
            shares
        };
        eventually("there are two readers", || delivered().len() == 2);
        wire.send(&Stream::new("wire0", 100));
        let shares = until("all is delivered", delivered, |it| {
            it.iter().sum::<u64>() == 100
        });
        drop(readers);
        wire.daemon.await_no_ports();
        shares
    };
    // The kernel's own frames take a turn, too.
    let taken = shares(&["--balance", "rr"]);
    assert!(taken[0] >= 40, "{taken:?}");
    // The control: by itself a flow stays with one of them.
    assert_eq!(shares(&[]), [0, 100]);
}

#[test]
fn a_reader_that_polls_does_not_sleep_between_frames() {
    let wire = Wire::new("1500", &["--source", "wire1=af_packet"]);
    let sleeps = |more: &[&str], sleeps_each_time: bool| {
        let args = [&["--filter", "udp"], more].concat();
        // What is sent back was read.
        let echo = reader(&wire, "echo", MANY, &args);
        let slept = || -> u64 {
            let text = status(echo.pid(), "voluntary_ctxt_switches");
            text.parse().unwrap()
        };
        let read = || value(counted(&wire.daemon.counters(), "port"), "send_taken");
        let before = slept();
        for first in 0..FRAMES {
            let before = slept();
            wire.send(&Stream {
                first,
                ..Stream::new("wire0", 1)
            });
            until("it is read", read, |now| *now == first + 1);
            if sleeps_each_time {
                until("it has slept", slept, |now| *now > before);
            }
        }
        let slept = slept() - before;
        println!("{more:?}: it slept {slept} times for {FRAMES} frames");
        drop(echo);
        wire.daemon.await_no_ports();
        slept
    };
    // The control.
    assert!(sleeps(&[], true) >= FRAMES);
    assert!(sleeps(&["--busy-poll"], false) < FRAMES / 4);
}

/// How many are sent, each when the one before was read.
const FRAMES: u64 = 50;
