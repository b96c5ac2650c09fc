//! The VM's `ivshmem-doorbell` device: readers are woken by interrupts, each by a vector of its own,
//! and the agent is not in their way.
//!
//! The device has a page with our pool's header, registers, and MSI-X. VFIO turns each vector into
//! an eventfd, which the application gets as its wake-up descriptor; every port gets a fresh one, so
//! whatever an application does to its own concerns nobody else. VFIO needs an IOMMU that remaps
//! interrupts. Nothing is relied on before it worked: the agent rings and the host answers by vector
//! 0; only then are vectors offered to the host.
//!
//! Holding the device keeps it from being unplugged, so it is let go when the kernel asks for it,
//! when the channel closes, and when its pool is gone. It stays bound to `vfio-pci`.

use std::fmt::{self, Display};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{Mode, open};
use rustix::io::{Errno, read};
use vnplug_ring::Region;
use vnplug_ring::pool::{FIRST_RING, PoolHeader};

use super::find::{Identity, entries, is_ivshmem, open_flags};
use crate::connection::timespec;
use crate::map::map;
use crate::map::vfio::{Failed, Interrupt, MAX_EVENTS, Part, PciDevice, Step};

/// A doorbell that works.
#[derive(Debug)]
pub(super) struct Doorbell {
    device: PciDevice,
    /// Readable when the kernel wants the device back.
    request: OwnedFd,
    pub(super) vectors: u32,
    pub(super) pool_id: u64,
    pub(super) id: Identity,
}

/// A vector that wakes one port; silent when dropped.
#[derive(Debug)]
pub(super) struct Line {
    doorbell: Rc<Doorbell>,
    vector: u32,
}

/// A doorbell of our pool that cannot be used.
#[derive(Debug)]
pub(super) struct Unusable {
    pub(super) id: Identity,
    address: String,
    why: String,
}

/// Looks for the doorbell of a pool, leaving out the device `not`, and tries it. `None`: there is
/// none.
pub(super) fn find(pool_id: u64, not: Option<&Identity>) -> Option<Result<Doorbell, Unusable>> {
    search(Path::new("/"), pool_id, not).map(|candidate| {
        let candidate = candidate?;
        let address = candidate.address.clone();
        let id = candidate.id.clone();
        candidate
            .open(Path::new("/dev/vfio"), pool_id)
            .map_err(|why| Unusable { id, address, why })
    })
}

struct Candidate {
    id: Identity,
    address: String,
    group: String,
}

/// The first device that may be the doorbell, with VFIO's driver.
fn search(
    root: &Path,
    pool_id: u64,
    not: Option<&Identity>,
) -> Option<Result<Candidate, Unusable>> {
    let bus = root.join("sys/bus/pci");
    for path in entries(&bus.join("devices")) {
        let id = Identity::of(&path);
        let Some(id) = id.filter(|id| is_doorbell(&path) && Some(id) != not) else {
            continue;
        };
        let address = path.file_name().unwrap_or_default();
        let address = address.to_string_lossy().into_owned();
        let driver = link_name(&path.join("driver"));
        // Another program's device is not ours to bind. Behind VFIO the page cannot be seen from
        // here; then opening looks.
        let ready = match driver.as_deref() {
            None if page_of(&path).is_none_or(|page| page.id != pool_id) => continue,
            None => bind(&bus, &path, &address),
            Some(DRIVER) => Ok(()),
            Some(other) => Err(format!("the driver {other:?} has it")),
        };
        let group = || link_name(&path.join("iommu_group")).ok_or_else(|| NO_IOMMU.to_owned());
        return Some(match ready.and_then(|()| group()) {
            Ok(group) => Ok(Candidate { id, address, group }),
            Err(why) => Err(Unusable { id, address, why }),
        });
    }
    None
}

/// Gives an idle device to VFIO.
pub(super) fn bind(bus: &Path, device: &Path, address: &str) -> Result<(), String> {
    if !device.join("iommu_group").exists() {
        return Err(NO_IOMMU.into());
    }
    if !bus.join("drivers").join(DRIVER).exists() {
        return Err("this kernel has no driver vfio-pci: run `modprobe vfio-pci`".into());
    }
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    };
    write(device.join("driver_override"), DRIVER)?;
    write(bus.join("drivers_probe"), address)?;
    match link_name(&device.join("driver")).as_deref() {
        Some(DRIVER) => Ok(()),
        _ => Err("vfio-pci does not take it; see the kernel's log".into()),
    }
}

