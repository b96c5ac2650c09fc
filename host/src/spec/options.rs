//! The options of a source, taken one by one by who knows them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::num::ParseIntError;
use std::str::FromStr;

use vnplug_path::source::SourceError;
use vnplug_ring::units;

/// Those that nobody has taken yet.
pub(super) struct Options<'a> {
    pub(super) name: &'a str,
    pub(super) left: BTreeMap<String, String>,
    /// What [`waits`](Self::waits) says if nobody else does.
    pub(super) waits: bool,
    /// Nothing is opened: they are looked at only.
    pub(super) checks: bool,
}

impl Options<'_> {
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        self.left.remove(key)
    }

    /// Whether an interface that does not exist is waited for.
    pub(super) fn waits(&mut self) -> Result<bool, SourceError> {
        Ok(self.flag("wait")?.unwrap_or(self.waits))
    }

    pub(super) fn bad(&self, key: &str, value: &str, want: impl Display) -> SourceError {
        SourceError::new(format!(
            "source {:?}: {key} is {want}, not {value:?}",
            self.name
        ))
    }

    pub(super) fn number<T: FromStr<Err = ParseIntError>>(
        &mut self,
        key: &str,
    ) -> Result<Option<T>, SourceError> {
        match self.take(key) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(number) => Ok(Some(number)),
                // All of them are unsigned.
                Err(_) => {
                    let most = u64::MAX >> (64 - 8 * size_of::<T>());
                    Err(self.bad(key, &text, format!("a whole number up to {most}")))
                }
            },
        }
    }

    pub(super) fn set<T: FromStr<Err = ParseIntError>>(
        &mut self,
        key: &str,
        into: &mut T,
    ) -> Result<(), SourceError> {
        if let Some(number) = self.number(key)? {
            *into = number;
        }
        Ok(())
    }

    /// A number of bytes, as [`units::size`] reads it.
    pub(super) fn size<T: TryFrom<u64>>(
        &mut self,
        key: &str,
        into: &mut T,
    ) -> Result<(), SourceError> {
        let Some(text) = self.take(key) else {
            return Ok(());
        };
        let bytes = units::size(&text).ok();
        *into = bytes
            .and_then(|bytes| T::try_from(bytes).ok())
            .ok_or_else(|| self.bad(key, &text, "a size like 65536, 256K or 1M"))?;
        Ok(())
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>, SourceError> {
        match self.take(key).as_deref() {
            None => Ok(None),
            Some("yes" | "true" | "on" | "1") => Ok(Some(true)),
            Some("no" | "false" | "off" | "0") => Ok(Some(false)),
            Some(other) => Err(self.bad(key, other, "yes or no")),
        }
    }

    pub(super) fn switch(&mut self, key: &str, into: &mut bool) -> Result<(), SourceError> {
        *into = self.flag(key)?.unwrap_or(*into);
        Ok(())
    }

    /// Permission bits, written in octal.
    pub(super) fn mode(&mut self, key: &str) -> Result<Option<u32>, SourceError> {
        let Some(text) = self.take(key) else {
            return Ok(None);
        };
        let bits = u32::from_str_radix(text.trim_start_matches("0o"), 8).ok();
        match bits.filter(|bits| *bits <= 0o7777) {
            Some(bits) => Ok(Some(bits)),
            None => Err(self.bad(key, &text, "permission bits in octal, as 0660")),
        }
    }

    pub(super) fn list<T>(
        &mut self,
        key: &str,
        one: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, SourceError> {
        let Some(text) = self.take(key) else {
            return Ok(Vec::new());
        };
        text.split('+')
            .map(|item| one(item).ok_or_else(|| self.bad(key, item, "a list joined by +")))
            .collect()
    }

    /// Nothing is left. Each kind asks before it opens: what is opened may take frames from the host.
    pub(super) fn done(&self) -> Result<(), SourceError> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(key) => Err(SourceError::new(format!(
                "source {:?}: no option {key:?} for this kind",
                self.name
            ))),
        }
    }
}
