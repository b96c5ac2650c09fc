//! Filtering rules, run by the daemon: over a real wire under load, in a guest, and against abuse.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vnplug::{
    Client, Error, ExactRule, Flow, Next, Pattern, Port, PortOptions, Rule, RuleAction, RuleKey,
    RuleKind, Tuning, WildcardRule, code,
};
use vnplug_e2e::daemon::{Daemon, guest_program, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Image, Lab, Netns, Uml, UmlConfig};
use vnplug_ring::control::{
    Counted, Grant, MAX_EXACT_RULES, MAX_WILDCARD_RULES, Message, Role, VmKind, VmSpec,
};
use vnplug_testing::{Deadline, PATIENCE, until};

/// The flow of an untagged UDP frame over IPv4.
fn flow(frame: &[u8]) -> Flow {
    assert_eq!(
        (&frame[12..14], frame[14], frame[23]),
        (&[8, 0][..], 0x45, 17)
    );
    let host = |at: usize| <[u8; 4]>::try_from(&frame[at..at + 4]).unwrap().into();
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    Flow {
        vlan_id: 0,
        proto: 17,
        host_a: host(26),
        host_b: host(30),
        port_a: port(34),
        port_b: port(36),
    }
}

/// Reads until `limit` packets came or nothing comes any more; counts them by flow.
fn read(port: &mut Port, limit: u64) -> BTreeMap<Flow, u64> {
    let deadline = Deadline::new(format!("{limit} packets come, or all"));
    let mut flows = BTreeMap::new();
    let mut packets = 0;
    while packets < limit {
        deadline.check_seen(&packets);
        match port.next().unwrap() {
            Next::Packet(packet) => {
                assert_eq!(packet.meta.lost, 0);
                *flows.entry(flow(packet.bytes)).or_default() += 1;
                packets += 1;
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
            Next::Ended => break,
        }
    }
    port.release();
    flows
}

fn exact(flow: Flow, action: RuleAction) -> Rule {
    Rule::Exact(ExactRule { flow, action })
}

fn wildcard(id: u16, matches: Pattern, action: RuleAction) -> Rule {
    Rule::Wildcard(WildcardRule {
        id,
        matches,
        action,
    })
}

/// The same flow by its other end.
fn back(flow: Flow) -> Flow {
    Flow {
        host_a: flow.host_b,
        host_b: flow.host_a,
        port_a: flow.port_b,
        port_b: flow.port_a,
        ..flow
    }
}

fn stranger(number: u32) -> Flow {
    Flow {
        vlan_id: 7,
        proto: 6,
        host_a: number.to_be_bytes().into(),
        host_b: [192, 0, 2, 1].into(),
        port_a: 1,
        port_b: 2,
    }
}

fn own<'a>(counters: &'a [Counted], port: &Port) -> &'a Counted {
    let number = port.number().to_string();
    let own = |counted: &&Counted| counted.kind == "port" && counted.name == number;
    counters.iter().find(own).unwrap()
}

fn until_offered(daemon: &Daemon, port: &Port, count: u64) -> Vec<Counted> {
    let audit = || daemon.audit();
    until("all are offered", audit, |counters| {
        value(own(counters, port), "offered") >= count
    })
}

