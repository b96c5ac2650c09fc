//! Runs a program in the sandbox: three processes.
//!
//! ```text
//!  keeper          the process the user started: passes signals on, refuses calls if the supervisor cannot
//!  └ supervisor    judges and does the calls
//!    └ program     below the filter
//! ```

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::filter::Terms;
use crate::judging::Judging;
use crate::keeper::{self, keep};
use crate::program::Start;
use crate::supervise::{Supervision, pair, supervise};
use crate::sys::landlock::{self, Ruleset};
use crate::sys::process::{self, Forked, Signals};
use crate::sys::seccomp;
use crate::sys::table::Table;
use crate::wire::{Network, Place, Summary};

/// What is to be run, and how.
pub struct Plan {
    /// The program and its arguments.
    pub words: Vec<OsString>,
    /// Which network the program has.
    pub network: Network,
    /// Makes who judges.
    pub judging: MakeJudging,
    /// Runs when the program has ended.
    pub finish: Option<Finish>,
    /// Files that the program changes are asked about too, but below these directories. `None`: files are no matter.
    pub writable: Option<Vec<PathBuf>>,
    /// With `writable`: programs in these directories, and those that rules allow, run without a question.
    pub runnable: Vec<PathBuf>,
    /// Runs on a kernel without Landlock too, where a program can write into other processes of its user.
    pub without_landlock: bool,
    /// Tells the user one line.
    pub tell: fn(&str),
}

/// Makes who judges, who may have what the program's network has for that. Runs in the supervisor, before the program
/// does; it may start threads.
pub type MakeJudging = Box<dyn FnOnce(&mut Place) -> io::Result<Judging>>;

/// Runs in the supervisor when the program has ended, and is told what its wire has moved, if it had one.
pub type Finish = Box<dyn FnOnce(Option<Summary>)>;

/// Runs a program to its end; returns its exit code, or 128 and the number of the signal that ended it. The calling
/// process must have one thread.
///
/// # Errors
/// The sandbox cannot be made, or the program cannot be started; nothing has run then.
pub fn run(plan: Plan) -> io::Result<u8> {
    let fence = fence(plan.without_landlock, plan.writable.is_some())?;
    if !seccomp::is_supported() {
        return Err(io::Error::other(
            "this kernel hands no system calls over (seccomp user notification): vnplug sandbox needs Linux 5.14",
        ));
    }
    if plan.writable.is_some() && !seccomp::waits_for_us() {
        return Err(io::Error::other(
            "this kernel lets signals end a call that is being judged: --files needs Linux 5.19",
        ));
    }
    if plan.words.is_empty() {
        return Err(io::Error::other("no program is named"));
    }
    let table = Arc::new(Table::new()?);
    let (ours, theirs) = pair()?;
    let signals = Signals::take(keeper::SIGNALS)?;
    process::become_subreaper();
    let keeper = std::process::id();
    match process::fork()? {
        Forked::Parent(supervisor) => {
            drop(theirs);
            process::become_undumpable();
            keep(supervisor, ours, &table, &signals, plan.tell)
        }
        Forked::Child => {
            drop(ours);
            signals.restore();
            drop(signals);
            let start = Start {
                words: plan.words,
                terms: Terms {
                    one_table: !process::threads_have_fds(),
                    files: plan.writable.is_some(),
                },
                fence,
                enter: None,
            };
            let result = process::die_with_parent(keeper).and_then(|()| {
                supervise(Supervision {
                    start,
                    network: plan.network,
                    judging: plan.judging,
                    writable: plan.writable,
                    runnable: plan.runnable,
                    finish: plan.finish,
                    table,
                    keeper: theirs,
                })
            });
            let code = result.unwrap_or_else(|error| {
                (plan.tell)(&error.to_string());
                match error.kind() {
                    io::ErrorKind::NotFound => 127,
                    io::ErrorKind::PermissionDenied => 126,
                    _ => 1,
                }
            });
            std::process::exit(i32::from(code));
        }
    }
}

fn fence(is_optional: bool, files: bool) -> io::Result<Option<Ruleset>> {
    match landlock::abi() {
        0 if is_optional && !files => Ok(None),
        0 => Err(io::Error::other(
            "this kernel has no Landlock (Linux 5.13, and `landlock` in /sys/kernel/security/lsm): the program could write \
             into other processes of yours by /proc/PID/mem. --without-landlock accepts that",
        )),
        abi => Ruleset::new(abi, files).map(Some),
    }
}
