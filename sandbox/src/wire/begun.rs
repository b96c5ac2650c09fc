//! By what connections were allowed that calls have just made.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::flow::{Ends, bytes_of};
use crate::act::Who;
use crate::name::Name;

/// By which names a connection was allowed; `None`: as an address.
pub(super) type Names = Option<Arc<[Name]>>;

/// The connections that calls made last. A later one between the same ends takes the place of an earlier one.
#[derive(Debug, Default)]
pub(super) struct Begun {
    connections: HashMap<Ends, Made>,
    /// In which order they were made, with the number of each.
    order: VecDeque<(Ends, u64)>,
    next: u64,
    /// Bytes that are kept of who made them, and of names.
    kept: usize,
}

/// A connection that a call made.
#[derive(Debug)]
struct Made {
    number: u64,
    who: Arc<Who>,
    names: Names,
    /// The number of the segment that began it, once it was seen: another one is another connection.
    began_with: Option<u32>,
}

impl Begun {
    /// A number that nothing else here has, nor a call.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn note(&mut self, ends: Ends, who: Arc<Who>, names: Names) {
        let number = self.number();
        let made = Made {
            number,
            who,
            names,
            began_with: None,
        };
        self.kept += made.bytes();
        if let Some(before) = self.connections.insert(ends, made) {
            self.kept -= before.bytes();
        }
        self.order.push_back((ends, number));
        while self.order.len() > MOST || self.kept > MOST_KEPT {
            let Some((ends, number)) = self.order.pop_front() else {
                return;
            };
            let is_it = |made: &Made| made.number == number;
            if self.connections.get(&ends).is_some_and(is_it)
                && let Some(made) = self.connections.remove(&ends)
            {
                self.kept -= made.bytes();
            }
        }
    }

    /// The number that the next one gets, connection or call.
    pub(super) fn mark(&self) -> u64 {
        self.next
    }

    /// The last one between these ends, if it is older than none of these calls: its names. It is taken for the one that began with a
    /// segment of this number, and from then on for no other.
    pub(super) fn find(&mut self, ends: &Ends, since: u64, began_with: u32) -> Option<&Names> {
        let made = self.connections.get_mut(ends)?;
        let is_it =
            made.number >= since && *made.began_with.get_or_insert(began_with) == began_with;
        is_it.then_some(&made.names)
    }

    /// Whose the one is that began with a segment of this number.
    pub(super) fn maker(&self, ends: &Ends, began_with: u32) -> Option<&Arc<Who>> {
        let made = self.connections.get(ends)?;
        (made.began_with == Some(began_with)).then_some(&made.who)
    }

    /// Whether the last one between these ends was allowed as an address.
    pub(super) fn is_bare(&self, ends: &Ends) -> bool {
        self.connections
            .get(ends)
            .is_some_and(|made| made.names.is_none())
    }
}

impl Made {
    /// What is kept of it: one process makes many, and each counts all of it.
    fn bytes(&self) -> usize {
        self.who.bytes() + self.names.as_deref().map_or(0, bytes_of)
    }
}

/// Connections that are remembered: whoever has to begin once more does so within two minutes.
const MOST: usize = 16_384;
/// Bytes of their makers and names.
const MOST_KEPT: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn ends(port: u16) -> Ends {
        let at = |port| SocketAddr::new([10, 0, 0, 1].into(), port);
        (at(443), at(port))
    }

    fn named(text: &str) -> Names {
        Some([Name::new(text).unwrap()].into())
    }

    #[test]
    fn the_last_ones_are_known_and_any_number_takes_bounded_memory() {
        let mut begun = Begun::default();
        for port in 0..60_000 {
            begun.note(ends(port), Arc::default(), None);
            begun.note(ends(0), Arc::default(), named("a.org"));
            assert!(begun.connections.len() <= MOST && begun.order.len() <= MOST);
        }
        let names = |begun: &mut Begun, port| begun.find(&ends(port), 0, 7).cloned();
        assert_eq!(names(&mut begun, 0), Some(named("a.org")));
        assert_eq!(names(&mut begun, 59_999), Some(None));
        assert_eq!(names(&mut begun, 1), None);
        let label = "x".repeat(60);
        let long: Arc<[Name]> = vec![Name::new(&[&label[..]; 4].join(".")).unwrap(); 16].into();
        for port in 0..10_000 {
            begun.note(ends(port), Arc::default(), Some(Arc::clone(&long)));
            assert!(begun.kept <= MOST_KEPT);
        }
        assert_eq!(names(&mut begun, 9_999), Some(Some(long)));
        for port in 0..60_000 {
            begun.note(ends(port), Arc::default(), None);
        }
        assert_eq!(begun.kept, MOST * Who::default().bytes());
    }
}
