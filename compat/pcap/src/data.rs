//! The two data symbols of libpcap 1.10.3. A program linked without PIC may hold copies of them, so
//! their sizes are part of the ABI.
#![expect(unsafe_code, reason = "exported data symbols")]

use std::ffi::{CStr, c_char, c_ushort};
use std::ptr;

/// `struct eproto`: an Ethernet protocol by its name in filters.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct EtherProtocol {
    name: *const c_char,
    number: c_ushort,
}

// SAFETY: the names are constants, which nobody writes.
unsafe impl Sync for EtherProtocol {}

const fn protocol(name: &'static CStr, number: c_ushort) -> EtherProtocol {
    EtherProtocol {
        name: name.as_ptr(),
        number,
    }
}

/// What `pcap_nametoeproto` knows, in the real library too: it finds this table before its own.
#[unsafe(no_mangle)]
pub(crate) static eproto_db: [EtherProtocol; 13] = [
    protocol(c"aarp", 0x80f3),
    protocol(c"arp", 0x0806),
    protocol(c"atalk", 0x809b),
    protocol(c"decnet", 0x6003),
    protocol(c"ip", 0x0800),
    protocol(c"ip6", 0x86dd),
    protocol(c"lat", 0x6004),
    protocol(c"loopback", 0x9000),
    protocol(c"mopdl", 0x6001),
    protocol(c"moprc", 0x6002),
    protocol(c"rarp", 0x8035),
    protocol(c"sca", 0x6007),
    EtherProtocol {
        name: ptr::null(),
        number: 0,
    },
];

/// The version of the interface this library has.
#[unsafe(no_mangle)]
pub(crate) static pcap_version: [u8; 7] = *b"1.10.3\0";

/// What another copy of this library looks for, so as not to take us for the real one.
#[unsafe(no_mangle)]
pub(crate) static vnplug_libpcap: u8 = 1;
