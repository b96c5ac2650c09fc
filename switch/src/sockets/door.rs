//! The thread that lets clients of plain sockets in. It never touches a frame, and nothing that it does
//! waits for a client.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::SocketType;
use vnplug_os::closer::{Closers, PeerFd};
use vnplug_os::{event, peer_log};

use super::datagrams::Datagrams;
use super::pairs::{Pair, Pairs};
use super::stream::Stream;
use crate::board;
use crate::control::{Change, Line};
use crate::door::Door;
use crate::forward::Number;
use crate::link::{Link, Loss, Losses};
use crate::porter::{self, Access, Directory};
use crate::roster::Roster;

/// Where clients of plain sockets come in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketsConfig {
    /// The socket for streams of frames with lengths.
    pub stream: Option<PathBuf>,
    /// The socket for connections of packets.
    pub bess: Option<PathBuf>,
    /// The directory for pairs of datagram sockets.
    pub dgram: Option<PathBuf>,
    /// Who may use them.
    pub access: Access,
}

/// How frames of a connection are told from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stream,
    Packets,
}

/// A socket that is listened at.
struct Listening {
    kind: Kind,
    path: PathBuf,
    socket: OwnedFd,
}

/// Entrances that are made and not served yet.
pub(crate) struct Open {
    name: String,
    roster: Arc<Mutex<Roster>>,
    /// Bytes of the longest frame.
    longest: usize,
    listening: Vec<Listening>,
    pairs: Option<Pairs>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            // The next switch takes it over.
            log::info!(target: "switch", "{}: {error}", self.path.display());
        }
    }
}

impl Open {
    /// Makes the sockets and the directory, or takes over what a switch left that is gone.
    ///
    /// # Errors
    /// The system's, or who has them.
    pub(crate) fn new(
        name: &str,
        config: SocketsConfig,
        longest: usize,
        roster: &Arc<Mutex<Roster>>,
    ) -> io::Result<Self> {
        let access = config.access;
        let mut listening = Vec::new();
        for (kind, path) in [(Kind::Stream, config.stream), (Kind::Packets, config.bess)] {
            let Some(path) = path else {
                continue;
            };
            let socket = access.listen(&path, kind.socket_type())?;
            listening.push(Listening { kind, path, socket });
        }
        let pairs = config
            .dgram
            .map(|dir| Pairs::new(Directory::open(&dir, &access)?, access));
        Ok(Self {
            name: name.to_owned(),
            roster: Arc::clone(roster),
            longest,
            listening,
            pairs: pairs.transpose()?,
        })
    }

    /// The entrance, of a switch that is spoken to by `line`.
    pub(crate) fn door(self, line: Line) -> Door {
        let said = ("vnplug-sockets", "nobody can join by a socket");
        Door::new(self.name.clone(), said, |waker| {
            let mut porter = Porter::new(self, line, waker)?;
            Ok(move |stop: &AtomicBool| porter.run(stop))
        })
    }
}

impl Kind {
    fn socket_type(self) -> SocketType {
        match self {
            Self::Stream => SocketType::STREAM,
            Self::Packets => SocketType::SEQPACKET,
        }
    }

    /// The word for it, as the option is called.
    fn way(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Packets => "bess",
        }
    }
}

/// A client that has a port.
struct Client {
    id: u64,
    pair: Option<Pair>,
}

/// Who lets clients in.
struct Porter {
    open: Open,
    line: Line,
    /// For the thread that forwards, and what it says.
    told: Losses,
    losses: Receiver<Loss>,
    waker: Arc<OwnedFd>,
    epoll: OwnedFd,
    /// The ports that are taken.
    ports: HashMap<Number, Client>,
    /// The number of the next client.
    next: u64,
    closers: Closers<u32>,
}

impl Porter {
    fn new(open: Open, line: Line, waker: Arc<OwnedFd>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        for (at, listening) in (0..).zip(&open.listening) {
            let data = EventData::new_u64(at);
            epoll::add(&epoll, &listening.socket, data, EventFlags::IN)?;
        }
        let (told, losses) = Losses::new(Arc::clone(&waker));
        Ok(Self {
            open,
            line,
            told,
            losses,
            waker,
            epoll,
            ports: HashMap::new(),
            next: 0,
            closers: Closers::default(),
        })
    }

