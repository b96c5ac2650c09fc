//! Functions that have nothing to do with our devices: the real library's, untouched.
#![expect(
    unsafe_code,
    reason = "exported functions that call the real library's"
)]

use std::ffi::{c_char, c_int, c_long, c_uchar, c_uint};

use libc::FILE;

use crate::abi::{Insn, Opaque, PacketHeader, Pcap, Program};
use crate::real::real;

macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        /// See its manual page.
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) $(-> $result)? {
            // SAFETY: the caller's promise is passed on.
            unsafe { (real().$name)($($arg),*) }
        }
    )*};
}

forward! {
    fn bpf_dump(program: *const Program, option: c_int);
    fn bpf_filter(insns: *const Insn, packet: *const c_uchar, wire_len: c_uint, len: c_uint) -> c_uint;
    fn bpf_image(insn: *const Insn, number: c_int) -> *mut c_char;
    fn bpf_validate(insns: *const Insn, len: c_int) -> c_int;
    fn pcap_compile_nopcap(snaplen: c_int, link_type: c_int, program: *mut Program, text: *const c_char, optimize: c_int, netmask: u32) -> c_int;
    fn pcap_datalink_name_to_val(name: *const c_char) -> c_int;
    fn pcap_datalink_val_to_description(link_type: c_int) -> *const c_char;
    fn pcap_datalink_val_to_description_or_dlt(link_type: c_int) -> *const c_char;
    fn pcap_datalink_val_to_name(link_type: c_int) -> *const c_char;
    fn pcap_dump(dumper: *mut c_uchar, header: *const PacketHeader, bytes: *const c_uchar);
    fn pcap_dump_close(dumper: *mut Opaque);
    fn pcap_dump_file(dumper: *mut Opaque) -> *mut FILE;
    fn pcap_dump_flush(dumper: *mut Opaque) -> c_int;
    fn pcap_dump_ftell(dumper: *mut Opaque) -> c_long;
    fn pcap_dump_ftell64(dumper: *mut Opaque) -> i64;
    fn pcap_ether_aton(text: *const c_char) -> *mut c_uchar;
    fn pcap_ether_hostton(name: *const c_char) -> *mut c_uchar;
    fn pcap_fopen_offline(file: *mut FILE, errbuf: *mut c_char) -> Pcap;
    fn pcap_fopen_offline_with_tstamp_precision(file: *mut FILE, precision: c_uint, errbuf: *mut c_char) -> Pcap;
    fn pcap_init(options: c_uint, errbuf: *mut c_char) -> c_int;
    fn pcap_lib_version() -> *const c_char;
    fn pcap_lookupdev(errbuf: *mut c_char) -> *mut c_char;
    fn pcap_nametoaddr(name: *const c_char) -> *mut *mut u32;
    fn pcap_nametoaddrinfo(name: *const c_char) -> *mut libc::addrinfo;
    fn pcap_nametoeproto(name: *const c_char) -> c_int;
    fn pcap_nametollc(name: *const c_char) -> c_int;
    fn pcap_nametonetaddr(name: *const c_char) -> u32;
    fn pcap_nametoport(name: *const c_char, port: *mut c_int, protocol: *mut c_int) -> c_int;
    fn pcap_nametoportrange(name: *const c_char, first: *mut c_int, last: *mut c_int, protocol: *mut c_int) -> c_int;
    fn pcap_nametoproto(name: *const c_char) -> c_int;
    fn pcap_next_etherent(file: *mut FILE) -> *mut Opaque;
    fn pcap_offline_filter(program: *const Program, header: *const PacketHeader, bytes: *const c_uchar) -> c_int;
    fn pcap_open_dead(link_type: c_int, snaplen: c_int) -> Pcap;
    fn pcap_open_dead_with_tstamp_precision(link_type: c_int, snaplen: c_int, precision: c_uint) -> Pcap;
    fn pcap_open_offline(name: *const c_char, errbuf: *mut c_char) -> Pcap;
    fn pcap_open_offline_with_tstamp_precision(name: *const c_char, precision: c_uint, errbuf: *mut c_char) -> Pcap;
    fn pcap_strerror(number: c_int) -> *const c_char;
    fn pcap_tstamp_type_name_to_val(name: *const c_char) -> c_int;
    fn pcap_tstamp_type_val_to_description(kind: c_int) -> *const c_char;
    fn pcap_tstamp_type_val_to_name(kind: c_int) -> *const c_char;
    fn pcap_free_datalinks(list: *mut c_int);
    fn pcap_free_tstamp_types(list: *mut c_int);
    fn pcap_freecode(program: *mut Program);
    fn pcap_statustostr(status: c_int) -> *const c_char;
}
