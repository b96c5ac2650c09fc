//! What waits for which connection, and whose turn it is.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use vnplug_ring::control::Backend;

use super::Registry;
use crate::control::backends::channel::Side;

impl Registry {
    /// What goes to a connection next, and for which of its applications.
    pub(in super::super) fn next(&mut self, token: u64) -> Option<(u32, Backend, Option<OwnedFd>)> {
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
    pub(in super::super) fn later(&mut self, token: u64) {
        self.fresh.push(token);
    }

    /// Whether somebody is to have a turn.
    pub(in super::super) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Connections for which something began to wait, each once.
    pub(in super::super) fn take_fresh(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.fresh)
    }

    /// Whether something waits for a connection.
    pub(in super::super) fn waits_for(&self, token: u64) -> bool {
        self.ready.contains_key(&token)
    }

    pub(super) fn is_ready(&mut self, number: u32) {
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
}
