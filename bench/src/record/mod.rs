//! The recorder, its replay and its queries, beside what others use for them.
//!
//! ```text
//!   record-SIZE   sender ── veth ── vnplugd, vnplug record │ tcpdump │ dumpcap │ netsniff-ng ── disk
//!   record-disk   generator in memory ── vnplug record ── disk          fio ── the same disk
//!   record-index  the same, with its index and without
//!   replay        file ── vnplug replay │ tcpreplay ── veth ── tcpdump
//!   query-20g     vnplug extract │ tcpdump -r ── a recording of 20 GB
//! ```
//!
//! What is lost is counted in the files, against what was sent; nobody's own word is taken for it. Every
//! measurement writes to a directory of its own, below [`Plan::disk`](crate::row::Plan), which is empty
//! again when the row ends, however it ends.
//!
//! Rows that write to the disk run in the ordinary scheduling class: what a program leaves in the page
//! cache is written by the kernel's threads, which have that class, and a program in a real-time class
//! would keep them from it.

mod disk;
mod files;
mod fio;
mod place;
mod query;
mod replay;
mod tool;
mod wire;

pub(crate) use disk::{against_fio, with_and_without_index};
pub(crate) use query::in_20g;
pub(crate) use replay::{accuracy, top_speed};
pub(crate) use wire::on_a_wire;

/// A gigabyte, as disks and networks count.
const GB: f64 = 1e9;
