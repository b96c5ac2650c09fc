//! Which names the addresses have that the sandbox gave to its program, while they live.
//!
//! A rule for a name accepts these addresses and no others: what the program itself says about an address counts
//! for nothing. An address lives as long as the answer says (as it was handed out, at most [`LONGEST`])
//! and [`GRACE`] more, for programs that are slow to connect. It then has no name until the name is
//! asked for again; connections that stand stay.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::name::Name;

/// The table of one sandbox.
#[derive(Debug, Default)]
pub struct Learned {
    addresses: Mutex<HashMap<IpAddr, Vec<(Name, Instant)>>>,
}

impl Learned {
    /// `name` was answered with `address` just now, for `life` (as handed out).
    pub fn note(&self, name: &Name, address: IpAddr, life: Duration) {
        self.note_at(name, address, life, Instant::now());
    }

    fn note_at(&self, name: &Name, address: IpAddr, life: Duration, now: Instant) {
        let until = now + life.min(LONGEST) + GRACE;
        let mut addresses = self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if addresses.len() >= ADDRESSES && !addresses.contains_key(&address.to_canonical()) {
            forget(&mut addresses, now);
        }
        let names = addresses.entry(address.to_canonical()).or_default();
        names.retain(|(known, until)| known != name && *until > now);
        // The newest stands first, and is what a question shows.
        names.insert(0, (name.clone(), until));
        names.truncate(NAMES);
    }

    /// The names of an address that live, the newest first.
    pub fn names(&self, address: IpAddr) -> Vec<Name> {
        self.names_at(address, Instant::now())
    }

    fn names_at(&self, address: IpAddr, now: Instant) -> Vec<Name> {
        let addresses = self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let names = addresses
            .get(&address.to_canonical())
            .map_or(&[][..], Vec::as_slice);
        names
            .iter()
            .filter(|(_, until)| *until > now)
            .map(|(name, _)| name.clone())
            .collect()
    }
}

/// Forgets what is dead, and if that is nothing, what dies first.
fn forget(addresses: &mut HashMap<IpAddr, Vec<(Name, Instant)>>, now: Instant) {
    addresses.retain(|_, names| names.iter().any(|(_, until)| *until > now));
    if addresses.len() >= ADDRESSES {
        let last = |names: &[(Name, Instant)]| names.iter().map(|(_, until)| *until).max();
        let first = addresses
            .iter()
            .min_by_key(|(_, names)| last(names))
            .map(|(&address, _)| address);
        if let Some(first) = first {
            addresses.remove(&first);
        }
    }
}

/// The longest life that the sandbox hands out; programs ask again after it.
pub const LONGEST: Duration = Duration::from_secs(3600);
/// How much longer an address has its name than its answer said.
pub const GRACE: Duration = Duration::from_secs(60);
/// So many addresses are known at once, and so many names of each.
const ADDRESSES: usize = 16_384;
const NAMES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    #[test]
    fn an_address_has_a_name_while_the_answer_lives_and_a_minute_more() {
        let learned = Learned::default();
        let now = Instant::now();
        let address = "192.0.2.1".parse().unwrap();
        let at = |seconds| learned.names_at(address, now + Duration::from_secs(seconds));
        learned.note_at(&name("a.org"), address, Duration::from_secs(10), now);
        assert_eq!(
            (at(0), at(69), at(70)),
            (vec![name("a.org")], vec![name("a.org")], vec![])
        );
        assert_eq!(
            learned.names_at("::ffff:192.0.2.1".parse().unwrap(), now),
            [name("a.org")]
        );
        // The newest name first; asked for again it lives anew; a year is an hour.
        learned.note_at(
            &name("b.org"),
            address,
            Duration::from_secs(365 * 86_400),
            now,
        );
        assert_eq!(at(0), [name("b.org"), name("a.org")]);
        assert_eq!((at(3659), at(3660)), (vec![name("b.org")], vec![]));
        learned.note_at(
            &name("a.org"),
            address,
            Duration::ZERO,
            now + Duration::from_secs(100),
        );
        assert_eq!(at(159), [name("a.org"), name("b.org")]);
    }

    #[test]
    fn what_a_program_looks_up_takes_bounded_memory() {
        let learned = Learned::default();
        let now = Instant::now();
        for number in 0..2 * u32::try_from(ADDRESSES).unwrap() {
            let life = Duration::from_secs(u64::from(number % 3000));
            learned.note_at(&name("a.org"), IpAddr::V4(number.into()), life, now);
            if number == 5 {
                // What follows is quick only if few have to be looked through.
                assert_eq!(learned.addresses.lock().unwrap().len(), 6);
            }
            if number > 1000 + u32::try_from(ADDRESSES).unwrap() {
                break;
            }
        }
        for number in 0..100 {
            learned.note_at(
                &name(&format!("n{number}.org")),
                "192.0.2.1".parse().unwrap(),
                GRACE,
                now,
            );
        }
        assert_eq!(
            learned.names_at("192.0.2.1".parse().unwrap(), now).len(),
            NAMES
        );
        assert!(learned.addresses.lock().unwrap().len() <= ADDRESSES);
    }
}
