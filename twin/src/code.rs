//! A program as machine code.
#![expect(
    unsafe_code,
    reason = "code without confinement, which is measured, must be asked for"
)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use vnplug_os::bpf::{Array, Insn};
use vnplug_os::executable::Executable;

use crate::check::{self, Checked, Context, Unfit};
use crate::emit::{Emitter, Places, function_signature};
use crate::helpers::{FIRST_HANDLE, MapPlace};
use crate::layout;
use crate::per_cpu::Seats;

/// A map that the kernel's instance and the daemon's share.
#[derive(Debug)]
pub struct SharedMap {
    /// What instructions name it by.
    pub(crate) descriptor: i32,
    pub(crate) fd: OwnedFd,
    pub(crate) stride: u32,
    pub(crate) value_bytes: u32,
    pub(crate) entries: u32,
    pub(crate) constant: bool,
}

impl SharedMap {
    /// Of an array; `constant`: programs only read it, and it is frozen.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(array: &Array, constant: bool) -> io::Result<Self> {
        Ok(Self {
            descriptor: array.number(),
            fd: array.as_fd().try_clone_to_owned()?,
            stride: array.stride(),
            value_bytes: array.value_bytes(),
            entries: array.entries(),
            constant,
        })
    }

    /// Of any map whose descriptor can be mapped: `entries` values of `value_bytes` bytes, each at a multiple
    /// of 8.
    pub fn of(fd: OwnedFd, descriptor: i32, value_bytes: u32, entries: u32) -> Self {
        Self {
            descriptor,
            fd,
            stride: value_bytes.next_multiple_of(8),
            value_bytes,
            entries,
            constant: false,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.stride) * u64::from(self.entries)
    }
}

/// Instructions that the daemon can run, translated.
#[derive(Debug)]
pub struct Code {
    pub(crate) context: Context,
    pub(crate) maps: Vec<SharedMap>,
    pub(crate) places: Vec<u32>,
    pub(crate) area: u32,
    /// Where functions begin.
    pub(crate) functions: Vec<usize>,
    /// Whoever runs it has one of these, for its maps per CPU.
    pub(crate) seats: Option<Arc<Seats>>,
    /// Keeps the pages.
    _pages: Executable,
    bytes: usize,
}

/// Why there is no machine code.
#[derive(Debug)]
pub enum CodeError {
    /// The program does what the daemon cannot.
    Unfit(Unfit),
    /// Its maps are too long.
    TooLong,
    /// There is no translator for this processor, or it failed; for people.
    Translator(String),
    /// The system's.
    System(io::Error),
}

impl std::fmt::Display for CodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unfit(why) => why.fmt(f),
            Self::TooLong => {
                let most = layout::MAX_MAPS >> 20;
                write!(f, "its maps have more than {most} MiB together")
            }
            Self::Translator(why) => write!(f, "it cannot be translated: {why}"),
            Self::System(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for CodeError {}

impl From<Unfit> for CodeError {
    fn from(why: Unfit) -> Self {
        Self::Unfit(why)
    }
}

impl From<io::Error> for CodeError {
    fn from(why: io::Error) -> Self {
        Self::System(why)
    }
}

impl Code {
    /// Translates a program that the kernel's verifier has accepted.
    ///
    /// # Errors
    /// [`CodeError`].
    pub fn new(
        insns: &[Insn],
        context: Context,
        maps: Vec<SharedMap>,
    ) -> Result<Arc<Self>, CodeError> {
        Self::translate(insns, context, maps, true, None)
    }

    /// As [`new`](Self::new), of a program whose instances have seats.
    pub(crate) fn seated(
        insns: &[Insn],
        context: Context,
        maps: Vec<SharedMap>,
        seats: Option<Arc<Seats>>,
    ) -> Result<Arc<Self>, CodeError> {
        Self::translate(insns, context, maps, true, seats)
    }

    /// As [`new`](Self::new), without the cut of addresses: what confinement costs is measured with it.
    ///
    /// # Errors
    /// [`CodeError`].
    ///
    /// # Safety
    /// The kernel's verifier has accepted the program, with these maps.
    #[doc(hidden)]
    pub unsafe fn believing(
        insns: &[Insn],
        context: Context,
        maps: Vec<SharedMap>,
    ) -> Result<Arc<Self>, CodeError> {
        Self::translate(insns, context, maps, false, None)
    }

    fn translate(
        insns: &[Insn],
        context: Context,
        maps: Vec<SharedMap>,
        is_confined: bool,
        seats: Option<Arc<Seats>>,
    ) -> Result<Arc<Self>, CodeError> {
        let checked = check::check(insns, context)?;
        let (places, area) =
            layout::lay_out(maps.iter().map(SharedMap::bytes)).ok_or(CodeError::TooLong)?;
        let known = Known {
            maps: &maps,
            places: &places,
        };
        let mask = is_confined.then_some(area - 1);
        let functions = compile(&checked, &known, mask).map_err(CodeError::Translator)?;
        let (joined, offsets) = join(&functions);
        let pages = Executable::new(&joined)?;
        Ok(Arc::new(Self {
            context,
            places,
            area,
            functions: offsets
                .into_iter()
                .map(|offset| pages.address(offset).as_ptr().addr())
                .collect(),
            bytes: joined.len(),
            seats,
            _pages: pages,
            maps,
        }))
    }

    /// Bytes of machine code.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What programs are given.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Where the maps lie.
    pub(crate) fn map_places(&self) -> Vec<MapPlace> {
        let maps = self.maps.iter().zip(&self.places);
        maps.map(|(map, &place)| MapPlace {
            place,
            stride: map.stride,
            value_bytes: map.value_bytes,
            entries: map.entries,
            constant: map.constant,
        })
        .collect()
    }
}

/// The maps that descriptors stand for.
struct Known<'a> {
    maps: &'a [SharedMap],
    places: &'a [u32],
}

