//! Sources that come and go at run time.
//!
//! ```text
//!   add ───── a thread opens it ── started
//!   remove ── ports ended ── closed ── threads end
//! ```
//!
//! What the configuration file says anew is in [`reloads`](super::reloads).

use std::collections::BTreeSet;
use std::sync::Arc;

use vnplug_ring::control::{Counted, HOST_PREFIX, Message, SourceRequest, code};

use super::Control;
use super::elsewhere::{Elsewhere, part};
use super::session::Over;
use super::waiting::Whom;
use crate::at_once::AT_ONCE;
use crate::hub::{Peer, Refusal, Source, Step, user_grant};
use crate::pattern::Opened;
use crate::spec::{Means, OpenSource, SourceSpec, untimed};
use vnplug_os::peer_log;
use vnplug_path::engine::Worker;
use vnplug_path::source::SourceError;
use vnplug_switch::{Gone, Switchboard};

/// Sources that operators add, on their way.
pub(super) struct Additions {
    /// Their names: there is one of a name at a time.
    opening: BTreeSet<String>,
    opened: Elsewhere<Addition>,
}

/// A source that an operator asked for, open if it can be.
struct Addition {
    whom: Whom,
    name: String,
    /// As it was written, if it is to be kept.
    keep: Option<String>,
    opened: Result<Opened, String>,
}

