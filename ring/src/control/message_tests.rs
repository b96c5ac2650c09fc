//! Every message, there and back, cut and random.

use super::*;
use crate::control::{
    ArenaHome, Arenas, Balance, DirectMember, Direction, ExactRule, Flow, Grant, GrantAction,
    GrantKind, HostGroup, NO_VLAN, Network, Pattern, ProgramChange, ProgramInfo, ProgramMap,
    Programs, RuleAction, Segments, SwitchAsk, SwitchRequest, VmKind, Whose, WildcardRule, backend,
    wire,
};

fn every_message() -> Vec<Message> {
    let place = RingPlace {
        offset: 4096,
        len: 8192,
    };
    let exact = ExactRule {
        flow: Flow {
            vlan_id: 5,
            proto: 6,
            host_a: [192, 0, 2, 1].into(),
            host_b: [0x20; 16].into(),
            port_a: 80,
            port_b: 40_000,
        },
        action: RuleAction::Drop,
    };
    let wildcard = WildcardRule {
        id: 7,
        matches: Pattern {
            bidirectional: true,
            source_mac: [2; 6],
            target_mac: [4; 6],
            vlan_id: NO_VLAN,
            ethertype: 0x0800,
            proto: 17,
            source: Some(Network {
                address: [10, 0, 0, 0].into(),
                mask: [255, 0, 0, 0].into(),
            }),
            target: None,
            source_ports: (53, 53),
            target_ports: (1024, 65_535),
            tos: 4,
            tos_mask: 0xfc,
            tcp_flags: 2,
            tcp_flags_mask: 18,
        },
        action: RuleAction::Count,
    };
    let pairs = vec![("read".to_owned(), 7)];
    vec![
        Message::Hello {
            min_version: 1,
            max_version: 3,
            role: Role::Agent,
            name: "agent".into(),
            live: vec![place],
            vectors: 8,
            locked_down: true,
        },
        Message::Welcome {
            version: 1,
            server: "vnplugd".into(),
            pool_id: 9,
        },
        Message::Error {
            code: 5,
            text: "syntax error".into(),
        },
        Message::List,
        Message::Devices(vec![Device {
            name: "host:eth1".into(),
            kind: "af_packet".into(),
            state: "up".into(),
            description: "eth1".into(),
            queues: 2,
            ports: 3,
            link_type: 1,
            mtu: 1500,
            speed_mbps: 10_000,
            mac: [2, 0, 0, 0, 0, 1],
            addresses: vec!["192.0.2.1/24".into(), "fe80::1/64".into()],
        }]),
        Message::Open(Open {
            device: "host:eth1@1".into(),
            ring_bytes: 1 << 20,
            snaplen: 96,
            tuning: Tuning {
                direction: Direction::Tx,
                sample: 10,
                enabled: false,
            },
            filter: FilterSpec::Expression("tcp port 80".into()),
            cluster: "ids".into(),
            balance: Balance::RoundRobin,
            reopened: true,
            label: "tcpdump[12]".into(),
            transmit_bytes: 0,
            group: "probes".into(),
            arena_bytes: 1 << 24,
            shares_wake: true,
            maps_apart: true,
            handle: 0x5eed,
            segments: Segments::Merged,
            joins: true,
            place: 7,
            program: "count".into(),
            posts: true,
        }),
        Message::Opened(Opened {
            port: 4,
            map_len: 1 << 21,
            rings: vec![place, place],
            snaplen: 96,
            link_type: 1,
            device: "host:eth1".into(),
            vector: u32::MAX,
            transmit: RingPlace::default(),
            arenas: Arenas {
                home: ArenaHome::Apart,
                memory: 77,
                map_len: 1 << 25,
                places: vec![RingPlace {
                    offset: 4096,
                    len: (1 << 24) + 4096,
                }],
            },
            apart: true,
            board: true,
            memory: 0x5eed,
        }),
        Message::Filter {
            port: 4,
            filter: FilterSpec::Program(vec![6, 0, 0, 0, 1, 0, 0, 0]),
        },
        Message::Filter {
            port: 4,
            filter: FilterSpec::All,
        },
        Message::Lend {
            port: 4,
            to: 5,
            first: 2,
        },
        Message::Tune {
            port: 4,
            tuning: Tuning::default(),
        },
        Message::AddRules {
            port: 4,
            rules: vec![Rule::Exact(exact), Rule::Wildcard(wildcard)],
        },
        Message::RemoveRule {
            port: 4,
            key: RuleKey::Exact(exact.flow),
        },
        Message::RuleDefault {
            port: 4,
            accept: true,
        },
        Message::PurgeRules {
            port: 4,
            kind: RuleKind::Wildcard,
            idle_ms: 90_000,
        },
        Message::Purged(vec![RuleKey::Wildcard(7), RuleKey::Exact(exact.flow)]),
        Message::RuleStats {
            port: 4,
            key: RuleKey::Wildcard(7),
        },
        Message::RuleCounters {
            matched: 9,
            idle_ms: 1234,
        },
        Message::Done,
        Message::Stats { port: 0 },
        Message::Counters(vec![Counted {
            kind: "port".into(),
            name: "4".into(),
            labels: vec![("filter".into(), "ip".into())],
            values: pairs,
        }]),
        Message::Note {
            port: 4,
            values: vec![("durable_packets".into(), 12)],
        },
        Message::Close { port: 4 },
        Message::Wake(vec![4, 5]),
        Message::Kick(vec![4]),
        Message::Gone {
            port: 4,
            reason: "quarantined".into(),
        },
        Message::AppGone,
        Message::Release(vec![place]),
        Message::AttachVm(VmSpec {
            name: "probe".into(),
            kind: VmKind::Uml,
            pool_bytes: 1 << 26,
            vectors: 8,
            allow: vec![Grant {
                source: "eth1".into(),
                filter: "not port 22".into(),
            }],
            owner: 77,
            groups: vec![HostGroup {
                name: "ids".into(),
                source: "eth1".into(),
                arena_bytes: 1 << 26,
            }],
            stays_for: Some(64055),
        }),
        Message::VmReady(VmReady {
            pool_path: "/dev/shm/p".into(),
            pool_len: 1 << 26,
            control_path: "/run/c".into(),
            doorbell_path: String::new(),
            arenas: vec![("/dev/shm/a".into(), 1 << 27)],
        }),
        Message::DetachVm {
            name: "probe".into(),
            owner: 77,
        },
        Message::HoldVm {
            name: "probe".into(),
            owner: 77,
            held: true,
        },
        Message::Ack { bytes: 77 },
        Message::Adopt {
            name: "probe".into(),
        },
        switch(SwitchAsk::Show { stations: false }),
        switch(SwitchAsk::Show { stations: true }),
        switch(SwitchAsk::Kick),
        switch(SwitchAsk::Set {
            text: "hub=yes".into(),
            keep: true,
        }),
        switch(SwitchAsk::Set {
            text: "age=5".into(),
            keep: false,
        }),
        Message::Revoke(Revoke {
            whose: Whose::Vm("probe".into()),
            receiving: true,
            sending: false,
        }),
        Message::Revoke(Revoke {
            whose: Whose::Channels {
                backend: "kv".into(),
                whose: "vm:probe".into(),
            },
            receiving: true,
            sending: true,
        }),
        Message::Grants(GrantRequest::Change {
            action: GrantAction::Set,
            kind: GrantKind::Send,
            text: "vm:probe=eth1".into(),
            keep: true,
        }),
        Message::Grants(GrantRequest::Change {
            action: GrantAction::Remove,
            kind: GrantKind::Use,
            text: "vm:probe=kv".into(),
            keep: false,
        }),
        Message::Programs(Programs::Change(ProgramChange::Add {
            text: "count=/etc/count.o,open=vm:*".into(),
        })),
        Message::Programs(Programs::Change(ProgramChange::Replace {
            text: "count".into(),
        })),
        Message::Programs(Programs::Change(ProgramChange::Remove {
            name: "count".into(),
        })),
        Message::Sources(SourceRequest::Add {
            text: "eth1=af_packet".into(),
            keep: false,
        }),
        Message::Sources(SourceRequest::Add {
            text: "eth2=af_packet".into(),
            keep: true,
        }),
        Message::Sources(SourceRequest::Remove {
            name: "host:eth1".into(),
        }),
        Message::Sources(SourceRequest::Reload),
        Message::Direct(Direct {
            port: 4,
            capacity: 1 << 18,
            merged: true,
        }),
        Message::Members(Members {
            slot: 2,
            generation: 8,
            is_first: true,
            others: vec![DirectMember {
                slot: 0,
                generation: 7,
                capacity: 1 << 19,
            }],
        }),
    ]
    .into_iter()
    .chain(of_backends().into_iter().map(Message::Backend))
    .chain(of_growth().into_iter().map(Message::Grow))
    .chain(of_programs().into_iter().map(Message::Programs))
    .collect()
}

