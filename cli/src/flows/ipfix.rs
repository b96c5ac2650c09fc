//! Flows as IPFIX (RFC 7011): to a collector by UDP, or into a file (RFC 5655: messages, one after the other).
//!
//! ```text
//!   message   version 10 (2)  length (2)  export time, s (4)  sequence (4)  domain (4)
//!   template set, both templates, in each message: a lost one costs its own records alone
//!   data set  of template 256 (IPv4) or 257 (IPv6)
//! ```
//!
//! All numbers are big-endian; the elements are IANA's. `octetDeltaCount` is bytes of IP packets, by which collectors count;
//! `layer2OctetDeltaCount` is bytes of frames. Of ICMP the destination port is type and code, as in NetFlow. Times are UTC, in milliseconds since 1970. The sequence counts records that were sent before, of the export.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vnplug_store::extract::{Flow, Sum};

use crate::failure::Failure;

/// Where IPFIX goes.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Target {
    /// A collector, as it was written: HOST:PORT.
    Collector(String),
    File(PathBuf),
}

/// Takes flows, and sends what makes a message.
pub(super) struct Exporter {
    outlet: Outlet,
    /// Encoded records of IPv4 and of IPv6.
    waiting: [Vec<u8>; 2],
    sent: u32,
    messages: u64,
}

enum Outlet {
    Collector(UdpSocket),
    File(BufWriter<File>),
}

/// `udp://HOST[:PORT]`, or a file.
pub(super) fn target(text: &str) -> Result<Target, String> {
    match text.strip_prefix("udp://") {
        None if text.contains("://") => {
            Err("write udp://HOST[:PORT], or the name of a file".into())
        }
        None => Ok(Target::File(text.into())),
        Some("") => Err("udp:// wants HOST[:PORT]; the port is 4739 if it is not said".into()),
        Some(host) => {
            let has_port = host.rsplit_once(':').is_some_and(|(front, port)| {
                port.parse::<u16>().is_ok() && (!front.contains(':') || front.ends_with(']'))
            });
            Ok(Target::Collector(match has_port {
                true => host.to_owned(),
                false => format!("{host}:{PORT}"),
            }))
        }
    }
}

impl Exporter {
    pub(super) fn open(target: &Target) -> Result<Self, Failure> {
        let outlet = match target {
            Target::File(path) => {
                let about = |error| Failure::about(path.display(), error);
                Outlet::File(BufWriter::new(File::create_new(path).map_err(about)?))
            }
            Target::Collector(host) => {
                let about = |error| Failure::about(host, error);
                Outlet::Collector(connect(host).map_err(about)?)
            }
        };
        Ok(Self {
            outlet,
            waiting: Default::default(),
            sent: 0,
            messages: 0,
        })
    }

    pub(super) fn add(&mut self, flow: &Flow, sum: Sum) -> Result<(), Failure> {
        let family = match (flow.from, flow.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                put(
                    &mut self.waiting[0],
                    &from.octets(),
                    &to.octets(),
                    flow,
                    sum,
                );
                0
            }
            (from, to) => {
                let [from, to] = [from, to].map(|ip| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                });
                put(
                    &mut self.waiting[1],
                    &from.octets(),
                    &to.octets(),
                    flow,
                    sum,
                );
                1
            }
        };
        match self.waiting[family].len() + ROOM > LONGEST {
            true => self.send(family),
            false => Ok(()),
        }
    }

    /// Sends the rest; how many records and messages there were.
    pub(super) fn finish(mut self) -> Result<(u32, u64), Failure> {
        for family in [0, 1] {
            if !self.waiting[family].is_empty() {
                self.send(family)?;
            }
        }
        if let Outlet::File(file) = &mut self.outlet {
            file.flush()?;
            file.get_ref().sync_all()?;
        }
        Ok((self.sent, self.messages))
    }

    fn send(&mut self, family: usize) -> Result<(), Failure> {
        let records = std::mem::take(&mut self.waiting[family]);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = now.unwrap_or_default().as_secs() as u32;
        let message = message(time, self.sent, family, &records);
        match &mut self.outlet {
            Outlet::File(file) => file.write_all(&message)?,
            Outlet::Collector(socket) => {
                // Nobody answers at a port that is not open, which is told at the next one.
                socket.send(&message)?;
                if self.messages % BURST == BURST - 1 {
                    std::thread::sleep(PAUSE);
                }
            }
        }
        let count = records.len() / RECORD[family];
        self.sent = self.sent.wrapping_add(count as u32);
        self.messages += 1;
        Ok(())
    }
}

fn connect(host: &str) -> std::io::Result<UdpSocket> {
    let address = host.to_socket_addrs()?.next();
    let address = address.ok_or_else(|| std::io::Error::other("it has no address"))?;
    let own: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(own)?;
    socket.connect(address)?;
    Ok(socket)
}

