//! Asking for a port, and what it is told of its ring.

use super::wire::{Malformed, Reader, Writer};

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

/// How a port gets frames that their sender left to a NIC: super-frames, or without a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Segments {
    /// As a wire would have carried them: cut, and with their checksums.
    #[default]
    Wire,
    /// As they came, with what is left to do ([`flags::OFFLOAD`](crate::layout::flags::OFFLOAD)). What
    /// the port sends may be so, too.
    Merged,
}

impl Segments {
    /// How users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wire => "wire",
            Self::Merged => "merged",
        }
    }

    /// What a user wrote; `None` if it is neither.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Wire, Self::Merged]
            .into_iter()
            .find(|segments| segments.name() == name)
    }
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

/// What can be turned while a port is open, beside its filter and its rules; it takes effect
/// between two packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Which frames.
    pub direction: Direction,
    /// One packet in this number of those that pass the filter; 0 and 1 = all.
    pub sample: u32,
    /// False: the port gets nothing, and what it does not get is counted as `paused`.
    pub enabled: bool,
}

impl Default for Tuning {
    /// Everything.
    fn default() -> Self {
        Self {
            direction: Direction::Both,
            sample: 0,
            enabled: true,
        }
    }
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
    /// Which frames, how many of them, and whether any.
    pub tuning: Tuning,
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
    /// Wanted bytes of the record area of a ring that transmits; 0 = the port does not send.
    pub transmit_bytes: u64,
    /// Group to join, whose members read one copy of each packet; empty = a ring of its own. What one
    /// member may see all may.
    pub group: String,
    /// Wanted bytes of the record area of each of the group's arenas, if it is made by this request;
    /// 0 = the daemon's default.
    pub arena_bytes: u64,
    /// On a Unix socket: it is woken by the same descriptor as the other ports of this connection that
    /// said so. Only the first of them gets it.
    pub shares_wake: bool,
    /// On a Unix socket: it maps a port whose records lie apart ([`apart`](super::apart)). A daemon that
    /// has no others refuses who does not say so.
    pub maps_apart: bool,
    /// A number that ports of one owner share which one program holds as one: none of them is shown
    /// what another of them sends. 0 = there is no other.
    pub handle: u64,
    /// How it gets super-frames.
    pub segments: Segments,
    /// It takes part in a switch: it is given what is due to it there, and what it sends comes from a
    /// port of the switch. Else it sees all that enters the switch.
    pub joins: bool,
    /// Of a port that shares its wake-up: the place of the connection's [board](crate::news::Board) that says
    /// that it has news, plus 1; 0 = none.
    pub place: u32,
    /// Name of the operator's program that its frames go through; empty = none.
    pub program: String,
    /// What it receives may be [posted](crate::posted): by itself, if it has a transmit ring, which says whether the daemon
    /// knows that; and by other ports to which it is lent.
    pub posts: bool,
}

impl Open {
    /// A port of its own at `device`, which is given all, whole and as a wire would have carried it, and does not send.
    #[must_use]
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            ring_bytes: 0,
            snaplen: 0,
            tuning: Tuning::default(),
            filter: FilterSpec::All,
            cluster: String::new(),
            balance: Balance::Flow,
            reopened: false,
            label: String::new(),
            transmit_bytes: 0,
            group: String::new(),
            arena_bytes: 0,
            shares_wake: false,
            maps_apart: true,
            handle: 0,
            segments: Segments::Wire,
            joins: false,
            place: 0,
            program: String::new(),
            posts: false,
        }
    }
}

/// Where one ring lies in the memory that came with [`Opened`].
///
/// Where a guest's agent says what applications map, one without a length is a whole device that was
/// plugged, by its number: see [`device`](Self::device).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingPlace {
    /// Bytes from the start of the memory.
    pub offset: u64,
    /// Bytes of the ring, header included.
    pub len: u64,
}

impl RingPlace {
    /// The device of this number, whole.
    #[must_use]
    pub fn device(number: u64) -> Self {
        Self {
            offset: number,
            len: 0,
        }
    }

    /// The number of the device, if it is one and no place in the pool.
    #[must_use]
    pub fn as_device(&self) -> Option<u64> {
        (self.len == 0 && self.offset != 0).then_some(self.offset)
    }
}

/// In which memory a group's arenas lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ArenaHome {
    /// There are none: the rings hold packets.
    #[default]
    None,
    /// In that of the rings.
    WithTheRings,
    /// In one of their own, which readers cannot write: the last descriptor on a Unix socket, a
    /// device of its own in a VM. Number 0 in a VM: in its pool, where the rings are not.
    Apart,
    /// To an agent: as `Apart`, in a device that was plugged for them, which its kernel may not have found
    /// yet.
    Plugged,
}

/// Where a group's arenas lie.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Arenas {
    /// In which memory.
    pub home: ArenaHome,
    /// Number of that memory, if it is a device.
    pub memory: u64,
    /// Bytes of it to map, from offset 0.
    pub map_len: u64,
    /// One for each ring.
    pub places: Vec<RingPlace>,
}

/// A port was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// The port's number.
    pub port: u32,
    /// Bytes of memory to map, from offset 0 of the descriptor; with `apart` of the layout.
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
    /// The ring that transmits, in the same memory; length 0 = there is none.
    pub transmit: RingPlace,
    /// Of a member of a group: the rings hold descriptors of packets that lie here.
    pub arenas: Arenas,
    /// The rings' records lie in a memory of their own: two descriptors instead of one, and
    /// [`apart`](super::apart) says how both are mapped.
    pub apart: bool,
    /// A descriptor of the connection's [board](crate::news::Board) comes after that of the wake-up.
    pub board: bool,
    /// To an agent: the number in the first page of the device that the rings lie in; 0: the pool.
    pub memory: u64,
}

