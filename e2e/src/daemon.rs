//! The programs under test: where they are, and a daemon that ends with its test.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Client, PortOptions};
use vnplug_ring::control::{Counted, Message};
use vnplug_ring::counters;
use vnplug_testing::until;

use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::kernel;
use crate::lab::Lab;
use crate::manager::Manager;
use crate::netns::{self, Netns};
use crate::owner;

/// A running `vnplugd` with a socket and state directory of its own; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    dir: PathBuf,
    pools: PathBuf,
    args: Vec<String>,
    netns: Option<String>,
    manager: Option<Arc<Manager>>,
    /// A process of the host that it runs on, where that is not ours.
    host: Option<u32>,
    process: Option<Tethered>,
    /// Packets for ports that the books closed over, at the last audit.
    accounted: AtomicU64,
    // Last: its directory outlives it.
    _lab: Lab,
}

const START: Duration = Duration::from_secs(60);
/// How much of a daemon is told when its test failed: entries of the counters, lines of the log.
const TOLD_COUNTERS: usize = 20;
const TOLD_LINES: usize = 40;

impl Daemon {
    /// Starts a daemon with these further arguments, in `netns` if given, and waits until it
    /// serves.
    ///
    /// # Errors
    /// [`LabError`] with the end of its log if it does not come up.
    pub fn start(lab: &Lab, netns: Option<&Netns>, args: &[&str]) -> Result<Self> {
        let mut daemon = Self::unstarted(lab, netns, args)?;
        daemon.launch()?;
        Ok(daemon)
    }

