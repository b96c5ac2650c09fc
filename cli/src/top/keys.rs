//! What keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::state::{Over, State};
use super::tables::KINDS;

/// Shown by `?`.
pub(super) const HELP: [(&str, &str); 9] = [
    ("q, Ctrl-C", "end"),
    ("Tab, ← →", "the next table, the one before"),
    ("↑ ↓, j k, PgUp PgDn", "choose a row; Home and End, too"),
    ("s, S", "sort by the next column, by the one before"),
    ("r", "turn the order around"),
    (
        "Enter",
        "all counters of the chosen row, with what they count",
    ),
    ("space, p", "stop and go on; the daemon is asked meanwhile"),
    ("?", "this"),
    ("Esc", "back to the tables"),
];

const PAGE: usize = 10;

/// Does what a key means.
pub(super) fn typed(state: &mut State, key: KeyEvent) {
    if key.kind == KeyEventKind::Release {
        return;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        state.ended |= key.code == KeyCode::Char('c');
        return;
    }
    match key.code {
        KeyCode::Char('q') => state.ended = true,
        // It never ends: a slow line brings the first byte of an arrow alone.
        KeyCode::Esc => state.over = Over::Nothing,
        KeyCode::Char('?' | 'h') => toggle(state, Over::Help),
        KeyCode::Enter => toggle(state, Over::Details),
        KeyCode::Char(' ' | 'p') => state.paused = !state.paused,
        KeyCode::Tab | KeyCode::Right => state.table = (state.table + 1) % KINDS.len(),
        KeyCode::BackTab | KeyCode::Left => {
            state.table = (state.table + KINDS.len() - 1) % KINDS.len();
        }
        KeyCode::Char('s') => sort(state, 1),
        KeyCode::Char('S') => sort(state, KINDS[state.table].columns.len() - 1),
        KeyCode::Char('r') => {
            let look = &mut state.looks[state.table];
            look.reversed = !look.reversed;
        }
        KeyCode::Down | KeyCode::Char('j') => step(state, 1, true),
        KeyCode::Up | KeyCode::Char('k') => step(state, 1, false),
        KeyCode::PageDown => step(state, PAGE, true),
        KeyCode::PageUp => step(state, PAGE, false),
        KeyCode::Home => step(state, usize::MAX, false),
        KeyCode::End => step(state, usize::MAX, true),
        _ => {}
    }
}

fn toggle(state: &mut State, over: Over) {
    state.scroll = 0;
    state.over = match state.over == over {
        true => Over::Nothing,
        false => over,
    };
}

fn sort(state: &mut State, steps: usize) {
    let look = &mut state.looks[state.table];
    look.column = (look.column + steps) % KINDS[state.table].columns.len();
}

/// Chooses another row, or scrolls what lies over the tables. Where that ends is known when it is drawn.
fn step(state: &mut State, rows: usize, down: bool) {
    if state.over != Over::Nothing {
        let rows = u16::try_from(rows).unwrap_or(u16::MAX);
        state.scroll = match down {
            true => state.scroll.saturating_add(rows),
            false => state.scroll.saturating_sub(rows),
        };
        return;
    }
    let chosen = &mut state.looks[state.table].chosen;
    *chosen = match down {
        true => chosen.saturating_add(rows),
        false => chosen.saturating_sub(rows),
    };
}
