//! How a channel ends: an end hangs up or is gone, or an operator takes it from both.

use vnplug_ring::control::{REVOKED_CHANNEL, code};

use super::{Registry, There};
use crate::control::backends::channel::{Channel, Side};
use crate::control::request::{cut, quoted};
use crate::hub::policy::Policy;
use crate::hub::{BackendGrant, Peer, Refusal};

impl Registry {
    /// An end wants no more of a channel.
    pub(super) fn hang_up(&mut self, number: u32, by: Side, reason: &str) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.hang_up(by, &cut(reason.to_owned(), 256));
        }
        self.is_ready(number);
        self.forget_if_over(number);
    }

    /// Ends channels of a back-end for both sides, which are told: their numbers. What waits in them is said to
    /// nobody any more.
    pub(in super::super) fn revoke(
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
    pub(in super::super) fn set_grants(&mut self, grants: Vec<BackendGrant>) {
        self.grants = grants;
    }

    /// Connections of back-ends that may not be what they are, with their names and whose they are.
    pub(in super::super) fn not_permitted(&self, policy: &Policy) -> Vec<(u64, String, Peer)> {
        let may = |id: u32, there: &There| {
            let granted = self.grant(id).filter(|grant| grant.name == there.name);
            granted.is_some_and(|grant| policy.may_serve(&there.viewer, grant))
        };
        let gone = self.there.iter().filter(|(id, there)| !may(**id, there));
        gone.map(|(_, there)| (there.token, there.name.clone(), there.viewer.clone()))
            .collect()
    }

    /// Ends channels whose programs may not have them any more, as [`revoke`](Self::revoke) does: their numbers.
    pub(in super::super) fn revoke_not_permitted(&mut self, policy: &Policy) -> Vec<u32> {
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
    pub(in super::super) fn gone(
        &mut self,
        token: u64,
        app: Option<u32>,
        reason: &str,
    ) -> Vec<u32> {
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

    pub(super) fn forget_if_over(&mut self, number: u32) {
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
}
