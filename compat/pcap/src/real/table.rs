//! The functions of libpcap, their types, and what stands in for each that is missing.
#![expect(
    unsafe_code,
    reason = "the real library's functions, and what stands in for them"
)]

use std::ffi::{CStr, c_char, c_int, c_long, c_uchar, c_uint, c_void};
use std::ptr;

use libc::FILE;

use super::{MISSING, say_missing};
use crate::abi::{ERROR, Handler, Insn, Interface, Opaque, PacketHeader, Pcap, PcapStat, Program};

/// `fn name(arguments) -> result = what a library without it answers;`
macro_rules! table {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $missing:expr;)*) => {
        /// One function pointer for each function of libpcap.
        #[derive(Debug)]
        pub(crate) struct Real {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl Real {
            /// Takes each function from `symbol`, or what stands in for it if that is null.
            pub(super) fn resolve(symbol: impl Fn(&CStr) -> *mut c_void) -> Self {
                $(
                    #[expect(clippy::allow_attributes, reason = "depends on the function")]
                    #[allow(unused_variables, unused_unsafe, reason = "depends on the function")]
                    unsafe extern "C" fn $name($($arg: $type),*) $(-> $result)? {
                        // SAFETY: what stands in only writes an error text to the buffer given, or
                        // frees what this library allocated, by the caller's promise.
                        unsafe { $missing }
                    }
                )*
                Self {
                    $($name: {
                        type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        let found = CStr::from_bytes_with_nul(name).map_or(ptr::null_mut(), &symbol);
                        if found.is_null() {
                            $name
                        } else {
                            // SAFETY: the type is that of the function in libpcap's headers.
                            unsafe { std::mem::transmute::<*mut c_void, Function>(found) }
                        }
                    },)*
                }
            }
        }
    };
}

