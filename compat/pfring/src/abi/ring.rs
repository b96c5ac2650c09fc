//! `struct __pfring`: what programs may look at. Everything else of a ring lies behind it.
//!
//! The library writes it; programs read it. What changes after the opening is atomic. Its functions
//! are set where the call works.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32};

use libc::timespec;

/// A member that is a function: NULL, or the exported call of that name.
pub(crate) type Call = *const c_void;

/// `struct bpf_program`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Program {
    pub(crate) len: u32,
    pub(crate) insns: *mut c_void,
}

/// The anonymous `hw_ts`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct HardwareTime {
    pub(crate) flags: [u8; 4],
    pub(crate) last: timespec,
}

/// The anonymous `tx`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LastReceived {
    pub(crate) enabled: u8,
    pub(crate) header: *mut c_void,
}

/// `struct __pfring`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Ring {
    pub(crate) initialized: u8,
    pub(crate) enabled: AtomicU8,
    pub(crate) long_header: u8,
    pub(crate) force_timestamp: u8,
    pub(crate) strip_hw_timestamp: u8,
    pub(crate) disable_parsing: u8,
    pub(crate) disable_timestamp: u8,
    pub(crate) ixia_timestamp_enabled: u8,
    pub(crate) vss_apcon_timestamp_enabled: u8,
    pub(crate) chunk_mode_enabled: u8,
    pub(crate) userspace_bpf: u8,
    pub(crate) force_userspace_bpf: u8,
    pub(crate) zc_device: u8,
    pub(crate) is_shutting_down: AtomicU8,
    pub(crate) default_accept_policy: AtomicU8,
    pub(crate) break_recv_loop_ext: u8,
    pub(crate) rss_mode: u32,
    pub(crate) direction: AtomicU32,
    pub(crate) mode: AtomicU32,
    pub(crate) bpf: Program,
    pub(crate) hw_ts: HardwareTime,
    pub(crate) tx: LastReceived,
    pub(crate) priv_data: *mut c_void,
    pub(crate) calls: Calls,
    pub(crate) rdi: [i8; 2],
    pub(crate) filter_mode: u32,
    pub(crate) ft_device_type: u32,
    pub(crate) buffer: *mut c_char,
    pub(crate) slots: *mut c_char,
    pub(crate) device_name: *mut c_char,
    pub(crate) flags: u32,
    pub(crate) caplen: u32,
    pub(crate) slot_header_len: u16,
    pub(crate) mtu: u16,
    pub(crate) sampling_rate: AtomicU32,
    pub(crate) sampling: [u32; 2],
    pub(crate) slicing: [u32; 2],
    pub(crate) fd: c_int,
    pub(crate) device_id: c_int,
    pub(crate) slots_info: *mut c_void,
    pub(crate) poll_sleep: u32,
    pub(crate) poll_duration: AtomicU16,
    pub(crate) promisc: u8,
    pub(crate) ft_enabled: u8,
    pub(crate) reentrant: u8,
    pub(crate) break_recv_loop: u8,
    pub(crate) padding: u16,
    pub(crate) num_poll_calls: u32,
    pub(crate) rx_lock: [u64; 7],
    pub(crate) tx_lock: [u64; 7],
    pub(crate) ft: *mut c_void,
    pub(crate) sock_tx: [u32; 5],
    pub(crate) reflector_socket: *mut c_void,
    pub(crate) one_copy_rx_pfring: *mut c_void,
    pub(crate) runtime_manager_thread: u64,
}

macro_rules! calls {
    ($($name:ident)*) => {
        /// The members of `struct __pfring` that are functions, in order.
        #[derive(Debug)]
        #[repr(C)]
        pub(crate) struct Calls {
            $(pub(crate) $name: Call,)*
        }

        impl Calls {
            /// None of them.
            pub(crate) const NONE: Self = Self { $($name: null(),)* };
        }
    };
}

calls! {
    close stats recv set_poll_watermark set_poll_watermark_timeout set_poll_duration
    set_tx_watermark set_channel_id set_channel_mask set_application_name set_application_stats
    get_appl_stats_file_name set_vlan_id bind send send_get_time get_num_rx_channels
    get_card_settings set_sampling_rate set_filtering_sampling_rate set_packet_slicing
    get_selectable_fd set_direction set_socket_mode set_cluster_consumer remove_from_cluster
    set_master_id set_master get_ring_id get_num_queued_pkts get_hash_filtering_rule_stats
    handle_hash_filtering_rule purge_idle_hash_rules add_filtering_rule remove_filtering_rule
    purge_idle_rules get_filtering_rule_stats toggle_filtering_policy enable_rss_rehash poll
    is_pkt_available next_pkt_time next_pkt_raw_timestamp version get_bound_device_address
    get_bound_device_ifindex get_device_ifindex get_slot_header_len set_virtual_device
    set_default_hw_action add_hw_rule remove_hw_rule loopback_test enable_ring disable_ring
    shutdown set_bpf_filter remove_bpf_filter get_device_clock set_device_clock
    adjust_device_clock sync_indexes_with_kernel send_last_rx_packet flush_tx_packets
    register_zerocopy_tx_ring recv_chunk recv_burst recv_flow set_bound_dev_name get_metadata
    get_interface_speed get_link_type
}

