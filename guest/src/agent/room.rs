//! Address space for a memory pool that was plugged behind a PCIe port.
//!
//! Firmware gives an empty hot-plug port a small window (2 MiB with SeaBIOS and OVMF unless QEMU is
//! told `pcie-root-port,pref64-reserve=SIZE`), and Linux does not widen the window of a port it
//! already set up when a device with a larger BAR appears ("BAR 2: can't assign; no space"). It
//! does when the port itself is removed and found again. So that is what the agent does, once for
//! each device, and only where the pool is all there is behind the port.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the kernel may take to give a device that it has just found its addresses.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

/// Gives `device`, a shared-memory device under `bus` (`/sys/bus/pci`), room for its BAR 2 if it
/// has none, and had none `patience` ago. Failing is logged; the pool then stays unusable.
pub(super) fn make(bus: &Path, device: &Path, patience: Duration) {
    /// When devices were first seen so, by the number of their directory: another device there is a new one. `None`
    /// once it was tried.
    static SEEN: Mutex<BTreeMap<u64, Option<Instant>>> = Mutex::new(BTreeMap::new());
    if !lacks_room(device) {
        return;
    }
    let Ok(inode) = fs::metadata(device).map(|meta| meta.ino()) else {
        return;
    };
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let since = seen.entry(inode).or_insert_with(|| Some(Instant::now()));
    match since {
        Some(first) if first.elapsed() >= patience => *since = None,
        _ => return,
    }
    let name = device.file_name().unwrap_or_default().display();
    let Some(port) = port_of_its_own(device) else {
        log::warn!("{name}: no address space for its memory, and its bus has other devices");
        return;
    };
    log::info!("{name}: no address space for its memory; the PCIe port above it is set up again");
    for file in [port.join("remove"), bus.join("rescan")] {
        if let Err(error) = fs::write(&file, "1") {
            log::warn!("{}: {error}", file.display());
        }
    }
}

/// BAR 2 is in the device and not in the address space: its line of `resource` is all zeroes.
fn lacks_room(device: &Path) -> bool {
    let resources = fs::read_to_string(device.join("resource")).unwrap_or_default();
    let bar2 = resources.lines().nth(2).unwrap_or_default();
    !bar2.is_empty()
        && bar2
            .split_whitespace()
            .all(|word| word.trim_matches(['0', 'x']).is_empty())
}

/// The bridge above the device, if the device is alone behind it.
fn port_of_its_own(device: &Path) -> Option<std::path::PathBuf> {
    let device = fs::canonicalize(device).ok()?;
    let port = device.parent()?;
    let class = fs::read_to_string(port.join("class")).ok()?;
    if !class.starts_with("0x0604") {
        return None;
    }
    let is_function = |name: &str| name.len() == "0000:00:00.0".len() && name.contains('.');
    let functions = fs::read_dir(port)
        .ok()?
        .flatten()
        .filter(|entry| entry.path().join("vendor").exists())
        .filter(|entry| entry.file_name().to_str().is_some_and(is_function))
        .count();
    (functions == 1).then(|| port.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const NO_BAR: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
    const BAR: &str = "0x0000000100000000 0x0000000103ffffff 0x000000000014220c";

    fn tree(name: &str, bar2: &str, neighbour: bool) -> (PathBuf, PathBuf) {
        let root = std::env::temp_dir().join(format!("vnplug-room-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let port = root.join("devices/0000:00:01.0");
        let device = port.join("0000:01:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(port.join("class"), "0x060400\n").unwrap();
        fs::write(port.join("remove"), "").unwrap();
        fs::write(root.join("rescan"), "").unwrap();
        fs::write(device.join("vendor"), "0x1af4\n").unwrap();
        fs::write(
            device.join("resource"),
            format!("{BAR}\n{NO_BAR}\n{bar2}\n"),
        )
        .unwrap();
        if neighbour {
            fs::create_dir(port.join("0000:01:00.1")).unwrap();
            fs::write(port.join("0000:01:00.1/vendor"), "0x8086\n").unwrap();
        }
        (root, device)
    }

    fn removed(root: &Path) -> bool {
        let read = |file: &str| fs::read_to_string(root.join(file)).unwrap();
        let (remove, rescan) = (read("devices/0000:00:01.0/remove"), read("rescan"));
        fs::remove_dir_all(root).unwrap();
        assert_eq!(remove, rescan);
        remove == "1"
    }

    // NB: one test, the lonely pool first: a directory of a later tree may get the inode of one that
    // was tried and removed.
    #[test]
    fn only_the_port_of_a_lonely_pool_without_address_is_set_up_again() {
        for (name, bar2, neighbour) in [
            ("lonely", NO_BAR, false),
            ("placed", BAR, false),
            ("neighbour", NO_BAR, true),
        ] {
            let (root, device) = tree(name, bar2, neighbour);
            make(&root, &device, Duration::from_secs(3600));
            assert!(
                fs::read(device.parent().unwrap().join("remove"))
                    .unwrap()
                    .is_empty()
            );
            make(&root, &device, Duration::ZERO);
            assert_eq!(removed(&root), name == "lonely", "{name}");
        }
    }
}
