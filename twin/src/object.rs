//! What a compiler left: an ELF object with programs and maps, read by `aya-obj`.
//!
//! Objects are those of libbpf's conventions (libbpf ≥ 0.x, `SEC("xdp")`, `SEC(".maps")`), so `clang -target bpf`
//! and aya's Rust give them.

use std::collections::HashSet;
use std::ffi::CString;
use std::fmt;
use std::os::fd::RawFd;

use aya_obj::{EbpfSectionKind, Map, ProgramSection};
use vnplug_os::bpf::{Insn, possible_cpus};

use crate::check::Context;
use crate::hash::{self, Layout};
use crate::layout::{MAX_MAPS, lay_out};
use crate::per_cpu;
use crate::section::{absent_bytes, with_old_names};

/// An object, and the program in it that was asked for.
#[derive(Debug)]
pub struct Object {
    inner: aya_obj::Object,
    program: String,
    /// The hook that it is for.
    pub context: Context,
    /// It can bear frames in several buffers (`xdp.frags`).
    pub frags: bool,
    /// Its maps.
    pub maps: Vec<MapSpec>,
}

/// A map that an object wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapSpec {
    /// Its name; `.rodata`, `.data` and `.bss` are the program's variables.
    pub name: String,
    /// What it is for the program.
    pub kind: MapKind,
    /// Bytes of a value.
    pub value_bytes: u32,
    /// How many values.
    pub entries: u32,
    /// Programs only read it.
    pub constant: bool,
    /// It is the program's variables.
    pub is_variables: bool,
    /// Where in a hash a key is depends on this.
    pub(crate) seed: u64,
    /// What lies in it at the begin; nothing: zeroes.
    pub data: Vec<u8>,
}

