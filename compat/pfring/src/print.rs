//! A parsed packet in one line, and numbers for people.

use std::fmt::Write;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::abi::packet::{IpAddr, NO_TUNNEL_ID, Parsed};

/// One line about a packet; `packet` is its captured bytes, for ARP.
pub(crate) fn line(parsed: &Parsed, hash: u32, packet: &[u8], wire_len: u32) -> String {
    let mut text = String::with_capacity(256);
    let offset = parsed.offset;
    let (smac, dmac) = (mac(&parsed.smac), mac(&parsed.dmac));
    add(&mut text, format_args!("[{smac} -> {dmac}] "));
    if { offset.vlan } != 0 {
        add(&mut text, format_args!("[vlan {}] ", { parsed.vlan_id }));
    }
    if { parsed.qinq_vlan_id } != 0 {
        add(
            &mut text,
            format_args!("[QinQ-vlan {}] ", { parsed.qinq_vlan_id }),
        );
    }
    match ({ parsed.eth_type }, parsed.ip_version) {
        (_, 4 | 6) => ip(&mut text, parsed, hash),
        (0x0806, _) => arp(
            &mut text,
            packet.get(offset.l3 as usize..).unwrap_or_default(),
        ),
        (other, _) => add(&mut text, format_args!("[eth_type=0x{other:04X}]")),
    }
    let Offsets {
        eth,
        l3,
        l4,
        payload,
    } = Offsets::of(parsed);
    let cap_len = packet.len();
    add(
        &mut text,
        format_args!(
            " [caplen={cap_len}][len={wire_len}][eth_offset={eth}][l3_offset={l3}][l4_offset={l4}]\
             [payload_offset={payload}]"
        ),
    );
    text
}

/// `value` with apostrophes between thousands, and two decimals if wanted.
pub(crate) fn number(value: f64, decimals: bool) -> String {
    let value = if value.is_finite() {
        value.max(0.0)
    } else {
        0.0
    };
    let mut whole = value.trunc() as u64;
    let hundredths = ((value - value.trunc()) * 100.0) as u32;
    let mut groups = Vec::new();
    while whole >= 1000 {
        groups.push(format!("'{:03}", whole % 1000));
        whole /= 1000;
    }
    let mut text = whole.to_string();
    text.extend(groups.into_iter().rev());
    if decimals {
        add(&mut text, format_args!(".{hundredths:02}"));
    }
    text
}

struct Offsets {
    eth: i16,
    l3: i16,
    l4: i16,
    payload: i16,
}

impl Offsets {
    fn of(parsed: &Parsed) -> Self {
        let all = parsed.offset;
        Self {
            eth: all.eth,
            l3: all.l3,
            l4: all.l4,
            payload: all.payload,
        }
    }
}

fn ip(text: &mut String, parsed: &Parsed, hash: u32) {
    let (source, target) = (parsed.ip_src, parsed.ip_dst);
    let ports = (parsed.l4_src_port, parsed.l4_dst_port);
    peers(text, parsed.ip_version, (source, target), ports);
    add(text, format_args!("[l3_proto={}]", proto(parsed.l3_proto)));
    let tunnel = parsed.tunnel;
    if { tunnel.id } != NO_TUNNEL_ID || tunnel.ip_version != 0 {
        let (id, inside) = (tunnel.id, proto(tunnel.proto));
        add(
            text,
            format_args!("[TEID=0x{id:08X}][tunneled_proto={inside}]"),
        );
        let ports = (tunnel.l4_src_port, tunnel.l4_dst_port);
        peers(
            text,
            tunnel.ip_version,
            (tunnel.ip_src, tunnel.ip_dst),
            ports,
        );
    }
    add(text, format_args!("[hash={hash}]"));
    if parsed.l3_proto == 6 {
        let (tos, sequence) = (parsed.ip_tos, parsed.tcp.seq_num);
        add(text, format_args!("[tos={tos}][tcp_seq_num={sequence}]"));
    }
}

fn peers(text: &mut String, version: u8, addresses: (IpAddr, IpAddr), ports: (u16, u16)) {
    let (source, target) = addresses;
    let (from, to) = ports;
    match version {
        4 => {
            let [source, target] = [source, target].map(|ip| Ipv4Addr::from(ip.as_v4()));
            add(
                text,
                format_args!("[IPv4][{source}:{from} -> {target}:{to}] "),
            );
        }
        6 => {
            let [source, target] = [source, target].map(|ip| Ipv6Addr::from(ip.as_v6()));
            add(
                text,
                format_args!("[IPv6][{source}:{from} -> {target}:{to}] "),
            );
        }
        _ => {}
    }
}

/// ARP for IPv4 over Ethernet (RFC 826).
fn arp(text: &mut String, packet: &[u8]) {
    add(text, format_args!("[ARP]"));
    for (who, at) in [("Sender", 8), ("Target", 18)] {
        let hardware: Option<&[u8; 6]> = packet.get(at..).and_then(<[u8]>::first_chunk);
        let address: Option<&[u8; 4]> = packet.get(at + 6..).and_then(<[u8]>::first_chunk);
        if let (Some(hardware), Some(address)) = (hardware, address) {
            let (hardware, address) = (mac(hardware), Ipv4Addr::from(*address));
            add(text, format_args!("[{who}={hardware}/{address}]"));
        }
    }
}

fn proto(number: u8) -> String {
    match number {
        1 => "ICMP".into(),
        6 => "TCP".into(),
        17 => "UDP".into(),
        47 => "GRE".into(),
        58 => "ICMPv6".into(),
        132 => "SCTP".into(),
        other => other.to_string(),
    }
}

fn mac(bytes: &[u8; 6]) -> String {
    let parts: Vec<String> = bytes.iter().map(|byte| format!("{byte:02X}")).collect();
    parts.join(":")
}

fn add(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::headers;

    #[test]
    fn numbers_have_apostrophes() {
        assert_eq!(number(0.0, false), "0");
        assert_eq!(number(1_234_567.891, true), "1'234'567.89");
        assert_eq!(number(999.0, true), "999.00");
        assert_eq!(number(1e9, false), "1'000'000'000");
        assert_eq!(number(f64::NAN, false), "0");
        assert_eq!(number(-5.0, false), "0");
    }

    #[test]
    fn an_arp_request_is_told_with_its_addresses() {
        let mut packet = vec![0xff; 6];
        packet.extend([2, 0, 0, 0, 0, 1, 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
        packet.extend([
            2, 0, 0, 0, 0, 1, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 9,
        ]);
        let text = line(&headers(&packet, 5).parsed, 0, &packet, 60);
        assert!(
            text.contains("[Sender=02:00:00:00:00:01/192.0.2.1]"),
            "{text}"
        );
        assert!(
            text.contains("[Target=00:00:00:00:00:00/192.0.2.9]"),
            "{text}"
        );
        assert!(text.ends_with(
            "[caplen=42][len=60][eth_offset=0][l3_offset=14][l4_offset=0][payload_offset=0]"
        ));
    }
}
