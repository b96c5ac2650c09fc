//! What the daemon serves: sources, their threads, and the ports attached to them.
//!
//! The hub lives in the control thread. It decides (names, policy, limits, memory) and tells the
//! queues' threads; it never touches a packet. Opening a port is all or nothing: memory is
//! committed first, then every queue of the source is told.

mod asking;
mod backend;
mod close;
mod cluster;
mod direct;
mod early;
pub(crate) mod exchange;
pub mod grant;
mod ground;
mod group;
mod host_group;
mod inquiry;
mod limits;
mod load;
pub(crate) mod maker;
mod note;
mod open;
mod pace;
pub(crate) mod places;
mod plan;
pub mod policy;
pub mod report;
mod retire;
mod revoke;
pub mod rules;
mod send;
pub(crate) mod switch;
pub mod terms;
pub(crate) mod twin;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use vnplug_ring::Region;
use vnplug_ring::control::{HOST_PREFIX, Message, RingPlace, Tuning, code};

use vnplug_filter::ebpf::Wanted;
use vnplug_filter::{Jit, Program};
use vnplug_os::closer::Closers;
use vnplug_path::engine::loader::Loader;
use vnplug_path::engine::sender::Sender;
use vnplug_path::engine::{Command, Line, PortSnapshot, Snapshot, Worker};
use vnplug_path::port::{Port, PortCounters};
use vnplug_path::source::Lent;
use vnplug_path::source::af_packet::Interface;
use vnplug_switch::Switchboard;

pub(crate) use asking::{Owed, Step};
pub use backend::{BackendGrant, OpenTo};
pub(crate) use close::Closing;
use cluster::{Cluster, ClusterKey};
use direct::DirectGroups;
pub use early::{Early, MAX_EARLY_FILTERS, MAX_EARLY_INSTRUCTIONS, MAX_EARLY_LOADS};
pub(crate) use ground::{Grown, Memory, OwnMemory, Plugged};
pub(crate) use group::arena_bytes;
use group::{Group, GroupKey};
use host_group::HostGroups;
pub(crate) use host_group::{Home, HostGroupSize, NewHostGroup};
use inquiry::Inquiry;
pub use limits::{Limits, MAX_FILTER_WORK};
use load::Owned;
pub(crate) use open::{NO_DESCRIPTORS, Opening, no_memory};
pub(crate) use plan::Need;
pub(crate) use policy::user_grant;
pub use policy::{Join, Peer, Sending};
pub(crate) use revoke::NewGrant;
pub use revoke::{Granted, Revoked};
pub use rules::RuleBook;
pub(crate) use twin::index_of;
pub use twin::{SourceProgram, SourcePrograms, TwinGrant, Twins};

/// A request was refused, with the code and text of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// One of `vnplug_ring::control::code`.
    pub code: u16,
    /// What is wrong and what to do.
    pub text: String,
}

impl Refusal {
    /// A refusal with this code and text.
    pub fn new(code: u16, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }
}

/// What a client names: a source, one of its queues, or one port of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// The source's place among all.
    pub source: usize,
    /// Only this queue.
    pub queue: Option<usize>,
    /// Only what passes this port.
    pub port: Option<NonZeroU16>,
}

/// A started source.
pub struct Source {
    /// What readers call it.
    pub name: String,
    /// `af_packet`, `pcap`, `gen`.
    pub kind: &'static str,
    /// For people.
    pub description: String,
    /// DLT of its frames.
    pub link_type: u32,
    /// The interface behind it.
    pub interface: Option<Arc<Interface>>,
    /// By which rings take part in it, if it is a switch.
    pub board: Option<Switchboard>,
    /// Whether ports may send through it.
    pub transmits: bool,
    /// What the kernel drops before them.
    pub early: Early,
    /// The memory of each queue's frames, if groups may read it; nothing else if not.
    pub lent: Option<Vec<Lent>>,
    /// One thread per queue.
    pub workers: Vec<Worker>,
    /// The operator's program that its queues run; empty = none, or the kernel does.
    pub program: String,
    /// It is a packet socket, and nobody said how long a frame may wait for its block to fill.
    pub is_untimed: bool,
    /// How many of its ports are on their way out.
    pub(crate) closing: usize,
}

