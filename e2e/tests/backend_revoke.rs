//! Channels of back-ends that an operator revokes: at once, those that are meant, with their memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{
    BackEnd, BackEndOptions, Channel, ChannelOptions, Client, Error, Heard, Revoke, Told, Whose,
};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::Raw;
use vnplug_e2e::times::Times;
use vnplug_e2e::user::{USER, as_uid, as_user, open_to_all};
use vnplug_ring::control::{Backend, Message, REVOKED_CHANNEL, code};
use vnplug_testing::until;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
const SHARED: &[u8; 6] = b"shared";

/// A daemon that permits two back-ends to root.
fn daemon(lab: &Lab) -> Daemon {
    let config = open_to_all(lab, "");
    let (kv, dns) = (
        "kv,id=85,uid=0,open=uid:*,memory=8M",
        "dns,id=86,uid=0,open=uid:*",
    );
    let args = ["--config", &config, "--backend", kv, "--backend", dns];
    Daemon::start(lab, None, &args).unwrap()
}

fn back_end(daemon: &Daemon, id: u32, name: &str) -> BackEnd {
    let options = BackEndOptions::new(id, name).socket(daemon.socket());
    options.register().unwrap()
}

fn heard(back: &mut BackEnd) -> Heard {
    let heard = back.next(SOON).unwrap();
    heard.expect("the back-end hears something")
}

fn joined(back: &mut BackEnd) -> u32 {
    match heard(back) {
        Heard::Joined { channel, .. } => channel,
        other => panic!("{other:?}"),
    }
}

fn told(channel: &mut Channel) -> Told {
    let told = channel.next(SOON).unwrap();
    told.expect("the program is told something")
}

fn channels(whose: &str) -> Revoke {
    Revoke {
        whose: Whose::Channels {
            backend: "kv".into(),
            whose: whose.into(),
        },
        receiving: true,
        sending: true,
    }
}

