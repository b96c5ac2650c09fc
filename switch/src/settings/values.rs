//! Values of settings: how they are read, and how they are said.

use std::fmt::{self, Display};
use std::str::FromStr;

use vnplug_frame::aggregate::MAX_SEGMENTS;
pub use vnplug_frame::lock::VlanSet;
pub(super) use vnplug_frame::lock::{mac, mac_text, parts};

/// How many of a million frames are lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Loss(
    /// Of a million.
    pub u32,
);

impl FromStr for Loss {
    type Err = String;

    /// `1%`, `0.05%`, `no`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("loss is a percentage as 0.5%, or no, not {text:?}");
        let number = match text {
            "no" | "none" => return Ok(Self(0)),
            text => text.trim_end_matches('%').parse::<f64>(),
        };
        let percent = number.ok().filter(|it| (0.0..=100.0).contains(it));
        Ok(Self((percent.ok_or_else(bad)? * 10_000.0).round() as u32))
    }
}

impl Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", f64::from(self.0) / 10_000.0)
    }
}

pub(super) fn yes(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "yes" | "true" | "on" | "1" => Ok(true),
        "no" | "false" | "off" | "0" => Ok(false),
        _ => Err(format!("{key} is yes or no, not {value:?}")),
    }
}

pub(super) fn choice<'a, const N: usize>(
    key: &str,
    value: &str,
    choices: [&'a str; N],
) -> Result<&'a str, String> {
    let found = choices.into_iter().find(|choice| *choice == value);
    found.ok_or_else(|| format!("{key} is {}, not {value:?}", choices.join(" or ")))
}

/// `100/s`, `100`, `no`: 0.
pub(super) fn per_second(key: &str, value: &str) -> Result<u32, String> {
    let bad = |_| format!("{key} is a number of frames a second as 1000/s, or no, not {value:?}");
    match value {
        "no" | "none" => Ok(0),
        _ => value.trim_end_matches("/s").parse().map_err(bad),
    }
}

/// `20ms`, `500us`, `1s`, `no`; in microseconds.
pub(super) fn duration(key: &str, value: &str) -> Result<u32, String> {
    let bad = || format!("{key} is a time up to 10s as 20ms, 500us or 1s, not {value:?}");
    if value == "no" || value == "0" {
        return Ok(0);
    }
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let found = units
        .iter()
        .find_map(|(unit, us)| Some((value.strip_suffix(unit)?, us)));
    let (number, us) = found.ok_or_else(bad)?;
    let time = number.parse::<f64>().map_err(|_| bad())? * us;
    match (0.0..=10e6).contains(&time) {
        true => Ok(time.round() as u32),
        false => Err(bad()),
    }
}

/// `10M`, `1.5G`, `64Kbit/s`, `no`; in bits a second, 0 for any number.
///
/// # Errors
/// How it is written.
pub fn rate(key: &str, value: &str) -> Result<u64, String> {
    let bad =
        || format!("{key} is a number of bits a second as 64K, 10M or 1G, or no, not {value:?}");
    if value == "no" {
        return Ok(0);
    }
    let text = value.trim_end_matches("/s").trim_end_matches("bit");
    let units = [("K", 1e3), ("M", 1e6), ("G", 1e9), ("", 1.0)];
    let found = units
        .iter()
        .find_map(|(unit, times)| Some((text.strip_suffix(unit)?, times)));
    let (number, times) = found.ok_or_else(bad)?;
    let bits = number.parse::<f64>().map_err(|_| bad())? * times;
    match (1000.0..=1e12).contains(&bits) {
        true => Ok(bits.round() as u64),
        false => Err(bad() + "; at least 1K"),
    }
}

/// `20`; `off`, or one segment, which is as it came: 0.
pub(super) fn segments(key: &str, value: &str) -> Result<u8, String> {
    let bad =
        || format!("{key} is a number of segments from 1 to {MAX_SEGMENTS}, or off, not {value:?}");
    match value {
        "off" | "no" | "none" | "0" | "1" => Ok(0),
        _ => {
            let count = value.parse().ok();
            let count = count.filter(|it| (2..=MAX_SEGMENTS).contains(&usize::from(*it)));
            count.ok_or_else(bad)
        }
    }
}
