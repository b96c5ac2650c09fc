//! Questions to people, and their answers.
//!
//! ```text
//!  gate ── question ──> desk ──> terminal                    (/dev/tty)
//!                        │  └──> socket ──> vnplug sandbox ask, a desktop, …
//!                        └── first answer, or the end of the time
//! ```
//!
//! Several questions are open at once. Equal ones are one: an answer is for all that wait for it, and after an answer
//! every open question is judged anew, since the rule that the answer makes may be about it, too. Nothing
//! that a program does makes the desk grow without bound: beyond [`OPEN`] questions, or [`WAITING`] acts that wait for
//! one, acts are refused at once.

pub mod desk;
pub mod show;
pub mod socket;
pub mod terminal;

#[cfg(test)]
mod front_tests;
#[cfg(test)]
pub(crate) mod tests;

use std::time::{Duration, Instant, SystemTime};

use crate::act::{Act, Doing, Target, Transport};
use crate::floor::{Floor, Network};
use crate::name::Name;
use crate::rules::glob::Glob;
use crate::rules::{Direction, Place, Protocol, Rule, Say};

/// A question that somebody is to answer.
#[derive(Clone, Debug)]
pub struct Question {
    /// Its number in this session, from 1 on.
    pub id: u64,
    /// What is to be done, by whom.
    pub act: Act,
    /// By which names the address is known, the newest first.
    pub names: Vec<Name>,
    /// The rules that an answer can make, as if it were *allow*; the first is the narrowest.
    pub offers: Vec<Rule>,
    /// False if an answer holds for this act alone: what is asked about is on the floor, or the program's path
    /// cannot be written as a rule.
    pub lasts: bool,
    /// How many acts of this process were allowed before, and refused.
    pub before: (u64, u64),
    /// When it is refused if nobody answers.
    pub deadline: Instant,
}

/// What somebody answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Allowed?
    pub allow: bool,
    /// For how long.
    pub life: Life,
    /// For what: which of the question's offers.
    pub offer: usize,
}

/// How long an answer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// For this process and [`ONCE`], so that it can try again or take the second address of a name; a name
    /// that was looked up may be used for [`ONCE_NAME`].
    Once,
    /// As long as the sandbox lives.
    Session,
    /// Until then.
    Until(SystemTime),
    /// It becomes a rule.
    Always,
}

/// What the fronts that ask are told.
#[derive(Clone, Debug)]
pub enum Event {
    /// Ask this.
    Asked(std::sync::Arc<Question>),
    /// It is decided.
    Settled {
        /// The number of the question.
        id: u64,
        /// Allowed?
        allow: bool,
        /// By whom: `terminal`, `socket`, `time`, `rule`.
        by: &'static str,
    },
}

/// The rules that an answer about `act` could make, the narrowest first; and whether they can last.
pub fn offers(act: &Act, names: &[Name]) -> (Vec<Rule>, bool) {
    let mut base = Rule::new(Say::Allow);
    base.direction = Direction::of(act.doing);
    base.program = Glob::only(&act.who.program.to_string_lossy());
    if base.program.is_none() || act.who.program.to_str().is_none() {
        (base.program, base.sha256) = (None, act.who.hash);
    }
    let is_written = base
        .program
        .as_ref()
        .is_some_and(|glob| !glob.to_string().is_empty())
        || base.sha256.is_some();
    let is_floor = matches!(&act.target, Target::Internet(to) if act.doing == Doing::Connect && Floor::of(to.ip()).is_some());
    let offer = |to: Option<Place>, with: bool, port: Option<u16>| {
        let mut rule = base.clone();
        rule.to.extend(to);
        // Raw sockets are meant only where they are named.
        if with || act.transport == Transport::Raw {
            rule.protocols = vec![Protocol::Is(act.transport)];
        }
        if with {
            rule.ports
                .extend(port.filter(|&port| port != 0).map(|port| port..=port));
        }
        rule
    };
    let below = |name: &Name| name.parent().map(Place::Below);
    let mut offers = match &act.target {
        Target::Internet(to) => {
            let name = names
                .first()
                .filter(|_| !is_floor && act.doing == Doing::Connect);
            let exact = name.map_or(
                Place::Network(Network::only(to.ip().to_canonical())),
                |name| Place::Name(name.clone()),
            );
            let mut offers = vec![
                offer(Some(exact.clone()), true, Some(to.port())),
                offer(Some(exact), false, None),
            ];
            offers.extend(
                name.and_then(below)
                    .map(|place| offer(Some(place), false, None)),
            );
            offers.push(offer(None, true, Some(to.port())));
            offers
        }
        Target::Name(text) => {
            let Ok(name) = Name::new(text) else {
                return (vec![base], false);
            };
            let mut offers = vec![offer(Some(Place::Name(name.clone())), false, None)];
            offers.extend(below(&name).map(|place| offer(Some(place), false, None)));
            offers
        }
        Target::Path(path) => {
            let place = if act.transport == Transport::Unix {
                Place::Unix
            } else {
                Place::File
            };
            let Some(only) =
                Glob::only(&path.to_string_lossy()).filter(|_| path.to_str().is_some())
            else {
                return (vec![base], false);
            };
            let mut offers = vec![offer(Some(place(only)), false, None)];
            if let Some(parent) = path
                .parent()
                .and_then(|parent| parent.to_str())
                .filter(|_| act.transport == Transport::File)
            {
                offers.push(offer(
                    Some(place(Glob::path(&format!(
                        "{}/**",
                        parent.trim_end_matches('/')
                    )))),
                    false,
                    None,
                ));
            }
            offers
        }
        Target::Abstract(name) => match std::str::from_utf8(name)
            .ok()
            .and_then(|name| Glob::only(name).map(|_| name))
        {
            Some(name) => vec![offer(Some(Place::Abstract(Glob::text(name))), false, None)],
            None => return (vec![base], false),
        },
        Target::Vsock { cid, port } => {
            let mut rule = offer(Some(Place::Vsock(Some(*cid))), false, None);
            rule.ports
                .extend(u16::try_from(*port).ok().map(|port| port..=port));
            vec![rule]
        }
        Target::Nobody => vec![offer(None, true, None)],
    };
    // The last: whatever program it is.
    let mut anybody = offers[0].clone();
    (anybody.program, anybody.sha256) = (None, None);
    offers.push(anybody);
    (offers, is_written && !is_floor)
}

/// How long an answer holds that is given once.
pub const ONCE: Duration = Duration::from_secs(10);
/// The same, for a name that was looked up.
pub const ONCE_NAME: Duration = Duration::from_secs(60);
/// The most questions that are open at once.
pub const OPEN: usize = 64;
/// The most acts that wait for one of them.
pub const WAITING: usize = 4096;
