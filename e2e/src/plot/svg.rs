//! The few shapes that plots are made of, as SVG 1.1 text.

use std::fmt::Write;

/// A drawing that grows shape by shape; coordinates are pixels from the upper left corner.
#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where a text's position is in it.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    /// At its beginning.
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

/// How a text looks.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// In pixels.
    pub size: f64,
    /// Heavier.
    pub bold: bool,
    /// As SVG writes it.
    pub color: &'static str,
    /// Where its position is.
    pub anchor: Anchor,
}

/// Plain text of the size of axis labels.
pub const LABEL: Text = Text {
    size: 12.0,
    bold: false,
    color: INK,
    anchor: Anchor::Start,
};

impl Text {
    /// The same at another place of its position.
    #[must_use]
    pub fn anchored(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }
}

impl Svg {
    /// An empty drawing.
    #[must_use]
    pub fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            body: String::new(),
        }
    }

    /// A line of one pixel; `dashes` are lengths of lines and gaps, none for a whole one.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str, dashes: &str) {
        self.wide_line(from, to, color, dashes, 1.0);
    }

    /// A line so wide.
    pub fn wide_line(
        &mut self,
        (x1, y1): (f64, f64),
        (x2, y2): (f64, f64),
        color: &str,
        dashes: &str,
        width: f64,
    ) {
        self.add(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>"#
        ));
    }

    /// A text, escaped.
    pub fn text(&mut self, (x, y): (f64, f64), text: &str, how: Text) {
        let Text { size, color, .. } = how;
        let weight = if how.bold { "bold" } else { "normal" };
        let anchor = match how.anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{color}">{text}</text>"#
        ));
    }

    /// A text that reads upwards, centred at a point.
    pub fn upward(&mut self, (x, y): (f64, f64), text: &str, how: Text) {
        let Text { size, color, .. } = how;
        let text = escape(text);
        self.add(format_args!(
            r#"<text transform="translate({x:.1},{y:.1}) rotate(-90)" font-size="{size}" text-anchor="middle" fill="{color}">{text}</text>"#
        ));
    }

    /// A mark of one of five shapes.
    pub fn mark(&mut self, (x, y): (f64, f64), shape: usize, color: &str) {
        let around = |points: &[(f64, f64)]| {
            let points = points
                .iter()
                .map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy));
            points.collect::<Vec<_>>().join(" ")
        };
        let points = match shape % 5 {
            0 => {
                self.add(format_args!(
                    r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{color}"/>"#
                ));
                return;
            }
            1 => around(&[(-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)]),
            2 => around(&[(0.0, -4.8), (4.6, 3.4), (-4.6, 3.4)]),
            3 => around(&[(0.0, -5.2), (5.2, 0.0), (0.0, 5.2), (-5.2, 0.0)]),
            _ => around(&[(0.0, 4.8), (4.6, -3.4), (-4.6, -3.4)]),
        };
        self.add(format_args!(
            r#"<polygon points="{points}" fill="{color}"/>"#
        ));
    }

    /// The whole file.
    #[must_use]
    pub fn finish(self) -> String {
        let Self {
            width,
            height,
            body,
        } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"DejaVu Sans, Verdana, Helvetica, \
             sans-serif\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n{body}</svg>\n"
        )
    }

    fn add(&mut self, shape: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "{shape}");
    }
}

/// About how wide a text is; fonts differ.
#[must_use]
pub fn width_of(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

/// For the inside of an element or a quoted attribute.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Text and axes.
pub const INK: &str = "#222222";
/// The lines of the grid.
pub const GRID: &str = "#dddddd";
/// Goals and limits.
pub const GOAL: &str = "#777777";
/// Colours that people who see few colours tell apart (Okabe and Ito); ours first.
pub const COLORS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_row_is_called_cannot_break_the_file() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text((0.0, 0.0), "a<b & \"c\"", LABEL);
        let file = svg.finish();
        assert!(file.contains("a&lt;b &amp; &quot;c&quot;</text>"));
        assert!(file.ends_with("</svg>\n"));
    }
}
