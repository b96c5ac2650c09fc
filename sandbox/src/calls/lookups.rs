//! Looks up who makes calls that nobody is known of: the files that their processes run are read.
//!
//! One thread does, piece by piece, and goes on with the file of which least was read since it had nothing to do. So a program
//! whose file is long, or is read again and again because it may change, waits for itself; who runs another file does not
//! wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use super::prepare::Proposal;
use super::serve::Server;
use super::task::Pending;
use crate::sys::seccomp::Answer;
use crate::who::{Look, Looked};

/// A call whose maker's file is being read.
struct Lookup {
    pending: Pending,
    proposal: Proposal,
    look: Box<Look>,
}

/// What was read of each file, by device and number.
#[derive(Debug, Default)]
struct Turns {
    read: HashMap<(u64, u64), u64>,
}

/// Looks up as long as somebody can ask for it.
pub(super) fn run(server: &Arc<Server>, new: &Receiver<(Pending, Proposal)>) {
    let mut turns = Turns::default();
    let mut lookups: Vec<Lookup> = Vec::new();
    loop {
        if lookups.is_empty() {
            turns = Turns::default();
            match new.recv() {
                Ok((pending, proposal)) => lookups.extend(begin(server, pending, proposal)),
                Err(_) => return,
            }
        }
        loop {
            match new.try_recv() {
                Ok((pending, proposal)) => lookups.extend(begin(server, pending, proposal)),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let Some(next) = turns.next(lookups.iter().map(|lookup| lookup.look.file())) else {
            continue;
        };
        // Those that wait for the same file are read in the order in which they came.
        let Lookup {
            pending,
            proposal,
            look,
        } = lookups.remove(next);
        if !server.listener.waits(pending.id) {
            server.forget(pending);
            continue;
        }
        let (file, before) = (look.file(), look.read());
        let looked = server.known.go_on(look);
        if let Ok(Looked::Part(look)) = looked {
            turns.count(file, look.read() - before);
            let lookup = Lookup {
                pending,
                proposal,
                look,
            };
            lookups.insert(next, lookup);
            continue;
        }
        turns.count(file, 1);
        lookups.extend(go_on(server, pending, proposal, looked));
    }
}

fn begin(server: &Arc<Server>, pending: Pending, proposal: Proposal) -> Option<Lookup> {
    let looked = server.known.look(pending.process, server.root);
    go_on(server, pending, proposal, looked)
}

/// Has the act judged, if it is known who makes it.
fn go_on(
    server: &Arc<Server>,
    pending: Pending,
    proposal: Proposal,
    mut looked: std::io::Result<Looked>,
) -> Option<Lookup> {
    if looked.is_err() && pending.process != pending.thread {
        // The first thread of its process has ended, and shows neither file nor command line any more.
        looked = server.known.look(pending.thread, server.root);
    }
    if !server.listener.waits(pending.id) {
        server.forget(pending);
        return None;
    }
    match looked {
        Ok(Looked::Whole(who)) => server.ask(pending, &proposal.act(who)),
        Ok(Looked::Part(look)) => {
            return Some(Lookup {
                pending,
                proposal,
                look,
            });
        }
        Err(error) => {
            log::debug!("thread {} cannot be looked at: {error}", pending.thread);
            server.answer(pending.id, pending.slot, Answer::Error(libc::EPERM));
        }
    }
    None
}

impl Turns {
    /// Whose turn it is: one of these files that wait, in the order in which they came.
    fn next(&self, files: impl Iterator<Item = (u64, u64)>) -> Option<usize> {
        let read = |file| self.read.get(&file).copied().unwrap_or(0);
        let files = files.enumerate();
        let least = files.min_by_key(|(_, file)| read(*file));
        least.map(|(at, _)| at)
    }

    fn count(&mut self, file: (u64, u64), bytes: u64) {
        if self.read.len() >= MOST_FILES && !self.read.contains_key(&file) {
            self.read.clear();
        }
        *self.read.entry(file).or_default() += bytes;
    }
}

/// Files that are told apart, at once.
const MOST_FILES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_had_least_is_next_and_the_first_of_those() {
        let mut turns = Turns::default();
        let (long, short) = ((1, 1), (1, 2));
        assert_eq!(turns.next([].into_iter()), None);
        assert_eq!(turns.next([long, short].into_iter()), Some(0));
        turns.count(long, 1);
        assert_eq!(turns.next([long, short].into_iter()), Some(1));
        turns.count(short, 1);
        assert_eq!(turns.next([long, long, short].into_iter()), Some(0));
        // Another that comes later, however many wait for the same one.
        assert_eq!(turns.next([long, long, short, (1, 3)].into_iter()), Some(3));
        for number in 0..10_000 {
            turns.count((2, number), 1);
            assert!(turns.read.len() <= MOST_FILES);
        }
    }
}