impl Candidate {
    fn open(self, dir: &Path, pool_id: u64) -> Result<Doorbell, String> {
        let device = PciDevice::open(dir, &self.group, &self.address).map_err(reason)?;
        let system = |what: &'static str| move |errno: Errno| format!("cannot {what}: {errno}");
        switch_on(&device, true)?;
        let mut page = [0; FIRST_RING as usize];
        device
            .read(Part::Bar2, 0, &mut page)
            .map_err(system("read its page"))?;
        let region = Region::heap(FIRST_RING);
        region.write(0, &page);
        if PoolHeader::read(&region).is_none_or(|header| header.id != pool_id) {
            return Err("it belongs to another pool".into());
        }
        let vectors = device
            .interrupts(Interrupt::MsiX)
            .map_err(system("count its vectors"))?;
        let vectors = vectors.min(MAX_EVENTS as u32);
        device
            .route(Interrupt::MsiX, 0, &vec![None; vectors as usize])
            .map_err(system("enable its vectors"))?;
        let request = event().map_err(system("make an eventfd"))?;
        device
            .route(Interrupt::Request, 0, &[Some(request.as_fd())])
            .map_err(system("learn when it is unplugged"))?;
        let doorbell = Doorbell {
            device,
            request,
            vectors,
            pool_id,
            id: self.id,
        };
        let took = doorbell.prove()?;
        log::info!(
            "doorbell {}: {vectors} vectors, the host answers in {} µs",
            self.address,
            took.as_micros()
        );
        Ok(doorbell)
    }
}

impl Doorbell {
    /// The eventfd that a vector rings from now on, and what keeps it so.
    pub(super) fn listen(self: &Rc<Self>, vector: u32) -> Result<(OwnedFd, Line), Errno> {
        let event = event()?;
        self.device
            .route(Interrupt::MsiX, vector, &[Some(event.as_fd())])?;
        let doorbell = Rc::clone(self);
        Ok((event, Line { doorbell, vector }))
    }

    /// Rings and waits for the host's answer, a few times; gives the middle round trip.
    fn prove(&self) -> Result<Duration, String> {
        let event = event().map_err(|errno| format!("cannot make an eventfd: {errno}"))?;
        self.device
            .route(Interrupt::MsiX, 0, &[Some(event.as_fd())])
            .map_err(|errno| format!("cannot route a vector: {errno}"))?;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            self.device
                .write(Part::Bar0, DOORBELL, &HOST.to_le_bytes())
                .map_err(|errno| format!("cannot ring: {errno}"))?;
            let mut fds = [PollFd::new(&event, PollFlags::IN)];
            match poll(&mut fds, Some(&timespec(ANSWER))) {
                Ok(1..) => times.push(begin.elapsed()),
                _ => return Err(SILENT.into()),
            }
            // It was readable.
            let _ = read(&event, &mut [0; 8]);
            // The host listens to a guest once a millisecond.
            std::thread::sleep(PACE);
        }
        self.silence(0);
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }

    fn silence(&self, vector: u32) {
        if let Err(errno) = self.device.route(Interrupt::MsiX, vector, &[None]) {
            log::debug!("cannot silence vector {vector}: {errno}");
        }
    }
}

/// Readable when the kernel wants the device back.
impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.request.as_fd()
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.doorbell.silence(self.vector);
    }
}

impl Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, why, .. } = self;
        write!(f, "the doorbell {address} is not used: {why}")
    }
}

/// VFIO hands a device over with memory and bus mastering off; without the latter it raises no interrupts.
pub(super) fn switch_on(device: &PciDevice, master: bool) -> Result<(), String> {
    let system = |what: &'static str| move |errno: Errno| format!("cannot {what}: {errno}");
    let mut command = [0; 2];
    device
        .read(Part::Config, PCI_COMMAND, &mut command)
        .map_err(system("read its configuration"))?;
    let mut on = u16::from_le_bytes(command) | PCI_MEMORY;
    if master {
        on |= PCI_MASTER;
    }
    device
        .write(Part::Config, PCI_COMMAND, &on.to_le_bytes())
        .map_err(system("switch it on"))
}

pub(super) fn reason(Failed(step, errno): Failed) -> String {
    let what = match (step, errno) {
        (Step::Iommu, Errno::PERM) => return NO_REMAPPING.into(),
        (Step::Viable, _) => return "another device of its IOMMU group has a driver".into(),
        (Step::Group, Errno::BUSY) => return "another program has it".into(),
        (Step::Container, _) => "open /dev/vfio/vfio",
        (Step::Group, _) => "open its IOMMU group",
        (Step::Join, _) => "join its IOMMU group",
        (Step::Iommu, _) => "set up the IOMMU",
        (Step::Device, _) => "take it from its group",
    };
    format!("cannot {what}: {errno}")
}

pub(super) fn event() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// `ivshmem-doorbell` has a BAR 1 for MSI-X, `ivshmem-plain` has not.
pub(super) fn is_doorbell(device: &Path) -> bool {
    let resources = fs::read_to_string(device.join("resource")).unwrap_or_default();
    let bar1 = resources.lines().nth(1).unwrap_or_default();
    let is_set = |word: &str| !word.trim_matches(['0', 'x']).is_empty();
    is_ivshmem(device) && bar1.split_whitespace().any(is_set)
}

