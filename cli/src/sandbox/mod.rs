//! `vnplug sandbox`: what one program may say to the network.

mod ask;
mod judge;
mod log;
mod recorder;
mod rules;
mod run;

use std::path::Path;

use clap::{Args, Subcommand};

use crate::failure::Outcome;

/// Run a program that may say to the network what rules allow
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Examples:
  vnplug sandbox -- curl https://example.org/
  vnplug sandbox --profile agent --ask socket -- my-agent
  vnplug sandbox --learn make.toml -- make test
  vnplug sandbox --offline -- make test
  vnplug sandbox --net lan0,address=10.0.0.9/24,gateway=10.0.0.1,dns=10.0.0.1 --record run1 -- ./agent
  vnplug sandbox rules list

Ends with the program's exit code; 128 and the number of the signal if one ended it. Needs no root and no
daemon, and Linux 5.14 (Landlock and more of seccomp with 6.12). More: docs/sandbox.md."
)]
pub(crate) struct Sandbox {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: run::Run,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show and change rules, and see what they say
    #[command(subcommand)]
    Rules(rules::Rules),
    /// Answer the questions of a sandbox, from anywhere but inside
    Ask(ask::Ask),
    /// Show what a sandbox decided
    Log(log::Log),
}

impl Sandbox {
    pub(crate) fn run(self, socket: &Path) -> Outcome {
        match self.command {
            None => self.run.run(socket),
            Some(Command::Rules(rules)) => rules.run(),
            Some(Command::Ask(ask)) => ask.run(),
            Some(Command::Log(log)) => log.run(),
        }
    }
}
