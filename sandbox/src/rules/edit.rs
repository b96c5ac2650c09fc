//! Changes to files of rules, which keep all else in them: comments, order, blank lines.

use std::fs;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};
use toml_edit::{DocumentMut, Item, TomlError, Value};
use vnplug_ring::units;

use crate::rules::file::{BadFile, parse_file, text};
use crate::rules::glob::Glob;
use crate::rules::rule::{Direction, Origin, Rule};
use crate::rules::words;

/// The rule as it stands in a file.
pub fn write(rule: &Rule) -> String {
    let mut lines = vec!["[[rule]]".to_owned()];
    let mut put = |key: &str, value: String| lines.push(format!("{key} = {value}"));
    let quoted = |text: &str| Value::from(text).to_string().trim().to_owned();
    let several = |words: Vec<String>| match words.as_slice() {
        [one] => one.clone(),
        _ => format!("[{}]", words.join(", ")),
    };
    put("say", quoted(&rule.say.to_string()));
    let glob = |glob: &Option<Glob>| glob.as_ref().map(ToString::to_string);
    for (key, text) in [
        ("program", glob(&rule.program)),
        ("sha256", rule.sha256.map(|hash| words::hex(&hash))),
        ("arguments", glob(&rule.arguments)),
        ("parent", glob(&rule.parent)),
    ] {
        if let Some(text) = text {
            put(key, quoted(&text));
        }
    }
    if !rule.protocols.is_empty() {
        put(
            "protocol",
            several(
                rule.protocols
                    .iter()
                    .map(|word| quoted(&word.to_string()))
                    .collect(),
            ),
        );
    }
    if !rule.to.is_empty() {
        put(
            "to",
            several(
                rule.to
                    .iter()
                    .map(|place| quoted(&place.to_string()))
                    .collect(),
            ),
        );
    }
    if !rule.ports.is_empty() {
        let port = |range: &RangeInclusive<u16>| match (range.start(), range.end()) {
            (low, high) if low == high => low.to_string(),
            (low, high) => quoted(&format!("{low}-{high}")),
        };
        put("port", several(rule.ports.iter().map(port).collect()));
    }
    if rule.direction != Direction::Out {
        put("direction", quoted(&rule.direction.to_string()));
    }
    if rule.local {
        put("local", "true".to_owned());
    }
    if let Some(until) = rule.until {
        put("until", written_time(until));
    }
    if let Some(note) = &rule.note {
        put("note", quoted(note));
    }
    lines.join("\n") + "\n"
}

/// A time as TOML and RFC 3339 write it, in UTC and whole seconds.
pub fn written_time(time: SystemTime) -> String {
    let seconds = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let (year, month, day) = units::civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Where a new rule goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Before all others: it decides what they would.
    First,
    /// Behind all others: they decide first.
    Last,
}

/// Adds a rule to a file, which is made if it is not there. All else in the file stays as it is, comments included,
/// and readers see the whole file as it was or as it is.
///
/// # Errors
/// [`BadFile`] if the file has errors of its own, or cannot be written.
pub fn add(path: &Path, rule: &Rule, place: Where) -> Result<(), BadFile> {
    let _alone = alone(path)?;
    let before = text(path)?.unwrap_or_default();
    let sheet = parse_file(path, &before)?;
    let mut after = before.clone();
    match (place, sheet.rules.first().map(|rule| &rule.origin)) {
        (Where::First, Some(Origin::File(_, line))) => {
            // The comment above the first rule is its own: the new rule goes above that, too.
            let lines: Vec<&str> = before.split_inclusive('\n').collect();
            let mut at = line - 1;
            while at > 0 && lines[at - 1].trim_start().starts_with('#') {
                at -= 1;
            }
            let offset = lines[..at].iter().map(|line| line.len()).sum();
            after.insert_str(offset, &(write(rule) + "\n"));
        }
        _ => {
            if !after.is_empty() {
                after += if after.ends_with('\n') { "\n" } else { "\n\n" };
            }
            after += &write(rule);
        }
    }
    // What cannot be read again is not written.
    parse_file(path, &after)?;
    replace(path, &after)
}

/// Takes the rule with this number (from 1 on) out of a file, with the comment right above it. Returns the rule.
///
/// # Errors
/// [`BadFile`] if there is no such rule, the file has errors, or cannot be written.
pub fn remove(path: &Path, number: usize) -> Result<Arc<Rule>, BadFile> {
    let _alone = alone(path)?;
    let before = text(path)?.unwrap_or_default();
    let sheet = parse_file(path, &before)?;
    let count = sheet.rules.len();
    let Some(rule) = number
        .checked_sub(1)
        .and_then(|index| sheet.rules.get(index))
    else {
        let why = format!(
            "there is no rule {number}, but {count}; `vnplug sandbox rules list` numbers them"
        );
        return Err(BadFile::Text {
            at: path.display().to_string(),
            why,
        });
    };
    let mut document: DocumentMut = before.parse().map_err(|error: TomlError| BadFile::Text {
        at: path.display().to_string(),
        why: error.message().to_owned(),
    })?;
    if let Some(rules) = document
        .get_mut("rule")
        .and_then(Item::as_array_of_tables_mut)
    {
        rules.remove(number - 1);
    }
    replace(path, &document.to_string())?;
    Ok(rule.clone())
}

/// Nobody else changes files of rules in this directory, until the file is closed.
fn alone(path: &Path) -> Result<fs::File, BadFile> {
    let failed = |error| BadFile::Io(path.to_owned(), error);
    let directory = parent(path);
    fs::create_dir_all(directory).map_err(failed)?;
    let directory = fs::File::open(directory).map_err(failed)?;
    flock(&directory, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
    Ok(directory)
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Writes a file anew beside the old one, and puts it in its place: also after a loss of power one of both is there.
///
/// # Errors
/// [`BadFile::Io`].
pub fn replace(path: &Path, text: &str) -> Result<(), BadFile> {
    let failed = |error| BadFile::Io(path.to_owned(), error);
    // A link to a file of rules stays a link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let directory = parent(&target);
    fs::create_dir_all(directory).map_err(failed)?;
    let part = target.with_extension(format!("toml.{}", std::process::id()));
    let written = (|| {
        let mut file = fs::File::create(&part)?;
        if let Ok(meta) = fs::metadata(&target) {
            file.set_permissions(meta.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&part, &target)?;
        fs::File::open(directory)?.sync_all()
    })();
    written.map_err(|error| {
        // It may never have been made.
        let _ = fs::remove_file(&part);
        failed(error)
    })
}
