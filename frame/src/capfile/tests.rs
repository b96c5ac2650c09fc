use super::classic::Classic;
use super::ng::{Block, ENHANCED_PACKET, EPB_FLAGS, INTERFACE, OUTBOUND, SECTION};
use super::write::{self, Head, Interface, pcap, pcapng};
use super::*;

const BYTES: &[u8] = b"a frame of 21 bytes..";
const HEAD: Head = Head {
    ts_ns: 1_700_000_000_123_456_789,
    wire_len: 1514,
};

#[test]
fn what_is_written_as_pcap_is_read_back() {
    let mut file = pcap::header(&[lan0()]);
    let header = file.len();
    file.resize(header + 100, 0xee);
    let end = pcap::record(&mut file, header, &HEAD, BYTES).expect("there is room");

    let classic = Classic::parse(&file).expect("its version is known");
    let classic = classic.expect("a pcap file");
    assert_eq!((classic.link, classic.snaplen), (1, 96));
    let record = classic.record(&file[header..]);
    assert_eq!(record, expected());
    assert_eq!(&file[header + classic.record_bytes..end], BYTES);
}

#[test]
fn what_is_written_as_pcapng_is_read_back() {
    let mut file = pcapng::header(&[lan0()], "a comment");
    let header = file.len();
    let mut options = Vec::new();
    pcapng::option(&mut options, EPB_FLAGS, &OUTBOUND.to_le_bytes());
    file.resize(header + 200, 0xee);
    let end = pcapng::enhanced(&mut file, header, 0, &HEAD, BYTES, &options).expect("room");
    assert_eq!(end - header, pcapng::enhanced_bytes(BYTES, &options));

    let (mut rest, mut order, mut seen) = (&file[..end], Order::Big, Vec::new());
    let mut clock = None;
    while !rest.is_empty() {
        let block = Block::begin(rest, order).expect("a block");
        let body = block.body(rest).expect("its two lengths agree");
        order = block.order;
        seen.push(block.kind);
        match block.kind {
            SECTION => block.section(body).expect("its version is known"),
            INTERFACE => {
                let interface = block.interface(body).expect("its options are right");
                assert_eq!(interface.name, "lan0");
                assert_eq!((interface.link_type, interface.snaplen), (1, 96));
                clock = Some(interface.clock);
            }
            _ => {
                assert_eq!(block.interface_of(body), 0);
                let packet = block.packet(body, 96).expect("the block holds it");
                let ts_ns = clock
                    .expect("an interface")
                    .ns(packet.units.expect("a time"));
                let (cap_len, wire_len) = (packet.cap_len, packet.wire_len);
                assert_eq!(
                    Record {
                        cap_len,
                        wire_len,
                        ts_ns
                    },
                    expected()
                );
                assert_eq!(&body[packet.at..][..BYTES.len()], BYTES);
                let found: Vec<_> = block
                    .options(body, packet.options_at())
                    .map(|option| option.expect("it fits"))
                    .map(|option| (option.code, order.u32(option.value, 0)))
                    .collect();
                assert_eq!(found, [(EPB_FLAGS, OUTBOUND)]);
            }
        }
        rest = &rest[block.len as usize..];
    }
    assert_eq!(seen, [SECTION, INTERFACE, ENHANCED_PACKET]);
}

/// Every cut and every single wrong byte is either refused or read without a step outside.
#[test]
fn no_damage_leads_outside_the_block() {
    let mut block = vec![0; 100];
    let end = pcapng::enhanced(&mut block, 0, 0, &HEAD, BYTES, &[]).expect("room");
    for at in 0..end {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut damaged = block[..end].to_vec();
            damaged[at] = value;
            let Ok(block) = Block::begin(&damaged, Order::Little) else {
                continue;
            };
            if block.len as usize > damaged.len() {
                continue; // the reader's part: it waits for more
            }
            let Ok(body) = block.body(&damaged) else {
                continue;
            };
            if block.is_packet()
                && let Ok(packet) = block.packet(body, 0)
            {
                assert!(packet.at + packet.cap_len as usize <= body.len());
                block.options(body, packet.options_at()).for_each(drop);
            }
        }
    }
}

#[test]
fn a_clock_counts_in_any_unit_and_clamps() {
    let clock = |tsresol: u8, offset: i64| {
        let mut body = Vec::new();
        body.extend(INTERFACE.to_le_bytes());
        body.extend([0; 12]); // length, link type, snaplen
        pcapng::option(&mut body, 9, &[tsresol]);
        pcapng::option(&mut body, 14, &offset.to_le_bytes());
        let block = Block {
            kind: INTERFACE,
            len: 0,
            order: Order::Little,
        };
        block.interface(&body).map(|interface| interface.clock)
    };
    let ns = |tsresol, offset, units| clock(tsresol, offset).expect("known").ns(units);
    assert_eq!(ns(9, 0, 5), 5);
    assert_eq!(ns(6, 0, 5), 5000);
    assert_eq!(ns(3, 0, 5), 5_000_000);
    assert_eq!(ns(12, 0, 5999), 5);
    assert_eq!(ns(0x80 | 10, 0, 1536), 1_500_000_000);
    assert_eq!(ns(0, 2, 1), 3_000_000_000);
    assert_eq!(ns(0, -2, 1), 0); // before 1970
    assert_eq!(ns(6, 0, u64::MAX), u64::MAX);
    assert_eq!(ns(0, i64::MAX, u64::MAX), u64::MAX);
    assert!(clock(19, 0).is_ok() && clock(20, 0).is_err());
    assert!(clock(0x80 | 63, 0).is_ok() && clock(0x80 | 64, 0).is_err());
}

#[test]
fn nothing_is_written_where_there_is_no_room() {
    let mut memory = [0x55; 64];
    assert_eq!(pcap::record(&mut memory, 32, &HEAD, BYTES), None);
    assert_eq!(
        pcapng::enhanced(&mut memory, 16, 0, &HEAD, BYTES, &[]),
        None
    );
    assert_eq!(memory, [0x55; 64]);
}

fn lan0() -> Interface {
    write::Interface {
        name: String::from("lan0"),
        link_type: 1,
        snaplen: 96,
        filter: String::from("udp"),
    }
}

fn expected() -> Record {
    Record {
        cap_len: BYTES.len() as u32,
        wire_len: HEAD.wire_len,
        ts_ns: HEAD.ts_ns,
    }
}