#[test]
fn rules_sort_the_flows_of_a_wire_and_every_frame_is_accounted_for() {
    const FLOWS: u32 = 5;
    const EACH: u64 = 8000;
    const ALL: u64 = FLOWS as u64 * EACH;
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let mut daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let send = |frames: u64| {
        let stream = Stream {
            flows: FLOWS,
            pps: std::num::NonZeroU64::new(100_000),
            ..Stream::new("wire0", frames)
        };
        netns.enter(|| stream.send()).unwrap().unwrap();
    };
    let mut port = daemon.port("wire1").ring_bytes(32 << 20).open().unwrap();
    send(u64::from(FLOWS) * 10);
    let flows: Vec<Flow> = read(&mut port, u64::from(FLOWS) * 10).into_keys().collect();
    assert_eq!(flows.len(), FLOWS as usize);

    // One flow dropped, one counted and then dropped by a wildcard rule, one counted alone.
    let third = Pattern {
        bidirectional: true,
        proto: 17,
        source_ports: (flows[2].port_b, flows[2].port_b),
        target_ports: (flows[2].port_a, flows[2].port_a),
        ..Pattern::default()
    };
    port.add_rules(&[
        exact(back(flows[0]), RuleAction::Drop),
        exact(flows[1], RuleAction::Count),
        exact(flows[2], RuleAction::Count),
        wildcard(9, Pattern::default(), RuleAction::Count),
        wildcard(4, third, RuleAction::Drop),
    ])
    .unwrap();
    // Rules come and go while frames pass: none of these is about any.
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(ALL));
        let mut number = 0;
        while !sender.is_finished() {
            let rules: Vec<Rule> = (number..number + 300)
                .map(|number| exact(stranger(number), RuleAction::Drop))
                .collect();
            port.add_rules(&rules).unwrap();
            port.remove_rule(rules[7].key()).unwrap();
            daemon.audit();
            number = (number + 300) % 60_000;
        }
    });
    let counters = until_offered(&daemon, &port, ALL + u64::from(FLOWS) * 10);
    assert_eq!(value(own(&counters, &port), "ruled_out"), 2 * EACH);
    let seen = read(&mut port, 3 * EACH);
    for (at, flow) in flows.iter().enumerate() {
        let expected = [0, EACH, 0, EACH, EACH][at];
        assert_eq!(seen.get(flow).copied().unwrap_or(0), expected, "flow {at}");
        let matched = port.rule_stats(RuleKey::Exact(back(*flow)));
        match at {
            0..3 => assert_eq!(matched.unwrap().matched, EACH),
            _ => assert!(matches!(
                matched,
                Err(Error::Refused {
                    code: code::NOT_FOUND,
                    ..
                })
            )),
        }
    }
    assert_eq!(port.rule_stats(RuleKey::Wildcard(4)).unwrap().matched, EACH);
    assert_eq!(
        port.rule_stats(RuleKey::Wildcard(9)).unwrap().matched,
        3 * EACH
    );

    // What nothing matched goes; then only one flow is wanted, also after a restart.
    std::thread::sleep(Duration::from_millis(20));
    let idle = Duration::from_millis(1);
    assert!(port.purge_rules(RuleKind::Exact, idle).unwrap() > 3);
    assert_eq!(port.purge_rules(RuleKind::Wildcard, idle).unwrap(), 2);
    assert_eq!(
        port.purge_rules(RuleKind::Exact, Duration::ZERO).unwrap(),
        0
    );
    port.set_rule_default(false).unwrap();
    port.add_rule(&exact(flows[3], RuleAction::Accept)).unwrap();
    daemon.kill();
    daemon.launch().unwrap();
    let deadline = Deadline::new("the port is reopened");
    while port.counts().reopened == 0 {
        deadline.check();
        assert!(!matches!(port.next().unwrap(), Next::Packet(_)));
        port.wait(Some(Duration::from_millis(20))).unwrap();
    }
    send(u64::from(FLOWS) * 100);
    let counters = until_offered(&daemon, &port, u64::from(FLOWS) * 100);
    let port_counters = own(&counters, &port);
    assert_eq!(value(port_counters, "ruled_out"), 400);
    assert_eq!(value(port_counters, "exact_rules"), 1);
    assert_eq!(read(&mut port, 100), BTreeMap::from([(flows[3], 100)]));
}

#[test]
fn a_flood_of_rules_ends_at_the_limits_and_costs_the_others_nothing() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=50000,count=150000,flows=16,run=3";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    // The source begins when the bystander comes, who is the first that is not paused.
    let port = daemon.port("lab").ring_bytes(1 << 16).enabled(false);
    let mut port = port.open().unwrap();
    let mut bystander = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    port.tune(Tuning::default()).unwrap();
    let many: Vec<Rule> = (0..MAX_EXACT_RULES as u32)
        .map(|number| exact(stranger(number), RuleAction::Drop))
        .collect();
    port.add_rules(&many).unwrap();
    let limit = |result: Result<(), Error>| {
        assert!(
            matches!(&result, Err(Error::Refused { code, .. }) if *code == code::LIMIT),
            "{result:?}"
        );
    };
    limit(port.add_rule(&exact(stranger(1 << 20), RuleAction::Drop)));
    let wild: Vec<Rule> = (0..MAX_WILDCARD_RULES as u16)
        .rev()
        .map(|id| {
            let matches = Pattern {
                vlan_id: 9,
                ..Pattern::default()
            };
            wildcard(id, matches, RuleAction::Drop)
        })
        .collect();
    port.add_rules(&wild).unwrap();
    limit(port.add_rule(&wildcard(5000, Pattern::default(), RuleAction::Drop)));
    daemon.audit();
    let seen: u64 = read(&mut bystander, u64::MAX).into_values().sum();
    assert_eq!(seen, 150_000);
    assert_eq!(
        port.purge_rules(RuleKind::Exact, Duration::ZERO).unwrap(),
        MAX_EXACT_RULES
    );
    let counters = daemon.audit();
    assert_eq!(value(own(&counters, &port), "exact_rules"), 0);
    assert_eq!(
        value(own(&counters, &port), "wildcard_rules"),
        MAX_WILDCARD_RULES as u64
    );
}

