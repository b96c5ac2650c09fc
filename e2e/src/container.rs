//! A rootless container: a guest that is a process, with a root directory and namespaces of its own.
//!
//! An ordinary user starts it, who is root in it. Of the host it has the daemon's socket, where programs look for it,
//! and nothing else: its file system is an image as other guests have it, its network a loopback interface.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::guest::{CONSOLE, Guest, Transfer};
use crate::image::Image;
use crate::initramfs::{self, Wires};
use crate::lab::Lab;

/// Starts a container of this user's, with the daemon's socket in it, and waits until it serves commands. The lab's
/// directory must be open to the user, and the socket, too.
///
/// # Errors
/// [`LabError::Boot`] with what was said, if the system does not let ordinary users have namespaces;
/// [`LabError::Command`] if its directory cannot be filled.
pub fn start(lab: &Lab, user: u32, socket: &Path, image: &Image) -> Result<Guest> {
    let dir = lab.guest_dir()?;
    let (root, archive) = (dir.join("root"), dir.join("image"));
    for open in [&dir, &root] {
        fs::create_dir_all(open).map_err(LabError::io("make the container's root"))?;
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(open, mode).map_err(LabError::io("open the container's root"))?;
    }
    let none = Path::new("/nonexistent");
    initramfs::build(&archive, image, Wires::Given, none, &[], none)?;
    unpack(&archive, &root)?;
    // The system's is put over it.
    File::create(root.join("dev/null")).map_err(LabError::io("make /dev/null"))?;

    let (ours, theirs) = UnixStream::pair().map_err(LabError::io("socket pair"))?;
    let console = File::create(dir.join(CONSOLE)).map_err(LabError::io("make the console log"))?;
    let errors = console
        .try_clone()
        .map_err(LabError::io("clone the console log"))?;
    let user = user.to_string();
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups"])
        .args(["unshare", "--user", "--map-root-user", "--net", "--mount"])
        .args(["--pid", "--ipc", "--uts", "--fork", "--kill-child"])
        .args(["sh", "-c", include_str!("guest/container.sh"), "container"])
        .args([root.as_path(), socket])
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(console)
        .stderr(errors);
    let process = Tethered::spawn(command, Vec::new(), None)?;
    // It has no file in common with the host, and no port for them.
    let transfer = Transfer::Port(Mutex::new(None));
    Guest::greet(lab, dir, process, ours, transfer, START)
}

fn unpack(archive: &Path, root: &Path) -> Result<()> {
    let archive = File::open(archive).map_err(LabError::io("open the image"))?;
    let output = Command::new("/bin/busybox")
        .args(["cpio", "-i", "-d", "-u"])
        .current_dir(root)
        .stdin(archive)
        .output()
        .map_err(LabError::io("run busybox (package busybox-static)"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(LabError::Command {
            command: "busybox cpio -i".to_owned(),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

/// Time allowed from its start to the first command.
const START: Duration = Duration::from_secs(60);
