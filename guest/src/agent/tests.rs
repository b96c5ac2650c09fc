//! When the agent takes the host for alive, without any host.

use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vnplug_ring::control::{Header, Message, VERSION, code};
use vnplug_testing::{PATIENCE, TestDir};

use super::accept::listen;
use super::phase::Phase;
use super::serve::Agent;
use super::{AgentConfig, AgentDevice, Hears, Standing};

/// An agent that knows its host, and has no channel.
fn up(name: &str) -> Agent {
    let name = format!("vnplug-agent-{name}-{}", std::process::id());
    let config = AgentConfig {
        socket: std::env::temp_dir().join(name),
        group: None,
        device: AgentDevice::default(),
        doorbell: false,
        stop: None,
        hears: None,
    };
    let mut agent = Agent::new(config).unwrap();
    agent.phase = Phase::Up;
    agent
}

fn header(id: u32) -> Header {
    Header {
        version: VERSION,
        kind: 0,
        len: 0,
        id,
        app: 0,
    }
}

#[test]
fn a_host_that_says_anything_lives() {
    let mut agent = up("life");
    for _ in 0..20 {
        agent.ask();
        agent.host_says(&header(0), Message::Wake(Vec::new()));
    }
    assert_eq!(agent.phase, Phase::Up);
    assert!(agent.probes.len() < 20);
    agent.ask();
    assert_eq!(agent.phase, Phase::Up);
    agent.ask();
    assert_eq!(agent.phase, Phase::Greeting);
}

#[test]
fn a_late_answer_counts_and_a_refusal_says_that_the_host_is_another() {
    let mut agent = up("late");
    agent.ask();
    for _ in 0..20 {
        let first = agent.probes[0];
        agent.ask();
        agent.host_says(&header(first), Message::Devices(Vec::new()));
        assert_eq!((agent.phase, agent.missed), (Phase::Up, 0));
    }
    let (code, text) = (code::PROTOCOL, "say Hello first".into());
    let first = agent.probes[0];
    agent.host_says(&header(first), Message::Error { code, text });
    assert_eq!(agent.phase, Phase::Greeting);
    assert!(agent.probes.is_empty());
}

#[test]
fn how_it_stands_is_told_at_once_and_when_that_changes() {
    let mut agent = up("stands");
    let told = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&told);
    let hear = move |standing| own.lock().unwrap().push(standing);
    agent.config.hears = Some(Hears(Box::new(hear)));
    for (phase, standing) in [
        (Phase::Searching, Standing::Waiting),
        (Phase::Up, Standing::Connected),
        (Phase::Greeting, Standing::Waiting),
    ] {
        agent.phase = phase;
        agent.tell_standing();
        assert_eq!(std::mem::take(&mut *told.lock().unwrap()), [standing]);
        agent.tell_standing();
        assert_eq!(*told.lock().unwrap(), []);
    }
}

#[test]
fn the_socket_of_an_agent_that_hangs_is_not_waited_for_and_not_taken() {
    let dir = TestDir::new("agent-hung");
    let path = dir.path("socket");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let address = SocketAddrUnix::new(&path).unwrap();
    let dial = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address).map(|()| socket)
    };
    let waiting: Vec<_> = std::iter::from_fn(|| dial().ok()).take(16).collect();
    // There is no room for one more.
    assert_eq!(dial().unwrap_err(), Errno::AGAIN);
    let (tell, told) = mpsc::channel();
    let own = path.clone();
    let listens = thread::spawn(move || tell.send(listen(&own, None).map(drop)));
    let refused = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(
        refused.to_string().contains("another agent or daemon"),
        "{refused}"
    );
    listens.join().unwrap().unwrap();
    // The control: that of one which has ended is taken.
    drop((listener, waiting));
    listen(&path, None).unwrap();
}
