//! Grants as text: in the configuration, on the command line, and from operators at run time.
//!
//! A grant is written in one way everywhere: `vm:NAME=SOURCE…` or `uid:N=SOURCE…`, and what follows depends
//! on its kind.

use vnplug_ring::control::{Grant, GrantAction, GrantKind, HOST_PREFIX};

use super::backend::is_back_end_name;
use super::{Join, Peer, Sending};

/// What a grant gives, and to whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// To whom.
    pub whom: Peer,
    /// The source, a port of a switch, or `*`; to serve, to use: the back-end's name.
    pub source: String,
    /// To see: the filter. To send, to join: `key=value` with commas between them. To serve, to use: nothing.
    pub rest: String,
}

/// A change of the grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// What is done.
    pub action: GrantAction,
    /// With which kind of grant.
    pub kind: GrantKind,
    /// With which.
    pub given: Given,
}

impl Change {
    /// Whether nothing else of this kind is left that the same one has of the same source.
    pub(crate) fn replaces(&self) -> bool {
        match self.action {
            GrantAction::Add => self.kind != GrantKind::See,
            GrantAction::Set => true,
            GrantAction::Remove => false,
        }
    }

    /// Whether it is about such a grant: the same one's, of the same source and, if it names a rest, with that.
    pub(crate) fn is_about(&self, kind: GrantKind, other: &Given) -> bool {
        let Given { whom, source, rest } = &self.given;
        (self.kind, whom, source) == (kind, &other.whom, &other.source)
            && (rest.is_empty() || *rest == other.rest)
    }
}

impl Given {
    /// Refuses what no machine has, as its name is none.
    ///
    /// # Errors
    /// What to write; `text` is the grant as it was given.
    pub(crate) fn must_be_one(&self, text: &str) -> Result<(), String> {
        match self.whom.is_nobody() {
            true => Err(format!(
                "{text:?} is no grant: it is one machine's, by its name (only `open` of back-ends and programs has vm:*)"
            )),
            false => Ok(()),
        }
    }

    /// Reads a grant of this kind.
    ///
    /// # Errors
    /// How it is written.
    pub(crate) fn read(kind: GrantKind, text: &str) -> Result<Self, String> {
        let end = match kind {
            GrantKind::See => ':',
            GrantKind::Send | GrantKind::Join => ',',
            GrantKind::Serve | GrantKind::Use => return Self::of_back_end(kind, text),
        };
        let usage = || {
            let rest = match kind {
                GrantKind::See => "[:FILTER]",
                _ => "[,KEY=VALUE…]",
            };
            format!("{text:?} is no grant: write vm:NAME=SOURCE{rest} or uid:N=SOURCE{rest}")
        };
        let (whom, what) = text.split_once('=').ok_or_else(usage)?;
        // Names have it, or have not.
        let what = what.strip_prefix(HOST_PREFIX).unwrap_or(what);
        let (source, rest) = what.split_once(end).unwrap_or((what, ""));
        let whom = whom_of(whom).ok_or_else(usage)?;
        if source.is_empty() {
            return Err(usage());
        }
        let rest = match kind {
            GrantKind::Join => of_join(rest),
            _ => rest.to_owned(),
        };
        Ok(Self {
            whom,
            source: source.to_owned(),
            rest,
        })
    }

    fn of_back_end(kind: GrantKind, text: &str) -> Result<Self, String> {
        let (whom, name) = text.split_once('=').unwrap_or((text, ""));
        let may = |whom: &Peer| kind == GrantKind::Use || matches!(whom, Peer::User(_));
        let whom = whom_of(whom).filter(may);
        match whom.filter(|_| is_back_end_name(name)) {
            Some(whom) => Ok(Self::of_name(whom, name)),
            None if kind == GrantKind::Use => Err(format!(
                "{text:?} is no grant: write vm:NAME=BACKEND or uid:N=BACKEND"
            )),
            None => Err(format!("{text:?} is no grant: write uid:N=BACKEND")),
        }
    }

    /// To be this back-end, or to use it.
    pub(super) fn of_name(whom: Peer, name: &str) -> Self {
        Self {
            whom,
            source: name.to_owned(),
            rest: String::new(),
        }
    }

