//! Ports that take part in a switch.

use std::num::NonZeroU16;

use vnplug_os::privileges::user_name;
use vnplug_ring::control::{Open, code};
use vnplug_switch::Holder;

use super::plan::PortPlan;
use super::{Hub, Peer, PortRecord, Refusal};

impl Hub {
    /// Refuses to take part where that makes no sense.
    pub(super) fn may_take_part(
        &self,
        request: &Open,
        source: usize,
        queue: Option<usize>,
    ) -> Result<(), Refusal> {
        if !request.joins {
            return Ok(());
        }
        let source = &self.sources[source];
        let name = &source.name;
        let what = if source.board.is_none() {
            format!(
                "{name:?} ({}) is no switch; `vnplug list` shows which sources are",
                source.kind
            )
        } else if queue.is_some() {
            format!("a port takes part in the whole switch: open \"host:{name}\"")
        } else if !request.cluster.is_empty() || !request.group.is_empty() {
            "a port that takes part in a switch is in no cluster and no group".to_owned()
        } else if request.transmit_bytes == 0 {
            "a port that takes part in a switch sends, too: open it with a transmit ring".to_owned()
        } else {
            return Ok(());
        };
        Err(Refusal::new(code::INVALID, what))
    }

    /// Takes a port of the switch for a port that asks for one.
    pub(super) fn take_part(
        &self,
        plan: &PortPlan,
        request: &Open,
        owner: &Peer,
    ) -> Result<Option<NonZeroU16>, Refusal> {
        let board = self.sources[plan.source].board.as_ref();
        let Some(board) = board.filter(|_| request.joins) else {
            return Ok(None);
        };
        let us = rustix::process::geteuid().as_raw();
        let holder = Holder {
            owner: match owner {
                Peer::User(uid) => user_name(*uid),
                Peer::Vm(name) => format!("vm {name}"),
            },
            is_trusted: matches!(owner, Peer::User(uid) if *uid == 0 || *uid == us),
            way: "ring",
            description: request.label.chars().take(64).collect(),
        };
        let taken = board.join(holder);
        taken
            .map(Some)
            .map_err(|what| Refusal::new(code::LIMIT, what))
    }

    /// Frees a port's port of the switch, when nothing goes through its rings any more.
    pub(super) fn part_with(&self, record: &PortRecord) {
        let board = self.sources[record.source].board.as_ref();
        if let (Some(board), Some(member)) = (board, record.member) {
            board.leave(member);
        }
    }
}
