//! Guests of User-mode Linux in pairs, which speak over one of their interfaces at a time.

use std::fmt;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::{Guest, Image, Job, Lab, Netns, Uml, UmlConfig};

use super::talk::{LATE, PROGRAM, Pace, SETTLE, Talk, WARM_UP, Window, send, taken};
use crate::pcap::stripped;
use crate::row::Result;

/// Guests, the first of which are in pairs: 0 speaks to 1, 2 to 3, and so on.
pub(super) struct Guests(Vec<Guest>);

/// A network that all guests are on, each with one interface.
#[derive(Clone, Copy)]
pub(super) struct Lan {
    /// The interface's name in each guest.
    pub(super) interface: &'static str,
    /// Its addresses are those of `10.81.NET.0/24`.
    pub(super) net: u8,
}

/// What went over a network in a time.
#[derive(Clone, Copy, Default)]
pub(super) struct Bulk {
    /// Gigabits of payload a second, of all pairs together.
    pub(super) gbps: f64,
    /// Seconds of processor time of what was asked about, for a gigabyte.
    pub(super) cpu_s: f64,
}

/// Datagrams of all guests together.
#[derive(Clone, Copy, Default)]
pub(super) struct Datagrams {
    pub(super) sent: u64,
    pub(super) came: u64,
    /// Arrived at a guest, whose kernel or program did not take them in time.
    pub(super) refused: u64,
    /// Dropped by the sender's kernel or driver, as the switch did not take them in time.
    pub(super) untaken: u64,
    /// Dropped by the switch, where it counts them.
    pub(super) dropped: u64,
}

impl Bulk {
    pub(super) fn of(bytes: u64, time: Duration, spent: Duration) -> Self {
        let bytes = bytes as f64;
        Self {
            gbps: bytes * 8e-9 / time.as_secs_f64(),
            cpu_s: spent.as_secs_f64() * 1e9 / bytes.max(1.0),
        }
    }
}

impl Guests {
    /// Boots `count` of them, all at once, each made of what `config` says of its number; this program and
    /// `ethtool` are added.
    pub(super) fn boot(
        lab: &Lab,
        count: usize,
        config: impl Fn(usize) -> UmlConfig,
    ) -> Result<Self> {
        let program = stripped(lab, &std::env::current_exe()?, "bench")?;
        let image = |image: Image| {
            let image = image.program_at(&program, PROGRAM);
            image.program("/usr/sbin/ethtool").module("virtio_net")
        };
        let configs: Vec<UmlConfig> = (0..count)
            .map(|number| {
                let config = config(number);
                UmlConfig {
                    image: image(config.image.clone()),
                    ..config
                }
            })
            .collect();
        let guests: Vec<_> = scope(|threads| {
            let boots = configs.into_iter().map(|config| {
                threads.spawn(|| Uml::boot(lab, config).map_err(|error| error.to_string()))
            });
            let boots: Vec<_> = boots.collect();
            boots.into_iter().map(|boot| boot.join()).collect()
        });
        let guests = guests.into_iter().map(|guest| {
            let guest = guest.map_err(|_| "a boot panicked")?;
            Ok(guest?)
        });
        let guests = Self(guests.collect::<Result<_>>()?);
        for guest in &guests.0 {
            ran(guest, ROOMY)?;
        }
        Ok(guests)
    }

    /// Gives each its address on a network.
    pub(super) fn join(&self, lan: Lan) -> Result<()> {
        for (at, guest) in self.0.iter().enumerate() {
            let (interface, address) = (lan.interface, lan.address(at));
            ran(
                guest,
                &format!("ip addr add {address}/24 dev {interface} && ip link set {interface} up"),
            )?;
        }
        // Neighbours are found before anything is measured.
        for (at, guest) in self.0.iter().enumerate() {
            let peer = lan.address(at ^ 1);
            if (at ^ 1) < self.0.len() {
                ran(guest, &format!("ping -q -c 2 -i 0.2 -W 5 {peer}"))?;
            }
        }
        Ok(())
    }

