//! Opening a port: its [`plan`](super::plan), its memory, and telling the source's threads.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;

use vnplug_ring::control::{Balance, Open, Opened, RingPlace, code};
use vnplug_ring::news::BOARD_LEN;

use super::ground::{Ground, Memory};
use super::pace::Pace;
use super::plan::PortPlan;
use super::terms::SendTerms;
use super::{Hub, Peer, PortRecord, Programs, Refusal, Revoked, RuleBook};
use vnplug_filter::ebpf::Wanted;
use vnplug_os::{event, mappings, memory};
use vnplug_path::batch::Handle;
use vnplug_path::engine::Command;
use vnplug_path::engine::sender::Sender;
use vnplug_path::port::Port;
use vnplug_path::port::doorbell::{Doorbell, SharedBell};

/// What was opened, with the descriptors for a process.
pub(crate) struct Opening {
    /// The answer.
    pub opened: Opened,
    /// Memory and wake-up descriptors; none for a port in a pool.
    pub fds: Vec<OwnedFd>,
    /// What wakes its reader, if it was made now.
    pub bell: Option<SharedBell>,
}

impl Hub {
    /// Makes a port and tells the source's threads. Without a doorbell it gets a pipe of its own.
    ///
    /// First all is made that may fail; what that took goes back by itself. Then the hub and the threads
    /// are told, which cannot fail.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was changed.
    pub(crate) fn open(
        &mut self,
        request: &Open,
        owner: Peer,
        programs: Programs,
        memory: Memory<'_>,
        doorbell: Option<Doorbell>,
    ) -> Result<Opening, Refusal> {
        let plan = self.plan(request, &owner, &programs)?;
        if let Some(group) = &plan.group {
            self.may_join(group, &programs)?;
        }
        if let Memory::Own(own) = &memory {
            self.say_pages(own.rings.huge);
        }
        let twins = self.programs_of(request, plan.source, &plan.queues)?;
        let id = self.fresh_port();
        let number = self.number_of(&owner);
        let handle = Handle {
            port: id,
            owner: number,
            number: request.handle,
        };
        let link_type = self.sources[plan.source].link_type;
        let mut ground = Ground::of(&plan, memory)?;
        let is_own = ground.is_own();
        let (doorbell, bell) = match doorbell {
            Some(doorbell) => (doorbell, None),
            None => {
                let bell = self.bell(&owner, request, &mut ground.fds)?;
                (bell.of(request.place), Some(bell))
            }
        };
        let has_board = bell.as_ref().is_some_and(SharedBell::has_board);
        let producers = ground.lay(&plan, id, link_type)?;
        let areas = Self::areas(&plan, &ground, request)?;
        let mut sender = self.sender(
            &plan,
            &mut ground,
            &owner,
            (handle, link_type),
            (request, &areas),
        )?;
        if let Some(sender) = &mut sender {
            let terms = programs.granted.terms.parse::<SendTerms>();
            let terms = terms.map_err(|what| Refusal::new(code::INTERNAL, what))?;
            // Its bucket is full at the beginning of time.
            sender.set_terms(terms.with(programs.sends.1.clone()), 0);
        }
        // The last two that may fail; the first undoes itself, and who takes part in a switch is in no group.
        let joined = self.enter_group(&plan, programs.guard.as_ref(), &mut ground)?;
        let member = self.take_part(&plan, request, &owner, programs.grant.as_deref())?;
        let segments = self.segments_of(&plan, request, member);
        let arenas = ground.arenas_from_here(joined.arenas);
        let opened = Opened {
            port: id,
            memory: ground.device(),
            map_len: ground.map_len,
            rings: ground.rings,
            snaplen: plan.snaplen - plan.prefix,
            link_type,
            device: self.device_name(plan.source, member.or(plan.port)),
            vector: u32::MAX,
            transmit: ground.transmit,
            arenas,
            apart: is_own,
            board: has_board,
        };
        let mut fds = ground.fds;
        fds.extend(joined.fd.filter(|_| is_own));
        let prefix = plan.prefix;
        // Who takes part in a switch may have named the port that it wants.
        let only = plan.port.filter(|_| !request.joins);
        let ports = producers.into_iter().enumerate().map(|(at, producer)| {
            let mut port = Port::new(id, producer, doorbell.clone());
            port.snaplen -= prefix;
            port.segments = segments;
            port.member = member;
            port.only = only;
            port.owner = number;
            port.handle = handle;
            port.commons = joined.commons.get(at).cloned();
            port.program = twins.get(at).cloned().flatten();
            port.judge.set_guard(programs.guard.clone());
            port.judge.set_filter(programs.filter.clone());
            port.judge.tune(request.tuning);
            port.mark_gap = request.reopened;
            port
        });
        let ports = ports.collect();
        let place = ground.place;
        if let Some(pool) = ground.pool {
            pool.keep();
        }
        if let (Some(sender), Some(member)) = (&mut sender, member) {
            sender.member = member.get();
        }
        let mut record = record(plan, request, programs, (owner, number), place);
        record.member = member;
        record.areas = areas;
        record.only = only;
        self.reads(&record, true);
        let source = record.source;
        self.commit(id, record, request.balance, ports, sender);
        self.watch_direct(source);
        Ok(Opening { opened, fds, bell })
    }

