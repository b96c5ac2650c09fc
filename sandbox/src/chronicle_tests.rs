//! What is written down, told and learnt of decisions.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use vnplug_testing::TestDir;

use crate::act::{Doing, Target, Transport};
use crate::ask::tests::{connect, who};
use crate::chronicle::{Chronicle, Sinks};
use crate::gate::{Gate, Setup, Verdict};
use crate::learn::Learner;
use crate::learned::By;
use crate::name::Name;
use crate::rules::{Origin, Policy, Say, file};

/// A file that can be looked at.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Paper {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone())
            .unwrap()
            .lines()
            .map(ToOwned::to_owned)
            .collect()
    }
}

fn gate(policy: Policy, learner: Option<Learner>) -> (Gate, Paper, Paper) {
    let (lines, notes) = (Paper::default(), Paper::default());
    let mut told = notes.clone();
    let sinks = Sinks {
        lines: Some(Box::new(lines.clone())),
        notes: Some(Box::new(move |note| writeln!(told, "{note}").unwrap())),
        learner,
        profile: Some("agent".to_owned()),
    };
    let chronicle = Some(Chronicle::start(sinks).unwrap());
    (
        Gate::with(Setup {
            policy,
            chronicle,
            ..Setup::default()
        }),
        lines,
        notes,
    )
}

fn judge(gate: &Gate, act: &crate::act::Act) -> Verdict {
    let (told, verdict) = std::sync::mpsc::channel();
    gate.judge(act, move |verdict| told.send(verdict).unwrap());
    verdict.recv().unwrap()
}

#[test]
fn every_decision_is_a_line_and_each_denial_says_what_would_allow_it() {
    let text = "[[rule]]\nsay = 'allow'\nto = 'example.org'\nport = 443\n[[rule]]\nsay = 'deny'\nto = '192.0.2.9'\n";
    let rules = file::parse(text, |line, _| {
        Origin::File(Arc::new("r.toml".into()), line)
    })
    .unwrap()
    .rules;
    let (gate, lines, notes) = gate(
        Policy {
            rules,
            default: Say::Ask,
            ..Policy::default()
        },
        None,
    );
    gate.learned().note(
        &Name::new("example.org").unwrap(),
        "192.0.2.1".parse().unwrap(),
        std::time::Duration::from_secs(9),
        &By::default(),
    );
    let mut hostile = connect(4, "192.0.2.3:22");
    hostile.who = who(4, "/tmp/it's\u{1b}[2J");
    for (act, expected) in [
        (connect(1, "192.0.2.1:443"), Verdict::Allow),
        (connect(1, "192.0.2.1:80"), Verdict::Deny),
        (connect(1, "192.0.2.1:80"), Verdict::Deny),
        (connect(2, "169.254.169.254:80"), Verdict::Deny),
        (connect(3, "192.0.2.9:1"), Verdict::Deny),
        (hostile, Verdict::Deny),
    ] {
        assert_eq!(judge(&gate, &act), expected);
    }
    gate.end();
    let entries: Vec<Value> = lines
        .lines()
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(entries.len(), 6);
    let of = |index: usize, keys: [&str; 3]| keys.map(|key| entries[index][key].clone());
    assert_eq!(
        of(0, ["verdict", "rule", "names"]),
        [json!("allow"), json!("r.toml:1"), json!(["example.org"])]
    );
    assert_eq!(
        of(0, ["doing", "to", "protocol"]),
        [
            json!("connect"),
            json!({"address": "192.0.2.1", "port": 443}),
            json!("tcp")
        ]
    );
    assert_eq!(
        of(1, ["verdict", "reason", "rule"]),
        [json!("deny"), json!("nobody"), Value::Null]
    );
    assert_eq!(entries[3]["reason"], "floor");
    assert!(
        entries[0]["time"].as_str().unwrap().ends_with('Z') && entries[0]["allow_with"].is_null()
    );
    // The rule that a denial names does allow it.
    for (index, act) in [
        (1, connect(1, "192.0.2.1:80")),
        (3, connect(2, "169.254.169.254:80")),
    ] {
        let text = entries[index]["allow_with"].as_str().unwrap();
        let rules = file::parse(text, |_, _| Origin::Given).unwrap().rules;
        let names = if index == 1 {
            vec![Name::new("example.org").unwrap()]
        } else {
            Vec::new()
        };
        let policy = Policy {
            rules,
            ..Policy::default()
        };
        assert_eq!(
            policy
                .decide(&act, &names, std::time::SystemTime::now())
                .say,
            Say::Allow,
            "{text}"
        );
    }
    // People are told once of the same.
    let notes = notes.lines();
    assert_eq!(notes.len(), 4, "{notes:?}");
    assert!(notes[0].contains("there is nobody to ask; to allow it: vnplug sandbox rules add --profile agent allow --program /usr/bin/curl --protocol tcp --to example.org --port 80"), "{}", notes[0]);
    assert!(
        notes[2].contains("change r.toml:5 to allow it"),
        "{}",
        notes[2]
    );
    assert!(
        notes[3].contains(r"--program '/tmp/it'\''s\x1b[2J'"),
        "{}",
        notes[3]
    );
}

