//! The sources that operators added at run time and that the next daemon is to have.
//!
//! They lie beside the records of VMs, as they were written.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::spec::SourceSpec;
use crate::vm::record;

/// What was added and is kept.
#[derive(Debug, Default)]
pub(crate) struct KeptSources {
    path: PathBuf,
    kept: Kept,
    /// Why what is there cannot be read; then nothing is written over it.
    unread: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    #[serde(default)]
    source: Vec<String>,
}

impl KeptSources {
    /// What earlier daemons with this state directory kept.
    pub(crate) fn restore(state: &Path) -> Self {
        let path = state.join("vms").join("sources");
        let kept = match record::read_kept(&path) {
            Ok(text) => toml::from_str::<Kept>(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
            Err(error) => Err(error.to_string()),
        };
        let (kept, unread) = match kept {
            Ok(kept) => (kept, None),
            Err(error) => {
                log::error!(target: "source", "{}: {error}: sources that were added are not opened again", path.display());
                (Kept::default(), Some(error))
            }
        };
        Self { path, kept, unread }
    }

    /// The sources, which wait for their interfaces. What is none is told in the log.
    pub(crate) fn specs(&self) -> Vec<SourceSpec> {
        let read = |text: &String| match text.parse::<SourceSpec>() {
            Ok(spec) => Some(spec.waiting()),
            Err(error) => {
                log::error!(target: "source", "{}: {error}", self.path.display());
                None
            }
        };
        self.kept.source.iter().filter_map(read).collect()
    }

    /// Keeps a source, as it was written.
    pub(super) fn keep(&mut self, name: &str, text: &str) -> io::Result<()> {
        let mut new = self.kept.without(name);
        new.source.push(text.to_owned());
        self.write(new)
    }

    /// Keeps the source of this name no more; whether it was kept.
    pub(super) fn forget(&mut self, name: &str) -> io::Result<bool> {
        let new = self.kept.without(name);
        if new == self.kept {
            return Ok(false);
        }
        self.write(new).map(|()| true)
    }

    fn write(&mut self, new: Kept) -> io::Result<()> {
        if let Some(why) = &self.unread {
            return Err(record::unread(&self.path, why));
        }
        let text = toml::to_string(&new).map_err(io::Error::other)?;
        record::write_kept(&self.path, &text)?;
        self.kept = new;
        Ok(())
    }
}

impl Kept {
    fn without(&self, name: &str) -> Self {
        let is_other = |text: &&String| text.split('=').next() != Some(name);
        Self {
            source: self.source.iter().filter(is_other).cloned().collect(),
        }
    }
}
