//! The switch's twin: one table, and two instances that decide by it, in the kernel and in this daemon.
//!
//! Uplinks with the option `twin` are ends of wires to containers. Between two of them a frame to a station that
//! is known is forwarded by the kernel instance ([`program`]), and never leaves the kernel. Everything else is an
//! *upcall*: the daemon has it by the uplink's packet socket as without a twin, learns, floods, and forwards to
//! ports that the kernel does not reach. The host's stack gets none of these frames.
//!
//! | | writes | reads |
//! |---|---|---|
//! | the table (`table/slots.rs`) | the daemon; the kernel instance writes when stations are heard | both |
//! | ports, doors, the header ([`layout`]) | the daemon; the kernel instance adds to counters | both |
//!
//! Nothing is passed between the instances: each loads what the other has stored. What `vnplug switch` tells
//! is the sum of both.
//!
//! **Stepping aside.** While somebody captures on the switch, or it is a hub, every frame is an upcall, so that the
//! daemon sees it; the same for ports that have settings which only the daemon knows how to apply.
//!
//! **Life.** The maps and the links of the programs have names in a bpf filesystem, `/sys/fs/bpf/vnplug/SWITCH`. A
//! daemon that is killed leaves them: stations that are known are forwarded on, everything else is dropped and
//! counted. The next daemon takes them over. One that ends in order removes them.

mod judge;
mod layout;
mod names;
mod program;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use vnplug_os::bpf::{Program, ProgramKind, Shape, Shared, TcxLink};
use vnplug_os::interface;
use vnplug_path::source::SourceError;
use vnplug_path::source::af_packet::Gate;
use vnplug_ring::layout::MAX_SNAPLEN;

pub(crate) use self::judge::{Judge, Verdict};
use self::layout::{DOOR_PROBES, DOORS, DOORS_AT, Layout, MOST_PORTS, PORT_BYTES, UPCALL};
use self::layout::{header, port as part};
use self::names::{PROJECT, ROOT, STATE, TABLE, clear, directory, link_name, pin_name};
use self::program::Parts;
use crate::config::SwitchConfig;
use crate::forward::Number;
use crate::police::Police;
use crate::table::{Limits, Slots, Table};

/// Both instances' data, and the kernel instance.
pub struct Twin {
    switch: String,
    dir: PathBuf,
    /// Nobody else has the directory.
    _lock: OwnedFd,
    /// What the daemon will be.
    user: Option<(u32, u32)>,
    state: Shared,
    table: Shared,
    layout: Layout,
    secret: (u64, u64),
    gate: Gate,
    classifier: Program,
    judge: Option<Judge>,
    /// Of every port.
    flags: Vec<u32>,
    /// Asks about interfaces.
    socket: OwnedFd,
    ports: Vec<TwinPort>,
    /// Numbers of ports that were [taken away](Self::remove): what was forwarded of them stays counted.
    gone: Vec<Number>,
    /// What is in the doors.
    doors: Vec<u64>,
    looked_s: u32,
}

/// A port that the kernel reaches.
struct TwinPort {
    number: Number,
    interface: String,
    /// 0: it is not there, or the kernel does not take the program.
    index: u32,
    link: Option<TcxLink>,
    /// It was said that it does not work.
    is_told: bool,
}

/// What the kernel instance forwarded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) in_frames: u64,
    pub(crate) in_bytes: u64,
    pub(crate) out_frames: u64,
    pub(crate) out_bytes: u64,
    /// What it dropped as too much.
    pub(crate) policed: u64,
    pub(crate) policed_bytes: u64,
}

