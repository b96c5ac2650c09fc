//! All of a sandbox that is not calls or frames: rules, questions, names, and what is written down.
//!
//! What can be wrong in files is said before the program starts ([`Options::prepare`]); threads and sockets are made where
//! the program's calls are judged ([`Prepared::start`]).

use std::fs::File;
use std::io::{self, BufWriter};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ask::socket::{self, Socket};
use crate::ask::terminal;
use crate::chronicle::{Chronicle, Sinks};
use crate::dns::{Proxy, Upstream, nameservers};
use crate::gate::{Gate, Setup};
use crate::learn::Learner;
use crate::profile::{self, Profile};
use crate::rules::{Policy, Say};

/// What the user wants.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The profile's name, or its file.
    pub profile: Option<String>,
    /// What is said of acts that no rule is about; `None`: what the profile says.
    pub default: Option<Say>,
    /// How long a question waits; `None`: what the profile says.
    pub timeout: Option<Duration>,
    /// No file of a project is looked for.
    pub without_project: bool,
    /// Questions are asked on the terminal.
    pub terminal: bool,
    /// Questions are asked at a socket.
    pub socket: bool,
    /// A question waits for a front-end also while there is none.
    pub patient: bool,
    /// Decisions are written to this file.
    pub log: Option<PathBuf>,
    /// A profile is learnt into this file: what no rule is about is allowed, but for the floor.
    pub learn: Option<PathBuf>,
    /// The servers that names are asked of; empty: those of /etc/resolv.conf.
    pub dns: Vec<SocketAddr>,
    /// The servers that the program asks, which we are instead; empty: those of /etc/resolv.conf.
    pub asked: Vec<SocketAddr>,
    /// The program has a network namespace of its own: its loopback is no floor.
    pub own_network: bool,
    /// The program and its arguments, as front-ends show them.
    pub command: Vec<String>,
}

/// Rules that were read, and files that were opened.
#[derive(Debug)]
pub struct Prepared {
    options: Options,
    profile: Option<Profile>,
    policy: Policy,
    log: Option<File>,
    servers: Vec<SocketAddr>,
    asked: Vec<SocketAddr>,
}

/// A sandbox that judges.
#[derive(Debug)]
pub struct Session {
    /// Judges.
    pub gate: Gate,
    /// Resolves names.
    pub proxy: Proxy,
    /// Where front-ends connect; the file goes with it.
    pub socket: Option<Socket>,
    /// Whom names are asked of.
    pub servers: Vec<SocketAddr>,
}

impl Options {
    /// Reads the rules and opens the files.
    ///
    /// # Errors
    /// A line that says what is wrong and what to do.
    pub fn prepare(self) -> Result<Prepared, String> {
        let directory = profile::directory();
        let from = if self.without_project {
            None
        } else {
            std::env::current_dir().ok()
        };
        let profile = match &directory {
            Some(directory) => Some(Profile::find(
                self.profile.as_deref(),
                directory,
                from.as_deref(),
            )?),
            None if self.profile.is_some() => {
                return Err("there is no place for rules: set HOME or XDG_CONFIG_HOME".to_owned());
            }
            None => None,
        };
        let mut policy = match &profile {
            Some(profile) => profile.load().map_err(|error| error.to_string())?,
            None => Policy {
                default: Say::Ask,
                ..Policy::default()
            },
        };
        policy.default = self.default.unwrap_or(policy.default);
        policy.timeout = self.timeout.unwrap_or(policy.timeout);
        if self.learn.is_some() {
            policy.default = Say::Allow;
        }
        policy.own_loopback = self.own_network;
        let log = self.log.as_deref().map(append).transpose()?;
        let mut host =
            nameservers(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
        if host.is_empty() {
            // Whom the C library asks then.
            host.push(SocketAddr::from(([127, 0, 0, 1], 53)));
        }
        let or_host = |servers: &[SocketAddr]| {
            if servers.is_empty() {
                host.clone()
            } else {
                servers.to_vec()
            }
        };
        let (servers, asked) = (or_host(&self.dns), or_host(&self.asked));
        Ok(Prepared {
            options: self,
            profile,
            policy,
            log,
            servers,
            asked,
        })
    }
}

impl Prepared {
    /// The servers that the program believes it asks for names.
    #[must_use]
    pub fn asked(&self) -> &[SocketAddr] {
        &self.asked
    }

    /// Starts threads and makes sockets, in the process that judges. `note` shows a line to the user.
    ///
    /// # Errors
    /// The system's; without terminal or socket it goes on, and says so by `note`.
    pub fn start(self, note: fn(&str)) -> io::Result<Session> {
        let upstream = Upstream::new(self.servers.clone());
        self.start_by(upstream, note)
    }

    /// The same, with names asked by `upstream`.
    ///
    /// # Errors
    /// As [`Prepared::start`].
    pub fn start_by(self, upstream: Upstream, note: fn(&str)) -> io::Result<Session> {
        let options = self.options;
        let sinks = Sinks {
            lines: self
                .log
                .map(|file| Box::new(BufWriter::new(file)) as Box<dyn io::Write + Send>),
            notes: Some(Box::new(note)),
            learner: options.learn.map(Learner::new),
            profile: options.profile.clone(),
        };
        let directory = socket::directory();
        // Nobody inside reaches the sockets of other sandboxes either.
        let private = directory.as_ref().ok().cloned().into_iter().collect();
        let gate = Gate::with(Setup {
            policy: self.policy,
            answers: self.profile.map(|profile| profile.answers),
            private,
            chronicle: Some(Chronicle::start(sinks)?),
            waits_for_fronts: options.socket && options.patient,
        });
        let own = std::process::id();
        let started = match (options.socket, directory) {
            (false, _) => None,
            (true, Ok(directory)) => {
                let path = directory.join(format!("{own}.sock"));
                match Socket::start(&gate, &path, &options.command, own) {
                    Ok(socket) => Some(socket),
                    Err(error) => {
                        note(&format!(
                            "no front-end can connect: {}: {error}",
                            path.display()
                        ));
                        None
                    }
                }
            }
            (true, Err(error)) => {
                note(&format!("no front-end can connect: {error}"));
                None
            }
        };
        if options.terminal {
            // So that the program's group is another, which reads the terminal or not. Who leads a session has one.
            let _ = rustix::process::setpgid(None, None);
        }
        if options.terminal
            && let Err(error) = terminal::start(&gate, Path::new(TERMINAL))
        {
            // Usual in a pipeline: then others are asked, or what would be asked is refused.
            log::info!("nobody is asked on the terminal: {error}");
        }
        let proxy = Proxy::new(gate.clone(), upstream, self.asked)?;
        Ok(Session {
            gate,
            proxy,
            socket: started,
            servers: self.servers,
        })
    }
}

fn append(path: &Path) -> Result<File, String> {
    let file = File::options().create(true).append(true).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()))
}

/// The terminal that the program was started on.
const TERMINAL: &str = "/dev/tty";
