//! What an operator may say of a switch and of its ports, as `key=value`.
//!
//! The default of everything is transparency: a switch without settings changes no frame, and none is lost.
//! The words are the same in the configuration, on the console and at run time.

mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};

use crate::forward::{MAX_PORTS, Number};
pub use values::{Loss, VlanSet, rate};
use values::{choice, duration, mac, mac_text, parts, per_second, segments, yes};
pub use vnplug_frame::lock::{Address, Networks};

/// What is said of one port. `Default` is a port of a transparent switch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortSettings {
    /// The VLAN of frames without a tag, both ways; 0 is that of transparent ports.
    pub untagged: Option<u16>,
    /// The VLANs whose frames come and go with a tag.
    pub tagged: VlanSet,
    /// It reaches only ports that are not isolated.
    pub is_isolated: bool,
    /// Whose frames it may send.
    pub lock: Lock,
    /// From which networks they may say that they come; none: from any.
    pub networks: Networks,
    /// Addresses that the switch knows at it, if not as many as at others.
    pub stations: Option<u32>,
    /// Frames for many that it may send in a second, if not as many as others; 0: any number.
    pub storm: Option<u32>,
    /// Bits in a second that it may send; 0: any number.
    pub police: u64,
    /// No address is learned at it.
    pub is_deaf: bool,
    /// It is not given frames for stations that are not known.
    pub is_spared: bool,
    /// Its link is down: nothing enters or leaves.
    pub is_down: bool,
    /// What the wire to its far end is like.
    pub wire: Wire,
    /// Super-frames are cut for it, and its card offers to take none.
    pub cuts: bool,
    /// The same of frames without their checksums, and so of super-frames.
    pub sums: bool,
    /// TCP segments for it that are merged into one frame at most; 0: none are.
    pub gro: u8,
    /// One ACK for them becomes as many as single segments would have had.
    pub expands_acks: bool,
}

/// Whose frames a port may send.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Lock {
    /// Anybody's.
    #[default]
    No,
    /// Those of the station that is heard first.
    First,
    /// These stations'.
    To(Vec<Address>),
}

/// A wire that is slow or bad on purpose, from the switch to the port's far end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wire {
    /// How long each frame takes.
    pub delay_us: u32,
    /// How much longer one may take.
    pub jitter_us: u32,
    /// Frames may overtake others, for jitter.
    pub reorders: bool,
    /// How many are lost.
    pub loss: Loss,
    /// How many bits a second it carries; 0: any number.
    pub bits_per_s: u64,
    /// Where the random numbers begin, if always at the same place.
    pub seed: Option<u64>,
}

impl Wire {
    /// Whether it does anything to a frame.
    pub fn is_plain(&self) -> bool {
        let Self {
            delay_us,
            jitter_us,
            loss,
            bits_per_s,
            ..
        } = *self;
        delay_us == 0 && jitter_us == 0 && loss == Loss::default() && bits_per_s == 0
    }
}

/// What is possible of a port.
const PORT_KEYS: &str = "vlan=ID, trunk=IDs, native=ID, isolated=yes, lock=MAC or first, ip=NETWORK, stations=N, \
                         storm=N/s, police=BITS, learn=no, flood=no, delay=TIME, jitter=TIME, reorder=yes, loss=PERCENT, \
                         rate=BITS, seed=N, link=down, tso=off, csum=off, gro=SEGMENTS, acks=expand";

