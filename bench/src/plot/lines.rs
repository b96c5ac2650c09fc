//! A panel of curves: one quantity by another, with the spread of the rounds.

use std::collections::BTreeSet;

use crate::row::{Figure, Samples};
use vnplug_e2e::plot::axis::{Axis, number};
use vnplug_e2e::plot::svg::{Anchor, COLORS, GOAL, GRID, INK, LABEL, Svg, Text, width_of};

/// What a panel of curves shows.
pub(crate) struct Lines {
    /// Above the panel.
    pub(crate) title: &'static str,
    /// Below it: what the curves run over.
    pub(crate) over: &'static str,
    /// Beside it: the quantity and its unit.
    pub(crate) unit: &'static str,
    pub(crate) log: bool,
    /// What the axis must reach, 0 if the figures decide alone.
    pub(crate) reach: f64,
    pub(crate) curves: &'static [Curve],
    /// Values that are drawn across, with a word each.
    pub(crate) levels: &'static [(f64, &'static str)],
}

/// One curve: the figures whose names fit a pattern.
pub(crate) struct Curve {
    pub(crate) label: &'static str,
    /// A name with `{}` for the number that the curve runs over.
    pub(crate) pattern: &'static str,
    pub(crate) side: Side,
}

/// A curve with its place in the panel and what is on it.
type Drawn<'c, 'f> = (usize, &'c Curve, Vec<(u64, &'f Samples)>);

/// Which of a figure's samples.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Peer,
}

impl Curve {
    /// Numbers and samples of the figures that fit, by number.
    fn points<'f>(&self, figures: &'f [Figure]) -> Vec<(u64, &'f Samples)> {
        let mut points: Vec<_> = figures
            .iter()
            .filter_map(|figure| {
                let (before, after) = self.pattern.split_once("{}")?;
                let at = figure.name.strip_prefix(before)?.strip_suffix(after)?;
                let samples = match self.side {
                    Side::Ours => &figure.ours,
                    Side::Peer => &figure.peer.as_ref()?.1,
                };
                Some((at.parse().ok()?, samples))
            })
            .collect();
        points.sort_by_key(|(at, _)| *at);
        points
    }
}

impl Lines {
    /// Whether any figure fits.
    pub(super) fn has_any(&self, figures: &[Figure]) -> bool {
        self.curves
            .iter()
            .any(|curve| !curve.points(figures).is_empty())
    }

    /// Draws the panel with its upper left corner at a point.
    pub(super) fn draw(&self, svg: &mut Svg, figures: &[Figure], (left, top): (f64, f64)) {
        let curves: Vec<Drawn<'_, '_>> = self
            .curves
            .iter()
            .enumerate()
            .map(|(style, curve)| (style, curve, curve.points(figures)))
            .filter(|(_, _, points)| !points.is_empty())
            .collect();
        let places: BTreeSet<u64> = curves
            .iter()
            .flat_map(|(_, _, points)| points.iter().map(|(at, _)| *at))
            .collect();
        let places: Vec<u64> = places.into_iter().collect();
        let mut values: Vec<f64> = curves
            .iter()
            .flat_map(|(_, _, points)| points.iter())
            .flat_map(|(_, samples)| [samples.range().0, samples.range().1])
            .collect();
        values.extend((self.reach > 0.0).then_some(self.reach));
        values.extend(self.levels.iter().map(|(level, _)| *level));

        svg.text(
            (left + 8.0, top + 18.0),
            self.title,
            Text {
                bold: true,
                size: 13.0,
                ..LABEL
            },
        );
        let area = Area {
            left: left + MARGIN_LEFT,
            right: left + WIDTH - MARGIN_RIGHT,
            top: top + 36.0 + LEGEND_LINE * self.legend(svg, &curves, (left, top + 34.0)),
            bottom: top + HEIGHT - MARGIN_BOTTOM,
        };
        let axis = Axis::over(&values, self.log, (area.bottom, area.top));
        self.frame(svg, &area, axis, &places);
        for (style, curve, points) in &curves {
            let color = COLORS[style % COLORS.len()];
            let dashes = if curve.side == Side::Peer { "6 3" } else { "" };
            let mut last = None;
            for (at, samples) in points {
                // Neighbouring curves are shifted a little, so that their spreads do not cover each other.
                let shift = (*style as f64 - 1.0) * 3.0;
                let x = area.x(&places, *at) + shift;
                let (low, high) = samples.range();
                let (low, high, y) = (axis.at(low), axis.at(high), axis.at(samples.median()));
                svg.line((x, low), (x, high), color, "");
                for end in [low, high] {
                    svg.line((x - 3.0, end), (x + 3.0, end), color, "");
                }
                if let Some(last) = last {
                    svg.wide_line(last, (x, y), color, dashes, 1.8);
                }
                svg.mark((x, y), *style, color);
                last = Some((x, y));
            }
        }
    }

