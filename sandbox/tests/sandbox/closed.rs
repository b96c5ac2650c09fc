//! F103: the supervisor is stopped or killed. The program's calls are refused within ten milliseconds, also those
//! that waited, and it can be killed.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vnplug_testing::{eventually, until};

use crate::support::{Port, Running, sandboxed};

/// What is promised.
const SOON: Duration = Duration::from_millis(10);

fn signal(pid: u32, signal: Signal) -> u64 {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    now_ns()
}

fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Milliseconds from `since` to the first line of `what` with this outcome after it.
fn first_after(running: &Running, what: &str, outcomes: &[&str], since: u64) -> Duration {
    let line = until(
        what,
        || {
            running.text().lines().find_map(|line| {
                let mut words = line.split(' ');
                let is_it = words.next() == Some(what);
                let at: u64 = words.next()?.parse().ok()?;
                let is_so = outcomes.contains(&words.next()?);
                (is_it && is_so && at > since).then_some(at)
            })
        },
        Option::is_some,
    );
    Duration::from_nanos(line.unwrap() - since)
}

fn holding(port: &Port) -> Running {
    let number = port.number.to_string();
    // It listens where the kernel puts it.
    let allowed = [&port.name()[..], "bind"];
    let running = Running::start(&mut sandboxed(&allowed, &["hold", &number]));
    eventually("it connects", || running.text().contains("done"));
    running
}

#[test]
fn a_stopped_supervisor_is_one_that_refuses() {
    let port = Port::new();
    let running = holding(&port);
    let supervisor = running.supervisor();
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let since = signal(supervisor, Signal::STOP);
        // The one had been received, the other is new.
        let accept = first_after(&running, "accept", &["EPERM"], since);
        let connect = first_after(&running, "connect", &["EPERM"], since);
        slowest = slowest.max(accept).max(connect);
        let since = signal(supervisor, Signal::CONT);
        first_after(&running, "connect", &["done"], since);
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("refused within {slowest:?}");
    assert!(slowest < SOON * patience(), "{slowest:?}");
}

#[test]
fn a_killed_supervisor_leaves_a_program_that_is_refused_and_can_be_killed() {
    let port = Port::new();
    let mut running = holding(&port);
    let process: u32 = running
        .text()
        .lines()
        .find_map(|line| {
            line.strip_prefix("process ")
                .and_then(|pid| pid.parse().ok())
        })
        .unwrap();
    let since = signal(running.supervisor(), Signal::KILL);
    let refused = ["EPERM", "ENOSYS"];
    let accept = first_after(&running, "accept", &refused, since);
    let connect = first_after(&running, "connect", &refused, since);
    println!("refused within {:?}", accept.max(connect));
    assert!(
        accept.max(connect) < SOON * patience(),
        "{accept:?} {connect:?}"
    );
    let before = Instant::now();
    signal(process, Signal::KILL);
    let status = running.child.wait().unwrap();
    assert_eq!(status.code(), Some(128 + 9));
    println!("killed within {:?}", before.elapsed());
}

#[test]
fn a_killed_keeper_takes_the_supervisor_with_it() {
    let port = Port::new();
    let mut running = holding(&port);
    let process: u32 = running
        .text()
        .lines()
        .find_map(|line| {
            line.strip_prefix("process ")
                .and_then(|pid| pid.parse().ok())
        })
        .unwrap();
    running.child.kill().unwrap();
    let since = now_ns();
    first_after(&running, "connect", &["ENOSYS"], since);
    signal(process, Signal::KILL);
}

/// On a machine that is busy with other tests the program itself waits for its turn.
fn patience() -> u32 {
    if std::env::var_os("VNPLUG_LONG").is_some() {
        1
    } else {
        20
    }
}