    /// One stream of TCP in each of the first pairs, all at once; `spent` is the processor time that
    /// counts.
    pub(super) fn tcp(
        &self,
        pairs: usize,
        lan: Lan,
        time: Duration,
        spent: impl Fn() -> Result<Duration>,
    ) -> Result<Bulk> {
        in_time(|lead| self.tcp_once(pairs, lan, time, lead, &spent))
    }

    fn tcp_once(
        &self,
        pairs: usize,
        lan: Lan,
        time: Duration,
        lead: Duration,
        spent: &impl Fn() -> Result<Duration>,
    ) -> Result<Option<Bulk>> {
        let window = Window::after(lead + WARM_UP, time);
        let flows: Vec<_> = (0..pairs).map(|pair| (2 * pair, 2 * pair + 1)).collect();
        let measured = self.flows(&flows, lan, window, |begin, end| {
            until(begin)?;
            let before = spent()?;
            until(end)?;
            Ok(spent()? - before)
        })?;
        Ok(measured.map(|(bytes, spent)| Bulk::of(bytes.iter().sum(), time, spent)))
    }

    /// One stream of TCP in each of these flows, all at once, from the first guest of each to its second;
    /// Gb/s of payload of each. `begun` is done as soon as it counts.
    pub(super) fn streams(
        &self,
        flows: &[(usize, usize)],
        lan: Lan,
        time: Duration,
        begun: impl Fn() -> Result<()>,
    ) -> Result<Vec<f64>> {
        in_time(|lead| {
            let window = Window::after(lead + WARM_UP, time);
            let measured = self.flows(flows, lan, window, |begin, end| {
                until(begin)?;
                begun()?;
                until(end)
            })?;
            let gbps = |bytes| Bulk::of(bytes, time, Duration::ZERO).gbps;
            Ok(measured.map(|(bytes, ())| bytes.into_iter().map(gbps).collect()))
        })
    }

    /// Streams in a window, and what is done `within` it; bytes of each, or nothing if a guest was late.
    fn flows<T>(
        &self,
        flows: &[(usize, usize)],
        lan: Lan,
        window: Window,
        within: impl FnOnce(Instant, Instant) -> Result<T>,
    ) -> Result<Option<(Vec<u64>, T)>> {
        let mut takers = Vec::new();
        let mut senders = Vec::new();
        for &(from, to) in flows {
            takers.push(self.starts(to, &Talk::Take, window)?);
            senders.push(self.starts(from, &Talk::Send(lan.address(to)), window)?);
        }
        let (begin, end) = window.instants();
        let done = within(begin, end)?;
        let mut bytes = Vec::new();
        for taker in takers {
            bytes.extend(numbers(&taker)?.map(|[came]| came));
        }
        let mut all_in_time = bytes.len() == flows.len();
        for sender in senders {
            all_in_time &= said(&sender)? != LATE;
        }
        Ok(all_in_time.then_some((bytes, done)))
    }

    /// One stream of TCP from a namespace to the first of them; `control` is how its sender
    /// controls congestion, if not by default, and `spent` the processor time that counts.
    pub(super) fn takes(
        &self,
        from: &Netns,
        lan: Lan,
        control: Option<&str>,
        time: Duration,
        spent: impl Fn() -> Result<Duration>,
    ) -> Result<Bulk> {
        in_time(|lead| {
            let window = Window::after(lead + WARM_UP, time);
            let taker = self.starts(0, &Talk::Take, window)?;
            let (begin, end) = window.instants();
            let to = lan.address(0);
            let send = || send(&to, control, begin, end).map_err(|error| error.to_string());
            let spent = scope(|threads| {
                let sender = threads.spawn(|| from.enter(send));
                until(begin)?;
                let before = spent()?;
                until(end)?;
                let spent = spent()? - before;
                sender.join().map_err(|_| "the sender panicked")???;
                Ok::<_, Box<dyn std::error::Error>>(spent)
            })?;
            let came = numbers(&taker)?;
            Ok(came.map(|[bytes]| Bulk::of(bytes, time, spent)))
        })
    }

