//! Which ports are taken, and by whom: for the threads that let clients in.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::{Change, Line};
use crate::forward::{MAX_PORTS, Number};
use crate::settings::Settings;

/// Who has a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Whose port it is, for people: what one owner has is counted together.
    pub owner: String,
    /// The owner is root or the daemon's user, and has no limit of its own.
    pub is_trusted: bool,
    /// How frames come and go, in a word.
    pub way: &'static str,
    /// What the client says of itself.
    pub description: String,
}

/// The ports that are taken.
#[derive(Debug)]
pub(crate) struct Roster {
    ports: BTreeMap<Number, Holder>,
    /// Those whose frames go through rings.
    rings: BTreeSet<Number>,
    /// Ports in all, and of one owner.
    limits: (usize, usize),
    /// What the operator says of the switch. The thread that forwards is told of changes in their order, for
    /// they are made and sent with the lock held.
    pub(crate) settings: Settings,
}

impl Roster {
    pub(crate) fn new(limits: (usize, usize), settings: Settings) -> Arc<Mutex<Self>> {
        let ports = BTreeMap::new();
        Arc::new(Mutex::new(Self {
            ports,
            rings: BTreeSet::new(),
            limits,
            settings,
        }))
    }

    /// Takes a port: the wanted one, or the first that is free and of which nothing is said.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn take(
        &mut self,
        holder: Holder,
        wanted: Option<Number>,
    ) -> Result<NonZeroU16, String> {
        let (all, each) = self.limits;
        if self.ports.len() >= all {
            return Err(format!("all {all} ports are taken (option ports)"));
        }
        let own = self.ports.values().filter(|it| it.owner == holder.owner);
        if !holder.is_trusted && own.count() >= each {
            let owner = &holder.owner;
            return Err(format!(
                "{owner} has {each} ports, the most for one owner (option ports_each)"
            ));
        }
        let is_free = |port: &Number| !self.ports.contains_key(port);
        let free = match wanted {
            Some(port) if !is_free(&port) => return Err(format!("port {port} is taken")),
            Some(port) => Some(port),
            // What is said of a number is meant for who asks for it.
            None => (1..=MAX_PORTS as Number)
                .find(|port| is_free(port) && !self.settings.ports.contains_key(port)),
        };
        let port = free.and_then(NonZeroU16::new).ok_or("no port is free")?;
        self.ports.insert(port.get(), holder);
        Ok(port)
    }

    pub(crate) fn free(&mut self, port: Number) {
        self.ports.remove(&port);
        self.rings.remove(&port);
    }

    /// The ports that are taken, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = Number> {
        self.ports.keys().copied()
    }

    /// Whether a port's frames go through rings.
    pub(crate) fn is_ring(&self, port: Number) -> bool {
        self.rings.contains(&port)
    }

    pub(crate) fn holder(&self, port: Number) -> Option<&Holder> {
        self.ports.get(&port)
    }
}

/// The lock on a roster.
pub(crate) fn locked(roster: &Mutex<Roster>) -> MutexGuard<'_, Roster> {
    roster.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets rings take part in a switch, and an operator see and change it.
#[derive(Debug, Clone)]
pub struct Switchboard {
    pub(crate) roster: Arc<Mutex<Roster>>,
    pub(crate) line: Line,
    pub(crate) entrances: Arc<[(&'static str, PathBuf)]>,
}

impl Switchboard {
    /// The switch's entrances, each by the name of its option, and where they are.
    pub fn entrances(&self) -> &[(&'static str, PathBuf)] {
        &self.entrances
    }

    /// Takes a port whose frames go through rings.
    ///
    /// # Errors
    /// Why there is none.
    pub fn join(&self, holder: Holder) -> Result<NonZeroU16, String> {
        let mut roster = locked(&self.roster);
        let port = roster.take(holder, None)?;
        roster.rings.insert(port.get());
        drop(roster);
        self.line.send(Change::AddRing(port.get()));
        Ok(port)
    }

    /// Frees it, when nothing goes through its rings any more.
    pub fn leave(&self, port: NonZeroU16) {
        // First: who takes the number again must not be removed.
        self.line.send(Change::Remove(port.get()));
        locked(&self.roster).free(port.get());
    }
}