impl Twin {
    /// Makes what both instances share, or takes over what a daemon left that was killed. `user` is what the
    /// daemon will be. `None`: this kernel does not do it, which is logged.
    ///
    /// # Errors
    /// There is no bpf filesystem, another daemon has a switch of this name, or the switch is too large.
    pub fn open(
        config: &SwitchConfig,
        user: Option<(u32, u32)>,
    ) -> Result<Option<Self>, SourceError> {
        let name = &config.name;
        let wrong = |what: String| SourceError::new(format!("switch {name:?}: {what}"));
        if config.ports.0 > MOST_PORTS {
            return Err(wrong(format!(
                "a switch with twin uplinks has at most {MOST_PORTS} ports: say ports={MOST_PORTS}"
            )));
        }
        let lock = directory(name, user).map_err(wrong)?;
        // By the descriptor: what the daemon will be may not be let through the directories above.
        let dir = PathBuf::from(format!("/proc/self/fd/{}", lock.as_raw_fd()));
        let held = lock.try_clone().map_err(|error| wrong(error.to_string()))?;
        match Self::make(config, dir.clone(), lock) {
            Ok(mut twin) => {
                twin.user = user;
                Ok(Some(twin))
            }
            Err(error) => {
                // What a daemon left that was killed would forward what this one forwards.
                clear(&dir, |_| false);
                drop(held);
                log::warn!(
                    target: "switch",
                    "{name}: no twin, the daemon forwards all: {error}"
                );
                Ok(None)
            }
        }
    }

