//! What a disk holds after a loss of power.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Image, Operation, put};

/// Files and names, as programs see them and as the disk has them.
#[derive(Debug, Default)]
pub(super) struct Platter {
    files: Vec<File>,
    /// Names as programs see them.
    seen: BTreeMap<PathBuf, usize>,
    /// Names as they were when their directory was synced.
    named: BTreeMap<PathBuf, usize>,
}

#[derive(Debug, Default)]
struct File {
    /// What is there, by sync or by chance.
    stable: Vec<u8>,
    /// What the next sync makes sure of.
    pending: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Write(u64, Vec<u8>),
    Truncate(u64),
}

impl Platter {
    /// The `index`th operation is done; `part` as in [`super::Sim::crash`].
    pub(super) fn step(&mut self, operation: &Operation, part: u32, index: usize) {
        match operation {
            Operation::Create(path) => {
                self.files.push(File::default());
                self.seen.insert(path.clone(), self.files.len() - 1);
            }
            Operation::Write(path, offset, bytes) => {
                let kept = kept(bytes.len(), part, index);
                let file = self.file(path);
                if kept > 0 {
                    put(&mut file.stable, *offset, &bytes[..kept]);
                }
                file.pending.push(Change::Write(*offset, bytes.clone()));
            }
            Operation::Truncate(path, len) => {
                let file = self.file(path);
                if happens(part, index as u64) {
                    file.stable.resize(*len as usize, 0);
                }
                file.pending.push(Change::Truncate(*len));
            }
            Operation::Sync(path) => self.file(path).sync(),
            // The kernel forgets what it could not write.
            Operation::SyncFailed(path) => self.file(path).pending.clear(),
            Operation::Rename(from, to) => {
                if let Some(file) = self.seen.remove(from) {
                    self.seen.insert(to.clone(), file);
                }
            }
            Operation::Remove(path) => {
                self.seen.remove(path);
            }
            Operation::SyncNames(dir) => {
                let inside = |path: &Path| path.parent() == Some(dir.as_path());
                self.named.retain(|path, _| !inside(path));
                let seen = self.seen.iter().filter(|(path, _)| inside(path));
                self.named
                    .extend(seen.map(|(path, file)| (path.clone(), *file)));
            }
            Operation::Failed => {}
        }
    }

    /// The files that are found after the loss of power.
    pub(super) fn image(&self, part: u32) -> Image {
        let mut paths: Vec<&PathBuf> = self.seen.keys().chain(self.named.keys()).collect();
        paths.sort_unstable();
        paths.dedup();
        let mut image = Image::new();
        for (index, path) in paths.into_iter().enumerate() {
            let names = match happens(part, mixed(index as u64)) {
                true => &self.seen,
                false => &self.named,
            };
            if let Some(&file) = names.get(path) {
                image.insert(path.clone(), self.files[file].stable.clone());
            }
        }
        image
    }

    fn file(&mut self, path: &Path) -> &mut File {
        let next = self.files.len();
        let file = *self.seen.entry(path.to_owned()).or_insert(next);
        if file == next {
            self.files.push(File::default());
        }
        &mut self.files[file]
    }
}

impl File {
    fn sync(&mut self) {
        for change in self.pending.drain(..) {
            match change {
                Change::Write(offset, bytes) => put(&mut self.stable, offset, &bytes),
                Change::Truncate(len) => self.stable.resize(len as usize, 0),
            }
        }
    }
}

/// Whether something that was not synced is there nevertheless.
fn happens(part: u32, salt: u64) -> bool {
    match part {
        0 => false,
        1000 => true,
        _ => mixed(salt << 10 | u64::from(part)) >> 40 & 1 == 1,
    }
}

/// How many of a write's bytes are there, in whole sectors; `salt` tells writes apart.
fn kept(len: usize, part: u32, salt: usize) -> usize {
    match part {
        0 => 0,
        1000 => len,
        _ => {
            let share = mixed((salt as u64) << 32 | u64::from(part)) >> 33 & 1023;
            // One in eight is whole, one in eight is missing.
            match share % 8 {
                0 => len,
                1 => 0,
                _ => (len as u64 * share / 1024) as usize / SECTOR * SECTOR,
            }
        }
    }
}

/// splitmix64: each bit of the seed changes half of the bits.
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const SECTOR: usize = 512;
