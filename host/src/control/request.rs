//! What a client, an agent or an operator asks, and the answer.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use vnplug_ring::control::wire::{Header, Malformed};
use vnplug_ring::control::{Message, Role, VERSION, code};

use super::Control;
use super::channel::Attaching;
use super::session::Over;
use super::waiting::Then;
use crate::hub::policy::Viewer;
use crate::hub::{Refusal, Step};

/// What a request costs beyond its own token if the queues' threads have to answer it too.
const ASKS_QUEUES: f64 = 9.0;
/// So many rules that a request has a queue's thread touch cost as much as a request.
const RULES_AT_ONCE: f64 = 32.0;
/// The longest reason of a refusal in bytes, and as much as it quotes of what was sent.
const MAX_REASON: usize = 1024;
const MAX_QUOTED: usize = 200;

/// What a peer sent, as a refusal quotes it.
pub(super) fn quoted(text: &str) -> String {
    cut(format!("{:?}", cut(text.into(), MAX_QUOTED)), MAX_QUOTED)
}

/// At most so many bytes of a text, with a sign that there was more.
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
                #[cfg(test)]
                assert!(name != super::tests::BREAKS, "on purpose");
                // A second Hello on a channel: the agent or the guest was restarted.
                let stale = self.forget_ports(token, |_, _| true);
                if self.close_first(token, &viewer, stale, frame) {
                    return Ok(());
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
                    session.acknowledged(bytes as usize);
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
                let step = self
                    .owned(token, app, port)
                    .map(|()| self.hub.tune(port, tuning));
                self.carry_on((token, id, app), step)
            }
            Message::AddRules { .. }
            | Message::RemoveRule { .. }
            | Message::RuleDefault { .. }
            | Message::PurgeRules { .. }
            | Message::RuleStats { .. } => {
                let touched = self.touched_rules(&message);
                self.charge(token, ASKS_QUEUES + touched as f64 / RULES_AT_ONCE);
                let step = self.rules(token, app, &viewer, message);
                self.carry_on((token, id, app), step)
            }
            Message::Note { port, values } => {
                let noted = self.owned(token, app, port);
                let result = noted.and_then(|()| self.hub.note(port, values));
                self.answer(token, id, app, result.map(|()| (Message::Done, Vec::new())))
            }
            Message::Stats { port } => {
                self.charge(token, ASKS_QUEUES);
                let step = self.stats(token, app, &viewer, port);
                self.carry_on((token, id, app), step)
            }
            Message::Close { port } => {
                if let Err(refusal) = self.owned(token, app, port) {
                    return self.answer(token, id, app, Err(refusal));
                }
                self.forget_ports(token, |_, opened| opened == port);
                self.close_one((token, id, app), &viewer, port)
            }
            Message::AppGone if session.channel => {
                let ports = self.forget_ports(token, |opener, _| opener == app);
                if self.close_first(token, &viewer, ports, frame) {
                    return Ok(());
                }
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
                    Ok(Attaching::Waits(want, spec)) => {
                        return self.make(token, id, app, want, Then::Attach(spec));
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

    pub(super) fn answer(
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
            session.bucket.borrow_mut().charge(tokens);
        }
    }
    fn stats(&mut self, token: u64, app: u32, viewer: &Viewer, port: u32) -> Result<Step, Refusal> {
        if port != 0 {
            self.owned(token, app, port)?;
            return Ok(self.hub.port_counters(vec![port]));
        }
        if self.policy.is_operator(viewer) {
            let vms = self.vm_counters();
            return Ok(self.hub.counters(vms));
        }
        let ports = self.sessions.get(&token).into_iter();
        let ports = ports.flat_map(|session| &session.ports);
        let own = ports.filter(|(opener, _)| *opener == app);
        let own = own.map(|(_, port)| *port).collect();
        Ok(self.hub.port_counters(own))
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
            session.begin_anew();
        }
    }
}
