//! Back-ends beside a guest whose memory is plugged slowly, falsely or never, and the ends of a thousand
//! connections at once.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use vnplug::{BackEnd, BackEndOptions, Channel, ChannelOptions, Client, Error, Heard, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::raw::Raw;
use vnplug_e2e::user::{as_user, open_to_all};
use vnplug_ring::control::backend::Connect;
use vnplug_ring::control::{Backend, Grow, Message, Role, VmKind, VmSpec, code};
use vnplug_testing::eventually;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
/// A back-end that is not held up is answered in this time, on a busy machine; a device has eight seconds.
const PROMPT: Duration = Duration::from_secs(3);

fn back_end(daemon: &Daemon) -> BackEnd {
    let options = BackEndOptions::new(85, "kv").events(1, 1);
    options.socket(daemon.socket()).register().unwrap()
}

fn heard(back: &mut BackEnd) -> Heard {
    back.next(SOON)
        .unwrap()
        .expect("the back-end hears something")
}

fn joined(back: &mut BackEnd) -> u32 {
    match heard(back) {
        Heard::Joined { channel, .. } => channel,
        other => panic!("{other:?}"),
    }
}

fn connect() -> Message {
    Message::Backend(Backend::Connect(Connect {
        id: 85,
        name: String::new(),
        version: 0,
        label: String::new(),
    }))
}

/// A VM without a machine: the test is who plugs, and the guest's agent.
struct Guest {
    plugger: Client,
    agent: Raw,
}

impl Guest {
    fn attach(daemon: &Daemon) -> Self {
        let mut plugger = Client::connect_to(&daemon.socket()).unwrap();
        let ready = plugger
            .attach_vm(VmSpec {
                name: "slow".into(),
                kind: VmKind::Qemu,
                pool_bytes: 1 << 20,
                vectors: 0,
                allow: Vec::new(),
                owner: 9,
                groups: Vec::new(),
                stays_for: None,
            })
            .unwrap();
        plugger.offer_growth("slow", 64 << 20, false).unwrap();
        let mut agent = Raw::connect(ready.control_path.as_ref());
        agent.hello(Role::Agent);
        Self { plugger, agent }
    }

