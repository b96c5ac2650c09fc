use super::*;

/// Makes capture files, in either byte order.
pub(crate) struct Maker {
    big: bool,
    pub(crate) bytes: Vec<u8>,
}

impl Maker {
    pub(crate) fn ng(big: bool) -> Self {
        let mut maker = Self {
            big,
            bytes: Vec::new(),
        };
        maker.section();
        maker
    }

    pub(crate) fn legacy(big: bool, magic: u32, link_type: u32) -> Self {
        let mut maker = Self {
            big,
            bytes: Vec::new(),
        };
        maker.words(&[magic]);
        maker.halves(&[2, 4]);
        maker.words(&[0, 0, 65_535, link_type]);
        maker
    }

    pub(crate) fn section(&mut self) {
        let mut body = Self {
            big: self.big,
            bytes: Vec::new(),
        };
        body.words(&[0x1a2b_3c4d]);
        body.halves(&[1, 0]);
        body.words(&[u32::MAX, u32::MAX]);
        self.block(0x0a0d_0d0a, &body.bytes);
    }

    /// An interface with nanoseconds.
    pub(crate) fn interface(&mut self, link_type: u16, resolution: u8) {
        let mut body = Self {
            big: self.big,
            bytes: Vec::new(),
        };
        body.halves(&[link_type, 0]);
        body.words(&[0]);
        body.halves(&[2, 3]);
        body.bytes.extend(*b"lo0\0");
        body.halves(&[9, 1]);
        body.bytes.extend([resolution, 0, 0, 0]);
        body.halves(&[0, 0]);
        self.block(1, &body.bytes);
    }

    pub(crate) fn packet(&mut self, interface: u32, units: u64, bytes: &[u8]) -> u64 {
        let at = self.bytes.len() as u64;
        let mut body = Self {
            big: self.big,
            bytes: Vec::new(),
        };
        let len = bytes.len() as u32;
        body.words(&[interface, (units >> 32) as u32, units as u32, len, len]);
        body.bytes.extend(bytes);
        body.bytes.resize(body.bytes.len().next_multiple_of(4), 0);
        self.block(6, &body.bytes);
        at
    }

    pub(crate) fn legacy_packet(&mut self, seconds: u32, part: u32, bytes: &[u8]) {
        let len = bytes.len() as u32;
        self.words(&[seconds, part, len, len]);
        self.bytes.extend(bytes);
    }

    pub(crate) fn block(&mut self, kind: u32, body: &[u8]) {
        let len = body.len() as u32 + 12;
        self.words(&[kind, len]);
        self.bytes.extend(body);
        self.words(&[len]);
    }

    fn words(&mut self, words: &[u32]) {
        for word in words {
            self.bytes.extend(match self.big {
                true => word.to_be_bytes(),
                false => word.to_le_bytes(),
            });
        }
    }

    fn halves(&mut self, halves: &[u16]) {
        for half in halves {
            self.bytes.extend(match self.big {
                true => half.to_be_bytes(),
                false => half.to_le_bytes(),
            });
        }
    }
}

/// A reader of these bytes, as of a pipe.
fn over(bytes: &[u8]) -> Reader {
    Reader::stream(Box::new(io::Cursor::new(bytes.to_vec())), "test".into())
}

fn all(reader: &mut Reader) -> Result<Vec<(u64, Vec<u8>)>, ReadError> {
    let mut list = Vec::new();
    while let Some(packet) = reader.read()? {
        list.push((packet.ts_ns, packet.bytes.to_vec()));
    }
    Ok(list)
}

fn golden(big: bool) -> (Vec<u8>, Vec<(u64, Vec<u8>)>) {
    let mut maker = Maker::ng(big);
    maker.interface(1, 9);
    maker.interface(101, 6);
    let mut expected = Vec::new();
    for n in 0..5_u64 {
        let bytes = vec![n as u8; 20 + n as usize];
        maker.packet(0, NS + n, &bytes);
        expected.push((NS + n, bytes));
    }
    maker.block(0x0bad, &[0; 40]); // nobody knows it
    maker.packet(1, 1_500_000, &[7; 3]);
    expected.push((1_500_000_000, vec![7; 3]));
    maker.section(); // interfaces count from zero
    maker.interface(1, 0x80 | 10);
    maker.packet(0, 1536, &[8; 4]);
    expected.push((1_500_000_000, vec![8; 4]));
    (maker.bytes, expected)
}

#[test]
fn pcapng_is_read_in_both_byte_orders() {
    for big in [false, true] {
        let (bytes, expected) = golden(big);
        let mut reader = over(&bytes);
        assert_eq!(all(&mut reader).unwrap(), expected);
        assert_eq!(reader.end(), End::Clean);
        let links: Vec<u32> = reader.interfaces().iter().map(|i| i.link_type).collect();
        assert_eq!(links, [1, 101, 1]);
        assert_eq!(reader.interfaces()[0].name, "lo0");
    }
}

