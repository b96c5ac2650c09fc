//! `vnplug manual DIR`: man pages and shell completions, made of the command line itself. Packages ship what
//! it writes.

use std::fs::{create_dir_all, write};
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::{Failure, OK, Outcome};

/// Writes the man pages and completions into a directory.
#[derive(Debug, Args)]
pub(crate) struct Manual {
    /// Where they go: `man/man1`, and one directory per shell
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// The shells, the directory for each, and what its loader wants the file to be called.
const SHELLS: [(Shell, &str, &str); 3] = [
    (Shell::Bash, "bash", "vnplug"),
    (Shell::Zsh, "zsh", "_vnplug"),
    (Shell::Fish, "fish", "vnplug.fish"),
];

impl Manual {
    /// Writes them for this command line.
    pub(crate) fn run(&self, command: Command) -> Outcome {
        let mut command = without_help(command);
        for (shell, dir, file) in SHELLS {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut command, "vnplug", &mut text);
            put(&self.dir.join(dir), file, &text)?;
        }
        let dir = self.dir.join("man/man1");
        create_dir_all(&dir).map_err(|error| Failure::about(dir.display(), error))?;
        clap_mangen::generate_to(command, &dir)
            .map_err(|error| Failure::about(dir.display(), error))?;
        Ok(OK)
    }
}

/// Without the commands `help`, which say what each page says.
fn without_help(command: Command) -> Command {
    let command = command.disable_help_subcommand(true);
    command.mut_subcommands(without_help)
}

fn put(dir: &Path, file: &str, text: &[u8]) -> Result<(), Failure> {
    let error = |error| Failure::about(dir.join(file).display(), error);
    create_dir_all(dir).map_err(error)?;
    write(dir.join(file), text).map_err(error)
}
