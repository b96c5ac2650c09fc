//! Third parties' back-ends and the programs that use them, in processes: routing, credit, events, memory,
//! grants, deaths, restarts, lies.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{BackEnd, BackEndOptions, Channel, ChannelOptions, Error, Heard, MAX_SAID, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::{Holdings, Raw};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::control::backend::{Register, WINDOW};
use vnplug_ring::control::{Backend, Message, code};
use vnplug_testing::until;

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
fn so_many(usual: u64, long: u64) -> u64 {
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
    let each = so_many(40_000, 200_000);
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
    let events = so_many(200_000, 1_000_000);
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
fn memory_is_shared_withdrawn_and_never_a_fault() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut program = channel(&daemon, "kv");
    let number = joined(&mut back);
    let region = back.share(number, 1 << 20, false).unwrap();
    let Told::Shared { region: same } = told(&mut program) else {
        panic!("no memory");
    };
    assert_eq!(region, same);
    back.memory(region)
        .unwrap()
        .write(4096, b"from the host")
        .unwrap();
    let mut read = [0; 13];
    let theirs = program.memory(region).unwrap();
    theirs.read(4096, &mut read).unwrap();
    assert_eq!(&read, b"from the host");
    assert_eq!((theirs.len(), theirs.is_writable()), (1 << 20, false));
    assert!(matches!(theirs.write(0, b"x"), Err(Error::Invalid(_))));
    assert!(matches!(
        theirs.read((1 << 20) - 3, &mut read),
        Err(Error::Invalid(_))
    ));
    // One that both write.
    let both = back.share(number, 100, true).unwrap();
    assert_eq!(told(&mut program), Told::Shared { region: both });
    program.memory(both).unwrap().store(8, 77).unwrap();
    assert_eq!(back.memory(both).unwrap().load(8).unwrap(), 77);
    // Taken back from one who lets go.
    let lets_go = thread::spawn(move || {
        let Told::Withdraw { region, .. } = told(&mut program) else {
            panic!("not asked");
        };
        program.release(region).unwrap();
        assert!(program.memory(region).is_none());
        program
    });
    assert!(back.withdraw(region, Duration::from_secs(10)).unwrap());
    let program = lets_go.join().unwrap();
    // And from one who does not listen: it maps zeros.
    let began = Instant::now();
    assert!(!back.withdraw(both, Duration::from_millis(200)).unwrap());
    assert!(began.elapsed() >= Duration::from_millis(200));
    let stays = program.memory(both).unwrap();
    assert_eq!(stays.load(8).unwrap(), 0);
    stays.store(8, 9).unwrap();
    assert!(back.withdraw(both, Duration::ZERO).is_err());
}

/// Its message may come together with the answer that opens the channel, and its descriptor with both.
#[test]
fn memory_that_is_shared_at_once_may_come_with_the_channel() {
    const CHANNELS: usize = 300;
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let shares = thread::spawn(move || {
        for _ in 0..CHANNELS {
            let number = joined(&mut back);
            for _ in 0..3 {
                back.share(number, 4096, false).unwrap();
            }
            back.send(number, b"all").unwrap();
            assert!(matches!(heard(&mut back), Heard::Left { .. }));
        }
    });
    for _ in 0..CHANNELS {
        let mut program = channel(&daemon, "kv");
        for _ in 0..3 {
            let Told::Shared { region } = told(&mut program) else {
                panic!("no memory");
            };
            assert_eq!(program.memory(region).unwrap().load(0).unwrap(), 0);
        }
        assert_eq!(told(&mut program), Told::Message(b"all".to_vec()));
    }
    shares.join().unwrap();
}

#[test]
fn what_a_back_end_shares_is_bounded_and_free_again() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let before = Holdings::at_rest(daemon.pid()).fds;
    for _ in 0..20 {
        let program = channel(&daemon, "kv");
        let number = joined(&mut back);
        back.share(number, 4 << 20, true).unwrap();
        let Err(Error::Refused {
            code: code::LIMIT,
            text,
        }) = back.share(number, 1, true)
        else {
            panic!("more than the grant permits");
        };
        assert!(text.contains("memory="), "{text}");
        assert!(back.share(number, 0, true).is_err() && back.share(99_999, 1, true).is_err());
        drop(program);
        assert!(matches!(heard(&mut back), Heard::Left { .. }));
    }
    let now = || Holdings::of(daemon.pid()).fds;
    until("what was shared is closed", now, |now| *now <= before);
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

