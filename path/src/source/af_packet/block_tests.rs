use super::*;

/// A block as the kernel writes it: header of 48 bytes, 16 for a note, then records.
fn block(records: &[Record]) -> Vec<u8> {
    let mut block = vec![0u8; 64];
    put(&mut block, FILLING, &5u64.to_ne_bytes());
    put(&mut block, PACKETS, &(records.len() as u32).to_ne_bytes());
    put(&mut block, FIRST, &64u32.to_ne_bytes());
    for (i, record) in records.iter().enumerate() {
        let mac = HEADER_LEN + 14;
        let mut bytes = vec![0u8; mac];
        let padded = (mac + record.bytes.len()).next_multiple_of(8);
        let next = if i + 1 == records.len() {
            0
        } else {
            padded as u32
        };
        put(&mut bytes, NEXT, &next.to_ne_bytes());
        put(&mut bytes, SECONDS, &7u32.to_ne_bytes());
        put(&mut bytes, NANOSECONDS, &9u32.to_ne_bytes());
        put(
            &mut bytes,
            SNAPLEN,
            &(record.bytes.len() as u32).to_ne_bytes(),
        );
        put(&mut bytes, LEN, &record.wire_len.to_ne_bytes());
        put(&mut bytes, STATUS, &record.status.to_ne_bytes());
        put(&mut bytes, MAC, &(mac as u16).to_ne_bytes());
        put(&mut bytes, VLAN_TCI, &record.tci.to_ne_bytes());
        put(&mut bytes, VLAN_TPID, &record.tpid.to_ne_bytes());
        bytes[PACKET_TYPE] = record.packet_type;
        bytes.extend_from_slice(&record.bytes);
        bytes.resize(padded, 0);
        block.extend_from_slice(&bytes);
    }
    block.resize(block.len() + 64, 0xee);
    block
}

#[derive(Default, Clone)]
struct Record {
    bytes: Vec<u8>,
    wire_len: u32,
    status: u32,
    tci: u32,
    tpid: u16,
    packet_type: u8,
}

fn plain(len: usize) -> Record {
    Record {
        bytes: (0..len).map(|i| i as u8).collect(),
        wire_len: len as u32,
        ..Record::default()
    }
}

