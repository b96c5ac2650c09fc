//! Ports that take part in a switch, and what operators ask of it.

use std::num::NonZeroU16;
use std::time::Instant;

use vnplug_os::privileges::user_name;
use vnplug_ring::control::{Counted, Device, HOST_PREFIX, Message, Open, Segments, Whose, code};
use vnplug_switch::forward::MAX_PORTS;
use vnplug_switch::{Asked, Holder, Settling, Shown, Switchboard};

use super::asking::Asks;
use super::plan::PortPlan;
use super::policy::{Policy, Sight, port_number, user_grant};
use super::{Hub, Peer, PortRecord, Refusal, Source, Step};

impl Source {
    /// What it is, for people; a switch's entrances come and go.
    pub(crate) fn about(&self) -> String {
        let mut about = self.description.clone();
        for (_, uplink) in self.board.iter().flat_map(Switchboard::uplinks) {
            about += &format!(", uplink {uplink}");
        }
        for (way, path) in self.board.iter().flat_map(Switchboard::entrances) {
            about += &format!(", {way} at {}", path.display());
        }
        about
    }
}

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
        grant: Option<&str>,
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
        // Who comes again after a restart has its number again, unless somebody was faster.
        let is_free = |port: &NonZeroU16| !request.reopened || !board.is_taken(*port);
        let wanted = plan.port.filter(is_free);
        let taken = board.join(holder, wanted, grant);
        taken
            .map(Some)
            .map_err(|what| Refusal::new(code::LIMIT, what))
    }

    /// What a port is given super-frames as: what it asked for, unless its settings on the switch
    /// (`tso=off`, `csum=off`) leave nothing to it.
    pub(super) fn segments_of(
        &self,
        plan: &PortPlan,
        request: &Open,
        member: Option<NonZeroU16>,
    ) -> Segments {
        let board = self.sources[plan.source].board.as_ref();
        match board.zip(member) {
            Some((board, member)) if board.is_cut_for(member) => Segments::Wire,
            _ => request.segments,
        }
    }

    /// Closes a port of a switch that came by an entrance: goes on when it is closed.
    ///
    /// # Errors
    /// There is no such port, or it is closed where it was opened.
    pub(crate) fn close_port(&self, switch: &str, port: NonZeroU16) -> Result<Step, Refusal> {
        let (source, board) = self.switch(switch)?;
        let closed = board.close(port.get());
        closed.map_err(|what| Refusal::new(code::INVALID, what))?;
        let closing = Expelled(vec![(source.name.clone(), board.settle())]);
        Ok(closing.then(Step::Done(Ok(Message::Done))))
    }

    /// Closes the ports of switches that came by an entrance, and that an operator means: the switches that have to do it.
    pub(crate) fn close_entered(&self, whose: &Whose) -> Expelled {
        match whose {
            Whose::User(uid) => {
                let owner = user_name(*uid);
                let switches = self.switches();
                let closing = switches.filter_map(|(source, board)| {
                    close_entered(source, board, |_, holder| holder.owner == owner)
                });
                Expelled(closing.collect())
            }
            Whose::Source(name) => {
                let named = self.find(name).ok();
                let closing = named.and_then(|named| {
                    let source = &self.sources[named.source];
                    let is_meant =
                        |port: NonZeroU16, _: &Holder| named.port.is_none_or(|only| port == only);
                    close_entered(source, source.board.as_ref()?, is_meant)
                });
                Expelled(closing.into_iter().collect())
            }
            Whose::Port(_) | Whose::Vm(_) | Whose::Group(_) | Whose::Channels { .. } => {
                Expelled::default()
            }
        }
    }

    /// Lets users join switches by other grants. Those that are there by an entrance, and would not be let in so
    /// again, are closed: the switches that have to do it.
    pub(crate) fn admit_by(&self, before: &Policy, after: &Policy) -> Expelled {
        let mut closing = Expelled::default();
        for (source, board) in self.switches() {
            let grants = |policy: &Policy| {
                let joiners = policy.joiners(&source.name);
                let grants: Vec<_> = joiners.filter_map(user_grant).collect();
                let is_open = policy.joiners(&source.name).next().is_none();
                (!is_open).then_some(grants)
            };
            let (before, after) = (grants(before), grants(after));
            if before == after {
                continue;
            }
            // That nobody may any more is told too: an entrance is not open to all because of that.
            board.grant(after.clone().unwrap_or_default());
            let settings = |grants: &Option<Vec<vnplug_switch::Grant>>, owner: &str| {
                let grants = grants.as_ref()?;
                let own = grants.iter().find(|it| user_name(it.uid) == owner);
                Some(own.map(|it| it.settings.clone()))
            };
            closing.0.extend(close_entered(source, board, |_, holder| {
                let owner = &holder.owner;
                let now = settings(&after, owner).unwrap_or_default();
                !holder.is_trusted && (now.is_none() || Some(now) != settings(&before, owner))
            }));
        }
        closing
    }

    /// Frees a port's port of the switch, when nothing goes through its rings any more.
    pub(super) fn part_with(&self, record: &PortRecord) {
        let board = self.sources[record.source].board.as_ref();
        if let (Some(board), Some(member)) = (board, record.member) {
            board.leave(member);
        }
    }

    /// Tells a switch that a port of it is read by itself, or is not any more.
    pub(super) fn reads(&self, record: &PortRecord, comes: bool) {
        let board = self.sources[record.source].board.as_ref();
        if let (Some(board), Some(only)) = (board, record.only) {
            board.read(only, comes);
        }
    }

    /// The port of a switch that a client names: `port3` or `3`.
    pub(super) fn switch_port(&self, source: usize, port: &str) -> Result<NonZeroU16, String> {
        let source = &self.sources[source];
        let name = &source.name;
        if source.board.is_none() {
            let kind = source.kind;
            return Err(format!("{name:?} ({kind}) is no switch, and has no ports"));
        }
        let number = port_number(port).filter(|it| usize::from(it.get()) <= MAX_PORTS);
        number.ok_or_else(|| format!("write {name}/port1 to {name}/port{MAX_PORTS}"))
    }

    /// What clients call a source, or one port of it.
    pub(super) fn device_name(&self, source: usize, port: Option<NonZeroU16>) -> String {
        let name = &self.sources[source].name;
        match port {
            None => format!("{HOST_PREFIX}{name}"),
            Some(port) => format!("{HOST_PREFIX}{name}/port{port}"),
        }
    }

    /// The ports of a switch that a viewer may see: those that are taken, and those that are read.
    pub(super) fn port_devices(
        &self,
        number: usize,
        sight: impl Fn(NonZeroU16) -> Sight,
        is_operator: bool,
    ) -> Vec<Device> {
        let source = &self.sources[number];
        let Some(board) = &source.board else {
            return Vec::new();
        };
        let taken = board.holders().into_iter();
        let mut all: Vec<_> = taken.map(|(port, holder)| (port, Some(holder))).collect();
        let readers = |port| {
            let ports = self.ports.values();
            let own = ports.filter(move |it| it.source == number && it.only == Some(port));
            own.count() as u32
        };
        let read = self.ports.values().filter(|it| it.source == number);
        for port in read.filter_map(|it| it.only) {
            if !all.iter().any(|(other, _)| *other == port) {
                all.push((port, None));
            }
        }
        all.retain(|(port, _)| sight(*port) != Sight::Nothing);
        all.sort_by_key(|(port, _)| *port);
        all.truncate(MAX_PORT_DEVICES);
        let device = |(port, holder): (NonZeroU16, Option<Holder>)| Device {
            name: self.device_name(number, Some(port)),
            kind: "switch port".into(),
            state: if holder.is_some() { "up" } else { "waiting" }.into(),
            description: match holder {
                None => String::new(),
                Some(it) if is_operator => about(&it),
                Some(it) => it.way.to_owned(),
            },
            queues: source.workers.len() as u32,
            ports: if is_operator { readers(port) } else { 0 },
            link_type: source.link_type,
            ..Device::default()
        };
        all.into_iter().map(device).collect()
    }

    /// The switch of this name, with or without `host:`.
    pub(crate) fn switch(&self, name: &str) -> Result<(&Source, &Switchboard), Refusal> {
        let name = name.strip_prefix(HOST_PREFIX).unwrap_or(name);
        let found = self.sources.iter().find(|source| source.name == name);
        let found = found.and_then(|source| Some((source, source.board.as_ref()?)));
        found.ok_or_else(|| {
            let what = format!("no switch {name:?}; `vnplug switch list` shows the switches");
            Refusal::new(code::NOT_FOUND, what)
        })
    }

    /// All switches.
    pub(crate) fn switches(&self) -> impl Iterator<Item = (&Source, &Switchboard)> {
        let sources = self.sources.iter();
        sources.filter_map(|source| Some((source, source.board.as_ref()?)))
    }

    /// The port of a program that takes part in a switch as this port, and whose it is.
    pub(crate) fn member(&self, switch: &str, port: NonZeroU16) -> Option<(u32, Peer)> {
        let is_it = |record: &&PortRecord| {
            record.member == Some(port) && self.sources[record.source].name == switch
        };
        let mut ports = self.ports.iter();
        let (id, record) = ports.find(|(_, record)| is_it(record))?;
        Some((*id, record.owner.clone()))
    }
}

