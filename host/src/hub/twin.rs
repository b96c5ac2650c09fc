//! The operator's programs: run for ports that ask for them, and in the kernel at the hooks that the operator named, all on
//! the same maps. They are loaded at the start, and later by a thread that may ([`super::maker`]).

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use rustix::net::{AddressFamily, SocketType, socket};
use vnplug_os::bpf::{Hook, TcxLink, XdpLink};
use vnplug_os::interface;
use vnplug_path::port::{PortProgram, Totals};
use vnplug_ring::control::program::MAX_VALUES;
use vnplug_ring::control::{Open, ProgramInfo, ProgramMap, code};
use vnplug_twin::{Context, Instance, Object, Program};

use super::{Hub, OpenTo, Peer, Refusal};

/// A program of the configuration's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TwinGrant {
    /// Its name, by which ports ask for it.
    pub name: String,
    /// The object.
    pub file: PathBuf,
    /// Which of its programs.
    pub function: Option<String>,
    /// Who may have frames go through it, and see its maps. Operators may, too.
    pub open_to: Vec<OpenTo>,
    /// Where the kernel runs it.
    pub attach: Vec<Place>,
}

/// A hook of the kernel's at an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Of its driver.
    Xdp(String),
    /// Of traffic control, as frames come in.
    Tc(String),
}

/// What keeps a program at a hook.
#[derive(Debug)]
pub(super) enum Link {
    Xdp(XdpLink),
    Tc(TcxLink),
}

impl Link {
    /// Every frame meets the old program or this one.
    pub(super) fn replace(&self, program: &Program) -> std::io::Result<()> {
        match self {
            Self::Xdp(link) => link.replace(program.kernel()),
            Self::Tc(link) => link.replace(program.kernel()),
        }
    }
}

/// Where the kernel runs a program.
#[derive(Debug)]
pub(super) struct Held {
    /// For people.
    pub(super) told: String,
    /// What keeps it there; none: it is a part of a source's own.
    pub(super) link: Option<(Place, Link)>,
}

/// The longest name.
const MAX_NAME: usize = 64;

impl TwinGrant {
    /// Of a configuration's words: `name`, `file` (perhaps `FILE:FUNCTION`), and perhaps `open` and `attach` (each
    /// joined by `+`).
    ///
    /// # Errors
    /// What is wrong, and what to write.
    pub fn of_words(mut words: BTreeMap<String, String>) -> Result<Self, String> {
        let name = words.remove("name").unwrap_or_default();
        let usable = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(usable) {
            return Err(format!(
                "a program's name is 1 to {MAX_NAME} letters, digits, `-`, `_` or `.`, not {name:?}"
            ));
        }
        let file = words
            .remove("file")
            .ok_or_else(|| format!("program {name:?} needs file, an eBPF object"))?;
        let (file, function) = match file.rsplit_once(".o:") {
            Some((file, function)) => (format!("{file}.o"), Some(function.to_owned())),
            None => (file, None),
        };
        let open_to = match words.remove("open") {
            None => Vec::new(),
            Some(text) => OpenTo::list(&text).map_err(|word| {
                format!("program {name:?}: open is vm:NAME, uid:N, vm:*, uid:* or *, not {word:?}")
            })?,
        };
        let attach = match words.remove("attach") {
            None => Vec::new(),
            Some(text) => text
                .split('+')
                .map(|hook| match hook.split_once(':') {
                    Some(("xdp", it)) if !it.is_empty() => Ok(Place::Xdp(it.to_owned())),
                    Some(("tc", it)) if !it.is_empty() => Ok(Place::Tc(it.to_owned())),
                    _ => Err(format!(
                        "program {name:?}: attach is xdp:INTERFACE or tc:INTERFACE, not {hook:?}"
                    )),
                })
                .collect::<Result<_, _>>()?,
        };
        if let Some(key) = words.keys().next() {
            return Err(format!(
                "program {name:?} has no {key:?}; there are name, file, open, attach"
            ));
        }
        Ok(Self {
            name,
            file: file.into(),
            function,
            open_to,
            attach,
        })
    }
}

/// A program through which the frames of a source go.
#[derive(Debug, Clone)]
pub struct SourceProgram {
    /// The program.
    pub program: Arc<Program>,
    /// What it does in the daemon is counted here.
    pub totals: Arc<Totals>,
}

/// The programs through which frames of sources can go, by name.
#[derive(Debug, Clone, Default)]
pub struct SourcePrograms(BTreeMap<String, SourceProgram>);

impl SourcePrograms {
    /// A program.
    ///
    /// # Errors
    /// There is none of that name.
    pub(crate) fn named(&self, name: &str) -> Result<SourceProgram, String> {
        let found = self.0.get(name).cloned();
        found.ok_or_else(|| {
            format!("no program is named {name:?}: --program {name}=FILE.o loads one")
        })
    }
}

