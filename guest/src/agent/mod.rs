//! The guest agent: answers applications in a guest as the daemon does on a host.
//!
//! ```text
//!   application ──Unix socket── agent ──virtio-serial or tty── vnplugd
//!        └──── ring memory: ivshmem BAR, /dev/dax or /dev/mmapper ─┘
//! ```
//!
//! The agent relays requests and answers, hands out the memory's descriptor, and forwards wake-ups
//! into one pipe per port. With a doorbell device that works (`agent::doorbell`) ports are woken by
//! interrupts instead, past the agent. It is not in the path of packets. One thread, one epoll loop; nothing
//! runs while nothing happens, but for a question every few seconds whether the host still answers.
//!
//! | phase     | meaning                                   | next step                             |
//! |-----------|-------------------------------------------|---------------------------------------|
//! | Searching | no device, or no channel                  | look again at news, or after 300 ms   |
//! | Silent    | the channel's other end is not connected  | look again every 10 ms, then 300 ms   |
//! | Greeting  | Hello was said                            | say it again after 500 ms, then 2 s   |
//! | Up        | Welcome, and its pool is our memory       | ask every 5 s; twice no answer: greet |
//!
//! Leaving Up closes every application's ports (`Gone`), answers what is pending with
//! `UNAVAILABLE`, and keeps the connections: libraries reopen by themselves. The places of rings
//! that applications may still map are named in the next Hello, and released when the
//! application's connection closes, which a library does only after unmapping.
//!
//! Applications are not trusted: they may not say what only agents and operators may, a malformed
//! message, a descriptor or an unread backlog closes the connection, and connections per user are
//! limited. What an application had its hands on is closed by a thread of its user (`closer`). An
//! application with too many requests under way is read again when one is answered.

mod accept;
mod app;
mod arena;
mod backend;
mod channel;
mod closer;
mod dax;
mod doorbell;
mod find;
mod held;
mod phase;
mod places;
mod plugged;
mod plugs;
mod relay;
mod room;
mod serve;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use vnplug_ring::control::DEFAULT_SOCKET;

use crate::error::Error;

/// How the agent is to run.
#[derive(Debug)]
pub struct AgentConfig {
    /// Where applications connect.
    pub socket: PathBuf,
    /// Group that may connect; `None`: every user may (applications need not be root).
    pub group: Option<u32>,
    /// Where the memory and the channel are.
    pub device: AgentDevice,
    /// Use the VM's doorbell device, if it has one that works; not with [`AgentDevice::Given`]. It
    /// is taken into use when the host is met, or later as soon as no port is open.
    pub doorbell: bool,
    /// The agent returns when this descriptor becomes readable or its other end closes.
    pub stop: Option<OwnedFd>,
    /// Who is told how it stands.
    pub hears: Option<Hears>,
}

/// How the agent stands with its host. Applications can connect either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The host's daemon answers: applications are served.
    Connected,
    /// Nothing is plugged in, or nobody answers: applications are told to come again.
    Waiting,
}

/// Hears how the agent stands: first when applications can connect, then at each change. The agent waits for it.
pub struct Hears(pub Box<dyn FnMut(Standing) + Send>);

impl fmt::Debug for Hears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hears")
    }
}

/// Where the memory and the channel are.
#[derive(Debug, Default)]
pub enum AgentDevice {
    /// Look for them: a PCI or virtio-pmem device with the pool's header and a virtio-serial port of our name
    /// (QEMU); or `/dev/mmapper` and the tty that the kernel command line names in `vnplug=ttyS0`
    /// (User-mode Linux). They may come and go.
    #[default]
    Search,
    /// Files or devices; what is `None` is searched.
    Paths {
        /// The memory pool.
        memory: Option<PathBuf>,
        /// The control channel.
        channel: Option<PathBuf>,
    },
    /// Open descriptors, for tests and for those who start the agent with them.
    Given {
        /// The memory pool.
        memory: OwnedFd,
        /// The control channel: any byte stream.
        channel: OwnedFd,
    },
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            group: None,
            device: AgentDevice::Search,
            doorbell: true,
            stop: None,
            hears: None,
        }
    }
}

/// Serves until [`AgentConfig::stop`] says otherwise.
///
/// # Errors
/// [`Error::System`] if the socket cannot be made, or something of the system's fails that a retry
/// does not heal. An absent device is no error: the agent waits for it.
pub fn run(config: AgentConfig) -> Result<(), Error> {
    serve::Agent::new(config)?.run()
}
