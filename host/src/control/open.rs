//! A port that is asked for, from what its viewer may have to the opened port.

use vnplug_ring::control::{FilterSpec, Message, Open, code};

use super::Control;
use super::memory::{LARGE, Want, rings};
use super::request::quoted;
use super::session::{Gifts, Over};
use super::waiting::{Then, Whom};
use crate::hub::policy::Sight;
use crate::hub::terms::SendTerms;
use crate::hub::twin::no_program;
use crate::hub::{
    Granted, Grown, Memory, Named, Need, Opening, OwnMemory, Peer, Programs, Refusal, Step,
    no_memory,
};

/// The longest name of a cluster or a group in bytes.
const MAX_CLUSTER: usize = 64;

impl Control {
    pub(super) fn open(&mut self, whom: Whom, viewer: &Peer, open: Open) -> Result<(), Over> {
        if open.cluster.len() > MAX_CLUSTER {
            let what = format!("a cluster's name has at most {MAX_CLUSTER} bytes");
            return self
                .sessions
                .answer(whom, Err(Refusal::new(code::INVALID, what)));
        }
        if matches!(viewer, Peer::User(_)) && !open.maps_apart {
            let what = "libvnplug is older than this daemon, which keeps packets where their reader \
                        cannot write; update it";
            return self
                .sessions
                .answer(whom, Err(Refusal::new(code::INVALID, what)));
        }
        if open.group.len() > MAX_CLUSTER {
            let what = format!("a group's name has at most {MAX_CLUSTER} bytes");
            return self
                .sessions
                .answer(whom, Err(Refusal::new(code::INVALID, what)));
        }
        let granted = self.granted(viewer, &open).and_then(|it| {
            let sends = sent_filter(&it.terms)?;
            Ok((self.guard_in_group(viewer, &open, it.sight)?, sends))
        });
        let (guard, sends) = match granted {
            Ok(granted) => granted,
            Err(refusal) => return self.sessions.answer(whom, Err(refusal)),
        };
        if guard.trim().is_empty() && sends.is_empty() && matches!(open.filter, FilterSpec::All) {
            return self.open_with(whom, viewer, open, Programs::default());
        }
        let filter = open.filter.clone();
        let link_type = self.link_type(&open.device);
        let then = Then::Open(open);
        self.compile(whom, viewer, then, (guard, sends, filter, link_type))
    }

    pub(super) fn filter(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        port: u32,
        filter: FilterSpec,
    ) -> Result<(), Over> {
        if let Err(refusal) = self.sessions.owned(whom, port) {
            return self.sessions.answer(whom, Err(refusal));
        }
        if filter == FilterSpec::All {
            let step = self.hub.set_filter(port, None, String::new());
            return self.carry_on(whom, Ok(step));
        }
        let link_type = self.hub.link_type_of(port);
        let what = (String::new(), String::new(), filter, link_type);
        self.compile(whom, viewer, Then::Filter { port }, what)
    }

    /// Opens a port whose filters are compiled: at once, or when its rings are made.
    pub(super) fn open_with(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        open: Open,
        programs: Programs,
    ) -> Result<(), Over> {
        let memory = match viewer {
            Peer::Vm(_) => {
                return self.open_in_vm(whom, viewer, open, programs, Grown::default());
            }
            Peer::User(uid) => {
                let owner = Peer::User(*uid);
                let awaited = self.awaited(viewer, &owner);
                let need = self.need(viewer, (&open, &programs), &owner, awaited);
                if let (Ok(need), Some(session)) = (&need, self.sessions.get(whom.token)) {
                    session.bucket.borrow_mut().charge_bytes(need.total());
                }
                match need {
                    Ok(need) if need.total() >= LARGE => {
                        let then = Then::Rings(open, programs);
                        return self.make(whom, Want::Rings(need), then);
                    }
                    Ok(need) => rings(need, &|| true)
                        .map(Some)
                        .map_err(|error| no_memory(need.total(), &error)),
                    Err(refusal) => Err(refusal),
                }
            }
        };
        let result = memory.and_then(|memory| {
            let grown = Grown::default();
            self.opened(whom, viewer, &open, programs, memory, grown)
        });
        self.tell_opened(whom, result)
    }

