//! Which ports are taken, and by whom: for the threads that let clients in.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::forward::{MAX_PORTS, Number};
use crate::settings::{PortSettings, Settings};

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

/// Who of the host's users may join, and what a port of theirs may and may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The user.
    pub uid: u32,
    /// Settings of the port, `key=value` with commas between them.
    pub settings: String,
}

/// A port that joined under a grant.
#[derive(Debug)]
pub(crate) struct Granted {
    /// What the grant says of it.
    pub(crate) text: String,
    /// What was said of its number before, and is again when it is free.
    pub(crate) before: Option<PortSettings>,
}

/// The ports that are taken.
#[derive(Debug)]
pub(crate) struct Roster {
    ports: BTreeMap<Number, Holder>,
    /// Who had a number last that is free, or taken again.
    last: BTreeMap<Number, String>,
    /// Those that joined under a grant.
    pub(crate) granted: BTreeMap<Number, Granted>,
    /// Who may join; `None`: whom the entrances let in.
    grants: Option<Vec<Grant>>,
    /// Those whose frames go through rings.
    rings: BTreeSet<Number>,
    /// Those that are to be closed by who let them in. One whose link is not there yet has none.
    closing: BTreeSet<Number>,
    /// Ports in all, and of one owner.
    limits: (usize, usize),
    /// What the operator says of the switch. The thread that forwards is told of changes in their order, for
    /// they are made and sent with the lock held.
    pub(crate) settings: Settings,
    /// What its configuration says of it.
    pub(crate) first: Settings,
}

impl Roster {
    pub(crate) fn new(limits: (usize, usize), settings: Settings) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            ports: BTreeMap::new(),
            last: BTreeMap::new(),
            granted: BTreeMap::new(),
            grants: None,
            rings: BTreeSet::new(),
            closing: BTreeSet::new(),
            limits,
            first: settings.clone(),
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
            None => self.first_free(),
        };
        let port = free.and_then(NonZeroU16::new).ok_or("no port is free")?;
        self.ports.insert(port.get(), holder);
        Ok(port)
    }

    fn first_free(&self) -> Option<Number> {
        // In order, as the numbers that are tried: nothing is searched for ten thousand times.
        let mut taken = self.ports.keys().peekable();
        (1..=MAX_PORTS as Number)
            .find(|port| taken.next_if_eq(&port).is_none() && !self.settings.says_of(*port))
    }

    pub(crate) fn free(&mut self, port: Number) {
        if let Some(holder) = self.ports.remove(&port) {
            self.last.insert(port, holder.owner);
        }
        self.rings.remove(&port);
        self.closing.remove(&port);
    }

    /// A port is to be closed by who let it in.
    pub(crate) fn close(&mut self, port: Number) {
        self.closing.insert(port);
    }

    /// Whether a port is to be closed.
    pub(crate) fn is_closing(&self, port: Number) -> bool {
        self.closing.contains(&port)
    }

    /// The ports that are taken, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = Number> {
        self.ports.keys().copied()
    }

    /// The ports that are taken, in order, and who has them.
    pub(crate) fn holders(&self) -> impl Iterator<Item = (Number, &Holder)> {
        self.ports.iter().map(|(number, holder)| (*number, holder))
    }

    /// Says who may join.
    pub(crate) fn grant(&mut self, grants: Vec<Grant>) {
        self.grants = Some(grants);
    }

    /// The grant under which a user joins; `None`: nothing is said of its ports.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn admit(&self, uid: u32, is_trusted: bool) -> Result<Option<String>, String> {
        let Some(grants) = self.grants.as_ref().filter(|_| !is_trusted) else {
            return Ok(None);
        };
        let own = grants.iter().find(|grant| grant.uid == uid);
        let own = own.ok_or_else(|| {
            format!("user {uid} has no grant to join this switch (--allow-join), and others have")
        })?;
        Ok(Some(own.settings.clone()))
    }

    /// A port's frames go through rings.
    pub(crate) fn add_ring(&mut self, port: Number) {
        self.rings.insert(port);
    }

    /// Whether a port's frames go through rings.
    pub(crate) fn is_ring(&self, port: Number) -> bool {
        self.rings.contains(&port)
    }

    /// Whether somebody else had this number before who has it now.
    pub(crate) fn is_new_to(&self, port: Number) -> bool {
        let both = self.last.get(&port).zip(self.ports.get(&port));
        both.is_some_and(|(last, holder)| *last != holder.owner)
    }

    pub(crate) fn holder(&self, port: Number) -> Option<&Holder> {
        self.ports.get(&port)
    }
}

/// The lock on a roster.
pub(crate) fn locked(roster: &Mutex<Roster>) -> MutexGuard<'_, Roster> {
    roster.lock().unwrap_or_else(PoisonError::into_inner)
}
