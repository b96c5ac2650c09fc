//! Sources that come and go at run time, and the configuration file read again.
//!
//! ```text
//!   reload ── a thread reads and checks the file ── what differs ── programs loaded ── new sources opened ── filters compiled ──┐
//!   add ───── opened ── started                                                                              │
//!   remove ── ports ended ── closed ── threads end          everything at once: ports, sources, grants ◄─────┘
//! ```
//!
//! Nothing changes before everything that can fail was done.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};

use vnplug_ring::control::{Counted, Message, SourceRequest, code};

use super::Control;
use super::grants::Regrant;
use super::session::Over;
use super::waiting::Whom;
use crate::config::Config;
use crate::hub::exchange::Made;
use crate::hub::policy::Policy;
use crate::hub::{Owed, Peer, Refusal, Step, user_grant};
use crate::reload::Difference;
use crate::spec::{OpenSource, SourceSpec};
use vnplug_os::event;
use vnplug_path::engine::Worker;

/// Reads the configuration again; takes its time.
pub(crate) type ReadAgain = Arc<dyn Fn() -> Result<Config, String> + Send + Sync>;

/// The configuration that is in force, and how it is read again.
pub(super) struct Reloads {
    /// In force.
    config: Config,
    read: ReadAgain,
    /// Who asked for what is being read.
    asked: Option<Whom>,
    /// Held by the reload that is on its way, wherever it is: there is one at a time, or an older file could win.
    turn: Weak<()>,
    tell: Sender<(Arc<()>, Result<Config, String>)>,
    done: Receiver<(Arc<()>, Result<Config, String>)>,
}

/// A configuration that is to be in force.
pub(super) struct Reload {
    pub(super) difference: Difference,
    config: Config,
    /// The sources that are new, open.
    opened: Vec<OpenSource>,
    /// The programs that are new, loaded.
    made: Vec<Made>,
    _turn: Arc<()>,
}

impl Reloads {
    pub(super) fn new(config: Config, read: ReadAgain) -> Self {
        let (tell, done) = channel();
        Self {
            config,
            read,
            asked: None,
            turn: Weak::new(),
            tell,
            done,
        }
    }

    /// Has the file read by a thread, which rings the bell when that is done.
    fn begin(&mut self, whom: Whom, bell: &Arc<OwnedFd>) -> io::Result<()> {
        let (read, tell, bell) = (Arc::clone(&self.read), self.tell.clone(), Arc::clone(bell));
        let turn = Arc::new(());
        self.turn = Arc::downgrade(&turn);
        std::thread::Builder::new()
            .name("vnplug-reload".into())
            .spawn(move || {
                // The loop is there as long as the process.
                let _ = tell.send((turn, read()));
                event::ring(&bell);
            })?;
        self.asked = Some(whom);
        Ok(())
    }
}

impl Control {
    /// What operators ask about the sources.
    pub(super) fn of_sources(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        request: SourceRequest,
    ) -> Result<(), Over> {
        let step = self
            .may_manage(viewer, "change sources")
            .and_then(|()| match request {
                SourceRequest::Add { text } => self.add_source(&text),
                SourceRequest::Remove { name } => self.remove_source(whom.token, &name),
                SourceRequest::Reload if self.reloads.turn.strong_count() > 0 => {
                    let what = "the configuration is being read already; try again";
                    Err(Refusal::new(code::UNAVAILABLE, what))
                }
                SourceRequest::Reload => {
                    let begun = self.reloads.begin(whom, &self.bell);
                    begun.map_err(|error| {
                        let what = format!("cannot read the configuration: {error}");
                        Refusal::new(code::INTERNAL, what)
                    })?;
                    self.sessions.set_busy(whom.token, true);
                    // The answer comes when it is read.
                    Ok(None)
                }
            });
        match step {
            Ok(None) => Ok(()),
            Ok(Some(step)) => self.carry_on(whom, Ok(step)),
            Err(refusal) => self.sessions.answer(whom, Err(refusal)),
        }
    }

