//! Writes packets as a capture file, to a file or a pipe.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use vnplug_frame::capfile::ng::{EPB_DROPCOUNT, EPB_FLAGS, OPT_COMMENT, OPT_END};
use vnplug_frame::capfile::write::{Head, pcap, pcapng};

use super::{Losses, Packet};
use crate::read::Interface;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// pcapng with nanoseconds; interfaces, flags, and what is said of losses are kept.
    Pcapng,
    /// Classic pcap with nanoseconds; one link type only.
    Pcap,
}

/// A capture file that is being written.
#[derive(Debug)]
pub struct Output<W: Write> {
    to: W,
    format: Format,
    interfaces: Vec<Interface>,
    buffer: Vec<u8>,
    /// Of the packet that is written.
    options: Vec<u8>,
    flushed: Option<Instant>,
}

impl<W: Write> Output<W> {
    /// Writes to `to`; the first byte goes out with the first packet, or with [`finish`](Self::finish).
    pub fn new(to: W, format: Format) -> Self {
        Self {
            to,
            format,
            interfaces: Vec::new(),
            buffer: Vec::with_capacity(BUFFER_BYTES + (64 << 10)),
            options: Vec::new(),
            flushed: None,
        }
    }

    /// Adds a packet. The first one goes out at once, later ones within 100 ms of the next.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::Unsupported`] for a second link type in classic pcap.
    pub fn write(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        let known = |other: &Interface| other.is_same(packet.interface);
        let number = match self.interfaces.iter().position(known) {
            Some(number) => number,
            None => self.add(packet.interface)?,
        };
        match self.format {
            Format::Pcapng => self.enhanced(number as u32, packet),
            Format::Pcap => {
                let at = self.room(pcap::RECORD_BYTES + packet.bytes.len());
                pcap::record(&mut self.buffer, at, &head_of(packet), packet.bytes);
            }
        }
        let due = self
            .flushed
            .is_none_or(|last| last.elapsed() >= FLUSH_AFTER);
        if due || self.buffer.len() >= BUFFER_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Says what the packets that were written do not tell of what is missing: a statistics block for each
    /// loss, with its range of time. Classic pcap has no words for it.
    ///
    /// # Errors
    /// Those of writing.
    pub fn tell(&mut self, losses: &Losses) -> io::Result<()> {
        let untold = losses.untold();
        if self.format == Format::Pcap || untold.is_empty() {
            return Ok(());
        }
        if self.interfaces.is_empty() {
            self.add(&Interface::ethernet())?;
        }
        for ((from_ns, to_ns), dropped, comment) in &untold {
            let statistics = pcapng::Statistics {
                at_ns: *to_ns,
                range_ns: Some((*from_ns, *to_ns)),
                dropped: *dropped,
                comment,
                ..Default::default()
            };
            pcapng::statistics(&mut self.buffer, &statistics);
            if self.buffer.len() >= BUFFER_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Writes what is left. A file without packets is a file all the same.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish(mut self) -> io::Result<W> {
        if self.interfaces.is_empty() {
            // tcpdump refuses a file without an interface.
            self.add(&Interface::ethernet())?;
        }
        self.flush()?;
        Ok(self.to)
    }

    /// Has everything that was written out.
    ///
    /// # Errors
    /// Those of writing.
    pub fn flush(&mut self) -> io::Result<()> {
        self.to.write_all(&self.buffer)?;
        self.buffer.clear();
        self.flushed = Some(Instant::now());
        self.to.flush()
    }

    fn header(&mut self, link_type: u32) {
        match self.format {
            Format::Pcapng => pcapng::section(&mut self.buffer, &[]),
            Format::Pcap => pcap::file(&mut self.buffer, 0, link_type),
        }
    }

    /// Describes an interface that was not seen before.
    fn add(&mut self, interface: &Interface) -> io::Result<usize> {
        if self.interfaces.is_empty() {
            self.header(interface.link_type);
        } else if self.format == Format::Pcap && self.interfaces[0].link_type != interface.link_type
        {
            let what = "packets of several link types do not fit into one pcap file: write pcapng";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.interfaces.push(interface.clone());
        if self.format == Format::Pcapng {
            // NB: no limit, whatever the file said: libpcap (1.10) refuses interfaces that differ in it.
            let (link_type, name) = (interface.link_type, &interface.name);
            pcapng::interface(&mut self.buffer, link_type, 0, name, "");
        }
        Ok(self.interfaces.len() - 1)
    }

    fn enhanced(&mut self, interface: u32, packet: &Packet<'_>) {
        let mut options = std::mem::take(&mut self.options);
        options.clear();
        for line in packet.comment.lines() {
            pcapng::option(&mut options, OPT_COMMENT, line.as_bytes());
        }
        if packet.flags != 0 {
            pcapng::option(&mut options, EPB_FLAGS, &packet.flags.to_le_bytes());
        }
        if packet.lost != 0 {
            pcapng::option(&mut options, EPB_DROPCOUNT, &packet.lost.to_le_bytes());
        }
        if !options.is_empty() {
            pcapng::option(&mut options, OPT_END, &[]);
        }
        let (head, bytes) = (head_of(packet), packet.bytes);
        let at = self.room(pcapng::enhanced_bytes(bytes, &options));
        pcapng::enhanced(&mut self.buffer, at, interface, &head, bytes, &options);
        self.options = options;
    }

    /// Where the next of these many bytes go.
    fn room(&mut self, bytes: usize) -> usize {
        let at = self.buffer.len();
        self.buffer.resize(at + bytes, 0);
        at
    }
}

fn head_of(packet: &Packet<'_>) -> Head {
    Head {
        ts_ns: packet.ts_ns,
        wire_len: packet.wire_len,
    }
}

const BUFFER_BYTES: usize = 256 << 10;
const FLUSH_AFTER: Duration = Duration::from_millis(100);
