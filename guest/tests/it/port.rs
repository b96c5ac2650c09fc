//! A port against a server under the test's control.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Dir, Server};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vnplug::{
    Client, Error, FilterSpec, Next, Port, PortOptions, Ready, VmKind, VmSpec, Waiting, flags,
};
use vnplug_ring::control::{Message, code};
use vnplug_ring::layout::Life;
use vnplug_testing::{Deadline, eventually};

fn open(server: &Server) -> Port {
    PortOptions::new("host:eth0")
        .socket(&server.path)
        .open()
        .unwrap()
}

fn take(port: &mut Port) -> Option<Vec<u8>> {
    match port.next().unwrap() {
        Next::Packet(packet) => Some(packet.bytes.to_vec()),
        Next::Nothing => None,
        Next::Ended => panic!("ended"),
    }
}

fn readable(port: &Port, ms: i64) -> bool {
    let time = Timespec {
        tv_sec: ms / 1000,
        tv_nsec: ms % 1000 * 1_000_000,
    };
    poll(
        &mut [PollFd::from_borrowed_fd(port.fd(), PollFlags::IN)],
        Some(&time),
    )
    .unwrap()
        == 1
}

/// Drains the port as an application in an event loop does, until `count` packets came.
fn collect(port: &mut Port, count: usize) -> Vec<(Vec<u8>, u16)> {
    let deadline = Deadline::new(format!("{count} packets come"));
    let mut got = Vec::new();
    while got.len() < count {
        deadline.check_seen(&got.len());
        match port.next().unwrap() {
            Next::Packet(packet) => got.push((packet.bytes.to_vec(), packet.meta.flags)),
            Next::Nothing => {
                port.wait(Some(Duration::from_secs(1))).unwrap();
            }
            Next::Ended => panic!("ended"),
        }
    }
    got
}

#[test]
fn packets_arrive_in_order_and_nothing_is_not_an_end() {
    let dir = Dir::new("order");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    assert_eq!(
        (port.device(), port.link_type(), port.snaplen()),
        ("host:eth0", 1, 2048)
    );
    assert_eq!(take(&mut port), None);
    server.send(1, 0, &[b"one", b"two"]);
    assert_eq!(take(&mut port).unwrap(), b"one");
    assert_eq!(take(&mut port).unwrap(), b"two");
    assert_eq!(take(&mut port), None);
    let counts = port.counts();
    assert_eq!((counts.received, counts.bytes, counts.lost), (2, 6, 0));
}

#[test]
fn the_descriptor_is_readable_exactly_when_there_is_something() {
    let dir = Dir::new("fd");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    for round in 0..100_u32 {
        assert_eq!(take(&mut port), None);
        assert!(!readable(&port, 0), "round {round}");
        server.send(1, 0, &[&round.to_le_bytes()]);
        assert!(readable(&port, 1000), "round {round}");
        assert_eq!(take(&mut port).unwrap(), round.to_le_bytes());
    }
}

#[test]
fn a_settled_descriptor_tells_the_truth_while_the_last_packet_is_lent() {
    let dir = Dir::new("settle");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    eventually("the port is open", || server.is_open(1));
    assert!(!port.settle().unwrap());
    for round in 0..20_u8 {
        server.send(1, 0, &[&[round], &[round, 1]]);
        assert!(readable(&port, 20_000));
        assert_eq!(take(&mut port), Some(vec![round]));
        // One is unread: readable, and it stays so.
        assert_eq!(port.unread().map(|(_, unread)| unread).sum::<u64>(), 1);
        assert!(port.settle().unwrap() && port.settle().unwrap());
        assert!(readable(&port, 0));
        assert_eq!(take(&mut port), Some(vec![round, 1]));
        // None is: not readable, and the next one rings, without a call of `next` in between.
        assert!(!port.settle().unwrap() && !port.settle().unwrap());
        assert!(!readable(&port, 20));
    }
    // A reader that does not settle finds everything as before.
    assert_eq!(take(&mut port), None);
    server.send(1, 0, &[b"x"]);
    assert!(port.wait(Some(Duration::from_secs(20))).unwrap() == Ready::Now);
    // Its doorbell was emptied: the descriptor is readable all the same.
    assert!(port.settle().unwrap() && readable(&port, 0));
    assert_eq!(take(&mut port), Some(b"x".to_vec()));
}

