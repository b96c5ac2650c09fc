//! Memory is committed, and given back, by threads of their own: half a second for each GiB, in
//! which everybody else is served.
//!
//! Tasks are done in turn, so that what is given back is there for who asks next: those of much memory
//! by one thread, those of little by another, which nobody's gigabytes hold up. Every task that
//! makes something comes back, also one that was given up because its connection is gone; what it
//! made is then the control thread's to throw away.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use vnplug_ring::Region;
use vnplug_ring::control::{RingPlace, code};

use super::compile::{Ticket, Waits};
use crate::hub::{Need, OwnMemory, Refusal};
use crate::vm::{Committed, VmPlan};
use vnplug_os::event;
use vnplug_os::memory;
use vnplug_os::memory::{Exported, GoOn};

/// Memory from this size on is these threads' business; less takes half a millisecond at most.
pub(crate) const LARGE: u64 = 1 << 20;
/// From this size on it is that of the one for much.
const MUCH: u64 = 16 << 20;

/// What is to be made.
pub(crate) enum Want {
    /// A VM's pool, and the arenas of groups that are made with it.
    Pool(Box<VmPlan>),
    /// A port's rings, and the arenas of the group that it is the first member of.
    Rings(Need),
    /// What a back-end shares with a program.
    Shared { len: u64, writable: bool },
    /// What a port or a group has in a device of its VM.
    Device { len: u64, writable: bool },
}

impl Want {
    fn bytes(&self) -> u64 {
        match self {
            Self::Pool(_) => u64::MAX,
            Self::Rings(need) => need.total(),
            Self::Shared { len, .. } | Self::Device { len, .. } => *len,
        }
    }
}

/// What was made.
pub(crate) enum Made {
    Pool(Box<VmPlan>, io::Result<Committed>),
    Rings(Need, io::Result<OwnMemory>),
    Shared(u64, io::Result<Exported>),
    Device(u64, io::Result<(Exported, Region)>),
    /// What a back-end shares, by its number: it holds zeros.
    Emptied(u32),
}

/// What is emptied.
#[derive(Clone)]
pub(crate) enum Contents {
    Own(Arc<Exported>),
    /// A place in a VM's pool.
    Pool(Region, RingPlace),
}

impl Contents {
    /// All of it reads as zeros then.
    pub(crate) fn empty(&self) {
        match self {
            Self::Own(made) => made.empty(),
            Self::Pool(region, place) => region.clear(place.offset, place.len),
        }
    }
}

/// The end of a task.
pub(crate) struct Completed {
    /// Token of the connection that asked; it may be gone.
    pub(crate) session: u64,
    pub(crate) made: Made,
}

enum Task {
    Make(u64, Box<Want>, Waits),
    Discard(Box<dyn Send>),
    Empty(u32, Contents),
}

/// The threads, as the control thread sees them.
pub(crate) struct MemoryThread {
    /// For little and for much.
    lanes: [Lane; 2],
    done: Receiver<Completed>,
    closing: Arc<AtomicBool>,
}

struct Lane {
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryThread {
    /// Starts them; `bell`, an eventfd, becomes readable when something is made.
    pub(crate) fn start(bell: Arc<OwnedFd>) -> io::Result<Self> {
        let (outbox, done) = channel();
        let closing = Arc::new(AtomicBool::new(false));
        let lane = |name: &str| {
            let (tasks, inbox) = channel();
            let (theirs, outbox, bell) = (Arc::clone(&closing), outbox.clone(), Arc::clone(&bell));
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || work(&inbox, &outbox, &theirs, &bell))?;
            io::Result::Ok(Lane {
                tasks: Some(tasks),
                thread: Some(thread),
            })
        };
        Ok(Self {
            lanes: [lane("vnplug-memory")?, lane("vnplug-memory-2")?],
            done,
            closing,
        })
    }

    /// Has memory made for a connection; it comes back by [`next_done`](Self::next_done). When the
    /// ticket is dropped before, it is given up.
    ///
    /// # Errors
    /// `INTERNAL` if the thread is gone.
    pub(crate) fn make(&self, session: u64, want: Want) -> Result<Ticket, Refusal> {
        let (ticket, waits) = Ticket::new();
        let bytes = want.bytes();
        if self.send(bytes, Task::Make(session, Box::new(want), waits)) {
            return Ok(ticket);
        }
        let what = "the thread that commits memory is gone: restart the daemon";
        Err(Refusal::new(code::INTERNAL, what))
    }

    /// Drops something that holds so much memory.
    pub(crate) fn discard(&self, what: impl Send + 'static, bytes: u64) {
        // Without the thread it is dropped here.
        self.send(bytes, Task::Discard(Box::new(what)));
    }

    /// Has memory of this number that a back-end shares, of `bytes`, emptied; that comes back, too. False: the
    /// thread is gone.
    pub(crate) fn empty(&self, number: u32, contents: Contents, bytes: u64) -> bool {
        self.send(bytes, Task::Empty(number, contents))
    }

    /// What was made next.
    pub(crate) fn next_done(&self) -> Option<Completed> {
        self.done.try_recv().ok()
    }

