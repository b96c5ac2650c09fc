//! Frames for tests of filters: what networks carry, what they should not, and cuts everywhere.
//!
//! Everything is drawn from few values (three hosts, ten ports, three VLANs), so that filters which
//! name them take some frames and leave others. The same seed gives the same frames on every
//! machine.

/// A frame's captured bytes and its length on the wire.
pub(crate) type Packet = (Vec<u8>, u32);

/// Frames of many kinds: stacks of VLAN tags and MPLS labels, PPPoE, ARP, LLC; IPv4 with options
/// and fragments, IPv6 with extension headers; TCP, UDP, SCTP, ICMP, GRE and IP in IP; jumbo
/// frames; wrong values and cuts everywhere.
pub(crate) fn frames(count: usize, seed: u64) -> Vec<Packet> {
    let mut random = Random(seed);
    (0..count).map(|_| frame(&mut random)).collect()
}

/// `count` frames, each cut to every length from nothing to all of it (at most 200 bytes).
pub(crate) fn cuts(count: usize, seed: u64) -> Vec<Packet> {
    let whole = frames(count, seed);
    let cut = |(bytes, wire_len): &Packet| {
        let (bytes, wire_len) = (bytes.clone(), *wire_len);
        let longest = bytes.len().min(200);
        (0..=longest).map(move |len| (bytes[..len].to_vec(), wire_len))
    };
    whole.iter().flat_map(cut).collect()
}

/// xorshift64*: the same frames on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Less than `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

fn frame(random: &mut Random) -> Packet {
    let mut f = Vec::new();
    for _ in 0..2 {
        match random.below(8) {
            0 => f.extend([0xff; 6]),
            1 => f.extend([1, 0, 0x5e, 0, 0, random.next() as u8]),
            _ => f.extend([2, 0, 0, 0, 0, random.below(3) as u8]),
        }
    }
    // Tags (802.1Q, 802.1ad, the older QinQ); their inner type follows.
    for _ in 0..random.pick(&[0, 0, 0, 1, 1, 2, 3]) {
        f.extend(random.pick::<[u8; 2]>(&[[0x81, 0], [0x81, 0], [0x88, 0xa8], [0x91, 0]]));
        f.extend([random.pick(&[0, 0x60, 0x10]), random.pick(&[5, 7, 9])]);
    }
    let v6 = random.one_in(3);
    match random.below(12) {
        0 => {
            // PPP over Ethernet, session stage.
            f.extend([0x88, 0x64, 0x11, 0, 0, random.below(3) as u8, 0, 60]);
            f.extend(if v6 { [0, 0x57] } else { [0, 0x21] });
        }
        1 => {
            f.extend([0x88, 0x47]);
            for left in (0..=random.below(3)).rev() {
                let label = random.pick::<u32>(&[1024, 1024, 16, 0xfffff]);
                let entry = label << 12 | u32::from(left == 0) << 8 | 64;
                f.extend(entry.to_be_bytes());
            }
        }
        2 => {
            match random.below(5) {
                0 => arp(random, &mut f),
                1 => f.extend([0x88, 0xcc, 2, 7, 4]),
                2 => f.extend([0, 38, 0x42, 0x42, 3, 0, 0]),
                3 => f.extend([0, 60, 0xfe, 0xfe, 3, random.pick(&[0x82, 0x83, 0x81])]),
                _ => f.extend([0, 60, 0xaa, 0xaa, 3, 0, 0, 0, 8, 0]),
            }
            payload(random, &mut f);
            return finish(random, f);
        }
        _ => f.extend(if v6 { [0x86, 0xdd] } else { [0x08, 0x00] }),
    }
    network(random, v6, 0, &mut f);
    finish(random, f)
}

fn arp(random: &mut Random, f: &mut Vec<u8>) {
    f.extend([0x08, random.pick(&[0x06, 0x06, 0x06, 0x35])]);
    f.extend([0, 1, 8, 0, 6, 4, 0, random.pick(&[1, 2])]);
    for _ in 0..2 {
        f.extend([2, 0, 0, 0, 0, random.below(3) as u8]);
        f.extend(random.pick(&ADDRESSES));
    }
}

/// `depth` IP headers are around it.
fn network(random: &mut Random, v6: bool, depth: u32, f: &mut Vec<u8>) {
    if v6 {
        ipv6(random, depth, f);
    } else {
        ipv4(random, depth, f);
    }
}

const PROTOCOLS: [u8; 15] = [6, 6, 6, 6, 6, 17, 17, 17, 1, 58, 132, 50, 2, 47, 41];

const ADDRESSES: [[u8; 4]; 6] = [
    [10, 0, 0, 1],
    [10, 0, 0, 1],
    [10, 0, 0, 2],
    [192, 168, 3, 4],
    [224, 0, 0, 1],
    [255, 255, 255, 255],
];