fn of_programs() -> Vec<Programs> {
    vec![
        Programs::List,
        Programs::All(vec![ProgramInfo {
            name: "count".into(),
            kind: "xdp".into(),
            runs: vec!["xdp:eth1 native".into()],
            id: 77,
            maps: vec![ProgramMap {
                name: "counters".into(),
                id: 78,
                value_bytes: 8,
                entries: 256,
                constant: true,
            }],
            ports: 2,
            frames: 1 << 40,
            dropped: 5,
            aborted: 1,
        }]),
        Programs::Read {
            program: "count".into(),
            map: "counters".into(),
            first: 3,
            count: 4,
        },
        Programs::Values {
            value_bytes: 2,
            entries: 256,
            bytes: vec![1, 0, 2, 0],
        },
    ]
}

fn of_growth() -> Vec<Grow> {
    vec![
        Grow::Offer {
            name: "probe".into(),
            most_bytes: 1 << 30,
            apart: true,
        },
        Grow::Plug {
            number: 3,
            len: 1 << 21,
            readonly: true,
        },
        Grow::Plugged {
            number: 3,
            error: String::new(),
        },
        Grow::Unplug { number: 3 },
        Grow::Unplugged {
            number: 3,
            error: "the guest does not let go".into(),
        },
    ]
}

