//! What the command line says, and what is said about it.

use crate::row::{Plan, Result};
use crate::rows;

/// The exit code for a command line that is not understood.
pub(crate) const WRONG: u8 = 2;

/// What `--help` prints: all there is to choose from.
pub(crate) fn help() -> String {
    format!("{USAGE}\nRows:\n{}", listed())
}

/// Which rows a command line and the environment name, and how they are measured.
///
/// # Errors
/// What is not understood, and what there is instead.
pub(crate) fn rows(mut words: Vec<String>) -> Result<(Vec<String>, Plan)> {
    let mut plan = Plan::from_env()?;
    if let Some(at) = words.iter().position(|word| word == "--interface") {
        let name = words
            .drain(at..(at + 2).min(words.len()))
            .nth(1)
            .ok_or("--interface needs a NAME")?;
        plan.interface = Some(name);
    }
    let named = std::env::var("ROWS").unwrap_or_default();
    words.extend(named.split_whitespace().map(str::to_owned));
    words.iter().try_for_each(|word| known(word))?;
    Ok((words, plan))
}

/// An error if this is no beginning of a row's name.
fn known(word: &str) -> Result<()> {
    if word.starts_with('-') {
        return Err(format!("no such option: {word:?}; see vnplug-bench --help").into());
    }
    if rows::all().any(|row| row.name.starts_with(word)) {
        return Ok(());
    }
    Err(format!("no row begins with {word:?}; there are\n{}", listed()).into())
}

fn listed() -> String {
    let line = |row: &crate::row::Row| format!("  {:<20} {}\n", row.name, row.about);
    rows::all().map(line).collect()
}

const USAGE: &str = "\
Measures vNPlug and its peers in turns on this machine. Needs root.

Usage:
  vnplug-bench [ROW…]              rows whose names begin with one of the words; all without words
  vnplug-bench --interface NAME    readers on a real interface; you provide the traffic
  vnplug-bench plot FILE           draws the plots of a results.json again
  vnplug-bench publish FILE DOCUMENT WHEN [PART]
                                   puts its tables and plots into a document, or into its part of that name
  vnplug-bench --help, -h          this text

Environment:
  ROWS=\"handoff fanout\"           further words, as above
  ROUNDS=5                         rounds of ours and the peer's in turns
  SECONDS=1.0                      for each measurement
  OUT=target/bench/results.json    the figures; a table, plots and a page of them lie beside it
  DISK=target/bench/disk           where recordings are written, and removed again
  IFACE=NAME                       as --interface; IFACE_SOURCE names another source on it

Exit codes:
  0  all rows were measured, whether they met their goals or not
  1  a row failed, or the bench was interrupted; the others' figures are written
  2  the command line or the environment is not understood; nothing was done
";