/// Closes those ports of a switch that did not come by rings.
fn close_entered(
    source: &Source,
    board: &Switchboard,
    is_meant: impl Fn(NonZeroU16, &Holder) -> bool,
) -> Option<(String, Settling)> {
    let closed = board.close_where(is_meant);
    for (port, holder) in &closed {
        log::info!(target: "control", "an operator closes port {port} of {}", holder.owner);
    }
    (!closed.is_empty()).then(|| (source.name.clone(), board.settle()))
}

/// Switches that were told to close ports.
#[derive(Default)]
pub(crate) struct Expelled(Vec<(String, Settling)>);

impl Expelled {
    /// Goes on with a request when the switches have closed the ports.
    pub(crate) fn then(self, step: Step) -> Step {
        match self.0.is_empty() {
            true => step,
            false => Step::Asks(Box::new(Expelling {
                switches: self.0,
                then: step,
            })),
        }
    }
}

/// A request that goes on when switches have closed ports.
struct Expelling {
    switches: Vec<(String, Settling)>,
    then: Step,
}

impl Asks for Expelling {
    fn is_over(&mut self, until: Instant) -> bool {
        let over = self.switches.iter_mut().map(|(_, it)| it.is_over(until));
        over.fold(true, |all, over| all & over)
    }

    fn go_on(self: Box<Self>, _: &mut Hub) -> Step {
        let silent = self.switches.into_iter().find(|(_, it)| !it.is_done());
        match silent {
            None => self.then,
            Some((name, _)) => {
                let what = format!(
                    "switch {name:?} does not answer; what was asked for is done when it goes on"
                );
                // The rest is done in any case.
                Step::finally(self.then, Err(Refusal::new(code::UNAVAILABLE, what)))
            }
        }
    }
}