    fn add_source(&mut self, text: &str) -> Result<Option<Step>, Refusal> {
        let invalid = |error: String| Refusal::new(code::INVALID, error);
        let spec: SourceSpec = text
            .parse()
            .map_err(|error: vnplug_path::source::SourceError| invalid(error.to_string()))?;
        let opened = self.open_source(&spec)?;
        let told = (format!("source {}", spec.name()), "added");
        self.welcome(opened)?;
        Ok(Some(Step::Done(Ok(answer(vec![told])))))
    }

    fn remove_source(&mut self, token: u64, name: &str) -> Result<Option<Step>, Refusal> {
        let named = self.hub.find(name)?;
        if named.queue.is_some() || named.port.is_some() {
            let what = format!("{name:?} is a part of a source; only whole sources are removed");
            return Err(Refusal::new(code::INVALID, what));
        }
        self.hub.may_retire(named.source)?;
        let told = (
            format!("source {}", self.hub.sources()[named.source].name),
            "removed",
        );
        self.part_from(token, named.source);
        Ok(Some(Step::Done(Ok(answer(vec![told])))))
    }

    /// Opens a source that is to be added.
    fn open_source(&self, spec: &SourceSpec) -> Result<OpenSource, Refusal> {
        let name = spec.name();
        if self.hub.present().any(|(_, source)| source.name == name) {
            let what = format!("there is a source {name:?} already: remove it first");
            return Err(Refusal::new(code::EXISTS, what));
        }
        self.hub.next_place()?;
        let opened = spec.open_with(None, None, &self.hub.twins);
        opened.map_err(|error| Refusal::new(code::INVALID, spec.blame(&error)))
    }

    /// Starts a source.
    fn welcome(&mut self, opened: OpenSource) -> Result<(), Refusal> {
        let place = self.hub.next_place()?;
        let name = opened.name().to_owned();
        if let Some(board) = opened.board() {
            let joiners: Vec<_> = self.policy.joiners(&name).collect();
            if !joiners.is_empty() {
                board.grant(joiners.into_iter().filter_map(user_grant).collect());
            }
            self.switches.restore(&name, board);
        }
        let source = opened
            .start(place)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.watch.add(source.workers.iter().map(Worker::line));
        log::info!(target: "source", "source {name:?} is added: {}", source.description);
        self.hub.add_at(place, source);
        Ok(())
    }

    /// Closes the ports of a source, which nobody finds any more. Their readers try to open them again: if there is another source of
    /// that name they go on with it.
    fn part_from(&mut self, token: u64, place: usize) {
        let name = self.hub.sources()[place].name.clone();
        let ports = self.hub.retire(place);
        log::info!(target: "source", "source {name:?} is removed, with {} ports", ports.len());
        let owned = |port| Some((port, self.hub.ports().get(&port)?.owner.clone()));
        let owned: Vec<_> = ports.into_iter().filter_map(owned).collect();
        self.end_ports(token, &owned, REMOVED);
    }

    /// Ends the threads of removed sources whose ports are closed.
    pub(super) fn see_sources_off(&mut self) {
        let workers = self.hub.take_idle();
        if workers.is_empty() {
            return;
        }
        for worker in &workers {
            self.watch.forget(&worker.line());
        }
        // One that hangs is waited for, for a while.
        let ends = std::thread::Builder::new().name("vnplug-parting".into());
        if let Err(error) = ends.spawn(move || drop(workers)) {
            log::error!(target: "source", "a source that was removed is closed here: {error}");
        }
    }

    /// Goes on with a configuration that was read again.
    pub(super) fn read_again(&mut self) {
        let Ok((turn, read)) = self.reloads.done.try_recv() else {
            return;
        };
        let Some(whom) = self.reloads.asked.take() else {
            return;
        };
        self.sessions.set_busy(whom.token, false);
        let read = match read {
            Err(what) => Err(what),
            Ok(config) => {
                let load = self.difference(&config).load;
                if load.is_empty() {
                    Ok((config, turn, Vec::new()))
                } else {
                    match self.load_for_reload(whom, &load, (config, turn)) {
                        // It goes on when they are.
                        Ok(()) => return,
                        Err(refusal) => Err(refusal.text),
                    }
                }
            }
        };
        self.go_on_reloading(whom, read);
    }