/// What is known of an attached port.
pub struct PortRecord {
    source: usize,
    queues: Vec<usize>,
    /// Its number on a switch.
    member: Option<NonZeroU16>,
    /// The port of a switch of which alone it reads the frames.
    only: Option<NonZeroU16>,
    cluster: Option<ClusterKey>,
    group: Option<GroupKey>,
    places: Vec<RingPlace>,
    /// The operator's obligatory filter.
    guard: Option<Arc<Program>>,
    /// What its owner was granted to see when it was opened, or later.
    granted: Granted,
    /// What an operator took from its owner.
    revoked: Revoked,
    /// What the kernel must let through for it.
    wanted: Wanted,
    /// Its filter.
    program: Option<Arc<Program>>,
    /// The operator's program that its frames go through.
    twin: String,
    /// Who has it.
    pub owner: Peer,
    /// The owner's number for the queues' threads.
    number: u32,
    /// What its reader said of itself.
    pub label: String,
    /// The reader's filter as given.
    pub filter: String,
    /// `filter` was replaced this many times.
    pub filter_version: u64,
    /// What its reader says of its work.
    notes: Vec<(String, u64)>,
    /// Its parts when they were last told, by queue.
    last: BTreeMap<usize, PortSnapshot>,
    /// How its reader tuned it.
    pub tuning: Tuning,
    /// How many rules it has.
    pub rules: RuleBook,
    /// Bytes of each ring's record area.
    pub capacity: u64,
    /// Bytes of the transmit ring's record area; 0 = the port does not send.
    pub transmit: u64,
    /// Mappings of its memory; 0 in a VM's pool.
    mappings: u64,
    /// The record areas in which it posts, or others do to which it is lent.
    areas: Vec<Region>,
    /// Ports to which it is lent, and by which source and queue each sends; also those that are closing, as their threads may read
    /// there.
    lent_to: BTreeMap<u32, (usize, usize)>,
    /// Ports that are lent to it.
    lenders: BTreeSet<u32>,
    /// How fast its rings fill.
    pace: pace::Pace,
}

impl PortRecord {
    /// Bytes of its record areas, which count for its owner's limit.
    fn bytes(&self) -> u64 {
        self.capacity * self.queues.len() as u64 + self.transmit
    }
}

/// What is left of a port that was closed.
pub struct Closed {
    /// Its final counters.
    pub counters: PortCounters,
    /// Places to give back to its VM's pool, and devices that were plugged for it.
    pub places: Vec<RingPlace>,
    /// What has its memory.
    pub remains: Remains,
}

/// The last of a port that was closed. When it is dropped its memory is freed, which takes a while if
/// it is large, and only then its owner may have as much again.
#[derive(Default)]
pub struct Remains {
    #[expect(clippy::vec_box, reason = "kept as the threads hand them over")]
    _ports: Vec<Box<Port>>,
    _sender: Option<Box<Sender>>,
    _areas: Vec<Region>,
    /// Dropped after what it is for.
    charge: Charge,
}

impl Remains {
    /// Bytes that are freed with it, of a process' port.
    pub(crate) fn bytes(&self) -> u64 {
        self.charge.bytes
    }
}

