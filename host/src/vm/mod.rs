//! Virtual machines: what each has of the daemon, and what outlives the daemon.
//!
//! A VM has a memory pool (a file, because QEMU and User-mode Linux open it by path), a control
//! channel and, optionally, an `ivshmem-doorbell` server. The pool and a record of the VM survive
//! the daemon: a restarted daemon maps the same pool and listens on the same sockets, QEMU's
//! chardev reconnects, `vnplug attach uml` hands its socket over again, and the guest agent says
//! Hello. The VM notices nothing but a gap.

pub(crate) mod arenas;
pub(crate) mod doorbell;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use vnplug_ring::Region;
use vnplug_ring::control::{Grant, HostGroup, RingPlace, VmKind, VmReady, VmSpec, code};
use vnplug_ring::pool::{MAX_NAME, PoolHeader};

use crate::hub::Refusal;
use crate::port::doorbell::{Doorbell, VmBell};
use crate::port::pool::Places;
use crate::sys::event;
use crate::sys::memory::{GoOn, Pool, Watch, pool_file};
use arenas::{ArenaFile, GroupRecord};
use doorbell::DoorbellServer;

/// The attribute that is a file's access list.
const ACL: &str = "system.posix_acl_access";

/// Smallest and largest pool in bytes.
const POOL_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 36;

/// What is written down of a VM, to be read by the next daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    name: String,
    uml: bool,
    pool: PathBuf,
    pool_bytes: u64,
    vectors: u32,
    allow: Vec<(String, String)>,
    /// Who attached it; as text, for TOML's numbers have a sign.
    #[serde(default)]
    owner: String,
    /// Groups of the host that it may join, in the order of its devices.
    #[serde(default)]
    groups: Vec<GroupRecord>,
}

impl Record {
    fn grants(&self) -> Vec<Grant> {
        let grant = |(source, filter): &(String, String)| Grant {
            source: source.clone(),
            filter: filter.clone(),
        };
        self.allow.iter().map(grant).collect()
    }

    fn remove_files(&self, state: &Path) {
        for path in [
            self.pool.clone(),
            control_path(state, &self.name),
            doorbell_path(state, &self.name),
            record_path(state, &self.name),
        ] {
            remove(&path);
        }
    }
}

/// One VM.
pub(crate) struct Vm {
    record: Record,
    pub(crate) region: Region,
    watch: Arc<Watch>,
    pub(crate) pool_id: u64,
    pub(crate) places: Places,
    pub(crate) listener: OwnedFd,
    /// Token of the connection that is its control channel.
    pub(crate) channel: Option<u64>,
    pub(crate) bells: HashMap<u32, VmBell>,
    pub(crate) doorbell: Option<DoorbellServer>,
    /// How many of its vectors the agent listens to.
    pub(crate) heard: u32,
}

/// What is read of a record that is not whole: as much as can be read.
#[derive(Default, Deserialize)]
struct Groups {
    #[serde(default)]
    groups: Vec<GroupRecord>,
}

/// As [`Groups`].
#[derive(Default, Deserialize)]
struct Origin {
    #[serde(default)]
    owner: String,
    #[serde(default)]
    pool: PathBuf,
}

/// Which memory of groups a recorded VM has, and what it may see.
pub(crate) struct Memories {
    pub(crate) name: String,
    /// What it was granted when it was attached; `None`: its record does not say.
    pub(crate) allow: Option<Vec<Grant>>,
    pub(crate) groups: Vec<GroupRecord>,
}

/// A VM of an earlier daemon that cannot be served, though it may run and have memory of ours.
pub(crate) struct Broken {
    pub(crate) name: String,
    pub(crate) why: String,
    /// Groups of the host whose memory it has, as far as its record says.
    pub(crate) groups: Vec<GroupRecord>,
    /// Who attached it; 0 if its record does not say.
    owner: u64,
    pool: PathBuf,
}

impl Broken {
    fn read(name: String, why: String, text: &str, dirs: &Dirs) -> Self {
        let Groups { groups } = toml::from_str(text).unwrap_or_default();
        let Origin { owner, pool } = toml::from_str(text).unwrap_or_default();
        let named = dirs.pool_path(&name);
        Self {
            why,
            groups,
            owner: owner.parse().unwrap_or(0),
            // It may lie where an earlier daemon had its pools.
            pool: match pool.file_name() == named.file_name() {
                true => pool,
                false => named,
            },
            name,
        }
    }

