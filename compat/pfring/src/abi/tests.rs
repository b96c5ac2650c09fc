//! The C compiler's sizes and offsets against ours.

use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use super::packet::{
    CardSettings, Extended, Interface, Offsets, PacketHeader, PacketInfo, Parsed, Stat, Tcp, Tunnel,
};
use super::ring::{Calls, Ring};
use super::rule::{Core, ExtendedFields, FilteringRule, HashRule, Stats, TunnelFields};

macro_rules! layout {
    ($($c:literal = $rust:ty { $($member:literal = $field:ident),* $(,)? })*) => {
        [$(
            (format!("sizeof({})", $c), size_of::<$rust>()),
            $((format!("offsetof({}, {})", $c, $member), offset_of!($rust, $field)),)*
        )*]
    };
}

fn ours() -> Vec<(String, usize)> {
    let mut all = Vec::from(layout! {
        "struct pkt_offset" = Offsets {
            "eth_offset" = eth, "vlan_offset" = vlan, "l3_offset" = l3, "l4_offset" = l4,
            "payload_offset" = payload
        }
        "tunnel_info" = Tunnel {
            "tunnel_id" = id, "tunneled_dmac" = dmac, "tunneled_smac" = smac,
            "tunneled_eth_type" = eth_type, "tunneled_ip_version" = ip_version,
            "tunneled_proto" = proto, "tunneled_ip_src" = ip_src, "tunneled_ip_dst" = ip_dst,
            "tunneled_l4_src_port" = l4_src_port, "tunneled_l4_dst_port" = l4_dst_port
        }
        "struct pkt_parsing_info" = Parsed {
            "dmac" = dmac, "smac" = smac, "eth_type" = eth_type, "vlan_id" = vlan_id,
            "qinq_vlan_id" = qinq_vlan_id, "ip_version" = ip_version, "l3_proto" = l3_proto,
            "ip_tos" = ip_tos, "ip_src" = ip_src, "ip_dst" = ip_dst,
            "l4_src_port" = l4_src_port, "l4_dst_port" = l4_dst_port, "icmp_type" = icmp_type,
            "icmp_code" = icmp_code, "tcp" = tcp, "tunnel" = tunnel,
            "last_matched_rule_id" = last_matched_rule_id, "offset" = offset
        }
        "struct pfring_extended_pkthdr" = Extended {
            "timestamp_ns" = timestamp_ns, "flags" = flags, "rx_direction" = rx_direction,
            "port_id" = port_id, "device_id" = device_id, "if_index" = if_index,
            "pkt_hash" = pkt_hash, "tx" = tx, "process.pid" = pid, "parsed_pkt" = parsed
        }
        "struct pfring_pkthdr" = PacketHeader {
            "ts" = ts, "caplen" = caplen, "len" = len, "extended_hdr" = extended
        }
        "pfring_packet_info" = PacketInfo {
            "data" = data, "ts" = ts, "caplen" = caplen, "len" = len, "flags" = flags,
            "hash" = hash
        }
        "pfring_stat" = Stat { "recv" = recv, "drop" = drop, "shunt" = shunt }
        "pfring_card_settings" = CardSettings {
            "max_packet_size" = max_packet_size, "rx_ring_slots" = rx_ring_slots,
            "tx_ring_slots" = tx_ring_slots
        }
        "pfring_if_t" = Interface {
            "name" = name, "system_name" = system_name, "module" = module,
            "module_version" = module_version, "sn" = sn, "mac" = mac, "bus_id" = bus_id,
            "status" = status, "license" = license, "license_expiration" = license_expiration,
            "next" = next
        }
        "filtering_rule_core_fields" = Core {
            "if_index" = if_index, "smac" = smac, "dmac" = dmac, "vlan_id" = vlan_id,
            "eth_type" = eth_type, "proto" = proto, "shost" = shost, "dhost" = dhost,
            "shost_mask" = shost_mask, "dhost_mask" = dhost_mask, "sport_low" = sport_low,
            "sport_high" = sport_high, "dport_low" = dport_low, "dport_high" = dport_high,
            "tcp.flags" = tcp_flags
        }
        "filtering_rule_extended_fields" = ExtendedFields {
            "optional_fields" = optional_fields, "tunnel" = tunnel,
            "payload_pattern" = payload_pattern
        }
        "filtering_rule" = FilteringRule {
            "rule_id" = rule_id, "rule_action" = rule_action, "balance_id" = balance_id,
            "balance_pool" = balance_pool, "locked" = locked, "bidirectional" = bidirectional,
            "core_fields" = core, "extended_fields" = extended,
            "reflector_device_name" = reflector_device_name, "internals" = internals
        }
        "hash_filtering_rule" = HashRule {
            "rule_id" = rule_id, "vlan_id" = vlan_id, "ip_version" = ip_version, "proto" = proto,
            "host_peer_a" = host_peer_a, "host_peer_b" = host_peer_b,
            "port_peer_a" = port_peer_a, "port_peer_b" = port_peer_b,
            "rule_action" = rule_action, "reflector_device_name" = reflector_device_name,
            "internals" = internals
        }
        "hash_filtering_rule_stats" = Stats {
            "match" = matched, "filtered" = filtered, "match_forward" = match_forward,
            "inactivity" = inactivity
        }
        "struct __pfring" = Ring {
            "initialized" = initialized, "enabled" = enabled, "zc_device" = zc_device,
            "is_shutting_down" = is_shutting_down, "direction" = direction, "mode" = mode,
            "userspace_bpf_filter" = bpf, "hw_ts" = hw_ts, "tx" = tx,
            "priv_data" = priv_data, "close" = calls, "rdi" = rdi, "filter_mode" = filter_mode,
            "buffer" = buffer, "device_name" = device_name, "flags" = flags, "caplen" = caplen,
            "slot_header_len" = slot_header_len, "mtu" = mtu, "sampling_rate" = sampling_rate,
            "slicing_level" = slicing, "fd" = fd, "device_id" = device_id,
            "slots_info" = slots_info, "poll_duration" = poll_duration, "reentrant" = reentrant,
            "break_recv_loop" = break_recv_loop, "rx_lock" = rx_lock, "tx_lock" = tx_lock,
            "ft" = ft, "sock_tx" = sock_tx, "reflector_socket" = reflector_socket,
            "runtime_manager_thread" = runtime_manager_thread
        }
    });
    let calls = offset_of!(Ring, calls);
    let member = |name: &str| format!("offsetof(struct __pfring, {name})");
    all.extend([
        (member("recv"), calls + offset_of!(Calls, recv)),
        (member("poll"), calls + offset_of!(Calls, poll)),
        (member("recv_burst"), calls + offset_of!(Calls, recv_burst)),
        (
            member("get_link_type"),
            calls + offset_of!(Calls, get_link_type),
        ),
        (
            "offsetof(filtering_rule, extended_fields.tunnel.dhost_mask)".into(),
            {
                let tunnel =
                    offset_of!(FilteringRule, extended) + offset_of!(ExtendedFields, tunnel);
                tunnel + offset_of!(TunnelFields, dhost_mask)
            },
        ),
        ("offsetof(struct pkt_parsing_info, tcp.seq_num)".into(), {
            offset_of!(Parsed, tcp) + offset_of!(Tcp, seq_num)
        }),
    ]);
    all
}

#[test]
fn every_structure_lies_as_the_header_says() {
    let ours = ours();
    let lines = ours
        .iter()
        .map(|(what, _)| format!("printf(\"%zu\\n\", (size_t){what});\n"));
    let source = format!(
        "#include <stddef.h>\n#include \"pfring.h\"\nint main(void) {{\n{}return 0; }}\n",
        lines.collect::<String>()
    );
    let dir = std::env::temp_dir().join(format!("vnplug-pfring-layout-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (file, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut compiler = Command::new("cc");
    compiler
        .arg("-I")
        .arg(include)
        .arg(file)
        .arg("-o")
        .arg(&program);
    assert!(compiler.status().unwrap().success());
    let output = Command::new(&program).output().unwrap().stdout;
    std::fs::remove_dir_all(&dir).unwrap();
    let theirs = String::from_utf8(output).unwrap();
    let theirs: Vec<usize> = theirs.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(theirs.len(), ours.len());
    let wrong: Vec<_> = ours
        .iter()
        .zip(theirs)
        .filter(|((_, ours), theirs)| ours != theirs)
        .collect();
    assert!(wrong.is_empty(), "ours and the header's: {wrong:#?}");
}
