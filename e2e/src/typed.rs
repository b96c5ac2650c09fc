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

/// The steps of a section, whose blocks are of two shells, as one script for [`run_apart`]: `sh root` is typed by root and
/// `sh user` by the user of number 1000, each in a shell that goes on. What stands in a block ```` ```c ```` that begins with
/// `/* NAME */` is a file NAME by then; a block ```` ```text ```` is what the step before it prints, which
/// [`missing`] looks for. Each step is followed by a line of [`STEP`].
#[must_use]
pub fn by_two(section: &str) -> (String, Vec<String>) {
    let (mut script, mut shown) = (TWO_SHELLS.to_owned(), Vec::new());
    for (info, text) in fenced(section) {
        let name = text
            .strip_prefix("/* ")
            .and_then(|it| it.split(" */").next());
        match (info, name) {
            ("sh root", _) => script += &format!("{text}echo {STEP}\n"),
            ("sh user", _) => script += &format!("as_user <<'TYPED'\n{text}echo {STEP}\nTYPED\n"),
            ("c", Some(name)) => script += &format!("cat >{name} <<'TYPED'\n{text}TYPED\n"),
            ("text", _) => {
                shown.resize(script.matches(STEP).count(), String::new());
                if let Some(last) = shown.last_mut() {
                    *last = text;
                }
            }
            _ => {}
        }
    }
    (script, shown)
}

/// Ends the output of a step.
pub const STEP: &str = "--- next step ---";

/// Has a second shell, which is somebody else's, read what it is to type from a pipe.
const TWO_SHELLS: &str = "\
mkfifo /run/typed
setpriv --reuid 1000 --regid 1000 --clear-groups sh -ex </run/typed &
user=$!
exec 9>/run/typed
as_user() {
    rm -f /tmp/typed
    { cat; echo 'touch /tmp/typed'; } >&9
    until test -e /tmp/typed; do kill -0 $user; sleep 0.05; done
}
";

/// The first line that a step shows and did not print, if there is one. Which numbers it has does not matter.
#[must_use]
pub fn missing<'a>(shown: &'a str, printed: &str) -> Option<&'a str> {
    let like = |line: &str| -> String {
        let digit = |it: char| if it.is_ascii_digit() { '0' } else { it };
        let mut like: Vec<char> = line.trim_end().chars().map(digit).collect();
        like.dedup_by(|after, before| (*after, *before) == ('0', '0'));
        like.into_iter().collect()
    };
    let printed: Vec<String> = printed.lines().map(like).collect();
    shown.lines().find(|line| !printed.contains(&like(line)))
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
    fn steps_are_typed_in_order_and_what_they_show_is_theirs() {
        let page = "```sh root\none\n```\n```c\n/* x.c */\nint x;\n```\n```sh user\ntwo\n```\n```text\nat 9\n```\n";
        let (script, shown) = by_two(page);
        let typed = script.strip_prefix(TWO_SHELLS).unwrap();
        assert_eq!(
            typed,
            "one\necho --- next step ---\ncat >x.c <<'TYPED'\n/* x.c */\nint x;\nTYPED\n\
             as_user <<'TYPED'\ntwo\necho --- next step ---\nTYPED\n"
        );
        assert_eq!(shown, ["", "at 9\n"]);
        assert_eq!(missing(&shown[1], "before\nat 17\n"), None);
        assert_eq!(missing(&shown[1], "of 7\n"), Some("at 9"));
    }

    #[test]
    fn a_section_ends_at_the_next_one() {
        let page = "# A\n\n## B\n\n    one\n\nmore\n\n### C\n\n    two\n\n## D\n\n    three\n";
        assert_eq!(indented(page, "## B"), "one\ntwo\n");
    }
}
