//! Goes through a segment once and counts its packets.

use std::fs::File;
use std::path::Path;

use datafusion::arrow::array::RecordBatch;
use vnplug_store::extract::{Extract, Query};
use vnplug_store::filter::Filter;
use vnplug_store::read::Reader;

use crate::failure::Failure;
use crate::frame::Frame;
use crate::rows::{Rows, Seen};

/// What is known of a segment as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) packets: u64,
    /// On the wire.
    pub(crate) bytes: u64,
    /// Of the first packet; higher than `last_ns` if there are none.
    pub(crate) first_ns: u64,
    pub(crate) last_ns: u64,
    /// What is wrong with it.
    pub(crate) damage: Option<String>,
}

/// Where rows go.
pub(crate) trait Sink {
    /// Takes some.
    fn take(&mut self, rows: RecordBatch) -> Result<(), Failure>;
    /// Forgets all that it took: the segment is read again in another way.
    fn restart(&mut self) -> Result<(), Failure>;
}

/// Counts the packets of a segment. `file` is it, open and leased; at most this many rows are held at once.
///
/// A damaged segment is read a second time by way of its index, which knows where to go on.
///
/// # Errors
/// [`Failure`] if it cannot be read, or the sink fails.
pub(crate) fn scan(
    path: &Path,
    file: File,
    most_rows: usize,
    sink: &mut dyn Sink,
) -> Result<Facts, Failure> {
    let mut count = Count::new(path, most_rows, sink);
    let mut reader = Reader::of(file, path.to_owned());
    let damage = loop {
        let (packet, interface) = match reader.read() {
            Ok(Some(packet)) => {
                let seen = Seen {
                    ts_ns: packet.ts_ns,
                    bytes: u64::from(packet.wire_len),
                    captured: packet.bytes.len() as u64,
                    flags: packet.flags,
                    link_type: packet.link_type,
                    frame: Frame::of(packet.link_type, packet.bytes),
                };
                (seen, packet.interface)
            }
            Ok(None) => return count.finish(),
            Err(error) if error.is_damage() => break error.to_string(),
            Err(error) => return Err(error.into()),
        };
        count.add(packet, &reader.interfaces()[interface].name)?;
    };
    drop(reader);
    count.sink.restart()?;
    let sink = count.sink;
    salvage(path, damage, Count::new(path, most_rows, sink))
}

/// Counts what is whole in a damaged segment.
fn salvage(path: &Path, damage: String, mut count: Count<'_>) -> Result<Facts, Failure> {
    count.facts.damage = Some(damage);
    let everything = Query {
        from_ns: 0,
        to_ns: u64::MAX,
        filter: Filter::new("")?,
    };
    let mut extract = Extract::open(&[path.to_owned()], everything)?;
    while let Some(packet) = extract.read()? {
        let link_type = packet.interface.link_type;
        let seen = Seen {
            ts_ns: packet.ts_ns,
            bytes: u64::from(packet.wire_len),
            captured: packet.bytes.len() as u64,
            flags: packet.flags,
            link_type,
            frame: Frame::of(link_type, packet.bytes),
        };
        count.add(seen, &packet.interface.name)?;
    }
    count.finish()
}

/// What was counted so far.
struct Count<'a> {
    rows: Rows,
    facts: Facts,
    sink: &'a mut dyn Sink,
}

impl<'a> Count<'a> {
    fn new(path: &Path, most_rows: usize, sink: &'a mut dyn Sink) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Self {
            rows: Rows::new(name.into_owned(), most_rows),
            facts: Facts::default(),
            sink,
        }
    }

    fn add(&mut self, packet: Seen, interface: &str) -> Result<(), Failure> {
        let facts = &mut self.facts;
        facts.packets += 1;
        facts.bytes += packet.bytes;
        facts.first_ns = facts.first_ns.min(packet.ts_ns);
        facts.last_ns = facts.last_ns.max(packet.ts_ns);
        self.rows.add(packet, interface);
        match self.rows.is_full() {
            true => self.sink.take(self.rows.make_room()?),
            false => Ok(()),
        }
    }

    fn finish(mut self) -> Result<Facts, Failure> {
        if !self.rows.is_empty() {
            self.sink.take(self.rows.take()?)?;
        }
        Ok(self.facts)
    }
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            packets: 0,
            bytes: 0,
            first_ns: u64::MAX,
            last_ns: 0,
            damage: None,
        }
    }
}
