//! What User-mode Linux needs on processors with AMX: `cli/uml-xstate.c`, which says why.
//!
//! `make install` puts the library where a `vnplug` beside it finds it; the UML gets it through the
//! dynamic loader (`LD_PRELOAD`). On other processors nothing is preloaded.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::out;

/// The value of `LD_PRELOAD` for a UML; `None` leaves it as it is.
///
/// Says on stderr when a library is needed and not found. That is no failure: a UML newer than
/// Debian's 6.1 may do without.
///
/// # Errors
/// `VNPLUG_UML_PRELOAD` names no file.
pub(crate) fn preload() -> Result<Option<OsString>, Failure> {
    let Some(library) = library()? else {
        return Ok(None);
    };
    let mut list = library.into_os_string();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    Ok(Some(list))
}

fn library() -> Result<Option<PathBuf>, Failure> {
    if let Some(told) = env::var_os(TOLD).map(PathBuf::from) {
        return match told.is_file() {
            true => Ok(Some(told)),
            false => Err(Failure::about(
                TOLD,
                format!("there is no file {}", told.display()),
            )),
        };
    }
    if !fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| has_amx(&text)) {
        return Ok(None);
    }
    let own = env::current_exe()?;
    let places = places(own.parent().unwrap_or(Path::new("/")));
    let found = places.iter().find(|place| place.is_file());
    if found.is_none() {
        let [installed, beside] = places.each_ref().map(|place| place.display());
        out::note(&format!(
            "this processor has AMX, where User-mode Linux 6.1 dies (\"ptrace set fp regs failed\") \
             without {LIBRARY}; there is no {installed} and no {beside}. `make install` puts it \
             there, or name it in {TOLD}"
        ));
    }
    Ok(found.cloned())
}

/// Where the library of a `vnplug` in `dir` may be: installed, and built.
fn places(dir: &Path) -> [PathBuf; 2] {
    let installed = dir.parent().unwrap_or(dir).join("lib/vnplug");
    [installed.join(LIBRARY), dir.join(LIBRARY)]
}

/// Whether the state of this processor is larger than UML can restore.
fn has_amx(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.any(|line| line.split_whitespace().any(|flag| flag == "amx_tile"))
}

const LIBRARY: &str = "libvnplug-uml-xstate.so";
/// The environment variable that names the library, needed or not.
const TOLD: &str = "VNPLUG_UML_PRELOAD";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amx_is_a_flag_of_the_processor() {
        assert!(has_amx(
            "processor : 0\nflags : fpu amx_bf16 amx_tile amx_int8\n"
        ));
        assert!(!has_amx("flags : fpu avx512f\n"));
        assert!(!has_amx("model name : amx_tile\n"));
    }

    #[test]
    fn the_library_is_installed_under_lib_or_lies_beside_the_program() {
        let found = places(Path::new("/usr/local/bin")).map(|place| place.display().to_string());
        assert_eq!(
            found,
            [
                "/usr/local/lib/vnplug/libvnplug-uml-xstate.so",
                "/usr/local/bin/libvnplug-uml-xstate.so"
            ]
        );
    }
}