impl Ring {
    /// A ring that is not open yet.
    pub(crate) fn new(caplen: u32, flags: u32) -> Self {
        let flag = |bit: u32| u8::from(flags & bit != 0);
        Self {
            initialized: 0,
            enabled: AtomicU8::new(0),
            long_header: flag(flags::LONG_HEADER),
            force_timestamp: flag(flags::TIMESTAMP),
            strip_hw_timestamp: 0,
            disable_parsing: flag(flags::DO_NOT_PARSE),
            disable_timestamp: 0,
            ixia_timestamp_enabled: 0,
            vss_apcon_timestamp_enabled: 0,
            chunk_mode_enabled: 0,
            userspace_bpf: 0,
            force_userspace_bpf: 0,
            zc_device: 0,
            is_shutting_down: AtomicU8::new(0),
            default_accept_policy: AtomicU8::new(1),
            break_recv_loop_ext: 0,
            rss_mode: 0,
            direction: AtomicU32::new(0),
            mode: AtomicU32::new(0),
            bpf: Program {
                len: 0,
                insns: null_mut(),
            },
            hw_ts: HardwareTime {
                flags: [0; 4],
                last: timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                },
            },
            tx: LastReceived {
                enabled: 0,
                header: null_mut(),
            },
            priv_data: null_mut(),
            calls: Calls::NONE,
            rdi: [-1; 2],
            filter_mode: SOFTWARE_ONLY,
            ft_device_type: 0,
            buffer: null_mut(),
            slots: null_mut(),
            device_name: null_mut(),
            flags,
            caplen,
            slot_header_len: 0,
            mtu: 0,
            sampling_rate: AtomicU32::new(1),
            sampling: [0; 2],
            slicing: [0; 2],
            fd: -1,
            device_id: -1,
            slots_info: null_mut(),
            poll_sleep: 0,
            poll_duration: AtomicU16::new(DEFAULT_POLL_DURATION),
            promisc: flag(flags::PROMISC),
            ft_enabled: 0,
            reentrant: flag(flags::REENTRANT),
            break_recv_loop: 0,
            padding: 0,
            num_poll_calls: 0,
            rx_lock: [0; 7],
            tx_lock: [0; 7],
            ft: null_mut(),
            sock_tx: [0; 5],
            reflector_socket: null_mut(),
            one_copy_rx_pfring: null_mut(),
            runtime_manager_thread: 0,
        }
    }
}

/// Flags of `pfring_open` that mean something here.
pub(crate) mod flags {
    /// `PF_RING_REENTRANT`.
    pub(crate) const REENTRANT: u32 = 1 << 1;
    /// `PF_RING_LONG_HEADER`.
    pub(crate) const LONG_HEADER: u32 = 1 << 2;
    /// `PF_RING_PROMISC`.
    pub(crate) const PROMISC: u32 = 1 << 3;
    /// `PF_RING_TIMESTAMP`.
    pub(crate) const TIMESTAMP: u32 = 1 << 4;
    /// `PF_RING_DO_NOT_PARSE`.
    pub(crate) const DO_NOT_PARSE: u32 = 1 << 9;
    /// `PF_RING_RX_PACKET_BOUNCE`.
    pub(crate) const RX_PACKET_BOUNCE: u32 = 1 << 6;
    /// `PF_RING_TX_BPF`.
    pub(crate) const TX_BPF: u32 = 1 << 22;
}

/// `socket_mode`.
pub(crate) mod mode {
    /// `send_and_recv_mode`.
    pub(crate) const SEND_AND_RECV: u32 = 0;
    /// `send_only_mode`.
    pub(crate) const SEND_ONLY: u32 = 1;
    /// `recv_only_mode`.
    pub(crate) const RECV_ONLY: u32 = 2;
    /// `management_only_mode`.
    pub(crate) const MANAGEMENT_ONLY: u32 = 3;
}

/// `software_only` of `filtering_mode`.
const SOFTWARE_ONLY: u32 = 2;
/// Milliseconds.
pub(crate) const DEFAULT_POLL_DURATION: u16 = 500;
