//! Asks on the terminal of the program itself.
//!
//! While a question is open this process is in the foreground, so that what is typed is an answer and not input
//! of the program: a program that reads the terminal meanwhile is stopped, and goes on afterwards. The terminal is
//! put into lines with echo for that time, and back as it was.
//!
//! What is shown was escaped (`show`): a program cannot write a question of its own that looks like ours, but it can
//! write to the same terminal. Who does not trust its output asks elsewhere, by `vnplug sandbox ask`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpgrp, kill_process_group};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp,
    tcsetattr, tcsetpgrp,
};

use crate::ask::{Answer, Event, Life, Question, show};
use crate::gate::Gate;

/// Asks on the terminal at `path`, usually `/dev/tty`, from a thread of its own until the gate is gone.
///
/// The calling process must have a process group of its own, and ignore or block SIGTTOU: it takes the terminal to
/// itself from the background.
///
/// # Errors
/// There is no terminal.
pub fn start(gate: &Gate, path: &Path) -> io::Result<()> {
    let tty = File::options().read(true).write(true).open(path)?;
    tcgetattr(&tty)?;
    let events = gate.subscribe();
    let front = Front {
        tty,
        gate: gate.clone(),
        open: BTreeMap::new(),
        seen: BTreeSet::new(),
        lapsed: None,
        taken: None,
        typed: Vec::new(),
    };
    thread::Builder::new()
        .name("vnplug-terminal".to_owned())
        .spawn(move || front.run(&events))?;
    Ok(())
}

struct Front {
    tty: File,
    gate: Gate,
    open: BTreeMap<u64, Arc<Question>>,
    /// Which were open since the last line was typed: an answer without a number may be meant for any of them.
    seen: BTreeSet<u64>,
    /// When one ended without this terminal: an answer to it may still be on its way.
    lapsed: Option<Instant>,
    /// Whose the terminal is otherwise, and in which mode.
    taken: Option<(Option<Pid>, Termios)>,
    typed: Vec<u8>,
}

impl Front {
    fn run(mut self, events: &Receiver<Event>) {
        loop {
            let event = if self.open.is_empty() {
                match events.recv_timeout(LONG) {
                    Ok(event) => Some(event),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            } else {
                match events.try_recv() {
                    Ok(event) => Some(event),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return self.give_back(),
                }
            };
            match event {
                Some(Event::Asked(question)) => self.ask(question),
                Some(Event::Settled { id, allow, by }) => self.settled(id, allow, by),
                // Nobody answers by this terminal any more: others do, or the time.
                None if !self.open.is_empty() && self.listen().is_err() => return self.give_back(),
                None => {}
            }
        }
    }

    fn ask(&mut self, question: Arc<Question>) {
        self.take();
        if self.open.is_empty() && self.lapsed.is_none_or(|at| at.elapsed() > ON_ITS_WAY) {
            self.seen.clear();
        }
        self.seen.insert(question.id);
        let mut text = String::from("\n");
        for (index, line) in show::question(&question).iter().enumerate() {
            text += if index == 0 { "vnplug: " } else { "        " };
            text += line;
            text += "\n";
        }
        let wait = question
            .deadline
            .saturating_duration_since(Instant::now())
            .as_secs_f64()
            .ceil();
        text += &format!("        {}; no answer in {wait} s means no\n", HELP);
        self.open.insert(question.id, question);
        self.say(&(text + "answer: "));
    }

    fn settled(&mut self, id: u64, allow: bool, by: &str) {
        if self.open.remove(&id).is_some() {
            if by == "terminal" {
                self.seen.remove(&id);
            } else {
                self.lapsed = Some(Instant::now());
            }
            let how = match by {
                "terminal" => "",
                "time" => ": nobody answered",
                "rule" => ": another answer says so",
                _ => ": answered elsewhere",
            };
            let verdict = if allow { "allowed" } else { "refused" };
            self.say(&format!(
                "{}vnplug: question {id}: {verdict}{how}\n",
                if by == "terminal" { "" } else { "\n" }
            ));
        }
        if self.open.is_empty() {
            self.give_back();
        } else {
            self.say(&format!("open: {}; answer: ", list(&self.open)));
        }
    }

    /// Waits a moment for something typed.
    fn listen(&mut self) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.tty, PollFlags::IN)];
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: MOMENT_NS,
        };
        match poll(&mut fds, Some(&moment)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut buffer = [0; 256];
        let count = match self.tty.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        };
        for &byte in &buffer[..count] {
            match byte {
                INTERRUPT => self.interrupt(),
                b'\n' | b'\r' => {
                    let line =
                        String::from_utf8_lossy(&std::mem::take(&mut self.typed)).into_owned();
                    self.line(&line);
                }
                _ if self.typed.len() < LINE => self.typed.push(byte),
                _ => {}
            }
        }
        Ok(())
    }

    /// Ctrl-C: no to all, and the program has it.
    fn interrupt(&mut self) {
        self.typed.clear();
        let open: Vec<u64> = self.open.keys().copied().collect();
        for id in open {
            // Whatever was decided meanwhile stays.
            let _ = self.gate.answer(
                id,
                Answer {
                    allow: false,
                    life: Life::Once,
                    offer: 0,
                },
                "terminal",
            );
        }
        let group = self.taken.as_ref().and_then(|(group, _)| *group);
        self.give_back();
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::INT);
        }
    }

    fn line(&mut self, line: &str) {
        let seen = std::mem::replace(&mut self.seen, self.open.keys().copied().collect());
        let outcome = parse(line).and_then(|(id, answer)| {
            let id = match id {
                Some(id) => id,
                None if seen.len() > 1 => {
                    return Err(
                        "there was more than one question: type its number, too, as in 3 y"
                            .to_owned(),
                    );
                }
                None => match seen.first() {
                    Some(&id) => id,
                    None => return Ok(()),
                },
            };
            self.gate
                .answer(id, answer, "terminal")
                .map_err(|error| error.to_string())
        });
        if let Err(why) = outcome {
            self.say(&format!(
                "vnplug: {}\nopen: {}; answer: ",
                vnplug_ring::text::escape(&why),
                list(&self.open)
            ));
        }
    }

    /// Takes the terminal from the program, unless it is taken.
    fn take(&mut self) {
        if self.taken.is_some() {
            return;
        }
        let Ok(mode) = tcgetattr(&self.tty) else {
            return;
        };
        let mut lines = mode.clone();
        lines
            .local_modes
            .insert(LocalModes::ICANON | LocalModes::ECHO);
        // Signals of the keyboard would reach this process and not the program: Ctrl-C ends a line, and is passed on.
        lines.local_modes.remove(LocalModes::ISIG);
        lines.special_codes[SpecialCodeIndex::VEOL] = INTERRUPT;
        lines.input_modes.insert(InputModes::ICRNL);
        let (whose, own) = (tcgetpgrp(&self.tty).ok(), getpgrp());
        let other = whose.filter(|&whose| whose != own);
        if other.is_some() {
            // Fails if this process has no such terminal: then it is asked there all the same.
            let _ = tcsetpgrp(&self.tty, own);
        }
        // What was typed before the question was no answer.
        let _ = tcsetattr(&self.tty, OptionalActions::Flush, &lines);
        self.taken = Some((other, mode));
        self.typed.clear();
    }

    fn give_back(&mut self) {
        if let Some((other, mode)) = self.taken.take() {
            let _ = tcsetattr(&self.tty, OptionalActions::Drain, &mode);
            if let Some(group) = other {
                let _ = tcsetpgrp(&self.tty, group);
                // Whoever read the terminal meanwhile was stopped.
                let _ = kill_process_group(group, Signal::CONT);
            }
        }
    }

    fn say(&mut self, text: &str) {
        // A terminal that is gone shows when it is read.
        let _ = self
            .tty
            .write_all(text.as_bytes())
            .and_then(|()| self.tty.flush());
    }
}

