//! Where a frame's headers lie. What is understood is said here, once, for all code that looks into
//! frames.
//!
//! | header | understood |
//! |---|---|
//! | VLAN tags | [`TAGS`], up to [`MAX_TAGS`] of them; after more, nothing |
//! | IPv4 | options are passed over; fragments are told apart |
//! | IPv6 | extension headers are passed over, up to [`MAX_EXTENSIONS`]: those of [`extension`] |
//!
//! Tunnels are not looked into here: [`tunnel`](crate::tunnel) is one step into one. Nothing is believed and nothing fails: offsets come out of the
//! frame and may lie past its end, where there is nothing to read.
//!
//! [`Link`] and [`ip`] walk. [`extension`] is one step, for the recorder's index, which looks on
//! where a walk ends. The flow hash and the rules of ports take the constants and go by themselves:
//! they look at every frame, and walking cost the rules 11 of 134 instructions for IPv6.

/// Ethertypes of VLAN tags: 802.1Q, 802.1ad, and what came before the latter (IEEE 802.1Q-2018,
/// table 9-1).
pub const TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// The most tags that are passed over.
pub const MAX_TAGS: usize = 8;

/// The most extension headers that are passed over. RFC 8200 (4.1) has each kind once, and
/// destination options twice.
pub const MAX_EXTENSIONS: usize = 16;

/// Ethertype of IPv4.
pub const IPV4: u16 = 0x0800;
/// Ethertype of IPv6.
pub const IPV6: u16 = 0x86dd;

/// The protocol number of IPv6's fragment header.
pub const FRAGMENT: u8 = 44;

/// True for the Ethertype of a VLAN tag.
#[inline(always)]
pub fn is_tag(ethertype: u16) -> bool {
    // NB: a pattern, as a search in TAGS becomes a loop.
    const A: u16 = TAGS[0];
    const B: u16 = TAGS[1];
    const C: u16 = TAGS[2];
    matches!(ethertype, A | B | C)
}

/// What a frame says before its network header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Where the first Ethertype is.
    pub from: usize,
    /// VLAN tags, the last one perhaps cut.
    pub tags: usize,
    /// Where the Ethertype after the tags is; the network header is 2 bytes further.
    pub at: usize,
    /// That Ethertype, or a length below 0x600, or that of one more tag than [`MAX_TAGS`]; `None` if
    /// the frame ends before it.
    pub ethertype: Option<u16>,
}

impl Link {
    /// Passes over the tags; the first Ethertype is at `at`, which is 12 for Ethernet.
    #[inline(always)]
    pub fn of(frame: &[u8], at: usize) -> Self {
        let (from, mut at, mut ethertype) = (at, at, half(frame, at));
        for _ in 0..MAX_TAGS {
            if !ethertype.is_some_and(is_tag) {
                break;
            }
            at += 4;
            ethertype = half(frame, at);
        }
        Self {
            from,
            tags: (at - from) / 4,
            at,
            ethertype,
        }
    }

    /// What follows: the network header and all after it.
    #[inline(always)]
    pub fn network<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        frame.get(self.at + 2..).unwrap_or_default()
    }

    /// The VLAN number of a tag, counted from the outermost, 0; `None` if there is no such tag, or
    /// only its Ethertype.
    #[inline(always)]
    pub fn vlan(&self, frame: &[u8], tag: usize) -> Option<u16> {
        match tag < self.tags {
            true => half(frame, self.from + 4 * tag + 2).map(vlan),
            false => None,
        }
    }
}

/// The VLAN number in a tag.
#[inline(always)]
pub fn vlan(tci: u16) -> u16 {
    tci & 0xfff
}

/// What an IPv6 header of some protocol number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extension {
    /// No extension header: what the packet carries.
    Not,
    /// One of `len` bytes; then comes a header of protocol `next`.
    Header {
        /// Protocol number of what follows.
        next: u8,
        /// Bytes until there.
        len: usize,
    },
    /// A fragment header, of 8 bytes.
    Fragment {
        /// Protocol number of what follows, in the first fragment.
        next: u8,
        /// Not the first fragment: what follows is no header.
        later: bool,
        /// Not the last one.
        more: bool,
    },
    /// An extension header, and the frame ends in it.
    Cut,
}

/// The protocol number of IPv6's authentication header, whose length is in units of 4 bytes, the first
/// two of them not counted (RFC 4302, 2.2).
pub const AUTHENTICATION: u8 = 51;