    /// The first of them answers requests on [`ECHO_PORT`](super::talk::ECHO_PORT), and takes a stream beside them if
    /// asked; `ask` is done from this instant on until that one.
    pub(super) fn answers<T>(
        &self,
        time: Duration,
        takes: bool,
        ask: impl Fn(Instant, Instant) -> Result<T>,
    ) -> Result<T> {
        in_time(|lead| {
            let window = Window::after(lead + WARM_UP, time);
            let answerer = self.starts(0, &Talk::Answer, window)?;
            let taker = takes.then(|| self.starts(0, &Talk::Take, window));
            let (begin, end) = window.instants();
            let asked = ask(begin, end);
            let mut in_time = said(&answerer)? != LATE;
            if let Some(taker) = taker {
                in_time &= said(&taker?)? != LATE;
            }
            if in_time { asked.map(Some) } else { Ok(None) }
        })
    }

    /// The first of them does this, and `ask` is done from this instant on until that one.
    pub(super) fn serves<T>(
        &self,
        talk: &Talk,
        time: Duration,
        ask: impl Fn(Instant, Instant) -> Result<T>,
    ) -> Result<T> {
        in_time(|lead| {
            let window = Window::after(lead + WARM_UP, time);
            let server = self.starts(0, talk, window)?;
            let (begin, end) = window.instants();
            let asked = ask(begin, end);
            let in_time = said(&server)? != LATE;
            if in_time { asked.map(Some) } else { Ok(None) }
        })
    }

    /// What the first of them says to this namespace, which is one stream of TCP; `spent` as in
    /// [`takes`](Self::takes).
    pub(super) fn gives(
        &self,
        talk: &Talk,
        to: &Netns,
        time: Duration,
        spent: impl Fn() -> Result<Duration>,
    ) -> Result<Bulk> {
        let take = |begin: Instant, end: Instant| taken(begin, end, 1);
        self.gives_to(talk, (to, take), time, spent)
    }

    /// As [`gives`](Self::gives), to whatever takes it there: the bytes that came between two instants.
    pub(super) fn gives_to(
        &self,
        talk: &Talk,
        (to, take): (&Netns, impl Fn(Instant, Instant) -> Result<u64> + Sync),
        time: Duration,
        spent: impl Fn() -> Result<Duration>,
    ) -> Result<Bulk> {
        in_time(|lead| {
            let window = Window::after(lead + WARM_UP, time);
            let sender = self.starts(0, talk, window)?;
            let (begin, end) = window.instants();
            let take = || take(begin, end).map_err(|error| error.to_string());
            let (bytes, spent) = scope(|threads| {
                let taker = threads.spawn(|| to.enter(take));
                until(begin)?;
                let before = spent()?;
                until(end)?;
                let spent = spent()? - before;
                let bytes = taker.join().map_err(|_| "the taker panicked")???;
                Ok::<_, Box<dyn std::error::Error>>((bytes, spent))
            })?;
            let in_time = said(&sender)? != LATE;
            Ok(in_time.then(|| Bulk::of(bytes, time, spent)))
        })
    }

    /// The first of them.
    pub(super) fn first(&self) -> Result<&Guest> {
        Ok(self.0.first().ok_or("there is no guest")?)
    }

    /// Datagrams both ways in each of the first pairs, all at once, at this pace of each flow.
    pub(super) fn udp(
        &self,
        pairs: usize,
        lan: Lan,
        pace: Pace,
        time: Duration,
    ) -> Result<Datagrams> {
        in_time(|lead| self.udp_once(pairs, lan, pace, time, lead))
    }

    fn udp_once(
        &self,
        pairs: usize,
        lan: Lan,
        pace: Pace,
        time: Duration,
        lead: Duration,
    ) -> Result<Option<Datagrams>> {
        let window = Window::after(lead + WARM_UP, time);
        let mut talks = Vec::new();
        for at in 0..2 * pairs {
            let talk = Talk::Both(lan.address(at ^ 1), pace);
            talks.push(self.starts(at, &talk, window)?);
        }
        until(window.instants().1)?;
        sleep(SETTLE);
        let (mut all, mut all_in_time) = (Datagrams::default(), true);
        for talk in talks {
            match numbers(&talk)? {
                Some([sent, came, refused, untaken]) => all.add(&Datagrams {
                    sent,
                    came,
                    refused,
                    untaken,
                    dropped: 0,
                }),
                None => all_in_time = false,
            }
        }
        Ok(all_in_time.then_some(all))
    }

