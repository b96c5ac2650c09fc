//! A program of an operator's: its maps made, accepted by the kernel, translated for the daemon.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::sync::Arc;

use vnplug_os::bpf::{self, Array, Insn, LoadError, ProgramKind};

use crate::check::{Context, check};
use crate::code::{Code, CodeError, SharedMap};
use crate::hash::Layout;
use crate::instance::Instance;
use crate::object::{MapKind, MapSpec, Object, ObjectError};
use crate::per_cpu::Seats;
use crate::weave::{Side, weave};

/// One program, for any number of instances. It and its maps go with the last of them.
#[derive(Debug)]
pub struct Program {
    /// Its name, for people.
    pub name: String,
    kernel: bpf::Program,
    code: Arc<Code>,
    insns: Vec<Insn>,
    frags: bool,
    maps: Vec<(MapSpec, Array)>,
    seats: Arc<Seats>,
}

/// How what lies in a map is told: values one after the other.
#[derive(Debug, Clone, Copy)]
pub struct MapView {
    /// Bytes of each.
    pub bytes: u32,
    /// How many.
    pub entries: u32,
    layout: Option<Layout>,
    stride: u32,
}

impl MapView {
    /// Where a value begins, for [`Instance::read_map`].
    pub fn place(&self, entry: u32) -> u64 {
        match self.layout {
            Some(layout) => layout.place(entry),
            None => u64::from(entry) * u64::from(self.stride),
        }
    }
}

/// Why there is no such program.
#[derive(Debug)]
pub enum ProgramError {
    /// The object is wrong.
    Object(ObjectError),
    /// A map could not be made.
    Map {
        /// Its name.
        name: String,
        /// The system's error.
        cause: io::Error,
    },
    /// The kernel's verifier does not accept it.
    Refused(LoadError),
    /// The daemon cannot run it.
    Code(CodeError),
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(why) => why.fmt(f),
            Self::Map { name, cause } => write!(f, "map {name} cannot be made: {cause}"),
            Self::Refused(why) => write!(f, "the kernel does not accept it: {why}"),
            Self::Code(why) => write!(f, "the daemon cannot run it: {why}"),
        }
    }
}

impl std::error::Error for ProgramError {}

impl Program {
    /// Makes the maps, has the kernel verify the program, and translates it.
    ///
    /// # Errors
    /// [`ProgramError`]; nothing is left then.
    pub fn load(name: &str, object: &Object) -> Result<Self, ProgramError> {
        Self::load_after(name, object, None)
    }