#[test]
fn floods_and_lies_end_a_channel_and_nobody_elses() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut bystander = channel(&daemon, "kv");
    let own = joined(&mut back);
    let liar = |lie: &dyn Fn(u32) -> Vec<Backend>| {
        let (mut raw, channel) = Raw::program(&daemon.socket(), 85);
        for message in lie(channel) {
            raw.send(&Message::Backend(message).encode(0, 0)).unwrap();
        }
        let hung_up = loop {
            match raw.next() {
                Some((0, Message::Backend(Backend::Hangup { reason, .. }))) => break reason,
                Some(_) => {}
                None => panic!("the connection ended, and not the channel"),
            }
        };
        // The connection is as good as before.
        assert!(matches!(raw.ask(&Message::List, 0), Message::Devices(_)));
        hung_up
    };
    let say = |channel, len| Backend::Say {
        channel,
        bytes: vec![1; len],
    };
    let flood = |channel| {
        (0..=WINDOW / (64 << 10))
            .map(|_| say(channel, MAX_SAID))
            .collect()
    };
    assert!(liar(&flood).contains("took"));
    assert!(liar(&|channel| vec![Backend::Took { channel, cost: 1 }]).contains("given"));
    let events = |channel, totals: &[u64]| Backend::Events {
        channel,
        totals: totals.to_vec(),
    };
    assert!(liar(&|channel| vec![events(channel, &[0; 40])]).contains("events"));
    assert!(
        liar(&|channel| vec![events(channel, &[9; 4]), events(channel, &[8; 4])])
            .contains("events")
    );
    // Others' channels, regions and back-ends cannot be named.
    let mut raw = Raw::greeted(&daemon.socket());
    for message in [
        say(own, 3),
        Backend::Hangup {
            channel: own,
            reason: "mine".into(),
        },
        Backend::Withdraw {
            channel: own,
            region: 1,
            within_ms: 0,
        },
    ] {
        raw.send(&Message::Backend(message).encode(0, 0)).unwrap();
    }
    let asked = raw.ask(
        &Message::Backend(Backend::Region {
            channel: own,
            bytes: 1,
            writable: true,
        }),
        0,
    );
    assert!(matches!(
        asked,
        Message::Error {
            code: code::NOT_FOUND,
            ..
        }
    ));
    let again = Register {
        id: 85,
        name: "kv".into(),
        version: 0,
        events_in: 0,
        events_out: 0,
    };
    let asked = raw.ask(&Message::Backend(Backend::Register(again)), 0);
    assert!(matches!(
        asked,
        Message::Error {
            code: code::EXISTS,
            ..
        }
    ));
    bystander.send(b"still here").unwrap();
    loop {
        match heard(&mut back) {
            Heard::Message { channel, bytes } if channel == own => {
                assert_eq!(bytes, b"still here");
                break;
            }
            Heard::Joined { .. }
            | Heard::Left { .. }
            | Heard::Message { .. }
            | Heard::Event { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    // A program that takes nothing fills its window, and holds up nobody.
    let mut sent = 0;
    while back.send(own, &[0; 1000]).is_ok() {
        sent += 1;
    }
    assert!(sent >= 100, "{sent}");
    let mut other = channel(&daemon, "kv");
    let other_number = loop {
        if let Heard::Joined { channel, .. } = heard(&mut back) {
            break channel;
        }
    };
    back.send(other_number, b"for the other").unwrap();
    assert_eq!(told(&mut other), Told::Message(b"for the other".to_vec()));
    let mut taken = 0;
    while taken < sent {
        assert!(matches!(told(&mut bystander), Told::Message(bytes) if bytes.len() == 1000));
        taken += 1;
    }
    back.send(own, b"room again").unwrap();
}