    fn send(&self, bytes: u64, task: Task) -> bool {
        let [little, much] = &self.lanes;
        let lane = if bytes < MUCH { little } else { much };
        lane.tasks
            .as_ref()
            .is_some_and(|tasks| tasks.send(task).is_ok())
    }
}

impl Drop for MemoryThread {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `work`.
        self.closing.store(true, Ordering::Release);
        self.lanes.iter_mut().for_each(|lane| lane.tasks = None);
        // What they had begun they give up, and leave no file behind.
        for lane in &mut self.lanes {
            if let Some(thread) = lane.thread.take()
                && thread.join().is_err()
            {
                log::error!(target: "control", "a thread that commits memory panicked");
            }
        }
        for completed in self.done.try_iter() {
            if let Made::Pool(plan, Ok(_)) = completed.made {
                plan.abandon();
            }
        }
    }
}

impl Completed {
    /// Deletes what was made for nobody.
    pub(crate) fn abandon(self, thread: &MemoryThread) {
        if let Made::Pool(plan, Ok(_)) = &self.made {
            plan.abandon();
        }
        let bytes = match &self.made {
            Made::Pool(..) => u64::MAX,
            Made::Rings(need, _) => need.total(),
            Made::Shared(len, _) | Made::Device(len, _) => *len,
            Made::Emptied(_) => 0,
        };
        thread.discard(self.made, bytes);
    }
}

fn work(inbox: &Receiver<Task>, outbox: &Sender<Completed>, closing: &AtomicBool, bell: &OwnedFd) {
    for task in inbox {
        let (session, want, waits) = match task {
            Task::Make(session, want, waits) => (session, *want, waits),
            Task::Discard(what) => {
                drop(what);
                continue;
            }
            Task::Empty(number, contents) => {
                // Nobody learns more of a panic than the log: it is as empty as it can be.
                let _ = guarded(|| {
                    contents.empty();
                    Ok(())
                });
                drop(contents);
                let made = Made::Emptied(number);
                if outbox.send(Completed { session: 0, made }).is_err() {
                    return;
                }
                event::ring(bell);
                continue;
            }
        };
        // Acquire: pairs with the Release in `MemoryThread::drop`.
        let go_on = || waits.is_awaited() && !closing.load(Ordering::Acquire);
        let made = match want {
            Want::Pool(plan) => {
                let pool = guarded(|| plan.commit(&go_on));
                Made::Pool(plan, pool)
            }
            Want::Rings(need) => Made::Rings(need, guarded(|| rings(need, &go_on))),
            Want::Shared { len, writable } => {
                let made = guarded(|| memory::exported(len, writable, &go_on));
                Made::Shared(len, made)
            }
            Want::Device { len, writable } => {
                let made = guarded(|| {
                    let made = memory::exported(len, writable, &go_on)?;
                    let region = made.map()?;
                    Ok((made, region))
                });
                Made::Device(len, made)
            }
        };
        if outbox.send(Completed { session, made }).is_err() {
            return;
        }
        event::ring(bell);
    }
}

/// The memory of a port.
pub(crate) fn rings(need: Need, go_on: GoOn<'_>) -> io::Result<OwnMemory> {
    let arenas = match need.arenas {
        0 => None,
        bytes => Some(memory::readable("vnplug-arena", bytes, go_on)?),
    };
    Ok(OwnMemory {
        rings: memory::rings(need.rings, go_on)?,
        arenas,
    })
}

/// A panic is an error of one task, and not the end of the thread.
fn guarded<T>(make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| {
        log::error!(target: "control", "committing memory panicked");
        Err(io::Error::other(
            "committing it failed; the daemon's log says why",
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::time::{Duration, Instant};
    use vnplug_ring::control::apart::Shape;

    fn thread() -> MemoryThread {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        MemoryThread::start(bell).unwrap()
    }

    fn next(thread: &MemoryThread) -> Completed {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(completed) = thread.next_done() {
                return completed;
            }
            assert!(Instant::now() < deadline, "nothing comes back");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_awaited_is_made_and_what_is_not_is_given_up_in_turn() {
        let thread = thread();
        let need = Need {
            rings: Shape {
                rings: 1,
                capacity: 8192,
                transmit: 0,
            },
            arenas: 4096,
        };
        drop(thread.make(1, Want::Rings(need)).ok().unwrap());
        let _ticket = thread.make(2, Want::Rings(need)).ok().unwrap();
        let first = next(&thread);
        assert_eq!(first.session, 1);
        // It may have been made before the ticket was dropped.
        if let Made::Rings(_, Err(error)) = first.made {
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        }
        let second = next(&thread);
        assert_eq!(second.session, 2);
        let Made::Rings(made, Ok(memory)) = second.made else {
            panic!("not made");
        };
        assert_eq!((made, memory.rings.shape), (need, need.rings));
        assert_eq!(memory.arenas.as_ref().map(|it| it.len), Some(4096));
        thread.discard(memory, need.total());
    }

    #[test]
    fn a_panic_is_one_tasks_error() {
        let error = guarded::<()>(|| panic!("on purpose")).unwrap_err();
        assert!(error.to_string().contains("the daemon's log"), "{error}");
    }
}
