//! What an operator sees of a switch, and changes at run time.

use std::num::NonZeroU16;

use crate::board::Switchboard;
use crate::control::{Change, PortTold, Told};
use crate::forward::{MAX_PORTS, Number};
use crate::roster::{Holder, Roster, locked};
use crate::settings::{self, Address, PortSettings, Settings};
use crate::table::Limits;
use crate::uplink::UPLINK;

/// A switch, as an operator sees it.
#[derive(Debug, Clone)]
pub struct Shown {
    /// What was said of it.
    pub settings: Settings,
    /// What its configuration says of it.
    pub first: Settings,
    /// How many stations it knows at most, and for how long.
    pub limits: Limits,
    /// What became of all frames, by the counters' public names.
    pub counters: Vec<(String, u64)>,
    /// Its ports, in order.
    pub ports: Vec<ShownPort>,
    /// The stations that it knows, or a part of very many.
    pub stations: Vec<Station>,
    /// How many it knows in all.
    pub station_count: u64,
}

/// A port.
#[derive(Debug, Clone)]
pub struct ShownPort {
    /// Its number.
    pub number: Number,
    /// Whose it is; `None` if that has changed just now.
    pub holder: Option<Holder>,
    /// What was said of it.
    pub settings: PortSettings,
    /// The part of it that the grant says under which it joined; empty: it joined without one.
    pub granted: String,
    /// `up`; `down` by its settings; `shut` for a loop.
    pub state: &'static str,
    /// What went through it.
    pub counters: Vec<(&'static str, u64)>,
}

/// A station.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Station {
    /// Its address.
    pub address: Address,
    /// Its VLAN.
    pub vlan: u16,
    /// Where it is.
    pub port: Number,
    /// Seconds since it was heard.
    pub age_s: u32,
    /// It never moves: it is static, or its port is locked to it.
    pub is_static: bool,
}

impl Switchboard {
    /// Sets something of a port, or of the whole switch (`None`), now and for clients to come: `key=value`,
    /// several with blanks between them; `default` first for what a port was without any. Nothing is lost of
    /// what goes through other ports, and nothing is changed if one of them is wrong.
    ///
    /// # Errors
    /// What is possible.
    pub fn set(&self, port: Option<Number>, text: &str) -> Result<(), String> {
        let mut roster = locked(&self.roster);
        let Some(port) = port else {
            if settings::words(text).any(|word| word.starts_with("port.")) {
                return Err("what is for a port is set of that port".to_owned());
            }
            roster.settings.apply(text)?;
            let whole = Box::new(roster.settings.clone());
            self.line.send(Change::Whole(whole));
            return Ok(());
        };
        if usize::from(port) > MAX_PORTS {
            return Err(format!(
                "a port is a number from 0 (the host) to {MAX_PORTS}"
            ));
        }
        // What it is by the configuration.
        let first = roster.first.ports.get(&port);
        let first = first.unwrap_or(&roster.settings.default).clone();
        let mut new = roster.settings.of(port).clone();
        new.apply_over(text, &first)?;
        if roster.is_ring(port) && !new.wire.is_plain() {
            return Err(format!("port {port} {NOT_OF_RINGS}"));
        }
        if roster.is_ring(port) && new.gro > 0 && new.gro != roster.settings.of(port).gro {
            return Err(format!(
                "port {port} has rings, and its program merges what it wants: `vnplug nic --gro`"
            ));
        }
        let now = roster.settings.of(port);
        let is_uplink = roster.holder(port).is_some_and(|it| it.way == UPLINK);
        let merges = |it: &PortSettings| (it.gro > 0, it.expands_acks);
        if is_uplink && merges(&new) > merges(now) {
            return Err(format!("port {port} {NOT_OF_UPLINKS}"));
        }
        if roster.is_ring(port) && (new.cuts, new.sums) != (now.cuts, now.sums) {
            return Err(format!(
                "port {port} has rings, and its program says what it takes: `vnplug nic --segments wire`"
            ));
        }
        // When who has it under a grant is gone, this still holds.
        let default = roster.settings.default.clone();
        if let Some(granted) = roster.granted.get_mut(&port) {
            granted
                .before
                .get_or_insert(default)
                .apply_over(text, &first)?;
        }
        let new = match new == roster.settings.default {
            // Nothing is said of it any more, and the number is for anybody.
            true => {
                roster.settings.ports.remove(&port);
                None
            }
            false => {
                roster.settings.ports.insert(port, new.clone());
                Some(Box::new(new))
            }
        };
        self.line.send(Change::Settings(port, new));
        Ok(())
    }

    /// Whether its configuration could say this of it.
    ///
    /// # Errors
    /// What is not possible of an uplink.
    pub fn may_be_said(&self, first: &Settings) -> Result<(), String> {
        let roster = locked(&self.roster);
        let mut uplinks = roster.holders().filter(|(_, it)| it.way == UPLINK);
        let merges = |number: &Number| {
            let own = first.ports.get(number);
            own.is_some_and(|it| it.gro > 0 || it.expands_acks)
        };
        match uplinks.find(|(number, _)| merges(number)) {
            None => Ok(()),
            Some((number, _)) => Err(format!("port {number} {NOT_OF_UPLINKS}")),
        }
    }

