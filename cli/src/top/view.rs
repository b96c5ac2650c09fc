//! Draws it.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Padding, Paragraph, Row, Table as Drawn, TableState, Wrap};
use vnplug_ring::counters::{Curve, HISTORY, STAGES, find};

use super::keys::HELP;
use super::state::{Over, State};
use super::tables::{Column, KINDS, Table, brief};
use crate::text::{counted, escape, grouped};

/// Less cannot be read.
const LEAST: (u16, u16) = (40, 10);
/// From here on there is room for the curves of losses, and of rows.
const WIDE: u16 = 110;
/// Bars of these.
const CURVE: usize = 12;
/// Blanks between columns.
const APART: u16 = 2;

const DIM: Style = Style::new().fg(Color::DarkGray);
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    draw_coloured(frame, state);
    if !state.has_colours {
        for cell in &mut frame.buffer_mut().content {
            (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
        }
    }
}

fn draw_coloured(frame: &mut Frame<'_>, state: &mut State) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("too small: {} × {} at least", LEAST.0, LEAST.1);
        return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }
    let [head, totals, stages, tables, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(first(state)), head);
    frame.render_widget(Paragraph::new(sums(state, area.width)), totals);
    frame.render_widget(Paragraph::new(losses(state, area.width)), stages);
    draw_tables(frame, state, tables);
    frame.render_widget(Paragraph::new(last(state)), foot);
    match state.over {
        Over::Nothing => {}
        Over::Help => over(frame, state, "Keys", help(), tables),
        Over::Details => {
            let (title, lines) = details(state, tables.width);
            over(frame, state, &title, lines, tables);
        }
    }
}

/// Which daemon, and how it is.
fn first(state: &State) -> Line<'static> {
    let socket = state.socket();
    if let Some((since, why)) = &state.trouble {
        let seconds = since.elapsed().as_secs();
        let text = format!("no answer for {seconds} s: {why}");
        return Line::from(vec![
            Span::styled(text, BAD),
            Span::styled("  asking again …", DIM),
        ]);
    }
    if state.course.asked().is_none() {
        return Line::styled(format!("asking {socket} …"), DIM);
    }
    let of = |kind: &str, name: &str| {
        let things = state.course.now().iter().filter(|it| it.kind == kind);
        counted(things.count() as u64, name)
    };
    let [sources, ports, vms] =
        [("source", "source"), ("port", "port"), ("vm", "VM")].map(|(kind, name)| of(kind, name));
    let mut words = vec![
        Span::styled(escape(&state.server), HEAD),
        Span::raw(format!("  {sources}, {ports}, {vms}")),
    ];
    if state.course.restarts() > 0 {
        let text = format!("  restarted while this ran: {}", state.course.restarts());
        words.push(Span::styled(text, Style::new().fg(Color::Yellow)));
    }
    if state.paused {
        words.push(Span::styled("  STOPPED", BAD));
    }
    words.push(Span::styled(format!("  {socket}"), DIM));
    Line::from(words)
}

fn sums(state: &State, width: u16) -> Line<'static> {
    let mut words = Vec::new();
    // What is left beside the words, for each of three.
    let curve_width = usize::from(width.saturating_sub(60) / 3).min(HISTORY);
    let names = [("seen", "/s"), ("read", "bit/s"), ("delivered", "/s")];
    for (curve, (name, unit)) in state.course.totals().iter().zip(names) {
        words.push(Span::styled(format!("{name} "), DIM));
        let rate = format!("{}{unit}", brief_with_space(curve.last(), unit));
        words.push(Span::styled(format!("{rate:>11} "), HEAD));
        let bars = Style::new().fg(Color::Green);
        words.push(Span::styled(bars_of(curve, curve_width), bars));
        words.push(Span::raw("  "));
    }
    Line::from(words)
}

/// `1.25 Mbit/s`, `1.25 M/s`.
fn brief_with_space(rate: f64, unit: &str) -> String {
    let text = brief(rate);
    match unit.starts_with('/') || text.ends_with(char::is_alphabetic) {
        true => text,
        false => text + " ",
    }
}

/// The last rates as a row of `width` bars.
pub(super) fn bars_of(curve: &Curve, width: usize) -> String {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = curve.rates(width);
    let most = shown.clone().fold(0.0, f64::max);
    let bar = |rate: f64| match most > 0.0 && rate > 0.0 {
        // What is there is seen.
        true => BARS[((rate / most * 8.0).round() as usize).clamp(1, 8)],
        false => BARS[0],
    };
    let bars: String = shown.map(bar).collect();
    format!("{bars:>width$}")
}