#[test]
fn rules_of_anothers_port_and_impossible_rules_are_refused() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000,queues=2"]).unwrap();
    let victim = daemon.port("lab").open().unwrap();
    let mut raw = Raw::greeted(&daemon.socket());
    let Message::Opened(opened) = raw.ask(&Message::Open(open("lab", 0)), 0) else {
        panic!("not opened");
    };
    raw.take_fds();
    let key = RuleKey::Wildcard(1);
    let requests = |port: u32| {
        vec![
            Message::AddRules {
                port,
                rules: vec![wildcard(1, Pattern::default(), RuleAction::Drop)],
            },
            Message::RemoveRule { port, key },
            Message::RuleStats { port, key },
            Message::RuleDefault {
                port,
                accept: false,
            },
            Message::PurgeRules {
                port,
                kind: RuleKind::Exact,
                idle_ms: 0,
            },
            Message::Tune {
                port,
                tuning: Tuning::default(),
            },
        ]
    };
    for request in requests(victim.number()) {
        let (refused, text) = refusal(raw.ask(&request, 0));
        assert_eq!(refused, code::NOT_FOUND, "{request:?}: {text}");
    }
    let mixed = Flow {
        host_b: [1; 16].into(),
        ..stranger(1)
    };
    let bad = [
        exact(mixed, RuleAction::Drop),
        wildcard(
            1,
            Pattern {
                target_ports: (2, 1),
                ..Pattern::default()
            },
            RuleAction::Drop,
        ),
    ];
    for rule in bad {
        let rules = vec![exact(stranger(1), RuleAction::Drop), rule];
        let port = opened.port;
        let (refused, text) = refusal(raw.ask(&Message::AddRules { port, rules }, 0));
        assert_eq!(refused, code::INVALID, "{text}");
    }
    let counters = daemon.audit();
    for counted in counters.iter().filter(|counted| counted.kind == "port") {
        let rules = (
            value(counted, "exact_rules"),
            value(counted, "wildcard_rules"),
        );
        assert_eq!(rules, (0, 0), "{counted:?}");
    }
    // A byte that is none of an action's, at the end of a well-formed request.
    let mut bytes = requests(opened.port)[0].encode(9, 0);
    *bytes.last_mut().unwrap() = 3;
    raw.send(&bytes).unwrap();
    let (id, answer) = raw.next().unwrap();
    assert_eq!((id, refusal(answer).0), (9, code::PROTOCOL));
    // On two queues a rule is found by its own, and counted once.
    for request in &requests(opened.port) {
        let answer = raw.ask(request, 0);
        assert!(
            !matches!(answer, Message::Error { .. }),
            "{request:?}: {answer:?}"
        );
        if matches!(request, Message::AddRules { .. }) {
            assert!(matches!(raw.ask(request, 0), Message::Done));
        }
        if matches!(request, Message::RemoveRule { .. }) {
            assert_eq!(refusal(raw.ask(request, 0)).0, code::NOT_FOUND);
            raw.ask(&requests(opened.port)[0], 0);
        }
    }
    daemon.audit();
}

#[test]
fn a_guest_may_have_as_many_rules_as_others_can_bear() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000,queues=2"]).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Uml,
        pool_bytes: 1 << 24,
        vectors: 0,
        allow: everything(),
        owner: 5,
        groups: Vec::new(),
        stays_for: None,
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    client.attach_vm(spec).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    client.adopt("probe", theirs.as_fd()).unwrap();
    let mut agent = Raw::over(ours);
    agent.hello(Role::Agent);
    let mut opened = |app: u32| match agent.ask(&Message::Open(open("host:lab", 1 << 16)), app) {
        Message::Opened(opened) => opened.port,
        other => panic!("{other:?}"),
    };
    let (first, second) = (opened(1), opened(2));
    // One application's port is not another's.
    let drop_all = |port| Message::RuleDefault {
        port,
        accept: false,
    };
    assert_eq!(refusal(agent.ask(&drop_all(first), 2)).0, code::NOT_FOUND);
    assert_eq!(agent.ask(&drop_all(first), 1), Message::Done);
    let rules = |port: u32, from: u16| Message::AddRules {
        port,
        rules: (from..from + 500)
            .map(|id| wildcard(id, Pattern::default(), RuleAction::Count))
            .collect(),
    };
    // On two queues, 3 instructions each: 2,730 in all at most, on whichever port.
    let mut added = 0;
    let refused = loop {
        let port = if added % 2 == 0 { first } else { second };
        let app = if added % 2 == 0 { 1 } else { 2 };
        match agent.ask(&rules(port, added * 500), app) {
            Message::Done => added += 1,
            other => break refusal(other),
        }
    };
    assert_eq!((refused.0, added), (code::LIMIT, 5), "{}", refused.1);
    assert!(refused.1.contains("wildcard"), "{}", refused.1);
    daemon.audit();
}

