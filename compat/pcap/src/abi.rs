//! The types and numbers of `<pcap/pcap.h>`, as far as they are needed here.

use std::ffi::{c_char, c_int, c_uchar, c_uint};

/// `pcap_t`: only its first word is looked at; see [`handle`](crate::handle).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PcapT {
    /// A function of the real library, or the tag of a handle of ours.
    pub(crate) first: *const u8,
}

/// `pcap_t *`.
pub(crate) type Pcap = *mut PcapT;

/// What this library only passes on.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Opaque {
    nothing: [u8; 0],
}

/// `struct pcap_pkthdr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacketHeader {
    pub(crate) ts: libc::timeval,
    pub(crate) caplen: u32,
    pub(crate) len: u32,
}

/// `struct pcap_stat`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PcapStat {
    pub(crate) recv: c_uint,
    pub(crate) drop: c_uint,
    pub(crate) ifdrop: c_uint,
}

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Insn {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

/// `struct bpf_program`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) len: c_uint,
    pub(crate) insns: *mut Insn,
}

/// `struct pcap_if`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Interface {
    pub(crate) next: *mut Interface,
    pub(crate) name: *mut c_char,
    pub(crate) description: *mut c_char,
    pub(crate) addresses: *mut Address,
    pub(crate) flags: u32,
}

/// `struct pcap_addr`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) next: *mut Address,
    pub(crate) addr: *mut libc::sockaddr,
    pub(crate) netmask: *mut libc::sockaddr,
    pub(crate) broadaddr: *mut libc::sockaddr,
    pub(crate) dstaddr: *mut libc::sockaddr,
}

/// `pcap_handler`.
pub(crate) type Handler =
    Option<unsafe extern "C" fn(*mut c_uchar, *const PacketHeader, *const c_uchar)>;

/// Bytes of the buffers that programs pass for error texts.
pub(crate) const ERRBUF_SIZE: usize = 256;

pub(crate) const ERROR: c_int = -1;
pub(crate) const ERROR_BREAK: c_int = -2;
pub(crate) const ERROR_NOT_ACTIVATED: c_int = -3;
pub(crate) const ERROR_ACTIVATED: c_int = -4;
pub(crate) const ERROR_NO_SUCH_DEVICE: c_int = -5;
pub(crate) const ERROR_RFMON_NOTSUP: c_int = -6;
pub(crate) const ERROR_PERM_DENIED: c_int = -8;
pub(crate) const ERROR_TSTAMP_PRECISION_NOTSUP: c_int = -12;
pub(crate) const WARNING_TSTAMP_TYPE_NOTSUP: c_int = 3;

/// Time stamps are the host's.
pub(crate) const TSTAMP_HOST: c_int = 0;
pub(crate) const PRECISION_MICRO: c_int = 0;
pub(crate) const PRECISION_NANO: c_int = 1;

pub(crate) const IF_UP: u32 = 2;
pub(crate) const IF_RUNNING: u32 = 4;
pub(crate) const IF_CONNECTED: u32 = 0x10;
pub(crate) const IF_DISCONNECTED: u32 = 0x20;
pub(crate) const IF_NOT_APPLICABLE: u32 = 0x30;