    /// The doorbell of a process' port, which others may share if it says so. What the process needs of it goes
    /// there: an end, and the board.
    fn bell(
        &mut self,
        owner: &Peer,
        request: &Open,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<SharedBell, Refusal> {
        let made = SharedBell::new(self.closers.of(owner));
        let (mut bell, theirs) = made.map_err(|error| no_memory(0, &error))?;
        fds.push(theirs);
        if request.shares_wake && request.place > 0 {
            let board = memory::sealed("vnplug-news", BOARD_LEN, &|| true);
            let board = board.map_err(|error| no_memory(BOARD_LEN, &error))?;
            bell.set_board(board.region);
            fds.push(board.fd);
        }
        Ok(bell)
    }

    /// Puts a port in the books, and tells the threads.
    fn commit(
        &mut self,
        id: u32,
        mut record: PortRecord,
        balance: Balance,
        ports: Vec<Port>,
        sender: Option<Box<Sender>>,
    ) {
        let source = record.source;
        let workers = |hub: &Self, queue: usize, command| {
            hub.sources[source].workers[queue].send(command);
        };
        if let Some(sender) = sender {
            workers(self, record.queues[0], Command::AttachSender(sender));
        }
        let (guard, filter) = (record.guard.as_ref(), record.program.as_ref());
        record.wanted = self.will_want(source, guard, filter);
        let (share, shares) = self.join(record.cluster.as_ref(), id, balance);
        for (mut port, &queue) in ports.into_iter().zip(&record.queues) {
            port.judge.set_share(share);
            workers(self, queue, Command::Attach(Box::new(port), shares.clone()));
        }
        self.opened += 1;
        self.own(id, &record, true);
        self.ports.insert(id, record);
        self.settle_early(source);
    }

    fn fresh_port(&mut self) -> u32 {
        loop {
            let id = self.next_port;
            self.next_port = self.next_port.checked_add(1).unwrap_or(1);
            if !self.ports.contains_key(&id) {
                return id;
            }
        }
    }

    fn say_pages(&mut self, huge: bool) {
        if self.huge != Some(huge) {
            self.huge = Some(huge);
            log::info!(target: "port", "rings lie in {}", if huge {
                "huge pages"
            } else {
                "ordinary memory: no huge pages are free (`sysctl vm.nr_hugepages=N` reserves some)"
            });
        }
    }
}

/// What the books say of a new port; what the kernel must let through for it is not known yet.
fn record(
    plan: PortPlan,
    request: &Open,
    programs: Programs,
    (owner, number): (Peer, u32),
    place: Option<RingPlace>,
) -> PortRecord {
    let mappings = match place {
        None => mappings::of(&plan.shape().pieces()),
        Some(_) => 0,
    };
    PortRecord {
        source: plan.source,
        queues: plan.queues,
        member: None,
        only: None,
        cluster: plan.cluster,
        group: plan.group.map(|group| group.key),
        places: place.into_iter().collect(),
        program: programs.filter,
        guard: programs.guard,
        granted: programs.granted,
        revoked: Revoked::default(),
        wanted: Wanted::default(),
        twin: request.program.clone(),
        owner,
        number,
        label: request.label.chars().take(64).collect(),
        filter: programs.text,
        filter_version: 0,
        notes: Vec::new(),
        last: BTreeMap::new(),
        tuning: request.tuning,
        rules: RuleBook::default(),
        capacity: plan.capacity,
        transmit: plan.transmit,
        mappings,
        areas: Vec::new(),
        lent_to: BTreeMap::new(),
        lenders: BTreeSet::new(),
        pace: Pace::new(),
    }
}

/// What to do when the daemon is out of descriptors.
pub(crate) const NO_DESCRIPTORS: &str = "the daemon is at its limit of open files: raise LimitNOFILE \
                                         in its service file, or have readers of many ports open \
                                         them in a bundle";

pub(crate) fn no_memory(bytes: u64, error: &io::Error) -> Refusal {
    let advice = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => NO_DESCRIPTORS,
        _ if error.kind() == io::ErrorKind::QuotaExceeded => "or fewer ports of fewer queues",
        _ => "use a smaller ring or free memory",
    };
    let what = format!("{bytes} bytes of ring memory: {error}; {advice}");
    Refusal::new(code::NO_MEMORY, what)
}

pub(super) fn fresh_epoch() -> u64 {
    // Low eight bits zero, never zero in all.
    (event::random() | 1 << 32) & !0xff
}
