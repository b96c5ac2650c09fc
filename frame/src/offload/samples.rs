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
    pub(crate) tcp_options: usize,
    pub(crate) tcp_flags: u8,
    pub(crate) payload: usize,
}

pub(crate) const PLAIN: Recipe = Recipe {
    tags: 0,
    is_ipv6: false,
    is_udp: false,
    options: 0,
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
        let len = (recipe.options + carries) as u16;
        let next = if recipe.options > 0 { 60 } else { protocol };
        frame.extend([0x6a, 0xbc, 0xde, 0xf0]);
        frame.extend(len.to_be_bytes());
        frame.extend([next, 64]);
        frame.extend((0..32).map(|byte| byte * 3 + 1));
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
        frame.extend(vec![1; recipe.options]);
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

/// Puts the sum of the pseudo header where the checksum is to be, as a sender leaves it.
pub(crate) fn leave_sum(frame: &mut [u8], recipe: &Recipe, transport: usize) {
    let network = 14 + 4 * recipe.tags;
    let addresses = match recipe.is_ipv6 {
        true => network + 8..network + 40,
        false => network + 12..network + 20,
    };
    let (at, protocol) = if recipe.is_udp { (6, 17) } else { (16, 6) };
    let length = ((frame.len() - transport) as u32).to_be_bytes();
    let sum = folded(&[&frame[addresses], &length, &[0, protocol]]);
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
        tcp_options: dice(11) * 4,
        tcp_flags: dice(256) as u8,
        payload: 1 + dice(20_000),
    };
    (recipe, 100 + dice(8700) as u16)
}