/// A back-end that says everything back, and shares memory with `SHARED` in it when it is asked for `memory`, until
/// it hears `end`: why channels were over.
fn serve(mut back: BackEnd) -> thread::JoinHandle<Vec<String>> {
    thread::spawn(move || {
        let mut reasons = Vec::new();
        loop {
            match heard(&mut back) {
                Heard::Message { bytes, .. } if bytes == b"end" => return reasons,
                Heard::Message { channel, bytes } if bytes == b"memory" => {
                    match back.share(channel, 4096, false) {
                        Ok(region) => back.memory(region).unwrap().write(0, SHARED).unwrap(),
                        // The channel is over meanwhile.
                        Err(Error::Refused { .. } | Error::Invalid(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                Heard::Message { channel, bytes } => match back.send(channel, &bytes) {
                    Ok(()) | Err(Error::Invalid(_)) => {}
                    Err(error) => panic!("{error}"),
                },
                Heard::Left { reason, .. } => reasons.push(reason),
                Heard::Joined { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    })
}

fn program(socket: PathBuf, uid: u32, name: &'static str) -> Channel {
    as_uid(uid, move || {
        ChannelOptions::new(name).socket(socket).open().unwrap()
    })
}

fn asks(program: &mut Channel, number: u64) {
    program.send(&number.to_le_bytes()).unwrap();
    assert_eq!(
        told(program),
        Told::Message(number.to_le_bytes().to_vec()),
        "lost, doubled or mixed"
    );
}

#[test]
fn a_user_s_channels_are_over_again_and_again_and_others_lose_nothing() {
    const ROUNDS: usize = 100;
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let kv = serve(back_end(&daemon, 85, "kv"));
    let dns = serve(back_end(&daemon, 86, "dns"));
    let over = Arc::new(AtomicBool::new(false));
    let mut bystander = program(daemon.socket(), USER + 1, "kv");
    let asks_on = thread::spawn({
        let over = Arc::clone(&over);
        move || {
            let mut asked = 0;
            while !over.load(Ordering::Relaxed) {
                asks(&mut bystander, asked);
                asked += 1;
            }
            (bystander, asked)
        }
    });
    let mut elsewhere = program(daemon.socket(), USER, "dns");
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let mut times = Times::default();
    for _ in 0..ROUNDS {
        // It may come again: a revocation is no change of the grant.
        let mut taken = program(daemon.socket(), USER, "kv");
        taken.send(b"memory").unwrap();
        let Told::Shared { region } = told(&mut taken) else {
            panic!("no memory");
        };
        let read = |taken: &Channel| {
            let mut read = [1; SHARED.len()];
            taken.memory(region).unwrap().read(0, &mut read).unwrap();
            read
        };
        asks(&mut taken, 1);
        assert_eq!(&read(&taken), SHARED);
        for _ in 0..20 {
            taken.send(b"waits").unwrap();
        }
        let begun = Instant::now();
        operator.revoke(channels(&format!("uid:{USER}"))).unwrap();
        times.push(begun.elapsed());
        let reason = loop {
            match told(&mut taken) {
                Told::Gone(reason) => break reason,
                Told::Message(bytes) => assert_eq!(bytes, b"waits"),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason, REVOKED_CHANNEL);
        assert_eq!(read(&taken), [0; SHARED.len()]);
        // It does not come back by itself.
        let gone = Error::Gone(REVOKED_CHANNEL.into());
        assert_eq!(
            taken.next(Some(Duration::from_millis(1))),
            Err(gone.clone())
        );
        assert_eq!(taken.send(b"?"), Err(gone.clone()));
        assert_eq!(taken.event(0, 1), Err(gone));
    }
    eprintln!(
        "{ROUNDS} revocations took {:?} in the median, {:?} at most",
        times.at(50),
        times.at(100)
    );
    asks(&mut elsewhere, 7);
    let own = || {
        let counters = daemon.counters();
        let mut own = counters.iter().filter(|it| it.kind == "backend");
        let kv = own.find(|it| it.name == "kv").unwrap();
        ["channels", "regions", "channels_cut"].map(|of| value(kv, of))
    };
    until("theirs are gone, with their memory", own, |own| {
        *own == [1, 0, 0]
    });
    over.store(true, Ordering::Relaxed);
    let (mut bystander, asked) = asks_on.join().unwrap();
    assert!(
        asked > ROUNDS as u64 / 2,
        "only {asked} questions beside them"
    );
    bystander.send(b"end").unwrap();
    assert_eq!(kv.join().unwrap(), vec![REVOKED_CHANNEL; ROUNDS]);
    // All of them, by the command.
    let (status, text) = daemon.vnplug(&["revoke", "--backend", "dns"]);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(told(&mut elsewhere), Told::Gone(REVOKED_CHANNEL.into()));
    drop(elsewhere);
    let mut last = program(daemon.socket(), USER, "dns");
    last.send(b"end").unwrap();
    assert_eq!(dns.join().unwrap(), [REVOKED_CHANNEL]);
}

/// What is at the beginning of a piece of memory.
fn begins(memory: &OwnedFd) -> [u8; SHARED.len()] {
    let mut begins = [1; SHARED.len()];
    rustix::io::pread(memory, &mut begins, 0).unwrap();
    begins
}

#[test]
fn a_program_that_does_not_listen_loses_its_memory_and_says_nothing_more() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let (mut taken, channel) = Raw::program(&daemon.socket(), 85);
    assert_eq!(joined(&mut back), channel);
    let region = back.share(channel, 4096, true).unwrap();
    let memory = back.memory(region).unwrap();
    memory.write(0, SHARED).unwrap();
    while !matches!(
        taken.next().unwrap(),
        (_, Message::Backend(Backend::Mapped(_)))
    ) {}
    let theirs = taken.take_fds().pop().unwrap();
    assert_eq!(&begins(&theirs), SHARED);
    // It is no VM's.
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    operator.revoke(channels("vm:*")).unwrap();
    assert_eq!(&begins(&theirs), SHARED);
    operator.revoke(channels("uid:0")).unwrap();
    let refused = back.share(channel, 4096, true);
    assert!(
        matches!(
            refused,
            Err(Error::Refused {
                code: code::NOT_FOUND,
                ..
            })
        ),
        "{refused:?}"
    );
    let bytes = b"still here?".to_vec();
    let says = Message::Backend(Backend::Say { channel, bytes });
    taken.send(&says.encode(0, 0)).unwrap();
    assert!(matches!(taken.ask(&Message::List, 0), Message::Devices(_)));
    assert!(
        matches!(heard(&mut back), Heard::Left { channel: of, reason }
        if of == channel && reason == REVOKED_CHANNEL)
    );
    assert_eq!(back.next(Some(Duration::from_millis(100))), Ok(None));
    assert!(back.memory(region).is_none());
    until(
        "its memory is emptied",
        || begins(&theirs),
        |it| *it == [0; 6],
    );
}

#[test]
fn who_may_not_and_what_cannot_be_is_refused() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut stays = program(daemon.socket(), USER, "kv");
    joined(&mut back);
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let mut refusal = |revoke| match operator.revoke(revoke) {
        Err(Error::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(channels("gid:1")), code::INVALID);
    let sending = Revoke {
        receiving: false,
        ..channels("*")
    };
    assert_eq!(refusal(sending), code::INVALID);
    let (status, text) = daemon.vnplug(&["revoke", "--backend", "vk"]);
    assert!(status != Some(0) && text.contains("no back-end"), "{text}");
    for wrong in [
        &["--backend", "kv", "--port", "3"][..],
        &["--backend", "kv", "--sending"],
        &["--backend", "kv", "--vm", "a", "--uid", "1"],
        &["--source", "lab", "--vm", "a"],
        &["--sending"],
    ] {
        let (status, text) = daemon.vnplug(&[&["revoke"], wrong].concat());
        assert_eq!(status, Some(2), "{wrong:?}: {text}");
    }
    let socket = daemon.socket();
    let refused = as_user(move || Client::connect_to(&socket).unwrap().revoke(channels("*")));
    assert!(
        matches!(
            refused,
            Err(Error::Refused {
                code: code::DENIED,
                ..
            })
        ),
        "{refused:?}"
    );
    stays.send(b"still here").unwrap();
    assert!(matches!(heard(&mut back), Heard::Message { bytes, .. } if bytes == b"still here"));
}
