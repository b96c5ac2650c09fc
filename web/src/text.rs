//! Times for people, and foreign text as a terminal may see it.

use vnplug_store::name;

pub(crate) use vnplug_ring::text::escape;
pub(crate) use vnplug_ring::units::{short, span as duration};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_readable() {
        let ns = 1_795_268_701_123_456_789;
        assert_eq!(time(ns, 0), "2026-11-21 13:45:01Z");
        assert_eq!(time(ns, 3), "2026-11-21 13:45:01.123Z");
        assert_eq!(time(ns, 9), "2026-11-21 13:45:01.123456789Z");
    }
}