fn of_backends() -> Vec<Backend> {
    vec![
        Backend::Hangup {
            channel: 1,
            reason: "enough".into(),
        },
        Backend::Register(backend::Register {
            id: 85,
            name: "kv".into(),
            version: 2,
            events_in: 4,
            events_out: 5,
        }),
        Backend::List,
        Backend::Listed(vec![backend::BackendInfo {
            id: 85,
            name: "kv".into(),
            is_there: true,
            version: 2,
            channels: 3,
        }]),
        Backend::Connect(backend::Connect {
            id: 0,
            name: "kv".into(),
            version: 1,
            label: "probe[7]".into(),
        }),
        Backend::Connected(backend::Connected {
            channel: 9,
            id: 85,
            name: "kv".into(),
            version: 2,
            events_in: 4,
            events_out: 5,
        }),
        Backend::Joined(backend::Joined {
            channel: 9,
            who: "vm:probe".into(),
            label: "probe[7]".into(),
            version: 1,
        }),
        Backend::Say {
            channel: 9,
            bytes: vec![0, 255, 7],
        },
        Backend::Took {
            channel: 9,
            cost: 259,
        },
        Backend::Events {
            channel: 9,
            totals: vec![0, 1, u64::MAX],
        },
        Backend::Region {
            channel: 9,
            bytes: 1 << 20,
            writable: true,
        },
        Backend::Mapped(backend::Mapped {
            channel: 9,
            region: 4,
            memory: 77,
            offset: 4096,
            len: 1 << 20,
            writable: true,
        }),
        Backend::Withdraw {
            channel: 9,
            region: 4,
            within_ms: 2000,
        },
        Backend::Withdrawn { released: true },
    ]
}