/// Bytes that count for an owner's limit although their port is closed.
#[derive(Default)]
struct Charge {
    owed: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    fn new(owed: &Arc<AtomicU64>) -> Self {
        Self {
            owed: Arc::clone(owed),
            bytes: 0,
        }
    }

    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.owed.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.owed.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Programs of a port: the operator's, the reader's, and the reader's as text.
#[derive(Debug, Clone, Default)]
pub struct Programs {
    /// The obligatory filter.
    pub guard: Option<Arc<Program>>,
    /// The operator's, as text; empty = none.
    pub sight: String,
    /// The reader's filter.
    pub filter: Option<Arc<Program>>,
    /// What to show for it.
    pub text: String,
    /// What a port of a switch may and may not by the grant under which it joins.
    pub grant: Option<String>,
    /// By which grants it is opened.
    pub granted: Granted,
    /// The operator's filter for what it sends, as text and compiled.
    pub sends: (String, Option<Arc<Program>>),
}

/// Sources and ports.
pub struct Hub {
    sources: Vec<Source>,
    ports: BTreeMap<u32, PortRecord>,
    owned: HashMap<Peer, Owned>,
    /// By owner what memory of closed ports has still to be freed.
    owed: HashMap<Peer, Arc<AtomicU64>>,
    clusters: BTreeMap<ClusterKey, Cluster>,
    groups: BTreeMap<GroupKey, Group>,
    host_groups: HostGroups,
    limits: Limits,
    next_port: u32,
    /// Trust groups of ports on switches.
    direct: DirectGroups,
    next_direct: u64,
    next_cluster: u32,
    /// Ports opened since start.
    pub opened: u64,
    /// Ports closed since start.
    pub closed: u64,
    /// What makes machine code of filters, for its counters.
    pub jit: Jit,
    /// Where the last ring came to lie.
    huge: Option<bool>,
    /// Makes the kernel's filters.
    loader: Option<Loader>,
    /// Who closes what peers share, by their owner.
    pub(crate) closers: Closers<Peer>,
    /// The last snapshot of all ports of a queue, by source and queue, and when it was taken.
    last: BTreeMap<(usize, usize), (Instant, Snapshot)>,
    /// The operator's programs.
    pub twins: Twins,
    /// Asks what interfaces are like.
    inquiry: Inquiry,
}

impl Hub {
    /// A hub without sources.
    pub fn new(limits: Limits) -> Self {
        Self {
            sources: Vec::new(),
            ports: BTreeMap::new(),
            owned: HashMap::new(),
            owed: HashMap::new(),
            clusters: BTreeMap::new(),
            groups: BTreeMap::new(),
            host_groups: HostGroups::default(),
            limits,
            next_port: 1,
            direct: DirectGroups::default(),
            next_direct: 1,
            next_cluster: 1,
            opened: 0,
            closed: 0,
            jit: Jit::off(),
            huge: None,
            loader: None,
            closers: Closers::default(),
            twins: Twins::default(),
            inquiry: Inquiry::default(),
            last: BTreeMap::new(),
        }
    }

    /// Adds a started source.
    pub fn add_source(&mut self, source: Source) {
        self.sources.push(source);
    }

    /// The sources.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The ports of an owner, and the sources that they read.
    pub(crate) fn read_by(&self, owner: &Peer) -> impl Iterator<Item = (u32, &str)> {
        let own = self.ports_of(owner);
        own.map(|(port, it)| (port, self.sources[it.source].name.as_str()))
    }

    /// The ports.
    pub fn ports(&self) -> &BTreeMap<u32, PortRecord> {
        &self.ports
    }

    /// Finds a source by the name a client gave: `[host:]NAME[@QUEUE]`, or of a switch `NAME/portN` and
    /// `NAME/N`, whoever has that port or will have it.
    ///
    /// # Errors
    /// [`Refusal`] that lists what there is.
    pub fn find(&self, device: &str) -> Result<Named, Refusal> {
        let name = device.strip_prefix(HOST_PREFIX).unwrap_or(device);
        let by_name = |name: &str| {
            let mut present = self.present();
            present
                .find(|(_, source)| source.name == name)
                .map(|(place, _)| place)
        };
        let named = |source, queue, port| Named {
            source,
            queue,
            port,
        };
        if let Some(source) = by_name(name) {
            return Ok(named(source, None, None));
        }
        if let Some((source, port)) = name
            .rsplit_once('/')
            .and_then(|(name, port)| Some((by_name(name)?, port)))
        {
            let port = self.switch_port(source, port);
            let wrong = |what| Refusal::new(code::NOT_FOUND, format!("{device}: {what}"));
            return port
                .map(|port| named(source, None, Some(port)))
                .map_err(wrong);
        }
        let queue = name
            .rsplit_once('@')
            .and_then(|(name, queue)| Some((by_name(name)?, queue.parse::<usize>().ok()?)));
        match queue {
            Some((source, queue)) if queue < self.sources[source].workers.len() => {
                Ok(named(source, Some(queue), None))
            }
            Some((source, _)) => {
                let last = self.sources[source].workers.len() - 1;
                Err(Refusal::new(
                    code::NOT_FOUND,
                    format!("{device}: queues are 0 to {last}"),
                ))
            }
            None => {
                let what = format!("no source {device:?}; `vnplug list` shows the sources");
                Err(Refusal::new(code::NOT_FOUND, what))
            }
        }
    }

