//! The words of rules: how places, protocols, ports and directions are written.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::act::Transport;
use crate::floor::{Floor, Network};
use crate::name::Name;
use crate::rules::glob::Glob;
use crate::rules::rule::{Direction, Place, Protocol, Say};

/// Why a word means nothing: what is wrong, and what to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadWord(pub String);

impl std::error::Error for BadWord {}

impl fmt::Display for BadWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Say {
    type Err = BadWord;

    fn from_str(word: &str) -> Result<Self, BadWord> {
        match word {
            "allow" => Ok(Self::Allow),
            "ask" => Ok(Self::Ask),
            "deny" => Ok(Self::Deny),
            _ => Err(BadWord(format!("{word:?} is not allow, ask or deny"))),
        }
    }
}

impl fmt::Display for Say {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Allow => "allow",
            Self::Ask => "ask",
            Self::Deny => "deny",
        })
    }
}

impl FromStr for Direction {
    type Err = BadWord;

    fn from_str(word: &str) -> Result<Self, BadWord> {
        let found = DIRECTIONS.iter().find(|(known, _)| *known == word);
        found.map(|&(_, direction)| direction).ok_or_else(|| {
            BadWord(format!(
                "{word:?} is not a direction: write out, listen, accept, write or execute"
            ))
        })
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = DIRECTIONS.iter().find(|(_, direction)| direction == self);
        f.pad(found.map_or("", |(word, _)| word))
    }
}

impl FromStr for Protocol {
    type Err = BadWord;

    fn from_str(word: &str) -> Result<Self, BadWord> {
        if word == "netlink" {
            return Ok(Self::AnyNetlink);
        }
        if let Some(&(_, transport)) = PROTOCOLS.iter().find(|(known, _)| *known == word) {
            return Ok(Self::Is(transport));
        }
        let numbered = word.split_once(':').and_then(|(kind, number)| match kind {
            "ip" => number.parse().ok().map(Transport::Other),
            "netlink" => number.parse().ok().map(Transport::Netlink),
            "family" => number.parse().ok().map(Transport::Family),
            _ => None,
        });
        numbered.map(Self::Is).ok_or_else(|| {
            BadWord(format!(
                "{word:?} is not a protocol: write tcp, udp, icmp, raw, packet, unix, netlink, netlink:NUMBER, vsock, \
                 ip:NUMBER or family:NUMBER"
            ))
        })
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AnyNetlink => f.pad("netlink"),
            Self::Is(transport) => f.pad(&transport.to_string()),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((word, _)) = PROTOCOLS.iter().find(|(_, transport)| transport == self) {
            return f.pad(word);
        }
        match self {
            Self::Other(number) => write!(f, "ip:{number}"),
            Self::Netlink(number) => write!(f, "netlink:{number}"),
            Self::Family(number) => write!(f, "family:{number}"),
            _ => f.pad("file"),
        }
    }
}

impl FromStr for Place {
    type Err = BadWord;

    fn from_str(word: &str) -> Result<Self, BadWord> {
        if word == "any" {
            return Ok(Self::Any);
        }
        if let Some(&floor) = Floor::ALL.iter().find(|floor| floor.word() == word) {
            return Ok(Self::Floor(floor));
        }
        if let Some(abstract_name) = word.strip_prefix("unix:@") {
            return Ok(Self::Abstract(Glob::text(abstract_name)));
        }
        for (prefix, place) in [
            ("unix:", Self::Unix as fn(Glob) -> Self),
            ("file:", Self::File),
        ] {
            if let Some(path) = word.strip_prefix(prefix) {
                return match path {
                    _ if path.starts_with(['/', '*']) => Ok(place(Glob::path(path))),
                    _ => Err(BadWord(format!(
                        "{word:?}: write the whole path, from / on"
                    ))),
                };
            }
        }
        if let Some(cid) = word.strip_prefix("vsock:") {
            let cid = if cid == "any" {
                Some(None)
            } else {
                cid.parse().ok().map(Some)
            };
            return cid.map(Self::Vsock).ok_or_else(|| {
                BadWord(format!(
                    "{word:?}: write vsock:any, or vsock: and a context id"
                ))
            });
        }
        let address = word
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(word);
        if let Ok(address) = address.parse::<IpAddr>() {
            return Ok(Self::Network(Network::only(address.to_canonical())));
        }
        if let Some((base, prefix)) = word
            .split_once('/')
            .filter(|(base, _)| base.parse::<IpAddr>().is_ok())
        {
            return network(base, prefix).map(Self::Network).ok_or_else(|| {
                BadWord(format!(
                    "{word:?} is not a network: write its first address and its length, as in 10.0.0.0/8"
                ))
            });
        }
        let (name, place) = match word.strip_prefix("*.") {
            Some(domain) => (domain, Self::Below as fn(Name) -> Self),
            None => (word, Self::Name as fn(Name) -> Self),
        };
        let place = Name::new(name).map(place).map_err(|error| {
            BadWord(format!(
                "{word:?} is not an address, network or name ({error}): write example.org, *.example.org, \
                 192.0.2.1, 192.0.2.0/24, any, unix:/PATH, unix:@NAME, vsock:CID, file:/PATH, or one of loopback, \
                 private, link-local, metadata, multicast, reserved"
            ))
        })?;
        // `Any` and `any.` would be names that are written as a word that means much more.
        let written = place.to_string();
        if written == "any" || Floor::ALL.iter().any(|floor| floor.word() == written) {
            return Err(BadWord(format!("{word:?}: write {written}")));
        }
        Ok(place)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Network(network) => write!(f, "{network}"),
            Self::Floor(floor) => write!(f, "{floor}"),
            Self::Name(name) => write!(f, "{name}"),
            Self::Below(name) => write!(f, "*.{name}"),
            Self::Unix(glob) => write!(f, "unix:{glob}"),
            Self::Abstract(glob) => write!(f, "unix:@{glob}"),
            Self::Vsock(None) => write!(f, "vsock:any"),
            Self::Vsock(Some(cid)) => write!(f, "vsock:{cid}"),
            Self::File(glob) => write!(f, "file:{glob}"),
        }
    }
}

