//! Options of who judges: rules, questions, names, what is written down.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use vnplug_sandbox::act::Target;
use vnplug_sandbox::judging::Judging;
use vnplug_sandbox::rules::Say;
use vnplug_sandbox::session::{Options, Prepared, Session};

use crate::failure::Failure;

#[derive(Debug, Args)]
pub(super) struct Judge {
    /// The profile: agent, build, one of your own, or a file of rules
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,
    /// What becomes of an act that no rule is about; else what the profile says, or ask
    #[arg(long, value_enum)]
    default: Option<Default>,
    /// Who is asked: the terminal, front-ends at a socket (vnplug sandbox ask), or none
    #[arg(long, value_enum, value_delimiter = ',', default_value = "terminal")]
    ask: Vec<Asked>,
    /// How long a question waits before it means no
    #[arg(long, value_name = "TIME", value_parser = crate::text::duration)]
    timeout: Option<Duration>,
    /// Do not read .vnplug-sandbox.toml, which a project may have to tighten the rules
    #[arg(long)]
    no_project: bool,
    /// Append every decision to this file, as lines of JSON
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Allow what no rule refuses, but for the floor, and write a profile of what was done
    #[arg(long, value_name = "FILE", conflicts_with = "default")]
    learn: Option<PathBuf>,
    /// The servers that names are asked of; else those of /etc/resolv.conf
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', value_parser = server)]
    dns: Vec<SocketAddr>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Default {
    Allow,
    Ask,
    Deny,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Asked {
    Terminal,
    Socket,
    None,
}

impl Judge {
    /// Reads the rules. `own_network`: the program has a network namespace of its own.
    ///
    /// # Errors
    /// What is wrong in a file, and where.
    pub(super) fn prepare(
        self,
        words: &[OsString],
        own_network: bool,
    ) -> Result<Prepared, Failure> {
        let default = self.default.map(|default| match default {
            Default::Allow => Say::Allow,
            Default::Ask => Say::Ask,
            Default::Deny => Say::Deny,
        });
        let socket = self.ask.contains(&Asked::Socket);
        let terminal = self.ask.contains(&Asked::Terminal);
        Options {
            profile: self.profile,
            default,
            timeout: self.timeout,
            without_project: self.no_project,
            terminal,
            socket,
            // On the terminal there is somebody; at a socket somebody may come.
            patient: !terminal,
            log: self.log,
            learn: self.learn,
            dns: self.dns,
            asked: Vec::new(),
            own_network,
            command: words
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
        }
        .prepare()
        .map_err(Failure::new)
    }
}

/// A session as the calls want it: names are asked of its proxy. Serves on the host's loopback, if `is_local`;
/// else whoever has the program's network gives the proxy its sockets.
pub(super) fn judging(session: &Session, is_local: bool) -> io::Result<Judging> {
    if is_local {
        session.proxy.serve_local()?;
    }
    let mut judging = Judging::by(session.gate.clone());
    let (proxy, its) = (session.proxy.clone(), session.proxy.clone());
    judging.detour = Some(Box::new(move |act| match act.target {
        Target::Internet(to) => proxy.redirect(act.transport, to),
        _ => None,
    }));
    judging.detoured = Some(Box::new(move |who, transport, from| {
        its.senders().note(transport, from, who.clone());
    }));
    Ok(judging)
}

/// An address, with port 53 if none is said.
fn server(text: &str) -> Result<SocketAddr, String> {
    let address = text
        .parse::<IpAddr>()
        .map(|address| SocketAddr::new(address, 53));
    address.or_else(|_| text.parse()).map_err(|_| {
        format!("{text:?} is no server: write an address, as 192.0.2.53, 192.0.2.53:5353 or [2001:db8::53]:53")
    })
}
