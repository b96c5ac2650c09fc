//! Whose frames somebody may send: stations, VLANs, and networks that the frames say they come from.
//!
//! | a lock names | a frame must |
//! |---|---|
//! | stations | come from one of them, and say so where ARP and neighbour discovery name their sender's address once more |
//! | VLANs | have one tag, of one of these, or none if that is among them; never two |
//! | networks | be IPv4, IPv6 or ARP, and come from an address in one of them; ARP and neighbour discovery may announce only such addresses. Who asks whether an address is free has none yet, and may ask for one of its own |
//!
//! Everything else is refused where networks are named: what cannot be judged is not let through. Tunnels are not
//! looked into, and a part of a datagram has an IP header of its own.

use std::fmt::{self, Display};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::headers::{IPV4, IPV6, Link, ip};

/// An address of a station.
pub type Address = [u8; 6];

/// Whose frames may be sent. `Default`: anybody's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceLock {
    /// Those of these stations; none: of any.
    pub stations: Vec<Address>,
    /// Those of these VLANs; `None`: of any.
    pub vlans: Option<Vlans>,
    /// Those from these networks; empty: from any.
    pub networks: Networks,
}

/// Why a frame may not be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Against {
    /// It says it is another station's.
    Station,
    /// Its VLAN.
    Vlan,
    /// It says it comes from another network, or not where from.
    Network,
}

impl SourceLock {
    /// Whether everything may be sent.
    pub fn is_open(&self) -> bool {
        self.stations.is_empty() && self.vlans.is_none() && self.networks.is_empty()
    }

    /// Whether an Ethernet frame may be sent. One that is shorter than its header is left to who sends it, and
    /// carries nothing.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn judge(&self, frame: &[u8]) -> Result<(), Against> {
        if frame.len() < 14 {
            return Ok(());
        }
        let link = Link::of(frame, 12);
        if !self.stations.is_empty() {
            let is_own = |at: &[u8]| self.stations.iter().any(|own| at == own);
            let told = Told::of(&link, frame);
            let tells_own = told.is_some_and(|told| told.stations().all(is_own));
            if !is_own(&frame[6..12]) || !tells_own {
                return Err(Against::Station);
            }
        }
        if let Some(vlans) = &self.vlans
            && !vlans.admit(&link, frame)
        {
            return Err(Against::Vlan);
        }
        match self.networks.admit_of(&link, frame) {
            true => Ok(()),
            false => Err(Against::Network),
        }
    }
}

/// VLANs that frames may be of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vlans {
    /// Frames without a tag.
    pub untagged: bool,
    /// Frames with one of these.
    pub tagged: VlanSet,
}

impl Vlans {
    fn admit(&self, link: &Link, frame: &[u8]) -> bool {
        match (link.tags, link.vlan(frame, 0)) {
            (0, _) => self.untagged,
            // IEEE 802.1Q-2018, 9.6: VLAN 0 is a priority, and no VLAN.
            (1, Some(0)) => self.untagged,
            (1, Some(vlan)) => self.tagged.contains(vlan),
            _ => false,
        }
    }
}

impl FromStr for Vlans {
    type Err = String;

    /// `10+20-29`, `no` for frames without a tag, `no+10`.
    fn from_str(text: &str) -> Result<Self, String> {
        let untagged = parts(text).any(|part| part == "no");
        let tagged: Vec<&str> = parts(text).filter(|part| *part != "no").collect();
        let vlans = Self {
            untagged,
            tagged: tagged.join("+").parse()?,
        };
        match vlans.untagged || !vlans.tagged.is_empty() {
            true => Ok(vlans),
            false => {
                Err("no VLAN is named: write vlan=10+20-29, or no for frames without a tag".into())
            }
        }
    }
}

impl Display for Vlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.untagged, self.tagged.is_empty()) {
            (true, true) => f.write_str("no"),
            (true, false) => write!(f, "no+{}", self.tagged),
            (false, _) => self.tagged.fmt(f),
        }
    }
}

/// Networks that frames may come from; none: any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// Address and mask.
    four: Vec<(u32, u32)>,
    six: Vec<(u128, u128)>,
}

