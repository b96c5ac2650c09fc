//! vnplug: counts and dumps what a port delivers, and attaches virtual machines.
//!
//! The same binary serves on the host, where the daemon answers, and in a guest, where the agent
//! does (`vnplug agent`). One file per command; [`out`] and [`failure`] say how they speak and end.

mod agent;
mod attach;
mod capture;
mod channel;
mod doctor;
mod entrances;
mod extcap;
mod external;
mod extract;
mod failure;
mod feed;
mod flows;
mod grant;
mod interface;
mod list;
mod manual;
mod nic;
mod out;
mod programs;
mod qemu;
mod record;
mod replay;
mod sandbox;
mod source;
mod stats;
mod switch;
mod sys;
mod tap;
mod text;
mod top;
mod uml;
mod verify;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use vnplug::{Client, DEFAULT_SOCKET};
use vnplug_os::service::{log_line, logs_to_journal};

use crate::failure::Failure;

/// Reads the wire of a host, on the host and in its virtual machines
#[derive(Debug, Parser)]
#[command(name = "vnplug", version, max_term_width = 100, after_help = failure::EXIT_CODES)]
struct Arguments {
    /// Socket of the daemon (on a host) or of the agent (in a guest)
    #[arg(long, global = true, value_name = "PATH", env = "VNPLUG_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Count the packets of a device
    Count(capture::count::Count),
    /// Write the packets of a device to a capture file or a pipe
    Dump(capture::dump::Dump),
    /// Record the packets of devices in files
    Record(Box<record::Record>),
    /// Send frames through a device, generated or from a capture file
    Send(capture::send::Send),
    /// Send the frames of capture files with their recorded gaps, or at a rate
    Replay(replay::Replay),
    /// Send what another machine captures: pcap-over-IP, TZSP, a pipe
    Feed(feed::Feed),
    /// Send back every packet of a device, for measuring
    Echo(capture::echo::Echo),
    /// Serve Wireshark as an external capture program
    Extcap(extcap::Extcap),
    /// Feed a device into a network interface (TAP), for programs that want one
    Tap(tap::TapArgs),
    /// Make a network interface that is a port of a switch
    Nic(nic::NicArgs),
    /// Show switches, change their settings, close their ports
    #[command(subcommand)]
    Switch(switch::Switch),
    /// Show grants and change them, also for open ports
    #[command(subcommand)]
    Grant(grant::Grant),
    /// Open and close sources while the daemon runs
    #[command(subcommand)]
    Source(source::Source),
    /// Have the daemon read its configuration file again
    Reload(source::Reload),
    /// Take open ports from their owners
    Revoke(grant::RevokeArgs),
    /// List the back-ends of third parties
    Backends(channel::Backends),
    /// Speak to a back-end
    Channel(channel::ChannelArgs),
    /// List the operator's programs, and show what lies in their maps
    Programs(programs::Programs),
    /// List the devices
    List(list::List),
    /// Check this host or guest: what is missing, what costs speed, what mends it
    Doctor(doctor::Doctor),
    /// Show every counter and check that the accounts close
    Stats(stats::Stats),
    /// Show sources, ports and VMs with their rates and losses, on the terminal
    Top(top::Top),
    /// Extract packets from recordings, by time and filter
    Extract(extract::Extract),
    /// List who spoke with whom in recordings, and how much
    Flows(flows::Flows),
    /// Answer SQL over the flows of recordings (runs vnplug-query)
    Query(external::External),
    /// Show recordings in the browser: timeline, filter, download
    Web(external::External),
    /// Show the counters to Prometheus (runs vnplug-metrics)
    Metrics(external::External),
    /// Make the indexes of recordings and capture files that have none
    Index(extract::Index),
    /// Check recordings against their manifests: is every segment there, and unchanged?
    Verify(verify::Verify),
    /// Plug the daemon into a virtual machine
    #[command(subcommand)]
    Attach(attach::Attach),
    /// Unplug the daemon from a virtual machine
    #[command(subcommand)]
    Detach(attach::Detach),
    /// Move a virtual machine to another host, its applications read on
    #[command(subcommand)]
    Migrate(attach::Migrate),
    /// Run a program that may say to the network what rules allow
    Sandbox(Box<sandbox::Sandbox>),
    /// Serve the applications of a guest; runs inside virtual machines
    Agent(agent::Agent),
    /// Write man pages and completions, for packages
    #[command(hide = true)]
    Manual(manual::Manual),
}

