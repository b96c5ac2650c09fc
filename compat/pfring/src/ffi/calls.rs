//! The functions a program finds in `struct __pfring`: those that work.

use std::ffi::c_void;

use super::{about, life, receive, rules, select, send};
use crate::abi::ring::Calls;

macro_rules! present {
    ($($module:ident: $($member:ident = $call:ident),*;)*) => {
        /// The members of `struct __pfring` that are functions.
        pub(super) fn present() -> Calls {
            Calls {
                $($($member: $module::$call as *const c_void,)*)*
                ..Calls::NONE
            }
        }
    };
}

present! {
    life:
        close = pfring_close, bind = pfring_bind, enable_ring = pfring_enable_ring,
        disable_ring = pfring_disable_ring, shutdown = pfring_shutdown;
    receive:
        recv = pfring_recv, recv_burst = pfring_recv_burst, poll = pfring_poll,
        get_selectable_fd = pfring_get_selectable_fd, is_pkt_available = pfring_is_pkt_available,
        next_pkt_time = pfring_next_pkt_time,
        next_pkt_raw_timestamp = pfring_next_pkt_raw_timestamp;
    select:
        set_poll_watermark = pfring_set_poll_watermark,
        set_poll_watermark_timeout = pfring_set_poll_watermark_timeout,
        set_poll_duration = pfring_set_poll_duration, set_channel_id = pfring_set_channel_id,
        set_channel_mask = pfring_set_channel_mask,
        set_application_name = pfring_set_application_name, set_vlan_id = pfring_set_vlan_id,
        set_sampling_rate = pfring_set_sampling_rate,
        set_packet_slicing = pfring_set_packet_slicing, set_direction = pfring_set_direction,
        set_socket_mode = pfring_set_socket_mode,
        set_cluster_consumer = pfring_set_cluster_consumer,
        remove_from_cluster = pfring_remove_from_cluster,
        enable_rss_rehash = pfring_enable_rss_rehash, set_bpf_filter = pfring_set_bpf_filter,
        remove_bpf_filter = pfring_remove_bpf_filter;
    rules:
        add_filtering_rule = pfring_add_filtering_rule,
        remove_filtering_rule = pfring_remove_filtering_rule,
        purge_idle_rules = pfring_purge_idle_rules,
        get_filtering_rule_stats = pfring_get_filtering_rule_stats,
        handle_hash_filtering_rule = pfring_handle_hash_filtering_rule,
        get_hash_filtering_rule_stats = pfring_get_hash_filtering_rule_stats,
        purge_idle_hash_rules = pfring_purge_idle_hash_rules,
        toggle_filtering_policy = pfring_toggle_filtering_policy;
    send:
        send = pfring_send, set_tx_watermark = pfring_set_tx_watermark,
        send_last_rx_packet = pfring_send_last_rx_packet,
        flush_tx_packets = pfring_flush_tx_packets;
    about:
        stats = pfring_stats, version = pfring_version,
        get_num_rx_channels = pfring_get_num_rx_channels,
        get_card_settings = pfring_get_card_settings, get_ring_id = pfring_get_ring_id,
        get_num_queued_pkts = pfring_get_num_queued_pkts,
        get_bound_device_address = pfring_get_bound_device_address,
        get_bound_device_ifindex = pfring_get_bound_device_ifindex,
        get_device_ifindex = pfring_get_device_ifindex,
        get_slot_header_len = pfring_get_slot_header_len,
        get_interface_speed = pfring_get_interface_speed, get_link_type = pfring_get_link_type;
}
