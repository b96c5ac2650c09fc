//! Sockets that outlive the process: the kernel goes on filling their rings, and the next process reads on.
//!
//! Their names have all that the rings' bytes do not tell, and that a socket cannot be asked. One that a process finds is taken
//! only if it is what it would have opened itself; else all of that source are opened anew.

use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError};

use super::AfPacketConfig;
use super::rings::Rings;
use super::socket::{Bound, Opener, PACKET_VNET_HDR};
use vnplug_os::kept::{Keeping, Kept};
use vnplug_os::packet::{Ring, RingShape, Socket};

/// Who keeps a source's sockets over a restart, and as what.
#[derive(Debug, Clone)]
pub struct Lasting {
    /// Who does.
    pub kept: Arc<Kept>,
    /// What no other source is called.
    pub name: String,
    /// Block timeouts with which rings that were kept will do, too: nobody has said another.
    pub timeouts_ms: Vec<u32>,
}

impl PartialEq for Lasting {
    fn eq(&self, other: &Self) -> bool {
        let is_one = Arc::ptr_eq(&self.kept, &other.kept);
        is_one && self.name == other.name && self.timeouts_ms == other.timeouts_ms
    }
}

impl Eq for Lasting {}

impl Opener {
    /// Those by which sockets that were kept may go on, the best first: rings stay as they were made.
    pub(super) fn resumable(config: &AfPacketConfig) -> impl Iterator<Item = Arc<Self>> {
        let own = config.block_timeout_ms;
        let others = config.lasting.iter().flat_map(|it| &it.timeouts_ms);
        let others = others.copied().filter(move |ms| *ms != own);
        std::iter::once(own).chain(others).map(|block_timeout_ms| {
            Arc::new(Self::new(AfPacketConfig {
                block_timeout_ms,
                ..config.clone()
            }))
        })
    }

    /// Goes on with what an earlier process received into; `None`: there is nothing, or not all of it.
    pub(super) fn resume(&self) -> Option<Vec<Bound>> {
        let queues = 0..self.config().queues;
        let bound: Option<Vec<_>> = queues.map(|queue| self.resume_one(queue)).collect();
        let bound = bound?;
        if let Some(first) = bound.first()
            && self.config().queues > 1
        {
            let group = group_of(first.rings.socket())?;
            let is_one = |bound: &Bound| group_of(bound.rings.socket()) == Some(group);
            bound.iter().all(is_one).then_some(())?;
            *self.group.lock().unwrap_or_else(PoisonError::into_inner) = Some(group);
        }
        Some(bound)
    }

    fn resume_one(&self, queue: u32) -> Option<Bound> {
        let (main, reserve) = self.ring_shapes();
        let mut keeping = Vec::new();
        let main = self.adopt(queue, MAIN, main, &mut keeping)?;
        let link = self.link(main.socket()).ok()?;
        let reserve = match reserve {
            None => None,
            Some(shape) => Some(self.adopt(queue, RESERVE, shape, &mut keeping)?),
        };
        let rings = Rings::new(main, reserve, self.config().offload);
        // An interface of the same name may be another one.
        let is_bound = |socket: &Socket| socket.bound_to().is_ok_and(|to| to == link.index);
        rings.sockets().all(is_bound).then_some(())?;
        // The reserve of another main ring would have what that has.
        let groups: Vec<_> = rings.sockets().map(group_of).collect();
        groups
            .windows(2)
            .all(|two| two[0].is_some() && two[0] == two[1])
            .then_some(())?;
        Some(Bound {
            rings,
            link,
            namespace: None,
            queue,
            keeping,
            resumed: true,
        })
    }

    fn adopt(
        &self,
        queue: u32,
        which: &str,
        shape: RingShape,
        keeping: &mut Vec<Keeping>,
    ) -> Option<Ring> {
        let lasting = self.lasting()?;
        let (fd, theirs) = lasting.kept.take_kept(&self.name(lasting, queue, which))?;
        keeping.push(theirs);
        let socket = Socket::adopt(fd).ok()?;
        let has_headers = socket.get(PACKET_VNET_HDR).ok()? != 0;
        let is_ours =
            socket.get(libc::PACKET_VERSION).ok()? == libc::tpacket_versions::TPACKET_V3 as i32;
        if has_headers != self.config().offload || !is_ours {
            return None;
        }
        socket.map(shape).ok()
    }

    /// Has the sockets of a queue kept.
    pub(super) fn keep(&self, queue: u32, rings: &Rings) -> Vec<Keeping> {
        let Some(lasting) = self.lasting() else {
            return Vec::new();
        };
        let sockets = rings.sockets().zip([MAIN, RESERVE]);
        let keep = |(socket, which): (&Socket, &str)| {
            let name = self.name(lasting, queue, which);
            lasting.kept.keep(&name, socket.as_fd())
        };
        sockets.filter_map(keep).collect()
    }

    /// Where another process could not enter, it finds nothing either.
    fn lasting(&self) -> Option<&Lasting> {
        let config = self.config();
        config
            .lasting
            .as_ref()
            .filter(|_| config.namespace.is_none())
    }

    /// What the sockets of a queue are called, with what must be the same for the next process.
    fn name(&self, lasting: &Lasting, queue: u32, which: &str) -> String {
        let config = self.config();
        let one = |is: bool| u8::from(is);
        format!(
            "{FORM} {} {queue}/{} {which} {}x{}@{} reserve={} {:?} promiscuous={} hardware={} send={}",
            lasting.name,
            config.queues,
            config.block_size,
            config.blocks,
            config.block_timeout_ms,
            one(config.shares().is_some()),
            config.direction,
            one(config.promiscuous),
            one(config.hardware_timestamps),
            config.send_bytes.unwrap_or(0),
        )
    }
}

/// The group of the kernel's that a socket is in.
fn group_of(socket: &Socket) -> Option<u16> {
    socket.get(libc::PACKET_FANOUT).ok().map(|word| word as u16)
}

/// Changes when rings mean something else, or their notes do.
const FORM: &str = "packets1";
const MAIN: &str = "main";
const RESERVE: &str = "reserve";