#[test]
fn pcap_is_read_in_all_forms() {
    for big in [false, true] {
        for (magic, part) in [(0xa1b2_c3d4, 5), (0xa1b2_3c4d, 5000)] {
            let mut maker = Maker::legacy(big, magic, 1);
            maker.legacy_packet(3, part, b"frame");
            let packets = all(&mut over(&maker.bytes)).unwrap();
            assert_eq!(packets, [(3_000_005_000, b"frame".to_vec())]);
        }
    }
}

/// Old versions have a packet's two lengths in the other order, or in either.
#[test]
fn the_lengths_of_old_pcap_files_are_read_in_their_order() {
    for (version, lengths) in [
        ([2, 4], [3, 60]),
        ([2, 3], [3, 60]),
        ([2, 3], [60, 3]),
        ([2, 2], [60, 3]),
        ([543, 0], [60, 3]),
    ] {
        for big in [false, true] {
            let mut maker = Maker::legacy(big, 0xa1b2_c3d4, 1);
            let mut versions = Maker {
                big,
                bytes: Vec::new(),
            };
            versions.halves(&version);
            maker.bytes[4..8].copy_from_slice(&versions.bytes);
            maker.words(&[1, 2, lengths[0], lengths[1]]);
            maker.bytes.extend(*b"abc");
            let mut reader = over(&maker.bytes);
            let packet = reader.read().unwrap().expect("a whole packet");
            assert_eq!((packet.bytes, packet.wire_len), (&b"abc"[..], 60));
            assert!(reader.read().unwrap().is_none());
        }
    }
    let mut maker = Maker::legacy(false, 0xa1b2_c3d4, 1);
    maker.bytes[4] = 3;
    assert!(over(&maker.bytes).read().is_err());
}

#[test]
fn a_file_cut_anywhere_gives_every_whole_packet() {
    let (bytes, expected) = golden(false);
    for cut in 0..bytes.len() {
        let mut reader = over(&bytes[..cut]);
        let got = all(&mut reader).unwrap();
        assert_eq!(got, expected[..got.len()], "cut at {cut}");
        match reader.end() {
            End::Clean => assert_eq!(reader.offset(), cut as u64),
            End::Torn(at) => assert!(at < cut as u64 && at <= reader.offset()),
            End::Unwritten(_) => panic!("cut at {cut}"),
        }
    }
}

