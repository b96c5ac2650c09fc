//! Threads that forward beside the one of the switch: the *lanes*.
//!
//! A guest by vhost-user whose port is plain is *lent* to a lane, which takes what it sends and gives it to other such
//! guests, by the table that the thread of the switch writes. A lane forwards a frame of which nothing is to be
//! decided: from a station that is known at its port to one that is known at another, as it is. At any other
//! frame it stops: the port is *referred* to the thread of the switch, which goes on at that frame, with all that it
//! does for everybody, and lends the port again a little later. So nothing is decided here that is not decided there,
//! no frame overtakes another of its sender, and each is counted once.
//!
//! ```text
//!   guest ── its lane ───────────────────────────────── guests       known to known
//!     └───── the thread of the switch ── everybody      everything else
//! ```
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | the lanes, as the thread of the switch has them |
//! | `roads.rs` | what it and the lanes share |
//! | `lane.rs` | a lane's thread |
//! | `referrals.rs` | for how long a referred port is not lent |
//!
//! What the lanes share is locked: each reads it for a turn, and only the thread of the switch writes. Whoever writes waits
//! until all lanes are between two turns: as long as it takes to copy 256 KiB, or one super-frame more. So a port that is gone, or a setting that is
//! new, is so for all of them at once. While somebody captures on the switch nothing is lent.

mod lane;
mod referrals;
mod roads;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};

use self::lane::Lane;
use self::referrals::Referrals;
pub(crate) use self::roads::Carried;
use self::roads::{Road, Roads};
use crate::clock::Clock;
use crate::control::Line;
use crate::forward::Number;
use crate::table::View;
use crate::vhost::Guest;

/// The lanes of a switch.
pub(crate) struct Lanes {
    roads: Arc<Roads>,
    lanes: Vec<Lane>,
    /// How many there are to be.
    count: usize,
    longest: usize,
    line: Line,
    /// Nobody has to see what is forwarded.
    is_open: bool,
    referrals: Referrals,
    /// How many guests there have been.
    guests: u64,
}

impl Lanes {
    /// `count` of them, for frames of at most `longest` bytes; their threads start when they are [opened](Self::begin). `line` is how
    /// they speak to the thread of the switch.
    pub(crate) fn new(count: usize, longest: usize, line: Line, view: View, clock: Clock) -> Self {
        Self {
            roads: Arc::new(Roads::new(view, clock)),
            lanes: Vec::new(),
            count,
            longest,
            line,
            is_open: false,
            referrals: Referrals::default(),
            guests: 0,
        }
    }

    /// Whether there are any.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Starts their threads. Without one the switch forwards by itself.
    pub(crate) fn begin(&mut self, switch: &str) {
        for number in 0..self.count {
            let roads = Arc::clone(&self.roads);
            match Lane::start(switch, number, self.longest, roads, self.line.clone()) {
                Ok(lane) => self.lanes.push(lane),
                Err(error) => {
                    log::error!(target: "switch", "{switch}: no more threads that forward: {error}");
                    return;
                }
            }
        }
    }

    /// Whether ports may be lent, as nobody has to see every frame; if not, all are to be taken back. True if it is
    /// another answer than before.
    #[inline]
    pub(crate) fn open(&mut self, is_open: bool) -> bool {
        std::mem::replace(&mut self.is_open, is_open) != is_open
    }

    /// A station that is not heard for `age_s` is forgotten.
    pub(crate) fn set_age(&self, age_s: u32) {
        self.roads.write().age_s = age_s;
    }

    /// A guest is at a port.
    pub(crate) fn add(&mut self, number: Number, guest: Arc<Guest>) {
        self.referrals.forget(number);
        self.guests += 1;
        let road = Road::new(guest, self.guests);
        self.roads.write().add(number, road);
    }

    /// A port is gone: nobody gives it anything any more. What was forwarded there since it was collected.
    pub(crate) fn remove(&mut self, number: Number) -> Carried {
        self.referrals.forget(number);
        let mut world = self.roads.write();
        let lane = world.take_back(number);
        let road = world.remove(number);
        drop(world);
        let Some(road) = road else {
            return Carried::default();
        };
        if let Some(lane) = lane {
            self.lanes[lane].forget(&*road.guest);
        }
        road.collect()
    }

    /// Whether frames go to a port, and from it, without anything being done with them.
    pub(crate) fn set_plain(&self, number: Number, is_plain: bool) {
        let is_other = |road: &Road| road.is_plain != is_plain;
        if self.roads.read().get(number).is_some_and(is_other)
            && let Some(road) = self.roads.write().get_mut(number)
        {
            road.is_plain = is_plain;
        }
    }

    /// All ports that can be lent at some time.
    pub(crate) fn ports(&self) -> Vec<Number> {
        self.roads.read().numbers()
    }

    /// Lends a port, if that may be now: the thread of the switch, which watched it by `epoll`, has nothing to do with it
    /// any more. Whether it did.
    pub(crate) fn lend(&mut self, number: Number, now_us: u64, epoll: &OwnedFd) -> bool {
        if !self.is_open || self.lanes.is_empty() || self.referrals.keeps(number) {
            return false;
        }
        let mut world = self.roads.write();
        let road = world.get(number);
        let Some(road) = road.filter(|road| road.is_plain && !road.is_lent()) else {
            return false;
        };
        let guest = Arc::clone(&road.guest);
        let Some(lane) = world.lend(number, self.lanes.len()) else {
            return false;
        };
        drop(world);
        if let Err(error) = self.lanes[lane].watch(number, &*guest) {
            log::error!(target: "switch", "port {number} is not lent: {error}");
            self.roads.write().take_back(number);
            return false;
        }
        let _ = epoll::delete(epoll, &*guest);
        self.referrals.lent(number, now_us);
        self.lanes[lane].wake();
        true
    }

    /// Takes a port back, whose frames the thread of the switch takes from now on; `None` if it was not lent, or `id` is
    /// of another guest.
    ///
    /// # Errors
    /// The system's: it cannot be watched, and is to be closed.
    pub(crate) fn take_back(
        &mut self,
        number: Number,
        id: Option<u64>,
        epoll: &OwnedFd,
    ) -> Option<io::Result<()>> {
        let mut world = self.roads.write();
        let road = world.get(number)?;
        if id.is_some_and(|id| id != road.id) {
            return None;
        }
        let guest = Arc::clone(&road.guest);
        let lane = world.take_back(number)?;
        drop(world);
        self.lanes[lane].forget(&*guest);
        let data = EventData::new_u64(u64::from(number));
        let watched = epoll::add(epoll, &*guest, data, EventFlags::IN);
        Some(watched.map_err(io::Error::from))
    }

    /// A lane has found something at a port that is not for it: it is not lent for a while, for ever if the lane
    /// failed.
    pub(crate) fn refer(&mut self, number: Number, now_us: u64, has_failed: bool) {
        self.referrals.refer(number, now_us, has_failed);
    }

    /// The ports that were kept for long enough.
    pub(crate) fn rested(&mut self, now_us: u64) -> Vec<Number> {
        self.referrals.rested(now_us)
    }

    /// When there is something to do for them.
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.referrals.next_us()
    }

    /// What they forwarded and was not collected.
    pub(crate) fn total(&self) -> Carried {
        self.roads.write().total()
    }

    /// Whether some ports wait to be lent again.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.referrals.is_empty()
    }

    /// What they forwarded since the last call, by port.
    pub(crate) fn collect(&self) -> Vec<(Number, Carried)> {
        // Nobody is within a turn: what is counted as sent is counted as given.
        self.roads.write().collect()
    }
}
