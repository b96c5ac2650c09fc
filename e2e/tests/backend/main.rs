//! Third parties' back-ends and the programs that use them, in processes: routing, credit, events, memory,
//! grants, deaths, restarts, lies.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod lies;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::thread;
use std::time::Duration;

use vnplug::{BackEnd, BackEndOptions, Channel, ChannelOptions, Error, Heard, MAX_SAID, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::control::code;

const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// A daemon that permits two back-ends to root.
fn daemon(lab: &Lab) -> Daemon {
    let args = [
        "--source",
        "lab=gen,pps=1000",
        "--backend",
        "kv,id=85,uid=0,open=*,memory=4M",
        "--backend",
        "dns,id=86,uid=0,open=*,memory=4M",
    ];
    Daemon::start(lab, None, &args).unwrap()
}

fn back_end(daemon: &Daemon, id: u32, name: &str) -> BackEnd {
    let options = BackEndOptions::new(id, name).version(3).events(4, 4);
    options.socket(daemon.socket()).register().unwrap()
}

fn channel(daemon: &Daemon, name: &str) -> Channel {
    let options = ChannelOptions::new(name).version(2).label("a test");
    options.socket(daemon.socket()).open().unwrap()
}

fn heard(back: &mut BackEnd) -> Heard {
    back.next(SOON)
        .unwrap()
        .expect("the back-end hears something")
}

fn told(channel: &mut Channel) -> Told {
    channel
        .next(SOON)
        .unwrap()
        .expect("the program is told something")
}

fn joined(back: &mut BackEnd) -> u32 {
    match heard(back) {
        Heard::Joined {
            channel,
            who,
            label,
            version,
        } => {
            assert_eq!(
                (who.as_str(), label.as_str(), version),
                ("uid:0", "a test", 2)
            );
            channel
        }
        other => panic!("{other:?}"),
    }
}

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
fn rounds(usual: u64, long: u64) -> u64 {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => long,
        None => usual,
    }
}

