//! Entrances of switches that come and go at run time.
//!
//! ```text
//!   set, reload ── a thread opens those that come ── put in force ── a thread ends those that went ── answered
//!   remove ─────────────────────────────────────────────────────────►┘
//! ```
//!
//! Their files may lie where the operator likes, and whoever joined by one that goes is parted with: neither is for the
//! control thread to wait for.

use std::num::NonZeroU16;

use vnplug_path::source::SourceError;
use vnplug_ring::control::{Message, code};
use vnplug_switch::{EntranceChange, Gone, settings};

use super::Control;
use super::elsewhere::Elsewhere;
use super::sources::FAILED;
use super::waiting::Whom;
use crate::hub::Refusal;
use crate::spec::{Means, SourceSpec, is_entrance};

/// Changes of entrances that are on their way.
pub(super) struct Entering {
    done: Elsewhere<Stage>,
}

/// How far a thread got.
enum Stage {
    Opened(Box<Wish>),
    Ended(Whom, Box<Result<Message, Refusal>>),
}

/// What an operator sets of a switch's entrances.
struct Wish {
    whom: Whom,
    name: String,
    /// `key=value`.
    texts: Vec<String>,
    keep: bool,
    opened: Result<EntranceChange, String>,
}

impl Default for Entering {
    fn default() -> Self {
        Self {
            done: Elsewhere::new(),
        }
    }
}

impl Control {
    /// Has entrances of a switch opened and ended, if that is what is set; false if it is something else.
    pub(super) fn set_entrances(
        &mut self,
        whom: Whom,
        name: &str,
        port: Option<NonZeroU16>,
        text: &str,
        keep: bool,
    ) -> Result<bool, Refusal> {
        let texts: Vec<String> = settings::words(text).map(str::to_owned).collect();
        let is_meant = |text: &String| is_entrance(text.split('=').next().unwrap_or_default());
        if port.is_some() || !texts.iter().any(is_meant) {
            return Ok(false);
        }
        let wrong = |what: String| Refusal::new(code::INVALID, what);
        if let Some(other) = texts.iter().find(|text| !is_meant(text)) {
            return Err(wrong(format!(
                "{other}: set that by a command of its own; here are entrances"
            )));
        }
        if let Some(bare) = texts.iter().find(|text| !text.contains('=')) {
            return Err(wrong(format!("{bare:?} is not KEY=VALUE")));
        }
        let (source, board) = self.hub.switch(name)?;
        let (name, board) = (source.name.clone(), board.clone());
        let Some(spec) = self.switches.spec(&name) else {
            return Ok(false);
        };
        let (spec, means) = (spec.with(&texts), self.means());
        let wish = move |opened| {
            Stage::Opened(Box::new(Wish {
                whom,
                name: name.clone(),
                texts: texts.clone(),
                keep,
                opened,
            }))
        };
        let failed = wish.clone();
        let open = move || {
            let config = spec.entrances_and_settings(&means);
            let opened = config
                .map_err(|error| spec.blame(&error, &means))
                .and_then(|config| board.plan(&config, &spec.uplink_texts()))
                .and_then(|change| {
                    let opened = self::open(change, &spec, &means);
                    opened.map_err(|error| spec.blame(&error, &means))
                });
            wish(opened)
        };
        let begun = self
            .entering
            .done
            .begin(&self.bell, open, move || failed(Err(FAILED.into())));
        begun.map(|()| true).map_err(|error| {
            let what = format!("cannot open entrances: {error}");
            Refusal::new(code::INTERNAL, what)
        })
    }

    /// Goes on with entrances that were opened, or ended.
    pub(super) fn entrances_changed(&mut self) {
        while let Some(stage) = self.entering.done.next() {
            match stage {
                Stage::Ended(whom, answer) => {
                    self.sessions.set_busy(whom.token, false);
                    let answer = (*answer).map(|message| (message, Vec::new()));
                    let went = self.sessions.answer(whom, answer);
                    self.went_on(whom.token, went);
                }
                Stage::Opened(wish) => {
                    let whom = wish.whom;
                    match self.put_entrances(*wish) {
                        Ok((gone, answer)) => self.end_entrances(whom, gone, answer),
                        Err(refusal) => {
                            self.sessions.set_busy(whom.token, false);
                            let went = self.sessions.answer(whom, Err(refusal));
                            self.went_on(whom.token, went);
                        }
                    }
                }
            }
        }
    }

    /// Puts entrances that were opened in force.
    fn put_entrances(&mut self, wish: Wish) -> Result<(Gone, Result<Message, Refusal>), Refusal> {
        let Wish {
            name,
            texts,
            keep,
            opened,
            ..
        } = wish;
        let change = opened.map_err(|what| Refusal::new(code::INVALID, what))?;
        if !change.fits() {
            let what = format!("switch {name:?} was changed meanwhile; nothing is changed");
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        tell(&name, &change);
        let gone = change.put();
        let answer = match keep {
            false => {
                self.switches.note_once(&name, &texts);
                Ok(Message::Done)
            }
            true => {
                let texts: Vec<_> = texts.iter().map(String::as_str).collect();
                let kept = self.switches.keep(&name, None, &texts);
                kept.map(|()| Message::Done).map_err(|error| {
                    let what = format!("it is set, but not kept for a restart: {error}");
                    Refusal::new(code::INTERNAL, what)
                })
            }
        };
        Ok((gone, answer))
    }

    /// Answers when entrances have ended.
    pub(super) fn end_entrances(
        &mut self,
        whom: Whom,
        gone: Gone,
        answer: Result<Message, Refusal>,
    ) {
        self.sessions.set_busy(whom.token, true);
        let failed = move || {
            let refusal = Refusal::new(code::INTERNAL, FAILED);
            Stage::Ended(whom, Box::new(Err(refusal)))
        };
        let end = move || {
            drop(gone);
            Stage::Ended(whom, Box::new(answer))
        };
        if let Err(error) = self.entering.done.begin(&self.bell, end, failed) {
            // They have ended here, as the thread's work was dropped.
            let what = format!("it is done, but without a thread: {error}");
            self.sessions.set_busy(whom.token, false);
            let refused = Err(Refusal::new(code::INTERNAL, what));
            let went = self.sessions.answer(whom, refused);
            self.went_on(whom.token, went);
        }
    }
}

/// Opens what comes. The calling thread may wait.
pub(super) fn open(
    mut change: EntranceChange,
    spec: &SourceSpec,
    means: &Means,
) -> Result<EntranceChange, SourceError> {
    change.open()?;
    let (uplinks, needs_more) = spec.late_uplinks(change.uplinks(), means)?;
    let plug = move || change.plug(uplinks).map(|()| change);
    match needs_more {
        true => means.errands.run(plug)?,
        false => plug(),
    }
}

/// Says in the log which entrances and uplinks come and go.
pub(super) fn tell(switch: &str, change: &EntranceChange) {
    for (comes, what) in change.told() {
        let how = if comes { "comes" } else { "goes" };
        log::info!(target: "control", "switch {switch}: {what} {how}");
    }
}
