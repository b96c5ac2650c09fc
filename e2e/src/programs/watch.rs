//! One program that runs in several places at once, the real wire first.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use vnplug_testing::PATIENCE;

use super::place::GUEST_DROPIN;
use super::{Place, Stage};
use crate::channel::{Job, Output};
use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::netns;
use crate::patience::until;

/// What a program said, and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// `wire` for the real one, else the name of the [`Place`].
    pub place: &'static str,
    /// Exit status; 128 and more for a signal.
    pub status: i32,
    /// Standard output and errors as they came, with `{dev}` for the interface's name.
    pub text: String,
}

/// Checks that every place saw what the wire did: what `part` takes of their texts is equal.
///
/// # Panics
/// With the first lines that differ.
pub fn same(all: &[Seen], part: impl Fn(&str) -> Vec<&str>) {
    let [real, ours @ ..] = all else {
        panic!("nobody saw anything");
    };
    let wanted = part(&real.text);
    assert!(!wanted.is_empty(), "silence proves nothing: {}", real.text);
    for seen in ours {
        let lines = part(&seen.text);
        let equal = lines
            .iter()
            .zip(&wanted)
            .take_while(|(a, b)| a == b)
            .count();
        let tell = |lines: &[&str]| lines[equal..lines.len().min(equal + 4)].join("\n  ");
        assert!(
            equal == wanted.len() && equal == lines.len(),
            "line {equal} of {}, which has {}:\n  {}\nof the wire, which has {}:\n  {}",
            seen.place,
            lines.len(),
            tell(&lines),
            wanted.len(),
            tell(&wanted)
        );
        assert_eq!(seen.status, real.status, "{}: {}", seen.place, seen.text);
    }
}

impl Seen {
    /// The lines that `wanted` accepts.
    pub fn lines(&self, wanted: impl Fn(&str) -> bool) -> Vec<&str> {
        self.text.lines().filter(|line| wanted(line)).collect()
    }
}

/// A program that listens in several places.
#[derive(Debug)]
pub struct Watch<'a> {
    stage: &'a Stage,
    command: String,
    runs: Vec<Run<'a>>,
}

/// It in one of them.
#[derive(Debug)]
struct Run<'a> {
    place: &'static str,
    device: &'static str,
    dir: PathBuf,
    process: Process<'a>,
}

#[derive(Debug)]
enum Process<'a> {
    Host(Tethered),
    /// With what it printed, once it has ended.
    Guest(&'a Guest, Job, OnceCell<Output>),
}

