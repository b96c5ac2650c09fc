//! Programs of third parties: built against the header and the library as anybody would.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{LabError, Result};

/// Where cargo put the library: beside a test's program.
///
/// # Errors
/// If it is not there.
pub fn library_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().map_err(io("cannot find this program"))?;
    let beside = program.ancestors().skip(1).take(2);
    let mut found = beside.filter(|dir| dir.join("libvnplug.so").exists());
    let missing = || LabError::Missing("libvnplug.so is not beside this program".into());
    found.next().map(Path::to_owned).ok_or_else(missing)
}

/// Compiles one file of C to a program in `dir`, with more flags.
///
/// # Errors
/// If the compiler warns.
pub fn build_c(source: &Path, dir: &Path, flags: &[&str]) -> Result<PathBuf> {
    let libraries = library_dir()?;
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/include");
    let program = dir.join(source.file_stem().unwrap_or_default());
    let output = Command::new("cc")
        .args([
            "-std=c11",
            "-D_GNU_SOURCE",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
        ])
        .args(flags)
        .arg("-I")
        .arg(header)
        .arg(source)
        .arg("-o")
        .arg(&program)
        .arg(format!("-L{}", libraries.display()))
        // As RPATH, which goes before LD_LIBRARY_PATH: there cargo names the directory above first, whose
        // library is of the last `cargo build`.
        .arg(format!(
            "-Wl,--disable-new-dtags,-rpath,{}",
            libraries.display()
        ))
        .arg("-lvnplug")
        .output()
        .map_err(io("cannot start cc"))?;
    if !output.status.success() {
        return Err(LabError::Command {
            command: format!("cc {}", source.display()),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    Ok(program)
}

fn io(what: &str) -> impl FnOnce(std::io::Error) -> LabError {
    let what = what.to_owned();
    |source| LabError::Io { what, source }
}

/// Compiles one file of C to an eBPF object in `dir`, as its first lines say.
///
/// # Errors
/// If the compiler warns.
pub fn build_bpf(source: &Path, dir: &Path) -> Result<PathBuf> {
    let object = dir.join(source.file_stem().unwrap_or_default());
    let object = object.with_extension("o");
    let headers = format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let output = Command::new("clang")
        .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-I"])
        .arg(headers)
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&object)
        .output()
        .map_err(io("cannot start clang"))?;
    match output.status.success() {
        true => Ok(object),
        false => Err(LabError::Command {
            command: format!("clang {}", source.display()),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

/// As [`build_bpf`], of a file of `examples/programs`, or of its `rust`.
///
/// # Errors
/// If the compiler warns.
pub fn example_bpf(name: &str, dir: &Path) -> Result<PathBuf> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/programs");
    if name.ends_with(".rs") {
        let assembly = dir.join(name).with_extension("s");
        compile_rust(&examples.join("rust"), &assembly)?;
        return build_bpf(&assembly, dir);
    }
    build_bpf(&examples.join(name), dir)
}

/// Compiles a crate to assembly of eBPF, as its first lines say, but for the toolchain: any that has the source of `core`.
fn compile_rust(package: &Path, assembly: &Path) -> Result<()> {
    let mut cargo = Command::new("cargo");
    // What is said of the product's own build.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"CARGO_PROFILE_") {
            cargo.env_remove(name);
        }
    }
    let output = cargo
        .env_remove("RUSTFLAGS")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", package.join("../../../target/ebpf"))
        .current_dir(package)
        .args(["rustc", "--quiet", "--locked", "--release", "--"])
        .arg(format!("--emit=asm={}", assembly.display()))
        .arg("-Dwarnings")
        .output()
        .map_err(io("cannot start cargo"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(LabError::Command {
            command: format!("cargo rustc in {}", package.display()),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}
