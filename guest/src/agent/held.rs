//! The pool of a guest whose kernel is locked down, through VFIO: such a kernel maps no PCI memory from sysfs, and lets
//! `vfio-pci` do so, where the machine has an IOMMU.
//!
//! What an application gets is the device's descriptor; the memory lies at an offset in it (`map::map` knows). So an
//! application has more of the device than its memory: it can switch it off, for all of them. Nothing is mapped for DMA,
//! and the device has none.
//!
//! Who has the device, or maps it, keeps it from being unplugged. So it is let go when the kernel asks for it, as its
//! applications do when their ports are over. It stays bound to `vfio-pci`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;

use super::doorbell::{bind, event, is_doorbell, link_name, reason, switch_on};
use super::find::{Identity, Pool, entries, is_ivshmem, pool};
use crate::map::map;
use crate::map::vfio::{Interrupt, PciDevice};

/// A pool's device, as long as it is ours.
#[derive(Debug)]
pub(super) struct Held {
    _device: PciDevice,
    /// Readable when the kernel wants the device back.
    request: OwnedFd,
    pub(super) id: Identity,
}

/// Readable when the kernel wants the device back.
impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.request.as_fd()
    }
}

/// Takes the first device with a pool, leaving out the device `not`.
///
/// # Errors
/// Why there is none, in words: that of the last device.
pub(super) fn take(not: Option<&Identity>) -> Result<(Pool, Held), String> {
    let bus = Path::new("/sys/bus/pci");
    let mut why = "no shared memory is plugged".to_owned();
    for path in entries(&bus.join("devices")) {
        let id = Identity::of(&path);
        let Some(id) = id.filter(|id| Some(id) != not) else {
            continue;
        };
        if !is_ivshmem(&path) || is_doorbell(&path) {
            continue;
        }
        match open(bus, &path, id) {
            Ok(found) => return Ok(found),
            Err(reason) => why = format!("{}: {reason}", path.display()),
        }
    }
    Err(why)
}

fn open(bus: &Path, path: &Path, id: Identity) -> Result<(Pool, Held), String> {
    let name = path.file_name().unwrap_or_default();
    let address = name.to_string_lossy();
    match link_name(&path.join("driver")).as_deref() {
        None => bind(bus, path, &address)?,
        Some("vfio-pci") => {}
        Some(other) => return Err(format!("the driver {other:?} has it")),
    }
    let group = link_name(&path.join("iommu_group")).unwrap_or_default();
    let device = PciDevice::open(Path::new("/dev/vfio"), &group, &address).map_err(reason)?;
    switch_on(&device, false)?;
    let system = |what: &'static str| move |errno: Errno| format!("cannot {what}: {errno}");
    let request = event().map_err(system("make an eventfd"))?;
    device
        .route(Interrupt::Request, 0, &[Some(request.as_fd())])
        .map_err(system("learn when it is unplugged"))?;
    let copy = device.as_fd().try_clone_to_owned();
    let copy = copy.map_err(|error| format!("cannot copy a descriptor: {error}"))?;
    let found = pool(copy, Some(id.clone())).map_err(|error| error.to_string())?;
    let found = found.ok_or("there is no pool in it")?;
    // All of it, which also says whether so much is there.
    map(found.memory.as_fd(), found.header.len).map_err(|error| error.to_string())?;
    let held = Held {
        _device: device,
        request,
        id,
    };
    Ok((found, held))
}
