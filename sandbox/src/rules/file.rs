//! Files of rules: TOML, for people and for programs to read and write.
//!
//! ```toml
//! default = "ask"          # what is said of acts that no rule is about
//! timeout = "30s"          # how long a question waits for its answer
//!
//! [[rule]]
//! say = "allow"
//! program = "/usr/bin/git"
//! to = ["*.example.org", "192.0.2.0/24"]
//! port = [22, 443]
//! ```
//!
//! Every key and word is read strictly: a word that is misspelt must not make a rule wider than its writer meant.

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags};
use toml_edit::{Datetime, Document, Item, Table, Value};

use crate::rules::glob::Glob;
use crate::rules::rule::{Direction, Origin, Place, Protocol, Rule, Say};
use crate::rules::words::{self, BadWord};
use vnplug_ring::units;

/// What a file of rules says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sheet {
    /// What it says of acts that no rule is about; `None`: nothing.
    pub default: Option<Say>,
    /// How long a question waits for its answer.
    pub timeout: Option<Duration>,
    /// The rules, from top to bottom.
    pub rules: Vec<Arc<Rule>>,
}

/// Why a file of rules cannot be used.
#[derive(Debug)]
pub enum BadFile {
    /// It cannot be read or written.
    Io(PathBuf, io::Error),
    /// What is in it means nothing: where (a file's line), and what to do.
    Text {
        /// File and line.
        at: String,
        /// What is wrong, and what to write.
        why: String,
    },
}

impl std::error::Error for BadFile {}

impl fmt::Display for BadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Text { at, why } => write!(f, "{at}: {why}"),
        }
    }
}

/// Reads a file; one that is not there has no rules.
///
/// # Errors
/// [`BadFile`] names file and line, and says what to write.
pub fn read(path: &Path) -> Result<Sheet, BadFile> {
    match text(path)? {
        Some(text) => parse_file(path, &text),
        None => Ok(Sheet::default()),
    }
}

/// As [`read`], of a text that stands in this file or is to.
pub(super) fn parse_file(path: &Path, text: &str) -> Result<Sheet, BadFile> {
    let path = Arc::new(path.to_owned());
    parse(text, |line, _| Origin::File(path.clone(), line))
}

/// The text of a file of rules; `None` if there is no such file.
pub(super) fn text(path: &Path) -> Result<Option<String>, BadFile> {
    match regular(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(BadFile::Io(path.to_owned(), error)),
    }
}

/// Reads what is a file and not too long. A project puts what it likes in the place of its file: a FIFO that nobody
/// writes to, or a device that never ends.
fn regular(path: &Path) -> io::Result<String> {
    let check = |meta: &fs::Metadata| {
        if meta.is_file() {
            Ok(())
        } else {
            Err(io::Error::other("a file of rules must be a regular file"))
        }
    };
    // Opening alone makes some devices act, so it is looked at before, too.
    check(&fs::metadata(path)?)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    check(&file.metadata()?)?;
    let mut bytes = Vec::new();
    // The length that a file says it has may be another when it is read.
    file.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        let why = format!("a file of rules has at most {LONGEST} bytes, this one has more");
        return Err(io::Error::other(why));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other("a file of rules is text in UTF-8"))
}

