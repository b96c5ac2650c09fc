//! A request that finds a bug costs its connection, and nobody else anything.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Message, Role, VERSION};

use clap::Parser;

use super::*;
use crate::config::Arguments;
use crate::hub::Limits;
use vnplug_os::event;
use vnplug_os::socket::listen;

/// Who says this name in its Hello makes its request panic.
pub(super) const BREAKS: &str = "a client that finds a bug";

fn hello(socket: &Path, name: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let hello = Message::Hello {
        min_version: VERSION,
        max_version: VERSION,
        role: Role::Client,
        name: name.into(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    };
    stream.write_all(&hello.encode(1, 0)).unwrap();
    stream
}

fn answer(stream: &mut UnixStream) -> Option<Message> {
    let mut framer = Framer::strict(MAX_PAYLOAD);
    let mut bytes = [0; 4096];
    loop {
        if let Some(frame) = framer.next_message().unwrap() {
            return Some(Message::from_frame(&frame).unwrap());
        }
        match stream.read(&mut bytes).unwrap() {
            0 => return None,
            len => framer.push(&bytes[..len]),
        }
    }
}

#[test]
fn a_panic_costs_the_connection_that_led_to_it_and_the_others_are_served() {
    let dir = std::env::temp_dir().join(format!("vnplug-control-{}", std::process::id()));
    std::fs::create_dir_all(dir.join("vms")).unwrap();
    let socket = dir.join("s");
    let listener = listen(&socket, 0o600).unwrap();
    let ends = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let termination = Arc::clone(&ends);
    let dirs = Dirs {
        state: dir.clone(),
        pools: dir.clone(),
        pool_bytes: 1 << 20,
    };
    let serves = std::thread::spawn(move || {
        let setup = Setup {
            config: Config::load(Arguments::parse_from(["vnplugd"])).unwrap(),
            read_again: Arc::new(|| Err("there is no file".into())),
            kept_sources: KeptSources::default(),
            patterns: Vec::new(),
            user: None,
            seats: SeatOffice::default(),
            entrance: Arc::default(),
            kept: Arc::default(),
            watch: Watch::default(),
            switches: Switches::default(),
            grants: KeptGrants::default(),
            maker: None,
            hub: Hub::new(Limits {
                ports: 10,
                ports_each: 10,
                user_bytes: 1 << 20,
                ring_bytes: 1 << 16,
                max_ring_bytes: 1 << 20,
            }),
            policy: Policy::new(0),
            dirs,
            compiler: Compiler::new("/nonexistent".into()),
            jit: Jit::off(),
            awake: None,
            listener,
            termination,
            pulse: Arc::new(Pulse::new("control", "serving")),
        };
        Control::new(setup).unwrap().run()
    });
    let mut other = hello(&socket, "another client");
    assert!(matches!(answer(&mut other), Some(Message::Welcome { .. })));
    for _ in 0..3 {
        assert!(
            answer(&mut hello(&socket, BREAKS)).is_none(),
            "it is cut off"
        );
    }
    other.write_all(&Message::List.encode(2, 0)).unwrap();
    assert!(matches!(answer(&mut other), Some(Message::Devices(_))));
    assert!(matches!(
        answer(&mut hello(&socket, "a later client")),
        Some(Message::Welcome { .. })
    ));
    event::ring(&ends);
    serves.join().unwrap().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
