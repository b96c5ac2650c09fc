//! Third parties' back-ends: how long a message takes to one and its answer back, and an event.
//!
//! Both ends are threads of this process, which sleep in `next`; between them is the daemon. The peer is the
//! least that any broker does: a process that reads what one socket says and writes it to another.

mod guest;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug::{BackEnd, BackEndOptions, Channel, ChannelOptions, Heard, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

use crate::row::{Figure, Plan, Result, Samples};

pub(crate) use guest::{CHILD, child, guest};

/// The name of the process between two sockets.
pub(crate) const RELAY: &str = "backend-relay";
/// Round trips before the first that counts.
const WARM: usize = 200;
const LIMIT: Option<Duration> = Some(Duration::from_secs(10));

/// A message to a back-end and its answer.
pub(crate) fn message(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, len) in [("64", 64), ("64k", 64 << 10)] {
        let (mut ours, mut late) = (Samples::default(), Samples::default());
        let (mut peer, mut peer_late) = (Samples::default(), Samples::default());
        for _ in 0..plan.rounds {
            let (lab, daemon) = served()?;
            let times = answered(&daemon, plan.time / 2, len)?;
            ours.push(times[times.len() / 2]);
            late.push(times[times.len() * 99 / 100]);
            let times = relayed(lab.dir(), plan.time / 2, len)?;
            peer.push(times[times.len() / 2]);
            peer_late.push(times[times.len() * 99 / 100]);
        }
        let note = format!("{len} bytes there and back, both ends asleep");
        eprintln!(
            "  {name}: {:.1} us, relay {:.1}",
            ours.median(),
            peer.median()
        );
        for (what, ours, peer) in [("", ours, peer), ("-p99", late, peer_late)] {
            figures.push(Figure {
                name: format!("backend-message-{name}{what}"),
                unit: "us",
                ours,
                peer: Some(("a relay between two Unix sockets".into(), peer)),
                limit: None,
                note: note.clone(),
            });
        }
    }
    Ok(figures)
}

/// An event, until the back-end has heard it.
pub(crate) fn event(plan: &Plan) -> Result<Vec<Figure>> {
    let (mut half, mut late, mut rate) = Default::default();
    for _ in 0..plan.rounds {
        let (_lab, daemon) = served()?;
        let [p50, p99, per_second]: [f64; 3] = heard(&daemon, plan.time / 2)?;
        let all: [(&mut Samples, f64); 3] =
            [(&mut half, p50), (&mut late, p99), (&mut rate, per_second)];
        all.into_iter()
            .for_each(|(samples, value)| samples.push(value));
    }
    eprintln!(
        "  event: {:.1} us, {:.0} a second",
        half.median(),
        rate.median()
    );
    let figure = |name: &str, unit, ours, note: &str| Figure {
        name: format!("backend-event{name}"),
        unit,
        ours,
        peer: None,
        limit: None,
        note: note.to_owned(),
    };
    let one = "one event at a time, from a program until its back-end has heard it";
    let many = "events as fast as a program says them, all heard; the daemon lets a user say 40,000 a second";
    Ok(vec![
        figure("", "us", half, one),
        figure("-p99", "us", late, one),
        figure("-rate", "events/s", rate, many),
    ])
}

fn served() -> Result<(Lab, Daemon)> {
    let lab = Lab::new()?;
    let args = [
        "--source",
        "lab=gen,count=1",
        "--backend",
        "bench,id=1,uid=0",
    ];
    let daemon = Daemon::start(&lab, None, &args)?;
    Ok((lab, daemon))
}

/// A back-end that answers everything with itself until its program leaves, and the program's end.
fn pair(daemon: &Daemon) -> Result<(BackEnd, Channel)> {
    let options = BackEndOptions::new(1, "bench").events(1, 1);
    let back = options.socket(daemon.socket()).register()?;
    let channel = ChannelOptions::new("bench")
        .socket(daemon.socket())
        .open()?;
    Ok((back, channel))
}

fn answered(daemon: &Daemon, time: Duration, len: usize) -> Result<Vec<f64>> {
    let (mut back, mut channel) = pair(daemon)?;
    let bytes = vec![7; len];
    std::thread::scope(|scope| {
        let answers = scope.spawn(move || -> std::result::Result<(), vnplug::Error> {
            while let Some(heard) = back.next(LIMIT)? {
                match heard {
                    Heard::Message { channel, bytes } => back.send(channel, &bytes)?,
                    Heard::Left { .. } => break,
                    _ => {}
                }
            }
            Ok(())
        });
        let times = trips(time, || {
            channel.send(&bytes)?;
            match channel.next(LIMIT)? {
                Some(Told::Message(_)) => Ok(()),
                other => Err(format!("no answer but {other:?}").into()),
            }
        })?;
        drop(channel);
        answers.join().map_err(|_| "the back-end panicked")??;
        Ok(times)
    })
}

fn heard(daemon: &Daemon, time: Duration) -> Result<[f64; 3]> {
    let (mut back, mut channel) = pair(daemon)?;
    let count = |back: &mut BackEnd, wanted: u64| -> Result<()> {
        let mut heard = 0;
        while heard < wanted {
            match back.next(LIMIT)? {
                Some(Heard::Event { count, .. }) => heard += count,
                Some(_) => {}
                None => return Err("an event was lost".into()),
            }
        }
        Ok(())
    };
    let times = trips(time, || {
        channel.event(0, 1)?;
        count(&mut back, 1)
    })?;
    let begun = Instant::now();
    let mut said = 0_u64;
    while begun.elapsed() < time {
        channel.event(0, 1)?;
        said += 1;
    }
    count(&mut back, said)?;
    let rate = said as f64 / begun.elapsed().as_secs_f64();
    let at = |share: usize| times[times.len() * share / 100];
    Ok([at(50), at(99), rate])
}

fn relayed(dir: &Path, time: Duration, len: usize) -> Result<Vec<f64>> {
    let path = dir.join("relay");
    let listener = UnixListener::bind(&path)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["child", RELAY])
        .arg(&path)
        .arg(len.to_string())
        .spawn()?;
    let (mut near, _) = listener.accept()?;
    let (mut far, _) = listener.accept()?;
    std::fs::remove_file(&path)?;
    let mut bytes = vec![7; len];
    let times = std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = vec![0; len];
            while far.read_exact(&mut bytes).is_ok() && far.write_all(&bytes).is_ok() {}
        });
        let times = trips(time, || {
            near.write_all(&bytes)?;
            Ok(near.read_exact(&mut bytes)?)
        });
        drop(near);
        times
    })?;
    child.wait()?;
    Ok(times)
}

/// The process between two sockets: whole messages of one length, there and back.
pub(crate) fn relay(words: &[String]) -> Result<()> {
    let [path, len] = words else {
        return Err("a relay needs a path and a length".into());
    };
    let (mut near, mut far) = (UnixStream::connect(path)?, UnixStream::connect(path)?);
    let mut bytes = vec![0; len.parse()?];
    loop {
        let mut pass = |from: &mut UnixStream, to: &mut UnixStream| {
            from.read_exact(&mut bytes)
                .and_then(|()| to.write_all(&bytes))
        };
        if pass(&mut near, &mut far).is_err() || pass(&mut far, &mut near).is_err() {
            return Ok(());
        }
    }
}

/// How long each of many took, in microseconds, the shortest first.
fn trips(time: Duration, mut once: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    for _ in 0..WARM {
        once()?;
    }
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < time {
        let at = Instant::now();
        once()?;
        times.push(at.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    if times.is_empty() {
        return Err("no time to measure anything".into());
    }
    Ok(times)
}