/// Reads the text of a file of rules; `origin` gives the place of a rule, from its line and number (both from 1 on).
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, origin: impl Fn(usize, usize) -> Origin) -> Result<Sheet, BadFile> {
    let place = |at: usize| match origin(
        1 + text.as_bytes()[..at.min(text.len())]
            .iter()
            .filter(|&&b| b == b'\n')
            .count(),
        0,
    ) {
        Origin::File(path, line) => (format!("{}:{line}", path.display()), line),
        other => (other.to_string(), 0),
    };
    let wrong = |at: usize, why: String| BadFile::Text {
        at: place(at).0,
        why,
    };
    let document = Document::parse(text).map_err(|error| {
        wrong(
            error.span().map_or(0, |span| span.start),
            format!("this is no TOML: {}", error.message()),
        )
    })?;
    let mut sheet = Sheet::default();
    for (key, item) in document.iter() {
        let at = document
            .key(key)
            .and_then(toml_edit::Key::span)
            .or_else(|| item.span())
            .map_or(0, |span| span.start);
        let bad = |BadWord(why): BadWord| wrong(at, format!("{key}: {why}"));
        match key {
            "default" => sheet.default = Some(word(item).map_err(bad)?),
            "timeout" => {
                let text = string(item).map_err(bad)?;
                let timeout =
                    units::duration(text).map_err(|error| bad(BadWord(error.to_string())))?;
                sheet.timeout = Some(timeout);
            }
            "rule" => {
                let tables = item.as_array_of_tables().ok_or_else(|| {
                    wrong(
                        at,
                        "rule: begin each rule with a line [[rule]], in double brackets".to_owned(),
                    )
                })?;
                for (index, table) in tables.iter().enumerate() {
                    let at = table.span().map_or(at, |span| span.start);
                    let origin = origin(place(at).1, index + 1);
                    let made = rule(table, origin)
                        .map_err(|(span, why)| wrong(span.unwrap_or(at), why))?;
                    sheet.rules.push(Arc::new(made));
                }
            }
            _ => {
                let why = format!(
                    "{key:?} is no key of a file of rules: write default, timeout or [[rule]]"
                );
                return Err(wrong(at, why));
            }
        }
    }
    Ok(sheet)
}

/// Where in the text something is wrong, and what.
type Wrong = (Option<usize>, String);

fn rule(table: &Table, origin: Origin) -> Result<Rule, Wrong> {
    let mut rule = Rule::new(Say::Deny);
    rule.origin = origin;
    let mut has_say = false;
    for (key, item) in table.iter() {
        let at = table
            .key(key)
            .and_then(toml_edit::Key::span)
            .or_else(|| item.span())
            .map(|span| span.start);
        let bad = |BadWord(why): BadWord| (at, format!("{key}: {why}"));
        match key {
            "say" => {
                rule.say = word(item).map_err(bad)?;
                has_say = true;
            }
            "program" => rule.program = Some(program(string(item).map_err(bad)?).map_err(bad)?),
            "parent" => rule.parent = Some(program(string(item).map_err(bad)?).map_err(bad)?),
            "sha256" => rule.sha256 = Some(words::hash(string(item).map_err(bad)?).map_err(bad)?),
            "arguments" => rule.arguments = Some(Glob::text(string(item).map_err(bad)?)),
            "protocol" => {
                rule.protocols =
                    list(item, |value| text_of(value)?.parse::<Protocol>()).map_err(bad)?
            }
            "to" => rule.to = list(item, |value| text_of(value)?.parse::<Place>()).map_err(bad)?,
            "port" => rule.ports = list(item, ports).map_err(bad)?,
            "direction" => rule.direction = word(item).map_err(bad)?,
            "local" => {
                let local = item
                    .as_bool()
                    .ok_or_else(|| bad(BadWord("write true or false".to_owned())))?;
                rule.local = local;
            }
            "until" => {
                let time = item.as_datetime().and_then(time);
                rule.until = Some(time.ok_or_else(|| {
                    bad(BadWord(
                        "write a time with its zone and without quotes, as in 2026-12-31T18:00:00Z"
                            .to_owned(),
                    ))
                })?);
            }
            "note" => rule.note = Some(string(item).map_err(bad)?.to_owned()),
            _ => {
                let why = format!(
                    "{key:?} is no key of a rule: write say, program, sha256, arguments, parent, protocol, to, port, \
                     direction, local, until or note"
                );
                return Err((at, why));
            }
        }
    }
    if !has_say {
        return Err((
            None,
            "this rule says nothing: add say = \"allow\", \"ask\" or \"deny\"".to_owned(),
        ));
    }
    consistent(&rule).map_err(|why| (None, why))?;
    Ok(rule)
}