impl PortSettings {
    /// Sets one thing; [`settle`](Self::settle) comes after the last one.
    ///
    /// # Errors
    /// What is possible.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let none = matches!(value, "no" | "none" | "");
        match key {
            "vlan" | "native" if none => self.untagged = None,
            "vlan" | "native" => {
                let id = value.parse().ok().filter(|id| *id < VLANS);
                self.untagged = Some(id.ok_or_else(|| {
                    format!("{key} is a VLAN from 1 to 4094, or no, not {value:?}")
                })?);
            }
            "trunk" => self.tagged = value.parse()?,
            "isolated" => self.is_isolated = yes(key, value)?,
            "lock" if none => self.lock = Lock::No,
            "lock" if value == "first" => self.lock = Lock::First,
            "lock" => {
                let all: Result<Vec<_>, _> = parts(value).map(mac).collect();
                let all = all?;
                if all.is_empty() || all.len() > MAX_LOCKS {
                    return Err(format!("lock is no, first, or 1 to {MAX_LOCKS} addresses"));
                }
                self.lock = Lock::To(all);
            }
            "ip" => self.networks = value.parse()?,
            "stations" if none => self.stations = None,
            "stations" => {
                let most = value.parse();
                let bad = |_| format!("stations is a number of addresses, or no, not {value:?}");
                self.stations = Some(most.map_err(bad)?);
            }
            "storm" if value == "default" => self.storm = None,
            "storm" => self.storm = Some(per_second(key, value)?),
            "police" => self.police = rate(key, value)?,
            "learn" => self.is_deaf = !yes(key, value)?,
            "flood" => self.is_spared = !yes(key, value)?,
            "link" => self.is_down = choice(key, value, ["up", "down"])? == "down",
            "tso" => self.cuts = choice(key, value, ["on", "off"])? == "off",
            "csum" => self.sums = choice(key, value, ["on", "off"])? == "off",
            "gro" => self.gro = segments(key, value)?,
            "acks" => self.expands_acks = choice(key, value, ["as-is", "expand"])? == "expand",
            "delay" => self.wire.delay_us = duration(key, value)?,
            "jitter" => self.wire.jitter_us = duration(key, value)?,
            "reorder" => self.wire.reorders = yes(key, value)?,
            "loss" => self.wire.loss = value.parse()?,
            "rate" => self.wire.bits_per_s = rate(key, value)?,
            "seed" if none => self.wire.seed = None,
            "seed" => {
                let seed = value.parse();
                self.wire.seed =
                    Some(seed.map_err(|_| format!("seed is a number, not {value:?}"))?);
            }
            _ => return Err(format!("a port has no {key:?}: there are {PORT_KEYS}")),
        }
        Ok(())
    }

    /// Ends a series of [`set`](Self::set): VLAN 0 of a port without a trunk is what no VLAN is. NB: not
    /// earlier, for the trunk may be said behind its native VLAN.
    pub fn settle(&mut self) {
        if self.tagged.is_empty() && self.untagged == Some(0) {
            self.untagged = None;
        }
    }

    /// Sets several things: `key=value` with blanks or commas between them, and `default` for what it was
    /// without any. Nothing is set if one of them is wrong.
    ///
    /// # Errors
    /// What is possible.
    pub fn apply(&mut self, text: &str) -> Result<(), String> {
        self.apply_over(text, &Self::default())
    }

    /// As [`apply`](Self::apply); without any it was like `default`.
    pub(crate) fn apply_over(&mut self, text: &str, default: &Self) -> Result<(), String> {
        let mut new = self.clone();
        for word in words(text) {
            match word.split_once('=') {
                None if word == "default" => new = default.clone(),
                None => return Err(format!("{word:?} is not KEY=VALUE: there are {PORT_KEYS}")),
                Some((key, value)) => new.set(key, value)?,
            }
        }
        new.settle();
        *self = new;
        Ok(())
    }

    /// Whether frames pass unchanged, whatever their tags.
    pub fn is_transparent(&self) -> bool {
        self.untagged.is_none() && self.tagged.is_empty()
    }

    /// What differs from the default.
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let mut pairs = Vec::new();
        let mut say = |is: bool, key, value: String| {
            if is {
                pairs.push((key, value));
            }
        };
        let Self {
            untagged,
            tagged,
            is_isolated,
            lock,
            networks,
            stations,
            storm,
            police,
            is_deaf,
            is_spared,
            is_down,
            wire,
            cuts,
            sums,
            gro,
            expands_acks,
        } = self;
        let key = if tagged.is_empty() { "vlan" } else { "native" };
        say(!tagged.is_empty(), "trunk", tagged.to_string());
        say(
            untagged.is_some(),
            key,
            untagged.unwrap_or_default().to_string(),
        );
        let yes = || "yes".to_owned();
        let no = || "no".to_owned();
        say(*is_isolated, "isolated", yes());
        match lock {
            Lock::No => {}
            Lock::First => say(true, "lock", "first".into()),
            Lock::To(all) => {
                let all: Vec<_> = all.iter().copied().map(mac_text).collect();
                say(true, "lock", all.join("+"));
            }
        }
        say(!networks.is_empty(), "ip", networks.to_string());
        let most = stations.unwrap_or_default();
        say(stations.is_some(), "stations", most.to_string());
        say(storm.is_some(), "storm", storm_text(*storm));
        say(*police > 0, "police", police.to_string());
        say(*is_deaf, "learn", no());
        say(*is_spared, "flood", no());
        let Wire {
            delay_us,
            jitter_us,
            reorders,
            loss,
            bits_per_s,
            seed,
        } = *wire;
        say(delay_us > 0, "delay", format!("{delay_us}us"));
        say(jitter_us > 0, "jitter", format!("{jitter_us}us"));
        say(reorders, "reorder", yes());
        say(loss != Loss::default(), "loss", loss.to_string());
        say(bits_per_s > 0, "rate", bits_per_s.to_string());
        let begin = seed.unwrap_or_default();
        say(seed.is_some(), "seed", begin.to_string());
        say(*is_down, "link", "down".into());
        say(*cuts, "tso", "off".into());
        say(*sums, "csum", "off".into());
        say(*gro > 0, "gro", gro.to_string());
        say(*expands_acks, "acks", "expand".into());
        pairs
    }
}

