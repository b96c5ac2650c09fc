//! The entrance for programs of VDE, unmodified: the socket protocol of `vde_switch` 2.3.
//!
//! A directory has a stream socket `ctl`. A client connects to it and sends a request
//! ([`request`]), which names a datagram socket of its own. The answer is a `sockaddr_un` with the
//! name of a datagram socket of ours (`NNN.FD` in the same directory: the port's number, and a number
//! that tells two of them apart). Then each datagram is a frame, both ways ([`crate::sockets::datagrams`]), until the
//! client closes the stream. `door` has the thread that does all of this but the frames; `console` is
//! the management console, as `vdeterm` and `vdecmd` expect it.

pub(crate) mod console;
pub(crate) mod door;
pub(crate) mod request;
