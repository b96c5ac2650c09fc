//! Writes capture files: pcap with nanoseconds, and pcapng.
//!
//! A pcapng file has one section header, one interface description with nanosecond timestamps, an
//! enhanced packet block per packet with its direction and with the packets lost before it, and one
//! interface statistics block at the end.

use std::io::{self, Write};

use vnplug::Packet;
use vnplug_frame::capfile::write::pcapng::{Accepted, Statistics};
use vnplug_frame::capfile::write::{Interface, pcap, pcapng};

/// Which kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Classic, with nanoseconds
    Pcap,
    /// With interface name, direction and drop counts
    Pcapng,
}

/// A capture file in the making; packets are collected and written in large pieces.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    file: W,
    format: Format,
    /// What was collected, up to `at`.
    pending: Vec<u8>,
    at: usize,
    pending_packets: u64,
    written_packets: u64,
}

/// What the statistics at the end say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    /// First and last moment of the capture, nanoseconds since 1970.
    pub(crate) from_ns: u64,
    /// See `from_ns`.
    pub(crate) to_ns: u64,
    /// Packets in the file.
    pub(crate) delivered: u64,
    /// Packets this port lost.
    pub(crate) lost: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file; nothing is written before the first flush.
    pub(crate) fn new(file: W, format: Format, origin: Interface) -> Self {
        let mut pending = match format {
            Format::Pcap => pcap::header(&[origin]),
            Format::Pcapng => pcapng::header(&[origin], ""),
        };
        let at = pending.len();
        pending.resize(PIECE + 4096, 0);
        Self {
            file,
            format,
            pending,
            at,
            pending_packets: 0,
            written_packets: 0,
        }
    }

    /// Adds a packet.
    ///
    /// # Errors
    /// The file cannot be written; [`written`](Self::written) packets are in it.
    #[inline]
    pub(crate) fn packet(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        self.at = loop {
            let (pending, at) = (&mut self.pending[..], self.at);
            let end = match self.format {
                Format::Pcap => pcap::packet(pending, at, packet),
                Format::Pcapng => pcapng::packet_with_direction(pending, at, 0, packet),
            };
            match end {
                Some(end) => break end,
                None => self.pending.resize(self.pending.len() + PIECE, 0),
            }
        };
        self.pending_packets += 1;
        if self.at >= PIECE {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what was collected.
    ///
    /// # Errors
    /// As [`packet`](Self::packet). What was collected is gone: a second try would repeat a part.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.at == 0 {
            return Ok(());
        }
        let at = std::mem::take(&mut self.at);
        self.file.write_all(&self.pending[..at])?;
        self.file.flush()?;
        self.written_packets += std::mem::take(&mut self.pending_packets);
        Ok(())
    }

    /// Packets that were handed to the system whole.
    pub(crate) fn written(&self) -> u64 {
        self.written_packets
    }

    /// Ends the file with its statistics (pcapng) and writes everything.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub(crate) fn finish(&mut self, totals: &Totals) -> io::Result<()> {
        if self.format == Format::Pcapng {
            self.pending.truncate(self.at);
            let statistics = Statistics {
                at_ns: totals.to_ns,
                range_ns: Some((totals.from_ns, totals.to_ns)),
                accepted: Some(Accepted {
                    delivered: totals.delivered,
                    lost: totals.lost,
                }),
                ..Statistics::default()
            };
            pcapng::statistics(&mut self.pending, &statistics);
            self.at = self.pending.len();
        }
        self.flush()
    }
}

const PIECE: usize = 256 << 10;

#[cfg(test)]
mod tests;
