//! A session whose ports are those of a server under the test's control: what the rings hold at the end
//! is recorded or counted, and a port that fails ends for itself.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug::{Port, PortOptions};
use vnplug_ring::control::wire::{Framer, MAX_REQUEST};
use vnplug_ring::control::{Arenas, Message, Opened, RingPlace, VERSION};
use vnplug_ring::layout::{DATA_OFFSET, Geometry, ring_size};
use vnplug_ring::{Producer, Region};
use vnplug_testing::Deadline;

use super::*;
use crate::record::{Session, Source, Triggers};

/// Bytes of a ring's record area.
const CAPACITY: u64 = 1 << 22;

/// A server that speaks the client protocol.
struct Server {
    socket: PathBuf,
    /// Of each port, in the order in which they were opened: its rings.
    ports: Arc<Mutex<Vec<Vec<Ring>>>>,
    _place: TestDir,
}

struct Ring {
    producer: Producer,
    memory: Region,
}

impl Server {
    fn new(what: &str, queues: u32) -> Self {
        let place = TestDir::new(&format!("record-{what}"));
        let socket = place.0.join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let ports: Arc<Mutex<Vec<Vec<Ring>>>> = Arc::default();
        let all = Arc::clone(&ports);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let ports = Arc::clone(&all);
                std::thread::spawn(move || serve(&ports, stream.unwrap(), queues));
            }
        });
        Self {
            socket,
            ports,
            _place: place,
        }
    }

    fn source(&self, interface: usize) -> Source {
        Source::new(self.port(), interface)
    }

    fn port(&self) -> Port {
        PortOptions::new("host:lab")
            .socket(&self.socket)
            .open()
            .unwrap()
    }

    /// Publishes packets with these numbers; they were stamped `late_ns` later than the clock says.
    fn send(&self, port: usize, queue: usize, numbers: std::ops::Range<u64>, late_ns: u64) {
        let mut ports = self.ports.lock().unwrap();
        let producer = &mut ports[port][queue].producer;
        for number in numbers {
            let bytes = bytes(number);
            let mut meta = meta(number, bytes.len());
            meta.queue = queue as u16;
            meta.ts_ns = crate::record::now_ns() + late_ns;
            assert!(producer.push(&meta, &bytes).unwrap(), "{number}: no room");
        }
        producer.publish();
    }

    /// Overwrites the next record of a ring that was not read yet.
    fn spoil(&self, port: usize, queue: usize) {
        let memory = &self.ports.lock().unwrap()[port][queue].memory;
        memory.write(DATA_OFFSET, &[0xfe; 4]);
    }
}

fn serve(ports: &Mutex<Vec<Vec<Ring>>>, mut stream: UnixStream, queues: u32) {
    let mut framer = Framer::strict(MAX_REQUEST);
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        framer.push(&bytes[..count]);
        while let Some(frame) = framer.next_message().unwrap() {
            let (answer, fds) = match Message::from_frame(&frame).unwrap() {
                Message::Hello { .. } => {
                    let welcome = Message::Welcome {
                        version: VERSION,
                        server: "test".into(),
                        pool_id: 0,
                    };
                    (welcome, Vec::new())
                }
                Message::Open(_) => open(&mut ports.lock().unwrap(), queues),
                Message::Stats { .. } => (Message::Counters(Vec::new()), Vec::new()),
                _ => (Message::Done, Vec::new()),
            };
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
            let bytes = answer.encode(frame.0.id, frame.0.app);
            // To a peer that may be gone.
            let _ = sendmsg(
                &stream,
                &[IoSlice::new(&bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
        }
    }
}

fn open(ports: &mut Vec<Vec<Ring>>, queues: u32) -> (Message, Vec<OwnedFd>) {
    let (len, port) = (ring_size(CAPACITY), ports.len() as u32 + 1);
    let map_len = len * u64::from(queues);
    let memory = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, map_len).unwrap();
    let region = vnplug::map_memory(memory.as_fd(), map_len).unwrap();
    let place = |queue| RingPlace {
        offset: u64::from(queue) * len,
        len,
    };
    let ring = |queue| {
        let memory = region.part(place(queue).offset, len).unwrap();
        let geometry = Geometry {
            capacity: CAPACITY,
            snaplen: 2048,
            link_type: 1,
            epoch: u64::from(port) << 8,
            port,
            queue,
        };
        let producer = Producer::create(memory.clone(), geometry).unwrap();
        Ring { producer, memory }
    };
    ports.push((0..queues).map(ring).collect());
    let opened = Opened {
        port,
        map_len,
        rings: (0..queues).map(place).collect(),
        snaplen: 2048,
        link_type: 1,
        device: "host:lab".into(),
        vector: u32::MAX,
        transmit: RingPlace::default(),
        arenas: Arenas::default(),
        apart: false,
        board: false,
        memory: 0,
    };
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    (Message::Opened(opened), vec![memory, wake])
}

/// The numbers of what was recorded, sorted. Stamps are not those of the other tests.
fn recorded(sim: &Sim) -> Vec<u64> {
    let mut numbers = Vec::new();
    for (path, content) in sim.files() {
        if SegmentName::parse(&path.file_name().unwrap().to_string_lossy()).is_some() {
            let mut reader = Reader::stream(Box::new(Cursor::new(content)), path);
            while let Some(packet) = reader.read().unwrap() {
                let number = u64::from_le_bytes(*packet.bytes.first_chunk().unwrap());
                assert_eq!(packet.bytes, bytes(number));
                numbers.push(number);
            }
        }
    }
    numbers.sort_unstable();
    numbers
}

#[test]
fn what_the_rings_hold_at_the_end_is_recorded_whatever_its_stamps_say() {
    const HOUR: u64 = 3_600_000_000_000;
    // Of the next ring the first packet is late already, or all of them are: another clock.
    for late in [[HOUR, 0], [0, HOUR], [HOUR, HOUR]] {
        let server = Server::new("stamps", 2);
        let sim = Sim::new(1 << 30);
        let recorder = recorder(&settings(Format::Pcapng), alone(&sim));
        let session = Session::new(vec![server.source(0), server.source(0)], recorder);
        server.send(0, 0, 0..1000, late[0]);
        server.send(0, 1, 1000..4000, late[1]);
        server.send(1, 0, 4000..4010, late[1]);
        server.send(1, 1, 4010..5000, late[0]);
        let status = session.finish();
        assert_eq!((status.taken, status.lost()), (5000, 0), "{status:?}");
        assert_eq!(recorded(&sim), (0..5000).collect::<Vec<u64>>());
    }
}

#[test]
fn what_no_buffer_takes_at_the_end_is_counted() {
    let server = Server::new("counted", 2);
    let sim = Sim::new(1 << 30);
    let mut settings = settings(Format::Pcapng);
    settings.chunk_bytes = 512 << 10;
    let recorder = recorder(&settings, alone(&sim));
    let session = Session::new(vec![server.source(0), server.source(0)], recorder);
    sim.fail_writes(Some(EIO));
    for (port, queue) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        server.send(port, queue, 0..5000, 0);
    }
    let status = session.finish();
    assert_eq!(status.taken + status.lost_ring, 20_000, "{status:?}");
    assert!(status.lost_ring > 5000, "{status:?}");
    assert_eq!(status.lost_disk + status.lost_unknown, status.taken);
    let losses = status.losses.iter().filter(|loss| loss.kind == "ring");
    assert_eq!(
        losses.map(|loss| loss.packets).sum::<u64>(),
        status.lost_ring
    );
}

