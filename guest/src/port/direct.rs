//! Direct mode: a port that is a member of a trust group; see [`vnplug_ring::direct`].
//!
//! The port's own rings stay what they are, the way to the switch and from it. Beside them it reads a ring
//! of each other member, as one of [`Port::rings`](super::Port), and writes one to each ([`Ways`]). Who is a
//! member the daemon tells; the table's roster says when to ask. A member that is gone is read to its end.
//! Whatever goes wrong here later ends direct mode and not the port: all frames go through the switch then, and
//! after a pause the port enters its group again, with a new home.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use vnplug_ring::control::{
    Direct as Request, DirectMember, FilterSpec, Members, Message, Segments, Tuning,
};
use vnplug_ring::direct::{SLOTS, TABLE_SIZE, TableReader, epoch, home_size, ring, words};
use vnplug_ring::layout::{ATTACHED, DATA_OFFSET, Geometry, MAX_SNAPLEN, RECORD_HEADER};
use vnplug_ring::offload::PREFIX;
use vnplug_ring::{Consumer, Producer, Region};

use super::Port;
use super::phase::Phase;
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
    home: Home,
    bell: OwnedFd,
    /// Members that it was told of: slot and generation. Their descriptors came, once.
    told: Vec<(u8, u32)>,
    /// Members whose rings are not laid yet.
    pending: Vec<Pending>,
    /// Calls until the pending ones are looked at again.
    calls: u32,
    is_over: bool,
}

/// A member's own memory.
#[derive(Debug)]
struct Home {
    region: Region,
    /// Whose it is: a child that was forked has it, too, and is not to end anything.
    process: u32,
}

/// The rings of other members that a port reads, which are its last ones.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Whose each is: slot and generation; `None`: it is gone, or this port left.
    of: Vec<Option<(u8, u32)>>,
    /// When this port left, and was still sent what was on its way.
    left: Option<Instant>,
}

impl Beside {
    /// Of a port whose rings are gone.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// When direct mode is tried again that ended for a fault.
#[derive(Debug, Default)]
pub(super) struct Again {
    at: Option<Instant>,
    /// Longer with each fault: who shuts this port's bell again and again costs it little.
    pause: Duration,
    /// The fault before.
    last: Option<Instant>,
}

impl Again {
    fn later(&mut self) {
        let now = Instant::now();
        let last = self.last.replace(now);
        if last.is_some_and(|last| now.duration_since(last) > PEACE) {
            self.pause = Duration::ZERO;
        }
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
        self.at = Some(now + self.pause);
    }

    /// Nothing is in the way any more.
    fn now(&mut self) {
        self.at = Some(Instant::now());
    }

    fn is_due(&self) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at)
    }
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
    fn is_stale(&mut self, beside: &Beside) -> bool {
        if self.roster != self.table.roster() || self.is_over {
            return true;
        }
        self.calls = self.calls.wrapping_sub(1);
        let is_time = self.calls.is_multiple_of(CALLS);
        is_time && (!self.pending.is_empty() || beside.of.contains(&None))
    }

    /// Empties the bell.
    pub(super) fn hush(&mut self) {
        let mut bytes = [0; 64];
        match recv(&self.bell, &mut bytes[..], RecvFlags::DONTWAIT) {
            // A member has shut it; the daemon never does.
            Ok((_, 0)) => self.is_over = true,
            // Who has laid a ring rings.
            Ok(_) => self.calls = 1,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.is_over = true,
        }
    }

    /// Bytes of the record area of each ring at home.
    fn capacity(&self) -> u64 {
        self.home.region.len() / SLOTS as u64 - 2 * DATA_OFFSET
    }
}

impl Drop for Home {
    /// Nothing is read any more of what others send here: they notice, and send through the switch.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        for slot in 0..SLOTS {
            if let Some(words) = words(&self.region, slot) {
                words.store_u64(ATTACHED, 0, Ordering::Release);
            }
        }
    }
}

impl Port {
    /// Something is to be done about the members, or about direct mode that is over.
    #[inline]
    pub(super) fn has_news_of_members(&mut self) -> bool {
        match &mut self.direct {
            Some(direct) => direct.is_stale(&self.beside),
            None => !self.beside.of.is_empty() || self.again.is_due(),
        }
    }

    /// Whether the host is to choose what comes.
    fn chooses(&self) -> bool {
        let request = &self.options.request;
        request.filter != FilterSpec::All
            || request.snaplen != 0
            || request.tuning != Tuning::default()
    }

