//! A drop-in for libpcap: programs that capture with it read vNPlug's rings, unchanged.
//!
//! ```text
//!   program ── pcap_*() ──┬── a handle of ours ── libvnplug's Port ── ring
//!                         └── any other ────────── the real libpcap, untouched
//! ```
//!
//! Installed as `libpcap.so.0.8`, it exports every symbol of Debian 12's libpcap 1.10.3. Devices
//! named `host:NAME` and `vnplug:NAME` are ours; whatever concerns another device, a file, or no
//! device at all goes to the real library, which is loaded by its path (see `real`). The two kinds
//! of handle are told apart by their first word.
//!
//! Packets are handed to the program where they lie in the ring (in a group: as a copy of it). Filters are compiled by the real
//! library and executed by the daemon. `docs/libpcap.md` is the manual.
//!
//! Not here: monitor mode, and anything that only other systems' libpcap has.

mod abi;
mod real;

mod data;
mod forward;

mod handle;
mod inject;
mod turns;

mod activate;
mod addresses;
mod devices;
mod filter;
mod notes;
mod read;
mod stats;

mod ffi;
