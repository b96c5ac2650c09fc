//! Which names the addresses have that the sandbox gave to its program, while they live.
//!
//! A rule for a name accepts these addresses and no others: what the program itself says about an address counts
//! for nothing. An address lives as long as the answer says (as it was handed out, at most [`LONGEST`])
//! and [`GRACE`] more, for programs that are slow to connect. It then has no name until the name is
//! asked for again; connections that stand stay.
//!
//! So much is kept at once, and of each address. Then the rule gives up its oldest by which most was looked up: whoever looks up names
//! without end loses those of the same rule, and none that others may look up. Rules are few, and no program makes one; of
//! processes and files it makes as many as it likes.

use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::name::Name;
use crate::rules::Rule;

/// The table of one sandbox.
#[derive(Debug, Default)]
pub struct Learned {
    table: Mutex<Table>,
}

/// By which rule a name was looked up. The default one: by none that lasts.
#[derive(Clone, Debug, Default)]
pub struct By(Option<Arc<Rule>>);

#[derive(Debug, Default)]
struct Table {
    /// The newest stands first, and is what a question shows.
    addresses: HashMap<IpAddr, Vec<Known>>,
    /// What was noted by each rule, the oldest first. Some of it is dead, or was noted once more since.
    noted: HashMap<By, VecDeque<(IpAddr, u64)>>,
    /// How much of that there is.
    count: usize,
    next: u64,
}

/// A name of an address.
#[derive(Debug)]
struct Known {
    name: Name,
    by: By,
    number: u64,
    until: Instant,
}

impl By {
    /// By this one.
    pub fn rule(rule: Arc<Rule>) -> Self {
        Self(Some(rule))
    }

    fn address(&self) -> *const Rule {
        self.0.as_ref().map_or(ptr::null(), Arc::as_ptr)
    }
}

impl PartialEq for By {
    fn eq(&self, other: &Self) -> bool {
        self.address() == other.address()
    }
}

impl Eq for By {}

impl Hash for By {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.address().hash(state);
    }
}

impl Learned {
    /// `name`, which was looked up by this rule, was answered with `address` just now, for `life` (as handed out).
    pub fn note(&self, name: &Name, address: IpAddr, life: Duration, by: &By) {
        self.note_at(name, address, life, by, Instant::now());
    }

    fn note_at(&self, name: &Name, address: IpAddr, life: Duration, by: &By, now: Instant) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let until = now + life.min(LONGEST) + GRACE;
        table.note(name, address.to_canonical(), by, (now, until));
    }

    /// The names of an address that live, the newest first.
    pub fn names(&self, address: IpAddr) -> Vec<Name> {
        self.names_at(address, Instant::now())
    }

    fn names_at(&self, address: IpAddr, now: Instant) -> Vec<Name> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let known = table.addresses.get(&address.to_canonical());
        let mut names = Vec::new();
        for known in known.into_iter().flatten() {
            if known.until > now && !names.contains(&known.name) {
                names.push(known.name.clone());
            }
        }
        names
    }
}

impl Table {
    fn note(&mut self, name: &Name, address: IpAddr, by: &By, (now, until): (Instant, Instant)) {
        let known = self.addresses.entry(address).or_default();
        known.retain(|it| it.until > now && !(it.name == *name && it.by == *by));
        let new = Known {
            name: name.clone(),
            by: by.clone(),
            number: self.next,
            until,
        };
        known.insert(0, new);
        if known.len() > NAMES {
            let of = |by: &By| known.iter().filter(|it| it.by == *by).count();
            let most = known.iter().map(|it| of(&it.by)).max();
            // If several have most, none of them makes room for a newcomer.
            let loser = known.iter().find(|it| Some(of(&it.by)) == most);
            let loser = loser.map(|it| it.by.clone());
            let at = known.iter().rposition(|it| Some(&it.by) == loser.as_ref());
            at.map(|at| known.remove(at));
        }
        let noted = self.noted.entry(by.clone()).or_default();
        noted.push_back((address, self.next));
        self.next += 1;
        self.count += 1;
        if self.count > MOST {
            self.forget(by);
        }
    }

    /// Forgets the oldest of the rule by which most was noted; of several with most, of this one.
    fn forget(&mut self, by: &By) {
        let own = self.noted.get(by).map_or(0, VecDeque::len);
        let most = self.noted.iter().max_by_key(|(_, noted)| noted.len());
        let loser = match most {
            Some((most, noted)) if noted.len() > own => most.clone(),
            _ => by.clone(),
        };
        let Some(noted) = self.noted.get_mut(&loser) else {
            return;
        };
        let oldest = noted.pop_front();
        if noted.is_empty() {
            self.noted.remove(&loser);
        }
        let Some((address, number)) = oldest else {
            return;
        };
        self.count -= 1;
        if let Some(known) = self.addresses.get_mut(&address) {
            known.retain(|it| it.number != number);
            if known.is_empty() {
                self.addresses.remove(&address);
            }
        }
    }
}

