//! Finding the pool where it is a virtio-pmem device: the kernel has a character device for it, which may be mapped
//! also where the kernel is locked down.
//!
//! ```text
//! /sys/bus/dax/drivers/device_dax/dax0.0 ─▶ …/virtio2/ndbus0/region0/dax0.1/dax0.0      /dev/dax0.0
//!                                                                      uuid: our prefix
//! ```
//!
//! A device is there some time before its driver: only those that have it are looked at.

use std::fs;
use std::path::{Path, PathBuf};

use vnplug_ring::pmem;

use super::find::entries;

/// A device that may be a pool.
pub(super) struct Dax {
    /// What is opened and mapped.
    pub(super) node: PathBuf,
    /// What it is known by while it is there.
    pub(super) device: PathBuf,
}

/// The devices below `root` that a host of ours made.
pub(super) fn search(root: &Path) -> Vec<Dax> {
    let all = entries(&root.join("sys/bus/dax/drivers/device_dax")).into_iter();
    let ours = all.filter_map(|link| {
        let name = link.file_name()?.to_str()?.to_owned();
        if !name.starts_with("dax") {
            // Not a device, but what a driver has beside them.
            return None;
        }
        let device = fs::canonicalize(&link).ok()?;
        let uuid = fs::read_to_string(device.parent()?.join("uuid")).ok()?;
        pmem::is_ours(&uuid).then(|| Dax {
            node: root.join("dev").join(name),
            device,
        })
    });
    ours.collect()
}
