//! What operators take from open ports: at once, exactly that, and for good.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Client, Error, GrantAction, GrantKind, Next, Port, Revoke, Whose, code};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::reading::{end_of, reads_on};
use vnplug_e2e::times::Times;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::control::Counted;
use vnplug_testing::until;

fn port(number: u32) -> Revoke {
    Revoke {
        whose: Whose::Port(number),
        receiving: true,
        sending: true,
    }
}

fn sending(number: u32) -> Revoke {
    Revoke {
        receiving: false,
        ..port(number)
    }
}

fn receiving(number: u32) -> Revoke {
    Revoke {
        sending: false,
        ..port(number)
    }
}

fn client(daemon: &Daemon) -> Client {
    Client::connect_to(&daemon.socket()).unwrap()
}

/// What the daemon says of a port; `None` if it is gone.
fn of_port(all: &[Counted], number: u32) -> Option<&Counted> {
    let name = number.to_string();
    all.iter().find(|it| it.kind == "port" && it.name == name)
}

/// Fills a transmit ring, which then has frames that wait unless its host is faster.
fn fill(port: &mut Port, len: usize) {
    let outbox = port.outbox().unwrap();
    while outbox.push(&vec![7; len]).unwrap() {}
    outbox.flush();
}

#[test]
fn a_revoked_port_is_over_its_reader_is_told_why_and_does_not_come_again() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let mut taken = daemon.port("lab").transmit(1 << 16).open().unwrap();
    let mut other = daemon.port("lab").open().unwrap();
    client(&daemon).revoke(port(taken.number())).unwrap();
    let told = end_of(&mut taken);
    assert!(
        matches!(&told, Error::Gone(why) if why.contains("an operator revoked")),
        "{told:?}"
    );
    assert!(matches!(taken.send(&[7; 60]), Err(Error::Gone(_))));
    thread::sleep(Duration::from_millis(300));
    let all = daemon.audit();
    assert!(of_port(&all, taken.number()).is_none());
    assert_eq!(value(&all[0], "ports"), 1);
    // The other goes on, and lost nothing.
    reads_on(&mut other);
    assert_eq!(other.counts().lost, 0);
}

#[test]
fn one_direction_is_revoked_and_the_other_goes_on() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let mut deaf = daemon.port("lab").transmit(1 << 16).open().unwrap();
    let mut mute = daemon.port("lab").transmit(1 << 16).open().unwrap();
    let mut operator = client(&daemon);
    operator.revoke(receiving(deaf.number())).unwrap();
    operator.revoke(sending(mute.number())).unwrap();
    let before = daemon.audit();
    let told = end_of(&mut deaf);
    assert!(
        matches!(&told, Error::Gone(why) if why.contains("revoked receiving")),
        "{told:?}"
    );
    for _ in 0..100 {
        assert_eq!(deaf.send(&[7; 60]), Ok(true));
    }
    let all = until(
        "what the deaf one sends is sent",
        || daemon.audit(),
        |all| value(of_port(all, deaf.number()).unwrap(), "sent") == 100,
    );
    let told = mute.send(&[7; 60]).unwrap_err();
    assert!(
        matches!(&told, Error::Gone(why) if why.contains("revoked sending")),
        "{told:?}"
    );
    reads_on(&mut mute);
    let (deaf_now, mute_now) = (deaf.number(), mute.number());
    let of = |all: &[Counted], number, name| value(of_port(all, number).unwrap(), name);
    // What comes shows in no counter of the deaf one.
    assert_eq!(
        of(&all, deaf_now, "delivered"),
        of(&before, deaf_now, "delivered")
    );
    assert!(of(&all, deaf_now, "refused") > of(&before, deaf_now, "refused"));
    assert!(label(of_port(&all, deaf_now).unwrap(), "revoked").contains("receiving"));
    assert!(of(&all, mute_now, "delivered") > of(&before, mute_now, "delivered"));
    assert!(label(of_port(&all, mute_now).unwrap(), "revoked").contains("sending"));
    // The rest of it may be taken, too.
    operator.revoke(sending(deaf_now)).unwrap();
    let all = daemon.audit();
    assert!(of_port(&all, deaf_now).is_none() && of_port(&all, mute_now).is_some());
}

