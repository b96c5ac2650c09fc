//! `vnplug sandbox rules`: list, add, take away, try.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde_json::json;
use vnplug_sandbox::act::{Act, Ancestor, Doing, Target, Transport, Who};
use vnplug_sandbox::ask::show;
use vnplug_sandbox::chronicle::why;
use vnplug_sandbox::name::Name;
use vnplug_sandbox::profile::{self, Profile};
use vnplug_sandbox::rules::edit::{self, Where};
use vnplug_sandbox::rules::{Decision, Direction, Place, Protocol, Reason, Rule, Say, file, words};

use crate::failure::{self, Failure, Outcome};
use crate::out;
use crate::text::{columns, escape};

/// Show and change rules, and see what they say
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  vnplug sandbox rules add allow --program /usr/bin/git --to '*.example.org' --port 22,443
  vnplug sandbox rules add deny --to private --profile build
  vnplug sandbox rules test --program /usr/bin/curl --to example.org --port 443

Rules stand in ~/.config/vnplug/sandbox, are read from top to bottom, and may be written by hand: docs/sandbox.md.")]
pub(super) enum Rules {
    /// List the rules in the order in which they decide
    List(List),
    /// Add a rule
    Add(Box<Add>),
    /// Take rules away
    Rm(Rm),
    /// Say what the rules say of an act, and which
    Test(Box<Test>),
}

