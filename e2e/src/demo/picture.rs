//! The table as a picture: for every guest what each way loses, and costs, by the rate on the wire.

use super::report::{Run, Traffic, Via, grouped, guests, ladder, lossless, pairs};
use crate::plot::axis::{Axis, number};
use crate::plot::svg::{Anchor, COLORS, GRID, INK, LABEL, Svg, Text};

/// Draws the runs as an SVG.
#[must_use]
pub fn svg(runs: &[Run]) -> String {
    let guests = guests(runs);
    let height = TOP + guests.len() as f64 * ROW + FOOT;
    let mut svg = Svg::new(WIDTH, height);
    let title = "What a program in the guest loses of the wire";
    svg.text((30.0, 36.0), title, sized(20.0, true));
    let text = "60-byte frames, offered both ways at 50, 200 and 500 thousand a second, and all the \
                generator can. Marks stand at the rate that was on the wire.";
    svg.text((30.0, 60.0), text, faint());
    for (via, left) in [(Via::Vnplug, 30.0), (Via::Nic, 130.0)] {
        let (color, shape) = look(via);
        svg.mark((left + 5.0, 80.0), shape, color);
        svg.text((left + 16.0, 84.0), name_of(via), sized(13.0, true));
    }
    for (at, guest) in guests.into_iter().enumerate() {
        row(&mut svg, runs, guest, TOP + at as f64 * ROW);
    }
    for (at, line) in NOTES.iter().enumerate() {
        let y = height - FOOT + 22.0 + at as f64 * 17.0;
        svg.text((30.0, y), line, faint());
    }
    svg.finish()
}

/// A guest: its headline and two panels.
fn row(svg: &mut Svg, runs: &[Run], guest: &str, top: f64) {
    svg.line((30.0, top), (WIDTH - 30.0, top), GRID, "");
    svg.text((30.0, top + 26.0), title(guest), sized(15.0, true));
    let told = |via| match lossless(&ladder(runs, guest, via)) {
        Some(pps) => format!("{} frames/s", grouped(pps.round() as u64)),
        None => "no rate of these".to_owned(),
    };
    let (ours, nic) = (told(Via::Vnplug), told(Via::Nic));
    let headline = format!("Highest rate without loss: vNPlug {ours}, own NIC {nic}");
    svg.text((30.0, top + 48.0), &headline, sized(14.0, false));
    let real = pairs(runs).into_iter();
    if let Some((nic, ours)) = real
        .into_iter()
        .find(|(nic, _)| nic.guest == guest && nic.traffic == Traffic::Real)
    {
        let text = format!(
            "Programs that talk (HTTP, DNS, bulk TCP): vNPlug lost {} of {} packets, own NIC {} of {}",
            grouped(ours.lost()),
            grouped(ours.offered),
            grouped(nic.lost()),
            grouped(nic.offered)
        );
        svg.text((30.0, top + 68.0), &text, faint());
    }
    let panels: [Panel; 2] = [
        Panel {
            title: "Lost, per cent",
            left: 80.0,
            value: |run| run.lost_pct(),
            reach: 100.0,
        },
        Panel {
            title: "Processor time of the host, µs per captured frame",
            left: 560.0,
            value: |run| run.cpu_us_per_packet(),
            reach: 1.0,
        },
    ];
    let ways = [Via::Nic, Via::Vnplug].map(|via| (via, ladder(runs, guest, via)));
    for panel in panels {
        panel.draw(svg, &ways, top + 100.0);
    }
}

/// One quantity by the rate.
struct Panel {
    title: &'static str,
    left: f64,
    value: fn(&Run) -> f64,
    /// What the axis shows at least.
    reach: f64,
}

impl Panel {
    fn draw(&self, svg: &mut Svg, ways: &[(Via, Vec<&Run>)], top: f64) {
        let Self { left, value, .. } = *self;
        let (right, bottom) = (left + PANEL.0, top + PANEL.1);
        let all = || ways.iter().flat_map(|(_, ladder)| ladder.iter());
        let values: Vec<f64> = all().map(|run| value(run)).chain([self.reach]).collect();
        let rates: Vec<f64> = all().map(|run| run.pps()).collect();
        let y = Axis::over(&values, false, (bottom, top));
        let x = Axis::over(&rates, true, (left, right));
        svg.text((left, top - 12.0), self.title, sized(12.0, true));
        for tick in y.ticks() {
            let at = y.at(tick);
            svg.line((left, at), (right, at), GRID, "");
            let how = LABEL.anchored(Anchor::End);
            svg.text((left - 8.0, at + 4.0), &number(tick), how);
        }
        for tick in x.ticks() {
            let at = x.at(tick);
            svg.line((at, bottom), (at, bottom + 5.0), INK, "");
            let how = LABEL.anchored(Anchor::Middle);
            svg.text((at, bottom + 20.0), &number(tick), how);
        }
        let how = LABEL.anchored(Anchor::Middle);
        let middle = f64::midpoint(left, right);
        svg.text(
            (middle, bottom + 40.0),
            "frames per second on the wire",
            how,
        );
        for (via, ladder) in ways {
            let (color, shape) = look(*via);
            let mut last = None;
            for run in ladder {
                let at = (x.at(run.pps()), y.at(value(run)));
                if let Some(last) = last.replace(at) {
                    svg.wide_line(last, at, color, "", 2.0);
                }
                svg.mark(at, shape, color);
            }
        }
    }
}

fn look(via: Via) -> (&'static str, usize) {
    match via {
        Via::Vnplug => (COLORS[0], 0),
        Via::Nic => (COLORS[1], 1),
    }
}

fn name_of(via: Via) -> &'static str {
    match via {
        Via::Vnplug => "vNPlug",
        Via::Nic => "the guest's own NIC",
    }
}

fn title(guest: &str) -> &str {
    match guest {
        "uml" => "User-mode Linux",
        "qemu-tcg" => "QEMU, emulated (TCG)",
        "qemu-kvm" => "QEMU with KVM",
        other => other,
    }
}

fn sized(size: f64, bold: bool) -> Text {
    Text {
        size,
        bold,
        ..LABEL
    }
}

fn faint() -> Text {
    Text {
        color: "#52606d",
        ..LABEL
    }
}

const NOTES: [&str; 3] = [
    "The generator shares the machine's processors with what captures, so at the upper end the two ways do not \
     get the same rate: compare marks that stand",
    "above each other. Processor time is that of the guest's process and, with vNPlug, of the daemon; the host \
     kernel's own work in interrupts is in neither.",
    "A NIC that loses most of the frames pays for those it throws away, too.",
];
const WIDTH: f64 = 1000.0;
const TOP: f64 = 104.0;
const ROW: f64 = 380.0;
const FOOT: f64 = 76.0;
const PANEL: (f64, f64) = (400.0, 210.0);