#[test]
fn whose_ports_are_meant_are_taken_and_no_others() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let args = [
        "--config",
        &config,
        "--source",
        "lab=gen,pps=100",
        "--source",
        "b=gen,pps=100",
    ];
    let allow = format!("uid:{USER}=*");
    let daemon = Daemon::start(&lab, None, &[&args[..], &["--allow", &allow]].concat()).unwrap();
    let options = daemon.port("lab");
    let of_user = as_user(move || options.open().unwrap());
    let of_root = daemon.port("lab").open().unwrap();
    let of_b = daemon.port("b").open().unwrap();
    let of_group = daemon.port("b").group("g").open().unwrap();
    let all = [&of_user, &of_root, &of_b, &of_group].map(Port::number);
    let mut operator = client(&daemon);
    let mut left = all.to_vec();
    for (whose, number) in [
        (Whose::User(USER), all[0]),
        (Whose::Group("g".into()), all[3]),
        (Whose::Source("host:b".into()), all[2]),
        (Whose::Port(all[1]), all[1]),
    ] {
        let revoke = Revoke { whose, ..port(0) };
        operator.revoke(revoke).unwrap();
        left.retain(|it| *it != number);
        let counters = daemon.audit();
        let open = counters.iter().filter(|it| it.kind == "port");
        let open: Vec<u32> = open.map(|it| it.name.parse().unwrap()).collect();
        assert_eq!(open, left);
    }
    let refused = operator.revoke(port(4711)).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Refused {
                code: code::NOT_FOUND,
                ..
            }
        ),
        "{refused:?}"
    );
    let socket = daemon.socket();
    let refused = as_user(move || Client::connect_to(&socket).unwrap().revoke(port(1)));
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
}

/// Revokes sending of a port with frames that wait, a thousand times under load. NB: the bound is for a
/// machine on which other tests run; what it takes alone is in docs/contexts.md.
#[test]
fn a_thousand_times_under_load_nothing_of_what_waits_is_sent_and_others_lose_nothing() {
    const ROUNDS: usize = 1_000;
    let lab = Lab::new().unwrap();
    let daemon =
        Daemon::start(&lab, None, &["--source", "lab=gen,pps=100000,size=60-1514"]).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let bystander = Arc::new(AtomicU64::new(0));
    // Sends all the time, and must have all of it sent.
    let mut sender = daemon
        .port("lab")
        .transmit(1 << 16)
        .enabled(false)
        .open()
        .unwrap();
    let number = sender.number();
    let load = thread::spawn({
        let (over, bystander) = (Arc::clone(&over), Arc::clone(&bystander));
        move || {
            while !over.load(Ordering::Relaxed) {
                match sender.send(&[8; 200]).unwrap() {
                    true => drop(bystander.fetch_add(1, Ordering::Relaxed)),
                    false => thread::yield_now(),
                }
            }
            sender
        }
    });
    let mut operator = client(&daemon);
    let mut times = Times::default();
    let (mut pending, mut sent) = (0, 0);
    for round in 0..ROUNDS {
        let options = daemon.port("lab").transmit(1 << 18).enabled(false);
        let mut port = options.open().unwrap();
        fill(&mut port, 1400);
        let begun = Instant::now();
        operator.revoke(sending(port.number())).unwrap();
        times.push(begun.elapsed());
        let stats = port.stats().unwrap().host.unwrap();
        let taken = value(&stats, "send_taken");
        pending += value(&stats, "send_dropped_revoked");
        sent += value(&stats, "sent");
        // What was written is sent or dropped by this, and nothing else becomes of it.
        assert_eq!(
            value(&stats, "sent") + value(&stats, "send_dropped_revoked"),
            taken
        );
        // Whoever writes on writes for nobody: its memory is not looked at any more.
        let error = port.send(&[7; 60]).unwrap_err();
        assert!(matches!(error, Error::Gone(_)), "{error:?}");
        if round % 100 == 0 {
            daemon.audit();
            let later = port.stats().unwrap().host.unwrap();
            assert_eq!(value(&later, "send_taken"), taken);
        }
    }
    over.store(true, Ordering::Relaxed);
    let sender = load.join().unwrap();
    // The fault is real: many had frames that waited. The control: what is not revoked is sent.
    assert!(
        pending > ROUNDS as u64,
        "only {pending} frames waited, {sent} were sent"
    );
    let written = bystander.load(Ordering::Relaxed);
    until(
        "all of the bystander's frames are sent",
        || daemon.audit(),
        |all| value(of_port(all, number).unwrap(), "sent") == written,
    );
    let (median, most) = (times.at(50), times.at(99));
    eprintln!(
        "revoking took {median:?}, 99 of 100 at most {most:?}, {pending} frames dropped, {sent} sent"
    );
    assert!(median < Duration::from_millis(10), "{median:?}");
    assert!(most < Duration::from_millis(100), "{most:?}");
    drop(sender);
}