/// Refuses rules that can never hold, or not as their writer may think.
///
/// # Errors
/// What to change.
pub fn consistent(rule: &Rule) -> Result<(), String> {
    use crate::act::Transport as T;
    let is_file = matches!(rule.direction, Direction::Write | Direction::Execute);
    let is_name = |place: &Place| matches!(place, Place::Name(_) | Place::Below(_));
    if rule
        .to
        .iter()
        .any(|place| matches!(place, Place::File(_)) != is_file)
    {
        return Err(
            "file: goes with direction = \"write\" or \"execute\", and these go with nothing else"
                .to_owned(),
        );
    }
    let kind = |protocol: &Protocol| {
        matches!(
            protocol,
            Protocol::AnyNetlink | Protocol::Is(T::Packet | T::Netlink(_) | T::Family(_))
        )
    };
    if rule.protocols.iter().any(kind)
        && !(rule.to.iter().all(|place| *place == Place::Any) && rule.ports.is_empty())
    {
        return Err(
            "sockets of packet, netlink and family have no other side: leave to and port away"
                .to_owned(),
        );
    }
    if rule.direction == Direction::Listen && rule.to.iter().any(is_name) {
        return Err("listening is on an address: write addresses, no names".to_owned());
    }
    if rule.local && !rule.to.iter().any(is_name) {
        return Err(
            "local is for rules with names; addresses of the floor are opened by naming them in to"
                .to_owned(),
        );
    }
    Ok(())
}

fn string(item: &Item) -> Result<&str, BadWord> {
    item.as_str()
        .ok_or_else(|| BadWord("write text in quotes".to_owned()))
}

fn text_of(value: &Value) -> Result<&str, BadWord> {
    value
        .as_str()
        .ok_or_else(|| BadWord("write text in quotes, or a list of such".to_owned()))
}

fn word<T: std::str::FromStr<Err = BadWord>>(item: &Item) -> Result<T, BadWord> {
    string(item)?.parse()
}

/// A pattern for the path of a program.
///
/// # Errors
/// [`BadWord`] if it is no path.
pub fn program(text: &str) -> Result<Glob, BadWord> {
    if !text.starts_with(['/', '*']) {
        return Err(BadWord(format!(
            "{text:?}: write the whole path, as in /usr/bin/curl, or **/curl"
        )));
    }
    Ok(Glob::path(text))
}

/// One value or a list of them, but no empty list, which would read as `none` and mean `any`.
fn list<T>(item: &Item, one: impl Fn(&Value) -> Result<T, BadWord>) -> Result<Vec<T>, BadWord> {
    let value = item
        .as_value()
        .ok_or_else(|| BadWord("write a value or a list of values".to_owned()))?;
    match value.as_array() {
        Some(values) if values.is_empty() => Err(BadWord(
            "the list is empty: leave the key away for `any`".to_owned(),
        )),
        Some(values) => values.iter().map(one).collect(),
        None => Ok(vec![one(value)?]),
    }
}

fn ports(value: &Value) -> Result<RangeInclusive<u16>, BadWord> {
    match (value.as_integer(), value.as_str()) {
        (Some(port), _) => words::ports(&port.to_string()),
        (None, Some(text)) => words::ports(text),
        _ => Err(BadWord(
            "write a port or a range of ports: 443 or \"8000-8999\"".to_owned(),
        )),
    }
}

/// A time with a zone; local times mean another time elsewhere, and are refused.
fn time(written: &Datetime) -> Option<SystemTime> {
    let (date, clock) = (written.date?, written.time?);
    let ahead = match written.offset? {
        toml_edit::Offset::Z => 0,
        toml_edit::Offset::Custom { minutes } => i64::from(minutes) * 60,
    };
    if date.year < 1970 {
        return None;
    }
    let days = units::days(date.year.into(), date.month.into(), date.day.into());
    let of_day = u64::from(clock.hour) * 3600
        + u64::from(clock.minute) * 60
        + u64::from(clock.second.unwrap_or(0));
    let seconds = (days * 86_400 + of_day).checked_add_signed(-ahead)?;
    Some(SystemTime::UNIX_EPOCH + Duration::new(seconds, clock.nanosecond.unwrap_or(0)))
}

/// No hand writes more, and a longer one is somebody's trick.
const LONGEST: u64 = 4 << 20;