impl Networks {
    /// None is named.
    pub const ANY: Self = Self {
        four: Vec::new(),
        six: Vec::new(),
    };

    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        self.four.is_empty() && self.six.is_empty()
    }

    /// Whether an Ethernet frame comes from one of them, and announces no other address.
    pub fn admit(&self, frame: &[u8]) -> bool {
        self.admit_of(&Link::of(frame, 12), frame)
    }

    #[inline]
    fn admit_of(&self, link: &Link, frame: &[u8]) -> bool {
        if self.is_empty() {
            return true;
        }
        let packet = link.network(frame);
        match link.ethertype {
            Some(IPV4) => match packet.first_chunk::<20>() {
                Some(head) if head[0] >> 4 == 4 => self.has_four(&head[12..16]),
                _ => false,
            },
            Some(IPV6) => self.admit_six(packet),
            Some(ARP) => match packet.first_chunk::<ARP_BYTES>() {
                // RFC 826; RFC 5227, 2.1: a probe has the sender 0.
                Some(arp) if arp[..6] == ARP_OF_IPV4 => {
                    let (sender, target) = (&arp[14..18], &arp[24..28]);
                    let is_probe = sender == [0; 4] && self.has_four(target);
                    is_probe || self.has_four(sender)
                }
                _ => false,
            },
            _ => false,
        }
    }

    fn admit_six(&self, packet: &[u8]) -> bool {
        let Some(head) = packet.first_chunk::<40>().filter(|head| head[0] >> 4 == 6) else {
            return false;
        };
        let Some(carried) = ip(IPV6, packet).filter(|it| !it.unknown) else {
            return false;
        };
        let source = &head[8..24];
        let message = match carried.protocol == ICMPV6 && !carried.later {
            true => packet.get(carried.at..).unwrap_or_default(),
            false => &[],
        };
        // RFC 4861, 4.3 and 4.4: the target is the address that is asked about, or announced.
        let target = message.get(8..24);
        match (message.first(), target) {
            (Some(&ADVERTISEMENT), Some(target)) => self.has_six(source) && self.has_six(target),
            (Some(&ADVERTISEMENT | &SOLICITATION), None) => false,
            // RFC 4862, 5.4.2: who looks whether an address is taken has none.
            (Some(&SOLICITATION), Some(target)) if source == [0; 16] => self.has_six(target),
            _ => self.has_six(source),
        }
    }

    fn has_four(&self, address: &[u8]) -> bool {
        let Ok(address) = address.try_into().map(u32::from_be_bytes) else {
            return false;
        };
        let mut all = self.four.iter();
        all.any(|(network, mask)| address & mask == *network)
    }

    fn has_six(&self, address: &[u8]) -> bool {
        let Ok(address) = address.try_into().map(u128::from_be_bytes) else {
            return false;
        };
        let mut all = self.six.iter();
        all.any(|(network, mask)| address & mask == *network)
    }
}

impl FromStr for Networks {
    type Err = String;

    /// `10.0.0.5+10.1.0.0/16+fe80::/10`, `no`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut networks = Self::default();
        if text == "no" {
            return Ok(networks);
        }
        for part in parts(text) {
            let bad =
                || format!("{part:?} is no address or network, as 10.0.0.0/8 and fe80::1 are");
            let (address, bits) = match part.split_once('/') {
                None => (part, None),
                Some((address, bits)) => (address, Some(bits.parse::<u32>().map_err(|_| bad())?)),
            };
            match address.parse::<IpAddr>().map_err(|_| bad())? {
                IpAddr::V4(address) => {
                    let bits = bits.unwrap_or(32);
                    let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
                    if bits > 32 {
                        return Err(bad());
                    }
                    networks.four.push((u32::from(address) & mask, mask));
                }
                IpAddr::V6(address) => {
                    let bits = bits.unwrap_or(128);
                    let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
                    if bits > 128 {
                        return Err(bad());
                    }
                    networks.six.push((u128::from(address) & mask, mask));
                }
            }
        }
        let count = networks.four.len() + networks.six.len();
        match (1..=MAX_NETWORKS).contains(&count) {
            true => Ok(networks),
            false => Err(format!(
                "ip is 1 to {MAX_NETWORKS} addresses or networks, or no"
            )),
        }
    }
}