/// The programs, in the order of the configuration.
#[derive(Debug, Default)]
pub struct Twins {
    pub(super) all: Vec<Twin>,
    /// What is to be in force of some names, while sources are opened for then; `None`: nothing.
    pub(super) coming: BTreeMap<String, Option<SourceProgram>>,
}

#[derive(Debug)]
pub(super) struct Twin {
    pub(super) grant: TwinGrant,
    pub(super) program: Arc<Program>,
    pub(super) totals: Arc<Totals>,
    /// Reads maps, and is never run.
    pub(super) reader: Instance,
    /// Where the kernel runs it.
    pub(super) held: Vec<Held>,
    /// One instance for all ports of a queue: by source and queue.
    pub(super) instances: BTreeMap<(usize, usize), Weak<Mutex<PortProgram>>>,
}

impl Twins {
    /// Loads the programs, and attaches them. Needs `CAP_BPF` and `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// Which program, and what is wrong with it.
    pub fn load(grants: &[TwinGrant]) -> Result<Self, String> {
        let all = grants.iter().map(|grant| Twin::load(grant, None));
        let all = all.collect::<Result<_, _>>()?;
        Ok(Self {
            all,
            ..Self::default()
        })
    }

    /// Which a viewer may use; operators may all.
    pub(crate) fn may_use(&self, name: &str, viewer: &Peer, is_operator: bool) -> bool {
        let found = self.all.iter().find(|it| it.grant.name == name);
        found.is_some_and(|it| it.is_open_to(viewer, is_operator))
    }

    /// What sources can have their frames go through.
    pub(crate) fn of_sources(&self) -> SourcePrograms {
        let program = |it: &Twin| {
            let program = SourceProgram {
                program: Arc::clone(&it.program),
                totals: Arc::clone(&it.totals),
            };
            (it.grant.name.clone(), program)
        };
        let mut all: BTreeMap<_, _> = self.all.iter().map(program).collect();
        for (name, coming) in &self.coming {
            match coming {
                Some(program) => drop(all.insert(name.clone(), program.clone())),
                None => drop(all.remove(name)),
            }
        }
        SourcePrograms(all)
    }

    /// The kernel runs a program there, as long as its source is.
    pub(crate) fn runs_at(&mut self, name: &str, place: String) {
        if let Some(at) = self.named(name) {
            self.all[at].held.push(Held {
                told: place,
                link: None,
            });
        }
    }

    /// A source is no more, and with it what the kernel ran there.
    pub(crate) fn forget_source(&mut self, source: &str) {
        let end = format!(" source {source}");
        for twin in &mut self.all {
            twin.held
                .retain(|held| held.link.is_some() || !held.told.ends_with(&end));
        }
    }

    /// Another source has this place from now on.
    pub(crate) fn forget_place(&mut self, place: usize) {
        for twin in &mut self.all {
            twin.instances.retain(|(it, _), _| *it != place);
        }
    }

    pub(super) fn named(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|it| it.grant.name == name)
    }
}

impl Twin {
    /// Loads it; `before` is what it takes the place of, with what the kernel runs of that. Nothing that is in force is changed.
    pub(super) fn load(grant: &TwinGrant, before: Option<&Before>) -> Result<Self, String> {
        let wrong =
            |what: String| format!("program {:?}: {}: {what}", grant.name, grant.file.display());
        let bytes = std::fs::read(&grant.file).map_err(|error| wrong(error.to_string()))?;
        let object = Object::parse(&bytes, grant.function.as_deref())
            .map_err(|error| wrong(error.to_string()))?;
        let program = Program::load_after(&grant.name, &object, before.map(|it| &*it.program))
            .map_err(|error| wrong(error.to_string()))?;
        let reader = program
            .instance()
            .map_err(|error| wrong(error.to_string()))?;
        let mut held = Vec::new();
        for place in &grant.attach {
            fits(&program, place).map_err(wrong)?;
            if before.is_some_and(|before| before.places.contains(place)) {
                continue;
            }
            let (told, link) = attach(&program, place).map_err(wrong)?;
            log::info!(target: "program", "{}: the kernel runs it at {told}", grant.name);
            let link = Some((place.clone(), link));
            held.push(Held { told, link });
        }
        Ok(Self {
            grant: grant.clone(),
            program: Arc::new(program),
            totals: before.map(|it| Arc::clone(&it.totals)).unwrap_or_default(),
            reader,
            held,
            instances: BTreeMap::new(),
        })
    }

    fn is_open_to(&self, viewer: &Peer, is_operator: bool) -> bool {
        is_operator || self.grant.open_to.iter().any(|whom| whom.is(viewer))
    }

