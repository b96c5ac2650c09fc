//! What pages tell a reader to type: taken out of them, and typed.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::netns::Netns;

/// A page of this repository, by its path from the root.
///
/// # Panics
/// If it is not there.
#[must_use]
pub fn page(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The indented blocks of a section, as one script. `heading` with its `## `.
///
/// # Panics
/// If the page has no such section.
#[must_use]
pub fn indented(page: &str, heading: &str) -> String {
    let found = page.split_once(&format!("\n{heading}\n"));
    let (_, rest) = found.unwrap_or_else(|| panic!("there is no section {heading}"));
    let section = rest.split("\n## ").next().unwrap_or_default();
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The fenced blocks of a page, in order: what stands behind the marks at their beginning, and their text.
#[must_use]
pub fn fenced(page: &str) -> Vec<(&str, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(&str, String)> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => open = Some((info, String::new())),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some((_, text))) => {
                text.push_str(line);
                text.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Where a script is typed.
#[derive(Debug)]
pub struct Shell<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// The socket of the daemon that commands ask.
    pub socket: &'a Path,
    /// Directories of programs, before those of the system.
    pub programs: &'a [&'a Path],
    /// The network namespace; none is the system's.
    pub netns: Option<&'a Netns>,
}

impl Shell<'_> {
    /// Types a script, with nothing to read; the first command that fails ends it. What it mounts nobody else sees.
    ///
    /// # Panics
    /// If there is no shell.
    #[must_use]
    pub fn run(&self, script: &str) -> Output {
        let there = match self.netns {
            Some(netns) => format!("ip netns exec {} ", netns.name()),
            None => String::new(),
        };
        // Nothing here takes long; what hangs is ended with its children.
        let words = format!("-k 5 400 {there}unshare --mount sh -exc");
        Command::new("timeout")
            .args(words.split(' '))
            .arg(script)
            .current_dir(self.dir)
            .env("PATH", path(self.programs))
            .env("VNPLUG_SOCKET", self.socket)
            .stdin(Stdio::null())
            .output()
            .expect("timeout runs")
    }
}

/// Types a script that starts a daemon of its own, where `/run` is: the sockets and the names of network
/// namespaces in it are this run's alone. The daemon ends with the shell.
///
/// # Panics
/// If there is no shell.
#[must_use]
pub fn run_apart(script: &str, programs: &[&Path]) -> Output {
    let whole = format!("mount -t tmpfs none /run\n{script}");
    Command::new("timeout")
        .args(["-k", "5", "400", "unshare", "--mount", "--pid", "--fork"])
        .args(["--kill-child", "--mount-proc", "sh", "-exc", &whole])
        .env("PATH", path(programs))
        .env_remove("VNPLUG_SOCKET")
        .stdin(Stdio::null())
        .output()
        .expect("timeout runs")
}

/// `PATH` with these directories first.
fn path(programs: &[&Path]) -> String {
    let first = programs.iter().map(|it| it.display().to_string());
    let system = std::env::var("PATH").unwrap_or_default();
    first.chain([system]).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_in_order_with_their_marks() {
        let page =
            "# A\n\n```sh host\none\ntwo\n```\n\ntext\n\n```sh guest\nthree\n```\n    four\n";
        let expected = [("sh host", "one\ntwo\n"), ("sh guest", "three\n")];
        let found = fenced(page);
        let found: Vec<_> = found
            .iter()
            .map(|(info, text)| (*info, text.as_str()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_section_ends_at_the_next_one() {
        let page = "# A\n\n## B\n\n    one\n\nmore\n\n### C\n\n    two\n\n## D\n\n    three\n";
        assert_eq!(indented(page, "## B"), "one\ntwo\n");
    }
}