fn losses(state: &State, width: u16) -> Vec<Line<'static>> {
    let mut words = vec![Span::styled("lost/s  ", DIM)];
    for (curve, stage) in state.course.stages().iter().zip(STAGES) {
        let rate = curve.last();
        let style = if rate > 0.0 { BAD } else { Style::new() };
        words.push(Span::styled(format!("{} ", stage.name), DIM));
        words.push(Span::styled(brief(rate), style));
        if rate > 0.0 && width >= WIDE {
            let bars = Style::new().fg(Color::Red);
            words.push(Span::styled(format!(" {}", bars_of(curve, CURVE)), bars));
        }
        words.push(Span::raw("  "));
    }
    // What the worst of it means.
    let worst = state.course.stages().iter().zip(STAGES);
    let worst = worst.max_by(|(a, _), (b, _)| a.last().total_cmp(&b.last()));
    let mut second = vec![
        Span::styled("lost    ", DIM),
        Span::raw(grouped(state.course.lost())),
        Span::styled(" in all", DIM),
    ];
    if let Some((_, stage)) = worst.filter(|(curve, _)| curve.last() > 0.0) {
        let why = format!("    {}: {}", stage.name, stage.help);
        second.push(Span::styled(why, Style::new().fg(Color::Yellow)));
    }
    vec![Line::from(words), Line::from(second)]
}

fn draw_tables(frame: &mut Frame<'_>, state: &mut State, area: Rect) {
    let all: Vec<Table> = (0..KINDS.len()).map(|it| state.table_of(it)).collect();
    // What each wants: its rows, its head and its title.
    let wants = all.iter().map(|it| it.rows.len() as u16 + 2);
    let wants: Vec<u16> = wants.collect();
    let heights = share(area.height, &wants, state.table);
    let mut top = area.y;
    for (number, (table, height)) in all.iter().zip(heights).enumerate() {
        let place = Rect {
            y: top,
            height,
            ..area
        };
        top += height;
        draw_table(frame, state, number, table, place);
    }
}

/// How many lines each gets: what it wants if there is room, else the chosen one takes what the others can spare.
fn share(height: u16, wants: &[u16], chosen: usize) -> Vec<u16> {
    const LITTLE: u16 = 3;
    let mut got: Vec<u16> = wants.iter().map(|it| (*it).min(LITTLE)).collect();
    let mut left = height.saturating_sub(got.iter().sum());
    let order = std::iter::once(chosen).chain((0..wants.len()).filter(|it| *it != chosen));
    for number in order {
        let more = left.min(wants[number] - got[number]);
        got[number] += more;
        left -= more;
    }
    // If there is not even a little for each, the chosen one has it.
    let mut over = got.iter().sum::<u16>().saturating_sub(height);
    for number in (0..wants.len()).rev().filter(|it| *it != chosen) {
        let less = over.min(got[number]);
        got[number] -= less;
        over -= less;
    }
    got
}

fn draw_table(frame: &mut Frame<'_>, state: &mut State, number: usize, table: &Table, area: Rect) {
    let is_chosen = state.table == number;
    let look = &mut state.looks[number];
    look.chosen = look.chosen.min(table.rows.len().saturating_sub(1));
    let mut columns: Vec<usize> = (0..table.kind.columns.len()).collect();
    let width = |column: usize| {
        let cells = table.rows.iter().map(|row| &row.cells[column].text);
        let widest = cells.map(|text| Span::raw(text.as_str()).width()).max();
        // A place for the sign of the order.
        widest
            .unwrap_or(0)
            .max(table.kind.columns[column].name.len() + 1)
    };
    let has_curves = number < 2 && area.width >= WIDE;
    let used = |columns: &[usize]| -> usize {
        let curve = if has_curves { CURVE } else { 0 };
        let apart = usize::from(APART);
        columns.iter().map(|it| width(*it) + apart).sum::<usize>() + curve
    };
    while columns.len() > 4 && used(&columns) > usize::from(area.width) {
        columns.pop();
    }
    let title = |column: usize| {
        let Column { name, is_number } = table.kind.columns[column];
        let sign = match (look.column == column, look.reversed) {
            (true, false) => "▾",
            (true, true) => "▴",
            (false, _) => "",
        };
        aligned(format!("{name}{sign}"), is_number)
    };
    let mut head: Vec<Line<'_>> = columns.iter().map(|it| title(*it)).collect();
    if has_curves {
        head.push(Line::raw(""));
    }
    let rows = table.rows.iter().map(|row| {
        let cell = |column: &usize| {
            let cell = &row.cells[*column];
            let style = if cell.is_bad { BAD } else { Style::new() };
            let is_number = table.kind.columns[*column].is_number;
            aligned(cell.text.clone(), is_number).style(style)
        };
        let mut cells: Vec<Line<'_>> = columns.iter().map(cell).collect();
        if has_curves {
            let curve = state.course.curve(&row.key);
            let bars = curve.map_or(String::new(), |it| bars_of(it, CURVE));
            cells.push(Line::styled(bars, Style::new().fg(Color::Green)));
        }
        Row::new(cells)
    });
    let mut widths: Vec<Constraint> = columns
        .iter()
        .map(|it| Constraint::Length(width(*it) as u16))
        .collect();
    if has_curves {
        widths.push(Constraint::Length(CURVE as u16));
    }
    let name = format!("─ {} ({}) ", table.kind.title, table.rows.len());
    let style = if is_chosen { HEAD.fg(Color::Cyan) } else { DIM };
    let line = format!("{name}{}", "─".repeat(usize::from(area.width)));
    let drawn = Drawn::new(rows.collect::<Vec<_>>(), widths)
        .column_spacing(APART)
        .header(Row::new(head).style(HEAD.add_modifier(Modifier::UNDERLINED)))
        .block(Block::new().title_top(Line::styled(line, style)))
        .row_highlight_style(match is_chosen {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        });
    let mut chosen = TableState::new().with_selected(Some(look.chosen));
    frame.render_stateful_widget(drawn, area, &mut chosen);
}

