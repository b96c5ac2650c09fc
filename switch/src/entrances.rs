//! The entrances of a switch, and its uplinks, which come and go while it runs.
//!
//! ```text
//!   plan ── which come, which go ── open: their files ── put: in force ── what went ends where it is dropped
//! ```
//!
//! Each is one way in, with a thread of its own: none that stays notices that another comes or goes. Opening and ending take
//! as long as the file system does, and are for a thread that may wait. So are the sockets of uplinks: they are opened aside, and what
//! the thread that forwards lets go of is closed aside.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vnplug_path::source::{Queue, SourceError};

use crate::board::{Switchboard, free, take};
use crate::config::{SwitchConfig, VdeConfig};
use crate::control::{Change, PATIENCE};
use crate::door::Door;
use crate::forward::Number;
use crate::sockets::door::{self as sockets, SocketsConfig};
use crate::uplink::{Unplugged, Uplink};
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
    uplinks: Vec<Plugged>,
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

/// An uplink that is there.
#[derive(Debug, Clone)]
struct Plugged {
    /// As it was written.
    text: String,
    interface: String,
    how: &'static str,
    port: Number,
}

/// An uplink that comes.
struct Plug {
    uplink: Uplink,
    /// Its queues, if its interface is there.
    queues: Option<Vec<Box<dyn Queue>>>,
    port: Taken,
}

/// A number that was taken, and is free again when this is dropped, unless it was used.
struct Taken(Switchboard, Option<Number>);

/// An uplink that goes: it is heard of when the thread that forwards has let go of it.
#[derive(Debug)]
struct Leaving(Receiver<Unplugged>);