fn ipv4(random: &mut Random, depth: u32, f: &mut Vec<u8>) {
    let options = random.pick(&[0, 0, 0, 1, 2, 10]);
    let version = if random.one_in(20) {
        random.next() as u8
    } else {
        0x45 + options
    };
    let fragment = random.pick::<[u8; 2]>(&[[0x40, 0], [0, 0], [0x20, 0], [0x20, 185], [0, 185]]);
    let authenticated = random.one_in(8);
    let protocol = random.pick(&PROTOCOLS);
    f.extend([
        version,
        random.pick(&[0, 0, 16, 255]),
        0,
        random.next() as u8,
        0,
        1,
    ]);
    f.extend(fragment);
    f.extend([64, if authenticated { 51 } else { protocol }, 0, 0]);
    f.extend(random.pick(&ADDRESSES));
    f.extend(random.pick(&ADDRESSES));
    // Router alert, record route, or nothing in particular.
    let first: [u8; 4] = random.pick(&[[148, 4, 0, 0], [7, 3, 4, 0], [1, 1, 1, 1]]);
    f.extend(
        first
            .into_iter()
            .chain(std::iter::repeat(1))
            .take(usize::from(options) * 4),
    );
    if authenticated {
        f.extend([protocol, 4, 0, 0]);
        f.extend([0; 20]);
    }
    transport(random, protocol, depth, f);
}

fn ipv6(random: &mut Random, depth: u32, f: &mut Vec<u8>) {
    let mut chain: Vec<u8> = (0..random.below(4))
        .map(|_| random.pick(&[0, 43, 44, 51, 60]))
        .collect();
    let protocol = random.pick(&PROTOCOLS);
    chain.push(protocol);
    f.extend([0x60, 0, 0, 0, 0, 100, chain[0], 64]);
    for _ in 0..2 {
        let first: [u8; 4] = random.pick(&[
            [0x20, 1, 0x0d, 0xb8],
            [0x20, 1, 0x0d, 0xb8],
            [0xff, 2, 0, 0],
            [0xfe, 0x80, 0, 0],
        ]);
        f.extend(first);
        f.extend([0; 11]);
        f.push(random.below(3) as u8);
    }
    for pair in chain.windows(2) {
        if pair[0] == 44 {
            let offset: [u8; 2] = random.pick(&[[0, 0], [0, 1], [5, 0xb9], [5, 0xb8]]);
            f.extend([pair[1], 0, offset[0], offset[1], 0, 0, 0, 7]);
            continue;
        }
        let units = random.below(3) as u8;
        let len = match pair[0] {
            51 => (usize::from(units) + 2) * 4,
            _ => (usize::from(units) + 1) * 8,
        };
        f.extend([pair[1], units]);
        f.extend(std::iter::repeat_n(0, len - 2));
    }
    transport(random, protocol, depth, f);
}

fn transport(random: &mut Random, protocol: u8, depth: u32, f: &mut Vec<u8>) {
    let ports: [u16; 10] = [80, 80, 443, 53, 22, 6081, 5000, 999, 1000, 65_535];
    match protocol {
        1 | 58 => f.extend([random.pick(&[8, 0, 128, 129, 3]), 0, 0, 0]),
        47 => {
            let key = random.one_in(2);
            let v6 = random.one_in(2);
            f.extend([if key { 0x20 } else { 0 }, 0]);
            f.extend(if v6 { [0x86, 0xdd] } else { [0x08, 0x00] });
            if key {
                f.extend([0, 0, 0, 9]);
            }
            if depth < 2 {
                return network(random, v6, depth + 1, f);
            }
        }
        41 if depth < 2 => return ipv6(random, depth + 1, f),
        _ => {
            f.extend(random.pick(&ports).to_be_bytes());
            f.extend(random.pick(&ports).to_be_bytes());
        }
    }
    match protocol {
        6 => {
            let words = random.pick(&[5, 5, 6, 8, 15]);
            f.extend([0; 8]);
            f.extend([
                words << 4,
                random.pick(&[2, 16, 17, 18, 4]),
                1,
                0,
                0,
                0,
                0,
                0,
            ]);
            f.extend(std::iter::repeat_n(1, usize::from(words - 5) * 4));
            if random.one_in(2) {
                f.extend(b"GET / HTTP/1.1");
            }
        }
        17 => {
            f.extend([0, random.next() as u8, 0, 0]);
            if random.one_in(2) {
                // Geneve with an inner Ethernet frame that holds IPv4.
                f.extend([0, 0, 0x65, 0x58, 0, 0, 1, 0]);
                f.extend([2; 12]);
                f.extend([8, 0, 0x45]);
            }
        }
        // Verification tag, checksum, and a DATA chunk.
        132 => f.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 3, 0, 20]),
        _ => {}
    }
    payload(random, f);
}

fn payload(random: &mut Random, f: &mut Vec<u8>) {
    let jumbo = random.one_in(100);
    let len = random.pick(&[0, 10, 30, 60, 200, 700]);
    for _ in 0..if jumbo { 8_900 } else { len } {
        f.push(random.next() as u8);
    }
}

/// Damages some frames and cuts others; the wire length is that before the cut.
fn finish(random: &mut Random, mut f: Vec<u8>) -> Packet {
    if random.one_in(8) {
        for _ in 0..3 {
            let at = random.below(f.len());
            f[at] = random.next() as u8;
        }
    }
    let wire_len = f.len() as u32;
    if random.one_in(4) {
        f.truncate(random.below(f.len() + 1));
    }
    (f, wire_len)
}