#[test]
fn wait_times_out_and_wakes_at_the_watermark() {
    let dir = Dir::new("watermark");
    let server = Server::start(&dir.socket());
    let options = PortOptions::new("host:eth0")
        .socket(&server.path)
        .watermark(3);
    let mut port = options.max_delay(Duration::from_secs(60)).open().unwrap();
    let brief = Some(Duration::from_millis(10));
    assert_eq!(port.wait(brief), Ok(Ready::TimedOut));
    server.send(1, 0, &[b"1", b"2"]);
    assert_eq!(port.wait(brief), Ok(Ready::TimedOut));
    server.send(1, 0, &[b"3"]);
    assert_eq!(port.wait(Some(Duration::from_secs(60))), Ok(Ready::Now));
    assert_eq!(collect(&mut port, 3).len(), 3);
}

#[test]
fn fewer_packets_than_the_watermark_wait_no_longer_than_the_delay() {
    let dir = Dir::new("delay");
    let server = Server::start(&dir.socket());
    let options = PortOptions::new("host:eth0")
        .socket(&server.path)
        .watermark(100);
    let mut port = options.max_delay(Duration::from_millis(20)).open().unwrap();
    server.send(1, 0, &[b"1"]);
    let start = Instant::now();
    assert_eq!(port.wait(Some(Duration::from_secs(60))), Ok(Ready::Now));
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(take(&mut port).unwrap(), b"1");
}

#[test]
fn several_rings_are_merged_and_released() {
    let dir = Dir::new("rings");
    let server = Server::start(&dir.socket());
    server.lock().queues = 3;
    let mut port = open(&server);
    assert_eq!(port.ring_count(), 3);
    let body = [0_u8; 1000];
    // Many times the rings' 64 KiB: only a port that releases all of them gets everything.
    for _ in 0..200 {
        for ring in 0..3 {
            server.send(1, ring, &[&body, &body]);
        }
        assert_eq!(collect(&mut port, 6).len(), 6);
    }
    assert_eq!((port.counts().received, port.counts().lost), (1200, 0));
}

#[test]
fn batches_cover_all_rings_and_lend_all_packets_at_once() {
    let dir = Dir::new("batch");
    let server = Server::start(&dir.socket());
    server.lock().queues = 2;
    let mut port = open(&server);
    for _ in 0..100 {
        server.send(1, 0, &[b"a1", b"a2"]);
        server.send(1, 1, &[b"b1"]);
        let batch: Vec<_> = port.batch(10).collect::<Result<_, _>>().unwrap();
        let mut bytes: Vec<_> = batch.iter().map(|packet| packet.bytes).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, [b"a1", b"a2", b"b1"]);
    }
    server.send(1, 0, &[b"a1", b"a2"]);
    assert_eq!(port.batch(1).count(), 1);
    assert_eq!(port.batch(0).count(), 0);
    assert_eq!(port.counts().received, 301);
}

#[test]
fn a_spinning_reader_gets_packets_and_learns_of_the_end() {
    let dir = Dir::new("spin");
    let server = Server::start(&dir.socket());
    let options = PortOptions::new("host:eth0").socket(&server.path);
    let mut port = options.reconnect(false).open().unwrap();
    assert!(matches!(port.poll_next(), Ok(Next::Nothing)));
    server.send(1, 0, &[b"x"]);
    assert!(matches!(port.poll_next(), Ok(Next::Packet(_))));
    server.kill();
    let deadline = Deadline::new("it learns of the end");
    while !matches!(port.poll_next(), Err(Error::Disconnected)) {
        deadline.check();
    }
}

