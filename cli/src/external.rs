//! Commands that are programs of their own, beside `vnplug`: what they need (a database, an HTTP server)
//! is not in the small binary that runs in guests.

use std::env;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::failure::{Failure, Outcome};

/// Everything after the command's name; the program reads it.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct External {
    /// Words for the program; `--help` shows which
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "…")]
    words: Vec<OsString>,
}

/// This program once more, also if another has taken its file's place since: what runs goes on as the version that it is.
pub(crate) fn own() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("vnplug");
    command
}

impl External {
    /// Becomes the program: the one in the directory of this binary, or else in PATH. `installs` is what
    /// does that. If it asks the daemon, it is the one at `socket`.
    pub(crate) fn run(&self, socket: &Path, program: &str, installs: &str) -> Outcome {
        let beside = env::current_exe().ok();
        let beside = beside.and_then(|own| Some(own.parent()?.join(program)));
        let mut error = io::Error::from(ErrorKind::NotFound);
        for file in beside.into_iter().chain([PathBuf::from(program)]) {
            let mut command = Command::new(file);
            command.args(&self.words).env("VNPLUG_SOCKET", socket);
            error = command.exec();
            if error.kind() != ErrorKind::NotFound {
                break;
            }
        }
        Err(match error.kind() {
            ErrorKind::NotFound => Failure::new(format!(
                "this command is the program {program}, which is neither beside vnplug nor in PATH: \
                 install it there ({installs})"
            )),
            _ => Failure::about(program, error),
        })
    }
}
