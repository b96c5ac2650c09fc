//! Who is a back-end, who uses it, and what waits for whom.
//!
//! Nothing here sends: what is to go to a connection waits here until the connection has room, so that one
//! that reads slowly holds up nobody and takes no more than its windows.

mod ends;
mod joins;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;

use vnplug_ring::control::backend::WINDOW;
use vnplug_ring::control::{Backend, Counted, REVOKED_CHANNEL};

use super::channel::{Channel, End, Side};
use crate::hub::{BackendGrant, Peer};

/// Bytes that may wait in a channel, both ways.
pub(super) const WINDOWS: u64 = 2 * WINDOW;
/// Why a channel is over whose other end says what only the daemon may.
const ENDED: &str = "the other side ended it";

/// The back-ends and their channels.
#[derive(Default)]
pub(super) struct Registry {
    grants: Vec<BackendGrant>,
    /// Those that are there, by number.
    there: BTreeMap<u32, There>,
    channels: BTreeMap<u32, Channel>,
    /// By back-end.
    tallies: BTreeMap<u32, Tally>,
    /// By connection the channels that it has an end of.
    of: HashMap<u64, BTreeSet<u32>>,
    /// By connection the channels with something for it, each once.
    ready: HashMap<u64, VecDeque<u32>>,
    /// Connections for which something waits since it was last looked.
    fresh: Vec<u64>,
    last: u32,
}

/// What a back-end and its programs did since the daemon began.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    opened: u64,
    cut: u64,
    /// To the back-end, and from it.
    messages: [u64; 2],
    bytes: [u64; 2],
    events: [u64; 2],
}

/// A back-end that is there.
struct There {
    token: u64,
    /// Who is it, and as which.
    viewer: Peer,
    name: String,
    version: u32,
    events: (u8, u8),
}

impl Registry {
    /// What the operator grants.
    pub(super) fn new(grants: Vec<BackendGrant>) -> Self {
        Self {
            grants,
            ..Self::default()
        }
    }

    /// A grant by its number.
    pub(super) fn grant(&self, id: u32) -> Option<&BackendGrant> {
        self.grants.iter().find(|grant| grant.id == id)
    }

    /// Bytes that may wait in the windows of a program's owner.
    pub(super) fn windows_of(&self, owner: &Peer) -> u64 {
        let own = self.channels.values().filter(|it| it.owner == *owner);
        own.count() as u64 * WINDOWS
    }

    /// What is told of each back-end; `shared` says what memory it shares.
    pub(super) fn counters(&self, shared: impl Fn(u32) -> (usize, u64)) -> Vec<Counted> {
        let counted = |grant: &BackendGrant| {
            let id = grant.id;
            let tally = self.tallies.get(&id).copied().unwrap_or_default();
            let waits = self.channels.values().filter(|it| it.backend == id);
            let (regions, region_bytes) = shared(id);
            let values = [
                ("channels", self.channels_of(id) as u64),
                ("channels_opened", tally.opened),
                ("channels_cut", tally.cut),
                ("messages_in", tally.messages[0]),
                ("messages_out", tally.messages[1]),
                ("message_bytes_in", tally.bytes[0]),
                ("message_bytes_out", tally.bytes[1]),
                ("events_in", tally.events[0]),
                ("events_out", tally.events[1]),
                ("waiting_bytes", waits.map(Channel::waiting).sum()),
                ("regions", regions as u64),
                ("region_bytes", region_bytes),
            ];
            let state = match self.there.contains_key(&id) {
                true => "there",
                false => "waiting",
            };
            Counted {
                kind: "backend".into(),
                name: grant.name.clone(),
                labels: vec![
                    ("id".into(), id.to_string()),
                    ("state".into(), state.into()),
                ],
                values: values.map(|(name, value)| (name.into(), value)).to_vec(),
            }
        };
        self.grants.iter().map(counted).collect()
    }

    /// A channel, and which end of it somebody has; `None` if he has none, or it is over.
    pub(super) fn channel_of(&mut self, end: End, number: u32) -> Option<(&mut Channel, Side)> {
        let channel = self.channels.get_mut(&number)?;
        let side = channel.side_of(end)?;
        Some((channel, side))
    }

    /// One end says something to the other. What is said of a channel that is over is nobody's. True if the
    /// channel is over by that.
    pub(super) fn pass(&mut self, from: End, number: u32, said: Backend) -> bool {
        let Some((channel, side)) = self.channel_of(from, number) else {
            return false;
        };
        if let Backend::Hangup { reason, .. } = said {
            // Only an operator has a program told that.
            let reason = match reason == REVOKED_CHANNEL {
                true => ENDED,
                false => &reason,
            };
            self.hang_up(number, side, reason);
            return true;
        }
        let to = side.other();
        let len = match &said {
            Backend::Say { bytes, .. } => Some(bytes.len() as u64),
            _ => None,
        };
        let before = channel.events_to(to);
        let taken = channel.take(side, said);
        if let Err(what) = taken {
            let whose = match side {
                Side::BackEnd => "the back-end",
                Side::Program => "the program",
            };
            channel.end_for_both(&format!("{whose} sent {what}"));
        }
        // A program may say any number.
        let events = channel.events_to(to).saturating_sub(before);
        let backend = channel.backend;
        let tally = self.tallies.entry(backend).or_default();
        let to = to as usize;
        match taken {
            Ok(goes_on) => {
                let len = len.filter(|_| goes_on);
                tally.messages[to] += u64::from(len.is_some());
                tally.bytes[to] += len.unwrap_or(0);
                tally.events[to] = tally.events[to].saturating_add(events);
            }
            Err(_) => tally.cut += 1,
        }
        self.is_ready(number);
        taken.is_err()
    }

    /// Tells the program, or the back-end, of a channel something.
    pub(super) fn tell(&mut self, number: u32, side: Side, what: Backend, fd: Option<OwnedFd>) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.tell(side, what, fd);
            self.is_ready(number);
        }
    }

    /// A region of a channel is no more.
    pub(super) fn forget_region(&mut self, number: u32, region: u32) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.forget_region(region);
        }
    }

    fn channels_of(&self, backend: u32) -> usize {
        let own = self.channels.values();
        own.filter(|it| it.backend == backend).count()
    }
}
