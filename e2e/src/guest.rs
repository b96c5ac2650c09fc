//! A running guest.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::channel::{Channel, Job, Output, console_tail};
use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::qmp::Qmp;

/// Lines of the console that a failed boot shows: a kernel's trace, and what was said before it.
const BOOT_TAIL: usize = 100;
/// Lines of the console of a guest whose test failed.
const DROPPED_TAIL: usize = 30;
/// How many guests of one test process may be booted a second time.
const SECOND_BOOTS: usize = 3;
/// How many were.
static BOOTED_AGAIN: AtomicUsize = AtomicUsize::new(0);
/// How long a guest may take to end that has closed its channel.
const DYING: Duration = Duration::from_secs(10);

/// A booted guest; dropping it kills it.
///
/// ```no_run
/// use std::time::Duration;
/// use vnplug_e2e::{Lab, Uml, UmlConfig};
///
/// # fn main() -> vnplug_e2e::Result<()> {
/// let lab = Lab::new()?;
/// let guest = Uml::boot(&lab, UmlConfig::default())?;
/// let output = guest.run("uname -m", Duration::from_secs(5))?;
/// assert_eq!((output.status, output.text().as_str()), (0, "x86_64"));
/// # Ok(())
/// # }
/// ```
pub struct Guest {
    process: Mutex<Tethered>,
    channel: Arc<Channel>,
    transfer: Transfer,
    dir: PathBuf,
    // Last: the directory must outlive the processes that use it.
    _lab: Lab,
}

/// How files cross.
#[derive(Debug)]
pub(crate) enum Transfer {
    /// A host directory that the guest sees as `/host`.
    HostDir(PathBuf),
    /// A virtio-serial port; `None` once a transfer broke off and left it out of step.
    Port(Mutex<Option<UnixStream>>),
}

/// Boots a guest with `attempt`, and once more if the first one ended before its greeting: until
/// then nothing of what is under test has run in it, but devices and sockets of ours may be plugged in:
/// so a test process has [`SECOND_BOOTS`] in all, and what kills guests often fails. That is said on
/// standard error, and an error tells of both.
pub(crate) fn boot_twice(attempt: impl Fn() -> Result<Guest>) -> Result<Guest> {
    let (first, seen) = match attempt() {
        Err(LabError::Boot {
            what,
            console,
            ended: true,
        }) => (what, console),
        other => return other,
    };
    // Relaxed: only the number counts.
    if BOOTED_AGAIN.fetch_add(1, Ordering::Relaxed) >= SECOND_BOOTS {
        return Err(LabError::Boot {
            what: format!("{first}; {SECOND_BOOTS} guests were booted once more before"),
            console: seen,
            ended: true,
        });
    }
    // NB: not by `eprintln`, which the test harness shows of failed tests only. Without a standard
    // error there is nobody to tell.
    let _ = writeln!(
        io::stderr(),
        "lab: {first}; booting once more; end of its console:\n{seen}"
    );
    attempt().map_err(|error| match error {
        LabError::Boot {
            what,
            console,
            ended,
        } => LabError::Boot {
            what: format!("{what}, and at the first try: {first}"),
            console: format!("{console}\nand at the first try:\n{seen}"),
            ended,
        },
        other => other,
    })
}

impl Guest {
    /// Waits for init's greeting.
    pub(crate) fn greet(
        lab: &Lab,
        dir: PathBuf,
        mut process: Tethered,
        stream: UnixStream,
        transfer: Transfer,
        limit: Duration,
    ) -> Result<Self> {
        let console = dir.join(CONSOLE);
        let channel = Channel::new(stream, &console)?;
        let deadline = Instant::now() + limit;
        loop {
            if channel.greeted(Duration::from_millis(50)) {
                break;
            }
            let ended = match process.try_wait() {
                // A dying process closes it first.
                None if channel.is_closed() => process.wait(DYING),
                ended => ended,
            };
            let reason = match ended {
                Some(status) => format!("the guest ended during boot ({status})"),
                None if channel.is_closed() => {
                    "the guest closed its channel during boot".to_owned()
                }
                None if Instant::now() >= deadline => {
                    format!("the guest did not boot within {limit:?}")
                }
                None => continue,
            };
            return Err(LabError::Boot {
                what: reason,
                console: console_tail(&console, BOOT_TAIL),
                ended: ended.is_some(),
            });
        }
        Ok(Self {
            process: Mutex::new(process),
            channel,
            transfer,
            dir,
            _lab: lab.clone(),
        })
    }