    /// For people: its kind, and as it is written.
    pub(crate) fn text(&self, kind: GrantKind) -> String {
        format!("{} {}", kind_name(kind), self.written(kind))
    }

    /// As it is written.
    pub(crate) fn written(&self, kind: GrantKind) -> String {
        let whom = self.whom.written();
        let end = match kind {
            _ if self.rest.is_empty() => "",
            GrantKind::See => ":",
            _ => ",",
        };
        let (source, rest) = (&self.source, &self.rest);
        format!("{whom}={source}{end}{rest}")
    }

    /// To see.
    pub(crate) fn sight(self) -> (Peer, Grant) {
        let grant = Grant {
            source: self.source,
            filter: self.rest,
        };
        (self.whom, grant)
    }

    /// To send.
    pub(crate) fn sending(self) -> Sending {
        Sending {
            whom: self.whom,
            source: self.source,
            terms: self.rest,
        }
    }

    /// To join.
    pub(crate) fn join(self) -> Join {
        Join {
            whom: self.whom,
            switch: self.source,
            settings: self.rest,
        }
    }
}

fn whom_of(text: &str) -> Option<Peer> {
    match text.split_once(':')? {
        ("vm", name) if !name.is_empty() => Some(Peer::Vm(name.to_owned())),
        ("uid", uid) => Some(Peer::User(uid.parse().ok()?)),
        _ => None,
    }
}

/// Settings of a port, of a grant: its `mac` is that of the only station that may send there.
pub(crate) fn of_join(settings: &str) -> String {
    let word = |word: &str| match word.strip_prefix("mac=") {
        Some(address) => format!("lock={address}"),
        None => word.to_owned(),
    };
    let words: Vec<String> = settings.split(',').map(word).collect();
    words.join(",")
}

/// What a kind of grant is called.
pub(crate) fn kind_name(kind: GrantKind) -> &'static str {
    match kind {
        GrantKind::See => "see",
        GrantKind::Send => "send",
        GrantKind::Join => "join",
        GrantKind::Serve => "serve",
        GrantKind::Use => "use",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_read_as_its_kind_is_written() {
        let see = Given::read(GrantKind::See, "uid:1000=host:eth1:port 53 or port 80").unwrap();
        assert_eq!(
            (see.whom, &*see.source, &*see.rest),
            (Peer::User(1000), "eth1", "port 53 or port 80")
        );
        let join = "vm:a=lan0,vlan=7,mac=02:00:00:00:00:01";
        let join = Given::read(GrantKind::Join, join).unwrap().join();
        assert_eq!(join.settings, "vlan=7,lock=02:00:00:00:00:01");
        for bad in ["eth1", "vm:=eth1", "uid:x=eth1", "uid:1=", "gid:1=eth1"] {
            let error = Given::read(GrantKind::Send, bad).unwrap_err();
            assert!(error.contains("vm:NAME=SOURCE"), "{error}");
        }
        for (text, is_one) in [
            ("vm:*=eth1", false),
            ("vm:a=eth1", true),
            ("uid:1=eth1", true),
        ] {
            let given = Given::read(GrantKind::See, text).unwrap();
            let said = given.must_be_one(text);
            assert_eq!(said.is_ok(), is_one, "{said:?}");
        }
    }

    #[test]
    fn a_back_end_is_a_process_of_the_host_and_used_from_anywhere() {
        let of = |kind, text| Given::read(kind, text);
        let used = of(GrantKind::Use, "vm:a=kv").unwrap();
        assert_eq!(
            (used.whom.clone(), &*used.source),
            (Peer::Vm("a".into()), "kv")
        );
        assert_eq!(used.text(GrantKind::Use), "use vm:a=kv");
        assert!(of(GrantKind::Serve, "uid:1000=kv").is_ok());
        let error = of(GrantKind::Serve, "vm:a=kv").unwrap_err();
        assert!(error.contains("write uid:N=BACKEND"), "{error}");
        for bad in ["kv", "uid:1=", "uid:1=kv,memory=1M", "uid:*=kv", "vm:=kv"] {
            let error = of(GrantKind::Use, bad).unwrap_err();
            assert!(error.contains("vm:NAME=BACKEND"), "{error}");
        }
    }
}
