//! The server that a program's questions reach, whomever it means to ask.
//!
//! Where the sockets are is for others to say: on addresses of the loopback, to which the questions for the
//! host's servers are sent, or in the program's own network namespace. Who asks is known by the address that the question comes
//! from, which whoever did the program's call noted ([`Senders`]). Every user of the machine can send to the host's loopback:
//! what comes there from an address that nobody noted is refused, and nobody is asked about it.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, sendto};
use simple_dns::RCODE;

use crate::act::{Act, Doing, Target, Transport, Who};
use crate::dns::message::{self, Query};
use crate::dns::upstream::{Upstream, framed};
use crate::floor::Floor;
use crate::gate::{Gate, Verdict};

/// The server; clones are the same.
#[derive(Clone, Debug)]
pub struct Proxy {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gate: Gate,
    senders: Senders,
    jobs: SyncSender<Job>,
    connections: AtomicUsize,
    /// Where questions for servers of these addresses go.
    redirected: Vec<SocketAddr>,
    /// Where they go; `None`: where they were meant to go, where somebody gave us sockets.
    local: Mutex<Option<Vec<SocketAddr>>>,
}

/// Something to ask upstream.
#[derive(Debug)]
struct Job {
    query: Query,
    act: Act,
    to: Asker,
}

/// What becomes of questions from addresses that nobody noted.
#[derive(Clone, Copy, Debug)]
enum Strangers {
    /// They may be of any user of the machine.
    Refused,
    /// Nobody but the program can send there; which process it is is unknown.
    OfTheProgram,
}

/// Where an answer goes.
#[derive(Clone, Debug)]
enum Asker {
    Udp(Arc<UdpSocket>, SocketAddr),
    Tcp(SyncSender<Vec<u8>>),
}

