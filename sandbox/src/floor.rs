//! Addresses that no answer to a question opens: only a rule that somebody wrote by hand, and that
//! names them, does.
//!
//! They are where a program reaches what stands behind the wall with it: the machine's own
//! services, its neighbours, and the services of clouds that hand out keys.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why an address is on the floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Floor {
    /// Services of clouds that answer with credentials: 169.254.169.254 and its kin.
    Metadata,
    /// The machine itself: 127.0.0.0/8, ::1, and 0.0.0.0/8, ::, which Linux takes for it.
    Loopback,
    /// Private networks: RFC 1918, RFC 4193, RFC 6598 (100.64.0.0/10).
    Private,
    /// The link: 169.254.0.0/16, fe80::/10.
    LinkLocal,
    /// Multicast: 224.0.0.0/4, ff00::/8.
    Multicast,
    /// Broadcast and what nobody was given: 240.0.0.0/4, 198.18.0.0/15.
    Reserved,
}

impl Floor {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Metadata,
        Self::Loopback,
        Self::Private,
        Self::LinkLocal,
        Self::Multicast,
        Self::Reserved,
    ];

    /// The floor that `address` is on. The IPv4 addresses [inside an IPv6 address](embedded) are looked at, too.
    pub fn of(address: IpAddr) -> Option<Self> {
        Self::of_itself(address).or_else(|| embedded(address).find_map(Self::of_itself))
    }

    /// The floor that `address` is on, whatever is inside it: what a rule may open by the floor's name.
    pub fn of_itself(address: IpAddr) -> Option<Self> {
        let address = address.to_canonical();
        NETWORKS
            .iter()
            .find(|(network, _)| network.contains(address))
            .map(|&(_, floor)| floor)
    }

    /// The floor that all of `network` is on; `None` also if only a part of it is.
    pub fn of_network(network: Network) -> Option<Self> {
        if u32::from(network.prefix) == width(network.base) {
            return Self::of(network.base);
        }
        let within = |&&(floor, _): &&(Network, Self)| floor.covers(network);
        NETWORKS.iter().find(within).map(|&(_, floor)| floor)
    }

    /// Its word in rules.
    pub fn word(self) -> &'static str {
        match self {
            Self::Metadata => "metadata",
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::LinkLocal => "link-local",
            Self::Multicast => "multicast",
            Self::Reserved => "reserved",
        }
    }
}

impl fmt::Display for Floor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A network: all addresses that share the first `prefix` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    base: IpAddr,
    prefix: u8,
}

impl Network {
    /// The network of `address` with a prefix of `prefix` bits; `None` if that is longer than an address, or if
    /// bits of `address` behind the prefix are set.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let network = Self {
            base: address,
            prefix,
        };
        let whole = u32::from(prefix) <= width(address) && masked(address, prefix) == bits(address);
        whole.then_some(network)
    }

    /// The network that consists of one address.
    pub fn only(address: IpAddr) -> Self {
        Self {
            base: address,
            prefix: if address.is_ipv4() { 32 } else { 128 },
        }
    }

    /// True if `address` is in it.
    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.base.is_ipv4() && masked(address, self.prefix) == bits(self.base)
    }

    /// True if all of `other` is in it.
    pub fn covers(self, other: Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.base)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if u32::from(self.prefix) == width(self.base) {
            return write!(f, "{}", self.base);
        }
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The first `prefix` bits of the address.
fn masked(address: IpAddr, prefix: u8) -> u128 {
    let behind = width(address) - u32::from(prefix);
    bits(address)
        .checked_shr(behind)
        .and_then(|bits| bits.checked_shl(behind))
        .unwrap_or(0)
}

