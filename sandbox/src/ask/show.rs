//! How acts, rules and questions are shown: as sentences for people, escaped, and as JSON.

use serde_json::{Value, json};
use vnplug_ring::text::escape;

use crate::act::{Act, Doing, Target, Who};
use crate::ask::Question;
use crate::name::Name;
use crate::rules::rule::Rule;
use crate::rules::{Direction, Place, Say, edit, words};

/// `curl[123] (from make < bash)`: files that run, not what a process says of itself.
pub fn process(who: &Who) -> String {
    let file = |path: &std::path::Path| {
        let name = path
            .file_name()
            .unwrap_or(path.as_os_str())
            .to_string_lossy()
            .into_owned();
        if name.is_empty() {
            "unknown".to_owned()
        } else {
            short(&name)
        }
    };
    let mut text = format!("{}[{}]", file(&who.program), who.pid);
    if !who.ancestors.is_empty() {
        let parents: Vec<String> = who
            .ancestors
            .iter()
            .take(4)
            .map(|parent| file(&parent.program))
            .collect();
        let more = if who.ancestors.len() > 4 {
            " < …"
        } else {
            ""
        };
        text += &format!(" (from {}{more})", parents.join(" < "));
    }
    escape(&text)
}

/// What it does, as the end of "… wants to": `connect to example.org (192.0.2.1) port 443 by tcp`.
pub fn doing(act: &Act, names: &[Name]) -> String {
    let other = match &act.target {
        Target::Internet(to) => {
            let port = if to.port() == 0 {
                String::new()
            } else {
                format!(" port {}", to.port())
            };
            let address = to.ip().to_canonical();
            match names.first() {
                Some(name) => format!("{name} ({address}){port}"),
                None => format!("{address}{port}"),
            }
        }
        Target::Name(name) => name.clone(),
        Target::Path(path) => path.to_string_lossy().into_owned(),
        Target::Abstract(name) => format!("@{}", String::from_utf8_lossy(name)),
        Target::Vsock { cid, port } => format!("vsock {cid}, port {port}"),
        Target::Nobody => String::new(),
    };
    let transport = act.transport;
    let text = match act.doing {
        Doing::Create => format!("make a socket of {transport}"),
        Doing::Connect => format!("connect to {} by {transport}", short(&other)),
        Doing::Bind => format!("listen on {} by {transport}", short(&other)),
        Doing::Accept => format!("take a connection of {} by {transport}", short(&other)),
        Doing::Resolve => format!("look up {}", short(&other)),
        Doing::Write => format!("change the file {}", short(&other)),
        Doing::Execute => format!("run {}", short(&other)),
    };
    escape(&text)
}

/// A rule as a sentence: `/usr/bin/curl to example.org, port 443, tcp`.
pub fn rule(rule: &Rule) -> String {
    let join = |words: Vec<String>| words.join(" or ");
    let mut text = match (&rule.program, rule.sha256) {
        (Some(program), _) => short(&program.to_string()),
        (None, Some(hash)) => format!("the program with SHA-256 {}…", &words::hex(&hash)[..12]),
        (None, None) => "any program".to_owned(),
    };
    if let Some(arguments) = &rule.arguments {
        text += &format!(" with arguments {}", short(&arguments.to_string()));
    }
    if let Some(parent) = &rule.parent {
        text += &format!(" below {}", short(&parent.to_string()));
    }
    let (verb, anywhere) = match rule.direction {
        Direction::Out => ("to", "anywhere"),
        Direction::Listen => ("listens on", "any address"),
        Direction::Accept => ("is called by", "anybody"),
        Direction::Write => ("changes", "any file"),
        Direction::Execute => ("runs", "anything"),
    };
    let to = join(
        rule.to
            .iter()
            .map(|place| short(&place.to_string()))
            .collect(),
    );
    text += &format!(" {verb} {}", if to.is_empty() { anywhere } else { &to });
    if !rule.ports.is_empty() {
        let ports = rule
            .ports
            .iter()
            .map(|range| match (range.start(), range.end()) {
                (low, high) if low == high => low.to_string(),
                (low, high) => format!("{low}-{high}"),
            });
        text += &format!(", port {}", join(ports.collect()));
    }
    if !rule.protocols.is_empty() {
        text += &format!(
            ", {}",
            join(rule.protocols.iter().map(ToString::to_string).collect())
        );
    }
    if rule.local {
        text += ", also at addresses of the floor";
    }
    if let Some(until) = rule.until {
        text += &format!(", until {}", edit::written_time(until));
    }
    escape(&text)
}

/// The command that makes this rule, as a shell takes it.
pub fn command(rule: &Rule, profile: Option<&str>) -> String {
    let mut words = vec!["vnplug sandbox rules add".to_owned()];
    if let Some(profile) = profile {
        words.push(format!("--profile {}", quoted(profile)));
    }
    words.push(rule.say.to_string());
    let mut put = |option: &str, text: String| words.push(format!("--{option} {}", quoted(&text)));
    if let Some(program) = &rule.program {
        put("program", program.to_string());
    }
    if let Some(hash) = rule.sha256 {
        put("sha256", words::hex(&hash));
    }
    for protocol in &rule.protocols {
        put("protocol", protocol.to_string());
    }
    for place in &rule.to {
        put("to", place.to_string());
    }
    for range in &rule.ports {
        let (low, high) = (range.start(), range.end());
        put(
            "port",
            if low == high {
                low.to_string()
            } else {
                format!("{low}-{high}")
            },
        );
    }
    if rule.direction != Direction::Out {
        put("direction", rule.direction.to_string());
    }
    if rule.local {
        words.push("--local".to_owned());
    }
    escape(&words.join(" "))
}

