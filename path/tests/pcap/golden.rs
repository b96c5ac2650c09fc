//! Capture files made by hand, record by record.

/// A file as the list of its records; the first one is the file's header.
pub(crate) struct Golden {
    pub(crate) name: &'static str,
    pub(crate) records: Vec<Record>,
}

pub(crate) struct Record {
    pub(crate) bytes: Vec<u8>,
    pub(crate) packet: Option<Expected>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) bytes: Vec<u8>,
    pub(crate) wire_len: u32,
    pub(crate) ts_ns: u64,
    pub(crate) outbound: bool,
}

impl Golden {
    pub(crate) fn file(&self) -> Vec<u8> {
        self.records
            .iter()
            .flat_map(|record| record.bytes.clone())
            .collect()
    }

    pub(crate) fn packets(&self) -> Vec<Expected> {
        self.records
            .iter()
            .filter_map(|record| record.packet.clone())
            .collect()
    }
}

/// Little-endian, or big-endian.
#[derive(Clone, Copy)]
pub(crate) struct Order(pub(crate) bool);

impl Order {
    pub(crate) fn u16(self, word: u16) -> [u8; 2] {
        if self.0 {
            word.to_be_bytes()
        } else {
            word.to_le_bytes()
        }
    }

    pub(crate) fn u32s(self, words: &[u32]) -> Vec<u8> {
        let word = |word: &u32| {
            if self.0 {
                word.to_be_bytes()
            } else {
                word.to_le_bytes()
            }
        };
        words.iter().flat_map(word).collect()
    }

    pub(crate) fn legacy_header(self, magic: u32, version: (u16, u16), link: u32) -> Vec<u8> {
        let mut bytes = self.u32s(&[magic]);
        bytes.extend(self.u16(version.0));
        bytes.extend(self.u16(version.1));
        bytes.extend(self.u32s(&[0, 0, 65_535, link]));
        bytes
    }

    pub(crate) fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let padded = body.len().next_multiple_of(4);
        let len = padded as u32 + 12;
        let mut bytes = self.u32s(&[kind, len]);
        bytes.extend(body);
        bytes.resize(8 + padded, 0);
        bytes.extend(self.u32s(&[len]));
        bytes
    }

    pub(crate) fn section(self) -> Vec<u8> {
        let mut body = self.u32s(&[0x1a2b_3c4d]);
        body.extend(self.u16(1));
        body.extend(self.u16(0));
        body.extend([0xff; 8]);
        self.block(0x0a0d_0d0a, &body)
    }

    pub(crate) fn option(self, code: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = self.u16(code).to_vec();
        bytes.extend(self.u16(value.len() as u16));
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    pub(crate) fn interface(self, link: u16, snaplen: u32, options: &[u8]) -> Vec<u8> {
        let mut body = self.u16(link).to_vec();
        body.extend([0; 2]);
        body.extend(self.u32s(&[snaplen]));
        body.extend(options);
        self.block(1, &body)
    }

    pub(crate) fn enhanced(self, interface: u32, units: u64, wire: u32, data: &[u8]) -> Vec<u8> {
        self.block(6, &self.enhanced_body(interface, units, wire, data))
    }

    pub(crate) fn enhanced_body(
        self,
        interface: u32,
        units: u64,
        wire: u32,
        data: &[u8],
    ) -> Vec<u8> {
        let (high, low) = ((units >> 32) as u32, units as u32);
        let mut body = self.u32s(&[interface, high, low, data.len() as u32, wire]);
        body.extend(data);
        body.resize(body.len().next_multiple_of(4), 0);
        body
    }
}

/// Twelve files: all legacy variants, and pcapng with everything in it, in both byte orders.
pub(crate) fn all() -> Vec<Golden> {
    let mut files = Vec::new();
    for order in [Order(false), Order(true)] {
        for (name, magic, version) in [
            ("microseconds", 0xa1b2_c3d4, (2, 4)),
            ("nanoseconds", 0xa1b2_3c4d, (2, 4)),
            ("modified", 0xa1b2_cd34, (2, 4)),
            ("version 2.2", 0xa1b2_c3d4, (2, 2)),
        ] {
            files.push(Golden {
                name,
                records: legacy(order, magic, version),
            });
        }
        files.push(Golden {
            name: "pcapng",
            records: ng(order),
        });
        let mut sections = ng(order);
        sections.extend(ng(Order(!order.0)));
        files.push(Golden {
            name: "pcapng, two byte orders",
            records: sections,
        });
    }
    files
}

