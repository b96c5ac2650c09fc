//! Operators' programs that change while the daemon runs.
//!
//! ```text
//! wish ── loaded elsewhere ── made ── the kernel's hooks ── queues' threads, each between two batches ── in force
//! ```
//!
//! Until it is made nothing is different. Then every frame is judged by one version: the kernel's links change from one
//! frame to the next, and a queue's thread from one batch to the next.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use vnplug_path::engine::{Command, Exchange, Parcel};
use vnplug_ring::control::code;
use vnplug_twin::{Instance, Program};

use super::asking::Owed;
use super::twin::{Before, Held, Twin};
use super::{Hub, Peer, Refusal, SourceProgram, TwinGrant, Twins};

/// A program that is to be loaded.
pub(crate) struct Wish {
    grant: TwinGrant,
    before: Option<Before>,
    /// How many instances it has now.
    instances: usize,
}

/// A program that was loaded, and is in force nowhere but at hooks that are new.
pub(crate) struct Made {
    twin: Twin,
    instances: Vec<Instance>,
}

/// What is over, and takes time to free.
#[derive(Default)]
pub(crate) struct Rest {
    _held: Vec<Held>,
    _twins: Vec<Twin>,
    _programs: Vec<Arc<Program>>,
    _instances: Vec<Instance>,
}

impl Wish {
    /// Loads it.
    pub(super) fn make(&self) -> Result<Made, String> {
        let twin = Twin::load(&self.grant, self.before.as_ref())?;
        let instances = (0..self.instances).map(|_| twin.program.instance());
        let instances = instances.collect::<io::Result<_>>();
        let instances = instances.map_err(|error| no_instance(&self.grant.name, &error))?;
        Ok(Made { twin, instances })
    }
}

impl Made {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.twin.grant.name
    }
}

impl Twins {
    /// The program of this name, as it was asked for.
    pub(crate) fn grant(&self, name: &str) -> Option<&TwinGrant> {
        self.named(name).map(|at| &self.all[at].grant)
    }

    /// Sources that are opened now are for the time when these are in force, and those of these names are gone.
    pub(crate) fn expect(&mut self, made: &[Made], gone: &[String]) {
        let made = made.iter().map(|it| {
            let program = SourceProgram {
                program: Arc::clone(&it.twin.program),
                totals: Arc::clone(&it.twin.totals),
            };
            (it.name().to_owned(), Some(program))
        });
        let gone = gone.iter().map(|name| (name.clone(), None));
        self.coming = gone.chain(made).collect();
    }

    /// They are, or are not to come.
    pub(crate) fn expect_nothing(&mut self) {
        self.coming.clear();
    }
}

impl Hub {
    /// What is to be loaded for a program, in place of the one of its name if there is one.
    ///
    /// # Errors
    /// [`Refusal`]: the kernel runs the old one as a part of something else.
    pub(crate) fn wish(&self, grant: TwinGrant) -> Result<Wish, Refusal> {
        let Some(twin) = self.twins.named(&grant.name).map(|at| &self.twins.all[at]) else {
            return Ok(Wish {
                grant,
                before: None,
                instances: 0,
            });
        };
        self.may_change_program(&grant.name)?;
        let places = twin.held.iter().filter_map(|held| held.link.as_ref());
        Ok(Wish {
            instances: self.seats(twin).len(),
            before: Some(Before {
                program: Arc::clone(&twin.program),
                totals: Arc::clone(&twin.totals),
                places: places.map(|(place, _)| place.clone()).collect(),
            }),
            grant,
        })
    }

    /// Whether a program is by itself wherever it runs.
    ///
    /// # Errors
    /// [`Refusal`]: the kernel runs it as a part of something else.
    pub(crate) fn may_change_program(&self, name: &str) -> Result<(), Refusal> {
        let at = self.twins.named(name);
        let mut held = at.into_iter().flat_map(|at| &self.twins.all[at].held);
        match held.find(|held| held.link.is_none()) {
            None => Ok(()),
            Some(Held { told, .. }) => {
                let what = format!(
                    "program {name:?} is in one piece with what the kernel runs at {told}: it changes when the daemon starts \
                     again"
                );
                Err(Refusal::new(code::INVALID, what))
            }
        }
    }

    /// Where the daemon runs a program: source, queue, and what has the instance if that is no source.
    fn seats(&self, twin: &Twin) -> Vec<Seat> {
        let ports = twin.instances.iter().filter_map(|(&(source, queue), it)| {
            let at = Some(it.upgrade()?);
            // What is left of a source that was removed has no thread any more.
            self.sources[source].workers.get(queue)?;
            Some((source, queue, at))
        });
        let own = |it: &super::Source| it.program == twin.grant.name;
        let sources = self.sources.iter().enumerate().filter(|it| own(it.1));
        let queues = sources.flat_map(|(source, it)| {
            let queues = 0..it.workers.len();
            queues.map(move |queue| (source, queue, None))
        });
        ports.chain(queues).collect()
    }

