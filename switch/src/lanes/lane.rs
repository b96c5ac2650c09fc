//! A lane's thread: turns of the guests that it has.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use vnplug_frame::offload::is_for_linux;
use vnplug_frame::recycle;
use vnplug_os::event;

use super::roads::{Road, Roads, World};
use crate::batch::{Batch, Entered};
use crate::control::{Change, Line};
use crate::exits::Wholes;
use crate::forward::{GROUP, HEADER, Number};
use crate::porter::{Shift, wait};
use crate::queue::{BATCH, EACH, ENOUGH};
use crate::table::{Key, Seen};
use crate::vhost::{Guest, Passage};

/// A lane, as the thread of the switch has it.
pub(super) struct Lane {
    /// Watches its guests.
    epoll: Arc<OwnedFd>,
    waker: Arc<OwnedFd>,
    _shift: Shift,
}

impl Lane {
    /// Starts the thread of lane `number`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(
        switch: &str,
        number: usize,
        longest: usize,
        roads: Arc<Roads>,
        line: Line,
    ) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        let mut waker = None;
        let name = switch.to_owned();
        let shift = Shift::start("vnplug-lane", |woken| {
            epoll::add(&*epoll, &*woken, EventData::new_u64(WAKER), EventFlags::IN)?;
            waker = Some(Arc::clone(&woken));
            let mut driver = Driver {
                name,
                number,
                roads,
                line,
                epoll: Arc::clone(&epoll),
                waker: woken,
                ready: VecDeque::new(),
                is_ready: Vec::new(),
                found: Vec::new(),
                batch: Batch::new(BATCH, longest).until(ENOUGH),
                entered: Vec::new(),
                wholes: Wholes::default(),
            };
            driver.batch.leaves = true;
            Ok(move |stop: &AtomicBool| driver.run(stop))
        })?;
        let waker = waker.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            epoll,
            waker,
            _shift: shift,
        })
    }

    /// It has this guest from now on, when it is [woken](Self::wake).
    ///
    /// # Errors
    /// The system's.
    pub(super) fn watch(&self, number: Number, guest: impl AsFd) -> io::Result<()> {
        let data = EventData::new_u64(u64::from(number));
        Ok(epoll::add(&*self.epoll, guest, data, EventFlags::IN)?)
    }

    /// It has this guest no longer.
    pub(super) fn forget(&self, guest: impl AsFd) {
        let _ = epoll::delete(&*self.epoll, guest);
    }

    /// It looks which guests it has.
    pub(super) fn wake(&self) {
        event::ring(&self.waker);
    }
}

/// The thread's own.
struct Driver {
    /// The switch's.
    name: String,
    number: usize,
    roads: Arc<Roads>,
    line: Line,
    epoll: Arc<OwnedFd>,
    waker: Arc<OwnedFd>,
    /// Ports that may have frames; each is there once.
    ready: VecDeque<Number>,
    is_ready: Vec<bool>,
    /// Empty between two looks.
    found: Vec<Number>,
    batch: Batch,
    /// Empty between two turns.
    entered: Vec<Entered<'static>>,
    wholes: Wholes,
}

/// Where the last frame went: those after it mostly go there, too.
#[derive(Default)]
struct Last {
    addresses: [u8; 12],
    to: Number,
}

impl Driver {
    fn run(&mut self, stop: &AtomicBool) {
        // NB: once. A count that all lanes change at each turn would be one cache line for all.
        let roads = Arc::clone(&self.roads);
        while !stop.load(Ordering::Acquire) {
            let limit = match self.ready.is_empty() {
                true => LONG,
                false => Duration::ZERO,
            };
            self.look(limit);
            for _ in 0..UNLOOKED {
                for _ in 0..self.ready.len() {
                    if let Some(number) = self.ready.pop_front() {
                        self.is_ready[usize::from(number)] = false;
                        self.visit(&roads, number);
                    }
                }
                if self.ready.is_empty() {
                    break;
                }
            }
        }
    }

    /// Finds out which guests have frames.
    fn look(&mut self, limit: Duration) {
        let mut is_woken = false;
        let mut found = std::mem::take(&mut self.found);
        wait(&self.epoll, limit, |number| match number {
            WAKER => is_woken = true,
            number => found.push(number as Number),
        });
        if is_woken {
            event::clear(&self.waker);
            // What they sent while nobody watched them.
            found.extend(self.roads.read().of_lane(self.number));
        }
        for number in found.drain(..) {
            self.make_ready(number);
        }
        self.found = found;
    }

    fn make_ready(&mut self, number: Number) {
        let at = usize::from(number);
        if self.is_ready.len() <= at {
            self.is_ready.resize(at + 1, false);
        }
        if !std::mem::replace(&mut self.is_ready[at], true) {
            self.ready.push_back(number);
        }
    }