    /// A QEMU that waits for the machine of `source`.
    pub(crate) fn arriving(
        lab: &Lab,
        dir: PathBuf,
        mut process: Tethered,
        stream: UnixStream,
        transfer: Transfer,
        source: &Self,
    ) -> Result<Self> {
        let channel = Channel::following(&source.channel, stream, &dir.join(CONSOLE))?;
        let deadline = Instant::now() + DYING;
        while ![QMP, LAB_QMP, "incoming"]
            .iter()
            .all(|name| dir.join(name).exists())
        {
            if process.try_wait().is_some() || Instant::now() >= deadline {
                let said = fs::read_to_string(dir.join(QEMU_LOG)).unwrap_or_default();
                return Err(LabError::Boot {
                    what: format!("QEMU does not wait for a machine: {said:?}"),
                    console: String::new(),
                    ended: true,
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self {
            process: Mutex::new(process),
            channel,
            transfer,
            dir,
            _lab: lab.clone(),
        })
    }

    /// Runs a shell command and waits for its end; kills it when `limit` is over. Several threads
    /// may run commands at once.
    ///
    /// # Errors
    /// [`LabError::Timeout`], [`LabError::GuestGone`], [`LabError::OutputTooLarge`] (above 1 MiB).
    /// A failing command is not an error: see [`Output::status`].
    pub fn run(&self, command: &str, limit: Duration) -> Result<Output> {
        let job = self.spawn(command)?;
        let result = job.wait(limit);
        if matches!(result, Err(LabError::Timeout { .. })) {
            // NB: the timeout is what the caller has to know, not what became of the kill.
            let _ = job.signal("KILL");
        }
        result
    }

    /// Starts a shell command in the guest and returns at once.
    ///
    /// # Errors
    /// [`LabError::GuestGone`].
    pub fn spawn(&self, command: &str) -> Result<Job> {
        Channel::start(&self.channel, command)
    }

    /// Has the guest boot again, with its devices as they are now, and waits until it serves commands. Nothing of what ran in it
    /// is there any more.
    ///
    /// # Errors
    /// [`LabError::GuestGone`]; [`LabError::Boot`] with the console's end if it does not boot within `limit`.
    pub fn reboot(&self, limit: Duration) -> Result<()> {
        let _job = self.spawn("reboot -f")?;
        match self.channel.greeted(limit) {
            true => Ok(()),
            false => Err(LabError::Boot {
                what: format!("the guest did not boot again within {limit:?}"),
                console: self.console_tail(BOOT_TAIL),
                ended: self.channel.is_closed(),
            }),
        }
    }

    /// Copies a file of the guest to the host. Large ones are fine: User-mode Linux copies at disk
    /// speed, QEMU through a virtio port of its own.
    ///
    /// # Errors
    /// [`LabError::Io`], [`LabError::Timeout`], [`LabError::GuestGone`]; [`LabError::Command`] if
    /// the guest cannot read it.
    pub fn pull(&self, guest: &str, host: &Path, limit: Duration) -> Result<()> {
        match &self.transfer {
            Transfer::HostDir(dir) => {
                let name = transfer_name();
                self.must_run(&format!("cp '{guest}' /host/{name}"), limit)?;
                let copy = dir.join(name);
                let done = fs::copy(&copy, host)
                    .map_err(LabError::io(format!("write {}", host.display())));
                // NB: the lab's directory goes anyway; this only keeps it small.
                let _ = fs::remove_file(&copy);
                done.map(drop)
            }
            Transfer::Port(port) => {
                let len = self
                    .must_run(&format!("stat -c %s '{guest}'"), limit)?
                    .text();
                let len: u64 = len
                    .parse()
                    .map_err(|_| LabError::Protocol(format!("no file length: {len}")))?;
                let mut file =
                    File::create(host).map_err(LabError::io(format!("make {}", host.display())))?;
                let job = self.spawn(&format!("cat '{guest}' >$(vport lab.data)"))?;
                with_port(port, limit, |stream| {
                    let copied = io::copy(&mut io::Read::take(stream, len), &mut file)?;
                    if copied == len {
                        Ok(())
                    } else {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    }
                })?;
                job.wait(limit).map(drop)
            }
        }
    }

    /// Copies a file of the host to the guest.
    ///
    /// # Errors
    /// As [`Guest::pull`].
    pub fn push(&self, host: &Path, guest: &str, limit: Duration) -> Result<()> {
        match &self.transfer {
            Transfer::HostDir(dir) => {
                let name = transfer_name();
                let copy = dir.join(&name);
                fs::copy(host, &copy).map_err(LabError::io(format!("copy {}", host.display())))?;
                self.must_run(&format!("mv /host/{name} '{guest}'"), limit)
                    .map(drop)
            }
            Transfer::Port(port) => {
                let mut file =
                    File::open(host).map_err(LabError::io(format!("open {}", host.display())))?;
                let len = file.metadata().map_err(LabError::io("file length"))?.len();
                let job = self.spawn(&format!("head -c {len} <$(vport lab.data) >'{guest}'"))?;
                with_port(port, limit, |stream| io::copy(&mut file, stream).map(drop))?;
                let output = job.wait(limit)?;
                if output.success() {
                    Ok(())
                } else {
                    Err(failed(&format!("write {guest}"), &output))
                }
            }
        }
    }

    /// The host directory that the guest sees as `/host`; User-mode Linux only.
    #[must_use]
    pub fn shared_dir(&self) -> Option<&Path> {
        match &self.transfer {
            Transfer::HostDir(dir) => Some(dir),
            Transfer::Port(_) => None,
        }
    }

    /// The guest's own directory on the host: console log, sockets.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The last `lines` lines of the console.
    #[must_use]
    pub fn console_tail(&self, lines: usize) -> String {
        console_tail(&self.dir.join(CONSOLE), lines)
    }

    /// The QMP socket for what is under test; QEMU only, one client at a time.
    #[must_use]
    pub fn qmp_path(&self) -> Option<PathBuf> {
        Some(self.dir.join(QMP)).filter(|path| path.exists())
    }

    /// Connects to a second QMP socket, the test's own.
    ///
    /// # Errors
    /// [`LabError::Missing`] if the guest is no QEMU, [`LabError::Io`] if it does not answer.
    pub fn qmp(&self) -> Result<Qmp> {
        let path = self.dir.join(LAB_QMP);
        if !path.exists() {
            return Err(LabError::Missing("this guest has no QMP socket".to_owned()));
        }
        Qmp::connect(&path)
    }

    /// Process id of the guest's main process on the host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// Host processor time, user and system, that the guest with all its processes has used.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.process().cpu_time()
    }

    /// Waits until the guest has ended by itself; `None` if it still runs after `limit`.
    #[must_use]
    pub fn wait_exit(&self, limit: Duration) -> Option<ExitStatus> {
        self.process().wait(limit)
    }

    /// Kills the guest, as pulling the plug would, and waits until it is gone.
    pub fn kill(&self) {
        self.process().kill();
    }

    fn must_run(&self, command: &str, limit: Duration) -> Result<Output> {
        let output = self.run(command, limit)?;
        if output.success() {
            Ok(output)
        } else {
            Err(failed(command, &output))
        }
    }

    fn process(&self) -> MutexGuard<'_, Tethered> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A test that fails tells what there is to tell: nobody can look any more.
        if std::thread::panicking() {
            let name = self.dir.display();
            if let Some(status) = self.process().try_wait() {
                eprintln!("guest {name} has ended: {status}");
            }
            let said = fs::read_to_string(self.dir.join(QEMU_LOG)).unwrap_or_default();
            if !said.is_empty() {
                eprintln!("guest {name}: QEMU says:\n{said}");
            }
            let console = self.console_tail(DROPPED_TAIL);
            eprintln!("guest {name}: its console ends:\n{console}");
        }
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest")
            .field("pid", &self.pid())
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Lends the data port to `copy`; takes it out of use if that fails.
fn with_port(
    port: &Mutex<Option<UnixStream>>,
    limit: Duration,
    copy: impl FnOnce(&mut UnixStream) -> io::Result<()>,
) -> Result<()> {
    let mut slot = port.lock().unwrap_or_else(PoisonError::into_inner);
    let mut stream = slot.take().ok_or_else(|| {
        LabError::Protocol("the data port is out of step after a failed transfer".to_owned())
    })?;
    stream
        .set_read_timeout(Some(limit))
        .map_err(LabError::io("data port"))?;
    stream
        .set_write_timeout(Some(limit))
        .map_err(LabError::io("data port"))?;
    copy(&mut stream).map_err(LabError::io("copy over the data port"))?;
    *slot = Some(stream);
    Ok(())
}

fn failed(command: &str, output: &Output) -> LabError {
    LabError::Command {
        command: command.to_owned(),
        text: format!("status {}: {}", output.status, output.text()),
    }
}

fn transfer_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: only uniqueness matters.
    format!(".transfer-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Console log in a guest's directory.
pub(crate) const CONSOLE: &str = "console.log";
/// QMP socket for what is under test.
pub(crate) const QMP: &str = "qmp";
/// QMP socket for the test itself.
pub(crate) const LAB_QMP: &str = "qmp-lab";
/// What QEMU printed, in a guest's directory.
pub(crate) const QEMU_LOG: &str = "qemu.log";

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn guests_that_keep_ending_are_not_booted_again_for_ever() {
        let boots = Cell::new(0);
        let attempt = || {
            boots.set(boots.get() + 1);
            Err(LabError::Boot {
                what: "it ended".to_owned(),
                console: String::new(),
                ended: true,
            })
        };
        for (nth, expected) in [(1, 2), (2, 4), (3, 6), (4, 7), (5, 8)] {
            assert!(boot_twice(attempt).is_err());
            assert_eq!(boots.get(), expected, "guest {nth}");
        }
    }
}