impl Arenas {
    fn write(&self, w: &mut Writer) {
        w.u8(self.home as u8);
        w.u64(self.memory);
        w.u64(self.map_len);
        w.list(&self.places, |w, place| place.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let homes = [
            ArenaHome::None,
            ArenaHome::WithTheRings,
            ArenaHome::Apart,
            ArenaHome::Plugged,
        ];
        Ok(Self {
            home: r.one_of("arena home", &homes)?,
            memory: r.u64("arena memory")?,
            map_len: r.u64("arena map_len")?,
            places: r.list("arenas", RingPlace::read)?,
        })
    }
}

impl FilterSpec {
    pub(super) fn write(&self, w: &mut Writer) {
        let (kind, bytes): (u8, &[u8]) = match self {
            Self::All => (0, &[]),
            Self::Expression(text) => (1, text.as_bytes()),
            Self::Program(bytes) => (2, bytes),
        };
        w.u8(kind);
        w.bytes(bytes);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match r.u8("filter kind")? {
            0 => {
                r.bytes("filter")?;
                Self::All
            }
            1 => Self::Expression(r.text("filter")?),
            2 => Self::Program(r.bytes("filter")?.to_vec()),
            kind => return Err(Malformed::Value("filter kind", u64::from(kind))),
        })
    }
}

impl Tuning {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u8(self.direction as u8);
        w.u32(self.sample);
        w.u8(u8::from(self.enabled));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let directions = [Direction::Both, Direction::Rx, Direction::Tx];
        Ok(Self {
            direction: r.one_of("direction", &directions)?,
            sample: r.u32("sample")?,
            enabled: r.flag("enabled")?,
        })
    }
}

impl Open {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.device);
        w.u64(self.ring_bytes);
        w.u32(self.snaplen);
        self.tuning.write(w);
        self.filter.write(w);
        w.text(&self.cluster);
        w.u8(self.balance as u8);
        w.u8(u8::from(self.reopened));
        w.text(&self.label);
        w.u64(self.transmit_bytes);
        w.text(&self.group);
        w.u64(self.arena_bytes);
        w.u8(u8::from(self.shares_wake));
        w.u8(u8::from(self.maps_apart));
        w.u64(self.handle);
        w.u8(self.segments as u8);
        w.u8(u8::from(self.joins));
        w.u32(self.place);
        w.text(&self.program);
        w.u8(u8::from(self.posts));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut open = Self {
            device: r.text("device")?,
            ring_bytes: r.u64("ring_bytes")?,
            snaplen: r.u32("snaplen")?,
            tuning: Tuning::read(r)?,
            filter: FilterSpec::read(r)?,
            cluster: r.text("cluster")?,
            balance: r.one_of("balance", &[Balance::Flow, Balance::RoundRobin])?,
            reopened: r.flag("reopened")?,
            label: r.text("label")?,
            transmit_bytes: r.appended_u64("transmit_bytes")?,
            group: String::new(),
            arena_bytes: 0,
            shares_wake: false,
            maps_apart: false,
            handle: 0,
            segments: Segments::Wire,
            joins: false,
            place: 0,
            program: String::new(),
            posts: false,
        };
        if !r.is_over() {
            open.group = r.text("group")?;
            open.arena_bytes = r.u64("arena_bytes")?;
        }
        if !r.is_over() {
            open.shares_wake = r.flag("shares_wake")?;
        }
        if !r.is_over() {
            open.maps_apart = r.flag("maps_apart")?;
        }
        if !r.is_over() {
            open.handle = r.u64("handle")?;
        }
        if !r.is_over() {
            open.segments = r.one_of("segments", &[Segments::Wire, Segments::Merged])?;
        }
        if !r.is_over() {
            open.joins = r.flag("joins")?;
        }
        if !r.is_over() {
            open.place = r.u32("place")?;
        }
        if !r.is_over() {
            open.program = r.text("program")?;
        }
        if !r.is_over() {
            open.posts = r.flag("posts")?;
        }
        Ok(open)
    }
}

impl RingPlace {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u64(self.offset);
        w.u64(self.len);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            offset: r.u64("offset")?,
            len: r.u64("len")?,
        })
    }
}

impl Opened {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u32(self.port);
        w.u64(self.map_len);
        w.list(&self.rings, |w, place| place.write(w));
        w.u32(self.snaplen);
        w.u32(self.link_type);
        w.text(&self.device);
        w.u32(self.vector);
        self.transmit.write(w);
        self.arenas.write(w);
        w.u8(u8::from(self.apart));
        w.u8(u8::from(self.board));
        // Only agents are told, and those who read the rest may know no more.
        if self.memory != 0 {
            w.u64(self.memory);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            port: r.u32("port")?,
            map_len: r.u64("map_len")?,
            rings: r.list("rings", RingPlace::read)?,
            snaplen: r.u32("snaplen")?,
            link_type: r.u32("link_type")?,
            device: r.text("device")?,
            vector: r.u32("vector")?,
            transmit: RingPlace {
                offset: r.appended_u64("transmit offset")?,
                len: r.appended_u64("transmit length")?,
            },
            arenas: match r.is_over() {
                true => Arenas::default(),
                false => Arenas::read(r)?,
            },
            apart: !r.is_over() && r.flag("apart")?,
            board: !r.is_over() && r.flag("board")?,
            memory: r.appended_u64("memory")?,
        })
    }
}
