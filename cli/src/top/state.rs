//! What is known, and where the user is.

use std::path::{Path, PathBuf};
use std::time::Instant;

use vnplug::Counted;
use vnplug_ring::counters::{Course, key};

use super::asker::Answer;
use super::tables::{self, KINDS, Table};
use crate::text::escape;

/// How a table is sorted, and which row is chosen.
#[derive(Debug, Clone, Default)]
pub(super) struct Look {
    pub(super) column: usize,
    pub(super) reversed: bool,
    pub(super) chosen: usize,
}

/// What lies over the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Nothing,
    Help,
    /// All counters of the chosen thing.
    Details,
}

#[derive(Debug)]
pub(super) struct State {
    socket: PathBuf,
    /// The daemon's name and version.
    pub(super) server: String,
    pub(super) course: Course,
    /// Why the last figures are old.
    pub(super) trouble: Option<(Instant, String)>,
    pub(super) table: usize,
    pub(super) looks: [Look; KINDS.len()],
    pub(super) over: Over,
    /// How far the details are scrolled.
    pub(super) scroll: u16,
    pub(super) paused: bool,
    pub(super) ended: bool,
    pub(super) has_colours: bool,
}

impl State {
    pub(super) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            server: String::new(),
            course: Course::default(),
            trouble: None,
            table: 0,
            looks: KINDS.map(|kind| Look {
                column: kind.sorted,
                reversed: false,
                chosen: 0,
            }),
            over: Over::Nothing,
            scroll: 0,
            paused: false,
            ended: false,
            has_colours: true,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.ended
    }

    pub(super) fn socket(&self) -> String {
        escape(&self.socket.display().to_string())
    }

    /// Takes an answer. While it is paused, the figures on the screen stay.
    pub(super) fn heard(&mut self, answer: Answer) {
        let (server, now) = match answer.told {
            Ok(told) => told,
            Err(error) => {
                let since = self.trouble.take().map_or(answer.at, |(since, _)| since);
                self.trouble = Some((since, error));
                self.course.missed();
                return;
            }
        };
        self.trouble = None;
        if !self.paused {
            self.server = server;
            self.course.heard(answer.at, now);
        }
    }

    /// The table of this number, sorted.
    pub(super) fn table_of(&self, number: usize) -> Table {
        tables::table(self, number)
    }

    /// The thing that is chosen.
    pub(super) fn chosen(&self) -> Option<&Counted> {
        let table = self.table_of(self.table);
        let row = table.rows.get(self.looks[self.table].chosen)?;
        self.course.now().iter().find(|it| key(it) == row.key)
    }
}
