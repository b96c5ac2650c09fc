//! Values of settings: how they are read, and how they are said.

use std::fmt::{self, Display};
use std::str::FromStr;

use vnplug_frame::aggregate::MAX_SEGMENTS;

/// A set of VLANs.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct VlanSet(
    /// A bit for each; `None`: empty, as most are.
    Option<Box<[u64; 64]>>,
);

impl VlanSet {
    /// Without any.
    pub const NONE: Self = Self(None);

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a VLAN is in it.
    #[inline]
    pub fn contains(&self, vlan: u16) -> bool {
        let bits = |bits: &[u64; 64]| bits[usize::from(vlan & 0xfff) / 64] >> (vlan % 64) & 1 == 1;
        self.0.as_deref().is_some_and(bits)
    }

    /// Puts one in, or out.
    pub fn put(&mut self, vlan: u16, is_in: bool) {
        let bits = self.0.get_or_insert_with(|| Box::new([0; 64]));
        let word = &mut bits[usize::from(vlan & 0xfff) / 64];
        let bit = 1 << (vlan % 64);
        if is_in {
            *word |= bit;
        } else {
            *word &= !bit;
        }
        if bits.iter().all(|word| *word == 0) {
            self.0 = None;
        }
    }

    /// Those in it, in order.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        (0..4096).filter(|vlan| self.contains(*vlan))
    }
}

impl fmt::Debug for VlanSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VlanSet({self})")
    }
}

impl FromStr for VlanSet {
    type Err = String;

    /// `1+5-9`, `all`, `no`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut set = Self::default();
        let text = match text {
            "no" | "none" | "" => return Ok(set),
            "all" => "1-4094",
            text => text,
        };
        let bad = || format!("trunk is VLANs from 1 to 4094 as 1+5-9, or all, or no, not {text:?}");
        for part in parts(text) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let id = |text: &str| {
                let id = text.parse::<u16>().ok();
                id.filter(|id| (1..4095).contains(id)).ok_or_else(bad)
            };
            let (first, last) = (id(first)?, id(last)?);
            if first > last {
                return Err(bad());
            }
            (first..=last).for_each(|vlan| set.put(vlan, true));
        }
        Ok(set)
    }
}

impl Display for VlanSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut plus = "";
        let mut next = 0;
        if self.is_empty() {
            return f.write_str("no");
        }
        while let Some(first) = (next..4096).find(|vlan| self.contains(*vlan)) {
            let end = (first..4096).find(|vlan| !self.contains(*vlan));
            next = end.unwrap_or(4096);
            match next - 1 {
                last if last == first => write!(f, "{plus}{first}")?,
                last => write!(f, "{plus}{first}-{last}")?,
            }
            plus = "+";
        }
        Ok(())
    }
}

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

/// A list's parts.
pub(super) fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split('+').filter(|part| !part.is_empty())
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
pub(super) fn rate(key: &str, value: &str) -> Result<u64, String> {
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

/// `20`, `off`: 0.
pub(super) fn segments(key: &str, value: &str) -> Result<u8, String> {
    let bad =
        || format!("{key} is a number of segments from 2 to {MAX_SEGMENTS}, or off, not {value:?}");
    match value {
        "off" | "no" | "none" | "0" => Ok(0),
        _ => {
            let count = value.parse().ok();
            let count = count.filter(|it| (2..=MAX_SEGMENTS).contains(&usize::from(*it)));
            count.ok_or_else(bad)
        }
    }
}

/// An address of one station, with colons, dots or hyphens.
pub(super) fn mac(text: &str) -> Result<[u8; 6], String> {
    let bad = || format!("{text:?} is no station's address, as 52:54:00:12:34:56 is");
    let mut address = [0; 6];
    let mut parts = text.split([':', '.', '-']);
    for byte in &mut address {
        let part = parts.next().filter(|part| (1..=2).contains(&part.len()));
        *byte = u8::from_str_radix(part.ok_or_else(bad)?, 16).map_err(|_| bad())?;
    }
    match parts.next().is_none() && address[0] & 1 == 0 {
        true => Ok(address),
        false => Err(bad()),
    }
}

pub(super) fn mac_text(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}