/// Sends as soon as there is room.
fn send(channel: &mut Channel, bytes: &[u8], taken: &mut Vec<Told>) {
    loop {
        match channel.send(bytes) {
            Ok(()) => return,
            Err(Error::Full) => {
                taken.extend(channel.next(Some(Duration::from_millis(10))).unwrap())
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn messages_go_both_ways_up_to_64_kib_and_no_further() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut program = channel(&daemon, "kv");
    assert_eq!(program.peer().unwrap().version, 3);
    let number = joined(&mut back);
    for len in [0, 1, 4095, 4096, 16 << 10, MAX_SAID] {
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        program.send(&bytes).unwrap();
        assert_eq!(
            heard(&mut back),
            Heard::Message {
                channel: number,
                bytes: bytes.clone()
            }
        );
        back.send(number, &bytes).unwrap();
        assert_eq!(told(&mut program), Told::Message(bytes));
    }
    let long = vec![0; MAX_SAID + 1];
    assert!(matches!(program.send(&long), Err(Error::Invalid(_))));
    assert!(matches!(back.send(number, &long), Err(Error::Invalid(_))));
    // The last words come before the end.
    program.send(b"last").unwrap();
    drop(program);
    assert!(matches!(heard(&mut back), Heard::Message { bytes, .. } if bytes == b"last"));
    assert!(matches!(heard(&mut back), Heard::Left { channel, .. } if channel == number));
    assert!(matches!(back.send(number, b"x"), Err(Error::Invalid(_))));
}

#[test]
fn two_back_ends_and_three_programs_are_never_mixed() {
    let each = rounds(40_000, 200_000);
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let serve = |id: u32, name: &'static str| {
        let mut back = back_end(&daemon, id, name);
        thread::spawn(move || {
            // What each channel said last, and what is owed to it.
            let mut last = BTreeMap::<u32, u64>::new();
            let mut answers = Vec::<(u32, Vec<u8>)>::new();
            let mut left = 0;
            while left < 3 {
                match back
                    .next(Some(Duration::from_millis(if answers.is_empty() {
                        20_000
                    } else {
                        1
                    })))
                    .unwrap()
                {
                    Some(Heard::Message { channel, bytes }) => {
                        let (words, rest) = bytes.split_at(16);
                        let word =
                            |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().unwrap());
                        assert_eq!(word(0), u64::from(id), "another back-end's");
                        let expected = last.entry(channel).or_default();
                        assert_eq!(word(8), *expected, "lost, doubled or mixed");
                        *expected += 1;
                        assert!(rest.iter().all(|&byte| byte == word(8) as u8));
                        answers.push((channel, bytes));
                    }
                    Some(Heard::Left { .. }) => left += 1,
                    Some(Heard::Joined { .. }) | None => {}
                    Some(other) => panic!("{other:?}"),
                }
                // Room may come between two of them: those behind one that found none wait, too.
                let mut full = BTreeSet::new();
                answers.retain(|(channel, bytes)| {
                    if full.contains(channel) {
                        return true;
                    }
                    match back.send(*channel, bytes) {
                        Ok(()) | Err(Error::Invalid(_)) => false,
                        Err(Error::Full) => full.insert(*channel),
                        Err(error) => panic!("{error}"),
                    }
                });
            }
            last.values().sum::<u64>()
        })
    };
    let backs = [serve(85, "kv"), serve(86, "dns")];
    let programs: Vec<_> = [(85_u64, "kv"), (86, "dns")]
        .into_iter()
        .flat_map(|pair| [pair; 3])
        .map(|(id, name)| {
            let mut program = channel(&daemon, name);
            thread::spawn(move || {
                let (mut answered, mut taken) = (0, Vec::new());
                let mut check = |told: Told| {
                    let Told::Message(bytes) = told else {
                        panic!("{told:?}");
                    };
                    assert_eq!(bytes[..8], id.to_le_bytes());
                    assert_eq!(bytes[8..16], u64::to_le_bytes(answered));
                    answered += 1;
                    answered
                };
                for number in 0..each {
                    let mut bytes = [id.to_le_bytes(), number.to_le_bytes()].concat();
                    bytes.resize(16 + (number % 400) as usize, number as u8);
                    send(&mut program, &bytes, &mut taken);
                    while let Some(told) = program.next(Some(Duration::ZERO)).unwrap() {
                        taken.push(told);
                    }
                    taken.drain(..).for_each(|told| {
                        check(told);
                    });
                }
                while check(told(&mut program)) < each {}
            })
        })
        .collect();
    programs.into_iter().for_each(|it| it.join().unwrap());
    let sums: Vec<u64> = backs.into_iter().map(|it| it.join().unwrap()).collect();
    assert_eq!(sums, [3 * each; 2]);
    // All of it was counted. What a program had left behind when it went was not said any more.
    let counters = daemon.counters();
    for name in ["kv", "dns"] {
        let mut own = counters.iter().filter(|it| it.kind == "backend");
        let own = own.find(|it| it.name == name).unwrap();
        let told = |of: &str| value(own, of);
        assert_eq!(
            (told("messages_in"), told("messages_out")),
            (3 * each, 3 * each)
        );
        assert_eq!(told("message_bytes_in"), told("message_bytes_out"));
        let now = [
            "channels_opened",
            "channels_cut",
            "channels",
            "waiting_bytes",
        ]
        .map(told);
        assert_eq!(now, [3, 0, 0, 0]);
    }
}

#[test]
fn events_are_counted_and_none_is_lost() {
    let events = rounds(200_000, 1_000_000);
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut program = channel(&daemon, "kv");
    let number = joined(&mut back);
    assert!(matches!(program.event(4, 1), Err(Error::Invalid(_))));
    let rings = thread::spawn(move || {
        for at in 0..events {
            program.event((at % 4) as u8, 1).unwrap();
        }
        let mut counts = [0; 4];
        while counts.iter().sum::<u64>() < events {
            if let Told::Event { event, count } = told(&mut program) {
                counts[usize::from(event)] += count;
            }
        }
        assert_eq!(counts, [events / 4; 4]);
        program
    });
    let mut counts = [0; 4];
    while counts.iter().sum::<u64>() < events {
        if let Heard::Event {
            channel,
            event,
            count,
        } = heard(&mut back)
        {
            assert_eq!(channel, number);
            counts[usize::from(event)] += count;
        }
    }
    assert_eq!(counts, [events / 4; 4]);
    for _ in 0..events / 4 {
        (0..4).for_each(|event| back.event(number, event, 1).unwrap());
    }
    let mut program = rings.join().unwrap();
    assert_eq!(
        program.next(Some(Duration::from_millis(200))).unwrap(),
        None,
        "one too many"
    );
}

#[test]
fn death_of_either_side_is_told_and_what_comes_again_is_served() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut program = channel(&daemon, "kv");
    let number = joined(&mut back);
    let region = back.share(number, 4096, true).unwrap();
    assert_eq!(told(&mut program), Told::Shared { region });
    program.memory(region).unwrap().store(0, 5).unwrap();
    // The back-end goes. How soon that is told: `guest/tests/it/back_ends.rs`.
    drop(back);
    assert!(matches!(told(&mut program), Told::Gone(_)));
    assert_eq!(program.memory(region).unwrap().load(0).unwrap(), 0);
    assert_eq!(program.send(b"?"), Err(Error::Disconnected));
    let missing = ChannelOptions::new("kv").socket(daemon.socket()).open();
    assert!(matches!(
        missing,
        Err(Error::Refused {
            code: code::UNAVAILABLE,
            ..
        })
    ));
    // And comes again.
    let mut back = back_end(&daemon, 85, "kv");
    assert_eq!(told(&mut program), Told::Back);
    let number = joined(&mut back);
    program.send(b"again").unwrap();
    assert!(matches!(heard(&mut back), Heard::Message { channel, .. } if channel == number));
    // The daemon goes, and comes.
    daemon.kill();
    assert!(matches!(told(&mut program), Told::Gone(_)));
    assert!(matches!(heard(&mut back), Heard::Left { .. }));
    assert!(matches!(heard(&mut back), Heard::Gone(_)));
    daemon.launch().unwrap();
    assert_eq!(heard(&mut back), Heard::Back);
    assert_eq!(told(&mut program), Told::Back);
    joined(&mut back);
    program.send(b"after").unwrap();
    assert!(matches!(heard(&mut back), Heard::Message { bytes, .. } if bytes == b"after"));
}