/// Reads a port, `443`, or a range of them, `8000-8999`.
///
/// # Errors
/// [`BadWord`] says what to write.
pub fn ports(word: &str) -> Result<RangeInclusive<u16>, BadWord> {
    let (low, high) = word.split_once('-').unwrap_or((word, word));
    match (low.trim().parse(), high.trim().parse()) {
        (Ok(low), Ok(high)) if low <= high => Ok(low..=high),
        _ => Err(BadWord(format!(
            "{word:?} is not a port or a range of ports: write 443 or 8000-8999"
        ))),
    }
}

/// Reads the SHA-256 of a file: 64 hexadecimal digits.
///
/// # Errors
/// [`BadWord`] says what to write.
pub fn hash(word: &str) -> Result<[u8; 32], BadWord> {
    let bad = || {
        BadWord(format!(
            "{word:?} is not a SHA-256: write 64 hexadecimal digits, as sha256sum prints them"
        ))
    };
    if word.len() != 64 || !word.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad());
    }
    let mut hash = [0; 32];
    for (index, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&word[2 * index..2 * index + 2], 16).map_err(|_| bad())?;
    }
    Ok(hash)
}

/// Hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl FromStr for Network {
    type Err = String;

    /// `ADDRESS` or `ADDRESS/PREFIX`.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = match text.split_once('/') {
            Some((base, prefix)) => network(base, prefix),
            None => text
                .parse()
                .ok()
                .map(|it: IpAddr| Self::only(it.to_canonical())),
        };
        found.ok_or_else(|| {
            format!(
                "{text:?} is no network: write ADDRESS or ADDRESS/PREFIX, for example 192.0.2.0/24"
            )
        })
    }
}

fn network(base: &str, prefix: &str) -> Option<Network> {
    let (base, prefix): (IpAddr, u8) = (base.parse().ok()?, prefix.parse().ok()?);
    // ::ffff:10.0.0.0/104 is 10.0.0.0/8: addresses are compared as what they are.
    match base.to_canonical() {
        v4 @ IpAddr::V4(_) if base.is_ipv6() => Network::new(v4, prefix.checked_sub(96)?),
        base => Network::new(base, prefix),
    }
}

const DIRECTIONS: [(&str, Direction); 5] = [
    ("out", Direction::Out),
    ("listen", Direction::Listen),
    ("accept", Direction::Accept),
    ("write", Direction::Write),
    ("execute", Direction::Execute),
];

const PROTOCOLS: [(&str, Transport); 7] = [
    ("tcp", Transport::Tcp),
    ("udp", Transport::Udp),
    ("icmp", Transport::Icmp),
    ("raw", Transport::Raw),
    ("packet", Transport::Packet),
    ("unix", Transport::Unix),
    ("vsock", Transport::Vsock),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_they_are_read() {
        for text in [
            "any",
            "example.org",
            "*.example.org",
            "192.0.2.1",
            "192.0.2.0/24",
            "2001:db8::/32",
            "::1",
            "loopback",
            "metadata",
            "link-local",
            "unix:/run/*.sock",
            "unix:@name",
            "vsock:3",
            "vsock:any",
            "file:/tmp/**",
        ] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        for (text, written) in [
            ("EXAMPLE.org.", "example.org"),
            ("*.Bücher.example", "*.xn--bcher-kva.example"),
            ("[::1]", "::1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), written);
        }
    }

    #[test]
    fn what_means_nothing_says_what_to_write() {
        for text in [
            "",
            "*",
            "*.",
            "exa mple",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "1.2.3",
            "a.*.org",
            "unix:run",
            "vsock:x",
            "http://example.org",
            "example.org:443",
            "a/b",
            "Any",
            "any.",
            "LOOPBACK",
        ] {
            let error = text.parse::<Place>().unwrap_err().to_string();
            assert!(error.contains("write"), "{text}: {error}");
        }
        assert!("TCP".parse::<Protocol>().is_err() && "ip:256".parse::<Protocol>().is_err());
        assert!(ports("0-65536").is_err() && ports("9-8").is_err() && ports("").is_err());
        assert_eq!(ports("8000-8999"), Ok(8000..=8999));
        assert!(
            hash("ab").is_err() && hash(&"g".repeat(64)).is_err() && hash(&"é".repeat(32)).is_err()
        );
        assert_eq!(hex(&hash(&"a1".repeat(32)).unwrap()), "a1".repeat(32));
    }

    #[test]
    fn protocols_are_written_as_they_are_read() {
        for text in [
            "tcp",
            "udp",
            "icmp",
            "raw",
            "packet",
            "unix",
            "netlink",
            "netlink:0",
            "vsock",
            "ip:132",
            "family:31",
        ] {
            assert_eq!(text.parse::<Protocol>().unwrap().to_string(), text);
        }
    }
}
