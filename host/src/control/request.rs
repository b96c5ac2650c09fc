//! What a client, an agent or an operator asks, and the answer.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use vnplug_ring::control::wire::{Header, Malformed};
use vnplug_ring::control::{FilterSpec, Message, Open, Role, VERSION, VmSpec, code};
use vnplug_ring::layout::MAX_SNAPLEN;

use super::Control;
use super::channel::Attaching;
use super::compile::{CHEAP, Compiled, Job, Ticket};
use super::memory::{Completed, LARGE, Made, Want, rings};
use super::session::Over;
use crate::filter::Trust;
use crate::hub::policy::{Sight, Viewer};
use crate::hub::{Closed, Memory, Need, OwnMemory, Owner, Programs, Refusal, no_memory};

/// A request that waits for its filter to be compiled or for its memory.
pub(super) struct Pending {
    id: u32,
    app: u32,
    then: Then,
    /// Dropped with this when the connection ends.
    _ticket: Ticket,
}

/// What such a request goes on with.
pub(super) enum Then {
    Open(Open),
    Filter { port: u32 },
    Rings(Open, Programs),
    Attach(VmSpec),
}

/// What a request costs beyond its own token if the queues' threads have to answer it too.
const ASKS_QUEUES: f64 = 9.0;
/// So many rules that a request has a queue's thread touch cost as much as a request.
const RULES_AT_ONCE: f64 = 32.0;
/// The longest name of a cluster in bytes, and as much of a filter's text as lists show.
const MAX_CLUSTER: usize = 64;
const SHOWN_FILTER: usize = 256;
/// The longest reason of a refusal in bytes, and as much as it quotes of what was sent.
const MAX_REASON: usize = 1024;
const MAX_QUOTED: usize = 200;

/// What a peer sent, as a refusal quotes it.
pub(super) fn quoted(text: &str) -> String {
    cut(format!("{:?}", cut(text.into(), MAX_QUOTED)), MAX_QUOTED)
}

/// At most so many bytes of a text, with a sign that there was more.
fn cut(mut text: String, most_bytes: usize) -> String {
    const MORE: char = '…';
    if text.len() > most_bytes {
        text.truncate(text.floor_char_boundary(most_bytes - MORE.len_utf8()));
        text.push(MORE);
    }
    text
}

