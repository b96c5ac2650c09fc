//! Clients of plain sockets (stream, bess, dgram), and a switch with these entrances.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, sockopt,
};
use vnplug_switch::{Access, SwitchConfig};
use vnplug_testing::{TestDir, eventually};

use crate::served::Served;

pub(crate) fn config(home: &TestDir) -> SwitchConfig {
    let mut config = SwitchConfig::new("lan0");
    config.sockets.stream = Some(home.path("stream"));
    config.sockets.bess = Some(home.path("bess"));
    config.sockets.dgram = Some(home.path("dgram"));
    config.sockets.access = Access {
        mode: 0o777,
        ..Access::default()
    };
    config
}

pub(crate) fn served(home: &TestDir) -> Served {
    Served::new(config(home)).0
}

/// What speaks to a switch.
pub(crate) trait Client {
    fn send(&self, frame: &[u8]);
    fn next(&self) -> Vec<u8>;
}

/// A connection with lengths before frames.
pub(crate) struct Stream(pub(crate) UnixStream);

/// A connection of packets.
pub(crate) struct Packets(pub(crate) OwnedFd);

/// A pair of datagram sockets with names.
pub(crate) struct Named(UnixDatagram);

impl Stream {
    pub(crate) fn join(home: &TestDir) -> Self {
        let stream = UnixStream::connect(home.path("stream")).unwrap();
        let limit = Some(Duration::from_secs(20));
        stream.set_read_timeout(limit).unwrap();
        stream.set_write_timeout(limit).unwrap();
        Self(stream)
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        (&self.0).write_all(bytes).unwrap();
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!((&self.0).read(&mut [0; 1]), Ok(0))
            || matches!((&self.0).write(&[0]), Err(error) if error.kind() == ErrorKind::BrokenPipe)
    }
}

pub(crate) fn with_length(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

impl Client for Stream {
    fn send(&self, frame: &[u8]) {
        self.write(&with_length(frame));
    }

    fn next(&self) -> Vec<u8> {
        let mut len = [0; 4];
        (&self.0).read_exact(&mut len).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        (&self.0).read_exact(&mut frame).unwrap();
        frame
    }
}

impl Packets {
    pub(crate) fn join(home: &TestDir) -> Self {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.unwrap();
        connect(&socket, &SocketAddrUnix::new(home.path("bess")).unwrap()).unwrap();
        let limit = Some(Duration::from_secs(20));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, limit).unwrap();
        Self(socket)
    }

    /// Bytes of the next frame, which stays where it is; 0 where nobody is there any more.
    pub(crate) fn look(&self) -> Option<usize> {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        recv(&self.0, &mut [0; 2000], flags)
            .ok()
            .map(|(_, len)| len)
    }
}

impl Client for Packets {
    fn send(&self, frame: &[u8]) {
        send(&self.0, frame, SendFlags::NOSIGNAL).unwrap();
    }

    fn next(&self) -> Vec<u8> {
        let mut bytes = vec![0; 70_000];
        let (_, len) = recv(&self.0, &mut bytes[..], RecvFlags::empty()).unwrap();
        bytes.truncate(len);
        bytes
    }
}

impl Named {
    /// As QEMU does it: binds its name, and sends to the other's.
    pub(crate) fn join(home: &TestDir, name: &str) -> Self {
        let dir = home.path("dgram");
        let _ = std::fs::remove_file(dir.join(name));
        let socket = UnixDatagram::bind(dir.join(name)).unwrap();
        let limit = Some(Duration::from_secs(20));
        socket.set_read_timeout(limit).unwrap();
        let port = dir.join(format!("{name}.port"));
        eventually("it has a port", || port.exists());
        Self(socket)
    }

    pub(crate) fn port(&self) -> PathBuf {
        let name = self.0.local_addr().unwrap();
        let mut name = name.as_pathname().unwrap().as_os_str().to_owned();
        name.push(".port");
        name.into()
    }
}

impl Client for Named {
    fn send(&self, frame: &[u8]) {
        self.0.send_to(frame, self.port()).unwrap();
    }

    fn next(&self) -> Vec<u8> {
        let mut bytes = vec![0; 70_000];
        let len = self.0.recv(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }
}