#[test]
fn every_way_of_waiting_finds_packets_and_learns_of_the_end() {
    for waiting in [Waiting::CPU, Waiting::BALANCED, Waiting::LATENCY] {
        let dir = Dir::new("waiting");
        let server = Server::start(&dir.socket());
        let options = PortOptions::new("host:eth0").socket(&server.path);
        let mut port = options.reconnect(false).waiting(waiting).open().unwrap();
        let short = Some(Duration::from_millis(5));
        assert_eq!(port.wait(short), Ok(Ready::TimedOut), "{waiting:?}");
        std::thread::scope(|scope| {
            let server = &server;
            scope.spawn(move || {
                for pause_us in [0, 10, 100, 1_000, 20_000] {
                    std::thread::sleep(Duration::from_micros(pause_us));
                    server.send(1, 0, &[b"x", b"y"]);
                }
            });
            assert_eq!(collect(&mut port, 10).len(), 10);
        });
        server.kill();
        let deadline = Deadline::new(format!("it learns of the end: {waiting:?}"));
        let end = loop {
            deadline.check();
            port.wait(Some(Duration::from_secs(1))).unwrap();
            match port.next() {
                Ok(Next::Nothing) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error,
            }
        };
        assert_eq!(end, Error::Disconnected, "{waiting:?}");
    }
}

#[test]
fn a_source_that_ends_is_read_to_its_last_packet() {
    let dir = Dir::new("ended");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    assert_eq!(take(&mut port), None);
    server.send(1, 0, &[b"last"]);
    server.finish(1, Life::Ended);
    server.kill();
    assert_eq!(take(&mut port).unwrap(), b"last");
    assert!(matches!(port.next(), Ok(Next::Ended)));
    assert!(matches!(port.next(), Ok(Next::Ended)));
    assert!(readable(&port, 1000), "nobody waits for an ended port");
    assert_eq!(port.wait(None), Ok(Ready::Now));
}

#[test]
fn a_quarantined_port_says_so() {
    let dir = Dir::new("quarantine");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    assert_eq!(take(&mut port), None);
    server.finish(1, Life::Quarantined);
    assert!(readable(&port, 1000));
    assert_eq!(port.next().unwrap_err(), Error::Quarantined);
    assert_eq!(port.next().unwrap_err(), Error::Quarantined);
}

#[test]
fn a_source_that_fails_is_an_error_after_its_last_packet() {
    let dir = Dir::new("failed");
    let server = Server::start(&dir.socket());
    server.lock().failure = Some("cut at byte 99".into());
    let mut port = open(&server);
    assert_eq!(take(&mut port), None);
    server.send(1, 0, &[b"last"]);
    server.finish(1, Life::Failed);
    assert_eq!(take(&mut port).unwrap(), b"last");
    let failed = Error::SourceFailed("cut at byte 99".into());
    assert_eq!(port.next().unwrap_err(), failed);
    assert_eq!(port.next().unwrap_err(), failed);
    assert!(readable(&port, 1000), "nobody waits for a failed port");
}

#[test]
fn a_failure_is_told_also_if_nobody_can_say_why() {
    let dir = Dir::new("failed-alone");
    let server = Server::start(&dir.socket());
    server.lock().queues = 2;
    let mut port = open(&server);
    assert_eq!(take(&mut port), None);
    server.send(1, 1, &[b"last"]);
    server.finish(1, Life::Failed);
    server.kill();
    assert_eq!(take(&mut port).unwrap(), b"last");
    let error = port.next().unwrap_err();
    assert!(matches!(error, Error::SourceFailed(_)), "{error:?}");
}