    /// The same by a service manager, also when it starts again.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_by(
        manager: &Arc<Manager>,
        lab: &Lab,
        netns: Option<&Netns>,
        args: &[&str],
    ) -> Result<Self> {
        let mut daemon = Self::unstarted(lab, netns, args)?;
        daemon.set_manager(manager);
        daemon.launch()?;
        Ok(daemon)
    }

    /// Has a service manager start it from now on.
    pub fn set_manager(&mut self, manager: &Arc<Manager>) {
        self.manager = Some(Arc::clone(manager));
    }

    /// Has it run with the files of the host that this process is on, from now on.
    pub(crate) fn set_host(&mut self, pid: u32) {
        self.host = Some(pid);
    }

    /// A daemon's directories and arguments, for [`launch`](Self::launch).
    ///
    /// # Errors
    /// [`LabError`] if the directories cannot be made.
    pub fn unstarted(lab: &Lab, netns: Option<&Netns>, args: &[&str]) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let dir = lab
            .dir()
            .join(format!("d{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&dir).map_err(LabError::io(format!("make {}", dir.display())))?;
        // In memory, and under a name that the next lab sweeps: a killed daemon leaves its pools.
        let pools = pool_base(lab).join(owner::unique_name());
        fs::create_dir(&pools).map_err(LabError::io(format!("make {}", pools.display())))?;
        Ok(Self {
            dir,
            pools,
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            netns: netns.map(|netns| netns.name().to_owned()),
            manager: None,
            host: None,
            process: None,
            accounted: AtomicU64::new(0),
            _lab: lab.clone(),
        })
    }

    /// Starts the process again after [`kill`](Self::kill), with the same arguments and directory.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn launch(&mut self) -> Result<()> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path());
        let log = log.map_err(LabError::io("the daemon's log"))?;
        let daemon = program("vnplugd")?;
        let (mut command, inherited) = match (&self.manager, self.host) {
            (Some(manager), _) => manager.start(&daemon),
            (None, Some(host)) => {
                let mut command = Command::new("nsenter");
                let target = format!("--target={host}");
                command
                    .args([&target, "--mount", "--pid", "--net", "--"])
                    .arg(daemon);
                (command, Vec::new())
            }
            (None, None) => (Command::new(daemon), Vec::new()),
        };
        command
            .arg("--socket")
            .arg(self.socket())
            .arg("--verbose")
            .args(&self.args);
        if !self.args.iter().any(|arg| arg == "--pool-dir") {
            command.arg("--pool-dir").arg(&self.pools);
        }
        command
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let netns: Option<OwnedFd> = self.netns.as_deref().map(netns::open).transpose()?;
        let mut process = Tethered::spawn(command, inherited, netns)?;
        let deadline = Instant::now() + START;
        while Client::connect_to(&self.socket()).is_err() {
            if process.try_wait().is_some() || Instant::now() > deadline {
                return Err(LabError::Boot {
                    what: "vnplugd".into(),
                    console: self.log(),
                    ended: process.try_wait().is_some(),
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
        self.process = Some(process);
        Ok(())
    }

    /// Ends it with SIGTERM, and waits until it has ended.
    ///
    /// # Panics
    /// If it does not end.
    pub fn end(&mut self) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        process
            .signal(rustix::process::Signal::TERM)
            .expect("it is ours");
        assert!(process.wait(START).is_some(), "the daemon does not end");
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// The `vnplug` command, which asks this daemon.
    ///
    /// # Errors
    /// [`LabError::Missing`] if it was not built.
    pub fn command(&self) -> Result<Command> {
        let mut command = Command::new(program("vnplug")?);
        command.arg("--socket").arg(self.socket());
        Ok(command)
    }

    /// Runs `vnplug` on the host; its exit code, and what it says on both outputs.
    ///
    /// # Panics
    /// If it cannot be run.
    #[must_use]
    pub fn vnplug(&self, args: &[&str]) -> (Option<i32>, String) {
        let mut command = self.command().expect("vnplug was built");
        let output = command.args(args).output().expect("it runs");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        (output.status.code(), text)
    }

    /// Where clients connect.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("s")
    }

    /// Where its pools are, unless an argument says otherwise.
    #[must_use]
    pub fn pools(&self) -> &Path {
        &self.pools
    }

    /// What it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Process id.
    ///
    /// # Panics
    /// If it was killed.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the daemon runs").pid()
    }

    /// Processor time of the daemon and its helper since it started.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.process
            .as_ref()
            .map_or(Duration::ZERO, Tethered::cpu_time)
    }

    /// Processor time that the daemon and its helper use in `window` when nothing is asked of them.
    /// What was asked before may still be under way: looks until it is at most `enough`, a few
    /// times, and gives the last look.
    #[must_use]
    pub fn cpu_at_rest(&self, window: Duration, enough: Duration) -> Duration {
        let mut spent = Duration::MAX;
        for _ in 0..8 {
            let before = self.cpu_time();
            thread::sleep(window);
            spent = self.cpu_time().saturating_sub(before);
            if spent <= enough {
                break;
            }
        }
        spent
    }

    /// Options for a port on this daemon.
    pub fn port(&self, device: &str) -> PortOptions {
        PortOptions::new(device).socket(self.socket())
    }

    /// All counters.
    ///
    /// # Panics
    /// If the daemon does not answer.
    #[must_use]
    pub fn counters(&self) -> Vec<Counted> {
        let asked = Client::connect_to(&self.socket()).and_then(|mut client| client.stats());
        asked.unwrap_or_else(|error| panic!("the daemon does not count: {error}"))
    }

    /// Waits until it has no ports any more; closing thousands of them takes it a while.
    ///
    /// # Panics
    /// If there are some after [`PATIENCE`](vnplug_testing::PATIENCE).
    pub fn await_no_ports(&self) {
        let ports = || {
            let asked = Client::connect_to(&self.socket()).and_then(|mut client| client.stats());
            // An answer that does not come in time says that it is still at it.
            asked.map_or(u64::MAX, |all| value(&all[0], "ports"))
        };
        until("no port stays", ports, |ports| *ports == 0);
    }

    /// Checks that the counters close at points R and S; returns them.
    ///
    /// # Panics
    /// If a sum does not close, with the numbers.
    pub fn audit(&self) -> Vec<Counted> {
        let counters = self.counters();
        audit(&counters);
        let sources = counters.iter().filter(|counted| counted.kind == "source");
        let duties = sources.map(|source| value(source, "duties")).sum();
        self.accounted.fetch_max(duties, Ordering::Relaxed);
        counters
    }

    /// Says on standard error how it stands: its counters that are not 0, and the end of its log.
    fn tell(&self) {
        let asked = Client::connect_to(&self.socket()).and_then(|mut client| client.stats());
        match asked {
            Ok(counters) => {
                for counted in counters.iter().take(TOLD_COUNTERS) {
                    let Counted {
                        kind,
                        name,
                        labels,
                        values,
                    } = counted;
                    let values: Vec<_> = values.iter().filter(|(_, value)| *value > 0).collect();
                    eprintln!("{kind} {name}: {labels:?} {values:?}");
                }
            }
            Err(error) => eprintln!("the daemon does not count: {error}"),
        }
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let end = &lines[lines.len().saturating_sub(TOLD_LINES)..];
        eprintln!("the daemon's log ends:\n{}", end.join("\n"));
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A test that fails tells what there is to tell: nobody can look any more.
        if thread::panicking() {
            self.tell();
        }
        let accounted = self.accounted.load(Ordering::Relaxed);
        if accounted > 0 && !thread::panicking() {
            println!("figure: G-10 packets accounted = {accounted}");
            println!("figure: G-10 packets unaccounted = 0");
        }
        self.kill();
        // NB: a failure leaves the directory to the next lab's sweep.
        let _ = fs::remove_dir_all(&self.pools);
    }
}

