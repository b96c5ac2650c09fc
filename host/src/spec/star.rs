//! Names with a star: patterns, and the sources that they stand for.

use std::sync::Arc;

use super::af_packet::{TIMEOUT, timeout_ms_of};
use super::options::Options;
use super::{Means, SourceSpec};
use vnplug_path::source::SourceError;
use vnplug_path::source::af_packet::Namespace;

/// A text with one star.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Star {
    before: String,
    after: String,
}

impl Star {
    /// `None` if there is none, or more than one.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (before, after) = text.split_once('*')?;
        (!after.contains('*')).then(|| Self {
            before: before.to_owned(),
            after: after.to_owned(),
        })
    }

    /// What the star stands for in a name that matches.
    pub(crate) fn part<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_prefix(self.before.as_str())?
            .strip_suffix(self.after.as_str())
    }

    /// The name with this in the star's place.
    fn with(&self, part: &str) -> String {
        format!("{}{part}{}", self.before, self.after)
    }
}

impl SourceSpec {
    /// Whether it stands for any number of sources.
    pub(crate) fn is_pattern(&self) -> bool {
        self.name.contains('*')
    }

    /// Of a pattern, what its interfaces' names are like, and how many sources it may have.
    ///
    /// # Errors
    /// [`SourceError`] if the option is none.
    pub(crate) fn members(&self) -> Result<(Star, usize), SourceError> {
        let mut options = Options {
            name: &self.name,
            left: self.options.clone(),
            waits: false,
            checks: true,
        };
        if options.take("wait").is_some() {
            let what = format!(
                "{:?}: a pattern waits for its interfaces in any case",
                self.name
            );
            return Err(SourceError::new(what));
        }
        let interfaces = options
            .take("interface")
            .unwrap_or_else(|| self.name.clone());
        let star = Star::read(&interfaces).ok_or_else(|| {
            options.bad(
                "interface",
                &interfaces,
                "a name with one *, in the place of that in the source's name",
            )
        })?;
        let most = options.number("members")?.unwrap_or(MEMBERS);
        if !(1..=MAX_MEMBERS).contains(&most) {
            let want = format!("a number from 1 to {MAX_MEMBERS}");
            return Err(options.bad("members", &most.to_string(), want));
        }
        Ok((star, usize::from(most)))
    }

    /// Of a pattern, how long a frame of its sources may wait for its block to fill.
    pub(crate) fn block_timeout_ms(&self) -> u32 {
        let number = |key: &str| self.options.get(key)?.parse::<u32>().ok();
        let most = number("members").unwrap_or(0);
        number(TIMEOUT).unwrap_or(timeout_ms_of(most as usize))
    }

    /// Of a pattern, whether sources can be opened with its options.
    ///
    /// # Errors
    /// [`SourceError`] as of [`open`](Self::open), as far as it is known without an interface.
    pub(crate) fn check(&self, means: &Means) -> Result<(), SourceError> {
        let probe = self.member("", "any")?;
        let checks = true;
        Self { checks, ..probe }.open(means).map(drop)
    }

    /// Of a pattern, whether the kernel may drop frames before its sources.
    pub(crate) fn may_drop_early(&self) -> bool {
        let early = self.options.get("early").map(String::as_str);
        !matches!(early, Some("no" | "false" | "off" | "0"))
    }

    /// The network namespace that it names.
    ///
    /// # Errors
    /// [`SourceError`] if the option is none.
    pub(crate) fn namespace(&self, means: &Means) -> Result<Option<Namespace>, SourceError> {
        let name = self.options.get("netns");
        name.map(|name| Namespace::new(name, Arc::clone(&means.entrance)))
            .transpose()
    }

    /// Of a pattern, the name of the source that has this in the star's place.
    pub(crate) fn member_name(&self, part: &str) -> String {
        Star::read(&self.name).map_or_else(String::new, |star| star.with(part))
    }

