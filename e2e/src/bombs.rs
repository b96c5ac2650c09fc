//! Descriptors that block a process that drops their last reference, and pages that block one that copies
//! into them: what a hostile peer does with the kernel objects that it shares.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

pub use crate::sys::{UnansweredPage, forget_pass_rights};

/// A TCP socket whose close waits: it lingers, and its peer reads nothing.
#[derive(Debug)]
pub struct Lingering {
    /// Whoever closes this last waits.
    pub socket: OwnedFd,
    /// The peer; the wait ends with it.
    pub peer: TcpStream,
}

/// Makes one over the loopback interface of the network namespace that this thread is in.
///
/// # Panics
/// If there is no loopback.
#[must_use]
pub fn lingering(time: Duration) -> Lingering {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let mut socket = TcpStream::connect(address).expect("a connection");
    let (peer, _) = listener.accept().expect("its other end");
    set_socket_linger(&socket, Some(time)).expect("it lingers");
    socket.set_nonblocking(true).expect("a flag");
    // What the peer's kernel does not take stays here.
    while socket.write(&[0; 1 << 16]).is_ok() {}
    let socket = socket.into();
    Lingering { socket, peer }
}
