//! What operators grant to third parties' back-ends.

use std::collections::BTreeMap;

use vnplug_ring::control::GrantKind;
use vnplug_ring::control::backend::MAX_BACKEND_NAME;
use vnplug_ring::units;

use super::Peer;
use super::grant::Given;

/// A back-end that may be, and what it may have. Whose process it may be and who may use it begins as this says, and
/// changes at run time: the [policy](super::policy::Policy) knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendGrant {
    /// Its number; not 0.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The user whose process may register it. Operators may, too.
    uid: u32,
    /// Who may connect to it. Operators may, too.
    open_to: Vec<OpenTo>,
    /// The most memory that it may share, in bytes, with all together.
    pub memory: u64,
    /// The most channels.
    pub channels: usize,
    /// Its memory may lie in the pool of a VM that has no other way: it can then read and write all rings of
    /// that VM.
    pub pool: bool,
}

/// Who may connect to a back-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenTo {
    /// Everybody.
    All,
    /// Every VM.
    Vms,
    /// Every user.
    Users,
    /// This one.
    One(Peer),
}

impl BackendGrant {
    /// Of a configuration's words: `id`, `name`, `uid`, and perhaps `open` (joined by `+`), `memory`,
    /// `channels`, `pool`.
    ///
    /// # Errors
    /// What is wrong, and what to write.
    pub fn of_words(mut words: BTreeMap<String, String>) -> Result<Self, String> {
        let name = words.remove("name").unwrap_or_default();
        if !is_back_end_name(&name) {
            return Err(format!(
                "a back-end's name is 1 to {MAX_BACKEND_NAME} letters, digits, `-`, `_` or `.`, not {name:?}"
            ));
        }
        let wrong = |key: &str, value: &str, how: &str| {
            format!("back-end {name:?}: {key} is {how}, not {value:?}")
        };
        let number = |key: &str, value: Option<String>, default: Option<u32>| {
            let how = "a number";
            match (value, default) {
                (None, Some(default)) => Ok(default),
                (None, None) => Err(format!("back-end {name:?} needs {key}")),
                (Some(text), _) => text.parse().map_err(|_| wrong(key, &text, how)),
            }
        };
        let id = number("id", words.remove("id"), None)?;
        if id == 0 {
            return Err(wrong("id", "0", "1 or more"));
        }
        let uid = number("uid", words.remove("uid"), None)?;
        let channels = number("channels", words.remove("channels"), Some(1024))?;
        let open_to = match words.remove("open") {
            None => Vec::new(),
            Some(text) => {
                let how = "vm:NAME, uid:N, vm:*, uid:* or *";
                OpenTo::list(&text).map_err(|word| wrong("open", &word, how))?
            }
        };
        let memory = match words.remove("memory") {
            None => 0,
            Some(text) => {
                units::size(&text).map_err(|_| wrong("memory", &text, "a size as 16M"))?
            }
        };
        let pool = match words.remove("pool").as_deref() {
            None | Some("no") => false,
            Some("yes") => true,
            Some(other) => return Err(wrong("pool", other, "yes or no")),
        };
        if let Some(key) = words.keys().next() {
            return Err(format!(
                "back-end {name:?} has no {key:?}; there are id, name, uid, open, memory, channels, pool"
            ));
        }
        Ok(Self {
            id,
            name,
            uid,
            open_to,
            memory,
            channels: channels as usize,
            pool,
        })
    }

    /// The grants that it gives to single ones.
    pub(crate) fn given(&self) -> Vec<(GrantKind, Given)> {
        let of = |kind, whom: &Peer| (kind, Given::of_name(whom.clone(), &self.name));
        let mut given = vec![of(GrantKind::Serve, &Peer::User(self.uid))];
        given.extend(self.open_to.iter().filter_map(|whom| match whom {
            OpenTo::One(one) => Some(of(GrantKind::Use, one)),
            _ => None,
        }));
        given
    }

    /// Whether everybody of this one's kind may connect.
    pub(crate) fn is_open_to_all_like(&self, viewer: &Peer) -> bool {
        self.open_to_many().any(|whom| whom.is(viewer))
    }

