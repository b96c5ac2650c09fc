//! Where a program runs: on the host, or in a guest that has vNPlug.

use std::fs;
use std::path::PathBuf;

use vnplug_testing::PATIENCE;

use super::Stage;
use crate::attached::{POOL_BYTES, attach_uml, everything, plug, uml_spec};
use crate::daemon::{guest_program, program};
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::image::Image;
use crate::lab::Lab;
use crate::patience::until;
use crate::qemu::{Qemu, QemuConfig};
use crate::uml::{Uml, UmlConfig};

/// Where programs read the wire through vNPlug's libpcap.
#[derive(Debug)]
pub enum Place {
    /// The host itself.
    Host,
    /// A User-mode Linux in which every program of the host runs.
    Uml(Guest),
    /// A QEMU guest with the programs it was given.
    Qemu(Guest),
}

impl Place {
    /// What the wire is called there.
    #[must_use]
    pub fn device(&self) -> &'static str {
        match self {
            Self::Host => "vnplug:wire",
            Self::Uml(_) | Self::Qemu(_) => "host:wire",
        }
    }

    /// A word for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Uml(_) => "uml",
            Self::Qemu(_) => "qemu",
        }
    }

    /// The guest, if it is one.
    #[must_use]
    pub fn guest(&self) -> Option<&Guest> {
        match self {
            Self::Host => None,
            Self::Uml(guest) | Self::Qemu(guest) => Some(guest),
        }
    }
}

impl Stage {
    /// Boots a User-mode Linux with vNPlug's memory; its agent serves.
    ///
    /// # Errors
    /// As [`Uml::boot`]; [`LabError::Protocol`] if the daemon refuses.
    pub fn uml(&self) -> Result<Place> {
        let config = UmlConfig {
            image: self.image(Image::default().host_root())?,
            memory_mib: 256,
            ..UmlConfig::default()
        };
        let spec = uml_spec("programs-uml", POOL_BYTES, everything());
        let (config, _channel) = attach_uml(&self.daemon, spec, config)?;
        let guest = Uml::boot(&self.lab, config)?;
        serve(&guest)?;
        Ok(Place::Uml(guest))
    }

    /// Boots a QEMU guest with these programs of the host, then plugs vNPlug in; its agent serves.
    ///
    /// # Errors
    /// As [`Qemu::boot`]; [`LabError::Command`] if attaching fails.
    pub fn qemu(&self, programs: &[&str]) -> Result<Place> {
        let image = programs
            .iter()
            .fold(Image::default(), |image, path| image.program(*path));
        let config = QemuConfig {
            image: self.image(image)?,
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&self.lab, config)?;
        plug(&self.daemon, &guest, "programs-qemu", &[])?;
        serve(&guest)?;
        Ok(Place::Qemu(guest))
    }

    /// The agent and the drop-in, beside what else the guest needs.
    fn image(&self, image: Image) -> Result<Image> {
        let library = (
            self.dropin.join(LIBRARY),
            format!("{GUEST_DROPIN}/{LIBRARY}"),
        );
        Ok(image
            .file(guest_program()?, "/usr/bin/vnplug", 0o755)
            .program_at(library.0, library.1))
    }
}

/// A directory that has only the drop-in, for `LD_LIBRARY_PATH`.
pub(super) fn dropin(lab: &Lab) -> Result<PathBuf> {
    let dir = lab.dir().join("pcap");
    fs::create_dir(&dir).map_err(LabError::io("make the drop-in's directory"))?;
    let link = dir.join(LIBRARY);
    std::os::unix::fs::symlink(program(BUILT)?, &link).map_err(LabError::io("link the drop-in"))?;
    Ok(dir)
}

/// Starts the agent and waits until programs in the guest see the wire.
fn serve(guest: &Guest) -> Result<()> {
    let agent = guest.spawn("exec vnplug agent")?;
    until(
        || {
            format!(
                "the guest sees the wire: {}",
                agent.peek(2000).unwrap_or_default()
            )
        },
        PATIENCE,
        || {
            Ok(guest
                .run("vnplug list 2>&1", PATIENCE)?
                .text()
                .contains("host:wire"))
        },
    )
}

/// As programs ask for it.
const LIBRARY: &str = "libpcap.so.0.8";
/// As cargo calls it.
const BUILT: &str = "libvnplug_pcap.so";
/// Where guests have it.
pub(super) const GUEST_DROPIN: &str = "/run/pcap";
