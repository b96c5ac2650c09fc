//! Virtual machines: what each has of the daemon, and what outlives the daemon.
//!
//! A VM has a memory pool (a file, because QEMU and User-mode Linux open it by path), a control
//! channel and, optionally, an `ivshmem-doorbell` server. The pool and a record of the VM survive
//! the daemon: a restarted daemon maps the same pool and listens on the same sockets, QEMU's
//! chardev reconnects, `vnplug attach uml` hands its socket over again, and the guest agent says
//! Hello. The VM notices nothing but a gap.

pub(crate) mod arenas;
mod dirs;
pub(crate) mod doorbell;
mod plan;
pub(crate) mod record;
mod stay;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;
use vnplug_ring::control::{Grant, HostGroup, RingPlace, VmKind, VmReady, VmSpec, code};
use vnplug_ring::pmem;
use vnplug_ring::pool::PoolHeader;

use crate::hub::Refusal;
use crate::hub::places::Places;
use arenas::GroupRecord;
pub(crate) use dirs::Dirs;
use dirs::{control_path, doorbell_path, records, remove};
use doorbell::DoorbellServer;
use plan::check_name;
pub(crate) use plan::{Committed, VmPlan};
use record::Record;
pub(crate) use record::{Broken, Memories};
use vnplug_os::access::AccessList;
use vnplug_os::closer::PeerFd;
use vnplug_os::event;
use vnplug_os::memory::{Pool, Watch, pool_file};
use vnplug_path::port::doorbell::{Board, Doorbell, VmBell};

/// One VM.
pub(crate) struct Vm {
    record: Record,
    pub(crate) region: Region,
    /// What lies in its file before the pool, if anything.
    front: Option<Region>,
    watch: Arc<Watch>,
    pub(crate) pool_id: u64,
    pub(crate) places: Places,
    pub(crate) listener: PeerFd,
    /// Token of the connection that is its control channel.
    pub(crate) channel: Option<u64>,
    pub(crate) bells: HashMap<u32, VmBell>,
    /// Of the bells that the channel carries; there once there is one.
    board: Option<Arc<Board>>,
    pub(crate) doorbell: Option<DoorbellServer>,
    /// How many of its vectors the agent listens to.
    pub(crate) heard: u32,
    /// Grants of its attachment that are not in force until the daemon ends.
    withheld: Vec<(String, String)>,
}

impl Vm {
    /// Makes a VM known that has its pool: socket, record.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is left then, the pool's file neither.
    pub(crate) fn create(
        plan: VmPlan,
        pool: io::Result<Pool>,
        dirs: &Dirs,
    ) -> Result<Self, Refusal> {
        let record = plan.record;
        let made = pool
            .and_then(|pool| Self::open(record.clone(), pool, event::random(), dirs))
            .and_then(|vm| vm.record.save(&dirs.state).map(|()| vm));
        made.map_err(|error| {
            record.remove_files(&dirs.state);
            let short = matches!(error.kind(), io::ErrorKind::StorageFull)
                || error.raw_os_error() == Some(libc::ENOMEM);
            let code = if short {
                code::NO_MEMORY
            } else {
                code::INTERNAL
            };
            Refusal::new(code, format!("VM {:?}: {error}", record.name))
        })
    }

    /// The VMs that an earlier daemon served, and those that cannot be served again, which are logged
    /// and left alone.
    pub(crate) fn load_all(dirs: &Dirs) -> (Vec<Self>, Vec<Broken>) {
        let (mut vms, mut broken) = (Vec::new(), Vec::new());
        let mut known = HashSet::new();
        // One whose record cannot be read may have any.
        let mut kinds = vec![dirs::POOL, dirs::ARENA];
        for path in records(dirs) {
            let text = record::read(&path);
            let said = text.as_deref().unwrap_or_default().to_owned();
            if let Ok(record) = toml::from_str::<Record>(&said)
                && record.stays_for.is_none()
                && record.is_of_another_boot()
            {
                let name = &record.name;
                log::info!(target: "vm", "VM {name:?} is forgotten: the host has booted since it was attached");
                record.remove_files(&dirs.state);
                continue;
            }
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let mut files = record::pools_of(&name, &said, dirs);
            match record::arenas_of(&said) {
                Some(arenas) if text.is_ok() => files.extend(arenas),
                _ => kinds.retain(|kind| *kind != dirs::ARENA),
            }
            let files = files.iter();
            known.extend(files.filter_map(|it| Some(it.file_name()?.to_owned())));
            let loaded = text
                .and_then(|text| toml::from_str::<Record>(&text).map_err(io::Error::other))
                .and_then(|record| match record.is_of_another_boot() {
                    true => Self::after_boot(record, dirs),
                    false => Self::reopen(record, dirs),
                });
            match loaded {
                Ok(vm) => vms.push(vm),
                Err(error) => {
                    log::error!(target: "vm", "{}: {error}", path.display());
                    let why = error.to_string();
                    broken.push(Broken::read(name.into_owned(), why, &said, dirs));
                }
            }
        }
        dirs::sweep(dirs, &kinds, &known);
        (vms, broken)
    }

