//! What operators ask of switches at run time: how they are, settings, closing a port.
//!
//! What is set and kept lies beside the records of VMs, a file for each switch, and is set again before
//! the next daemon lets anybody join. Entrances, which are set with the same words, are in
//! [`entrances`](super::entrances).

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU16;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vnplug_ring::control::{Counted, Message, SwitchAsk, SwitchRequest, code};
use vnplug_switch::settings::{self, Settings};
use vnplug_switch::{Shown, ShownPort, Station, Switchboard};

use super::Control;
use super::session::Over;
use super::waiting::Whom;
use crate::hub::switch::show;
use crate::hub::{Peer, Refusal, Step};
use crate::spec::{SourceSpec, is_entrance, is_for_life};
use crate::vm::record;

/// What was set at run time, of all switches.
#[derive(Debug, Default)]
pub(crate) struct Switches {
    /// Where it is kept.
    dir: PathBuf,
    all: BTreeMap<String, Running>,
}

/// A switch that is there.
#[derive(Debug, Clone)]
pub(super) struct Running {
    /// As it was made, or said anew.
    pub(super) spec: SourceSpec,
    kept: Kept,
    /// Entrances that were set until the daemon ends.
    once: Vec<String>,
}

/// What was set of one switch, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    #[serde(default)]
    set: Vec<Setting>,
    /// Why what is there cannot be read; then nothing is written over it.
    #[serde(skip)]
    unread: Option<String>,
}

/// One thing that was set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Setting {
    /// Of this port; none: of the whole switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    /// `key=value`.
    text: String,
}

impl Setting {
    fn key(&self) -> &str {
        key_of(&self.text)
    }
}

fn key_of(text: &str) -> &str {
    text.split_once('=').map_or(text, |(key, _)| key)
}

fn is_same(one: &str, other: &str) -> bool {
    key_of(one) == key_of(other)
}

impl Kept {
    /// What is set takes the place of what was set before.
    fn add(&mut self, port: Option<u16>, text: &str) {
        let new = Setting {
            port,
            text: text.to_owned(),
        };
        match text {
            DEFAULT => self.set.retain(|it| it.port != port),
            // Each is another station's.
            _ if new.key() == STATIC => self.set.retain(|it| *it != new),
            _ => self
                .set
                .retain(|it| it.port != port || it.key() != new.key()),
        }
        if text != DEFAULT {
            self.set.push(new);
        }
    }

    /// What is set of entrances.
    fn entrances(&self) -> Vec<String> {
        let whole = self.set.iter().filter(|it| it.port.is_none());
        let own = whole.filter(|it| is_entrance(it.key()));
        own.map(|it| it.text.clone()).collect()
    }

    fn has(&self, port: Option<u16>, key: &str) -> bool {
        let of_port = port.map(|port| format!("port.{port}.{key}"));
        self.set
            .iter()
            .any(|it| it.port == port && it.key() == key || Some(it.key()) == of_port.as_deref())
    }
}

impl Switches {
    /// What earlier daemons with this state directory kept is found there.
    pub(crate) fn new(state: &Path) -> Self {
        Self {
            dir: state.join("vms"),
            all: BTreeMap::new(),
        }
    }

    /// A switch with the entrances that were set at run time, and kept, in place of its own.
    pub(crate) fn with_kept(&self, spec: &SourceSpec) -> SourceSpec {
        spec.with(&self.kept_entrances(spec))
    }

    /// What was set at run time of a switch's entrances, and kept.
    pub(crate) fn kept_entrances(&self, spec: &SourceSpec) -> Vec<String> {
        match spec.is_switch() {
            true => self.read(spec.name()).entrances(),
            false => Vec::new(),
        }
    }

    /// Sets again what was kept of a switch that was made so.
    pub(crate) fn restore(&mut self, spec: &SourceSpec, board: &Switchboard) {
        let running = Running {
            spec: spec.clone(),
            kept: self.read(spec.name()),
            once: Vec::new(),
        };
        self.set_again(&running, board);
        self.all.insert(spec.name().to_owned(), running);
    }

