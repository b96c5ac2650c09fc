//! Direct mode: a port that is a member of a trust group; see [`vnplug_ring::direct`].
//!
//! The port's own rings stay what they are, the way to the switch and from it. Beside them it reads a ring
//! of each other member, as one of [`Port::rings`](super::Port), and writes one to each ([`Ways`]). Who is a
//! member the daemon tells; the table's roster says when to ask. Whatever goes wrong here ends direct mode
//! and not the port: all frames go through the switch then.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use vnplug_ring::control::{Direct as Request, DirectMember, Members, Message, Segments};
use vnplug_ring::direct::{SLOTS, TABLE_SIZE, TableReader, epoch, home_size, ring, words};
use vnplug_ring::layout::{DATA_OFFSET, Geometry, MAX_SNAPLEN, RECORD_HEADER};
use vnplug_ring::offload::PREFIX;
use vnplug_ring::{Consumer, Producer, Region};

use super::Port;
use super::ways::{Way, Ways};
use crate::connection::unexpected;
use crate::error::Error;
use crate::map::{map, map_read_only};

/// What a member has besides its rings.
#[derive(Debug)]
pub(super) struct Direct {
    table: TableReader,
    /// The table's roster when it was asked last.
    roster: u32,
    slot: usize,
    generation: u32,
    home: Region,
    bell: OwnedFd,
    /// Members whose rings are not laid yet.
    pending: Vec<Pending>,
    /// Whose rings the port's last ones are: slot and generation.
    read: Vec<(usize, u32)>,
    is_over: bool,
}

/// A member whose ring is not laid yet.
#[derive(Debug)]
struct Pending {
    member: DirectMember,
    ring: Region,
}

impl Direct {
    /// Something is to be done about the members.
    #[inline]
    pub(super) fn is_stale(&self) -> bool {
        self.roster != self.table.roster() || !self.pending.is_empty() || self.is_over
    }

    /// Empties the bell.
    pub(super) fn hush(&mut self) {
        let mut bytes = [0; 64];
        match recv(&self.bell, &mut bytes[..], RecvFlags::DONTWAIT) {
            // A member has shut it; the daemon never does.
            Ok((_, 0)) => self.is_over = true,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.is_over = true,
        }
    }

    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The rings of the members of which something is known.
    fn known(&self) -> Vec<(u8, u32)> {
        let pending = self.pending.iter().map(|it| it.member);
        let pending = pending.map(|it| (it.slot, it.generation));
        let read = self.read.iter();
        let read = read.map(|(slot, generation)| (*slot as u8, *generation));
        read.chain(pending).collect()
    }
}

impl Port {
    /// Becomes a member.
    pub(super) fn enter_group(&mut self) -> Result<(), Error> {
        let capacity = self.options.request.transmit_bytes.next_power_of_two();
        let capacity = capacity.clamp(MIN_RING, MAX_RING);
        let memory = home(home_size(capacity))?;
        let home = map(memory.as_fd(), home_size(capacity))?;
        seal(&memory)?;
        let request = self.request(capacity, Vec::new());
        let (members, mut fds) = self.ask_members(&request, Some(memory.as_fd()))?;
        let nonsense = |what: &str| Error::Protocol(what.into());
        if !members.is_first || fds.len() < 2 || usize::from(members.slot) >= SLOTS {
            return Err(nonsense("no table of a trust group"));
        }
        let bell = fds.remove(1);
        let table = map_read_only(fds.remove(0).as_fd(), TABLE_SIZE)?;
        let table = TableReader::attach(table)
            .ok_or_else(|| nonsense("not the table of a trust group, or of another version"))?;
        self.watch.add_wake(bell.as_fd())?;
        let outbox = self.outbox.as_mut().ok_or(Error::Disconnected)?;
        outbox.ways = Some(Box::new(Ways::new(table.clone())));
        self.direct = Some(Box::new(Direct {
            // Whoever came meanwhile is asked for once more.
            roster: table.roster().wrapping_sub(1),
            table,
            slot: members.slot.into(),
            generation: members.generation,
            home,
            bell,
            pending: Vec::new(),
            read: Vec::new(),
            is_over: false,
        }));
        self.meet(&members, fds)
    }