/// True for IPv6's extension headers whose length is in units of 8 bytes, the first not counted:
/// hop-by-hop, routing, destination options, mobility, HIP, shim6 (RFC 8200, 4; IANA).
#[inline(always)]
pub fn counts_in_eights(protocol: u8) -> bool {
    matches!(protocol, 0 | 43 | 60 | 135 | 139 | 140)
}

/// What stands in `rest` if the header before it says `protocol`.
#[inline(always)]
pub fn extension(protocol: u8, rest: &[u8]) -> Extension {
    let (unit, more) = match protocol {
        _ if counts_in_eights(protocol) => (8, 1),
        AUTHENTICATION => (4, 2),
        FRAGMENT => {
            let Some(&[next, _, high, low]) = rest.first_chunk() else {
                return Extension::Cut;
            };
            return Extension::Fragment {
                next,
                later: u16::from_be_bytes([high, low]) & 0xfff8 != 0,
                more: low & 1 != 0,
            };
        }
        _ => return Extension::Not,
    };
    match rest {
        [next, len, ..] => Extension::Header {
            next: *next,
            len: (usize::from(*len) + more) * unit,
        },
        _ => Extension::Cut,
    }
}

/// Bytes of IPv6's fragment header.
pub const FRAGMENT_BYTES: usize = 8;

/// What an IP header says of what it carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    /// Protocol number; of IPv6 the one after the extension headers.
    pub protocol: u8,
    /// Where it begins, in bytes from the IP header's first.
    pub at: usize,
    /// Part of a datagram, and not its first: it begins with no header.
    pub later: bool,
    /// Part of a datagram, and not its last.
    pub more: bool,
    /// The frame ends in the extension headers, or they are more than [`MAX_EXTENSIONS`]: `protocol`
    /// is that of one of them.
    pub unknown: bool,
}

/// Looks at a packet of that Ethertype. Neither the version nor the length of an IPv4 header is
/// compared with what it must be.
///
/// `None` if it is not IP, or cut in the header itself.
pub fn ip(ethertype: u16, packet: &[u8]) -> Option<Carried> {
    match ethertype {
        IPV4 => ipv4(packet),
        IPV6 => ipv6(packet),
        _ => None,
    }
}

fn ipv4(packet: &[u8]) -> Option<Carried> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let fragment = u16::from_be_bytes([head[6], head[7]]);
    Some(Carried {
        protocol: head[9],
        at: usize::from(head[0] & 0xf) * 4,
        later: fragment & 0x1fff != 0,
        more: fragment & 0x2000 != 0,
        unknown: false,
    })
}

fn ipv6(packet: &[u8]) -> Option<Carried> {
    let head: &[u8; 40] = packet.first_chunk()?;
    let mut carried = Carried {
        protocol: head[6],
        at: head.len(),
        later: false,
        more: false,
        unknown: false,
    };
    for _ in 0..MAX_EXTENSIONS {
        let rest = packet.get(carried.at..).unwrap_or_default();
        match extension(carried.protocol, rest) {
            Extension::Not => return Some(carried),
            Extension::Header { next, len } => {
                carried.protocol = next;
                carried.at += len;
            }
            Extension::Fragment { next, later, more } => {
                carried.protocol = next;
                carried.at += FRAGMENT_BYTES;
                // One that another such header follows is a fragment all the same.
                carried.more |= more;
                if later {
                    carried.later = true;
                    return Some(carried);
                }
            }
            Extension::Cut => break,
        }
    }
    let rest = packet.get(carried.at..).unwrap_or_default();
    carried.unknown = extension(carried.protocol, rest) != Extension::Not;
    Some(carried)
}