#[test]
fn a_port_that_fails_does_not_end_the_others() {
    let server = Server::new("fails", 1);
    let sim = Sim::new(1 << 30);
    let recorder = recorder(&settings(Format::Pcapng), alone(&sim));
    let mut session = Session::new(vec![server.source(0), server.source(0)], recorder);
    server.send(0, 0, 0..100, 0);
    server.spoil(0, 0);
    let ledger = Arc::clone(session.recorder().ledger());
    let deadline = Deadline::new("the other goes on");
    let mut sent = 0;
    // The other goes on long after.
    let driven = session.run(&mut || {
        if ledger.status().lost_ring > 0 && sent < 10 {
            server.send(1, 0, 100 + sent * 10..110 + sent * 10, 0);
            sent += 1;
        }
        sent == 10 || deadline.is_over()
    });
    let error = driven.unwrap_err().to_string();
    let status = session.finish();
    assert_eq!((status.taken, status.lost_ring), (100, 100), "{status:?}");
    assert_eq!(status.losses[0].reason, error, "{status:?}");
    assert_eq!(recorded(&sim), (100..200).collect::<Vec<u64>>());
}

#[test]
fn an_event_ends_when_every_ring_was_read_up_to_its_end() {
    const MINUTE: u64 = 60_000_000_000;
    let server = Server::new("skew", 2);
    let sim = Sim::new(1 << 30);
    let settings = Settings {
        trigger: Some(Triggers {
            filters: vec!["ether[0:2] = 0xd507".into()], // 2005
            before: Duration::from_secs(10),
            after: Duration::from_secs(10),
            buffers: 4,
        }),
        ..settings(Format::Pcapng)
    };
    let recorder = recorder(&settings, alone(&sim));
    let mut session = Session::new(vec![server.source(0)], recorder);
    // The ring that has the trigger is behind the other one.
    server.send(0, 0, 0..300, 0);
    server.send(0, 0, 300..2000, MINUTE);
    server.send(0, 1, 2000..6000, 0);
    let ledger = Arc::clone(session.recorder().ledger());
    let deadline = Deadline::new("all are taken");
    let mut behind = false;
    let driven = session.run(&mut || {
        let status = ledger.status();
        let over = status
            .trigger
            .is_some_and(|it| it.events == 1 && !it.writing);
        if over && !behind {
            server.send(0, 0, 6000..6100, MINUTE);
            behind = true;
        }
        status.taken == 6100 || deadline.is_over()
    });
    driven.unwrap();
    let status = session.finish();
    assert_eq!(status.trigger.unwrap().passed_over, 100);
    assert_eq!(recorded(&sim), (0..6000).collect::<Vec<u64>>());
}