/// Asks switches how they are; `tell` says it of each.
pub(crate) fn show(
    boards: Vec<(String, Switchboard)>,
    tell: impl Fn(&str, Shown) -> Vec<Counted> + 'static,
) -> Step {
    let ask = |(name, board): (String, Switchboard)| (name, board.ask());
    Step::Asks(Box::new(Showing {
        asked: boards.into_iter().map(ask).collect(),
        tell,
    }))
}

/// Switches that were asked how they are.
struct Showing<F> {
    asked: Vec<(String, Asked)>,
    tell: F,
}

impl<F: Fn(&str, Shown) -> Vec<Counted>> Asks for Showing<F> {
    fn is_over(&mut self, until: Instant) -> bool {
        let over = self.asked.iter_mut().map(|(_, asked)| asked.is_over(until));
        over.fold(true, |all, over| all & over)
    }

    fn go_on(self: Box<Self>, _: &mut Hub) -> Step {
        let mut all = Vec::new();
        for (name, asked) in self.asked {
            let Some(shown) = asked.take() else {
                let what = format!("switch {name:?} does not answer");
                return Step::Done(Err(Refusal::new(code::UNAVAILABLE, what)));
            };
            all.extend((self.tell)(&name, shown));
        }
        Step::Done(Ok(Message::Counters(all)))
    }
}

/// Who has a port, for people.
fn about(holder: &Holder) -> String {
    let Holder {
        owner,
        way,
        description,
        ..
    } = holder;
    match description.is_empty() {
        true => format!("{way}, {owner}"),
        false => format!("{way}, {owner}: {description}"),
    }
}

/// The most ports of one switch that are listed as devices; all can be opened.
const MAX_PORT_DEVICES: usize = 64;