#[test]
fn no_command_names_a_program_that_is_not_known() {
    let (gate, lines, notes) = gate(Policy::default(), None);
    let mut act = connect(1, "192.0.2.1:80");
    act.who = who(1, "");
    assert_eq!(judge(&gate, &act), Verdict::Deny);
    gate.end();
    let note = &notes.lines()[0];
    assert!(
        note.contains("its program is not known") && !note.contains("--program"),
        "{note}"
    );
    let entry: Value = serde_json::from_str(&lines.lines()[0]).unwrap();
    assert_eq!(entry["allow_with"], Value::Null);
}

/// On connections that were allowed by another name.
#[test]
fn a_servers_name_that_is_refused_is_written_down_with_the_rule_that_allows_it() {
    let dir = TestDir::new("sandbox-named");
    let path = dir.path("learnt.toml");
    let policy = || {
        let text = "[[rule]]\nsay = 'allow'\nto = 'ruled.org'\n\
                    [[rule]]\nsay = 'allow'\nprogram = '/usr/bin/curl'\nto = 'curls.org'\n";
        let rules = file::parse(text, |_, _| Origin::Given).unwrap().rules;
        Policy {
            rules,
            default: Say::Ask,
            ..Policy::default()
        }
    };
    let (gate, lines, notes) = gate(policy(), Some(Learner::new(path.clone())));
    let curl = connect(1, "192.0.2.1:443").who;
    let [at, floor] = ["192.0.2.1:443", "10.0.0.1:443"].map(|at| at.parse().unwrap());
    let name = |text| Name::new(text).unwrap();
    for (who, text, passes) in [
        (Some(&curl), "ruled.org", true),
        (Some(&curl), "curls.org", true),
        (None, "ruled.org", true),
        // A rule for curl says nothing of the others.
        (None, "curls.org", false),
    ] {
        assert_eq!(
            gate.judge_name(who, Transport::Tcp, at, &name(text)),
            passes,
            "{text}"
        );
    }
    let refused = [
        (Some(&curl), at, "evil.org"),
        (None, at, "evil.org"),
        (Some(&curl), floor, "evil.org"),
    ];
    for (who, to, text) in refused {
        assert!(!gate.judge_name(who, Transport::Tcp, to, &name(text)));
    }
    gate.end();
    let lines = lines.lines();
    assert_eq!(lines.len(), 4, "{lines:?}");
    for ((who, to, text), line) in refused.into_iter().zip(&lines[1..]) {
        let entry: Value = serde_json::from_str(line).unwrap();
        let [verdict, reason] = ["verdict", "reason"].map(|key| entry[key].as_str().unwrap());
        assert_eq!((verdict, reason), ("deny", "server-name"), "{line}");
        assert_eq!(entry["names"], json!([text]));
        // The rule that it names does allow it, and is one more for this program alone if that is known.
        let rule = entry["allow_with"].as_str().unwrap();
        let rules = file::parse(rule, |_, _| Origin::Given).unwrap().rules;
        let gate = Gate::new(Policy { rules, ..policy() });
        assert!(
            gate.judge_name(who, Transport::Tcp, to, &name(text)),
            "{rule}"
        );
        assert_eq!(
            gate.judge_name(None, Transport::Tcp, to, &name(text)),
            who.is_none(),
            "{rule}"
        );
    }
    let notes = notes.lines();
    let told = "it named this server by TLS where another one was allowed: no rule is about it; to allow it: vnplug \
                sandbox rules add --profile agent allow --program /usr/bin/curl --protocol tcp --to evil.org --port 443";
    assert!(notes[1].contains(told), "{}", notes[1]);
    let learnt = std::fs::read_to_string(&path).unwrap();
    assert!(learnt.contains("# to = \"evil.org\""), "{learnt}");
}