    /// What the daemon wants plugged, or taken out, next.
    fn wanted(&mut self) -> Grow {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some((what, _)) = self.plugger.next_growth().unwrap() {
                return what;
            }
            assert!(Instant::now() < deadline, "nothing is wanted");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn plug(&mut self) -> u32 {
        match self.wanted() {
            Grow::Plug { number, .. } => number,
            other => panic!("{other:?}"),
        }
    }

    fn says(&mut self, what: Grow) {
        self.plugger.tell_growth(what).unwrap();
    }

    /// Memory that a program in the guest is told of.
    fn mapped(&mut self) -> u32 {
        loop {
            match self.agent.next().unwrap() {
                (0, Message::Backend(Backend::Mapped(mapped))) => return mapped.region,
                (0, _) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_back_end_does_not_wait_for_a_guest_whose_memory_is_plugged_slowly() {
    let lab = Lab::new().unwrap();
    let kv = "kv,id=85,uid=0,open=*,memory=32M";
    let args = ["--source", "lab=gen,pps=100", "--backend", kv];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut back = back_end(&daemon);
    let mut guest = Guest::attach(&daemon);
    let Message::Backend(Backend::Connected(_)) = guest.agent.ask(&connect(), 1) else {
        panic!("not connected");
    };
    let slow = joined(&mut back);
    let mut other = ChannelOptions::new("kv")
        .socket(daemon.socket())
        .open()
        .unwrap();
    let quick = joined(&mut back);

    // Nobody answers, and the back-end has its memory, and others have answers.
    let began = Instant::now();
    let region = back.share(slow, 1 << 20, true).unwrap();
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    back.memory(region).unwrap().write(0, b"early").unwrap();
    back.send(quick, b"hello").unwrap();
    assert_eq!(
        other.next(SOON).unwrap(),
        Some(Told::Message(b"hello".to_vec()))
    );
    // Its program is told when it is there, and not before.
    let number = guest.plug();
    let error = String::new();
    guest.says(Grow::Plugged { number, error });
    assert_eq!(guest.mapped(), region);

    // It does not come: the back-end is told.
    let lost = back.share(slow, 1 << 20, true).unwrap();
    let (number, error) = (guest.plug(), "no slot".to_owned());
    guest.says(Grow::Plugged { number, error });
    let released = Heard::Released {
        channel: slow,
        region: lost,
    };
    assert_eq!(heard(&mut back), released);
    // Who plugs lies: it is gone before it was there.
    let lost = back.share(slow, 1 << 20, true).unwrap();
    let (number, error) = (guest.plug(), String::new());
    guest.says(Grow::Unplugged { number, error });
    let released = Heard::Released {
        channel: slow,
        region: lost,
    };
    assert_eq!(heard(&mut back), released);
    let error = String::new();
    guest.says(Grow::Plugged { number, error });
    // It is taken back before it comes: nobody is waited for, and it is taken out when it is there.
    let region = back.share(slow, 1 << 20, true).unwrap();
    let began = Instant::now();
    assert!(back.withdraw(region, Duration::from_secs(30)).unwrap());
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    let late = guest.plug();
    let error = String::new();
    guest.says(Grow::Plugged {
        number: late,
        error,
    });
    // The one that was gone and there again is nobody's; it goes some time later.
    assert_eq!(guest.wanted(), Grow::Unplug { number: late });
    // Who plugs dies: the same, and the memory of the first is still the program's.
    let lost = back.share(slow, 1 << 20, true).unwrap();
    let Guest { plugger, agent } = guest;
    drop(plugger);
    let released = Heard::Released {
        channel: slow,
        region: lost,
    };
    assert_eq!(heard(&mut back), released);
    let backend = || {
        let all = daemon.counters();
        value(counted(&all, "backend"), "regions")
    };
    assert_eq!(backend(), 1);
    drop(agent);
    // Without a guest there is no channel.
    assert!(matches!(heard(&mut back), Heard::Left { channel, .. } if channel == slow));
    eventually("its memory is free", || backend() == 0);
}

#[test]
fn a_thousand_connections_may_end_at_once() {
    const MANY: usize = 1000;
    let lab = Lab::new().unwrap();
    let kv = "kv,id=85,uid=0,open=*,channels=2000";
    let args = ["--source", "lab=gen,pps=100", "--backend", kv];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let open = |back: &mut BackEnd| {
        let mut all = Vec::new();
        let mut channels = BTreeSet::new();
        for _ in 0..MANY {
            let mut raw = Raw::greeted(&daemon.socket());
            assert!(matches!(
                raw.ask(&connect(), 0),
                Message::Backend(Backend::Connected(_))
            ));
            all.push(raw);
            channels.insert(joined(back));
        }
        (all, channels)
    };
    let mut back = back_end(&daemon);
    // The programs end, with messages on their way to each.
    let (all, mut channels) = open(&mut back);
    for channel in &channels {
        while back.send(*channel, &[7; 60_000]).is_ok() {}
    }
    drop(all);
    while !channels.is_empty() {
        match heard(&mut back) {
            Heard::Left { channel, .. } => assert!(channels.remove(&channel)),
            other => panic!("{other:?}"),
        }
    }
    // The back-end ends, with messages on their way to it.
    let (mut all, _) = open(&mut back);
    for raw in &mut all {
        raw.send(&Message::List.encode(9, 0)).unwrap();
    }
    drop(back);
    for raw in &mut all {
        loop {
            match raw.next().expect("the connection goes on") {
                (0, Message::Backend(Backend::Hangup { .. })) => break,
                (9, Message::Devices(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // And who comes then is served.
    let mut back = back_end(&daemon);
    let mut program = ChannelOptions::new("kv")
        .socket(daemon.socket())
        .open()
        .unwrap();
    let channel = joined(&mut back);
    back.send(channel, b"still here").unwrap();
    assert_eq!(
        program.next(SOON).unwrap(),
        Some(Told::Message(b"still here".to_vec()))
    );
}

#[test]
fn what_may_wait_in_channels_is_charged_to_their_user() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "max_user_bytes = \"2MiB\"\nring_bytes = \"256KiB\"");
    let args = [
        "--source",
        "lab=gen,pps=100",
        "--backend",
        "kv,id=85,uid=0,open=*",
        "--allow",
        "uid:54321=lab",
        "--config",
        &config,
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let _back = back_end(&daemon);
    let (socket, port) = (daemon.socket(), daemon.port("host:lab").ring_bytes(1 << 20));
    as_user(move || {
        let channel = || ChannelOptions::new("kv").socket(&socket).open();
        // Four channels of half a MiB are all that it may have, or two beside a ring of one.
        let mut own: Vec<Channel> = (0..4).map(|_| channel().unwrap()).collect();
        let Err(Error::Refused {
            code: code::LIMIT,
            text,
        }) = channel()
        else {
            panic!("a fifth");
        };
        assert!(text.contains("max_user_bytes"), "{text}");
        assert!(matches!(
            port.clone().open(),
            Err(Error::Refused {
                code: code::LIMIT,
                ..
            })
        ));
        own.truncate(2);
        let began = Instant::now();
        let _port = loop {
            match port.clone().open() {
                Ok(port) => break port,
                Err(_) if began.elapsed() < Duration::from_secs(20) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => panic!("{error}"),
            }
        };
        assert!(channel().is_err());
    });
}