#[test]
fn a_file_that_grows_is_read_on() {
    let path = std::env::temp_dir().join(format!("vnplug-read-{}", std::process::id()));
    let (bytes, expected) = golden(false);
    std::fs::write(&path, []).unwrap();
    let mut reader = Reader::open(&path).unwrap();
    let mut got = Vec::new();
    for end in 0..=bytes.len() {
        std::fs::write(&path, &bytes[..end]).unwrap();
        got.extend(all(&mut reader).unwrap());
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(got, expected);
}

#[test]
fn reading_goes_on_from_any_packet() {
    let (bytes, expected) = golden(false);
    let path = std::env::temp_dir().join(format!("vnplug-seek-{}", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let mut first = Reader::open(&path).unwrap();
    let mut offsets = Vec::new();
    while let Some(packet) = first.read().unwrap() {
        offsets.push(packet.offset);
    }
    let definitions = first.definitions().to_vec();
    for n in (0..offsets.len()).chain((0..offsets.len()).rev()) {
        for reader in [&mut first, &mut Reader::open(&path).unwrap()] {
            reader.seek(offsets[n], &definitions).unwrap();
            assert_eq!(all(reader).unwrap(), expected[n..], "from packet {n}");
        }
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn zeros_where_a_block_should_begin_are_the_end() {
    let (mut bytes, expected) = golden(false);
    let end = bytes.len() as u64;
    bytes.resize(bytes.len() + 4096, 0);
    let mut reader = over(&bytes);
    assert_eq!(all(&mut reader).unwrap(), expected);
    assert_eq!(reader.end(), End::Unwritten(end));
}

#[test]
fn damage_is_told_with_its_place() {
    let fails = |bytes: &[u8], what: &str, at: u64| {
        let error = all(&mut over(bytes)).unwrap_err();
        assert!(error.is_damage() && error.offset == at, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    };
    fails(b"GET / HTTP/1.1\r\n", "neither pcapng nor pcap", 0);
    let mut maker = Maker::ng(false);
    let idb = maker.bytes.len();
    maker.interface(1, 9);
    let at = maker.packet(0, 0, &[0; 60]);
    let good = maker.bytes;
    for (place, value, what) in [
        (4, 0, "block length"),
        (4, 13, "block length"),
        (4, 0xffff_fff0, "16 MiB"),
        (4, 88, "lengths of a block differ"),
        (8, 1, "not described"),
        (20, 61, "longer than its block"),
    ] {
        let mut bytes = good.clone();
        bytes[at as usize + place..][..4].copy_from_slice(&u32::to_le_bytes(value));
        bytes.resize(bytes.len() + 1000, 1);
        fails(&bytes, what, at);
    }
    for resolution in [20, 127, 0x80 | 64, 255] {
        let mut bytes = good.clone();
        bytes[idb + 28] = resolution;
        fails(&bytes, "resolution", idb as u64);
    }
}

#[test]
fn any_bytes_end_or_fail() {
    let (good, _) = golden(true);
    let mut seed = vnplug_frame::witness::seed("any bytes");
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        for _ in 0..3 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (seed >> 33) as usize % bytes.len();
            bytes[at] = (seed >> 20) as u8;
        }
        let _ = all(&mut over(&bytes));
    }
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let path = std::env::temp_dir().join(format!("vnplug-pipe-{}", std::process::id()));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let error = Reader::open(&path).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

/// A file that a writer changes while it is read.
struct Live(PathBuf);

impl Live {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let name = format!("vnplug-live-{name}-{}", std::process::id());
        let live = Self(std::env::temp_dir().join(name));
        live.write(bytes);
        live
    }

    fn write(&self, bytes: &[u8]) {
        std::fs::write(&self.0, bytes).unwrap();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

fn padded(bytes: &[u8], with: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4096), with);
    bytes
}

#[test]
fn packets_written_over_zeros_and_ones_are_found_by_the_same_reader() {
    let mut ng = Maker::ng(false);
    ng.interface(1, 9);
    let mut legacy = Maker::legacy(false, 0xa1b2_3c4d, 1);
    for (maker, is_ng) in [(&mut ng, true), (&mut legacy, false)] {
        let add = |maker: &mut Maker, n: u8| match is_ng {
            true => drop(maker.packet(0, u64::from(n), &[n; 60])),
            false => maker.legacy_packet(0, u32::from(n), &[n; 60]),
        };
        for with in [0, 0xff] {
            if is_ng && with == 0xff {
                continue;
            }
            let live = Live::new(&format!("{is_ng}-{with}"), &[]);
            add(maker, 1);
            live.write(&padded(&maker.bytes, with));
            let mut reader = Reader::open(&live.0).unwrap();
            all(&mut reader).unwrap();
            let at = maker.bytes.len() as u64;
            let wanted = [End::Unwritten(at), End::Torn(at)][usize::from(with == 0xff)];
            assert_eq!(reader.end(), wanted);
            for n in 2..6 {
                add(maker, n);
                live.write(&padded(&maker.bytes, with));
                let got = all(&mut reader).unwrap();
                assert_eq!(got, [(u64::from(n), vec![n; 60])], "{is_ng} {with}");
                // As many ones as a header has not, or not yet.
                live.write(&[&maker.bytes[..], &[with; 10]].concat());
                assert_eq!(all(&mut reader).unwrap(), []);
            }
            // Written while the reader has older bytes after the packet it lends.
            add(maker, 6);
            live.write(&padded(&maker.bytes, with));
            assert!(reader.read().unwrap().is_some());
            add(maker, 7);
            live.write(&padded(&maker.bytes, with));
            assert_eq!(all(&mut reader).unwrap(), [(7, vec![7; 60])]);
        }
    }
}

#[test]
fn ones_that_no_writer_left_are_damage_and_may_be_mended() {
    let mut maker = Maker::legacy(false, 0xa1b2_3c4d, 1);
    maker.legacy_packet(0, 1, &[1; 60]);
    let good = maker.bytes.clone();
    let mut long = padded(&good, 0xff);
    long.push(0xff);
    let live = Live::new("ones", &long);
    let mut reader = Reader::open(&live.0).unwrap();
    assert!(reader.read().unwrap().is_some());
    let error = reader.read().unwrap_err();
    assert!(error.is_damage() && error.offset == good.len() as u64);
    maker.legacy_packet(0, 2, &[2; 60]);
    live.write(&maker.bytes);
    assert_eq!(all(&mut reader).unwrap(), [(2, vec![2; 60])]);
    // Room that is allocated after it changes nothing.
    let mut window = padded(&good, 0xff);
    window.resize(window.len() + 8192, 0);
    let mut reader = over(&window);
    assert_eq!(all(&mut reader).unwrap().len(), 1);
    assert_eq!(reader.end(), End::Torn(good.len() as u64));
}

#[test]
fn sections_without_end_are_refused() {
    let mut maker = Maker::ng(false);
    let section = maker.bytes.clone();
    maker.bytes = section.repeat(70_000);
    let mut reader = over(&maker.bytes);
    let error = reader.read().unwrap_err();
    assert!(error.to_string().contains("65536 sections"), "{error}");
    assert_eq!(error.offset, 65_536 * section.len() as u64);
}

const NS: u64 = 1_000_000_000;
