//! What a client, an agent or an operator asks, and the answer.

use std::collections::HashSet;

use vnplug_ring::control::program::MAX_VALUES;
use vnplug_ring::control::wire::{Header, Malformed};
use vnplug_ring::control::{Backend, Message, Programs, Role, VERSION, code};

use super::Control;
use super::channel::{Attaching, GREET_FIRST, MOVES};
use super::session::Over;
use super::waiting::{Then, Whom};
use crate::hub::policy::Sight;
use crate::hub::twin::no_program;
use crate::hub::{Peer, Refusal, Step};

/// What a request costs beyond its own token if the queues' threads have to answer it too.
const ASKS_QUEUES: f64 = 9.0;
/// How many rules that a request has a queue's thread touch cost as much as a request.
const RULES_AT_ONCE: f64 = 32.0;
/// How many values of a map cost as much as a request.
const VALUES_AT_ONCE: f64 = 1024.0;
/// As many bytes a refusal quotes of what was sent.
const MAX_QUOTED: usize = 200;

/// What a peer sent, as a refusal quotes it.
pub(super) fn quoted(text: &str) -> String {
    cut(format!("{:?}", cut(text.into(), MAX_QUOTED)), MAX_QUOTED)
}

/// At most `most_bytes` of a text, with a sign if there was more.
pub(super) fn cut(mut text: String, most_bytes: usize) -> String {
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
        let whom = Whom { token, id, app };
        let message = match Message::from_frame(frame) {
            Ok(message) => message,
            Err(malformed) => {
                let refusal = Refusal::new(code::PROTOCOL, malformed.to_string());
                return self.sessions.answer(whom, Err(refusal));
            }
        };
        let Some(session) = self.sessions.get(token) else {
            return Ok(());
        };
        let takes_one = matches!(message, Message::Adopt { .. } | Message::Direct(_));
        if session.gift.is_some() && !takes_one {
            return Err(Over::Misbehaved("a descriptor that no message takes"));
        }
        let viewer = session.viewer.clone();
        match message {
            Message::Hello { .. } => self.hello(whom, &viewer, message, frame),
            Message::Ack { bytes } if session.channel => self.acknowledged(token, bytes),
            _ if !session.greeted => {
                let refusal = Refusal::new(code::PROTOCOL, GREET_FIRST);
                self.sessions.answer(whom, Err(refusal))
            }
            Message::AppGone | Message::Kick(_) | Message::Release(_) if session.channel => {
                self.of_channel(whom, &viewer, message, frame)
            }
            Message::AttachVm(_)
            | Message::DetachVm { .. }
            | Message::HoldVm { .. }
            | Message::Adopt { .. } => self.of_operator(whom, &viewer, message),
            Message::Switch(request) => self.of_switch(whom, &viewer, &request),
            Message::Revoke(revoke) => self.of_revoke(whom, &viewer, &revoke),
            Message::Grants(request) => self.of_grants(whom, &viewer, request),
            Message::Sources(request) => self.of_sources(whom, &viewer, request),
            Message::Open(_) | Message::Backend(Backend::Connect(_))
                if self.vms.is_held(&viewer) =>
            {
                let refusal = Refusal::new(code::UNAVAILABLE, MOVES);
                self.sessions.answer(whom, Err(refusal))
            }
            Message::Backend(said) => self.of_backends(whom, &viewer, said),
            Message::Grow(said) => self.of_growth(whom, &viewer, said),
            Message::Programs(Programs::Change(change)) => {
                self.of_program_change(whom, &viewer, change)
            }
            message => self.of_reader(whom, &viewer, message),
        }
    }

    /// What readers ask.
    fn of_reader(&mut self, whom: Whom, viewer: &Peer, message: Message) -> Result<(), Over> {
        match message {
            Message::List => {
                self.sessions.charge(whom.token, ASKS_QUEUES);
                let grants = self.vms.grants(viewer);
                let sight = |source: &str, port| {
                    let sight = self.policy.sight_of(viewer, (source, port), &grants);
                    match self.policy.may_join(viewer, source) {
                        Some(_) if sight == Sight::Nothing && port.is_none() => {
                            Sight::Through(String::new())
                        }
                        _ => sight,
                    }
                };
                let devices = self.hub.devices(viewer, sight, &self.policy);
                let devices = Message::Devices(devices);
                self.sessions.answer(whom, Ok((devices, Vec::new())))
            }
            Message::Open(open) => self.open(whom, viewer, open),
            Message::Filter { port, filter } => self.filter(whom, viewer, port, filter),
            Message::Tune { port, tuning } => {
                self.sessions.charge(whom.token, ASKS_QUEUES);
                let owned = self.sessions.owned(whom, port);
                let step = owned.map(|()| self.hub.tune(port, tuning));
                self.carry_on(whom, step)
            }
            Message::Lend { port, to, first } => {
                self.sessions.charge(whom.token, ASKS_QUEUES);
                // Of this application, on this connection: nobody has another's packets sent.
                let owned = self.sessions.owned(whom, port);
                let owned = owned.and_then(|()| self.sessions.owned(whom, to));
                let step = owned.and_then(|()| self.hub.lend_port(port, to, first));
                self.carry_on(whom, step)
            }
            Message::Direct(request) => {
                let session = self.sessions.get_mut(whom.token);
                let home = session.and_then(|session| session.gift.take());
                let owned = self.sessions.owned(whom, request.port);
                let answer = owned.and_then(|()| self.hub.direct(&request, home));
                self.sessions.answer(whom, answer)
            }
            Message::AddRules { .. }
            | Message::RemoveRule { .. }
            | Message::RuleDefault { .. }
            | Message::PurgeRules { .. }
            | Message::RuleStats { .. } => {
                let touched = self.touched_rules(&message) as f64 / RULES_AT_ONCE;
                self.sessions.charge(whom.token, ASKS_QUEUES + touched);
                let step = self.rules(whom, viewer, message);
                self.carry_on(whom, step)
            }
            Message::Note { port, values } => {
                let owned = self.sessions.owned(whom, port);
                let noted = owned.and_then(|()| self.hub.note(port, values));
                self.done_if(whom, noted)
            }
            Message::Stats { port } => {
                self.sessions.charge(whom.token, ASKS_QUEUES);
                let step = self.stats(whom, viewer, port);
                self.carry_on(whom, step)
            }
            Message::Programs(asked) => {
                if let Programs::Read { count, .. } = &asked {
                    let looked = f64::from(*count).min(MAX_VALUES as f64) / VALUES_AT_ONCE;
                    self.sessions.charge(whom.token, looked);
                } else {
                    // It asks the kernel about each map.
                    self.sessions.charge(whom.token, ASKS_QUEUES);
                }
                let answer = self.of_programs(viewer, asked);
                let answer = answer.map(|it| (Message::Programs(it), Vec::new()));
                self.sessions.answer(whom, answer)
            }
            Message::Close { port } => {
                if let Err(refusal) = self.sessions.owned(whom, port) {
                    return self.sessions.answer(whom, Err(refusal));
                }
                self.sessions
                    .forget_ports(whom.token, |_, opened| opened == port);
                self.close_one(whom, viewer, port)
            }
            other => self.is_no_request(whom, &other),
        }
    }

    /// What a VM's agent says, of its applications and of its pool.
    fn of_channel(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        message: Message,
        frame: &(Header, Vec<u8>),
    ) -> Result<(), Over> {
        match message {
            Message::AppGone => {
                self.backends_gone(whom.token, Some(whom.app));
                let gone = |opener, _| opener == whom.app;
                let ports = self.sessions.forget_ports(whom.token, gone);
                if self.close_first(whom.token, viewer, ports, frame) {
                    return Ok(());
                }
                self.done_if(whom, Ok(()))
            }
            Message::Kick(ports) => {
                let session = self.sessions.get(whom.token).into_iter();
                let own = session.flat_map(|session| &session.ports);
                let own: HashSet<u32> = own.map(|(_, port)| *port).collect();
                self.hub
                    .kick(ports.into_iter().filter(|port| own.contains(port)));
                Ok(())
            }
            Message::Release(places) => {
                if let Some(vm) = self.vms.of_mut(viewer) {
                    vm.places.release(&places);
                }
                self.release_devices(viewer, &places);
                self.done_if(whom, Ok(()))
            }
            other => self.is_no_request(whom, &other),
        }
    }

    /// What operators ask about VMs.
    fn of_operator(&mut self, whom: Whom, viewer: &Peer, message: Message) -> Result<(), Over> {
        if !self.policy.is_operator(viewer) {
            let what = "only root or the daemon's own user may attach and detach VMs";
            return self.done_if(whom, Err(Refusal::new(code::DENIED, what)));
        }
        match message {
            Message::AttachVm(spec) => match self.attach_vm(whom.token, spec) {
                Ok(Attaching::Waits(want, spec)) => self.make(whom, want, Then::Attach(spec)),
                Ok(Attaching::Done(ready)) => self.sessions.answer(whom, Ok((ready, Vec::new()))),
                Err(refusal) => self.sessions.answer(whom, Err(refusal)),
            },
            Message::DetachVm { name, owner } => {
                let result = self.detach_own_vm(&name, owner);
                self.done_if(whom, result)
            }
            Message::HoldVm { name, owner, held } => {
                let ready = self.hold_vm(whom.token, (&name, owner), held);
                let ready = ready.map(|ready| (Message::VmReady(ready), Vec::new()));
                self.sessions.answer(whom, ready)
            }
            Message::Adopt { name } => {
                let session = self.sessions.get_mut(whom.token);
                let gift = session.and_then(|session| session.gift.take());
                let result = self.adopt(whom.token, &name, gift);
                self.done_if(whom, result)
            }
            other => self.is_no_request(whom, &other),
        }
    }

    /// Answers that it is done, or why not.
    pub(super) fn done_if(&mut self, whom: Whom, result: Result<(), Refusal>) -> Result<(), Over> {
        let answer = result.map(|()| (Message::Done, Vec::new()));
        self.sessions.answer(whom, answer)
    }

    pub(super) fn is_no_request(&mut self, whom: Whom, message: &Message) -> Result<(), Over> {
        let what = format!("message {} is not a request to a daemon", message.kind());
        self.done_if(whom, Err(Refusal::new(code::PROTOCOL, what)))
    }

    /// Tells a peer that it does not speak the protocol, and ends the connection.
    pub(super) fn misbehaved(&mut self, token: u64, malformed: &Malformed) {
        let refusal = Refusal::new(code::PROTOCOL, malformed.to_string());
        let (id, app) = (0, 0);
        // Told as far as it listens; it is cut off in any case.
        let _ = self.sessions.answer(Whom { token, id, app }, Err(refusal));
        self.end(token, &Over::Misbehaved("it does not speak the protocol"));
    }

    /// The operator's programs, as far as this viewer may use them.
    fn of_programs(&self, viewer: &Peer, asked: Programs) -> Result<Programs, Refusal> {
        let is_operator = self.policy.is_operator(viewer);
        match asked {
            Programs::List => Ok(Programs::All(self.hub.twins(viewer, is_operator))),
            Programs::Read {
                program,
                map,
                first,
                count,
            } => {
                if !self.hub.twins.may_use(&program, viewer, is_operator) {
                    return Err(no_program(&program));
                }
                let values = self.hub.twin_values((&program, &map), (first, count))?;
                let (value_bytes, entries, bytes) = values;
                Ok(Programs::Values {
                    value_bytes,
                    entries,
                    bytes,
                })
            }
            Programs::All(_) | Programs::Values { .. } | Programs::Change(_) => {
                let what = "an answer is no request";
                Err(Refusal::new(code::PROTOCOL, what))
            }
        }
    }

    fn stats(&mut self, whom: Whom, viewer: &Peer, port: u32) -> Result<Step, Refusal> {
        if port != 0 {
            self.sessions.owned(whom, port)?;
            return Ok(self.hub.port_counters(vec![port]));
        }
        if self.policy.may_observe(viewer) {
            let mut more = self.vms.counters(&self.sessions, |vm| self.grown(vm));
            more.extend(self.backends.counters());
            return Ok(self.hub.counters(more));
        }
        Ok(self.hub.port_counters(self.sessions.ports_of(whom)))
    }

    fn acknowledged(&mut self, token: u64, bytes: u32) -> Result<(), Over> {
        match self.sessions.get_mut(token) {
            Some(session) => {
                session.acknowledged(bytes as usize);
                session.flush()
            }
            None => Ok(()),
        }
    }

    fn hello(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        hello: Message,
        frame: &(Header, Vec<u8>),
    ) -> Result<(), Over> {
        let Message::Hello {
            min_version,
            max_version,
            role,
            name,
            live,
            vectors,
            locked_down,
        } = hello
        else {
            return self.is_no_request(whom, &hello);
        };
        if !(min_version..=max_version).contains(&VERSION) {
            let what = format!(
                "this daemon speaks protocol version {VERSION}, the client {min_version} to \
                 {max_version}: update one of them"
            );
            return self.done_if(whom, Err(Refusal::new(code::PROTOCOL, what)));
        }
        #[cfg(test)]
        assert!(name != super::tests::BREAKS, "on purpose");
        // A second Hello on a channel: the agent or the guest was restarted.
        let stale = self.sessions.forget_ports(whom.token, |_, _| true);
        self.backends_gone(whom.token, None);
        if self.close_first(whom.token, viewer, stale, frame) {
            return Ok(());
        }
        log::debug!(target: "control", "{viewer:?} is {:?}", name.escape_debug().to_string());
        if role == Role::Agent
            && let Some(vm) = self.vms.of_mut(viewer)
        {
            vm.sign();
            vm.places.release_all();
            vm.places.linger(&live);
            vm.heard = vectors;
            self.vms.hear_locked_down(viewer, locked_down);
            self.name_devices(viewer, &live);
        }
        self.sessions.greeted(whom.token);
        let welcome = Message::Welcome {
            version: VERSION,
            server: format!("vnplugd {}", env!("CARGO_PKG_VERSION")),
            pool_id: self.vms.of(viewer).map_or(0, |vm| vm.pool_id),
        };
        self.sessions.answer(whom, Ok((welcome, Vec::new())))
    }
}