/// The rule that would allow an act: what an answer would make, and on the floor the one that names the address.
pub fn allowing(act: &Act, names: &[Name]) -> Rule {
    let (mut offers, _) = super::offers(act, names);
    let mut rule = offers.swap_remove(0);
    rule.say = Say::Allow;
    rule
}

/// A question for people, one line each.
pub fn question(question: &Question) -> Vec<String> {
    let act = &question.act;
    let mut lines = vec![format!(
        "question {}: {} wants to {}",
        question.id,
        process(&act.who),
        doing(act, &question.names)
    )];
    let words: Vec<String> = act.who.arguments.iter().map(|word| quoted(word)).collect();
    let program = act.who.program.to_string_lossy();
    lines.push(escape(&format!(
        "  it runs {}, started as: {}",
        short(&program),
        short(&words.join(" "))
    )));
    if question.names.len() > 1 {
        let others: Vec<&str> = question.names[1..]
            .iter()
            .take(4)
            .map(Name::as_str)
            .collect();
        lines.push(format!(
            "  the address was given for {}, too",
            others.join(", ")
        ));
    }
    let (allowed, denied) = question.before;
    lines.push(format!(
        "  before: {allowed} acts of this process allowed, {denied} refused"
    ));
    if question.lasts {
        for (index, offer) in question.offers.iter().enumerate() {
            lines.push(format!("  {}: {}", index + 1, rule(offer)));
        }
    } else {
        lines.push(
            "  an answer holds for this one act: no answer opens such a place for longer"
                .to_owned(),
        );
    }
    lines
}

/// A question as JSON; `text` has the lines for people.
pub fn question_json(asked: &Question) -> Value {
    let wait = asked
        .deadline
        .saturating_duration_since(std::time::Instant::now());
    let offers: Vec<Value> = asked
        .offers
        .iter()
        .map(|offer| json!({"text": rule(offer), "rule": edit::write(offer)}))
        .collect();
    let (allowed, denied) = asked.before;
    let mut object = act_json(&asked.act, &asked.names);
    object["id"] = json!(asked.id);
    object["before"] = json!({"allowed": allowed, "denied": denied});
    object["offers"] = json!(offers);
    object["lasts"] = json!(asked.lasts);
    object["wait_ms"] = json!(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    object["text"] = json!(question(asked));
    object
}

/// An act as JSON.
pub fn act_json(act: &Act, names: &[Name]) -> Value {
    let to = match &act.target {
        Target::Internet(to) => {
            json!({"address": to.ip().to_canonical().to_string(), "port": to.port()})
        }
        Target::Name(name) => json!({"name": name}),
        Target::Path(path) => json!({"path": path.to_string_lossy()}),
        Target::Abstract(name) => json!({"abstract": String::from_utf8_lossy(name)}),
        Target::Vsock { cid, port } => json!({"cid": cid, "port": port}),
        Target::Nobody => Value::Null,
    };
    let doing = match act.doing {
        Doing::Create => "create",
        Doing::Connect => "connect",
        Doing::Bind => "listen",
        Doing::Accept => "accept",
        Doing::Resolve => "resolve",
        Doing::Write => "write",
        Doing::Execute => "execute",
    };
    let names: Vec<&str> = names.iter().map(Name::as_str).collect();
    json!({
        "doing": doing,
        "protocol": act.transport.to_string(),
        "to": to,
        "names": names,
        "process": process_json(&act.who),
    })
}

fn process_json(who: &Who) -> Value {
    let ancestor = |parent: &crate::act::Ancestor| json!({"pid": parent.pid, "program": parent.program.to_string_lossy()});
    json!({
        "pid": who.pid,
        "started": who.started,
        "program": who.program.to_string_lossy(),
        "sha256": who.hash.map(|hash| words::hex(&hash)),
        "arguments": who.arguments,
        "ancestors": who.ancestors.iter().map(ancestor).collect::<Vec<_>>(),
    })
}

/// A rule as JSON.
pub fn rule_json(rule: &Rule) -> Value {
    let words = |places: Vec<String>| {
        if places.is_empty() {
            Value::Null
        } else {
            json!(places)
        }
    };
    json!({
        "say": rule.say.to_string(),
        "program": rule.program.as_ref().map(ToString::to_string),
        "sha256": rule.sha256.map(|hash| words::hex(&hash)),
        "arguments": rule.arguments.as_ref().map(ToString::to_string),
        "parent": rule.parent.as_ref().map(ToString::to_string),
        "protocol": words(rule.protocols.iter().map(ToString::to_string).collect()),
        "to": words(rule.to.iter().map(Place::to_string).collect()),
        "port": words(rule.ports.iter().map(|range| match (range.start(), range.end()) {
            (low, high) if low == high => low.to_string(),
            (low, high) => format!("{low}-{high}"),
        }).collect()),
        "direction": rule.direction.to_string(),
        "local": rule.local,
        "until": rule.until.map(edit::written_time),
        "note": rule.note,
        "origin": rule.origin.to_string(),
        "text": self::rule(rule),
    })
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Nobody reads more of it, and a program may have written it to push the question off the screen.
fn short(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

const SHOWN: usize = 160;