#[derive(Debug, Args)]
pub(super) struct Chosen {
    /// The profile, by name or file
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct List {
    #[command(flatten)]
    chosen: Chosen,
}

#[derive(Debug, Args)]
pub(super) struct Add {
    /// What the rule says: allow, ask or deny
    #[arg(value_parser = parsed::<Say>)]
    say: Say,
    /// The program's file; * is any number of characters but /, ** of any
    #[arg(long, value_name = "PATH", value_parser = program)]
    program: Option<String>,
    /// SHA-256 of the program's file
    #[arg(long, value_name = "HEX", value_parser = hash)]
    sha256: Option<[u8; 32]>,
    /// The command line, with *
    #[arg(long, value_name = "WORDS")]
    arguments: Option<String>,
    /// The file that some ancestor of the program runs
    #[arg(long, value_name = "PATH", value_parser = program)]
    parent: Option<String>,
    /// tcp, udp, icmp, raw, packet, unix, netlink, vsock, ip:NUMBER
    #[arg(long, value_name = "WORD", value_delimiter = ',', value_parser = parsed::<Protocol>)]
    protocol: Vec<Protocol>,
    /// A name, *.NAME, address, network, unix:PATH, …; loopback, private, … for the floor
    #[arg(long, value_name = "PLACE", value_delimiter = ',', value_parser = parsed::<Place>)]
    to: Vec<Place>,
    /// Ports and ranges of them
    #[arg(long, value_name = "PORT", value_delimiter = ',')]
    port: Vec<String>,
    /// out, listen, accept, write or execute
    #[arg(long, value_name = "WORD", default_value = "out", value_parser = parsed::<Direction>)]
    direction: Direction,
    /// For names: addresses of the floor are accepted, too
    #[arg(long)]
    local: bool,
    /// The rule ends at this time
    #[arg(long, value_name = "TIME", conflicts_with = "lasting")]
    until: Option<String>,
    /// The rule ends after this time, as in 2h
    #[arg(long = "for", value_name = "TIME", id = "lasting", value_parser = crate::text::duration)]
    lasting: Option<Duration>,
    /// Why the rule is there
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
    /// Before all other rules of its file, and not behind them
    #[arg(long)]
    first: bool,
    /// For every profile
    #[arg(long, conflicts_with = "profile")]
    all: bool,
    #[command(flatten)]
    chosen: Chosen,
}

#[derive(Debug, Args)]
pub(super) struct Rm {
    /// What `rules list` has in its first column: 3, answers:2, all:1
    #[arg(required = true, value_name = "RULE")]
    rules: Vec<String>,
    #[command(flatten)]
    chosen: Chosen,
}

#[derive(Debug, Args)]
pub(super) struct Test {
    /// The program's file
    #[arg(long, value_name = "PATH", default_value = "/usr/bin/program")]
    program: PathBuf,
    /// SHA-256 of the program's file
    #[arg(long, value_name = "HEX", value_parser = hash)]
    sha256: Option<[u8; 32]>,
    /// The command line
    #[arg(long, value_name = "WORDS")]
    arguments: Option<String>,
    /// The file that an ancestor of the program runs, the nearest first
    #[arg(long, value_name = "PATH")]
    parent: Vec<PathBuf>,
    /// tcp, udp, icmp, raw, …
    #[arg(long, value_name = "WORD", default_value = "tcp", value_parser = parsed::<Protocol>)]
    protocol: Protocol,
    /// An address, a name, unix:PATH, file:PATH; nothing: making the socket
    #[arg(long, value_name = "PLACE", value_parser = parsed::<Place>)]
    to: Option<Place>,
    /// The port; without one a name is only looked up
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// A name that the address was given for
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// out, listen, accept, write or execute
    #[arg(long, value_name = "WORD", default_value = "out", value_parser = parsed::<Direction>)]
    direction: Direction,
    #[command(flatten)]
    chosen: Chosen,
}

impl Rules {
    pub(super) fn run(self) -> Outcome {
        match self {
            Self::List(list) => list.run(),
            Self::Add(add) => add.run(),
            Self::Rm(rm) => rm.run(),
            Self::Test(test) => test.run(),
        }
    }
}

impl Chosen {
    /// The profile; `None` names the one without a name.
    fn find(&self) -> Result<Profile, Failure> {
        let directory = profile::directory().ok_or_else(|| {
            Failure::new("there is no place for rules: set HOME or XDG_CONFIG_HOME")
        })?;
        let here = std::env::current_dir().ok();
        Profile::find(self.profile.as_deref(), &directory, here.as_deref()).map_err(Failure::new)
    }
}

impl List {
    fn run(self) -> Outcome {
        let profile = self.chosen.find()?;
        let policy = profile.load()?;
        let ids = |rules: &[Arc<Rule>]| {
            let id = |rule: &Arc<Rule>| id(&profile, rule);
            rules
                .iter()
                .map(|rule| (id(rule).unwrap_or_else(|| "-".to_owned()), rule.clone()))
                .collect::<Vec<_>>()
        };
        let (rules, answers) = (ids(&policy.rules), ids(&policy.answers));
        let project = ids(policy
            .project
            .as_ref()
            .map_or(&[][..], |sheet| &sheet.rules));
        if self.chosen.json {
            let list = |rules: &[(String, Arc<Rule>)]| {
                let with_id = |(id, rule): &(String, Arc<Rule>)| {
                    let mut object = show::rule_json(rule);
                    object["id"] = json!(id);
                    object
                };
                rules.iter().map(with_id).collect::<Vec<_>>()
            };
            let object = json!({
                "profile": profile.name,
                "default": policy.default.to_string(),
                "timeout_s": policy.timeout.as_secs_f64(),
                "rules": list(&rules),
                "answers": list(&answers),
                "project": list(&project),
                "project_default": policy.project.as_ref().and_then(|sheet| sheet.default).map(|say| say.to_string()),
            });
            out::raw(&format!("{object}\n"))?;
            return Ok(failure::OK);
        }
        let row = |(id, rule): &(String, Arc<Rule>)| {
            let note = rule
                .note
                .as_deref()
                .map_or(String::new(), |note| format!(" ({note})"));
            [
                id.clone(),
                rule.say.to_string(),
                show::rule(rule) + &escape(&note),
                escape(&rule.origin.to_string()),
            ]
            .to_vec()
        };
        let mut text = columns(&rules.iter().map(row).collect::<Vec<_>>());
        // Writing to a String cannot fail.
        let _ = writeln!(text, "otherwise: {}", policy.default);
        for (title, rules) in [
            ("answers, where the rules say ask:", &answers),
            ("the project may only tighten:", &project),
        ] {
            if !rules.is_empty() {
                let _ = write!(
                    text,
                    "\n{title}\n{}",
                    columns(&rules.iter().map(row).collect::<Vec<_>>())
                );
            }
        }
        out::raw(&text)?;
        Ok(failure::OK)
    }
}

/// How `rules rm` names a rule; `None` if it is in no file of the user's.
fn id(profile: &Profile, rule: &Rule) -> Option<String> {
    use vnplug_sandbox::rules::Origin;
    let Origin::File(path, line) = &rule.origin else {
        return None;
    };
    let files = [
        ("", &profile.own),
        ("all:", &profile.all),
        ("answers:", &profile.answers),
    ];
    let (prefix, file) = files.into_iter().find(|(_, file)| ***file == **path)?;
    let rules = file::read(file).ok()?.rules;
    let at = |other: &Arc<Rule>| matches!(&other.origin, Origin::File(_, its) if its == line);
    Some(format!("{prefix}{}", rules.iter().position(at)? + 1))
}

impl Add {
    fn run(self) -> Outcome {
        let profile = self.chosen.find()?;
        let mut rule = Rule::new(self.say);
        rule.program = self.program.as_deref().map(file::program).transpose()?;
        rule.parent = self.parent.as_deref().map(file::program).transpose()?;
        rule.sha256 = self.sha256;
        rule.arguments = self
            .arguments
            .as_deref()
            .map(vnplug_sandbox::rules::glob::Glob::text);
        rule.protocols = self.protocol;
        rule.to = self.to;
        rule.ports = self
            .port
            .iter()
            .map(|word| words::ports(word))
            .collect::<Result<_, _>>()?;
        rule.direction = self.direction;
        rule.local = self.local;
        rule.note = self.note;
        let now = SystemTime::now();
        let now_ns = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        rule.until = match (&self.until, self.lasting) {
            (Some(text), _) => {
                let ns = vnplug_store::extract::parse_time(
                    text,
                    u64::try_from(now_ns).unwrap_or(u64::MAX),
                )?;
                Some(SystemTime::UNIX_EPOCH + Duration::from_nanos(ns))
            }
            (None, lasting) => lasting.map(|lasting| now + lasting),
        };
        file::consistent(&rule).map_err(Failure::new)?;
        let path = if self.all { &profile.all } else { &profile.own };
        edit::add(
            path,
            &rule,
            if self.first {
                Where::First
            } else {
                Where::Last
            },
        )?;
        if self.chosen.json {
            let mut object = show::rule_json(&rule);
            object["origin"] = json!(path.display().to_string());
            out::raw(&format!("{object}\n"))?;
        } else {
            out::raw(&format!(
                "{}: {} {}\n",
                escape(&path.display().to_string()),
                rule.say,
                show::rule(&rule)
            ))?;
        }
        Ok(failure::OK)
    }
}

impl Rm {
    fn run(self) -> Outcome {
        let profile = self.chosen.find()?;
        let mut wanted = Vec::new();
        for text in &self.rules {
            let (file, number) = text.split_once(':').unwrap_or(("", text));
            let path = match file {
                "" => &profile.own,
                "all" => &profile.all,
                "answers" => &profile.answers,
                _ => {
                    return Err(Failure::new(format!(
                        "{text:?} is no rule: write what `rules list` has in its first column"
                    )));
                }
            };
            let number: usize = number.parse().map_err(|_| {
                Failure::new(format!(
                    "{text:?} is no rule: write what `rules list` has in its first column"
                ))
            })?;
            wanted.push((path, number));
        }
        // The last of a file first, so that the numbers of the others stay.
        wanted.sort_by(|a, b| b.cmp(a));
        wanted.dedup();
        let mut gone = Vec::new();
        for (path, number) in wanted {
            gone.push(edit::remove(path, number)?);
        }
        for rule in &gone {
            if self.chosen.json {
                out::raw(&format!("{}\n", show::rule_json(rule)))?;
            } else {
                out::raw(&format!("taken away: {} {}\n", rule.say, show::rule(rule)))?;
            }
        }
        Ok(failure::OK)
    }
}

impl Test {
    fn run(self) -> Outcome {
        let policy = self.chosen.find()?.load()?;
        let (act, names) = self.act()?;
        let Decision { say, reason } = policy.decide(&act, &names, SystemTime::now());
        let rule = match &reason {
            Reason::Rule(rule) | Reason::Project(rule) | Reason::Answer(rule) => Some(rule),
            _ => None,
        };
        if self.chosen.json {
            let mut act = show::act_json(&act, &names);
            if let (Some(Place::Name(name)), Some(port)) = (&self.to, self.port) {
                // Of a name nobody has looked up there is no address.
                act["to"] = json!({"name": name.as_str(), "port": port});
            }
            let object = json!({
                "verdict": say.to_string(),
                "why": why(&reason),
                "rule": rule.map(|rule| show::rule_json(rule)),
                "act": act,
            });
            out::raw(&format!("{object}\n"))?;
        } else {
            let rule = rule.map_or(String::new(), |rule| {
                format!(": {} {}", rule.say, show::rule(rule))
            });
            out::raw(&format!("{say}: {}{rule}\n", why(&reason)))?;
        }
        Ok(failure::OK)
    }

