//! What a guest finds on its file system, apart from busybox.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{LabError, Result};

/// One file of the guest.
#[derive(Clone, Debug)]
pub struct GuestFile {
    /// Where it is on the host.
    pub host: PathBuf,
    /// Where it will be in the guest, absolute.
    pub guest: PathBuf,
    /// Permission bits, for example `0o755`.
    pub mode: u32,
}

/// Extra files, programs and kernel modules of a guest.
///
/// ```
/// use vnplug_e2e::Image;
/// let image = Image::default().program("/usr/bin/tcpdump").module("sch_netem");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Image {
    files: Vec<GuestFile>,
    programs: Vec<(PathBuf, PathBuf)>,
    modules: Vec<String>,
    host_root: bool,
}

impl Image {
    /// Adds one file as it is.
    #[must_use]
    pub fn file(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>, mode: u32) -> Self {
        self.files.push(GuestFile {
            host: host.into(),
            guest: guest.into(),
            mode,
        });
        self
    }

    /// Adds a program of the host under `/usr/bin`, with the shared libraries it names.
    #[must_use]
    pub fn program(self, host: impl Into<PathBuf>) -> Self {
        let host = host.into();
        let guest = Path::new("/usr/bin").join(host.file_name().unwrap_or_default());
        self.program_at(host, guest)
    }

    /// Adds a program or shared library of the host at `guest`, with the libraries it names.
    #[must_use]
    pub fn program_at(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        self.programs.push((host.into(), guest.into()));
        self
    }

    /// Adds a kernel module and what it depends on; init loads them. A module the guest's kernel
    /// has built in is fine.
    #[must_use]
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.modules.push(name.into());
        self
    }

    /// Lets the guest run every program of the host: `world COMMAND` runs one as it is installed
    /// there. User-mode Linux only; the host's root is read-only, while `/tmp`, `/run` and `/root`
    /// are the guest's.
    #[must_use]
    pub fn host_root(mut self) -> Self {
        self.host_root = true;
        self
    }

    /// Whether the guest gets the host's root.
    pub(crate) fn has_host_root(&self) -> bool {
        self.host_root
    }

    /// The modules asked for, in order.
    pub(crate) fn modules(&self) -> Vec<&str> {
        self.modules.iter().map(String::as_str).collect()
    }

    /// All files: the plain ones, the programs, and the libraries of the programs, each path once.
    ///
    /// # Errors
    /// [`LabError::Command`] if `ldd` cannot resolve a library.
    pub(crate) fn resolve(&self) -> Result<Vec<GuestFile>> {
        let mut all = self.files.clone();
        for (host, guest) in &self.programs {
            all.push(GuestFile {
                host: host.clone(),
                guest: guest.clone(),
                mode: 0o755,
            });
            for library in libraries(host)? {
                if !all.iter().any(|file| file.guest == library) {
                    all.push(GuestFile {
                        host: library.clone(),
                        guest: library,
                        mode: 0o755,
                    });
                }
            }
        }
        Ok(all)
    }
}

/// The shared libraries and the loader of a program; none for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .map_err(LabError::io("run ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if text.contains("statically linked") || errors.contains("not a dynamic executable") {
        return Ok(Vec::new());
    }
    if !output.status.success() || text.contains("not found") {
        return Err(LabError::Command {
            command: format!("ldd {}", program.display()),
            text: format!("{text}{errors}"),
        });
    }
    // `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)` or `/lib64/ld-linux-x86-64.so.2 (0x…)`.
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_brings_its_libraries_and_each_only_once() {
        let files = Image::default()
            .program("/bin/sh")
            .program("/bin/ls")
            .resolve()
            .unwrap();
        let count = |name: &str| {
            files
                .iter()
                .filter(|file| file.guest.ends_with(name))
                .count()
        };
        assert_eq!(count("libc.so.6"), 1);
        assert_eq!(count("ls"), 1);
        assert!(files.iter().all(|file| file.host.exists()));
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(
            Image::default()
                .program("/nonexistent/program")
                .resolve()
                .is_err()
        );
    }
}
