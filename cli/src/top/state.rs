//! What is known, and where the user is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Instant;

use vnplug::Counted;
use vnplug_ring::counters::{Growth, STAGES, lost, value};

use super::asker::Answer;
use super::tables::{self, KINDS, Table};
use crate::text::escape;

/// Answers that a curve shows.
pub(super) const HISTORY: usize = 60;

/// The kind and name of a thing.
pub(super) type Key = (String, String);

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

/// Rates of one stage or thing over time.
#[derive(Debug, Clone, Default)]
pub(super) struct Curve(VecDeque<f64>);

impl Curve {
    pub(super) fn push(&mut self, rate: f64) {
        if self.0.len() == HISTORY {
            self.0.pop_front();
        }
        self.0.push_back(rate);
    }

    /// The latest rate.
    pub(super) fn last(&self) -> f64 {
        self.0.back().copied().unwrap_or(0.0)
    }

    /// The last ones as a row of `width` bars.
    pub(super) fn bars(&self, width: usize) -> String {
        const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let shown = self.0.iter().skip(self.0.len().saturating_sub(width));
        let most = shown.clone().fold(0.0, |most: f64, it| most.max(*it));
        let bar = |rate: f64| match most > 0.0 && rate > 0.0 {
            // What is there is seen.
            true => BARS[((rate / most * 8.0).round() as usize).clamp(1, 8)],
            false => BARS[0],
        };
        let bars: String = shown.map(|rate| bar(*rate)).collect();
        format!("{bars:>width$}")
    }
}

#[derive(Debug)]
pub(super) struct State {
    socket: PathBuf,
    /// The daemon's name and version.
    pub(super) server: String,
    pub(super) now: Vec<Counted>,
    asked: Option<Instant>,
    pub(super) growth: Growth,
    /// Why the last figures are old.
    pub(super) trouble: Option<(Instant, String)>,
    /// It did not answer since the figures were heard.
    was_away: bool,
    /// How often the daemon began anew while this ran.
    pub(super) restarts: usize,
    pub(super) curves: BTreeMap<Key, Curve>,
    /// Of all: what was seen, read in bits, delivered.
    pub(super) totals: [Curve; 3],
    /// Of each stage.
    pub(super) stages: [Curve; STAGES.len()],
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
            now: Vec::new(),
            asked: None,
            growth: Growth::default(),
            trouble: None,
            was_away: false,
            restarts: 0,
            curves: BTreeMap::new(),
            totals: Default::default(),
            stages: Default::default(),
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

    /// Whether the daemon answered at all.
    pub(super) fn knows(&self) -> bool {
        self.asked.is_some()
    }

    /// Takes an answer. While it is paused, the figures on the screen stay.
    pub(super) fn heard(&mut self, answer: Answer) {
        let (server, now) = match answer.told {
            Ok(told) => told,
            Err(error) => {
                let since = self.trouble.take().map_or(answer.at, |(since, _)| since);
                self.trouble = Some((since, error));
                return;
            }
        };
        self.was_away |= self.trouble.take().is_some();
        if self.paused {
            return;
        }
        self.server = server;
        let before = std::mem::replace(&mut self.now, now);
        let is_new = std::mem::take(&mut self.was_away) && fell(&before, &self.now);
        self.restarts += usize::from(is_new);
        self.growth = match self.asked.replace(answer.at) {
            Some(asked) if !is_new => Growth::since(before, answer.at.duration_since(asked)),
            _ => Growth::default(),
        };
        self.draw_curves();
        self.forget_gone();
    }

    fn draw_curves(&mut self) {
        let sum = |figure: fn(&Counted) -> u64| -> f64 {
            self.now.iter().map(|it| self.growth.of(it, figure)).sum()
        };
        let figures: [fn(&Counted) -> u64; 3] = [
            |it| of(it, "source", "seen"),
            |it| of(it, "source", "bytes").saturating_mul(8),
            |it| of(it, "port", "delivered"),
        ];
        for (curve, rate) in self.totals.iter_mut().zip(figures.map(sum)) {
            curve.push(rate);
        }
        for (curve, stage) in self.stages.iter_mut().zip(STAGES) {
            let rates = self.now.iter();
            curve.push(
                rates
                    .map(|it| self.growth.of(it, |it| stage.of(it).unwrap_or(0)))
                    .sum(),
            );
        }
        for thing in &self.now {
            let rate = self.growth.of(thing, tables::pulse);
            let curve = self.curves.entry(key(thing)).or_default();
            curve.push(rate);
        }
    }

    fn forget_gone(&mut self) {
        let there: BTreeSet<Key> = self.now.iter().map(key).collect();
        self.curves.retain(|key, _| there.contains(key));
    }

    /// What was lost in all, ports that are gone included: since the daemon began, and at the NIC since the host did.
    pub(super) fn lost(&self) -> u64 {
        let departed = |it: &Counted| {
            let of = |name| of(it, "source", name);
            of("departed_accounted").saturating_sub(of("departed_delivered"))
        };
        self.now.iter().map(|it| lost(it) + departed(it)).sum()
    }

    /// The table of this number, sorted.
    pub(super) fn table_of(&self, number: usize) -> Table {
        tables::table(self, number)
    }

    /// The thing that is chosen.
    pub(super) fn chosen(&self) -> Option<&Counted> {
        let table = self.table_of(self.table);
        let row = table.rows.get(self.looks[self.table].chosen)?;
        self.now.iter().find(|it| key(it) == row.key)
    }
}

pub(super) fn key(thing: &Counted) -> Key {
    (thing.kind.clone(), thing.name.clone())
}

/// A counter of a thing, if it is of that kind.
fn of(thing: &Counted, kind: &str, name: &str) -> u64 {
    let found = value(thing, name).filter(|_| thing.kind == kind);
    found.unwrap_or(0)
}

/// Whether something that only grows is less than it was: another daemon counts now.
fn fell(before: &[Counted], now: &[Counted]) -> bool {
    let now: BTreeMap<Key, &Counted> = now.iter().map(|it| (key(it), it)).collect();
    let fell = |old: &Counted, new: &Counted| {
        let grows = [("daemon", "ports_opened"), ("source", "seen")];
        grows
            .iter()
            .any(|(kind, name)| of(new, kind, name) < of(old, kind, name))
    };
    before
        .iter()
        .any(|old| now.get(&key(old)).is_some_and(|new| fell(old, new)))
}
