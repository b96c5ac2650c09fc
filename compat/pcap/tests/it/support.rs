//! The drop-in as it is installed, the C program that tries it, and how to run things over it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_testing::until;

/// A directory as `make install` leaves it, and a program linked to the real libpcap.
pub(crate) struct DropIn {
    pub(crate) dir: PathBuf,
    pub(crate) program: PathBuf,
}

impl DropIn {
    pub(crate) fn new(lab: &Lab) -> Self {
        let test = std::env::current_exe().unwrap();
        let library = test.parent().unwrap().join("libvnplug_pcap.so");
        let dir = lab.dir().join("lib");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(library, dir.join("libpcap.so.0.8")).unwrap();
        for link in ["libpcap.so.1", "libpcap.so"] {
            std::os::unix::fs::symlink("libpcap.so.0.8", dir.join(link)).unwrap();
        }
        let program = built(lab, "program.c");
        Self { dir, program }
    }

    /// The library.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.join("libpcap.so.0.8")
    }

    /// Runs the C program with the drop-in by `LD_LIBRARY_PATH`; it must say "ok".
    pub(crate) fn ok(&self, daemon: &Daemon, args: &[&str]) -> String {
        let mut command = limited(&self.program);
        command.env("LD_LIBRARY_PATH", &self.dir);
        said_ok(command.env("VNPLUG_SOCKET", daemon.socket()).args(args))
    }
}

/// A C program of the tests, linked to the real libpcap.
pub(crate) fn built(lab: &Lab, source: &str) -> PathBuf {
    let program = lab.dir().join(source.trim_end_matches(".c"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(source);
    let built = Command::new("cc")
        .args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .args(["-lpcap", "-lpthread", "-ldl"])
        .status()
        .unwrap();
    assert!(built.success(), "libpcap-dev is needed");
    program
}

/// A command that is killed after two minutes.
pub(crate) fn limited(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120"]).arg(program);
    command
}

/// Runs it; it must succeed and say "ok".
pub(crate) fn said_ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = text(&output);
    assert!(
        output.status.success() && said.contains("ok"),
        "{command:?}: {said}"
    );
    said
}

/// Waits until the daemon's one source has sent this many frames.
pub(crate) fn until_sent(daemon: &Daemon, frames: u64) {
    until(
        "all is sent",
        || daemon.audit(),
        |counters| {
            let source = counted(counters, "source");
            value(source, "sent") == frames
        },
    );
}

/// Both outputs.
pub(crate) fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

/// Sends a signal by its name. `timeout` passes SIGINT on to its program.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .status();
    assert!(status.unwrap().success());
}
