//! Sockets of the supervisor's own on a program's wire.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};

use super::fence::Fence;
use super::space::Maker;
use crate::act::Transport;

/// Makes sockets of the supervisor's own on a program's wire, each of which may speak with one peer.
#[derive(Debug)]
pub struct Dialler {
    pub(super) maker: Arc<Maker>,
    pub(super) fence: Arc<Fence>,
}

/// A socket of the supervisor's own. When it is dropped, no other socket that gets its port may speak in its place.
#[derive(Debug)]
pub struct Dialled<S> {
    // The first field is closed first.
    socket: S,
    /// None: there is no fence in its way.
    _permit: Option<PortPermit>,
}

/// That a port may speak with a peer, as long as this lives.
#[derive(Debug)]
struct PortPermit {
    fence: Arc<Fence>,
    transport: Transport,
    server: SocketAddr,
    own: u16,
}

impl Dialler {
    /// A socket that is connected to this server.
    ///
    /// # Errors
    /// The system's.
    pub fn udp(&self, server: SocketAddr) -> io::Result<Dialled<UdpSocket>> {
        let socket = UdpSocket::from(self.bound(server, SocketType::DGRAM)?);
        let _permit = Some(self.permit(Transport::Udp, server, socket.local_addr()?));
        socket.connect(server)?;
        Ok(Dialled { socket, _permit })
    }

    /// A connection to this server, made within a time.
    ///
    /// # Errors
    /// The system's.
    pub fn tcp(&self, server: SocketAddr, limit: Duration) -> io::Result<Dialled<TcpStream>> {
        let socket = TcpStream::from(self.bound(server, SocketType::STREAM)?);
        let _permit = Some(self.permit(Transport::Tcp, server, socket.local_addr()?));
        socket.set_write_timeout(Some(limit))?;
        // As long as it may take to write it may take to connect (socket(7), SO_SNDTIMEO).
        rustix::net::connect(&socket, &server)?;
        Ok(Dialled { socket, _permit })
    }

    /// A socket of this own address that is connected to this server.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn udp_from(
        &self,
        own: SocketAddr,
        server: SocketAddr,
    ) -> io::Result<Dialled<UdpSocket>> {
        let family = match own {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = UdpSocket::from(self.maker.socket(family, SocketType::DGRAM)?);
        rustix::net::bind(&socket, &own)?;
        let _permit = Some(self.permit(Transport::Udp, server, own));
        socket.connect(server)?;
        Ok(Dialled { socket, _permit })
    }

    fn permit(&self, transport: Transport, server: SocketAddr, own: SocketAddr) -> PortPermit {
        self.fence.permit_port(transport, server, own.port());
        PortPermit {
            fence: Arc::clone(&self.fence),
            transport,
            server,
            own: own.port(),
        }
    }

    fn bound(&self, server: SocketAddr, kind: SocketType) -> io::Result<OwnedFd> {
        let (family, any): (_, IpAddr) = match server {
            SocketAddr::V4(_) => (AddressFamily::INET, Ipv4Addr::UNSPECIFIED.into()),
            SocketAddr::V6(_) => (AddressFamily::INET6, Ipv6Addr::UNSPECIFIED.into()),
        };
        let socket = self.maker.socket(family, kind)?;
        rustix::net::bind(&socket, &SocketAddr::new(any, 0))?;
        Ok(socket)
    }
}

impl<S> From<S> for Dialled<S> {
    /// A socket of the host's network.
    fn from(socket: S) -> Self {
        Self {
            socket,
            _permit: None,
        }
    }
}

impl<S> Deref for Dialled<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

impl Drop for PortPermit {
    fn drop(&mut self) {
        self.fence
            .revoke_port(self.transport, self.server, self.own);
    }
}
