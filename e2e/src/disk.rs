//! A disk of a User-mode Linux guest that fails when a test says so (device-mapper, in the guest's own
//! kernel: nothing happens to the host's).
//!
//! ```no_run
//! # fn main() -> vnplug_e2e::Result<()> {
//! use vnplug_e2e::{DiskFault, Fault, Image, Lab, Uml, UmlConfig};
//! let lab = Lab::new()?;
//! let file = DiskFault::file(&lab, "disk", 64)?;
//! let guest = Uml::boot(&lab, UmlConfig {
//!     kernel_args: vec![DiskFault::kernel_arg(&file)],
//!     image: DiskFault::image(Image::default()),
//!     ..UmlConfig::default()
//! })?;
//! let disk = DiskFault::new(&guest, "/disk")?;
//! disk.mount()?;                       // ext4
//! disk.set(Fault::Writes)?;            // from now on every write fails with EIO
//! # Ok(())
//! # }
//! ```
//!
//! A power cut is [`DiskFault::cut`]: from one moment on the disk keeps nothing more, then what the guest
//! still holds in memory is thrown away and the disk is mounted again, as after a boot.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vnplug_testing::PATIENCE;

use crate::channel::Output;
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::image::Image;
use crate::lab::Lab;

/// What a disk does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// These sectors (of 512 bytes) can be neither read nor written: EIO.
    Sectors {
        /// The first of them.
        first: u64,
        /// How many.
        count: u64,
    },
    /// Every write fails with EIO; what is there can be read.
    Writes,
    /// Everything fails with EIO.
    All,
    /// Writes are reported done and are not: a power cut that nobody has noticed yet.
    Lose,
    /// Every write and flush takes longer, by this.
    Slow(Duration),
}

/// A guest's disk, behind a mapping that can be changed while it is in use.
#[derive(Debug)]
pub struct DiskFault<'a> {
    guest: &'a Guest,
    dir: String,
    sectors: u64,
}

impl<'a> DiskFault<'a> {
    /// The disk as the guest's programs see it.
    pub const DEVICE: &'static str = "/dev/mapper/disk";

    /// Makes a disk's file on the host, with an empty ext4 file system; it goes with the lab.
    ///
    /// # Errors
    /// [`LabError::Io`], [`LabError::Command`] if `mkfs.ext4` fails.
    pub fn file(lab: &Lab, name: &str, mib: u64) -> Result<PathBuf> {
        let path = lab.dir().join(name);
        let file = File::create(&path).map_err(LabError::io("make a disk"))?;
        file.set_len(mib << 20)
            .map_err(LabError::io("size a disk"))?;
        let output = Command::new("mkfs.ext4")
            .args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"])
            .arg(&path)
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .output()
            .map_err(|_| missing("mkfs.ext4", "e2fsprogs"))?;
        if !output.status.success() {
            return Err(LabError::Command {
                command: "mkfs.ext4".to_owned(),
                text: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        Ok(path)
    }

    /// What makes a file the guest's disk.
    #[must_use]
    pub fn kernel_arg(file: &Path) -> String {
        format!("ubd0={}", file.display())
    }

    /// Adds what the guest needs for it.
    #[must_use]
    pub fn image(image: Image) -> Image {
        let modules = ["dm-mod", "dm-flakey", "dm-delay", "dm-log-writes"];
        modules
            .iter()
            .fold(image, |image, module| image.module(*module))
            .program_at(DMSETUP, "/usr/sbin/dmsetup")
    }

    /// Maps the guest's disk, without a fault; it will be mounted at `dir`.
    ///
    /// # Errors
    /// [`LabError::Command`] with what `dmsetup` says.
    pub fn new(guest: &'a Guest, dir: &str) -> Result<Self> {
        create(guest, dir, |sectors| table(sectors, Fault::None))
    }

    /// From now on the disk behaves so. What is on its way to the disk is not waited for, and the file
    /// system is not asked to settle.
    ///
    /// # Errors
    /// [`LabError::Command`] with what `dmsetup` says.
    pub fn set(&self, fault: Fault) -> Result<()> {
        let table = table(self.sectors, fault);
        let steps = [
            format!("printf '{table}' | {DM} load disk"),
            format!("{DM} suspend --noflush --nolockfs disk"),
            format!("{DM} resume disk"),
        ];
        run(self.guest, &steps.join(" && ")).map(drop)
    }

    /// Mounts the file system.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn mount(&self) -> Result<()> {
        // The journal is written when a program asks for it, or after a minute; without a journal the
        // option is refused.
        let (device, dir) = (Self::DEVICE, &self.dir);
        let mount = format!(
            "mount -t ext4 -o commit=60 {device} '{dir}' || mount -t ext4 {device} '{dir}'"
        );
        run(self.guest, &mount).map(drop)
    }

    /// Unmounts the file system; programs that use it must have ended.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn unmount(&self) -> Result<()> {
        run(self.guest, &format!("umount '{}'", self.dir)).map(drop)
    }

    /// Cuts the power: what the disk has at this moment is all that is there when it is mounted again.
    /// `end` is a shell command that ends the programs that write, run after the cut.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn cut(&self, end: &str) -> Result<()> {
        self.set(Fault::Lose)?;
        if !end.is_empty() {
            run(self.guest, end)?;
        }
        // What is still in memory is written to a disk that loses it; then memory forgets it, too. A program
        // that was killed may take a while to end.
        let patient = "n=0; until umount '{}' || [ $n -ge 100 ]; do n=$((n+1)); sleep 0.1; done; \
                       ! grep -q ' {} ' /proc/mounts";
        run(self.guest, &patient.replace("{}", &self.dir))?;
        run(self.guest, "echo 3 >/proc/sys/vm/drop_caches")?;
        self.set(Fault::None)?;
        self.mount()
    }
}

