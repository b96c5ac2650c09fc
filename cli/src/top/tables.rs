//! The tables: what stands in their columns.

use vnplug::Counted;
use vnplug_ring::counters::{lost, value};
use vnplug_ring::units::{short, span};

use super::state::{Key, State, key};
use crate::list::{device, label};
use crate::text::{escape, grouped};

/// A kind of thing that has a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) title: &'static str,
    kind: &'static str,
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
        kind: "source",
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
        kind: "port",
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
        kind: "vm",
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
    let things = state.now.iter().filter(|it| it.kind == kind.kind);
    let row = |thing: &Counted| Row {
        key: key(thing),
        cells: match kind.kind {
            "source" => source(state, thing),
            "port" => port(state, thing),
            _ => vm(state, thing),
        },
    };
    let mut rows: Vec<Row> = things.map(row).collect();
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

/// What the curve of a thing shows.
pub(super) fn pulse(thing: &Counted) -> u64 {
    let name = match thing.kind.as_str() {
        "source" => "seen",
        _ => "delivered",
    };
    value(thing, name).unwrap_or(0)
}

fn source(state: &State, it: &Counted) -> Vec<Cell> {
    let up = label(it, "state").split(',');
    let is_down = up.clone().any(|word| !matches!(word, "up" | "ended"));
    vec![
        text(&it.name),
        text(label(it, "kind")),
        bad(text(label(it, "state")), is_down),
        rate(state, it, |it| of(it, "seen")),
        rate(state, it, |it| of(it, "bytes").saturating_mul(8)),
        losses(state, it),
        count(lost(it)),
        rate(state, it, |it| of(it, "early")),
        patience(it),
    ]
}

fn port(state: &State, it: &Counted) -> Vec<Cell> {
    let word = label(it, "state").split(':').next().unwrap_or_default();
    let mut number = text(&it.name);
    // In the order in which they were opened.
    number.number = it.name.parse().ok().map(|number: f64| -number);
    vec![
        number,
        text(&device(it)),
        text(label(it, "label")),
        bad(text(word), word != "open"),
        rate(state, it, |it| of(it, "delivered")),
        rate(state, it, |it| of(it, "bytes").saturating_mul(8)),
        losses(state, it),
        count(lost(it)),
        patience(it),
        text(label(it, "owner")),
    ]
}

fn vm(state: &State, it: &Counted) -> Vec<Cell> {
    let owner = format!("vm {}", it.name);
    let own = || {
        let ports = state.now.iter().filter(|port| port.kind == "port");
        ports.filter(|port| label(port, "owner") == owner)
    };
    let sum = |figure: fn(&Counted) -> u64| -> f64 {
        own().map(|port| state.growth.of(port, figure)).sum()
    };
    let (pool, free) = (of(it, "pool_bytes"), of(it, "pool_free"));
    let used = pool.saturating_sub(free) as f64 * 100.0 / pool.max(1) as f64;
    let word = label(it, "state");
    let lost = sum(lost);
    vec![
        text(&it.name),
        text(label(it, "kind")),
        bad(text(word), word != "ready"),
        count(own().count() as u64),
        number(sum(|it| of(it, "delivered"))),
        bad(number(lost), lost > 0.0),
        Cell {
            text: format!("{} MiB", grouped(pool >> 20)),
            number: Some(pool as f64),
            is_bad: false,
        },
        Cell {
            text: format!("{used:.0} %"),
            number: Some(used),
            is_bad: used > 90.0,
        },
    ]
}

fn of(thing: &Counted, name: &str) -> u64 {
    value(thing, name).unwrap_or(0)
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

fn rate(state: &State, thing: &Counted, figure: fn(&Counted) -> u64) -> Cell {
    number(state.growth.of(thing, figure))
}

fn losses(state: &State, thing: &Counted) -> Cell {
    let lost = state.growth.of(thing, lost);
    bad(number(lost), lost > 0.0)
}

/// For how long it may stand still: short is bad.
fn patience(thing: &Counted) -> Cell {
    let Some(ms) = value(thing, "patience_ms") else {
        return Cell {
            text: "-".into(),
            number: Some(f64::NEG_INFINITY),
            is_bad: false,
        };
    };
    Cell {
        text: span(ms.saturating_mul(1_000_000)),
        number: Some(ms as f64),
        is_bad: ms < 20,
    }
}

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
