//! Tables of rules, and what holds whatever the rules are.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vnplug_testing::TestDir;

use super::edit::{self, Where};
use super::file::{self, parse};
use super::policy::{Policy, Reason};
use super::rule::{Origin, Rule, Say};
use crate::act::{Act, Ancestor, Doing, Target, Transport, Who};
use crate::floor::Floor;
use crate::name::Name;

mod conditions;
mod deciding;
mod files;

fn rules(text: &str) -> Vec<Arc<Rule>> {
    parse(text, |line, _| {
        Origin::File(Arc::new("t.toml".into()), line)
    })
    .unwrap()
    .rules
}

fn policy(default: Say, text: &str) -> Policy {
    Policy {
        rules: rules(text),
        default,
        ..Policy::default()
    }
}

fn who(program: &str, parents: &[&str]) -> Arc<Who> {
    let ancestor = |program: &&str| Ancestor {
        pid: 2,
        program: PathBuf::from(program),
    };
    Arc::new(Who {
        pid: 7,
        started: 100,
        program: program.into(),
        hash: Some([0xab; 32]),
        arguments: vec![
            program.rsplit('/').next().unwrap().to_owned(),
            "-v".to_owned(),
            "x y".to_owned(),
        ],
        ancestors: parents.iter().map(ancestor).collect(),
    })
}

/// `tcp 192.0.2.1:80`, `resolve example.org`, `unix /run/x`, `abstract x`, `listen udp 0.0.0.0:53`, `raw`, …
fn act(text: &str) -> Act {
    let words: Vec<&str> = text.split(' ').collect();
    let to = |text: &str| Target::Internet(text.parse::<SocketAddr>().unwrap());
    let by = |word: &str| match word {
        "tcp" => Transport::Tcp,
        "udp" => Transport::Udp,
        "icmp" => Transport::Icmp,
        "sctp" => Transport::Other(132),
        "raw" => Transport::Raw,
        "packet" => Transport::Packet,
        "netlink" => Transport::Netlink(16),
        word => panic!("{word}"),
    };
    let (doing, transport, target) = match words.as_slice() {
        ["resolve", name] => (
            Doing::Resolve,
            Transport::Udp,
            Target::Name((*name).to_owned()),
        ),
        ["unix", path] => (Doing::Connect, Transport::Unix, Target::Path(path.into())),
        ["abstract", name] => (
            Doing::Connect,
            Transport::Unix,
            Target::Abstract(name.as_bytes().to_vec()),
        ),
        ["vsock", cid] => (
            Doing::Connect,
            Transport::Vsock,
            Target::Vsock {
                cid: cid.parse().unwrap(),
                port: 5,
            },
        ),
        ["write", path] => (Doing::Write, Transport::File, Target::Path(path.into())),
        ["execute", path] => (Doing::Execute, Transport::File, Target::Path(path.into())),
        ["listen", transport, address] => (Doing::Bind, by(transport), to(address)),
        ["accept", transport, address] => (Doing::Accept, by(transport), to(address)),
        [transport, address] => (Doing::Connect, by(transport), to(address)),
        [transport] => (Doing::Create, by(transport), Target::Nobody),
        words => panic!("{words:?}"),
    };
    Act {
        who: who("/usr/bin/curl", &["/bin/sh", "/usr/bin/make"]),
        doing,
        transport,
        target,
    }
}

fn names(text: &str) -> Vec<Name> {
    text.split_whitespace()
        .map(|name| Name::new(name).unwrap())
        .collect()
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

/// True if a rule with these conditions is about the act.
fn is_about(conditions: &str, what: &str, known: &str) -> bool {
    let rules = rules(&format!(
        "[[rule]]\nsay = \"allow\"\n{}\n",
        conditions.replace("; ", "\n")
    ));
    rules[0].matches(&act(what), &names(known), now())
}
