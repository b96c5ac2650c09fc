//! `vnplug top`: what the daemon does now, on a terminal.
//!
//! ```text
//! asker (a thread: asks, says what it heard) ── State (figures, rates, where the user is) ── view (draws it)
//!                                                 ↑ keys
//! ```
//!
//! The figures are those of `vnplug stats`; the losses by stage are `vnplug_ring::counters::STAGES`.

mod asker;
mod keys;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod view;

use std::io::IsTerminal;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use self::asker::Answer;
use self::state::State;
use crate::failure::{Failure, OK, Outcome};
use crate::{out, sys, text};

/// Shows sources, ports and virtual machines with their rates and losses.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug top
  vnplug top --every 200ms

Keys: q ends it, ? shows the others. For programs there is `vnplug stats --json`.")]
pub(crate) struct Top {
    /// How often the daemon is asked
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = text::duration)]
    every: Duration,
}

impl Top {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if !out::is_terminal() || !std::io::stdin().is_terminal() {
            return Err(Failure::new(
                "top draws on a terminal, and this is none: use `vnplug stats`, or `vnplug stats --json`",
            ));
        }
        let term = std::env::var("TERM").unwrap_or_default();
        if matches!(term.as_str(), "" | "dumb") {
            return Err(Failure::new(
                "top draws on a terminal, and this one cannot (TERM is dumb or not set): use `vnplug stats`",
            ));
        }
        let heard = asker::start(socket, self.every.max(SHORTEST));
        let mut state = State::new(socket);
        state.has_colours = has_colours(&term);
        sys::catch_signals();
        sys::end_with_terminal();
        let mut terminal = ratatui::try_init()
            .map_err(|error| Failure::about("cannot draw on this terminal", error))?;
        let done = show(&mut terminal, &heard, &mut state);
        ratatui::restore();
        done.map(|()| OK)
    }
}

/// Draws what is heard and does what is typed, until the user has seen enough.
fn show(
    terminal: &mut DefaultTerminal,
    heard: &Receiver<Answer>,
    state: &mut State,
) -> Result<(), Failure> {
    let mut drawn = None;
    while sys::stop().is_none() && !state.is_over() {
        while let Ok(answer) = heard.try_recv() {
            state.heard(answer);
            drawn = None;
        }
        if drawn.is_none_or(|drawn: Instant| drawn.elapsed() >= ANEW) {
            terminal.draw(|frame| view::draw(frame, state))?;
            drawn = Some(Instant::now());
        }
        // What is typed in one go is drawn once.
        let mut patience = LOOK;
        while event::poll(patience).or_else(interrupted)? {
            if let Event::Key(key) = event::read()? {
                keys::typed(state, key);
            }
            (patience, drawn) = (Duration::ZERO, None);
        }
    }
    Ok(())
}

/// Whether colours are wanted and possible. What a terminal without them does with them differs.
fn has_colours(term: &str) -> bool {
    let is_unwanted = std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    let is_plain = ["vt1", "vt2"].iter().any(|it| term.starts_with(it))
        || ["-m", "-mono"].iter().any(|it| term.ends_with(it));
    !is_unwanted && !is_plain
}

/// A signal ends a wait early.
fn interrupted(error: std::io::Error) -> std::io::Result<bool> {
    match error.kind() {
        std::io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    }
}

/// More often than so, asking is what the daemon does.
const SHORTEST: Duration = Duration::from_millis(100);
/// How long a new answer, or a signal, waits to be seen.
const LOOK: Duration = Duration::from_millis(100);
/// After this time what nobody changed is drawn again: it says for how many seconds the daemon has not answered.
const ANEW: Duration = Duration::from_secs(1);