    /// Becomes a member, as soon as the host answers, or within a limit.
    pub(super) fn enter_group(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        if self.chooses() {
            return Err(Error::Invalid(
                "direct mode takes no filter, snaplen, direction or sampling: the host applies them",
            ));
        }
        let capacity = self.options.request.transmit_bytes.next_power_of_two();
        let capacity = capacity.clamp(MIN_RING, MAX_RING);
        let memory = home(home_size(capacity))?;
        let home = map(memory.as_fd(), home_size(capacity))?;
        seal(&memory)?;
        let request = self.request(capacity);
        let link = self.link.as_mut().ok_or(Error::Disconnected)?;
        let fd = Some(memory.as_fd());
        let (answer, mut fds) = match limit {
            Some(limit) => link.ask_fds(&request, fd, limit)?,
            None => link.exchange_fds(&request, fd)?,
        };
        let members = members(answer)?;
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
        outbox.ways = Some(Box::new(Ways::new(table.clone(), members.slot.into())));
        self.direct = Some(Box::new(Direct {
            // Whoever came meanwhile is asked for once more.
            roster: table.roster().wrapping_sub(1),
            table,
            slot: members.slot.into(),
            generation: members.generation,
            home: Home {
                region: home,
                process: std::process::id(),
            },
            bell,
            told: Vec::new(),
            pending: Vec::new(),
            calls: 0,
            is_over: false,
        }));
        self.again.at = None;
        self.meet(&members, fds)
    }

    /// Looks after the members: who came, who went, whose ring is laid by now.
    #[cold]
    pub(super) fn look_after_members(&mut self) {
        self.forget_gone();
        let Some(direct) = &mut self.direct else {
            // NB: the others lay their rings to this port anew then, in the same place.
            if self.beside.of.is_empty() && self.again.is_due() {
                self.enter_again();
            }
            return;
        };
        let mut done = match direct.is_over {
            true => Err(Error::Protocol("a member shut this one's bell".into())),
            false => Ok(()),
        };
        let roster = direct.table.roster();
        if done.is_ok() && direct.roster != roster {
            direct.roster = roster;
            let request = self.request(0);
            let link = self.link.as_mut().ok_or(Error::Disconnected);
            let asked = link.and_then(|link| link.ask_fds(&request, None, PATIENCE));
            done = asked.and_then(|(answer, fds)| self.meet(&members(answer)?, fds));
        }
        if let Err(error) = done.and_then(|()| self.attach_pending()) {
            self.end_direct(&error);
        }
    }

    /// Direct mode is over for a fault, until it is tried again.
    pub(super) fn end_direct(&mut self, why: &Error) {
        self.leave_group();
        self.again.later();
        let pause = self.again.pause.as_secs();
        log::warn!(
            "no direct mode, all frames go through the switch, at least for {pause} s: {why}"
        );
    }

    /// Becomes a member again.
    fn enter_again(&mut self) {
        self.again.at = None;
        // Who is away enters when it is back; whose frames the host chooses, when it does not any more.
        if !matches!(self.phase, Phase::Live) || self.chooses() {
            return;
        }
        match self.enter_group(Some(PATIENCE)) {
            Ok(()) => log::info!("direct mode again"),
            Err(error) => self.end_direct(&error),
        }
    }

    /// The host chooses from now on, or does not any more, what comes: nobody else may hand over frames then.
    pub(super) fn choice_changed(&mut self) {
        match self.chooses() {
            true => self.leave_group(),
            false if self.options.direct && self.direct.is_none() => self.again.now(),
            false => {}
        }
    }

    /// All frames go through the switch from now on; what others have handed over is read to its end.
    pub(super) fn leave_group(&mut self) {
        if let Some(direct) = self.direct.take() {
            self.watch.remove_wake(direct.bell.as_fd());
            self.beside.of.fill(None);
            self.beside.left = Some(Instant::now());
        }
        if let Some(outbox) = &mut self.outbox {
            outbox.ways = None;
        }
    }

    /// Forgets the rings of members that are gone, when all is read.
    fn forget_gone(&mut self) {
        // A sender that did not see it yet publishes what it has begun.
        if self.beside.left.is_some_and(|at| at.elapsed() < ON_ITS_WAY) {
            return;
        }
        let of = &mut self.beside.of;
        let first = self.rings.len() - of.len();
        for at in (0..of.len()).rev() {
            if of[at].is_none() && self.rings[first + at].is_drained() {
                of.remove(at);
                self.rings.remove(first + at);
                (self.current, self.turn, self.looked) = (0, 0, None);
            }
        }
        if of.is_empty() {
            self.beside.left = None;
        }
    }

    /// Rings that the host writes; those of other members come behind them.
    #[inline]
    pub(super) fn hosted(&self) -> &[Consumer] {
        &self.rings[..self.rings.len() - self.beside.of.len()]
    }

    fn request(&self, capacity: u64) -> Message {
        Message::Direct(Request {
            port: self.number,
            capacity,
            merged: self.takes_merged(),
        })
    }

