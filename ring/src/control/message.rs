//! The messages.

use super::VERSION;
use super::wire::{Header, Malformed, Reader, Writer};

/// Who says Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// An application.
    Client,
    /// A guest agent that relays for applications.
    Agent,
}

/// Which frames of a source a port is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direction {
    /// Received and sent by the interface.
    #[default]
    Both,
    /// Received only.
    Rx,
    /// Sent only.
    Tx,
}

/// How the members of a cluster share a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Balance {
    /// By symmetric flow hash: a flow stays with one member.
    #[default]
    Flow,
    /// Packet by packet in turn.
    RoundRobin,
}

/// A port's filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FilterSpec {
    /// Everything.
    #[default]
    All,
    /// pcap-filter(7) text, compiled by the daemon.
    Expression(String),
    /// A classic BPF program: 8 bytes per instruction (u16 code, u8 jt, u8 jf, u32 k).
    Program(Vec<u8>),
}

/// Asks for a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// Name of a source, with or without `host:`; `NAME@Q` asks for receive queue Q alone.
    pub device: String,
    /// Wanted bytes of each ring's record area; rounded up to a power of two. 0 = the daemon's
    /// default.
    pub ring_bytes: u64,
    /// Captured bytes per packet; 0 = whole packets.
    pub snaplen: u32,
    /// Which frames.
    pub direction: Direction,
    /// One packet in so many of those that pass the filter; 0 and 1 = all.
    pub sample: u32,
    /// Which frames, by content.
    pub filter: FilterSpec,
    /// Cluster to join; empty = a port of its own that gets everything.
    pub cluster: String,
    /// How the cluster shares; all members must agree.
    pub balance: Balance,
    /// This replaces a ring of an earlier daemon: the first record is marked `GAP`.
    pub reopened: bool,
    /// What the operator sees in lists, for example the program's name and process number.
    pub label: String,
}

/// Where one ring lies in the memory that came with [`Opened`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// Bytes from the start of the memory.
    pub offset: u64,
    /// Bytes of the ring, header included.
    pub len: u64,
}

/// A port was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// The port's number.
    pub port: u32,
    /// Bytes of memory to map, from offset 0 of the descriptor.
    pub map_len: u64,
    /// One ring per receive queue of the source.
    pub rings: Vec<RingPlace>,
    /// The longest record.
    pub snaplen: u32,
    /// DLT of the frames.
    pub link_type: u32,
    /// The source's name, with `host:`.
    pub device: String,
    /// MSI-X vector of the VM's doorbell device that rings for this port; `u32::MAX` = the control
    /// channel does. No meaning outside VM channels.
    pub vector: u32,
}

/// One source, as a client may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// Which kind of virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmKind {
    /// QEMU: the pool is an ivshmem device, the channel a virtio-serial port.
    Qemu,
    /// User-mode Linux: the pool is `/dev/mmapper`, the channel a tty line.
    Uml,
}

/// Asks for a VM to be made known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// The operator's name for it: 1 to 63 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Which kind.
    pub kind: VmKind,
    /// Bytes of its memory pool; a power of two; 0 = the daemon's default.
    pub pool_bytes: u64,
    /// MSI-X vectors of an `ivshmem-doorbell` device; 0 = none.
    pub vectors: u32,
    /// Which sources the VM may see, beside what the daemon's configuration grants it.
    pub allow: Vec<Grant>,
    /// Whose it is: a number that tells one attacher from another, drawn by it. While the VM's
    /// control channel is open, only the same owner may attach it again. 0 = nobody that comes
    /// again.
    pub owner: u64,
}

/// Permission to see a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the source, without `host:`; `*` = every source.
    pub source: String,
    /// Obligatory filter (pcap-filter(7)), run before the reader's own; empty = none.
    pub filter: String,
}

/// A VM is known; here is what to plug into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmReady {
    /// File of the memory pool.
    pub pool_path: String,
    /// Its length in bytes.
    pub pool_len: u64,
    /// Unix socket on which the daemon listens for the VM's control channel.
    pub control_path: String,
    /// Unix socket of the ivshmem server; empty without a doorbell.
    pub doorbell_path: String,
}