    /// Whether it is for `owner` to have it forgotten: its own, or an operator who names any VM (0).
    pub(crate) fn obeys(&self, owner: u64) -> bool {
        owner == 0 || owner == self.owner
    }

    /// Deletes what is left of it.
    pub(crate) fn remove_files(&self, state: &Path) {
        let name = &self.name;
        for path in [
            self.pool.clone(),
            control_path(state, name),
            doorbell_path(state, name),
            record_path(state, name),
        ] {
            remove(&path);
        }
    }
}

/// Where VMs' files lie.
#[derive(Debug, Clone)]
pub(crate) struct Dirs {
    /// Sockets and records.
    pub(crate) state: PathBuf,
    /// Pools: a tmpfs or hugetlbfs.
    pub(crate) pools: PathBuf,
    /// Bytes of a pool when the operator does not say.
    pub(crate) pool_bytes: u64,
}

impl Dirs {
    fn pool_path(&self, name: &str) -> PathBuf {
        let instance = instance(&self.state);
        self.pools.join(format!("vnplug-{instance}-{name}.pool"))
    }
}

/// A VM that an operator asked for and that has nothing yet.
pub(crate) struct Plan {
    record: Record,
    /// Names of groups of the host that are to be made with it.
    new_groups: Vec<String>,
}

/// Memory that was made for a VM.
pub(crate) struct Committed {
    pub(crate) pool: Pool,
    /// In the order of [`Plan::new_groups`]; none for one that has its source's memory.
    pub(crate) arenas: Vec<Option<ArenaFile>>,
}