    fn takes_merged(&self) -> bool {
        self.options.request.segments == Segments::Merged
    }

    /// Sees off members that went, and takes those that came.
    fn meet(&mut self, members: &Members, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let (Some(direct), Some(outbox)) = (&mut self.direct, &mut self.outbox) else {
            return Ok(());
        };
        let Some(ways) = &mut outbox.ways else {
            return Ok(());
        };
        let others = &members.others;
        let is_there = |(slot, generation): (u8, u32)| {
            let is_it = |it: &DirectMember| it.slot == slot && it.generation == generation;
            others.iter().any(is_it)
        };
        let beside = &mut self.beside.of;
        let first = self.rings.len() - beside.len();
        for (ring, read) in self.rings[first..].iter_mut().zip(beside) {
            if read.is_some_and(|member| !is_there(member)) {
                ring.see_off();
                *read = None;
            }
        }
        let still = |it: &Pending| is_there((it.member.slot, it.member.generation));
        direct.pending.retain(still);
        direct.told.retain(|member| is_there(*member));
        for slot in 0..SLOTS as u8 {
            let generation = ways.generation(slot.into());
            if generation.is_some_and(|generation| !is_there((slot, generation))) {
                ways.set(slot.into(), None);
            }
        }
        let mut fds = fds.into_iter();
        for member in others {
            let told = (member.slot, member.generation);
            if direct.told.contains(&told) {
                continue;
            }
            direct.told.push(told);
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
            let mine = part(ring(&direct.home.region, slot, direct.capacity()))?;
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
            ways.set(slot, Some(Way::new(laid, bell, member.generation)));
            direct.pending.push(Pending {
                member: *member,
                ring: part(ring(&theirs, direct.slot, member.capacity))?,
            });
        }
        self.attach_pending()
    }

    /// Reads the rings of members that have laid them by now.
    fn attach_pending(&mut self) -> Result<(), Error> {
        let allowed = (longest(MAX_RING), self.takes_merged());
        let Some(direct) = &mut self.direct else {
            return Ok(());
        };
        direct.calls = 0;
        let (own, home) = (direct.generation, &direct.home.region);
        let mut at = 0;
        while let Some(Pending { member, ring }) = direct.pending.get(at) {
            let slot = usize::from(member.slot);
            let epoch = epoch(member.generation, own);
            let mine = words(home, slot).ok_or(Error::Disconnected)?;
            match Consumer::attach_beside(ring.clone(), mine, epoch, allowed) {
                Ok(None) => at += 1,
                Ok(Some(consumer)) => {
                    let whose = Some((member.slot, member.generation));
                    self.beside.of.push(whose);
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

/// The answer to the question who is a member.
fn members(answer: Message) -> Result<Members, Error> {
    match answer {
        Message::Members(members) => Ok(members),
        other => Err(unexpected(&other)),
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

/// How long the daemon may take to say who is a member; frames wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long after this port left a member may still publish what it has begun.
const ON_ITS_WAY: Duration = Duration::from_millis(10);
/// How long direct mode is over after its first fault, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// After this time without a fault the pauses begin anew.
const PEACE: Duration = Duration::from_secs(600);
/// Calls between two looks at members that are waited for, where nobody rings.
const CALLS: u32 = 64;
/// Bytes of each ring to another member, at least and at most.
const MIN_RING: u64 = 256 << 10;
const MAX_RING: u64 = 4 << 20;
/// Bytes of the longest frame: 64 KiB, Ethernet header and tags.
const SUPER_FRAME: u32 = 66 << 10;
/// LINKTYPE_ETHERNET, as registered by tcpdump.org.
const ETHERNET: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_that_ends_leaves_its_parent_a_member() {
        let region = Region::heap(home_size(MIN_RING));
        let own = words(&region, 3).unwrap();
        own.store_u64(ATTACHED, 1, Ordering::Relaxed);
        let home = |process| Home {
            region: region.clone(),
            process,
        };
        drop(home(std::process::id() + 1));
        assert_eq!(own.load_u64(ATTACHED, Ordering::Relaxed), 1);
        drop(home(std::process::id()));
        assert_eq!(own.load_u64(ATTACHED, Ordering::Relaxed), 0);
    }

    #[test]
    fn each_fault_makes_the_pause_before_direct_mode_longer() {
        let mut again = Again::default();
        assert!(!again.is_due());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            again.later();
            pauses.push(again.pause.as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        again.last = Instant::now().checked_sub(PEACE + FIRST_PAUSE);
        if again.last.is_some() {
            again.later();
            assert_eq!(again.pause, FIRST_PAUSE);
        }
        assert!(!again.is_due());
        again.at = Some(Instant::now());
        assert!(again.is_due());
    }
}
