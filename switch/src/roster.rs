//! Which ports are taken, and by whom: for the threads that let clients in.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::{Change, Line};
use crate::forward::{MAX_PORTS, Number};

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
    /// Ports in all, and of one owner.
    limits: (usize, usize),
}

impl Roster {
    pub(crate) fn new(limits: (usize, usize)) -> Arc<Mutex<Self>> {
        let ports = BTreeMap::new();
        Arc::new(Mutex::new(Self { ports, limits }))
    }

    /// Takes a port: the wanted one, or the first that is free.
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
            None => (1..=MAX_PORTS as Number).find(is_free),
        };
        let port = free.and_then(NonZeroU16::new).ok_or("no port is free")?;
        self.ports.insert(port.get(), holder);
        Ok(port)
    }

    pub(crate) fn free(&mut self, port: Number) {
        self.ports.remove(&port);
    }

    pub(crate) fn holder(&self, port: Number) -> Option<&Holder> {
        self.ports.get(&port)
    }
}

/// The lock on a roster.
pub(crate) fn locked(roster: &Mutex<Roster>) -> MutexGuard<'_, Roster> {
    roster.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets rings take part in a switch.
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
        let port = locked(&self.roster).take(holder, None)?;
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
