//! A VM that is asked for: what it is to be, and its memory.

use std::io;

use vnplug_ring::control::{VmKind, VmSpec, code};
use vnplug_ring::pmem;
use vnplug_ring::pool::MAX_NAME;

use super::arenas::{ArenaFile, GroupRecord};
use super::dirs::{Dirs, POOL, remove};
use super::doorbell;
use super::record::{Record, this_boot};
use crate::hub::Refusal;
use vnplug_os::memory::{GoOn, Pool, pool_file};

/// A VM that an operator asked for and that has nothing yet.
pub(crate) struct VmPlan {
    pub(super) record: Record,
    /// Names of groups of the host that are to be made with it.
    new_groups: Vec<String>,
}

/// Memory that was made for a VM.
pub(crate) struct Committed {
    pub(crate) pool: Pool,
    /// In the order of [`VmPlan::new_groups`]; none for one that has its source's memory.
    pub(crate) arenas: Vec<Option<ArenaFile>>,
}

impl VmPlan {
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
        let pool_bytes = rounded(spec.kind, pool_bytes);
        check_pool_bytes(spec.kind, pool_bytes)?;
        if spec.kind == VmKind::QemuPmem && (spec.vectors > 0 || !groups.is_empty()) {
            let what = "a VM with a virtio-pmem device has no doorbell and no groups of the host";
            return Err(Refusal::new(code::INVALID, what));
        }
        if spec.stays_for.is_some() && (spec.kind != VmKind::Qemu || !groups.is_empty()) {
            let what = "only a QEMU with an ivshmem device, without groups of the host, stays over a boot of the host";
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
            pool: dirs.fresh(&spec.name, POOL),
            pool_bytes,
            vectors: spec.vectors,
            allow: spec
                .allow
                .iter()
                .map(|grant| (grant.source.clone(), grant.filter.clone()))
                .collect(),
            taken: Vec::new(),
            owner: spec.owner.to_string(),
            groups: groups.into_iter().map(|(group, _)| group).collect(),
            apart: false,
            pmem: spec.kind == VmKind::QemuPmem,
            held: None,
            boot: this_boot(),
            stays_for: spec.stays_for,
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
        let pool = pool_file(&self.record.pool, self.record.file_len(), true, go_on)?;
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

/// Refuses what cannot be the size of a pool.
pub(super) fn check_pool_bytes(kind: VmKind, pool_bytes: u64) -> Result<(), Refusal> {
    let (is_possible, use_) = match kind {
        VmKind::QemuPmem => (
            pool_bytes.is_multiple_of(pmem::STEP),
            "a multiple of 2 MiB up to 64 GiB",
        ),
        VmKind::Qemu | VmKind::Uml => (
            pool_bytes.is_power_of_two(),
            "a power of two from 1 MiB to 64 GiB (ivshmem devices have such sizes only)",
        ),
    };
    if !is_possible || !POOL_BYTES.contains(&pool_bytes) {
        let what = format!("a pool of {pool_bytes} bytes: use {use_}");
        return Err(Refusal::new(code::INVALID, what));
    }
    Ok(())
}

/// The size of the pool that is made for who asks for this one.
pub(super) fn rounded(kind: VmKind, pool_bytes: u64) -> u64 {
    match kind {
        VmKind::QemuPmem => pool_bytes
            .checked_next_multiple_of(pmem::STEP)
            .unwrap_or(pool_bytes),
        VmKind::Qemu | VmKind::Uml => pool_bytes,
    }
}

/// Refuses what cannot be part of a file's name.
pub(super) fn check_name(whose: &str, name: &str) -> Result<(), Refusal> {
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

/// Smallest and largest pool in bytes.
const POOL_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 36;