#[test]
fn what_is_learnt_is_a_profile_that_allows_just_that() {
    let dir = TestDir::new("sandbox-learn");
    let path = dir.path("learnt.toml");
    let policy = Policy {
        default: Say::Allow,
        ..Policy::default()
    };
    let (gate, _, _) = gate(policy, Some(Learner::new(path.clone())));
    let name = Name::new("example.org").unwrap();
    gate.learned().note(
        &name,
        "192.0.2.1".parse().unwrap(),
        std::time::Duration::from_secs(9),
        &By::default(),
    );
    let mut resolve = connect(1, "0.0.0.0:0");
    (resolve.doing, resolve.target) = (Doing::Resolve, Target::Name("example.org".to_owned()));
    let done = [
        resolve,
        connect(1, "192.0.2.1:443"),
        connect(2, "192.0.2.1:80"),
        connect(3, "192.0.2.8:22"),
    ];
    for act in &done {
        assert_eq!(judge(&gate, act), Verdict::Allow);
    }
    assert_eq!(judge(&gate, &connect(1, "10.0.0.1:22")), Verdict::Deny);
    gate.end();
    let text = std::fs::read_to_string(&path).unwrap();
    let sheet = file::read(&path).unwrap();
    assert_eq!(
        (sheet.default, sheet.rules.len()),
        (Some(Say::Ask), 2),
        "{text}"
    );
    assert!(
        text.contains("# to = \"10.0.0.1\"") && text.contains("port = [80, 443]"),
        "{text}"
    );
    let policy = Policy {
        rules: sheet.rules,
        default: Say::Deny,
        ..Policy::default()
    };
    let say = |act| {
        policy
            .decide(
                act,
                std::slice::from_ref(&name),
                std::time::SystemTime::now(),
            )
            .say
    };
    assert!(done[..3].iter().all(|act| say(act) == Say::Allow));
    assert_eq!(
        policy
            .decide(&done[3], &[], std::time::SystemTime::now())
            .say,
        Say::Allow
    );
    assert_eq!(say(&connect(1, "192.0.2.1:8080")), Say::Deny);
    assert_eq!(
        policy
            .decide(
                &connect(3, "192.0.2.8:23"),
                &[],
                std::time::SystemTime::now()
            )
            .say,
        Say::Deny
    );
}

#[test]
fn what_cannot_be_written_is_counted() {
    /// A disk that takes its time.
    struct Slow(Paper, Arc<Mutex<()>>);
    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            drop(self.1.lock().unwrap());
            self.0.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (paper, busy) = (Paper::default(), Arc::new(Mutex::new(())));
    let sinks = Sinks {
        lines: Some(Box::new(Slow(paper.clone(), busy.clone()))),
        ..Sinks::default()
    };
    let chronicle = Some(Chronicle::start(sinks).unwrap());
    let gate = Gate::with(Setup {
        chronicle,
        ..Setup::default()
    });
    let held = busy.lock().unwrap();
    let count = 10_000;
    for pid in 0..count {
        judge(&gate, &connect(pid, "192.0.2.1:1"));
    }
    drop(held);
    gate.end();
    let entries: Vec<Value> = paper
        .lines()
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let lost: u64 = entries
        .iter()
        .filter_map(|entry| entry["not_written"].as_u64())
        .sum();
    let written = u64::try_from(
        entries
            .iter()
            .filter(|entry| entry["verdict"].is_string())
            .count(),
    )
    .unwrap();
    assert!(
        lost > 0 && written + lost == u64::from(count),
        "{written} {lost}"
    );
}
