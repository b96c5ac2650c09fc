//! vnplugd: receives every packet of a wire once and hands it to many readers.
//!
//! The way of the packets is crate [`vnplug_path`], and what it asks of Linux is crate
//! [`vnplug_os`]. Here is what decides who gets which of them, in the control thread:
//!
//! - [`spec`]: a source as the operator writes it.
//! - [`hub`]: sources, ports, groups, policy.
//! - `control`: the client protocol. `vm`: virtual machines.
//! - [`config`] and [`daemon`] put it together.
//!
//! Threads: one per queue, the control loop, one that compiles filters and one that makes machine
//! code of them, one that makes filters for the kernel, one per VM with a doorbell device, one that
//! watches the others (`watch`), one that hears SIGHUP (`hangup`).

mod at_once;
mod awake;
pub mod config;
mod control;
pub mod daemon;
mod hangup;
pub mod hub;
mod pattern;
mod reload;
pub mod spec;
mod vm;
mod watch;