    /// The configuration says of a switch that it is like this.
    pub(super) fn say_anew(&mut self, spec: &SourceSpec, board: &Switchboard) {
        if let Some(running) = self.all.get_mut(spec.name()) {
            running.spec = spec.clone();
            let running = running.clone();
            self.set_again(&running, board);
        }
    }

    /// What is not possible any more is logged, and kept.
    fn set_again(&self, running: &Running, board: &Switchboard) {
        let kept = running.kept.set.iter();
        let settings = kept.filter(|it| !is_entrance(it.key()));
        // What is said of the whole switch first: ports begin with it.
        let (whole, of_ports): (Vec<_>, Vec<_>) = settings.partition(|it| it.port.is_none());
        for Setting { port, text } in whole.into_iter().chain(of_ports) {
            if let Err(error) = board.set(*port, text) {
                let path = self.path(running.spec.name());
                log::error!(target: "control", "{}: {text:?}: {error}", path.display());
            }
        }
    }

    /// What was set and kept of a switch.
    fn read(&self, name: &str) -> Kept {
        let path = self.path(name);
        let kept = match record::read_kept(&path) {
            Ok(text) => toml::from_str::<Kept>(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
            Err(error) => Err(error.to_string()),
        };
        kept.unwrap_or_else(|error| {
            log::error!(
                target: "control",
                "{}: {error}: what was set of switch {name:?} is not set again",
                path.display()
            );
            Kept {
                unread: Some(error),
                ..Kept::default()
            }
        })
    }

    /// A running switch as it would be made now, if the configuration said this of it.
    pub(super) fn as_set(&self, spec: &SourceSpec) -> SourceSpec {
        match self.all.get(spec.name()) {
            None => spec.clone(),
            Some(it) => spec.with(&it.kept.entrances()).with(&it.once),
        }
    }

    /// The same of one that is not said anew.
    pub(super) fn spec(&self, name: &str) -> Option<SourceSpec> {
        self.all.get(name).map(|it| self.as_set(&it.spec))
    }

    /// Keeps something for the next daemon.
    pub(super) fn keep(&mut self, name: &str, port: Option<u16>, texts: &[&str]) -> io::Result<()> {
        let path = self.path(name);
        let Some(Running { kept, once, .. }) = self.all.get_mut(name) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if let Some(why) = &kept.unread {
            return Err(record::unread(&path, why));
        }
        let before = kept.clone();
        texts.iter().for_each(|text| kept.add(port, text));
        let written = toml::to_string(kept).map_err(io::Error::other);
        let written = written.and_then(|text| record::write_kept(&path, &text));
        match &written {
            Err(_) => *kept = before,
            Ok(()) => once.retain(|it| port.is_some() || !texts.iter().any(|new| is_same(it, new))),
        }
        written
    }

    /// Notes entrances that were set until the daemon ends.
    pub(super) fn note_once(&mut self, name: &str, texts: &[String]) {
        if let Some(running) = self.all.get_mut(name) {
            running.once.extend_from_slice(texts);
        }
    }

    /// A switch was removed by an operator, and what was set of it goes with it.
    pub(super) fn forget(&mut self, name: &str) {
        self.all.remove(name);
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => log::error!(target: "control", "{}: {error}", path.display()),
        }
    }

    /// Where an entrance's option comes from.
    fn origin(&self, name: &str, key: &str, value: &str) -> &'static str {
        let text = format!("{key}={value}");
        match self.all.get(name) {
            Some(it) if it.once.contains(&text) => ONCE,
            Some(it) if it.kept.entrances().contains(&text) => RUN_TIME,
            _ => FILE,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.switch"))
    }
}

