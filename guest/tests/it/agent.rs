//! The agent between applications and a server, over a socket pair as the channel and a memory
//! file as the pool: everything but the virtual machine.

mod strangers;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use vnplug::agent::{AgentConfig, AgentDevice, Hears, Standing, run};
use vnplug::{Bundle, Client, Error, FilterSpec, Next, Port, PortOptions, Ready};
use vnplug_ring::control::{Message, code};
use vnplug_ring::layout::flags;
use vnplug_testing::{Deadline, PATIENCE, eventually};

use crate::support::{Dir, Server};

/// A guest: its pool, its channel, its agent.
struct Guest {
    dir: Dir,
    server: Server,
    pool: OwnedFd,
    channel: UnixStream,
    agent: Option<(OwnedFd, JoinHandle<Result<(), Error>>)>,
    /// How it stood, as it told.
    stands: Arc<Mutex<Vec<Standing>>>,
}

impl Guest {
    fn new(name: &str) -> Self {
        let dir = Dir::new(name);
        let pool = memfd_create("test-pool", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&pool, POOL).unwrap();
        let (host, channel) = UnixStream::pair().unwrap();
        let server = Server::on_channel(host, &pool, POOL, 7);
        let mut guest = Self {
            dir,
            server,
            pool,
            channel,
            agent: None,
            stands: Arc::default(),
        };
        guest.start();
        guest
    }

    fn start(&mut self) {
        let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let config = AgentConfig {
            socket: self.socket(),
            group: None,
            device: AgentDevice::Given {
                memory: self.pool.try_clone().unwrap(),
                channel: self.channel.try_clone().unwrap().into(),
            },
            stop: Some(stopped),
            hears: Some(Hears(Box::new({
                let stands = Arc::clone(&self.stands);
                move |standing| stands.lock().unwrap().push(standing)
            }))),
            ..AgentConfig::default()
        };
        self.agent = Some((stop, std::thread::spawn(|| run(config))));
        eventually("the agent listens", || {
            Client::connect_to(&self.socket()).is_ok()
        });
    }

    fn stop(&mut self) {
        let (stop, thread) = self.agent.take().unwrap();
        drop(stop);
        thread.join().unwrap().unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.dir.socket()
    }

    fn options(&self) -> PortOptions {
        PortOptions::new("host:eth0").socket(self.socket())
    }

    /// Opens a port as soon as the agent is connected.
    fn open(&self) -> Port {
        let mut port = None;
        eventually("the host can be reached", || {
            match self.options().open() {
                Ok(opened) => port = Some(opened),
                Err(Error::Refused {
                    code: code::UNAVAILABLE,
                    ..
                }) => {}
                Err(error) => panic!("{error}"),
            }
            port.is_some()
        });
        port.unwrap()
    }

    fn has_said(&self, what: impl Fn(u32, &Message) -> bool) -> bool {
        let shared = self.server.lock();
        shared
            .requests
            .iter()
            .any(|(app, message)| what(*app, message))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.agent.is_some() {
            self.stop();
        }
    }
}

fn receive(port: &mut Port) -> (Vec<u8>, u16) {
    let deadline = Deadline::new("a packet comes");
    loop {
        deadline.check();
        match port.next().unwrap() {
            Next::Packet(packet) => return (packet.bytes.to_vec(), packet.meta.flags),
            // Longer than the limit: who is not woken fails.
            Next::Nothing => {
                port.wait(Some(2 * PATIENCE)).unwrap();
            }
            Next::Ended => panic!("ended"),
        }
    }
}