/// Maps the guest's disk, of this many sectors, as a table says.
pub(crate) fn create<'a>(
    guest: &'a Guest,
    dir: &str,
    table: impl Fn(u64) -> String,
) -> Result<DiskFault<'a>> {
    let size = run(guest, &format!("cat /sys/block/{UBD}/size"))?.text();
    let sectors = size
        .trim()
        .parse()
        .map_err(|_| LabError::Protocol(format!("no size of a disk: {size}")))?;
    let table = table(sectors);
    let make = format!("mkdir -p '{dir}' && printf '{table}' | {DM} create disk");
    run(guest, &make)?;
    Ok(DiskFault {
        guest,
        dir: dir.to_owned(),
        sectors,
    })
}

/// The mapping as device-mapper wants it (Documentation/admin-guide/device-mapper).
fn table(all: u64, fault: Fault) -> String {
    let dev = format!("/dev/{UBD}");
    match fault {
        Fault::None => format!("0 {all} linear {dev} 0\\n"),
        Fault::All => format!("0 {all} error\\n"),
        // Down for ever: 0 seconds up, then a year.
        Fault::Writes => format!("0 {all} flakey {dev} 0 0 31536000 1 error_writes\\n"),
        Fault::Lose => format!("0 {all} flakey {dev} 0 0 31536000 1 drop_writes\\n"),
        Fault::Slow(by) => {
            let ms = by.as_millis();
            format!("0 {all} delay {dev} 0 0 {dev} 0 {ms}\\n")
        }
        Fault::Sectors { first, count } => {
            let first = first.min(all);
            let behind = (first + count).min(all);
            let parts = [
                (0, first, format!("linear {dev} 0")),
                (first, behind - first, "error".to_owned()),
                (behind, all - behind, format!("linear {dev} {behind}")),
            ];
            let line = |(at, len, what): &(u64, u64, String)| format!("{at} {len} {what}\\n");
            let some = parts.iter().filter(|(_, len, _)| *len > 0);
            some.map(line).collect()
        }
    }
}

pub(crate) fn run(guest: &Guest, command: &str) -> Result<Output> {
    let output = guest.run(command, PATIENCE)?;
    if output.success() {
        return Ok(output);
    }
    Err(LabError::Command {
        command: command.to_owned(),
        text: output.text(),
    })
}

fn missing(program: &str, package: &str) -> LabError {
    LabError::Missing(format!(
        "no {program} on the host: apt-get install {package}"
    ))
}

const DMSETUP: &str = "/usr/sbin/dmsetup";
/// There is no udev in the guest to wait for.
pub(crate) const DM: &str = "DM_DISABLE_UDEV=1 /usr/sbin/dmsetup";
pub(crate) const UBD: &str = "ubda";