impl Control {
    /// What operators ask about switches.
    pub(super) fn of_switch(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        request: &SwitchRequest,
    ) -> Result<(), Over> {
        let looks = matches!(request.ask, SwitchAsk::Show { .. });
        let may = self.policy.is_operator(viewer) || looks && self.policy.may_observe(viewer);
        if !may {
            let what = "only root or the daemon's own user may look at a switch or change it";
            let refusal = Refusal::new(code::DENIED, what);
            return self.sessions.answer(whom, Err(refusal));
        }
        let port = NonZeroU16::new(request.port);
        let step = match &request.ask {
            SwitchAsk::Show { stations } => self.show_switch(&request.name, port, *stations),
            SwitchAsk::Set { text, keep } => {
                match self.set_entrances(whom, &request.name, port, text, *keep) {
                    // The answer comes when a thread is done.
                    Ok(true) => {
                        self.sessions.set_busy(whom.token, true);
                        return Ok(());
                    }
                    Ok(false) => self.set_switch(&request.name, port, text, *keep),
                    Err(refusal) => Err(refusal),
                }
            }
            SwitchAsk::Kick => match self.kick(whom, &request.name, port) {
                Ok(ControlFlow::Break(closing)) => return closing,
                Ok(ControlFlow::Continue(step)) => Ok(step),
                Err(refusal) => Err(refusal),
            },
        };
        self.carry_on(whom, step)
    }

    fn show_switch(
        &self,
        name: &str,
        port: Option<NonZeroU16>,
        stations: bool,
    ) -> Result<Step, Refusal> {
        let boards: Vec<_> = match name {
            "" => {
                let all = self.hub.switches();
                all.map(|(source, board)| (source.name.clone(), board.clone()))
                    .collect()
            }
            name => {
                let (source, board) = self.hub.switch(name)?;
                if let Some(port) = port.filter(|port| !board.is_taken(*port)) {
                    return Err(nobody(&source.name, port));
                }
                vec![(source.name.clone(), board.clone())]
            }
        };
        let with_kept = |(name, board): &(String, Switchboard)| {
            let entrances = board.entrances().into_iter();
            let entrances = entrances.flat_map(|(key, path)| {
                let path = path.display().to_string();
                setting(key, &path, self.switches.origin(name, key, &path))
            });
            let uplinks = board.uplinks().into_iter().map(|(text, _)| text);
            let uplinks = uplinks.collect::<Vec<_>>().join("+");
            let uplinks = (!uplinks.is_empty()).then(|| {
                let from = self.switches.origin(name, "uplink", &uplinks);
                setting("uplink", &uplinks, from)
            });
            let entrances = entrances.chain(uplinks.into_iter().flatten());
            let running = self.switches.all.get(name);
            let kept = running.map_or(Kept::default(), |it| it.kept.clone());
            (name.clone(), (kept, entrances.collect::<Vec<_>>()))
        };
        let known: BTreeMap<_, _> = boards.iter().map(with_kept).collect();
        Ok(show(boards, move |name, mut shown| {
            if let Some(port) = port {
                shown.ports.retain(|it| it.number == port.get());
                shown.stations.retain(|it| it.port == port.get());
            }
            if !stations {
                shown.stations.clear();
            }
            let (kept, entrances) = known.get(name).cloned().unwrap_or_default();
            let mut told = tell(name, &shown, &kept);
            if let Some(switch) = told.first_mut() {
                switch.labels.extend(entrances);
            }
            told
        }))
    }