/// Where pools lie, if there is room: a container may have as little as 64 MiB of it.
pub(crate) const MEMORY: &str = "/dev/shm";

/// Room that the pools of all tests that run at once have.
const ROOM: u64 = 2 << 30;

fn pool_base(lab: &Lab) -> &Path {
    let shm = Path::new(MEMORY);
    match rustix::fs::statvfs(shm) {
        Ok(stat) if stat.f_bavail.saturating_mul(stat.f_frsize) >= ROOM => shm,
        _ => lab.dir(),
    }
}

/// The first entry of a kind, where there is one: the daemon, its only source, its only VM.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn counted<'a>(all: &'a [Counted], kind: &str) -> &'a Counted {
    let found = all.iter().find(|it| it.kind == kind);
    found.unwrap_or_else(|| panic!("no {kind} is counted: {all:?}"))
}

/// One value of one entry; 0 if there is none.
#[must_use]
pub fn value(counted: &Counted, name: &str) -> u64 {
    counted
        .values
        .iter()
        .find(|(key, _)| key == name)
        .map_or(0, |(_, value)| *value)
}

/// One label of one entry.
#[must_use]
pub fn label<'a>(counted: &'a Counted, name: &str) -> &'a str {
    counted
        .labels
        .iter()
        .find(|(key, _)| key == name)
        .map_or("", |(_, value)| value)
}

/// Checks that the accounts close, and that every counter is one that is known.
///
/// # Panics
/// If a sum does not close, with the numbers.
pub fn audit(counters: &[Counted]) {
    closes(counters).unwrap_or_else(|text| panic!("{text}"));
}

/// As [`audit`], without the panic.
///
/// # Errors
/// What does not close, with the numbers.
pub fn closes(all: &[Counted]) -> std::result::Result<(), String> {
    for counted in all {
        let names = counted.values.iter().map(|(name, _)| name);
        let mut of_us = names.filter(|name| !name.starts_with(counters::OF_READER));
        if let Some(name) = of_us.find(|name| counters::find(&counted.kind, name).is_none()) {
            return Err(format!("no table has the counter {name}: {counted:?}"));
        }
    }
    let accounts = counters::accounts(all);
    let of = |kind: &str| all.iter().filter(|it| it.kind == kind).count();
    // Three of each source, and one of each port, besides what sends.
    if accounts.len() < 3 * of("source") + of("port") {
        return Err(format!("counters are missing: {all:?}"));
    }
    match accounts.iter().find(|account| !account.closes()) {
        None => Ok(()),
        Some(open) => Err(format!("{} is missing: {open:?}", open.difference())),
    }
}

/// A program of ours, as the build left it beside the running test. `make build` makes one `vnplug`, the
/// static one for guests, which serves on the host as well.
///
/// # Errors
/// [`LabError::Missing`] that says how to build it.
pub fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(LabError::io("our own path"))?;
    own.ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .or_else(|| guest_program().ok().filter(|_| name == "vnplug"))
        .ok_or_else(|| LabError::Missing(format!("no {name} was built: run `make build` first")))
}

/// The static `vnplug` for guests.
///
/// # Errors
/// [`LabError::Missing`] that says how to build it.
pub fn guest_program() -> Result<PathBuf> {
    let path = kernel::guest_dir()?.join("bin/vnplug");
    if path.is_file() {
        return Ok(path);
    }
    let what = format!("no {}: run `make build` first", path.display());
    Err(LabError::Missing(what))
}

/// A program of `guest/examples`, which cargo builds with the library's tests.
///
/// # Errors
/// [`LabError::Missing`] if it was not built.
pub fn example(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe().map_err(LabError::io("find this program"))?;
    let program = test.ancestors().nth(2).unwrap_or(&test).join("examples");
    let program = program.join(name);
    if program.is_file() {
        return Ok(program);
    }
    let path = program.display();
    let what = format!("no {path}: run `cargo build -p libvnplug --example {name}` first");
    Err(LabError::Missing(what))
}

/// The error text of a refused request, or the message that came instead.
///
/// # Panics
/// If the message is no error.
#[must_use]
pub fn refusal(message: Message) -> (u16, String) {
    match message {
        Message::Error { code, text } => (code, text),
        other => panic!("not refused but {other:?}"),
    }
}
