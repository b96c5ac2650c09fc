//! Sizes and times as people write and read them: in options of every command, in the daemon's configuration,
//! on the page.
//!
//! | | examples | units |
//! |---|---|---|
//! | size | `65536`, `64M`, `4MiB`, `1 gb` | bytes; `K`, `M`, `G`, `T`, powers of 1024, in any case and with `B` or `iB` |
//! | time | `5`, `1.5s`, `200ms`, `1h30m` | seconds; `ns`, `us`, `ms`, `s`, `m`, `h`, `d`; several are added |
//!
//! It stands here because everybody reaches it: the daemon, the commands, the recorder.

use std::fmt;
use std::time::Duration;

/// Reads a number of bytes.
///
/// # Errors
/// [`BadUnits`], which says what to write.
pub fn size(text: &str) -> Result<u64, BadUnits> {
    let bad = || BadUnits::Size(text.to_owned());
    let whole = text.trim();
    let end = whole.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = whole.split_at(end.unwrap_or(whole.len()));
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(bad()),
    };
    if number.is_empty() {
        return Err(bad());
    }
    let bytes = number.parse().ok();
    bytes
        .and_then(|number: u64| number.checked_mul(1 << shift))
        .ok_or_else(|| BadUnits::TooLarge(text.to_owned()))
}

/// Days since 1970-01-01 as year, month, day. The year begins in March, so that a leap day is its
/// last; a cycle of 400 years has 146,097 days.
pub fn civil(days: u64) -> (u64, u64, u64) {
    let day = days + 719_468; // since 0000-03-01
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march = (5 * of_year + 2) / 153;
    let month = if march < 10 { march + 3 } else { march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, of_year - (153 * march + 2) / 5 + 1)
}

/// The inverse of [`civil`], for years from 1970 on.
pub fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = year - u64::from(month <= 2);
    let (era, year_of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
}

/// Reads a length of time; a number alone is one of seconds.
///
/// # Errors
/// [`BadUnits`], which says what to write.
pub fn duration(text: &str) -> Result<Duration, BadUnits> {
    let mut rest = text.trim();
    if let Some(sum_ns) = decimal(rest, NS) {
        return whole(sum_ns).ok_or_else(|| BadUnits::TooLarge(text.to_owned()));
    }
    let bad = || BadUnits::Duration(text.to_owned());
    let mut sum_ns = 0_u128;
    loop {
        let end = rest.find(|c: char| c != '.' && !c.is_ascii_digit());
        let (number, behind) = rest.split_at(end.ok_or_else(bad)?);
        let unit = behind.trim_start();
        let end = unit.find(|c: char| !c.is_ascii_alphabetic());
        let (unit, behind) = unit.split_at(end.unwrap_or(unit.len()));
        let factor = match unit {
            "ns" => 1,
            "us" => 1000,
            "ms" => 1_000_000,
            "s" => NS,
            "m" => 60 * NS,
            "h" => 3600 * NS,
            "d" => 86_400 * NS,
            _ => return Err(bad()),
        };
        let part = decimal(number, factor).ok_or_else(bad)?;
        // Both are less than 2^128 by far: see `decimal`.
        sum_ns = sum_ns.saturating_add(part);
        rest = behind.trim_start();
        if rest.is_empty() {
            return whole(sum_ns).ok_or_else(|| BadUnits::TooLarge(text.to_owned()));
        }
    }
}

/// A number with or without a fraction, at most 20 and 18 digits, times `factor`.
fn decimal(text: &str, factor: u128) -> Option<u128> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let empty = whole.is_empty() && fraction.is_empty();
    if empty || whole.len() > 20 || fraction.len() > 18 || !digits(whole) || !digits(fraction) {
        return None;
    }
    // An empty one stands for 0.
    let number = |text: &str| text.parse::<u128>().unwrap_or(0);
    let part = number(fraction) * factor / 10_u128.pow(fraction.len() as u32);
    Some(number(whole) * factor + part)
}