impl Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("no");
        }
        let four = self
            .four
            .iter()
            .map(|(network, mask)| (IpAddr::V4(Ipv4Addr::from(*network)), mask.count_ones(), 32));
        let six = self
            .six
            .iter()
            .map(|(network, mask)| (IpAddr::V6(Ipv6Addr::from(*network)), mask.count_ones(), 128));
        for (at, (network, bits, all)) in four.chain(six).enumerate() {
            f.write_str(if at == 0 { "" } else { "+" })?;
            match bits == all {
                true => write!(f, "{network}")?,
                false => write!(f, "{network}/{bits}")?,
            }
        }
        Ok(())
    }
}

/// The stations' addresses that a frame tells beyond that of its header: the sender's of ARP, and those that
/// neighbour discovery announces.
struct Told<'a> {
    sender: Option<&'a [u8]>,
    options: &'a [u8],
}

impl<'a> Told<'a> {
    /// `None`: it cannot be said what it tells.
    fn of(link: &Link, frame: &'a [u8]) -> Option<Self> {
        let packet = link.network(frame);
        let nothing = Self {
            sender: None,
            options: &[],
        };
        match link.ethertype {
            Some(ARP) => Some(Self {
                sender: Some(packet.get(8..14).filter(|_| packet.len() >= ARP_BYTES)?),
                ..nothing
            }),
            Some(IPV6) => {
                let Some(carried) = ip(IPV6, packet) else {
                    // No packet of IPv6, and nothing that anybody takes for one.
                    return Some(nothing);
                };
                if carried.unknown {
                    return None;
                }
                if carried.protocol != ICMPV6 || carried.later {
                    return Some(nothing);
                }
                let message = packet.get(carried.at..).unwrap_or_default();
                // RFC 4861, 4.1 to 4.5: what comes before the options.
                let fixed = match message.first() {
                    Some(133) => 8,
                    Some(134) => 16,
                    Some(&SOLICITATION | &ADVERTISEMENT) => 24,
                    Some(137) => 40,
                    _ => return Some(nothing),
                };
                let options = message.get(fixed..)?;
                // One that cannot be read to its end is not believed in its beginning.
                let told = Self {
                    sender: None,
                    options,
                };
                told.is_whole().then_some(told)
            }
            _ => Some(nothing),
        }
    }

    fn is_whole(&self) -> bool {
        let mut rest = self.options;
        while let [_, units, ..] = *rest {
            // RFC 4861, 4.6: in units of eight bytes, never 0.
            let len = usize::from(units) * 8;
            match rest.get(len..) {
                Some(after) if len > 0 => rest = after,
                // What pads a short frame.
                _ => return rest.iter().all(|byte| *byte == 0),
            }
        }
        true
    }

    fn stations(&self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.options;
        let options = std::iter::from_fn(move || {
            let len = usize::from(*rest.get(1)?) * 8;
            let (option, after) = rest.split_at_checked(len).filter(|_| len > 0)?;
            rest = after;
            Some(option)
        });
        // Of the source (1) and of the target (2).
        let told = options.filter(|option| matches!(option[0], 1 | 2));
        self.sender
            .into_iter()
            .chain(told.map(|option| &option[2..8]))
    }
}

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
        let bad = || format!("VLANs are from 1 to 4094, as 1+5-9, or all, or no, not {text:?}");
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

/// A list's parts.
pub fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split('+').filter(|part| !part.is_empty())
}

/// An address of one station, with colons, dots or hyphens.
///
/// # Errors
/// How one is written.
pub fn mac(text: &str) -> Result<[u8; 6], String> {
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

/// As [`mac`] reads it.
pub fn mac_text(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

/// Networks at most.
const MAX_NETWORKS: usize = 64;
/// Ethertype of ARP.
const ARP: u16 = 0x0806;
/// Bytes of ARP for Ethernet and IPv4.
const ARP_BYTES: usize = 28;
/// The beginning of ARP for these: hardware, protocol, lengths of their addresses (RFC 826).
const ARP_OF_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
/// Protocol number of ICMPv6, and its messages (RFC 4861, 4.3 and 4.4).
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
