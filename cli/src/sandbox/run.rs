//! Runs the program.

use std::cell::RefCell;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use vnplug_sandbox::dns::upstream::Upstream;
use vnplug_sandbox::judging::Judging;
use vnplug_sandbox::run::Plan;
use vnplug_sandbox::wire::{Network, WirePlan};

use super::judge::{Judge, judging};
use super::recorder::Recorder;
use crate::failure::{Failure, Outcome};
use crate::out;

/// How long a name server may take to be connected to.
const DNS_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(super) struct Run {
    #[command(flatten)]
    judge: Judge,
    /// A wire of its own on this switch of the daemon, with an address that somebody gives there (DHCP), or with this one:
    /// SWITCH[,address=10.0.0.9/24][,gateway=10.0.0.1][,dns=…][,mac=…][,mtu=…][,dhcp=off][,fence=off]
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
    /// Ask about files that the program opens to write, makes, removes, renames or runs
    #[arg(long)]
    files: bool,
    /// With --files: below this directory there is no question
    #[arg(long, value_name = "DIRECTORY", requires = "files")]
    writable: Vec<PathBuf>,
    /// With --files: programs below this directory run without a question, as those of the system do
    #[arg(long, value_name = "DIRECTORY", requires = "files")]
    runnable: Vec<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    words: Vec<OsString>,
}

impl Run {
    pub(super) fn run(self, socket: &Path) -> Outcome {
        let own_network = self.offline || self.net.is_some();
        let prepared = self.judge.prepare(&self.words, own_network)?;
        let network = match (self.net, self.offline) {
            (Some(plan), _) => Network::Wire {
                nameservers: match plan.dns.is_empty() && !plan.leases() {
                    true => Vec::new(),
                    false => prepared.asked().iter().map(SocketAddr::ip).collect(),
                },
                plan,
                socket: socket.to_owned(),
            },
            (None, true) => Network::Nowhere,
            (None, false) => Network::Host,
        };
        let recorder = Rc::new(RefCell::new(None));
        let (started, record, socket) = (Rc::clone(&recorder), self.record, socket.to_owned());
        // Made in the supervisor, and ended there.
        let session = Rc::new(RefCell::new(None));
        let its = session.clone();
        let places = |places: &[PathBuf], option| -> Result<Vec<PathBuf>, Failure> {
            let places = places.iter().map(|place| place.canonicalize());
            let places: std::io::Result<_> = places.collect();
            places.map_err(|error| Failure::about(option, error))
        };
        let writable = places(&self.writable, "--writable")?;
        let runnable = places(&self.runnable, "--runnable")?;
        let plan = Plan {
            words: self.words,
            network,
            judging: Box::new(move |place| {
                let Some(wire) = place.wire() else {
                    let made = prepared.start(out::note)?;
                    let judging = match own_network {
                        // There is nobody to ask for names.
                        true => Judging::by(made.gate.clone()),
                        false => judging(&made, true)?,
                    };
                    *its.borrow_mut() = Some(made);
                    return Ok(judging);
                };
                if let Some(to) = &record {
                    let recording = Recorder::start(&socket, wire.device(), to)?;
                    started.replace(Some(recording));
                }
                let [udp, tcp] = [wire.dialler(), wire.dialler()];
                let upstream = Upstream::by(
                    wire.servers(),
                    move |server| udp.udp(server),
                    move |server| tcp.tcp(server, DNS_PATIENCE),
                );
                let made = prepared.start_by(upstream, out::note)?;
                let mut judging = judging(&made, false)?;
                let mut served = Vec::new();
                for (udp, tcp) in wire.questions() {
                    served.push(udp.local_addr()?);
                    made.proxy.serve_udp(udp)?;
                    made.proxy.serve_tcp(tcp)?;
                }
                // A server in whose place nobody answers is judged as any other address.
                let is_served = move |to: &SocketAddr| {
                    served.contains(&SocketAddr::new(to.ip().to_canonical(), to.port()))
                };
                if let Some(detour) = judging.detour.take() {
                    judging.detour = Some(Box::new(move |act| detour(act).filter(&is_served)));
                }
                *its.borrow_mut() = Some(made);
                Ok(judging)
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
                if let Some(session) = session.borrow_mut().take() {
                    session.gate.end();
                }
            })),
            writable: self.files.then_some(writable),
            runnable,
            without_landlock: self.without_landlock,
            tell: out::note,
        };
        vnplug_sandbox::run::run(plan)
            .map(ExitCode::from)
            .map_err(|error| Failure::new(error.to_string()))
    }
}