impl Known<'_> {
    fn index(&self, descriptor: i32) -> Option<usize> {
        self.maps
            .iter()
            .position(|map| map.descriptor == descriptor)
    }
}

impl Places for Known<'_> {
    fn handle(&self, descriptor: i32) -> Option<u64> {
        Some(FIRST_HANDLE + self.index(descriptor)? as u64)
    }

    fn values(&self, descriptor: i32) -> Option<(u32, u64)> {
        let index = self.index(descriptor)?;
        Some((self.places[index], self.maps[index].bytes()))
    }
}

fn compile(
    program: &Checked,
    places: &dyn Places,
    mask: Option<u32>,
) -> Result<Vec<Vec<u8>>, String> {
    let isa = isa()?;
    let mut context = cranelift_codegen::Context::new();
    let mut builders = FunctionBuilderContext::new();
    let mut functions = Vec::new();
    for number in 0..program.functions.len() {
        context.clear();
        context.func.signature = function_signature();
        let builder = FunctionBuilder::new(&mut context.func, &mut builders);
        Emitter::new(builder, program, places, mask).write(number, isa.frontend_config())?;
        let compiled = context
            .compile(&*isa, &mut ControlPlane::default())
            .map_err(|error| error.inner.to_string())?;
        if !compiled.buffer.relocs().is_empty() {
            return Err("its code refers to something outside of it".into());
        }
        functions.push(compiled.code_buffer().to_vec());
    }
    Ok(functions)
}

/// For the processor that this runs on.
fn isa() -> Result<OwnedTargetIsa, String> {
    let mut flags = settings::builder();
    let verify = if cfg!(debug_assertions) {
        "true"
    } else {
        "false"
    };
    for (name, value) in [
        ("opt_level", "speed"),
        ("enable_verifier", verify),
        ("enable_probestack", "false"),
        ("unwind_info", "false"),
    ] {
        flags.set(name, value).map_err(|error| error.to_string())?;
    }
    let name = format!("{}-unknown-linux", std::env::consts::ARCH);
    cranelift_codegen::isa::lookup_by_name(&name)
        .map_err(|error| error.to_string())?
        .finish(settings::Flags::new(flags))
        .map_err(|error| error.to_string())
}

/// The functions one after the other, and where each begins.
fn join(functions: &[Vec<u8>]) -> (Vec<u8>, Vec<usize>) {
    /// A function begins at a cache line.
    const ALIGNMENT: usize = 64;
    const INT3: u8 = 0xcc;
    let mut joined = Vec::new();
    let offsets = functions
        .iter()
        .map(|function| {
            joined.resize(joined.len().next_multiple_of(ALIGNMENT), INT3);
            let offset = joined.len();
            joined.extend_from_slice(function);
            offset
        })
        .collect();
    (joined, offsets)
}
