//! What is different in a configuration that was read again.
//!
//! Sources, grants, back-ends and, if the operator lets them, programs change while the daemon runs. Everything else is read when it starts; what differs there is told and
//! left. What operators changed at run time stays: only the difference between the two files is done.

use std::collections::{BTreeMap, BTreeSet};

use vnplug_ring::control::GrantKind;

use crate::config::Config;
use crate::hub::grant::Given;
use crate::hub::policy::Policy;
use crate::hub::{BackendGrant, TwinGrant};
use crate::spec::SourceSpec;

/// From one configuration to another.
#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// Sources that are new, or are to be others.
    pub(crate) open: Vec<SourceSpec>,
    /// Names of sources that are to be no more, or to be others.
    pub(crate) close: Vec<String>,
    /// Switches whose settings and entrances become others while they run.
    pub(crate) reset: Vec<SourceSpec>,
    /// Sources that wait until the daemon starts again, and for what.
    waiting: BTreeMap<String, String>,
    /// Names of programs, and what becomes of each: `added`, `changed`, `removed`.
    pub(crate) programs: BTreeMap<String, &'static str>,
    /// Those that are to be loaded.
    pub(crate) load: Vec<TwinGrant>,
    /// Names of back-ends, and what becomes of each, beside who may be it and use it: those are grants.
    pub(crate) backends: BTreeMap<String, &'static str>,
    /// Grants that are no more.
    pub(crate) taken: Vec<(GrantKind, Given)>,
    /// Grants that are new.
    pub(crate) given: Vec<(GrantKind, Given)>,
    /// What waits until the daemon starts again.
    pub(crate) restart: Vec<String>,
    /// Names of sources that could not be started.
    missing: BTreeSet<String>,
}

impl Difference {
    /// `kept` does to the grants of a configuration what operators changed for good at run time.
    pub(crate) fn between(old: &Config, new: &Config, kept: impl Fn(&mut Policy)) -> Self {
        let mut it = Self::default();
        for spec in &new.sources {
            match old.sources.iter().find(|old| old.name() == spec.name()) {
                Some(old) if old == spec => {}
                Some(old) if old.is_switch() && spec.is_switch() => {
                    match spec.not_while_it_runs(old)[..] {
                        [] => it.reset.push(spec.clone()),
                        ref keys => it.put_off_source(spec.name(), &keys.join(", ")),
                    }
                }
                Some(old) if !old.may_change() || !spec.may_change() => {
                    it.put_off_source(spec.name(), "");
                }
                Some(_) => {
                    it.close.push(spec.name().to_owned());
                    it.open.push(spec.clone());
                }
                None => it.open.push(spec.clone()),
            }
        }
        let is_left = |name: &str| new.sources.iter().any(|spec| spec.name() == name);
        let names = old.sources.iter().map(SourceSpec::name);
        it.close
            .extend(names.filter(|name| !is_left(name)).map(str::to_owned));
        // Whose daemon it is is no matter here.
        let [before, after] = [old, new].map(|config| {
            let mut policy = config.policy(0);
            kept(&mut policy);
            policy.grants()
        });
        it.taken
            .extend(before.iter().filter(|it| !after.contains(it)).cloned());
        it.given
            .extend(after.into_iter().filter(|it| !before.contains(it)));
        it.backends = backends(&old.backends, &new.backends);
        it.restart.extend(settings(old, new));
        let has = |config: &Config, name: &str| config.programs.iter().any(|it| it.name == name);
        let differs = |it: &&TwinGrant| !old.programs.contains(it);
        it.load = new.programs.iter().filter(differs).cloned().collect();
        for grant in &it.load {
            let what = match has(old, &grant.name) {
                true => "changed",
                false => "added",
            };
            it.programs.insert(grant.name.clone(), what);
        }
        let names = old.programs.iter().map(|it| &it.name);
        let gone = names.filter(|name| !has(new, name));
        it.programs
            .extend(gone.map(|name| (name.clone(), "removed")));
        it
    }

    /// A source's change waits until the daemon starts again, for this.
    pub(crate) fn put_off_source(&mut self, name: &str, why: &str) {
        self.close.retain(|it| it != name);
        self.open.retain(|it| it.name() != name);
        self.reset.retain(|it| it.name() != name);
        self.waiting.insert(name.to_owned(), why.to_owned());
    }

