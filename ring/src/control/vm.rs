//! Virtual machines, as operators make them known.

use super::wire::{Malformed, Reader, Writer};

/// Which kind of virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmKind {
    /// QEMU: the pool is an ivshmem device, the channel a virtio-serial port.
    Qemu,
    /// User-mode Linux: the pool is `/dev/mmapper`, the channel a tty line.
    Uml,
    /// QEMU: the pool is a virtio-pmem device ([`crate::pmem`]), the channel a virtio-serial port.
    QemuPmem,
}

/// Asks for a VM to be made known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// The operator's name for it: 1 to 63 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Which kind.
    pub kind: VmKind,
    /// Bytes of its memory pool; a power of two ([`VmKind::QemuPmem`]: rounded up to 2 MiB); 0 = the daemon's
    /// default.
    pub pool_bytes: u64,
    /// MSI-X vectors of an `ivshmem-doorbell` device; 0 = none.
    pub vectors: u32,
    /// Which sources the VM may see, beside what the daemon's configuration grants it.
    pub allow: Vec<Grant>,
    /// Whose it is: a number that tells one attacher from another, drawn by it. While the VM's
    /// control channel is open, only the same owner may attach it again. 0 = nobody that comes
    /// again.
    pub owner: u64,
    /// Groups of the host that it may join: for each it gets a device with the arena, read-only. QEMU
    /// only.
    pub groups: Vec<HostGroup>,
    /// Its devices are in the definition of a machine that QEMU runs as this user: after a boot of the host the VM is there
    /// again, with an empty pool in the same file, which that user may open. QEMU only, without groups of the host.
    pub stays_for: Option<u32>,
}

/// A group of the host: its arena is a file of its own, which several VMs map, none of them for
/// writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostGroup {
    /// What readers call it; characters as of a VM's name.
    pub name: String,
    /// Its source, without `host:`.
    pub source: String,
    /// Wanted bytes of the record area of each receive queue's arena, if this attach makes the group;
    /// 0 = as it is, or the daemon's default.
    pub arena_bytes: u64,
}

/// Permission to see a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the source, without `host:`; `*` = every source.
    pub source: String,
    /// Obligatory filter (pcap-filter(7)), run before the reader's own; empty = none.
    pub filter: String,
}

/// A VM is known; here is what to plug into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmReady {
    /// File of the memory pool.
    pub pool_path: String,
    /// The file's length in bytes.
    pub pool_len: u64,
    /// Unix socket on which the daemon listens for the VM's control channel.
    pub control_path: String,
    /// Unix socket of the ivshmem server; empty without a doorbell.
    pub doorbell_path: String,
    /// Files of the arenas of its groups of the host, and their lengths in bytes; to be mapped
    /// read-only. One whose name ends in `.umem` is the packet memory of the group's source.
    pub arenas: Vec<(String, u64)>,
}

impl VmSpec {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.name);
        w.u8(self.kind as u8);
        w.u64(self.pool_bytes);
        w.u32(self.vectors);
        w.list(&self.allow, |w, grant| {
            w.text(&grant.source);
            w.text(&grant.filter);
        });
        w.u64(self.owner);
        // A daemon that knows none refuses those who ask for one, and nobody else.
        if !self.groups.is_empty() || self.stays_for.is_some() {
            w.list(&self.groups, |w, group| {
                w.text(&group.name);
                w.text(&group.source);
                w.u64(group.arena_bytes);
            });
        }
        if let Some(uid) = self.stays_for {
            w.u32(uid);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("name")?,
            kind: r.one_of("kind", &[VmKind::Qemu, VmKind::Uml, VmKind::QemuPmem])?,
            pool_bytes: r.u64("pool_bytes")?,
            vectors: r.u32("vectors")?,
            allow: r.list("allow", |r| {
                Ok(Grant {
                    source: r.text("source")?,
                    filter: r.text("filter")?,
                })
            })?,
            owner: r.appended_u64("owner")?,
            groups: match r.is_over() {
                true => Vec::new(),
                false => r.list("groups", |r| {
                    Ok(HostGroup {
                        name: r.text("group")?,
                        source: r.text("group's source")?,
                        arena_bytes: r.u64("arena_bytes")?,
                    })
                })?,
            },
            stays_for: match r.is_over() {
                true => None,
                false => Some(r.u32("stays_for")?),
            },
        })
    }
}

impl VmReady {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.pool_path);
        w.u64(self.pool_len);
        w.text(&self.control_path);
        w.text(&self.doorbell_path);
        if !self.arenas.is_empty() {
            w.list(&self.arenas, |w, (path, len)| {
                w.text(path);
                w.u64(*len);
            });
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            pool_path: r.text("pool_path")?,
            pool_len: r.u64("pool_len")?,
            control_path: r.text("control_path")?,
            doorbell_path: r.text("doorbell_path")?,
            arenas: match r.is_over() {
                true => Vec::new(),
                false => r.list("arenas", |r| {
                    Ok((r.text("arena's path")?, r.u64("arena's length")?))
                })?,
            },
        })
    }
}
