//! Who owns a leftover: names of directories and namespaces carry their owner's identity.
//!
//! A name is `vnplab-PID-START-N`: process id, the start time of that process in clock ticks (a
//! reused process id differs in it) and a counter. A name whose owner no longer runs is garbage.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

/// A name nobody else has.
pub(crate) fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let start = start_ticks(pid).unwrap_or(0);
    // Relaxed: only uniqueness matters.
    format!(
        "{PREFIX}{pid}-{start}-{}",
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Whether `name` is one of ours and its owner is dead.
pub(crate) fn is_orphan(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return false;
    };
    let mut parts = rest.split('-');
    let (Some(pid), Some(start), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let (Ok(pid), Ok(start)) = (pid.parse::<u32>(), start.parse::<u64>()) else {
        return false;
    };
    start_ticks(pid) != Some(start)
}

/// Start time of a process in clock ticks after boot; `None` if there is no such process (a zombie
/// counts as none).
fn start_ticks(pid: u32) -> Option<u64> {
    let fields = stat_fields(pid)?;
    if fields
        .first()
        .is_some_and(|state| state == "Z" || state == "X")
    {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The fields of `/proc/PID/stat` after the command name, beginning with the state (field 3 of
/// proc(5) is index 0 here).
pub(crate) fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may hold blanks and parentheses: fields start after the last one.
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

const PREFIX: &str = "vnplab-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_not_orphans() {
        let name = unique_name();
        assert!(!is_orphan(&name));
        assert_ne!(name, unique_name());
    }

    #[test]
    fn a_reused_process_id_is_an_orphan() {
        assert!(is_orphan(&format!("{PREFIX}{}-1-0", std::process::id())));
    }

    #[test]
    fn foreign_names_are_left_alone() {
        for name in [
            "vnplab",
            "vnplab-",
            "vnplab-1-2",
            "vnplab-a-b-c",
            "vnplab-1-2-3-4",
            "other-1-2-3",
        ] {
            assert!(!is_orphan(name), "{name}");
        }
    }
}
