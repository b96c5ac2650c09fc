//! The bytes in `docs/control-protocol.md` are those that this crate writes and reads.

use std::path::Path;

use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{
    Arenas, Direction, FilterSpec, Message, Open, Opened, RingPlace, Role, Tuning, VmKind, VmSpec,
    code,
};

/// What the document shows: heading of the block, message, request number, application.
fn examples() -> Vec<(&'static str, Message, u32, u32)> {
    let open = Open {
        ring_bytes: 1 << 20,
        snaplen: 128,
        tuning: Tuning {
            direction: Direction::Rx,
            ..Tuning::default()
        },
        filter: FilterSpec::Expression("udp port 53".into()),
        label: "probe[7]".into(),
        ..Open::new("host:eth1")
    };
    let opened = Opened {
        port: 4,
        map_len: 1_052_672,
        rings: vec![RingPlace {
            offset: 0,
            len: 1_052_672,
        }],
        snaplen: 128,
        link_type: 1,
        device: "host:eth1".into(),
        vector: u32::MAX,
        transmit: RingPlace::default(),
        arenas: Arenas::default(),
        apart: true,
        board: false,
        memory: 0,
    };
    let hello = Message::Hello {
        min_version: 1,
        max_version: 1,
        role: Role::Client,
        name: "probe".into(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    };
    let welcome = Message::Welcome {
        version: 1,
        server: "vnplugd 0.1.0".into(),
        pool_id: 0,
    };
    let refused = Message::Error {
        code: code::FILTER,
        text: "syntax error".into(),
    };
    let paused = Tuning {
        direction: Direction::Both,
        sample: 10,
        enabled: false,
    };
    let attach = VmSpec {
        name: "probe".into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 26,
        vectors: 0,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    vec![
        ("Hello, request 1", hello, 1, 0),
        ("Welcome, its answer", welcome, 1, 0),
        ("Open, request 2", Message::Open(open), 2, 0),
        ("Opened, its answer", Message::Opened(opened), 2, 0),
        ("Error, another answer", refused, 2, 0),
        (
            "Close of port 4, request 3 of application 9",
            Message::Close { port: 4 },
            3,
            9,
        ),
        (
            "Tune of port 4, request 4",
            Message::Tune {
                port: 4,
                tuning: paused,
            },
            4,
            0,
        ),
        ("Wake for ports 4 and 5", Message::Wake(vec![4, 5]), 0, 0),
        ("AttachVm, request 5", Message::AttachVm(attach), 5, 0),
        ("Ack of 2048 bytes", Message::Ack { bytes: 2048 }, 0, 0),
    ]
}

fn hex(bytes: &[u8]) -> String {
    let line = |bytes: &[u8]| {
        let pairs: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        pairs.join(" ") + "\n"
    };
    bytes.chunks(24).map(line).collect()
}

#[test]
fn the_documents_bytes_are_the_codes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control-protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let examples = examples();
    let expected: String = examples
        .iter()
        .map(|(title, message, id, app)| {
            let bytes = hex(&message.encode(*id, *app));
            format!("{title}:\n\n```hex\n{bytes}```\n\n")
        })
        .collect();
    assert!(
        document.contains(expected.trim_end()),
        "the document should say:\n\n{expected}"
    );
    assert_eq!(document.matches("```hex").count(), examples.len());
}

#[test]
fn the_documents_bytes_are_read_back() {
    for (title, message, id, app) in examples() {
        let mut framer = Framer::strict(MAX_PAYLOAD);
        framer.push(&message.encode(id, app));
        let frame = framer.next_message().unwrap().unwrap();
        assert_eq!((frame.0.id, frame.0.app), (id, app), "{title}");
        assert_eq!(Message::from_frame(&frame), Ok(message), "{title}");
    }
}
