//! On the host: a bare counter, and tcpdump.

use std::process::Command;
use std::thread;
use std::time::Duration;

use vnplug_e2e::daemon::Daemon;

use super::counter::{self, Listener};
use super::{COST, Load, Turn, Turns, Wire, drop_in};
use crate::attached::cpu_time;
use crate::handoff::Reading;
use crate::row::{Figure, Plan, Result};

/// Whose libpcap a program gets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    Real,
}

/// What captures.
#[derive(Clone, Copy)]
enum Application {
    Dispatch,
    Tcpdump,
}

impl Application {
    /// What it must do with a packet at least.
    fn reading(self) -> Reading {
        match self {
            Self::Dispatch => Reading::Header,
            Self::Tcpdump => Reading::CopiedOut,
        }
    }
}

/// A bare `pcap_dispatch` counter.
pub(crate) fn dispatch(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    rows(plan, len, Application::Dispatch, "dispatch")
}

/// `tcpdump -w /dev/null`.
pub(crate) fn tcpdump(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    rows(plan, len, Application::Tcpdump, "tcpdump")
}

fn rows(plan: &Plan, len: usize, application: Application, name: &str) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    let (mut steady, mut flat_out) = (Turns::default(), Turns::default());
    for round in 1..=plan.rounds {
        for (load, turns) in [
            (Load::Steady(STEADY_PPS), &mut steady),
            (Load::FlatOut, &mut flat_out),
        ] {
            let ours = turn(plan, &wire, application, Side::Ours, len, load)?;
            let real = turn(plan, &wire, application, Side::Real, len, load)?;
            let told = |turn: &Turn| {
                let (own, whole) = (turn.own_cost(), turn.whole_cost());
                format!(
                    "{own:.3} ({whole:.3}) CPU s/Mpkt, {:.2} % lost",
                    turn.lost_percent()
                )
            };
            eprintln!(
                "  round {round}: ours {}; real {}",
                told(&ours),
                told(&real)
            );
            turns.ours.push(ours);
            turns.theirs.push(real);
        }
        steady.push_bare(plan, len, application.reading())?;
    }
    let note = |what: &str| {
        format!(
            "{what}; {len}-byte frames on a veth, 16 MiB of buffer on both sides, the same program \
             over the drop-in's libpcap and over the system's; the copy into the kernel's ring is \
             in the sender's time on both sides. The limit: what one CPU, with the daemon's both, \
             needs to pass the bytes on, bare"
        )
    };
    let at = format!("at {STEADY_PPS} packets/s, which neither side loses");
    Ok(vec![
        steady.bounded(
            steady.figure(
                format!("pcap-{name}-{len}"),
                COST,
                Turn::own_cost,
                PEER,
                note(&format!("processor time of the application {at}")),
            ),
            1.0,
        ),
        steady.bounded(
            steady.figure(
                format!("pcap-{name}-{len}-whole"),
                COST,
                Turn::whole_cost,
                PEER,
                note(&format!("the same with the daemon's, for one reader, {at}")),
            ),
            2.0,
        ),
        steady.bounded(
            flat_out.figure(
                format!("pcap-{name}-{len}-top"),
                COST,
                Turn::own_cost,
                PEER,
                note("processor time of the application per packet it got, sent flat out"),
            ),
            1.0,
        ),
        flat_out.figure(
            format!("pcap-{name}-{len}-loss"),
            "% lost",
            Turn::lost_percent,
            PEER,
            note("lost of what the sender sent flat out; sender, daemon and reader share the CPUs"),
        ),
    ])
}

fn turn(
    plan: &Plan,
    wire: &Wire,
    application: Application,
    side: Side,
    len: usize,
    load: Load,
) -> Result<Turn> {
    let daemon = match side {
        Side::Ours => Some(Daemon::start(
            &wire.lab,
            Some(&wire.netns),
            &["--source", "wire0"],
        )?),
        Side::Real => None,
    };
    let device = if daemon.is_some() {
        "vnplug:wire0"
    } else {
        "wire0"
    };
    let mut command = match application {
        Application::Dispatch => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["child", counter::NAME, device]);
            command
        }
        Application::Tcpdump => {
            let mut command = Command::new("/bin/sh");
            let tcpdump = format!("exec tcpdump -i {device} -B 16384 -w /dev/null 2>&1");
            command.args(["-c", &tcpdump]);
            command
        }
    };
    if let Some(daemon) = &daemon {
        command.env("LD_LIBRARY_PATH", drop_in(&wire.lab)?);
        command.env("VNPLUG_SOCKET", daemon.socket());
    }
    let listener = wire
        .netns
        .enter(|| Listener::start(command).map_err(|e| e.to_string()))??;
    let (own, host) = (cpu_time(listener.pid())?, spent(daemon.as_ref())?);
    let sent = wire.send(count(plan, load), len, load)?;
    thread::sleep(QUIET);
    let (own, host) = (
        cpu_time(listener.pid())? - own,
        spent(daemon.as_ref())? - host,
    );
    let output = listener.end()?;
    let captured = match application {
        Application::Dispatch => counter::parse(&output)?,
        Application::Tcpdump => captured(&output)?,
    };
    Ok(Turn {
        sent: sent.frames,
        captured,
        own_s: own.as_secs_f64(),
        daemon_s: host.as_secs_f64(),
    })
}

/// Frames of one turn.
fn count(plan: &Plan, load: Load) -> u64 {
    let pps = load.pps().map_or(FLAT_OUT_PPS, std::num::NonZeroU64::get);
    (pps as f64 * plan.time.as_secs_f64()) as u64
}

fn spent(daemon: Option<&Daemon>) -> Result<Duration> {
    daemon.map_or(Ok(Duration::ZERO), |daemon| cpu_time(daemon.pid()))
}

/// The number that tcpdump ends with.
fn captured(output: &str) -> Result<u64> {
    output
        .lines()
        .find_map(|line| line.strip_suffix(" packets captured")?.parse().ok())
        .ok_or_else(|| format!("tcpdump said {output:?}").into())
}

const PEER: &str = "the system's libpcap";
/// A rate at which no side loses a packet here.
const STEADY_PPS: u64 = 200_000;
/// About what the sender reaches; decides only how many frames a turn has.
const FLAT_OUT_PPS: u64 = 1_000_000;
/// After the last packet: longer than every read timeout.
const QUIET: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcpdump_s_last_words_are_understood() {
        let words = "\n12 packets captured\n14 packets received by filter\n2 packets dropped";
        assert_eq!(captured(words).unwrap(), 12);
        assert!(captured("tcpdump: no").is_err());
    }
}
