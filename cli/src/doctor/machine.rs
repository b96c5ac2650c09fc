//! The machine as its files tell it, below a directory that is `/` but in tests.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::failure::Failure;

/// A machine to look at.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    root: PathBuf,
}

impl Machine {
    /// This one.
    pub(super) fn this() -> Self {
        Self { root: "/".into() }
    }

    /// One whose files lie below a directory.
    #[cfg(test)]
    pub(super) fn below(root: &std::path::Path) -> Self {
        Self { root: root.into() }
    }

    /// Where a path of the machine lies.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text, without white space at its ends.
    pub(super) fn read(&self, path: &str) -> io::Result<String> {
        let text = fs::read(self.path(path))?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }

    pub(super) fn write(&self, path: &str, text: &str) -> Result<(), String> {
        fs::write(self.path(path), text).map_err(|error| format!("{path}: {error}"))
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Which file that is. `None` if it is not there, or this user may not know.
    pub(super) fn identity(&self, path: &str) -> Option<Identity> {
        let file = fs::metadata(self.path(path)).ok()?;
        Some((file.dev(), file.ino()))
    }

    /// The names in a directory, sorted; none if it is not there.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path))
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<_> = entries
            .filter_map(|it| it.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// The number of a process of this name.
    pub(super) fn process(&self, name: &str) -> Option<String> {
        let mut all = self.processes().into_iter();
        all.find(|(_, it)| it == name).map(|(pid, _)| pid)
    }

    /// The processes: their numbers and names.
    pub(super) fn processes(&self) -> Vec<(String, String)> {
        let mut pids = self.names("/proc");
        pids.retain(|it| it.bytes().all(|byte| byte.is_ascii_digit()));
        let named = pids.into_iter().filter_map(|pid| {
            let name = self.read(&format!("/proc/{pid}/comm")).ok()?;
            Some((pid, name))
        });
        named.collect()
    }
}

/// What two paths to the same file share: its device and number.
pub(super) type Identity = (u64, u64);

/// Runs a program of the system.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(complaint(program, said.trim()).line()),
    }
}

/// What a program said, after its name; most of them have that before their complaints.
fn complaint(program: &str, said: &str) -> Failure {
    let rest = said.strip_prefix(program);
    match rest.is_some_and(|rest| rest.starts_with(": ")) {
        true => Failure::new(said),
        false => Failure::about(program, said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_named_once() {
        let failed = |script: &str| run("sh", &["-c", script]).unwrap_err();
        assert_eq!(failed("echo 'sh: no module' >&2; exit 1"), "sh: no module");
        assert_eq!(failed("echo 'no module' >&2; exit 1"), "sh: no module");
        assert_eq!(failed("echo shut >&2; exit 1"), "sh: shut");
        assert_eq!(run("sh", &["-c", "echo 'sh: a warning' >&2"]), Ok(()));
    }
}
