//! The timeline as an SVG picture, light or dark as its viewer likes.

use std::fmt::Write as _;

use crate::bins::Axis;
use crate::text::{duration, short, time};
use crate::timeline::Timeline;

/// A row of the picture: its name, unit, top and height.
struct Row {
    name: &'static str,
    unit: &'static str,
    class: &'static str,
    top: f64,
    height: f64,
}

const ROWS: [Row; 3] = [
    Row {
        name: "packets",
        unit: "packets/s",
        class: "p",
        top: 74.0,
        height: 150.0,
    },
    Row {
        name: "bits on the wire",
        unit: "bit/s",
        class: "b",
        top: 254.0,
        height: 150.0,
    },
    Row {
        name: "lost",
        unit: "packets/s",
        class: "l",
        top: 434.0,
        height: 40.0,
    },
];

/// Writes the picture; `title` says of what.
pub(crate) fn svg(timeline: &Timeline, title: &str) -> String {
    let mut out = String::with_capacity(64 << 10);
    // Writing to a String cannot fail.
    let _ = draw(&mut out, timeline, title);
    out
}

fn draw(out: &mut String, timeline: &Timeline, title: &str) -> std::fmt::Result {
    let axis = timeline.axis;
    write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\"><style>{STYLE}</style>\
         <defs><pattern id=\"gap\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" \
         patternTransform=\"rotate(45)\"><rect width=\"3\" height=\"8\" class=\"g\"/></pattern></defs>\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" class=\"bg\"/>\
         <text x=\"{LEFT}\" y=\"24\" class=\"h\">{}</text><text x=\"{LEFT}\" y=\"44\">{}</text>",
        xml(title),
        xml(&summary(timeline))
    )?;
    for (row, (values, factor)) in ROWS
        .iter()
        .zip([(0, 1.0), (1, 8.0), (2, 1.0)].map(|(n, factor)| (&timeline.bins[n], factor)))
    {
        let rates: Vec<f64> = values
            .iter()
            .enumerate()
            .map(|(bin, &value)| value as f64 * factor / (axis.width_ns(bin) as f64 / 1e9))
            .collect();
        draw_row(out, row, &rates, &axis)?;
    }
    let (top, bottom) = (ROWS[0].top, ROWS[2].top + ROWS[2].height);
    for &(from, to) in &timeline.gaps {
        let (a, b) = (x(&axis, from), x(&axis, to));
        write!(
            out,
            "<rect x=\"{a:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{}\" fill=\"url(#gap)\">\
             <title>no packets for {}</title></rect>",
            b - a,
            bottom - top,
            duration(to - from)
        )?;
    }
    for (n, part) in timeline.parts.iter().enumerate() {
        let (a, b) = (x(&axis, part.from_ns), x(&axis, part.to_ns));
        write!(
            out,
            "<rect x=\"{a:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"5\" class=\"s\">\
             <title>{}</title></rect>",
            bottom + 4.0 + (n % 2) as f64 * 6.0,
            (b - a).max(1.0),
            xml(&part.name)
        )?;
    }
    for state in timeline
        .states
        .iter()
        .filter(|state| (axis.from_ns..=axis.to_ns).contains(&state.status.mark_ns))
    {
        let a = x(&axis, state.status.mark_ns);
        // The words stand where they have room.
        let (dx, anchor) = if a > WIDTH / 2.0 {
            (-4.0, "end")
        } else {
            (4.0, "start")
        };
        write!(
            out,
            "<path d=\"M{a:.1} {top}V{bottom}\" class=\"m\"/>\
             <text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{} is durable up to here</text>",
            a + dx,
            top - 6.0,
            xml(&state.status.recording)
        )?;
    }
    draw_times(out, &axis, bottom + 18.0)?;
    out.push_str("</svg>\n");
    Ok(())
}

fn summary(timeline: &Timeline) -> String {
    let [packets, bytes, lost] = timeline.totals();
    if packets == 0 && lost == 0 {
        return "no packets".to_owned();
    }
    let span_ns = timeline.axis.to_ns - timeline.axis.from_ns;
    let mut text = format!(
        "{packets} packets, {}B on the wire in {}, {lost} lost; {} {}",
        short(bytes as f64),
        duration(span_ns),
        timeline.segments,
        if timeline.segments == 1 {
            "file"
        } else {
            "files"
        },
    );
    if timeline.spread_ns > 0 {
        text += &format!("; times to within {}", duration(timeline.spread_ns));
    }
    text
}

