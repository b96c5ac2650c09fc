//! Who is a back-end, who uses it, and what waits for whom.
//!
//! Nothing here sends: what is to go to a connection waits here until the connection has room, so that one
//! that reads slowly holds up nobody and takes no more than its windows.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;

use vnplug_ring::control::backend::{
    BackendInfo, Connect, Connected, Joined, MAX_EVENTS, Register, WINDOW,
};
use vnplug_ring::control::{Backend, Counted, REVOKED_CHANNEL, code};

use super::channel::{Channel, End, Side};
use crate::control::request::{cut, quoted};
use crate::hub::policy::Policy;
use crate::hub::{BackendGrant, Peer, Refusal};

/// Channels of one application's connection, or of one VM.
const MAX_CHANNELS: usize = 64;
/// Bytes that may wait in a channel, both ways.
pub(super) const WINDOWS: u64 = 2 * WINDOW;
/// Why a channel is over whose other end says what only the daemon may.
const ENDED: &str = "the other side ended it";
/// As many characters of a program's label the back-end is told.
const MAX_LABEL: usize = 64;

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

    /// The process behind a connection is this back-end from now on.
    pub(super) fn register(
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
    pub(super) fn list(&self, viewer: &Peer, policy: &Policy) -> Vec<BackendInfo> {
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

    /// Bytes that may wait in the windows of a program's owner.
    pub(super) fn windows_of(&self, owner: &Peer) -> u64 {
        let own = self.channels.values().filter(|it| it.owner == *owner);
        own.count() as u64 * WINDOWS
    }

    /// Makes a channel; the back-end is told of it.
    pub(super) fn connect(
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
            who: match viewer {
                Peer::Vm(name) => format!("vm:{name}"),
                Peer::User(uid) => format!("uid:{uid}"),
            },
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

    /// An end wants no more of a channel.
    fn hang_up(&mut self, number: u32, by: Side, reason: &str) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.hang_up(by, &cut(reason.to_owned(), 256));
        }
        self.is_ready(number);
        self.forget_if_over(number);
    }

    /// Ends channels of a back-end for both sides, which are told: their numbers. What waits in them is said to
    /// nobody any more.
    pub(super) fn revoke(
        &mut self,
        backend: &str,
        is_meant: impl Fn(&Peer) -> bool,
    ) -> Result<Vec<u32>, Refusal> {
        let id = self.grants.iter().find(|it| it.name == backend);
        let id = id.map(|it| it.id).ok_or_else(|| {
            let what = format!(
                "no back-end {}; `vnplug backends` shows them",
                quoted(backend)
            );
            Refusal::new(code::NOT_FOUND, what)
        })?;
        let own = self.channels.values();
        let own = own.filter(|it| it.backend == id && is_meant(&it.owner));
        let own = own.map(|it| it.number).collect();
        Ok(self.revoke_these(own))
    }

    fn revoke_these(&mut self, channels: Vec<u32>) -> Vec<u32> {
        for number in &channels {
            if let Some(channel) = self.channels.get_mut(number) {
                channel.end_for_both(REVOKED_CHANNEL);
            }
            self.is_ready(*number);
        }
        channels
    }

    /// Other back-ends may be from now on.
    pub(super) fn set_grants(&mut self, grants: Vec<BackendGrant>) {
        self.grants = grants;
    }

    /// Connections of back-ends that may not be what they are, with their names and whose they are.
    pub(super) fn not_permitted(&self, policy: &Policy) -> Vec<(u64, String, Peer)> {
        let may = |id: u32, there: &There| {
            let granted = self.grant(id).filter(|grant| grant.name == there.name);
            granted.is_some_and(|grant| policy.may_serve(&there.viewer, grant))
        };
        let gone = self.there.iter().filter(|(id, there)| !may(**id, there));
        gone.map(|(_, there)| (there.token, there.name.clone(), there.viewer.clone()))
            .collect()
    }

    /// Ends channels whose programs may not have them any more, as [`revoke`](Self::revoke) does: their numbers.
    pub(super) fn revoke_not_permitted(&mut self, policy: &Policy) -> Vec<u32> {
        let may = |channel: &Channel| {
            let grant = self.grant(channel.backend);
            grant.is_some_and(|grant| policy.may_use(&channel.owner, grant))
        };
        let own = self
            .channels
            .values()
            .filter(|it| !it.has_ended() && !may(it));
        let own = own.map(|it| it.number).collect();
        self.revoke_these(own)
    }

    /// A connection is gone, or (`app`) an application of it: the channels that end with it.
    pub(super) fn gone(&mut self, token: u64, app: Option<u32>, reason: &str) -> Vec<u32> {
        let numbers: Vec<u32> = self.of.get(&token).into_iter().flatten().copied().collect();
        let mut ended = Vec::new();
        for number in numbers {
            let Some(channel) = self.channels.get(&number) else {
                continue;
            };
            for side in [Side::BackEnd, Side::Program] {
                let end = channel.end(side);
                if end.token == token && app.is_none_or(|app| app == end.app) {
                    ended.push(number);
                    self.hang_up(number, side, reason);
                    break;
                }
            }
        }
        if app.is_none() {
            self.there.retain(|_, there| there.token != token);
            self.of.remove(&token);
            self.ready.remove(&token);
        }
        ended
    }

    /// What goes to a connection next, and for which of its applications.
    pub(super) fn next(&mut self, token: u64) -> Option<(u32, Backend, Option<OwnedFd>)> {
        loop {
            let ready = self.ready.get_mut(&token)?;
            let Some(number) = ready.pop_front() else {
                self.ready.remove(&token);
                return None;
            };
            let Some(channel) = self.channels.get_mut(&number) else {
                continue;
            };
            let sides = [Side::BackEnd, Side::Program].into_iter();
            let mut sides = sides.filter(|side| channel.end(*side).token == token);
            let Some(side) = sides.find(|side| channel.has_for(*side)) else {
                continue;
            };
            let app = channel.end(side).app;
            let Some((what, fd)) = channel.next(side) else {
                continue;
            };
            if channel.has_for(side) {
                ready.push_back(number);
            }
            self.forget_if_over(number);
            return Some((app, what, fd));
        }
    }

    /// A connection had its turn: the rest of what waits for it comes with the next one.
    pub(super) fn later(&mut self, token: u64) {
        self.fresh.push(token);
    }

    /// Whether somebody is to have a turn.
    pub(super) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Connections for which something began to wait, each once.
    pub(super) fn take_fresh(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.fresh)
    }

    /// Whether something waits for a connection.
    pub(super) fn waits_for(&self, token: u64) -> bool {
        self.ready.contains_key(&token)
    }

    fn is_ready(&mut self, number: u32) {
        let Some(channel) = self.channels.get(&number) else {
            return;
        };
        for side in [Side::BackEnd, Side::Program] {
            if channel.has_for(side) {
                let token = channel.end(side).token;
                let ready = self.ready.entry(token).or_insert_with(|| {
                    self.fresh.push(token);
                    VecDeque::new()
                });
                if !ready.contains(&number) {
                    ready.push_back(number);
                }
            }
        }
    }

    fn forget_if_over(&mut self, number: u32) {
        let over = self.channels.get(&number).is_some_and(Channel::is_over);
        let Some(channel) = over.then(|| self.channels.remove(&number)).flatten() else {
            return;
        };
        for end in [Side::BackEnd, Side::Program].map(|side| channel.end(side)) {
            if let Some(own) = self.of.get_mut(&end.token) {
                own.remove(&number);
                if own.is_empty() {
                    self.of.remove(&end.token);
                }
            }
        }
    }

    fn channels_of(&self, backend: u32) -> usize {
        let own = self.channels.values();
        own.filter(|it| it.backend == backend).count()
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn registry(channels: &str) -> Registry {
        let words = [
            ("id", "85"),
            ("name", "kv"),
            ("uid", "0"),
            ("open", "*"),
            ("channels", channels),
        ];
        let words = words.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let grant = BackendGrant::of_words(BTreeMap::from(words)).unwrap();
        Registry::new(vec![grant])
    }

    /// What the registry's grants permit, and root.
    fn policy(registry: &Registry) -> Policy {
        let mut policy = Policy::new(0);
        for (kind, given) in registry.grants.iter().flat_map(BackendGrant::given) {
            policy.give(kind, &given);
        }
        policy
    }

    fn register(registry: &mut Registry, token: u64) -> Result<(), Refusal> {
        let request = Register {
            id: 85,
            name: "kv".into(),
            version: 1,
            events_in: 1,
            events_out: 1,
        };
        let policy = policy(registry);
        registry.register(token, &Peer::User(0), &policy, &request)
    }

    fn connect(registry: &mut Registry, token: u64) -> Result<Connected, Refusal> {
        connect_as(registry, token, 1)
    }

    fn connect_as(registry: &mut Registry, token: u64, uid: u32) -> Result<Connected, Refusal> {
        let request = Connect {
            id: 85,
            name: String::new(),
            version: 1,
            label: String::new(),
        };
        let program = End { token, app: 0 };
        let policy = policy(registry);
        registry.connect(program, &Peer::User(uid), &policy, &request)
    }

    #[test]
    fn channels_whose_programs_do_not_read_count_after_their_back_end_is_gone() {
        let mut registry = registry("2");
        register(&mut registry, 20).unwrap();
        let first = connect(&mut registry, 30).unwrap();
        connect_as(&mut registry, 31, 2).unwrap();
        assert_eq!(registry.gone(20, None, "gone").len(), 2);
        register(&mut registry, 21).unwrap();
        let refused = connect_as(&mut registry, 32, 3).unwrap_err();
        assert_eq!(refused.code, code::LIMIT);
        // One of them reads to the end.
        let (_, last, _) = registry.next(30).unwrap();
        assert!(matches!(last, Backend::Hangup { channel, .. } if channel == first.channel));
        connect_as(&mut registry, 32, 3).unwrap();
        let refused = connect_as(&mut registry, 33, 4).unwrap_err();
        assert_eq!(refused.code, code::LIMIT);
    }

    #[test]
    fn no_owner_of_programs_takes_all_of_a_back_ends_channels() {
        let mut registry = registry("9");
        register(&mut registry, 20).unwrap();
        let mut tokens = 30..;
        let mut most = |registry: &mut Registry, uid| {
            let mut own = 0;
            loop {
                match connect_as(registry, tokens.next().unwrap(), uid) {
                    Ok(_) => own += 1,
                    Err(refusal) => break (own, refusal),
                }
            }
        };
        let (own, refusal) = most(&mut registry, 1);
        assert_eq!((own, refusal.code), (4, code::LIMIT));
        assert!(refusal.text.contains("half"), "{}", refusal.text);
        // Who comes later has half of what is left, as long as there is one.
        let others: Vec<_> = (2..6).map(|uid| most(&mut registry, uid).0).collect();
        assert_eq!(others, [2, 1, 1, 1]);
        assert_eq!(most(&mut registry, 6).0, 0);
        // What one gives back is another's.
        let first = *registry.of[&30].first().unwrap();
        registry.gone(30, None, "gone");
        while registry.next(20).is_some() {}
        assert!(!registry.channels.contains_key(&first));
        assert_eq!(most(&mut registry, 6).0, 1);
    }

    #[test]
    fn what_is_said_in_a_channel_that_is_over_is_not_counted() {
        let mut registry = registry("9");
        register(&mut registry, 20).unwrap();
        let channel = connect(&mut registry, 30).unwrap().channel;
        let program = End { token: 30, app: 0 };
        let say = || Backend::Say {
            channel,
            bytes: vec![7; 100],
        };
        registry.pass(program, channel, say());
        registry.revoke("kv", |_| true).unwrap();
        registry.pass(program, channel, say());
        let Tally {
            messages, bytes, ..
        } = registry.tallies[&85];
        assert_eq!((messages, bytes), ([1, 0], [100, 0]));
    }

    #[test]
    fn who_is_meant_is_told_that_an_operator_revoked_the_channel_and_nobody_else() {
        let mut registry = registry("9");
        register(&mut registry, 20).unwrap();
        let [first, second] = [30, 31].map(|token| connect(&mut registry, token).unwrap().channel);
        let other = Peer::Vm("other".into());
        assert_eq!(
            registry.revoke("kv", |owner| *owner == other).unwrap(),
            [0; 0]
        );
        let said = |channel| Backend::Say {
            channel,
            bytes: vec![7],
        };
        let program = |token| End { token, app: 0 };
        while registry.next(20).is_some() {}
        registry.pass(program(30), first, said(first));
        let ended = registry.revoke("kv", |owner| *owner == Peer::User(1));
        assert_eq!(ended.unwrap(), [first, second]);
        // What waited is not said any more, nor what comes.
        assert!(!registry.pass(program(30), first, said(first)));
        for (token, channel) in [(20, first), (20, second), (30, first), (31, second)] {
            let reason = REVOKED_CHANNEL.to_owned();
            let hung_up = Backend::Hangup { channel, reason };
            assert_eq!(registry.next(token).map(|(_, what, _)| what), Some(hung_up));
        }
        assert!(registry.next(20).is_none() && registry.channels.is_empty());
        assert!(registry.revoke("dns", |_| true).is_err());
    }

    #[test]
    fn no_end_says_that_an_operator_revoked_a_channel() {
        let mut registry = registry("9");
        register(&mut registry, 20).unwrap();
        let channel = connect(&mut registry, 30).unwrap().channel;
        let reason = REVOKED_CHANNEL.to_owned();
        let back = End { token: 20, app: 0 };
        assert!(registry.pass(back, channel, Backend::Hangup { channel, reason }));
        let (_, told, _) = registry.next(30).unwrap();
        assert!(matches!(told, Backend::Hangup { reason, .. } if reason == ENDED));
    }

    #[test]
    fn a_lie_ends_the_channel_and_is_told_as_such() {
        let mut registry = registry("9");
        register(&mut registry, 20).unwrap();
        let channel = connect(&mut registry, 30).unwrap().channel;
        let program = End { token: 30, app: 0 };
        let said = |cost| Backend::Took { channel, cost };
        assert!(!registry.pass(program, channel, said(0)));
        assert!(registry.pass(program, channel, said(1)));
        assert!(
            !registry.pass(End { token: 31, app: 0 }, channel, said(1)),
            "of a stranger"
        );
        while registry.next(20).is_some() || registry.next(30).is_some() {}
        assert_eq!(registry.channels_of(85), 0);
    }
}
