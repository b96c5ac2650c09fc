//! Frames for the tests of this crate, always the same for a seed.

use vnplug_testing::Dice;

/// Frames of many kinds.
pub(crate) struct Traffic {
    random: Dice,
    flows: Vec<[u32; 3]>,
}

impl Traffic {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Dice(seed),
            flows: Vec::new(),
        }
    }

    /// An Ethernet, IPv4 and UDP frame of `len` bytes.
    pub(crate) fn udp(from: u32, to: u32, source: u16, target: u16, len: usize) -> Vec<u8> {
        let mut frame = vec![0x02; 12];
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((len as u16).wrapping_sub(14).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        frame.extend(from.to_be_bytes());
        frame.extend(to.to_be_bytes());
        frame.extend(source.to_be_bytes());
        frame.extend(target.to_be_bytes());
        frame.resize(len.max(frame.len()), 0);
        frame
    }

    /// As a busy wire has them: most packets belong to few of many flows, and are long.
    pub(crate) fn busy(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        if self.flows.len() < 64 || random.below(40) == 0 {
            let server = 0x0a00_0000 + random.below(500) as u32;
            let client = random.roll() as u32;
            let ports = (random.one_of(&[443_u32, 80, 53, 8080]) << 16)
                | (1024 + random.below(60_000) as u32);
            self.flows.push([server, client, ports]);
        }
        let count = self.flows.len() as u64;
        let recent = count - 1 - random.below(count.min(2000)) * random.below(1000) / 1000;
        let [a, b, ports] = self.flows[recent as usize];
        let len = random.one_of(&[1400, 1400, 1400, 1400, 1400, 60, 60, 590]);
        match random.below(3) {
            0 => Self::udp(b, a, ports as u16, (ports >> 16) as u16, len),
            _ => Self::udp(a, b, (ports >> 16) as u16, ports as u16, len),
        }
    }

    /// One of 100,000 flows.
    pub(crate) fn frame_of(&mut self, len: usize) -> Vec<u8> {
        let flow = self.random.below(100_000) as u32;
        let host = 0x0a00_0000 + flow % 3000;
        Self::udp(host, 0xc0a8_0000 + flow / 7, 443, flow as u16, len)
    }

    /// Anything: IPv4 with options and fragments, IPv6 with extension headers, VLAN stacks, ARP, SCTP,
    /// others, lengths, and frames that are cut. Few different addresses and ports.
    pub(crate) fn frame(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        let mut frame: Vec<u8> = (0..12).map(|_| random.roll() as u8).collect();
        for _ in 0..random.one_of(&[0, 0, 0, 1, 1, 2, 3, 9]) {
            frame.extend(random.one_of(&[0x8100_u16, 0x88a8, 0x9100]).to_be_bytes());
            frame.extend(
                (random.one_of(&[1_u16, 5, 7, 4094]) | random.one_of(&[0, 0x6000])).to_be_bytes(),
            );
        }
        let protocol = random.one_of(&[6, 6, 17, 17, 132, 1, 58, 47]);
        let address = |random: &mut Dice| 0x0a01_0200_u32 + random.below(12) as u32;
        match random.below(10) {
            0..5 => {
                let options = random.one_of(&[0, 0, 0, 1, 3]);
                frame.extend([8, 0, 0x45 + options, 0, 0, 100, 0, 0]);
                frame.extend(
                    random
                        .one_of(&[0_u16, 0, 0, 0x4000, 0x2000, 0x2010, 0x0001])
                        .to_be_bytes(),
                );
                frame.extend([64, protocol, 0, 0]);
                frame.extend(address(random).to_be_bytes());
                frame.extend(address(random).to_be_bytes());
                frame.extend(vec![1; usize::from(options) * 4]);
            }
            5..7 => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 100]);
                let extension = random.one_of(&[0, 0, 0, 1, 2, 3]);
                let first = [protocol, 0, 44, 51][extension];
                frame.extend([first, 64]);
                for _ in 0..2 {
                    frame.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
                    frame.push(1 + random.below(6) as u8);
                }
                match extension {
                    1 => frame.extend([protocol, 0, 1, 4, 0, 0, 0, 0]),
                    2 => {
                        frame.extend([protocol, 0]);
                        frame.extend(random.one_of(&[0_u16, 1, 0x00b9]).to_be_bytes());
                        frame.extend([0; 4]);
                    }
                    3 => frame.extend([[protocol, 1, 0, 0], [0; 4], [0; 4]].concat()),
                    _ => {}
                }
            }
            7 => {
                frame.extend(random.one_of(&[0x0806_u16, 0x8035]).to_be_bytes());
                frame.extend([0, 1, 8, 0, 6, 4, 0, 1, 2, 2, 2, 2, 2, 2]);
                frame.extend(address(random).to_be_bytes());
                frame.extend([0; 6]);
                frame.extend(address(random).to_be_bytes());
            }
            8 => frame.extend(random.one_of(&[0x88cc_u16, 0x8847, 0x8864]).to_be_bytes()),
            _ => frame.extend((random.below(1500) as u16).to_be_bytes()),
        }
        for _ in 0..2 {
            frame.extend(
                random
                    .one_of(&[443_u16, 80, 53, 1000, 65_535])
                    .to_be_bytes(),
            );
        }
        frame.extend([0; 9]);
        frame.push(random.one_of(&[0x50, 2, 0x10]));
        let len = frame.len();
        frame.resize(len + random.below(60) as usize, 0xaa);
        if random.below(20) == 0 {
            frame.truncate(random.below(len as u64) as usize);
        }
        frame
    }
}