    fn info(&self, ports: u32) -> ProgramInfo {
        // Relaxed: numbers that nothing else depends on.
        let total = |it: &std::sync::atomic::AtomicU64| it.load(Ordering::Relaxed);
        let kind = match self.program.code().context() {
            Context::Xdp => "xdp",
            Context::Classifier => "tc",
        };
        let maps = self.program.maps().iter();
        ProgramInfo {
            name: self.grant.name.clone(),
            kind: kind.into(),
            runs: self.held.iter().map(|held| held.told.clone()).collect(),
            id: self.program.kernel().id().unwrap_or_default(),
            maps: maps
                .enumerate()
                .map(|(at, (spec, array))| {
                    let view = self.program.view(at);
                    ProgramMap {
                        name: spec.name.clone(),
                        id: array.id().unwrap_or_default(),
                        value_bytes: view.map_or(0, |view| view.bytes),
                        entries: view.map_or(0, |view| view.entries),
                        constant: spec.constant,
                    }
                })
                .collect(),
            ports,
            frames: total(&self.totals.frames),
            dropped: total(&self.totals.dropped),
            aborted: total(&self.totals.aborted),
        }
    }

    /// Values of a map: bytes of each, how many there are, and those that were asked for.
    fn read(&self, map: &str, first: u32, count: u32) -> Result<(u32, u32, Vec<u8>), Refusal> {
        let mut maps = self.program.maps().iter();
        let at = maps.position(|(spec, _)| spec.name == map);
        let none = || {
            let names = self
                .program
                .maps()
                .iter()
                .map(|(spec, _)| spec.name.as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            let what = format!(
                "program {} has no such map; it has {names}",
                self.grant.name
            );
            Refusal::new(code::NOT_FOUND, what)
        };
        let at = at.ok_or_else(none)?;
        let view = self.program.view(at).ok_or_else(none)?;
        let each = view.bytes as usize;
        if each > MAX_VALUES {
            let what = format!("a value of {each} bytes does not fit an answer of {MAX_VALUES}");
            return Err(Refusal::new(code::INVALID, what));
        }
        let end = first.saturating_add(count).min(view.entries);
        let most = (MAX_VALUES / each) as u32;
        let end = end.min(first.saturating_add(most));
        let mut bytes = Vec::new();
        let mut value = vec![0; each];
        for entry in first..end.max(first) {
            self.reader.read_map(at, view.place(entry), &mut value);
            bytes.extend_from_slice(&value);
        }
        Ok((view.bytes, view.entries, bytes))
    }

    /// The instance for a queue.
    fn instance(
        &mut self,
        key: (usize, usize),
        interface: u32,
    ) -> std::io::Result<Arc<Mutex<PortProgram>>> {
        if let Some(there) = self.instances.get(&key).and_then(Weak::upgrade) {
            return Ok(there);
        }
        let instance = self.program.instance()?;
        let made = PortProgram::shared(instance, interface, Arc::clone(&self.totals));
        self.instances.insert(key, Arc::downgrade(&made));
        Ok(made)
    }
}

/// What a version takes the place of.
#[derive(Debug, Clone)]
pub(crate) struct Before {
    pub(super) program: Arc<Program>,
    pub(super) totals: Arc<Totals>,
    /// The hooks where it is.
    pub(super) places: Vec<Place>,
}

/// Whether a program is for such a hook.
fn fits(program: &Program, place: &Place) -> Result<(), String> {
    match (place, program.code().context()) {
        (Place::Xdp(_), Context::Xdp) | (Place::Tc(_), Context::Classifier) => Ok(()),
        (Place::Xdp(_), _) => Err("attach=xdp:… is for a program with SEC(\"xdp\")".into()),
        (Place::Tc(_), _) => Err("attach=tc:… is for a program with SEC(\"tc\")".into()),
    }
}

/// Has the kernel run a program at a hook of its kind: where, for people, and what keeps it there.
fn attach(program: &Program, place: &Place) -> Result<(String, Link), String> {
    let kernel = program.kernel();
    match place {
        Place::Xdp(name) => {
            let index = index_at(name)?;
            // In the driver, or, if that has no place for one, after it.
            let (how, link) = match XdpLink::attach(kernel, index, Hook::Native) {
                Ok(link) => ("native", Ok(link)),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => ("native", Err(error)),
                Err(_) => ("generic", XdpLink::attach(kernel, index, Hook::Generic)),
            };
            let link = link.map_err(|error| cannot(name, &error))?;
            Ok((format!("xdp:{name} {how}"), Link::Xdp(link)))
        }
        Place::Tc(name) => {
            let link = TcxLink::attach(kernel, index_at(name)?).map_err(|error| {
                match error.raw_os_error() {
                    Some(libc::EINVAL) => format!("cannot run at {name}: tc:… needs Linux 6.6"),
                    _ => cannot(name, &error),
                }
            })?;
            Ok((format!("tc:{name}"), Link::Tc(link)))
        }
    }
}

fn cannot(interface: &str, error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) => {
            format!("cannot run at {interface}: another program is there")
        }
        _ => format!("cannot run at {interface}: {error}"),
    }
}

