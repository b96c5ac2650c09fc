//! Numbers and times for people, and foreign text as a terminal may see it.

use vnplug_store::name;

/// `text` without anything a terminal would act on.
pub(crate) fn escape(text: &str) -> String {
    text.chars()
        .map(|c| match c.is_control() {
            true => format!("\\x{:02x}", u32::from(c)),
            false => c.to_string(),
        })
        .collect()
}

/// A time as `2026-11-21 13:45:01.123Z` with this many digits after the point.
pub(crate) fn time(ns: u64, digits: usize) -> String {
    let text = name::time(ns);
    let (date, clock) = text.split_at(8);
    let part = |from: usize, to: usize| clock.get(from..to).unwrap_or_default();
    let fraction = match digits {
        0 => String::new(),
        digits => format!(".{}", part(8, 8 + digits.min(9))),
    };
    format!(
        "{}-{}-{} {}:{}:{}{fraction}Z",
        &date[..4],
        &date[4..6],
        &date[6..],
        part(1, 3),
        part(3, 5),
        part(5, 7)
    )
}

/// A number with a decimal prefix: `1.25 M`, `900 `.
pub(crate) fn short(number: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (factor, unit) = units
        .into_iter()
        .find(|(factor, _)| number >= *factor)
        .unwrap_or((1.0, ""));
    // Two digits that mean something.
    let digits = match number {
        small if small > 0.0 && small < 1.0 => 1 - small.log10().floor() as i32,
        _ => 2,
    };
    let value = format!("{:.*}", digits.clamp(2, 12) as usize, number / factor);
    let value = value.trim_end_matches('0').trim_end_matches('.');
    format!("{value} {unit}")
}

/// A distance in time: `1.5 s`, `250 ms`, `2 h`.
pub(crate) fn duration(ns: u64) -> String {
    let units = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "min"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "µs"),
    ];
    let (factor, unit) = units
        .into_iter()
        .find(|(factor, _)| ns >= *factor)
        .unwrap_or((1, "ns"));
    let value = format!("{:.1}", ns as f64 / factor as f64);
    format!(
        "{} {unit}",
        value.trim_end_matches('0').trim_end_matches('.')
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_numbers_are_readable() {
        let ns = 1_795_268_701_123_456_789;
        assert_eq!(time(ns, 0), "2026-11-21 13:45:01Z");
        assert_eq!(time(ns, 3), "2026-11-21 13:45:01.123Z");
        assert_eq!(time(ns, 9), "2026-11-21 13:45:01.123456789Z");
        assert_eq!(short(0.0), "0 ");
        assert_eq!(short(1_250_000.0), "1.25 M");
        assert_eq!(short(100.0), "100 ");
        assert_eq!(short(0.00123), "0.0012 ");
        assert_eq!(duration(1_500_000_000), "1.5 s");
        assert_eq!(duration(0), "0 ns");
        assert_eq!(duration(7_200_000_000_000), "2 h");
        assert_eq!(escape("a\x1b[2J"), "a\\x1b[2J");
    }
}
