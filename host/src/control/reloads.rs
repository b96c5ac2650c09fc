//! The configuration file read again.
//!
//! ```text
//!   a thread reads and checks the file ── what differs ── programs loaded ── a thread opens new sources ── filters compiled ──┐
//!                                   everything at once: programs, grants, ports, sources ◄────────────────────────────────────┘
//! ```
//!
//! Nothing changes before everything that can fail was done.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use vnplug_ring::control::{Message, code};

use super::Control;
use super::elsewhere::{Elsewhere, part};
use super::entrances;
use super::grants::Regrant;
use super::sources::{FAILED, REMOVED, answer};
use super::waiting::Whom;
use crate::at_once::Together;
use crate::config::Config;
use crate::hub::exchange::Made;
use crate::hub::policy::Policy;
use crate::hub::{Owed, Refusal};
use crate::pattern::Opened;
use crate::reload::Difference;
use crate::spec::{Means, SourceSpec};
use vnplug_switch::settings::Settings;
use vnplug_switch::{EntranceChange, Switchboard};

/// Reads the configuration again; takes its time.
pub(crate) type ReadAgain = Arc<dyn Fn() -> Result<Config, String> + Send + Sync>;

/// The configuration that is in force, and how it is read again.
pub(super) struct Reloads {
    /// In force.
    pub(super) config: Config,
    read: ReadAgain,
    /// Who asked for what is on its way.
    asked: Option<Whom>,
    /// Held by the reload that is on its way, wherever it is: there is one at a time, or an older file could win.
    turn: Weak<()>,
    done: Elsewhere<Result<Stage, String>>,
}

/// How far a thread got.
enum Stage {
    Read(Box<Config>, Arc<()>),
    Opened(Box<Reload>),
}

/// A configuration that is to be in force.
pub(super) struct Reload {
    pub(super) difference: Difference,
    pub(super) config: Config,
    /// The sources that are new, open.
    opened: Ready,
    /// Switches that change while they run.
    resets: Vec<Reset>,
    /// The programs that are new, loaded.
    made: Vec<Made>,
    _turn: Arc<()>,
}

/// Sources that are open, and not received yet. Those that nobody takes out are closed.
///
/// NB: packet sockets by a thread of their own, as each waits for the kernel. What is of another kind is closed when this is gone: whoever
/// opens the same next would find its paths and queues in use.
#[derive(Default)]
struct Ready(Together<Opened>);

impl Drop for Ready {
    fn drop(&mut self) {
        let is_slow = |it: &Opened| it.spec().is_packet_socket();
        let mut slow = Together::default();
        while let Some(at) = self.0.iter().position(is_slow) {
            slow.extend(self.0.remove(at));
        }
        if !slow.is_empty() {
            part(move || drop(slow));
        }
    }
}

/// A switch that is to have other settings and entrances.
struct Reset {
    /// As the configuration has it.
    spec: SourceSpec,
    /// With what was set at run time.
    as_set: SourceSpec,
    board: Switchboard,
    /// What it becomes, once that is known: those entrances are open.
    becomes: Option<(Settings, EntranceChange)>,
}

impl Reset {
    /// Opens the entrances that come; `Some`: what must wait until the daemon starts again.
    fn open(&mut self, means: &Means) -> Result<Option<String>, String> {
        let blamed = |spec: &SourceSpec, error| spec.blame(&error, means);
        let settings = self.spec.entrances_and_settings(means);
        let settings = settings
            .map_err(|error| blamed(&self.spec, error))?
            .settings;
        let said = self.board.may_be_said(&settings);
        said.map_err(|what| format!("switch {:?}: {what}", self.spec.name()))?;
        let config = self.as_set.entrances_and_settings(means);
        let config = config.map_err(|error| blamed(&self.as_set, error))?;
        let change = match self.board.plan(&config, &self.as_set.uplink_texts()) {
            Ok(change) => change,
            Err(why) => return Ok(Some(why)),
        };
        let change = entrances::open(change, &self.as_set, means);
        let change = change.map_err(|error| blamed(&self.as_set, error))?;
        self.becomes = Some((settings, change));
        Ok(None)
    }
}

impl Reloads {
    pub(super) fn new(config: Config, read: ReadAgain) -> Self {
        Self {
            config,
            read,
            asked: None,
            turn: Weak::new(),
            done: Elsewhere::new(),
        }
    }

    /// Has the file read.
    fn begin(&mut self, whom: Whom, bell: &Arc<OwnedFd>) -> io::Result<()> {
        let read = Arc::clone(&self.read);
        let turn = Arc::new(());
        self.turn = Arc::downgrade(&turn);
        let work = move || Ok(Stage::Read(Box::new(read()?), turn));
        self.done.begin(bell, work, || Err(FAILED.into()))?;
        self.asked = Some(whom);
        Ok(())
    }