/// What a map is for a program. In memory each is an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_ARRAY`, or the program's variables.
    Array,
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`
    PerCpu,
    /// `BPF_MAP_TYPE_HASH`, `BPF_MAP_TYPE_LRU_HASH`
    Hash {
        /// Bytes of a key.
        key_bytes: u32,
        /// It forgets the oldest where it has no room.
        forgets: bool,
    },
}

impl MapSpec {
    /// The array that it is in memory: bytes of an entry, and entries.
    pub(crate) fn in_memory(&self) -> (u32, u64) {
        match self.kind {
            MapKind::Array => (self.value_bytes, self.entries.into()),
            MapKind::PerCpu => {
                let each = per_cpu::places(cpus());
                (self.value_bytes, u64::from(self.entries) * u64::from(each))
            }
            MapKind::Hash { key_bytes, forgets } => {
                let layout = Layout::of(self, key_bytes, forgets);
                (layout.bucket(), layout.array())
            }
        }
    }

    /// Whether what lies in one is what another would find. Variables have no shape that could be compared: whichever a version
    /// has, they lie in one value.
    pub(crate) fn has_shape_of(&self, other: &Self) -> bool {
        let shape = |it: &Self| {
            (
                it.name.clone(),
                it.kind,
                it.value_bytes,
                it.entries,
                it.constant,
            )
        };
        !self.is_variables && !other.is_variables && shape(self) == shape(other)
    }
}

/// Why an object is none that we can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectError(pub String);

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ObjectError {}

impl Object {
    /// Reads an object. `program`: which of its programs; it may be left out if it has one.
    ///
    /// # Errors
    /// [`ObjectError`]: what is wrong with it, and what to do.
    pub fn parse(bytes: &[u8], program: Option<&str>) -> Result<Self, ObjectError> {
        match absent_bytes(bytes) {
            Some(0..=MAX_MAPS) => {}
            Some(_) => return Err(too_much()),
            None => {
                let what =
                    "not an eBPF object: no ELF file of 64 bits, little endian, with sections";
                return Err(ObjectError(what.into()));
            }
        }
        // The reader is made for objects that compilers left; of others it may fail in its own way.
        let bytes = with_old_names(bytes);
        let parsed = std::panic::catch_unwind(|| aya_obj::Object::parse(&bytes));
        let inner = match parsed {
            Ok(Ok(inner)) => inner,
            Ok(Err(error @ aya_obj::ParseError::InvalidProgramSection { .. })) => {
                return Err(ObjectError(format!(
                    "{error}: programs for frames are in SEC(\"xdp\") or SEC(\"tc\")"
                )));
            }
            Ok(Err(error)) => return Err(ObjectError(format!("not an eBPF object: {error}"))),
            Err(_) => return Err(ObjectError("not an eBPF object that makes sense".into())),
        };
        let name = choose(&inner, program)?;
        let (context, frags) = match &inner.programs[&name].section {
            ProgramSection::Xdp { frags, .. } => (Context::Xdp, *frags),
            ProgramSection::SchedClassifier => (Context::Classifier, false),
            other => {
                return Err(ObjectError(format!(
                    "{name} is a program for {other:?}; only SEC(\"xdp\") and SEC(\"tc\") are for frames"
                )));
            }
        };
        let mut maps = inner
            .maps
            .iter()
            .map(|(name, map)| spec(name, map))
            .collect::<Result<Vec<_>, _>>()?;
        maps.sort_by(|a, b| a.name.cmp(&b.name));
        let len = |map: &MapSpec| {
            let (bytes, entries) = map.in_memory();
            entries * u64::from(bytes).next_multiple_of(8)
        };
        let copied: u64 = maps.iter().filter(|map| map.constant).map(len).sum();
        if lay_out(maps.iter().map(len)).is_none() || copied > MAX_COPIED {
            return Err(too_much());
        }
        Ok(Self {
            inner,
            program: name,
            context,
            frags,
            maps,
        })
    }

    /// Its name in the object.
    pub fn name(&self) -> &str {
        &self.program
    }

    /// What it says that it is under.
    pub fn license(&self) -> CString {
        self.inner.license.clone()
    }

    /// The instructions, with each map named by the descriptor that `descriptor` gives for its name.
    ///
    /// # Errors
    /// [`ObjectError`].
    pub fn link(
        &self,
        descriptor: impl Fn(&str) -> Option<RawFd>,
    ) -> Result<Vec<Insn>, ObjectError> {
        let mut object = self.inner.clone();
        let text: HashSet<usize> = object
            .functions
            .keys()
            .map(|(section, _)| *section)
            .collect();
        let maps = object.maps.clone();
        let maps = maps
            .iter()
            .filter_map(|(name, map)| Some((name.as_str(), descriptor(name)?, map)));
        let linked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            object.relocate_maps(maps, &text)?;
            object.relocate_calls(&text)
        }));
        match linked {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let mut text = error.to_string();
                let mut cause = std::error::Error::source(&error);
                while let Some(next) = cause {
                    text = format!("{text}: {next}");
                    cause = next.source();
                }
                return Err(ObjectError(format!("cannot be linked: {text}")));
            }
            Err(_) => return Err(ObjectError("its references make no sense".into())),
        }
        let key = object.programs[&self.program].function_key();
        let function = object.functions.get(&key);
        let function = function.ok_or_else(|| ObjectError("has no instructions".into()))?;
        let insns = function.instructions.iter();
        Ok(insns
            .map(|it| Insn::new(it.code, it.dst_reg(), it.src_reg(), it.off, it.imm))
            .collect())
    }
}

fn too_much() -> ObjectError {
    let (all, copied) = (MAX_MAPS >> 20, MAX_COPIED >> 20);
    ObjectError(format!(
        "its maps have more than {all} MiB together, or those that it only reads more than {copied}"
    ))
}

fn choose(object: &aya_obj::Object, program: Option<&str>) -> Result<String, ObjectError> {
    let mut names: Vec<_> = object.programs.keys().cloned().collect();
    names.sort();
    let all = names.join(", ");
    match (program, &names[..]) {
        (_, []) => Err(ObjectError(
            "has no program; a program is a function with SEC(\"xdp\") or SEC(\"tc\")".into(),
        )),
        (None, [one]) => Ok(one.clone()),
        (None, _) => Err(ObjectError(format!(
            "has several programs ({all}): say which, as FILE.o:NAME"
        ))),
        (Some(name), _) if names.iter().any(|it| it == name) => Ok(name.to_owned()),
        (Some(name), _) => Err(ObjectError(format!("has no program {name}; it has {all}"))),
    }
}

fn spec(name: &str, map: &Map) -> Result<MapSpec, ObjectError> {
    let wrong = |why: String| Err(ObjectError(format!("map {name}: {why}")));
    let section = map.section_kind();
    let is_data = matches!(
        section,
        EbpfSectionKind::Bss | EbpfSectionKind::Data | EbpfSectionKind::Rodata
    );
    let kind = match (is_data, map.map_type()) {
        (true, _) | (_, ARRAY) => MapKind::Array,
        (_, PERCPU_ARRAY) => MapKind::PerCpu,
        (_, HASH | LRU_HASH) => MapKind::Hash {
            key_bytes: map.key_size(),
            forgets: map.map_type() == LRU_HASH,
        },
        (_, other) => {
            return wrong(format!(
                "is of type {other}; programs that run in the daemon as well share BPF_MAP_TYPE_ARRAY, _PERCPU_ARRAY, _HASH \
                 and _LRU_HASH, and the variables of the program"
            ));
        }
    };
    let (value_bytes, entries) = match is_data {
        true => (map.data().len() as u32, 1),
        false => (map.value_size(), map.max_entries()),
    };
    let is_constant =
        section == EbpfSectionKind::Rodata || map.map_flags() & READ_ONLY_PROGRAM != 0;
    match kind {
        MapKind::Hash { key_bytes, .. } => {
            let fits = (1..=hash::MAX_KEY).contains(&key_bytes) && value_bytes <= hash::MAX_VALUE;
            if !fits || entries > MAX_KEYS {
                return wrong(format!(
                    "keys of a hash have at most {} bytes, values {}, and there are at most {MAX_KEYS}",
                    hash::MAX_KEY,
                    hash::MAX_VALUE
                ));
            }
        }
        _ if !is_data && map.key_size() != 4 => {
            return wrong("keys of an array have 4 bytes".into());
        }
        _ => {}
    }
    if kind != MapKind::Array && is_constant {
        return wrong("only arrays can be read alone by programs".into());
    }
    if value_bytes == 0 || entries == 0 {
        return wrong("has no room for a value".into());
    }
    Ok(MapSpec {
        name: name.to_owned(),
        kind,
        seed: vnplug_os::event::random(),
        value_bytes,
        entries,
        constant: is_constant,
        is_variables: is_data,
        data: match is_data {
            true => map.data().to_vec(),
            false => Vec::new(),
        },
    })
}

/// The most of maps that programs only read: each instance has a copy.
const MAX_COPIED: u64 = 16 << 20;
/// How many CPUs this machine may have.
fn cpus() -> u32 {
    possible_cpus().map_or(1, |cpus| cpus as u32)
}

/// The most keys of a hash.
const MAX_KEYS: u32 = 1 << 22;
/// `BPF_MAP_TYPE_HASH`
const HASH: u32 = 1;
/// `BPF_MAP_TYPE_ARRAY`
const ARRAY: u32 = 2;
/// `BPF_MAP_TYPE_PERCPU_ARRAY`
const PERCPU_ARRAY: u32 = 6;
/// `BPF_MAP_TYPE_LRU_HASH`
const LRU_HASH: u32 = 9;
/// `BPF_F_RDONLY_PROG`
const READ_ONLY_PROGRAM: u32 = 1 << 7;
