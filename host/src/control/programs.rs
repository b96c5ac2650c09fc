//! Operators' programs that change at run time.
//!
//! ```text
//!   add, replace ── loaded by a thread that may ──┐
//!   reload ──────── loaded, sources opened … ─────┴── the kernel's hooks ── queues' threads ── the old ones are freed
//!   remove ── ports ended ── gone
//! ```

use std::sync::Arc;

use vnplug_ring::control::{ProgramChange, code};

use super::Control;
use super::session::Over;
use super::waiting::Whom;
use crate::config::{Config, program_of};
use crate::hub::exchange::{Made, Parcels, Rest, Wish, unpacked};
use crate::hub::maker::{Errands, Maker};
use crate::hub::{Owed, Peer, Refusal, Step, TwinGrant};
use crate::reload::Difference;

/// What loads programs, and who waits for it.
#[derive(Default)]
pub(super) struct ProgramChanges {
    maker: Option<Maker>,
    asked: Option<Asked>,
    /// On their way to queues' threads and back.
    parcels: Parcels,
    /// What queues' threads may still run.
    rest: Vec<Rest>,
}

/// What programs are loaded for.
enum Asked {
    /// An operator's change of one.
    One(Whom),
    /// A configuration.
    Reload(Whom, Box<Config>, Arc<()>),
}

impl ProgramChanges {
    pub(super) fn new(maker: Option<Maker>) -> Self {
        Self {
            maker,
            ..Self::default()
        }
    }

    /// Who opens what takes the rights that loading programs takes.
    pub(super) fn errands(&self) -> Errands {
        self.maker
            .as_ref()
            .map_or_else(Errands::default, Maker::errands)
    }

    /// Frees what is over, elsewhere if there is somebody.
    fn discard(&self, rest: impl Send + 'static) {
        match &self.maker {
            Some(maker) => maker.discard(rest),
            None => drop(rest),
        }
    }
}

impl Control {
    /// What operators change of the programs.
    pub(super) fn of_program_change(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        change: ProgramChange,
    ) -> Result<(), Over> {
        let may = self.may_manage(viewer, "change programs");
        let begun = may.and_then(|()| match change {
            ProgramChange::Add { text } => self.add_program(whom, &text).map(|()| false),
            ProgramChange::Replace { text } => self.replace_program(whom, &text).map(|()| false),
            ProgramChange::Remove { name } => self.remove_program(whom.token, &name).map(|()| true),
        });
        match begun {
            // The answer comes when it is loaded.
            Ok(false) => Ok(()),
            Ok(true) => self.done_if(whom, Ok(())),
            Err(refusal) => self.done_if(whom, Err(refusal)),
        }
    }

    fn add_program(&mut self, whom: Whom, text: &str) -> Result<(), Refusal> {
        let grant = grant_of(text)?;
        if self.hub.twins.grant(&grant.name).is_some() {
            let what = format!(
                "there is a program {:?} already: `vnplug programs replace` loads another version",
                grant.name
            );
            return Err(Refusal::new(code::EXISTS, what));
        }
        let wish = self.hub.wish(grant)?;
        self.load_programs(vec![wish], Asked::One(whom))
    }

