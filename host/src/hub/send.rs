//! Ports that send: their transmit rings, and kicks.
//!
//! A port has one transmit ring, however many queues it reads, served by the thread of the first of
//! them: frames leave in the order in which they were written.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vnplug_ring::control::{Open, RingPlace, code};
use vnplug_ring::layout::{Geometry, MAX_CAPACITY, MIN_CAPACITY};
use vnplug_ring::{Intake, Region};

use super::open::no_memory;
use super::{Hub, Owed, Refusal};
use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::memory::Holes;
use vnplug_os::socket;
use vnplug_path::batch::Handle;
use vnplug_path::engine::Command;
use vnplug_path::engine::sender::Sender;

/// The longest frame that a port may send, in bytes: more than a jumbo frame with its tags.
pub(super) const MAX_SEND: u32 = 16 << 10;

impl Hub {
    /// Bytes of the record area of the transmit ring that a request wants; 0 = none.
    pub(super) fn transmit_capacity(&self, request: &Open) -> Result<u64, Refusal> {
        let wanted = request.transmit_bytes;
        if wanted == 0 {
            return Ok(0);
        }
        let source = &self.sources[self.find(&request.device)?.0];
        if !source.transmits {
            let what = format!(
                "source {:?} ({}) cannot send; open the port without a transmit ring",
                source.name, source.kind
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        if wanted > most {
            let what = format!("a transmit ring of {wanted} bytes; the limit is {most}");
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(wanted.max(MIN_CAPACITY).next_power_of_two())
    }

    /// Makes a transmit ring and tells the queue's thread; for a process (which has a closer) there
    /// is its end of the socket by which it kicks.
    pub(super) fn attach_sender(
        &self,
        memory: &Region,
        place: RingPlace,
        (geometry, handle): (Geometry, Handle),
        (source, queue): (usize, usize),
        closer: Option<Closer>,
        holes: Option<Holes>,
    ) -> Result<Option<OwnedFd>, Refusal> {
        let part = memory
            .part(place.offset, place.len)
            .ok_or_else(|| Refusal::new(code::INTERNAL, "a ring outside its memory"))?;
        let intake = Intake::create(part, geometry)
            .map_err(|error| Refusal::new(code::INVALID, error.to_string()))?;
        let (read, write) = match closer {
            Some(closer) => {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
                let (read, write) = pair.map_err(|errno| no_memory(0, &errno.into()))?;
                // Where the kernel cannot refuse descriptors, what is read stops before them.
                socket::pass_rights(&read, false);
                (Some(PeerFd::new(read, closer)), Some(write))
            }
            None => (None, None),
        };
        let mut sender = Box::new(Sender::new(geometry.port, intake, read, holes));
        sender.handle = handle;
        self.sources[source].workers[queue].send(Command::AttachSender(sender));
        Ok(write)
    }

    /// Ends a port's transmit ring. Until the thread has answered it may still read there.
    pub(super) fn detach_sender(
        &self,
        id: u32,
        source: usize,
        queue: usize,
    ) -> Owed<Option<Box<Sender>>> {
        let line = self.sources[source].workers[queue].line();
        Owed::ask(line, |reply| Command::DetachSender(id, reply))
    }

    /// Wakes the threads that serve the transmit rings of these ports.
    pub(crate) fn kick(&self, ports: impl Iterator<Item = u32>) {
        let queues: BTreeSet<(usize, usize)> = ports
            .filter_map(|port| self.ports.get(&port))
            .filter(|record| record.transmit > 0)
            .map(|record| (record.source, record.queues[0]))
            .collect();
        for (source, queue) in queues {
            self.sources[source].workers[queue].send(Command::Kick);
        }
    }
}
