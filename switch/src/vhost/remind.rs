//! Calls a guest again that has not read its call.
//!
//! User-mode Linux takes a call as a signal (`SIGIO`) from its end of a pair of sockets. Its 6.1 loses one that comes while it goes
//! to sleep (`os_idle_sleep`): interrupts are off by then, so that the signal is only noted, and nobody looks at the note before
//! another signal ends the sleep. The frame waits for the guest's next tick, up to 10 ms. Any later call wakes it.
//!
//! So a thread looks at calls made by a socket half a millisecond later, and makes those again that the guest has not read
//! (`SIOCOUTQ`), each three times at most. A call that is made anew meanwhile is as good as that, and its time begins then. Eventfds
//! need none of this: who has one polls it.
//!
//! - Who calls reads the clock, stores one word and loads another. Only if the thread sleeps, as nothing was unread when it looked
//!   last, is it woken by a system call: once for each call, where calls are further apart than half a millisecond.
//! - While nothing is unread the thread sleeps, and nothing ticks.
//! - Those of front-ends that are trusted and of all others have a table each, so that no stranger takes a place or a turn of theirs.
//!   Tables are bounded, and one stranger has a part of its own. Whose call finds no place is called once, as without all this.
//! - A look asks for [`AT_ONCE`] calls of each table at most, and begins behind the last one of the look before. Between two looks
//!   the thread sleeps for [`PAUSE_US`] at least.
//! - Each call of a front-end that never reads costs four looks at most, and three more calls of eight bytes. None of them waits: a
//!   stranger's own thread makes those for that stranger ([`Caller`]), and if that hangs they are none.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use vnplug_os::peer_log;

use super::call::{Call, Caller};

/// Calls again what is not read. Its thread ends with it.
#[derive(Debug, Default)]
pub(super) struct Reminder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begin: Instant,
    /// Nothing was unread when the thread looked last. It looks once more and sleeps, and who calls wakes it.
    is_asleep: AtomicBool,
    is_over: AtomicBool,
    thread: OnceLock<Thread>,
    tables: Mutex<Tables>,
    /// Calls that were made again.
    made: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Tables {
    trusted: Table,
    strangers: Table,
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
    /// Which one is looked at first.
    turn: usize,
}

#[derive(Debug)]
struct Entry {
    note: Arc<Note>,
    call: Weak<Call>,
    caller: Option<Caller>,
}

/// A place in the table, which is free when this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    note: Arc<Note>,
    shared: Arc<Shared>,
}

/// When a call was made that may be unread, in microseconds, and in the two low bits how often it was made again. 0: there is none.
///
/// Who calls stores, and the thread changes only what it has seen (compare and exchange), so that no call is taken for an earlier one.
#[derive(Debug, Default)]
struct Note(AtomicU64);

/// An entry whose call is late, as its note was then.
struct Late {
    note: Arc<Note>,
    call: Arc<Call>,
    noted: u64,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            begin: Instant::now(),
            is_asleep: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            thread: OnceLock::new(),
            tables: Mutex::default(),
            made: Arc::default(),
        }
    }
}

impl Reminder {
    /// One that counts what it makes again there.
    pub(super) fn counting(made: Arc<AtomicU64>) -> Self {
        Self(Arc::new(Shared {
            made,
            ..Shared::default()
        }))
    }

    /// A place for a call that this caller makes; `None` if there is no room, or no thread.
    pub(super) fn mark(&self, call: Weak<Call>, caller: Option<&Caller>) -> Option<Mark> {
        self.start()?;
        self.0.mark(call, caller)
    }

    /// Starts the thread, if it does not run.
    fn start(&self) -> Option<()> {
        // NB: the lock has ended when the line is written.
        let started = self.start_once();
        if let Err(error) = &started {
            peer_log!(
                log::Level::Error,
                "switch",
                "no thread to call guests again with: {error}"
            );
        }
        started.ok()
    }

    fn start_once(&self) -> std::io::Result<()> {
        let _one = self.0.tables();
        if self.0.thread.get().is_some() {
            return Ok(());
        }
        let shared = Arc::clone(&self.0);
        let spawned = std::thread::Builder::new()
            .name("vnplug-remind".into())
            .stack_size(STACK)
            .spawn(move || shared.run())?;
        // It cannot be set: the lock is held.
        let _ = self.0.thread.set(spawned.thread().clone());
        Ok(())
    }
}

impl Drop for Reminder {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.0.thread.get() {
            thread.unpark();
        }
    }
}

impl Shared {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(self: &Arc<Self>, call: Weak<Call>, caller: Option<&Caller>) -> Option<Mark> {
        let mut tables = self.tables();
        let entries = &mut tables.of(caller).entries;
        if let Some(caller) = caller {
            let own = entries.iter().filter_map(|it| it.caller.as_ref());
            if own.filter(|it| it.is(caller)).count() >= OF_ONE {
                return None;
            }
        }
        if entries.len() >= MOST {
            return None;
        }
        let note = Arc::<Note>::default();
        entries.push(Entry {
            note: Arc::clone(&note),
            call,
            caller: caller.cloned(),
        });
        let shared = Arc::clone(self);
        Some(Mark { note, shared })
    }

