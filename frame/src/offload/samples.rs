//! Super-frames of every kind, for tests here and beside a kernel.

use vnplug_ring::offload::{Offload, flags, gso};

/// What a frame is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    pub(crate) tags: usize,
    pub(crate) is_ipv6: bool,
    pub(crate) is_udp: bool,
    /// Bytes of IPv4 options, or of IPv6 destination options.
    pub(crate) options: usize,
    /// It goes by way of another address: by a routing header, or in IPv4 by its options, if they have room. The last
    /// one is that of the pseudo header.
    pub(crate) is_routed: bool,
    pub(crate) tcp_options: usize,
    pub(crate) tcp_flags: u8,
    pub(crate) payload: usize,
}

pub(crate) const PLAIN: Recipe = Recipe {
    tags: 0,
    is_ipv6: false,
    is_udp: false,
    options: 0,
    is_routed: false,
    tcp_options: 12,
    tcp_flags: 0x18,
    payload: 4000,
};

/// A frame, and where its transport header and its payload begin.
pub(crate) fn frame(recipe: &Recipe) -> (Vec<u8>, usize, usize) {
    let mut frame: Vec<u8> = (1..=12).collect();
    for tag in 0..recipe.tags {
        frame.extend([0x81, 0, 0x20, tag as u8 + 5]);
    }
    let header = if recipe.is_udp {
        8
    } else {
        20 + recipe.tcp_options
    };
    let carries = header + recipe.payload;
    let protocol = if recipe.is_udp { 17 } else { 6 };
    if recipe.is_ipv6 {
        frame.extend([0x86, 0xdd]);
        let routing = if recipe.is_routed { 24 } else { 0 };
        let len = (routing + recipe.options + carries) as u16;
        let next = if recipe.options > 0 { 60 } else { protocol };
        let first = if recipe.is_routed { 43 } else { next };
        frame.extend([0x6a, 0xbc, 0xde, 0xf0]);
        frame.extend(len.to_be_bytes());
        frame.extend([first, 64]);
        frame.extend((0..32).map(|byte| byte * 3 + 1));
        if recipe.is_routed {
            // RFC 6275, 6.4: one more address.
            frame.extend([next, 2, 2, 1, 0, 0, 0, 0]);
            frame.extend(LAST);
        }
        if recipe.options > 0 {
            let mut options = vec![0; recipe.options];
            (options[0], options[1]) = (protocol, (recipe.options / 8 - 1) as u8);
            frame.extend(options);
        }
    } else {
        frame.extend([0x08, 0x00]);
        let len = (20 + recipe.options + carries) as u16;
        frame.extend([0x45 + (recipe.options / 4) as u8, 3]);
        frame.extend(len.to_be_bytes());
        frame.extend([
            0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        let mut options = vec![1; recipe.options];
        if recipe.is_routed && recipe.options >= 8 {
            // RFC 791, 3.1: a loose source route.
            options[..7].copy_from_slice(&[131, 7, 4, LAST[0], LAST[1], LAST[2], LAST[3]]);
        }
        frame.extend(options);
    }
    let transport = frame.len();
    frame.extend([0x30, 0x39, 0, 80]);
    if recipe.is_udp {
        frame.extend((carries as u16).to_be_bytes());
        frame.extend([0xab, 0xcd]);
    } else {
        frame.extend([0xff, 0xff, 0xf0, 0, 1, 2, 3, 4]);
        frame.extend([
            (header / 4) as u8 * 16,
            recipe.tcp_flags,
            1,
            0,
            0xab,
            0xcd,
            0,
            0,
        ]);
        frame.extend(vec![1; recipe.tcp_options]);
    }
    let payload = frame.len();
    frame.extend((0..recipe.payload).map(|byte| ((byte * 31) >> 2) as u8));
    (frame, transport, payload)
}

pub(crate) fn offload(recipe: &Recipe, transport: usize, size: u16) -> Offload {
    let gso_type = match (recipe.is_udp, recipe.is_ipv6) {
        (true, _) => gso::UDP_L4,
        (false, true) => gso::TCPV6,
        (false, false) => gso::TCPV4,
    };
    Offload {
        flags: flags::NEEDS_CSUM,
        gso_type,
        gso_size: size,
        csum_start: transport as u16,
        csum_offset: if recipe.is_udp { 6 } else { 16 },
    }
}

/// Where a frame goes in the end that goes by way of another address.
const LAST: [u8; 16] = [
    0xfd, 0xa7, 0x31, 5, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0xee, 0xff,
];

/// The one's-complement sum of big-endian words (RFC 1071), written another way than the cutter's.
pub(crate) fn folded(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from);
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    sum as u16
}

/// The addresses of the pseudo header: where from, and where to in the end.
pub(crate) fn pseudo_addresses(frame: &[u8], recipe: &Recipe) -> Vec<u8> {
    let network = 14 + 4 * recipe.tags;
    let (from, len) = if recipe.is_ipv6 { (8, 16) } else { (12, 4) };
    let both = &frame[network + from..][..2 * len];
    let is_routed = recipe.is_routed && (recipe.is_ipv6 || recipe.options >= 8);
    let last = if is_routed {
        &LAST[..len]
    } else {
        &both[len..]
    };
    [&both[..len], last].concat()
}

/// Puts the sum of the pseudo header where the checksum is to be, as a sender leaves it.
pub(crate) fn leave_sum(frame: &mut [u8], recipe: &Recipe, transport: usize) {
    let addresses = pseudo_addresses(frame, recipe);
    let (at, protocol) = if recipe.is_udp { (6, 17) } else { (16, 6) };
    let length = ((frame.len() - transport) as u32).to_be_bytes();
    let sum = folded(&[&addresses, &length, &[0, protocol]]);
    frame[transport + at..transport + at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// A generator of numbers (xorshift64) below the sides that it is asked for.
pub(crate) fn dice(mut state: u64) -> impl FnMut(usize) -> usize {
    move |sides| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % sides as u64) as usize
    }
}

/// Any frame that can be cut, and into which size.
pub(crate) fn any(dice: &mut impl FnMut(usize) -> usize) -> (Recipe, u16) {
    let recipe = Recipe {
        tags: dice(4),
        is_ipv6: dice(2) == 1,
        is_udp: dice(2) == 1,
        options: dice(4) * 8,
        is_routed: dice(4) == 0,
        tcp_options: dice(11) * 4,
        tcp_flags: dice(256) as u8,
        payload: 1 + dice(20_000),
    };
    (recipe, 100 + dice(8700) as u16)
}
