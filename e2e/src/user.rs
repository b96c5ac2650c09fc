//! An ordinary user, as whom a test does something.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use rustix::process::{Gid, Uid};

use crate::lab::Lab;

/// Its number; it has no name.
pub const USER: u32 = 54_321;

/// Does something as the ordinary user.
///
/// # Panics
/// If `does` does, or this is not root.
pub fn as_user<T: Send + 'static>(does: impl FnOnce() -> T + Send + 'static) -> T {
    as_uid(USER, does)
}

/// Does something as the user of this number.
///
/// # Panics
/// If `does` does, or this is not root.
pub fn as_uid<T: Send + 'static>(uid: u32, does: impl FnOnce() -> T + Send + 'static) -> T {
    as_member(uid, None, does)
}

/// Does something as the user of this number, whose group is this one if it is said.
///
/// # Panics
/// As [`as_uid`].
pub fn as_member<T: Send + 'static>(
    uid: u32,
    gid: Option<u32>,
    does: impl FnOnce() -> T + Send + 'static,
) -> T {
    let user = thread::spawn(move || {
        if let Some(gid) = gid {
            let gid = Gid::from_raw(gid);
            rustix::thread::set_thread_gid(gid).expect("root may be of any group");
        }
        rustix::thread::set_thread_uid(Uid::from_raw(uid)).expect("root may be anybody");
        does()
    });
    user.join().expect("what the user did")
}

/// A daemon's configuration with which everybody may connect, and what more it says.
///
/// # Panics
/// If it cannot be written.
#[must_use]
pub fn open_to_all(lab: &Lab, more: &str) -> String {
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(lab.dir(), mode).expect("the directory's mode");
    let config = lab.dir().join("config.toml");
    fs::write(&config, format!("socket_mode = 0o666\n{more}")).expect("a configuration");
    config.display().to_string()
}
