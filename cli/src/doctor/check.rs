//! What a check is, and how checks run: side by side, each after what it needs.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::machine::Machine;

/// How a thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ok,
    /// It works, and costs something or may come to.
    Warn,
    /// Something does not work.
    Fail,
    /// Not looked at; the text says why.
    Skipped,
}

/// Something that is safe to mend.
pub(super) type Fix = fn(&Machine) -> Result<(), String>;

/// What a check found.
#[derive(Debug, Clone)]
pub(super) struct Finding {
    pub(super) state: State,
    pub(super) text: String,
    /// A command, or what to do.
    pub(super) cure: Option<String>,
    pub(super) fix: Option<Fix>,
}

impl Finding {
    fn new(state: State, text: impl Into<String>) -> Self {
        Self {
            state,
            text: text.into(),
            cure: None,
            fix: None,
        }
    }

    pub(super) fn ok(text: impl Into<String>) -> Self {
        Self::new(State::Ok, text)
    }

    pub(super) fn skipped(text: impl Into<String>) -> Self {
        Self::new(State::Skipped, text)
    }

    /// It costs something; `cure` changes that.
    pub(super) fn warn(text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self {
            cure: Some(cure.into()),
            ..Self::new(State::Warn, text)
        }
    }

    /// It does not work until `cure`.
    pub(super) fn fail(text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self {
            cure: Some(cure.into()),
            ..Self::new(State::Fail, text)
        }
    }

    /// `--fix` may mend it so.
    pub(super) fn fixed_by(self, fix: Fix) -> Self {
        Self {
            fix: Some(fix),
            ..self
        }
    }
}

/// Looks at one thing.
pub(super) struct Check {
    /// In lower case with hyphens; checks of an interface end with its name.
    pub(super) name: String,
    /// Names of checks without whose success it says nothing.
    pub(super) needs: Vec<String>,
    pub(super) look: Box<dyn FnOnce(&Machine) -> Finding + Send>,
}

impl Check {
    pub(super) fn new(
        name: impl Into<String>,
        look: impl FnOnce(&Machine) -> Finding + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            needs: Vec::new(),
            look: Box::new(look),
        }
    }

    pub(super) fn after(mut self, name: impl Into<String>) -> Self {
        self.needs.push(name.into());
        self
    }
}

/// A check that was run, or skipped.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) name: String,
    pub(super) finding: Finding,
}

/// Runs all, and returns them in the order in which they were given. A need that nobody meets, or that failed,
/// skips who has it; nobody waits for one that does not end within `limit`.
pub(super) fn run(machine: &Machine, checks: Vec<Check>, limit: Duration) -> Vec<Checked> {
    let order: Vec<String> = checks.iter().map(|it| it.name.clone()).collect();
    let mut done = BTreeMap::<String, Finding>::new();
    let mut waiting = checks;
    while !waiting.is_empty() {
        let pending: Vec<_> = waiting.iter().map(|it| it.name.clone()).collect();
        let is_ready = |it: &Check| !it.needs.iter().any(|need| pending.contains(need));
        let (mut ready, later): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_ready);
        if ready.is_empty() {
            // They need each other: each says so below, for its need is not done.
            ready = later;
            waiting = Vec::new();
        } else {
            waiting = later;
        }
        let is_met = |need: &String| {
            let met = done.get(need).map(|it| it.state);
            matches!(met, Some(State::Ok | State::Warn))
        };
        let until = Instant::now() + limit;
        let running = ready.into_iter().map(|check| {
            let unmet = check.needs.iter().find(|need| !is_met(need)).cloned();
            let awaited = match unmet {
                Some(need) => Err(Finding::skipped(format!("needs {need}"))),
                None => {
                    let (found, awaited) = sync_channel(1);
                    let (machine, look) = (machine.clone(), check.look);
                    // Left alone if it hangs: the process ends without it. Without a receiver nobody wants to know.
                    std::thread::spawn(move || found.send(look(&machine)).ok());
                    Ok(awaited)
                }
            };
            (check.name, awaited)
        });
        let running: Vec<_> = running.collect();
        let found = running.into_iter().map(|(name, awaited)| {
            let finding = awaited.and_then(|awaited| {
                let left = until.saturating_duration_since(Instant::now());
                awaited.recv_timeout(left).map_err(|error| match error {
                    RecvTimeoutError::Timeout => Finding::warn(
                        format!("no answer within {} s", limit.as_secs_f32()),
                        "a part of this machine hangs: look at `dmesg`, and at processes in state D (`ps`)",
                    ),
                    RecvTimeoutError::Disconnected => {
                        Finding::skipped("the check panicked, which is a bug of it")
                    }
                })
            });
            (name, finding.unwrap_or_else(|other| other))
        });
        done.extend(found.collect::<Vec<_>>());
    }
    let results = order.into_iter().filter_map(|name| {
        let finding = done.remove(&name)?;
        Some(Checked { name, finding })
    });
    results.collect()
}
