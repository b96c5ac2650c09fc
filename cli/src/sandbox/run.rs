//! Runs the program.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use vnplug_sandbox::gate::Gate;
use vnplug_sandbox::judging::Judging;
use vnplug_sandbox::rules::{Policy, Say};
use vnplug_sandbox::run::Plan;

use crate::failure::{Failure, Outcome};
use crate::out;

#[derive(Debug, Args)]
pub(super) struct Run {
    /// What becomes of an act that no rule is about
    #[arg(long, value_enum, default_value_t = Default::Deny)]
    default: Default,
    /// Run without Landlock if the kernel has none: the program can then write into other processes of yours
    #[arg(long)]
    without_landlock: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    words: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Default {
    Allow,
    Ask,
    Deny,
}

impl Run {
    pub(super) fn run(self) -> Outcome {
        let default = match self.default {
            Default::Allow => Say::Allow,
            Default::Ask => Say::Ask,
            Default::Deny => Say::Deny,
        };
        let policy = Policy {
            default,
            ..Policy::default()
        };
        let plan = Plan {
            words: self.words,
            judging: Box::new(move || Ok(Judging::by(Gate::new(policy)))),
            enter: None,
            finish: None,
            without_landlock: self.without_landlock,
            tell: out::note,
        };
        vnplug_sandbox::run::run(plan)
            .map(ExitCode::from)
            .map_err(|error| Failure::new(error.to_string()))
    }
}
