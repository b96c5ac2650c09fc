//! Runs a User-mode Linux with a daemon's memory pool and control channel.
//!
//! The pool is `/dev/mmapper` in the guest; a UML can get it only when it starts. The control
//! channel is one end of a socket pair: UML inherits it as a tty line (`ssl0=fd:N`, checked with
//! Debian's 6.1), the daemon gets a copy of the other end. This process keeps that end, so a daemon
//! that restarts gets it again and the guest never notices more than a pause.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use vnplug::Client;
use vnplug_ring::control::{VmKind, VmReady, VmSpec};

use crate::entrances::{Entrances, NicSpec, Via};
use crate::failure::{Failure, OK, Outcome};
use crate::{attach, out, sys};

mod preload;

/// Starts a User-mode Linux that is attached, and stays until it ends.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug attach uml --name probe --allow eth1 -- linux.uml mem=256M initrd=probe.img \\
      con=null con0=fd:0,fd:1
  vnplug attach uml --name probe --print -- linux.uml mem=256M
  vnplug attach uml --name web --nic lan0 -- linux.uml mem=256M initrd=web.img

Appends `iomem=mmapper,POOL ssl0=fd:N vnplug=ttyS0`; line ttyS0 is taken. Signals are passed on; the
exit code is that of the UML (128 + N if signal N killed it). In the guest, run `vnplug agent`.
Debian's linux.uml needs libvnplug-uml-xstate.so on processors with AMX; it is preloaded if installed,
and VNPLUG_UML_PRELOAD names another. --nic appends `virtio_uml.device=`, `vecN:transport=bess` or `ethN=vde`,
which of them is said. After a restart of the daemon vecN has no cable until it is set down and up.")]
pub(crate) struct Attach {
    #[command(flatten)]
    vm: attach::VmArgs,
    /// A network interface whose cable ends in a switch of the daemon: by vhost, bess or vde, whatever is
    /// best; may be repeated
    #[arg(long = "nic", value_name = "SWITCH[,mac=ADDRESS][,via=WAY]")]
    nics: Vec<NicSpec>,
    /// Print the command that would run and exit; N is the descriptor of the control channel
    #[arg(long)]
    print: bool,
    /// The UML binary and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Makes the daemon forget a User-mode Linux and close its ports.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  vnplug detach uml --name probe

The UML keeps running, without packets; `attach uml` does this by itself when its UML ends.")]
pub(crate) struct Detach {
    /// The name it was attached under
    #[arg(long, value_parser = attach::vm_name)]
    name: String,
}

impl Attach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let mut client = connect()?;
        let nics = self.nic_arguments(&mut client)?;
        let spec = VmSpec {
            name: self.vm.name.clone(),
            kind: VmKind::Uml,
            pool_bytes: self.vm.pool,
            vectors: 0,
            allow: self.vm.allow.clone(),
            owner: fresh_owner()?,
            groups: Vec::new(),
            stays_for: None,
        };
        let ready = client.attach_vm(spec.clone())?;
        let ended = if self.print {
            let command = self.command.iter().map(|word| word.to_string_lossy());
            let words: Vec<_> = command
                .chain(arguments(&ready, "N").map(Into::into))
                .chain(nics.into_iter().map(Into::into))
                .collect();
            out::line(&words.join(" ")).map(|()| OK)
        } else {
            self.supervise(&connect, &mut client, spec.clone(), &ready, &nics)
        };
        let forgotten = attach::forget(&mut client, &self.vm.name, spec.owner)
            .or_else(|_| attach::forget(&mut connect()?, &self.vm.name, spec.owner));
        if let Err(failure) = forgotten {
            out::warn(&format!(
                "{}: the daemon did not forget it: {}",
                self.vm.name,
                failure.line()
            ));
        }
        ended
    }

    /// What gives the UML its interfaces; says which way each takes, and why.
    fn nic_arguments(&self, client: &mut Client) -> Result<Vec<String>, Failure> {
        let given = self.command.iter().map(|word| word.to_string_lossy());
        let given: Vec<_> = given.collect();
        let mut arguments = Vec::new();
        for spec in &self.nics {
            if spec.model.is_some() {
                return Err(Failure::about(
                    &spec.switch,
                    "a User-mode Linux has no choice of models; leave model= out",
                ));
            }
            let entrances = Entrances::of(client, &spec.switch)?;
            let mac = spec.mac_for(&self.vm.name);
            let taken = |stem: &str, number: &u32| {
                let mut all = given.iter().map(AsRef::as_ref);
                let mut ours = arguments.iter().map(String::as_str);
                let is_it = |word: &str| {
                    let rest = word.strip_prefix(stem);
                    let rest = rest.and_then(|rest| rest.strip_prefix(&number.to_string()));
                    rest.is_some_and(|rest| rest.starts_with([':', '=']))
                };
                all.any(is_it) || ours.any(is_it)
            };
            let free = |stem: &str| (0..).find(|number| !taken(stem, number)).unwrap_or(0);
            let (argument, why) = nic_argument(&entrances, spec.via, &mac, free)?;
            out::note(&format!(
                "{}: on {} by {argument}: {why}",
                self.vm.name, spec.switch
            ));
            arguments.push(argument);
        }
        Ok(arguments)
    }

    /// Starts the UML and keeps daemon and guest together until it ends.
    fn supervise(
        &self,
        connect: &impl Fn() -> Result<Client, Failure>,
        client: &mut Client,
        spec: VmSpec,
        ready: &VmReady,
        nics: &[String],
    ) -> Outcome {
        let cannot = |errno| Failure::about("cannot make the control channel", errno);
        let pair = |flags| socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (ours, theirs) = pair(SocketFlags::CLOEXEC).map_err(cannot)?;
        // The guest's end alone is inherited; nothing else is started in this process.
        let theirs = rustix::io::dup(theirs).map_err(cannot)?;
        client.adopt(&spec.name, ours.as_fd())?;
        sys::catch_signals();
        let program = &self.command[0];
        let mut command = Command::new(program);
        if let Some(list) = preload::preload()? {
            command.env("LD_PRELOAD", list);
        }
        let mut uml = command
            .args(&self.command[1..])
            .args(arguments(ready, &theirs.as_raw_fd().to_string()))
            .args(nics)
            .spawn()
            .map_err(|error| Failure::about(program.display(), error))?;
        drop(theirs);
        let mut link = Link {
            spec,
            channel: ours,
            pool: (ready.pool_path.clone(), ready.pool_len),
            retry: None,
        };
        let status = link.run(connect, client, &mut uml)?;
        Ok(exit_code(status))
    }
}

