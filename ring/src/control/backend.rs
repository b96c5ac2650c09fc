//! What third parties' back-ends and the programs of their guests say to each other, by the daemon.
//!
//! ```text
//!   back-end ── Register ──▶ daemon ◀── Connect ── program (in a guest: by the agent)
//!            ◀── Joined ───         ─── Connected ▶          a channel, one number at both ends
//!            ◀── Say, Events ─▶ … ◀─ Say, Events ─▶          by credit: `Took` gives it back
//!            ─── Region ──▶         ─── Mapped + fd ▶        memory, made by the daemon
//!            ─── Withdraw ▶         ─── Withdraw ▶  … ◀ Withdraw ── … Withdrawn ▶
//!            ◀── Hangup ─── either side ends the channel ──▶
//! ```
//!
//! A channel belongs to the connection that registered the back-end and to the application that
//! connected. Nobody else can name it.

use super::wire::{Malformed, Reader, Writer};

/// Longest message in bytes.
pub const MAX_SAID: usize = 64 << 10;
/// What one side may have said that the other has not taken, in bytes of [`cost`].
pub const WINDOW: u64 = 256 << 10;
/// Events each way, at most.
pub const MAX_EVENTS: u8 = 32;
/// Longest name of a back-end.
pub const MAX_BACKEND_NAME: usize = 64;

/// What a message of `len` bytes takes of the [`WINDOW`].
#[must_use]
pub fn cost(len: usize) -> u64 {
    len as u64 + 256
}

/// What is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// Both ways: the channel is over. Of a program it may be said of a channel of a back-end that is gone.
    Hangup {
        /// The channel.
        channel: u32,
        /// Why, for people.
        reason: String,
    },
    /// A process is this back-end. Answer: Done.
    Register(Register),
    /// Asks for the back-ends that may be connected to. Answer: [`Listed`](Self::Listed).
    List,
    /// They are these.
    Listed(Vec<BackendInfo>),
    /// Asks for a channel. Answer: [`Connected`](Self::Connected).
    Connect(Connect),
    /// Here it is.
    Connected(Connected),
    /// To a back-end, unasked: somebody connected.
    Joined(Joined),
    /// Both ways, unasked: a message.
    Say {
        /// The channel.
        channel: u32,
        /// At most [`MAX_SAID`].
        bytes: Vec<u8>,
    },
    /// Both ways, unasked: messages of this [`cost`] were taken; as much may be said again.
    Took {
        /// The channel.
        channel: u32,
        /// Sum of the costs.
        cost: u64,
    },
    /// Both ways, unasked: how often each event happened since the channel began.
    Events {
        /// The channel.
        channel: u32,
        /// By event; they only grow.
        totals: Vec<u64>,
    },
    /// A back-end asks for memory that the other end of a channel maps, too. Answer:
    /// [`Mapped`](Self::Mapped).
    Region {
        /// The channel.
        channel: u32,
        /// Length in bytes.
        bytes: u64,
        /// The program may write it.
        writable: bool,
    },
    /// The answer, and to the program, unasked: there is memory. With a descriptor, where it is no agent
    /// that is told.
    Mapped(Mapped),
    /// A back-end asks for memory back. Answer: [`Withdrawn`](Self::Withdrawn). To a program, unasked: it is
    /// to let go. From a program, unasked: it does not map it any more.
    Withdraw {
        /// The channel.
        channel: u32,
        /// The region.
        region: u32,
        /// How long the program is waited for, in milliseconds.
        within_ms: u32,
    },
    /// The memory is the back-end's no more.
    Withdrawn {
        /// The program let go; otherwise its mapping is zeros now.
        released: bool,
    },
}

/// Who a back-end is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// Its number, as the operator's grant has it.
    pub id: u32,
    /// Its name, likewise.
    pub name: String,
    /// Of what it speaks; told to who connects.
    pub version: u32,
    /// Events that programs may send it.
    pub events_in: u8,
    /// Events that it may send.
    pub events_out: u8,
}

/// A back-end as programs see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// A process is it now.
    pub is_there: bool,
    /// Its version, if it is there.
    pub version: u32,
    /// Channels that it has; told to operators, else 0.
    pub channels: u32,
}

/// Asks for a channel to a back-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connect {
    /// Its number; 0: by name.
    pub id: u32,
    /// Its name, where the number is 0.
    pub name: String,
    /// Told to the back-end.
    pub version: u32,
    /// Told to the back-end, cut after 64 characters.
    pub label: String,
}

/// A channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connected {
    /// Its number.
    pub channel: u32,
    /// The back-end's number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// Events that it may be sent.
    pub events_in: u8,
    /// Events that it sends.
    pub events_out: u8,
}

/// Somebody connected to a back-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// The channel's number.
    pub channel: u32,
    /// Who: `vm:NAME` or `uid:N`, in the daemon's words.
    pub who: String,
    /// The program's own words: not to be believed.
    pub label: String,
    /// What it speaks, in its own words.
    pub version: u32,
}

/// Memory of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// The channel.
    pub channel: u32,
    /// The memory's number.
    pub region: u32,
    /// To an agent: the number in the first page of the device that it is; 0: the pool.
    pub memory: u64,
    /// Where it begins in what the descriptor maps.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// The program may write it.
    pub writable: bool,
}