fn frame(bytes: &[u8]) -> (Header, Vec<u8>) {
    let mut framer = wire::Framer::strict(wire::MAX_PAYLOAD);
    framer.push(bytes);
    framer.next_message().unwrap().unwrap()
}

#[test]
fn every_message_round_trips() {
    for message in every_message() {
        let frame = frame(&message.encode(3, 5));
        assert_eq!((frame.0.id, frame.0.app), (3, 5));
        assert_eq!(Message::from_frame(&frame).as_ref(), Ok(&message));
    }
}

#[test]
fn every_cut_of_every_payload_is_refused_or_read_without_panic() {
    for message in every_message() {
        let (header, payload) = frame(&message.encode(1, 0));
        for cut in 0..payload.len() {
            let refused = Message::decode(&header, &payload[..cut]).is_err();
            // What was appended later is missing in messages of earlier peers: a Hello's number
            // of vectors and its lock, a VM's owner, the ring that transmits, a group, a shared wake-up, a handle, how
            // super-frames come, a VM's groups, whether it stays.
            let left = payload.len() - cut;
            let earlier = match header.kind {
                1 => matches!(left, 1 | 5),
                // Whether it posts, before it the program (9 bytes), a place on the board, taking part, how super-frames come, the handle,
                // records apart, the shared wake-up, the group, the ring that transmits.
                6 => matches!(left, 1 | 10 | 14 | 15 | 16 | 24 | 25 | 26 | 44 | 52),
                7 => matches!(left, 8 | 9 | 10 | 47 | 55 | 63),
                17 => matches!(left, 4 | 31 | 39),
                18 => left == 26,
                19 => left == 8,
                57 => left == 1,
                _ => false,
            };
            assert_eq!(refused, !earlier, "{message:?} at {cut}");
        }
        let longer = [&payload[..], b"fields of a later version"].concat();
        assert_eq!(Message::decode(&header, &longer).as_ref(), Ok(&message));
    }
}

#[test]
fn an_agent_that_says_nothing_about_vectors_listens_to_none() {
    let (header, payload) = frame(&every_message()[0].encode(1, 0));
    let earlier = Message::decode(&header, &payload[..payload.len() - 5]);
    let Ok(Message::Hello {
        live,
        vectors,
        locked_down,
        ..
    }) = earlier
    else {
        panic!("{earlier:?}");
    };
    assert_eq!((live.len(), vectors, locked_down), (1, 0, false));
}

#[test]
fn random_payloads_never_panic() {
    let mut state = vnplug_frame::witness::seed("random payloads");
    for round in 0..200_000_u32 {
        let payload: Vec<u8> = (0..round % 64)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Small numbers make plausible counts and lengths.
                (state as u8) >> (state >> 8 & 7)
            })
            .collect();
        let kind = (round % 64) as u8;
        let header = Header {
            version: 1,
            kind,
            len: payload.len() as u32,
            id: 1,
            app: 0,
        };
        let _ = Message::decode(&header, &payload);
    }
}

#[test]
fn an_unknown_version_is_refused_but_a_hello_may_have_any() {
    for message in every_message() {
        let (mut header, payload) = frame(&message.encode(1, 0));
        header.version = 9;
        let refused = Message::decode(&header, &payload) == Err(Malformed::Version(9));
        assert_eq!(refused, header.kind != 1);
    }
}

fn switch(ask: SwitchAsk) -> Message {
    Message::Switch(SwitchRequest {
        name: "lan0".into(),
        port: 3,
        ask,
    })
}