    fn act(&self) -> Result<(Act, Vec<Name>), Failure> {
        let ancestor = |program: &PathBuf| Ancestor {
            pid: 0,
            program: program.clone(),
        };
        let who = Who {
            pid: 0,
            started: 0,
            program: self.program.clone(),
            hash: self.sha256,
            arguments: self.arguments.iter().cloned().collect(),
            ancestors: self.parent.iter().map(ancestor).collect(),
        };
        let mut names = self
            .name
            .iter()
            .map(|name| Name::new(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut transport = match self.protocol {
            Protocol::Is(transport) => transport,
            Protocol::AnyNetlink => Transport::Netlink(0),
        };
        let mut doing = match self.direction {
            Direction::Out => Doing::Connect,
            Direction::Listen => Doing::Bind,
            Direction::Accept => Doing::Accept,
            Direction::Write => Doing::Write,
            Direction::Execute => Doing::Execute,
        };
        let at =
            |address: IpAddr| Target::Internet(SocketAddr::new(address, self.port.unwrap_or(0)));
        let target = match &self.to {
            None => {
                doing = Doing::Create;
                Target::Nobody
            }
            Some(Place::Network(network)) => {
                let text = network.to_string();
                at(text
                    .parse()
                    .map_err(|_| Failure::new(format!("{text}: write one address")))?)
            }
            Some(Place::Name(name)) if self.port.is_none() => {
                doing = Doing::Resolve;
                Target::Name(name.as_str().to_owned())
            }
            Some(Place::Name(name)) => {
                names.insert(0, name.clone());
                // Whatever address the sandbox gave for it, of those outside the floor.
                at(IpAddr::from([192, 0, 2, 0]))
            }
            Some(place) => {
                let text = place.to_string();
                let (kind, path) = text.split_once(':').unwrap_or(("", ""));
                match (kind, path.strip_prefix('@')) {
                    ("unix", Some(name)) => {
                        transport = Transport::Unix;
                        Target::Abstract(name.as_bytes().to_vec())
                    }
                    ("unix", None) => {
                        transport = Transport::Unix;
                        Target::Path(path.into())
                    }
                    ("file", None) => {
                        transport = Transport::File;
                        Target::Path(path.into())
                    }
                    _ => {
                        return Err(Failure::new(format!(
                            "{text}: write one address, name, unix:PATH or file:PATH"
                        )));
                    }
                }
            }
        };
        Ok((
            Act {
                who: Arc::new(who),
                doing,
                transport,
                target,
            },
            names,
        ))
    }
}

fn parsed<T: std::str::FromStr<Err = words::BadWord>>(word: &str) -> Result<T, String> {
    word.parse()
        .map_err(|error: words::BadWord| error.to_string())
}

fn program(text: &str) -> Result<String, String> {
    file::program(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

fn hash(text: &str) -> Result<[u8; 32], String> {
    words::hash(text).map_err(|error| error.to_string())
}
