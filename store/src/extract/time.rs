//! Times as people write them.

use std::fmt;

use vnplug_ring::units;

use crate::name;

/// Reads a time: nanoseconds since 1970 UTC.
///
/// RFC 3339 (`2026-11-21T13:45:01.5Z`, `2026-11-21 14:45:01+01:00`; UTC if no zone is given, midnight if
/// no time of day is), the same as segments' names have it (`20261121T134501.123456789Z`), seconds since
/// 1970 (`1795268701.123456789`), `now`, or a time before `now_ns`: `-10m`, `-1h30m`, `-250ms`
/// ([`units::duration`], with a unit).
///
/// # Errors
/// [`BadTime`] if it is none of these.
pub fn parse_time(text: &str, now_ns: u64) -> Result<u64, BadTime> {
    let text = text.trim();
    // A number alone is seconds since 1970, and not seconds ago.
    let has_unit = text.ends_with(|c: char| c.is_ascii_alphabetic());
    let parsed = match text.strip_prefix('-') {
        _ if text == "now" => Some(now_ns),
        Some(ago) if has_unit => nanoseconds(ago).map(|ns| now_ns.saturating_sub(ns)),
        Some(_) => None,
        None if text.get(4..5) == Some("-") => calendar(text),
        None if text.get(8..9) == Some("T") => compact(text),
        None if has_unit => None,
        None => nanoseconds(text),
    };
    parsed.ok_or_else(|| BadTime(text.to_owned()))
}

/// What [`units::duration`] reads, in nanoseconds.
fn nanoseconds(text: &str) -> Option<u64> {
    u64::try_from(units::duration(text).ok()?.as_nanos()).ok()
}

/// RFC 3339, with a blank for the T and without zone or time of day, too.
fn calendar(text: &str) -> Option<u64> {
    let date = text.get(..10)?;
    let rest = text
        .get(10..)?
        .strip_prefix(['T', 't', ' '])
        .unwrap_or(&text[10..]);
    let zone = rest.find(['Z', 'z', '+', '-']).unwrap_or(rest.len());
    let (clock, zone) = rest.split_at(zone);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let clock = match clock {
        "" => "00:00:00".to_owned(),
        short if short.len() == 5 => format!("{short}:00"),
        full => full.to_owned(),
    };
    let (date, clock) = (digits(date, '-', 8)?, digits(&clock, ':', 6)?);
    if fraction.len() > 9 {
        return None;
    }
    let utc = name::parse_time(&format!("{date}T{clock}.{fraction:0<9}Z"))?;
    if zone.is_empty() || zone.eq_ignore_ascii_case("z") {
        return Some(utc);
    }
    let (hours, minutes) = zone[1..].split_once(':')?;
    let (hours, minutes): (u64, u64) = (hours.parse().ok()?, minutes.parse().ok()?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let ahead = (hours * 60 + minutes) * 60 * NS;
    if zone.starts_with('+') {
        utc.checked_sub(ahead)
    } else {
        utc.checked_add(ahead)
    }
}

/// ISO 8601 without separators: as [`name::time`] writes it, also with less or no fraction.
fn compact(text: &str) -> Option<u64> {
    let part = |from, to| text.get(from..to);
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let (hour, minute, rest) = (part(9, 11)?, part(11, 13)?, text.get(13..)?);
    calendar(&format!("{year}-{month}-{day}T{hour}:{minute}:{rest}"))
}

/// `text` without the separators, if it has `count` digits then.
fn digits(text: &str, separator: char, count: usize) -> Option<String> {
    let digits: String = text.split(separator).collect();
    let good = digits.len() == count && text.split(separator).count() == 3;
    (good && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(digits)
}

/// Not a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTime(String);

impl fmt::Display for BadTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is no time: write 2026-11-21T13:45:01Z, seconds since 1970, now, or -1h30m",
            self.0
        )
    }
}

impl std::error::Error for BadTime {}

const NS: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let now = 1_795_268_701_123_456_789;
        for (text, expected) in [
            ("2026-11-21T13:45:01.123456789Z", now),
            ("2026-11-21 13:45:01.123456789", now),
            ("2026-11-21T14:45:01.123456789+01:00", now),
            ("2026-11-21t08:15:01.123456789-05:30", now),
            ("2026-11-21T13:45", 1_795_268_700 * NS),
            ("2026-11-21", 1_795_219_200 * NS),
            ("20261121T134501.123456789Z", now),
            ("20261121T134501.1Z", 1_795_268_701_100_000_000),
            ("20261121T134501Z", 1_795_268_701 * NS),
            ("20261121T134501", 1_795_268_701 * NS),
            ("20261121T144501+01:00", 1_795_268_701 * NS),
            ("1795268701.123456789", now),
            ("1795268701", 1_795_268_701 * NS),
            ("0", 0),
            ("now", now),
            ("-10m", now - 600 * NS),
            ("-1h30m", now - 5400 * NS),
            ("-250ms", now - NS / 4),
            ("-0.5s", now - NS / 2),
            ("-100000d", 0),
        ] {
            assert_eq!(parse_time(text, now), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "-",
            "yesterday",
            "10m",
            "-10",
            "-10x",
            "-1.2.3s",
            "2026-13-01",
            "2026-11-21T25:00:00Z",
            "2026-11-21T13:45:01+1",
            "2026-11-21T13:45:01.1234567891Z",
            "1e9",
            "99999999999999999999",
            "2026-1121",
            "2026-11-21T134501Z",
            "2026-11-21é",
            "20261121T1345",
            "20261121T13:45:01Z",
            "20261321T134501Z",
            "20261121T134501.12345678é",
        ] {
            assert!(parse_time(text, 1 << 60).is_err(), "{text}");
        }
    }
}