impl Proxy {
    /// A server that forwards to `upstream` what `gate` allows. Questions for the servers at `redirected` are its own
    /// ([`Proxy::redirect`]).
    ///
    /// # Errors
    /// The system's, if there can be no more threads.
    pub fn new(gate: Gate, upstream: Upstream, redirected: Vec<SocketAddr>) -> io::Result<Self> {
        let (jobs, receiver) = sync_channel(JOBS);
        let inner = Inner {
            gate: gate.clone(),
            senders: Senders::default(),
            jobs,
            connections: AtomicUsize::new(0),
            redirected,
            local: Mutex::default(),
        };
        let (receiver, upstream) = (Arc::new(Mutex::new(receiver)), Arc::new(upstream));
        for _ in 0..WORKERS {
            let (receiver, upstream, gate) = (receiver.clone(), upstream.clone(), gate.clone());
            let run = move || work(&receiver, &upstream, &gate);
            thread::Builder::new()
                .name("vnplug-dns".to_owned())
                .spawn(run)?;
        }
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Serves on the loopback, by UDP and TCP, IPv4 and (where there is one) IPv6.
    ///
    /// # Errors
    /// The sockets cannot be made.
    pub fn serve_local(&self) -> io::Result<()> {
        let v4 = self.serve_at(Ipv4Addr::LOCALHOST.into())?;
        let mut local = vec![v4];
        if self.inner.redirected.iter().any(SocketAddr::is_ipv6) {
            local.extend(self.serve_at(Ipv6Addr::LOCALHOST.into()).ok());
        }
        *self
            .inner
            .local
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(local);
        Ok(())
    }

    fn serve_at(&self, address: IpAddr) -> io::Result<SocketAddr> {
        // A port that is free for both.
        let mut last = None;
        for _ in 0..TRIES {
            let udp = UdpSocket::bind((address, 0))?;
            let at = udp.local_addr()?;
            match TcpListener::bind(at) {
                Ok(tcp) => {
                    self.udp(udp, Strangers::Refused)?;
                    self.tcp(tcp, Strangers::Refused)?;
                    return Ok(at);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    /// Where a message to `to` goes instead, if that is one of the servers whose questions are ours: to the
    /// loopback, or there itself if nothing is [served locally](Proxy::serve_local).
    pub fn redirect(&self, transport: Transport, to: SocketAddr) -> Option<SocketAddr> {
        let is_ours = matches!(transport, Transport::Tcp | Transport::Udp)
            && self.inner.redirected.iter().any(|server| {
                server.port() == to.port() && server.ip().to_canonical() == to.ip().to_canonical()
            });
        if !is_ours {
            return None;
        }
        let local = self.inner.local.lock();
        let local = local.unwrap_or_else(PoisonError::into_inner);
        let Some(local) = local.as_ref() else {
            return Some(to);
        };
        // A socket of IPv6 reaches the IPv4 loopback by a mapped address.
        let same = local
            .iter()
            .find(|local| local.is_ipv4() == to.is_ipv4())
            .copied();
        let mapped = || match local.first() {
            Some(SocketAddr::V4(v4)) if to.is_ipv6() => {
                Some(SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()))
            }
            _ => None,
        };
        same.filter(|_| to.is_ipv4() || to.ip().to_canonical().is_ipv6())
            .or_else(mapped)
    }

    /// Who sends from which address.
    pub fn senders(&self) -> &Senders {
        &self.inner.senders
    }

    /// Answers what comes to this socket, which the program alone reaches, from a thread of its own, as long as the process lives.
    ///
    /// # Errors
    /// The system's, if there can be no more threads.
    pub fn serve_udp(&self, socket: UdpSocket) -> io::Result<()> {
        self.udp(socket, Strangers::OfTheProgram)
    }

    fn udp(&self, socket: UdpSocket, strangers: Strangers) -> io::Result<()> {
        let (proxy, socket) = (self.clone(), Arc::new(socket));
        let run = move || {
            let mut buffer = vec![0; 4096];
            loop {
                match socket.recv_from(&mut buffer) {
                    Ok((length, from)) => {
                        let who = proxy.asker(Transport::Udp, from, strangers);
                        proxy.take(
                            &buffer[..length],
                            who,
                            Transport::Udp,
                            Asker::Udp(socket.clone(), from),
                        );
                    }
                    // What comes back from an asker that is gone.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => {
                        log::debug!("questions by UDP: {error}");
                        thread::sleep(PAUSE);
                    }
                }
            }
        };
        thread::Builder::new()
            .name("vnplug-dns-udp".to_owned())
            .spawn(run)?;
        Ok(())
    }

    /// Answers who connects to this socket, which the program alone reaches, from threads of its own, as long as the process
    /// lives.
    ///
    /// # Errors
    /// The system's, if there can be no more threads.
    pub fn serve_tcp(&self, listener: TcpListener) -> io::Result<()> {
        self.tcp(listener, Strangers::OfTheProgram)
    }

    fn tcp(&self, listener: TcpListener, strangers: Strangers) -> io::Result<()> {
        let proxy = self.clone();
        let run = move || {
            loop {
                match listener.accept() {
                    Ok((stream, from)) => proxy.connected(stream, from, strangers),
                    Err(error) => {
                        log::debug!("questions by TCP: {error}");
                        thread::sleep(PAUSE);
                    }
                }
            }
        };
        thread::Builder::new()
            .name("vnplug-dns-tcp".to_owned())
            .spawn(run)?;
        Ok(())
    }

    fn connected(&self, stream: TcpStream, from: SocketAddr, strangers: Strangers) {
        if self.inner.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            self.inner.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let proxy = self.clone();
        let run = move || {
            // Whatever goes wrong with it, it is closed.
            let _ = proxy.converse(stream, from, strangers);
            proxy.inner.connections.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new()
            .name("vnplug-dns-tcp".to_owned())
            .spawn(run)
            .is_err()
        {
            self.inner.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn converse(
        &self,
        mut stream: TcpStream,
        from: SocketAddr,
        strangers: Strangers,
    ) -> io::Result<()> {
        let mut known = None;
        stream.set_read_timeout(Some(IDLE))?;
        stream.set_write_timeout(Some(IDLE))?;
        loop {
            let mut length = [0; 2];
            stream.read_exact(&mut length)?;
            let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut message)?;
            // The connection stands before its address is noted, and the program sends after that. From then on
            // nobody else has the address while the connection stands.
            let who = known
                .clone()
                .or_else(|| self.asker(Transport::Tcp, from, strangers));
            known.clone_from(&who);
            let (answers, answer) = sync_channel(1);
            self.take(&message, who, Transport::Tcp, Asker::Tcp(answers));
            // The channel ends without an answer where there is none.
            let Ok(answer) = answer.recv() else {
                return Ok(());
            };
            stream.write_all(&framed(&answer))?;
        }
    }

    /// Who asks from this address; `None`: a stranger, who is refused.
    fn asker(
        &self,
        transport: Transport,
        from: SocketAddr,
        strangers: Strangers,
    ) -> Option<Arc<Who>> {
        let noted = self.inner.senders.who(transport, from);
        noted.or_else(|| match strangers {
            Strangers::Refused => None,
            Strangers::OfTheProgram => Some(Arc::default()),
        })
    }

    fn take(&self, bytes: &[u8], who: Option<Arc<Who>>, transport: Transport, to: Asker) {
        let query = match message::read(bytes) {
            Ok(query) => query,
            Err(Some(answer)) => return to.send(answer),
            Err(None) => return,
        };
        let Some(who) = who else {
            return to.send(query.answer(RCODE::Refused));
        };
        if let Some(address) = query.reverse() {
            let names = self.inner.gate.learned().names(address);
            // Of an address that we gave we know the name. Others are nobody's business, unless a rule says so.
            let act = act(who.clone(), transport, &query);
            if !names.is_empty() || self.inner.gate.test(&act).say != crate::rules::Say::Allow {
                return to.send(query.names(&names));
            }
        }
        let act = act(who, transport, &query);
        let (jobs, its) = (self.inner.jobs.clone(), act.clone());
        self.inner.gate.judge(&act, move |verdict| match verdict {
            Verdict::Deny => to.send(query.answer(RCODE::Refused)),
            Verdict::Allow if query.is_hidden() => to.send(query.answer(RCODE::NoError)),
            Verdict::Allow => {
                if let Err(error) = jobs.try_send(Job {
                    query,
                    act: its,
                    to,
                }) {
                    let (std::sync::mpsc::TrySendError::Full(job)
                    | std::sync::mpsc::TrySendError::Disconnected(job)) = error;
                    job.to.send(job.query.answer(RCODE::ServerFailure));
                }
            }
        });
    }
}

impl Asker {
    /// Sends an answer, or none if nobody takes it: whoever asked asks again.
    fn send(&self, answer: Vec<u8>) {
        match self {
            Self::Udp(socket, to) => {
                let _ = sendto(socket, &answer, SendFlags::DONTWAIT, to);
            }
            Self::Tcp(answers) => {
                let _ = answers.try_send(answer);
            }
        }
    }
}

fn act(who: Arc<Who>, transport: Transport, query: &Query) -> Act {
    Act {
        who,
        doing: Doing::Resolve,
        transport,
        target: Target::Name(query.name.as_str().to_owned()),
    }
}

/// Asks upstream, one question after the other.
fn work(jobs: &Mutex<Receiver<Job>>, upstream: &Upstream, gate: &Gate) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { query, act, to }) = job else {
            return;
        };
        let policy = gate.policy();
        let keep = |address| Floor::of(address).is_none() || policy.opens(address, &query.name);
        let Some(reply) = upstream.ask(&query, keep) else {
            to.send(query.answer(RCODE::ServerFailure));
            continue;
        };
        let by = gate.looked_up_by(&act);
        for &(address, life) in &reply.addresses {
            gate.learned().note(&query.name, address, life, &by);
        }
        if let Some(floor) = reply
            .left_away
            .first()
            .and_then(|&address| Floor::of(address))
        {
            gate.left_away(&act, floor);
        }
        match &to {
            Asker::Udp(..) => to.send(query.fit(reply.bytes)),
            Asker::Tcp(_) => to.send(reply.bytes),
        }
    }
}

/// Who sends questions from which address: noted by whoever does a program's call, before the question can be on
/// its way.
#[derive(Debug, Default)]
pub struct Senders {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// By TCP or not, and address; and when that was noted.
    by_address: HashMap<Key, (Arc<Who>, Instant)>,
    /// What was noted, the oldest first.
    order: VecDeque<(Key, Instant)>,
}

type Key = (bool, SocketAddr);

impl Senders {
    /// `who` sends from this address by `transport` now.
    pub fn note(&self, transport: Transport, from: SocketAddr, who: Arc<Who>) {
        self.note_at(transport, from, who, Instant::now());
    }

    pub(super) fn note_at(
        &self,
        transport: Transport,
        from: SocketAddr,
        who: Arc<Who>,
        now: Instant,
    ) {
        let key = key(transport, from);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { by_address, order } = &mut *known;
        by_address.insert(key, (who, now));
        order.push_back((key, now));
        while let Some(&(oldest, noted)) = order.front()
            && (order.len() > SENDERS || now.saturating_duration_since(noted) >= REMEMBERED)
        {
            order.pop_front();
            // It may have been noted once more since.
            if by_address.get(&oldest).is_some_and(|(_, at)| *at == noted) {
                by_address.remove(&oldest);
            }
        }
    }

    /// Who sends from this address, if that was noted, and not too long ago.
    pub fn who(&self, transport: Transport, from: SocketAddr) -> Option<Arc<Who>> {
        self.who_at(transport, from, Instant::now())
    }

    pub(super) fn who_at(
        &self,
        transport: Transport,
        from: SocketAddr,
        now: Instant,
    ) -> Option<Arc<Who>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let noted = |ip: IpAddr| {
            known
                .by_address
                .get(&key(transport, SocketAddr::new(ip, from.port())))
                .filter(|(_, noted)| now.saturating_duration_since(*noted) < REMEMBERED)
                .map(|(who, _)| who.clone())
        };
        // A socket that is bound to no address sends from whichever leads there.
        noted(from.ip())
            .or_else(|| noted(Ipv4Addr::UNSPECIFIED.into()))
            .or_else(|| noted(Ipv6Addr::UNSPECIFIED.into()))
    }
}

fn key(transport: Transport, from: SocketAddr) -> Key {
    (
        transport == Transport::Tcp,
        SocketAddr::new(from.ip().to_canonical(), from.port()),
    )
}

/// The most questions that wait to be asked upstream, and the most that are on their way.
const JOBS: usize = 256;
const WORKERS: usize = 8;
/// The most connections at once.
const CONNECTIONS: usize = 32;
/// The most senders that are known at once.
const SENDERS: usize = 16_384;
/// How long a sender is known: another user of the machine may have the port after that.
pub(super) const REMEMBERED: Duration = Duration::from_secs(300);
/// A connection without a question is closed after this time.
const IDLE: Duration = Duration::from_secs(10);
/// Between two failures of a socket.
const PAUSE: Duration = Duration::from_millis(100);
const TRIES: usize = 16;