    /// Has the sources opened that are new.
    fn open(
        &self,
        mut reload: Box<Reload>,
        means: Means,
        bell: &Arc<OwnedFd>,
    ) -> Result<(), String> {
        let work = move || {
            let opened = Opened::all(&reload.difference.open, |spec| Opened::open(spec, &means));
            reload.opened = Ready(opened?);
            for reset in &mut reload.resets {
                if let Some(why) = reset.open(&means)? {
                    reload.difference.put_off_source(reset.spec.name(), &why);
                }
            }
            Ok(Stage::Opened(reload))
        };
        let begun = self.done.begin(bell, work, || Err(FAILED.into()));
        begun.map_err(|error| format!("cannot open the new sources: {error}"))
    }
}

impl Control {
    /// Has the configuration read again.
    pub(super) fn reload(&mut self, whom: Whom) -> Result<(), Refusal> {
        if self.reloads.turn.strong_count() > 0 {
            let what = "the configuration is being read already; try again";
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        let begun = self.reloads.begin(whom, &self.bell);
        begun.map_err(|error| {
            let what = format!("cannot read the configuration: {error}");
            Refusal::new(code::INTERNAL, what)
        })
    }

    /// Goes on with a configuration that was read again, or whose sources are open.
    pub(super) fn read_again(&mut self) {
        let Some(stage) = self.reloads.done.next() else {
            return;
        };
        let Some(whom) = self.reloads.asked.take() else {
            return;
        };
        self.sessions.set_busy(whom.token, false);
        let (config, turn) = match stage {
            Err(what) => return self.end_reload(whom, Err(what)),
            Ok(Stage::Opened(reload)) => return self.end_reload(whom, Ok(reload)),
            Ok(Stage::Read(config, turn)) => (*config, turn),
        };
        let load = self.difference(&config).load;
        if load.is_empty() {
            return self.go_on_reloading(whom, Ok((config, turn, Vec::new())));
        }
        // It goes on when they are.
        if let Err(refusal) = self.load_for_reload(whom, &load, (config, turn)) {
            self.go_on_reloading(whom, Err(refusal.text));
        }
    }

    /// What is different in a configuration.
    fn difference(&self, config: &Config) -> Difference {
        let kept = |policy: &mut Policy| self.grants.replay(policy);
        let mut difference = Difference::between(&self.reloads.config, config, kept);
        self.put_off_programs(&mut difference);
        difference
    }

    /// Goes on with a configuration whose programs are loaded: its new sources are opened.
    pub(super) fn go_on_reloading(
        &mut self,
        whom: Whom,
        read: Result<(Config, Arc<()>, Vec<Made>), String>,
    ) {
        let prepared = read.and_then(|(config, turn, made)| self.prepare(config, turn, made));
        let means = prepared.as_ref().map(|reload| {
            let difference = &reload.difference;
            self.means_for(&difference.open, &difference.close)
        });
        let means = means.unwrap_or_default();
        self.hub.twins.expect_nothing();
        let begun = prepared.and_then(|reload| {
            match reload.difference.open.is_empty() && reload.resets.is_empty() {
                true => Ok(Some(reload)),
                false => self.reloads.open(reload, means, &self.bell).map(|()| None),
            }
        });
        match begun {
            Ok(None) => {
                self.reloads.asked = Some(whom);
                self.sessions.set_busy(whom.token, true);
            }
            Ok(Some(reload)) => self.end_reload(whom, Ok(reload)),
            Err(what) => self.end_reload(whom, Err(what)),
        }
    }

    /// Goes on with a configuration whose sources are open, or of which something is wrong.
    fn end_reload(&mut self, whom: Whom, reload: Result<Box<Reload>, String>) {
        let went = match reload {
            Err(what) => {
                let what = format!("{what}; nothing is changed");
                log::error!(target: "control", "the configuration is not in force: {what}");
                self.sessions
                    .answer(whom, Err(Refusal::new(code::INVALID, what)))
            }
            Ok(reload) => match self.sessions.get(whom.token).map(|it| it.viewer.clone()) {
                Some(viewer) => self.regrant(whom, &viewer, Regrant::of_file(reload)),
                // Who asked for it is gone.
                None => Ok(()),
            },
        };
        self.went_on(whom.token, went);
    }

    /// What is different in a configuration, and can be done.
    fn prepare(
        &mut self,
        config: Config,
        turn: Arc<()>,
        made: Vec<Made>,
    ) -> Result<Box<Reload>, String> {
        config.check_terms()?;
        let mut difference = self.difference(&config);
        self.expect_programs(&difference, &made)?;
        let stays = |name: &String| {
            let place = self.place_of(name);
            place.is_some_and(|place| self.hub.may_retire(place).is_err())
        };
        let waits: Vec<String> = difference
            .close
            .iter()
            .filter(|it| stays(it))
            .cloned()
            .collect();
        for name in waits {
            difference.put_off_source(&name, "groups read its packet memory");
        }
        // One that was removed at run time is made again.
        let is_gone = |spec: &mut SourceSpec| self.place_of(spec.name()).is_none();
        difference
            .open
            .extend(difference.reset.extract_if(.., is_gone));
        for spec in &difference.open {
            let replaces = difference.close.iter().any(|name| name == spec.name());
            if !replaces && self.may_be_named(spec.name()).is_err() {
                return Err(was_added(spec.name()));
            }
        }
        for spec in &mut difference.open {
            *spec = self.switches.with_kept(spec);
        }
        let mut resets = Vec::new();
        for spec in &difference.reset {
            let (_, board) = self
                .hub
                .switch(spec.name())
                .map_err(|_| was_added(spec.name()))?;
            resets.push(Reset {
                spec: spec.clone(),
                as_set: self.switches.as_set(spec),
                board: board.clone(),
                becomes: None,
            });
        }
        Ok(Box::new(Reload {
            difference,
            config,
            opened: Ready::default(),
            resets,
            made,
            _turn: turn,
        }))
    }

    /// Whether what was prepared can still be done: filters were waited for meanwhile.
    pub(super) fn still_fits(&self, reload: &Reload) -> Result<(), Refusal> {
        let closes = &reload.difference.close;
        for place in closes.iter().filter_map(|name| self.place_of(name)) {
            self.hub.may_retire(place)?;
        }
        for opened in reload.opened.0.iter() {
            let name = opened.name();
            if !closes.iter().any(|it| it == name) && self.may_be_named(name).is_err() {
                let what = format!("source {name:?} was added meanwhile; nothing is changed");
                return Err(Refusal::new(code::EXISTS, what));
            }
        }
        for reset in &reload.resets {
            if reset.becomes.as_ref().is_some_and(|(_, it)| !it.fits()) {
                let name = reset.spec.name();
                let what = format!("switch {name:?} was changed meanwhile; nothing is changed");
                return Err(Refusal::new(code::UNAVAILABLE, what));
            }
        }
        Ok(())
    }

    /// Puts a configuration in force whose grants are already; tells what is different.
    pub(super) fn exchange_sources(
        &mut self,
        token: u64,
        reload: Reload,
        owed: &mut Vec<Owed<()>>,
    ) -> Result<Message, Refusal> {
        let Reload {
            mut difference,
            config,
            mut opened,
            resets,
            made,
            _turn,
        } = reload;
        let mut failed = None;
        match self.adopt_programs(token, made) {
            Ok(asked) => owed.extend(asked),
            Err(refusal) => failed = Some(refusal),
        }
        for name in &difference.close {
            self.part_from_pattern(token, name, REMOVED);
            // It may have been removed at run time.
            if let Some(place) = self.place_of(name)
                && let Some(gone) = self.part_from(token, place)
            {
                part(move || drop(gone));
            }
        }
        for name in difference.unload() {
            // It may have been removed at run time.
            if self.hub.twins.grant(&name).is_some()
                && let Err(refusal) = self.remove_program(token, &name)
            {
                failed = failed.or(Some(refusal));
            }
        }
        for reset in resets {
            self.reset_switch(reset);
        }
        let mut missing = BTreeSet::new();
        while let Some(source) = opened.0.pop_front() {
            let name = source.name().to_owned();
            if let Err(refusal) = self.welcome_any(token, source) {
                log::error!(target: "source", "{}", refusal.text);
                failed = failed.or(Some(refusal));
                // Threads or descriptors are short.
                missing.insert(name);
                missing.extend(opened.0.iter().map(|it| it.name().to_owned()));
                break;
            }
        }
        difference.miss_sources(missing);
        for name in difference.missing() {
            log::warn!(target: "control", "reload: source {name}: not started");
        }
        let told = difference.told();
        for (name, what) in &told {
            match *what {
                "restart" => {
                    log::warn!(target: "control", "reload: {name}: waits for a restart of the daemon")
                }
                what => log::info!(target: "control", "reload: {name}: {what}"),
            }
        }
        if told.is_empty() {
            log::info!(target: "control", "reload: nothing is different");
        }
        difference.done(&mut self.reloads.config, config);
        let Some(refusal) = failed else {
            return Ok(answer(told));
        };
        Err(match difference.told_missing() {
            Some(missing) => Refusal::new(refusal.code, format!("{}; {missing}", refusal.text)),
            None => refusal,
        })
    }

    /// Gives a switch other settings and entrances while it runs.
    fn reset_switch(&mut self, reset: Reset) {
        let Reset {
            spec,
            board,
            becomes: Some((settings, change)),
            ..
        } = reset
        else {
            // It waits.
            return;
        };
        board.say_anew(settings);
        self.switches.say_anew(&spec, &board);
        entrances::tell(spec.name(), &change);
        let gone = change.put();
        part(move || drop(gone));
    }
}

fn was_added(name: &str) -> String {
    format!("source {name:?} was added at run time: remove it first")
}
