//! Link types: only Ethernet is played; the others are refused by name.

use vnplug_frame::capfile::Bad;

/// Bytes of FCS at the end of each frame, if the link type of a pcap header or an interface is
/// Ethernet. The upper bits of a pcap header's word are libpcap's `LT_FCS_LENGTH`.
pub(super) fn ethernet(word: u32, at: usize) -> Result<u8, Bad> {
    let number = word & 0x03ff_ffff;
    if number == ETHERNET {
        let has_fcs = word & 0x0400_0000 != 0;
        return Ok(if has_fcs { 2 * (word >> 28) as u8 } else { 0 });
    }
    let known = NAMES
        .iter()
        .find(|(known, _)| *known == number)
        .map(|(_, name)| *name);
    let name = known.unwrap_or("unknown");
    let raw = if name.contains("IP") {
        "; there is no Ethernet header to add"
    } else {
        ""
    };
    let what = format!("link type {number} ({name}), only Ethernet (1) can be played{raw}");
    Err(Bad::new(at, what))
}

const ETHERNET: u32 = 1;

/// <https://www.tcpdump.org/linktypes.html>, the ones met in practice.
const NAMES: &[(u32, &str)] = &[
    (0, "NULL"),
    (3, "AX25"),
    (6, "IEEE802_5"),
    (7, "ARCNET_BSD"),
    (8, "SLIP"),
    (9, "PPP"),
    (10, "FDDI"),
    (12, "RAW IP"),
    (14, "RAW IP"),
    (50, "PPP_HDLC"),
    (51, "PPP_ETHER"),
    (100, "ATM_RFC1483"),
    (101, "RAW IP"),
    (104, "C_HDLC"),
    (105, "IEEE802_11"),
    (107, "FRELAY"),
    (108, "LOOP"),
    (113, "LINUX_SLL"),
    (117, "PFLOG"),
    (119, "IEEE802_11_PRISM"),
    (127, "IEEE802_11_RADIOTAP"),
    (143, "DOCSIS"),
    (147, "USER0"),
    (163, "IEEE802_11_AVS"),
    (187, "BLUETOOTH_HCI_H4"),
    (189, "USB_LINUX"),
    (195, "IEEE802_15_4_WITHFCS"),
    (201, "BLUETOOTH_HCI_H4_WITH_PHDR"),
    (220, "USB_LINUX_MMAPPED"),
    (227, "CAN_SOCKETCAN"),
    (228, "IPV4 (raw IP)"),
    (229, "IPV6 (raw IP)"),
    (230, "IEEE802_15_4_NOFCS"),
    (239, "NFLOG"),
    (249, "USBPCAP"),
    (253, "NETLINK"),
    (276, "LINUX_SLL2"),
];