    /// Puts a program in force; what was in its place is to be freed when that was answered.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing is different.
    pub(crate) fn adopt_program(
        &mut self,
        made: Made,
    ) -> Result<(Vec<Owed<()>>, Parcels, Rest), Refusal> {
        let Made {
            mut twin,
            mut instances,
        } = made;
        let mut rest = Rest::default();
        let Some(at) = self.twins.named(&twin.grant.name) else {
            self.twins.all.push(twin);
            return Ok((Vec::new(), Vec::new(), rest));
        };
        let seats = self.seats(&self.twins.all[at]);
        // Ports may have been opened since it was asked for.
        while instances.len() < seats.len() {
            let one = twin.program.instance();
            let one = one.map_err(|error| {
                Refusal::new(code::NO_MEMORY, no_instance(&twin.grant.name, &error))
            })?;
            instances.push(one);
        }
        let before = &mut self.twins.all[at];
        let stays = |held: &Held| {
            let place = held.link.as_ref().map(|(place, _)| place);
            place.is_none_or(|place| twin.grant.attach.contains(place))
        };
        let (kept, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut before.held)
            .into_iter()
            .partition(stays);
        if let Err(error) = replace(&kept, &twin.program, &before.program) {
            before.held = kept.into_iter().chain(gone).collect();
            let what = format!("program {:?}: {error}; nothing is changed", twin.grant.name);
            return Err(Refusal::new(code::INTERNAL, what));
        }
        twin.held.extend(kept);
        rest._held = gone;
        before.grant = twin.grant;
        before.held = twin.held;
        rest._programs
            .push(std::mem::replace(&mut before.program, twin.program));
        rest._instances
            .push(std::mem::replace(&mut before.reader, twin.reader));
        let (mut owed, mut parcels) = (Vec::new(), Vec::new());
        for ((source, queue, at), instance) in seats.into_iter().zip(instances) {
            let parcel: Parcel = Arc::new(Mutex::new(Some(instance)));
            parcels.push(Arc::clone(&parcel));
            let line = self.sources[source].workers[queue].line();
            let all = vec![Exchange { at, parcel }];
            owed.push(Owed::ask(line, |reply| Command::Exchange(all, reply)));
        }
        Ok((owed, parcels, rest))
    }

    /// The ports that go through a program, and whose they are.
    pub(crate) fn ports_through(&self, name: &str) -> Vec<(u32, Peer)> {
        let ports = self.ports.iter().filter(|(_, port)| port.twin == name);
        ports.map(|(id, port)| (*id, port.owner.clone())).collect()
    }

    /// Takes a program away; the ports that go through it are to be ended.
    ///
    /// # Errors
    /// [`Refusal`]: there is none, or a source has it.
    pub(crate) fn take_program(&mut self, name: &str) -> Result<Rest, Refusal> {
        let at = self.twins.named(name);
        let at = at.ok_or_else(|| super::twin::no_program(name))?;
        self.may_take_program(name, &[])?;
        let twin = self.twins.all.remove(at);
        Ok(Rest {
            _twins: vec![twin],
            ..Rest::default()
        })
    }

    /// Whether no source has a program but those that are closed with it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn may_take_program(&self, name: &str, closed: &[String]) -> Result<(), Refusal> {
        self.may_change_program(name)?;
        let mut sources = self.present().filter(|(_, it)| it.program == name);
        match sources.find(|(_, it)| !closed.contains(&it.name)) {
            None => Ok(()),
            Some((_, source)) => {
                let what = format!(
                    "all frames of source {:?} go through program {name:?}, and its readers are to see no others: remove the \
                     source first",
                    source.name
                );
                Err(Refusal::new(code::INVALID, what))
            }
        }
    }
}

/// Source, queue, and what has the instance; `None`: the source itself.
type Seat = (
    usize,
    usize,
    Option<Arc<Mutex<vnplug_path::port::PortProgram>>>,
);

/// They come back with what was there before.
pub(crate) type Parcels = Vec<Parcel>;

/// What came back in parcels.
pub(crate) fn unpacked(parcels: Parcels) -> Rest {
    let all = parcels.into_iter().filter_map(|parcel| {
        let mut parcel = parcel.lock().unwrap_or_else(PoisonError::into_inner);
        parcel.take()
    });
    Rest {
        _instances: all.collect(),
        ..Rest::default()
    }
}

/// All of them run this program from now on, or all the other one.
fn replace(held: &[Held], program: &Program, before: &Program) -> Result<(), String> {
    for (at, Held { told, link }) in held.iter().enumerate() {
        let Some(Err(error)) = link.as_ref().map(|(_, link)| link.replace(program)) else {
            continue;
        };
        // Where the interface is gone, no program is.
        if error.raw_os_error() == Some(libc::ENOLINK) {
            continue;
        }
        for (_, link) in held[..at].iter().filter_map(|it| it.link.as_ref()) {
            if let Err(error) = link.replace(before) {
                log::error!(target: "program", "the old program cannot be put back: {error}");
            }
        }
        return Err(format!("the kernel does not run it at {told}: {error}"));
    }
    Ok(())
}

fn no_instance(name: &str, error: &io::Error) -> String {
    format!("program {name:?}: an instance of it: {error}")
}
