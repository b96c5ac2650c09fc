//! Guests that a daemon serves: attached, with `vnplug` in them, and its agent.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use vnplug::Client;
use vnplug_ring::control::{Grant, VmKind, VmSpec};
use vnplug_testing::PATIENCE;

use crate::daemon::{Daemon, guest_program};
use crate::{Guest, Image, Job, Lab, LabError, Result, Uml, UmlConfig, patience};

/// Bytes of the memory pool of an [`AttachedUml`].
pub const POOL_BYTES: u64 = 64 << 20;

/// The image with the static `vnplug` in it.
///
/// # Errors
/// [`LabError::Missing`] if it was not built.
pub fn image() -> Result<Image> {
    Ok(Image::default().file(guest_program()?, "/bin/vnplug", 0o755))
}

/// A static program that runs the `vnplug` of the guest that it is [installed](image) in: the real one has ten megabytes, which take
/// a minute where QEMU's agent is emulated.
///
/// # Errors
/// [`LabError::Command`] if it cannot be compiled.
pub fn small_program(lab: &Lab) -> Result<PathBuf> {
    let [source, program] = ["small.c", "small"].map(|name| lab.dir().join(name));
    fs::write(&source, SMALL).map_err(LabError::io("write a program"))?;
    let mut cc = Command::new("cc");
    cc.args(["-static", "-Os", "-s", "-o"])
        .args([&program, &source]);
    let output = cc.output().map_err(LabError::io("run cc"))?;
    match output.status.success() {
        true => Ok(program),
        false => Err(LabError::Command {
            command: "cc".into(),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

const SMALL: &str = r#"#include <unistd.h>
int main(int argc, char **argv) { return argc + execv("/bin/vnplug", argv); }
"#;

/// A grant of every source.
#[must_use]
pub fn everything() -> Vec<Grant> {
    vec![Grant {
        source: "*".into(),
        filter: String::new(),
    }]
}

/// A User-mode Linux attached to a daemon; our end of its channel can be handed over again.
#[derive(Debug)]
pub struct AttachedUml {
    /// The guest.
    pub guest: Guest,
    /// Our end of the channel.
    pub channel: UnixStream,
    spec: VmSpec,
}

impl AttachedUml {
    /// Attaches and boots one.
    ///
    /// # Errors
    /// As [`attach_uml`]; what the guest's console said, if it does not boot.
    pub fn boot(
        lab: &Lab,
        daemon: &Daemon,
        name: &str,
        allow: Vec<Grant>,
        image: Image,
    ) -> Result<Self> {
        let spec = VmSpec {
            owner: 77,
            ..uml_spec(name, POOL_BYTES, allow)
        };
        let config = UmlConfig {
            image,
            ..UmlConfig::default()
        };
        let (config, channel) = attach_uml(daemon, spec.clone(), config)?;
        Ok(Self {
            guest: Uml::boot(lab, config)?,
            channel,
            spec,
        })
    }

    /// What `vnplug attach uml` does when the daemon was restarted.
    ///
    /// # Panics
    /// If the daemon does not take it.
    pub fn adopt_again(&self, daemon: &Daemon) {
        let mut client = Client::connect_to(&daemon.socket()).expect("the daemon listens");
        client.attach_vm(self.spec.clone()).expect("attached");
        let channel = self.channel.as_fd();
        client.adopt(&self.spec.name, channel).expect("adopted");
    }
}

/// What a daemon is told of a User-mode Linux; `pool_bytes` 0 is the daemon's default.
#[must_use]
pub fn uml_spec(name: &str, pool_bytes: u64, allow: Vec<Grant>) -> VmSpec {
    VmSpec {
        name: name.into(),
        kind: VmKind::Uml,
        pool_bytes,
        vectors: 0,
        allow,
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    }
}

/// Attaches a User-mode Linux that is to boot: the configuration with its memory and its channel, and
/// our end of the channel.
///
/// # Errors
/// [`LabError::Protocol`] if the daemon refuses.
pub fn attach_uml(
    daemon: &Daemon,
    spec: VmSpec,
    mut config: UmlConfig,
) -> Result<(UmlConfig, UnixStream)> {
    let failed = |error: vnplug::Error| LabError::Protocol(format!("attach uml: {error}"));
    let name = spec.name.clone();
    let mut client = Client::connect_to(&daemon.socket()).map_err(failed)?;
    let ready = client.attach_vm(spec).map_err(failed)?;
    let (ours, theirs) = UnixStream::pair().map_err(LabError::io("socket pair"))?;
    client.adopt(&name, ours.as_fd()).map_err(failed)?;
    config.pool = Some(ready.pool_path.into());
    config.lines.push((0, OwnedFd::from(theirs)));
    config.kernel_args.push("vnplug=ttyS0".into());
    Ok((config, ours))
}

/// Plugs the daemon into a running QEMU, by `vnplug attach`, with every source granted; gives what it
/// says. Unless `more` says so, it waits for no agent, which tests start later.
///
/// # Errors
/// [`LabError::Command`] with what the command said.
pub fn plug(daemon: &Daemon, guest: &Guest, name: &str, more: &[&str]) -> Result<String> {
    let qmp = guest.qmp_path();
    let qmp = qmp.ok_or_else(|| LabError::Missing("a guest of QEMU".into()))?;
    let qmp = qmp.to_string_lossy();
    let attach = ["attach", "qemu", "--name", name, "--allow", "*"];
    let wait: &[&str] = match more.contains(&"--wait") {
        true => &[],
        false => &["--wait", "0s"],
    };
    let args = [&attach[..], &["--qmp", &qmp], wait, more].concat();
    match daemon.vnplug(&args) {
        (Some(0), text) => Ok(text),
        (_, text) => Err(LabError::Command {
            command: format!("vnplug {args:?}"),
            text,
        }),
    }
}

/// What `vnplug count --json` says at its end, in the last of the lines that it said.
///
/// # Errors
/// [`LabError::Protocol`] with what it said instead.
pub fn summary(said: &str) -> Result<Value> {
    let summary = values(said).rfind(|value| value["summary"] == true);
    summary.ok_or_else(|| LabError::Protocol(format!("vnplug count said {said:?}")))
}

/// Those lines of what a command said that are JSON and whole.
pub fn values(said: &str) -> impl DoubleEndedIterator<Item = Value> {
    let lines = said.lines();
    lines.filter_map(|line| serde_json::from_str(line).ok())
}

/// Starts the agent in a guest and waits until its applications can list devices.
///
/// # Errors
/// [`LabError::Timeout`] with what the agent said, or the channel's.
pub fn agent(guest: &Guest) -> Result<Job> {
    let job = guest.spawn("exec vnplug agent 2>&1")?;
    let said = || {
        let said = job.peek(4096).unwrap_or_default();
        format!("the agent: {said}\n{}", guest.console_tail(10))
    };
    patience::until(said, PATIENCE, || {
        Ok(guest.run("vnplug list 2>&1", PATIENCE)?.status == 0)
    })?;
    Ok(job)
}