    /// Gives a port its turn, if it is still lent.
    fn visit(&mut self, roads: &Roads, number: Number) {
        let world = roads.read();
        let road = world.get(number);
        // Relaxed: set and read by this thread while it has the port.
        let is_here = |it: &&Road| it.is_of(self.number) && !it.is_referred.load(Ordering::Relaxed);
        let Some(road) = road.filter(is_here) else {
            return;
        };
        // R10: what panics costs its own port.
        let passed = catch_unwind(AssertUnwindSafe(|| self.turn(&world, number, road)));
        let refer = |has_failed| {
            road.is_referred.store(true, Ordering::Relaxed);
            self.line.send(Change::Refer {
                port: number,
                guest: road.id,
                has_failed,
            });
        };
        match passed {
            Ok(Passage::More) => self.make_ready(number),
            Ok(Passage::Nothing) => {}
            Ok(Passage::Refer) => refer(false),
            Err(_) => {
                log::error!(
                    target: "switch",
                    "{}: a thread that forwards panicked at what port {number} sent; the switch goes on with it",
                    self.name
                );
                self.wholes.clear();
                self.batch.clear();
                road.guest.undo();
                refer(true);
            }
        }
    }

    fn turn(&mut self, world: &World, number: Number, road: &Road) -> Passage {
        let now_s = world.clock.now_s();
        let (batch, entered, wholes) = (&mut self.batch, &mut self.entered, &mut self.wholes);
        batch.clear();
        batch.sends(number);
        let passed = road.guest.pass(batch, EACH, |batch| {
            forward(world, (number, road), batch, now_s, (entered, wholes))
        });
        // What is wrong with it the thread of the switch finds, too, and says.
        passed.unwrap_or(Passage::Refer)
    }
}

/// Forwards frames of a port, up to the first that is not for a lane. How many.
fn forward(
    world: &World,
    (from, road): (Number, &Road),
    batch: &Batch,
    now_s: u32,
    (entered, wholes): (&mut Vec<Entered<'static>>, &mut Wholes),
) -> usize {
    let mut last = Last::default();
    let (mut done, mut bytes) = (0, 0);
    let mut frames = recycle(std::mem::take(entered));
    for it in batch.iter() {
        let Some(to) = way(world, from, &it, now_s, &mut last) else {
            break;
        };
        wholes.add(to, done as u32);
        bytes += it.len() as u64;
        frames.push(it);
        done += 1;
    }
    wholes.give(&frames, |to, due| {
        // It is there: `way` has asked.
        if let Some(road) = world.get(to) {
            road.gave(road.guest.give(due));
        }
    });
    road.sent(done as u64, bytes);
    *entered = recycle(frames);
    done
}

/// Where a frame goes, if that is for a lane to say.
#[inline]
fn way(
    world: &World,
    from: Number,
    it: &Entered<'_>,
    now_s: u32,
    last: &mut Last,
) -> Option<Number> {
    let addresses: &[u8; 12] = it.bytes.first_chunk()?;
    if it.fault.is_some() || it.bytes.len() < HEADER {
        return None;
    }
    let to = match *addresses == last.addresses && last.to != 0 {
        true => last.to,
        false => find(world, from, addresses, now_s)?,
    };
    let guest: &Guest = &world.get(to)?.guest;
    let takes = it
        .offload
        .is_none_or(|offload| guest.takes(offload) && is_for_linux(it.len(), offload));
    takes.then(|| {
        *last = Last {
            addresses: *addresses,
            to,
        };
        to
    })
}

/// The port of a frame's receiver, if both stations are where they seem to be.
fn find(world: &World, from: Number, addresses: &[u8; 12], now_s: u32) -> Option<Number> {
    let &[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5] = addresses;
    if (d0 | s0) & GROUP != 0 {
        return None;
    }
    let source = world.view.find(Key::new([s0, s1, s2, s3, s4, s5], 0))?;
    if source.port != from {
        return None;
    }
    let Seen { port, .. } = world
        .view
        .find(Key::new([d0, d1, d2, d3, d4, d5], 0))
        .filter(|it| !it.is_old(now_s, world.age_s))?;
    let is_plain = world.get(port)?.is_plain && port != from;
    (is_plain && world.view.hear(&source, now_s)).then_some(port)
}

/// The event of the lane's own waker; no port has this number.
const WAKER: u64 = u64::MAX;
/// Turns of all that have frames without a look at others.
const UNLOOKED: u32 = 4;
/// Nobody waits for ever.
const LONG: Duration = Duration::from_secs(3600);