impl<'a> Watch<'a> {
    pub(super) fn start(
        stage: &'a Stage,
        places: &[&'a Place],
        command: &str,
        ready: &str,
    ) -> Result<Self> {
        let before = (stage.ports(), stage.sockets()?);
        let mut runs = vec![stage.on_host("wire", "wire1", command, false)?];
        for place in places {
            runs.push(stage.start(place, command)?);
        }
        let watch = Self {
            stage,
            command: command.to_owned(),
            runs,
        };
        if ready.is_empty() {
            watch.wait("it listens", |watch| {
                let open = stage.ports() >= before.0 + watch.runs.len() - 1;
                Ok(open && stage.sockets()? > before.1)
            })?;
            // From the opened port to the first packet a program has little left to do.
            std::thread::sleep(Duration::from_millis(500));
        } else {
            watch.until(ready)?;
        }
        Ok(watch)
    }

    pub(super) fn once(stage: &'a Stage, place: &'a Place, command: &str) -> Result<Seen> {
        let mut watch = Self {
            stage,
            command: command.to_owned(),
            runs: vec![stage.start(place, command)?],
        };
        Ok(watch.wait_all()?.remove(0))
    }

    /// Waits until every one has printed `text`.
    ///
    /// # Errors
    /// [`LabError::Timeout`] with what they printed.
    pub fn until(&self, text: &str) -> Result<()> {
        self.wait(text, |watch| {
            for run in &watch.runs {
                let ended = run.has_ended();
                let said = run.said()?;
                match said.contains(text) {
                    true => {}
                    false if ended => {
                        return Err(LabError::Command {
                            command: format!("{} ({})", watch.command, run.place),
                            text: format!("it ended without {text:?}: {said}"),
                        });
                    }
                    false => return Ok(false),
                }
            }
            Ok(true)
        })
    }

    /// Waits until every one has a file `name` in its directory for which `enough` says yes.
    ///
    /// # Errors
    /// [`LabError::Timeout`] with what they printed.
    pub fn until_file(&self, name: &str, enough: impl Fn(&[u8]) -> bool) -> Result<()> {
        self.wait(name, |watch| {
            Ok((0..watch.runs.len()).all(|run| watch.file(run, name).is_ok_and(|b| enough(&b))))
        })
    }

    /// Has the conversation; `last` is in its last packet.
    ///
    /// # Errors
    /// As [`super::Talk::say`].
    pub fn talk(&self, last: &str) -> Result<()> {
        self.stage.talk.say(last)
    }

    /// Sends a signal (`INT`, `TERM`, `USR1` …) to every one.
    ///
    /// # Errors
    /// [`LabError`] if a guest does not answer.
    pub fn signal(&self, name: &str) -> Result<()> {
        for run in &self.runs {
            match &run.process {
                Process::Host(process) => process.signal_group(number(name))?,
                Process::Guest(_, job, _) => job.signal(name)?,
            }
        }
        Ok(())
    }

    /// Waits for the end of every one, the real one first.
    ///
    /// # Errors
    /// [`LabError::Timeout`] if one still runs.
    pub fn wait_all(&mut self) -> Result<Vec<Seen>> {
        let command = self.command.clone();
        let late = |place| LabError::Timeout {
            what: format!("the end of `{command}` ({place})"),
            after: PATIENCE,
        };
        let mut all = Vec::new();
        for run in &mut self.runs {
            let (status, text) = match &mut run.process {
                Process::Host(process) => {
                    use std::os::unix::process::ExitStatusExt;
                    let status = process.wait(PATIENCE).ok_or_else(|| late(run.place))?;
                    let status = status.code().unwrap_or(128 + status.signal().unwrap_or(0));
                    (status, read(&run.dir.join("said")))
                }
                Process::Guest(_, job, ended) => {
                    let output = match ended.get() {
                        Some(output) => output,
                        None => &job.wait(PATIENCE)?,
                    };
                    (output.status, output.text())
                }
            };
            all.push(Seen {
                place: run.place,
                status,
                text: text.trim_end().replace(run.device, "{dev}"),
            });
        }
        Ok(all)
    }

    /// The names of the files in the directory of run `run` (0 is the real one), sorted.
    ///
    /// # Errors
    /// [`LabError`] if the directory cannot be read.
    pub fn files(&self, run: usize) -> Result<Vec<String>> {
        let run = &self.runs[run];
        let mut names: Vec<String> = match &run.process {
            Process::Host(_) => fs::read_dir(&run.dir)
                .map_err(LabError::io("list what a program wrote"))?
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .filter(|name| name != "said")
                .collect(),
            Process::Guest(guest, ..) => {
                let list = guest.run(&format!("ls {}", run.dir.display()), PATIENCE)?;
                list.text().lines().map(str::to_owned).collect()
            }
        };
        names.sort();
        Ok(names)
    }

    /// What run `run` wrote to file `name` of its directory.
    ///
    /// # Errors
    /// [`LabError`] if it cannot be read.
    pub fn file(&self, run: usize, name: &str) -> Result<Vec<u8>> {
        let Run { dir, process, .. } = &self.runs[run];
        let from = dir.join(name);
        let read =
            |path: &Path| fs::read(path).map_err(LabError::io(format!("read {}", path.display())));
        match process {
            Process::Host(_) => read(&from),
            Process::Guest(guest, ..) => {
                let copy = guest.dir().join("pulled");
                guest.pull(&from.to_string_lossy(), &copy, PATIENCE)?;
                read(&copy)
            }
        }
    }

    fn wait(&self, what: &str, mut ready: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let describe = || {
            let said = |run: &Run<'_>| {
                let text = run.said().unwrap_or_else(|error| error.to_string());
                format!("\n  {}: {}", run.place, text.trim_end())
            };
            let said: String = self.runs.iter().map(said).collect();
            format!("{what:?} of `{}`:{said}", self.command)
        };
        until(describe, PATIENCE, || ready(self))
    }
}

