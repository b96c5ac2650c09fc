//! The tables: what stands in their columns.

use vnplug::Counted;
use vnplug_ring::counters::{Key, PortRow, SourceRow, VmRow, key};
use vnplug_ring::units::{short, span};

use super::state::State;
use crate::text::{escape, grouped};

/// A kind of thing that has a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) title: &'static str,
    /// Where there is little room, the last ones are left out.
    pub(super) columns: &'static [Column],
    /// By which column it is sorted at first.
    pub(super) sorted: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) name: &'static str,
    /// Numbers stand at the right.
    pub(super) is_number: bool,
}

const fn words(name: &'static str) -> Column {
    Column {
        name,
        is_number: false,
    }
}

const fn numbers(name: &'static str) -> Column {
    Column {
        name,
        is_number: true,
    }
}

pub(super) const KINDS: [Kind; 3] = [
    Kind {
        title: "Sources",
        columns: &[
            words("SOURCE"),
            words("KIND"),
            words("STATE"),
            numbers("SEEN/S"),
            numbers("BIT/S"),
            numbers("LOST/S"),
            numbers("LOST"),
            numbers("EARLY/S"),
            numbers("PATIENCE"),
        ],
        sorted: 3,
    },
    Kind {
        title: "Ports",
        columns: &[
            words("PORT"),
            words("DEVICE"),
            words("READER"),
            words("STATE"),
            numbers("READ/S"),
            numbers("BIT/S"),
            numbers("LOST/S"),
            numbers("LOST"),
            numbers("PATIENCE"),
            words("OWNER"),
        ],
        sorted: 4,
    },
    Kind {
        title: "VMs",
        columns: &[
            words("VM"),
            words("KIND"),
            words("STATE"),
            numbers("PORTS"),
            numbers("READ/S"),
            numbers("LOST/S"),
            numbers("POOL"),
            numbers("USED"),
        ],
        sorted: 4,
    },
];

/// What is shown, and by what it is sorted: by the number if there is one.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) text: String,
    number: Option<f64>,
    /// It is not as it should be.
    pub(super) is_bad: bool,
}

#[derive(Debug)]
pub(super) struct Row {
    pub(super) key: Key,
    pub(super) cells: Vec<Cell>,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) kind: Kind,
    pub(super) rows: Vec<Row>,
}

/// The table of this number, sorted as the user wants it.
pub(super) fn table(state: &State, number: usize) -> Table {
    let kind = KINDS[number];
    let course = &state.course;
    let mut rows: Vec<Row> = match kind.title {
        "Sources" => course.sources().iter().map(source).collect(),
        "Ports" => course.ports().iter().map(port).collect(),
        _ => course.vms().iter().map(vm).collect(),
    };
    let look = &state.looks[number];
    rows.sort_by(|a, b| {
        let (a, b) = (&a.cells[look.column], &b.cells[look.column]);
        let order = match (a.number, b.number) {
            // Large numbers first, words in order.
            (Some(a), Some(b)) => b.total_cmp(&a),
            _ => a.text.cmp(&b.text),
        };
        if look.reversed {
            order.reverse()
        } else {
            order
        }
    });
    Table { kind, rows }
}

fn source(it: &SourceRow<'_>) -> Row {
    row(
        it.thing,
        vec![
            text(&it.thing.name),
            text(it.kind),
            bad(text(it.state), it.is_bad),
            number(it.seen),
            number(it.bits),
            loss(it.lost.0),
            count(it.lost.1),
            number(it.early),
            patience(it.patience_ms),
        ],
    )
}

fn port(it: &PortRow<'_>) -> Row {
    let mut name = text(&it.thing.name);
    // In the order in which they were opened.
    name.number = it.thing.name.parse().ok().map(|number: f64| -number);
    row(
        it.thing,
        vec![
            name,
            text(&it.device),
            text(it.reader),
            bad(text(it.state), it.is_bad),
            number(it.delivered),
            number(it.bits),
            loss(it.lost.0),
            count(it.lost.1),
            patience(it.patience_ms),
            text(it.owner),
        ],
    )
}

fn vm(it: &VmRow<'_>) -> Row {
    let used = it.used_percent();
    row(
        it.thing,
        vec![
            text(&it.thing.name),
            text(it.kind),
            bad(text(it.state), it.is_bad),
            count(it.ports),
            number(it.delivered),
            loss(it.lost),
            Cell {
                text: format!("{} MiB", grouped(it.pool_bytes >> 20)),
                number: Some(it.pool_bytes as f64),
                is_bad: false,
            },
            Cell {
                text: format!("{used:.0} %"),
                number: Some(used),
                is_bad: used > 90.0,
            },
        ],
    )
}

fn row(thing: &Counted, cells: Vec<Cell>) -> Row {
    Row {
        key: key(thing),
        cells,
    }
}

/// Foreign words, without what a terminal would act on; a long one is cut.
fn text(text: &str) -> Cell {
    let mut text = escape(text);
    if let Some((end, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(end);
        text.push('…');
    }
    Cell {
        text,
        number: None,
        is_bad: false,
    }
}

fn number(number: f64) -> Cell {
    Cell {
        text: brief(number),
        number: Some(number),
        is_bad: false,
    }
}

fn count(count: u64) -> Cell {
    Cell {
        text: grouped(count),
        number: Some(count as f64),
        is_bad: false,
    }
}

fn bad(cell: Cell, is_bad: bool) -> Cell {
    Cell { is_bad, ..cell }
}

fn loss(rate: f64) -> Cell {
    bad(number(rate), rate > 0.0)
}

/// For how long it may stand still: short is bad.
fn patience(ms: Option<u64>) -> Cell {
    let Some(ms) = ms else {
        return Cell {
            text: "-".into(),
            number: Some(f64::NEG_INFINITY),
            is_bad: false,
        };
    };
    Cell {
        text: span(ms.saturating_mul(1_000_000)),
        number: Some(ms as f64),
        is_bad: ms < SHORT_MS,
    }
}

/// Less patience is bad.
const SHORT_MS: u64 = 20;
/// Characters of a cell.
const LONGEST: usize = 28;

/// A number in three digits: `1.25 M`, `12.5 k`, `900`. More would only flicker.
pub(super) fn brief(number: f64) -> String {
    if number < 0.05 {
        return "0".into();
    }
    let digits = number.log10().floor() as i32 - 2;
    let step = 10_f64.powi(digits.max(-1));
    short((number / step).round() * step).trim_end().to_owned()
}
