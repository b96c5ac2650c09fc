//! vnplugd: receives every packet of a wire once and hands it to many readers.
//!
//! ```text
//! wire → source → filter → fanout → port → ring → guest
//! ```
//!
//! - [`source`]: where frames come from (an interface, a capture file, the generator), and the
//!   thread of each of its queues.
//! - [`filter`]: which frames a port wants: the pcap-filter language, run here, before the copy.
//! - [`rules`]: many per port, each with an action and counters, run behind the filter.
//! - [`fanout`]: one batch to many ports; clusters; the counters that add up.
//! - [`port`]: one reader as a queue's thread sees it: ring, filters, doorbell, counters.
//! - ring: crate [`vnplug_ring`], shared with the reader.
//!
//! Around that path, in the control thread: [`hub`] (sources, ports, policy), the client protocol
//! in `control`, virtual machines in `vm`, idle CPUs in `awake`. [`config`] and [`daemon`] put it together. Threads: one
//! per queue, the control loop, one that compiles filters and one that makes machine code of them,
//! one per VM with a doorbell device, one that watches the others (`watch`).

mod awake;
mod closer;
pub mod config;
mod control;
pub mod daemon;
pub mod fanout;
pub mod filter;
pub mod hub;
mod noise;
pub mod port;
pub mod rules;
pub mod source;
mod sys;
mod vm;
mod watch;
