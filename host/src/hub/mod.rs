//! What the daemon serves: sources, their threads, and the ports attached to them.
//!
//! The hub lives in the control thread. It decides (names, policy, limits, memory) and tells the
//! queues' threads; it never touches a packet. Opening a port is all or nothing: memory is
//! committed first, then every queue of the source is told.

pub mod policy;
pub mod report;
pub mod rules;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use vnplug_ring::control::{Balance, HOST_PREFIX, Open, Opened, RingPlace, Tuning, code};
use vnplug_ring::layout::{
    Geometry, Life, MAX_CAPACITY, MAX_SNAPLEN, MIN_CAPACITY, record_size, ring_size,
};
use vnplug_ring::{Producer, Region};

use crate::filter::Program;
use crate::port::doorbell::Doorbell;
use crate::port::{Port, PortCounters, Share};
use crate::source::af_packet::Interface;
use crate::source::worker::{Command, Snapshot, Worker};
use crate::sys::{event, memory};

pub use rules::RuleBook;

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

/// Limits that the operator sets.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Ports in all.
    pub ports: usize,
    /// Ports of one user that is no operator, or of one VM.
    pub ports_each: usize,
    /// Bytes of rings of one user that is no operator.
    pub user_bytes: u64,
    /// Bytes of a ring's record area when a reader does not say.
    pub ring_bytes: u64,
    /// The most a reader may ask for.
    pub max_ring_bytes: u64,
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
    pub interface: Option<Interface>,
    /// One thread per queue.
    pub workers: Vec<Worker>,
}

/// Where a port's ring memory comes from.
pub(crate) enum Memory<'a> {
    /// A memfd of its own, with at least [`Hub::ring_bytes`]; the descriptor travels with the
    /// answer.
    Own(memory::Shared),
    /// A VM's pool.
    Pool {
        /// The pool.
        region: &'a Region,
        /// Its places.
        places: &'a mut crate::port::pool::Places,
    },
}

/// A port that may be, without memory.
struct Plan {
    source: usize,
    queues: Vec<usize>,
    cluster: Option<ClusterKey>,
    snaplen: u32,
    capacity: u64,
    /// Bytes of one queue's ring with its header.
    each: u64,
}

impl Plan {
    fn bytes(&self) -> u64 {
        self.each * self.queues.len() as u64
    }
}

/// Who asked for a port, for lists and limits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A process of this user.
    User(u32),
    /// A virtual machine.
    Vm(String),
}

/// What is known of an attached port.
pub struct PortRecord {
    source: usize,
    queues: Vec<usize>,
    cluster: Option<ClusterKey>,
    places: Vec<RingPlace>,
    /// Instructions of its filter times its queues.
    filter_work: usize,
    /// Who has it.
    pub owner: Owner,
    /// What its reader said of itself.
    pub label: String,
    /// The reader's filter as given.
    pub filter: String,
    /// `filter` was replaced so many times.
    pub filter_version: u64,
    /// How its reader tuned it.
    pub tuning: Tuning,
    /// How many rules it has.
    pub rules: RuleBook,
    /// Bytes of each ring's record area.
    pub capacity: u64,
}

impl PortRecord {
    /// What its filter and rules cost per frame at most, in instructions, times its queues.
    fn work(&self) -> usize {
        self.filter_work + self.rules.work() * self.queues.len()
    }
}

/// Source, queue if one was named, owner, name. A cluster belongs to who made it: nobody can join
/// another's and take a share of its frames. Its members read the same queues, or frames of a queue
/// that one of them does not read would be nobody's.
type ClusterKey = (usize, Option<usize>, Owner, String);

struct Cluster {
    number: u32,
    balance: Balance,
    members: Vec<u32>,
}

/// What was opened, with the descriptors for a process.
pub struct Opening {
    /// The answer.
    pub opened: Opened,
    /// Memory and wake-up descriptors; none for a port in a pool.
    pub fds: Vec<OwnedFd>,
}

/// What is left of a port that was closed.
pub struct Closed {
    /// Its final counters.
    pub counters: PortCounters,
    /// Places to give back to its VM's pool.
    pub places: Vec<RingPlace>,
    /// Its parts in the queues; with the last of them its memory is unmapped, which takes a while
    /// if it is large.
    pub remains: Vec<Box<Port>>,
}