impl Plan {
    /// Checks what was asked for. `groups` are those of the host that it asks for, and whether each is
    /// to be made.
    pub(crate) fn new(
        spec: &VmSpec,
        groups: Vec<(GroupRecord, bool)>,
        dirs: &Dirs,
    ) -> Result<Self, Refusal> {
        check_name("VM", &spec.name)?;
        let pool_bytes = if spec.pool_bytes == 0 {
            dirs.pool_bytes
        } else {
            spec.pool_bytes
        };
        if !pool_bytes.is_power_of_two() || !POOL_BYTES.contains(&pool_bytes) {
            let what = format!(
                "a pool of {pool_bytes} bytes: use a power of two from 1 MiB to 64 GiB (ivshmem \
                 devices have such sizes only)"
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        if spec.vectors > doorbell::MAX_VECTORS {
            let what = format!(
                "{} vectors; at most {}",
                spec.vectors,
                doorbell::MAX_VECTORS
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        let new = groups.iter().filter(|(_, is_new)| *is_new);
        let new_groups = new.map(|(group, _)| group.name.clone()).collect();
        let record = Record {
            name: spec.name.clone(),
            uml: spec.kind == VmKind::Uml,
            pool: dirs.pool_path(&spec.name),
            pool_bytes,
            vectors: spec.vectors,
            allow: spec
                .allow
                .iter()
                .map(|grant| (grant.source.clone(), grant.filter.clone()))
                .collect(),
            owner: spec.owner.to_string(),
            groups: groups.into_iter().map(|(group, _)| group).collect(),
        };
        Ok(Self { record, new_groups })
    }

    /// The groups of the host that it asks for.
    pub(crate) fn groups(&self) -> &[GroupRecord] {
        &self.record.groups
    }

    /// Those of them that are to be made with it.
    pub(crate) fn new_groups(&self) -> impl Iterator<Item = &GroupRecord> {
        let is_new = |group: &&GroupRecord| self.new_groups.contains(&group.name);
        self.record.groups.iter().filter(is_new)
    }

    /// The operator's name for it.
    pub(crate) fn name(&self) -> &str {
        &self.record.name
    }

    /// Makes its pool and the arenas, which takes long: half a second for each GiB.
    ///
    /// # Errors
    /// The system's; `Interrupted` if `go_on` said so. Nothing is left then.
    pub(crate) fn commit(&self, go_on: GoOn<'_>) -> io::Result<Committed> {
        // A pool without a record is what an interrupted attach left behind.
        remove(&self.record.pool);
        let pool = pool_file(&self.record.pool, self.record.pool_bytes, true, go_on)?;
        let arenas = self.new_groups().map(|group| group.make(go_on));
        let arenas = arenas.collect::<io::Result<_>>();
        let arenas = arenas.inspect_err(|_| self.abandon())?;
        Ok(Committed { pool, arenas })
    }

    /// Deletes what was made for nobody.
    pub(crate) fn abandon(&self) {
        remove(&self.record.pool);
        self.new_groups().for_each(GroupRecord::abandon);
    }
}

impl Vm {
    /// Makes a VM known that has its pool: socket, record.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is left then, the pool's file neither.
    pub(crate) fn create(plan: Plan, pool: io::Result<Pool>, dirs: &Dirs) -> Result<Self, Refusal> {
        let record = plan.record;
        let made = pool
            .and_then(|pool| Self::open(record.clone(), pool, event::random(), dirs))
            .and_then(|vm| vm.save(&dirs.state).map(|()| vm));
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
        for path in records(dirs) {
            let text = std::fs::read_to_string(&path);
            let said = text.as_deref().unwrap_or_default().to_owned();
            let loaded = text
                .and_then(|text| toml::from_str::<Record>(&text).map_err(io::Error::other))
                .and_then(|record| Self::reopen(record, dirs));
            match loaded {
                Ok(vm) => vms.push(vm),
                Err(error) => {
                    log::error!(target: "vm", "{}: {error}", path.display());
                    let name = path.file_stem().unwrap_or_default().to_string_lossy();
                    let why = error.to_string();
                    broken.push(Broken::read(name.into_owned(), why, &said, dirs));
                }
            }
        }
        (vms, broken)
    }

    /// What the records of an earlier daemon tell of memory that VMs have, whether they can be served or
    /// not; `None` for one that does not tell.
    pub(crate) fn memories(dirs: &Dirs) -> Vec<Option<Memories>> {
        let memories = |path: PathBuf| {
            let text = std::fs::read_to_string(&path).ok()?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            match toml::from_str::<Record>(&text) {
                Ok(record) if record.name == name => Some(Memories {
                    allow: Some(record.grants()),
                    name: record.name,
                    groups: record.groups,
                }),
                _ => Some(Memories {
                    name: name.into_owned(),
                    allow: None,
                    groups: toml::from_str::<Groups>(&text).ok()?.groups,
                }),
            }
        };
        records(dirs).into_iter().map(memories).collect()
    }

    fn reopen(record: Record, dirs: &Dirs) -> io::Result<Self> {
        check_name("VM", &record.name).map_err(|refusal| io::Error::other(refusal.text))?;
        let pool = pool_file(&record.pool, record.pool_bytes, false, &|| true)?;
        // The guest can write its pool: of an old header only the number is taken, which the guest
        // compares with what its own channel says.
        let id = PoolHeader::read(&pool.0).map_or_else(event::random, |header| header.id);
        Self::open(record, pool, id, dirs)
    }

    fn open(record: Record, (region, watch): Pool, id: u64, dirs: &Dirs) -> io::Result<Self> {
        let header = PoolHeader {
            len: record.pool_bytes,
            id,
            name: record.name.clone(),
        };
        header.write(&region);
        let listener = crate::control::listen(&control_path(&dirs.state, &record.name), 0o600)?;
        share_access(&record.pool, &control_path(&dirs.state, &record.name));
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
            watch,
            pool_id: header.id,
            listener,
            channel: None,
            bells: HashMap::new(),
            doorbell,
            heard: 0,
        })
    }

    /// The operator's name for it.
    pub(crate) fn name(&self) -> &str {
        &self.record.name
    }

    /// `qemu` or `uml`.
    pub(crate) fn kind(&self) -> &'static str {
        if self.record.uml { "uml" } else { "qemu" }
    }

    /// Who attached it: [`VmSpec::owner`].
    pub(crate) fn owner(&self) -> u64 {
        self.record.owner.parse().unwrap_or(0)
    }

    /// Bytes of its pool.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.record.pool_bytes
    }

    /// What it was granted when it was attached.
    pub(crate) fn grants(&self) -> Vec<Grant> {
        self.record.grants()
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
            pool_len: self.record.pool_bytes,
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
        let same_kind = (spec.kind == VmKind::Uml) == self.record.uml;
        let same_pool = spec.pool_bytes == 0 || spec.pool_bytes == self.record.pool_bytes;
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
        self.record.allow = spec
            .allow
            .iter()
            .map(|g| (g.source.clone(), g.filter.clone()))
            .collect();
        self.record.owner = spec.owner.to_string();
        self.save(state)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))
    }

    /// How a new port of this VM is woken: a doorbell vector that the agent listens to, if one is
    /// free, else the channel. Returns the vector too.
    pub(crate) fn bell(&self, channel_bell: &Arc<OwnedFd>) -> (Doorbell, Option<VmBell>, u32) {
        let free = self.doorbell.as_ref().and_then(|it| it.free(self.heard));
        if let Some((bell, vector)) = free {
            return (Doorbell::Vm(bell), None, vector);
        }
        let bell = VmBell::new(Arc::clone(channel_bell));
        (Doorbell::Vm(bell.clone()), Some(bell), u32::MAX)
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
        self.region
    }

    fn save(&self, state: &Path) -> io::Result<()> {
        let text = toml::to_string(&self.record).map_err(io::Error::other)?;
        let path = record_path(state, self.name());
        let draft = path.with_extension("new");
        std::fs::write(&draft, text)?;
        std::fs::rename(&draft, &path)
    }
}

