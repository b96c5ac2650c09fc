//! What the tests of the sandbox run inside it, and around it: a program that tries to get past.
//!
//! | `sandbox-probe …` | |
//! |---|---|
//! | `run ALLOWED… -- PROGRAM …` | a sandbox whose gate allows what the words say |
//! | `naive PORT -- PROGRAM …` | the control: a supervisor that looks and lets the program go on |
//! | `floor -- PROGRAM …` | a supervisor that lets everything go on |
//! | `race KIND CALLS GOOD BAD` | changes arguments while a call is judged |
//! | `naive run BAD -- PROGRAM …` | the same for programs that are run |
//! | `run-race CALLS GOOD BAD` | changes the path while a program is run |
//! | `channel NAME …` | one way around, once |
//! | other words | see `acts.rs` |
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod acts;
mod channels;
mod naive;
mod race;
mod runs;
mod sys;

use std::fs::OpenOptions;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use vnplug_sandbox::act::{Act, Doing, Target};
use vnplug_sandbox::gate::{Gate, Verdict};
use vnplug_sandbox::judging::Judging;
use vnplug_sandbox::run::{Finish, Plan, run};
use vnplug_sandbox::wire::Network;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let at = words.iter().position(|word| word == "--");
    let (options, program) = match at {
        Some(at) => (&words[1..at], &words[at + 1..]),
        None => (&words[1.min(words.len())..], &[][..]),
    };
    match words.first().map(String::as_str) {
        Some("run") => sandboxed(options.to_vec(), program.to_vec()),
        Some("naive") => naive::run(options, program),
        Some("run-race") => runs::race(options),
        Some("floor") => naive::floor(program),
        Some("race") => race::run(options),
        Some("channel") => {
            for attempt in options {
                let name = attempt.split('=').next().unwrap_or(attempt);
                println!("{name} {}", channels::attempt(attempt));
            }
            ExitCode::SUCCESS
        }
        Some(act) => acts::run(act, options),
        None => ExitCode::from(2),
    }
}

/// Runs a program in the sandbox. Each word allows something: `all`, `create`, an address and port, a Unix socket's path,
/// `files` (these are asked about too), `writable=DIRECTORY`, `runnable=DIRECTORY` beside `/usr`, `by-name` (only acts whose port is the number that the program has as its last argument), `log=FILE`,
/// `lingers` (the supervisor stays a while when all is over, and says its processor time).
fn sandboxed(allowed: Vec<String>, program: Vec<String>) -> ExitCode {
    let mut writable = None;
    let mut runnable = vec!["/usr".into()];
    for word in &allowed {
        match word.strip_prefix("writable=") {
            Some(directory) => writable.get_or_insert_with(Vec::new).push(directory.into()),
            None if word.starts_with("runnable=") => runnable.push(word[9..].into()),
            None if word == "files" => writable = writable.or(Some(Vec::new())),
            None => {}
        }
    }
    let lingers = allowed.iter().any(|word| word == "lingers");
    let judge = move |act: &Act| {
        let verdict = judged(&allowed, act);
        for word in &allowed {
            if let Some(path) = word.strip_prefix("log=") {
                let line = format!(
                    "{} {} {:?} {:?} {:?} {:?} {:?}\n",
                    act.who.pid,
                    act.who.started,
                    act.who.arguments,
                    act.doing,
                    act.transport,
                    act.target,
                    verdict
                );
                let file = OpenOptions::new().append(true).create(true).open(path);
                file.unwrap().write_all(line.as_bytes()).unwrap();
            }
        }
        verdict
    };
    let plan = Plan {
        words: program.into_iter().map(Into::into).collect(),
        network: Network::Host,
        judging: Box::new(move |_| Ok(Judging::by(Gate::of(judge)))),
        finish: lingers.then(|| Box::new(|_| linger()) as Finish),
        writable,
        runnable,
        without_landlock: false,
        tell: |line| eprintln!("sandbox-probe: {line}"),
    };
    match run(plan) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("sandbox-probe: {error}");
            ExitCode::from(99)
        }
    }
}

fn linger() {
    use rustix::time::{ClockId, clock_gettime};
    std::thread::sleep(Duration::from_millis(300));
    let used = clock_gettime(ClockId::ProcessCPUTime);
    println!("cpu_ms={}", used.tv_sec * 1000 + used.tv_nsec / 1_000_000);
}

fn judged(allowed: &[String], act: &Act) -> Verdict {
    let target = match &act.target {
        Target::Internet(address) => address.to_string(),
        Target::Path(path) => path.display().to_string(),
        Target::Abstract(name) => format!("@{}", String::from_utf8_lossy(name)),
        _ => String::new(),
    };
    let with_transport = format!("{:?}/{target}", act.transport).to_lowercase();
    let is_allowed = allowed.iter().any(|word| match word.as_str() {
        "all" => true,
        "create" => act.doing == Doing::Create,
        "bind" => act.doing == Doing::Bind,
        "accept" => act.doing == Doing::Accept,
        "by-name" => {
            let port = target.rsplit_once(':').map(|(_, port)| port.to_string());
            act.who.arguments.last().cloned() == port
        }
        word => word == target || word == with_transport,
    });
    if is_allowed {
        Verdict::Allow
    } else {
        Verdict::Deny
    }
}
