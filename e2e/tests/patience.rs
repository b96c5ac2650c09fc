//! A daemon that is stopped, and goes on: what came meanwhile was kept, or is counted as lost.

use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Counted;
use vnplug_testing::until;

/// Frames per second, each on a wire of its own.
const RATES: [u64; 3] = [1_000, 5_000, 100_000];
const STOPS_MS: [u64; 3] = [200, 1_000, 5_000];
/// How long is sent before the first stop, and after each.
const LEAD: Duration = Duration::from_millis(3_000);
const BETWEEN: Duration = Duration::from_millis(1_500);

/// F16: the worker stopped. What the daemon said that it can bridge, it does without losing a frame.
#[test]
fn a_stopped_daemon_loses_nothing_in_the_time_that_it_told() {
    let lab = Lab::new().expect("a lab");
    let netns = Netns::new().expect("a namespace");
    let mut arguments = Vec::new();
    for rate in RATES {
        let (near, far) = (format!("n{rate}"), format!("f{rate}"));
        netns.veth(&near, &far).expect("a wire");
        // Read by the daemon without anybody who wants it.
        arguments.extend(["--source".to_owned(), format!("{near}=af_packet,early=no")]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let daemon = Daemon::start(&lab, Some(&netns), &arguments).expect("a daemon");
    let (told, stopped, sent) = thread::scope(|scope| {
        let netns = &netns;
        let senders = RATES.map(|rate| scope.spawn(move || send(netns, rate)));
        let begun = Instant::now();
        thread::sleep(LEAD);
        let told = RATES.map(|rate| value(source(&daemon.counters(), rate), "patience_ms"));
        let stopped = STOPS_MS.map(|ms| {
            let before = dropped(&daemon);
            let took = stop(&daemon, Duration::from_millis(ms));
            thread::sleep(BETWEEN);
            let after = dropped(&daemon);
            (took, [0, 1, 2].map(|at| after[at] - before[at]))
        });
        println!("sent for {:?} at least", begun.elapsed());
        let sent = senders.map(|sender| sender.join().expect("a sender"));
        (told, stopped, sent)
    });
    for (at, (rate, told)) in RATES.into_iter().zip(told).enumerate() {
        println!("{rate} frames/s: {told} ms are told");
        let least_ms = if rate <= 5_000 { 10_000 } else { 2_000 };
        assert!(told >= least_ms, "{rate} frames/s: {told} ms");
        for (took, lost) in &stopped {
            let lost = lost[at];
            println!("  stopped for {took:?}: {lost} lost");
            // A tenth for a sender that was late, and makes up for it.
            if took.as_millis() < u128::from(told * 9 / 10) {
                assert_eq!(lost, 0, "{rate} frames/s, {took:?}, {told} ms were told");
            }
        }
    }
    // Whatever was lost was counted, to the frame.
    for (rate, sent) in RATES.into_iter().zip(sent) {
        let look = || source(&daemon.audit(), rate).clone();
        until(&format!("all {sent} are counted"), look, |source| {
            let known = value(source, "read") + value(source, "kernel_dropped");
            known == sent && value(source, "seen") == sent
        });
    }
}

/// Sends at a rate until all stops are over.
fn send(netns: &Netns, rate: u64) -> u64 {
    let stops: u64 = STOPS_MS.iter().sum();
    let pauses = LEAD + BETWEEN * STOPS_MS.len() as u32;
    let stream = Stream {
        pps: NonZeroU64::new(rate),
        ..Stream::new(
            format!("f{rate}"),
            rate * (stops + pauses.as_millis() as u64) / 1000,
        )
    };
    let sent = netns.enter(|| stream.send());
    sent.expect("in the namespace").expect("sent").frames
}

/// Stops the daemon's threads; tells for how long.
fn stop(daemon: &Daemon, time: Duration) -> Duration {
    let pid = Pid::from_raw(daemon.pid() as i32).expect("a process");
    let begun = Instant::now();
    kill_process(pid, Signal::STOP).expect("stopped");
    thread::sleep(time);
    kill_process(pid, Signal::CONT).expect("goes on");
    begun.elapsed()
}

fn dropped(daemon: &Daemon) -> [u64; 3] {
    let counters = daemon.counters();
    RATES.map(|rate| value(source(&counters, rate), "kernel_dropped"))
}

fn source(counters: &[Counted], rate: u64) -> &Counted {
    let name = format!("n{rate}");
    let found = counters
        .iter()
        .find(|it| it.kind == "source" && it.name == name);
    found.expect("a source of this name")
}