    /// Microseconds, never 0.
    fn now_us(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64 + 1
    }

    #[cold]
    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn run(&self) {
        let mut late = Vec::with_capacity(2 * AT_ONCE);
        while !self.is_over.load(Ordering::SeqCst) {
            match self.look(self.now_us(), &mut late) {
                Some(within) => {
                    self.is_asleep.store(false, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_micros(within.max(PAUSE_US)));
                }
                // SeqCst: who calls stores its note and then loads this; here it is the other way round, so that one of both sees
                // the other. Hence the look between this and the sleep.
                None if self.is_asleep.swap(true, Ordering::SeqCst) => std::thread::park(),
                None => {}
            }
        }
    }

    /// Makes calls again that are unread for long enough by now; in how many microseconds there is more to do, if there is anything.
    fn look(&self, now_us: u64, late: &mut Vec<Late>) -> Option<u64> {
        let mut within = self.tables().find(now_us, late);
        // NB: without the lock. The last owner of a call frees its place.
        for Late { note, call, noted } in late.drain(..) {
            let times = noted & TIMES;
            let mut next = 0;
            if times < TIMES && !call.is_read() {
                call.make_again();
                // NB: also if it is to be made anyhow, as its caller hangs: that could last.
                next = now_us << BITS | (times + 1);
                within = Some(sooner(within, AFTER_US));
            }
            // SeqCst: see `run`. It fails if the guest was called anew: that is looked at when its time has come.
            let seq_cst = Ordering::SeqCst;
            if note
                .0
                .compare_exchange(noted, next, seq_cst, seq_cst)
                .is_err()
            {
                within = Some(sooner(within, AFTER_US));
            }
        }
        within
    }
}

impl Tables {
    fn of(&mut self, caller: Option<&Caller>) -> &mut Table {
        match caller {
            None => &mut self.trusted,
            Some(_) => &mut self.strangers,
        }
    }

    /// As [`Table::find`].
    fn find(&mut self, now_us: u64, late: &mut Vec<Late>) -> Option<u64> {
        let tables = [&mut self.trusted, &mut self.strangers];
        let within = tables.map(|table| table.find(now_us, late));
        within.into_iter().flatten().min()
    }
}

impl Table {
    /// Finds some that were made long enough ago; in how many microseconds the next one is, or the others are looked at.
    fn find(&mut self, now_us: u64, late: &mut Vec<Late>) -> Option<u64> {
        let mut within: Option<u64> = None;
        let mut left = AT_ONCE;
        let len = self.entries.len();
        let begin = self.turn;
        for at in (begin..begin + len).map(|at| at % len) {
            let entry = &self.entries[at];
            // SeqCst: see `Shared::run`.
            let noted = entry.note.0.load(Ordering::SeqCst);
            if noted == 0 {
                continue;
            }
            let due = (noted >> BITS) + AFTER_US;
            if due > now_us {
                within = Some(sooner(within, due - now_us));
            } else if left == 0 {
                within = Some(sooner(within, PAUSE_US));
            } else if let Some(call) = entry.call.upgrade() {
                let note = Arc::clone(&entry.note);
                late.push(Late { note, call, noted });
                left -= 1;
                self.turn = (at + 1) % len;
            }
        }
        within
    }
}

impl Mark {
    /// The call is made now.
    #[inline]
    pub(super) fn note(&self) {
        let shared = &self.shared;
        // SeqCst: see `Shared::run`.
        self.note.0.store(shared.now_us() << BITS, Ordering::SeqCst);
        if shared.is_asleep.load(Ordering::SeqCst) {
            shared.wake();
        }
    }

    /// The call was made again now.
    pub(super) fn count(&self) {
        // Relaxed: a number.
        self.shared.made.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let mut tables = self.shared.tables();
        let Tables { trusted, strangers } = &mut *tables;
        for table in [trusted, strangers] {
            let entries = &mut table.entries;
            entries.retain(|entry| !Arc::ptr_eq(&entry.note, &self.note));
        }
    }
}

fn sooner(within: Option<u64>, us: u64) -> u64 {
    within.map_or(us, |it| it.min(us))
}

/// How long a guest may take to read a call.
const AFTER_US: u64 = 500;
/// Bits of a note that count, and how often a call is made again at most.
const BITS: u32 = 2;
const TIMES: u64 = 3;
/// Rings of one entrance in a table, and of them of one stranger.
const MOST: usize = 512;
const OF_ONE: usize = 128;
/// Those of a table that are asked for in one look.
const AT_ONCE: usize = 64;
/// How long the thread sleeps between two looks at least.
const PAUSE_US: u64 = AFTER_US / 2;
const STACK: usize = 64 << 10;

#[cfg(test)]
mod tests;