    /// The places of a port in its VM's pool.
    pub(crate) fn places_of(&self, id: u32) -> &[RingPlace] {
        self.ports.get(&id).map_or(&[], |record| &record.places)
    }

    /// Tunes a port; the next batch is judged so.
    pub(crate) fn tune(&mut self, id: u32, tuning: Tuning) -> Step {
        if let Some(record) = self.ports.get_mut(&id) {
            record.tuning = tuning;
        }
        let tune = |line| Owed::ask(line, |reply| Command::Tune(id, tuning, reply));
        let owed = self.lines_of(id).into_iter().map(tune).collect();
        Step::after(owed, |_, heard| Step::done_if(heard))
    }

    /// Replaces a port's filter. Done means: no packet is judged by the old filter any more.
    pub(crate) fn set_filter(
        &mut self,
        id: u32,
        filter: Option<Arc<Program>>,
        text: String,
    ) -> Step {
        let Some(mut record) = self.ports.remove(&id) else {
            return Step::Done(Ok(Message::Done));
        };
        self.own(id, &record, false);
        let source = record.source;
        let wanted = self.will_want(source, record.guard.as_ref(), filter.as_ref());
        record.filter = text;
        record.filter_version += 1;
        record.program.clone_from(&filter);
        let before = std::mem::replace(&mut record.wanted, wanted);
        self.own(id, &record, true);
        self.ports.insert(id, record);
        let replace = |line| Owed::ask(line, |reply| Command::Filter(id, filter.clone(), reply));
        let owed: Vec<_> = self.lines_of(id).into_iter().map(replace).collect();
        Step::after(owed, move |hub, heard| {
            hub.wants_no_more(source, &before);
            Step::done_if(heard)
        })
    }

    /// The threads that serve a port.
    fn lines_of(&self, id: u32) -> Vec<Line> {
        let record = self.ports.get(&id);
        let queues = record.map_or(&[][..], |record| &record.queues);
        let line = |&queue: &usize| Some(self.sources[record?.source].workers[queue].line());
        queues.iter().filter_map(line).collect()
    }

    /// Refuses what needs a thread that is stalled.
    fn must_turn(&self, source: usize, queues: &[usize]) -> Result<(), Refusal> {
        let mut pulses = queues
            .iter()
            .map(|&queue| self.sources[source].workers[queue].pulse());
        let stalled = pulses.find_map(|pulse| Some((pulse, pulse.stalled()?)));
        match stalled {
            None => Ok(()),
            Some((pulse, stalled)) => {
                Err(Refusal::new(code::UNAVAILABLE, pulse.complaint(stalled)))
            }
        }
    }

    /// DLT of the frames of a port; Ethernet if there is no such port.
    pub fn link_type_of(&self, id: u32) -> u32 {
        self.ports
            .get(&id)
            .map_or(1, |record| self.sources[record.source].link_type)
    }
}

impl Drop for Hub {
    /// All threads are told to end before the first is waited for.
    fn drop(&mut self) {
        let workers = self.sources.iter_mut().flat_map(|it| &mut it.workers);
        workers.for_each(Worker::stop);
    }
}

#[cfg(test)]
pub(crate) mod tests;
