//! A program of an operator's: its maps made, accepted by the kernel, translated for the daemon.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::sync::Arc;

use vnplug_os::bpf::{self, Array, Insn, LoadError, ProgramKind};

use crate::check::Context;
use crate::code::{Code, CodeError, SharedMap};
use crate::instance::Instance;
use crate::object::{MapSpec, Object, ObjectError};

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
            same.map(|(_, array)| array.try_clone())
        };
        let maps = object
            .maps
            .iter()
            .map(|spec| match kept(spec).unwrap_or_else(|| make(spec)) {
                Ok(array) => Ok((spec.clone(), array)),
                Err(cause) => Err(ProgramError::Map {
                    name: spec.name.clone(),
                    cause,
                }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let descriptor = |name: &str| {
            let found = maps.iter().find(|(spec, _)| spec.name == name);
            found.map(|(_, array)| array.number())
        };
        let insns = object.link(descriptor).map_err(ProgramError::Object)?;
        Self::from_parts(name, object, insns, maps)
    }

    fn from_parts(
        name: &str,
        object: &Object,
        insns: Vec<Insn>,
        maps: Vec<(MapSpec, Array)>,
    ) -> Result<Self, ProgramError> {
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
        let code = Code::new(&insns, object.context, shared).map_err(ProgramError::Code)?;
        Ok(Self {
            name: name.to_owned(),
            kernel,
            code,
            insns,
            frags: object.frags,
            maps,
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

    /// Its maps, in the order in which [`Instance::read_map`] counts them.
    pub fn maps(&self) -> &[(MapSpec, Array)] {
        &self.maps
    }
}

fn make(spec: &MapSpec) -> io::Result<Array> {
    let array = Array::create(&spec.name, spec.value_bytes, spec.entries, spec.constant)?;
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