/// The longest life that the sandbox hands out; programs ask again after it.
pub const LONGEST: Duration = Duration::from_secs(3600);
/// How much longer an address has its name than its answer said.
pub const GRACE: Duration = Duration::from_secs(60);
/// The most addresses whose names are known at once, and the most names of one.
const MOST: usize = 65_536;
const NAMES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Say;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn rule() -> By {
        By::rule(Arc::new(Rule::new(Say::Allow)))
    }

    #[test]
    fn an_address_has_a_name_while_the_answer_lives_and_a_minute_more() {
        let learned = Learned::default();
        let now = Instant::now();
        let address = "192.0.2.1".parse().unwrap();
        let at = |seconds| learned.names_at(address, now + Duration::from_secs(seconds));
        let note = |text, by: &By, life, seconds| {
            let now = now + Duration::from_secs(seconds);
            learned.note_at(&name(text), address, Duration::from_secs(life), by, now);
        };
        let by = rule();
        note("a.org", &by, 10, 0);
        assert_eq!(
            (at(0), at(69), at(70)),
            (vec![name("a.org")], vec![name("a.org")], vec![])
        );
        assert_eq!(
            learned.names_at("::ffff:192.0.2.1".parse().unwrap(), now),
            [name("a.org")]
        );
        // The newest name first; asked for again it lives anew; a year is an hour.
        note("b.org", &by, 365 * 86_400, 0);
        assert_eq!(at(0), [name("b.org"), name("a.org")]);
        assert_eq!((at(3659), at(3660)), (vec![name("b.org")], vec![]));
        note("a.org", &by, 0, 100);
        assert_eq!(at(159), [name("a.org"), name("b.org")]);
        // By two rules it is one name.
        note("b.org", &By::default(), 0, 120);
        assert_eq!(at(150), [name("b.org"), name("a.org")]);
    }

    /// Looks up more names, of this address and of others, than are kept.
    fn flood(learned: &Learned, address: IpAddr, by: &By, now: Instant) {
        for number in 0..u32::try_from(2 * MOST).unwrap() {
            let other = IpAddr::V4((0x0b00_0000 + number).into());
            let at = if number < 1000 { address } else { other };
            learned.note_at(&name(&format!("x{number}.evil.org")), at, LONGEST, by, now);
        }
    }

    #[test]
    fn whoever_looks_up_names_without_end_pushes_out_none_that_another_rule_is_about() {
        let (now, address) = (Instant::now(), "192.0.2.1".parse().unwrap());
        let (good, evil) = (rule(), rule());
        for (by, is_kept) in [
            (&evil, true),
            (&By::default(), true),
            // The control: by the same rule.
            (&good, false),
        ] {
            let learned = Learned::default();
            learned.note_at(&name("good.org"), address, LONGEST, &good, now);
            flood(&learned, address, by, now);
            let names = learned.names_at(address, now);
            assert_eq!(names.contains(&name("good.org")), is_kept, "{by:?}");
            // Nor does it keep a new one out.
            learned.note_at(&name("new.org"), address, LONGEST, &good, now);
            assert_eq!(learned.names_at(address, now)[0], name("new.org"));
        }
    }

    #[test]
    fn what_a_program_looks_up_takes_bounded_memory() {
        let (learned, now) = (Learned::default(), Instant::now());
        let address = "192.0.2.1".parse().unwrap();
        let rules: Vec<By> = (0..2 * NAMES).map(|_| rule()).collect();
        for by in &rules {
            learned.note_at(&name("a.org"), address, LONGEST, by, now);
        }
        flood(&learned, address, &rules[0], now);
        // The same name again and again is one.
        for _ in 0..2 * MOST {
            learned.note_at(&name("b.org"), address, LONGEST, &rules[1], now);
        }
        let table = learned.table.lock().unwrap();
        let noted: usize = table.noted.values().map(VecDeque::len).sum();
        assert_eq!((table.count, noted), (MOST, MOST));
        assert!(table.addresses.len() <= MOST && table.addresses[&address].len() <= NAMES);
        let known: usize = table.addresses.values().map(Vec::len).sum();
        assert!(known <= MOST);
    }
}