/// An entrance that is there.
struct Standing {
    way: Way,
    door: Door,
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

/// What must be done so that the entrances and uplinks are as a configuration says.
pub struct EntranceChange {
    board: Switchboard,
    /// What was there when it was found out.
    changes: u64,
    come: Vec<Way>,
    go: Vec<Way>,
    opened: Vec<Standing>,
    /// Uplinks that come, as they are written.
    texts: Vec<String>,
    plugs: Vec<Plug>,
    unplugs: Vec<Plugged>,
}

/// Entrances that are there no more. Their threads and files go, and so do their clients' ports, when this is dropped, which
/// takes a moment.
#[must_use]
#[derive(Debug)]
pub struct Gone {
    _all: Vec<Standing>,
    _uplinks: Vec<Leaving>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // What comes is closed here. A thread that does not answer closes it itself.
        drop(self.0.recv_timeout(PATIENCE));
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(port) = self.1.take() {
            free(&self.0.roster, &self.0.line, port);
        }
    }
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
            // They go with the switch.
            _uplinks: Vec::new(),
        }
    }

    /// An uplink has this port.
    pub(crate) fn note(&self, uplink: &Uplink, port: Number) {
        self.locked().uplinks.push(Plugged::new(uplink, port));
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

    /// The switch's uplinks, each as it was written, and for people.
    pub fn uplinks(&self) -> Vec<(String, String)> {
        let state = self.entrances.locked();
        let told = |it: &Plugged| (it.text.clone(), format!("{} ({})", it.interface, it.how));
        state.uplinks.iter().map(told).collect()
    }

    /// What must be done so that the entrances are as a configuration says, of which nothing else is looked at, and the
    /// uplinks are those that are written so.
    ///
    /// # Errors
    /// What cannot be done while the switch runs: an entrance stays where it is, but is to be another one; or an uplink.
    pub fn plan(
        &self,
        config: &SwitchConfig,
        uplinks: &[String],
    ) -> Result<EntranceChange, String> {
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
        let there = |text: &String| state.uplinks.iter().any(|it| it.text == *text);
        let texts = uplinks.iter().filter(|text| !there(text)).cloned();
        let texts: Vec<_> = texts.collect();
        let unplugs = state.uplinks.iter();
        let unplugs: Vec<_> = unplugs
            .filter(|it| !uplinks.contains(&it.text))
            .cloned()
            .collect();
        for gone in &unplugs {
            let interface = &gone.interface;
            if texts
                .iter()
                .any(|text| text.split('/').next() == Some(interface))
            {
                return Err(format!(
                    "uplink {interface} is there with other options: take it away first"
                ));
            }
        }
        Ok(EntranceChange {
            board: self.clone(),
            changes: state.changes,
            come,
            go,
            opened: Vec::new(),
            texts,
            plugs: Vec::new(),
            unplugs,
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
        let entrances = self.come.is_empty() && self.go.is_empty();
        entrances && self.texts.is_empty() && self.unplugs.is_empty()
    }

    /// What comes (`true`) or goes: entrances, by their options and where they are, and uplinks.
    pub fn told(&self) -> Vec<(bool, String)> {
        let told = |comes| move |way: &Way| (comes, format!("entrance {way}"));
        let come = self.come.iter().map(told(true));
        let uplink = |comes| move |text: &String| (comes, format!("uplink {text}"));
        let plugs = self.texts.iter().map(uplink(true));
        let unplugs = self.unplugs.iter().map(|it| &it.text).map(uplink(false));
        let go = self.go.iter().map(told(false));
        come.chain(go).chain(plugs).chain(unplugs).collect()
    }

    /// The uplinks that come, as they are written.
    pub fn uplinks(&self) -> &[String] {
        &self.texts
    }

    /// Opens uplinks that come, which are these; they take a port each, and nothing goes through them yet.
    ///
    /// # Errors
    /// [`SourceError`] that says which cannot be opened, and why.
    pub fn plug(&mut self, uplinks: Vec<Uplink>) -> Result<(), SourceError> {
        for mut uplink in uplinks {
            let interface = uplink.interface.clone();
            let cannot = |error: SourceError| SourceError {
                what: format!("uplink {interface}: {}", error.what),
                cause: error.cause,
            };
            let Switchboard { roster, line, .. } = &self.board;
            let port = take(roster, line, uplink.holder(), (None, None), false);
            let port = port.map_err(|what| cannot(SourceError::new(what)))?;
            let port = Taken(self.board.clone(), Some(port.get()));
            let queues = (uplink.open)().map_err(cannot)?;
            self.plugs.push(Plug {
                uplink,
                queues,
                port,
            });
        }
        Ok(())
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
            return Gone {
                _all: self.opened,
                _uplinks: Vec::new(),
            };
        }
        let uplinks = self.unplugs.into_iter().map(|gone| {
            let (tell, hear) = channel();
            // NB: first. Who takes the number again must not be removed.
            self.board.line.send(Change::Unplug(gone.port, tell));
            free(&self.board.roster, &self.board.line, gone.port);
            state.uplinks.retain(|it| it.port != gone.port);
            Leaving(hear)
        });
        let uplinks = uplinks.collect();
        for mut plug in self.plugs {
            if let Some(port) = plug.port.1.take() {
                state.uplinks.push(Plugged::new(&plug.uplink, port));
                self.board.line.send(Change::Plug {
                    port,
                    uplink: Box::new(plug.uplink),
                    queues: plug.queues,
                });
            }
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
        Gone {
            _all: gone,
            _uplinks: uplinks,
        }
    }
}

impl std::fmt::Debug for EntranceChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.told()).finish()
    }
}

impl Plugged {
    fn new(uplink: &Uplink, port: Number) -> Self {
        Self {
            text: uplink.text.clone(),
            interface: uplink.interface.clone(),
            how: uplink.how,
            port,
        }
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
            Way::Vde(config) => vde::Open::new(name, config, roster).map(|open| open.door(line)),
            Way::Sockets(config) => {
                sockets::Open::new(name, config, longest, roster).map(|open| open.door(line))
            }
            Way::Vhost(config) => {
                vhost::Open::new(name, config, longest, roster).map(|open| open.door(line))
            }
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
