//! The Community ID of a flow, version 1: what Zeek, Suricata, Arkime and Wireshark call the same flow, in both of its directions.
//!
//! `1:` and the base64 of a SHA-1 over seed, addresses, protocol, a zero byte and ports, the smaller end first
//! (github.com/corelight/community-id-spec).

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha1::{Digest, Sha1};

use super::Flow;

impl Flow {
    /// The Community ID with seed 0; `None` where it is not known.
    pub fn community_id(&self) -> Option<String> {
        let ports = (self.ports != (0, 0)).then_some(self.ports);
        community_id(self.protocol, (self.from, self.to), ports)
    }
}

/// The Community ID with seed 0. `None` for what takes ports and has none here, as fragments after the first; for ICMP, whose
/// types and codes no flow of ours has; and for addresses of different kinds.
pub fn community_id(
    protocol: u8,
    (from, to): (IpAddr, IpAddr),
    ports: Option<(u16, u16)>,
) -> Option<String> {
    let ports = match protocol {
        TCP | UDP | SCTP => Some(ports?),
        ICMP | ICMP6 => return None,
        _ => None,
    };
    let (from_port, to_port) = ports.unwrap_or_default();
    let [low, high] = match (from, from_port) <= (to, to_port) {
        true => [(from, from_port), (to, to_port)],
        false => [(to, to_port), (from, from_port)],
    };
    let mut hash = Sha1::new();
    hash.update([0, 0]);
    match (low.0, high.0) {
        (IpAddr::V4(low), IpAddr::V4(high)) => {
            hash.update(low.octets());
            hash.update(high.octets());
        }
        (IpAddr::V6(low), IpAddr::V6(high)) => {
            hash.update(low.octets());
            hash.update(high.octets());
        }
        _ => return None,
    }
    hash.update([protocol, 0]);
    if ports.is_some() {
        hash.update(low.1.to_be_bytes());
        hash.update(high.1.to_be_bytes());
    }
    Some(format!("1:{}", STANDARD.encode(hash.finalize())))
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;
const SCTP: u8 = 132;

#[cfg(test)]
mod tests {
    use super::*;

    /// From the specification's baseline.
    #[test]
    fn both_directions_have_the_id_that_others_give() {
        for (protocol, from, to, ports, expected) in [
            (
                6,
                "128.232.110.120",
                "66.35.250.204",
                (34855, 80),
                "1:LQU9qZlK+B5F3KDmev6m5PMibrg=",
            ),
            (
                17,
                "192.168.1.52",
                "8.8.8.8",
                (54585, 53),
                "1:d/FP5EW3wiY1vCndhwleRRKHowQ=",
            ),
            (
                132,
                "192.168.170.8",
                "192.168.170.56",
                (7, 80),
                "1:jQgCxbku+pNGw8WPbEc/TS/uTpQ=",
            ),
        ] {
            let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
            let there = community_id(protocol, (from, to), Some(ports));
            let back = community_id(protocol, (to, from), Some((ports.1, ports.0)));
            assert_eq!(there.as_deref(), Some(expected));
            assert_eq!(back.as_deref(), Some(expected));
        }
    }

    #[test]
    fn what_has_no_ports_has_an_id_only_if_it_takes_none() {
        let ends = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let esp = community_id(50, ends, None);
        assert!(esp.is_some_and(|id| id.starts_with("1:") && id.len() == 30));
        for protocol in [ICMP, TCP, UDP, ICMP6, SCTP] {
            assert_eq!(community_id(protocol, ends, None), None);
        }
        let mixed = (ends.0, "2001:db8::1".parse().unwrap());
        assert_eq!(community_id(TCP, mixed, Some((1, 2))), None);
    }
}
