//! Plots of the figures: one SVG file for each group, and a page that shows them all.

mod dots;
mod groups;
mod lines;
mod stacks;

use std::fmt::Write;
use std::path::Path;

use dots::Dots;
use lines::Lines;
use stacks::Stacks;
use vnplug_e2e::plot::svg::{LABEL, Svg, Text, escape, width_of};

use crate::report;
use crate::row::{Figure, Result};

/// One file: a title, and rows of panels below each other.
struct Plot {
    /// The file's name without its end.
    name: &'static str,
    title: &'static str,
    panels: &'static [&'static [Panel]],
}

/// A part of a plot.
enum Panel {
    Lines(Lines),
    Dots(Dots),
    Stacks(Stacks),
}

/// Draws every plot that has figures into a folder, and a page of them all.
pub(crate) fn all(figures: &[Figure], folder: &Path) -> Result<()> {
    let mut page = String::new();
    for drawing in drawings(figures) {
        let name = format!("{}.svg", drawing.name);
        std::fs::write(folder.join(&name), drawing.file)?;
        let title = escape(drawing.title);
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "<h2>{title}</h2>\n<img src=\"{name}\" alt=\"{title}\">"
        );
    }
    let machine = escape(&report::machine());
    let page = format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>vNPlug bench</title>\n\
         <style>body {{ font-family: sans-serif; margin: 2em }} img {{ max-width: 100% }}</style>\n\
         <h1>vNPlug bench</h1>\n<p>{machine}</p>\n<p>Marks are medians, lines beside them the lowest \
         and the highest round. All figures: <a href=\"results.json\">results.json</a>.</p>\n{page}"
    );
    Ok(std::fs::write(folder.join("index.html"), page)?)
}

/// A plot that was drawn.
pub(crate) struct Drawing {
    /// The file's name without its end.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// An SVG file.
    pub(crate) file: String,
    /// Which figures are in it.
    pub(crate) shows: Vec<usize>,
}

/// Every plot that has figures, in the order of the page.
pub(crate) fn drawings(figures: &[Figure]) -> Vec<Drawing> {
    let shares = figures.iter().filter_map(share_of_limit);
    let all: Vec<Figure> = figures.iter().cloned().chain(shares).collect();
    let drawing = |plot: &Plot| {
        Some(Drawing {
            name: plot.name,
            title: plot.title,
            file: plot.draw(&all)?,
            shows: (0..figures.len())
                .filter(|&at| plot.shows(&figures[at]))
                .collect(),
        })
    };
    groups::plots().filter_map(drawing).collect()
}

/// How much of its limit a figure reaches, as a figure of its own: its name has a colon after it.
fn share_of_limit(figure: &Figure) -> Option<Figure> {
    let share = figure.reached()? * 100.0;
    Some(Figure {
        name: format!("{}:", figure.name),
        unit: REACHED,
        ours: [share].into_iter().collect(),
        peer: None,
        limit: None,
        note: String::new(),
    })
}

impl Plot {
    fn shows(&self, figure: &Figure) -> bool {
        let alone = std::slice::from_ref(figure);
        let mut panels = self.panels.iter().copied().flatten();
        panels.any(|panel| panel.has_any(alone))
    }

    /// The file, if any figure is in it.
    fn draw(&self, figures: &[Figure]) -> Option<String> {
        let mut shapes = Vec::new();
        let (mut top, mut width) = (HEAD, 0.0_f64);
        for row in self.panels {
            let (mut left, mut height) = (0.0, 0.0_f64);
            for panel in row.iter().filter(|panel| panel.has_any(figures)) {
                shapes.push((panel, (left, top)));
                let (wide, high) = panel.size(figures);
                left += wide;
                height = height.max(high);
            }
            width = width.max(left);
            top += height;
        }
        if shapes.is_empty() {
            return None;
        }
        let mut svg = Svg::new(width.max(20.0 + width_of(self.title, 17.0)), top + 6.0);
        svg.text(
            (8.0, 24.0),
            self.title,
            Text {
                bold: true,
                size: 16.0,
                ..LABEL
            },
        );
        for (panel, place) in shapes {
            match panel {
                Panel::Lines(lines) => lines.draw(&mut svg, figures, place),
                Panel::Dots(dots) => dots.draw(&mut svg, figures, place),
                Panel::Stacks(stacks) => stacks.draw(&mut svg, figures, place),
            }
        }
        Some(svg.finish())
    }
}

impl Panel {
    fn has_any(&self, figures: &[Figure]) -> bool {
        match self {
            Self::Lines(lines) => lines.has_any(figures),
            Self::Dots(dots) => dots.has_any(figures),
            Self::Stacks(stacks) => stacks.has_any(figures),
        }
    }

    fn size(&self, figures: &[Figure]) -> (f64, f64) {
        match self {
            Self::Lines(_) => (lines::WIDTH, lines::HEIGHT),
            Self::Dots(dots) => (dots::WIDTH, dots.height(figures)),
            Self::Stacks(stacks) => (dots::WIDTH, stacks.height(figures)),
        }
    }
}

/// Unit of [`share_of_limit`].
const REACHED: &str = "% of the limit";
/// Height of a plot's title.
const HEAD: f64 = 36.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Samples;

    fn figure(name: &str, unit: &'static str, value: f64) -> Figure {
        let mut ours = Samples::default();
        for sample in [value * 0.9, value, value * 1.1] {
            ours.push(sample);
        }
        Figure {
            name: name.into(),
            unit,
            peer: Some(("libpcap".into(), ours.clone())),
            limit: None,
            ours,
            note: String::new(),
        }
    }

    #[test]
    fn a_plot_has_what_was_measured_and_no_more() {
        let plot = |name| groups::plots().find(|plot| plot.name == name).unwrap();
        assert_eq!(plot("capture").draw(&[]), None);
        let figures = [
            figure("capture-host-64", "Mpps", 1.5),
            figure("capture-host-1514", "Mpps", 0.8),
            figure("handoff-60", "Mpps", 100.0),
        ];
        let file = plot("capture").draw(&figures).unwrap();
        assert!(file.contains(">1514</text>") && !file.contains("handoff"));
        assert!(
            plot("handoff")
                .draw(&figures)
                .unwrap()
                .contains("handoff-60")
        );
    }

    #[test]
    fn files_have_names_of_their_own() {
        for (at, plot) in groups::plots().enumerate() {
            let mut others = groups::plots().skip(at + 1);
            assert!(others.all(|other| other.name != plot.name));
        }
    }
}
