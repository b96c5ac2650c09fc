//! Sessions of back-ends and programs that say anything, in any order, with any numbers, and break off: the daemon
//! lives, other channels lose nothing, and nothing of what they had is left.

use std::thread::scope;
use std::time::Duration;

use vnplug::{BackEndOptions, ChannelOptions, Heard, MAX_SAID, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::{Holdings, Raw};
use vnplug_frame::witness::seed;
use vnplug_ring::control::backend::{Connect, Register};
use vnplug_ring::control::{Backend, Message};
use vnplug_testing::{Dice, until};

const SOON: Option<Duration> = Some(Duration::from_secs(20));
/// Messages of each bystander to the other.
const NUMBERED: u32 = 2_000;
/// Messages of a session, at most.
const LONGEST: u64 = 60;

/// Numbers that are special to somebody.
const EDGES: [u64; 10] = [
    0,
    1,
    2,
    3,
    4096,
    65_535,
    1 << 20,
    1 << 32,
    u64::MAX - 1,
    u64::MAX,
];

/// What a session says next.
fn anything(dice: &mut Dice, last: u32) -> Backend {
    // Mostly numbers that somebody has.
    let channel = match dice.below(4) {
        0 => dice.one_of(&EDGES) as u32,
        _ => 1 + dice.below(u64::from(last) + 2) as u32,
    };
    let len = dice.one_of(&[0, 1, 100, 4_000, MAX_SAID as u64]) as usize;
    match dice.below(9) {
        0 => Backend::Hangup {
            channel,
            reason: "x".repeat(dice.below(300) as usize),
        },
        1 => Backend::Register(Register {
            id: dice.one_of(&[0, 85, 86, 87, 1 << 31]) as u32,
            name: ["kv", "dns", "", "nobody"][dice.below(4) as usize].into(),
            version: dice.roll() as u32,
            events_in: dice.one_of(&[0, 1, 4, 32, 33, 255]) as u8,
            events_out: dice.one_of(&[0, 1, 4, 32, 33, 255]) as u8,
        }),
        2 => Backend::Connect(Connect {
            id: dice.one_of(&[0, 85, 86, 87]) as u32,
            name: ["", "kv", "dns", "nobody"][dice.below(4) as usize].into(),
            version: dice.roll() as u32,
            label: "y".repeat(dice.below(80) as usize),
        }),
        3 => Backend::Took {
            channel,
            cost: dice.one_of(&EDGES),
        },
        4 => Backend::Events {
            channel,
            totals: (0..dice.below(40)).map(|_| dice.one_of(&EDGES)).collect(),
        },
        5 => Backend::Region {
            channel,
            bytes: dice.one_of(&EDGES),
            writable: dice.below(2) == 0,
        },
        6 => Backend::Withdraw {
            channel,
            region: dice.below(5) as u32,
            within_ms: dice.one_of(&[0, 1, 60_000, u64::from(u32::MAX)]) as u32,
        },
        7 => Backend::Withdrawn {
            released: dice.below(2) == 0,
        },
        _ => Backend::Say {
            channel,
            bytes: vec![7; len],
        },
    }
}

/// A connection that says things, some of them spoiled, and breaks off. It hears nothing: what is said to it is its loss.
fn session(dice: &mut Dice, daemon: &Daemon) {
    let mut raw = Raw::greeted(&daemon.socket());
    let app = dice.one_of(&[0, 0, 0, 1, 7]) as u32;
    // A part of them is a back-end, and most of the rest speaks to one.
    let first = match dice.below(3) {
        0 => Backend::Register(Register {
            id: 86,
            name: "dns".into(),
            version: 1,
            events_in: 4,
            events_out: 4,
        }),
        _ => Backend::Connect(Connect {
            id: dice.one_of(&[85, 86]) as u32,
            name: String::new(),
            version: 1,
            label: "random".into(),
        }),
    };
    let mut last = 1;
    let mut said = Some(first);
    for number in 0..=dice.below(LONGEST) {
        let message = said.take().unwrap_or_else(|| anything(dice, last));
        last = last.max(number as u32 + 2);
        let mut bytes = Message::Backend(message).encode(number as u32, app);
        match dice.below(40) {
            // A byte is another one; the end is missing.
            0 => {
                let at = dice.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << dice.below(8);
            }
            1 => bytes.truncate(dice.below(bytes.len() as u64) as usize),
            _ => {}
        }
        // The daemon ends connections that make no sense.
        if raw.send(&bytes).is_err() {
            return;
        }
    }
}

#[test]
fn whatever_sessions_say_others_lose_nothing_and_nothing_is_left() {
    let seed = seed("back-ends");
    let lab = Lab::new().unwrap();
    let args = [
        "--source",
        "lab=gen,pps=1000",
        "--backend",
        "kv,id=85,uid=0,open=*,memory=4M",
        "--backend",
        "dns,id=86,uid=0,open=*,memory=4M",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let options = BackEndOptions::new(85, "kv").events(4, 4);
    let mut back = options.socket(daemon.socket()).register().unwrap();
    let options = ChannelOptions::new("kv").label("bystander");
    let mut program = options.socket(daemon.socket()).open().unwrap();
    let own = match back.next(SOON).unwrap() {
        Some(Heard::Joined { channel, .. }) => channel,
        other => panic!("{other:?}"),
    };
    let before = Holdings::at_rest(daemon.pid());
    let sessions = match std::env::var_os("VNPLUG_LONG") {
        None => 3_000,
        Some(_) => 300_000,
    };
    scope(|threads| {
        let liars = threads.spawn(|| {
            let mut dice = Dice(seed);
            (0..sessions).for_each(|_| session(&mut dice, &daemon));
        });
        // A question and its answer at a time, as long as they last and so often at least.
        let mut number = 0_u32;
        while number < NUMBERED || !liars.is_finished() {
            program.send(&number.to_le_bytes()).unwrap();
            loop {
                match back.next(SOON).unwrap().expect("the bystander is heard") {
                    Heard::Message { channel, bytes } if channel == own => {
                        assert_eq!(bytes, number.to_le_bytes(), "seed {seed}");
                        break;
                    }
                    Heard::Gone(reason) => panic!("seed {seed}: {reason}"),
                    Heard::Left { channel, .. } => assert_ne!(channel, own, "seed {seed}"),
                    _ => {}
                }
            }
            back.send(own, &number.to_be_bytes()).unwrap();
            match program.next(SOON).unwrap() {
                Some(Told::Message(bytes)) => assert_eq!(bytes, number.to_be_bytes()),
                other => panic!("seed {seed}: {other:?}"),
            }
            number += 1;
        }
        println!("{sessions} sessions beside {number} questions");
        liars.join().unwrap();
    });
    let all = daemon.counters();
    let opened = |name: &str| {
        let it = all
            .iter()
            .find(|it| it.kind == "backend" && it.name == name);
        value(it.unwrap(), "channels_opened")
    };
    // They did get that far.
    let channels = opened("kv") + opened("dns");
    assert!(channels > sessions / 4, "{channels} channels");
    until(
        "what they had is gone",
        || daemon.counters(),
        |all| {
            let of = |name: &str| {
                all.iter()
                    .find(|it| it.kind == "backend" && it.name == name)
            };
            let held = |name: &str| {
                let it = of(name).unwrap();
                (value(it, "channels"), value(it, "regions"))
            };
            held("kv") == (1, 0) && held("dns") == (0, 0)
        },
    );
    let after = Holdings::at_rest(daemon.pid());
    assert_eq!(
        (after.fds, after.threads),
        (before.fds, before.threads),
        "seed {seed}"
    );
    daemon.audit();
}
