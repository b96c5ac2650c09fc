//! Calls that have no meaning here; `docs/pfring.md` says why. Their arguments are not looked at.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::set_errno;
use crate::abi::ring::Ring;
use crate::error::NOT_SUPPORTED;

fn no() -> c_int {
    set_errno(libc::ENOTSUP);
    NOT_SUPPORTED
}

macro_rules! unsupported {
    ($($name:ident($($argument:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: not supported.")]
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($(_: $argument),*) -> c_int {
                no()
            }
        )*
    };
}

// What only a NIC, its driver, or PF_RING's kernel module can do.
unsupported! {
    pfring_send_get_time(*mut Ring, *mut c_char, c_uint, *mut c_void);
    pfring_recv_flow(*mut Ring, *mut c_void, u8);
    pfring_recv_chunk(*mut Ring, *mut *mut c_void, *mut c_void, u8);
    pfring_get_metadata(*mut Ring, *mut *mut u8, *mut u32);
    pfring_set_default_hw_action(*mut Ring, u32);
    pfring_add_hw_rule(*mut Ring, *mut c_void);
    pfring_remove_hw_rule(*mut Ring, u16);
    pfring_set_filtering_sampling_rate(*mut Ring, u32);
    pfring_set_application_stats(*mut Ring, *mut c_char);
    pfring_set_master_id(*mut Ring, u32);
    pfring_set_master(*mut Ring, *mut Ring);
    pfring_set_virtual_device(*mut Ring, *mut c_void);
    pfring_loopback_test(*mut Ring, *mut c_char, c_uint, c_uint);
    pfring_get_device_clock(*mut Ring, *mut c_void);
    pfring_set_device_clock(*mut Ring, *mut c_void);
    pfring_adjust_device_clock(*mut Ring, *mut c_void, i8);
    pfring_search_payload(*mut Ring, *mut c_char);
    pfring_set_if_promisc(*const c_char, c_int);
    pfring_set_promisc(*mut Ring, c_int);
    pfring_enable_hw_timestamp(*mut Ring, *mut c_char, u8, u8);
    pfring_set_bound_dev_name(*mut Ring, *mut c_char);
    pfring_read_arista_7150_keyframe(*mut u8, u32, *mut u64, *mut u32);
    pfring_handle_ixia_hw_timestamp(*mut u8, *mut c_void);
    pfring_handle_metawatch_hw_timestamp(*mut u8, *mut c_void);
    pfring_handle_arista_hw_timestamp(*mut u8, *mut c_void);
}

// Compiling filters in the program; the daemon does it.
unsupported! {
    pfring_parse_bpf_filter(*const c_char, c_uint, *mut c_void);
}

macro_rules! finds_nothing {
    ($($name:ident($($argument:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: no such trailer is looked for; 0 bytes.")]
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($(_: $argument),*) -> c_int {
                0
            }
        )*
    };
}

finds_nothing! {
    pfring_read_ixia_hw_timestamp(*mut u8, u32, *mut c_void);
    pfring_read_metawatch_hw_timestamp(*mut u8, u32, *mut c_void);
    pfring_read_metawatch_device_info(*mut u8, u32, *mut u16, *mut u8);
    pfring_read_arista_7150_hw_timestamp(*mut u8, u32, *mut u64);
    pfring_read_vss_apcon_hw_timestamp(*mut u8, u32, *mut c_void);
}

/// `pfring_bpf_filter`: nothing passes, for nothing was compiled.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn pfring_bpf_filter(_: *mut c_void, _: *mut u8, _: u32, _: u32) -> u32 {
    no();
    0
}

/// `pfring_get_appl_stats_file_name`: there is no such file.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn pfring_get_appl_stats_file_name(
    _: *mut Ring,
    _: *mut c_char,
    _: c_uint,
) -> *mut c_char {
    no();
    null_mut()
}

macro_rules! does_nothing {
    ($($name:ident($($argument:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: there is nothing to be done.")]
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($(_: $argument),*) {}
        )*
    };
}

does_nothing! {
    pfring_sync_indexes_with_kernel(*mut Ring);
    pfring_enable_hw_timestamp_debug();
    pfring_handle_vss_apcon_hw_timestamp(*mut u8, *mut c_void);
    pfring_free_bpf_filter(*mut c_void);
    pfring_thirdparty_lib_init(*const c_char, *mut c_void);
}
