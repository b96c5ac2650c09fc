//! VMs that a test plays: it says what their agents say, and maps the memory that their guests map.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vnplug::Client;
use vnplug_ring::control::{Message, Open, Opened, RingPlace, Role, VmKind, VmSpec};
use vnplug_ring::{Consumer, Producer, Region};

use crate::daemon::Daemon;
use crate::raw::Raw;

/// One of them.
#[derive(Debug)]
pub struct PlayedVm {
    /// The agent's end of the channel.
    pub agent: Raw,
    /// The file of the memory pool.
    pub file: File,
    /// The pool, mapped.
    pub pool: Region,
}

impl PlayedVm {
    /// Attaches a VM and says its agent's Hello: on a serial line if it is a User-mode Linux.
    ///
    /// # Panics
    /// If the daemon refuses, or the pool cannot be mapped.
    #[must_use]
    pub fn attach(daemon: &Daemon, spec: VmSpec) -> Self {
        let mut operator = Client::connect_to(&daemon.socket()).expect("the daemon listens");
        let (name, kind) = (spec.name.clone(), spec.kind);
        let ready = operator.attach_vm(spec).expect("the VM is attached");
        let mut agent = match kind {
            VmKind::Uml => {
                let (ours, theirs) = UnixStream::pair().expect("a socket pair");
                operator.adopt(&name, theirs.as_fd()).expect("adopted");
                Raw::on_a_line(ours)
            }
            _ => Raw::connect(Path::new(&ready.control_path)),
        };
        agent.hello(Role::Agent);
        let mut options = File::options();
        let file = options.read(true).write(true).open(&ready.pool_path);
        let file = file.expect("the pool's file");
        let pool = vnplug::map_memory(file.as_fd(), ready.pool_len).expect("the pool is mapped");
        Self { agent, file, pool }
    }

    /// Opens a port.
    ///
    /// # Panics
    /// If that is refused.
    pub fn open(&mut self, request: Open) -> Opened {
        match self.agent.ask(&Message::Open(request), 1) {
            Message::Opened(opened) => opened,
            other => panic!("not opened but {other:?}"),
        }
    }

    /// The reader's end of a port of one ring.
    ///
    /// # Panics
    /// If it has another number of them, or its ring is none.
    #[must_use]
    pub fn reader(&self, port: &Opened) -> Consumer {
        let [place] = port.rings[..] else {
            panic!("not one ring: {port:?}");
        };
        Consumer::attach(self.part(place)).expect("a ring")
    }

    /// The sender's end of a port that sends.
    ///
    /// # Panics
    /// If it does not send.
    #[must_use]
    pub fn sender(&self, port: &Opened) -> Producer {
        Producer::attach(self.part(port.transmit)).expect("a transmit ring")
    }

    fn part(&self, place: RingPlace) -> Region {
        let part = self.pool.part(place.offset, place.len);
        part.expect("a place in the pool")
    }
}
