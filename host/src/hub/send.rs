//! Ports that send: their transmit rings, and kicks.
//!
//! A port has one transmit ring, however many queues it reads, served by the thread of the first of
//! them: frames leave in the order in which they were written.

use std::collections::BTreeMap;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vnplug_ring::control::{Open, RingPlace, Segments, code};
use vnplug_ring::layout::{DATA_OFFSET, Geometry, MAX_CAPACITY, MIN_CAPACITY};
use vnplug_ring::{Intake, Region};

use super::ground::Ground;
use super::open::{fresh_epoch, no_memory};
use super::plan::{PortPlan, longest_record};
use super::{Hub, Owed, Peer, PortRecord, Refusal, Step};
use vnplug_os::closer::PeerFd;
use vnplug_os::socket;
use vnplug_path::batch::Handle;
use vnplug_path::engine::Command;
use vnplug_path::engine::sender::Sender;

/// The longest frame that a port may send, in bytes: more than a jumbo frame with its tags.
pub(super) const MAX_SEND: u32 = 16 << 10;
/// The same where super-frames are taken: 64 KiB, Ethernet header, tags and what comes before.
const MAX_SEND_MERGED: u32 = 66 << 10;

/// Why what a port received cannot be posted.
const POSTS: &str =
    "what a member of a group receives is not posted: others' packets lie in the same memory";
/// Why it cannot be by that port.
const NO_POSTS: &str =
    "both ports are to be opened with `posts`, and the one that sends with a transmit ring";
/// The most ports to which one is lent: the thread of each is asked when it is closed.
const MAX_BORROWERS: usize = 64;
/// Rings that one transmit ring's records may name.
const MAX_LENT: usize = 256;

impl Hub {
    /// Bytes of the record area of the transmit ring that a request wants; 0 = none.
    pub(super) fn transmit_capacity(&self, request: &Open) -> Result<u64, Refusal> {
        let wanted = request.transmit_bytes;
        if request.posts && !request.group.is_empty() {
            return Err(Refusal::new(code::INVALID, POSTS));
        }
        if wanted == 0 {
            return Ok(0);
        }
        let source = &self.sources[self.find(&request.device)?.source];
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

    /// Makes the transmit ring of a port that is to have one. A process gets its end of the socket by
    /// which it kicks.
    pub(super) fn sender(
        &mut self,
        plan: &PortPlan,
        ground: &mut Ground<'_>,
        owner: &Peer,
        (handle, link_type): (Handle, u32),
        (request, areas): (&Open, &[Region]),
    ) -> Result<Option<Box<Sender>>, Refusal> {
        if plan.transmit == 0 {
            return Ok(None);
        }
        let longest = match request.segments {
            Segments::Wire => MAX_SEND,
            Segments::Merged => MAX_SEND_MERGED,
        };
        let geometry = Geometry {
            capacity: plan.transmit,
            snaplen: longest_record(plan.transmit).min(longest),
            link_type,
            epoch: fresh_epoch(),
            port: handle.port,
            queue: plan.queues[0] as u32,
        };
        let mut intake = Intake::create(ground.part(ground.transmit)?, geometry)
            .map_err(|error| Refusal::new(code::INVALID, error.to_string()))?;
        if request.posts {
            intake.lend(areas.iter().cloned());
        }
        let mut kicks = None;
        if ground.is_own() {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let (read, write) = pair.map_err(|errno| no_memory(0, &errno.into()))?;
            // Where the kernel cannot refuse descriptors, what is read stops before them.
            socket::pass_rights(&read, false);
            kicks = Some(PeerFd::new(read, self.closers.of(owner)));
            ground.fds.push(write);
        }
        let mut sender = Sender::new(handle.port, intake, kicks, ground.holes.take());
        sender.handle = handle;
        sender.segments = request.segments;
        Ok(Some(Box::new(sender)))
    }

    /// The record areas in which a port posts, or others do to which it is lent: memory that it maps, so that it could
    /// have copied from there as well.
    pub(super) fn areas(
        plan: &PortPlan,
        ground: &Ground<'_>,
        request: &Open,
    ) -> Result<Vec<Region>, Refusal> {
        let rings = ground.rings.iter().filter(|_| request.posts);
        let area = |ring: &RingPlace| {
            ground.part(RingPlace {
                offset: ring.offset + DATA_OFFSET,
                len: plan.capacity,
            })
        };
        rings.map(area).collect()
    }

    /// What `port` receives may be posted by `to`, where its first ring has that number. Both are of one
    /// application.
    pub(crate) fn lend_port(&mut self, port: u32, to: u32, first: u16) -> Result<Step, Refusal> {
        let refusal = || Refusal::new(code::INVALID, NO_POSTS);
        let (lender, sends) = match (self.ports.get(&port), self.ports.get(&to)) {
            (Some(lender), Some(sends)) if port != to => (lender, sends),
            _ => return Err(refusal()),
        };
        let areas = lender.areas.clone();
        if areas.is_empty() || sends.areas.is_empty() || sends.transmit == 0 {
            return Err(refusal());
        }
        let numbers = usize::from(first)..usize::from(first) + areas.len();
        if numbers.start < sends.areas.len() || numbers.end > MAX_LENT {
            let what = format!(
                "numbers from {} up to {MAX_LENT} are free",
                sends.areas.len()
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        if lender.lent_to.len() >= MAX_BORROWERS && !lender.lent_to.contains_key(&to) {
            let what = format!("a port is lent to {MAX_BORROWERS} others at most");
            return Err(Refusal::new(code::LIMIT, what));
        }
        let there = (sends.source, sends.queues[0]);
        let line = self.sources[there.0].workers[there.1].line();
        if let Some(lender) = self.ports.get_mut(&port) {
            lender.lent_to.insert(to, there);
        }
        if let Some(sends) = self.ports.get_mut(&to) {
            sends.lenders.insert(port);
        }
        let lent = (port, first, areas);
        let owed = Owed::ask(line, |reply| Command::Lend(to, lent, reply));
        Ok(Step::after(vec![owed], |_, heard| Step::done_if(heard)))
    }

    /// Tells the threads of those to which a port is lent that it is over; one that is closing may still send what waits.
    pub(super) fn withdraw(
        &self,
        port: u32,
        lent_to: &BTreeMap<u32, (usize, usize)>,
    ) -> Vec<Owed<Vec<Region>>> {
        let withdraw = |(&to, &(source, queue)): (&u32, &(usize, usize))| {
            let line = self.sources[source].workers[queue].line();
            Owed::ask(line, |reply| Command::Withdraw(to, port, reply))
        };
        lent_to.iter().map(withdraw).collect()
    }

    /// Nothing is lent to a port any more, nor is it: all threads have let it go.
    pub(super) fn returned(&mut self, id: u32, record: &PortRecord) {
        for lender in &record.lenders {
            if let Some(lender) = self.ports.get_mut(lender) {
                lender.lent_to.remove(&id);
            }
        }
        for to in record.lent_to.keys() {
            if let Some(to) = self.ports.get_mut(to) {
                to.lenders.remove(&id);
            }
        }
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
        let mut queues: BTreeMap<(usize, usize), Vec<u32>> = BTreeMap::new();
        for port in ports {
            if let Some(record) = self.ports.get(&port).filter(|it| it.transmit > 0) {
                let queue = (record.source, record.queues[0]);
                queues.entry(queue).or_default().push(port);
            }
        }
        for ((source, queue), ports) in queues {
            self.sources[source].workers[queue].send(Command::Kick(ports));
        }
    }
}
