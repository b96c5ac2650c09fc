//! What a grant to send says: `key=value` with commas between them, a filter last.

use std::str::FromStr;
use std::sync::Arc;

use vnplug_filter::Program;
use vnplug_frame::lock::{SourceLock, mac, parts};
use vnplug_path::engine::terms::{MAX_WEIGHT, Terms};
use vnplug_switch::settings::rate;

/// The terms on which somebody sends, before their filter is compiled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SendTerms {
    /// Whose frames.
    pub lock: SourceLock,
    /// Which frames, in the language of pcap-filter; empty = any.
    pub filter: String,
    /// Its part in proportion to those of others; 0 = 1.
    pub weight: u32,
    /// Bits in a second; 0 = any number.
    pub bits_per_s: u64,
}

impl SendTerms {
    /// As a queue's thread has them.
    pub(crate) fn with(self, filter: Option<Arc<Program>>) -> Arc<Terms> {
        Arc::new(Terms {
            lock: self.lock,
            filter,
            weight: self.weight.max(1),
            bytes_per_s: self.bits_per_s.div_ceil(8),
        })
    }
}

impl FromStr for SendTerms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut terms = Self::default();
        let mut rest = text;
        while !rest.is_empty() {
            // The filter has commas and all else of its own.
            if let Some(filter) = rest.strip_prefix("filter=") {
                filter.trim().clone_into(&mut terms.filter);
                break;
            }
            let (word, after) = rest.split_once(',').unwrap_or((rest, ""));
            rest = after;
            let Some((key, value)) = word.split_once('=') else {
                return Err(format!("{word:?} is not KEY=VALUE: there are {KEYS}"));
            };
            match key {
                "mac" => {
                    let all: Result<Vec<_>, _> = parts(value).map(mac).collect();
                    terms.lock.stations = all?;
                    if !(1..=MAX_STATIONS).contains(&terms.lock.stations.len()) {
                        return Err(format!("mac is 1 to {MAX_STATIONS} addresses"));
                    }
                }
                "vlan" => terms.lock.vlans = Some(value.parse()?),
                "ip" => terms.lock.networks = value.parse()?,
                "weight" => {
                    let weight = value
                        .parse()
                        .ok()
                        .filter(|it| (1..=MAX_WEIGHT).contains(it));
                    let bad =
                        || format!("weight is a number from 1 to {MAX_WEIGHT}, not {value:?}");
                    terms.weight = weight.ok_or_else(bad)?;
                }
                "rate" => terms.bits_per_s = rate(key, value)?,
                _ => return Err(format!("sending has no {key:?}: there are {KEYS}")),
            }
        }
        Ok(terms)
    }
}

/// What may be said.
const KEYS: &str = "mac=MAC+…, vlan=ID+… (no: without a tag), ip=NETWORK+…, rate=BITS, weight=N, and last filter=EXPRESSION";
/// Addresses that a sender has at most.
const MAX_STATIONS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_read_and_a_filter_has_the_rest() {
        let text = "mac=02:00:00:00:00:01+02:00:00:00:00:02,vlan=no+10,ip=10.0.0.0/8+fe80::/10,filter=port 53, or x=1";
        let terms: SendTerms = text.parse().unwrap();
        assert_eq!(terms.lock.stations.len(), 2);
        assert_eq!(terms.lock.vlans.unwrap().to_string(), "no+10");
        assert_eq!(terms.lock.networks.to_string(), "10.0.0.0/8+fe80::/10");
        assert_eq!(terms.filter, "port 53, or x=1");
        let terms: SendTerms = "rate=10M,weight=3".parse().unwrap();
        assert_eq!((terms.bits_per_s, terms.weight), (10_000_000, 3));
        let terms = terms.with(None);
        assert_eq!((terms.bytes_per_s, terms.weight), (1_250_000, 3));
        assert_eq!("".parse(), Ok(SendTerms::default()));
        for (bad, why) in [
            ("mac=", "1 to 64"),
            ("mac=01:00:00:00:00:01", "no station's address"),
            ("vlan=4095", "1 to 4094"),
            ("ip=10.0.0.300", "no address or network"),
            ("color=blue", "mac=MAC"),
            ("mac", "KEY=VALUE"),
            ("weight=0", "1 to 100"),
            ("rate=x", "bits a second"),
        ] {
            let error = bad.parse::<SendTerms>().unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