#[inline(always)]
fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let half = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([half[0], half[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tagged(tags: usize, ethertype: u16) -> Vec<u8> {
        let mut frame = vec![0; 12];
        for tag in 0..tags {
            frame.extend(TAGS[tag % 3].to_be_bytes());
            frame.extend((0x6000 + tag as u16 + 1).to_be_bytes());
        }
        frame.extend(ethertype.to_be_bytes());
        frame
    }

    #[test]
    fn eight_tags_of_every_kind_are_passed_over_and_a_ninth_is_not() {
        for tags in 0..=8 {
            let frame = tagged(tags, IPV4);
            let (at, ethertype) = (12 + 4 * tags, Some(IPV4));
            let link = Link::of(&frame, 12);
            assert_eq!(
                link,
                Link {
                    from: 12,
                    tags,
                    at,
                    ethertype
                }
            );
            for tag in 0..10 {
                let vlan = (tag < tags).then_some(tag as u16 + 1);
                assert_eq!(link.vlan(&frame, tag), vlan);
            }
        }
        let link = Link::of(&tagged(9, IPV4), 12);
        assert_eq!((link.tags, link.ethertype), (8, Some(TAGS[2])));
    }

    #[test]
    fn a_cut_tag_is_one_without_a_type_behind_it() {
        let frame = tagged(2, IPV4);
        for (len, tags, vlan) in [
            (20, 2, Some(2)),
            (19, 2, None),
            (18, 2, None),
            (17, 1, None),
        ] {
            let link = Link::of(&frame[..len], 12);
            assert_eq!((link.tags, link.ethertype), (tags, None), "{len}");
            assert_eq!(link.vlan(&frame[..len], 1), vlan, "{len}");
            assert!(link.network(&frame[..len]).is_empty());
        }
        assert_eq!(Link::of(&[], 12).ethertype, None);
    }

    /// An IPv6 packet with these extension headers, each of 8 bytes, and UDP after them.
    fn six(extensions: &[u8]) -> Vec<u8> {
        let kinds = [extensions, &[17]].concat();
        let mut packet = vec![0; 40];
        (packet[0], packet[6]) = (0x60, kinds[0]);
        for (kind, next) in kinds.iter().zip(&kinds[1..]) {
            // 51 counts in words, and not the first two.
            let len = u8::from(*kind == 51) * 2;
            packet.extend([*next, len, 0, 0, 0, 0, 0, 0]);
            packet.resize(packet.len() + usize::from(len) * 4, 0);
        }
        packet.extend([0, 53, 0, 53]);
        packet
    }

    #[test]
    fn every_extension_header_is_passed_over() {
        for kind in [0, 43, 44, 51, 60, 135, 139, 140] {
            let packet = six(&[0, kind, 60]);
            let found = ip(IPV6, &packet).unwrap();
            assert_eq!((found.protocol, found.at), (17, packet.len() - 4), "{kind}");
            assert!(!found.later && !found.more && !found.unknown, "{kind}");
        }
        // Encrypted, nothing, ICMPv6: nothing is behind them.
        for kind in [50, 59, 58, 6] {
            let found = ip(IPV6, &six(&[kind, 60])).unwrap();
            assert_eq!((found.protocol, found.at), (kind, 40));
            assert!(!found.unknown);
        }
    }

    #[test]
    fn as_many_extension_headers_as_are_allowed_lead_somewhere() {
        let found = |n| ip(IPV6, &six(&vec![60; n])).unwrap();
        let most = found(MAX_EXTENSIONS);
        assert_eq!((most.protocol, most.unknown), (17, false));
        let more = found(MAX_EXTENSIONS + 1);
        assert_eq!((more.protocol, more.unknown), (60, true));
    }

    #[test]
    fn fragments_are_told_apart() {
        for (word, later, more) in [
            (0, false, false),
            (1, false, true),
            (9, true, true),
            (8, true, false),
        ] {
            let mut packet = six(&[44, 0]);
            packet[43] = word;
            let found = ip(IPV6, &packet).unwrap();
            assert_eq!((found.later, found.more), (later, more), "{word}");
            // What follows a later one is no header.
            let end = if later { (0, 48) } else { (17, 56) };
            assert_eq!((found.protocol, found.at), end, "{word}");
        }
        // The first of several, and a second header that says that it is all there is.
        let mut packet = six(&[44, 44]);
        packet[43] = 1;
        let found = ip(IPV6, &packet).unwrap();
        assert_eq!((found.later, found.more), (false, true));
        let mut packet = [0; 20];
        (packet[0], packet[9]) = (0x47, 6);
        for (word, later, more) in [
            (0x4000, false, false),
            (0x2000, false, true),
            (0x2001, true, true),
            (0x1fff, true, false),
        ] {
            packet[6..8].copy_from_slice(&u16::to_be_bytes(word));
            let found = ip(IPV4, &packet).unwrap();
            assert_eq!((found.later, found.more), (later, more), "{word:x}");
            assert_eq!((found.protocol, found.at), (6, 28));
        }
    }

    #[test]
    fn any_cut_of_a_packet_is_looked_at_safely() {
        let packet = six(&[0, 51, 44, 60]);
        for len in 0..=packet.len() {
            let found = ip(IPV6, &packet[..len]);
            assert_eq!(found.is_some(), len >= 40);
            // UDP is 4 bytes; the last header needs 2 to say how long it is, and where it ends.
            let known = found.is_some_and(|found| !found.unknown);
            assert_eq!(known, len >= packet.len() - 4 - 8 + 2, "{len}");
        }
        assert_eq!(ip(IPV4, &[0x45; 19]), None);
        assert_eq!(ip(0x0806, &[0; 64]), None);
    }
}
