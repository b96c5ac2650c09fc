//! The entrances of a switch, which come and go while it runs.
//!
//! ```text
//!   plan ── which come, which go ── open: their files ── put: in force ── what went ends where it is dropped
//! ```
//!
//! Each is one way in, with a thread of its own: none that stays notices that another comes or goes. Opening and ending take
//! as long as the file system does, and are for a thread that may wait.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vnplug_path::source::SourceError;

use crate::board::Switchboard;
use crate::config::{SwitchConfig, VdeConfig};
use crate::link::Entrance;
use crate::sockets::door::{self as sockets, SocketsConfig};
use crate::vde::door as vde;
use crate::vhost::door::{self as vhost, VhostConfig};

/// Those of a switch.
#[derive(Debug, Default)]
pub(crate) struct Entrances(Mutex<State>);

#[derive(Default)]
struct State {
    phase: Phase,
    /// How often they were changed.
    changes: u64,
    all: Vec<Standing>,
    name: String,
    /// Bytes of the longest frame.
    longest: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// They are made, and nobody joins yet.
    #[default]
    Made,
    Served,
    /// The switch is gone.
    Over,
}

/// An entrance that is there.
struct Standing {
    way: Way,
    door: Box<dyn Entrance>,
}

/// An entrance as the configuration has it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    Vde(VdeConfig),
    /// Of one kind of sockets.
    Sockets(SocketsConfig),
    /// The socket, or those of front-ends that listen.
    Vhost(VhostConfig),
}

/// What must be done so that the entrances are as a configuration says.
#[derive(Debug)]
pub struct EntranceChange {
    board: Switchboard,
    /// What was there when it was found out.
    changes: u64,
    come: Vec<Way>,
    go: Vec<Way>,
    opened: Vec<Standing>,
}

/// Entrances that are there no more. Their threads and files go, and so do their clients' ports, when this is dropped, which
/// takes a moment.
#[must_use]
#[derive(Debug)]
pub struct Gone {
    _all: Vec<Standing>,
}

/// Ends the entrances of a switch when it is dropped.
pub(crate) struct Served(pub(crate) Arc<Entrances>);

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.0.end());
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.all).finish()
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.way.fmt(f)
    }
}

impl Entrances {
    /// Makes those of a new switch, which nobody can use yet.
    ///
    /// # Errors
    /// [`SourceError`] that says which cannot be made, and why.
    pub(crate) fn make(config: &SwitchConfig, board: &Switchboard) -> Result<(), SourceError> {
        let mut state = board.entrances.locked();
        (state.name, state.longest) = (config.name.clone(), config.longest);
        let (name, longest) = (&config.name, config.longest);
        let all = ways(config).into_iter();
        let all = all.map(|way| Standing::open(way, (name, longest), board));
        state.all = all.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Lets clients join. By now the daemon has given up its privileges.
    pub(crate) fn begin(&self) {
        let mut state = self.locked();
        state.phase = Phase::Served;
        state.all.iter_mut().for_each(|it| it.door.open());
    }

    fn end(&self) -> Gone {
        let mut state = self.locked();
        state.phase = Phase::Over;
        state.changes += 1;
        Gone {
            _all: std::mem::take(&mut state.all),
        }
    }

    /// What it guards is whole after every statement.
    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Switchboard {
    /// The switch's entrances, each by the name of its option, and where they are.
    pub fn entrances(&self) -> Vec<(&'static str, PathBuf)> {
        let state = self.entrances.locked();
        let given = |it: &Standing| {
            // A directory that is gone cannot be named.
            let path = std::path::absolute(it.way.path()?);
            path.ok().map(|path| (it.way.option(), path))
        };
        state.all.iter().filter_map(given).collect()
    }

    /// What must be done so that the entrances are as a configuration says, of which nothing else is looked at.
    ///
    /// # Errors
    /// What cannot be done while the switch runs: an entrance stays where it is, but is to be another one.
    pub fn plan(&self, config: &SwitchConfig) -> Result<EntranceChange, String> {
        let state = self.entrances.locked();
        let wanted = ways(config);
        let has = |way: &Way| state.all.iter().any(|it| it.way == *way);
        let come: Vec<_> = wanted.iter().filter(|way| !has(way)).cloned().collect();
        let go = state.all.iter().map(|it| &it.way);
        let go: Vec<_> = go.filter(|way| !wanted.contains(way)).cloned().collect();
        for way in &come {
            if let Some(path) = way.path()
                && go.iter().any(|it| it.path() == Some(path))
            {
                return Err(format!(
                    "{}={} is there with other permissions or another console; it cannot change while clients use it",
                    way.option(),
                    path.display()
                ));
            }
        }
        Ok(EntranceChange {
            board: self.clone(),
            changes: state.changes,
            come,
            go,
            opened: Vec::new(),
        })
    }

    /// Takes all entrances from the switch: nobody joins by them any more.
    pub fn shut(&self) -> Gone {
        self.entrances.end()
    }
}

impl EntranceChange {
    /// Whether nothing is different.
    pub fn is_nothing(&self) -> bool {
        self.come.is_empty() && self.go.is_empty()
    }

    /// Each entrance that comes (`true`) or goes: its option, and where it is.
    pub fn told(&self) -> Vec<(bool, String)> {
        let told = |comes| move |way: &Way| (comes, way.to_string());
        let come = self.come.iter().map(told(true));
        come.chain(self.go.iter().map(told(false))).collect()
    }

    /// Makes those that come; nobody can use them yet, and they are removed if this is dropped.
    ///
    /// # Errors
    /// [`SourceError`] that says which cannot be made, and why.
    pub fn open(&mut self) -> Result<(), SourceError> {
        let state = self.board.entrances.locked();
        let (name, longest) = (state.name.clone(), state.longest);
        drop(state);
        for way in &self.come {
            let opened = Standing::open(way.clone(), (&name, longest), &self.board)?;
            self.opened.push(opened);
        }
        Ok(())
    }

    /// Whether the entrances are still those that there were.
    pub fn fits(&self) -> bool {
        let state = self.board.entrances.locked();
        state.changes == self.changes && state.phase != Phase::Over
    }

    /// Puts it in force: those that were opened are served, and the others go.
    pub fn put(self) -> Gone {
        let mut state = self.board.entrances.locked();
        state.changes += 1;
        if state.phase == Phase::Over {
            return Gone { _all: self.opened };
        }
        let is_gone = |it: &mut Standing| self.go.contains(&it.way);
        let gone = state.all.extract_if(.., is_gone).collect();
        let is_served = state.phase == Phase::Served;
        for mut standing in self.opened {
            if is_served {
                standing.door.open();
            }
            state.all.push(standing);
        }
        Gone { _all: gone }
    }
}

impl Way {
    /// The option that it is written with.
    fn option(&self) -> &'static str {
        match self {
            Self::Vde(_) => "vde",
            Self::Sockets(SocketsConfig {
                stream: Some(_), ..
            }) => "stream",
            Self::Sockets(SocketsConfig { bess: Some(_), .. }) => "bess",
            Self::Sockets(_) => "dgram",
            Self::Vhost(VhostConfig { path: Some(_), .. }) => "vhost",
            Self::Vhost(_) => "vhostconnect",
        }
    }

    /// Where clients find it; nothing, if it goes to them.
    fn path(&self) -> Option<&Path> {
        let path = match self {
            Self::Vde(it) => Some(&it.dir),
            Self::Sockets(it) => it
                .stream
                .as_ref()
                .or(it.bess.as_ref())
                .or(it.dgram.as_ref()),
            Self::Vhost(it) => it.path.as_ref(),
        };
        path.map(PathBuf::as_path)
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self, self.path()) {
            (Self::Vhost(it), None) => {
                let all: Vec<_> = it
                    .connect
                    .iter()
                    .map(|it| it.display().to_string())
                    .collect();
                write!(f, "{}={}", self.option(), all.join(":"))
            }
            (_, path) => {
                let path = path.unwrap_or(Path::new("")).display();
                write!(f, "{}={path}", self.option())
            }
        }
    }
}

