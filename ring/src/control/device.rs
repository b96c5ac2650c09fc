//! What there is: sources, and the counters of everything.

use super::wire::{Malformed, Reader, Writer};

/// One source, as a client may see it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Device {
    /// Name to open it by, with `host:`.
    pub name: String,
    /// `af_packet`, `pcap`, `gen`.
    pub kind: String,
    /// `up`, `down`, `gone`, `ended`, `waiting`.
    pub state: String,
    /// For people: interface, file, rate.
    pub description: String,
    /// Receive queues.
    pub queues: u32,
    /// Attached ports (0 for guests, whom the number does not concern).
    pub ports: u32,
    /// DLT of its frames.
    pub link_type: u32,
    /// Bytes after the Ethernet header that a frame of the interface may have; 0 = unknown.
    pub mtu: u32,
    /// Megabits per second; 0 = unknown.
    pub speed_mbps: u32,
    /// The interface's address; zeros = none.
    pub mac: [u8; 6],
    /// The interface's network addresses with their prefix lengths, as `192.0.2.1/24` and
    /// `fe80::1/64`; told on the host alone.
    pub addresses: Vec<String>,
}

/// The counters of one thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted {
    /// `source`, `port`, `cluster`, `vm`, `daemon`.
    pub kind: String,
    /// Its name or number.
    pub name: String,
    /// Words about it: (key, value), for example `device`, `label`, `filter`, `state`.
    pub labels: Vec<(String, String)>,
    /// (counter, value).
    pub values: Vec<(String, u64)>,
}

impl Device {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.name);
        w.text(&self.kind);
        w.text(&self.state);
        w.text(&self.description);
        w.u32(self.queues);
        w.u32(self.ports);
        w.u32(self.link_type);
        w.u32(self.mtu);
        w.u32(self.speed_mbps);
        w.array(&self.mac);
        w.list(&self.addresses, |w, address| w.text(address));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("name")?,
            kind: r.text("kind")?,
            state: r.text("state")?,
            description: r.text("description")?,
            queues: r.u32("queues")?,
            ports: r.u32("ports")?,
            link_type: r.u32("link_type")?,
            mtu: r.u32("mtu")?,
            speed_mbps: r.u32("speed_mbps")?,
            mac: r.array("mac")?,
            addresses: r.list("addresses", |r| r.text("address"))?,
        })
    }
}

impl Counted {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.kind);
        w.text(&self.name);
        w.list(&self.labels, |w, (key, value)| {
            w.text(key);
            w.text(value);
        });
        w.list(&self.values, |w, (key, value)| {
            w.text(key);
            w.u64(*value);
        });
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            kind: r.text("kind")?,
            name: r.text("name")?,
            labels: r.list("labels", |r| Ok((r.text("key")?, r.text("value")?)))?,
            values: r.list("values", |r| Ok((r.text("key")?, r.u64("value")?)))?,
        })
    }
}