    fn reopen(record: Record, dirs: &Dirs) -> io::Result<Self> {
        record.check()?;
        let pool = pool_file(&record.pool, record.file_len(), false, &|| true)?;
        // The guest can write its pool: of an old header only the number is taken, which the guest
        // compares with what its own channel says.
        let (region, _) = parted(&record, &pool.0)?;
        let id = PoolHeader::read(&region).map_or_else(event::random, |header| header.id);
        Self::open(record, pool, id, dirs)
    }

    fn open(record: Record, (file, watch): Pool, id: u64, dirs: &Dirs) -> io::Result<Self> {
        let (region, front) = parted(&record, &file)?;
        let header = record.header(id);
        header.write(&region);
        if let Some(front) = &front {
            pmem::write_header(front, record.pool_bytes, id);
        }
        let listener = vnplug_os::socket::listen(&control_path(&dirs.state, &record.name), 0o600)?;
        share_access(&record.pool, &control_path(&dirs.state, &record.name));
        // Whoever connected and was not accepted yet goes with it.
        let listener = PeerFd::alone(listener);
        let doorbell = match record.vectors {
            0 => None,
            vectors => {
                let path = doorbell_path(&dirs.state, &record.name);
                let server = DoorbellServer::listen(&path, vectors, &header)?;
                share_access(&record.pool, &path);
                Some(server)
            }
        };
        Ok(Self {
            places: Places::new(record.pool_bytes),
            record,
            region,
            front,
            watch,
            pool_id: header.id,
            listener,
            channel: None,
            bells: HashMap::new(),
            board: None,
            doorbell,
            heard: 0,
            withheld: Vec::new(),
        })
    }

    /// The operator's name for it.
    pub(crate) fn name(&self) -> &str {
        &self.record.name
    }

