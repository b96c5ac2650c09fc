//! What the options of `vnplug record` may say.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vnplug_store::name;
use vnplug_store::record::Quota;

use crate::text;

/// The filters and lengths of the ports that together deliver each packet once.
pub(super) fn parts(filter: &str, slices: &[(String, u32)], snaplen: u32) -> Vec<(String, u32)> {
    let and = |terms: &[String]| terms.join(" and ");
    let mut before: Vec<String> = match filter.trim() {
        "" => Vec::new(),
        filter => vec![format!("({filter})")],
    };
    let mut parts = Vec::new();
    for (expression, bytes) in slices {
        let mut terms = before.clone();
        terms.push(format!("({expression})"));
        parts.push((and(&terms), *bytes));
        before.push(format!("not ({expression})"));
    }
    parts.push((and(&before), snaplen));
    parts
}

pub(super) fn recording_name(text: &str) -> Result<String, String> {
    match name::is_recording_name(text) {
        true => Ok(text.to_owned()),
        false => Err("1 to 64 letters, digits, `.`, `_` and `-`; not `.` or `-` first".into()),
    }
}

pub(super) fn slice(text: &str) -> Result<(String, u32), String> {
    let wrong = || format!("`{text}`: write for example 'tcp port 443=128'");
    let (expression, bytes) = text.rsplit_once('=').ok_or_else(wrong)?;
    let bytes = text::length(bytes).map_err(|_| wrong())?;
    match (expression.trim(), bytes) {
        ("", _) | (_, 0) => Err(wrong()),
        (expression, bytes) => Ok((expression.to_owned(), bytes)),
    }
}

pub(super) fn ring(text: &str) -> Result<u64, String> {
    match text::size(text)? {
        bytes if bytes == 0 || bytes >= SMALLEST_RING => Ok(bytes),
        _ => Err("64K or more, or 0 for the daemon's".into()),
    }
}

pub(super) fn quota(text: &str) -> Result<Quota, String> {
    match text.trim().strip_suffix('%') {
        Some(percent) => match percent.trim().parse() {
            Ok(percent @ 1..=100) => Ok(Quota::Percent(percent)),
            _ => Err(format!("`{text}`: 1% to 100%")),
        },
        None => match text::size(text)? {
            bytes if bytes >= 8 << 20 => Ok(Quota::Bytes(bytes)),
            _ => Err("8M or more".into()),
        },
    }
}

/// An age is a second or more.
pub(super) fn age(text: &str) -> Result<Duration, String> {
    match text::duration(text)? {
        age if age >= Duration::from_secs(1) => Ok(age),
        _ => Err("1s or more".into()),
    }
}

/// How long ago a time was, as far as the clock tells: `12.3 s`.
pub(super) fn since(at_ns: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ns = now.unwrap_or_default().as_nanos() as u64;
    format!("{:.1} s", now_ns.saturating_sub(at_ns) as f64 / 1e9)
}

const SMALLEST_RING: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_deliver_each_packet_once() {
        let owned = |parts: &[(&str, u32)]| -> Vec<(String, u32)> {
            parts
                .iter()
                .map(|(filter, bytes)| ((*filter).to_owned(), *bytes))
                .collect()
        };
        assert_eq!(parts("", &[], 0), owned(&[("", 0)]));
        assert_eq!(parts(" ip ", &[], 64), owned(&[("(ip)", 64)]));
        let slices = owned(&[("udp", 128), ("port 443", 96)]);
        let expected = owned(&[
            ("(ip) and (udp)", 128),
            ("(ip) and not (udp) and (port 443)", 96),
            ("(ip) and not (udp) and not (port 443)", 0),
        ]);
        assert_eq!(parts("ip", &slices, 0), expected);
    }

    #[test]
    fn a_slice_needs_both_halves() {
        assert_eq!(slice("ether[0] = 1=64"), Ok(("ether[0] = 1".into(), 64)));
        assert_eq!(slice("udp=1K"), Ok(("udp".into(), 1024)));
        for text in ["", "udp", "=64", "udp=", "udp=0", "udp=-1"] {
            assert!(slice(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_ring_holds_jumbo_frames() {
        assert_eq!((ring("0"), ring("64K")), (Ok(0), Ok(64 << 10)));
        for text in ["1", "63K", "-1", "x"] {
            assert!(ring(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_age_has_units() {
        assert_eq!(age("2d"), Ok(Duration::from_secs(2 * 86_400)));
        assert_eq!(age("1h30m"), Ok(Duration::from_secs(5400)));
        for text in ["0", "5ms", "-1h", "x"] {
            assert!(age(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_quota_is_a_size_or_a_share() {
        assert_eq!(quota("90%"), Ok(Quota::Percent(90)));
        assert_eq!(quota("10G"), Ok(Quota::Bytes(10 << 30)));
        for text in ["0%", "101%", "1K", "x"] {
            assert!(quota(text).is_err(), "{text}");
        }
    }
}