/// Lets whoever was given access to the pool (a QEMU that runs as another user) connect to a socket
/// too: attaching gave both an access control list, and a restarted daemon makes new sockets.
fn share_access(pool: &Path, socket: &Path) {
    let mut list = vec![0; 4096];
    // No list (ENODATA) and no lists at all (ENOTSUP) leave the socket to the daemon's own user.
    let Ok(len) = rustix::fs::getxattr(pool, ACL, &mut list) else {
        return;
    };
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(socket, ACL, &list[..len], flags) {
        log::warn!(target: "vm", "{}: {error}", socket.display());
    }
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn!(target: "vm", "{}: {error}", path.display());
        }
        _ => {}
    }
}

fn control_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.control"))
}

fn doorbell_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.doorbell"))
}

/// The records of VMs that there are.
fn records(dirs: &Dirs) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dirs.state.join("vms"));
    let paths = entries.into_iter().flatten().flatten().map(|it| it.path());
    let is_one = |path: &PathBuf| path.extension().is_some_and(|it| it == "toml");
    paths.filter(is_one).collect()
}

fn record_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.toml"))
}

/// A short name for the daemon that owns this state directory, so that several can share a tmpfs.
fn instance(state: &Path) -> String {
    let state = std::fs::canonicalize(state).unwrap_or_else(|_| state.to_owned());
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in state.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{:08x}", hash as u32)
}

