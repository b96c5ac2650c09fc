//! KVM or emulation: found out by booting, since `/dev/kvm` may exist and yet run no guest.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::child::Tethered;
use crate::error::Result;
use crate::initramfs;
use crate::kernel;
use crate::lab::Lab;

/// How QEMU runs guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The kernel's virtualization.
    Kvm,
    /// QEMU's emulation: works everywhere, an order of magnitude slower.
    Tcg,
}

impl Accel {
    /// QEMU's word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The fastest accelerator that really boots a guest here; says so on standard error when that is
/// emulation. `VNPLUG_ACCEL=kvm|tcg` decides instead of the probe.
///
/// The probe boots a tiny guest within 8 seconds, once per process; the answer is kept in
/// `target/guest/accel` until the host boots again or `/dev/kvm` changes.
pub fn accel_probe() -> Accel {
    static ANSWER: OnceLock<Accel> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let (accel, reason) = match env::var("VNPLUG_ACCEL").as_deref() {
            Ok("kvm") => (Accel::Kvm, "VNPLUG_ACCEL says so".to_owned()),
            Ok("tcg") => (Accel::Tcg, "VNPLUG_ACCEL says so".to_owned()),
            _ => probe_or_remember(),
        };
        if accel == Accel::Tcg {
            eprintln!("lab: QEMU guests run under emulation (TCG): {reason}");
        }
        accel
    })
}

fn probe_or_remember() -> (Accel, String) {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return (Accel::Tcg, format!("/dev/kvm: {error}"));
    }
    let memory = kernel::guest_dir().ok().map(|dir| dir.join("accel"));
    remembered(memory.as_deref(), &host_key(), try_kvm)
}

/// The answer that `memory` has for this key, else the probe's, which is kept there.
fn remembered(
    memory: Option<&Path>,
    key: &str,
    probe: impl FnOnce() -> Result<(Accel, String)>,
) -> (Accel, String) {
    let text = memory.and_then(|path| fs::read_to_string(path).ok());
    if let Some(answer) = text.as_deref().and_then(|text| recall(text, key)) {
        return answer;
    }
    let (accel, reason) = match probe() {
        Ok(answer) => answer,
        // Says nothing of the host: the next caller may find what was missing.
        Err(error) => return (Accel::Tcg, format!("KVM cannot be tried: {error}")),
    };
    if let Some(path) = memory {
        // NB: written aside and renamed, as others may read it. Failing to remember costs a probe.
        let aside = path.with_extension(std::process::id().to_string());
        let text = format!("{key}\n{}\n{reason}\n", accel.name());
        let _ = fs::write(&aside, text).and_then(|()| fs::rename(&aside, path));
    }
    (accel, reason)
}

/// Parses the remembered answer: key, accelerator, reason, a line each.
fn recall(text: &str, key: &str) -> Option<(Accel, String)> {
    let mut lines = text.lines();
    if lines.next()? != key {
        return None;
    }
    let accel = match lines.next()? {
        "kvm" => Accel::Kvm,
        "tcg" => Accel::Tcg,
        _ => return None,
    };
    Some((accel, lines.next()?.to_owned()))
}

/// Changes when the answer may: another boot, another `/dev/kvm`.
fn host_key() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let device = fs::metadata("/dev/kvm").map_or(0, |meta| meta.ino());
    format!("{} {device}", boot.trim())
}

/// Boots a guest by KVM, or tells why that is not to be; fails where none could be tried.
fn try_kvm() -> Result<(Accel, String)> {
    let lab = Lab::new()?;
    let initrd = lab.dir().join("probe");
    let console = lab.dir().join("probe.log");
    initramfs::build_minimal(&initrd, INIT)?;
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args([
            "-machine",
            "pc,accel=kvm",
            "-cpu",
            "host",
            "-m",
            "128",
            "-display",
            "none",
            "-nodefaults",
        ])
        .args(["-no-reboot", "-serial"])
        .arg(format!("file:{}", console.display()))
        .arg("-kernel")
        .arg(kernel::qemu_kernel()?)
        .arg("-initrd")
        .arg(&initrd)
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut guest = Tethered::spawn(command, Vec::new(), None)?;
    let ended = guest.wait(PROBE_LIMIT);
    guest.kill();
    Ok(match ended {
        _ if said_hello(&console) => (Accel::Kvm, "a guest booted".to_owned()),
        Some(status) => {
            let reason = format!("a KVM guest ended without booting ({status})");
            (Accel::Tcg, reason)
        }
        None => {
            let reason = format!("a KVM guest did not boot within {PROBE_LIMIT:?}");
            (Accel::Tcg, reason)
        }
    })
}

fn said_hello(console: &Path) -> bool {
    fs::read_to_string(console).is_ok_and(|text| text.contains(HELLO))
}

const HELLO: &str = "the probe has booted";
const INIT: &str = "#!/bin/busybox sh\necho the probe has booted\n/bin/busybox reboot -f\n";
const PROBE_LIMIT: Duration = Duration::from_secs(8);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LabError;

    #[test]
    fn an_answer_of_another_boot_is_forgotten() {
        let text = "boot-1 7\ntcg\nno KVM\n";
        assert_eq!(
            recall(text, "boot-1 7"),
            Some((Accel::Tcg, "no KVM".to_owned()))
        );
        assert_eq!(recall(text, "boot-2 7"), None);
        assert_eq!(recall("boot-1 7\n", "boot-1 7"), None);
    }

    #[test]
    fn a_probe_that_could_not_be_made_is_not_remembered() {
        let path = env::temp_dir().join(format!("vnplug-accel-{}", std::process::id()));
        let missing = || Err(LabError::Missing("no guest kernel".to_owned()));
        let (accel, reason) = remembered(Some(&path), "boot", missing);
        assert_eq!(accel, Accel::Tcg);
        assert!(reason.contains("no guest kernel"), "{reason}");
        // The next one tries, and its answer is the one that stays.
        let answer = (Accel::Tcg, "no KVM".to_owned());
        let probed = remembered(Some(&path), "boot", || Ok(answer.clone()));
        assert_eq!(probed, answer);
        let again = remembered(Some(&path), "boot", || panic!("it is known"));
        fs::remove_file(&path).unwrap();
        assert_eq!(again, answer);
    }
}