fn index_at(interface: &str) -> Result<i32, String> {
    let index = index_of(interface).map_err(|error| cannot(interface, &error))?;
    Ok(index.cast_signed())
}

/// The number of an interface, in the network namespace of this thread.
///
/// # Errors
/// The system's: there is none of that name.
pub(crate) fn index_of(interface: &str) -> std::io::Result<u32> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let link = interface::link(socket.as_fd(), interface)?;
    Ok(link.index.cast_unsigned())
}

impl Hub {
    /// The programs that a viewer may use.
    pub(crate) fn twins(&self, viewer: &Peer, is_operator: bool) -> Vec<ProgramInfo> {
        let ports = |name: &str| {
            let with = self.ports.values().filter(|port| port.twin == name);
            u32::try_from(with.count()).unwrap_or(u32::MAX)
        };
        let all = self.twins.all.iter();
        let seen = all.filter(|it| it.is_open_to(viewer, is_operator));
        seen.map(|it| it.info(ports(&it.grant.name))).collect()
    }

    /// Values of a map of a program that a viewer may use.
    pub(crate) fn twin_values(
        &self,
        (program, map): (&str, &str),
        (first, count): (u32, u32),
    ) -> Result<(u32, u32, Vec<u8>), Refusal> {
        let at = self
            .twins
            .named(program)
            .ok_or_else(|| no_program(program))?;
        self.twins.all[at].read(map, first, count)
    }

    /// The instances that a port's frames go through, one a queue; none if it wants no program.
    pub(super) fn programs_of(
        &mut self,
        request: &Open,
        source: usize,
        queues: &[usize],
    ) -> Result<Vec<Option<Arc<Mutex<PortProgram>>>>, Refusal> {
        if request.program.is_empty() {
            return Ok(vec![None; queues.len()]);
        }
        if !request.group.is_empty() {
            let what = "the members of a group read one copy of each packet, so none has a program of its \
                        own; leave out the group or the program";
            return Err(Refusal::new(code::INVALID, what));
        }
        let at = self.twins.named(&request.program);
        let at = at.ok_or_else(|| no_program(&request.program))?;
        let interface = self.sources[source].interface.as_ref();
        let interface = interface.and_then(|it| it.index()).unwrap_or(0);
        let twin = &mut self.twins.all[at];
        queues
            .iter()
            .map(|&queue| twin.instance((source, queue), interface))
            .map(|made| {
                made.map(Some).map_err(|error| {
                    let what = format!("an instance of the program: {error}");
                    Refusal::new(code::NO_MEMORY, what)
                })
            })
            .collect()
    }
}

/// There is none, or none that somebody may use, which he need not know.
pub(crate) fn no_program(name: &str) -> Refusal {
    let what = format!(
        "no program {:?} that may be used from here; `vnplug programs` shows them",
        name.chars().take(MAX_NAME).collect::<String>()
    );
    Refusal::new(code::NOT_FOUND, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(words: &[(&str, &str)]) -> Result<TwinGrant, String> {
        let words = words
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()));
        TwinGrant::of_words(words.collect())
    }

    #[test]
    fn a_program_is_a_file_and_perhaps_a_function_of_it() {
        let plain = grant(&[
            ("name", "count"),
            ("file", "/etc/count.o"),
            ("open", "vm:*+uid:5"),
        ])
        .unwrap();
        assert_eq!((plain.file, plain.function), ("/etc/count.o".into(), None));
        assert_eq!(plain.open_to.len(), 2);
        let named = grant(&[
            ("name", "count"),
            ("file", "/a.o:drop"),
            ("attach", "xdp:eth0+tc:eth1"),
        ])
        .unwrap();
        assert_eq!(
            (named.file, named.function),
            ("/a.o".into(), Some("drop".into()))
        );
        assert_eq!(
            named.attach,
            [Place::Xdp("eth0".into()), Place::Tc("eth1".into())]
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (words, what) in [
            (vec![("name", "a b"), ("file", "x.o")], "name"),
            (vec![("name", "a")], "needs file"),
            (
                vec![("name", "a"), ("file", "x.o"), ("open", "root")],
                "open",
            ),
            (
                vec![("name", "a"), ("file", "x.o"), ("attach", "eth0")],
                "attach",
            ),
            (
                vec![("name", "a"), ("file", "x.o"), ("colour", "red")],
                "colour",
            ),
        ] {
            let error = grant(&words).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
