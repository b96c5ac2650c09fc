//! libpcap as an oracle: its reader of files, its rules for programs and its interpreter.
#![expect(unsafe_code, reason = "calls into libpcap")]

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::ptr::null_mut;

use vnplug_filter::Instruction;

/// `struct pcap_pkthdr`.
#[repr(C)]
struct Header {
    seconds: c_long,
    /// Nanoseconds, as asked for.
    fraction: c_long,
    cap_len: c_uint,
    wire_len: c_uint,
}

#[link(name = "pcap")]
unsafe extern "C" {
    fn pcap_fopen_offline_with_tstamp_precision(
        file: *mut libc::FILE,
        precision: c_uint,
        error: *mut c_char,
    ) -> *mut c_void;
    fn pcap_next_ex(pcap: *mut c_void, header: *mut *mut Header, data: *mut *const u8) -> c_int;
    fn pcap_datalink(pcap: *mut c_void) -> c_int;
    fn pcap_close(pcap: *mut c_void);
    fn bpf_filter(
        program: *const Instruction,
        bytes: *const u8,
        wire: c_uint,
        len: c_uint,
    ) -> c_uint;
    fn bpf_validate(program: *const Instruction, len: c_int) -> c_int;
}

/// A packet as libpcap reads it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) seconds: i64,
    pub(crate) ns: i64,
    pub(crate) wire_len: u32,
    pub(crate) bytes: Vec<u8>,
}

/// What libpcap makes of a file.
#[derive(Debug)]
pub(crate) struct File {
    /// Frames are Ethernet's. libpcap turns words around in some others.
    pub(crate) ethernet: bool,
    pub(crate) packets: Vec<Packet>,
    /// It came to the end without an error.
    pub(crate) whole: bool,
}

/// Reads a file; `None` if libpcap does not open it.
pub(crate) fn read(bytes: &[u8]) -> Option<File> {
    if bytes.is_empty() {
        return None;
    }
    // SAFETY: with mode "r" nothing is written, and `bytes` outlives the stream.
    let stream =
        unsafe { libc::fmemopen(bytes.as_ptr().cast_mut().cast(), bytes.len(), c"r".as_ptr()) };
    if stream.is_null() {
        return None;
    }
    let mut error: [c_char; 256] = [0; 256];
    const NANO: c_uint = 1;
    // SAFETY: an open stream, and a buffer of PCAP_ERRBUF_SIZE.
    let pcap =
        unsafe { pcap_fopen_offline_with_tstamp_precision(stream, NANO, error.as_mut_ptr()) };
    if pcap.is_null() {
        // SAFETY: libpcap leaves the stream open when it refuses the file.
        unsafe { libc::fclose(stream) };
        return None;
    }
    const DLT_EN10MB: c_int = 1;
    // SAFETY: `pcap` is open.
    let ethernet = unsafe { pcap_datalink(pcap) } == DLT_EN10MB;
    let mut packets = Vec::new();
    let (mut header, mut data) = (null_mut(), std::ptr::null());
    let last = loop {
        // SAFETY: `pcap` is open; both places are for libpcap to fill in.
        let result = unsafe { pcap_next_ex(pcap, &raw mut header, &raw mut data) };
        if result != 1 {
            break result;
        }
        // SAFETY: the result says that both are valid until the next call.
        let (header, bytes) = unsafe {
            let header = &*header;
            (
                header,
                std::slice::from_raw_parts(data, header.cap_len as usize),
            )
        };
        packets.push(Packet {
            seconds: header.seconds,
            ns: header.fraction,
            wire_len: header.wire_len,
            bytes: bytes.to_vec(),
        });
    };
    // SAFETY: `pcap` is open and not used again; it closes the stream.
    unsafe { pcap_close(pcap) };
    const EOF: c_int = -2;
    Some(File {
        ethernet,
        packets,
        whole: last == EOF,
    })
}

/// Whether libpcap takes this for a program.
pub(crate) fn accepts(program: &[Instruction]) -> bool {
    let Ok(len) = c_int::try_from(program.len()) else {
        return false;
    };
    // SAFETY: the list has this length and is only read.
    unsafe { bpf_validate(program.as_ptr(), len) != 0 }
}

/// The verdict of a program that [`accepts`] took, and that comes to an end.
pub(crate) fn run(program: &[Instruction], bytes: &[u8], wire_len: u32) -> u32 {
    // SAFETY: the caller's program was accepted; the frame has this length.
    unsafe {
        bpf_filter(
            program.as_ptr(),
            bytes.as_ptr(),
            wire_len,
            bytes.len() as c_uint,
        )
    }
}
