//! The table as a picture: for every guest and load one bar by each way, captured and lost.

use std::fmt::Write;

use super::report::{Run, Traffic, Via, grouped, pairs};

/// Draws the runs as an SVG.
#[must_use]
pub fn svg(runs: &[Run]) -> String {
    let groups = pairs(runs);
    let height = TOP + groups.len() as u32 * GROUP + 70;
    let mut text = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="14" fill="#1f2933">
<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
<text x="30" y="40" font-size="22" font-weight="bold">What a program in the guest captures of the wire</text>
<text x="30" y="64" fill="#52606d">The same load, by the guest's own virtual NIC and by vNPlug. Longer green is better.</text>
<rect x="{LEFT}" y="80" width="14" height="14" fill="{CAPTURED}"/><text x="{}" y="92">captured</text>
<rect x="{}" y="80" width="14" height="14" fill="{LOST}"/><text x="{}" y="92">lost</text>
"##,
        LEFT + 20,
        LEFT + 110,
        LEFT + 130,
    );
    for (at, (nic, ours)) in groups.iter().enumerate() {
        let top = TOP + at as u32 * GROUP;
        let load = match nic.traffic {
            Traffic::Real => "real traffic",
            Traffic::Small => "60-byte frames",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            r##"<line x1="30" y1="{0}" x2="{1}" y2="{0}" stroke="#e4e7eb"/>
<text x="30" y="{2}" font-weight="bold">{3}</text>
<text x="30" y="{4}" fill="#52606d">{load}</text>
<text x="30" y="{5}" fill="#52606d" font-size="12">{6} packets</text>"##,
            top - 8,
            WIDTH - 30,
            top + 19,
            name(&nic.guest),
            top + 39,
            top + 58,
            offered(nic, ours),
        );
        bar(&mut text, nic, top);
        bar(&mut text, ours, top + 34);
    }
    let foot = TOP + groups.len() as u32 * GROUP + 12;
    let _ = writeln!(
        text,
        r##"<text x="30" y="{foot}" fill="#52606d" font-size="12">CPU: processor time on the host of the guest's process and vNPlug's daemon, per captured packet; the host</text>
<text x="30" y="{}" fill="#52606d" font-size="12">kernel's own work in interrupts is in neither.</text>
</svg>"##,
        foot + 18
    );
    text
}

fn bar(text: &mut String, run: &Run, top: u32) {
    let label = match run.via {
        Via::Nic => "own NIC",
        Via::Vnplug => "vNPlug",
    };
    let captured = f64::from(BAR) * (1.0 - run.lost_pct() / 100.0);
    let end = f64::from(LEFT) + captured;
    let lost = if run.lost() == 0 {
        "0 lost".to_owned()
    } else {
        format!("{} lost, {:.1} %", grouped(run.lost()), run.lost_pct())
    };
    let weight = if run.via == Via::Vnplug {
        "bold"
    } else {
        "normal"
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        r##"<text x="{}" y="{}" text-anchor="end" font-weight="{weight}">{label}</text>
<rect x="{LEFT}" y="{top}" width="{captured:.1}" height="26" fill="{CAPTURED}"/>
<rect x="{end:.1}" y="{top}" width="{:.1}" height="26" fill="{LOST}"/>
<text x="{}" y="{}" font-weight="{weight}">{lost}</text>
<text x="{}" y="{}" fill="#52606d" font-size="11">at {}/s; {:.2} µs CPU per packet</text>"##,
        LEFT - 10,
        top + 18,
        f64::from(BAR) - captured,
        LEFT + BAR + 12,
        top + 12,
        LEFT + BAR + 12,
        top + 26,
        grouped(run.pps().round() as u64),
        run.cpu_us_per_packet(),
    );
}

/// Programs never talk twice in quite the same number of packets.
fn offered(nic: &Run, ours: &Run) -> String {
    let (least, most) = (nic.offered.min(ours.offered), nic.offered.max(ours.offered));
    match least == most {
        true => grouped(most),
        false => format!("{} to {}", grouped(least), grouped(most)),
    }
}

fn name(guest: &str) -> &str {
    match guest {
        "uml" => "User-mode Linux",
        "qemu-tcg" => "QEMU, emulated (TCG)",
        "qemu-kvm" => "QEMU with KVM",
        other => other,
    }
}

const WIDTH: u32 = 980;
const TOP: u32 = 120;
const GROUP: u32 = 88;
const LEFT: u32 = 300;
const BAR: u32 = 420;
const CAPTURED: &str = "#2f9e6e";
const LOST: &str = "#e5776b";
