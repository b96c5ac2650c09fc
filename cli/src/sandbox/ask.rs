//! `vnplug sandbox ask`: answers the questions of a sandbox from another terminal, or by notifications.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use vnplug_os::socket::connect_within;
use vnplug_sandbox::ask::{Answer, Life, socket, terminal};

use crate::failure::{self, Failure, Outcome};
use crate::out;

/// Answer the questions of a sandbox, from anywhere but inside
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug sandbox --ask socket -- my-agent     # in one terminal
  vnplug sandbox ask                          # in another

The sandbox must have been started with --ask socket (or --ask terminal,socket). The socket's lines of JSON are
described in docs/sandbox.md.")]
pub(super) struct Ask {
    /// The sandbox, by the process id of its supervisor or by its socket; the only one, if there is one
    #[arg(value_name = "PID|SOCKET")]
    sandbox: Option<String>,
    /// Pass the lines of JSON on, between the sandbox and standard input and output
    #[arg(long)]
    json: bool,
    /// Ask by notifications of the desktop (notify-send)
    #[arg(long, conflicts_with = "json")]
    notify: bool,
}

impl Ask {
    pub(super) fn run(self) -> Outcome {
        let path = self.socket()?;
        let stream = connect_within(&path, PATIENCE)
            .map_err(|error| Failure::about(path.display(), error))?;
        let lines = BufReader::new(stream.try_clone()?).lines();
        // The oldest question is what an answer without a number is for.
        let open = Arc::new(Mutex::new(BTreeMap::new()));
        if !self.notify {
            let (stream, open, json) = (stream.try_clone()?, open.clone(), self.json);
            thread::spawn(move || {
                // The sandbox or its answerer is gone: the other thread sees it.
                let _ = answer(&stream, &open, json);
            });
        }
        for line in lines {
            let line = line?;
            let value: Value = serde_json::from_str(&line).map_err(|error| {
                Failure::new(format!("{} is no sandbox: {error}", path.display()))
            })?;
            let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(id) = value["ask"]["id"].as_u64() {
                open.insert(id, ());
            }
            if let Some(id) = value["settled"]["id"].as_u64() {
                open.remove(&id);
            }
            drop(open);
            if self.json {
                out::raw(&(line + "\n"))?;
                continue;
            }
            show(&value)?;
            if self.notify && value.get("ask").is_some() {
                let stream = stream.try_clone()?;
                thread::spawn(move || {
                    if let Err(error) = notify(&value["ask"], &stream) {
                        out::note(&format!("notify-send: {error}"));
                    }
                });
            }
        }
        Ok(failure::OK)
    }

    fn socket(&self) -> Result<PathBuf, Failure> {
        let directory = socket::directory()?;
        match self.sandbox.as_deref() {
            Some(path) if path.contains('/') => return Ok(path.into()),
            Some(pid) => return Ok(directory.join(format!("{pid}.sock"))),
            None => {}
        }
        let mut found: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            // A socket that nobody serves was left by a sandbox that was killed.
            if path
                .extension()
                .is_some_and(|extension| extension == "sock")
                && listens(&path)
            {
                found.push(path);
            }
        }
        found.sort();
        match found.as_slice() {
            [one] => Ok(one.clone()),
            [] => Err(Failure::new(
                "no sandbox asks at a socket: start one with --ask socket",
            )),
            several => {
                let pid = |path: &PathBuf| {
                    Path::new(path)
                        .file_stem()
                        .map(|stem| stem.to_string_lossy().into_owned())
                };
                let pids: Vec<String> = several.iter().filter_map(pid).collect();
                Err(Failure::new(format!(
                    "there are several sandboxes, name one: {}",
                    pids.join(", ")
                )))
            }
        }
    }
}

/// Shows what the sandbox says.
fn show(value: &Value) -> Result<(), Failure> {
    if let Some(ask) = value.get("ask") {
        for line in ask["text"].as_array().into_iter().flatten() {
            out::line(line.as_str().unwrap_or_default())?;
        }
        out::line(&format!("  {}", terminal::HELP))?;
    } else if let Some(settled) = value.get("settled") {
        let verdict = if settled["say"] == "allow" {
            "allowed"
        } else {
            "refused"
        };
        out::line(&format!(
            "question {}: {verdict} by {}",
            settled["id"],
            settled["by"].as_str().unwrap_or_default()
        ))?;
    } else if let Some(error) = value["error"].as_str() {
        out::note(error);
    } else if let Some(command) = value["command"].as_array() {
        let words: Vec<&str> = command.iter().filter_map(Value::as_str).collect();
        out::line(&format!(
            "sandbox {} runs: {}",
            value["pid"],
            words.join(" ")
        ))?;
    }
    Ok(())
}

/// Sends what is typed.
fn answer(mut stream: &UnixStream, open: &Mutex<BTreeMap<u64, ()>>, json: bool) -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        if json {
            writeln!(stream, "{line}")?;
            continue;
        }
        let oldest = open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keys()
            .next()
            .copied();
        match terminal::parse(&line) {
            Ok((id, answer)) => match id.or(oldest) {
                Some(id) => writeln!(stream, "{}", written(id, answer))?,
                None => out::note("no question is open"),
            },
            Err(why) => out::note(&why),
        }
    }
    Ok(())
}

/// An answer as the socket takes it.
fn written(id: u64, answer: Answer) -> Value {
    let life = match answer.life {
        Life::Always | Life::Until(_) => "always",
        Life::Session => "session",
        Life::Once => "once",
    };
    let say = if answer.allow { "allow" } else { "deny" };
    json!({"answer": {"id": id, "say": say, "for": life, "offer": answer.offer}})
}

/// Shows a question as a notification, and sends what is chosen there. One that is closed is no answer.
fn notify(ask: &Value, mut stream: &UnixStream) -> io::Result<()> {
    let lines: Vec<&str> = ask["text"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let Some((title, rest)) = lines.split_first() else {
        return Ok(());
    };
    let wait = ask["wait_ms"].as_u64().unwrap_or(0).to_string();
    let mut command = Command::new("notify-send");
    command.args([
        "--app-name=vnplug",
        "--urgency=critical",
        "--expire-time",
        &wait,
        "--wait",
    ]);
    for (action, label) in [
        ("y", "Allow once"),
        ("s", "Allow this session"),
        ("a", "Allow always"),
        ("n", "Refuse"),
    ] {
        command.arg(format!("--action={action}={label}"));
    }
    command.args(["--", title, &body(&rest.join("\n"))]);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let chosen = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if let (Ok((_, answer)), Some(id)) = (terminal::parse(&chosen), ask["id"].as_u64()) {
        writeln!(stream, "{}", written(id, answer))?;
    }
    Ok(())
}

/// Text as the body of a notification: there are marks of HTML in one, and notify-send reads escapes of C in it
/// before. A title has neither.
fn body(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\\', "\\\\")
}

/// Whether somebody listens there; who hangs does, too.
fn listens(path: &Path) -> bool {
    match connect_within(path, Duration::ZERO) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

/// How long a sandbox may take to let somebody in.
const PATIENCE: Duration = Duration::from_secs(2);