table! {
    fn bpf_dump(program: *const Program, option: c_int) = ();
    fn bpf_filter(insns: *const Insn, packet: *const c_uchar, wire_len: c_uint, len: c_uint) -> c_uint = 0;
    fn bpf_image(insn: *const Insn, number: c_int) -> *mut c_char = ptr::null_mut();
    fn bpf_validate(insns: *const Insn, len: c_int) -> c_int = 0;
    fn pcap_compile_nopcap(snaplen: c_int, link_type: c_int, program: *mut Program, text: *const c_char, optimize: c_int, netmask: u32) -> c_int = ERROR;
    fn pcap_datalink_name_to_val(name: *const c_char) -> c_int = ERROR;
    fn pcap_datalink_val_to_description(link_type: c_int) -> *const c_char = ptr::null();
    fn pcap_datalink_val_to_description_or_dlt(link_type: c_int) -> *const c_char = c"DLT".as_ptr();
    fn pcap_datalink_val_to_name(link_type: c_int) -> *const c_char = ptr::null();
    fn pcap_dump(dumper: *mut c_uchar, header: *const PacketHeader, bytes: *const c_uchar) = ();
    fn pcap_dump_close(dumper: *mut Opaque) = ();
    fn pcap_dump_file(dumper: *mut Opaque) -> *mut FILE = ptr::null_mut();
    fn pcap_dump_flush(dumper: *mut Opaque) -> c_int = ERROR;
    fn pcap_dump_ftell(dumper: *mut Opaque) -> c_long = -1;
    fn pcap_dump_ftell64(dumper: *mut Opaque) -> i64 = -1;
    fn pcap_ether_aton(text: *const c_char) -> *mut c_uchar = ptr::null_mut();
    fn pcap_ether_hostton(name: *const c_char) -> *mut c_uchar = ptr::null_mut();
    fn pcap_fopen_offline(file: *mut FILE, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_fopen_offline_with_tstamp_precision(file: *mut FILE, precision: c_uint, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_init(options: c_uint, errbuf: *mut c_char) -> c_int = 0;
    fn pcap_lib_version() -> *const c_char = c"libpcap version 1.10.3 (vNPlug, no real libpcap)".as_ptr();
    fn pcap_lookupdev(errbuf: *mut c_char) -> *mut c_char = { say_missing(errbuf); ptr::null_mut() };
    fn pcap_nametoaddr(name: *const c_char) -> *mut *mut u32 = ptr::null_mut();
    fn pcap_nametoaddrinfo(name: *const c_char) -> *mut libc::addrinfo = ptr::null_mut();
    fn pcap_nametoeproto(name: *const c_char) -> c_int = ERROR;
    fn pcap_nametollc(name: *const c_char) -> c_int = ERROR;
    fn pcap_nametonetaddr(name: *const c_char) -> u32 = 0;
    fn pcap_nametoport(name: *const c_char, port: *mut c_int, protocol: *mut c_int) -> c_int = 0;
    fn pcap_nametoportrange(name: *const c_char, first: *mut c_int, last: *mut c_int, protocol: *mut c_int) -> c_int = 0;
    fn pcap_nametoproto(name: *const c_char) -> c_int = ERROR;
    fn pcap_next_etherent(file: *mut FILE) -> *mut Opaque = ptr::null_mut();
    fn pcap_offline_filter(program: *const Program, header: *const PacketHeader, bytes: *const c_uchar) -> c_int = 0;
    fn pcap_open_dead(link_type: c_int, snaplen: c_int) -> Pcap = ptr::null_mut();
    fn pcap_open_dead_with_tstamp_precision(link_type: c_int, snaplen: c_int, precision: c_uint) -> Pcap = ptr::null_mut();
    fn pcap_open_offline(name: *const c_char, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_open_offline_with_tstamp_precision(name: *const c_char, precision: c_uint, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_strerror(number: c_int) -> *const c_char = libc::strerror(number);
    fn pcap_tstamp_type_name_to_val(name: *const c_char) -> c_int = ERROR;
    fn pcap_tstamp_type_val_to_description(kind: c_int) -> *const c_char = ptr::null();
    fn pcap_tstamp_type_val_to_name(kind: c_int) -> *const c_char = ptr::null();
    fn pcap_activate(p: Pcap) -> c_int = ERROR;
    fn pcap_breakloop(p: Pcap) = ();
    fn pcap_bufsize(p: Pcap) -> c_int = ERROR;
    fn pcap_can_set_rfmon(p: Pcap) -> c_int = ERROR;
    fn pcap_close(p: Pcap) = ();
    fn pcap_compile(p: Pcap, program: *mut Program, text: *const c_char, optimize: c_int, netmask: u32) -> c_int = ERROR;
    fn pcap_create(device: *const c_char, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_datalink(p: Pcap) -> c_int = ERROR;
    fn pcap_datalink_ext(p: Pcap) -> c_int = ERROR;
    fn pcap_dispatch(p: Pcap, count: c_int, handler: Handler, user: *mut c_uchar) -> c_int = ERROR;
    fn pcap_dump_fopen(p: Pcap, file: *mut FILE) -> *mut Opaque = ptr::null_mut();
    fn pcap_dump_open(p: Pcap, name: *const c_char) -> *mut Opaque = ptr::null_mut();
    fn pcap_dump_open_append(p: Pcap, name: *const c_char) -> *mut Opaque = ptr::null_mut();
    fn pcap_file(p: Pcap) -> *mut FILE = ptr::null_mut();
    fn pcap_fileno(p: Pcap) -> c_int = ERROR;
    fn pcap_findalldevs(devices: *mut *mut Interface, errbuf: *mut c_char) -> c_int = say_missing(errbuf);
    fn pcap_free_datalinks(list: *mut c_int) = libc::free(list.cast());
    fn pcap_free_tstamp_types(list: *mut c_int) = libc::free(list.cast());
    fn pcap_freealldevs(devices: *mut Interface) = crate::devices::free(devices);
    fn pcap_freecode(program: *mut Program) = crate::filter::free(program);
    fn pcap_get_required_select_timeout(p: Pcap) -> *const libc::timeval = ptr::null();
    fn pcap_get_selectable_fd(p: Pcap) -> c_int = ERROR;
    fn pcap_get_tstamp_precision(p: Pcap) -> c_int = 0;
    fn pcap_geterr(p: Pcap) -> *mut c_char = MISSING.as_ptr().cast_mut();
    fn pcap_getnonblock(p: Pcap, errbuf: *mut c_char) -> c_int = say_missing(errbuf);
    fn pcap_inject(p: Pcap, bytes: *const c_void, len: usize) -> c_int = ERROR;
    fn pcap_is_swapped(p: Pcap) -> c_int = ERROR;
    fn pcap_list_datalinks(p: Pcap, list: *mut *mut c_int) -> c_int = ERROR;
    fn pcap_list_tstamp_types(p: Pcap, list: *mut *mut c_int) -> c_int = ERROR;
    fn pcap_lookupnet(device: *const c_char, net: *mut u32, mask: *mut u32, errbuf: *mut c_char) -> c_int = say_missing(errbuf);
    fn pcap_loop(p: Pcap, count: c_int, handler: Handler, user: *mut c_uchar) -> c_int = ERROR;
    fn pcap_major_version(p: Pcap) -> c_int = ERROR;
    fn pcap_minor_version(p: Pcap) -> c_int = ERROR;
    fn pcap_next(p: Pcap, header: *mut PacketHeader) -> *const c_uchar = ptr::null();
    fn pcap_next_ex(p: Pcap, header: *mut *mut PacketHeader, bytes: *mut *const c_uchar) -> c_int = ERROR;
    fn pcap_open_live(device: *const c_char, snaplen: c_int, promisc: c_int, timeout_ms: c_int, errbuf: *mut c_char) -> Pcap = no_handle(errbuf);
    fn pcap_perror(p: Pcap, prefix: *const c_char) = ();
    fn pcap_sendpacket(p: Pcap, bytes: *const c_uchar, len: c_int) -> c_int = ERROR;
    fn pcap_set_buffer_size(p: Pcap, bytes: c_int) -> c_int = ERROR;
    fn pcap_set_datalink(p: Pcap, link_type: c_int) -> c_int = ERROR;
    fn pcap_set_immediate_mode(p: Pcap, on: c_int) -> c_int = ERROR;
    fn pcap_set_promisc(p: Pcap, on: c_int) -> c_int = ERROR;
    fn pcap_set_protocol_linux(p: Pcap, protocol: c_int) -> c_int = ERROR;
    fn pcap_set_rfmon(p: Pcap, on: c_int) -> c_int = ERROR;
    fn pcap_set_snaplen(p: Pcap, snaplen: c_int) -> c_int = ERROR;
    fn pcap_set_timeout(p: Pcap, timeout_ms: c_int) -> c_int = ERROR;
    fn pcap_set_tstamp_precision(p: Pcap, precision: c_int) -> c_int = ERROR;
    fn pcap_set_tstamp_type(p: Pcap, kind: c_int) -> c_int = ERROR;
    fn pcap_setdirection(p: Pcap, direction: c_int) -> c_int = ERROR;
    fn pcap_setfilter(p: Pcap, program: *mut Program) -> c_int = ERROR;
    fn pcap_setnonblock(p: Pcap, on: c_int, errbuf: *mut c_char) -> c_int = say_missing(errbuf);
    fn pcap_snapshot(p: Pcap) -> c_int = ERROR;
    fn pcap_stats(p: Pcap, stats: *mut PcapStat) -> c_int = ERROR;
    fn pcap_statustostr(status: c_int) -> *const c_char = c"libpcap status".as_ptr();
}

/// # Safety
/// As [`say_missing`].
unsafe fn no_handle(errbuf: *mut c_char) -> Pcap {
    // SAFETY: the caller's promise.
    unsafe { say_missing(errbuf) };
    ptr::null_mut()
}