/// The IPv4 addresses that an IPv6 address may reach in the end, by a translator or a tunnel. Whether there is one is not
/// known, so they count where something is refused, and never where something is allowed.
pub fn embedded(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let bits = match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let v4 = |bits: u128| {
        Some(Ipv4Addr::from_bits(
            u32::try_from(bits & 0xffff_ffff).unwrap_or(0),
        ))
    };
    let mut found = [None; 5];
    match bits >> 32 {
        // ::ffff:a.b.c.d; ::a.b.c.d (RFC 4291, section 2.5.5), but ::1 is an address of its own;
        // 64:ff9b::a.b.c.d (RFC 6052); ::ffff:0:a.b.c.d (RFC 2765).
        0xffff | 0x0064_ff9b_0000_0000_0000_0000 | 0xffff_0000 => found[0] = v4(bits),
        0 if bits > 1 => found[0] = v4(bits),
        // 6to4 (RFC 3056).
        _ if bits >> 112 == 0x2002 => found[0] = v4(bits >> 80),
        // Teredo (RFC 4380): the server, and the client with all its bits turned round.
        _ if bits >> 96 == 0x2001_0000 => (found[0], found[1]) = (v4(bits >> 64), v4(!bits)),
        // 64:ff9b:1::/48 (RFC 8215): how long the prefix in use is nobody says, and the bits 64 to 71 are left out.
        _ if bits >> 80 == 0x0064_ff9b_0001 => {
            let packed = bits >> 64 << 56 | bits & ((1 << 56) - 1);
            let of = [packed >> 40, packed >> 32, packed >> 24, bits].map(v4);
            // Bits that are no address mostly look like one of 0.0.0.0/8, which nothing is translated to.
            let is_real = |v4: &Option<Ipv4Addr>| v4.is_some_and(|v4| v4.octets()[0] != 0);
            for (place, v4) in found.iter_mut().zip(of.into_iter().filter(is_real)) {
                *place = v4;
            }
        }
        _ => {}
    }
    // ISATAP (RFC 5214), in any network.
    if matches!(bits >> 32 & 0xffff_ffff, 0x0000_5efe | 0x0200_5efe) {
        found[4] = v4(bits);
    }
    found.into_iter().flatten().map(IpAddr::V4)
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Network {
    Network {
        base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        prefix,
    }
}

const fn v6(bits: u128, prefix: u8) -> Network {
    Network {
        base: IpAddr::V6(Ipv6Addr::from_bits(bits)),
        prefix,
    }
}

/// The first that contains an address says what it is.
const NETWORKS: [(Network, Floor); 26] = [
    (v4(169, 254, 169, 254, 32), Floor::Metadata), // AWS, Google, Azure, OpenStack, …
    (v4(169, 254, 170, 2, 32), Floor::Metadata),   // AWS, containers
    (v4(169, 254, 170, 23, 32), Floor::Metadata),  // AWS, pods
    (v4(100, 100, 100, 200, 32), Floor::Metadata), // Alibaba
    (v4(168, 63, 129, 16, 32), Floor::Metadata),   // Azure
    (v4(192, 0, 0, 192, 32), Floor::Metadata),     // Oracle
    (v6(0xfd00_0ec2 << 96 | 0x254, 128), Floor::Metadata), // AWS
    (v6(0xfd00_0ec2 << 96 | 0x23, 128), Floor::Metadata), // AWS, pods
    (v6(0xfd20_00ce << 96 | 0x254, 128), Floor::Metadata), // Google
    (v4(0, 0, 0, 0, 8), Floor::Loopback),
    (v4(127, 0, 0, 0, 8), Floor::Loopback),
    (v6(0, 127), Floor::Loopback), // :: and ::1
    (v4(10, 0, 0, 0, 8), Floor::Private),
    (v4(172, 16, 0, 0, 12), Floor::Private),
    (v4(192, 168, 0, 0, 16), Floor::Private),
    (v4(100, 64, 0, 0, 10), Floor::Private),
    (v4(192, 0, 0, 0, 24), Floor::Private),
    (v6(0xfc << 120, 7), Floor::Private),
    (v6(0xfec0 << 112, 10), Floor::Private), // site-local, RFC 3879
    (v4(169, 254, 0, 0, 16), Floor::LinkLocal),
    (v6(0xfe80 << 112, 10), Floor::LinkLocal),
    (v4(224, 0, 0, 0, 4), Floor::Multicast),
    (v6(0xff << 120, 8), Floor::Multicast),
    (v4(198, 18, 0, 0, 15), Floor::Reserved),
    (v4(240, 0, 0, 0, 4), Floor::Reserved),
    (v6(0x0100 << 112, 64), Floor::Reserved), // discarded, RFC 6666
];

#[cfg(test)]
mod tests {
    use super::*;

    fn floor(text: &str) -> Option<Floor> {
        Floor::of(text.parse().unwrap())
    }

    #[test]
    fn the_floor_is_where_it_should_be() {
        for (text, expected) in [
            ("169.254.169.254", Floor::Metadata),
            ("::ffff:169.254.169.254", Floor::Metadata),
            ("64:ff9b::a9fe:a9fe", Floor::Metadata),
            ("2002:a9fe:a9fe::1", Floor::Metadata),
            ("fd00:ec2::254", Floor::Metadata),
            ("168.63.129.16", Floor::Metadata),
            ("127.0.0.1", Floor::Loopback),
            ("127.255.255.254", Floor::Loopback),
            ("0.0.0.0", Floor::Loopback),
            ("::1", Floor::Loopback),
            ("::", Floor::Loopback),
            ("::127.0.0.1", Floor::Loopback),
            ("::ffff:0:127.0.0.1", Floor::Loopback),
            // Teredo: the server, and the client.
            ("2001:0:a00:1::1", Floor::Private),
            ("2001:0:c000:201:0:1:5601:5601", Floor::Metadata),
            // NAT64 with a prefix of 48, 56, 64 and 96 bits.
            ("64:ff9b:1:a9fe:a9:fe00::", Floor::Metadata),
            ("64:ff9b:1:a9:fe:a9fe::", Floor::Metadata),
            ("64:ff9b:1:0:a9:fea9:fe00:0", Floor::Metadata),
            ("64:ff9b:1::169.254.169.254", Floor::Metadata),
            ("2001:db8::5efe:10.0.0.1", Floor::Private),
            ("2001:db8::200:5efe:10.0.0.1", Floor::Private),
            ("10.255.255.255", Floor::Private),
            ("172.16.0.1", Floor::Private),
            ("172.31.255.255", Floor::Private),
            ("192.168.1.1", Floor::Private),
            ("100.64.0.1", Floor::Private),
            ("fd12::1", Floor::Private),
            ("169.254.0.1", Floor::LinkLocal),
            ("fe80::1", Floor::LinkLocal),
            ("224.0.0.251", Floor::Multicast),
            ("ff02::fb", Floor::Multicast),
            ("255.255.255.255", Floor::Reserved),
        ] {
            assert_eq!(floor(text), Some(expected), "{text}");
        }
        for text in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.2.1",
            "100.63.255.255",
            "100.128.0.0",
            "168.63.129.17",
            "2001:db8::1",
            "2606:4700::1111",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
            "64:ff9b:1::1.1.1.1",
            "64:ff9b:1:101:1:100::",
            "2001:0:c000:201:0:1:fefe:fefe",
            "2001:db8::5efe:1.1.1.1",
            "2001:db8:0:5efe::1",
        ] {
            assert_eq!(floor(text), None, "{text}");
        }
    }

    #[test]
    fn a_network_is_on_the_floor_only_as_a_whole() {
        let of = |text: &str, prefix| {
            Floor::of_network(Network::new(text.parse().unwrap(), prefix).unwrap())
        };
        assert_eq!(of("10.0.0.0", 8), Some(Floor::Private));
        assert_eq!(of("10.1.0.0", 16), Some(Floor::Private));
        assert_eq!(of("127.0.0.1", 32), Some(Floor::Loopback));
        assert_eq!(of("fc00::", 7), Some(Floor::Private));
        for (text, prefix) in [
            ("0.0.0.0", 0),
            ("0.0.0.0", 1),
            ("8.0.0.0", 6),
            ("172.0.0.0", 8),
            ("::", 0),
        ] {
            assert_eq!(of(text, prefix), None, "{text}/{prefix}");
        }
    }

    #[test]
    fn a_network_has_no_bits_behind_its_prefix() {
        let network = |text: &str, prefix| Network::new(text.parse().unwrap(), prefix);
        assert_eq!(network("10.0.0.1", 8), None);
        assert_eq!(network("10.0.0.0", 33), None);
        assert_eq!(network("::", 129), None);
        assert!(
            network("0.0.0.0", 0)
                .unwrap()
                .contains("255.1.2.3".parse().unwrap())
        );
        assert!(
            !network("0.0.0.0", 0)
                .unwrap()
                .contains("::1".parse().unwrap())
        );
        assert_eq!(network("10.0.0.0", 8).unwrap().to_string(), "10.0.0.0/8");
        assert_eq!(Network::only("::1".parse().unwrap()).to_string(), "::1");
    }
}
