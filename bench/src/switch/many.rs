//! One pair that talks among many ports that do not, and among ports that come and go.
//!
//! All ports are clients of the sockets of VDE, of one process. `vde_switch` asks the kernel about each of
//! its sockets for every frame (`poll`), ours is told which have something (`epoll`), so that the one
//! costs more with each port and the other does not.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;

use super::arm::{Arm, PEER};
use super::client::{Client, FROM, TO, carry, frame, pair};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPU of the switch.
const SWITCH_CPU: usize = 0;
/// CPU of all clients.
const ENDS_CPU: usize = 1;
/// Ports in all: few, many, and about as many as 20,000 open files allow, two for each.
const PORTS: [usize; 3] = [10, 1000, 9000];
/// Of these, ports that come and go are added.
const CHURNED: usize = 1000;
/// Ports that come in a second, and as many that go.
const JOINS: f64 = 100.0;
/// How many of those are there at a time.
const STAY: usize = 10;
/// Frames a second of the pair meanwhile.
const PPS: f64 = 20_000.0;
const LEN: usize = 1514;

/// Samples of one switch with one number of ports.
#[derive(Default)]
struct Series {
    rate: Samples,
    /// Nanoseconds of the switch's processor time for a frame that came.
    cost: Samples,
    /// Per cent of the frames lost while ports came and went.
    lost: Samples,
}

/// A switch with its ports.
struct Crowd {
    arm: Arm,
    pair: [Client; 2],
    _idle: Idle,
}

impl Crowd {
    fn new(arm: Arm, ports: usize) -> Result<Self> {
        let begin = Instant::now();
        let pair = pair(&arm.dir)?;
        let idle = Idle::join(&arm.dir, ports - 2)?;
        let (name, seconds) = (arm.name, begin.elapsed().as_secs_f64());
        eprintln!("  {ports} ports have joined {name} in {seconds:.2} s");
        Ok(Self {
            arm,
            pair,
            _idle: idle,
        })
    }

    /// The pair talks as fast as it can.
    fn measure(&self, time: Duration, series: &mut Series) -> Result<()> {
        let [from, to] = &self.pair;
        let frame = frame(LEN, TO, FROM);
        carry((from, to), &frame, time / 8, None)?;
        let before = self.arm.cpu_time()?;
        let carried = carry((from, to), &frame, time, None)?;
        let spent = self.arm.cpu_time()? - before;
        series.rate.push(carried.mpps());
        series
            .cost
            .push(spent.as_nanos() as f64 / carried.came.max(1) as f64);
        Ok(())
    }

    /// The pair talks at a steady rate while ports come and go; how many came.
    fn churn(&self, time: Duration, series: &mut Series) -> Result<usize> {
        let [from, to] = &self.pair;
        let over = AtomicBool::new(false);
        let (carried, joined) = scope(|threads| {
            let visitors =
                threads.spawn(|| self.visitors(&over).map_err(|error| error.to_string()));
            let carried = carry((from, to), &frame(LEN, TO, FROM), time, Some(PPS));
            over.store(true, Ordering::Relaxed);
            (carried, visitors.join())
        });
        series.lost.push(carried?.lost_percent());
        Ok(joined.map_err(|_| "the visitors panicked")??)
    }

    /// Ports come and go, each says one word to the pair, until it is over; how many came.
    fn visitors(&self, over: &AtomicBool) -> Result<usize> {
        let (begin, mut joined, mut here) = (Instant::now(), 0, std::collections::VecDeque::new());
        while !over.load(Ordering::Relaxed) {
            while (joined as f64) < begin.elapsed().as_secs_f64() * JOINS {
                let visitor = Client::join(&self.arm.dir)?;
                visitor.send(&frame(60, TO, 100 + (joined % STAY) as u8))?;
                here.push_back(visitor);
                joined += 1;
                if here.len() > STAY {
                    here.pop_front();
                }
            }
            sleep(Duration::from_millis(1));
        }
        Ok(joined)
    }
}

/// Ports that say nothing, of a process of their own: a process has as many open files as a switch.
struct Idle(std::process::Child);

