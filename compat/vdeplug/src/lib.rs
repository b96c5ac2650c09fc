//! A module of libvdeplug 4: its programs, unchanged, are ports of a switch by `vnplug://lan0`.
//!
//! ```text
//!   program ── vde_recv(), vde_send() ── libvdeplug ── vdeplug_ops ── libvnplug's Port ── rings ── switch
//! ```
//!
//! libvdeplug loads `libvdeplug_vnplug.so` for a `vnplug://` address and calls the six functions of
//! its symbol `vdeplug_ops` (`ffi`). A frame is copied from the ring into the program's buffer, or
//! from there into the ring, in the program's own thread: the module has no thread, for programs
//! fork, and `vdens` enters a user namespace, after they opened their connection.
//!
//! `docs/switch.md` is the manual. Not here: super-frames, for libvdeplug has no place to describe
//! them; the switch cuts them before.

mod abi;
mod address;
mod plug;

mod ffi;
