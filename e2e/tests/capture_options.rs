//! Options of `vnplug count`, `dump` and `echo` that shape what a reader gets, and when.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vnplug_e2e::daemon::{counted, value};
use vnplug_e2e::station::Running;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_testing::{eventually, until};

/// A `vnplug` command on the wire that ends after so many packets, once it has its port.
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
