//! A panel of figures beside their peers, one line each.

use crate::goal::Goal;
use crate::row::{Figure, Samples};
use vnplug_e2e::plot::axis::{Axis, number};
use vnplug_e2e::plot::svg::{Anchor, COLORS, GOAL, GRID, INK, LABEL, Svg, Text, width_of};

/// What a panel of lines shows: every figure of one unit whose name begins with one of the words.
pub(crate) struct Dots {
    /// Above the panel.
    pub(crate) title: &'static str,
    pub(crate) names: &'static [&'static str],
    /// Names that end so are left out.
    pub(crate) without: &'static [&'static str],
    /// Only names that end so.
    pub(crate) suffix: &'static str,
    /// Figures of another unit are left out.
    pub(crate) unit: &'static str,
    pub(crate) log: bool,
}

impl Dots {
    pub(super) const fn ending(self, suffix: &'static str) -> Self {
        Self { suffix, ..self }
    }

    pub(super) const fn without(self, without: &'static [&'static str]) -> Self {
        Self { without, ..self }
    }

    /// With an axis that shows small and large values alike.
    pub(super) const fn by_magnitude(self) -> Self {
        Self { log: true, ..self }
    }

    fn rows<'f>(&self, figures: &'f [Figure]) -> Vec<&'f Figure> {
        let fits = |figure: &&Figure| {
            let begins = |word: &&str| figure.name.starts_with(word);
            let out = self.without.iter().any(|end| figure.name.ends_with(end));
            let ends = figure.name.ends_with(self.suffix) && !out;
            figure.unit == self.unit && ends && self.names.iter().any(begins)
        };
        figures.iter().filter(fits).collect()
    }

    /// Whether any figure fits.
    pub(super) fn has_any(&self, figures: &[Figure]) -> bool {
        !self.rows(figures).is_empty()
    }

    /// How high the panel is.
    pub(super) fn height(&self, figures: &[Figure]) -> f64 {
        let rows = self.rows(figures);
        TOP + further_lines(&rows) + ROW * rows.len() as f64 + BOTTOM
    }

    /// Draws the panel with its upper left corner at a point.
    pub(super) fn draw(&self, svg: &mut Svg, figures: &[Figure], (left, top): (f64, f64)) {
        let rows = self.rows(figures);
        svg.text(
            (left + 8.0, top + 18.0),
            self.title,
            Text {
                bold: true,
                size: 13.0,
                ..LABEL
            },
        );
        let peers = peers(&rows);
        legend(svg, &rows, (left + 12.0, top + 36.0));
        let top = top + further_lines(&rows);

        let names = rows.iter().map(|row| width_of(shown(row), 11.5));
        let names = names.fold(90.0, f64::max).min(WIDTH / 3.0);
        let (from, to) = (left + names + 18.0, left + WIDTH - VALUES);
        let (above, below) = (top + TOP, top + TOP + ROW * rows.len() as f64);
        let mut values = Vec::new();
        for row in &rows {
            let peer = row.peer.as_ref().map(|(_, samples)| samples.range());
            let goal = Goal::of(row).and_then(|goal| goal.value(row));
            values.extend([row.ours.range().0, row.ours.range().1]);
            values.extend(peer.into_iter().flat_map(|(low, high)| [low, high]));
            values.extend(goal);
        }
        let axis = Axis::over(&values, self.log, (from, to));
        for tick in axis.ticks() {
            let x = axis.at(tick);
            svg.line((x, above), (x, below), GRID, "");
            let how = LABEL.anchored(Anchor::Middle);
            svg.text((x, below + 16.0), &number(tick), Text { size: 11.0, ..how });
        }
        let middle = ((from + to) / 2.0, below + 34.0);
        svg.text(middle, self.unit, LABEL.anchored(Anchor::Middle));
        for (at, row) in rows.iter().enumerate() {
            let y = above + ROW * (at as f64 + 0.5);
            let how = Text {
                size: 11.5,
                ..LABEL.anchored(Anchor::End)
            };
            svg.text((from - 10.0, y + 4.0), shown(row), how);
            if let Some(goal) = Goal::of(row).and_then(|goal| goal.value(row)) {
                let x = axis.at(goal);
                svg.wide_line((x, y - 10.0), (x, y + 10.0), GOAL, "2 2", 2.0);
            }
            if let Some((name, samples)) = &row.peer {
                let style = peers.iter().position(|peer| peer == name).unwrap_or(0) + 1;
                spread(svg, axis, y + 3.5, samples, style % COLORS.len());
            }
            let ours = if row.peer.is_some() { y - 3.5 } else { y };
            spread(svg, axis, ours, &row.ours, 0);
            let text = match row.ratio() {
                Some(ratio) => format!("{} · {ratio:.2}×", number(row.ours.median())),
                None => number(row.ours.median()),
            };
            svg.text(
                (to + 10.0, y + 4.0),
                &text,
                Text {
                    size: 11.0,
                    ..LABEL
                },
            );
        }
        svg.line((from, below), (to, below), INK, "");
        svg.line((from, above), (from, below), INK, "");
    }
}