impl Control {
    /// Serves one message.
    pub(super) fn request(&mut self, token: u64, frame: &(Header, Vec<u8>)) -> Result<(), Over> {
        let (id, app) = (frame.0.id, frame.0.app);
        let message = match Message::from_frame(frame) {
            Ok(message) => message,
            Err(malformed) => {
                let refusal = Refusal::new(code::PROTOCOL, malformed.to_string());
                return self.answer(token, id, app, Err(refusal));
            }
        };
        let Some(session) = self.sessions.get(&token) else {
            return Ok(());
        };
        let gift_expected = matches!(message, Message::Adopt { .. });
        if session.gift.is_some() && !gift_expected {
            return Err(Over::Misbehaved("a descriptor that no message takes"));
        }
        let greeted = session.greeted;
        let viewer = session.viewer.clone();
        match message {
            Message::Hello {
                min_version,
                max_version,
                role,
                name,
                live,
                vectors,
            } => {
                if !(min_version..=max_version).contains(&VERSION) {
                    let what = format!(
                        "this daemon speaks protocol version {VERSION}, the client {min_version} \
                         to {max_version}: update one of them"
                    );
                    return self.answer(token, id, app, Err(Refusal::new(code::PROTOCOL, what)));
                }
                self.hello(token, &viewer, role, &name, &live, vectors);
                let pool_id = self.vm_of(&viewer).map_or(0, |vm| vm.pool_id);
                let server = format!("vnplugd {}", env!("CARGO_PKG_VERSION"));
                let welcome = Message::Welcome {
                    version: VERSION,
                    server,
                    pool_id,
                };
                self.answer(token, id, app, Ok((welcome, Vec::new())))
            }
            Message::Ack { bytes } if session.channel => {
                if let Some(session) = self.sessions.get_mut(&token) {
                    session.acknowledged(Some(bytes as usize));
                    session.flush()?;
                }
                Ok(())
            }
            _ if !greeted => {
                let refusal = Refusal::new(code::PROTOCOL, "say Hello first");
                self.answer(token, id, app, Err(refusal))
            }
            Message::List => {
                self.charge(token, ASKS_QUEUES);
                let grants = self.grants(&viewer);
                let sight = |source: &str| self.policy.sight(&viewer, source, &grants);
                let devices = self.hub.devices(&viewer, sight, &self.policy);
                self.answer(token, id, app, Ok((Message::Devices(devices), Vec::new())))
            }
            Message::Open(open) => self.open(token, id, app, &viewer, open),
            Message::Filter { port, filter } => self.filter(token, id, app, &viewer, port, filter),
            Message::Tune { port, tuning } => {
                self.charge(token, ASKS_QUEUES);
                let result = self.owned(token, app, port).map(|()| {
                    self.hub.tune(port, tuning);
                    (Message::Done, Vec::new())
                });
                self.answer(token, id, app, result)
            }
            Message::AddRules { .. }
            | Message::RemoveRule { .. }
            | Message::RuleDefault { .. }
            | Message::PurgeRules { .. }
            | Message::RuleStats { .. } => {
                let touched = self.touched_rules(&message);
                self.charge(token, ASKS_QUEUES + touched as f64 / RULES_AT_ONCE);
                let result = self.rules(token, app, &viewer, message);
                self.answer(token, id, app, result)
            }
            Message::Stats { port } => {
                self.charge(token, ASKS_QUEUES);
                let result = self.stats(token, app, &viewer, port);
                self.answer(token, id, app, result)
            }
            Message::Close { port } => {
                let result = self.owned(token, app, port).map(|()| {
                    self.forget_ports(token, |_, opened| opened == port);
                    self.close_ports(&viewer, vec![port]);
                    (Message::Done, Vec::new())
                });
                self.answer(token, id, app, result)
            }
            Message::AppGone if session.channel => {
                let ports = self.forget_ports(token, |opener, _| opener == app);
                self.close_ports(&viewer, ports);
                self.answer(token, id, app, Ok((Message::Done, Vec::new())))
            }
            Message::Kick(ports) if session.channel => {
                let own: HashSet<u32> = session.ports.iter().map(|(_, port)| *port).collect();
                self.hub
                    .kick(ports.into_iter().filter(|port| own.contains(port)));
                Ok(())
            }
            Message::Release(places) if session.channel => {
                if let Some(vm) = self.vm_of_mut(&viewer) {
                    vm.places.release(&places);
                }
                self.answer(token, id, app, Ok((Message::Done, Vec::new())))
            }
            Message::AttachVm(_) | Message::DetachVm { .. } | Message::Adopt { .. }
                if !self.policy.is_operator(&viewer) =>
            {
                let what = "only root or the daemon's own user may attach and detach VMs";
                self.answer(token, id, app, Err(Refusal::new(code::DENIED, what)))
            }
            Message::AttachVm(spec) => {
                let result = match self.attach_vm(token, spec) {
                    Ok(Attaching::Waits(want, then)) => {
                        return self.make(token, id, app, want, then);
                    }
                    Ok(Attaching::Done(ready)) => Ok((ready, Vec::new())),
                    Err(refusal) => Err(refusal),
                };
                self.answer(token, id, app, result)
            }
            Message::DetachVm { name, owner } => {
                let result = self.detach_own_vm(&name, owner);
                self.answer(token, id, app, result.map(|()| (Message::Done, Vec::new())))
            }
            Message::Adopt { name } => {
                let gift = self
                    .sessions
                    .get_mut(&token)
                    .and_then(|session| session.gift.take());
                let result = self.adopt(token, &name, gift);
                self.answer(token, id, app, result.map(|()| (Message::Done, Vec::new())))
            }
            other => {
                let what = format!("message {} is not a request to a daemon", other.kind());
                self.answer(token, id, app, Err(Refusal::new(code::PROTOCOL, what)))
            }
        }
    }