fn check_name(whose: &str, name: &str) -> Result<(), Refusal> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty()
        || name.len() > MAX_NAME
        || name.starts_with('.')
        || !name.chars().all(allowed)
    {
        let what = format!(
            "{:?} is no {whose} name: use 1 to {MAX_NAME} letters, digits, - _ . (not first)",
            name.chars().take(80).collect::<String>()
        );
        return Err(Refusal::new(code::INVALID, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirs(name: &str) -> Dirs {
        let state = std::env::temp_dir().join(format!("vnplug-vm-{name}-{}", std::process::id()));
        std::fs::create_dir_all(state.join("vms")).unwrap();
        Dirs {
            pools: state.clone(),
            state,
            pool_bytes: 1 << 20,
        }
    }

    fn spec(name: &str) -> VmSpec {
        let allow = vec![Grant {
            source: "eth1".into(),
            filter: "icmp".into(),
        }];
        VmSpec {
            name: name.into(),
            kind: VmKind::Qemu,
            pool_bytes: 0,
            vectors: 0,
            allow,
            owner: 7,
            groups: Vec::new(),
        }
    }

    fn create(spec: &VmSpec, dirs: &Dirs) -> Result<Vm, Refusal> {
        let plan = Plan::new(spec, Vec::new(), dirs)?;
        let pool = plan.commit(&|| true).map(|committed| committed.pool);
        Vm::create(plan, pool, dirs)
    }

    #[test]
    fn an_attach_that_fails_leaves_nothing() {
        let dirs = dirs("failed");
        // Something that is no socket is where the doorbell's has to be.
        let obstacle = doorbell_path(&dirs.state, "probe");
        std::fs::create_dir(&obstacle).unwrap();
        let wanted = VmSpec {
            vectors: 2,
            ..spec("probe")
        };
        let refusal = create(&wanted, &dirs).err().unwrap();
        assert!(refusal.text.contains("no socket"), "{}", refusal.text);
        std::fs::remove_dir(&obstacle).unwrap();
        let left = std::fs::read_dir(dirs.state.join("vms")).unwrap();
        assert_eq!(left.count(), 0);
        assert_eq!(std::fs::read_dir(&dirs.pools).unwrap().count(), 1);
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }

    #[test]
    fn a_vm_is_found_again_by_the_next_daemon_with_the_same_pool() {
        let dirs = dirs("again");
        let vm = create(&spec("probe"), &dirs).unwrap();
        let (id, ready) = (vm.pool_id, vm.ready(&dirs.state));
        drop(vm);
        let (again, _) = Vm::load_all(&dirs);
        assert_eq!(again.len(), 1);
        assert_eq!((again[0].pool_id, again[0].ready(&dirs.state)), (id, ready));
        assert_eq!(again[0].grants(), spec("probe").allow);
        again[0].record.remove_files(&dirs.state);
        assert!(Vm::load_all(&dirs).0.is_empty());
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }

    #[test]
    fn what_cannot_be_served_keeps_its_owner_and_goes_with_its_pool() {
        let dirs = dirs("broken");
        drop(create(&spec("probe"), &dirs).unwrap());
        let path = record_path(&dirs.state, "probe");
        let whole = std::fs::read_to_string(&path).unwrap();
        let elsewhere = Dirs {
            pools: dirs.state.join("elsewhere"),
            ..dirs.clone()
        };
        for (text, now, known) in [
            (whole.replace("uml = false", "uml = 7"), &elsewhere, true),
            ("no record".to_owned(), &dirs, false),
        ] {
            std::fs::write(&path, text).unwrap();
            let (vms, broken) = Vm::load_all(now);
            assert!(vms.is_empty());
            let obeys = [7, 8, 0].map(|owner| broken[0].obeys(owner));
            assert_eq!(obeys, [known, false, true]);
            assert_eq!(broken[0].pool, dirs.pool_path("probe"));
        }
        Vm::load_all(&dirs).1[0].remove_files(&dirs.state);
        assert_eq!(
            std::fs::read_dir(dirs.state.join("vms")).unwrap().count(),
            0
        );
        assert!(!dirs.pool_path("probe").exists());
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }

    #[test]
    fn who_may_map_the_pool_may_connect_after_a_restart() {
        let dirs = dirs("acl");
        let vm = create(&spec("probe"), &dirs).unwrap();
        // linux/posix_acl_xattr.h: version 2; (tag, permissions, id): owner, user 65534, group,
        // mask, others.
        let entries = [
            (1, 6, u32::MAX),
            (2, 6, 65_534),
            (4, 0, u32::MAX),
            (16, 6, u32::MAX),
            (32, 0, u32::MAX),
        ];
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            list.extend(u16::to_le_bytes(tag));
            list.extend(u16::to_le_bytes(permissions));
            list.extend(id.to_le_bytes());
        }
        let pool = vm.ready(&dirs.state).pool_path;
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&pool, ACL, &list, flags).unwrap();
        drop(vm);
        let again = Vm::load_all(&dirs).0.pop().unwrap();
        let mut found = vec![0; 4096];
        let len = rustix::fs::getxattr(again.ready(&dirs.state).control_path, ACL, &mut found);
        assert_eq!(found[..len.unwrap()], list);
        again.record.remove_files(&dirs.state);
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }

    #[test]
    fn what_a_guest_wrote_over_its_pools_header_does_not_reach_the_next_daemon() {
        let dirs = dirs("scribbled");
        let vm = create(&spec("probe"), &dirs).unwrap();
        let id = vm.pool_id;
        // A name that is longer once its bytes are made UTF-8, and another length.
        vm.region.write(0x20, &[0xff; MAX_NAME]);
        vm.region.write(0x10, &u64::MAX.to_le_bytes());
        drop(vm);
        let (again, _) = Vm::load_all(&dirs);
        assert_eq!((again[0].name(), again[0].pool_id), ("probe", id));
        let header = PoolHeader::read(&again[0].region).unwrap();
        assert_eq!((header.len, header.name.as_str()), (1 << 20, "probe"));
        again[0].record.remove_files(&dirs.state);
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }

    #[test]
    fn names_that_are_paths_and_sizes_that_are_no_power_of_two_are_refused() {
        let dirs = dirs("bad");
        for name in ["", "../x", "a/b", ".hidden", "ä", &"x".repeat(64)] {
            let refusal = create(&spec(name), &dirs).err().unwrap();
            assert_eq!(refusal.code, code::INVALID, "{name}");
        }
        let odd = VmSpec {
            pool_bytes: (1 << 20) + 4096,
            ..spec("odd")
        };
        assert!(
            create(&odd, &dirs)
                .err()
                .unwrap()
                .text
                .contains("power of two")
        );
        std::fs::remove_dir_all(&dirs.state).unwrap();
    }
}
