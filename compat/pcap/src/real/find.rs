//! Where the real library is.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// Opens the first real libpcap there is. Never closed.
#[expect(unsafe_code, reason = "dlopen, dlsym, dladdr")]
pub(super) fn open() -> Option<NonNull<c_void>> {
    let own = own_file();
    for path in candidates() {
        let same = |own: &(u64, u64)| file(&path).as_ref() == Some(own);
        if own.as_ref().is_some_and(same) {
            continue;
        }
        let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
            continue;
        };
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: the path of a libpcap; its constructors are those that the program expects.
        let Some(handle) = NonNull::new(unsafe { libc::dlopen(name.as_ptr(), flags) }) else {
            continue;
        };
        // SAFETY: the handle is open, the name ends with 0.
        if unsafe { libc::dlsym(handle.as_ptr(), MARK.as_ptr()) }.is_null() {
            return Some(handle);
        }
        // Another copy of this library, by a path of its own.
        // SAFETY: opened above, and nothing of it is kept.
        unsafe { libc::dlclose(handle.as_ptr()) };
    }
    None
}

/// Paths to try, in order.
fn candidates() -> Vec<PathBuf> {
    let mut paths = Vec::new();
    if let Some(path) = std::env::var_os("VNPLUG_REAL_LIBPCAP").filter(|_| !is_privileged()) {
        paths.push(PathBuf::from(path));
    }
    let multiarch = format!("{}-linux-gnu", std::env::consts::ARCH);
    let directories = [
        format!("/usr/lib/{multiarch}"),
        format!("/lib/{multiarch}"),
        "/usr/lib64".into(),
        "/lib64".into(),
        "/usr/lib".into(),
        "/lib".into(),
        format!("/usr/local/lib/{multiarch}"),
        "/usr/local/lib64".into(),
        "/usr/local/lib".into(),
    ];
    for directory in &directories {
        paths.extend(NAMES.map(|name| Path::new(directory).join(name)));
    }
    paths.retain(|path| path.is_absolute() && path.is_file());
    paths
}

/// True in a program that gained rights by being executed: its environment is a stranger's.
#[expect(unsafe_code, reason = "getauxval")]
fn is_privileged() -> bool {
    // SAFETY: a plain question.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// This library's own file.
#[expect(unsafe_code, reason = "dladdr")]
fn own_file() -> Option<(u64, u64)> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let address = (&raw const crate::data::vnplug_libpcap).cast::<c_void>();
    // SAFETY: `info` may be written; zero is a valid Dl_info, and so is what dladdr writes.
    let (found, info) = unsafe {
        let found = libc::dladdr(address, info.as_mut_ptr());
        (found, info.assume_init())
    };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr's name ends with 0 and lives as long as this library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    file(Path::new(OsStr::from_bytes(name.to_bytes())))
}

fn file(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The symbol that only this library has.
const MARK: &CStr = c"vnplug_libpcap";

/// Debian's name and everybody else's, each first as a package diversion leaves it.
const NAMES: [&str; 4] = [
    "libpcap.so.0.8.distrib",
    "libpcap.so.0.8",
    "libpcap.so.1.distrib",
    "libpcap.so.1",
];