    /// Runs a command in one of them, which must succeed.
    pub(super) fn ran(&self, at: usize, command: &str) -> Result<String> {
        ran(self.0.get(at).ok_or("there is no such guest")?, command)
    }

    /// Processor time of all of them on the host, to 10 ms each.
    pub(super) fn cpu_time(&self) -> Duration {
        self.0.iter().map(Guest::cpu_time).sum()
    }

    fn starts(&self, at: usize, talk: &Talk, window: Window) -> Result<Job> {
        let guest = self.0.get(at).ok_or("there is no such guest")?;
        Ok(guest.spawn(&format!("exec {}", talk.command(window)))?)
    }
}

impl Lan {
    /// The address of a guest, by its number.
    pub(super) fn address(self, guest: usize) -> String {
        format!("10.81.{}.{}", self.net, guest + 1)
    }
}

impl Datagrams {
    /// Adds those of another guest, or time.
    pub(super) fn add(&mut self, more: &Self) {
        self.sent += more.sent;
        self.came += more.came;
        self.refused += more.refused;
        self.untaken += more.untaken;
        self.dropped += more.dropped;
    }

    /// Per cent of them that did not come.
    pub(super) fn lost_percent(self) -> f64 {
        (1.0 - self.came as f64 / self.sent.max(1) as f64) * 100.0
    }
}

impl fmt::Display for Datagrams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.lost_percent();
        write!(f, "{lost:.3} % of {} lost", self.sent)?;
        for (count, what) in [
            (self.untaken, "not taken by the switch"),
            (self.dropped, "dropped by it"),
            (self.refused, "not taken by the receiver"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

/// Runs a command in a guest, which must succeed; what it says.
pub(super) fn ran(guest: &Guest, command: &str) -> Result<String> {
    let done = guest.run(command, LIMIT)?;
    match done.success() {
        true => Ok(done.text()),
        false => Err(format!("{command}: {}", done.text()).into()),
    }
}

fn said(job: &Job) -> Result<String> {
    let done = job.wait(LIMIT)?;
    match done.success() {
        true => Ok(done.text()),
        false => Err(format!("a guest's talk: {}", done.text()).into()),
    }
}

/// The numbers of the last line that a guest's talk said; nothing if it was not there in time.
fn numbers<const N: usize>(job: &Job) -> Result<Option<[u64; N]>> {
    let said = said(job)?;
    let line = said.lines().next_back().unwrap_or_default();
    if line == LATE {
        return Ok(None);
    }
    let numbers: std::result::Result<Vec<u64>, _> =
        line.split_whitespace().map(str::parse).collect();
    let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
    numbers
        .map(Some)
        .ok_or_else(|| format!("a guest's talk: {said}").into())
}

/// Measures until all guests were there in time, with more time for that each time.
fn in_time<T>(measure: impl Fn(Duration) -> Result<Option<T>>) -> Result<T> {
    for times in 1..=TRIES {
        if let Some(measured) = measure(LEAD * times)? {
            return Ok(measured);
        }
    }
    Err("the machine is too busy: a guest was never there in time".into())
}

/// Sleeps until then.
///
/// # Errors
/// If that is past: the guests were started too late.
fn until(instant: Instant) -> Result<()> {
    let left = instant.checked_duration_since(Instant::now());
    sleep(left.ok_or("the guests were started too late")?);
    Ok(())
}

/// What a program of a guest does not take in time is not what a switch loses: eight guests share two CPUs.
const ROOMY: &str = "cd /proc/sys/net/core && echo 100000 >netdev_max_backlog && \
     for it in max default; do echo 8388608 >rmem_$it; done";
/// From the first guest's command until all of them run.
const LEAD: Duration = Duration::from_millis(1000);
const TRIES: u32 = 4;
const LIMIT: Duration = Duration::from_secs(60);