fn main() -> ExitCode {
    let environment = env_logger::Env::new().filter_or("VNPLUG_LOG", "warn");
    let mut logger = env_logger::Builder::from_env(environment);
    if logs_to_journal() {
        logger.format(|line, record| writeln!(line, "{}", log_line(record)));
    }
    logger.init();
    let arguments = Arguments::parse_from(extcap::arguments(std::env::args_os()));
    // A program in the sandbox keeps the limits that it was given.
    if !matches!(arguments.command, Action::Sandbox(_)) {
        vnplug_store::extract::raise_open_files();
    }
    let socket = arguments.socket;
    let connect = || Client::connect_to(&socket).map_err(Failure::from);
    let outcome = match arguments.command {
        // An agent is started by init systems of all kinds, and prints nothing.
        Action::Agent(agent) => agent.run(&socket),
        _ if sys::stdout_was_closed() => Err(Failure::new(
            "standard output is closed: open it, or send it to /dev/null",
        )),
        Action::Count(count) => count.run(&socket),
        Action::Dump(dump) => dump.run(&socket),
        Action::Record(record) => record.run(&socket),
        Action::Send(send) => send.run(&socket),
        Action::Replay(replay) => replay.run(&socket),
        Action::Feed(feed) => feed.run(&socket),
        Action::Echo(echo) => echo.run(&socket),
        Action::Extcap(extcap) => extcap.run(&socket),
        Action::Tap(tap) => tap.run(&socket),
        Action::Nic(nic) => nic.run(&socket),
        Action::Switch(switch) => switch.run(connect),
        Action::Grant(grant) => grant.run(connect),
        Action::Source(source) => source.run(connect),
        Action::Reload(reload) => reload.run(connect),
        Action::Revoke(revoke) => revoke.run(connect),
        Action::Backends(backends) => backends.run(&socket),
        Action::Channel(channel) => channel.run(&socket),
        Action::Programs(programs) => programs.run(connect),
        Action::List(list) => list.run(connect),
        Action::Doctor(doctor) => doctor.run(&socket),
        Action::Stats(stats) => stats.run(connect),
        Action::Top(top) => top.run(&socket),
        Action::Extract(extract) => extract.run(),
        Action::Flows(flows) => flows.run(),
        Action::Query(query) => query.run(
            &socket,
            "vnplug-query",
            "`make query` and `make install` do",
        ),
        Action::Web(web) => web.run(&socket, "vnplug-web", "`make install` does"),
        Action::Metrics(it) => it.run(&socket, "vnplug-metrics", "`make install` does"),
        Action::Index(index) => index.run(),
        Action::Verify(verify) => verify.run(),
        Action::Attach(attach) => attach.run(connect),
        Action::Detach(detach) => detach.run(connect),
        Action::Migrate(migrate) => migrate.run(connect),
        Action::Sandbox(sandbox) => sandbox.run(&socket),
        Action::Manual(manual) => manual.run(Arguments::command()),
    };
    outcome.unwrap_or_else(|failure| {
        let line = failure.line();
        if !line.is_empty() {
            out::say(log::Level::Error, &line);
        }
        failure.exit_code()
    })
}

#[cfg(test)]
mod tests {
    use clap::Command;
    use vnplug_testing::Pages;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_and_option_stands_in_a_page() {
        let lacking = lacking(&Pages::read(), &Arguments::command(), "vnplug");
        assert!(lacking.is_empty(), "docs/ lacks {lacking:#?}");
    }

    /// Of a command and those below it; what is hidden is for packages.
    fn lacking(pages: &Pages, command: &Command, name: &str) -> Vec<String> {
        let options = command.get_arguments().filter(|it| !it.is_hide_set());
        let options = options.filter_map(|it| {
            assert!(
                it.is_positional() || it.get_long().is_some(),
                "{name}: {it}"
            );
            it.get_long()
        });
        let own = pages.lack(name, options);
        let below = command.get_subcommands().filter(|it| !it.is_hide_set());
        let below = below.flat_map(|it| lacking(pages, it, &format!("{name} {}", it.get_name())));
        own.into_iter().chain(below).collect()
    }
}
