//! What the thread of a switch and its lanes share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::clock::Clock;
use crate::forward::Number;
use crate::link::Given;
use crate::table::View;
use crate::vhost::Guest;

/// What they share, locked.
pub(super) struct Roads(RwLock<World>);

/// Where lanes may forward to.
pub(super) struct World {
    pub(super) view: View,
    pub(super) clock: Clock,
    /// Seconds after which a station is forgotten that is not heard.
    pub(super) age_s: u32,
    /// By port.
    roads: Vec<Option<Road>>,
    /// How many ports each lane has.
    lent: Vec<u32>,
}

/// One port that may be lent, and what lanes counted there.
pub(super) struct Road {
    pub(super) guest: Arc<Guest>,
    /// No other has this number, whoever has the port's.
    pub(super) id: u64,
    /// The lane that has it.
    lane: Option<usize>,
    /// That lane has found something which it does not do, and has said so.
    pub(super) is_referred: AtomicBool,
    /// Frames go there, and come from there, without anything being done with them.
    pub(super) is_plain: bool,
    sent: [AtomicU64; 2],
    given: [AtomicU64; 5],
}

/// What lanes forwarded from a port and to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Frames that it sent, and their bytes.
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// What became of frames for it.
    pub(crate) given: Given,
    /// Of those that were given to it, by whomever, and waited there: dropped after all.
    pub(crate) lost: u64,
}

impl Carried {
    fn with(self, more: Self) -> Self {
        let (a, b) = (self.given, more.given);
        Self {
            frames: self.frames + more.frames,
            bytes: self.bytes + more.bytes,
            lost: self.lost + more.lost,
            given: Given {
                enqueued: a.enqueued + b.enqueued,
                full: a.full + b.full,
                gone: a.gone + b.gone,
                long: a.long + b.long,
                bytes: a.bytes + b.bytes,
            },
        }
    }
}

impl Roads {
    pub(super) fn new(view: View, clock: Clock) -> Self {
        let world = World {
            view,
            clock,
            age_s: 0,
            lent: Vec::new(),
            roads: Vec::new(),
        };
        Self(RwLock::new(world))
    }

    /// For a turn. NB: never twice in one thread: a writer in between waits for the first, and the second for it.
    #[inline]
    pub(super) fn read(&self) -> RwLockReadGuard<'_, World> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// When all lanes are between two turns.
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, World> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    #[inline]
    pub(super) fn get(&self, number: Number) -> Option<&Road> {
        self.roads.get(usize::from(number))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: Number) -> Option<&mut Road> {
        self.roads.get_mut(usize::from(number))?.as_mut()
    }

    pub(super) fn add(&mut self, number: Number, road: Road) {
        let at = usize::from(number);
        if self.roads.len() <= at {
            self.roads.resize_with(at + 1, || None);
        }
        self.roads[at] = Some(road);
    }

    /// A port is gone that no lane has.
    pub(super) fn remove(&mut self, number: Number) -> Option<Road> {
        self.roads.get_mut(usize::from(number))?.take()
    }

    /// One of the `lanes` has this port from now on: the one that has the fewest.
    pub(super) fn lend(&mut self, number: Number, lanes: usize) -> Option<usize> {
        self.lent.resize(lanes, 0);
        let (lane, _) = (0..).zip(&self.lent).min_by_key(|(_, count)| **count)?;
        let road = self.get_mut(number)?;
        road.lane = Some(lane);
        road.is_referred.store(false, Ordering::Relaxed);
        self.lent[lane] += 1;
        Some(lane)
    }

    /// No lane has this port any more: the one that had it.
    pub(super) fn take_back(&mut self, number: Number) -> Option<usize> {
        let lane = self.get_mut(number)?.lane.take()?;
        self.lent[lane] -= 1;
        Some(lane)
    }

    fn all(&self) -> impl Iterator<Item = (Number, &Road)> {
        let numbered = (0..).zip(&self.roads);
        numbered.filter_map(|(number, road)| Some((number, road.as_ref()?)))
    }

    pub(super) fn numbers(&self) -> Vec<Number> {
        self.all().map(|(number, _)| number).collect()
    }

    /// The ports that a lane has.
    pub(super) fn of_lane(&self, lane: usize) -> impl Iterator<Item = Number> {
        let ports = self.all().filter(move |(_, road)| road.is_of(lane));
        ports.map(|(number, _)| number)
    }

    /// What was counted since it was collected, together.
    pub(super) fn total(&self) -> Carried {
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        let all = self.all().map(|(_, road)| road.carried(read, Guest::lost));
        all.fold(Carried::default(), Carried::with)
    }

    /// What was counted since the last call.
    pub(super) fn collect(&self) -> Vec<(Number, Carried)> {
        let all = self.all().map(|(number, road)| (number, road.collect()));
        all.filter(|(_, carried)| *carried != Carried::default())
            .collect()
    }
}

impl Road {
    pub(super) fn new(guest: Arc<Guest>, id: u64) -> Self {
        Self {
            guest,
            id,
            lane: None,
            is_referred: AtomicBool::new(false),
            is_plain: false,
            sent: Default::default(),
            given: Default::default(),
        }
    }

    /// Whether this lane has it.
    #[inline]
    pub(super) fn is_of(&self, lane: usize) -> bool {
        self.lane == Some(lane)
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lane.is_some()
    }

    /// It sent these `frames`, which a lane forwarded.
    pub(super) fn sent(&self, frames: u64, bytes: u64) {
        for (sum, more) in self.sent.iter().zip([frames, bytes]) {
            // Relaxed: numbers, which are read when no lane is within a turn.
            sum.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// A lane gave it frames.
    pub(super) fn gave(&self, given: Given) {
        let Given {
            enqueued,
            full,
            gone,
            long,
            bytes,
        } = given;
        for (sum, more) in self.given.iter().zip([enqueued, full, gone, long, bytes]) {
            sum.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// What was counted since it was collected.
    pub(super) fn collect(&self) -> Carried {
        self.carried(|sum| sum.swap(0, Ordering::Relaxed), Guest::count_lost)
    }

    fn carried(&self, read: impl Fn(&AtomicU64) -> u64, lost: impl Fn(&Guest) -> u64) -> Carried {
        let [frames, bytes] = self.sent.each_ref().map(&read);
        let [enqueued, full, gone, long, given] = self.given.each_ref().map(&read);
        Carried {
            frames,
            bytes,
            lost: lost(&self.guest),
            given: Given {
                enqueued,
                full,
                gone,
                long,
                bytes: given,
            },
        }
    }
}