#[test]
fn an_application_reads_the_pool_and_is_woken_over_the_channel() {
    let guest = Guest::new("agent-relay");
    let mut port = guest.open();
    for round in 0..100_u32 {
        assert!(matches!(port.next(), Ok(Next::Nothing)));
        guest.server.send(port.number(), 0, &[&round.to_le_bytes()]);
        assert_eq!(receive(&mut port).0, round.to_le_bytes());
    }
    port.set_filter(FilterSpec::Expression("tcp".into()))
        .unwrap();
    assert!(matches!(
        port.set_filter(FilterSpec::Expression("bad".into())),
        Err(Error::Refused {
            code: code::FILTER,
            ..
        })
    ));
    assert_eq!(port.stats().unwrap().host.unwrap().values[0].1, 7);
    let mut client = Client::connect_to(&guest.socket()).unwrap();
    assert_eq!(client.devices().unwrap()[0].name, "host:eth0");
    assert!(client.server().starts_with("vnplug agent"));
}

#[test]
fn an_agent_tells_that_its_host_answers() {
    let guest = Guest::new("agent-stands");
    let port = guest.open();
    let stands = [Standing::Waiting, Standing::Connected];
    assert_eq!(*guest.stands.lock().unwrap(), stands);
    drop(port);
}

#[test]
fn of_many_ports_those_are_told_of_that_were_woken() {
    let guest = Guest::new("agent-bundle");
    drop(guest.open());
    let mut bundle = Bundle::new().unwrap();
    for _ in 0..40 {
        bundle.open(guest.options()).unwrap();
    }
    for at in [7, 30, 7, 0, 39] {
        let nothing = bundle.wait(Some(Duration::from_millis(1)));
        assert_eq!((nothing, bundle.next_ready()), (Ok(Ready::TimedOut), None));
        let port = bundle.ports()[at].number();
        guest.server.send(port, 0, &[b"news"]);
        assert_eq!(bundle.wait(Some(PATIENCE)), Ok(Ready::Now));
        assert_eq!((bundle.next_ready(), bundle.next_ready()), (Some(at), None));
        assert_eq!(receive(&mut bundle.ports()[at]).0, b"news");
    }
}

#[test]
fn a_port_with_a_doorbell_nobody_hears_is_late_but_not_asleep() {
    let guest = Guest::new("agent-blind");
    guest.server.lock().vector = Some(0);
    let mut port = guest.open();
    for round in 0..10_u32 {
        assert!(matches!(port.next(), Ok(Next::Nothing)));
        guest.server.send(port.number(), 0, &[&round.to_le_bytes()]);
        assert_eq!(receive(&mut port).0, round.to_le_bytes());
    }
}

#[test]
fn applications_have_numbers_and_ports_of_their_own() {
    let guest = Guest::new("agent-many");
    let mut ports: Vec<Port> = (0..8).map(|_| guest.open()).collect();
    for port in &mut ports {
        assert!(matches!(port.next(), Ok(Next::Nothing)));
    }
    for port in &ports {
        let number = port.number();
        guest.server.send(number, 0, &[&number.to_le_bytes()]);
    }
    for port in &mut ports {
        let number = port.number();
        assert_eq!(receive(port).0, number.to_le_bytes());
    }
    let mut apps: Vec<u32> = guest
        .server
        .lock()
        .requests
        .iter()
        .filter(|(_, message)| matches!(message, Message::Open(_)))
        .map(|(app, _)| *app)
        .collect();
    apps.dedup();
    assert!(
        apps.len() == 8 && apps.iter().all(|&app| app > 0),
        "{apps:?}"
    );
}

#[test]
fn garbage_on_the_channel_is_skipped() {
    let guest = Guest::new("agent-garbage");
    let mut port = guest.open();
    assert!(matches!(port.next(), Ok(Next::Nothing)));
    guest
        .server
        .garbage(b"VNPC some console noise \xff\x00 VNP");
    guest.server.garbage(&[0xfe; 5000]);
    guest.server.send(port.number(), 0, &[b"after the noise"]);
    assert_eq!(receive(&mut port).0, b"after the noise");
    assert_eq!(port.counts().gaps, 0);
}

#[test]
fn an_application_that_dies_frees_its_ports_and_places() {
    let guest = Guest::new("agent-app-dies");
    let (port, other) = (guest.open(), guest.open());
    let (number, other_number) = (port.number(), other.number());
    drop(port);
    eventually("its port is closed", || !guest.server.is_open(number));
    eventually("its place is released", || {
        guest
            .has_said(|_, message| matches!(message, Message::Release(places) if places.len() == 1))
    });
    assert!(guest.server.is_open(other_number));
}

