//! Runs the program.

use std::cell::RefCell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use clap::{Args, ValueEnum};
use vnplug_sandbox::gate::Gate;
use vnplug_sandbox::judging::Judging;
use vnplug_sandbox::rules::{Policy, Say};
use vnplug_sandbox::run::Plan;
use vnplug_sandbox::wire::{Network, WirePlan};

use super::recorder::Recorder;
use crate::failure::{Failure, Outcome};
use crate::out;

#[derive(Debug, Args)]
pub(super) struct Run {
    /// What becomes of an act that no rule is about
    #[arg(long, value_enum, default_value_t = Default::Deny)]
    default: Default,
    /// A wire of its own on this switch of the daemon, with its address:
    /// SWITCH,address=10.0.0.9/24[,gateway=10.0.0.1][,mac=…][,mtu=…][,fence=off]
    #[arg(long, value_name = "SWITCH,…", conflicts_with = "offline")]
    net: Option<WirePlan>,
    /// No network but a loopback interface of its own
    #[arg(long)]
    offline: bool,
    /// Record what passes the program's wire, in files of this directory
    #[arg(long, value_name = "DIR", requires = "net")]
    record: Option<PathBuf>,
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
    pub(super) fn run(self, socket: &Path) -> Outcome {
        let default = match self.default {
            Default::Allow => Say::Allow,
            Default::Ask => Say::Ask,
            Default::Deny => Say::Deny,
        };
        let policy = Policy {
            default,
            ..Policy::default()
        };
        if self.net.as_ref().is_some_and(|plan| !plan.dns.is_empty()) {
            return Err(Failure::about(
                "--net",
                "dns= has nobody who judges names on a wire: leave it out, and allow a name server's address",
            ));
        }
        let network = match (self.net, self.offline) {
            (Some(plan), _) => Network::Wire {
                plan,
                socket: socket.to_owned(),
                nameservers: Vec::new(),
            },
            (None, true) => Network::Nowhere,
            (None, false) => Network::Host,
        };
        // Of the supervisor, where both closures run.
        let recorder = Rc::new(RefCell::new(None));
        let (started, record, socket) = (Rc::clone(&recorder), self.record, socket.to_owned());
        let plan = Plan {
            words: self.words,
            network,
            judging: Box::new(move |place| {
                if let (Some(wire), Some(to)) = (place.wire(), &record) {
                    let recording = Recorder::start(&socket, wire.device(), to)?;
                    started.replace(Some(recording));
                }
                Ok(Judging::by(Gate::new(policy)))
            }),
            finish: Some(Box::new(move |summary| {
                if let Some(summary) = summary {
                    out::note(&summary.to_string());
                }
                match recorder.take().map(Recorder::finish) {
                    None => {}
                    Some(Ok(to)) => out::note(&format!("its traffic is in {}", to.display())),
                    Some(Err(error)) => out::note(&error.to_string()),
                }
            })),
            without_landlock: self.without_landlock,
            tell: out::note,
        };
        vnplug_sandbox::run::run(plan)
            .map(ExitCode::from)
            .map_err(|error| Failure::new(error.to_string()))
    }
}
