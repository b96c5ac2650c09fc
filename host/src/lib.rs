//! vnplugd: receives every packet of a wire once and hands it to many readers.
//!
//! ```text
//! wire -> source -> filter -> fanout -> port -> ring -> guest
//! ```
//!
//! - [`source`]: where frames come from: an interface, a capture file, the generator.
//! - [`filter`]: which frames a port wants: the pcap-filter language, run here, before the copy.

pub mod filter;
pub mod source;
mod sys;