#[test]
fn ports_survive_a_restart_of_the_agent() {
    let mut guest = Guest::new("agent-restart");
    let mut port = guest.open();
    guest.server.send(port.number(), 0, &[b"before"]);
    guest.stop();
    assert_eq!(receive(&mut port), (b"before".to_vec(), 0));
    assert!(matches!(port.next(), Ok(Next::Nothing)));
    guest.start();
    eventually("the port is reopened", || {
        port.wait(Some(Duration::from_millis(50))).unwrap();
        assert!(matches!(port.next(), Ok(Next::Nothing)));
        !port.is_away()
    });
    guest.server.send(port.number(), 0, &[b"after"]);
    assert_eq!(receive(&mut port), (b"after".to_vec(), flags::GAP));
}

#[test]
fn an_application_reads_on_where_its_machine_went_with_its_memory() {
    let guest = Guest::new("agent-moved");
    let mut port = guest.open();
    let greetings = || {
        let shared = guest.server.lock();
        let requests = shared.requests.iter();
        let hellos = requests.filter_map(|(_, message)| match message {
            Message::Hello { live, .. } => Some(live.clone()),
            _ => None,
        });
        hellos.collect::<Vec<_>>()
    };
    assert_eq!(greetings(), [Vec::new()]);
    guest.server.become_another(8);
    let stranger = Message::Gone {
        port: 0,
        reason: "say Hello first".into(),
    };
    guest.server.garbage(&stranger.encode(0, 0));
    eventually("the port is reopened", || {
        port.wait(Some(Duration::from_millis(50))).unwrap();
        assert!(matches!(port.next(), Ok(Next::Nothing)));
        port.stats().is_ok_and(|stats| stats.own.reopened == 1)
    });
    guest.server.send(port.number(), 0, &[b"there"]);
    assert_eq!(receive(&mut port), (b"there".to_vec(), flags::GAP));
    // What it still mapped of the pool was named.
    let greetings = greetings();
    assert!(
        greetings.len() == 2 && !greetings[1].is_empty(),
        "{greetings:?}"
    );
}

#[test]
fn a_host_that_does_not_answer_is_unavailable_and_not_a_hang() {
    let guest = Guest::new("agent-mute");
    drop(guest.open());
    let mut guest = guest;
    guest.stop();
    guest.server.lock().mute = true;
    guest.start();
    let start = Instant::now();
    let refused = guest.options().open();
    assert!(
        matches!(
            refused,
            Err(Error::Refused {
                code: code::UNAVAILABLE,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(start.elapsed() < Duration::from_secs(30));
    guest.server.lock().mute = false;
    // Hello is said again, without anybody asking.
    drop(guest.open());
}

#[test]
fn a_host_that_closes_a_port_is_relayed_and_the_place_kept_until_unmapped() {
    let guest = Guest::new("agent-gone");
    let mut port = guest.open();
    let number = port.number();
    assert!(matches!(port.next(), Ok(Next::Nothing)));
    guest.server.send(number, 0, &[b"last"]);
    guest.server.lock().refuse = Some((code::NOT_FOUND, "no such device".into()));
    guest.server.gone(number, "eth0 was removed");
    std::thread::sleep(Duration::from_millis(20));
    let released = || {
        guest.has_said(
            |_, message| matches!(message, Message::Release(places) if !places.is_empty()),
        )
    };
    assert!(!released());
    assert_eq!(receive(&mut port).0, b"last");
    let deadline = Deadline::new("the port ends");
    let error = loop {
        deadline.check();
        match port.next() {
            Ok(_) => port.wait(Some(Duration::from_secs(1))).unwrap(),
            Err(error) => break error.to_string(),
        };
    };
    assert!(error.contains("eth0 was removed"), "{error}");
    eventually("its place is released", released);
}

const POOL: u64 = 4 << 20;
