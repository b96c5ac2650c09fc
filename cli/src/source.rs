//! `vnplug source`: sources that come and go while the daemon runs; `vnplug reload`: its configuration read again.

use clap::{Args, Subcommand};
use vnplug::{Client, Counted, SourceRequest};
use vnplug_ring::counters::label;

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Opens and closes sources, for root and the daemon's own user.
#[derive(Debug, Subcommand)]
pub(crate) enum Source {
    /// Open one more source, until the daemon ends or for good
    Add(Add),
    /// Close a source, with all its ports
    Rm(Rm),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug source add eth2
  vnplug source add 'tap7=af_packet:tap7,queues=2,wait=yes'
  vnplug source add --keep eth3
  vnplug source add 'vnet*=af_packet,members=100'
  vnplug source add lab=gen,pps=1000

It is written as on the daemon's command line (docs/sources.md). What it needs beyond CAP_NET_RAW the daemon has given up:
AF_XDP takes the configuration file and a new start, or change_programs = \"on\". A name with a * is a pattern: every interface that matches is a source
while it is there.")]
pub(crate) struct Add {
    /// The source, as with --source of vnplugd: NAME=KIND:WHAT,OPTION=VALUE… or just the name of an interface
    #[arg(value_name = "SPEC")]
    spec: String,
    /// Open it in the next daemon, too, until `vnplug source rm`
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  vnplug source rm eth2

Its readers keep what is in their rings, and are told that it is gone. Other sources lose nothing.")]
pub(crate) struct Rm {
    /// The source, as `vnplug list` shows it
    #[arg(value_name = "NAME")]
    name: String,
}

/// Has the daemon read its configuration file again, as SIGHUP does.
#[derive(Debug, Args)]
#[command(after_help = "\
What is different in it becomes so, for open ports too: sources and grants. What did not change loses nothing. Settings that are
read when the daemon starts are named, and wait for that. If anything in the file is wrong, nothing changes.")]
pub(crate) struct Reload {}

impl Source {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let request = match self {
            Self::Add(Add { spec, keep }) => SourceRequest::Add {
                text: spec.clone(),
                keep: *keep,
            },
            Self::Rm(Rm { name }) => SourceRequest::Remove { name: name.clone() },
        };
        connect()?.change_sources(request)?;
        Ok(OK)
    }
}

impl Reload {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let changes = connect()?.change_sources(SourceRequest::Reload)?;
        if changes.is_empty() {
            out::note("nothing is different");
        }
        out::raw(&changes.iter().map(line).collect::<String>())?;
        Ok(OK)
    }
}

fn line(change: &Counted) -> String {
    let what = match label(change, "what") {
        "restart" => "waits for a restart of the daemon",
        what => what,
    };
    format!("{}: {}\n", text::escape(&change.name), text::escape(what))
}