impl Standing {
    /// Makes an entrance of a switch of this name and with frames up to this length.
    fn open(
        way: Way,
        (name, longest): (&str, usize),
        board: &Switchboard,
    ) -> Result<Self, SourceError> {
        let (roster, line) = (&board.roster, board.line.clone());
        let made = match way.clone() {
            Way::Vde(config) => vde::Open::new(name, config, roster)
                .map(|open| Box::new(vde::Door::new(open, line)) as Box<dyn Entrance>),
            Way::Sockets(config) => sockets::Open::new(name, config, longest, roster)
                .map(|open| Box::new(sockets::Door::new(open, line)) as _),
            Way::Vhost(config) => vhost::Open::new(name, config, longest, roster)
                .map(|open| Box::new(vhost::Door::new(open, line)) as _),
        };
        let what = |error: io::Error| {
            let what = match &way {
                Way::Vde(_) => "its VDE entrance",
                Way::Sockets(_) => "its entrance by sockets",
                Way::Vhost(_) => "its vhost-user entrance",
            };
            SourceError::io(format!("switch {name:?}: {what}"), error)
        };
        let door = made.map_err(what)?;
        Ok(Self { way, door })
    }
}

/// The entrances of a configuration, one by one.
fn ways(config: &SwitchConfig) -> Vec<Way> {
    let mut all: Vec<_> = config.vde.iter().cloned().map(Way::Vde).collect();
    let SocketsConfig {
        stream,
        bess,
        dgram,
        access,
    } = config.sockets.clone();
    let none = || SocketsConfig {
        access: access.clone(),
        ..SocketsConfig::default()
    };
    all.extend(stream.map(|path| {
        let stream = Some(path);
        Way::Sockets(SocketsConfig { stream, ..none() })
    }));
    all.extend(bess.map(|path| {
        let bess = Some(path);
        Way::Sockets(SocketsConfig { bess, ..none() })
    }));
    all.extend(dgram.map(|path| {
        let dgram = Some(path);
        Way::Sockets(SocketsConfig { dgram, ..none() })
    }));
    let VhostConfig {
        path,
        connect,
        access,
    } = config.vhost.clone();
    if path.is_some() {
        all.push(Way::Vhost(VhostConfig {
            path,
            connect: Vec::new(),
            access: access.clone(),
        }));
    }
    if !connect.is_empty() {
        all.push(Way::Vhost(VhostConfig {
            path: None,
            connect,
            access,
        }));
    }
    all
}
