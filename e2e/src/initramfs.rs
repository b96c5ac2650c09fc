//! Packs a guest's file system: a cpio archive in the kernel's "newc" form
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{LabError, Result};
use crate::image::Image;
use crate::kernel;

/// How init finds its command channel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wires {
    /// A tty line for commands and a host directory at `/host`.
    Uml,
    /// Two virtio-serial ports, named `lab.cmd` and `lab.data`.
    Qemu,
    /// None: a container is given its command channel.
    Given,
}

/// Writes the initramfs of a guest to `target`; `host_dir` is what `/host` shows under
/// User-mode Linux.
///
/// # Errors
/// [`LabError::Missing`] without busybox, [`LabError::Io`] if a file cannot be read or written.
pub(crate) fn build(
    target: &Path,
    image: &Image,
    wires: Wires,
    modules: &Path,
    base_modules: &[&str],
    host_dir: &Path,
) -> Result<()> {
    let mut archive = Cpio::default();
    let busybox = Path::new("/bin/busybox");
    let applets = Command::new(busybox).arg("--list").output().map_err(|_| {
        LabError::Missing("no /bin/busybox on the host: apt-get install busybox-static".to_owned())
    })?;
    archive.file("/bin/busybox", 0o755, &read(busybox)?);
    for applet in String::from_utf8_lossy(&applets.stdout)
        .lines()
        .filter(|&name| name != "busybox")
    {
        archive.link(&format!("/bin/{applet}"), "/bin/busybox");
    }
    for dir in [
        "/dev",
        "/proc",
        "/sys",
        "/run/lab",
        "/tmp",
        "/root",
        "/host",
        "/usr/bin",
        "/usr/sbin",
        "/sbin",
    ] {
        archive.dir(dir);
    }
    if image.has_host_root() {
        archive.dir("/world");
        archive.file("/bin/world", 0o755, include_bytes!("guest/world.sh"));
    }
    archive.file("/etc/passwd", 0o644, b"root::0:0:root:/root:/bin/sh\n");
    archive.file("/etc/group", 0o644, b"root:x:0:\n");
    archive.file("/init", 0o755, include_bytes!("guest/init.sh"));
    archive.file("/lab/serve.sh", 0o644, include_bytes!("guest/serve.sh"));
    archive.file("/bin/vport", 0o755, include_bytes!("guest/vport.sh"));

    let wanted: Vec<&str> = base_modules
        .iter()
        .copied()
        .chain(image.modules())
        .collect();
    let mut list = String::new();
    for file in kernel::module_closure(modules, &wanted)? {
        let guest = format!(
            "/lab/modules/{}",
            file.file_name().unwrap_or_default().to_string_lossy()
        );
        archive.file(&guest, 0o644, &read(&file)?);
        list.push_str(&guest);
        list.push('\n');
    }
    archive.file("/lab/modules.list", 0o644, list.as_bytes());
    let settings = match wires {
        Wires::Uml => format!(
            "LAB_TTY=/dev/ttyS1\nLAB_HOST_DIR='{}'\n",
            host_dir.display()
        ),
        Wires::Qemu => "LAB_PORT=lab.cmd\n".to_owned(),
        Wires::Given => String::new(),
    };
    archive.file("/lab/settings", 0o644, settings.as_bytes());
    for file in image.resolve()? {
        archive.file(&file.guest.to_string_lossy(), file.mode, &read(&file.host)?);
    }
    fs::write(target, archive.finish()).map_err(LabError::io(format!("write {}", target.display())))
}

/// Writes an initramfs that consists of busybox and one init script.
pub(crate) fn build_minimal(target: &Path, init: &str) -> Result<()> {
    let mut archive = Cpio::default();
    archive.file("/bin/busybox", 0o755, &read(Path::new("/bin/busybox"))?);
    archive.file("/init", 0o755, init.as_bytes());
    fs::write(target, archive.finish()).map_err(LabError::io(format!("write {}", target.display())))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(LabError::io(format!("read {}", path.display())))
}

/// An archive under construction.
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    dirs: BTreeSet<PathBuf>,
    entries: u32,
}

impl Cpio {
    fn dir(&mut self, path: &str) {
        let path = Path::new(path);
        let missing: Vec<PathBuf> = path
            .ancestors()
            .filter(|dir| dir.parent().is_some() && !self.dirs.contains(*dir))
            .map(Path::to_path_buf)
            .collect();
        for dir in missing.into_iter().rev() {
            self.entry(&dir.to_string_lossy(), S_IFDIR | 0o755, &[]);
            self.dirs.insert(dir);
        }
    }

    fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.parents(path);
        self.entry(path, S_IFREG | mode, content);
    }

    fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, S_IFLNK | 0o777, target.as_bytes());
    }

    fn parents(&mut self, path: &str) {
        if let Some(parent) = Path::new(path).parent() {
            self.dir(&parent.to_string_lossy());
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let name = path.trim_start_matches('/');
        self.entries += 1;
        let fields = [
            self.entries,          // inode
            mode,                  //
            0,                     // uid
            0,                     // gid
            1,                     // links
            0,                     // mtime
            content.len() as u32,  // NB: newc knows no file above 4 GiB; ours are small
            0,                     // device major, minor
            0,                     //
            0,                     // rdev major, minor
            0,                     //
            name.len() as u32 + 1, // with the NUL
            0,                     // checksum, unused in newc
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

// File types of inode(7).
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Stdio;

    #[test]
    fn cpio_reads_what_we_pack() {
        let mut archive = Cpio::default();
        archive.file("/a/b/plain", 0o640, b"odd");
        archive.link("/a/link", "b/plain");
        let mut cpio = Command::new("cpio")
            .arg("-tv")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        cpio.stdin
            .take()
            .unwrap()
            .write_all(&archive.finish())
            .unwrap();
        let output = cpio.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        assert!(text.contains("-rw-r-----"), "{text}");
        for name in ["a/b/plain", "a/link -> b/plain"] {
            assert!(text.contains(name), "{text}");
        }
    }
}
