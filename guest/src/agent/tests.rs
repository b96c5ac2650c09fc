//! When the agent takes the host for alive, without any host.

use std::sync::{Arc, Mutex};

use vnplug_ring::control::{Header, Message, VERSION, code};

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