impl Run<'_> {
    /// What it has printed so far, or the end of that.
    fn said(&self) -> Result<String> {
        match &self.process {
            Process::Host(_) => Ok(read(&self.dir.join("said"))),
            Process::Guest(_, job, ended) => {
                if job.is_done() && ended.get().is_none() {
                    // NB: nobody else sets it in between; a second value would be the same.
                    let _ = ended.set(job.wait(PATIENCE)?);
                }
                ended
                    .get()
                    .map_or_else(|| job.peek(100_000), |output| Ok(output.text()))
            }
        }
    }

    fn has_ended(&self) -> bool {
        match &self.process {
            Process::Host(process) => process.has_ended(),
            Process::Guest(_, job, _) => job.is_done(),
        }
    }
}

impl Stage {
    fn start<'a>(&self, place: &'a Place, command: &str) -> Result<Run<'a>> {
        let (name, device) = (place.name(), place.device());
        match place {
            Place::Host => self.on_host(name, device, command, true),
            Place::Uml(guest) => in_guest(name, device, guest, command, true),
            Place::Qemu(guest) => in_guest(name, device, guest, command, false),
        }
    }

    fn on_host<'a>(
        &self,
        place: &'static str,
        device: &'static str,
        command: &str,
        dropin: bool,
    ) -> Result<Run<'a>> {
        let dir = self.lab.dir().join(next("w"));
        fs::create_dir(&dir).map_err(LabError::io("make a program's directory"))?;
        let said = File::create(dir.join("said")).map_err(LabError::io("make a program's log"))?;
        let errors = said
            .try_clone()
            .map_err(LabError::io("clone a program's log"))?;
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &line(command, device, &dir)])
            .current_dir(&dir);
        shell
            .envs(ENVIRONMENT)
            .env_remove("LD_PRELOAD")
            .env_remove("LD_LIBRARY_PATH");
        shell.env("VNPLUG_SOCKET", self.daemon.socket());
        if dropin {
            shell.env("LD_LIBRARY_PATH", &self.dropin);
        }
        shell.stdin(Stdio::null()).stdout(said).stderr(errors);
        let netns = netns::open(self.talk.far.name())?;
        let process = Tethered::spawn(shell, Vec::new(), Some(netns))?;
        Ok(Run {
            place,
            device,
            dir,
            process: Process::Host(process),
        })
    }

    fn ports(&self) -> usize {
        let counters = self.daemon.counters();
        counters.iter().filter(|entry| entry.kind == "port").count()
    }

    /// Packet sockets on the far end, the daemon's among them.
    fn sockets(&self) -> Result<usize> {
        let list = self.talk.far.exec(&["cat", "/proc/net/packet"])?;
        Ok(list.lines().count())
    }
}

fn in_guest<'a>(
    place: &'static str,
    device: &'static str,
    guest: &'a Guest,
    command: &str,
    world: bool,
) -> Result<Run<'a>> {
    let dir = Path::new("/tmp").join(next("w"));
    let mut environment: Vec<String> = ENVIRONMENT
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    environment.push(format!("LD_LIBRARY_PATH={GUEST_DROPIN}"));
    let quoted = line(command, device, &dir).replace('\'', r"'\''");
    let program = format!(
        "env {} sh -c 'cd {} && {quoted}'",
        environment.join(" "),
        dir.display()
    );
    let program = if world {
        format!("world {program}")
    } else {
        program
    };
    let job = guest.spawn(&format!("mkdir {} && exec {program}", dir.display()))?;
    Ok(Run {
        place,
        device,
        dir,
        process: Process::Guest(guest, job, OnceCell::new()),
    })
}

/// The shell's line for a command.
fn line(command: &str, device: &str, dir: &Path) -> String {
    let command = command.replace("{dev}", device);
    format!("exec {}", command.replace("{dir}", &dir.to_string_lossy()))
}

fn next(prefix: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

fn number(name: &str) -> Signal {
    match name {
        "INT" => Signal::INT,
        "USR1" => Signal::USR1,
        _ => Signal::TERM,
    }
}

/// The same everywhere, so that outputs are.
const ENVIRONMENT: [(&str, &str); 3] = [
    ("LC_ALL", "C.UTF-8"),
    ("TZ", "UTC"),
    ("PATH", "/usr/bin:/bin:/usr/sbin:/sbin"),
];