impl Display for PortSettings {
    /// As [`apply`](Self::apply) reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        joined(f, &self.pairs())
    }
}

/// What becomes of a loop that is found: the same station heard at two ports in turns, many times a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Loops {
    /// It is not looked for.
    No,
    /// It is logged and counted.
    #[default]
    Log,
    /// The port at which the station is heard too is shut for a minute.
    Shut,
}

/// What is said of a whole switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Every frame is for all.
    pub is_hub: bool,
    /// Seconds after which an address that is not heard is forgotten.
    pub age_s: u32,
    /// Seconds for which an address stays where it has come to.
    pub hold_s: u32,
    /// Frames for many that a port may send in a second; 0: any number.
    pub storm: u32,
    /// What becomes of a loop.
    pub loops: Loops,
    /// Of ports of which nothing else is said.
    pub default: PortSettings,
    /// Of ports by number, in place of `default`. Such a number is given to nobody who does not ask for it.
    pub ports: BTreeMap<Number, PortSettings>,
    /// Stations that never move: address and VLAN, and their ports.
    pub statics: BTreeMap<(Address, u16), Number>,
    /// VLANs that were made on the console, whoever is in them.
    pub vlans: BTreeSet<u16>,
}

impl Default for Settings {
    fn default() -> Self {
        let limits = crate::table::Limits::default();
        Self {
            is_hub: false,
            age_s: limits.age_s,
            hold_s: limits.hold_s,
            storm: 0,
            loops: Loops::default(),
            default: PortSettings::default(),
            ports: BTreeMap::new(),
            statics: BTreeMap::new(),
            vlans: BTreeSet::new(),
        }
    }
}

/// What is possible of a switch.
const KEYS: &str = "hub=yes, age=SECONDS, hold=SECONDS, storm=N/s, loops=shut, log or no, static=MAC@PORT/VLAN, \
                    static=MAC@no, default.KEY=VALUE and port.N.KEY=VALUE";

