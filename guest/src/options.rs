//! What to ask for when opening a port.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::time::Duration;

use vnplug_ring::control::{Balance, Direction, FilterSpec, Open, Segments};

use crate::connection::socket_path;
use crate::error::Error;
use crate::port::{Port, Waiting};

/// A port to be: which device, which packets, how to be woken.
///
/// ```no_run
/// # fn main() -> Result<(), vnplug::Error> {
/// let mut port = vnplug::PortOptions::new("host:eth1")
///     .filter("tcp port 443")
///     .snaplen(128)
///     .open()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is opened before `open`"]
pub struct PortOptions {
    pub(crate) request: Open,
    pub(crate) watermark: u32,
    pub(crate) max_delay: Duration,
    pub(crate) waiting: Waiting,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) reconnect: bool,
    pub(crate) direct: bool,
}

impl PortOptions {
    /// A port on `device`, as [`Client::devices`](crate::Client::devices) names it; `NAME@Q` is
    /// receive queue Q alone. Everything else has a default: every packet, whole, both directions,
    /// the daemon's ring size, woken at the first packet, reconnecting.
    pub fn new(device: impl Into<String>) -> Self {
        let request = Open {
            label: default_label(),
            ..Open::new(device)
        };
        Self {
            request,
            watermark: 1,
            max_delay: DEFAULT_MAX_DELAY,
            waiting: Waiting::Sleep,
            socket: None,
            reconnect: true,
            direct: false,
        }
    }

    /// Only packets that match this pcap-filter(7) expression; empty = all.
    pub fn filter(self, expression: &str) -> Self {
        let spec = match expression.trim() {
            "" => FilterSpec::All,
            text => FilterSpec::Expression(text.into()),
        };
        self.filter_spec(spec)
    }

    /// Only packets that this filter passes.
    pub fn filter_spec(mut self, spec: FilterSpec) -> Self {
        self.request.filter = spec;
        self
    }

    /// Captured bytes per packet; 0 = whole packets.
    pub fn snaplen(mut self, bytes: u32) -> Self {
        self.request.snaplen = bytes;
        self
    }

    /// How super-frames come, and frames whose checksum was left to a NIC: as the wire would have carried
    /// them (default), or as they are, with [`flags::OFFLOAD`](crate::flags::OFFLOAD) and
    /// `meta.offload`. A daemon that does not know the question gives them as they are, without it.
    pub fn segments(mut self, segments: Segments) -> Self {
        self.request.segments = segments;
        self
    }

    /// Takes part in a switch: the port is given the frames that are due to it there, and what it sends
    /// comes from a port of the switch; its ring has 1 MiB, if [`transmit`](Self::transmit) says nothing
    /// else. Any other port on a switch sees all frames that enter it.
    pub fn join(mut self) -> Self {
        self.request.joins = true;
        if self.request.transmit_bytes == 0 {
            self.request.transmit_bytes = 1 << 20;
        }
        self
    }