    fn make(config: &SwitchConfig, dir: PathBuf, lock: OwnedFd) -> io::Result<Self> {
        let slots = Table::places_of(limits(config));
        let layout = Layout::new(slots, config.ports.0)?;
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let netns = rustix::fs::stat("/proc/thread-self/ns/net")?.st_ino;
        let shape = Shape {
            entry_bytes: Slots::BYTES as u32,
            entries: layout.slots,
        };
        let (state, table, secret) = match old(&dir, layout, shape, netns) {
            Ok(old) => {
                log::info!(target: "switch", "{}: goes on with the table that is there", config.name);
                old
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    log::warn!(target: "switch", "{}: begins anew: {error}", config.name);
                }
                clear(&dir, |_| false);
                let state = Shared::create("vnplug_twin", layout.shape())?;
                let table = Shared::create("vnplug_table", shape)?;
                let secret = Table::new_secret();
                layout.found(&state, secret, netns);
                table.pin(&dir.join(TABLE))?;
                state.pin(&dir.join(STATE))?;
                (state, table, secret)
            }
        };
        state.write(header::LONGEST, config.longest as u64);
        let parts = Parts {
            state: &state,
            table: &table,
            layout,
        };
        let code = |code: Result<_, _>| code.map_err(|_| io::Error::other("a jump is too long"));
        let load = |kind, code: &[_]| {
            let loaded = Program::load(kind, "vnplug_twin", code, false);
            loaded.map_err(|error| io::Error::new(error.cause.kind(), error.to_string()))
        };
        let gate = load(ProgramKind::SocketFilter, &code(parts.gate(MAX_SNAPLEN))?)?;
        let insns = code(parts.classifier())?;
        let classifier = load(ProgramKind::Classifier, &insns)?;
        let judge = Judge::new(&insns, [&state, &table]).inspect_err(|error| {
            log::warn!(target: "switch", "{}: no instance of the twin here: {error}", config.name);
        });
        Ok(Self {
            switch: config.name.clone(),
            dir,
            _lock: lock,
            user: None,
            state,
            table,
            layout,
            secret,
            gate: Gate(Arc::new(gate)),
            classifier,
            judge: judge.ok(),
            flags: vec![UPCALL; layout.ports as usize],
            socket,
            ports: Vec::new(),
            gone: Vec::new(),
            doors: vec![0; DOORS as usize],
            looked_s: 0,
        })
    }

    /// The filter of the packet sockets of its uplinks.
    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    /// The daemon's instance, once; nothing where this processor has no translator.
    pub(crate) fn take_judge(&mut self) -> Option<Judge> {
        self.judge.take()
    }

    /// The table, with what is there of these ports. Once, before ports are [added](Self::add).
    pub(crate) fn table(&mut self, limits: Limits, ports: &[(Number, &str)]) -> Table {
        self.set_age(limits.age_s);
        // Numbers of ports are of the configuration, which may be another one by now.
        let is_kept = |number: Number| {
            let port = ports.iter().find(|(it, _)| *it == number);
            let index = port.map_or(0, |(_, interface)| self.index(interface));
            let word = self.state.read(self.layout.port(number) + part::WORD);
            index != 0 && word as u32 == index
        };
        let all: Vec<Number> = (0..self.layout.ports as Number).collect();
        let kept: Vec<bool> = all.iter().map(|number| is_kept(*number)).collect();
        let memory = self
            .table
            .region()
            .part(0, u64::from(self.layout.slots) * Slots::BYTES);
        let memory = memory.expect("an array of this shape");
        for number in all.iter().filter(|number| kept[usize::from(**number)]) {
            // They forward as they did until their settings are known.
            let word = self.state.read(self.layout.port(*number) + part::WORD);
            self.flags[usize::from(*number)] = (word >> 32) as u32;
        }
        let is_kept = |number: Number| kept.get(usize::from(number)).copied().unwrap_or(false);
        let table = Table::take_over(limits, memory, self.secret, is_kept);
        for number in all.into_iter().filter(|number| !is_kept(*number)) {
            let port = self.layout.port(number);
            (0..u64::from(PORT_BYTES / 8)).for_each(|word| self.state.write(port + word * 8, 0));
        }
        if !table.is_empty() {
            log::info!(target: "switch", "{}: knows {} stations already", self.switch, table.len());
        }
        table
    }

    /// The interface is this port's; it need not be there yet.
    pub(crate) fn add(&mut self, number: Number, interface: &str) {
        self.ports.push(TwinPort {
            number,
            interface: interface.to_owned(),
            index: 0,
            link: None,
            is_told: false,
        });
        self.look();
    }

    /// The interface of this port is a port no more: the kernel forwards nothing from it or to it, and its program is taken
    /// from it, which needs no right that the daemon gave up. No other interface is this port's again.
    pub(crate) fn remove(&mut self, number: Number) {
        let Some(at) = self.ports.iter().position(|it| it.number == number) else {
            return;
        };
        let gone = self.ports.remove(at);
        // First: from now on its frames are upcalls, which the daemon has until its sockets are closed; then the program
        // drops them where it still is.
        self.set_upcall(number, true);
        // Who has this number next owes nothing, whatever its rate is.
        self.state.write(self.layout.port(number) + part::RATE, 0);
        self.publish();
        self.gone.push(number);
        drop(gone.link);
        if gone.index != 0
            && let Err(error) = std::fs::remove_file(self.dir.join(link_name(gone.index)))
        {
            log::error!(
                target: "switch",
                "{}: the program stays at {}, and drops what comes there: {error}",
                self.switch, gone.interface
            );
        }
    }

    /// All ports are added: what is left of others goes.
    pub(crate) fn settle(&mut self) {
        let names: Vec<String> = self.ports.iter().map(|it| link_name(it.index)).collect();
        clear(&self.dir, |name| {
            [STATE, TABLE].contains(&name) || names.iter().any(|it| it == name)
        });
        // Last: root without the right to pass by permissions could make no name in somebody else's.
        if let Some((uid, gid)) = self.user
            && let Err(error) = std::os::unix::fs::chown(&self.dir, Some(uid), Some(gid))
        {
            log::warn!(
                target: "switch",
                "{}: what the kernel keeps of the twin stays root's, also when the daemon ends: {error}",
                self.switch
            );
        }
    }

    /// Removes what a killed daemon left of a switch that has no twin now: it would forward what the daemon
    /// forwards.
    pub fn forget(switch: &str, user: Option<(u32, u32)>) {
        let path = Path::new(ROOT).join(PROJECT).join(pin_name(switch));
        if path.symlink_metadata().is_err() {
            return;
        }
        if let Ok(lock) = directory(switch, user) {
            clear(
                &PathBuf::from(format!("/proc/self/fd/{}", lock.as_raw_fd())),
                |_| false,
            );
            let _ = std::fs::remove_dir(&path);
        }
    }

    /// Whether every frame from or to a port is for the daemon.
    pub(crate) fn set_upcall(&mut self, number: Number, is: bool) {
        let Some(flags) = self.flags.get_mut(usize::from(number)) else {
            return;
        };
        *flags = if is { UPCALL } else { 0 };
        let port = self.ports.iter().find(|it| it.number == number);
        self.tell(number, port.map_or(0, |port| port.index));
    }

    /// Says how a port is.
    fn tell(&self, number: Number, index: u32) {
        let flags = self.flags.get(usize::from(number)).copied();
        let word = u64::from(index) | u64::from(flags.unwrap_or(UPCALL)) << 32;
        self.state
            .write(self.layout.port(number) + part::WORD, word);
    }

    /// How much a port may send, by whichever instance.
    pub(crate) fn police(&self, number: Number, police: Police) {
        let port = self.layout.port(number);
        if self.state.read(port + part::RATE) != police.ns_per_kib() {
            // What was sent at another rate is not owed at this one.
            self.state.write(port + part::SENT, 0);
        }
        self.state.write(port + part::BURST, police.burst_ns());
        self.state.write(port + part::RATE, police.ns_per_kib());
    }

    /// Whether every frame is for the daemon.
    #[inline]
    pub(crate) fn step_aside(&self, is: bool) {
        if self.state.read(header::ASIDE) != u64::from(is) {
            self.state.write(header::ASIDE, u64::from(is));
        }
    }

    /// Remembers stations for this long.
    pub(crate) fn set_age(&self, age_s: u32) {
        self.state.write(header::AGE, age_s.into());
    }

    /// Looks after the interfaces, once a second.
    #[inline]
    pub(crate) fn tick(&mut self, now_s: u32) {
        if self.looked_s != now_s {
            self.looked_s = now_s;
            self.look();
        }
    }

    /// What the kernel instance forwarded from and to a port.
    pub(crate) fn forwarded(&self, number: Number) -> Forwarded {
        match self.ports.iter().any(|it| it.number == number) {
            true => self.counted(number),
            // Also where another port has the number of one that is gone.
            false => Forwarded::default(),
        }
    }

    fn counted(&self, number: Number) -> Forwarded {
        let port = self.layout.port(number);
        let read = |at| self.state.read(port + at);
        Forwarded {
            in_frames: read(part::IN_FRAMES),
            in_bytes: read(part::IN_BYTES),
            out_frames: read(part::OUT_FRAMES),
            out_bytes: read(part::OUT_BYTES),
            policed: read(part::POLICED_FRAMES),
            policed_bytes: read(part::POLICED_BYTES),
        }
    }

    /// Frames that the kernel instance forwarded, and that it dropped as too many.
    pub(crate) fn frames(&self) -> (u64, u64) {
        let ports = self.ports.iter().map(|it| &it.number);
        let all = ports.chain(&self.gone).map(|number| self.counted(*number));
        all.fold((0, 0), |(frames, policed), it| {
            (frames + it.in_frames, policed + it.policed)
        })
    }

    /// The counters with their public names.
    pub(crate) fn named(&self) -> Vec<(String, u64)> {
        let ports = self.ports.iter().filter(|it| it.index != 0).count() as u64;
        [
            ("twin_ports", ports),
            ("twin_forwarded", self.frames().0),
            ("twin_lost", self.state.read(header::LOST)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    fn index(&self, interface: &str) -> u32 {
        let link = interface::link(&self.socket, interface);
        link.map_or(0, |link| link.index as u32)
    }

    /// Finds interfaces that came, and forgets those that went.
    fn look(&mut self) {
        let mut is_changed = false;
        for at in 0..self.ports.len() {
            let index = self.index(&self.ports[at].interface);
            if index == 0 {
                self.ports[at].is_told = false;
            }
            if index == self.ports[at].index || (index != 0 && self.ports[at].is_told) {
                continue;
            }
            is_changed = true;
            let old = std::mem::take(&mut self.ports[at].index);
            if old != 0 {
                self.ports[at].link = None;
                let _ = std::fs::remove_file(self.dir.join(link_name(old)));
            }
            if index == 0 {
                continue;
            }
            match self.attach(index) {
                Ok(link) => (self.ports[at].index, self.ports[at].link) = (index, Some(link)),
                Err(error) => {
                    self.ports[at].is_told = true;
                    let is_old = error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
                    let why = if is_old {
                        "; it needs Linux 6.6 or newer"
                    } else {
                        ""
                    };
                    let interface = &self.ports[at].interface;
                    log::warn!(
                        target: "switch",
                        "{}: uplink {interface} has no twin, the daemon forwards all: {error}{why}",
                        self.switch
                    );
                }
            }
        }
        if is_changed {
            self.publish();
        }
    }

    /// Puts the classifier at an interface, or into the place of one that is there.
    fn attach(&self, index: u32) -> io::Result<TcxLink> {
        let path = self.dir.join(link_name(index));
        if let Ok(link) = TcxLink::open(&path) {
            match link.replace(&self.classifier) {
                Ok(()) => return Ok(link),
                // Of an interface that is gone.
                Err(_) => std::fs::remove_file(&path)?,
            }
        }
        let link = TcxLink::attach(&self.classifier, index as i32)?;
        link.pin(&path)?;
        Ok(link)
    }

    /// Says which interface is which port's. A frame in between is an upcall.
    fn publish(&mut self) {
        let mut doors = vec![0_u64; DOORS as usize];
        for port in &self.ports {
            if port.index != 0 {
                let places =
                    (0..DOOR_PROBES).map(|it| (port.index.wrapping_add(it) % DOORS) as usize);
                let free = places.into_iter().find(|at| doors[*at] == 0);
                match free {
                    Some(at) => doors[at] = u64::from(port.index) | u64::from(port.number) << 32,
                    None => log::warn!(
                        target: "switch",
                        "{}: uplink {} has no twin: too many interfaces", self.switch, port.interface
                    ),
                }
            }
        }
        for port in &self.ports {
            self.tell(port.number, port.index);
        }
        // Release: pairs with nothing; ports that are told of are complete for whoever finds their doors.
        std::sync::atomic::fence(Ordering::Release);
        for (at, door) in (0..).zip(&doors) {
            if self.doors[at as usize] != *door || self.state.read(door_at(at)) != *door {
                self.state.write(door_at(at), *door);
            }
        }
        self.doors = doors;
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        // The kernel instance goes with its names: nobody forwards any more.
        clear(&self.dir, |_| false);
        // Root's, where the daemon is somebody else: then it stays, empty.
        let _ = std::fs::remove_dir(Path::new(ROOT).join(PROJECT).join(pin_name(&self.switch)));
    }
}

/// How large the table is.
pub(crate) fn limits(config: &SwitchConfig) -> Limits {
    let (all, each) = config.stations;
    Limits {
        all,
        each,
        own: all / 4 / config.ports.0.max(1),
        age_s: config.settings.age_s,
        hold_s: config.settings.hold_s,
    }
}

/// What a daemon left that was killed.
fn old(
    dir: &Path,
    layout: Layout,
    shape: Shape,
    netns: u64,
) -> io::Result<(Shared, Shared, (u64, u64))> {
    let state = Shared::open(&dir.join(STATE), layout.shape())?;
    let table = Shared::open(&dir.join(TABLE), shape)?;
    let other = || io::Error::other("what is there is another switch's");
    let secret = layout.known(&state, netns).ok_or_else(other)?;
    Ok((state, table, secret))
}

fn door_at(at: u64) -> u64 {
    u64::from(DOORS_AT) + at * 8
}

#[cfg(test)]
mod tests;
