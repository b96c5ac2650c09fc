//! Who runs a program: nobody, ours, and the peers, each told to allow what the program does.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};

use crate::row::Result;

/// Who runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arm {
    /// The program alone.
    Bare,
    /// `vnplug sandbox`, on the host's network.
    Ours,
    /// `vnplug sandbox --offline`.
    Offline,
    /// `vnplug sandbox --net`.
    Net,
    /// A supervisor that lets every call go on and looks at none.
    Floor,
    Sandlock,
    Strace,
    Firejail,
    /// Firejail in a network namespace without a way out.
    FirejailOffline,
}

impl Arm {
    /// As a peer is named.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Ours => "vnplug sandbox",
            Self::Offline => "vnplug sandbox --offline",
            Self::Net => "vnplug sandbox --net",
            Self::Floor => "a supervisor that only continues",
            Self::Sandlock => "Sandlock",
            Self::Strace => "strace --seccomp-bpf",
            Self::Firejail => "firejail --noprofile",
            Self::FirejailOffline => "firejail --net=none",
        }
    }
}

/// Programs, and rules that allow one port of the loopback.
pub(super) struct Site {
    lab: Lab,
    daemon: Option<Daemon>,
    vnplug: PathBuf,
    probe: PathBuf,
    sandlock: PathBuf,
    rules: PathBuf,
    port: u16,
}

impl Site {
    /// Allows this port.
    pub(super) fn new(port: u16) -> Result<Self> {
        let lab = Lab::new()?;
        let rules = lab.dir().join("rules.toml");
        let rule = |direction: &str| {
            format!(
                "[[rule]]\nsay = \"allow\"\nto = \"loopback\"\nport = {port}\ndirection = \"{direction}\"\n"
            )
        };
        let text = format!("default = \"deny\"\n{}{}", rule("out"), rule("listen"));
        std::fs::write(&rules, text)?;
        let sandlock = PathBuf::from("target/sandlock/bin/sandlock");
        if !sandlock.is_file() {
            return Err("Sandlock is not there: run bench/get-sandlock.sh".into());
        }
        Ok(Self {
            lab,
            daemon: None,
            vnplug: program("vnplug")?,
            probe: program("sandbox-probe")?,
            sandlock: sandlock.canonicalize()?,
            rules,
            port,
        })
    }

    /// With a daemon that has the switch `lan0`.
    pub(super) fn with_switch(mut self) -> Result<Self> {
        let daemon = Daemon::start(&self.lab, None, &["--switch", "lan0"])?;
        self.daemon = Some(daemon);
        Ok(self)
    }

    /// The program that makes calls.
    pub(super) fn probe(&self) -> &Path {
        &self.probe
    }

    /// Runs a program and gives what it says.
    pub(super) fn said(&self, arm: Arm, words: &[&str]) -> Result<String> {
        let output = self.command(arm, words).stderr(Stdio::piped()).output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}: {}: {why}", arm.name(), output.status).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs a program; until all has ended.
    pub(super) fn lasts(&self, arm: Arm, words: &[&str]) -> Result<Duration> {
        let mut command = self.command(arm, words);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let begin = Instant::now();
        let status = command.status()?;
        let lasted = begin.elapsed();
        match status.success() {
            true => Ok(lasted),
            false => Err(format!("{}: {status}", arm.name()).into()),
        }
    }

    fn command(&self, arm: Arm, words: &[&str]) -> Command {
        let starts = |program: &Path, options: &[&str]| {
            let mut command = Command::new(program);
            command.args(options).args(words);
            command
        };
        let mut command = match arm {
            Arm::Bare => {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]);
                command
            }
            Arm::Ours => self.ours(&[], words),
            Arm::Offline => self.ours(&["--offline"], words),
            Arm::Net => self.ours(&["--net", "lan0,address=203.0.113.9/24"], words),
            Arm::Floor => starts(&self.probe, &["floor", "--"]),
            Arm::Sandlock => {
                let port = self.port;
                let (tcp, udp) = (
                    format!("127.0.0.1:{port}"),
                    format!("udp://127.0.0.1:{port}"),
                );
                // iperf3 binds to any port, and writes to a file in /tmp.
                let options = ["run", "-r", "/", "-w", "/tmp", "--net-allow-bind", "*"];
                let allowed = ["--net-allow", &tcp, "--net-allow", &udp, "--"];
                starts(&self.sandlock, &[&options[..], &allowed[..]].concat())
            }
            Arm::Strace => {
                let traces = [
                    "-f",
                    "--seccomp-bpf",
                    "-e",
                    "trace=network",
                    "-o",
                    "/dev/null",
                    "--",
                ];
                starts(Path::new("strace"), &traces)
            }
            Arm::Firejail => starts(Path::new("firejail"), &["--quiet", "--noprofile", "--"]),
            Arm::FirejailOffline => starts(
                Path::new("firejail"),
                &["--quiet", "--noprofile", "--net=none", "--"],
            ),
        };
        command.stdin(Stdio::null());
        command
    }

    fn ours(&self, options: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new(&self.vnplug);
        // Nobody's own rules.
        command.env("XDG_CONFIG_HOME", self.lab.dir());
        if let Some(daemon) = &self.daemon {
            command.arg("--socket").arg(daemon.socket());
        }
        command.args(["sandbox", "--ask", "none", "--no-project", "--profile"]);
        command.arg(&self.rules).args(options).arg("--").args(words);
        command
    }
}