impl Detach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        if !attach::forget(&mut connect()?, &self.name, 0)? {
            return Err(Failure::about(&self.name, "no VM of that name is attached"));
        }
        out::line(&format!("{}: detached", self.name))?;
        Ok(OK)
    }
}

/// The daemon's side of a running UML.
struct Link {
    spec: VmSpec,
    channel: OwnedFd,
    pool: (String, u64),
    /// When to try to reach the daemon again, and how long to wait after that; `None` = it is there.
    retry: Option<(Instant, Duration)>,
}

impl Link {
    fn run(
        &mut self,
        connect: &impl Fn() -> Result<Client, Failure>,
        client: &mut Client,
        uml: &mut Child,
    ) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(uml);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        loop {
            if let Some(status) = uml.try_wait()? {
                return Ok(status);
            }
            if let Some(signal) = sys::stop().and_then(Signal::from_named_raw) {
                // It may have ended meanwhile; the next round sees that.
                let _ = kill_process(pid, signal);
            }
            let gone = {
                let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
                if self.retry.is_none() {
                    // The daemon says nothing unasked to an operator: readable means closed.
                    fds.push(PollFd::from_borrowed_fd(client.as_fd(), PollFlags::IN));
                }
                // EINTR: a signal came, the next round passes it on.
                let _ = poll(&mut fds, Some(&TICK));
                fds.get(1).is_some_and(|fd| !fd.revents().is_empty())
            };
            if gone {
                out::warn(&format!(
                    "{}: the daemon went away, waiting for it",
                    self.spec.name
                ));
                self.retry = Some((Instant::now(), FIRST_RETRY));
            }
            if let Some((at, delay)) = self.retry
                && Instant::now() >= at
            {
                match self.attach_again(connect) {
                    Ok(new) => {
                        *client = new;
                        self.retry = None;
                        out::note(&format!("{}: the daemon is back", self.spec.name));
                    }
                    Err(failure) => {
                        log::info!("{}: {}", self.spec.name, failure.line());
                        let next = (delay * 2).min(LAST_RETRY);
                        self.retry = Some((Instant::now() + delay, next));
                    }
                }
            }
        }
    }

    fn attach_again(
        &self,
        connect: &impl Fn() -> Result<Client, Failure>,
    ) -> Result<Client, Failure> {
        let mut client = connect()?;
        match client.attach_vm(self.spec.clone()) {
            Ok(ready) if (&ready.pool_path, ready.pool_len) != (&self.pool.0, self.pool.1) => {
                attach::forget(&mut client, &self.spec.name, self.spec.owner)?;
                return Err(Failure::new(
                    "the daemon came back with another pool; a running UML keeps the one it \
                     started with, start it again",
                ));
            }
            other => drop(other?),
        }
        client.adopt(&self.spec.name, self.channel.as_fd())?;
        Ok(client)
    }
}