    fn set_switch(
        &mut self,
        name: &str,
        port: Option<NonZeroU16>,
        text: &str,
        keep: bool,
    ) -> Result<Step, Refusal> {
        let (source, board) = self.hub.switch(name)?;
        let name = source.name.clone();
        let port = port.map(NonZeroU16::get);
        let texts: Vec<&str> = settings::words(text).collect();
        if texts.is_empty() {
            let what = "nothing to set: write key=value";
            return Err(Refusal::new(code::INVALID, what));
        }
        if port.is_none()
            && let Some(key) = texts
                .iter()
                .map(|text| key_of(text))
                .find(|it| is_for_life(it))
        {
            let what = format!(
                "{key} holds as long as there is the switch: say it in the configuration and start the daemon again, or make the \
                 switch anew: `vnplug switch rm {name}`, then `vnplug switch add {name},{key}=…` with its other options"
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        board
            .set(port, &texts.join(" "))
            .map_err(|what| Refusal::new(code::INVALID, what))?;
        let whose = port.map_or(String::new(), |port| format!("/port{port}"));
        log::info!(target: "control", "switch {name}{whose}: an operator sets {texts:?}");
        if keep {
            self.switches.keep(&name, port, &texts).map_err(|error| {
                let what = format!("it is set, but not kept for a restart: {error}");
                Refusal::new(code::INTERNAL, what)
            })?;
        }
        Ok(Step::Done(Ok(Message::Done)))
    }

    /// Closes a port. One with rings is answered by who closes it (`Break`).
    fn kick(
        &mut self,
        whom: Whom,
        name: &str,
        port: Option<NonZeroU16>,
    ) -> Result<ControlFlow<Result<(), Over>, Step>, Refusal> {
        let (source, board) = self.hub.switch(name)?;
        let name = source.name.clone();
        let port = port.ok_or_else(|| {
            let what = format!("which port? Write {name}/port1");
            Refusal::new(code::INVALID, what)
        })?;
        if !board.is_taken(port) {
            return Err(nobody(&name, port));
        }
        log::info!(target: "control", "switch {name}: an operator closes port {port}");
        let Some((id, owner)) = self.hub.member(&name, port) else {
            return Ok(ControlFlow::Continue(self.hub.close_port(&name, port)?));
        };
        let reason = format!("an operator closed port {port} of {name}");
        self.tell_gone(whom.token, &[(id, owner.clone())], &reason);
        Ok(ControlFlow::Break(self.close_one(whom, &owner, id)))
    }
}

fn nobody(name: &str, port: NonZeroU16) -> Refusal {
    let what =
        format!("nobody has port {port} of {name}; `vnplug switch show {name}` shows the ports");
    Refusal::new(code::NOT_FOUND, what)
}

/// A switch, its ports and its stations, as clients are told.
fn tell(name: &str, shown: &Shown, kept: &Kept) -> Vec<Counted> {
    let first = settings_of(&shown.first);
    let mut labels = Vec::new();
    for (key, value) in settings_of(&shown.settings) {
        let from = match () {
            () if kept.has(None, &key) => RUN_TIME,
            () if first.iter().any(|it| (&it.0, &it.1) == (&key, &value)) => FILE,
            () => ONCE,
        };
        labels.extend(setting(&key, &value, from));
    }
    let mut values = shown.counters.clone();
    values.push(("stations".into(), shown.station_count));
    values.push(("ports".into(), shown.ports.len() as u64));
    let switch = Counted {
        kind: "switch".into(),
        name: name.to_owned(),
        labels,
        values,
    };
    let ports = shown.ports.iter();
    let ports = ports.filter_map(|port| tell_port(name, port, &shown.first, kept));
    let station = |it: &Station| Counted {
        kind: "station".into(),
        name: it.address.map(|byte| format!("{byte:02x}")).join(":"),
        labels: vec![
            ("switch_port".into(), format!("{name}/port{}", it.port)),
            ("vlan".into(), it.vlan.to_string()),
            (
                "static".into(),
                if it.is_static { "yes" } else { "no" }.into(),
            ),
        ],
        values: vec![("age_s".into(), u64::from(it.age_s))],
    };
    let stations = shown.stations.iter().map(station);
    std::iter::once(switch)
        .chain(ports)
        .chain(stations)
        .collect()
}

/// A port, if somebody still has it.
fn tell_port(name: &str, port: &ShownPort, first: &Settings, kept: &Kept) -> Option<Counted> {
    let holder = port.holder.as_ref()?;
    let mut labels = vec![
        ("state".into(), port.state.to_owned()),
        ("way".into(), holder.way.to_owned()),
        ("owner".into(), holder.owner.clone()),
        ("description".into(), holder.description.clone()),
    ];
    if !port.granted.is_empty() {
        labels.push(("granted".into(), port.granted.clone()));
    }
    let is_granted = |key: &str| {
        let mut words = port.granted.split([',', ' ']);
        words.any(|it| {
            it.split_once('=')
                .is_some_and(|(granted, _)| granted == key)
        })
    };
    let first = first.of(port.number).pairs();
    for (key, value) in port.settings.pairs() {
        let from = match () {
            () if is_granted(key) => GRANT,
            () if kept.has(Some(port.number), key) => RUN_TIME,
            () if first.iter().any(|it| (it.0, &it.1) == (key, &value)) => FILE,
            () => ONCE,
        };
        labels.extend(setting(key, &value, from));
    }
    let values = port.counters.iter();
    Some(Counted {
        kind: "switch_port".into(),
        name: format!("{name}/port{}", port.number),
        labels,
        values: values.map(|(key, it)| ((*key).to_owned(), *it)).collect(),
    })
}

/// The settings of a whole switch: those that everybody asks for, and what else was said.
fn settings_of(settings: &Settings) -> Vec<(String, String)> {
    let hub = if settings.is_hub { "yes" } else { "no" };
    let mut all = vec![
        ("hub".to_owned(), hub.to_owned()),
        ("age".to_owned(), settings.age_s.to_string()),
        ("hold".to_owned(), settings.hold_s.to_string()),
    ];
    for (key, value) in settings.pairs() {
        match all.iter_mut().find(|(other, _)| *other == key) {
            None => all.push((key, value)),
            Some((_, values)) if key == STATIC => *values += &format!("+{value}"),
            Some(_) => {}
        }
    }
    all
}

/// A setting, and where it comes from.
fn setting(key: &str, value: &str, from: &str) -> [(String, String); 2] {
    [
        (format!("set.{key}"), value.to_owned()),
        (format!("from.{key}"), from.to_owned()),
    ]
}

/// What undoes all that was set.
const DEFAULT: &str = "default";
/// A setting that there may be several of.
const STATIC: &str = "static";
/// Where a setting comes from: the configuration, or its absence there,
const FILE: &str = "file";
/// what was set at run time and is kept,
const RUN_TIME: &str = "run time";
/// and is not kept,
const ONCE: &str = "once";
/// the grant under which the port joined.
const GRANT: &str = "grant";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_takes_the_place_of_what_was_and_stations_add_up() {
        let mut kept = Kept::default();
        for (port, text) in [
            (None, "hub=yes"),
            (Some(3), "vlan=10"),
            (None, "hub=no"),
            (Some(3), "vlan=11"),
            (Some(4), "vlan=12"),
            (None, "static=02:00:00:00:00:01@3"),
            (None, "static=02:00:00:00:00:02@4"),
            (None, "static=02:00:00:00:00:01@3"),
            (Some(4), "default"),
        ] {
            kept.add(port, text);
        }
        let texts: Vec<_> = kept.set.iter().map(|it| (it.port, &*it.text)).collect();
        assert_eq!(
            texts,
            [
                (None, "hub=no"),
                (Some(3), "vlan=11"),
                (None, "static=02:00:00:00:00:02@4"),
                (None, "static=02:00:00:00:00:01@3"),
            ]
        );
        let written = toml::to_string(&kept).unwrap();
        assert_eq!(toml::from_str::<Kept>(&written).unwrap(), kept);
        assert!(kept.has(Some(3), "vlan") && !kept.has(None, "vlan"));
    }
}
