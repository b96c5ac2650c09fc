//! Counts frames and bytes by what they carry, and lets all of them pass: `count.c` in Rust.
//!
//!     rustup toolchain install nightly --component rust-src
//!     cargo +nightly rustc --release -- --emit=asm=count.s
//!     clang -target bpf -c count.s -o count.o
//!     vnplugd --source eth1 --program count=$PWD/count.o,attach=xdp:eth1
#![no_std]
#![feature(core_intrinsics)]
#![expect(
    internal_features,
    reason = "`AtomicU64` has no `fetch_add` for this target, which has the instruction"
)]

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::xdp_action::XDP_PASS;
use aya_ebpf::macros::{map, xdp};
use aya_ebpf::maps::Array;
use aya_ebpf::programs::XdpContext;

/// By the protocol of IPv4 (RFC 791); 255: what is no IPv4.
#[map(name = "packets")]
static PACKETS: Array<u64> = Array::with_max_entries(256, 0);

#[map(name = "bytes")]
static BYTES: Array<u64> = Array::with_max_entries(256, 0);

#[xdp]
pub fn count(frame: XdpContext) -> u32 {
    let (data, end) = (frame.data(), frame.data_end());
    let mut kind = 255;
    if data + ETHERNET + IPV4 <= end && load::<[u8; 2]>(data + 12) == [0x08, 0x00] {
        kind = load::<u8>(data + ETHERNET + 9).into();
    }
    add(&PACKETS, kind, 1);
    add(&BYTES, kind, (end - data) as u64);
    XDP_PASS
}

#[inline(always)]
fn load<T: Copy>(at: usize) -> T {
    // SAFETY: the kernel's verifier proves that each place that is loaded from lies in the frame, or refuses the program.
    unsafe { (at as *const T).read_unaligned() }
}

#[inline(always)]
fn add(map: &Array<u64>, kind: u32, what: u64) {
    if let Some(value) = map.get_ptr_mut(kind) {
        // SAFETY: it is eight bytes of the map, which live as long as that; others only add to them and load them.
        unsafe { atomic_xadd::<_, _, { AtomicOrdering::Relaxed }>(value, what) };
    }
}

#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
pub static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// Bytes of the headers.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