fn only(record: Record, snaplen: u32, check: impl FnOnce(Frame<'_>)) {
    let mut block = block(&[record]);
    let cursor = Cursor::start(&block);
    let mut walk = Walk::resume(&mut block, cursor, snaplen, u64::MAX);
    check(walk.next().expect("one frame"));
    assert!(walk.next().is_none());
    assert_eq!(walk.stop().1, 0);
}

#[test]
fn frames_come_in_order_and_the_walk_resumes_where_it_stopped() {
    let mut block = block(&[plain(60), plain(61), plain(1514)]);
    let cursor = Cursor::start(&block);
    assert_eq!(cursor.left, 3);
    let mut walk = Walk::resume(&mut block, cursor, 65536, u64::MAX);
    let first = walk.next().expect("first");
    assert_eq!((first.bytes.len(), first.ts_ns), (60, 7_000_000_009));
    assert_eq!(walk.next().expect("second").bytes, &plain(61).bytes[..]);
    let (cursor, malformed) = walk.stop();
    assert_eq!((cursor.left, malformed), (1, 0));
    let mut walk = Walk::resume(&mut block, cursor, 65536, u64::MAX);
    assert_eq!(walk.next().expect("third").bytes, &plain(1514).bytes[..]);
    assert_eq!(walk.stop().0.left, 0);
}

#[test]
fn tag_from_metadata_is_put_back_as_on_the_wire() {
    let status = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
    let record = Record {
        status,
        tci: 0x6123,
        tpid: 0x88a8,
        ..plain(60)
    };
    let sent = record.bytes.clone();
    only(record, 65536, |frame| {
        assert_eq!(frame.bytes[..12], sent[..12]);
        assert_eq!(frame.bytes[12..16], [0x88, 0xa8, 0x61, 0x23]);
        assert_eq!(frame.bytes[16..], sent[12..]);
        assert_eq!((frame.wire_len, frame.vlan_tci), (64, 0x6123));
        assert_eq!(frame.flags, flags::VLAN);
    });
}

/// A process that was killed before it noted how far it was: the next one reads the block as it finds it.
#[test]
fn a_tag_that_was_put_back_is_there_once_for_who_reads_the_block_again() {
    let status = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
    let tagged = Record {
        status,
        tci: 0x6123,
        tpid: 0x88a8,
        ..plain(60)
    };
    for has_headers in [false, true] {
        let mut block = block(&[tagged.clone(), plain(61)]);
        if has_headers {
            // A checksum that is due.
            let header = 64 + HEADER_LEN + 14 - SHORT_HEADER;
            block[header] = 1;
            put(&mut block, header + CSUM_START, &34_u16.to_ne_bytes());
        }
        let mut read = || {
            let cursor = Cursor::resume(&block);
            let walk = Walk::resume(&mut block, cursor, 65536, u64::MAX);
            let frames = walk.with_headers(has_headers).map(|it| {
                let what = (it.wire_len, it.vlan_tci, it.flags, it.offload);
                (it.bytes.to_vec(), what)
            });
            frames.collect::<Vec<_>>()
        };
        let first = read();
        let (bytes, (_, tci, _, offload)) = &first[0];
        assert_eq!((first.len(), bytes.len(), *tci), (2, 64, 0x6123));
        assert_eq!(offload.csum_start, if has_headers { 38 } else { 0 });
        assert_eq!(read(), first);
    }
}

#[test]
fn a_checksum_that_was_found_right_is_told_and_nothing_else_of_what_is_done() {
    for (told, is_valid, is_due) in [(0, false, false), (2, true, false), (1, false, true)] {
        let mut block = block(&[plain(60)]);
        let header = 64 + HEADER_LEN + 14 - SHORT_HEADER;
        block[header] = told;
        put(&mut block, header + CSUM_START, &34_u16.to_ne_bytes());
        let cursor = Cursor::resume(&block);
        let mut walk = Walk::resume(&mut block, cursor, 65536, u64::MAX).with_headers(true);
        let frame = walk.next().unwrap();
        let seen = (frame.offload.is_valid(), frame.offload.is_due());
        assert_eq!(seen, (is_valid, is_due));
        assert_eq!(frame.offload.csum_start, if is_due { 34 } else { 0 });
        assert_eq!(frame.flags & flags::OFFLOAD != 0, is_due);
    }
}

#[test]
fn tag_without_tpid_is_802_1q_and_keeps_to_the_snaplen() {
    let record = Record {
        status: libc::TP_STATUS_VLAN_VALID,
        tci: 5,
        wire_len: 99,
        ..plain(64)
    };
    only(record, 64, |frame| {
        assert_eq!(frame.bytes[12..16], [0x81, 0x00, 0, 5]);
        assert_eq!((frame.bytes.len(), frame.wire_len), (64, 103));
    });
}

#[test]
fn inline_tag_is_reported() {
    let mut record = plain(60);
    put(&mut record.bytes, 12, &[0x81, 0x00, 0x00, 0x2a]);
    only(record, 65536, |frame| {
        assert_eq!(
            (frame.flags, frame.vlan_tci, frame.wire_len),
            (flags::VLAN, 0x2a, 60)
        );
    });
}

#[test]
fn kernel_status_becomes_flags() {
    let status = libc::TP_STATUS_CSUMNOTREADY | libc::TP_STATUS_TS_RAW_HARDWARE;
    let record = Record {
        status,
        packet_type: libc::PACKET_OUTGOING,
        ..plain(60)
    };
    only(record, 65536, |frame| {
        assert_eq!(
            frame.flags,
            flags::CSUM_NOT_READY | flags::HW_TIMESTAMP | flags::OUTBOUND
        );
    });
}

#[test]
fn block_that_does_not_add_up_ends_early_and_its_frames_are_counted() {
    let good = block(&[plain(60), plain(61), plain(62)]);
    let second = 64 + (HEADER_LEN + 14 + 60).next_multiple_of(8);
    let lies: [(usize, &[u8]); 4] = [
        (second + NEXT, &8u32.to_ne_bytes()),
        (second + NEXT, &0x7fff_ffffu32.to_ne_bytes()),
        (second + MAC, &u16::MAX.to_ne_bytes()),
        (second + SNAPLEN, &u32::MAX.to_ne_bytes()),
    ];
    for (at, value) in lies {
        let mut block = good.clone();
        put(&mut block, at, value);
        let cursor = Cursor::start(&block);
        let mut walk = Walk::resume(&mut block, cursor, 65536, u64::MAX);
        assert_eq!(walk.by_ref().count(), 1);
        let (cursor, malformed) = walk.stop();
        assert_eq!((cursor.left, malformed), (0, 2));
    }
}

#[test]
fn no_single_wrong_byte_panics() {
    let good = block(&[
        plain(60),
        Record {
            status: u32::MAX,
            ..plain(20)
        },
    ]);
    for at in 0..good.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut block = good.clone();
            block[at] = value;
            let cursor = Cursor::start(&block);
            let frames = Walk::resume(&mut block, cursor, 65536, u64::MAX).count();
            assert!(frames <= 2);
        }
    }
}

#[test]
fn another_process_goes_on_where_a_walk_stopped_but_not_in_another_filling() {
    let mut block = block(&[plain(60), plain(61), plain(62)]);
    let first = Cursor::resume(&block);
    assert_eq!(first, Cursor::start(&block));
    let mut walk = Walk::resume(&mut block, first, 65536, u64::MAX);
    assert_eq!(walk.next().expect("first").bytes.len(), 60);
    let (stopped, _) = walk.stop();
    assert_eq!(Cursor::resume(&block), stopped);
    let mut walk = Walk::resume(&mut block, stopped, 65536, u64::MAX);
    assert_eq!(walk.next().expect("second").bytes.len(), 61);
    assert_eq!(walk.next().expect("third").bytes.len(), 62);
    walk.stop();
    assert_eq!(Cursor::resume(&block).left, 0);
    // The kernel fills it anew.
    put(&mut block, FILLING, &6u64.to_ne_bytes());
    assert_eq!(Cursor::resume(&block), first);
}