    /// A program's change waits until the daemon starts again.
    pub(crate) fn put_off(&mut self, program: &str) {
        self.programs.remove(program);
        self.load.retain(|it| it.name != program);
        self.restart.push(format!("program {program}"));
    }

    /// Sources of these names could not be started. They stay different, so that the next reload opens them again.
    pub(crate) fn miss_sources(&mut self, names: BTreeSet<String>) {
        self.open.retain(|spec| !names.contains(spec.name()));
        self.missing = names;
    }

    /// Names of the sources that could not be started.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &str> {
        self.missing.iter().map(String::as_str)
    }

    /// What is said behind the reason if sources could not be started.
    pub(crate) fn told_missing(&self) -> Option<String> {
        let names: Vec<String> = self.missing().map(|name| format!("{name:?}")).collect();
        let named = names[..names.len().min(NAMED)].join(", ");
        let what = match names.len() {
            0 => return None,
            1 => format!("source {named} is not there"),
            all @ ..=NAMED => format!("{all} sources are not there: {named}"),
            all => format!(
                "{all} sources are not there: {named}, and {} more",
                all - NAMED
            ),
        };
        Some(format!(
            "{what}; all else of the configuration is in force, and the next reload tries again"
        ))
    }

    /// Programs that are to be no more.
    pub(crate) fn unload(&self) -> Vec<String> {
        let gone = self.programs.iter().filter(|(_, what)| **what == "removed");
        gone.map(|(name, _)| name.clone()).collect()
    }

    /// Each change as it is told: what it is about, and `added`, `removed`, `changed` or `restart`.
    pub(crate) fn told(&self) -> Vec<(String, &'static str)> {
        let opened: BTreeSet<&str> = self.open.iter().map(SourceSpec::name).collect();
        let closed: BTreeSet<&str> = self.close.iter().map(String::as_str).collect();
        let mut told = Vec::new();
        for name in opened.union(&closed) {
            let what = match (opened.contains(name), closed.contains(name)) {
                (true, true) => "changed",
                (true, false) => "added",
                (false, _) => "removed",
            };
            told.push((format!("source {name}"), what));
        }
        let reset = self.reset.iter();
        told.extend(reset.map(|spec| (format!("source {}", spec.name()), "changed")));
        let programs = self.programs.iter();
        told.extend(programs.map(|(name, what)| (format!("program {name}"), *what)));
        let backends = self.backends.iter();
        told.extend(backends.map(|(name, what)| (format!("back-end {name}"), *what)));
        let grants = |all: &[(GrantKind, Given)], what| {
            let all = all.iter();
            all.map(|(kind, given)| (format!("grant {}", given.text(*kind)), what))
                .collect::<Vec<_>>()
        };
        told.extend(grants(&self.taken, "removed"));
        told.extend(grants(&self.given, "added"));
        let waiting = self.waiting.iter().map(|(name, why)| match &**why {
            "" => format!("source {name}"),
            why => format!("source {name} ({why})"),
        });
        let restart = waiting.chain(self.restart.iter().cloned());
        told.extend(restart.map(|name| (name, "restart")));
        told
    }

    /// The configuration by which the daemon runs when this is done.
    pub(crate) fn done(&self, old: &mut Config, new: Config) {
        let Config {
            sources,
            users,
            vms,
            senders,
            joiners,
            backends,
            programs,
            ..
        } = new;
        // What waits stays different, so that it is told again.
        let waits = |spec: &SourceSpec| self.waiting.contains_key(spec.name());
        let (mut kept, _): (Vec<_>, Vec<_>) = std::mem::take(&mut old.sources)
            .into_iter()
            .partition(waits);
        let is_there = |spec: &SourceSpec| !waits(spec) && !self.missing.contains(spec.name());
        kept.extend(sources.into_iter().filter(is_there));
        old.sources = kept;
        let waits = |it: &TwinGrant| self.restart.contains(&format!("program {}", it.name));
        old.programs.retain(waits);
        old.programs
            .extend(programs.into_iter().filter(|it| !waits(it)));
        (old.users, old.vms) = (users, vms);
        (old.senders, old.joiners) = (senders, joiners);
        old.backends = backends;
    }
}