fn whole(ns: u128) -> Option<Duration> {
    let seconds = u64::try_from(ns / NS).ok()?;
    Some(Duration::new(seconds, (ns % NS) as u32))
}

/// A number with a decimal prefix: `1.25 M`, `900 `.
#[must_use]
pub fn short(number: f64) -> String {
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
#[must_use]
pub fn span(ns: u64) -> String {
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

/// Not a size, or not a length of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadUnits {
    /// Not a size.
    Size(String),
    /// Not a length of time.
    Duration(String),
    /// More than there is a number for.
    TooLarge(String),
}

impl fmt::Display for BadUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(text) => write!(
                f,
                "{text:?} is no size: write for example 65536, 64M or 1GiB (K, M, G, T)"
            ),
            Self::Duration(text) => write!(
                f,
                "{text:?} is no time: write for example 5 (seconds), 200ms, 30d or 1h30m (ns, us, \
                 ms, s, m, h, d)"
            ),
            Self::TooLarge(text) => write!(f, "{text:?} is too large"),
        }
    }
}

impl std::error::Error for BadUnits {}

impl From<BadUnits> for String {
    fn from(bad: BadUnits) -> Self {
        bad.to_string()
    }
}

const NS: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_however_written() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64k", 65536),
            ("64M", 64 << 20),
            ("4MiB", 4 << 20),
            ("4 mb", 4 << 20),
            (" 1G ", 1 << 30),
            ("100B", 100),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "M", "-1", "1.5M", "1X", "1MM", "0x10", "1ib", "1 2", "1M5",
        ] {
            assert_eq!(size(text), Err(BadUnits::Size(text.to_owned())));
        }
        for text in ["99999999999T", "18446744073709551616", "16777216T"] {
            assert_eq!(size(text), Err(BadUnits::TooLarge(text.to_owned())));
        }
    }

    #[test]
    fn times_have_units_and_default_to_seconds() {
        for (text, ns) in [
            ("5", 5_000_000_000),
            ("0", 0),
            ("1.5s", 1_500_000_000),
            (".5", 500_000_000),
            ("200ms", 200_000_000),
            ("1000us", 1_000_000),
            ("7ns", 7),
            ("2m", 120_000_000_000),
            ("1h", 3_600_000_000_000),
            ("30d", 30 * 86_400_000_000_000),
            ("1h30m", 5_400_000_000_000),
            (" 1h 30 m ", 5_400_000_000_000),
            ("1d12h", 36 * 3_600_000_000_000),
            ("1m0.5s", 60_500_000_000),
            ("1795268701.123456789", 1_795_268_701_123_456_789),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        for text in [
            "", "s", "-1", "1x", "nan", "inf", "1e300", ".", "1h30", "1.2.3s", "1 2s", "1sm", "5S",
            "1h-30m", "1µs",
        ] {
            assert_eq!(duration(text), Err(BadUnits::Duration(text.to_owned())));
        }
        let long = "99999999999999999999d";
        assert_eq!(duration(long), Err(BadUnits::TooLarge(long.to_owned())));
    }

    #[test]
    fn numbers_and_times_are_readable() {
        assert_eq!(short(0.0), "0 ");
        assert_eq!(short(1_250_000.0), "1.25 M");
        assert_eq!(short(100.0), "100 ");
        assert_eq!(short(0.00123), "0.0012 ");
        assert_eq!(span(1_500_000_000), "1.5 s");
        assert_eq!(span(0), "0 ns");
        assert_eq!(span(7_200_000_000_000), "2 h");
    }

    #[test]
    fn what_is_wrong_says_what_to_write() {
        assert_eq!(
            size("big").unwrap_err().to_string(),
            "\"big\" is no size: write for example 65536, 64M or 1GiB (K, M, G, T)"
        );
        let time = duration("soon\u{1b}").unwrap_err().to_string();
        assert!(time.contains("1h30m") && time.starts_with("\"soon\\u{1b}\""));
    }
}