    fn replace_program(&mut self, whom: Whom, text: &str) -> Result<(), Refusal> {
        let name = text.split('=').next().unwrap_or_default();
        let Some(there) = self.hub.twins.grant(name) else {
            let what = format!("no program {name:?}; `vnplug programs` shows them");
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        let grant = match name == text {
            true => there.clone(),
            false => grant_of(text)?,
        };
        let wish = self.hub.wish(grant)?;
        self.load_programs(vec![wish], Asked::One(whom))
    }

    /// Takes a program away, and ends the ports that go through it.
    pub(super) fn remove_program(&mut self, token: u64, name: &str) -> Result<(), Refusal> {
        let ports = self.hub.ports_through(name);
        let rest = self.hub.take_program(name)?;
        log::info!(target: "program", "program {name:?} is removed, with {} ports", ports.len());
        self.end_ports(token, &ports, REMOVED);
        self.programs.discard(rest);
        Ok(())
    }

    /// Has programs of a configuration loaded, which then goes on.
    pub(super) fn load_for_reload(
        &mut self,
        whom: Whom,
        grants: &[TwinGrant],
        (config, turn): (Config, Arc<()>),
    ) -> Result<(), Refusal> {
        let wishes = grants.iter().map(|grant| self.hub.wish(grant.clone()));
        let wishes = wishes.collect::<Result<Vec<_>, _>>()?;
        self.load_programs(wishes, Asked::Reload(whom, Box::new(config), turn))
    }

    fn load_programs(&mut self, wishes: Vec<Wish>, asked: Asked) -> Result<(), Refusal> {
        let Some(maker) = &self.programs.maker else {
            let what = "this daemon loads no programs after its start: it was started without --change-programs on \
                        (change_programs = \"on\" in its file)";
            return Err(Refusal::new(code::DENIED, what));
        };
        if self.programs.asked.is_some() {
            let what = "other programs are being loaded; try again";
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        maker.load(wishes, &self.bell);
        let (Asked::One(whom) | Asked::Reload(whom, ..)) = &asked;
        self.sessions.set_busy(whom.token, true);
        self.programs.asked = Some(asked);
        Ok(())
    }

    /// Goes on with programs that were loaded.
    pub(super) fn programs_made(&mut self) {
        let Some(made) = self.programs.maker.as_ref().and_then(Maker::next_done) else {
            return;
        };
        let Some(asked) = self.programs.asked.take() else {
            return;
        };
        let whom = match asked {
            Asked::One(whom) => whom,
            Asked::Reload(whom, config, turn) => {
                self.sessions.set_busy(whom.token, false);
                return self.go_on_reloading(whom, made.map(|made| (*config, turn, made)));
            }
        };
        self.sessions.set_busy(whom.token, false);
        let invalid =
            |what: String| Refusal::new(code::INVALID, format!("{what}; nothing is changed"));
        let went = match made.map_err(invalid) {
            // Who asked for it is gone, and did not hear that it is done.
            Ok(made) if self.sessions.get(whom.token).is_none() => {
                self.programs.discard(made);
                return;
            }
            Ok(made) => match self.adopt_programs(whom.token, made) {
                Ok(owed) => {
                    let step = Step::after(owed, |_, heard| Step::done_if(heard));
                    self.carry_on(whom, Ok(step))
                }
                Err(refusal) => self.done_if(whom, Err(refusal)),
            },
            Err(refusal) => self.done_if(whom, Err(refusal)),
        };
        self.went_on(whom.token, went);
    }

    /// Puts programs in force; what threads have to answer before they are everywhere. Who may not use one any more has
    /// no port that goes through it.
    ///
    /// # Errors
    /// [`Refusal`] of the first that could not be; the others are.
    pub(super) fn adopt_programs(
        &mut self,
        token: u64,
        made: Vec<Made>,
    ) -> Result<Vec<Owed<()>>, Refusal> {
        let (mut all, mut failed) = (Vec::new(), None);
        for made in made {
            let name = made.name().to_owned();
            match self.hub.adopt_program(made) {
                Ok((owed, parcels, rest)) => {
                    log::info!(
                        target: "program",
                        "program {name:?} is loaded; the daemon runs it in {} places",
                        owed.len()
                    );
                    all.extend(owed);
                    self.programs.parcels.extend(parcels);
                    self.programs.rest.push(rest);
                    let mut over = self.hub.ports_through(&name);
                    over.retain(|(_, owner)| {
                        let is_operator = self.policy.is_operator(owner);
                        !self.hub.twins.may_use(&name, owner, is_operator)
                    });
                    self.end_ports(token, &over, NARROWED);
                }
                Err(refusal) => failed = failed.or(Some(refusal)),
            }
        }
        failed.map_or(Ok(all), Err)
    }

    /// Frees what programs left that were replaced.
    pub(super) fn free_programs(&mut self) {
        let is_back = |parcel: &mut vnplug_path::engine::Parcel| Arc::strong_count(parcel) == 1;
        let parcels: Parcels = self.programs.parcels.extract_if(.., is_back).collect();
        if !parcels.is_empty() {
            self.programs.discard(unpacked(parcels));
        }
        if self.programs.parcels.is_empty() && !self.programs.rest.is_empty() {
            let rest = std::mem::take(&mut self.programs.rest);
            self.programs.discard(rest);
        }
    }

    /// What of a configuration's programs cannot be done now waits.
    pub(super) fn put_off_programs(&self, difference: &mut Difference) {
        let names: Vec<String> = difference.programs.keys().cloned().collect();
        for name in names {
            let may = self.hub.may_change_program(&name);
            if self.programs.maker.is_none() || may.is_err() {
                difference.put_off(&name);
            }
        }
    }

    /// Sources of a configuration are opened next, for its programs.
    ///
    /// # Errors
    /// What is wrong with the programs.
    pub(super) fn expect_programs(
        &mut self,
        difference: &Difference,
        made: &[Made],
    ) -> Result<(), String> {
        for (name, what) in &difference.programs {
            if *what == "added" && self.hub.twins.grant(name).is_some() {
                return Err(format!(
                    "program {name:?} was added at run time: remove it first"
                ));
            }
        }
        let gone = difference.unload();
        for name in &gone {
            let may = self.hub.may_take_program(name, &difference.close);
            may.map_err(|refusal| refusal.text)?;
        }
        self.hub.twins.expect(made, &gone);
        Ok(())
    }
}

fn grant_of(text: &str) -> Result<TwinGrant, Refusal> {
    program_of(text).map_err(|error| Refusal::new(code::INVALID, error))
}

/// Why ports are gone.
const NARROWED: &str = "an operator took the right to use the program that its packets go through";
const REMOVED: &str = "an operator removed the program that its packets go through";