fn draw_row(out: &mut String, row: &Row, rates: &[f64], axis: &Axis) -> std::fmt::Result {
    let bottom = row.top + row.height;
    let most = rates.iter().copied().fold(0.0, f64::max);
    let (step, top) = scale(most, row.height / 40.0);
    let right = WIDTH - RIGHT;
    let mut value = 0.0;
    while value <= top * 1.0001 && step > 0.0 {
        let y = bottom - value / top * row.height;
        write!(
            out,
            "<path d=\"M{LEFT} {y:.1}H{right}\" class=\"grid\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            short(value).trim_end()
        )?;
        value += step;
    }
    write!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\">{}, {} (highest {}{})</text>",
        row.top - 6.0,
        row.name,
        row.unit,
        short(most),
        row.unit
    )?;
    if most > 0.0 {
        write!(out, "<path class=\"{}\" d=\"M{LEFT} {bottom}", row.class)?;
        for (bin, rate) in rates.iter().enumerate() {
            let end = (axis.from_ns + bin as u64 * axis.bin_ns).saturating_add(axis.bin_ns);
            let y = bottom - rate / top * row.height;
            write!(out, "V{y:.1}H{:.1}", x(axis, end.min(axis.to_ns)))?;
        }
        write!(out, "V{bottom}Z\"/>")?;
    }
    Ok(())
}

fn draw_times(out: &mut String, axis: &Axis, y: f64) -> std::fmt::Result {
    let span = axis.to_ns - axis.from_ns;
    let step = time_step(span / 8);
    let digits = (0..=9)
        .find(|&digits| step >= 10_u64.pow(9 - digits))
        .unwrap_or(9) as usize;
    let Some(mut at) = axis.from_ns.checked_next_multiple_of(step) else {
        return Ok(());
    };
    while at < axis.to_ns {
        let x = x(axis, at);
        let text = time(at, digits);
        let (date, clock) = text.split_at(10);
        write!(
            out,
            "<path d=\"M{x:.1} {:.1}v5\" class=\"grid\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            y - 2.0,
            y + 16.0,
            clock.trim()
        )?;
        if step >= DAY_NS || at == axis.from_ns.next_multiple_of(step) || at % DAY_NS < step {
            write!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{date}</text>",
                y + 31.0
            )?;
        }
        let Some(next) = at.checked_add(step) else {
            break;
        };
        at = next;
    }
    Ok(())
}

/// Where a time is in the picture.
fn x(axis: &Axis, ns: u64) -> f64 {
    let ns = ns.clamp(axis.from_ns, axis.to_ns);
    let share = (ns - axis.from_ns) as f64 / (axis.to_ns - axis.from_ns) as f64;
    LEFT + share * (WIDTH - LEFT - RIGHT)
}

/// A round step and the highest value of a scale for values up to `most`, with about `count` steps.
fn scale(most: f64, count: f64) -> (f64, f64) {
    if most <= 0.0 {
        return (1.0, 1.0);
    }
    let rough = most / count.max(1.0);
    let unit = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|n| n * unit)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    (step, (most / step).ceil().max(1.0) * step)
}

/// The shortest round time of at least `rough` nanoseconds.
fn time_step(rough: u64) -> u64 {
    const ROUND: [u64; 16] = [
        1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400,
    ];
    if rough <= SECOND_NS {
        let powers = (0..=9).map(|n| 10_u64.pow(n));
        let steps = powers.flat_map(|power| [1, 2, 5].map(|n| n * power));
        return steps
            .into_iter()
            .find(|&step| step >= rough)
            .unwrap_or(SECOND_NS);
    }
    let steps = ROUND.map(|seconds| seconds * SECOND_NS);
    steps
        .into_iter()
        .find(|&step| step >= rough)
        .unwrap_or_else(|| rough.div_ceil(DAY_NS) * DAY_NS)
}

fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            // XML has no way to write control characters.
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 538.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const SECOND_NS: u64 = 1_000_000_000;
const DAY_NS: u64 = 86_400 * SECOND_NS;
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#444}.h{font-size:16px;font-weight:600;\
fill:#111}.bg{fill:#fff}.grid{stroke:#ddd;fill:none}.p{fill:#2563ab}.b{fill:#2a7d4f}.l{fill:#c62828}\
.s{fill:#888}.g{fill:#999;opacity:.35}.m{stroke:#8a5a00;stroke-width:1.5;stroke-dasharray:5 3;fill:none}\
@media(prefers-color-scheme:dark){text{fill:#bbb}.h{fill:#eee}.bg{fill:#16181d}.grid{stroke:#333}\
.p{fill:#5b9bd5}.b{fill:#5cb585}.l{fill:#ef5350}.m{stroke:#e0a030}}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round_and_reach_the_highest_value() {
        for most in [0.1, 1.0, 3.0, 999.0, 1000.0, 1001.0, 8.7e9] {
            let (step, top) = scale(most, 4.0);
            assert!(top >= most && top < most + step * 1.001, "{most}: {top}");
            assert!(top / step <= 10.0);
        }
        assert_eq!(scale(0.0, 4.0), (1.0, 1.0));
    }

    #[test]
    fn steps_of_time_are_round_and_long_enough() {
        for (rough, step) in [
            (0, 1),
            (3, 5),
            (700_000_000, SECOND_NS),
            (7 * SECOND_NS, 10 * SECOND_NS),
            (50_000 * SECOND_NS, DAY_NS),
            (30 * DAY_NS + 1, 31 * DAY_NS),
        ] {
            assert_eq!(time_step(rough), step, "{rough}");
        }
    }

    #[test]
    fn names_do_not_break_the_picture() {
        assert_eq!(xml("<a&\"\x1b>"), "&lt;a&amp;&quot;\u{fffd}&gt;");
    }
}