impl Settings {
    /// Sets one thing; [`settle`](Self::settle) comes after the last one.
    ///
    /// # Errors
    /// What is possible.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let seconds = || {
            let seconds = value.parse::<u32>();
            seconds.map_err(|_| format!("{key} is a number of seconds, not {value:?}"))
        };
        match key {
            "hub" => self.is_hub = yes(key, value)?,
            "age" => self.age_s = seconds()?,
            "hold" => self.hold_s = seconds()?,
            "storm" => self.storm = per_second(key, value)?,
            "loops" => {
                self.loops = match choice(key, value, ["no", "log", "shut"])? {
                    "no" => Loops::No,
                    "log" => Loops::Log,
                    _ => Loops::Shut,
                }
            }
            "static" => {
                for one in parts(value) {
                    self.station(one)?;
                }
            }
            _ => return self.of_port(key, value),
        }
        Ok(())
    }

    fn of_port(&mut self, key: &str, value: &str) -> Result<(), String> {
        if let Some(key) = key.strip_prefix("default.") {
            return self.default.set(key, value);
        }
        let port = key.strip_prefix("port.").and_then(|it| it.split_once('.'));
        let Some((number, key)) = port else {
            return Err(format!("a switch has no {key:?}: there are {KEYS}"));
        };
        let number = number.parse().ok();
        let number = number.filter(|number| usize::from(*number) <= MAX_PORTS);
        let number =
            number.ok_or_else(|| format!("a port is a number from 0 (the host) to {MAX_PORTS}"))?;
        self.ports.entry(number).or_default().set(key, value)
    }

    /// `MAC@PORT[/VLAN]`, or `MAC@no[/VLAN]` to forget one.
    fn station(&mut self, text: &str) -> Result<(), String> {
        let bad = || format!("static is MAC@PORT or MAC@PORT/VLAN, not {text:?}");
        let (address, place) = text.split_once('@').ok_or_else(bad)?;
        let (port, vlan) = place.split_once('/').unwrap_or((place, "0"));
        let vlan = vlan.parse().ok().filter(|vlan| *vlan < VLANS);
        let key = (mac(address)?, vlan.ok_or_else(bad)?);
        if port == "no" {
            self.statics.remove(&key);
            return Ok(());
        }
        let port = port.parse().map_err(|_| bad())?;
        if port == 0 || usize::from(port) > MAX_PORTS {
            return Err(bad());
        }
        if self.statics.len() >= MAX_STATICS && !self.statics.contains_key(&key) {
            return Err(format!("there are {MAX_STATICS} static stations, the most"));
        }
        self.statics.insert(key, port);
        Ok(())
    }

    /// Sets several things, as [`PortSettings::apply`] does.
    ///
    /// # Errors
    /// What is possible.
    pub fn apply(&mut self, text: &str) -> Result<(), String> {
        let mut new = self.clone();
        for word in words(text) {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| format!("{word:?} is not KEY=VALUE: there are {KEYS}"))?;
            new.set(key, value)?;
        }
        new.settle();
        *self = new;
        Ok(())
    }

    /// Ends a series of [`set`](Self::set).
    pub fn settle(&mut self) {
        self.default.settle();
        self.ports.values_mut().for_each(PortSettings::settle);
    }

    /// Whether something is said of this port alone.
    pub(crate) fn says_of(&self, port: Number) -> bool {
        self.ports.contains_key(&port) || self.statics.values().any(|at| *at == port)
    }

    /// What is said of a port that joins.
    pub fn of(&self, port: Number) -> &PortSettings {
        self.ports.get(&port).unwrap_or(&self.default)
    }

    /// What differs from the default, but for ports by number.
    pub fn pairs(&self) -> Vec<(String, String)> {
        let default = Self::default();
        let mut pairs = Vec::new();
        let mut say = |is: bool, key: &str, value: String| {
            if is {
                pairs.push((key.to_owned(), value));
            }
        };
        say(self.is_hub, "hub", "yes".into());
        say(self.age_s != default.age_s, "age", self.age_s.to_string());
        say(
            self.hold_s != default.hold_s,
            "hold",
            self.hold_s.to_string(),
        );
        say(self.storm > 0, "storm", storm_text(Some(self.storm)));
        let loops = match self.loops {
            Loops::No => "no",
            Loops::Log => "log",
            Loops::Shut => "shut",
        };
        say(self.loops != default.loops, "loops", loops.into());
        for ((address, vlan), port) in &self.statics {
            let vlan = match vlan {
                0 => String::new(),
                vlan => format!("/{vlan}"),
            };
            let text = format!("{}@{port}{vlan}", mac_text(*address));
            say(true, "static", text);
        }
        for (key, value) in self.default.pairs() {
            say(true, &format!("default.{key}"), value);
        }
        pairs
    }
}

impl Display for Settings {
    /// As [`apply`](Self::apply) reads it, with the ports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = self.pairs();
        for (number, port) in &self.ports {
            let of_port = port.pairs().into_iter();
            pairs.extend(of_port.map(|(key, value)| (format!("port.{number}.{key}"), value)));
        }
        joined(f, &pairs)
    }
}

fn joined<K: Display>(f: &mut fmt::Formatter<'_>, pairs: &[(K, String)]) -> fmt::Result {
    for (at, (key, value)) in pairs.iter().enumerate() {
        let blank = if at == 0 { "" } else { " " };
        write!(f, "{blank}{key}={value}")?;
    }
    Ok(())
}

fn storm_text(storm: Option<u32>) -> String {
    match storm {
        None | Some(0) => "no".to_owned(),
        Some(most) => format!("{most}/s"),
    }
}

/// What is said one by one: with blanks or commas between them.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || c == ',')
        .filter(|word| !word.is_empty())
}

/// VLANs are numbers below this (IEEE 802.1Q-2018, 9.6: 4095 is reserved).
const VLANS: u16 = 4095;
/// Addresses that a port is locked to, at most.
const MAX_LOCKS: usize = 64;
/// Static stations at most.
const MAX_STATICS: usize = 4096;

#[cfg(test)]
mod tests;