/// How many sources that could not be started are named in an answer.
const NAMED: usize = 8;

/// Which back-ends are not as they were, and what becomes of each: `added`, `changed`, `removed`.
fn backends(old: &[BackendGrant], new: &[BackendGrant]) -> BTreeMap<String, &'static str> {
    let named = |all: &[BackendGrant], name: &str| all.iter().find(|it| it.name == name).cloned();
    let mut differ = BTreeMap::new();
    for grant in new {
        match named(old, &grant.name) {
            None => differ.insert(grant.name.clone(), "added"),
            Some(before) if !grant.is_like(&before) => differ.insert(grant.name.clone(), "changed"),
            Some(_) => None,
        };
    }
    let gone = old.iter().filter(|it| named(new, &it.name).is_none());
    differ.extend(gone.map(|it| (it.name.clone(), "removed")));
    differ
}

/// The settings that differ, and are read when the daemon starts.
fn settings(old: &Config, new: &Config) -> Vec<String> {
    let Config {
        socket,
        socket_mode,
        socket_group,
        state_dir,
        pool_dir,
        user,
        observers,
        ring_bytes,
        max_ring_bytes,
        pool_bytes,
        max_ports,
        max_ports_each,
        max_user_bytes,
        wake_us,
        jit,
        jit_bytes,
        sources: _,
        users: _,
        vms: _,
        senders: _,
        joiners: _,
        backends: _,
        programs: _,
        change_programs,
    } = new;
    let all = [
        ("socket", *socket != old.socket),
        ("socket_mode", *socket_mode != old.socket_mode),
        ("socket_group", *socket_group != old.socket_group),
        ("state_dir", *state_dir != old.state_dir),
        ("pool_dir", *pool_dir != old.pool_dir),
        ("user", *user != old.user),
        ("observers", *observers != old.observers),
        ("ring_bytes", *ring_bytes != old.ring_bytes),
        ("max_ring_bytes", *max_ring_bytes != old.max_ring_bytes),
        ("pool_bytes", *pool_bytes != old.pool_bytes),
        ("max_ports", *max_ports != old.max_ports),
        ("max_ports_each", *max_ports_each != old.max_ports_each),
        ("max_user_bytes", *max_user_bytes != old.max_user_bytes),
        ("wake_us", *wake_us != old.wake_us),
        ("jit", *jit != old.jit),
        ("jit_bytes", *jit_bytes != old.jit_bytes),
        ("change_programs", *change_programs != old.change_programs),
    ];
    let differ = all.into_iter().filter(|(_, differs)| *differs);
    differ.map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use vnplug_ring::control::GrantAction;

    use super::*;
    use crate::config::Arguments;
    use crate::hub::grant::Change;

    fn config(words: &[&str]) -> Config {
        let words = ["vnplugd", "--socket", "/tmp/s"].iter().chain(words);
        Config::load(Arguments::parse_from(words)).unwrap()
    }

    #[test]
    fn only_what_differs_is_told_and_what_waits_is_told_again() {
        let mut old = config(&[
            "--source",
            "a=gen",
            "--source",
            "b=gen,pps=1",
            "--source",
            "gone=gen",
            "--switch",
            "lan0",
            "--switch",
            "lan1",
            "--allow",
            "uid:1=a:ip",
            "--allow",
            "uid:2=a",
            "--allow-send",
            "uid:1=a",
        ]);
        assert_eq!(Difference::between(&old, &old, |_| ()).told(), []);
        let words = [
            "--source",
            "a=gen",
            "--source",
            "b=gen,pps=2",
            "--source",
            "new=gen",
            "--switch",
            "lan0,hub=yes,stream=/nowhere/x",
            "--switch",
            "lan1,ports=5,hub=yes,uplink=eth1",
            "--allow",
            "uid:1=a:arp",
            "--allow",
            "uid:2=a",
            "--allow-send",
            "uid:1=a",
            "--jit",
            "off",
        ];
        let new = config(&words);
        let difference = Difference::between(&old, &new, |_| ());
        let told = difference.told();
        let told: Vec<_> = told.iter().map(|(name, what)| (&**name, *what)).collect();
        assert_eq!(
            told,
            [
                ("source b", "changed"),
                ("source gone", "removed"),
                ("source new", "added"),
                ("source lan0", "changed"),
                ("grant see uid:1=a:ip", "removed"),
                ("grant see uid:1=a:arp", "added"),
                ("source lan1 (ports)", "restart"),
                ("jit", "restart"),
            ]
        );
        difference.done(&mut old, new);
        let again = Difference::between(&old, &config(&words), |_| ()).told();
        let names: Vec<_> = again.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["source lan1 (ports)", "jit"]);
    }

    #[test]
    fn a_source_that_cannot_be_started_is_told_and_tried_again() {
        let of = |sources: &[&str]| {
            let words = sources.iter().flat_map(|it| ["--source", it]);
            config(&words.collect::<Vec<_>>())
        };
        let mut old = of(&["a=gen,pps=1", "b=gen,pps=1", "gone=gen"]);
        let new = || of(&["a=gen,pps=2", "b=gen,pps=2", "c=gen", "d=gen"]);
        let mut difference = Difference::between(&old, &new(), |_| ());
        assert_eq!(difference.told_missing(), None);
        difference.miss_sources(["b", "d"].map(str::to_owned).into());
        let told = difference.told();
        let told: Vec<_> = told.iter().map(|(name, what)| (&**name, *what)).collect();
        assert_eq!(
            told,
            [
                ("source a", "changed"),
                ("source b", "removed"),
                ("source c", "added"),
                ("source gone", "removed"),
            ]
        );
        let missing = difference.told_missing().unwrap();
        assert!(
            missing.starts_with("2 sources are not there: \"b\", \"d\"; "),
            "{missing}"
        );
        difference.done(&mut old, new());
        let mut again = Difference::between(&old, &new(), |_| ());
        let told = again.told();
        let told: Vec<_> = told.iter().map(|(name, what)| (&**name, *what)).collect();
        assert_eq!(told, [("source b", "added"), ("source d", "added")]);
        again.miss_sources((0..10).map(|n| n.to_string()).collect());
        let missing = again.told_missing().unwrap();
        assert!(missing.contains("\"7\", and 2 more; "), "{missing}");
    }

    #[test]
    fn a_back_end_is_told_apart_from_who_may_be_it_and_use_it() {
        let of = |backends: &[&str]| {
            let words = backends.iter().flat_map(|it| ["--backend", it]);
            config(&words.collect::<Vec<_>>())
        };
        let mut old = of(&[
            "kv,id=85,uid=1,open=uid:2+vm:*,memory=1M",
            "dns,id=86,uid=1",
            "old,id=1,uid=1",
        ]);
        let new = || {
            of(&[
                "kv,id=85,uid=1,open=uid:3+vm:*,memory=1M",
                "dns,id=86,uid=1,channels=2",
            ])
        };
        let difference = Difference::between(&old, &new(), |_| ());
        let told = difference.told();
        let told: Vec<_> = told.iter().map(|(name, what)| (&**name, *what)).collect();
        assert_eq!(
            told,
            [
                ("back-end dns", "changed"),
                ("back-end old", "removed"),
                ("grant use uid:2=kv", "removed"),
                ("grant serve uid:1=old", "removed"),
                ("grant use uid:3=kv", "added"),
            ]
        );
        difference.done(&mut old, new());
        assert_eq!(Difference::between(&old, &new(), |_| ()).told(), []);
    }

    #[test]
    fn what_operators_keep_is_not_undone_by_a_file() {
        let old = config(&["--allow", "vm:probe=a:not port 22"]);
        let new = config(&["--allow", "vm:probe=a:not port 23", "--allow", "uid:1=a"]);
        let kept = |policy: &mut Policy| {
            for (action, text) in [
                (GrantAction::Remove, "vm:probe=a"),
                (GrantAction::Add, "uid:1=a"),
            ] {
                let (kind, given) = (GrantKind::See, Given::read(GrantKind::See, text).unwrap());
                policy.change(&Change {
                    action,
                    kind,
                    given,
                });
            }
        };
        assert_eq!(Difference::between(&old, &new, kept).told(), []);
        assert_eq!(Difference::between(&old, &new, |_| ()).told().len(), 3);
    }
}