#[test]
fn a_restart_is_survived_with_a_gap_and_the_same_descriptor() {
    let dir = Dir::new("restart");
    let server = Server::start(&dir.socket());
    let options = PortOptions::new("host:eth0")
        .socket(&server.path)
        .filter("udp");
    let mut port = options.open().unwrap();
    let number = rustix::fd::AsRawFd::as_raw_fd(&port.fd());
    assert_eq!(take(&mut port), None);
    server.send(1, 0, &[b"before"]);
    server.kill();
    // What was published before the death is not lost.
    assert_eq!(take(&mut port).unwrap(), b"before");
    assert!(
        readable(&port, 1000),
        "the death makes the descriptor readable"
    );
    assert_eq!(take(&mut port), None);
    assert!(port.is_away());
    assert_eq!(port.set_filter(FilterSpec::All), Err(Error::Disconnected));
    assert_eq!(port.stats().unwrap().host, None);

    let server = Server::start(&dir.socket());
    eventually("the port is reopened", || {
        readable(&port, 100);
        assert_eq!(take(&mut port), None);
        !port.is_away()
    });
    let last = server.lock().requests.last().unwrap().1.clone();
    let Message::Open(request) = last else {
        panic!("{last:?}")
    };
    assert_eq!(
        (request.reopened, request.filter),
        (true, FilterSpec::Expression("udp".into()))
    );
    server.send(1, 0, &[b"after", b"more"]);
    let got = collect(&mut port, 2);
    assert_eq!(
        got,
        [(b"after".to_vec(), flags::GAP), (b"more".to_vec(), 0)]
    );
    let counts = port.counts();
    assert_eq!((counts.gaps, counts.reopened, counts.received), (1, 1, 3));
    assert_eq!(rustix::fd::AsRawFd::as_raw_fd(&port.fd()), number);
}

#[test]
fn without_reconnect_a_death_is_an_error() {
    let dir = Dir::new("no-reconnect");
    let server = Server::start(&dir.socket());
    let options = PortOptions::new("host:eth0").socket(&server.path);
    let mut port = options.reconnect(false).open().unwrap();
    assert_eq!(take(&mut port), None);
    server.kill();
    assert_eq!(port.wait(None), Ok(Ready::Now));
    assert_eq!(port.next().unwrap_err(), Error::Disconnected);
}

