//! What operators change of the daemon's sources at run time.

use super::wire::{Malformed, Reader, Writer};

/// A change of the sources. The answer is Counters: a thing of the kind `change` for each change, and for what is not changed
/// before the daemon starts again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceRequest {
    /// Open one more, which is written as on the daemon's command line.
    Add {
        /// `NAME=KIND:WHAT,OPTION=VALUE…`
        text: String,
        /// The next daemon has it, too; otherwise it lasts until this one ends.
        keep: bool,
    },
    /// Close one, with all its ports, and keep it no more.
    Remove {
        /// With or without `host:`.
        name: String,
    },
    /// Read the configuration file again, and do what is different in it: sources and grants.
    Reload,
}

impl SourceRequest {
    pub(super) fn write(&self, w: &mut Writer) {
        let (what, text) = match self {
            Self::Add { text, keep } => (if *keep { KEEP } else { ADD }, text.as_str()),
            Self::Remove { name } => (REMOVE, name.as_str()),
            Self::Reload => (RELOAD, ""),
        };
        w.u8(what);
        w.text(text);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let what = r.u8("what")?;
        let text = r.text("text")?;
        Ok(match what {
            ADD | KEEP => Self::Add {
                text,
                keep: what == KEEP,
            },
            REMOVE => Self::Remove { name: text },
            RELOAD => Self::Reload,
            other => return Err(Malformed::Value("what", u64::from(other))),
        })
    }
}

const ADD: u8 = 1;
const REMOVE: u8 = 2;
const RELOAD: u8 = 3;
const KEEP: u8 = 4;
