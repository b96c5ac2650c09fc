//! `vnplug sandbox`: what one program may say to the network.

mod recorder;
mod run;

use std::path::Path;

use clap::Args;

use crate::failure::Outcome;

/// Run a program that may say to the network what rules allow
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug sandbox -- curl https://example.org/
  vnplug sandbox --default allow -- make test
  vnplug sandbox --offline -- make test
  vnplug sandbox --net lan0,address=10.0.0.9/24,gateway=10.0.0.1 --record run1 -- ./agent

Ends with the program's exit code; 128 and the number of the signal if one ended it. Needs no root and no
daemon, and Linux 5.14 (Landlock and more of seccomp with 6.12). More: docs/sandbox.md.")]
pub(crate) struct Sandbox {
    #[command(flatten)]
    run: run::Run,
}

impl Sandbox {
    pub(crate) fn run(self, socket: &Path) -> Outcome {
        self.run.run(socket)
    }
}