    /// From now on this is what the configuration says of it. What was set at run time is undone, but for VLANs that were made
    /// on the console and for what grants say.
    pub fn say_anew(&self, first: Settings) {
        let mut roster = locked(&self.roster);
        if roster.first == first {
            return;
        }
        let mut settings = first.clone();
        settings.vlans.extend(&roster.settings.vlans);
        let now = roster.settings.clone();
        for (number, granted) in &mut roster.granted {
            granted.before = settings.ports.get(number).cloned();
            let mut own = settings.default.clone();
            // It was possible when the port joined.
            let applied = own.apply(&granted.text);
            let own = applied.map_or_else(|_| now.of(*number).clone(), |()| own);
            settings.ports.insert(*number, own);
        }
        (roster.first, roster.settings) = (first, settings);
        let whole = Box::new(roster.settings.clone());
        self.line.send(Change::Whole(whole));
    }

    /// The switch as it is; `None` if it does not answer.
    pub fn show(&self) -> Option<Shown> {
        Some(self.shown(&self.line.ask()?))
    }

    pub(crate) fn shown(&self, told: &Told) -> Shown {
        let roster = locked(&self.roster);
        let ports = told.ports.iter().map(|it| ShownPort {
            number: it.number,
            holder: roster.holder(it.number).cloned(),
            settings: roster.settings.of(it.number).clone(),
            granted: match roster.granted.get(&it.number) {
                Some(granted) => granted.text.clone(),
                None => String::new(),
            },
            state: it.state,
            counters: of_port(it),
        });
        let stations = told.stations.iter().map(|it| Station {
            address: it.key.address(),
            vlan: it.key.vlan(),
            port: it.port,
            age_s: it.age_s,
            is_static: it.is_pinned,
        });
        Shown {
            ports: ports.collect(),
            stations: stations.collect(),
            station_count: told.station_count,
            settings: roster.settings.clone(),
            first: roster.first.clone(),
            limits: told.limits,
            counters: told.counters.named(),
        }
    }

    /// Keeps a port's number for who asks for it.
    pub(crate) fn keep(&self, port: Number) {
        let mut roster = locked(&self.roster);
        let settings = roster.settings.of(port).clone();
        roster.settings.ports.insert(port, settings.clone());
        let change = Change::Settings(port, Some(Box::new(settings)));
        self.line.send(change);
    }

    /// Forgets what was said of a port: it is as others are.
    pub(crate) fn forget(&self, port: Number) {
        let mut roster = locked(&self.roster);
        roster.settings.ports.remove(&port);
        self.line.send(Change::Settings(port, None));
    }

    /// Asks who let a port in to close it.
    ///
    /// # Errors
    /// There is no such port, or it is closed where it was opened.
    pub fn close(&self, port: Number) -> Result<(), String> {
        let mut roster = locked(&self.roster);
        match roster.holder(port) {
            None => return Err(format!("there is no port {port}")),
            Some(holder) if holder.way == UPLINK => {
                return Err(format!(
                    "port {port} is an uplink: take it out of the configuration, or set link=down"
                ));
            }
            Some(_) if roster.is_ring(port) => {
                return Err(format!(
                    "port {port} has rings of a program: end that program, or set link=down"
                ));
            }
            Some(_) => {}
        }
        self.ask_to_close(&mut roster, port);
        Ok(())
    }

    /// Asks who let ports in to close those that are meant, of all that came by an entrance: which they are.
    pub fn close_where(
        &self,
        is_meant: impl Fn(NonZeroU16, &Holder) -> bool,
    ) -> Vec<(NonZeroU16, Holder)> {
        let mut roster = locked(&self.roster);
        let meant = roster.holders().filter_map(|(port, holder)| {
            let number = NonZeroU16::new(port)?;
            let came_in = holder.way != UPLINK && !roster.is_ring(port);
            (came_in && is_meant(number, holder)).then(|| (number, holder.clone()))
        });
        let meant: Vec<_> = meant.collect();
        for (port, _) in &meant {
            self.ask_to_close(&mut roster, port.get());
        }
        meant
    }

    /// With the lock: who takes the number again must not be closed.
    fn ask_to_close(&self, roster: &mut Roster, port: Number) {
        roster.close(port);
        self.line.send(Change::Close(port));
    }
}

/// What is not possible of an uplink.
pub(crate) const NOT_OF_UPLINKS: &str = "is an uplink, for which nothing is merged: a super-frame of segments longer than \
     its MTU would be lost behind it, without a count. What comes by it is merged for the ports that it goes to: set gro \
     there";
/// What is not possible of a port with rings.
pub(crate) const NOT_OF_RINGS: &str = "has rings, which delay and lose nothing: delay, jitter, loss and \
                                       rate are for ports of programs that have sockets";

fn of_port(it: &PortTold) -> Vec<(&'static str, u64)> {
    let counters = it.counters;
    let mut named = vec![
        ("in_frames", counters.in_frames),
        ("in_bytes", counters.in_bytes),
        ("acks_expanded", counters.acks_expanded),
    ];
    named.extend(it.refused.named());
    named.extend([
        ("out_frames", counters.out_frames),
        ("out_bytes", counters.out_bytes),
        ("out_merged", counters.out_merged),
        ("out_super_frames", counters.out_super_frames),
        ("out_dropped_full", counters.out_full),
        ("out_dropped_gone", counters.out_gone),
        ("out_dropped_long", counters.out_long),
        ("out_dropped_loss", counters.out_lost),
    ]);
    named
}
