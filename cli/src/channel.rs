//! `vnplug backends` and `vnplug channel`: third parties' back-ends, looked at and spoken to by hand.

use std::io::{self, BufRead};
use std::path::Path;
use std::sync::mpsc::{Receiver, TryRecvError, channel as queue};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Channel, ChannelOptions, Error, Told};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Lists the back-ends that may be used from here.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug backends
  vnplug backends --json

A back-end is a process on the host that offers something to programs in guests, containers and elsewhere.
The operator grants it ([[backend]] in the daemon's configuration) and says who may use it.")]
pub(crate) struct Backends {
    /// One JSON array
    #[arg(long)]
    json: bool,
}

impl Backends {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let all = Channel::list_of(Some(socket))?;
        if self.json {
            let one = |it: &vnplug::BackendInfo| {
                json!({"id": it.id, "name": it.name, "is_there": it.is_there, "version": it.version,
                       "channels": it.channels})
            };
            let all: Value = all.iter().map(one).collect();
            out::raw(&format!("{all}\n"))?;
            return Ok(OK);
        }
        if all.is_empty() {
            out::note("there is no back-end that may be used from here; the operator grants them");
            return Ok(OK);
        }
        let row = |it: &vnplug::BackendInfo| {
            vec![
                text::escape(&it.name),
                it.id.to_string(),
                if it.is_there { "there" } else { "waiting" }.to_owned(),
                it.version.to_string(),
                it.channels.to_string(),
            ]
        };
        let head = ["BACKEND", "ID", "STATE", "VERSION", "CHANNELS"];
        out::raw(&text::table(&head, all.iter().map(row)))?;
        Ok(OK)
    }
}

/// Speaks to a back-end: what is typed goes there, what it says is shown.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug channel kv                         lines of stdin are messages
  vnplug channel kv --say 'get name' -c 1   one message, one answer
  vnplug channel meter --dump 64 --json     shows the memory that it shares

Memory that the back-end wants back is released at once. If the back-end or the daemon goes, that is shown,
and the channel is opened again when it is back.")]
pub(crate) struct ChannelArgs {
    /// Name of the back-end, or its number
    #[arg(value_name = "BACKEND")]
    name: String,
    /// Send this message, and not the lines of stdin; may be repeated
    #[arg(long, value_name = "TEXT")]
    say: Vec<String>,
    /// An event happened, N times if said so; may be repeated
    #[arg(long, value_name = "EVENT[=N]", value_parser = event)]
    event: Vec<(u8, u64)>,
    /// End after this number of messages
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// End after this time
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    duration: Option<Duration>,
    /// Show the first N bytes of memory, when it is shared and after each event
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=65_536))]
    dump: u64,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Wait for the back-end if it is not there yet
    #[arg(long)]
    wait: bool,
}

/// How long one look for news lasts while stdin may have more.
const TURN: Duration = Duration::from_millis(20);

impl ChannelArgs {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let options = match self.name.parse() {
            Ok(id) => ChannelOptions::by_id(id),
            Err(_) => ChannelOptions::new(&self.name),
        };
        let label = format!("vnplug[{}]", std::process::id());
        let options = options.socket(socket).label(&label);
        let mut channel = match self.wait {
            true => options.open_when_there()?,
            false => options.open()?,
        };
        let until = self.duration.map(|duration| Instant::now() + duration);
        for &(event, count) in &self.event {
            channel.event(event, count)?;
        }
        let (lines, mut more) = match self.say.is_empty() {
            true => (Some(stdin()), true),
            false => (None, false),
        };
        let mut said = self.say.iter().cloned();
        let mut waits: Option<String> = None;
        let mut messages = 0;
        loop {
            if waits.is_none() {
                waits = said.next();
            }
            if let (None, Some(lines)) = (&waits, &lines) {
                match lines.try_recv() {
                    Ok(line) => waits = Some(line),
                    Err(TryRecvError::Empty) => {}
                    Err(TryRecvError::Disconnected) => more = false,
                }
            }
            if let Some(line) = waits.take() {
                match channel.send(line.as_bytes()) {
                    Ok(()) => continue,
                    // Said when there is room, or somebody.
                    Err(Error::Full | Error::Disconnected) => waits = Some(line),
                    Err(error) => return Err(error.into()),
                }
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(OK);
            }
            let limit = match more || waits.is_some() {
                true => Some(left.unwrap_or(TURN).min(TURN)),
                false => left,
            };
            let Some(told) = channel.next(limit)? else {
                continue;
            };
            messages += u64::from(matches!(told, Told::Message(_)));
            self.show(&mut channel, &told)?;
            if self.count == Some(messages) {
                return Ok(OK);
            }
        }
    }

    fn show(&self, channel: &mut Channel, told: &Told) -> Result<(), Failure> {
        let (line, value) = match told {
            Told::Message(bytes) => {
                let text = String::from_utf8_lossy(bytes);
                (text.clone().into_owned(), json!({"message": text}))
            }
            Told::Event { event, count } => (
                format!("# event {event}: {count}"),
                json!({"event": event, "count": count}),
            ),
            Told::Shared { region } => {
                let memory = channel.memory(*region);
                let (bytes, writable) =
                    memory.map_or((0, false), |it| (it.len(), it.is_writable()));
                let how = if writable { "to write" } else { "to read" };
                (
                    format!("# memory {region}: {bytes} bytes {how}"),
                    json!({"memory": region, "bytes": bytes, "writable": writable}),
                )
            }
            Told::Withdraw { region, .. } => {
                channel.release(*region)?;
                (
                    format!("# memory {region} is released"),
                    json!({"released": region}),
                )
            }
            Told::Gone(reason) => (format!("# gone: {reason}"), json!({"gone": reason})),
            Told::Back => ("# back".to_owned(), json!({"back": true})),
        };
        self.print(&line, &value)?;
        if self.dump > 0 && matches!(told, Told::Shared { .. } | Told::Event { .. }) {
            for region in channel.regions().collect::<Vec<_>>() {
                let Some(memory) = channel.memory(region) else {
                    continue;
                };
                let mut bytes = vec![0; self.dump.min(memory.len()) as usize];
                memory.read(0, &mut bytes)?;
                let text = String::from_utf8_lossy(&bytes);
                let text = text.trim_end_matches('\0');
                let line = format!("# memory {region} begins: {text}");
                self.print(&line, &json!({"memory": region, "begins": text}))?;
            }
        }
        Ok(())
    }

    fn print(&self, line: &str, value: &Value) -> Result<(), Failure> {
        match self.json {
            true => out::raw(&format!("{value}\n")),
            false => out::line(line),
        }
    }
}

/// The lines of standard input, as they come.
fn stdin() -> Receiver<String> {
    let (sender, lines) = queue();
    std::thread::spawn(move || {
        let lines = io::stdin().lock().lines().map_while(Result::ok);
        lines
            .take_while(|line| sender.send(line.clone()).is_ok())
            .for_each(drop);
    });
    lines
}

fn event(text: &str) -> Result<(u8, u64), String> {
    let (event, count) = text.split_once('=').unwrap_or((text, "1"));
    let wrong = || format!("{text:?} is no event: write 3 or 3=100");
    Ok((
        event.parse().map_err(|_| wrong())?,
        count.parse().map_err(|_| wrong())?,
    ))
}