#[test]
fn a_port_that_may_not_be_reopened_ends_with_both_reasons() {
    let dir = Dir::new("gone");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    assert_eq!(take(&mut port), None);
    server.lock().refuse = Some((code::NOT_FOUND, "no device eth0".into()));
    server.finish(1, Life::Closed);
    server.gone(1, "eth0 was removed");
    let error = loop {
        assert_eq!(port.wait(Some(Duration::from_secs(60))), Ok(Ready::Now));
        match port.next() {
            Ok(Next::Nothing) => {}
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(
        error.contains("eth0 was removed") && error.contains("no device eth0"),
        "{error}"
    );
}

#[test]
fn refusals_and_absence_are_told_apart() {
    let dir = Dir::new("refused");
    let options = || PortOptions::new("host:eth0").socket(dir.socket());
    assert!(matches!(options().open(), Err(Error::Unreachable { .. })));
    let server = Server::start(&dir.socket());
    let refused = |options: PortOptions| match options.open() {
        Err(Error::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(options().filter("bad")), code::FILTER);
    assert_eq!(
        refused(PortOptions::new("host:none").socket(&server.path)),
        code::NOT_FOUND
    );
}

#[test]
fn filters_are_replaced_and_a_bad_one_changes_nothing() {
    let dir = Dir::new("filter");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    port.set_filter(FilterSpec::Expression("tcp".into()))
        .unwrap();
    let bad = port.set_filter(FilterSpec::Expression("bad".into()));
    assert!(matches!(
        bad,
        Err(Error::Refused {
            code: code::FILTER,
            ..
        })
    ));
    let host = port.stats().unwrap().host.unwrap();
    assert_eq!(
        (host.name, host.values),
        ("1".into(), vec![("delivered".into(), 7)])
    );
}

#[test]
fn many_ports_of_one_process_do_not_disturb_each_other() {
    let dir = Dir::new("many");
    let server = Server::start(&dir.socket());
    let mut ports: Vec<Port> = (0..20).map(|_| open(&server)).collect();
    for number in 1..=20_u32 {
        server.send(number, 0, &[&number.to_le_bytes()]);
    }
    for port in &mut ports {
        let number = port.number();
        assert_eq!(take(port).unwrap(), number.to_le_bytes());
        assert_eq!(take(port), None);
    }
}

#[test]
fn a_client_asks_for_everything_else() {
    let dir = Dir::new("client");
    let server = Server::start(&dir.socket());
    let mut client = Client::connect_to(&server.path).unwrap();
    assert_eq!(client.server(), "test");
    assert_eq!(client.devices().unwrap()[0].name, "host:eth0");
    assert_eq!(client.stats().unwrap()[0].name, "0");
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
    assert_eq!(client.attach_vm(spec).unwrap().pool_path, "/pool/vm");
    let (one, _two) = std::os::unix::net::UnixStream::pair().unwrap();
    client.adopt("vm", one.as_fd()).unwrap();
    client.detach_vm("vm").unwrap();
    server.kill();
    assert_eq!(client.devices(), Err(Error::Disconnected));
}

#[test]
fn the_losses_before_an_end_are_counted_after_it() {
    let dir = Dir::new("tail");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    // More than the ring holds; no packet comes after the lost ones to tell of them.
    let sent = 10_000;
    server.send(1, 0, &vec![&[7; 2000][..]; sent]);
    server.finish(1, Life::Ended);
    let mut received = 0;
    while let Next::Packet(_) = port.next().unwrap() {
        received += 1;
    }
    assert!(matches!(port.next(), Ok(Next::Ended)));
    assert!(received < sent, "nothing was lost");
    assert_eq!((received as u64) + port.dropped(), sent as u64);
}

/// Becomes true also if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn other_threads_ask_while_the_reader_reads() {
    const PACKETS: usize = 3000;
    let dir = Dir::new("asked");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let askers: Vec<_> = (0..2)
            .map(|_| {
                let (asker, over) = (port.asker(), &over);
                scope.spawn(move || {
                    let mut asked = 0;
                    while !over.load(Ordering::Relaxed) {
                        let stats = asker.stats().unwrap();
                        assert_eq!(stats.host.unwrap().values, [("delivered".into(), 7)]);
                        assert!(asker.counts().received <= PACKETS as u64);
                        asked += 1;
                    }
                    asked
                })
            })
            .collect();
        let ends = Ends(&over);
        let (reader, server, over) = (port.asker(), &server, &over);
        scope.spawn(move || {
            for sent in (0..PACKETS as u64).step_by(10) {
                // The reader may have no processor: then the ring must not overflow.
                while sent - reader.counts().received > 500 && !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_micros(200));
                }
                server.send(1, 0, &[b"packet".as_slice(); 10]);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        assert_eq!(collect(&mut port, PACKETS).len(), PACKETS);
        drop(ends);
        assert!(askers.into_iter().all(|asker| asker.join().unwrap() > 0));
    });
    let counts = port.counts();
    assert_eq!((counts.received, counts.lost), (PACKETS as u64, 0));
    assert_eq!((counts.gaps, counts.reopened), (0, 0));
}

#[test]
fn an_answer_that_comes_too_late_is_dropped_and_the_port_lives_on() {
    let dir = Dir::new("late");
    let server = Server::start(&dir.socket());
    let mut port = open(&server);
    let asker = port.asker();
    let (soon, late) = (Duration::from_millis(50), Duration::from_secs(60));
    let frozen = server.lock();
    for _ in 0..2 {
        assert_eq!(asker.ask(soon).unwrap(), None);
    }
    drop(frozen);
    let (number, host) = asker.ask(late).unwrap().unwrap();
    assert_eq!((number, host.name.as_str()), (1, "1"));
    let asked = |(_, request): &&(u32, Message)| matches!(request, Message::Stats { .. });
    assert_eq!(server.lock().requests.iter().filter(asked).count(), 2);
    port.set_filter(FilterSpec::All).unwrap();
    server.send(1, 0, &[b"a"]);
    assert_eq!(collect(&mut port, 1).len(), 1);
    assert_eq!(port.counts().reopened, 0);
}