/// Programs of a port: the operator's, the reader's, and the reader's as text.
#[derive(Debug, Clone, Default)]
pub struct Programs {
    /// The obligatory filter.
    pub guard: Option<Arc<Program>>,
    /// The reader's filter.
    pub filter: Option<Arc<Program>>,
    /// What to show for it.
    pub text: String,
}

impl Programs {
    /// The most instructions that the reader's filter may cost per frame.
    fn filter_work(&self) -> usize {
        self.filter
            .as_ref()
            .map_or(0, |filter| filter.instructions().len())
    }
}

/// Instructions of all filters and rules of one owner, who is no operator, on one source, added up
/// over its queues. Everybody's frames wait while a queue's thread runs one reader's filters.
pub const MAX_FILTER_WORK: usize = 16_384;

/// Sources and ports.
pub struct Hub {
    sources: Vec<Source>,
    ports: BTreeMap<u32, PortRecord>,
    clusters: BTreeMap<ClusterKey, Cluster>,
    limits: Limits,
    next_port: u32,
    next_cluster: u32,
    /// Ports opened since start.
    pub opened: u64,
    /// Ports closed since start.
    pub closed: u64,
    /// Where the last ring came to lie.
    huge: Option<bool>,
}

/// How long a queue's thread may take to answer; it answers between two batches.
const ANSWER: Duration = Duration::from_secs(5);

