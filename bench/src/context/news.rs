//! What one port costs that has packets, among many of one reader that have none.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::time::{ClockId, clock_gettime};
use vnplug::{Bundle, Next, Port, Ready, Tuning};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

use crate::row::{Figure, Plan, Result, Samples};

/// Ports of a reader.
const PORTS: [usize; 3] = [10, 1_000, 10_000];
/// Packets a second: each comes when the reader sleeps.
const PACE: Duration = Duration::from_millis(1);

/// The reader's processor time for a packet of the one port that has any.
pub(crate) fn news(plan: &Plan) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"])?;
    let mut samples = vec![[(); 3].map(|()| Samples::default()); PORTS.len()];
    for round in 1..=plan.rounds {
        for (count, samples) in PORTS.into_iter().zip(&mut samples) {
            // One after the other: a process has no room for the mappings of twice as many.
            samples[0].push(Told::open(&daemon, count)?.cost(plan.time)?);
            daemon.await_no_ports();
            samples[1].push(All::open(&daemon, count)?.cost(plan.time)?);
            daemon.await_no_ports();
            samples[2].push(Fds::open(count)?.cost(plan.time)?);
        }
        let line = samples.iter().zip(PORTS).map(|(it, count)| {
            let [told, all, fds] = [0, 1, 2].map(|at| it[at].last());
            format!("{count}: {told:.2} (all {all:.2}, eventfds {fds:.2})")
        });
        eprintln!(
            "  round {round}: us per packet, of {}",
            line.collect::<Vec<_>>().join(", of ")
        );
    }
    let mut figures = Vec::new();
    let few = samples[0][0].clone();
    for ([told, all, fds], count) in samples.into_iter().zip(PORTS) {
        let mut growth = Samples::default();
        let rounds = told.all().iter().zip(few.all());
        rounds.for_each(|(many, few)| growth.push(many / few));
        figures.push(Figure {
            name: format!("context-news-{count}-growth"),
            unit: "times of 10",
            ours: growth,
            peer: None,
            limit: None,
            note: format!("what a packet costs among {count} ports, by what it costs among 10 in the same round"),
        });
        let figure = |name: String, ours, note: &str| Figure {
            name,
            unit: "us CPU/packet",
            ours,
            peer: Some((format!("epoll, {count} eventfds"), fds.clone())),
            limit: None,
            note: format!(
                "{count} ports of one bundle, of which one gets 1,000 packets/s, each while the reader sleeps; \
                 processor time of the reader's thread, with the kernel's for it{note}"
            ),
        };
        figures.push(figure(format!("context-news-{count}"), told, ""));
        let note = "; all ports are looked at, as by a program that has no bundle";
        figures.push(figure(format!("context-news-{count}-all"), all, note));
    }
    Ok(figures)
}

/// Microseconds of this thread's processor time for each of what `next` takes in a while.
fn cost(time: Duration, mut next: impl FnMut() -> Result<u64>) -> Result<f64> {
    // What was left to settle.
    for _ in 0..20 {
        next()?;
    }
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
    };
    let (begin, before, mut taken) = (Instant::now(), now(), 0);
    while begin.elapsed() < time {
        taken += next()?;
    }
    Ok((now() - before) / taken.max(1) as f64)
}

fn enable(port: &mut Port, enabled: bool) -> Result<()> {
    Ok(port.tune(Tuning {
        enabled,
        ..Tuning::default()
    })?)
}

fn take(port: &mut Port) -> Result<u64> {
    let mut taken = 0;
    while let Next::Packet(_) = port.next()? {
        taken += 1;
    }
    Ok(taken)
}

/// A reader that is told which of its ports have packets.
struct Told(Bundle);

impl Told {
    fn open(daemon: &Daemon, count: usize) -> Result<Self> {
        let mut bundle = Bundle::new()?;
        for _ in 0..count {
            bundle.open(daemon.port("lab").ring_bytes(4096).enabled(false))?;
        }
        Ok(Self(bundle))
    }

    fn cost(&mut self, time: Duration) -> Result<f64> {
        let bundle = &mut self.0;
        let one = bundle.ports().len() / 2;
        enable(&mut bundle.ports()[one], true)?;
        let cost = cost(time, || {
            bundle.wait(Some(Duration::from_secs(1)))?;
            let mut taken = 0;
            while let Some(at) = bundle.next_ready() {
                taken += take(&mut bundle.ports()[at])?;
            }
            Ok(taken)
        })?;
        enable(&mut bundle.ports()[one], false)?;
        Ok(cost)
    }
}

/// One that asks all of them after each wait.
struct All(Bundle, Vec<Port>);

impl All {
    fn open(daemon: &Daemon, count: usize) -> Result<Self> {
        let mut bundle = Bundle::new()?;
        let options = || daemon.port("lab").ring_bytes(4096).enabled(false);
        let ports = (0..count).map(|_| bundle.open_apart(options()));
        let ports = ports.collect::<std::result::Result<_, _>>()?;
        Ok(Self(bundle, ports))
    }

    fn cost(&mut self, time: Duration) -> Result<f64> {
        let Self(bundle, ports) = self;
        let one = ports.len() / 2;
        enable(&mut ports[one], true)?;
        let cost = cost(time, || {
            let mut taken = 0;
            // They were opened in the order of their numbers.
            let waited = bundle.wait_apart(Some(Duration::from_secs(1)), |number, look| {
                ports.get_mut(number).into_iter().for_each(look);
                true
            })?;
            if waited == Ready::Now {
                for port in ports.iter_mut() {
                    taken += take(port)?;
                }
            }
            Ok(taken)
        })?;
        enable(&mut ports[one], false)?;
        Ok(cost)
    }
}

/// One that the kernel tells, by a descriptor for each.
struct Fds(OwnedFd, Vec<Arc<OwnedFd>>);

impl Fds {
    fn open(count: usize) -> Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let mut fds = Vec::new();
        for at in 0..count {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            epoll::add(&epoll, &fd, EventData::new_u64(at as u64), EventFlags::IN)?;
            fds.push(Arc::new(fd));
        }
        Ok(Self(epoll, fds))
    }

    fn cost(&mut self, time: Duration) -> Result<f64> {
        let Self(epoll, fds) = self;
        let over = Arc::new(AtomicBool::new(false));
        let (one, told) = (Arc::clone(&fds[fds.len() / 2]), Arc::clone(&over));
        let writer = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                std::thread::sleep(PACE);
                let _ = rustix::io::write(&*one, &1_u64.to_ne_bytes());
            }
        });
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 64];
        let cost = cost(time, || {
            let found = epoll::wait(&*epoll, &mut events, Some(&second))?;
            for event in &events[..found] {
                let fd = &fds[event.data.u64() as usize];
                rustix::io::read(fd.as_fd(), &mut [0; 8])?;
            }
            Ok(found as u64)
        });
        over.store(true, Ordering::Relaxed);
        writer.join().map_err(|_| "the writer panicked")?;
        cost
    }
}
