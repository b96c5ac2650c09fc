//! The system calls of VFIO (Linux `include/uapi/linux/vfio.h`), as far as a doorbell and a pool need them.
//!
//! A device is reached through its IOMMU group, a group through a container. A doorbell is rung and its page read by reads
//! and writes at the device's descriptor; a pool is mapped from that descriptor ([`memory_in`]).
#![expect(unsafe_code, reason = "the island that makes VFIO's system calls")]

use std::ffi::{CString, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, Result, pread, pwrite};
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, Setter, Updater};

/// A PCI device that VFIO gave to this process. The order of fields is the order of closing.
#[derive(Debug)]
pub(crate) struct PciDevice {
    device: OwnedFd,
    _group: OwnedFd,
    _container: OwnedFd,
}

/// The step that failed, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed(pub(crate) Step, pub(crate) Errno);

/// Steps of opening a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Opening `/dev/vfio/vfio`.
    Container,
    /// Opening the group.
    Group,
    /// Another device of the group has a driver of the kernel's.
    Viable,
    /// Putting the group into the container.
    Join,
    /// Choosing the IOMMU; EPERM: it does not remap interrupts.
    Iommu,
    /// Taking the device out of the group.
    Device,
}

/// Parts of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Part {
    Bar0 = 0,
    Bar2 = 2,
    Config = 7,
}

/// Interrupts of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Interrupt {
    /// The vectors of MSI-X.
    MsiX = 2,
    /// The kernel asks for the device back.
    Request = 4,
}

impl PciDevice {
    /// Opens the device `address` (`0000:01:00.0`) of `group`; `dir` is `/dev/vfio`.
    pub(crate) fn open(
        dir: &Path,
        group: &str,
        address: &str,
    ) -> std::result::Result<Self, Failed> {
        let at = |step| move |errno| Failed(step, errno);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let container =
            open(dir.join("vfio"), flags, Mode::empty()).map_err(at(Step::Container))?;
        let group = open(dir.join(group), flags, Mode::empty()).map_err(at(Step::Group))?;
        let mut status = GroupStatus {
            argsz: size_of::<GroupStatus>() as u32,
            flags: 0,
        };
        // SAFETY: VFIO_GROUP_GET_STATUS fills a structure of this layout, `argsz` bytes long.
        let asked = unsafe {
            ioctl::ioctl(
                &group,
                Updater::<GROUP_GET_STATUS, GroupStatus>::new(&mut status),
            )
        };
        asked.map_err(at(Step::Group))?;
        if status.flags & GROUP_VIABLE == 0 {
            return Err(Failed(Step::Viable, Errno::BUSY));
        }
        // SAFETY: VFIO_GROUP_SET_CONTAINER reads one int, a descriptor.
        let joined = unsafe {
            let container = container.as_raw_fd();
            ioctl::ioctl(&group, Setter::<GROUP_SET_CONTAINER, c_int>::new(container))
        };
        joined.map_err(at(Step::Join))?;
        // SAFETY: VFIO_SET_IOMMU takes a number and no pointer.
        let chosen = unsafe {
            let number = ioctl::IntegerSetter::<SET_IOMMU>::new_usize(TYPE1V2_IOMMU);
            ioctl::ioctl(&container, number)
        };
        chosen.map_err(at(Step::Iommu))?;
        let name = CString::new(address).map_err(|_| Failed(Step::Device, Errno::INVAL))?;
        // SAFETY: `GetDeviceFd` says what the call does.
        let device = unsafe { ioctl::ioctl(&group, GetDeviceFd(name)) };
        Ok(Self {
            device: device.map_err(at(Step::Device))?,
            _group: group,
            _container: container,
        })
    }

    /// Reads `into.len()` bytes of a part.
    pub(crate) fn read(&self, part: Part, offset: u64, into: &mut [u8]) -> Result<()> {
        let at = self.place(part, offset, into.len())?;
        let count = pread(&self.device, &mut *into, at)?;
        if count == into.len() {
            Ok(())
        } else {
            Err(Errno::IO)
        }
    }