impl Idle {
    /// Comes back when all have joined.
    fn join(dir: &Path, ports: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["child", IDLE])
            .arg(dir)
            .arg(ports.to_string());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut idle = Self(child.spawn()?);
        let mut said = String::new();
        if let Some(output) = idle.0.stdout.take() {
            BufReader::new(output).read_line(&mut said)?;
        }
        match said.trim() == JOINED {
            true => Ok(idle),
            false => Err(format!("{ports} ports did not join {}", dir.display()).into()),
        }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process of [`Idle`]: joins `ports` times, and stays until its input ends.
pub(crate) fn idle(args: &[String]) -> Result<()> {
    let [dir, ports] = args else {
        return Err("child idle DIRECTORY PORTS".into());
    };
    sys::allow_most_files()?;
    let ports: usize = ports.parse()?;
    let joined = (0..ports).map(|_| Client::join(Path::new(dir)));
    let _joined: Vec<Client> = joined.collect::<Result<_>>()?;
    println!("{JOINED}");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// The name of the program's part that holds ports.
pub(crate) const IDLE: &str = "idle";
const JOINED: &str = "joined";

/// With each number of ports, both switches in turns.
pub(crate) fn many(plan: &Plan) -> Result<Vec<Figure>> {
    sys::allow_most_files()?;
    let mut all: Vec<[Series; 2]> = Vec::new();
    for ports in PORTS {
        let lab = Lab::new()?;
        let arms = Arm::both(
            &lab,
            ports.max(32) + spare(ports),
            Some(sys::cpu(SWITCH_CPU)),
        )?;
        let crowds = arms.map(|arm| Crowd::new(arm, ports));
        let mut series = [(); 2].map(|()| Series::default());
        sys::pin(sys::cpu(ENDS_CPU))?;
        for round in 1..=plan.rounds {
            for (crowd, series) in crowds.iter().zip(&mut series) {
                let crowd = crowd.as_ref().map_err(ToString::to_string)?;
                crowd.measure(plan.time, series)?;
                let churned = match ports == CHURNED {
                    true => {
                        let joined = crowd.churn(2 * plan.time, series)?;
                        format!(", {:.4} % lost while {joined} came", series.lost.last())
                    }
                    false => String::new(),
                };
                eprintln!(
                    "  round {round}, {ports} ports: {} {:.3} Mpps, {:.0} CPU ns per frame{churned}",
                    crowd.arm.name,
                    series.rate.last(),
                    series.cost.last(),
                );
            }
        }
        all.push(series);
    }
    Ok(figures(&all))
}

fn figures(all: &[[Series; 2]]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let few = &all[0][0].cost;
    for (ports, [ours, theirs]) in PORTS.into_iter().zip(all) {
        let note = format!(
            "{LEN}-byte frames from one port of VDE to another while {} more say nothing; the switch \
             on CPU {SWITCH_CPU}, all clients on CPU {ENDS_CPU}",
            ports - 2
        );
        let figure = |suffix: &str, unit, ours: &Samples, name: &str, theirs: &Samples| Figure {
            name: format!("switch-many-{ports}{suffix}"),
            unit,
            ours: ours.clone(),
            peer: Some((name.to_owned(), theirs.clone())),
            limit: None,
            note: note.clone(),
        };
        figures.push(figure(
            "",
            "CPU ns per frame",
            &ours.cost,
            PEER,
            &theirs.cost,
        ));
        figures.push(figure("-rate", "Mpps", &ours.rate, PEER, &theirs.rate));
        if ports != PORTS[0] {
            let name = format!("ours with {}", PORTS[0]);
            figures.push(figure(
                "-growth",
                "CPU ns per frame",
                &ours.cost,
                &name,
                few,
            ));
        }
        if ports == CHURNED {
            figures.push(Figure {
                note: format!(
                    "{LEN}-byte frames, {PPS} a second, while {JOINS} more ports a second join, send a \
                     frame to the pair, and leave; {note}"
                ),
                ..figure("-churn", "% lost", &ours.lost, PEER, &theirs.lost)
            });
        }
    }
    figures
}

/// Ports for those that come and go.
fn spare(ports: usize) -> usize {
    match ports == CHURNED {
        true => 4 * STAY,
        false => 0,
    }
}
