//! The example `clock`, a back-end in Rust: what it does, and how soon a death is told.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vnplug::{BackEndOptions, Channel, ChannelOptions, Heard, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::times::Times;

use crate::support::example;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
/// How often each side dies.
const DEATHS: usize = 11;

fn daemon(lab: &Lab) -> Daemon {
    let (clock, kv) = ("clock,id=90,uid=0,open=*,memory=1M", "kv,id=85,uid=0");
    let args = ["--backend", clock, "--backend", kv];
    Daemon::start(lab, None, &args).unwrap()
}

/// A process that ends with the test.
struct Running(Child);

impl Running {
    /// The example, when it is the back-end.
    fn clock(daemon: &Daemon) -> Self {
        let mut clock = Command::new(example("clock"));
        clock.args(["90", "clock"]);
        clock.env("VNPLUG_SOCKET", daemon.socket());
        let mut clock = Self(clock.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(clock.0.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "registered");
        clock
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn told(program: &mut Channel) -> Told {
    let told = program.next(SOON).unwrap();
    told.expect("the program is told something")
}

fn channel(daemon: &Daemon) -> Channel {
    let options = ChannelOptions::new("clock").socket(daemon.socket());
    options.open().unwrap()
}

/// What the page says, read as `docs/backends.md` has it.
fn page(program: &Channel, region: u32) -> u64 {
    let page = program.memory(region).unwrap();
    loop {
        let before = page.load(0).unwrap();
        let now = page.load(8).unwrap();
        if before.is_multiple_of(2) && page.load(0).unwrap() == before {
            return now;
        }
    }
}

#[test]
fn the_clock_answers_shares_its_page_and_tells_of_seconds() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let _clock = Running::clock(&daemon);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut program = channel(&daemon);
    let Told::Shared { region } = told(&mut program) else {
        panic!("no page");
    };
    let said_between = |program: &mut Channel| loop {
        match told(program) {
            Told::Message(bytes) => return String::from_utf8(bytes).unwrap(),
            Told::Event { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    program.send(b"time").unwrap();
    let (said, then) = (said_between(&mut program), now().as_secs());
    let numbers = said.split(':').map(|number| number.parse::<u64>().unwrap());
    let of_day = numbers.fold(0, |sum, number| sum * 60 + number);
    // Perhaps it is the next day meanwhile.
    assert!((then + 86_400 - of_day) % 86_400 < 20, "{said}, {then}");
    program.send(b"date").unwrap();
    assert_eq!(said_between(&mut program), "what?");
    let before = page(&program, region);
    assert!(now().as_secs() - before < 20);
    while page(&program, region) == before {
        assert!(matches!(told(&mut program), Told::Event { event: 0, .. }));
    }
    // The command understands it, too.
    let (status, text) = daemon.vnplug(&["channel", "clock", "--say", "time", "-c", "1"]);
    assert!(status == Some(0) && text.matches(':').count() > 1, "{text}");
}

#[test]
fn death_of_either_side_is_told_within_a_tenth_of_a_second() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let kv = BackEndOptions::new(85, "kv").socket(daemon.socket());
    let mut kv = kv.register().unwrap();
    let [mut of_back_end, mut of_program] = [Times::default(), Times::default()];
    for _ in 0..DEATHS {
        let mut clock = Running::clock(&daemon);
        let mut program = channel(&daemon);
        assert!(matches!(told(&mut program), Told::Shared { .. }));
        let begun = Instant::now();
        clock.0.kill().unwrap();
        while !matches!(told(&mut program), Told::Gone(_)) {}
        of_back_end.push(begun.elapsed());

        let mut program = daemon.command().unwrap();
        program.args(["channel", "kv"]).stdin(Stdio::piped());
        let mut program = Running(program.stdout(Stdio::null()).spawn().unwrap());
        assert!(matches!(kv.next(SOON), Ok(Some(Heard::Joined { .. }))));
        let begun = Instant::now();
        program.0.kill().unwrap();
        assert!(matches!(kv.next(SOON), Ok(Some(Heard::Left { .. }))));
        of_program.push(begun.elapsed());
    }
    let soon = Duration::from_millis(100);
    of_back_end.are_within(soon, "to tell the death of the back-end");
    of_program.are_within(soon, "to tell the death of the program");
}
