//! The program that is put into a guest: one that needs no library there.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A static program for one kind of machine.
#[derive(Debug)]
pub(in crate::qemu) struct Program {
    pub(super) bytes: Vec<u8>,
    /// The machine, as `uname -m` names it.
    pub(super) machine: &'static str,
}

impl Program {
    /// Reads one; without `path` the one that runs here.
    ///
    /// # Errors
    /// It cannot be read, is no program for Linux, or needs libraries.
    pub(super) fn read(path: Option<&Path>) -> Result<Self, Failure> {
        let own = PathBuf::from("/proc/self/exe");
        let shown = path.map_or("this vnplug".into(), |path| path.display().to_string());
        let bytes = std::fs::read(path.unwrap_or(&own))
            .map_err(|error| Failure::about(&shown, format!("cannot be read: {error}")))?;
        let elf = Elf::of(&bytes).ok_or_else(|| {
            Failure::about(&shown, "this is no program for Linux on x86-64 or arm64")
        })?;
        if elf.is_dynamic {
            let mut why = "it needs libraries, which the guest may not have".to_owned();
            let advice = "; give --guest-program FILE: a static vnplug, as in the packages, or by `make guest`";
            let _ = write!(why, "{advice}");
            return Err(Failure::about(shown, why));
        }
        Ok(Self {
            machine: elf.machine,
            bytes,
        })
    }
}

/// What the head of an ELF file tells (System V ABI, "Object Files").
#[derive(Debug, PartialEq)]
struct Elf {
    machine: &'static str,
    is_dynamic: bool,
}

impl Elf {
    /// Of 64-bit, little-endian ones.
    fn of(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        bytes.starts_with(b"\x7fELF\x02\x01").then_some(())?;
        let machine = match half(E_MACHINE)? {
            62 => "x86_64",
            183 => "aarch64",
            _ => return None,
        };
        let headers = u64::from_le_bytes(*bytes.get(E_PHOFF..)?.first_chunk()?);
        let headers = usize::try_from(headers).ok()?;
        let (size, count) = (half(E_PHENTSIZE)?, half(E_PHNUM)?);
        let mut is_dynamic = false;
        for index in 0..count {
            let at = headers.checked_add(usize::from(size) * usize::from(index))?;
            let kind = u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
            is_dynamic |= kind == PT_INTERP;
        }
        Some(Self {
            machine,
            is_dynamic,
        })
    }
}

const E_MACHINE: usize = 18;
const E_PHOFF: usize = 32;
const E_PHENTSIZE: usize = 54;
const E_PHNUM: usize = 56;
/// The program wants a loader.
const PT_INTERP: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_loader_and_what_is_none_are_refused() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let elf = Elf::of(&own).unwrap();
        assert!(elf.is_dynamic);
        let refused = Program::read(None).unwrap_err().line();
        assert!(refused.contains("--guest-program FILE"), "{refused}");
        // The same without its loader.
        let mut stat = own.clone();
        let headers = u64::from_le_bytes(*stat[E_PHOFF..].first_chunk().unwrap()) as usize;
        let count = usize::from(stat[E_PHNUM]);
        for at in (0..count).map(|index| headers + 56 * index) {
            if stat[at..at + 4] == PT_INTERP.to_le_bytes() {
                stat[at] = 0;
            }
        }
        assert!(!Elf::of(&stat).unwrap().is_dynamic);
        for len in 0..64 {
            assert_eq!(Elf::of(&own[..len]), None);
        }
        let mut far = own;
        far[E_PHOFF..E_PHOFF + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(Elf::of(&far), None);
        let text = Program::read(Some(Path::new("/etc/passwd"))).unwrap_err();
        assert!(text.line().contains("no program for Linux"), "{text:?}");
    }
}