    /// Looks after the members: who came, who went, whose ring is laid by now.
    #[cold]
    pub(super) fn look_after_members(&mut self) {
        let Some(direct) = &mut self.direct else {
            return;
        };
        let mut done = match direct.is_over {
            true => Err(Error::Protocol("a member shut this one's bell".into())),
            false => Ok(()),
        };
        let roster = direct.table.roster();
        if done.is_ok() && direct.roster != roster {
            direct.roster = roster;
            let (capacity, known) = (0, direct.known());
            let request = self.request(capacity, known);
            let asked = self.ask_members(&request, None);
            done = asked.and_then(|(members, fds)| self.meet(&members, fds));
        }
        if let Err(error) = done.and_then(|()| self.attach_pending()) {
            log::warn!("direct mode is over, all frames go through the switch: {error}");
            self.leave_group();
        }
    }

    /// All frames go through the switch from now on.
    pub(super) fn leave_group(&mut self) {
        if let Some(direct) = self.direct.take() {
            self.watch.remove_wake(direct.bell());
            self.rings.truncate(self.rings.len() - direct.read.len());
            (self.current, self.turn, self.looked) = (0, 0, None);
        }
        if let Some(outbox) = &mut self.outbox {
            outbox.ways = None;
        }
    }

    /// Rings that the host writes; those of other members come behind them.
    #[inline]
    pub(super) fn hosted(&self) -> &[Consumer] {
        let beside = self.direct.as_ref().map_or(0, |direct| direct.read.len());
        &self.rings[..self.rings.len() - beside]
    }

    fn request(&self, capacity: u64, known: Vec<(u8, u32)>) -> Message {
        Message::Direct(Request {
            port: self.number,
            capacity,
            merged: self.options.request.segments == Segments::Merged,
            known,
        })
    }

    fn ask_members(
        &mut self,
        request: &Message,
        memory: Option<BorrowedFd<'_>>,
    ) -> Result<(Members, Vec<OwnedFd>), Error> {
        let link = self.link.as_mut().ok_or(Error::Disconnected)?;
        let (answer, fds) = link.exchange_fds(request, memory)?;
        match answer {
            Message::Members(members) => Ok((members, fds)),
            other => Err(unexpected(&other)),
        }
    }

