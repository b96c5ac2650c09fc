//! The messages.

use super::VERSION;
use super::backend::Backend;
use super::device::{Counted, Device};
use super::direct::{Direct, Members};
use super::grant::{GrantRequest, Revoke};
use super::grow::Grow;
use super::open::{FilterSpec, Open, Opened, RingPlace, Tuning};
use super::program::Programs;
use super::rule::{self, Rule, RuleKey, RuleKind};
use super::source::SourceRequest;
use super::switch::SwitchRequest;
use super::vm::{VmReady, VmSpec};
use super::wire::{HEADER, Header, Malformed, Reader, Writer};

/// Who says Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// An application.
    Client,
    /// A guest agent that relays for applications.
    Agent,
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
        /// Agents: this guest's kernel lets nobody map the memory that there is. Such an agent serves nobody, and
        /// says so that the machine gets memory of another kind.
        locked_down: bool,
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
    /// Turns a port's direction, sampling, or turns it off or on.
    Tune {
        /// The port.
        port: u32,
        /// From the next packet on.
        tuning: Tuning,
    },
    /// What a port receives may be [posted](crate::posted) by another one of the same application, too.
    Lend {
        /// The port that receives.
        port: u32,
        /// The port that sends.
        to: u32,
        /// What the port's first ring is called in the records of the other; its others follow.
        first: u16,
    },
    /// Adds rules to a port: all or, on Error, none. One with the key of an old one replaces it
    /// and counts from 0.
    AddRules {
        /// The port.
        port: u32,
        /// The rules.
        rules: Vec<Rule>,
    },
    /// Removes a rule.
    RemoveRule {
        /// The port.
        port: u32,
        /// Which.
        key: RuleKey,
    },
    /// Says what becomes of packets that no rule decides.
    RuleDefault {
        /// The port.
        port: u32,
        /// The port gets them.
        accept: bool,
    },
    /// Removes the rules of one kind that no packet matched for some time.
    PurgeRules {
        /// The port.
        port: u32,
        /// Which kind.
        kind: RuleKind,
        /// For this time, in milliseconds.
        idle_ms: u64,
    },
    /// These were removed.
    Purged(Vec<RuleKey>),
    /// Asks for the counters of a rule.
    RuleStats {
        /// The port.
        port: u32,
        /// Which.
        key: RuleKey,
    },
    /// They are these.
    RuleCounters {
        /// Packets that it was about.
        matched: u64,
        /// Milliseconds since the last of them, or since it was added.
        idle_ms: u64,
    },
    /// It is done.
    Done,
    /// What a port's reader says of its own work, for those who ask for the port's counters.
    Note {
        /// The port.
        port: u32,
        /// (name, value); they replace those before.
        values: Vec<(String, u64)>,
    },
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
    /// Agents, unasked: frames wait in the transmit rings of these ports, whose host sleeps.
    Kick(Vec<u32>),
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
    /// The answer to AttachVm and HoldVm.
    VmReady(VmReady),
    /// Operators: forget a VM, close its ports.
    DetachVm {
        /// The VM.
        name: String,
        /// Only if it is still this owner's ([`VmSpec::owner`]); 0 = anyone's.
        owner: u64,
    },
    /// Operators: close a VM's ports and open none until it is let go, or attached again: its applications
    /// let go of its memory, which is to be unplugged for a while. Answered with VmReady.
    HoldVm {
        /// The VM.
        name: String,
        /// As in DetachVm.
        owner: u64,
        /// Held, or let go.
        held: bool,
    },
    /// Operators: the descriptor sent along is the control channel of this VM (User-mode Linux).
    Adopt {
        /// The VM.
        name: String,
    },
    /// Operators: something about a switch.
    Switch(SwitchRequest),
    /// Operators: end ports, or one direction of them.
    Revoke(Revoke),
    /// Operators: something about grants.
    Grants(GrantRequest),
    /// Operators: a change of the sources.
    Sources(SourceRequest),
    /// Asks for the members of a port's trust group.
    Direct(Direct),
    /// The answer to Direct.
    Members(Members),
    /// Of third parties' back-ends.
    Backend(Backend),
    /// Of memory that a VM gets while it runs.
    Grow(Grow),
    /// Of the operator's programs.
    Programs(Programs),
    /// Agents on a tty, unasked and unanswered: this many bytes arrived since the last one. The daemon
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
            Self::Tune { .. } => 22,
            Self::AddRules { .. } => 23,
            Self::RemoveRule { .. } => 24,
            Self::RuleDefault { .. } => 25,
            Self::PurgeRules { .. } => 26,
            Self::Purged(_) => 27,
            Self::RuleStats { .. } => 28,
            Self::RuleCounters { .. } => 29,
            Self::Kick(_) => 30,
            Self::Note { .. } => 31,
            Self::Switch(_) => 32,
            Self::Direct(_) => 33,
            Self::Members(_) => 34,
            Self::Revoke(_) => 48,
            Self::Grants(_) => 49,
            Self::Sources(_) => 50,
            Self::HoldVm { .. } => 51,
            Self::Lend { .. } => 67,
            Self::Backend(it) => it.kind(),
            Self::Grow(it) => it.kind(),
            Self::Programs(it) => it.kind(),
        }
    }

    /// Header and payload as they travel.
    pub fn encode(&self, id: u32, app: u32) -> Vec<u8> {
        let mut w = Writer::behind_header();
        self.payload(&mut w);
        let mut bytes = w.into_bytes();
        let (head, payload) = bytes.split_at_mut(HEADER);
        let len = payload.len() as u32;
        let header = Header {
            version: VERSION,
            kind: self.kind(),
            len,
            id,
            app,
        };
        head.copy_from_slice(&header.encode());
        bytes
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
                locked_down,
            } => {
                w.u8(*min_version);
                w.u8(*max_version);
                w.u8(*role as u8);
                w.text(name);
                w.list(live, |w, place| place.write(w));
                w.u32(*vectors);
                w.u8(u8::from(*locked_down));
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
            Self::Devices(devices) => w.list(devices, |w, device| device.write(w)),
            Self::Open(open) => open.write(w),
            Self::Opened(opened) => opened.write(w),
            Self::Filter { port, filter } => {
                w.u32(*port);
                filter.write(w);
            }
            Self::Tune { port, tuning } => {
                w.u32(*port);
                tuning.write(w);
            }
            Self::AddRules { port, rules } => {
                w.u32(*port);
                w.list(rules, |w, rule| rule.write(w));
            }
            Self::Lend { port, to, first } => {
                w.u32(*port);
                w.u32(*to);
                w.u16(*first);
            }
            Self::RemoveRule { port, key } | Self::RuleStats { port, key } => {
                w.u32(*port);
                key.write(w);
            }
            Self::RuleDefault { port, accept } => {
                w.u32(*port);
                w.u8(u8::from(*accept));
            }
            Self::PurgeRules {
                port,
                kind,
                idle_ms,
            } => {
                w.u32(*port);
                w.u8(*kind as u8);
                w.u64(*idle_ms);
            }
            Self::Purged(keys) => w.list(keys, |w, key| key.write(w)),
            Self::RuleCounters { matched, idle_ms } => {
                w.u64(*matched);
                w.u64(*idle_ms);
            }
            Self::Stats { port } | Self::Close { port } => w.u32(*port),
            Self::Note { port, values } => {
                w.u32(*port);
                w.list(values, |w, (key, value)| {
                    w.text(key);
                    w.u64(*value);
                });
            }
            Self::Counters(all) => w.list(all, |w, counted| counted.write(w)),
            Self::Wake(ports) | Self::Kick(ports) => w.list(ports, |w, port| w.u32(*port)),
            Self::Gone { port, reason } => {
                w.u32(*port);
                w.text(reason);
            }
            Self::Release(places) => w.list(places, |w, place| place.write(w)),
            Self::AttachVm(spec) => spec.write(w),
            Self::VmReady(ready) => ready.write(w),
            Self::DetachVm { name, owner } => {
                w.text(name);
                w.u64(*owner);
            }
            Self::Adopt { name } => w.text(name),
            Self::HoldVm { name, owner, held } => {
                w.text(name);
                w.u64(*owner);
                w.u8(u8::from(*held));
            }
            Self::Ack { bytes } => w.u32(*bytes),
            Self::Switch(request) => request.write(w),
            Self::Direct(direct) => direct.write(w),
            Self::Members(members) => members.write(w),
            Self::Revoke(revoke) => revoke.write(w),
            Self::Grants(request) => request.write(w),
            Self::Sources(request) => request.write(w),
            Self::Backend(it) => it.write(w),
            Self::Grow(it) => it.write(w),
            Self::Programs(it) => it.write(w),
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
                role: r.one_of("role", &[Role::Client, Role::Agent])?,
                name: r.text("name")?,
                live: r.list("live", RingPlace::read)?,
                vectors: r.appended_u32("vectors")?,
                locked_down: !r.is_over() && r.flag("locked_down")?,
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
            5 => Self::Devices(r.list("devices", Device::read)?),
            6 => Self::Open(Open::read(r)?),
            7 => Self::Opened(Opened::read(r)?),
            8 => Self::Filter {
                port: r.u32("port")?,
                filter: FilterSpec::read(r)?,
            },
            9 => Self::Done,
            10 => Self::Stats {
                port: r.u32("port")?,
            },
            11 => Self::Counters(r.list("counters", Counted::read)?),
            12 => Self::Close {
                port: r.u32("port")?,
            },
            13 => Self::Wake(r.list("ports", |r| r.u32("port"))?),
            14 => Self::Gone {
                port: r.u32("port")?,
                reason: r.text("reason")?,
            },
            15 => Self::AppGone,
            16 => Self::Release(r.list("places", RingPlace::read)?),
            17 => Self::AttachVm(VmSpec::read(r)?),
            18 => Self::VmReady(VmReady::read(r)?),
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
            22 => Self::Tune {
                port: r.u32("port")?,
                tuning: Tuning::read(r)?,
            },
            23 => Self::AddRules {
                port: r.u32("port")?,
                rules: r.list("rules", Rule::read)?,
            },
            24 => Self::RemoveRule {
                port: r.u32("port")?,
                key: RuleKey::read(r)?,
            },
            25 => Self::RuleDefault {
                port: r.u32("port")?,
                accept: r.flag("accept")?,
            },
            26 => Self::PurgeRules {
                port: r.u32("port")?,
                kind: rule::read_kind(r)?,
                idle_ms: r.u64("idle_ms")?,
            },
            27 => Self::Purged(r.list("rules", RuleKey::read)?),
            28 => Self::RuleStats {
                port: r.u32("port")?,
                key: RuleKey::read(r)?,
            },
            29 => Self::RuleCounters {
                matched: r.u64("matched")?,
                idle_ms: r.u64("idle_ms")?,
            },
            30 => Self::Kick(r.list("ports", |r| r.u32("port"))?),
            31 => Self::Note {
                port: r.u32("port")?,
                values: r.list("values", |r| Ok((r.text("key")?, r.u64("value")?)))?,
            },
            32 => Self::Switch(SwitchRequest::read(r)?),
            33 => Self::Direct(Direct::read(r)?),
            34 => Self::Members(Members::read(r)?),
            48 => Self::Revoke(Revoke::read(r)?),
            49 => Self::Grants(GrantRequest::read(r)?),
            50 => Self::Sources(SourceRequest::read(r)?),
            67 => Self::Lend {
                port: r.u32("port")?,
                to: r.u32("to")?,
                first: r.u16("first")?,
            },
            51 => Self::HoldVm {
                name: r.text("name")?,
                owner: r.u64("owner")?,
                held: r.flag("held")?,
            },
            kind if Backend::has(kind) => Self::Backend(Backend::read(kind, r)?),
            kind if Grow::has(kind) => Self::Grow(Grow::read(kind, r)?),
            kind if Programs::has(kind) => Self::Programs(Programs::read(kind, r)?),
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

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
