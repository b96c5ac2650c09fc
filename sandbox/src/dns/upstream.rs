//! Whom we ask.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use crate::dns::message::{Query, Reply};
use crate::wire::Dialled;

/// Makes a socket by which a server is asked.
type Dial<S> = Box<dyn Fn(SocketAddr) -> io::Result<Dialled<S>> + Send + Sync>;

/// Servers, in the order in which they are asked, and the way to them.
pub struct Upstream {
    servers: Vec<SocketAddr>,
    udp: Dial<UdpSocket>,
    tcp: Dial<TcpStream>,
}

impl Upstream {
    /// These servers, by the host's network.
    pub fn new(servers: Vec<SocketAddr>) -> Self {
        let udp = |server: SocketAddr| {
            let any = match server {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            // The kernel picks a port that nobody guesses, anew for each question.
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(server)?;
            Ok(socket)
        };
        let tcp = |server: SocketAddr| TcpStream::connect_timeout(&server, PATIENCE);
        Self::by(servers, udp, tcp)
    }

    /// These servers, by connected sockets that `udp` and `tcp` make: those of another network namespace.
    pub fn by<U: Into<Dialled<UdpSocket>>, T: Into<Dialled<TcpStream>>>(
        servers: Vec<SocketAddr>,
        udp: impl Fn(SocketAddr) -> io::Result<U> + Send + Sync + 'static,
        tcp: impl Fn(SocketAddr) -> io::Result<T> + Send + Sync + 'static,
    ) -> Self {
        Self {
            servers,
            udp: Box::new(move |server| udp(server).map(Into::into)),
            tcp: Box::new(move |server| tcp(server).map(Into::into)),
        }
    }

    /// Asks, server after server, each twice; blocks for as long as that takes. `None` if nobody answers.
    pub(crate) fn ask(&self, query: &Query, keep: impl Fn(IpAddr) -> bool) -> Option<Reply> {
        let rounds = self.servers.iter().chain(&self.servers);
        rounds
            .take(TRIES)
            .find_map(|&server| match self.by_udp(server, query, &keep) {
                Ok((reply, false)) => Some(reply),
                Ok((_, true)) => self.by_tcp(server, query, &keep).ok(),
                Err(error) => {
                    log::debug!("{server}: {error}");
                    None
                }
            })
    }

    fn by_udp(
        &self,
        server: SocketAddr,
        query: &Query,
        keep: impl Fn(IpAddr) -> bool,
    ) -> io::Result<(Reply, bool)> {
        let socket = (self.udp)(server)?;
        let id = random()?;
        socket.send(&query.forward(id))?;
        let until = Instant::now() + PATIENCE;
        let mut buffer = vec![0; 1 << 16];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            socket.set_read_timeout(Some(left))?;
            let length = socket.recv(&mut buffer)?;
            // What does not answer our question is not from whom we asked.
            if let Some(reply) = query.filter(id, &buffer[..length], &keep) {
                return Ok(reply);
            }
        }
    }

    fn by_tcp(
        &self,
        server: SocketAddr,
        query: &Query,
        keep: impl Fn(IpAddr) -> bool,
    ) -> io::Result<Reply> {
        let socket = (self.tcp)(server)?;
        let mut stream: &TcpStream = &socket;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let id = random()?;
        stream.write_all(&framed(&query.forward(id)))?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut message)?;
        let reply = query.filter(id, &message, keep);
        reply
            .map(|(reply, _)| reply)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// A message as TCP carries it: behind its length. One that is too long is cut to nothing.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let Ok(length) = u16::try_from(message.len()) else {
        return vec![0, 0];
    };
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(message);
    framed
}

/// A number that nobody guesses.
fn random() -> io::Result<u16> {
    let mut bytes = [0; 2];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u16::from_ne_bytes(bytes))
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream")
            .field("servers", &self.servers)
            .finish_non_exhaustive()
    }
}

/// How long a server may take: what the C library waits is twice that.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many tries there are, over all servers.
const TRIES: usize = 4;