    /// Tells a peer that it does not speak the protocol, and ends the connection.
    pub(super) fn misbehaved(&mut self, token: u64, malformed: &Malformed) {
        let refusal = Refusal::new(code::PROTOCOL, malformed.to_string());
        // Told as far as it listens; it is cut off in any case.
        let _ = self.answer(token, 0, 0, Err(refusal));
        self.end(token, &Over::Misbehaved("it does not speak the protocol"));
    }

    fn answer(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        result: Result<(Message, Vec<OwnedFd>), Refusal>,
    ) -> Result<(), Over> {
        let (message, fds) = match result {
            Ok(answer) => answer,
            Err(Refusal { code, text }) => {
                let text = cut(text, MAX_REASON);
                (Message::Error { code, text }, Vec::new())
            }
        };
        match self.sessions.get_mut(&token) {
            Some(session) => session.say(&message, id, app, fds),
            None => Ok(()),
        }
    }

    fn charge(&mut self, token: u64, tokens: f64) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.bucket.charge(tokens);
        }
    }

    fn open(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        viewer: &Viewer,
        open: Open,
    ) -> Result<(), Over> {
        if open.cluster.len() > MAX_CLUSTER {
            let what = format!("a cluster's name has at most {MAX_CLUSTER} bytes");
            return self.answer(token, id, app, Err(Refusal::new(code::INVALID, what)));
        }
        if open.group.len() > MAX_CLUSTER {
            let what = format!("a group's name has at most {MAX_CLUSTER} bytes");
            return self.answer(token, id, app, Err(Refusal::new(code::INVALID, what)));
        }
        let guard = self
            .guard(viewer, &open.device)
            .and_then(|guard| self.may_send(viewer, &open).map(|()| guard));
        let guard = match guard {
            Ok(guard) => guard,
            Err(refusal) => return self.answer(token, id, app, Err(refusal)),
        };
        if guard.trim().is_empty() && matches!(open.filter, FilterSpec::All) {
            return self.open_with(token, id, app, viewer, open, Programs::default());
        }
        let filter = open.filter.clone();
        let link_type = self.link_type(&open.device);
        let then = Then::Open(open);
        self.compile(token, id, app, viewer, then, (guard, filter, link_type))
    }

    fn filter(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        viewer: &Viewer,
        port: u32,
        filter: FilterSpec,
    ) -> Result<(), Over> {
        if let Err(refusal) = self.owned(token, app, port) {
            return self.answer(token, id, app, Err(refusal));
        }
        if filter == FilterSpec::All {
            self.hub.set_filter(port, None, String::new());
            return self.answer(token, id, app, Ok((Message::Done, Vec::new())));
        }
        let link_type = self.hub.link_type_of(port);
        let what = (String::new(), filter, link_type);
        self.compile(token, id, app, viewer, Then::Filter { port }, what)
    }

    /// Has the operator's and the reader's filter compiled; the request goes on in
    /// [`compiled`](Self::compiled).
    fn compile(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        viewer: &Viewer,
        then: Then,
        (guard, filter, link_type): (String, FilterSpec, u32),
    ) -> Result<(), Over> {
        let trust = if self.policy.is_operator(viewer) {
            Trust::Operator
        } else {
            Trust::Guest
        };
        let submitted = self.compiler.submit(Job {
            session: token,
            owner: viewer.clone(),
            trust,
            guard,
            filter,
            snaplen: MAX_SNAPLEN,
            link_type,
        });
        let ticket = match submitted {
            Ok(ticket) => ticket,
            Err(refusal) => return self.answer(token, id, app, Err(refusal)),
        };
        self.wait(token, id, app, then, ticket);
        Ok(())
    }

    /// Has memory made; the request goes on in [`made`](Self::made).
    fn make(&mut self, token: u64, id: u32, app: u32, want: Want, then: Then) -> Result<(), Over> {
        match self.memory.make(token, want) {
            Ok(ticket) => {
                self.wait(token, id, app, then, ticket);
                Ok(())
            }
            Err(refusal) => {
                if let Then::Attach(spec) = &then {
                    self.attaching.remove(&spec.name);
                }
                self.answer(token, id, app, Err(refusal))
            }
        }
    }

    fn wait(&mut self, token: u64, id: u32, app: u32, then: Then, ticket: Ticket) {
        let pending = Pending {
            id,
            app,
            then,
            _ticket: ticket,
        };
        self.pending.insert(token, pending);
        if let Some(session) = self.sessions.get_mut(&token) {
            session.busy = true;
        }
    }

    /// Goes on with a request whose filter is compiled.
    pub(super) fn compiled(&mut self, compiled: Compiled) {
        let Compiled {
            session: token,
            mut programs,
            took,
        } = compiled;
        if let Ok(programs) = &mut programs {
            programs.text = cut(std::mem::take(&mut programs.text), SHOWN_FILTER);
        }
        let Some(pending) = self.pending.remove(&token) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        session.busy = false;
        if took > CHEAP {
            session.bucket.charge(took.as_secs_f64() * 10_000.0);
        }
        let viewer = session.viewer.clone();
        let Pending { id, app, then, .. } = pending;
        let programs = programs.and_then(|programs| {
            let (device, port) = match &then {
                Then::Filter { port } => ("", Some(*port)),
                Then::Open(open) | Then::Rings(open, _) => (open.device.as_str(), None),
                Then::Attach(_) => return Ok(programs),
            };
            self.bears(&viewer, device, port, &programs)?;
            Ok(programs)
        });
        let went = match (programs, then) {
            (Err(refusal), _) => self.answer(token, id, app, Err(refusal)),
            (Ok(programs), Then::Open(open)) => {
                self.open_with(token, id, app, &viewer, open, programs)
            }
            (Ok(programs), Then::Filter { port }) => {
                self.hub.set_filter(port, programs.filter, programs.text);
                self.answer(token, id, app, Ok((Message::Done, Vec::new())))
            }
            (Ok(_), Then::Rings(..) | Then::Attach(_)) => Ok(()),
        };
        self.went_on(token, went);
    }

    /// Goes on with a request whose memory is made.
    pub(super) fn made(&mut self, completed: Completed) {
        let token = completed.session;
        if let Made::Pool(plan, _) = &completed.made {
            self.attaching.remove(plan.name());
        }
        let (Some(pending), Some(session)) =
            (self.pending.remove(&token), self.sessions.get_mut(&token))
        else {
            // Who asked for it is gone.
            completed.abandon(&self.memory);
            return;
        };
        session.busy = false;
        let viewer = session.viewer.clone();
        let Pending { id, app, then, .. } = pending;
        let result = match (completed.made, then) {
            (Made::Pool(plan, pool), Then::Attach(spec)) => self
                .attached(token, &spec, plan, pool)
                .map(|ready| (ready, Vec::new())),
            (Made::Rings(need, memory), Then::Rings(open, programs)) => memory
                .map_err(|error| no_memory(need.total(), &error))
                .and_then(|memory| self.opened(token, app, &viewer, &open, programs, Some(memory))),
            _ => Err(Refusal::new(code::INTERNAL, "not what was asked for")),
        };
        let went = self.answer(token, id, app, result);
        self.went_on(token, went);
    }

    /// Goes on with a connection that waited.
    fn went_on(&mut self, token: u64, went: Result<(), Over>) {
        match went {
            Ok(()) => self.work(token),
            Err(over) => self.end(token, &over),
        }
    }

    /// Opens a port whose filters are compiled: at once, or when its rings are made.
    fn open_with(
        &mut self,
        token: u64,
        id: u32,
        app: u32,
        viewer: &Viewer,
        open: Open,
        programs: Programs,
    ) -> Result<(), Over> {
        let memory = match viewer {
            Viewer::Vm(_) => Ok(None),
            Viewer::User(uid) => {
                let owner = Owner::User(*uid);
                let awaited = self.awaited(viewer, &owner);
                match self.need(viewer, &open, &owner, awaited) {
                    Ok(need) if need.total() >= LARGE => {
                        let then = Then::Rings(open, programs);
                        return self.make(token, id, app, Want::Rings(need), then);
                    }
                    Ok(need) => rings(need, &|| true)
                        .map(Some)
                        .map_err(|error| no_memory(need.total(), &error)),
                    Err(refusal) => Err(refusal),
                }
            }
        };
        let result =
            memory.and_then(|memory| self.opened(token, app, viewer, &open, programs, memory));
        self.answer(token, id, app, result)
    }

    /// Bytes of memory for a port, if it may be beside what its owner waits for.
    fn need(
        &self,
        viewer: &Viewer,
        open: &Open,
        owner: &Owner,
        awaited: (usize, u64),
    ) -> Result<Need, Refusal> {
        if !self.policy.is_operator(viewer) {
            self.hub.within_limits(open, owner, awaited)?;
        }
        self.hub.need(open, owner)
    }

    /// Ports whose rings are being made for a user, on whatever connection, and their bytes.
    fn awaited(&self, viewer: &Viewer, owner: &Owner) -> (usize, u64) {
        let rings = self.pending.iter().filter_map(|(token, pending)| {
            let own = self.sessions.get(token)?.viewer == *viewer;
            match &pending.then {
                Then::Rings(open, _) if own => {
                    let need = self.hub.need(open, owner).unwrap_or_default();
                    Some(need.total())
                }
                _ => None,
            }
        });
        rings.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }

    fn bears(
        &mut self,
        viewer: &Viewer,
        device: &str,
        port: Option<u32>,
        programs: &Programs,
    ) -> Result<(), Refusal> {
        let owner = match viewer {
            _ if self.policy.is_operator(viewer) => return Ok(()),
            Viewer::User(uid) => Owner::User(*uid),
            Viewer::Vm(name) => Owner::Vm(name.clone()),
        };
        self.hub.bears(device, port, &owner, programs)
    }

    fn opened(
        &mut self,
        token: u64,
        app: u32,
        viewer: &Viewer,
        open: &Open,
        programs: Programs,
        memory: Option<OwnMemory>,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        // Others of its owner may have been opened while its rings were made.
        self.bears(viewer, &open.device, None, &programs)?;
        let opening = match viewer {
            Viewer::User(uid) => {
                let owner = Owner::User(*uid);
                let need = self.need(viewer, open, &owner, (0, 0))?;
                // What was asked for when it was made is what is asked for now.
                let memory = memory
                    .filter(|memory| memory.rings.len >= need.rings)
                    .ok_or_else(|| Refusal::new(code::INTERNAL, "no memory was made"))?;
                self.hub
                    .open(open, owner, programs, Memory::Own(memory), None)?
            }
            Viewer::Vm(name) => {
                let owner = Owner::Vm(name.clone());
                self.hub.within_limits(open, &owner, (0, 0))?;
                let Some(vm) = self.vms.get_mut(name) else {
                    return Err(Refusal::new(code::NOT_FOUND, "the VM was detached"));
                };
                let (doorbell, bell, vector) = vm.bell(&self.bell);
                let memory = Memory::Pool {
                    region: &vm.region,
                    places: &mut vm.places,
                };
                let mut opening = self
                    .hub
                    .open(open, owner, programs, memory, Some(doorbell))?;
                opening.opened.vector = vector;
                let port = opening.opened.port;
                vm.bells.extend(bell.map(|bell| (port, bell)));
                opening
            }
        };
        if let Some(session) = self.sessions.get_mut(&token) {
            session.ports.push((app, opening.opened.port));
        }
        Ok((Message::Opened(opening.opened), opening.fds))
    }

    fn stats(
        &mut self,
        token: u64,
        app: u32,
        viewer: &Viewer,
        port: u32,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let counters = if port != 0 {
            self.owned(token, app, port)?;
            self.hub.port_counters(&[port])
        } else if self.policy.is_operator(viewer) {
            let mut counters = self.hub.counters();
            counters.extend(self.vm_counters());
            counters
        } else {
            let ports: Vec<u32> = self
                .sessions
                .get(&token)
                .into_iter()
                .flat_map(|session| &session.ports)
                .filter(|(opener, _)| *opener == app)
                .map(|(_, port)| *port)
                .collect();
            self.hub.port_counters(&ports)
        };
        Ok((Message::Counters(counters), Vec::new()))
    }

    /// The obligatory filter of a viewer for a device; a source that it may not see is not there.
    fn guard(&self, viewer: &Viewer, device: &str) -> Result<String, Refusal> {
        let unseen = || {
            let device = quoted(device);
            let what = format!("no source {device}; `vnplug list` shows the sources");
            Refusal::new(code::NOT_FOUND, what)
        };
        let (source, _) = self.hub.find(device).map_err(|refusal| match viewer {
            _ if self.policy.is_operator(viewer) => refusal,
            _ => unseen(),
        })?;
        let name = &self.hub.sources()[source].name;
        match self.policy.sight(viewer, name, &self.grants(viewer)) {
            Sight::Through(filter) => Ok(filter),
            Sight::Nothing => Err(unseen()),
        }
    }

    /// Whether a port may have the transmit ring that it asks for, if it asks for one.
    fn may_send(&self, viewer: &Viewer, open: &Open) -> Result<(), Refusal> {
        if open.transmit_bytes == 0 {
            return Ok(());
        }
        let (source, _) = self.hub.find(&open.device)?;
        let name = &self.hub.sources()[source].name;
        if self.policy.may_send(viewer, name) {
            return Ok(());
        }
        let what = format!(
            "sending through {name:?} needs a grant of its own: the operator gives it with \
             `send = true` in an [[allow]] or with --allow-send"
        );
        Err(Refusal::new(code::DENIED, what))
    }

    pub(super) fn owned(&self, token: u64, app: u32, port: u32) -> Result<(), Refusal> {
        let mine = self
            .sessions
            .get(&token)
            .is_some_and(|session| session.ports.contains(&(app, port)));
        if mine {
            return Ok(());
        }
        Err(Refusal::new(
            code::NOT_FOUND,
            format!("port {port} is not open on this connection"),
        ))
    }

    fn link_type(&self, device: &str) -> u32 {
        self.hub
            .find(device)
            .map_or(1, |(source, _)| self.hub.sources()[source].link_type)
    }

    /// Forgets the ports of a connection that `which` (application, port) names.
    pub(super) fn forget_ports(
        &mut self,
        token: u64,
        which: impl Fn(u32, u32) -> bool,
    ) -> Vec<u32> {
        let Some(session) = self.sessions.get_mut(&token) else {
            return Vec::new();
        };
        let (gone, kept): (Vec<_>, Vec<_>) = session
            .ports
            .drain(..)
            .partition(|&(app, port)| which(app, port));
        session.ports = kept;
        gone.into_iter().map(|(_, port)| port).collect()
    }

    /// Closes ports and gives their memory back.
    pub(super) fn close_ports(&mut self, viewer: &Viewer, ports: Vec<u32>) {
        for port in ports.into_iter().collect::<HashSet<_>>() {
            let Some(Closed {
                places, remains, ..
            }) = self.hub.close(port)
            else {
                continue;
            };
            if remains.iter().map(|port| port.ring_bytes()).sum::<u64>() >= LARGE {
                self.memory.discard(remains);
            }
            if let Viewer::Vm(name) = viewer
                && let Some(vm) = self.vms.get_mut(name)
            {
                vm.forget_port(port, &places);
            }
        }
    }

    fn hello(
        &mut self,
        token: u64,
        viewer: &Viewer,
        role: Role,
        name: &str,
        live: &[vnplug_ring::control::RingPlace],
        vectors: u32,
    ) {
        log::debug!(target: "control", "{viewer:?} is {:?}", name.escape_debug().to_string());
        // A second Hello on a channel: the agent or the guest was restarted.
        let stale = self.forget_ports(token, |_, _| true);
        self.close_ports(viewer, stale);
        if role == Role::Agent
            && let Some(vm) = self.vm_of_mut(viewer)
        {
            vm.places.release_all();
            vm.places.linger(live);
            vm.heard = vectors;
        }
        if let Some(session) = self.sessions.get_mut(&token) {
            session.greeted = true;
            self.silent.remove(&token);
            session.acknowledged(None);
        }
    }
}
