//! A frame's way from the wire into the rings of its readers.
//!
//! ```text
//! wire → source → filter → fanout → port → ring
//!        └──────────── engine ───────────┘
//! ```
//!
//! - [`source`]: where frames come from: an interface, a capture file, the generator.
//! - filter: which frames a port wants: crate [`vnplug_filter`].
//! - [`fanout`]: one batch to many ports; clusters; the counters that add up.
//! - [`port`]: one reader as a queue's thread sees it: ring, filters, doorbell, counters.
//! - [`rules`]: many per port, each with an action and counters, run after the filter.
//! - [`commons`]: what the members of a group share: one copy of each frame.
//! - [`bucket`]: how much may go in a second.
//! - [`cuts`]: what super-frames become, made once for all ports.
//! - ring: crate [`vnplug_ring`], shared with the reader.
//! - [`engine`]: the thread that does all this, turn after turn, and sends what ports transmit.

pub mod batch;
pub mod bucket;
pub mod commons;
pub mod cuts;
pub mod engine;
pub mod fanout;
pub mod port;
pub mod rules;
pub mod source;

#[cfg(test)]
#[path = "../../filter/src/packets.rs"]
#[expect(dead_code, reason = "some of it only the tests of filters need")]
mod packets;
