//! A small server that speaks the client protocol, with rings of its own: what the daemon does, as
//! far as the library and the agent can see it. Every step is under the test's control.

use std::collections::BTreeMap;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use vnplug_ring::control::wire::{Framer, MAX_REQUEST};
use vnplug_ring::control::{
    Counted, Device, FilterSpec, Message, Open, Opened, RingPlace, Role, VERSION, VmReady, code,
};
use vnplug_ring::layout::{Geometry, Life, Meta, flags, ring_size};
use vnplug_ring::pool::{FIRST_RING, PoolHeader};
use vnplug_ring::{Bell, Producer, Region};

/// A program of `guest/examples`, which cargo builds with the tests.
pub(crate) fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let beside = test.parent().unwrap().parent().unwrap();
    let program = beside.join("examples").join(name);
    assert!(
        program.exists(),
        "{} is missing: cargo build -p libvnplug --example {name}",
        program.display()
    );
    program
}

/// A directory of this test's own, removed at the end.
pub(crate) struct Dir(pub(crate) PathBuf);

/// The server; closing its sockets is its death.
pub(crate) struct Server {
    pub(crate) path: PathBuf,
    shared: Arc<Mutex<Shared>>,
}

/// What the test can see and move.
#[derive(Default)]
pub(crate) struct Shared {
    ports: BTreeMap<u32, Side>,
    connections: Vec<UnixStream>,
    channel: Option<UnixStream>,
    pool: Option<Pool>,
    /// Every request, in the order of arrival, with the application's number.
    pub(crate) requests: Vec<(u32, Message)>,
    /// Answer every Open with this.
    pub(crate) refuse: Option<(u16, String)>,
    /// Why the source failed, for Stats.
    pub(crate) failure: Option<String>,
    /// Ports are woken by this vector of a doorbell device that nobody has.
    pub(crate) vector: Option<u32>,
    /// Rings per port.
    pub(crate) queues: u32,
    /// Answer nothing any more.
    pub(crate) mute: bool,
    last_port: u32,
    dead: bool,
}

struct Side {
    app: u32,
    /// The connection it was opened on; 0 for a channel.
    owner: u64,
    rings: Vec<Producer>,
    wake: Option<OwnedFd>,
    connection: Option<UnixStream>,
    reopened: bool,
}

struct Pool {
    region: Region,
    len: u64,
    next: u64,
    id: u64,
}

impl Dir {
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vnplug-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("s")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

impl Server {
    /// Listens on `path`, replacing a dead server's socket.
    pub(crate) fn start(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let server = Self {
            path: path.into(),
            shared: Arc::new(Mutex::new(Shared {
                queues: 1,
                ..Shared::default()
            })),
        };
        let shared = Arc::clone(&server.shared);
        std::thread::spawn(move || {
            for (serial, stream) in (1..).zip(listener.incoming()) {
                let stream = stream.unwrap();
                let mut guard = shared.lock().unwrap();
                if guard.dead {
                    return;
                }
                guard.connections.push(stream.try_clone().unwrap());
                drop(guard);
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(&shared, stream, serial));
            }
        });
        server
    }

