//! A sandbox that asks at its socket, and a front-end that answers as a test or a demo says.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use serde_json::{Value, json};
use vnplug_testing::until;

use crate::raw::children;
use crate::station::Running;
use crate::user::USER;
use crate::{Lab, LabError, Netns, Result};

/// A program in a sandbox of the ordinary user's, and who answers its questions.
#[derive(Debug)]
pub struct Asking {
    sandbox: Running,
    front: Option<BufReader<UnixStream>>,
    /// The socket, for other front-ends.
    pub socket: PathBuf,
}

/// What is answered to a question.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// `allow`, `deny`.
    pub say: &'static str,
    /// `once`, `session`, `always`.
    pub life: &'static str,
    /// Which of the rules that are offered.
    pub offer: usize,
}

/// What a sandbox did, from its beginning to its end.
#[derive(Debug)]
pub struct Asked {
    /// What it asked, as the protocol of front-ends has it (docs/sandbox-rules.md).
    pub questions: Vec<Value>,
    /// What the program printed.
    pub output: String,
    /// What the program and the sandbox said on standard error.
    pub errors: String,
    /// How it ended.
    pub status: ExitStatus,
}

impl Asking {
    /// Starts `vnplug sandbox` with these options and the program, at home in `home`, and connects to it;
    /// `vnplug` is the command without arguments of the sandbox, `name` that of files of the lab.
    ///
    /// # Errors
    /// The lab's.
    ///
    /// # Panics
    /// If the sandbox neither asks at its socket nor ends.
    pub fn start(
        mut vnplug: Command,
        (lab, netns, name): (&Lab, Option<&Netns>, &str),
        home: &Path,
        options: &[&str],
        words: &[&str],
    ) -> Result<Self> {
        vnplug.args(["sandbox", "--ask", "socket"]).args(options);
        vnplug.arg("--").args(words).current_dir(home);
        at_home(&mut vnplug, home);
        let start = || Running::start(vnplug, lab, name);
        let mut sandbox = match netns {
            Some(netns) => netns.enter(start)??,
            None => start()?,
        };
        let pid = sandbox.pid();
        let look = || {
            let supervisor = children(pid).first().map(u32::to_string);
            let supervisor = supervisor.unwrap_or_default();
            let socket = home.join(format!("vnplug/sandbox/{supervisor}.sock"));
            let stream = UnixStream::connect(&socket);
            (stream.ok(), socket, sandbox.status().is_some())
        };
        let (stream, socket, _) = until(
            "the sandbox asks at its socket, or ends",
            look,
            |(stream, _, ended)| stream.is_some() || *ended,
        );
        let front = stream.map(BufReader::new);
        Ok(Self {
            sandbox,
            front,
            socket,
        })
    }

    /// The next question or settlement; `None` when the sandbox ends.
    pub fn event(&mut self) -> Option<Value> {
        let front = self.front.as_mut()?;
        loop {
            let mut line = String::new();
            front.read_line(&mut line).ok().filter(|read| *read > 0)?;
            let value: Value = serde_json::from_str(&line).unwrap_or_default();
            if ["ask", "settled", "error"]
                .iter()
                .any(|it| value.get(it).is_some())
            {
                return Some(value);
            }
        }
    }

    /// Answers a question.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub fn reply(&mut self, question: &Value, reply: Reply) -> Result<()> {
        let Reply { say, life, offer } = reply;
        let id = &question["id"];
        let answer = json!({"answer": {"id": id, "say": say, "for": life, "offer": offer}});
        let Some(front) = &mut self.front else {
            return Ok(());
        };
        let sent = writeln!(front.get_mut(), "{answer}");
        sent.map_err(LabError::io("answer a sandbox"))
    }

    /// What the program printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.sandbox.output()
    }

    /// Answers every question as `reply` says, or not at all, until the sandbox ends.
    ///
    /// # Errors
    /// The sandbox is gone before it has its answer.
    ///
    /// # Panics
    /// If it does not end.
    pub fn finish(mut self, mut reply: impl FnMut(&Value) -> Option<Reply>) -> Result<Asked> {
        let mut questions: Vec<Value> = Vec::new();
        while let Some(mut event) = self.event() {
            if let Some(reply) = event.get("ask").and_then(&mut reply) {
                self.reply(&event["ask"], reply)?;
            }
            if let Some(error) = event["error"].as_str() {
                return Err(LabError::Protocol(format!("the sandbox says {error}")));
            }
            questions.extend(event.get_mut("ask").map(Value::take));
        }
        let sandbox = &mut self.sandbox;
        let status = until("the sandbox ends", || sandbox.status(), Option::is_some);
        Ok(Asked {
            questions,
            output: self.sandbox.output(),
            errors: self.sandbox.errors(),
            status: status.unwrap_or_default(),
        })
    }
}

impl Asked {
    /// What each question is about, in one line: `curl resolve tcp web.test`, `ping connect icmp 192.0.2.1:0`.
    #[must_use]
    pub fn asked(&self) -> Vec<String> {
        let line = |question: &Value| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let program = text(&question["process"]["program"]);
            let to = &question["to"];
            let to = match (to["name"].as_str(), to["address"].as_str()) {
                (Some(name), _) => name.to_owned(),
                (_, Some(address)) => format!("{address}:{}", to["port"]),
                _ => to.to_string(),
            };
            let name = program.rsplit('/').next().unwrap_or_default();
            let [doing, protocol] = ["doing", "protocol"].map(|it| text(&question[it]));
            format!("{name} {doing} {protocol} {to}")
        };
        self.questions.iter().map(line).collect()
    }
}

/// Runs a command as the ordinary user, whose files and sockets are all in `home`.
pub fn at_home(command: &mut Command, home: &Path) {
    command.uid(USER).gid(USER).env("HOME", home);
    command.env("XDG_RUNTIME_DIR", home);
    command.env("XDG_CONFIG_HOME", home.join("config"));
}

/// A home for the ordinary user in the lab.
///
/// # Errors
/// The system's.
pub fn home(lab: &Lab, name: &str) -> Result<PathBuf> {
    let home = lab.dir().join(name);
    let made = fs::create_dir(&home)
        .and_then(|()| fs::set_permissions(lab.dir(), Permissions::from_mode(0o755)))
        .and_then(|()| std::os::unix::fs::chown(&home, Some(USER), Some(USER)));
    made.map_err(LabError::io(format!("make {}", home.display())))?;
    Ok(home)
}