fn everything() -> Vec<Grant> {
    vec![Grant {
        source: "*".into(),
        filter: String::new(),
    }]
}

#[test]
fn an_application_in_a_guest_has_its_rules_run_on_the_host() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=2000,flows=4,run=6";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Uml,
        pool_bytes: 64 << 20,
        vectors: 0,
        allow: everything(),
        owner: 77,
        groups: Vec::new(),
        stays_for: None,
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let ready = client.attach_vm(spec).unwrap();
    let (channel, theirs) = UnixStream::pair().unwrap();
    client.adopt("probe", channel.as_fd()).unwrap();
    let image = Image::default()
        .file(guest_program().unwrap(), "/bin/vnplug", 0o755)
        .program_at(std::env::current_exe().unwrap(), "/bin/rules");
    let guest = Uml::boot(
        &lab,
        UmlConfig {
            // This program, with what its debugger wants, lies in the guest's memory twice at boot.
            memory_mib: 512,
            pool: Some(ready.pool_path.into()),
            lines: vec![(0, OwnedFd::from(theirs))],
            kernel_args: vec!["vnplug=ttyS0".into()],
            image,
            ..UmlConfig::default()
        },
    )
    .unwrap_or_else(|error| panic!("{error}"));
    let _agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    let command = "RUST_BACKTRACE=1 rules --ignored --exact --nocapture inside_a_guest 2>&1";
    let output = guest.run(command, PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{}", output.text());
    assert!(output.text().contains("1 passed"), "{}", output.text());
    daemon.audit();
}

#[test]
#[ignore = "run in a guest by an_application_in_a_guest_has_its_rules_run_on_the_host"]
fn inside_a_guest() {
    let open = || PortOptions::new("host:lab").open();
    let mut port = until("the agent serves", open, Result::is_ok).unwrap();
    let flows: Vec<Flow> = read(&mut port, 400).into_keys().collect();
    assert_eq!(flows.len(), 4);
    port.set_rule_default(false).unwrap();
    let wanted = exact(flows[1], RuleAction::Accept);
    port.add_rule(&wanted).unwrap();
    let many: Vec<Rule> = (0..2000)
        .map(|number| exact(stranger(number), RuleAction::Accept))
        .collect();
    port.add_rules(&many).unwrap();
    // What was published before is read out first.
    while matches!(port.next().unwrap(), Next::Packet(_)) {}
    let seen = read(&mut port, 200);
    assert_eq!(seen, BTreeMap::from([(flows[1], 200)]));
    let stats = port.rule_stats(wanted.key()).unwrap();
    assert!(stats.matched >= 200 && stats.idle < Duration::from_secs(5));
    let removed = port.purge_rules(RuleKind::Exact, Duration::from_secs(100));
    assert_eq!(removed.unwrap(), 0);
    let host = port.stats().unwrap().host.unwrap();
    assert!(value(&host, "ruled_out") > 0);
    assert_eq!(value(&host, "exact_rules"), 2001);
}

#[test]
fn what_keeps_a_queue_from_its_packets_is_asked_less_often() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut port = daemon.port("lab").open().unwrap();
    let many: Vec<Rule> = (0..60_000)
        .map(|number| exact(stranger(number), RuleAction::Drop))
        .collect();
    let begun = Instant::now();
    port.add_rules(&many).unwrap();
    // Every one may have to look through the whole table.
    for _ in 0..4 {
        let idle = Duration::from_secs(3600);
        assert_eq!(port.purge_rules(RuleKind::Exact, idle).unwrap(), 0);
    }
    assert!(begun.elapsed() > Duration::from_secs(1));
    daemon.audit();
}