/// A record, in the order of [`FIELDS`].
fn put(into: &mut Vec<u8>, from: &[u8], to: &[u8], flow: &Flow, sum: Sum) {
    into.extend(from);
    into.extend(to);
    let (source, destination) = match (flow.protocol, flow.ports) {
        (1 | 58, (kind, code)) => (0, kind << 8 | code),
        (_, ports) => ports,
    };
    into.extend(source.to_be_bytes());
    into.extend(destination.to_be_bytes());
    into.push(flow.protocol);
    into.extend(sum.packets.to_be_bytes());
    into.extend(sum.ip_bytes.to_be_bytes());
    into.extend(sum.bytes.to_be_bytes());
    for ns in [sum.first_ns, sum.last_ns] {
        into.extend((ns / 1_000_000).to_be_bytes());
    }
}

/// A message with records of one template.
fn message(time: u32, sent: u32, family: usize, records: &[u8]) -> Vec<u8> {
    let mut templates = Vec::new();
    for (number, (from, to, len)) in (TEMPLATE..).zip(ADDRESSES) {
        templates.extend(number.to_be_bytes());
        templates.extend((FIELDS.len() as u16 + 2).to_be_bytes());
        for (element, len) in [(from, len), (to, len)].into_iter().chain(FIELDS) {
            templates.extend(element.to_be_bytes());
            templates.extend(len.to_be_bytes());
        }
    }
    let set = |number: u16, body: &[u8]| {
        let head = [number.to_be_bytes(), (body.len() as u16 + 4).to_be_bytes()];
        [&head.concat(), body].concat()
    };
    let sets = [set(2, &templates), set(TEMPLATE + family as u16, records)].concat();
    let mut message = 10_u16.to_be_bytes().to_vec();
    message.extend((sets.len() as u16 + HEADER as u16).to_be_bytes());
    for word in [time, sent, DOMAIN] {
        message.extend(word.to_be_bytes());
    }
    message.extend(sets);
    message
}

/// Where collectors listen (RFC 7011, 10.3.4).
const PORT: u16 = 4739;
/// Of IPv4; that of IPv6 is the next.
const TEMPLATE: u16 = 256;
/// The observation domain: there is one.
const DOMAIN: u32 = 1;
/// sourceIPv4Address and destinationIPv4Address, and those of IPv6, with their length.
const ADDRESSES: [(u16, u16, u16); 2] = [(8, 12, 4), (27, 28, 16)];
/// sourceTransportPort, destinationTransportPort, protocolIdentifier, packetDeltaCount, octetDeltaCount,
/// layer2OctetDeltaCount, flowStartMilliseconds, flowEndMilliseconds, with their length.
const FIELDS: [(u16, u16); 8] = [
    (7, 2),
    (11, 2),
    (4, 1),
    (2, 8),
    (1, 8),
    (352, 8),
    (152, 8),
    (153, 8),
];
/// Bytes of a record, of IPv4 and of IPv6.
const RECORD: [usize; 2] = [2 * 4 + 45, 2 * 16 + 45];
const HEADER: usize = 16;
/// Bytes of records in a message, with which it fits a frame of Ethernet.
const LONGEST: usize = 1200;
const ROOM: usize = RECORD[1];
/// The most messages that go at once to a collector.
const BURST: u64 = 32;
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_it_goes_is_read() {
        let collector = |text: &str| Ok(Target::Collector(text.into()));
        assert_eq!(target("udp://c"), collector("c:4739"));
        assert_eq!(target("udp://c:9"), collector("c:9"));
        assert_eq!(target("udp://[::1]"), collector("[::1]:4739"));
        assert_eq!(target("udp://[::1]:9"), collector("[::1]:9"));
        assert_eq!(
            target("flows.ipfix"),
            Ok(Target::File("flows.ipfix".into()))
        );
        for wrong in ["udp://", "tcp://c", "sctp://c:1"] {
            target(wrong).unwrap_err();
        }
    }

    #[test]
    fn a_message_says_how_long_it_is_and_how_its_records_are_made() {
        let flow = Flow {
            protocol: 17,
            from: "192.0.2.1".parse().unwrap(),
            to: "192.0.2.2".parse().unwrap(),
            ports: (1024, 53),
            has_ports: true,
        };
        let sum = Sum {
            packets: 3,
            bytes: 300,
            ip_bytes: 258,
            first_ns: 1_000_999_999,
            last_ns: 2_000_000_000,
        };
        let mut record = Vec::new();
        put(&mut record, &[192, 0, 2, 1], &[192, 0, 2, 2], &flow, sum);
        assert_eq!(record.len(), RECORD[0]);
        let fields = FIELDS
            .iter()
            .map(|(_, len)| usize::from(*len))
            .sum::<usize>();
        for (record, (_, _, len)) in RECORD.iter().zip(ADDRESSES) {
            assert_eq!(*record, fields + 2 * usize::from(len));
        }
        let message = message(7, 9, 0, &record);
        assert_eq!(message[..4], [0, 10, 0, message.len() as u8]);
        assert!(message.ends_with(&record));
        assert_eq!(record[21..29], 258_u64.to_be_bytes());
        assert_eq!(record[29..37], 300_u64.to_be_bytes());
    }
}
