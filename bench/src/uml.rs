//! One reader, `vnplug count`, in User-mode Linux and as a process of the host.
//!
//! Both run the same static binary with the same arguments, on the same CPU, in turns, and read from
//! the flat-out generator of one daemon, whose thread has the other CPU. The guest's kernel and its
//! programs are processes of that one CPU too, and idle while it is the host's turn.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug_e2e::attached::{attach_uml, everything, uml_spec};
use vnplug_e2e::daemon::{Daemon, guest_program};
use vnplug_e2e::{Guest, Image, Job, Lab, Uml, UmlConfig};

use crate::fanout::{self, Sharing};
use crate::handoff::Sizes;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::{limit, sys};

/// CPU of the source's thread.
const SOURCE_CPU: usize = 0;
/// CPU of the reader, and of everything of the guest.
const READER_CPU: usize = 1;
/// Bytes of the record area: it stays in the cache, as in the row `handoff`.
const RING: &str = "512K";
/// For everything that is not measured.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Packets per second in the guest and on the host, in turns.
pub(crate) fn against_host(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let source = format!("lab=gen,size={len},cpus={}", sys::cpu(SOURCE_CPU));
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    // Processes inherit the CPU of the thread that starts them.
    std::thread::scope(|scope| {
        let readers = scope.spawn(|| {
            sys::pin(sys::cpu(READER_CPU))
                .and_then(|()| in_turns(plan, len, &lab, &daemon))
                .map_err(|error| error.to_string())
        });
        Ok(readers.join().map_err(|_| "the row panicked")??)
    })
}

fn in_turns(plan: &Plan, len: usize, lab: &Lab, daemon: &Daemon) -> Result<Vec<Figure>> {
    let guest = AttachedUml::boot(lab, daemon)?;
    let count = format!(
        "count lab --json --busy-poll --ring {RING} --seconds {}ms",
        plan.time.as_millis()
    );
    let [mut ours, mut theirs, mut limit] = [(); 3].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let in_guest = guest.count(&count)?;
        let on_host = count_on_host(daemon, &count)?;
        let bare = fanout::bare(plan.time / 4, Sizes::One(len), 1, Sharing::Private)?;
        eprintln!(
            "  round {round}: guest {in_guest:.2}, host {on_host:.2}, bare transfer {bare:.2} Mpps"
        );
        limit.push(bare);
        ours.push(in_guest);
        theirs.push(on_host);
    }
    Ok(vec![Figure {
        name: format!("uml-reader-{len}"),
        unit: "Mpps",
        ours,
        peer: Some(("the same on the host".to_owned(), theirs)),
        limit: Some(Limit::new(limit::BARE, limit)),
        note: format!(
            "received by the static `vnplug {count}`: ours in User-mode Linux through the agent and \
             /dev/mmapper, the peer as a process of the host; both on CPU {READER_CPU}, the \
             daemon's generator flat out on CPU {SOURCE_CPU}"
        ),
    }])
}

/// A User-mode Linux attached to a daemon, with its agent.
pub(crate) struct AttachedUml {
    guest: Guest,
    _agent: Job,
    /// Our end of the control channel, of which the daemon has a copy.
    _channel: UnixStream,
}

impl AttachedUml {
    /// Boots the guest and waits until its applications are served.
    pub(crate) fn boot(lab: &Lab, daemon: &Daemon) -> Result<Self> {
        Self::boot_with(lab, daemon, Image::default())
    }

    /// As [`boot`](Self::boot), with more files.
    pub(crate) fn boot_with(lab: &Lab, daemon: &Daemon, image: Image) -> Result<Self> {
        let config = UmlConfig {
            image,
            ..UmlConfig::default()
        };
        Self::boot_as(lab, daemon, "bench", config)
    }

    /// As [`boot`](Self::boot), under a name, made of what the configuration says.
    pub(crate) fn boot_as(
        lab: &Lab,
        daemon: &Daemon,
        name: &str,
        config: UmlConfig,
    ) -> Result<Self> {
        let spec = uml_spec(name, 0, everything());
        let (mut config, channel) = attach_uml(daemon, spec, config)?;
        config.image = config.image.file(guest_program()?, "/bin/vnplug", 0o755);
        let guest = Uml::boot(lab, config)?;
        let agent = serve(&guest)?;
        Ok(Self {
            guest,
            _agent: agent,
            _channel: channel,
        })
    }

    /// The guest itself.
    pub(crate) fn guest(&self) -> &Guest {
        &self.guest
    }

    fn count(&self, count: &str) -> Result<f64> {
        let output = self.guest.run(&format!("vnplug {count}"), LIMIT)?;
        rate(&output.text())
    }
}

/// Starts the agent in a guest and waits until applications there are served.
pub(crate) fn serve(guest: &Guest) -> Result<Job> {
    let agent = guest.spawn("exec vnplug agent 2>&1")?;
    let deadline = Instant::now() + LIMIT;
    while !guest.run("vnplug list", LIMIT)?.success() {
        if Instant::now() > deadline {
            return Err(format!("no agent: {}", agent.peek(1000)?).into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(agent)
}

fn count_on_host(daemon: &Daemon, count: &str) -> Result<f64> {
    let output = Command::new(guest_program()?)
        .arg("--socket")
        .arg(daemon.socket())
        .args(count.split(' '))
        .output()?;
    rate(&String::from_utf8_lossy(&output.stdout))
}

/// Packets per microsecond in the summary that `vnplug count --json` ends with.
fn rate(lines: &str) -> Result<f64> {
    lines
        .lines()
        .last()
        .and_then(|line| serde_json::from_str::<Value>(line).ok()?["packets_per_second"].as_f64())
        .map(|rate| rate / 1e6)
        .ok_or_else(|| format!("no summary: {lines}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_the_summary_s() {
        let lines =
            "{\"packets_per_second\":1}\n{\"summary\":true,\"packets_per_second\":2500000}\n";
        assert_eq!(rate(lines).unwrap(), 2.5);
        assert!(rate("cannot open").is_err());
    }
}