/// Everything that can be said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// First on every connection, and again after an agent or its channel restarted: earlier ports
    /// of this channel are closed.
    Hello {
        /// Lowest version the sender speaks.
        min_version: u8,
        /// Highest version the sender speaks.
        max_version: u8,
        /// Who it is.
        role: Role,
        /// Program name and version, for logs.
        name: String,
        /// Agents: places in the pool that applications still map; the daemon makes no ring there
        /// until [`Message::Release`] names them.
        live: Vec<RingPlace>,
        /// Agents: how many vectors of the VM's doorbell device, from 0 on, the agent listens to;
        /// others are not given to ports. An agent that does not say so listens to none.
        vectors: u32,
    },
    /// The answer to Hello.
    Welcome {
        /// The version to speak.
        version: u8,
        /// Name and version of the server.
        server: String,
        /// Agents: the number in the pool's first page. Else 0.
        pool_id: u64,
    },
    /// The request had no effect.
    Error {
        /// One of [`super::code`].
        code: u16,
        /// What is wrong and what to do; one line, no full stop.
        text: String,
    },
    /// Asks for the sources.
    List,
    /// The sources.
    Devices(Vec<Device>),
    /// Asks for a port.
    Open(Open),
    /// The port.
    Opened(Opened),
    /// Replaces a port's filter.
    Filter {
        /// The port.
        port: u32,
        /// Its new filter.
        filter: FilterSpec,
    },
    /// It is done.
    Done,
    /// Asks for counters: of one port of this application, or (0) of all there is to see.
    Stats {
        /// The port, or 0.
        port: u32,
    },
    /// The counters.
    Counters(Vec<Counted>),
    /// Closes a port.
    Close {
        /// The port.
        port: u32,
    },
    /// Unasked, VM channels: wake the readers of these ports.
    Wake(Vec<u32>),
    /// Unasked: the port is closed, for this reason.
    Gone {
        /// The port.
        port: u32,
        /// Why.
        reason: String,
    },
    /// Agents: the application is gone; all its ports are to be closed. (Its number is in the
    /// header.)
    AppGone,
    /// Agents: applications no longer map these places.
    Release(Vec<RingPlace>),
    /// Operators: make a VM known.
    AttachVm(VmSpec),
    /// The answer to AttachVm.
    VmReady(VmReady),
    /// Operators: forget a VM, close its ports.
    DetachVm {
        /// The VM.
        name: String,
        /// Only if it is still this owner's ([`VmSpec::owner`]); 0 = whoever's it is.
        owner: u64,
    },
    /// Operators: the descriptor sent along is the control channel of this VM (User-mode Linux).
    Adopt {
        /// The VM.
        name: String,
    },
    /// Agents on a tty, unasked and unanswered: so many bytes arrived since the last one. The daemon
    /// has at most [`super::TTY_WINDOW`] unacknowledged bytes on their way.
    Ack {
        /// Bytes read from the channel.
        bytes: u32,
    },
}

