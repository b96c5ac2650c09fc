//! What applications may ask, and how much of it: each is a stranger to the agent, and costs the others nothing.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vnplug::{Client, Error, Next, VmKind, VmSpec};
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Message, Role, code};
use vnplug_testing::eventually;

use super::{Guest, receive};

/// The first message of a connection.
fn hello(role: Role) -> Vec<u8> {
    let hello = Message::Hello {
        min_version: 1,
        max_version: 1,
        role,
        name: "x".into(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    };
    hello.encode(1, 0)
}

#[test]
fn what_only_operators_may_is_refused_by_the_agent_itself() {
    let guest = Guest::new("agent-denied");
    let mut client = Client::connect_to(&guest.socket()).unwrap();
    let spec = VmSpec {
        name: "vm".into(),
        kind: VmKind::Uml,
        pool_bytes: 0,
        vectors: 0,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    let denied = Err(Error::Refused {
        code: code::DENIED,
        text: "only on the host: a guest may not attach virtual machines".into(),
    });
    assert_eq!(client.attach_vm(spec).map(|_| ()), denied);
    assert_eq!(client.detach_vm("vm"), denied);
    assert!(!guest.has_said(|_, message| matches!(message, Message::DetachVm { .. })));
}

#[test]
fn a_request_that_does_not_belong_here_closes_only_that_connection() {
    let guest = Guest::new("agent-hostile");
    let mut port = guest.open();
    let bad = [
        b"GET / HTTP/1.0\r\n\r\n-----------------".to_vec(),
        hello(Role::Agent),
        Message::List.encode(1, 0),
        [hello(Role::Client), Message::AppGone.encode(2, 0)].concat(),
        [
            hello(Role::Client),
            Message::Release(Vec::new()).encode(2, 0),
        ]
        .concat(),
        [hello(Role::Client), Message::List.encode(0, 0)].concat(),
        [hello(Role::Client), Message::List.encode(2, 9)].concat(),
    ];
    for bytes in bad {
        let mut stream = UnixStream::connect(guest.socket()).unwrap();
        stream.write_all(&bytes).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let closed = std::io::copy(&mut stream, &mut std::io::sink());
        let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(
            closed.is_ok() || closed.as_ref().is_err_and(reset),
            "{closed:?}"
        );
    }
    assert!(matches!(port.next(), Ok(Next::Nothing)));
    guest.server.send(port.number(), 0, &[b"still here"]);
    assert_eq!(receive(&mut port).0, b"still here");
}

#[test]
fn an_application_that_reads_no_answers_is_not_served_on_until_it_does() {
    let guest = Guest::new("agent-backlog");
    drop(guest.open());
    let mut stream = UnixStream::connect(guest.socket()).unwrap();
    stream.write_all(&hello(Role::Client)).unwrap();
    stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let request = Message::DetachVm {
        name: "x".into(),
        owner: 0,
    }
    .encode(2, 0);
    let stuck = (0..100_000).find_map(|sent| Some((sent, stream.write_all(&request).err()?)));
    let (sent, error) = stuck.expect("the agent reads no more");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    // Others are served, and so is this one when it reads.
    drop(guest.open());
    let mut framer = Framer::strict(MAX_PAYLOAD);
    let (mut answers, mut bytes) = (0, [0; 4096]);
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    // The one to Hello, too.
    while answers < sent + 1 {
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0, "closed after {answers}");
        framer.push(&bytes[..count]);
        while framer.next_message().unwrap().is_some() {
            answers += 1;
        }
    }
}

/// An application that said Hello and reads nothing by itself.
fn greeted(guest: &Guest) -> UnixStream {
    let mut stream = UnixStream::connect(guest.socket()).unwrap();
    let limit = Some(Duration::from_secs(60));
    stream.set_read_timeout(limit).unwrap();
    stream.set_write_timeout(limit).unwrap();
    stream.write_all(&hello(Role::Client)).unwrap();
    stream
}

#[test]
fn requests_beyond_what_may_be_under_way_wait_and_are_answered_in_order() {
    let guest = Guest::new("agent-pipeline");
    drop(guest.open());
    let mut stream = greeted(&guest);
    let mut answers = stream.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut framer = Framer::strict(MAX_PAYLOAD);
        let mut ids = Vec::new();
        let mut bytes = [0; 4096];
        while ids.len() < 1001 {
            let count = answers.read(&mut bytes).unwrap();
            assert!(count > 0, "closed after {}", ids.len());
            framer.push(&bytes[..count]);
            while let Some(frame) = framer.next_message().unwrap() {
                let message = Message::from_frame(&frame).unwrap();
                assert!(!matches!(message, Message::Error { .. }), "{message:?}");
                ids.push(frame.0.id);
            }
        }
        ids
    });
    let requests: Vec<u8> = (2..=1001)
        .flat_map(|id| Message::List.encode(id, 0))
        .collect();
    stream.write_all(&requests).unwrap();
    assert_eq!(reader.join().unwrap(), (1..=1001).collect::<Vec<u32>>());
}

#[test]
fn an_application_whose_requests_are_not_answered_is_not_read_on() {
    let guest = Guest::new("agent-busy");
    drop(guest.open());
    guest.server.lock().mute = true;
    let mut stream = greeted(&guest);
    stream
        .write_all(&Message::Stats { port: 9 }.encode(2, 0).repeat(300))
        .unwrap();
    let relayed = || {
        let is_stats = |(_, message): &&(u32, Message)| matches!(message, Message::Stats { .. });
        guest.server.lock().requests.iter().filter(is_stats).count()
    };
    eventually("some are relayed", || relayed() > 0);
    std::thread::sleep(Duration::from_millis(100));
    assert!(relayed() <= 64, "{}", relayed());
    // It leaves, and others are served.
    drop(stream);
    guest.server.lock().mute = false;
    drop(guest.open());
    assert!(relayed() <= 64, "{}", relayed());
}

#[test]
fn the_host_is_not_told_about_applications_it_never_heard_of() {
    let guest = Guest::new("agent-passers-by");
    drop(guest.open());
    let farewells = || {
        let is_gone = |(_, message): &&(u32, Message)| matches!(message, Message::AppGone);
        guest.server.lock().requests.iter().filter(is_gone).count()
    };
    eventually("the host is told about the port's", || farewells() == 1);
    for _ in 0..300 {
        drop(greeted(&guest));
    }
    drop(guest.open());
    eventually("the host is told about the port's", || farewells() >= 2);
    assert_eq!(farewells(), 2);
}

/// A socket whose close takes so long, and its peer, which reads nothing.
fn lingering(time: Duration) -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(time)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket.into(), peer)
}

#[test]
fn a_descriptor_that_blocks_who_drops_it_costs_its_application_only() {
    let guest = Guest::new("agent-bomb");
    let _port = guest.open();
    // The control.
    let (short, _peer) = lingering(Duration::from_secs(1));
    let begun = Instant::now();
    drop(short);
    assert!(begun.elapsed() > Duration::from_millis(900));

    let mut peers = Vec::new();
    for _ in 0..3 {
        let application = UnixStream::connect(guest.socket()).unwrap();
        let (bomb, peer) = lingering(Duration::from_secs(60));
        crate::support::write_with_fds(&application, b"V", &[bomb]);
        peers.push(peer);
        // Its connection ends when that is closed; the others are served all the time.
        let begun = Instant::now();
        let mut other = Client::connect_to(&guest.socket()).unwrap();
        assert_eq!(other.devices().unwrap().len(), 1);
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
    }
}