    /// Answers with an opened port.
    pub(super) fn tell_opened(
        &mut self,
        whom: Whom,
        result: Result<Opening, Refusal>,
    ) -> Result<(), Over> {
        let Opening { opened, fds, .. } = match result {
            Ok(opening) => opening,
            Err(refusal) => return self.sessions.answer(whom, Err(refusal)),
        };
        let opened = Message::Opened(opened);
        self.carry_on_with(whom, Step::Done(Ok(opened)), fds)
    }

    /// Bytes of memory for a port, if it may be beside what its owner waits for.
    fn need(
        &self,
        viewer: &Peer,
        (open, programs): (&Open, &Programs),
        owner: &Peer,
        awaited: (usize, u64),
    ) -> Result<Need, Refusal> {
        if !self.policy.is_operator(viewer) {
            self.hub.within_limits(open, owner, programs, awaited)?;
        }
        self.hub.need(open, owner, programs)
    }

    pub(super) fn bears(
        &mut self,
        viewer: &Peer,
        device: &str,
        port: Option<u32>,
        programs: &Programs,
    ) -> Result<(), Refusal> {
        if self.policy.is_operator(viewer) {
            return Ok(());
        }
        self.hub.bears(device, port, viewer, programs)
    }

    pub(super) fn opened(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        open: &Open,
        mut programs: Programs,
        memory: Option<OwnMemory>,
        grown: Grown,
    ) -> Result<Opening, Refusal> {
        // The grants may have changed while its filters were compiled and its rings were made.
        programs.granted = self.granted(viewer, open)?;
        let sight = programs.granted.sight.clone();
        let is_like = self.guard_in_group(viewer, open, sight)?.trim() == programs.sight.trim();
        if !is_like || sent_filter(&programs.granted.terms)? != programs.sends.0 {
            let what = "the grants changed while the port was opened; open it again";
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        programs.grant.clone_from(&programs.granted.join);
        // Others of its owner may have been opened while its rings were made.
        self.bears(viewer, &open.device, None, &programs)?;
        let opening = match viewer {
            Peer::User(uid) => {
                let owner = Peer::User(*uid);
                let windows = self.backends.windows_of(&owner);
                let need = self.need(viewer, (open, &programs), &owner, (0, windows))?;
                // What was asked for when it was made is what is asked for now.
                let memory = memory
                    .filter(|memory| memory.rings.shape == need.rings)
                    .ok_or_else(|| Refusal::new(code::INTERNAL, "no memory was made"))?;
                let session = self
                    .sessions
                    .get_mut(whom.token)
                    .filter(|_| open.shares_wake);
                let shared = session.as_ref().and_then(|session| session.bell.as_ref());
                let shared = shared.map(|bell| bell.of(open.place));
                let memory = Memory::Own(memory);
                let opening = self.hub.open(open, owner, programs, memory, shared)?;
                if let (Some(session), Some(bell)) = (session, &opening.bell) {
                    session.bell = Some(bell.clone());
                }
                opening
            }
            Peer::Vm(name) => {
                let owner = Peer::Vm(name.clone());
                self.hub.within_limits(open, &owner, &programs, (0, 0))?;
                let Some(vm) = self.vms.get_mut(name) else {
                    return Err(Refusal::new(code::NOT_FOUND, "the VM was detached"));
                };
                let (doorbell, bell, vector) = vm.bell(&self.bell);
                let memory = Memory::Pool {
                    region: &vm.region,
                    places: &mut vm.places,
                    grown,
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
        if let Some(session) = self.sessions.get_mut(whom.token) {
            session.ports.push((whom.app, opening.opened.port));
            if open.joins && matches!(viewer, Peer::User(_)) {
                // The memory of its home, if it becomes a member of a trust group.
                session.take_gifts(Gifts::OfMember);
            }
        }
        Ok(opening)
    }

    /// By which grants a viewer opens a port.
    fn granted(&self, viewer: &Peer, open: &Open) -> Result<Granted, Refusal> {
        let is_operator = self.policy.is_operator(viewer);
        if !open.program.is_empty() && !self.hub.twins.may_use(&open.program, viewer, is_operator) {
            return Err(no_program(&open.program));
        }
        if let Some(join) = self.joins(viewer, open)? {
            // It is given what is due to it, and no more.
            return Ok(Granted {
                join: Some(join),
                ..Granted::default()
            });
        }
        Ok(Granted {
            sight: self.guard(viewer, &open.device)?,
            terms: self.may_send(viewer, open)?,
            join: None,
        })
    }

    /// The obligatory filter of a viewer for a device; a source that it may not see is not there.
    fn guard(&self, viewer: &Peer, device: &str) -> Result<String, Refusal> {
        let unseen = || {
            let device = quoted(device);
            let what = format!("no source {device}; `vnplug list` shows the sources");
            Refusal::new(code::NOT_FOUND, what)
        };
        let Named { source, port, .. } = self.hub.find(device).map_err(|refusal| match viewer {
            _ if self.policy.is_operator(viewer) => refusal,
            _ => unseen(),
        })?;
        let name = &self.hub.sources()[source].name;
        let grants = self.vms.grants(viewer);
        match self.policy.sight_of(viewer, (name, port), &grants) {
            Sight::Through(filter) => Ok(filter),
            Sight::Nothing => Err(unseen()),
        }
    }

    /// What the grant says under which somebody takes part in a switch. `None`: it does not, or by the right
    /// to see the switch and to send through it.
    fn joins(&self, viewer: &Peer, open: &Open) -> Result<Option<String>, Refusal> {
        if !open.joins || self.policy.is_operator(viewer) {
            return Ok(None);
        }
        let Ok(named) = self.hub.find(&open.device) else {
            return Ok(None);
        };
        let name = &self.hub.sources()[named.source].name;
        if let Some(join) = self.policy.may_join(viewer, name) {
            return Ok(Some(join.settings.clone()));
        }
        // To whom it does not exist, this does not tell that it does.
        self.guard(viewer, &open.device)?;
        if self.policy.joiners(name).next().is_none() {
            return Ok(None);
        }
        let what = format!(
            "taking part in {name:?} needs a grant of its own: the operator gives it with --allow-join or \
             a [[join]]"
        );
        Err(Refusal::new(code::DENIED, what))
    }

    /// The terms on which a port may have the transmit ring that it asks for, if it asks for one.
    fn may_send(&self, viewer: &Peer, open: &Open) -> Result<String, Refusal> {
        if open.transmit_bytes == 0 {
            return Ok(String::new());
        }
        let named = self.hub.find(&open.device)?;
        let name = &self.hub.sources()[named.source].name;
        if let Some(terms) = self.policy.may_send(viewer, name) {
            return Ok(terms.to_owned());
        }
        let what = format!(
            "sending through {name:?} needs a grant of its own: the operator gives it with \
             `send = true` in an [[allow]] or with --allow-send"
        );
        Err(Refusal::new(code::DENIED, what))
    }

    fn link_type(&self, device: &str) -> u32 {
        self.hub
            .find(device)
            .map_or(1, |named| self.hub.sources()[named.source].link_type)
    }
}

/// The filter for what is sent, of the terms of a grant.
fn sent_filter(terms: &str) -> Result<String, Refusal> {
    let terms = terms.parse::<SendTerms>();
    // They were read when they were given.
    terms
        .map(|it| it.filter)
        .map_err(|what| Refusal::new(code::INTERNAL, what))
}