/// The name without what tells derived figures from measured ones.
fn shown(figure: &Figure) -> &str {
    figure.name.trim_end_matches(':')
}

/// A median and its range.
fn spread(svg: &mut Svg, axis: Axis, y: f64, samples: &Samples, style: usize) {
    let color = COLORS[style];
    let (low, high) = samples.range();
    svg.wide_line((axis.at(low), y), (axis.at(high), y), color, "", 1.6);
    svg.mark((axis.at(samples.median()), y), style, color);
}

/// The peers of these rows, each once.
fn peers<'f>(rows: &[&'f Figure]) -> Vec<&'f str> {
    let mut peers: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().filter_map(|row| row.peer.as_ref()) {
        if !peers.contains(&name.as_str()) {
            peers.push(name);
        }
    }
    peers
}

/// Where the words of the legend stand, beside its corner: as many in a line as fit.
fn places(rows: &[&Figure]) -> Vec<(&'static str, String, (f64, f64))> {
    let marks = ["vNPlug"].into_iter().chain(peers(rows));
    let mut words: Vec<_> = marks.map(|name| ("mark", name.to_owned())).collect();
    if rows.iter().any(|row| Goal::of(row).is_some()) {
        words.push(("goal", "goal".to_owned()));
    }
    let (mut x, mut y) = (4.0, 0.0);
    let mut placed = Vec::new();
    for (kind, name) in words {
        let wide = 30.0 + width_of(&name, 11.0);
        if x + wide > WIDTH - 20.0 {
            (x, y) = (4.0, y + LEGEND_LINE);
        }
        placed.push((kind, name, (x, y)));
        x += wide;
    }
    placed
}

/// Says what the marks are; peers by their names.
fn legend(svg: &mut Svg, rows: &[&Figure], (left, top): (f64, f64)) {
    let small = Text {
        size: 11.0,
        ..LABEL
    };
    for (style, (kind, name, (x, y))) in places(rows).into_iter().enumerate() {
        let (x, y) = (left + x, top + y);
        match kind {
            "goal" => svg.wide_line((x, y - 7.0), (x, y + 7.0), GOAL, "2 2", 2.0),
            _ => svg.mark((x, y), style, COLORS[style % COLORS.len()]),
        }
        svg.text((x + 9.0, y + 4.0), &name, small);
    }
}

/// How much lower a panel begins because of further lines of its legend.
fn further_lines(rows: &[&Figure]) -> f64 {
    places(rows).last().map_or(0.0, |(_, _, (_, y))| *y)
}

/// Of a panel.
pub(super) const WIDTH: f64 = 800.0;
/// Room for the value and the ratio.
const VALUES: f64 = 110.0;
const TOP: f64 = 54.0;
const LEGEND_LINE: f64 = 16.0;
const ROW: f64 = 24.0;
const BOTTOM: f64 = 48.0;
