//! Running programs (`--files`): judged by what was looked up, carried out by the program's own call, and looked at once
//! more before the first instruction of what the process has become.
//!
//! The path stands in memory that can change, and nobody can execute for somebody else. So the call goes on under
//! ptrace: it stops in the kernel when the new program is there and nothing of it has run. If it is another
//! one than was judged, and no rule allows that one either, the process is killed there.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, accessat, fstat, openat};

use super::control::number_of;
use super::files::{At, Look, own};
use super::prepare::Proposal;
use super::serve::Server;
use super::task::{Pending, Task};
use super::unix::Home;
use crate::act::{Act, Doing, Target, Transport, Who};
use crate::sys::lock;
use crate::sys::process::{self, field, group_of};
use crate::sys::seccomp::{Answer, Notice};
use crate::sys::trace::{self, Stop};

/// execve and execveat, as registers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Execute {
    at: At,
    flags: i32,
}

/// A program that is to be run, whose files were looked up.
#[derive(Debug)]
pub(super) struct Program {
    /// What the process may become: the file, or an interpreter that it names. They are held, so that their numbers cannot
    /// come to mean others.
    files: Vec<OwnedFd>,
    /// Which of them are still to be judged, the first one last.
    paths: Vec<PathBuf>,
}

/// A call that is to go on.
pub(super) struct Run {
    pending: Pending,
    program: Program,
    who: Option<Arc<Who>>,
}

/// The most programs that can be started at once, by threads that follow them.
const RUNNERS: usize = 8;
/// A script names an interpreter, which may be a script: how many of these the kernel follows.
const MOST_INTERPRETERS: usize = 5;
/// The bytes of a file that the kernel looks at.
const HEAD_BYTES: usize = 256;
/// How often a thread that is followed is looked at. An exec takes some hundred microseconds.
const LOOK: Duration = Duration::from_micros(50);
/// Each time after this number of looks, whether it is there at all.
const LOOKS: u32 = 32;

impl Execute {
    /// The call that a notice is about.
    pub(super) fn of(notice: &Notice) -> Self {
        let register = notice.arguments;
        if notice.number == libc::SYS_execveat {
            let at = At {
                directory: register[0] as i32,
                path: register[1],
            };
            let flags = register[4] as i32;
            return Self { at, flags };
        }
        let at = At {
            directory: libc::AT_FDCWD,
            path: register[0],
        };
        Self { at, flags: 0 }
    }

    /// Looks up the file, and the interpreters of scripts.
    ///
    /// # Errors
    /// The number of the error that the call gets.
    pub(super) fn look(self, thread: u32, thread_fd: BorrowedFd<'_>) -> Result<Program, i32> {
        let home = Home::of(thread).map_err(number_of)?;
        let look = Look {
            thread,
            thread_fd,
            home: &home,
        };
        let known = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW;
        if self.flags & !known != 0 {
            return Err(libc::EINVAL);
        }
        let follows = self.flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        let mut file = match look.existing(self.at, follows) {
            Err(libc::ENOENT) if self.is_by_number(&look) => {
                process::file_of(thread_fd, self.at.directory).map_err(number_of)?
            }
            file => file?,
        };
        let (mut files, mut paths) = (Vec::new(), Vec::new());
        loop {
            let may = || accessat(CWD, own(&file), Access::EXEC_OK, AtFlags::EACCESS);
            let is_plain = fstat(&file)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
            if !is_plain || home.act(|| Ok(may()?)).is_err() {
                return Err(libc::EACCES);
            }
            let path = fs::read_link(own(&file)).map_err(number_of)?;
            paths.push(path);
            let next = interpreter_of(&home, &file);
            files.push(file);
            match next {
                None => break,
                Some(_) if files.len() > MOST_INTERPRETERS => return Err(libc::ELOOP),
                Some(next) => {
                    file = home.open(&next, OFlags::PATH).map_err(number_of)?;
                }
            }
        }
        paths.reverse();
        Ok(Program { files, paths })
    }

    fn is_by_number(&self, look: &Look<'_>) -> bool {
        self.flags & libc::AT_EMPTY_PATH != 0 && look.is_empty(self.at)
    }
}

/// The interpreter that a script names. If the file cannot be read, none is known; what the process becomes is
/// looked at all the same.
fn interpreter_of(home: &Home, file: &OwnedFd) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = || Ok(openat(CWD, own(file), flags, Mode::empty())?);
    let file = fs::File::from(home.act(open).ok()?);
    let mut head = [0; HEAD_BYTES];
    let length = file.read_at(&mut head, 0).ok()?;
    named(&head[..length])
}

/// What stands behind `#!`.
fn named(head: &[u8]) -> Option<Vec<u8>> {
    let line = head.strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n' || *byte == 0).next()?;
    let mut words = line
        .split(|byte| matches!(byte, b' ' | b'\t'))
        .filter(|word| !word.is_empty());
    words.next().map(<[u8]>::to_vec)
}

impl Program {
    /// Nothing of it is a question.
    pub(super) fn is_free(&mut self) {
        self.paths.clear();
    }

    /// The next file that is to be judged, but for those in directories that the user gave.
    pub(super) fn next(&mut self, runnable: &[PathBuf]) -> Option<Proposal> {
        loop {
            let path = self.paths.pop()?;
            if !runnable.iter().any(|given| path.starts_with(given)) {
                return Some(run(path));
            }
        }
    }