impl Message {
    /// The number of this message in a header.
    pub fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Welcome { .. } => 2,
            Self::Error { .. } => 3,
            Self::List => 4,
            Self::Devices(_) => 5,
            Self::Open(_) => 6,
            Self::Opened(_) => 7,
            Self::Filter { .. } => 8,
            Self::Done => 9,
            Self::Stats { .. } => 10,
            Self::Counters(_) => 11,
            Self::Close { .. } => 12,
            Self::Wake(_) => 13,
            Self::Gone { .. } => 14,
            Self::AppGone => 15,
            Self::Release(_) => 16,
            Self::AttachVm(_) => 17,
            Self::VmReady(_) => 18,
            Self::DetachVm { .. } => 19,
            Self::Adopt { .. } => 20,
            Self::Ack { .. } => 21,
        }
    }

    /// Header and payload as they travel.
    pub fn encode(&self, id: u32, app: u32) -> Vec<u8> {
        let mut w = Writer::default();
        self.payload(&mut w);
        let payload = w.into_bytes();
        let len = payload.len() as u32;
        let header = Header {
            version: VERSION,
            kind: self.kind(),
            len,
            id,
            app,
        };
        [&header.encode()[..], &payload].concat()
    }

    fn payload(&self, w: &mut Writer) {
        match self {
            Self::List | Self::Done | Self::AppGone => {}
            Self::Hello {
                min_version,
                max_version,
                role,
                name,
                live,
                vectors,
            } => {
                w.u8(*min_version);
                w.u8(*max_version);
                w.u8(*role as u8);
                w.text(name);
                w.list(live, place);
                w.u32(*vectors);
            }
            Self::Welcome {
                version,
                server,
                pool_id,
            } => {
                w.u8(*version);
                w.text(server);
                w.u64(*pool_id);
            }
            Self::Error { code, text } => {
                w.u16(*code);
                w.text(text);
            }
            Self::Devices(devices) => w.list(devices, |w, device| {
                w.text(&device.name);
                w.text(&device.kind);
                w.text(&device.state);
                w.text(&device.description);
                w.u32(device.queues);
                w.u32(device.ports);
            }),
            Self::Open(open) => {
                w.text(&open.device);
                w.u64(open.ring_bytes);
                w.u32(open.snaplen);
                w.u8(open.direction as u8);
                w.u32(open.sample);
                filter(w, &open.filter);
                w.text(&open.cluster);
                w.u8(open.balance as u8);
                w.u8(u8::from(open.reopened));
                w.text(&open.label);
            }
            Self::Opened(opened) => {
                w.u32(opened.port);
                w.u64(opened.map_len);
                w.list(&opened.rings, place);
                w.u32(opened.snaplen);
                w.u32(opened.link_type);
                w.text(&opened.device);
                w.u32(opened.vector);
            }
            Self::Filter { port, filter: spec } => {
                w.u32(*port);
                filter(w, spec);
            }
            Self::Stats { port } | Self::Close { port } => w.u32(*port),
            Self::Counters(all) => w.list(all, |w, one| {
                w.text(&one.kind);
                w.text(&one.name);
                w.list(&one.labels, |w, (key, value)| {
                    w.text(key);
                    w.text(value);
                });
                w.list(&one.values, |w, (key, value)| {
                    w.text(key);
                    w.u64(*value);
                });
            }),
            Self::Wake(ports) => w.list(ports, |w, port| w.u32(*port)),
            Self::Gone { port, reason } => {
                w.u32(*port);
                w.text(reason);
            }
            Self::Release(places) => w.list(places, place),
            Self::AttachVm(spec) => {
                w.text(&spec.name);
                w.u8(spec.kind as u8);
                w.u64(spec.pool_bytes);
                w.u32(spec.vectors);
                w.list(&spec.allow, |w, grant| {
                    w.text(&grant.source);
                    w.text(&grant.filter);
                });
                w.u64(spec.owner);
            }
            Self::VmReady(ready) => {
                w.text(&ready.pool_path);
                w.u64(ready.pool_len);
                w.text(&ready.control_path);
                w.text(&ready.doorbell_path);
            }
            Self::DetachVm { name, owner } => {
                w.text(name);
                w.u64(*owner);
            }
            Self::Adopt { name } => w.text(name),
            Self::Ack { bytes } => w.u32(*bytes),
        }
    }

    /// Reads the payload of a message whose header was read.
    ///
    /// # Errors
    /// [`Malformed`]; the sender's fault.
    pub fn decode(header: &Header, payload: &[u8]) -> Result<Self, Malformed> {
        // Hello carries the versions, so its own header may have any.
        if header.version != VERSION && header.kind != 1 {
            return Err(Malformed::Version(header.version));
        }
        let r = &mut Reader::new(payload);
        Ok(match header.kind {
            1 => Self::Hello {
                min_version: r.u8("min_version")?,
                max_version: r.u8("max_version")?,
                role: one_of(r, "role", &[Role::Client, Role::Agent])?,
                name: r.text("name")?,
                live: r.list("live", read_place)?,
                vectors: r.appended_u32("vectors")?,
            },
            2 => Self::Welcome {
                version: r.u8("version")?,
                server: r.text("server")?,
                pool_id: r.u64("pool_id")?,
            },
            3 => Self::Error {
                code: r.u16("code")?,
                text: r.text("text")?,
            },
            4 => Self::List,
            5 => Self::Devices(r.list("devices", |r| {
                Ok(Device {
                    name: r.text("name")?,
                    kind: r.text("kind")?,
                    state: r.text("state")?,
                    description: r.text("description")?,
                    queues: r.u32("queues")?,
                    ports: r.u32("ports")?,
                })
            })?),
            6 => Self::Open(Open {
                device: r.text("device")?,
                ring_bytes: r.u64("ring_bytes")?,
                snaplen: r.u32("snaplen")?,
                direction: one_of(
                    r,
                    "direction",
                    &[Direction::Both, Direction::Rx, Direction::Tx],
                )?,
                sample: r.u32("sample")?,
                filter: read_filter(r)?,
                cluster: r.text("cluster")?,
                balance: one_of(r, "balance", &[Balance::Flow, Balance::RoundRobin])?,
                reopened: one_of(r, "reopened", &[false, true])?,
                label: r.text("label")?,
            }),
            7 => Self::Opened(Opened {
                port: r.u32("port")?,
                map_len: r.u64("map_len")?,
                rings: r.list("rings", read_place)?,
                snaplen: r.u32("snaplen")?,
                link_type: r.u32("link_type")?,
                device: r.text("device")?,
                vector: r.u32("vector")?,
            }),
            8 => Self::Filter {
                port: r.u32("port")?,
                filter: read_filter(r)?,
            },
            9 => Self::Done,
            10 => Self::Stats {
                port: r.u32("port")?,
            },
            11 => Self::Counters(r.list("counters", |r| {
                Ok(Counted {
                    kind: r.text("kind")?,
                    name: r.text("name")?,
                    labels: r.list("labels", |r| Ok((r.text("key")?, r.text("value")?)))?,
                    values: r.list("values", |r| Ok((r.text("key")?, r.u64("value")?)))?,
                })
            })?),
            12 => Self::Close {
                port: r.u32("port")?,
            },
            13 => Self::Wake(r.list("ports", |r| r.u32("port"))?),
            14 => Self::Gone {
                port: r.u32("port")?,
                reason: r.text("reason")?,
            },
            15 => Self::AppGone,
            16 => Self::Release(r.list("places", read_place)?),
            17 => Self::AttachVm(VmSpec {
                name: r.text("name")?,
                kind: one_of(r, "kind", &[VmKind::Qemu, VmKind::Uml])?,
                pool_bytes: r.u64("pool_bytes")?,
                vectors: r.u32("vectors")?,
                allow: r.list("allow", |r| {
                    Ok(Grant {
                        source: r.text("source")?,
                        filter: r.text("filter")?,
                    })
                })?,
                owner: r.appended_u64("owner")?,
            }),
            18 => Self::VmReady(VmReady {
                pool_path: r.text("pool_path")?,
                pool_len: r.u64("pool_len")?,
                control_path: r.text("control_path")?,
                doorbell_path: r.text("doorbell_path")?,
            }),
            19 => Self::DetachVm {
                name: r.text("name")?,
                owner: r.appended_u64("owner")?,
            },
            20 => Self::Adopt {
                name: r.text("name")?,
            },
            21 => Self::Ack {
                bytes: r.u32("bytes")?,
            },
            kind => return Err(Malformed::Kind(kind)),
        })
    }

    /// Reads whatever [`Framer::next_message`](super::wire::Framer::next_message) returned.
    ///
    /// # Errors
    /// [`Malformed`]; the sender's fault.
    pub fn from_frame(frame: &(Header, Vec<u8>)) -> Result<Self, Malformed> {
        Self::decode(&frame.0, &frame.1)
    }
}