fn aligned(text: String, right: bool) -> Line<'static> {
    let alignment = if right {
        Alignment::Right
    } else {
        Alignment::Left
    };
    Line::raw(text).alignment(alignment)
}

fn last(state: &State) -> Line<'static> {
    let keys = match state.over {
        Over::Nothing => [
            ("q", "end"),
            ("Tab", "table"),
            ("s", "sort"),
            ("r", "order"),
            ("Enter", "counters"),
            ("?", "help"),
        ],
        Over::Help | Over::Details => [
            ("q", "end"),
            ("Esc", "back"),
            ("↑↓", "scroll"),
            ("", ""),
            ("", ""),
            ("", ""),
        ],
    };
    let words = keys.iter().filter(|(key, _)| !key.is_empty());
    let words = words.flat_map(|(key, does)| {
        let key = Span::styled(
            format!(" {key} "),
            Style::new().add_modifier(Modifier::REVERSED),
        );
        [key, Span::raw(format!(" {does}  "))]
    });
    Line::from(words.collect::<Vec<_>>())
}

fn help() -> Vec<Line<'static>> {
    let keys = HELP.iter().map(|(keys, does)| {
        Line::from(vec![
            Span::styled(format!("{keys:<22}"), HEAD),
            Span::raw(*does),
        ])
    });
    let stages = STAGES.iter().map(|stage| {
        Line::from(vec![
            Span::styled(format!("{:<22}", stage.name), HEAD),
            Span::raw(stage.help),
        ])
    });
    let head = |text: &'static str| [Line::raw(""), Line::styled(text, DIM)];
    keys.chain(head("lost at")).chain(stages).collect()
}

/// All counters of the chosen thing.
fn details(state: &State, width: u16) -> (String, Vec<Line<'static>>) {
    let Some(thing) = state.chosen() else {
        return ("Nothing is chosen".into(), Vec::new());
    };
    let labels = thing.labels.iter().filter(|(_, value)| !value.is_empty());
    let labels = labels.map(|(key, value)| {
        Line::from(vec![
            Span::styled(format!("{:<24}", escape(key)), DIM),
            Span::raw(escape(value)),
        ])
    });
    // Beside the name, the number and the rate, inside the frame.
    let help_width = usize::from(width).saturating_sub(57).max(20);
    let values = thing.values.iter().flat_map(|(name, value)| {
        let known = find(&thing.kind, name);
        let rate = state.course.rate(thing, |it| {
            vnplug_ring::counters::value(it, name).unwrap_or(0)
        });
        let rate = match known.is_none_or(|it| it.is_now) || rate == 0.0 {
            true => String::new(),
            false => format!("{}/s", brief(rate)),
        };
        let mut help = wrapped(known.map_or("", |it| it.help), help_width).into_iter();
        let first = Line::from(vec![
            Span::styled(format!("{:<24}", escape(name)), HEAD),
            Span::raw(format!("{:>16} {rate:>10}  ", grouped(*value))),
            Span::styled(help.next().unwrap_or_default(), DIM),
        ]);
        let more = help.map(|it| Line::styled(format!("{:53}{it}", ""), DIM));
        std::iter::once(first).chain(more).collect::<Vec<_>>()
    });
    let title = format!("{} {}", escape(&thing.kind), escape(&thing.name));
    (title, labels.chain([Line::raw("")]).chain(values).collect())
}

/// Words in lines of this many characters, if none is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Lays something over the tables.
fn over(frame: &mut Frame<'_>, state: &mut State, title: &str, lines: Vec<Line<'_>>, area: Rect) {
    let inside = usize::from(area.height.saturating_sub(2));
    let most = lines.len().saturating_sub(inside);
    state.scroll = state.scroll.min(u16::try_from(most).unwrap_or(u16::MAX));
    let block = Block::bordered()
        .title(format!(" {title} "))
        .padding(Padding::horizontal(1));
    frame.render_widget(Clear, area);
    let text = Paragraph::new(lines).block(block).scroll((state.scroll, 0));
    frame.render_widget(text, area);
}
