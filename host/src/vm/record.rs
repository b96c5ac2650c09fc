//! What is written down of a VM, and what the next daemon makes of it.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vnplug_ring::control::{Grant, VmKind};
use vnplug_ring::pmem;
use vnplug_ring::pool::PoolHeader;

use super::arenas::GroupRecord;
use super::dirs::{Dirs, check_pool, record_path, records, remove_all};
use super::plan::{check_name, check_pool_bytes};

/// What is written down of a VM, to be read by the next daemon, which may be an older one.
///
/// NB: only what a VM has is written, and who reads a word that it does not know cannot keep what that says: such a VM is not
/// served. So a field that is new is no obstacle for a VM that does not use it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) uml: bool,
    pub(super) pool: PathBuf,
    pub(super) pool_bytes: u64,
    pub(super) vectors: u32,
    pub(super) allow: Vec<(String, String)>,
    /// What operators took of it for good: an attach of the same machine does not give it again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) taken: Vec<(String, String)>,
    /// Who attached it; as text, for TOML's numbers have a sign.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) owner: String,
    /// Groups of the host that it may join, in the order of its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) groups: Vec<GroupRecord>,
    /// Each of its ports is to have a device of its own.
    #[serde(default, skip_serializing_if = "is_not")]
    pub(super) apart: bool,
    /// Its pool is a virtio-pmem device.
    #[serde(default, skip_serializing_if = "is_not")]
    pub(super) pmem: bool,
    /// No port is opened for it, for it moves; and what its ports read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) held: Option<BTreeSet<String>>,
    /// In which boot of the host it was attached; empty: it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) boot: String,
    /// Its devices are in the definition of a machine that runs as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stays_for: Option<u32>,
}

impl Record {
    /// What it was granted when it was attached.
    pub(super) fn grants(&self) -> Vec<Grant> {
        let grant = |(source, filter): &(String, String)| Grant {
            source: source.clone(),
            filter: filter.clone(),
        };
        self.allow.iter().map(grant).collect()
    }

    /// Which kind it is.
    pub(super) fn kind(&self) -> VmKind {
        match (self.uml, self.pmem) {
            (true, _) => VmKind::Uml,
            (false, true) => VmKind::QemuPmem,
            (false, false) => VmKind::Qemu,
        }
    }

    /// Refuses what no daemon can have written.
    pub(super) fn check(&self) -> io::Result<()> {
        check_name("VM", &self.name).map_err(|refusal| io::Error::other(refusal.text))?;
        check_pool(&self.pool, &self.name)?;
        check_pool_bytes(self.kind(), self.pool_bytes)
            .map_err(|refusal| io::Error::other(refusal.text))
    }

    /// The first page of its pool, whose number is `id`.
    pub(super) fn header(&self, id: u64) -> PoolHeader {
        PoolHeader {
            len: self.pool_bytes,
            id,
            name: self.name.clone(),
        }
    }

    /// Bytes of the file before its pool.
    pub(super) fn front(&self) -> u64 {
        if self.pmem { pmem::FRONT } else { 0 }
    }

    /// Bytes of its file.
    pub(super) fn file_len(&self) -> u64 {
        self.front() + self.pool_bytes
    }

    /// Whether the host has booted since: the machine runs no more, and its memory is gone. When it starts it is attached anew.
    pub(super) fn is_of_another_boot(&self) -> bool {
        let now = this_boot();
        !self.boot.is_empty() && !now.is_empty() && self.boot != now
    }

    /// Deletes everything of it that lies in the file system.
    pub(super) fn remove_files(&self, state: &Path) {
        remove_all(state, &self.name, std::slice::from_ref(&self.pool));
    }

    /// Writes it down.
    pub(super) fn save(&self, state: &Path) -> io::Result<()> {
        let text = toml::to_string(self).map_err(io::Error::other)?;
        write(&record_path(state, &self.name), &text)
    }
}

/// Writes down what was changed at run time, so that [`read_kept`] sees whether it is whole.
///
/// # Errors
/// As [`write`].
pub(crate) fn write_kept(path: &Path, text: &str) -> io::Result<()> {
    write(path, &format!("{HEAD}{} bytes\n{text}", text.len()))
}

