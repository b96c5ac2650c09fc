//! Who becomes a back-end, what programs are told of them, and how a program gets its channel.

use std::collections::BTreeSet;

use vnplug_ring::control::backend::{
    BackendInfo, Connect, Connected, Joined, MAX_EVENTS, Register,
};
use vnplug_ring::control::{Backend, code};

use super::{Registry, There};
use crate::control::backends::channel::{Channel, End, Side};
use crate::control::request::{cut, quoted};
use crate::hub::policy::Policy;
use crate::hub::{BackendGrant, Peer, Refusal};

/// Channels of one application's connection, or of one VM.
const MAX_CHANNELS: usize = 64;
/// As many characters of a program's label the back-end is told.
const MAX_LABEL: usize = 64;

impl Registry {
    /// The process behind a connection is this back-end from now on.
    pub(in super::super) fn register(
        &mut self,
        token: u64,
        viewer: &Peer,
        policy: &Policy,
        request: &Register,
    ) -> Result<(), Refusal> {
        let Register { id, name, .. } = request;
        let granted = self.grant(*id).filter(|grant| grant.name == *name);
        let own = granted.filter(|grant| policy.may_serve(viewer, grant));
        if own.is_none() {
            let what = format!(
                "no grant to be back-end {id} {}: the operator gives it by a [[backend]] table, --backend, or `vnplug grant add --serve`",
                quoted(name)
            );
            return Err(Refusal::new(code::DENIED, what));
        }
        if request.events_in.max(request.events_out) > MAX_EVENTS {
            let what = format!("a back-end has at most {MAX_EVENTS} events each way");
            return Err(Refusal::new(code::INVALID, what));
        }
        if self.there.values().any(|it| it.token == token) {
            let what = "this connection is a back-end already; use one for each";
            return Err(Refusal::new(code::EXISTS, what));
        }
        if self.there.contains_key(id) {
            let what = format!("another process is back-end {id} {}", quoted(name));
            return Err(Refusal::new(code::EXISTS, what));
        }
        let there = There {
            token,
            viewer: viewer.clone(),
            name: name.clone(),
            version: request.version,
            events: (request.events_in, request.events_out),
        };
        self.there.insert(*id, there);
        Ok(())
    }

    /// The back-ends that a viewer may connect to.
    pub(in super::super) fn list(&self, viewer: &Peer, policy: &Policy) -> Vec<BackendInfo> {
        let is_operator = policy.is_operator(viewer);
        let open = self.grants.iter();
        let open = open.filter(|grant| policy.may_use(viewer, grant));
        open.map(|grant| {
            let there = self.there.get(&grant.id);
            BackendInfo {
                id: grant.id,
                name: grant.name.clone(),
                is_there: there.is_some(),
                version: there.map_or(0, |it| it.version),
                channels: match is_operator {
                    true => self.channels_of(grant.id) as u32,
                    false => 0,
                },
            }
        })
        .collect()
    }

    /// Makes a channel; the back-end is told of it.
    pub(in super::super) fn connect(
        &mut self,
        program: End,
        viewer: &Peer,
        policy: &Policy,
        request: &Connect,
    ) -> Result<Connected, Refusal> {
        let meant = |grant: &&BackendGrant| match request.id {
            0 => grant.name == request.name,
            id => grant.id == id,
        };
        let grant = self.grants.iter().find(meant);
        let open = grant.filter(|grant| policy.may_use(viewer, grant));
        let Some(BackendGrant {
            id, name, channels, ..
        }) = open
        else {
            let named = match request.id {
                0 => quoted(&request.name),
                id => id.to_string(),
            };
            let what = format!("no back-end {named} that may be used from here");
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        let Some(there) = self.there.get(id) else {
            let what = format!("no process is back-end {name:?} now; try again when it is started");
            return Err(Refusal::new(code::UNAVAILABLE, what));
        };
        let own = self.of.get(&program.token).map_or(0, BTreeSet::len);
        // Those are counted, too, that an earlier process had and whose programs have not read to the end.
        let have = self.channels_of(*id);
        if have >= *channels || own >= MAX_CHANNELS {
            let what = format!(
                "back-end {name:?} has {have} channels of at most {channels}, and here are {own} of at \
                 most {MAX_CHANNELS}"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        let by_him = self.channels.values();
        let by_him = by_him.filter(|it| it.backend == *id && it.owner == *viewer);
        let by_him = by_him.count();
        // One is to be had in any case: there is no half of a channel.
        let half = (channels.saturating_sub(have - by_him) / 2).max(1);
        if !policy.is_operator(viewer) && by_him >= half {
            let what = format!(
                "{viewer:?} has {by_him} channels with back-end {name:?}: of at most {channels} (channels= of \
                 its grant) one user or VM has at most half of what the others leave"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        if there.token == program.token {
            let what = "a back-end cannot connect to itself; use another connection";
            return Err(Refusal::new(code::INVALID, what));
        }
        let back = End {
            token: there.token,
            app: 0,
        };
        let connected = Connected {
            channel: 0,
            id: *id,
            name: name.clone(),
            version: there.version,
            events_in: there.events.0,
            events_out: there.events.1,
        };
        let events = there.events;
        let number = self.next_number();
        let ends = [back, program];
        let mut channel = Channel::new((number, connected.id), viewer.clone(), ends, events);
        let joined = Joined {
            channel: number,
            who: viewer.written(),
            label: cut(request.label.clone(), MAX_LABEL),
            version: request.version,
        };
        channel.tell(Side::BackEnd, Backend::Joined(joined), None);
        self.channels.insert(number, channel);
        self.tallies.entry(connected.id).or_default().opened += 1;
        for end in [back, program] {
            self.of.entry(end.token).or_default().insert(number);
        }
        self.is_ready(number);
        Ok(Connected {
            channel: number,
            ..connected
        })
    }

    fn next_number(&mut self) -> u32 {
        loop {
            self.last = self.last.checked_add(1).unwrap_or(1);
            if !self.channels.contains_key(&self.last) {
                return self.last;
            }
        }
    }
}