fn arguments(ready: &VmReady, fd: &str) -> impl Iterator<Item = String> {
    [
        format!("iomem=mmapper,{}", ready.pool_path),
        format!("ssl0=fd:{fd}"),
        "vnplug=ttyS0".to_owned(),
    ]
    .into_iter()
}

/// The argument of one interface, and why it is this one; `free` finds the number of one that is free.
fn nic_argument(
    entrances: &Entrances,
    via: Option<Via>,
    mac: &str,
    free: impl Fn(&str) -> u32,
) -> Result<(String, &'static str), Failure> {
    let ways = [Via::Vhost, Via::Bess, Via::Vde];
    if let Some(via) = via.filter(|via| !ways.contains(via)) {
        let text = format!(
            "a User-mode Linux joins by vhost, bess or vde, not by {}",
            via.word()
        );
        return Err(Failure::about(&entrances.switch, text));
    }
    let mut asked = ways
        .into_iter()
        .filter(|way| via.is_none_or(|it| it == *way));
    let Some((way, path)) = asked.find_map(|way| Some((way, entrances.path(way)?))) else {
        let what = via.map_or("bess", Via::word);
        return Err(entrances.lacks(&format!("give it {what}=PATH")));
    };
    Ok(match way {
        Via::Vhost => (
            format!("virtio_uml.device={path}:1"),
            "the switch reads and writes the guest's memory",
        ),
        Via::Vde => (
            format!("eth{}=vde,{path},{mac}", free("eth")),
            "the switch has neither vhost nor bess",
        ),
        _ => (
            format!("vec{}:transport=bess,dst={path},mac={mac}", free("vec")),
            "the switch has no vhost; a packet of a socket is a frame",
        ),
    })
}

/// A number by which the daemon knows this run again: nobody else may have the VM while it runs.
fn fresh_owner() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let signal = status.signal().map_or(1, |signal| 128 + signal);
    // Both are below 256 by the kernel's encoding.
    ExitCode::from(status.code().unwrap_or(signal) as u8)
}

const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_takes_the_best_way_that_the_switch_has() {
        let mac = "02:00:00:00:00:01";
        let argument = |has: &[Via], asked| {
            let has: Vec<_> = has.iter().map(|via| (*via, "/p")).collect();
            let made = nic_argument(&Entrances::made(&has), asked, mac, |_| 1);
            made.map(|(argument, _)| argument).map_err(|it| it.line())
        };
        let all = [Via::Vhost, Via::Stream, Via::Bess, Via::Vde];
        let bess = "vec1:transport=bess,dst=/p,mac=02:00:00:00:00:01";
        for (has, asked, expected) in [
            (&all[..], None, "virtio_uml.device=/p:1"),
            (&all[1..], None, bess),
            (&all, Some(Via::Bess), bess),
            (&all[3..], None, "eth1=vde,/p,02:00:00:00:00:01"),
        ] {
            assert_eq!(argument(has, asked).unwrap(), expected);
        }
        let lacks = argument(&[Via::Stream], None).unwrap_err();
        assert!(
            lacks.contains("it has stream): give it bess=PATH"),
            "{lacks}"
        );
        let wrong = argument(&all, Some(Via::Stream)).unwrap_err();
        assert!(wrong.contains("not by stream"), "{wrong}");
    }
}