    /// Writes what the curves are; returns how many lines that took.
    fn legend(&self, svg: &mut Svg, curves: &[Drawn<'_, '_>], (left, top): (f64, f64)) -> f64 {
        let (mut x, mut line) = (left + 12.0, 0.0);
        for (style, curve, _) in curves {
            let wide = 30.0 + width_of(curve.label, 11.0);
            if x + wide > left + WIDTH && x > left + 12.0 {
                (x, line) = (left + 12.0, line + 1.0);
            }
            let (y, color) = (top + line * LEGEND_LINE, COLORS[style % COLORS.len()]);
            let dashes = if curve.side == Side::Peer { "6 3" } else { "" };
            svg.wide_line((x, y), (x + 18.0, y), color, dashes, 1.8);
            svg.mark((x + 9.0, y), *style, color);
            svg.text(
                (x + 22.0, y + 4.0),
                curve.label,
                Text {
                    size: 11.0,
                    ..LABEL
                },
            );
            x += wide;
        }
        line + 1.0
    }

    fn frame(&self, svg: &mut Svg, area: &Area, axis: Axis, places: &[u64]) {
        for tick in axis.ticks() {
            let y = axis.at(tick);
            svg.line((area.left, y), (area.right, y), GRID, "");
            let how = LABEL.anchored(Anchor::End);
            svg.text(
                (area.left - 5.0, y + 4.0),
                &number(tick),
                Text { size: 11.0, ..how },
            );
        }
        for place in places {
            let x = area.x(places, *place);
            svg.line((x, area.bottom), (x, area.bottom + 4.0), INK, "");
            let how = LABEL.anchored(Anchor::Middle);
            let name = match place {
                10_000.. => number(*place as f64),
                small => small.to_string(),
            };
            svg.text((x, area.bottom + 17.0), &name, Text { size: 11.0, ..how });
        }
        for (level, word) in self.levels {
            let y = axis.at(*level);
            svg.wide_line((area.left, y), (area.right, y), GOAL, "2 3", 1.5);
            let how = Text {
                size: 10.5,
                color: GOAL,
                ..LABEL
            };
            svg.text((area.left + 3.0, y - 4.0), word, how);
        }
        svg.line((area.left, area.bottom), (area.right, area.bottom), INK, "");
        svg.line((area.left, area.top), (area.left, area.bottom), INK, "");
        let middle = (area.left + area.right) / 2.0;
        svg.text(
            (middle, area.bottom + 34.0),
            self.over,
            LABEL.anchored(Anchor::Middle),
        );
        let beside = (
            area.left - MARGIN_LEFT + 14.0,
            (area.top + area.bottom) / 2.0,
        );
        svg.upward(beside, self.unit, LABEL);
    }
}

/// The pixels between the axes.
struct Area {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Area {
    /// Numbers stand side by side at equal distances, whatever they are.
    fn x(&self, places: &[u64], place: u64) -> f64 {
        let at = places.iter().position(|known| *known == place).unwrap_or(0);
        let step = (self.right - self.left) / places.len().max(1) as f64;
        self.left + step * (at as f64 + 0.5)
    }
}

/// Of a panel.
pub(super) const WIDTH: f64 = 400.0;
pub(super) const HEIGHT: f64 = 310.0;
const MARGIN_LEFT: f64 = 64.0;
const MARGIN_RIGHT: f64 = 14.0;
const MARGIN_BOTTOM: f64 = 48.0;
const LEGEND_LINE: f64 = 16.0;