#[test]
fn grants_say_who_is_a_back_end_and_who_may_use_it() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(
        &lab,
        &format!(
            "[[backend]]\nid = 85\nname = \"kv\"\nuid = {USER}\nopen = [\"uid:0\"]\nmemory = \"1M\"\n\
             [[backend]]\nid = 86\nname = \"dns\"\nuid = 0\nopen = [\"uid:{USER}\", \"vm:*\"]\n"
        ),
    );
    let daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let socket = daemon.socket();
    let refused = |socket: &Path, id, name: &str| {
        let options = BackEndOptions::new(id, name).socket(socket);
        match options.register() {
            Err(Error::Refused { code, .. }) => code,
            other => panic!("{other:?}"),
        }
    };
    let path = socket.clone();
    let mut kv = as_user(move || {
        assert_eq!(refused(&path, 86, "dns"), code::DENIED);
        assert_eq!(refused(&path, 85, "dns"), code::DENIED);
        assert_eq!(refused(&path, 87, "new"), code::DENIED);
        let kv = BackEndOptions::new(85, "kv").socket(&path);
        let kv = kv.register().unwrap();
        // Its own back-end is not open to it.
        let own = ChannelOptions::new("kv").socket(&path).open();
        assert!(matches!(
            own,
            Err(Error::Refused {
                code: code::NOT_FOUND,
                ..
            })
        ));
        let seen = Channel::list_of(Some(&path)).unwrap();
        assert_eq!(seen.iter().map(|it| it.id).collect::<Vec<_>>(), [86]);
        kv
    });
    assert_eq!(refused(&socket, 85, "kv"), code::EXISTS);
    let mut program = ChannelOptions::by_id(85).socket(&socket).open().unwrap();
    assert!(matches!(heard(&mut kv), Heard::Joined { who, .. } if who == "uid:0"));
    program.send(b"hello").unwrap();
    assert!(matches!(heard(&mut kv), Heard::Message { .. }));
    let (status, text) = daemon.vnplug(&["backends"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("kv") && text.contains("85") && text.contains("dns"),
        "{text}"
    );
}
