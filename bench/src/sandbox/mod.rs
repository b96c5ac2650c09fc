//! What `vnplug sandbox` costs a program, beside what others do it with.
//!
//! ```text
//!   sandbox-call     one call that is judged                 floor, Sandlock, strace, bare
//!   sandbox-start    a program that does nothing             Sandlock, firejail, strace; minus bare
//!   sandbox-data     iperf3 over the loopback                bare, Sandlock
//!   sandbox-threads  a thousand threads that call at once    floor, Sandlock, bare
//! ```
//!
//! All run as the same user, allow one port of the loopback and refuse the rest. The floor is a supervisor of one
//! thread that lets every call go on without a look: less than that nobody can do who is asked.

mod arm;

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::Lab;
use vnplug_e2e::station::Running;

use self::arm::{Arm, Site};
use crate::row::{Figure, Plan, Result, Samples};

/// A port of the loopback that nobody has.
fn free_port() -> Result<u16> {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(socket.local_addr()?.port())
}

/// Samples of the first arm beside those of another.
fn beside(
    name: &str,
    unit: &'static str,
    note: &str,
    ours: &Samples,
    peer: (Arm, &Samples),
) -> Figure {
    Figure {
        name: name.to_owned(),
        unit,
        ours: ours.clone(),
        peer: Some((peer.0.name().to_owned(), peer.1.clone())),
        limit: None,
        note: note.to_owned(),
    }
}

/// Microseconds of one call.
pub(crate) fn calls(plan: &Plan) -> Result<Vec<Figure>> {
    const ARMS: [(Arm, &str); 5] = [
        (Arm::Ours, ""),
        (Arm::Sandlock, ""),
        (Arm::Strace, "-strace"),
        (Arm::Bare, "-bare"),
        (Arm::Floor, "-floor"),
    ];
    let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = receiver.local_addr()?.port();
    let site = Site::new(port)?;
    let probe = site.probe().display().to_string();
    let port = port.to_string();
    let mut figures = Vec::new();
    for kind in ["connect", "send", "bind"] {
        let mut samples = ARMS.map(|_| Samples::default());
        for _ in 0..plan.rounds {
            for ((arm, _), samples) in ARMS.iter().zip(&mut samples) {
                let said = site.said(*arm, &[&probe, "price", kind, &port, CALLS])?;
                samples.push(said.trim().parse::<f64>()? / 1e3);
            }
        }
        let note = format!("{CALLS} calls of one thread, each with what it does itself");
        let [ours, rest @ ..] = &samples;
        let floor = &samples[4];
        for ((arm, suffix), peer) in ARMS[1..].iter().zip(rest) {
            let name = format!("sandbox-call-{kind}{suffix}");
            let figure = beside(&name, "us per call", &note, ours, (*arm, peer));
            figures.push(match suffix.is_empty() {
                true => figure.limited(Arm::Floor.name(), floor),
                false => figure,
            });
        }
    }
    Ok(figures)
}

/// Milliseconds that a program takes longer than alone, until everything has ended.
pub(crate) fn start(plan: &Plan) -> Result<Vec<Figure>> {
    const ARMS: [Arm; 8] = [
        Arm::Bare,
        Arm::Ours,
        Arm::Offline,
        Arm::Net,
        Arm::Sandlock,
        Arm::Strace,
        Arm::Firejail,
        Arm::FirejailOffline,
    ];
    const PAIRS: [(&str, Arm, Arm); 5] = [
        ("sandbox-start", Arm::Ours, Arm::Sandlock),
        ("sandbox-start-strace", Arm::Ours, Arm::Strace),
        ("sandbox-start-firejail", Arm::Ours, Arm::Firejail),
        ("sandbox-start-offline", Arm::Offline, Arm::FirejailOffline),
        ("sandbox-start-net", Arm::Net, Arm::FirejailOffline),
    ];
    let site = Site::new(free_port()?)?.with_switch()?;
    let mut samples = ARMS.map(|_| Samples::default());
    for round in 0..plan.rounds {
        let mut turns = ARMS.map(|_| Samples::default());
        for turn in 0..STARTS {
            // What one leaves for the kernel to clean up is not always the same one's burden.
            for step in 0..ARMS.len() {
                let at = (step * 3 + turn + round) % ARMS.len();
                let lasted = site.lasts(ARMS[at], &["/bin/true"])?;
                turns[at].push(lasted.as_secs_f64() * 1e3);
            }
        }
        let bare = turns[0].median();
        for (samples, turns) in samples.iter_mut().zip(&turns) {
            samples.push(turns.median() - bare);
        }
    }
    let of = |arm: Arm| &samples[ARMS.iter().position(|other| *other == arm).unwrap_or(0)];
    let note =
        format!("/bin/true, medians of {STARTS} starts a round, without what it takes alone");
    Ok(PAIRS
        .iter()
        .map(|(name, ours, peer)| beside(name, "ms", &note, of(*ours), (*peer, of(*peer))))
        .collect())
}