    /// `qemu`, `uml` or `qemu-pmem`.
    pub(crate) fn kind(&self) -> &'static str {
        match self.record.kind() {
            VmKind::Qemu => "qemu",
            VmKind::Uml => "uml",
            VmKind::QemuPmem => "qemu-pmem",
        }
    }

    /// Who attached it: [`VmSpec::owner`].
    pub(crate) fn owner(&self) -> u64 {
        self.record.owner.parse().unwrap_or(0)
    }

    /// Bytes of its pool.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.record.pool_bytes
    }

    /// The file of its pool, to be read and written.
    pub(crate) fn pool_file(&self) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.record.pool, flags, Mode::empty())?)
    }

    /// What it was granted when it was attached, but for what operators took for good.
    pub(crate) fn attached_with(&self) -> Vec<Grant> {
        self.record.grants()
    }

    /// The same, but for what is withheld until the daemon ends, too.
    pub(crate) fn grants(&self) -> Vec<Grant> {
        let mut grants = self.attached_with();
        grants.retain(|it| !self.withheld.contains(&pair(it)));
        grants
    }

    /// Takes what it was granted when it was attached: of a source, or only what has this filter; for good, or until
    /// the daemon ends. True if there was any.
    ///
    /// # Errors
    /// It cannot be written down; nothing was changed.
    pub(crate) fn take_grants(
        &mut self,
        (source, filter): (&str, &str),
        for_good: bool,
        state: &Path,
    ) -> io::Result<bool> {
        let is_meant =
            |own: &(String, String)| own.0 == source && (filter.is_empty() || own.1 == filter);
        // What is withheld already can still be taken for good.
        let grants = match for_good {
            true => self.attached_with(),
            false => self.grants(),
        };
        let mut taken: Vec<_> = grants.iter().map(pair).collect();
        taken.retain(is_meant);
        if taken.is_empty() {
            return Ok(false);
        }
        if for_good {
            let mut record = self.record.clone();
            record.allow.retain(|own| !taken.contains(own));
            taken.retain(|own| !record.taken.contains(own));
            record.taken.extend(taken);
            record.save(state)?;
            self.record = record;
        } else {
            self.withheld.extend(taken);
        }
        Ok(true)
    }

    /// What is left of what somebody attaches this machine with: what operators took of it is not given again.
    pub(crate) fn left_of(&self, mut allow: Vec<Grant>) -> Vec<Grant> {
        allow.retain(|grant| {
            let is_left = !self.record.taken.contains(&pair(grant));
            if !is_left {
                let (vm, source) = (self.name(), grant.source.escape_debug());
                log::info!(target: "vm", "VM {vm:?}: --allow {source} was taken by an operator and is not given again");
            }
            is_left
        });
        allow
    }

    /// The groups of the host that it may join.
    pub(crate) fn groups(&self) -> &[GroupRecord] {
        &self.record.groups
    }

    /// What to plug into it.
    pub(crate) fn ready(&self, state: &Path) -> VmReady {
        let doorbell = match self.record.vectors {
            0 => String::new(),
            _ => doorbell_path(state, self.name()).display().to_string(),
        };
        VmReady {
            pool_path: self.record.pool.display().to_string(),
            pool_len: self.record.file_len(),
            control_path: control_path(state, self.name()).display().to_string(),
            doorbell_path: doorbell,
            arenas: self
                .record
                .groups
                .iter()
                .map(|group| (group.path.display().to_string(), group.len))
                .collect(),
        }
    }

    /// Whether `spec` asks for what this VM is; the grants and the owner are taken over.
    pub(crate) fn readopt(&mut self, spec: &VmSpec, state: &Path) -> Result<(), Refusal> {
        let same_kind = spec.kind == self.record.kind();
        let wanted = plan::rounded(spec.kind, spec.pool_bytes);
        let same_pool = wanted == 0 || wanted == self.record.pool_bytes;
        if !same_kind || !same_pool || spec.vectors != self.record.vectors {
            let what = format!(
                "VM {:?} is attached as {} with a pool of {} bytes and {} vectors; detach it first",
                spec.name,
                self.kind(),
                self.record.pool_bytes,
                self.record.vectors
            );
            return Err(Refusal::new(code::EXISTS, what));
        }
        let groups = &self.record.groups;
        let same_group = |(group, wanted): (&GroupRecord, &HostGroup)| group.is(wanted);
        if groups.len() != spec.groups.len() || !groups.iter().zip(&spec.groups).all(same_group) {
            let shown = |group: &GroupRecord| format!("{}={}", group.name, group.source);
            let what = match groups.as_slice() {
                [] => "no --group".to_owned(),
                groups => groups.iter().map(shown).collect::<Vec<_>>().join(", "),
            };
            let what = format!(
                "VM {:?} is attached with {what}; detach it first to change its groups",
                spec.name
            );
            return Err(Refusal::new(code::EXISTS, what));
        }
        let record = Record {
            allow: spec.allow.iter().map(pair).collect(),
            owner: spec.owner.to_string(),
            held: None,
            stays_for: spec.stays_for,
            ..self.record.clone()
        };
        // What a restarted daemon would not know is not so now.
        record
            .save(state)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.record = record;
        if let Some(front) = &self.front {
            // Before it may be plugged (again): root in the guest may write it.
            pmem::write_header(front, self.record.pool_bytes, self.pool_id);
        }
        Ok(())
    }

    /// What its ports read until it was held: no port is opened for it, for it moves. `None`: it is not held.
    pub(crate) fn held(&self) -> Option<&BTreeSet<String>> {
        self.record.held.as_ref()
    }

    /// It is held from now on, or no more; the next daemon knows it, too.
    ///
    /// # Errors
    /// [`Refusal`]: it cannot be written down; nothing was changed.
    pub(crate) fn set_held(
        &mut self,
        held: Option<BTreeSet<String>>,
        state: &Path,
    ) -> Result<(), Refusal> {
        if self.record.held == held {
            return Ok(());
        }
        let record = Record {
            held,
            ..self.record.clone()
        };
        record
            .save(state)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.record = record;
        Ok(())
    }

    /// Writes the first page of its pool again: a machine that came here with its memory brought the page of the
    /// pool that it had elsewhere.
    pub(crate) fn sign(&self) {
        self.record.header(self.pool_id).write(&self.region);
    }

    /// Whether each of its ports is to have a device of its own, and none a place in the pool.
    pub(crate) fn is_apart(&self) -> bool {
        self.record.apart
    }

    /// From now on each of its ports is to have a device of its own, or not.
    pub(crate) fn set_apart(&mut self, apart: bool, state: &Path) -> Result<(), Refusal> {
        if self.record.apart == apart {
            return Ok(());
        }
        let record = Record {
            apart,
            ..self.record.clone()
        };
        // The next daemon, too, makes no port in the pool before somebody plugs again.
        record
            .save(state)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.record = record;
        Ok(())
    }

    /// How a new port of this VM is woken: a doorbell vector that the agent listens to, if one is
    /// free, else the channel. Returns the vector too.
    pub(crate) fn bell(&mut self, channel_bell: &Arc<OwnedFd>) -> (Doorbell, Option<VmBell>, u32) {
        let free = self.doorbell.as_ref().and_then(|it| it.free(self.heard));
        if let Some((bell, vector)) = free {
            return (Doorbell::Vm(bell), None, vector);
        }
        let new = || Board::new(Arc::clone(channel_bell));
        let bell = VmBell::new(self.board.get_or_insert_with(new));
        (Doorbell::Vm(bell.clone()), Some(bell), u32::MAX)
    }

    /// Whether any of the bells was rung that the channel carries.
    pub(crate) fn is_rung(&self) -> bool {
        self.board.as_ref().is_some_and(|board| board.is_rung())
    }

    /// The ports whose bells were rung and that the channel carries.
    pub(crate) fn take_rung(&self) -> Vec<u32> {
        if !self.board.as_ref().is_some_and(|board| board.take()) {
            return Vec::new();
        }
        let rung = |(port, bell): (&u32, &VmBell)| bell.take().then_some(*port);
        self.bells.iter().filter_map(rung).collect()
    }

    /// Gives back what a port had here.
    pub(crate) fn forget_port(&mut self, port: u32, places: &[RingPlace]) {
        self.bells.remove(&port);
        for place in places {
            self.places.give(*place);
        }
    }

    /// Somebody truncated the pool's file; the VM cannot be served any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.lost.load(Ordering::Acquire)
    }

    /// Deletes what lies in the file system, and gives the memory away: to unmap it takes long.
    pub(crate) fn dissolve(self, state: &Path) -> Region {
        self.record.remove_files(state);
        // A QEMU that does not let go of it keeps no memory.
        self.watch.give_up();
        self.region
    }
}

/// As records have it.
fn pair(grant: &Grant) -> (String, String) {
    (grant.source.clone(), grant.filter.clone())
}

/// The pool of a file that is mapped whole, and what lies before it.
fn parted(record: &Record, file: &Region) -> io::Result<(Region, Option<Region>)> {
    let front = record.front();
    let pool = file.part(front, record.pool_bytes);
    let pool = pool.ok_or_else(|| io::Error::other("a pool's file is too short"))?;
    Ok((pool, file.part(0, front).filter(|_| front > 0)))
}

/// Lets a process with access to the pool (a QEMU that runs as another user) connect to a socket
/// too: attaching gave both an access control list, and a restarted daemon makes new sockets.
fn share_access(pool: &Path, socket: &Path) {
    // No list, and no lists at all, leave the socket to the daemon's own user.
    let set = AccessList::of(pool).and_then(|list| match list {
        Some(list) => list.set(socket),
        None => Ok(()),
    });
    if let Err(error) = set {
        log::warn!(target: "vm", "{}: {error}", socket.display());
    }
}

#[cfg(test)]
mod tests;