    /// As [`load`](Self::load), of a version that comes after another one: maps of the same shape are that one's. What the
    /// program itself calls its variables begins anew.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_after(
        name: &str,
        object: &Object,
        before: Option<&Self>,
    ) -> Result<Self, ProgramError> {
        let kept = |spec: &MapSpec| {
            let maps = before.map_or(&[][..], |before| &before.maps);
            let same = maps.iter().find(|(it, _)| it.has_shape_of(spec));
            same.map(|(spec, array)| Ok((spec.clone(), array.try_clone()?)))
        };
        let new = |spec: &MapSpec| Ok((spec.clone(), make(spec)?));
        let maps = object
            .maps
            .iter()
            .map(|spec| {
                let made: io::Result<_> = kept(spec).unwrap_or_else(|| new(spec));
                made.map_err(|cause| ProgramError::Map {
                    name: spec.name.clone(),
                    cause,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let descriptor = |name: &str| {
            let found = maps.iter().find(|(spec, _)| spec.name == name);
            found.map(|(_, array)| array.number())
        };
        let insns = object.link(descriptor).map_err(ProgramError::Object)?;
        let seats = before.map(|before| Arc::clone(&before.seats));
        Self::from_parts(name, object, insns, maps, seats.unwrap_or_default())
    }

    fn from_parts(
        name: &str,
        object: &Object,
        insns: Vec<Insn>,
        maps: Vec<(MapSpec, Array)>,
        seats: Arc<Seats>,
    ) -> Result<Self, ProgramError> {
        let unfit = |why| ProgramError::Code(CodeError::Unfit(why));
        let both = |side| {
            // What has arrays alone is for the verifier first, whose words are better.
            if maps.iter().all(|(spec, _)| spec.kind == MapKind::Array) {
                return Ok(insns.clone());
            }
            let checked = check(&insns, object.context)?;
            let maps: Vec<_> = maps.iter().map(|(spec, array)| (spec, array)).collect();
            weave(&insns, &checked, &maps, side)
        };
        let (theirs, ours) = (both(Side::Kernel), both(Side::Daemon));
        let (insns, ours) = (theirs.map_err(unfit)?, ours.map_err(unfit)?);
        let license = object.license();
        let kernel = verify(
            object.context,
            object.name(),
            &insns,
            object.frags,
            &license,
        )
        .map_err(ProgramError::Refused)?;
        let shared = maps
            .iter()
            .map(|(spec, array)| SharedMap::new(array, spec.constant))
            .collect::<io::Result<Vec<_>>>()
            .map_err(|why| ProgramError::Code(CodeError::System(why)))?;
        let has_seats = maps.iter().any(|(spec, _)| spec.kind == MapKind::PerCpu);
        let seated = has_seats.then(|| Arc::clone(&seats));
        let code = Code::seated(&ours, object.context, shared, seated);
        let code = code.map_err(ProgramError::Code)?;
        Ok(Self {
            name: name.to_owned(),
            kernel,
            code,
            insns,
            frags: object.frags,
            maps,
            seats,
        })
    }

    /// The kernel's instance, to be attached.
    pub fn kernel(&self) -> &bpf::Program {
        &self.kernel
    }

    /// The instructions, as the kernel was given them.
    pub fn insns(&self) -> &[Insn] {
        &self.insns
    }

    /// It bears frames of several buffers.
    pub fn frags(&self) -> bool {
        self.frags
    }

    /// The daemon's code.
    pub fn code(&self) -> &Arc<Code> {
        &self.code
    }

    /// An instance in the daemon.
    ///
    /// # Errors
    /// The system's: no memory.
    pub fn instance(&self) -> io::Result<Instance> {
        Instance::new(&self.code)
    }

    /// How what lies in a map is told, by its place among [`maps`](Self::maps).
    pub fn view(&self, map: usize) -> Option<MapView> {
        let (spec, array) = self.maps.get(map)?;
        Some(match spec.kind {
            MapKind::Array | MapKind::PerCpu => MapView {
                bytes: spec.value_bytes,
                entries: array.entries(),
                layout: None,
                stride: array.stride(),
            },
            MapKind::Hash { key_bytes, forgets } => {
                let layout = Layout::of(spec, key_bytes, forgets);
                MapView {
                    bytes: layout.slot(),
                    entries: layout.slots(),
                    layout: Some(layout),
                    stride: layout.slot(),
                }
            }
        })
    }

    /// Its maps, in the order in which [`Instance::read_map`] counts them.
    pub fn maps(&self) -> &[(MapSpec, Array)] {
        &self.maps
    }
}

fn make(spec: &MapSpec) -> io::Result<Array> {
    let (bytes, entries) = spec.in_memory();
    let entries = u32::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
    let array = Array::create(&spec.name, bytes, entries, spec.constant)?;
    if !spec.data.is_empty() {
        array.set(0, &spec.data)?;
    }
    if spec.constant {
        array.freeze()?;
    }
    Ok(array)
}

fn verify(
    context: Context,
    name: &str,
    insns: &[Insn],
    frags: bool,
    license: &CStr,
) -> Result<bpf::Program, LoadError> {
    let kind = match context {
        Context::Xdp => ProgramKind::Xdp,
        Context::Classifier => ProgramKind::Classifier,
    };
    bpf::Program::load_licensed(kind, name, insns, frags, license)
}