fn place(w: &mut Writer, place: &RingPlace) {
    w.u64(place.offset);
    w.u64(place.len);
}

fn read_place(r: &mut Reader<'_>) -> Result<RingPlace, Malformed> {
    Ok(RingPlace {
        offset: r.u64("offset")?,
        len: r.u64("len")?,
    })
}

fn filter(w: &mut Writer, spec: &FilterSpec) {
    let (kind, bytes): (u8, &[u8]) = match spec {
        FilterSpec::All => (0, &[]),
        FilterSpec::Expression(text) => (1, text.as_bytes()),
        FilterSpec::Program(bytes) => (2, bytes),
    };
    w.u8(kind);
    w.bytes(bytes);
}

fn read_filter(r: &mut Reader<'_>) -> Result<FilterSpec, Malformed> {
    Ok(match r.u8("filter kind")? {
        0 => {
            r.bytes("filter")?;
            FilterSpec::All
        }
        1 => FilterSpec::Expression(r.text("filter")?),
        2 => FilterSpec::Program(r.bytes("filter")?.to_vec()),
        kind => return Err(Malformed::Value("filter kind", u64::from(kind))),
    })
}

fn one_of<T: Copy>(r: &mut Reader<'_>, field: &'static str, values: &[T]) -> Result<T, Malformed> {
    let number = r.u8(field)?;
    values
        .get(usize::from(number))
        .copied()
        .ok_or(Malformed::Value(field, u64::from(number)))
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