    /// Forgets members that went, and takes those that came.
    fn meet(&mut self, members: &Members, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let (Some(direct), Some(outbox)) = (&mut self.direct, &mut self.outbox) else {
            return Ok(());
        };
        let Some(ways) = &mut outbox.ways else {
            return Ok(());
        };
        let others = &members.others;
        let is_there = |slot: usize, generation: u32| {
            let is_it =
                |it: &DirectMember| usize::from(it.slot) == slot && it.generation == generation;
            others.iter().any(is_it)
        };
        let first = self.rings.len() - direct.read.len();
        for at in (0..direct.read.len()).rev() {
            let (slot, generation) = direct.read[at];
            if !is_there(slot, generation) {
                direct.read.remove(at);
                self.rings.remove(first + at);
                (self.current, self.turn, self.looked) = (0, 0, None);
            }
        }
        let still = |it: &Pending| is_there(it.member.slot.into(), it.member.generation);
        direct.pending.retain(still);
        for slot in 0..SLOTS {
            if ways.generation(slot).is_some_and(|it| !is_there(slot, it)) {
                ways.set(slot, None);
            }
        }
        let known = direct.known();
        let is_new = |it: &&DirectMember| !known.contains(&(it.slot, it.generation));
        let mut fds = fds.into_iter();
        for member in others.iter().filter(is_new) {
            let (Some(memory), Some(bell)) = (fds.next(), fds.next()) else {
                return Err(Error::Protocol("a member without its memory".into()));
            };
            let slot = usize::from(member.slot);
            if slot >= SLOTS || slot == direct.slot {
                return Err(Error::Protocol(format!("a member in slot {slot}")));
            }
            let theirs = map_read_only(memory.as_fd(), home_size(member.capacity))?;
            let part = |part: Option<Region>| {
                part.ok_or_else(|| Error::Protocol("a member's home is too small".into()))
            };
            let mine = part(ring(&direct.home, slot, direct.capacity()))?;
            let their_words = part(words(&theirs, direct.slot))?;
            let geometry = Geometry {
                capacity: direct.capacity(),
                snaplen: longest(direct.capacity()),
                link_type: ETHERNET,
                epoch: epoch(direct.generation, member.generation),
                port: 0,
                queue: 0,
            };
            let laid = Producer::create_beside(mine, their_words, geometry);
            let laid = laid.map_err(|error| Error::Protocol(error.to_string()))?;
            let merged = direct.table.member(slot).is_some_and(|it| it.merged);
            ways.set(slot, Some(Way::new(laid, bell, member.generation, merged)));
            direct.pending.push(Pending {
                member: *member,
                ring: part(ring(&theirs, direct.slot, member.capacity))?,
            });
        }
        self.attach_pending()
    }

    /// Reads the rings of members that have laid them by now.
    fn attach_pending(&mut self) -> Result<(), Error> {
        let Some(direct) = &mut self.direct else {
            return Ok(());
        };
        let (own, home) = (direct.generation, &direct.home);
        let mut at = 0;
        while let Some(Pending { member, ring }) = direct.pending.get(at) {
            let slot = usize::from(member.slot);
            let epoch = epoch(member.generation, own);
            let mine = words(home, slot).ok_or(Error::Disconnected)?;
            match Consumer::attach_beside(ring.clone(), mine, epoch) {
                Ok(None) => at += 1,
                Ok(Some(consumer)) => {
                    direct.read.push((slot, member.generation));
                    direct.pending.remove(at);
                    self.rings.push(consumer);
                }
                // It has itself to blame, and is heard through the switch.
                Err(error) => {
                    log::warn!("the ring of a member of the trust group: {error}");
                    direct.pending.remove(at);
                }
            }
        }
        Ok(())
    }
}

impl Direct {
    /// Bytes of the record area of each ring at home.
    fn capacity(&self) -> u64 {
        self.home.len() / SLOTS as u64 - 2 * DATA_OFFSET
    }
}

/// A memory for a home.
fn home(len: u64) -> Result<OwnedFd, Error> {
    let failed = || Error::system("cannot make the memory for direct mode");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("vnplug-direct", flags).map_err(failed())?;
    ftruncate(&memory, len).map_err(failed())?;
    Ok(memory)
}

/// From now on nobody maps it writable, and its length stays. Linux 5.1.
fn seal(memory: &OwnedFd) -> Result<(), Error> {
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sealed = fcntl_add_seals(memory, seals);
    sealed.map_err(Error::system("cannot seal the memory for direct mode"))
}

/// Bytes of the longest record of a ring: two of them fit.
fn longest(capacity: u64) -> u32 {
    let fits = (capacity / 2 - RECORD_HEADER) as u32 & !7;
    fits.min(MAX_SNAPLEN).min(SUPER_FRAME + PREFIX as u32)
}

/// Bytes of each ring to another member, at least and at most.
const MIN_RING: u64 = 256 << 10;
const MAX_RING: u64 = 4 << 20;
/// Bytes of the longest frame: 64 KiB, Ethernet header and tags.
const SUPER_FRAME: u32 = 66 << 10;
/// LINKTYPE_ETHERNET, as registered by tcpdump.org.
const ETHERNET: u32 = 1;