    fn run(&mut self, stop: &AtomicBool) {
        for Listening { kind, path, .. } in &self.open.listening {
            let (name, way) = (&self.open.name, kind.way());
            log::info!(target: "switch", "{name}: {way} clients join at {}", path.display());
        }
        let mut looked = Instant::now();
        self.look();
        while !stop.load(Ordering::Acquire) {
            let mut news = Vec::new();
            porter::wait(&self.epoll, LOOK, |id| news.push(id));
            if news.contains(&WAKER) {
                event::clear(&self.waker);
            }
            // Before others come, who may need the ports.
            while let Ok(Loss { port, client }) = self.losses.try_recv() {
                if self.ports.get(&port).is_some_and(|it| it.id == client) {
                    self.free(port);
                }
            }
            let clients = news.into_iter().filter(|id| *id != WAKER);
            clients.for_each(|at| self.accept(at as usize));
            if looked.elapsed() >= LOOK {
                self.look();
                looked = Instant::now();
            }
        }
        self.end();
    }

    fn accept(&mut self, at: usize) {
        let Listening { kind, socket, .. } = &self.open.listening[at];
        let kind = *kind;
        let accepted = porter::accept(socket, &self.open.name, &mut self.closers);
        let Some((socket, peer)) = accepted else {
            return;
        };
        let uid = peer.uid;
        let holder = porter::holder(uid, kind.way(), peer.to_string());
        let port = board::admit(&self.open.roster, &self.line, uid, holder, None);
        let port = match port {
            Ok(port) => port.get(),
            Err(why) => {
                let name = &self.open.name;
                peer_log!(
                    log::Level::Warn,
                    "switch",
                    "{name}: a {} client of user {uid} cannot join: {why}",
                    kind.way()
                );
                return;
            }
        };
        let link: Box<dyn Link> = match kind {
            Kind::Stream => Box::new(Stream::new(socket, self.open.longest)),
            Kind::Packets => Box::new(Datagrams::of_connection(socket)),
        };
        let what = format!("a {} client of user {uid}, {peer}", kind.way());
        self.add(port, link, None, &what);
    }

    /// A port is there.
    fn add(&mut self, port: Number, link: Box<dyn Link>, pair: Option<Pair>, what: &str) {
        peer_log!(
            log::Level::Info,
            "switch",
            "{}: port {port}: {what}",
            self.open.name
        );
        let id = self.next;
        self.next += 1;
        self.ports.insert(port, Client { id, pair });
        let losses = self.told.of(id);
        board::add(&self.open.roster, &self.line, port, link, losses);
    }

    /// Looks which names there are in the directory of pairs.
    fn look(&mut self) {
        let Some(pairs) = &mut self.open.pairs else {
            return;
        };
        let held = self.ports.iter();
        let held = held.filter_map(|(port, it)| Some((*port, it.pair.as_ref()?)));
        let gone: Vec<Number> = held
            .filter(|(_, pair)| !pair.is_alive())
            .map(|(port, _)| port)
            .collect();
        let found = pairs.found(|name| {
            let mut all = self.ports.values().filter_map(|it| it.pair.as_ref());
            all.any(|pair| pair.is_of(name))
        });
        for port in gone {
            // First: who takes the number again must not be removed.
            self.line.send(Change::Remove(port));
            self.free(port);
        }
        for found in found {
            let Some(pairs) = &mut self.open.pairs else {
                return;
            };
            let (uid, name) = (found.uid, found.name.clone());
            let holder = porter::holder(uid, "dgram", name.clone());
            let (roster, line) = (&self.open.roster, &self.line);
            let port = board::admit(roster, line, uid, holder, None);
            let joined = port.and_then(|port| {
                let joined = pairs.join(found);
                joined
                    .inspect_err(|_| board::free(roster, line, port.get()))
                    .map(|(socket, pair)| (port.get(), socket, pair))
            });
            match joined {
                Ok((port, socket, pair)) => {
                    let socket = PeerFd::new(socket, self.closers.of(&uid));
                    let what = format!("a dgram client of user {uid} ({name:?})");
                    self.add(port, Box::new(Datagrams::new(socket)), Some(pair), &what);
                }
                Err(why) => {
                    let is_news = pairs.refuse(&name);
                    if is_news {
                        peer_log!(
                            log::Level::Warn,
                            "switch",
                            "{}: a dgram client of user {uid} cannot join: {why}",
                            self.open.name
                        );
                    }
                }
            }
        }
    }

    /// The thread that forwards does not know the port any more.
    fn free(&mut self, port: Number) {
        if self.ports.remove(&port).is_some() {
            board::free(&self.open.roster, &self.line, port);
            peer_log!(
                log::Level::Info,
                "switch",
                "{}: port {port} is free",
                self.open.name
            );
        }
    }

    fn end(&mut self) {
        let all: Vec<Number> = self.ports.keys().copied().collect();
        for port in all {
            self.line.send(Change::Remove(port));
            self.free(port);
        }
    }
}

/// How often the directory of pairs is looked at.
const LOOK: Duration = Duration::from_millis(500);
const WAKER: u64 = u64::MAX;