#[test]
fn grants_that_change_act_on_open_ports_and_are_kept_as_asked() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let allow = format!("uid:{USER}=lab");
    let source = "lab=gen,pps=20000,flows=2";
    let args = [
        "--config",
        &config,
        "--source",
        source,
        "--allow",
        &allow,
        "--allow-send",
        &allow,
    ];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let options = daemon.port("lab").transmit(1 << 16);
    let mut theirs = as_user(move || options.reconnect(false).open().unwrap());
    let mut ours = daemon.port("lab").open().unwrap();
    let mut operator = client(&daemon);
    let mut change = |action, kind, rest: &str, keep| {
        operator.change_grant(action, kind, &format!("{allow}{rest}"), keep)
    };
    // Narrower: what comes from now on is judged by the new filter, and the reader cannot see the rest.
    change(GrantAction::Set, GrantKind::See, ":udp src port 0", false).unwrap();
    let number = theirs.number();
    let before = daemon.audit();
    thread::sleep(Duration::from_millis(100));
    let after = daemon.audit();
    let of = |all: &[Counted], name| value(of_port(all, number).unwrap(), name);
    assert_eq!(of(&before, "delivered"), of(&after, "delivered"));
    assert!(of(&before, "refused") < of(&after, "refused"));
    // And wider again.
    change(GrantAction::Add, GrantKind::See, ":udp", false).unwrap();
    let at = of(&daemon.audit(), "delivered");
    until(
        "it sees again",
        || daemon.audit(),
        |all| of(all, "delivered") > at,
    );
    // A filter that is wrong changes nothing.
    let wrong = change(GrantAction::Set, GrantKind::See, ":udp prot 53", false).unwrap_err();
    assert!(
        matches!(
            wrong,
            Error::Refused {
                code: code::FILTER,
                ..
            }
        ),
        "{wrong:?}"
    );
    // Sending goes, seeing stays.
    assert_eq!(theirs.send(&[7; 60]), Ok(true));
    change(GrantAction::Remove, GrantKind::Send, "", true).unwrap();
    let error = theirs.send(&[7; 60]).unwrap_err();
    assert!(
        matches!(&error, Error::Gone(why) if why.contains("sending")),
        "{error:?}"
    );
    let at = of(&daemon.audit(), "delivered");
    until(
        "it still sees",
        || daemon.audit(),
        |all| of(all, "delivered") > at,
    );
    let again = change(GrantAction::Remove, GrantKind::Send, "", true).unwrap_err();
    assert!(
        matches!(
            again,
            Error::Refused {
                code: code::NOT_FOUND,
                ..
            }
        ),
        "{again:?}"
    );
    // All goes: the port, and the sight of the source.
    change(GrantAction::Remove, GrantKind::See, "", false).unwrap();
    let told = end_of(&mut theirs);
    assert!(
        matches!(&told, Error::Gone(why) if why.contains("grants")),
        "{told:?}"
    );
    let options = daemon.port("lab");
    let refused = as_user(move || options.open().err().unwrap());
    assert!(
        matches!(
            refused,
            Error::Refused {
                code: code::NOT_FOUND,
                ..
            }
        ),
        "{refused:?}"
    );
    // The operator's own port has lost nothing meanwhile.
    while let Ok(Next::Packet(_)) = ours.next() {}
    assert_eq!(
        value(of_port(&daemon.audit(), ours.number()).unwrap(), "refused"),
        0
    );
    // The next daemon has what was kept, and nothing else.
    daemon.kill();
    daemon.launch().unwrap();
    let options = daemon.port("lab");
    drop(as_user(move || options.open().unwrap()));
    let options = daemon.port("lab").transmit(1 << 16);
    let refused = as_user(move || options.open().err().unwrap());
    assert!(
        matches!(
            refused,
            Error::Refused {
                code: code::DENIED,
                ..
            }
        ),
        "{refused:?}"
    );
    let (status, listed) = daemon.vnplug(&["grant", "list"]);
    assert_eq!(status, Some(0));
    assert!(
        listed.contains("see") && !listed.contains("send"),
        "{listed}"
    );
}

#[test]
fn a_vms_grants_are_taken_also_those_of_its_attachment() {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use vnplug_e2e::raw::{Raw, open};
    use vnplug_ring::control::{Grant, Message, Role, VmKind, VmSpec};
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut operator = client(&daemon);
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Uml,
        pool_bytes: 1 << 22,
        vectors: 0,
        allow: vec![Grant {
            source: "lab".into(),
            filter: String::new(),
        }],
        owner: 5,
        groups: Vec::new(),
        stays_for: None,
    };
    operator.attach_vm(spec).unwrap();
    let (channel, theirs) = UnixStream::pair().unwrap();
    operator.adopt("probe", theirs.as_fd()).unwrap();
    let mut agent = Raw::over(channel);
    agent.hello(Role::Agent);
    let Message::Opened(opened) = agent.ask(&Message::Open(open("host:lab", 1 << 16)), 1) else {
        panic!("refused");
    };
    let remove = (GrantAction::Remove, GrantKind::See);
    operator
        .change_grant(remove.0, remove.1, "vm:probe=lab", false)
        .unwrap();
    let gone = until(
        "the agent is told",
        || agent.next(),
        |it| matches!(it, Some((0, Message::Gone { .. }))),
    );
    let Some((_, Message::Gone { port, reason })) = gone else {
        panic!("{gone:?}");
    };
    assert_eq!(port, opened.port);
    assert!(reason.contains("grants"), "{reason}");
    let refused = agent.ask(&Message::Open(open("host:lab", 1 << 16)), 1);
    assert_eq!(vnplug_e2e::daemon::refusal(refused).0, code::NOT_FOUND);
    let all = daemon.audit();
    assert_eq!(value(counted(&all, "daemon"), "ports"), 0);
    assert!(operator.grants().unwrap().is_empty());
}