    /// Writes bytes to a part; at an aligned offset four bytes are one access.
    pub(crate) fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.place(part, offset, bytes.len())?;
        if pwrite(&self.device, bytes, at)? == bytes.len() {
            Ok(())
        } else {
            Err(Errno::IO)
        }
    }

    /// How many interrupts of a kind the device has.
    pub(crate) fn interrupts(&self, kind: Interrupt) -> Result<u32> {
        let mut info = IrqInfo {
            argsz: size_of::<IrqInfo>() as u32,
            flags: 0,
            index: kind as u32,
            count: 0,
        };
        // SAFETY: VFIO_DEVICE_GET_IRQ_INFO fills a structure of this layout, `argsz` bytes long.
        unsafe {
            let updater = Updater::<DEVICE_GET_IRQ_INFO, IrqInfo>::new(&mut info);
            ioctl::ioctl(&self.device, updater)?;
        }
        Ok(info.count)
    }

    /// From now on the kernel rings `events` for the interrupts from `first` on; `None`: nothing.
    /// The first call for MSI-X must name all vectors that will ever be used (kernels before 6.5).
    pub(crate) fn route(
        &self,
        kind: Interrupt,
        first: u32,
        events: &[Option<BorrowedFd<'_>>],
    ) -> Result<()> {
        let mut set = IrqSet {
            argsz: (IRQ_SET_HEADER + 4 * events.len()) as u32,
            flags: IRQ_SET_DATA_EVENTFD | IRQ_SET_ACTION_TRIGGER,
            index: kind as u32,
            start: first,
            count: events.len() as u32,
            events: [-1; MAX_EVENTS],
        };
        let places = set.events.get_mut(..events.len()).ok_or(Errno::INVAL)?;
        for (place, event) in places.iter_mut().zip(events) {
            *place = event.map_or(-1, |event| event.as_raw_fd());
        }
        // SAFETY: VFIO_DEVICE_SET_IRQS reads `argsz` bytes of this layout, which are no more than
        // the structure has; it takes references to the eventfds, which are open now.
        unsafe { ioctl::ioctl(&self.device, Setter::<DEVICE_SET_IRQS, IrqSet>::new(set)) }
    }

    /// Offset of a part of the device in its descriptor, if `len` bytes from `offset` are there.
    fn place(&self, part: Part, offset: u64, len: usize) -> Result<u64> {
        let info = region(self.device.as_fd(), part)?;
        let end = offset.checked_add(len as u64).ok_or(Errno::INVAL)?;
        if end > info.size {
            return Err(Errno::NXIO);
        }
        Ok(info.offset + offset)
    }
}

/// Where the memory of a shared memory device lies in its descriptor, and how much; `None`: this is no descriptor of VFIO's.
pub(crate) fn memory_in(device: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let info = region(device, Part::Bar2).ok()?;
    Some((info.offset, info.size))
}

fn region(device: BorrowedFd<'_>, part: Part) -> Result<RegionInfo> {
    let mut info = RegionInfo {
        argsz: size_of::<RegionInfo>() as u32,
        flags: 0,
        index: part as u32,
        cap_offset: 0,
        size: 0,
        offset: 0,
    };
    // SAFETY: VFIO_DEVICE_GET_REGION_INFO fills a structure of this layout, `argsz` bytes long.
    unsafe {
        let updater = Updater::<DEVICE_GET_REGION_INFO, RegionInfo>::new(&mut info);
        ioctl::ioctl(device, updater)?;
    }
    Ok(info)
}

impl AsFd for PciDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// VFIO_GROUP_GET_DEVICE_FD: reads a name, returns a new descriptor.
struct GetDeviceFd(CString);

// SAFETY: the call reads a zero-terminated string at the pointer and changes no memory; what it
// returns when it does not fail is a descriptor that nobody else owns.
unsafe impl Ioctl for GetDeviceFd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GROUP_GET_DEVICE_FD
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.0.as_ptr().cast_mut().cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> Result<OwnedFd> {
        // SAFETY: see above.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

#[repr(C)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    events: [c_int; MAX_EVENTS],
}

/// The most interrupts one call can name.
pub(crate) const MAX_EVENTS: usize = 64;

const IRQ_SET_HEADER: usize = size_of::<IrqSet>() - 4 * MAX_EVENTS;
const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;
const GROUP_VIABLE: u32 = 1;
const TYPE1V2_IOMMU: usize = 3;

/// `_IO(VFIO_TYPE, VFIO_BASE + number)`.
const fn vfio(number: u8) -> Opcode {
    ioctl::opcode::none(b';', 100 + number)
}

const SET_IOMMU: Opcode = vfio(2);
const GROUP_GET_STATUS: Opcode = vfio(3);
const GROUP_SET_CONTAINER: Opcode = vfio(4);
const GROUP_GET_DEVICE_FD: Opcode = vfio(6);
const DEVICE_GET_REGION_INFO: Opcode = vfio(8);
const DEVICE_GET_IRQ_INFO: Opcode = vfio(9);
const DEVICE_SET_IRQS: Opcode = vfio(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_layouts_are_the_kernels() {
        assert_eq!((SET_IOMMU, DEVICE_SET_IRQS), (0x3b66, 0x3b6e));
        assert_eq!((size_of::<RegionInfo>(), IRQ_SET_HEADER), (32, 20));
    }

    #[test]
    fn without_vfio_the_first_step_fails() {
        let failed = PciDevice::open(Path::new("/nonexistent"), "1", "0000:00:00.0").err();
        assert_eq!(failed, Some(Failed(Step::Container, Errno::NOENT)));
    }
}
