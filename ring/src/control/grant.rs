//! What operators ask about what others may: grants, and what of it is taken back.

use super::wire::{Malformed, Reader, Writer};

/// Ends ports, or one direction of them, or channels of a back-end, whatever their owners say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revoke {
    /// Whose.
    pub whose: Whose,
    /// Nothing is received by them any more.
    pub receiving: bool,
    /// Nothing is sent for them any more.
    pub sending: bool,
}

/// Which ports are meant, or channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// The port of this number.
    Port(u32),
    /// Those of this user of the host.
    User(u32),
    /// Those of this VM.
    Vm(String),
    /// The members of groups of this name.
    Group(String),
    /// Those of this source, with or without `host:`.
    Source(String),
    /// Channels of a back-end, and no ports. A channel is taken as a whole.
    Channels {
        /// The back-end's name.
        backend: String,
        /// Of which programs: `vm:NAME`, `uid:N`, `vm:*`, `uid:*` or `*`, several with `+` between them.
        whose: String,
    },
}

/// Asks for the grants, or changes them. A grant is written as on the daemon's command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrantRequest {
    /// Which there are. The answer is Counters.
    List,
    /// Change one. The answer is Done.
    Change {
        /// What is done.
        action: GrantAction,
        /// What kind of grant it is.
        kind: GrantKind,
        /// Which: `vm:NAME=SOURCE…` or `uid:N=SOURCE…`, or with a back-end's name as the source.
        text: String,
        /// The next daemon has the change, too.
        keep: bool,
    },
}

/// What is done with a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum GrantAction {
    /// It is given, beside those that there are.
    Add = 1,
    /// It takes the place of all of the same kind that the same viewer has of the same source.
    Set = 2,
    /// All of this kind are taken away that this viewer has of this source; with a filter, that one.
    Remove = 3,
}

/// What a grant permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum GrantKind {
    /// To see a source: `--allow`.
    See = 1,
    /// To send through it: `--allow-send`.
    Send = 2,
    /// To take part in a switch: `--allow-join`.
    Join = 3,
    /// To be a back-end: `uid` of its `--backend`.
    Serve = 4,
    /// To connect to a back-end: `open` of its `--backend`.
    Use = 5,
}

impl Revoke {
    pub(super) fn write(&self, w: &mut Writer) {
        let (what, number, name) = match &self.whose {
            Whose::Port(port) => (PORT, *port, ""),
            Whose::User(uid) => (USER, *uid, ""),
            Whose::Vm(name) => (VM, 0, name.as_str()),
            Whose::Group(name) => (GROUP, 0, name.as_str()),
            Whose::Source(name) => (SOURCE, 0, name.as_str()),
            Whose::Channels { backend, .. } => (CHANNELS, 0, backend.as_str()),
        };
        w.u8(what);
        w.u32(number);
        w.text(name);
        w.u8(u8::from(self.receiving));
        w.u8(u8::from(self.sending));
        if let Whose::Channels { whose, .. } = &self.whose {
            w.text(whose);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let what = r.u8("whose")?;
        let number = r.u32("number")?;
        let name = r.text("name")?;
        let (receiving, sending) = (r.flag("receiving")?, r.flag("sending")?);
        Ok(Self {
            whose: match what {
                PORT => Whose::Port(number),
                USER => Whose::User(number),
                VM => Whose::Vm(name),
                GROUP => Whose::Group(name),
                SOURCE => Whose::Source(name),
                CHANNELS => Whose::Channels {
                    backend: name,
                    whose: r.text("whose channels")?,
                },
                _ => return Err(Malformed::Value("whose", u64::from(what))),
            },
            receiving,
            sending,
        })
    }
}

impl GrantRequest {
    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::List => w.u8(LIST),
            Self::Change {
                action,
                kind,
                text,
                keep,
            } => {
                w.u8(*action as u8);
                w.u8(*kind as u8);
                w.text(text);
                w.u8(u8::from(*keep));
            }
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        use GrantAction::{Add, Remove, Set};
        let action = match r.u8("action")? {
            LIST => return Ok(Self::List),
            1 => Add,
            2 => Set,
            3 => Remove,
            other => return Err(Malformed::Value("action", u64::from(other))),
        };
        let kind = match r.u8("kind")? {
            1 => GrantKind::See,
            2 => GrantKind::Send,
            3 => GrantKind::Join,
            4 => GrantKind::Serve,
            5 => GrantKind::Use,
            other => return Err(Malformed::Value("kind", u64::from(other))),
        };
        Ok(Self::Change {
            action,
            kind,
            text: r.text("text")?,
            keep: r.flag("keep")?,
        })
    }
}

const LIST: u8 = 0;
const PORT: u8 = 1;
const USER: u8 = 2;
const VM: u8 = 3;
const GROUP: u8 = 4;
const SOURCE: u8 = 5;
const CHANNELS: u8 = 6;