    /// Of a pattern, the source of this interface, whose name has this in the star's place.
    ///
    /// # Errors
    /// [`SourceError`] if no source can have that name.
    pub(crate) fn member(&self, part: &str, interface: &str) -> Result<Self, SourceError> {
        let name = self.member_name(part);
        let mut options = self.options.clone();
        options.remove("members");
        options.insert("interface".into(), interface.into());
        for (key, value) in DEFAULTS {
            options.entry(key.into()).or_insert_with(|| value.into());
        }
        let timeout = || self.block_timeout_ms().to_string();
        options.entry(TIMEOUT.into()).or_insert_with(timeout);
        let spec = Self::new(&name, &self.kind, options)?;
        if spec.is_pattern() {
            return Err(SourceError::new(format!(
                "{name:?} is no name for a source"
            )));
        }
        Ok(Self {
            pattern: Some(self.name.clone()),
            ..spec
        })
    }
}

/// The most sources of a pattern when it does not say.
const MEMBERS: u16 = 64;
const MAX_MEMBERS: u16 = 1024;
/// What is otherwise than of a source that was named: 12 MiB for each, as there may be many.
const DEFAULTS: [(&str, &str); 2] = [("block_size", "128K"), ("blocks", "96")];

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> SourceSpec {
        text.parse().unwrap()
    }

    #[test]
    fn an_interface_that_matches_becomes_a_source_named_after_it() {
        for (text, interface, name) in [
            ("vnet*", "vnet7", Some("vnet7")),
            ("vnet*", "vnet", Some("vnet")),
            ("vnet*", "net7", None),
            ("*-out", "web-out", Some("web-out")),
            ("c1-*=af_packet:*,netns=c1", "eth0", Some("c1-eth0")),
            ("c1-*=af_packet:eth*", "eth0", Some("c1-0")),
            ("a*a", "a", None),
        ] {
            let spec = spec(text);
            assert!(spec.is_pattern());
            let (star, most) = spec.members().unwrap();
            assert_eq!(most, 64);
            let part = star.part(interface);
            let member = part.map(|part| spec.member(part, interface).unwrap());
            assert_eq!(member.as_ref().map(SourceSpec::name), name, "{text}");
        }
        let member = spec("tap*=af_packet,members=3,blocks=2,netns=x")
            .member("1", "tap1")
            .unwrap();
        assert_eq!(member.pattern.as_deref(), Some("tap*"));
        let options: Vec<_> = member
            .options
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        assert_eq!(
            options.join(","),
            "block_size=128K,block_timeout_ms=2,blocks=2,interface=tap1,netns=x"
        );
        // What no source can be called.
        for part in ["a:b", "*", "ü"] {
            assert!(spec("tap*").member(part, "x").is_err(), "{part}");
        }
    }

    #[test]
    fn the_more_sources_a_pattern_may_have_the_slower_are_their_timers() {
        for (options, ms) in [
            ("", 2),
            (",members=1", 2),
            (",members=64", 2),
            (",members=65", 4),
            (",members=1024", 32),
            (",members=1024,block_timeout_ms=1", 1),
        ] {
            let spec = spec(&format!("tap*=af_packet{options}"));
            let member = spec.member("1", "tap1").unwrap();
            assert_eq!(member.options["block_timeout_ms"], ms.to_string());
            assert_eq!(spec.block_timeout_ms(), ms, "{options}");
        }
        // What is none is refused where it is opened.
        let spec = spec("tap*=af_packet,block_timeout_ms=fast");
        let member = spec.member("1", "tap1").unwrap();
        assert_eq!(member.options["block_timeout_ms"], "fast");
    }

    #[test]
    fn a_pattern_that_is_none_is_refused() {
        for (text, why) in [
            ("*", "more than the star"),
            ("a*b*", "one star"),
            ("tap*=gen", "only of the kind af_packet"),
            ("tap*=af_xdp", "only of the kind af_packet"),
        ] {
            let error = text.parse::<SourceSpec>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        for (text, why) in [
            ("tap*=af_packet:eth0", "a name with one *"),
            ("tap*=af_packet,members=0", "from 1 to 1024"),
            ("tap*=af_packet,members=2000", "from 1 to 1024"),
        ] {
            let error = spec(text).members().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