    /// Whether the other one is the same but for what it [gives](Self::given) to single ones.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let many = |it: &Self| it.open_to_many().cloned().collect();
        let same = Self {
            uid: other.uid,
            open_to: many(other),
            ..other.clone()
        };
        let own = Self {
            uid: other.uid,
            open_to: many(self),
            ..self.clone()
        };
        own == same
    }

    fn open_to_many(&self) -> impl Iterator<Item = &OpenTo> {
        let all = self.open_to.iter();
        all.filter(|whom| !matches!(whom, OpenTo::One(_)))
    }
}

/// Whether a back-end may be called so.
pub(super) fn is_back_end_name(name: &str) -> bool {
    let usable = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_BACKEND_NAME).contains(&name.len()) && name.chars().all(usable)
}

impl OpenTo {
    /// Several, joined by `+`.
    ///
    /// # Errors
    /// The word that is none.
    pub(crate) fn list(text: &str) -> Result<Vec<Self>, String> {
        let one = |word: &str| Self::parse(word).ok_or_else(|| word.to_owned());
        text.split('+').map(one).collect()
    }

    /// Whether this one is meant.
    pub(crate) fn is(&self, viewer: &Peer) -> bool {
        match (self, viewer) {
            (Self::All, _) | (Self::Vms, Peer::Vm(_)) | (Self::Users, Peer::User(_)) => true,
            (Self::One(one), viewer) => one == viewer,
            _ => false,
        }
    }

    fn parse(word: &str) -> Option<Self> {
        match word.split_once(':') {
            None if word == "*" => Some(Self::All),
            Some(("vm", "*")) => Some(Self::Vms),
            Some(("uid", "*")) => Some(Self::Users),
            Some(("vm", name)) if !name.is_empty() => Some(Self::One(Peer::Vm(name.to_owned()))),
            Some(("uid", uid)) => Some(Self::One(Peer::User(uid.parse().ok()?))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(words: &[(&str, &str)]) -> Result<BackendGrant, String> {
        let words = words
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()));
        BackendGrant::of_words(words.collect())
    }

    #[test]
    fn a_grant_says_who_may_connect() {
        let words = [
            ("id", "85"),
            ("name", "kv"),
            ("uid", "1000"),
            ("open", "vm:*+uid:1001"),
            ("memory", "16M"),
        ];
        let grant = grant(&words).unwrap();
        assert_eq!(
            (grant.memory, grant.channels, grant.pool),
            (16 << 20, 1024, false)
        );
        assert!(grant.is_open_to_all_like(&Peer::Vm("any".into())));
        assert!(!grant.is_open_to_all_like(&Peer::User(1001)));
        let given = grant.given();
        let given: Vec<_> = given.iter().map(|(kind, it)| it.text(*kind)).collect();
        assert_eq!(given, ["serve uid:1000=kv", "use uid:1001=kv"]);
    }

    #[test]
    fn what_is_given_to_single_ones_makes_no_other_back_end() {
        let words = |open, uid, memory| {
            let words = [
                ("id", "85"),
                ("name", "kv"),
                ("uid", uid),
                ("open", open),
                ("memory", memory),
            ];
            grant(&words).unwrap()
        };
        let one = words("vm:*+uid:1001", "1000", "1M");
        assert!(one.is_like(&words("vm:*+vm:a", "1001", "1M")));
        for other in [words("uid:1001", "1000", "1M"), words("vm:*", "1000", "2M")] {
            assert!(!one.is_like(&other) && !other.is_like(&one));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good = [("id", "85"), ("name", "kv"), ("uid", "1000")];
        assert!(grant(&good).is_ok());
        for (key, value) in [
            ("id", "0"),
            ("id", "x"),
            ("name", "a b"),
            ("uid", ""),
            ("open", "root"),
            ("open", "vm:"),
            ("memory", "much"),
            ("pool", "maybe"),
            ("colour", "red"),
        ] {
            let mut words: Vec<_> = good.iter().copied().filter(|(it, _)| *it != key).collect();
            words.push((key, value));
            let error = grant(&words).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