/// Reads a line of an answer: `[QUESTION] LETTER[OFFER]`.
///
/// # Errors
/// What to type.
pub fn parse(line: &str) -> Result<(Option<u64>, Answer), String> {
    let bad = || format!("{line:?} is no answer: {HELP}");
    let text: String = line
        .chars()
        .filter(|c| !c.is_whitespace())
        .collect::<String>()
        .to_ascii_lowercase();
    let letter_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let (id, rest) = text.split_at(letter_at);
    let mut rest = rest.chars();
    let (allow, life) = match rest.next() {
        Some('y') => (true, Life::Once),
        Some('s') => (true, Life::Session),
        Some('a') => (true, Life::Always),
        Some('n') => (false, Life::Once),
        Some('d') => (false, Life::Session),
        Some('v') => (false, Life::Always),
        _ => return Err(bad()),
    };
    let offer = match rest.as_str() {
        "" => 1,
        number => number
            .parse::<usize>()
            .ok()
            .filter(|&number| number > 0)
            .ok_or_else(bad)?,
    };
    let id = if id.is_empty() {
        None
    } else {
        Some(id.parse().map_err(|_| bad())?)
    };
    Ok((
        id,
        Answer {
            allow,
            life,
            offer: offer - 1,
        },
    ))
}

fn list(open: &BTreeMap<u64, Arc<Question>>) -> String {
    let ids: Vec<String> = open.keys().map(ToString::to_string).collect();
    ids.join(", ")
}

/// Shown with each question.
pub const HELP: &str = "y: yes, once; s: yes, this session; a: always; n: no; d: no, this session; v: never; \
                        with an offer's number: a2; for one of several questions: 3 y";
/// Ctrl-C.
const INTERRUPT: u8 = 3;
const LONG: Duration = Duration::from_secs(1);
/// Between reading a question and the end of the answer's line.
const ON_ITS_WAY: Duration = Duration::from_secs(3);
const MOMENT_NS: i64 = 50_000_000;
const LINE: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_a_letter_with_numbers_around() {
        let answer = |allow, life, offer| Answer { allow, life, offer };
        for (line, expected) in [
            ("y", Ok((None, answer(true, Life::Once, 0)))),
            (" A2 ", Ok((None, answer(true, Life::Always, 1)))),
            ("3 s", Ok((Some(3), answer(true, Life::Session, 0)))),
            ("12v 3", Ok((Some(12), answer(false, Life::Always, 2)))),
            ("d", Ok((None, answer(false, Life::Session, 0)))),
        ] {
            assert_eq!(parse(line), expected, "{line}");
        }
        for line in [
            "",
            "3",
            "yes",
            "y0",
            "q",
            "y-1",
            "99999999999999999999999y",
            "\u{1b}[A",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