    /// As [`join`](Self::join), and in direct mode: ports of one user that all say so hand frames to each
    /// other, and the switch has no work with them; it carries what is for many, for others, or tagged, and
    /// everything while somebody captures on it. They trust each other as programs of one user do: one can
    /// change a frame while its receiver reads it. Such frames have no time ([`Meta`](crate::Meta)), and
    /// are not in the switch's counters. Not in guests, and not in a [`Bundle`](crate::Bundle).
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self.join()
    }

    /// Each packet goes through the operator's program of this name ([`Client::programs`](crate::Client::programs)),
    /// after the filter: it may drop it, or change it. Empty = none. A daemon that does not know the question
    /// gives the packets as they are.
    pub fn program(mut self, name: &str) -> Self {
        self.request.program = name.to_owned();
        self
    }

    /// What the port receives may be sent on from where it lies: by itself, if it has a ring to [`transmit`](Self::transmit),
    /// for [`Outbox::forward`](crate::Outbox::forward) writes where a packet lies in place of copying it; and by other ports
    /// to which it is [lent](Port::lend_to). Not in a group, and not in direct mode. A daemon or agent that does not know
    /// it is refused, if the port has such a ring.
    pub fn posts(mut self) -> Self {
        self.request.posts = true;
        self
    }

    /// Received packets, sent packets, or both.
    pub fn direction(mut self, direction: Direction) -> Self {
        self.request.tuning.direction = direction;
        self
    }

    /// One in `one_in` of the packets that pass the filter; 0 and 1 = all.
    pub fn sample(mut self, one_in: u32) -> Self {
        self.request.tuning.sample = one_in;
        self
    }

    /// Whether the port gets anything from the start; [`Port::tune`] starts one that does not.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.request.tuning.enabled = enabled;
        self
    }

    /// Bytes of each ring, rounded up to a power of two; 0 = the daemon's default.
    pub fn ring_bytes(mut self, bytes: u64) -> Self {
        self.request.ring_bytes = bytes;
        self
    }

    /// A ring of this many bytes for sending, rounded up to a power of two; 0 = the port does not
    /// send. Needs a grant of its own: who sends puts any frame onto the wire.
    pub fn transmit(mut self, bytes: u64) -> Self {
        self.request.transmit_bytes = bytes;
        self
    }

    /// One of several ports that the program holds as one, as one that receives and one that sends:
    /// what one of them sends, none of the others is shown. All say the same number, of
    /// [`fresh_handle`](Self::fresh_handle); 0 = there is no other. A port is never shown what it sends
    /// itself.
    pub fn handle(mut self, number: u64) -> Self {
        self.request.handle = number;
        self
    }

    /// A random number for [`handle`](Self::handle), never 0.
    #[must_use]
    pub fn fresh_handle() -> u64 {
        unique() | 1
    }

    /// Shares the device with the other members of this cluster.
    pub fn cluster(mut self, name: impl Into<String>, balance: Balance) -> Self {
        self.request.cluster = name.into();
        self.request.balance = balance;
        self
    }

    /// Joins a group: its members read one copy of each packet, each with its own filter, and trust
    /// each other with every packet that any of them gets. A member that is slow loses packets that
    /// are overwritten before it reads them; it holds nobody up. Such losses are counted by this
    /// reader ([`Counts::lost`](crate::Counts), [`Port::dropped`](crate::Port::dropped)), not by the
    /// host, which has delivered them. Empty = a ring of its own.
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.request.group = name.into();
        self
    }

    /// Bytes of the group's arena for each ring, if this port is the first of the group; rounded up
    /// to a power of two; 0 = the daemon's default. [`ring_bytes`](Self::ring_bytes) is then what
    /// this reader has for descriptors of 16 bytes each.
    pub fn arena_bytes(mut self, bytes: u64) -> Self {
        self.request.arena_bytes = bytes;
        self
    }

    /// Sleep until this many packets are unread (or [`max_delay`](Self::max_delay) is over); 0 and
    /// 1 = wake at the first packet.
    pub fn watermark(mut self, packets: u32) -> Self {
        self.watermark = packets.max(1);
        self
    }

    /// Longest time an unread packet may wait for the watermark. Default 10 ms; microseconds count.
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// What the port does while it has nothing to read. Default: it sleeps.
    pub fn waiting(mut self, waiting: Waiting) -> Self {
        self.waiting = waiting;
        self
    }

    /// What the operator sees in lists. Default: program name and process number.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.request.label = label.into();
        self
    }

    /// The socket of the daemon or agent. Default: `$VNPLUG_SOCKET`, else
    /// [`DEFAULT_SOCKET`](vnplug_ring::control::DEFAULT_SOCKET).
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Whether the port survives a restart of the daemon or agent. Default: it does; the first
    /// packet afterwards has [`flags::GAP`](crate::flags::GAP).
    pub fn reconnect(mut self, reconnect: bool) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// Opens as many ports, one for each thread of a reader, that share the device by flow: all
    /// packets of a flow, both directions, go to one port, and each goes to one. Each port has rings
    /// of its own, so the threads have nothing in common. They are a cluster that nobody else joins.
    ///
    /// Nothing comes before the last one is open. After the daemon was restarted the ports reopen one
    /// by one; until the last one is back, flows move between them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 ports or a port that names a cluster; those of [`open`](Self::open).
    pub fn spread(mut self, ports: usize) -> Result<Vec<Port>, Error> {
        if ports == 0 || !self.request.cluster.is_empty() {
            return Err(Error::Invalid("spread: 1 port or more, of no cluster"));
        }
        self.request.cluster = format!("spread {:016x}", unique());
        self.request.balance = Balance::Flow;
        let tuning = self.request.tuning;
        self.request.tuning.enabled = false;
        let opened = (0..ports).map(|_| Port::open(self.clone()));
        let mut opened = opened.collect::<Result<Vec<_>, _>>()?;
        for port in &mut opened {
            port.tune(tuning)?;
        }
        Ok(opened)
    }

    /// Opens the port.
    ///
    /// # Errors
    /// See [`Port::open`].
    pub fn open(self) -> Result<Port, Error> {
        Port::open(self)
    }

    pub(crate) fn path(&self) -> PathBuf {
        socket_path(self.socket.as_deref())
    }

    pub(crate) fn max_delay_us(&self) -> u32 {
        u32::try_from(self.max_delay.as_micros()).unwrap_or(u32::MAX)
    }
}

/// A number that no other program has, as good as certainly.
fn unique() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

fn default_label() -> String {
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    format!("{}[{}]", program.trim_end(), std::process::id())
}

const DEFAULT_MAX_DELAY: Duration = Duration::from_millis(10);

/// A name like `eth1/ids` as a device and the group that its reader joins, as the libraries for programs of
/// others write it; empty = none. A port of a switch belongs to the device: `lan0/port3`,
/// `lan0/port3/ids`.
pub fn split_group(name: &str) -> (&str, &str) {
    let Some((device, rest)) = name.split_once('/') else {
        return (name, "");
    };
    let (first, group) = rest.split_once('/').unwrap_or((rest, ""));
    let number = first.strip_prefix("port").unwrap_or_default();
    let is_port = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    match is_port {
        true => (&name[..device.len() + 1 + first.len()], group),
        false if rest.is_empty() => (name, ""),
        false => (device, rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_a_switch_is_no_group() {
        for (name, parts) in [
            ("eth1", ("eth1", "")),
            ("eth1/", ("eth1/", "")),
            ("eth1@2/ids", ("eth1@2", "ids")),
            ("a,host:b@0-3/ids", ("a,host:b@0-3", "ids")),
            ("lan0/port3", ("lan0/port3", "")),
            ("host:lan0/port3/ids", ("host:lan0/port3", "ids")),
            ("lan0/3", ("lan0", "3")),
            ("lan0/portable", ("lan0", "portable")),
            ("lan0/port", ("lan0", "port")),
        ] {
            assert_eq!(split_group(name), parts);
        }
    }
}