    /// Whether a file is one that was judged.
    fn has(&self, file: &OwnedFd) -> bool {
        let number = |file: BorrowedFd<'_>| fstat(file).ok().map(|it| (it.st_dev, it.st_ino));
        let its = number(file.as_fd());
        its.is_some()
            && self
                .files
                .iter()
                .any(|judged| number(judged.as_fd()) == its)
    }
}

fn run(path: PathBuf) -> Proposal {
    Proposal {
        doing: Doing::Execute,
        transport: Transport::File,
        target: Target::Path(path),
    }
}

impl Run {
    /// `None` for other calls.
    pub(super) fn of(mut pending: Pending, who: Option<Arc<Who>>) -> Option<Self> {
        let task = std::mem::replace(&mut pending.task, Task::Create);
        let Task::Execute(program) = task else {
            return None;
        };
        Some(Self {
            pending,
            program,
            who,
        })
    }
}

/// Starts the threads that follow programs; what is sent to them they run.
pub(super) fn runners(
    start: impl Fn(&str, Box<dyn FnOnce(Arc<Server>) + Send>) -> std::io::Result<()>,
) -> std::io::Result<Sender<Run>> {
    let (runs, to_run) = mpsc::channel();
    let to_run: Arc<Mutex<Receiver<Run>>> = Arc::new(Mutex::new(to_run));
    for _ in 0..RUNNERS {
        let to_run = Arc::clone(&to_run);
        start(
            "runs",
            Box::new(move |server| {
                loop {
                    // One of them waits for the next, the others for their turn.
                    let next = lock(&to_run).recv();
                    let Ok(next) = next else { return };
                    server.follow(next);
                }
            }),
        )?;
    }
    Ok(runs)
}

impl Server {
    /// Lets a call go on, and looks at what came of it.
    fn follow(&self, run: Run) {
        let Run {
            pending,
            program,
            who,
        } = run;
        let (thread, id, slot) = (pending.thread, pending.id, pending.slot);
        let group = group_of(thread);
        let (Ok(group), Ok(())) = (group, trace::seize(thread)) else {
            return self.answer(id, slot, Answer::Error(libc::EPERM));
        };
        trace::stop_soon(thread);
        if self.listener.waits(id) {
            self.answer(id, slot, Answer::Continue); // CONTINUE: what execve(2) made is looked at before it runs
        } else {
            self.release(slot);
        }
        let Some((stopped, stop)) = stop_of(thread, group) else {
            return;
        };
        let signal = match stop {
            Stop::Became => match became(stopped) {
                Some((file, _)) if program.has(&file) => 0,
                Some((_, path)) if self.may_become(path.clone(), who) => 0,
                // Also what cannot be looked at: a file that may be run and not read.
                _ => libc::SIGKILL,
            },
            Stop::Signal(number) => number,
        };
        if signal == libc::SIGKILL && stop == Stop::Became {
            // It stands still until it is dead.
            return process::signal_child(stopped, libc::SIGKILL);
        }
        trace::release(stopped, signal);
    }

    /// Whether a process may be another program than the one that was judged: one that needs no question, such as an
    /// interpreter by the kernel's own table (binfmt_misc).
    fn may_become(&self, path: PathBuf, who: Option<Arc<Who>>) -> bool {
        if self.runnable.iter().any(|given| path.starts_with(given)) {
            return true;
        }
        let Some(who) = who else { return false };
        let act: Act = run(path).act(who);
        if self.judging.gate.allows(&act) {
            return true;
        }
        self.judging.gate.refused(
            &act,
            "it is not what was asked about: the process was killed",
        );
        false
    }
}

/// Waits until a thread that this one follows stands still; `None` if it ended.
fn stop_of(thread: u32, group: u32) -> Option<(u32, Stop)> {
    let follower = trace::own_thread();
    for look in 1.. {
        // The thread that becomes another program takes the number of its process.
        for number in [thread, group] {
            if let Some(stop) = trace::stop_of(number) {
                return Some((number, stop));
            }
        }
        if look % LOOKS == 0 && !is_followed(thread, group, follower) {
            return None;
        }
        thread::sleep(LOOK);
    }
    None
}

fn is_followed(thread: u32, group: u32, follower: u32) -> bool {
    // In this order: in between it may change its number to the second.
    [thread, group].iter().any(|number| {
        let status = fs::read_to_string(format!("/proc/{number}/status"));
        status.is_ok_and(|text| field(&text, "TracerPid:") == Some(follower))
    })
}

/// The file that a process runs.
fn became(pid: u32) -> Option<(OwnedFd, PathBuf)> {
    let exe = format!("/proc/{pid}/exe");
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = openat(CWD, &exe, flags, Mode::empty()).ok()?;
    let path = fs::read_link(own(&file)).ok()?;
    Some((file, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_names_its_interpreter_as_the_kernel_reads_it() {
        for (text, expected) in [
            (&b"#!/bin/sh\n"[..], Some(&b"/bin/sh"[..])),
            (b"#! /usr/bin/env  python3\n", Some(b"/usr/bin/env")),
            (b"#!\t/bin/sh", Some(b"/bin/sh")),
            (b"#!\n/bin/sh", None),
            (b"#!/bin/sh\0x", Some(b"/bin/sh")),
            (b"\x7fELF", None),
            (b"", None),
        ] {
            assert_eq!(named(text).as_deref(), expected);
        }
    }
}