/// Gigabits a second of a connection that was allowed.
pub(crate) fn data(plan: &Plan) -> Result<Vec<Figure>> {
    const ARMS: [Arm; 3] = [Arm::Ours, Arm::Bare, Arm::Sandlock];
    let port = free_port()?;
    let site = Site::new(port)?;
    let lab = Lab::new()?;
    let number = port.to_string();
    let mut server = Command::new("iperf3");
    server
        .args(["-s", "-B", "127.0.0.1", "-p", &number])
        .stdout(Stdio::null());
    let _server = Running::start(server, &lab, "iperf3")?;
    std::thread::sleep(Duration::from_millis(300));
    let time = plan.time.as_secs_f64().ceil().to_string();
    let words = [
        "iperf3",
        "-c",
        "127.0.0.1",
        "-p",
        &number,
        "-t",
        &time,
        "-J",
        // Client and server on a processor each: where they share one, the rate is another.
        "-A",
        "0,1",
    ];
    let mut samples = ARMS.map(|_| Samples::default());
    for round in 0..plan.rounds {
        for step in 0..ARMS.len() {
            let at = (step + round) % ARMS.len();
            // A server that is still at the last one refuses the next.
            std::thread::sleep(Duration::from_millis(300));
            let said = site.said(ARMS[at], &words)?;
            let said: Value = serde_json::from_str(&said)?;
            let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
            samples[at].push(bits.ok_or_else(|| format!("no rate: {}", said["error"]))? / 1e9);
        }
    }
    let note = "iperf3 by TCP over the loopback; the client is the program";
    let [ours, bare, sandlock] = &samples;
    Ok(vec![
        beside("sandbox-data", "Gb/s", note, ours, (Arm::Bare, bare)),
        beside(
            "sandbox-data-sandlock",
            "Gb/s",
            note,
            ours,
            (Arm::Sandlock, sandlock),
        ),
    ])
}

/// Microseconds of a call of a thousand threads: that begin at once, and that call whenever each comes to it.
pub(crate) fn threads(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = of_threads(
        plan,
        "",
        &[],
        "all at the same time; -later: without the first one",
    )?;
    figures.extend(of_threads(
        plan,
        "-spread",
        &["spread"],
        "each at its own moment, 4,000 calls a second in all; -later: without the first one",
    )?);
    Ok(figures)
}

fn of_threads(plan: &Plan, kind: &str, more: &[&str], when: &str) -> Result<Vec<Figure>> {
    const ARMS: [(Arm, &str); 4] = [
        (Arm::Ours, ""),
        (Arm::Floor, "-floor"),
        (Arm::Sandlock, "-sandlock"),
        (Arm::Bare, "-bare"),
    ];
    let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = receiver.local_addr()?.port();
    let site = Site::new(port)?;
    let probe = site.probe().display().to_string();
    let port = port.to_string();
    let words = [&[probe.as_str(), "threads", &port, THREADS, "5"], more].concat();
    let mut samples = ARMS.map(|_| [(); 3].map(|()| Samples::default()));
    for _ in 0..plan.rounds {
        for ((arm, _), samples) in ARMS.iter().zip(&mut samples) {
            let said = site.said(*arm, &words)?;
            for (name, samples) in PERCENTILES.iter().zip(samples) {
                samples.push(figure(&said, name)?);
            }
        }
    }
    let note =
        format!("{THREADS} threads make five calls each, a quarter of a second apart, {when}");
    let mut figures = Vec::new();
    for (at, name) in ["-p50", "-p99", "-later-p99"].iter().enumerate() {
        for ((arm, suffix), peer) in ARMS[1..].iter().zip(&samples[1..]) {
            let name = format!("sandbox-threads{kind}{name}{suffix}");
            figures.push(beside(
                &name,
                "us",
                &note,
                &samples[0][at],
                (*arm, &peer[at]),
            ));
        }
    }
    Ok(figures)
}

/// A number that the probe says as `name=number`.
fn figure(said: &str, name: &str) -> Result<f64> {
    let mut words = said.split_whitespace();
    let number = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let number = number.ok_or_else(|| format!("no {name} in {said:?}"))?;
    Ok(number.parse()?)
}

const CALLS: &str = "20000";
const THREADS: &str = "1000";
const PERCENTILES: [&str; 3] = ["p50_us", "p99_us", "later_p99_us"];
/// In each round, of each.
const STARTS: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_found_by_its_whole_name() {
        let said = "calls=5 p99_us=7 later_p99_us=3";
        assert_eq!(figure(said, "p99_us").unwrap(), 7.0);
        assert_eq!(figure(said, "later_p99_us").unwrap(), 3.0);
        assert!(figure(said, "p50_us").is_err());
    }
}