fn legacy(order: Order, magic: u32, version: (u16, u16)) -> Vec<Record> {
    let header = order.legacy_header(magic, version, 1);
    let mut records = vec![Record {
        bytes: header,
        packet: None,
    }];
    let unit_ns = if magic == 0xa1b2_3c4d { 1 } else { 1000 };
    for (n, len) in [60, 0, 13, 1514, 61].into_iter().enumerate() {
        let data = frame(n as u8, len);
        let (second, fraction, wire) = (1_700_000_000 + n as u32, 999_999 - n as u32, 2000);
        let (first, last) = if version.1 < 3 {
            (wire, len as u32)
        } else {
            (len as u32, wire)
        };
        let mut bytes = order.u32s(&[second, fraction, first, last]);
        if magic == 0xa1b2_cd34 {
            bytes.extend([0xee; 8]);
        }
        bytes.extend(&data);
        let ts_ns = u64::from(second) * 1_000_000_000 + u64::from(fraction) * unit_ns;
        records.push(Record {
            bytes,
            packet: Some(expected(data, wire, ts_ns)),
        });
    }
    records
}

fn ng(order: Order) -> Vec<Record> {
    const SECOND: u64 = 1_000_000_000;
    let comment = order.option(1, b"not \xff UTF-8");
    let nanos = order.option(9, &[9]);
    let mut binary = order.option(9, &[0x80 | 10]);
    binary.extend(order.option(14, &offset(order, -5)));
    binary.extend(order.option(0, &[]));
    let data = frame(9, 61);
    let mut outbound = order.enhanced_body(0, 77, 61, &data);
    outbound.extend(order.option(2, &order.u32s(&[2])));
    outbound.extend(order.option(0, &[]));
    let (high, low) = (0, 5_000_000);
    let mut old = order.u16(0).to_vec();
    old.extend(order.u16(0xffff));
    old.extend(order.u32s(&[high, low, 61, 99]));
    old.extend(&data);
    let mut simple = order.u32s(&[200]);
    simple.extend([7; 96]);

    let plain = |bytes| Record {
        bytes,
        packet: None,
    };
    let whole = |bytes, data: &[u8], wire, ts_ns| Record {
        bytes,
        packet: Some(expected(data.to_vec(), wire, ts_ns)),
    };
    let mut records = vec![
        plain(order.section()),
        plain(order.interface(1, 96, &comment)),
        plain(order.interface(1, 0, &nanos)),
        plain(order.interface(1, 0, &binary)),
        whole(
            order.enhanced(0, 1_000_001, 61, &data),
            &data,
            61,
            1_000_001_000,
        ),
        plain(order.block(5, &[3; 40])),
        whole(
            order.enhanced(1, u64::MAX, 5000, &data),
            &data,
            5000,
            u64::MAX,
        ),
        whole(
            order.enhanced(2, 1024 * 7 + 512, 61, &data),
            &data,
            61,
            2 * SECOND + SECOND / 2,
        ),
        whole(order.enhanced(2, 1024, 61, &data), &data, 61, 0),
        whole(order.block(6, &outbound), &data, 61, 77_000),
        whole(order.block(2, &old), &data, 99, 5 * SECOND),
        whole(order.block(3, &simple), &[7; 96], 200, 5 * SECOND),
        plain(order.block(0x8000_0bad, &[])),
    ];
    if let Some(packet) = &mut records[9].packet {
        packet.outbound = true;
    }
    records
}

fn expected(bytes: Vec<u8>, wire_len: u32, ts_ns: u64) -> Expected {
    Expected {
        bytes,
        wire_len,
        ts_ns,
        outbound: false,
    }
}

fn offset(order: Order, seconds: i64) -> [u8; 8] {
    if order.0 {
        seconds.to_be_bytes()
    } else {
        seconds.to_le_bytes()
    }
}

fn frame(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n as u8).wrapping_mul(seed | 1)).collect()
}