impl Hub {
    /// A hub without sources.
    pub fn new(limits: Limits) -> Self {
        Self {
            sources: Vec::new(),
            ports: BTreeMap::new(),
            clusters: BTreeMap::new(),
            limits,
            next_port: 1,
            next_cluster: 1,
            opened: 0,
            closed: 0,
            huge: None,
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

    /// The ports.
    pub fn ports(&self) -> &BTreeMap<u32, PortRecord> {
        &self.ports
    }

    /// Finds a source by the name a client gave: `[host:]NAME[@QUEUE]`.
    ///
    /// # Errors
    /// [`Refusal`] that lists what there is.
    pub fn find(&self, device: &str) -> Result<(usize, Option<usize>), Refusal> {
        let name = device.strip_prefix(HOST_PREFIX).unwrap_or(device);
        let by_name = |name: &str| self.sources.iter().position(|source| source.name == name);
        if let Some(source) = by_name(name) {
            return Ok((source, None));
        }
        let queue = name
            .rsplit_once('@')
            .and_then(|(name, queue)| Some((by_name(name)?, queue.parse::<usize>().ok()?)));
        match queue {
            Some((source, queue)) if queue < self.sources[source].workers.len() => {
                Ok((source, Some(queue)))
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

    /// What a port would be.
    fn plan(&self, request: &Open, owner: &Owner) -> Result<Plan, Refusal> {
        let (source, queue) = self.find(&request.device)?;
        if self.ports.len() >= self.limits.ports {
            let most = self.limits.ports;
            let what = format!("{most} ports are open, the limit; close some or raise max_ports");
            return Err(Refusal::new(code::LIMIT, what));
        }
        let snaplen = match request.snaplen {
            0 => MAX_SNAPLEN,
            snaplen => snaplen.min(MAX_SNAPLEN),
        };
        let capacity = self.capacity(request, snaplen)?;
        let snaplen = snaplen.min(longest_record(capacity));
        let cluster = (!request.cluster.is_empty())
            .then(|| (source, queue, owner.clone(), request.cluster.clone()));
        if let Some(existing) = cluster.as_ref().and_then(|key| self.clusters.get(key))
            && existing.balance != request.balance
        {
            let what = format!(
                "cluster {:?} shares by {:?}; all members must use the same",
                request.cluster, existing.balance
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        let queues: Vec<usize> = match queue {
            Some(queue) => vec![queue],
            None => (0..self.sources[source].workers.len()).collect(),
        };
        Ok(Plan {
            each: ring_size(capacity).next_multiple_of(4096),
            source,
            queues,
            cluster,
            snaplen,
            capacity,
        })
    }

    /// Bytes of memory that a port needs for its rings.
    ///
    /// # Errors
    /// [`Refusal`], as [`open`](Self::open) would give it.
    pub(crate) fn ring_bytes(&self, request: &Open, owner: &Owner) -> Result<u64, Refusal> {
        Ok(self.plan(request, owner)?.bytes())
    }

    /// Makes a port and tells the source's threads.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was changed.
    pub(crate) fn open(
        &mut self,
        request: &Open,
        owner: Owner,
        programs: Programs,
        memory: Memory<'_>,
        doorbell: Option<Doorbell>,
    ) -> Result<Opening, Refusal> {
        let plan = self.plan(request, &owner)?;
        let total = plan.bytes();
        let Plan {
            source,
            queues,
            cluster,
            snaplen,
            capacity,
            each,
        } = plan;
        let id = self.fresh_port();
        let mut pool = None;
        let (region, base, mut fds, map_len, given) = match memory {
            Memory::Own(shared) => {
                self.say_pages(shared.huge);
                (shared.region, 0, vec![shared.fd], shared.len, Vec::new())
            }
            Memory::Pool { region, places } => {
                let places = pool.insert(places);
                let place = places.take(total).ok_or_else(|| {
                    let free = places.free();
                    let what = format!(
                        "the VM's pool has {free} bytes free and this port needs {total} in one \
                         piece: use a smaller ring, close ports or attach with a larger --pool"
                    );
                    Refusal::new(code::NO_MEMORY, what)
                })?;
                (
                    Region::clone(region),
                    place.offset,
                    Vec::new(),
                    region.len(),
                    vec![place],
                )
            }
        };
        let doorbell = match doorbell {
            Some(doorbell) => doorbell,
            None => {
                let (doorbell, read) = Doorbell::pipe().map_err(|error| no_memory(0, &error))?;
                fds.push(read);
                doorbell
            }
        };
        // All rings first: what fails here leaves nothing behind but the place, which goes back.
        let mut rings = Vec::with_capacity(queues.len());
        let mut producers = Vec::with_capacity(queues.len());
        for (at, &queue) in queues.iter().enumerate() {
            let place = RingPlace {
                offset: base + at as u64 * each,
                len: each,
            };
            let geometry = Geometry {
                capacity,
                snaplen,
                link_type: self.sources[source].link_type,
                epoch: fresh_epoch(),
                port: id,
                queue: queue as u32,
            };
            let part = region.part(place.offset, place.len);
            let producer = part
                .ok_or_else(|| Refusal::new(code::INTERNAL, "a ring outside its memory"))
                .and_then(|part| {
                    Producer::create(part, geometry)
                        .map_err(|error| Refusal::new(code::INVALID, error.to_string()))
                });
            match producer {
                Ok(producer) => producers.push(producer),
                Err(refusal) => {
                    if let (Some(places), Some(place)) = (pool, given.first()) {
                        places.give(*place);
                    }
                    return Err(refusal);
                }
            }
            rings.push(place);
        }
        let filter_work = programs.filter_work() * queues.len();
        let share = self.join(cluster.as_ref(), id, request.balance);
        for (producer, &queue) in producers.into_iter().zip(&queues) {
            let mut port = Port::new(id, producer, doorbell.clone());
            port.guard.clone_from(&programs.guard);
            port.filter.clone_from(&programs.filter);
            port.tune(request.tuning);
            port.share = share.0;
            port.mark_gap = request.reopened;
            let command = Command::Attach(Box::new(port), share.1.clone());
            self.sources[source].workers[queue].send(command);
        }
        self.opened += 1;
        self.ports.insert(
            id,
            PortRecord {
                source,
                queues,
                cluster,
                places: given,
                filter_work,
                owner,
                label: request.label.chars().take(64).collect(),
                filter: programs.text,
                filter_version: 0,
                tuning: request.tuning,
                rules: RuleBook::default(),
                capacity,
            },
        );
        let opened = Opened {
            port: id,
            map_len,
            rings,
            snaplen,
            link_type: self.sources[source].link_type,
            device: format!("{HOST_PREFIX}{}", self.sources[source].name),
            vector: u32::MAX,
        };
        Ok(Opening { opened, fds })
    }

    /// Whether somebody who is no operator may open one more port; all readers share the daemon's
    /// ports and the host's memory. `awaited`: ports that they wait for, and their bytes.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn within_limits(
        &self,
        request: &Open,
        owner: &Owner,
        awaited: (usize, u64),
    ) -> Result<(), Refusal> {
        let (source, queue) = self.find(&request.device)?;
        let own = || self.ports.values().filter(|port| port.owner == *owner);
        let most = self.limits.ports_each;
        if own().count() + awaited.0 >= most {
            let what = format!("{most} ports of yours are open, the limit (max_ports_each)");
            return Err(Refusal::new(code::LIMIT, what));
        }
        if matches!(owner, Owner::Vm(_)) {
            return Ok(());
        }
        let queues = queue.map_or(self.sources[source].workers.len(), |_| 1);
        let wanted = self.capacity(request, 0)? * queues as u64;
        let has: u64 = own()
            .map(|port| port.capacity * port.queues.len() as u64)
            .sum::<u64>()
            + awaited.1;
        let most = self.limits.user_bytes;
        if has + wanted > most {
            let what = format!(
                "your rings have {has} bytes and this port needs {wanted}; the limit is {most} \
                 (max_user_bytes)"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Whether the filters of somebody who is no operator, with this one, are still bearable for the
    /// other readers of the source. `port` is the one whose filter it replaces.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn bears(
        &self,
        device: &str,
        port: Option<u32>,
        owner: &Owner,
        programs: &Programs,
    ) -> Result<(), Refusal> {
        let (source, queues) = match port.and_then(|port| self.ports.get(&port)) {
            Some(record) => (record.source, record.queues.len()),
            None => {
                let (source, queue) = self.find(device)?;
                (
                    source,
                    queue.map_or(self.sources[source].workers.len(), |_| 1),
                )
            }
        };
        let others: usize = self
            .ports
            .iter()
            .filter(|(id, record)| {
                Some(**id) != port && record.source == source && record.owner == *owner
            })
            .map(|(_, record)| record.work())
            .sum();
        let rules = port.and_then(|port| self.ports.get(&port));
        let rules = rules.map_or(0, |record| record.rules.work());
        let wanted = (programs.filter_work() + rules) * queues;
        if others + wanted > MAX_FILTER_WORK {
            let what = format!(
                "your filters on this source have {others} instructions and this one {wanted}; \
                 the limit is {MAX_FILTER_WORK}: use shorter filters or fewer ports"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Closes a port.
    pub fn close(&mut self, id: u32) -> Option<Closed> {
        let record = self.ports.remove(&id)?;
        let shares = self.leave(record.cluster.as_ref(), id);
        let mut counters = PortCounters::default();
        let mut places = record.places;
        let mut remains = Vec::new();
        for &queue in &record.queues {
            let (reply, answer) = channel();
            let command = Command::Detach(id, Life::Closed, shares.clone(), reply);
            self.sources[record.source].workers[queue].send(command);
            match answer.recv_timeout(ANSWER) {
                Ok(Some(port)) => {
                    counters.add(&port.counters);
                    remains.push(port);
                }
                _ => {
                    log::error!(target: "port", "port {id}: a source's thread does not answer");
                    // It may still write there: the place is lost, not given to another ring.
                    places.clear();
                }
            }
        }
        self.closed += 1;
        Some(Closed {
            counters,
            places,
            remains,
        })
    }

    /// Tunes a port; the next batch is judged so.
    pub fn tune(&mut self, id: u32, tuning: Tuning) {
        let Some(record) = self.ports.get_mut(&id) else {
            return;
        };
        record.tuning = tuning;
        let answers: Vec<_> = record
            .queues
            .iter()
            .map(|&queue| {
                let (reply, answer) = channel();
                let command = Command::Tune(id, tuning, reply);
                self.sources[record.source].workers[queue].send(command);
                answer
            })
            .collect();
        for answer in answers {
            if answer.recv_timeout(ANSWER).is_err() {
                log::error!(target: "port", "port {id}: a source's thread does not answer");
            }
        }
    }

    /// Replaces a port's filter; the next batch is judged by the new one.
    pub fn set_filter(&mut self, id: u32, filter: Option<Arc<Program>>, text: String) {
        let Some(record) = self.ports.get_mut(&id) else {
            return;
        };
        record.filter = text;
        record.filter_version += 1;
        let instructions = filter
            .as_ref()
            .map_or(0, |filter| filter.instructions().len());
        record.filter_work = instructions * record.queues.len();
        let (source, queues) = (record.source, record.queues.clone());
        for queue in queues {
            let (reply, answer) = channel();
            self.sources[source].workers[queue].send(Command::Filter(id, filter.clone(), reply));
            // Done means: no packet is judged by the old filter any more.
            if answer.recv_timeout(ANSWER).is_err() {
                log::error!(target: "port", "port {id}: a source's thread does not answer");
            }
        }
    }

    /// DLT of the frames of a port; Ethernet if there is no such port.
    pub fn link_type_of(&self, id: u32) -> u32 {
        self.ports
            .get(&id)
            .map_or(1, |record| self.sources[record.source].link_type)
    }

    /// The counters of every queue of a source, each consistent between two batches.
    pub fn snapshots(&self, source: usize) -> Vec<Snapshot> {
        let answers: Vec<_> = self.sources[source]
            .workers
            .iter()
            .map(|worker| {
                let (reply, answer) = channel();
                worker.send(Command::Snapshot(reply));
                answer
            })
            .collect();
        answers
            .iter()
            .filter_map(|answer| answer.recv_timeout(ANSWER).ok())
            .collect()
    }

    fn capacity(&self, request: &Open, snaplen: u32) -> Result<u64, Refusal> {
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        let wanted = match request.ring_bytes {
            0 => self.limits.ring_bytes,
            bytes if bytes > most => {
                let what = format!("a ring of {bytes} bytes; the limit is {most}");
                return Err(Refusal::new(code::INVALID, what));
            }
            bytes => bytes,
        };
        let capacity = wanted.max(MIN_CAPACITY).next_power_of_two();
        // A snaplen asked for by name must fit; whole packets are cut to what fits.
        if request.snaplen != 0 && snaplen > longest_record(capacity) {
            let what = format!(
                "a ring of {capacity} bytes holds records up to {}; make the ring larger or the \
                 snaplen smaller",
                longest_record(capacity)
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(capacity)
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

    fn join(
        &mut self,
        key: Option<&ClusterKey>,
        id: u32,
        balance: Balance,
    ) -> (Share, Vec<(u32, Share)>) {
        let Some(key) = key else {
            return (Share::All, Vec::new());
        };
        let number = self.next_cluster;
        let cluster = self.clusters.entry(key.clone()).or_insert_with(|| {
            self.next_cluster += 1;
            Cluster {
                number,
                balance,
                members: Vec::new(),
            }
        });
        cluster.members.push(id);
        let shares = cluster.shares();
        let own = shares.last().map_or(Share::All, |(_, share)| *share);
        (own, shares)
    }

    fn leave(&mut self, key: Option<&ClusterKey>, id: u32) -> Vec<(u32, Share)> {
        let Some((key, cluster)) = key.and_then(|key| Some((key, self.clusters.get_mut(key)?)))
        else {
            return Vec::new();
        };
        cluster.members.retain(|member| *member != id);
        let shares = cluster.shares();
        if cluster.members.is_empty() {
            self.clusters.remove(key);
        }
        shares
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

impl Cluster {
    fn shares(&self) -> Vec<(u32, Share)> {
        let of = self.members.len() as u32;
        let share = |index| Share::Member {
            cluster: self.number,
            index,
            of,
            balance: self.balance,
        };
        self.members
            .iter()
            .zip(0..)
            .map(|(&id, index)| (id, share(index)))
            .collect()
    }
}

/// The longest record that always fits a ring of this capacity.
fn longest_record(capacity: u64) -> u32 {
    let half = capacity / 2 - record_size(0) - 8;
    MAX_SNAPLEN.min(u32::try_from(half).unwrap_or(MAX_SNAPLEN))
}

pub(crate) fn no_memory(bytes: u64, error: &io::Error) -> Refusal {
    let advice = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => "close ports or raise the limit of open files",
        _ => "use a smaller ring or free memory",
    };
    let what = format!("{bytes} bytes of ring memory: {error}; {advice}");
    Refusal::new(code::NO_MEMORY, what)
}

fn fresh_epoch() -> u64 {
    // Low eight bits zero, never zero in all.
    (event::random() | 1 << 32) & !0xff
}

#[cfg(test)]
mod tests;