    /// Speaks over a VM's control channel, rings in `pool`.
    pub(crate) fn on_channel(channel: UnixStream, pool: &OwnedFd, pool_len: u64, id: u64) -> Self {
        let region = vnplug::map_memory(pool.as_fd(), pool_len).unwrap();
        let shared = Shared {
            queues: 1,
            channel: Some(channel.try_clone().unwrap()),
            pool: Some(Pool {
                region,
                len: pool_len,
                next: FIRST_RING,
                id,
            }),
            ..Shared::default()
        };
        let shared = Arc::new(Mutex::new(shared));
        let server = Self {
            path: PathBuf::new(),
            shared: Arc::clone(&shared),
        };
        server.become_another(id);
        std::thread::spawn(move || serve(&shared, channel, 0));
        server
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    /// Dies without a word: all sockets close, nothing is said in the rings.
    pub(crate) fn kill(&self) {
        let mut shared = self.lock();
        shared.dead = true;
        for connection in shared.connections.drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        shared.ports.clear();
        drop(shared);
        // Lets the accepting thread see that it is dead, and frees the path.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }

    /// Writes packets with these bytes and publishes them; rings as the protocol says.
    pub(crate) fn send(&self, port: u32, ring: usize, packets: &[&[u8]]) {
        self.lock().send(port, ring, packets);
    }

    /// Ends the life of all rings of a port and wakes its reader.
    pub(crate) fn finish(&self, port: u32, life: Life) {
        let mut shared = self.lock();
        for producer in &mut shared.ports.get_mut(&port).unwrap().rings {
            producer.finish(life);
        }
        shared.wake(port);
    }

    /// Says that the port is gone.
    pub(crate) fn gone(&self, port: u32, reason: &str) {
        let mut shared = self.lock();
        let side = shared.ports.remove(&port).unwrap();
        let message = Message::Gone {
            port,
            reason: reason.into(),
        };
        let bytes = message.encode(0, side.app);
        let to = side
            .connection
            .as_ref()
            .or(shared.channel.as_ref())
            .unwrap();
        write_with_fds(to, &bytes, &[]);
    }

    /// Is another daemon from now on, which knows nobody and has signed the pool with its own number.
    pub(crate) fn become_another(&self, id: u64) {
        let mut shared = self.lock();
        shared.ports.clear();
        let pool = shared.pool.as_mut().unwrap();
        pool.id = id;
        let header = PoolHeader {
            len: pool.len,
            id,
            name: "test".into(),
        };
        header.write(&pool.region);
    }

    /// Raw bytes to the agent.
    pub(crate) fn garbage(&self, bytes: &[u8]) {
        write_with_fds(self.lock().channel.as_ref().unwrap(), bytes, &[]);
    }

    pub(crate) fn is_open(&self, port: u32) -> bool {
        self.lock().ports.contains_key(&port)
    }
}

impl Shared {
    pub(crate) fn send(&mut self, port: u32, ring: usize, packets: &[&[u8]]) {
        let side = self.ports.get_mut(&port).unwrap();
        let producer = &mut side.rings[ring];
        for bytes in packets {
            let meta = Meta {
                wire_len: bytes.len() as u32,
                ts_ns: 1,
                flags: if std::mem::take(&mut side.reopened) {
                    flags::GAP
                } else {
                    0
                },
                queue: ring as u16,
                ..Meta::default()
            };
            producer.push(&meta, bytes).unwrap();
        }
        producer.publish();
        if producer.bell(0) == Bell::Ring {
            self.wake(port);
        }
    }

    fn wake(&mut self, port: u32) {
        let side = &self.ports[&port];
        match &side.wake {
            Some(pipe) => {
                rustix::io::write(pipe, &[1]).unwrap();
            }
            None if self.vector.is_some() => {}
            None => {
                let bytes = Message::Wake(vec![port]).encode(0, 0);
                write_with_fds(self.channel.as_ref().unwrap(), &bytes, &[]);
            }
        }
    }

    fn open(
        &mut self,
        open: &Open,
        app: u32,
        owner: u64,
        stream: &UnixStream,
    ) -> Result<(Opened, Vec<OwnedFd>), (u16, String)> {
        let refuse = |code, text: &str| Err((code, text.into()));
        if let Some((code, text)) = &self.refuse {
            return refuse(*code, text);
        }
        if !open.device.starts_with("host:eth") {
            return refuse(code::NOT_FOUND, "no such device");
        }
        if open.filter == FilterSpec::Expression("bad".into()) {
            return refuse(code::FILTER, "syntax error");
        }
        let capacity = open.ring_bytes.max(1 << 16).next_power_of_two();
        let len = ring_size(capacity);
        self.last_port += 1;
        let port = self.last_port;
        let (region, first, map_len, fds, wake) = match &mut self.pool {
            None => {
                let map_len = len * u64::from(self.queues);
                let memory = memfd_create("test-ring", MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&memory, map_len).unwrap();
                let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
                let region = vnplug::map_memory(memory.as_fd(), map_len).unwrap();
                (region, 0, map_len, vec![memory, read], Some(write))
            }
            Some(pool) => {
                let first = pool.next;
                pool.next += len * u64::from(self.queues);
                (
                    pool.region.clone(),
                    first,
                    pool.region.len(),
                    Vec::new(),
                    None,
                )
            }
        };
        let places: Vec<_> = (0..u64::from(self.queues))
            .map(|queue| RingPlace {
                offset: first + queue * len,
                len,
            })
            .collect();
        let rings = places.iter().enumerate().map(|(queue, place)| {
            let geometry = Geometry {
                capacity,
                snaplen: 2048,
                link_type: 1,
                epoch: u64::from(port) << 8,
                port,
                queue: queue as u32,
            };
            Producer::create(region.part(place.offset, place.len).unwrap(), geometry).unwrap()
        });
        let side = Side {
            app,
            owner,
            rings: rings.collect(),
            connection: wake.is_some().then(|| stream.try_clone().unwrap()),
            wake,
            reopened: open.reopened,
        };
        self.ports.insert(port, side);
        let opened = Opened {
            port,
            map_len,
            rings: places,
            snaplen: 2048,
            link_type: 1,
            device: open.device.clone(),
            vector: self.vector.unwrap_or(u32::MAX),
            transmit: RingPlace::default(),
            arenas: vnplug_ring::control::Arenas::default(),
            apart: false,
            board: false,
            memory: 0,
        };
        Ok((opened, fds))
    }

    fn answer(
        &mut self,
        app: u32,
        serial: u64,
        request: &Message,
        stream: &UnixStream,
    ) -> Option<(Message, Vec<OwnedFd>)> {
        self.requests.push((app, request.clone()));
        let plain = |message| Some((message, Vec::new()));
        match request {
            Message::Hello { role, .. } => {
                if *role == Role::Agent {
                    self.ports.clear();
                }
                let pool_id = self.pool.as_ref().map_or(0, |pool| pool.id);
                plain(Message::Welcome {
                    version: VERSION,
                    server: "test".into(),
                    pool_id,
                })
            }
            Message::List => plain(Message::Devices(vec![Device {
                name: "host:eth0".into(),
                kind: "gen".into(),
                state: "up".into(),
                description: "a test".into(),
                queues: self.queues,
                link_type: 1,
                mtu: 1500,
                mac: [2, 0, 0, 0, 0, 1],
                ..Device::default()
            }])),
            Message::Tune { .. } => plain(Message::Done),
            Message::Open(open) => Some(match self.open(open, app, serial, stream) {
                Ok((opened, fds)) => (Message::Opened(opened), fds),
                Err((code, text)) => (Message::Error { code, text }, Vec::new()),
            }),
            Message::Filter { filter, .. } => {
                plain(if *filter == FilterSpec::Expression("bad".into()) {
                    Message::Error {
                        code: code::FILTER,
                        text: "syntax error".into(),
                    }
                } else {
                    Message::Done
                })
            }
            Message::Stats { port } => plain(Message::Counters(vec![Counted {
                kind: "port".into(),
                name: port.to_string(),
                labels: match &self.failure {
                    Some(failure) => vec![("failure".into(), failure.clone())],
                    None => Vec::new(),
                },
                values: vec![("delivered".into(), 7)],
            }])),
            Message::AttachVm(spec) => plain(Message::VmReady(VmReady {
                pool_path: format!("/pool/{}", spec.name),
                pool_len: 1,
                control_path: "/c".into(),
                doorbell_path: String::new(),
                arenas: Vec::new(),
            })),
            Message::Close { port } => {
                self.ports.remove(port);
                plain(Message::Done)
            }
            Message::DetachVm { .. } | Message::Adopt { .. } => plain(Message::Done),
            Message::AppGone => {
                self.ports.retain(|_, side| side.app != app);
                None
            }
            _ => None,
        }
    }
}

fn serve(shared: &Mutex<Shared>, mut stream: UnixStream, serial: u64) {
    let mut framer = if serial == 0 {
        Framer::resyncing(MAX_REQUEST)
    } else {
        Framer::strict(MAX_REQUEST)
    };
    let mut bytes = [0; 4096];
    while let Ok(count) = stream.read(&mut bytes) {
        if count == 0 {
            break;
        }
        framer.push(&bytes[..count]);
        while let Some(frame) = framer.next_message().unwrap() {
            let request = Message::from_frame(&frame).unwrap();
            let mut shared = shared.lock().unwrap();
            if shared.mute {
                shared.requests.push((frame.0.app, request));
                continue;
            }
            if let Some((answer, fds)) = shared.answer(frame.0.app, serial, &request, &stream) {
                let bytes = answer.encode(frame.0.id, frame.0.app);
                write_with_fds(&stream, &bytes, &fds);
            }
        }
    }
    if serial != 0 {
        let mut shared = shared.lock().unwrap();
        shared.ports.retain(|_, side| side.owner != serial);
    }
}

/// Writes to a peer that may be gone.
pub(crate) fn write_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    match sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    ) {
        Ok(sent) => assert_eq!(sent, bytes.len()),
        Err(errno) => assert!(
            matches!(
                errno,
                rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET
            ),
            "{errno}"
        ),
    }
}