    /// What is different in a configuration.
    fn difference(&self, config: &Config) -> Difference {
        let kept = |policy: &mut Policy| self.grants.replay(policy);
        let mut difference = Difference::between(&self.reloads.config, config, kept);
        self.put_off_programs(&mut difference);
        difference
    }

    /// Goes on with a configuration whose programs are loaded.
    pub(super) fn go_on_reloading(
        &mut self,
        whom: Whom,
        read: Result<(Config, Arc<()>, Vec<Made>), String>,
    ) {
        let prepared = read.and_then(|(config, turn, made)| self.prepare(config, turn, made));
        self.hub.twins.expect_nothing();
        let went = match prepared {
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

    /// Opens what is new in a configuration.
    fn prepare(
        &mut self,
        config: Config,
        turn: Arc<()>,
        made: Vec<Made>,
    ) -> Result<Reload, String> {
        config.check_terms()?;
        let mut difference = self.difference(&config);
        self.expect_programs(&difference, &made)?;
        let present = |name: &str| {
            let mut present = self.hub.present();
            present.find(|(_, source)| source.name == name)
        };
        let stays = |name: &String| {
            present(name).is_some_and(|(place, _)| self.hub.may_retire(place).is_err())
        };
        let waits: Vec<String> = difference
            .close
            .extract_if(.., |name| stays(name))
            .collect();
        difference
            .open
            .retain(|spec| !waits.iter().any(|name| name == spec.name()));
        let waits = waits.into_iter().map(|name| format!("source {name}"));
        difference.restart.extend(waits);
        let mut opened = Vec::new();
        for spec in &difference.open {
            let replaces = difference.close.iter().any(|name| name == spec.name());
            if !replaces && present(spec.name()).is_some() {
                return Err(format!(
                    "source {:?} was added at run time: remove it first",
                    spec.name()
                ));
            }
            let open = spec.open_with(None, None, &self.hub.twins);
            opened.push(open.map_err(|error| spec.blame(&error))?);
        }
        Ok(Reload {
            difference,
            config,
            opened,
            made,
            _turn: turn,
        })
    }

    /// Whether what was prepared can still be done: filters were waited for meanwhile.
    pub(super) fn still_fits(&self, reload: &Reload) -> Result<(), Refusal> {
        let closes = &reload.difference.close;
        for (place, source) in self.hub.present() {
            if closes.contains(&source.name) {
                self.hub.may_retire(place)?;
            } else if reload.opened.iter().any(|it| it.name() == source.name) {
                let what = format!(
                    "source {:?} was added meanwhile; nothing is changed",
                    source.name
                );
                return Err(Refusal::new(code::EXISTS, what));
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
            difference,
            config,
            opened,
            made,
            _turn,
        } = reload;
        let mut failed = None;
        match self.adopt_programs(made) {
            Ok(asked) => owed.extend(asked),
            Err(refusal) => failed = Some(refusal),
        }
        for name in &difference.close {
            let found = self.hub.present().find(|(_, source)| source.name == *name);
            // It may have been removed at run time.
            if let Some(place) = found.map(|(place, _)| place) {
                self.part_from(token, place);
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
        let mut missing = Vec::new();
        for source in opened {
            let name = source.name().to_owned();
            if let Err(refusal) = self.welcome(source) {
                log::error!(target: "source", "{}", refusal.text);
                failed = failed.or(Some(refusal));
                missing.push(name);
            }
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
        // The next reload tries it again.
        let sources = &mut self.reloads.config.sources;
        sources.retain(|spec| !missing.iter().any(|name| name == spec.name()));
        failed.map_or_else(|| Ok(answer(told)), Err)
    }
}

/// What is different, as it is answered.
fn answer(told: Vec<(String, &'static str)>) -> Message {
    let counted = |(name, what): (String, &str)| Counted {
        kind: "change".into(),
        name,
        labels: vec![("what".into(), what.into())],
        values: Vec::new(),
    };
    Message::Counters(told.into_iter().map(counted).collect())
}

/// Why a port is gone.
const REMOVED: &str = "an operator removed the source, or changed it";