/// What the first page of a device without a driver says.
fn page_of(device: &Path) -> Option<PoolHeader> {
    if let Err(error) = fs::write(device.join("enable"), "1") {
        log::debug!("{}: cannot enable: {error}", device.display());
    }
    let memory = open(device.join("resource2"), open_flags(), Mode::empty()).ok()?;
    PoolHeader::read(&map(memory.as_fd(), FIRST_RING).ok()?)
}

/// The last part of what a link points to.
pub(super) fn link_name(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

const DRIVER: &str = "vfio-pci";
const NO_IOMMU: &str = "the VM has no IOMMU in use: start it with -device intel-iommu,intremap=on \
                        and its kernel with intel_iommu=on";
const NO_REMAPPING: &str = "the VM's IOMMU does not remap interrupts: start it with -device \
                            intel-iommu,intremap=on";
const SILENT: &str = "the host does not answer it (a daemon that was restarted cannot: detach and \
                      attach the VM to plug the doorbell again)";

/// Register of BAR 0: peer << 16 | vector (QEMU, ivshmem-spec).
const DOORBELL: u64 = 12;
/// Vector 0 of peer 0, the host.
const HOST: u32 = 0;
const PCI_COMMAND: u64 = 4;
const PCI_MEMORY: u16 = 1 << 1;
const PCI_MASTER: u16 = 1 << 2;

const ROUNDS: usize = 9;
const ANSWER: Duration = Duration::from_secs(1);
const PACE: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let name = format!("vnplug-doorbell-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn path(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        }

        /// An ivshmem device whose page names pool `id`; its directory.
        fn device(&self, slot: &str, bar1: &str, id: u64) -> PathBuf {
            let dir = format!("sys/bus/pci/devices/{slot}");
            let region = Region::heap(FIRST_RING);
            let (len, name) = (1 << 26, "vm".into());
            PoolHeader { len, id, name }.write(&region);
            let mut page = [0; FIRST_RING as usize];
            region.read(0, &mut page);
            let bar = "0xfeb00000 0xfeb000ff 0x40200\n";
            let resource = format!("{bar}{bar1}{bar}");
            for (file, bytes) in [
                ("vendor", &b"0x1af4\n"[..]),
                ("device", b"0x1110\n"),
                ("resource", resource.as_bytes()),
                ("resource2", &page),
            ] {
                fs::write(self.path(&format!("{dir}/{file}")), bytes).unwrap();
            }
            self.0.join(dir)
        }

        fn why(&self) -> Option<String> {
            let found = search(&self.0, 7, None)?;
            Some(found.err().map_or("found".into(), |it| it.to_string()))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const BAR1: &str = "0xfeb01000 0xfeb01fff 0x40200\n";
    const NONE: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";

    #[test]
    fn only_a_doorbell_of_our_pool_is_looked_at() {
        let tree = Tree::new("ours");
        tree.device("0000:01:00.0", NONE, 7);
        let foreign = tree.device("0000:02:00.0", BAR1, 8);
        assert_eq!(tree.why(), None);
        assert!(!foreign.join("driver_override").exists());
    }

    #[test]
    fn what_is_missing_is_named_and_a_ready_device_found() {
        let tree = Tree::new("missing");
        let device = tree.device("0000:03:00.0", BAR1, 7);
        let no_iommu = tree.why().unwrap();
        assert!(
            no_iommu.starts_with("the doorbell 0000:03:00.0 is not used: the VM has no IOMMU")
                && no_iommu.contains("-device intel-iommu,intremap=on"),
            "{no_iommu}"
        );
        symlink("../../groups/4", device.join("iommu_group")).unwrap();
        fs::create_dir_all(tree.path("sys/bus/pci/groups/4")).unwrap();
        let no_driver = tree.why().unwrap();
        assert!(no_driver.contains("modprobe vfio-pci"), "{no_driver}");
        symlink("../drivers/e1000", device.join("driver")).unwrap();
        let taken = tree.why().unwrap();
        assert!(taken.contains("the driver \"e1000\" has it"), "{taken}");
        fs::remove_file(device.join("driver")).unwrap();
        symlink("../drivers/vfio-pci", device.join("driver")).unwrap();
        assert_eq!(tree.why().unwrap(), "found");
        let id = Identity::of(&device).unwrap();
        assert!(search(&tree.0, 7, Some(&id)).is_none());
    }

    #[test]
    fn an_iommu_without_remapping_is_told_from_a_busy_group() {
        assert!(reason(Failed(Step::Iommu, Errno::PERM)).contains("intremap=on"));
        assert_eq!(
            reason(Failed(Step::Group, Errno::BUSY)),
            "another program has it"
        );
        assert!(reason(Failed(Step::Container, Errno::NOENT)).contains("/dev/vfio/vfio"));
    }
}