impl Backend {
    /// The number of the message in a header.
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Hangup { .. } => 35,
            Self::Register(_) => 36,
            Self::List => 37,
            Self::Listed(_) => 38,
            Self::Connect(_) => 39,
            Self::Connected(_) => 40,
            Self::Joined(_) => 41,
            Self::Say { .. } => 42,
            Self::Took { .. } => 43,
            Self::Events { .. } => 44,
            Self::Region { .. } => 45,
            Self::Mapped(_) => 46,
            Self::Withdraw { .. } => 47,
            Self::Withdrawn { .. } => 56,
        }
    }

    /// Whether a header of this number is one of these.
    pub(super) fn has(kind: u8) -> bool {
        (35..=47).contains(&kind) || kind == 56
    }

    /// Whether it goes between the ends of a channel, unasked: a request or a part of none.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        matches!(
            self,
            Self::Hangup { .. }
                | Self::Say { .. }
                | Self::Took { .. }
                | Self::Events { .. }
                | Self::Withdraw { .. }
        )
    }

    /// Whether a header of this number is a message, credit or events: part of the traffic of a channel.
    #[must_use]
    pub fn is_passed_kind(kind: u8) -> bool {
        (42..=44).contains(&kind)
    }

    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::List => {}
            Self::Hangup { channel, reason } => {
                w.u32(*channel);
                w.text(reason);
            }
            Self::Register(it) => {
                w.u32(it.id);
                w.text(&it.name);
                w.u32(it.version);
                w.u8(it.events_in);
                w.u8(it.events_out);
            }
            Self::Listed(all) => w.list(all, |w, it| {
                w.u32(it.id);
                w.text(&it.name);
                w.u8(u8::from(it.is_there));
                w.u32(it.version);
                w.u32(it.channels);
            }),
            Self::Connect(it) => {
                w.u32(it.id);
                w.text(&it.name);
                w.u32(it.version);
                w.text(&it.label);
            }
            Self::Connected(it) => {
                w.u32(it.channel);
                w.u32(it.id);
                w.text(&it.name);
                w.u32(it.version);
                w.u8(it.events_in);
                w.u8(it.events_out);
            }
            Self::Joined(it) => {
                w.u32(it.channel);
                w.text(&it.who);
                w.text(&it.label);
                w.u32(it.version);
            }
            Self::Say { channel, bytes } => {
                w.u32(*channel);
                w.bytes(bytes);
            }
            Self::Took { channel, cost } => {
                w.u32(*channel);
                w.u64(*cost);
            }
            Self::Events { channel, totals } => {
                w.u32(*channel);
                w.list(totals, |w, total| w.u64(*total));
            }
            Self::Region {
                channel,
                bytes,
                writable,
            } => {
                w.u32(*channel);
                w.u64(*bytes);
                w.u8(u8::from(*writable));
            }
            Self::Mapped(it) => {
                w.u32(it.channel);
                w.u32(it.region);
                w.u64(it.memory);
                w.u64(it.offset);
                w.u64(it.len);
                w.u8(u8::from(it.writable));
            }
            Self::Withdraw {
                channel,
                region,
                within_ms,
            } => {
                w.u32(*channel);
                w.u32(*region);
                w.u32(*within_ms);
            }
            Self::Withdrawn { released } => w.u8(u8::from(*released)),
        }
    }

    pub(super) fn read(kind: u8, r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match kind {
            35 => Self::Hangup {
                channel: r.u32("channel")?,
                reason: r.text("reason")?,
            },
            36 => Self::Register(Register {
                id: r.u32("id")?,
                name: r.text("name")?,
                version: r.u32("version")?,
                events_in: r.u8("events_in")?,
                events_out: r.u8("events_out")?,
            }),
            37 => Self::List,
            38 => Self::Listed(r.list("backends", |r| {
                Ok(BackendInfo {
                    id: r.u32("id")?,
                    name: r.text("name")?,
                    is_there: r.flag("is_there")?,
                    version: r.u32("version")?,
                    channels: r.u32("channels")?,
                })
            })?),
            39 => Self::Connect(Connect {
                id: r.u32("id")?,
                name: r.text("name")?,
                version: r.u32("version")?,
                label: r.text("label")?,
            }),
            40 => Self::Connected(Connected {
                channel: r.u32("channel")?,
                id: r.u32("id")?,
                name: r.text("name")?,
                version: r.u32("version")?,
                events_in: r.u8("events_in")?,
                events_out: r.u8("events_out")?,
            }),
            41 => Self::Joined(Joined {
                channel: r.u32("channel")?,
                who: r.text("who")?,
                label: r.text("label")?,
                version: r.u32("version")?,
            }),
            42 => Self::Say {
                channel: r.u32("channel")?,
                bytes: r.bytes("bytes")?.to_vec(),
            },
            43 => Self::Took {
                channel: r.u32("channel")?,
                cost: r.u64("cost")?,
            },
            44 => Self::Events {
                channel: r.u32("channel")?,
                totals: r.list("totals", |r| r.u64("total"))?,
            },
            45 => Self::Region {
                channel: r.u32("channel")?,
                bytes: r.u64("bytes")?,
                writable: r.flag("writable")?,
            },
            46 => Self::Mapped(Mapped {
                channel: r.u32("channel")?,
                region: r.u32("region")?,
                memory: r.u64("memory")?,
                offset: r.u64("offset")?,
                len: r.u64("len")?,
                writable: r.flag("writable")?,
            }),
            47 => Self::Withdraw {
                channel: r.u32("channel")?,
                region: r.u32("region")?,
                within_ms: r.u32("within_ms")?,
            },
            56 => Self::Withdrawn {
                released: r.flag("released")?,
            },
            kind => return Err(Malformed::Kind(kind)),
        })
    }
}
