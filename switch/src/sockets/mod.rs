//! The entrances for machines without shared memory: plain sockets, frames and nothing else.
//!
//! | entrance | is for | a port is |
//! |---|---|---|
//! | `stream` | QEMU `-netdev stream` and `socket`, passt, socket_vmnet | a connection, frames with their lengths before them |
//! | `bess` | User-mode Linux `vecN:transport=bess`, gvisor-tap-vsock | a connection of packets (`SOCK_SEQPACKET`), each a frame |
//! | `dgram` | QEMU `-netdev dgram` | a pair of datagram sockets with names in a directory |
//!
//! `door` has the thread that lets them in; `stream` and `datagrams` have the frames, `pairs` the files
//! of the last kind. VDE's data sockets are `datagrams`, too.

pub(crate) mod datagrams;
pub(crate) mod door;
pub(crate) mod pairs;
pub(crate) mod stream;
