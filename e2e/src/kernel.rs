//! Finds the kernels guests boot, and their modules.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{LabError, Result};

/// Where the lab keeps what outlives one run: `target/guest` of the nearest directory upward that
/// has it.
///
/// # Errors
/// [`LabError::Missing`] if there is none; the text says how to make it.
pub(crate) fn guest_dir() -> Result<PathBuf> {
    if let Some(kernel) = env::var_os("VNPLUG_GUEST_KERNEL") {
        let kernel = PathBuf::from(kernel);
        return Ok(kernel
            .parent()
            .map_or_else(|| kernel.clone(), Path::to_path_buf));
    }
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let start = manifest
        .or_else(|| env::current_dir().ok())
        .unwrap_or_else(|| PathBuf::from("/"));
    start
        .ancestors()
        .map(|dir| dir.join("target/guest"))
        .find(|dir| dir.is_dir())
        .ok_or_else(|| {
            LabError::Missing(format!(
                "no target/guest from {} upward: {SETUP}",
                start.display()
            ))
        })
}

/// The kernel image that QEMU boots.
///
/// # Errors
/// [`LabError::Missing`] if the set-up script has not run.
pub(crate) fn qemu_kernel() -> Result<PathBuf> {
    first_with_prefix(&qemu_tree()?.join("boot"), "vmlinuz-")
}

/// The directory with the modules of the QEMU guest's kernel.
///
/// # Errors
/// [`LabError::Missing`] if the set-up script has not run.
pub(crate) fn qemu_modules() -> Result<PathBuf> {
    first_with_prefix(&qemu_tree()?.join("lib/modules"), "")
}

/// The directory with the modules of the User-mode Linux kernel.
///
/// # Errors
/// [`LabError::Missing`] if Debian's package is not installed.
pub(crate) fn uml_modules() -> Result<PathBuf> {
    first_with_prefix(Path::new("/usr/lib/uml/modules"), "").map_err(|_| {
        LabError::Missing("no /usr/lib/uml/modules: apt-get install user-mode-linux".to_owned())
    })
}

/// The module files that `wanted` need, dependencies first, each once. Names the kernel has built
/// in (or does not know) are left out of the result.
///
/// # Errors
/// [`LabError::Io`] if a module cannot be read.
pub(crate) fn module_closure(tree: &Path, wanted: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = HashMap::new();
    index_modules(tree, &mut files);
    let mut order = Vec::new();
    for name in wanted {
        add_with_dependencies(&files, name, &mut order)?;
    }
    Ok(order)
}

fn add_with_dependencies(
    files: &HashMap<String, PathBuf>,
    name: &str,
    order: &mut Vec<PathBuf>,
) -> Result<()> {
    let Some(file) = files.get(&name.replace('-', "_")) else {
        return Ok(());
    };
    if order.contains(file) {
        return Ok(());
    }
    let bytes = fs::read(file).map_err(LabError::io(format!("read {}", file.display())))?;
    // The section .modinfo holds NUL-terminated `key=value` strings.
    const KEY: &[u8] = b"\0depends=";
    if let Some(at) = bytes.windows(KEY.len()).position(|window| window == KEY) {
        let list = bytes[at + KEY.len()..]
            .split(|&byte| byte == 0)
            .next()
            .unwrap_or_default();
        for dependency in String::from_utf8_lossy(list)
            .split(',')
            .filter(|name| !name.is_empty())
        {
            add_with_dependencies(files, dependency, order)?;
        }
    }
    order.push(file.clone());
    Ok(())
}

fn index_modules(dir: &Path, files: &mut HashMap<String, PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            index_modules(&path, files);
        } else if let Some(name) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.strip_suffix(".ko"))
        {
            files.insert(name.replace('-', "_"), path);
        }
    }
}

fn qemu_tree() -> Result<PathBuf> {
    let tree = match env::var_os("VNPLUG_GUEST_KERNEL") {
        Some(tree) => PathBuf::from(tree),
        None => guest_dir()?.join("kernel"),
    };
    if tree.join(".complete").exists() {
        Ok(tree)
    } else {
        Err(LabError::Missing(format!(
            "no guest kernel in {}: {SETUP}",
            tree.display()
        )))
    }
}

fn first_with_prefix(dir: &Path, prefix: &str) -> Result<PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .ok_or_else(|| LabError::Missing(format!("no {prefix}* in {}: {SETUP}", dir.display())))
}

const SETUP: &str = "run e2e/setup-guest-kernel.sh";