impl Default for Additions {
    fn default() -> Self {
        Self {
            opening: BTreeSet::new(),
            opened: Elsewhere::new(),
        }
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
                SourceRequest::Add { text, keep } => {
                    self.add_source(whom, text, keep).map(|()| None)
                }
                SourceRequest::Remove { name } => self.remove_source(whom, &name),
                SourceRequest::Reload => self.reload(whom).map(|()| None),
            });
        match step {
            // The answer comes when a thread is done.
            Ok(None) => {
                self.sessions.set_busy(whom.token, true);
                Ok(())
            }
            Ok(Some(step)) => self.carry_on(whom, Ok(step)),
            Err(refusal) => self.sessions.answer(whom, Err(refusal)),
        }
    }

    /// Has a source opened that is to be added: its rings take long to make.
    fn add_source(&mut self, whom: Whom, text: String, keep: bool) -> Result<(), Refusal> {
        let spec: SourceSpec = text
            .parse()
            .map_err(|error: SourceError| Refusal::new(code::INVALID, error.to_string()))?;
        let name = spec.name().to_owned();
        self.may_be_named(&name)?;
        if self.additions.opening.contains(&name) {
            let what = format!("source {name:?} is being added already");
            return Err(Refusal::new(code::EXISTS, what));
        }
        self.hub.next_place()?;
        let spec = self.switches.with_kept(&spec);
        let means = self.means_for(std::slice::from_ref(&spec), &[]);
        let keep = keep.then_some(text);
        let failed = Addition {
            whom,
            name: name.clone(),
            keep: None,
            opened: Err(format!("source {name:?}: {FAILED}")),
        };
        let own = name.clone();
        let open = move || {
            let opened = Opened::open(&spec, &means);
            Addition {
                whom,
                name: own,
                keep,
                opened,
            }
        };
        let begun = self.additions.opened.begin(&self.bell, open, || failed);
        begun.map_err(|error| {
            let what = format!("cannot open source {name:?}: {error}");
            Refusal::new(code::INTERNAL, what)
        })?;
        self.additions.opening.insert(name);
        Ok(())
    }

    /// Goes on with sources that were opened to be added.
    pub(super) fn opened_sources(&mut self) {
        while let Some(addition) = self.additions.opened.next() {
            let Addition {
                whom,
                name,
                keep,
                opened,
            } = addition;
            self.additions.opening.remove(&name);
            let is_there = self.sessions.get(whom.token).is_some();
            let opened = opened
                .map_err(|error| Refusal::new(code::INVALID, error))
                .and_then(|opened| match self.may_be_named(&name) {
                    Ok(()) if is_there => self.welcome_any(whom.token, opened),
                    other => {
                        self.jobs.discard(opened, RING_BYTES);
                        other
                    }
                });
            let opened = opened.and_then(|()| match keep {
                Some(text) if is_there => self.keep_source(&name, &text),
                _ => Ok(()),
            });
            self.sessions.set_busy(whom.token, false);
            let told = opened.map(|()| answer(vec![(format!("source {name}"), "added")]));
            let went = self
                .sessions
                .answer(whom, told.map(|message| (message, Vec::new())));
            self.went_on(whom.token, went);
        }
    }

    fn forget_source(&mut self, name: &str) -> Result<bool, Refusal> {
        self.kept_sources.forget(name).map_err(|error| {
            let what =
                format!("source {name:?} cannot be taken out of those that are kept: {error}");
            Refusal::new(code::INTERNAL, what)
        })
    }

    fn keep_source(&mut self, name: &str, text: &str) -> Result<(), Refusal> {
        self.kept_sources.keep(name, text).map_err(|error| {
            let what =
                format!("source {name:?} is added, but not kept for the next daemon: {error}");
            Refusal::new(code::INTERNAL, what)
        })
    }

    /// What sources are opened with while the daemon runs.
    pub(super) fn means(&self) -> Means {
        Means {
            programs: self.hub.twins.of_sources(),
            user: self.user,
            entrance: Arc::clone(&self.entrance),
            kept: Arc::clone(&self.kept),
            seats: self.seats.clone(),
            errands: self.programs.errands(),
            is_late: true,
            ..Means::default()
        }
    }

    /// The same, for those that come when those of these names go. What stays is as it was opened.
    pub(super) fn means_for(&self, come: &[SourceSpec], go: &[String]) -> Means {
        let go: BTreeSet<&str> = go.iter().map(String::as_str).collect();
        let stays = |(_, it): &(usize, &Source)| it.is_untimed && !go.contains(it.name.as_str());
        let untimed = self.hub.present().filter(stays).count() + untimed(come.iter());
        Means {
            untimed,
            ..self.means()
        }
    }

    /// Whether the operator may have a source of this name; a pattern's gives way to it.
    pub(super) fn may_be_named(&self, name: &str) -> Result<(), Refusal> {
        match self.patterns.of(name) {
            Some(_) => Ok(()),
            None => self.must_be_new(name),
        }
    }

    /// Where the source of this name is that the operator named: not one that is there by a pattern since.
    pub(super) fn place_of(&self, name: &str) -> Option<usize> {
        let mut present = self.hub.present();
        let found = present.find(|(_, source)| source.name == name);
        let (place, _) = found.filter(|_| self.patterns.of(name).is_none())?;
        Some(place)
    }

    pub(super) fn must_be_new(&self, name: &str) -> Result<(), Refusal> {
        let mut present = self.hub.present();
        if self.patterns.has(name) || present.any(|(_, source)| source.name == name) {
            let what = format!("there is a source {name:?} already: remove it first");
            return Err(Refusal::new(code::EXISTS, what));
        }
        Ok(())
    }

    /// Removes a source; `None`: it is answered when a thread is done.
    fn remove_source(&mut self, whom: Whom, name: &str) -> Result<Option<Step>, Refusal> {
        let token = whom.token;
        let bare = name.strip_prefix(HOST_PREFIX).unwrap_or(name);
        let told = || answer(vec![(format!("source {bare}"), "removed")]);
        let removed = || Some(Step::Done(Ok(told())));
        let is_there = self.patterns.has(bare) || self.hub.find(name).is_ok();
        // One that could not be opened is only kept.
        let was_kept = !is_there && self.forget_source(bare)?;
        if was_kept {
            return Ok(removed());
        }
        if self.patterns.has(bare) {
            self.forget_source(bare)?;
            self.part_from_pattern(token, bare, REMOVED);
            return Ok(removed());
        }
        let named = self.hub.find(name)?;
        if named.queue.is_some() || named.port.is_some() {
            let what = format!("{name:?} is a part of a source; only whole sources are removed");
            return Err(Refusal::new(code::INVALID, what));
        }
        let own = &self.hub.sources()[named.source].name;
        if let Some(pattern) = self.patterns.of(own) {
            let what = format!(
                "{own:?} is there by {pattern:?}, as long as its interface: remove that, with all its sources"
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        self.hub.may_retire(named.source)?;
        self.forget_source(bare)?;
        let gone = self.part_from(token, named.source);
        if let Some(gone) = gone {
            self.switches.forget(bare);
            self.end_entrances(whom, gone, Ok(told()));
            return Ok(None);
        }
        Ok(removed())
    }

    /// Starts what was opened.
    pub(super) fn welcome_any(&mut self, token: u64, opened: Opened) -> Result<(), Refusal> {
        match opened {
            Opened::One(source) => {
                let name = source.name().to_owned();
                self.take_from_pattern(token, &name, REMOVED);
                self.welcome(*source)
                    .inspect_err(|_| self.patterns.free(&name))
            }
            Opened::Many(pattern) => self.welcome_pattern(*pattern),
        }
    }

    /// Starts a source.
    pub(super) fn welcome(&mut self, opened: OpenSource) -> Result<(), Refusal> {
        let place = self.hub.next_place()?;
        let name = opened.name().to_owned();
        if let Some(board) = opened.board() {
            let joiners: Vec<_> = self.policy.joiners(&name).collect();
            if !joiners.is_empty() {
                board.grant(joiners.into_iter().filter_map(user_grant).collect());
            }
            self.switches.restore(opened.spec(), board);
        }
        let source = opened
            .start(place)
            .map_err(|error| Refusal::new(code::INTERNAL, error.to_string()))?;
        self.watch.add(source.workers.iter().map(Worker::line));
        // Others than operators may make interfaces that match.
        let level = log::Level::Info;
        match self.patterns.of(&name) {
            None => {
                log::info!(target: "source", "source {name:?} is added: {}", source.about())
            }
            Some(_) => peer_log!(
                level,
                "source",
                "source {name:?} is added: {}",
                source.description
            ),
        }
        self.hub.add_at(place, source);
        Ok(())
    }

    /// Closes a source that the operator has no more, as [`retire`](Self::retire) does. The entrances of a switch.
    #[must_use]
    pub(super) fn part_from(&mut self, token: u64, place: usize) -> Option<Gone> {
        let source = &self.hub.sources()[place];
        let name = source.name.clone();
        // Nobody is to join meanwhile.
        let gone = source.board.as_ref().map(Switchboard::shut);
        let ports = self.retire(token, place, REMOVED);
        log::info!(target: "source", "source {name:?} is removed, with {ports} ports");
        gone
    }

    /// Closes the ports of a source, which nobody finds any more. Their readers try to open them again: if there is another source of
    /// that name they go on with it. How many they are.
    pub(super) fn retire(&mut self, token: u64, place: usize, why: &str) -> usize {
        let name = self.hub.sources()[place].name.clone();
        let ports = self.hub.retire(place);
        self.patterns.free(&name);
        let count = ports.len();
        let owned = |port| Some((port, self.hub.ports().get(&port)?.owner.clone()));
        let owned: Vec<_> = ports.into_iter().filter_map(owned).collect();
        self.end_ports(token, &owned, why);
        count
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
        part(move || part_with(workers));
    }
}

/// Sixteen close their queues at the same time. No more of them: each has a second from when it is told.
fn part_with(workers: Vec<Worker>) {
    let mut left = workers.into_iter();
    loop {
        let mut some: Vec<_> = left.by_ref().take(AT_ONCE).collect();
        if some.is_empty() {
            return;
        }
        some.iter_mut().for_each(Worker::stop);
    }
}

/// What is different, as it is answered.
pub(super) fn answer(told: Vec<(String, &'static str)>) -> Message {
    let counted = |(name, what): (String, &str)| Counted {
        kind: "change".into(),
        name,
        labels: vec![("what".into(), what.into())],
        values: Vec::new(),
    };
    Message::Counters(told.into_iter().map(counted).collect())
}

/// Why a port is gone.
pub(super) const REMOVED: &str = "an operator removed the source, or changed it";
/// What is said of a thread that panicked.
pub(super) const FAILED: &str = "opening it failed, which is a bug in vnplugd: the log says where";
/// About as many bytes are freed with an open source that is not wanted.
pub(super) const RING_BYTES: u64 = 96 << 20;
