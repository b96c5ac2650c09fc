//! Memory that a back-end shares with a program.
//!
//! The daemon makes all of it: nobody can shorten it, it is counted as the back-end's, and the daemon can
//! empty it while somebody maps it. It is the back-end's until it asks for it back; the program is told, and
//! says when it has let go. If it does not in time, the memory is emptied under it: what it maps are zeros.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_os::event;
use vnplug_os::memory::Exported;
use vnplug_ring::control::RingPlace;
use vnplug_ring::control::backend::Mapped;

use super::RegionWish;
use super::channel::End;
use crate::control::limit::SharedBucket;
use crate::control::waiting::Whom;

/// How long a program is waited for whose back-end is gone.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// The longest that a back-end may have a program waited for.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// A back-end that waits for a device with its memory.
pub(super) struct Plugging {
    pub(super) whom: Whom,
    pub(super) end: End,
    pub(super) wish: RegionWish,
    /// Until the back-end is answered: then the region has it.
    pub(super) made: Option<Exported>,
    /// The number in the first page.
    pub(super) memory: u64,
    /// The back-end was answered: the region's number.
    pub(super) told: Option<Mapped>,
}

/// All shared memory.
pub(super) struct Regions {
    all: BTreeMap<u32, Shared>,
    last: u32,
}

/// One piece.
pub(super) struct Shared {
    pub(super) channel: u32,
    /// The back-end's number.
    pub(super) backend: u32,
    pub(super) owner: End,
    pub(super) program: End,
    pub(super) len: u64,
    pub(super) bill: Bill,
    pub(super) home: Home,
    pub(super) state: State,
    /// A thread empties it.
    pub(super) is_busy: bool,
    /// It is to be forgotten when that thread is done; whether its program let it go.
    pub(super) gone: Option<bool>,
}

/// Who pays for it. Its back-end did when it was made, and pays for what it takes back, or ends, and shares again.
/// A program may connect, and let go, again and again, too, and no other is to wait for that.
pub(super) struct Bill {
    pub(super) back_end: Option<SharedBucket>,
    pub(super) program: Option<SharedBucket>,
}

impl Bill {
    /// The program lets go by itself, or is gone: its owner pays for these `bytes`, and not the back-end.
    pub(super) fn is_the_programs(&self, bytes: u64) {
        if let (Some(back_end), Some(program)) = (&self.back_end, &self.program) {
            back_end.borrow_mut().give_back_bytes(bytes);
            program.borrow_mut().charge_bytes(bytes);
        }
    }
}

/// Where it lies.
pub(super) enum Home {
    /// In memory of its own, which a process maps.
    Own(Arc<Exported>),
    /// In a VM's pool.
    Pool(String, RingPlace),
    /// In a device that was plugged into a VM for it.
    Device {
        number: u32,
        /// The number in its first page.
        memory: u64,
        made: Arc<Exported>,
    },
}

/// Whose it is.
pub(super) enum State {
    /// Nobody's yet: it is emptied first, of a pool. Who waits for that.
    Coming(Whom, RegionWish),
    /// The back-end's and the program's.
    Used,
    /// The program is to let go until then; who waits for that.
    Asked(Instant, Option<Whom>),
    /// It was emptied, and the program still maps it.
    Emptied,
}

impl Regions {
    /// None yet. Numbers begin anywhere: those of an earlier daemon are still in use in programs.
    pub(super) fn new() -> Self {
        Self {
            all: BTreeMap::new(),
            last: event::random() as u32,
        }
    }

    /// Takes a piece up, and gives it a number.
    pub(super) fn add(&mut self, shared: Shared) -> u32 {
        loop {
            self.last = self.last.checked_add(1).unwrap_or(1);
            if !self.all.contains_key(&self.last) {
                break;
            }
        }
        self.all.insert(self.last, shared);
        self.last
    }

    /// One piece.
    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Shared> {
        self.all.get_mut(&number)
    }

    /// Forgets a piece that its program does not map any more.
    pub(super) fn remove(&mut self, number: u32) -> Option<Shared> {
        self.all.remove(&number)
    }

    /// Pieces of one channel.
    pub(super) fn of_channel(&self, channel: u32) -> usize {
        let own = self.all.values().filter(|it| it.channel == channel);
        own.count()
    }

    /// Pieces that a back-end shares, and their bytes.
    pub(super) fn shared_by(&self, backend: u32) -> (usize, u64) {
        let own = self.all.values().filter(|it| it.backend == backend);
        own.fold((0, 0), |(count, sum), it| (count + 1, sum + it.len))
    }

    /// Bytes that a back-end shares with these programs.
    pub(super) fn shared_with(&self, backend: u32, whose: impl Fn(End) -> bool) -> u64 {
        let own = self.all.values();
        let own = own.filter(|it| it.backend == backend && whose(it.program));
        own.map(|it| it.len).sum()
    }

    /// Pieces that these programs had, who are gone.
    pub(super) fn of_program(&self, gone: impl Fn(End) -> bool) -> Vec<u32> {
        let own = self.all.iter().filter(|(_, it)| gone(it.program));
        own.map(|(number, _)| *number).collect()
    }

    /// These programs are gone: their owners pay for what they were not asked to let go.
    pub(super) fn programs_pay(&self, gone: impl Fn(End) -> bool) {
        let own = self.all.values().filter(|it| gone(it.program));
        for shared in own.filter(|it| matches!(it.state, State::Used)) {
            shared.bill.is_the_programs(shared.len);
        }
    }

    /// Pieces of a VM's pool.
    pub(super) fn in_pool_of(&self, vm: &str) -> Vec<u32> {
        let is_own = |it: &Shared| matches!(&it.home, Home::Pool(name, _) if name == vm);
        let own = self.all.iter().filter(|(_, it)| is_own(it));
        own.map(|(number, _)| *number).collect()
    }

    /// The channel of these is over, and not by their program: it has some time to let go.
    pub(super) fn channel_is_over(&mut self, channel: u32, now: Instant) {
        for shared in self.all.values_mut().filter(|it| it.channel == channel) {
            if matches!(shared.state, State::Used) {
                shared.state = State::Asked(now + AFTERWARDS, None);
            }
        }
    }

    /// Pieces whose programs have not let go in time.
    pub(super) fn overdue(&self, now: Instant) -> Vec<u32> {
        let late = self.all.iter().filter(|(_, it)| match it.state {
            State::Asked(until, _) => !it.is_busy && until <= now,
            _ => false,
        });
        late.map(|(number, _)| *number).collect()
    }

    /// How soon one is late.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        let until = self.all.values().filter_map(|it| match it.state {
            State::Asked(until, _) if !it.is_busy => Some(until.saturating_duration_since(now)),
            _ => None,
        });
        until.min()
    }
}