/// Reads what was changed at run time, if it is whole: of a part nobody could see what is missing.
///
/// # Errors
/// As [`read`]; or it was cut off.
pub(crate) fn read_kept(path: &Path) -> io::Result<String> {
    whole(read(path)?).map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Writes something down in place of what was there. It is on the disk when this returns.
///
/// # Errors
/// It is longer than what is read; or the system's. What was there is still there, unless the directory alone could not be
/// written to the disk.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    if text.len() as u64 > LONGEST {
        let len = text.len();
        let what = format!("{len} bytes are more than the {LONGEST} that are read again");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let draft = path.with_extension("new");
    // It tells who may see what, which is nobody else's business.
    let mut file = std::fs::File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&draft)?;
    // One of an earlier daemon may have had another mode.
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    // Else a name may be there after a loss of power, and nothing behind it.
    let written = file.write_all(text.as_bytes());
    let written = written.and_then(|()| file.sync_data());
    drop(file);
    written
        .and_then(|()| std::fs::rename(&draft, path))
        .inspect_err(|_| {
            // A part of it helps nobody, and takes room that is short.
            let _ = std::fs::remove_file(&draft);
        })?;
    match path.parent() {
        Some(dir) => std::fs::File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// What was written down, if it is whole.
fn whole(text: String) -> Result<String, String> {
    let says_nothing = |line: &str| line.trim().is_empty() || line.starts_with('#');
    if text.lines().all(says_nothing) {
        return Err("it is empty: it was cut off, or emptied".to_owned());
    }
    // Earlier daemons wrote no head.
    let Some((head, rest)) = text.strip_prefix(HEAD).and_then(|it| it.split_once('\n')) else {
        return Ok(text);
    };
    let (had, has) = (head.strip_suffix(" bytes"), rest.len());
    match had.and_then(|len| len.parse::<usize>().ok()) {
        // More is no loss; who wrote that by hand is told what is wrong with it.
        Some(had) if had <= has => Ok(text),
        _ => Err(format!(
            "its first line says that {head} follow, and {has} do: it was cut off, or somebody changed it and left that line"
        )),
    }
}

/// Reads a record, if it is a regular file of ours or of the directory's owner, and no link.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let found = file.metadata()?;
    let dir = path.parent().map(std::fs::metadata).transpose()?;
    let us = rustix::process::geteuid().as_raw();
    let is_known = |uid: u32| uid == us || dir.is_some_and(|dir| dir.uid() == uid);
    let what = match () {
        () if !found.is_file() => "no regular file".to_owned(),
        () if !is_known(found.uid()) => format!("it belongs to user {}", found.uid()),
        () if found.len() > LONGEST => format!("{} bytes are no record", found.len()),
        () => {
            let mut text = String::new();
            file.take(LONGEST).read_to_string(&mut text)?;
            return Ok(text);
        }
    };
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// The host's boot (random(4)); empty if it does not say.
pub(super) fn this_boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_default().trim().to_owned()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde asks")]
fn is_not(flag: &bool) -> bool {
    !flag
}

/// How a file begins; a comment in TOML, which earlier daemons pass over.
const HEAD: &str = "# of vnplugd; here follow ";
/// Bytes of the longest record that is read: more than all the sources and groups of a VM take.
const LONGEST: u64 = 1 << 20;

/// Why nothing is written over what cannot be read: a newer daemon may have written it, and come again.
pub(crate) fn unread(path: &Path, why: &str) -> io::Error {
    let path = path.display();
    io::Error::other(format!(
        "{path} cannot be read ({why}), and stays as it is: remove it first"
    ))
}

/// What is read of a record that is not whole: as much as can be read.
#[derive(Default, Deserialize)]
struct Groups {
    #[serde(default)]
    groups: Vec<GroupRecord>,
}

/// As [`Groups`].
#[derive(Default, Deserialize)]
struct Origin {
    #[serde(default)]
    owner: String,
    #[serde(default)]
    pool: PathBuf,
}

/// The pool that a record's text tells of; if it tells of none, those that its name tells of.
pub(super) fn pools_of(name: &str, text: &str, dirs: &Dirs) -> Vec<PathBuf> {
    let Origin { pool, .. } = toml::from_str(text).unwrap_or_default();
    // It may lie where an earlier daemon had its pools.
    match check_pool(&pool, name) {
        Ok(()) => vec![pool],
        Err(_) => dirs.pools_of(name),
    }
}

/// The files of groups that a record's text tells of; `None` if it cannot be read.
pub(super) fn arenas_of(text: &str) -> Option<Vec<PathBuf>> {
    let Groups { groups } = toml::from_str(text).ok()?;
    Some(groups.into_iter().map(|group| group.path).collect())
}

/// Which memory of groups a recorded VM has, and what it may see.
pub(crate) struct Memories {
    pub(crate) name: String,
    /// What it was granted when it was attached; `None`: its record does not say.
    pub(crate) allow: Option<Vec<Grant>>,
    pub(crate) groups: Vec<GroupRecord>,
}

impl Memories {
    /// What the records of an earlier daemon tell of memory that VMs have, whether they can be served or
    /// not; `None` for one that does not tell.
    pub(super) fn of_all(dirs: &Dirs) -> Vec<Option<Self>> {
        let memories = |path: PathBuf| {
            let text = read(&path).ok()?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            match toml::from_str::<Record>(&text) {
                Ok(record) if record.name == name => Some(Self {
                    allow: Some(record.grants()),
                    name: record.name,
                    groups: record.groups,
                }),
                _ => Some(Self {
                    name: name.into_owned(),
                    allow: None,
                    groups: toml::from_str::<Groups>(&text).ok()?.groups,
                }),
            }
        };
        records(dirs).into_iter().map(memories).collect()
    }
}

/// A VM of an earlier daemon that cannot be served, though it may run and have memory of ours.
pub(crate) struct Broken {
    pub(crate) name: String,
    pub(crate) why: String,
    /// Groups of the host whose memory it has, as far as its record says.
    pub(crate) groups: Vec<GroupRecord>,
    /// Who attached it; 0 if its record does not say.
    owner: u64,
    pub(super) pools: Vec<PathBuf>,
}

impl Broken {
    pub(super) fn read(name: String, why: String, text: &str, dirs: &Dirs) -> Self {
        let Groups { groups } = toml::from_str(text).unwrap_or_default();
        let Origin { owner, .. } = toml::from_str(text).unwrap_or_default();
        Self {
            why,
            groups,
            owner: owner.parse().unwrap_or(0),
            pools: pools_of(&name, text, dirs),
            name,
        }
    }

    /// Whether it is for `owner` to have it forgotten: its own, or an operator who names any VM (0).
    pub(crate) fn obeys(&self, owner: u64) -> bool {
        owner == 0 || owner == self.owner
    }

    /// Deletes what is left of it.
    pub(crate) fn remove_files(&self, state: &Path) {
        remove_all(state, &self.name, &self.pools);
    }
}

#[cfg(test)]
mod tests {
    use vnplug_testing::TestDir;

    use super::*;

    #[test]
    fn what_is_not_whole_is_not_taken_for_what_was_written() {
        let dir = TestDir::new("record");
        let path = dir.path("grants");
        let text = "[[change]]\na = 1\n\n[[change]]\na = 2\n";
        write_kept(&path, text).unwrap();
        let all = read_kept(&path).unwrap();
        assert!(all.ends_with(text) && all.parse::<toml::Table>().is_ok());
        // The same of an earlier daemon, and by hand.
        std::fs::write(&path, text).unwrap();
        assert_eq!(read_kept(&path).unwrap(), text);
        for len in 0..all.len() {
            std::fs::write(&path, &all[..len]).unwrap();
            assert!(read_kept(&path).is_err(), "{len} bytes of {all:?}");
        }
        std::fs::write(&path, "\n").unwrap();
        assert!(read_kept(&path).unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn nothing_is_written_that_is_not_read_again() {
        let dir = TestDir::new("record");
        let path = dir.path("grants");
        write(&path, "a = 1\n").unwrap();
        let long = "a\n".repeat(LONGEST as usize / 2 + 1);
        let error = write(&path, &long).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(read(&path).unwrap().ends_with("a = 1\n"));
        // The control: what is just short enough.
        write(&path, &long[..LONGEST as usize]).unwrap();
        assert_eq!(read(&path).unwrap().len() as u64, LONGEST);
        assert!(!path.with_extension("new").exists());
    }
}
