//! The Community ID of a flow, version 1: what Zeek, Suricata, Arkime and Wireshark call the same flow, in both of its directions.
//!
//! `1:` and the base64 of a SHA-1 over seed, addresses, protocol, a zero byte and ports, the smaller end first
//! (github.com/corelight/community-id-spec). Of ICMP the type is the first port, and the type of the answer the second; where
//! nothing answers it is the code, and the ends stay as they are.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha1::{Digest, Sha1};

use super::Flow;

impl Flow {
    /// The Community ID with seed 0; `None` where it is not known.
    pub fn community_id(&self) -> Option<String> {
        let ports = self.has_ports.then_some(self.ports);
        community_id(self.protocol, (self.from, self.to), ports)
    }
}

/// The Community ID with seed 0; `ports` of ICMP are its type and code. `None` for what takes ports and has none here, as
/// fragments after the first, and for addresses of different kinds.
pub fn community_id(
    protocol: u8,
    (from, to): (IpAddr, IpAddr),
    ports: Option<(u16, u16)>,
) -> Option<String> {
    let mut one_way = false;
    let ports = match protocol {
        TCP | UDP | SCTP => Some(ports?),
        ICMP | ICMP6 => {
            let (kind, code) = ports?;
            let answer = answer(protocol, kind);
            one_way = answer.is_none();
            Some((kind, answer.unwrap_or(code)))
        }
        _ => None,
    };
    let (from_port, to_port) = ports.unwrap_or_default();
    let [low, high] = match one_way || (from, from_port) <= (to, to_port) {
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

/// The type of ICMP that answers one, or that one answers.
fn answer(protocol: u8, kind: u16) -> Option<u16> {
    let pairs: &[(u16, u16)] = match protocol {
        ICMP => &[(8, 0), (13, 14), (15, 16), (10, 9), (17, 18)],
        _ => &[
            (128, 129),
            (133, 134),
            (135, 136),
            (130, 131),
            (139, 140),
            (144, 145),
        ],
    };
    pairs.iter().find_map(|&(asks, answers)| match kind {
        _ if kind == asks => Some(answers),
        _ if kind == answers => Some(asks),
        _ => None,
    })
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
    fn a_question_of_icmp_and_its_answer_have_one_id() {
        let id = |protocol, from: &str, to: &str, kind| {
            let ends = (from.parse().unwrap(), to.parse().unwrap());
            community_id(protocol, ends, Some(kind)).unwrap()
        };
        let (here, there) = ("192.168.0.89", "192.168.0.1");
        assert_eq!(id(1, here, there, (8, 0)), "1:X0snYXpgwiv9TZtqg64sgzUn6Dk=");
        assert_eq!(id(1, there, here, (0, 0)), "1:X0snYXpgwiv9TZtqg64sgzUn6Dk=");
        let (here, there) = ("fe80::200:86ff:fe05:80da", "fe80::260:97ff:fe07:69ea");
        assert_eq!(
            id(58, here, there, (135, 0)),
            "1:dGHyGvjMfljg6Bppwm3bg0LO8TY="
        );
        assert_eq!(
            id(58, there, here, (136, 0)),
            "1:dGHyGvjMfljg6Bppwm3bg0LO8TY="
        );
        // Nothing answers that a host is unreachable.
        assert_ne!(
            id(1, "10.0.0.1", "10.0.0.2", (3, 1)),
            id(1, "10.0.0.2", "10.0.0.1", (3, 1))
        );
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
