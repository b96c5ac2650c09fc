//! A panel of bars that are made of parts, one bar for each way to do the same.

use crate::row::Figure;
use vnplug_e2e::plot::axis::number;
use vnplug_e2e::plot::svg::{Anchor, GRID, INK, LABEL, Svg, Text, width_of};

/// What a panel of bars shows: the figures `NAME-PART`, whose names begin with one word.
pub(crate) struct Stacks {
    /// Above the panel.
    pub(crate) title: &'static str,
    /// All names of figures begin so.
    pub(crate) begins: &'static str,
    /// The parts of a bar, in per cent, and their colours.
    pub(crate) parts: &'static [(&'static str, &'static str)],
    /// Unit of the parts.
    pub(crate) unit: &'static str,
    /// The end of the names of what stands behind the bars, and its unit.
    pub(crate) whole: (&'static str, &'static str),
}

impl Stacks {
    /// The names of the bars, each once.
    fn bars<'f>(&self, figures: &'f [Figure]) -> Vec<&'f str> {
        let mut bars: Vec<&str> = Vec::new();
        for figure in figures.iter().filter(|figure| figure.unit == self.unit) {
            let bar = self.bar(figure);
            bars.extend(bar.filter(|bar| !bars.contains(bar)));
        }
        bars
    }

    /// The bar that a figure is a part of.
    fn bar<'f>(&self, figure: &'f Figure) -> Option<&'f str> {
        let rest = figure.name.strip_prefix(self.begins)?;
        let parts = self.parts.iter();
        let mut bars = parts.filter_map(|(part, _)| rest.strip_suffix(part)?.strip_suffix('-'));
        bars.next()
    }

    fn of(&self, figures: &[Figure], bar: &str, end: &str, unit: &str) -> Option<f64> {
        let name = format!("{}{bar}{end}", self.begins);
        let mut all = figures.iter();
        let found = all.find(|it| it.name == name && it.unit == unit)?;
        Some(found.ours.median())
    }

    /// Whether any figure fits.
    pub(super) fn has_any(&self, figures: &[Figure]) -> bool {
        !self.bars(figures).is_empty()
    }

    /// How high the panel is.
    pub(super) fn height(&self, figures: &[Figure]) -> f64 {
        TOP + self.legend_height() + ROW * self.bars(figures).len() as f64 + BOTTOM
    }

    /// Draws the panel with its upper left corner at a point.
    pub(super) fn draw(&self, svg: &mut Svg, figures: &[Figure], (left, top): (f64, f64)) {
        let bars = self.bars(figures);
        let title = Text {
            bold: true,
            size: 13.0,
            ..LABEL
        };
        svg.text((left + 8.0, top + 18.0), self.title, title);
        let small = Text {
            size: 11.0,
            ..LABEL
        };
        for ((part, color), (x, y)) in self.parts.iter().zip(self.places()) {
            let (x, y) = (left + 16.0 + x, top + 36.0 + y);
            svg.wide_line((x, y), (x + 12.0, y), color, "", 10.0);
            svg.text((x + 17.0, y + 4.0), part, small);
        }
        let names = bars.iter().map(|bar| width_of(bar, 11.5));
        let names = names.fold(90.0, f64::max);
        let (from, to) = (left + names + 18.0, left + super::dots::WIDTH - VALUES);
        let above = top + TOP + self.legend_height();
        let below = above + ROW * bars.len() as f64;
        let at = |percent: f64| from + (to - from) * percent / 100.0;
        for percent in [0.0, 25.0, 50.0, 75.0, 100.0] {
            let x = at(percent);
            svg.line((x, above), (x, below), GRID, "");
            let how = small.anchored(Anchor::Middle);
            svg.text((x, below + 16.0), &number(percent), how);
        }
        let middle = ((from + to) / 2.0, below + 34.0);
        svg.text(middle, self.unit, LABEL.anchored(Anchor::Middle));
        for (row, bar) in bars.iter().enumerate() {
            let y = above + ROW * (row as f64 + 0.5);
            let how = Text {
                size: 11.5,
                ..LABEL.anchored(Anchor::End)
            };
            svg.text((from - 10.0, y + 4.0), bar, how);
            let mut sum = 0.0;
            for (part, color) in self.parts {
                let end = format!("-{part}");
                let share = self.of(figures, bar, &end, self.unit).unwrap_or(0.0);
                svg.wide_line((at(sum), y), (at(sum + share), y), color, "", 16.0);
                sum += share;
            }
            let (end, unit) = self.whole;
            if let Some(whole) = self.of(figures, bar, end, unit) {
                let text = format!("{} {unit}", number(whole));
                svg.text((to + 12.0, y + 4.0), &text, small);
            }
        }
        svg.line((from, above), (from, below), INK, "");
    }

    /// Where the names of the parts stand: as many in a line as fit.
    fn places(&self) -> Vec<(f64, f64)> {
        let (mut x, mut y) = (0.0, 0.0);
        let mut places = Vec::new();
        for (part, _) in self.parts {
            let wide = 34.0 + width_of(part, 11.0);
            if x + wide > super::dots::WIDTH - 40.0 {
                (x, y) = (0.0, y + LEGEND_LINE);
            }
            places.push((x, y));
            x += wide;
        }
        places
    }

    fn legend_height(&self) -> f64 {
        self.places().last().map_or(0.0, |(_, y)| *y)
    }
}

/// Room for what stands behind the bars.
const VALUES: f64 = 150.0;
const TOP: f64 = 54.0;
const LEGEND_LINE: f64 = 16.0;
const ROW: f64 = 26.0;
const BOTTOM: f64 = 48.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_has_its_parts_and_what_stands_behind_it() {
        let stacks = Stacks {
            title: "t",
            begins: "row-tx-",
            parts: &[("rx", "#000001"), ("tcp-rx", "#000002")],
            unit: "%",
            whole: ("-cpu", "s"),
        };
        let figure = |name: &str, unit, value: f64| Figure {
            name: name.into(),
            unit,
            ours: [value].into_iter().collect(),
            peer: None,
            limit: None,
            note: String::new(),
        };
        let figures = [
            figure("row-tx-a-rx", "%", 40.0),
            figure("row-tx-a-cpu", "s", 3.0),
            figure("row-rx-b-rx", "%", 60.0),
        ];
        assert_eq!(stacks.bars(&figures), ["a"]);
        let mut svg = Svg::new(10.0, 10.0);
        stacks.draw(&mut svg, &figures, (0.0, 0.0));
        let file = svg.finish();
        assert!(
            file.contains(">a</text>") && file.contains(">3 s</text>"),
            "{file}"
        );
    }
}
