//! An uplink: a port whose far end is an interface of the host.
//!
//! There is no second way to receive from an interface: an uplink is the queues of a source of the
//! path ([`Queue`]) and their way out ([`Transmitter`]). So super-frames stay whole both ways where the
//! kernel tells of them and takes them, and what an interface does (down, up, deleted, made again) is the
//! source's business.
//!
//! - **In.** Frames are forwarded from where the kernel put them, without a copy of ours
//!   ([`Uplinks::receive`]); one call serves one queue, and the switch calls them in turn.
//! - **Out.** [`Cable`] is the port's link. Nothing waits there: what the interface does not take is
//!   dropped and counted.
//! - **Waiting.** What the queues wait for is gathered in one epoll, whose descriptors are asked once
//!   for each sleep: queues wait for different ones at different times.
//!
//! An interface that is not there is asked for now and then, and the port is there all the while.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;
use vnplug_frame::{Frame, offload};
use vnplug_os::datagrams::Rest;
use vnplug_path::source::af_packet::tells_of_super_frames;
use vnplug_path::source::{
    Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter,
};
use vnplug_ring::offload::{Offload, gso};

use crate::batch::{Batch, Entered, MAX_SUPER};
use crate::exits::{Due, Out};
use crate::forward::{Fault, Number};
use crate::link::{Given, Link};
use crate::roster::Holder;

/// Opens the queues of an interface; `None`: there is no such interface now.
pub type OpenUplink = Box<dyn FnMut() -> Result<Option<Vec<Box<dyn Queue>>>, SourceError> + Send>;

/// An interface of the host that is to be a port.
pub struct Uplink {
    /// Its name.
    pub interface: String,
    /// As the operator wrote it: what it is known by.
    pub text: String,
    /// How frames come and go, for people.
    pub how: &'static str,
    /// The kernel forwards what it can of it: its queues have the twin's [gate](crate::Twin::gate).
    pub is_twin: bool,
    /// Opens it, and again when it was not there.
    pub open: OpenUplink,
}

impl Uplink {
    /// Who has its port.
    pub(crate) fn holder(&self) -> Holder {
        Holder {
            owner: UPLINK.into(),
            is_trusted: true,
            way: UPLINK,
            description: format!("interface {} ({})", self.interface, self.how),
        }
    }
}

/// The uplinks of a switch.
pub(crate) struct Uplinks {
    switch: String,
    all: Vec<Arc<Mutex<Far>>>,
    /// Has what their queues wait for; each descriptor tells once, and is asked again.
    epoll: Arc<OwnedFd>,
    /// Whose turn it is: queues of all uplinks, one after the other's.
    at: (usize, usize),
    /// Frames that entered.
    entered: u64,
    /// What those counted that are no more.
    past: QueueCounters,
    counters: QueueCounters,
    up: u64,
}

/// One that is no port any more. Its sockets are closed when this is dropped, which takes a moment.
pub(crate) struct Unplugged {
    _far: Arc<Mutex<Far>>,
}

/// The far end of one.
struct Far {
    uplink: Uplink,
    port: Number,
    queues: Vec<Box<dyn Queue>>,
    /// What queues counted that are closed.
    past: QueueCounters,
    /// When to look for the interface again, if there are no queues.
    again: Instant,
    takes: bool,
    takes_udp: bool,
    /// A frame that is in two parts, joined.
    joined: Vec<u8>,
    /// Bytes of each frame that is on its way to the kernel.
    lens: Vec<usize>,
}

/// The link of the port.
struct Cable {
    far: Arc<Mutex<Far>>,
    epoll: Arc<OwnedFd>,
}

impl Uplinks {
    /// Without uplinks.
    ///
    /// # Errors
    /// The system's, when descriptors are short.
    pub(crate) fn new(switch: &str) -> std::io::Result<Self> {
        Ok(Self {
            switch: switch.to_owned(),
            all: Vec::new(),
            epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?),
            at: (0, 0),
            entered: 0,
            past: QueueCounters::default(),
            counters: QueueCounters::default(),
            up: 0,
        })
    }

    /// Adds one, as this port; its link.
    ///
    /// # Errors
    /// What is wrong, unless the interface is only not there.
    pub(crate) fn add(
        &mut self,
        mut uplink: Uplink,
        port: Number,
    ) -> Result<Box<dyn Link>, SourceError> {
        let found = (uplink.open)()?;
        Ok(self.plug(uplink, found, port))
    }

    /// Adds one whose queues were opened, if its interface is there.
    pub(crate) fn plug(
        &mut self,
        uplink: Uplink,
        found: Option<Vec<Box<dyn Queue>>>,
        port: Number,
    ) -> Box<dyn Link> {
        if found.is_none() {
            log::warn!(
                target: "switch",
                "{}: uplink {}: there is no such interface yet; port {port} waits for it",
                self.switch, uplink.interface
            );
        }
        let mut far = Far {
            uplink,
            port,
            queues: Vec::new(),
            past: QueueCounters::default(),
            again: Instant::now() + PAUSE,
            takes: false,
            takes_udp: tells_of_super_frames(),
            joined: Vec::new(),
            lens: Vec::new(),
        };
        far.set(found.unwrap_or_default());
        let far = Arc::new(Mutex::new(far));
        self.all.push(Arc::clone(&far));
        let epoll = Arc::clone(&self.epoll);
        Box::new(Cable { far, epoll })
    }

    /// Takes the one away that is this port.
    pub(crate) fn unplug(&mut self, port: Number) -> Option<Unplugged> {
        let at = self.all.iter().position(|far| locked(far).port == port)?;
        let far = self.all.remove(at);
        self.at = (0, 0);
        let mut gone = locked(&far);
        self.past.add(&gone.past);
        for queue in &mut gone.queues {
            self.past.add(&last(queue.counters()));
        }
        drop(gone);
        Some(Unplugged { _far: far })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Receives from the queue whose turn it is; `None` when all had theirs, and it begins again.
    ///
    /// `sink` gets the port's number and the frames, which lie where the kernel put them.
    pub(crate) fn receive(
        &mut self,
        sink: &mut dyn FnMut(Number, &[Frame<'_>]),
    ) -> Option<Received> {
        let (uplink, queue) = self.at;
        let Some(far) = self.all.get(uplink) else {
            self.at = (0, 0);
            return None;
        };
        // Nobody else has it: a frame is never due to the port that it came from.
        let mut far = locked(far);
        let port = far.port;
        let Some(next) = far.queues.get_mut(queue) else {
            self.at = (uplink + 1, 0);
            return Some(Received::Nothing);
        };
        self.at.1 += 1;
        let entered = &mut self.entered;
        let received = next.receive(&mut |frames| {
            *entered += frames.len() as u64;
            sink(port, frames);
        });
        match received {
            Ok(Received::End) => Some(Received::Nothing),
            Ok(received) => Some(received),
            Err(error) => {
                let name = &far.uplink.interface;
                log::error!(target: "switch", "{}: uplink {name}: {error}", self.switch);
                far.close();
                Some(Received::Nothing)
            }
        }
    }

    /// Tells that a queue may have frames.
    pub(crate) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Waits for what may give a queue frames; how long, if there is a limit.
    pub(crate) fn arm(&mut self) -> Option<Duration> {
        let mut within: Option<Duration> = None;
        for (at, far) in (0..).zip(&self.all) {
            let mut far = locked(far);
            if far.queues.is_empty() {
                let left = far.again.saturating_duration_since(Instant::now());
                within = [within, Some(left.max(MIN_PAUSE))]
                    .into_iter()
                    .flatten()
                    .min();
            }
            for (nth, queue) in (0..).zip(&mut far.queues) {
                let wake = queue.arm();
                within = [within, wake.within].into_iter().flatten().min();
                for (which, fd) in (0..).zip(wake.fds) {
                    let Some(fd) = fd else {
                        continue;
                    };
                    if watch(&self.epoll, fd, token(at, nth, which)).is_err() {
                        // Without memory for it: looks again soon.
                        within = [within, Some(MIN_PAUSE)].into_iter().flatten().min();
                    }
                }
            }
        }
        within
    }

    /// The wait is over: each queue is told what was seen of what it waits for, which is nothing unless one [has](Self::epoll)
    /// something.
    pub(crate) fn woke(&mut self, have: bool) {
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; EVENTS];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // The only error that is possible is a signal.
        let found = match have {
            true => epoll::wait(&self.epoll, &mut events, Some(&now)).unwrap_or(0),
            false => 0,
        };
        for (at, far) in (0..).zip(&self.all) {
            let mut far = locked(far);
            if far.queues.is_empty() {
                far.look_again(&self.switch);
            }
            for (nth, queue) in (0..).zip(&mut far.queues) {
                let mut seen: Seen = [PollFlags::empty(); 2];
                for event in &events[..found] {
                    for (which, seen) in (0..).zip(&mut seen) {
                        if event.data.u64() == token(at, nth, which) {
                            *seen = as_poll(event.flags);
                        }
                    }
                }
                queue.woke(seen);
            }
        }
    }

    /// Counts what the kernel counted; [`named`](Self::named) has it.
    pub(crate) fn count(&mut self) {
        self.counters = self.past;
        self.up = 0;
        for far in &self.all {
            let mut far = locked(far);
            self.counters.add(&far.past);
            let mut is_up = !far.queues.is_empty();
            for queue in &mut far.queues {
                self.counters.add(&queue.counters());
                is_up &= queue.state() == "up";
            }
            self.up += u64::from(is_up);
        }
    }

    /// The counters with their public names; none if there never was an uplink.
    pub(crate) fn named(&self) -> Vec<(String, u64)> {
        if self.is_empty() && self.past == QueueCounters::default() {
            return Vec::new();
        }
        let QueueCounters {
            seen,
            dropped,
            waiting,
            rebinds,
            ..
        } = self.counters;
        [
            ("uplinks_up", self.up),
            ("uplink_seen", seen),
            ("uplink_entered", self.entered),
            ("uplink_kernel_dropped", dropped),
            ("uplink_in_kernel", waiting),
            ("uplink_rebinds", rebinds),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

impl Far {
    fn set(&mut self, mut queues: Vec<Box<dyn Queue>>) {
        let first = queues.first_mut().and_then(|queue| queue.transmitter());
        self.takes = first.is_some_and(|out| out.takes_offload());
        self.queues = queues;
    }

    #[cold]
    fn look_again(&mut self, switch: &str) {
        if Instant::now() < self.again {
            return;
        }
        self.again = Instant::now() + PAUSE;
        let name = &self.uplink.interface;
        match (self.uplink.open)() {
            Ok(Some(queues)) => {
                log::info!(target: "switch", "{switch}: uplink {name}: the interface is there");
                self.set(queues);
            }
            Ok(None) => {}
            Err(error) => {
                log::warn!(target: "switch", "{switch}: uplink {name}: {error}");
                self.again = Instant::now() + LONG_PAUSE;
            }
        }
    }

    #[cold]
    fn close(&mut self) {
        for mut queue in self.queues.drain(..) {
            self.past.add(&last(queue.counters()));
        }
        self.again = Instant::now() + LONG_PAUSE;
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        let mut given = Given::default();
        let first = self.queues.first_mut();
        // NB: always the same one, so that frames keep their order.
        let Some(out) = first.and_then(|queue| queue.transmitter()) else {
            given.gone = due.iter().count() as u64;
            return given;
        };
        for it in due.iter() {
            let bytes = match it.body {
                [] => it.head,
                body => {
                    self.joined.clear();
                    self.joined.extend_from_slice(it.head);
                    self.joined.extend_from_slice(body);
                    &self.joined
                }
            };
            let mut taken = offer(out, bytes, &it);
            if taken == Transmit::Full {
                flush(out, &mut self.lens, &mut given);
                taken = offer(out, bytes, &it);
            }
            match taken {
                Transmit::Taken => self.lens.push(bytes.len()),
                Transmit::Full => given.full += 1,
                Transmit::BadLength => given.long += 1,
                Transmit::LinkDown | Transmit::Unsupported => given.gone += 1,
            }
        }
        flush(out, &mut self.lens, &mut given);
        given
    }
}

/// The counters of a queue that is closed: what waited in the kernel is lost.
fn last(mut counters: QueueCounters) -> QueueCounters {
    counters.dropped += std::mem::take(&mut counters.waiting);
    counters
}

fn offer(out: &mut dyn Transmitter, bytes: &[u8], it: &Out<'_>) -> Transmit {
    match it.offload {
        Some(offload) => out.transmit_offloaded(bytes, offload),
        None => out.transmit(bytes),
    }
}

/// Sends what was taken. The kernel takes frames in order, so the first ones were sent, but for those of
/// them that were too long.
fn flush(out: &mut dyn Transmitter, lens: &mut Vec<usize>, given: &mut Given) {
    if lens.is_empty() {
        return;
    }
    let flushed = out.flush(&mut |_| {});
    let bytes: usize = lens.drain(..).take(flushed.sent as usize).sum();
    given.enqueued += flushed.sent;
    given.bytes += bytes as u64;
    given.full += flushed.full;
    given.long += flushed.bad_length;
    given.gone += flushed.link_down;
}

impl Link for Cable {
    /// Never asked: [`Uplinks::receive`] has the frames.
    fn receive(&mut self, _: &mut Batch, _: usize) -> std::io::Result<Rest> {
        Ok(Rest::Nothing)
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        locked(&self.far).send(due)
    }

    fn takes(&self, offload: &Offload) -> bool {
        let far = locked(&self.far);
        far.takes && (far.takes_udp || offload.gso_type & !gso::ECN != gso::UDP_L4)
    }
}

impl AsFd for Cable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A frame of an uplink as it enters by this port; it, or what it is cut into, has at most `longest` bytes.
#[inline]
pub(crate) fn entered<'a>(from: Number, frame: &'a Frame<'a>, longest: usize) -> Entered<'a> {
    let left = &frame.offload;
    let most = match left.is_super_frame() {
        true => MAX_SUPER,
        false => longest,
    };
    let fault = if frame.wire_len as usize > frame.bytes.len() || frame.bytes.len() > most {
        Some(Fault::Long)
    } else if left.is_due() {
        match offload::work(frame.bytes, frame.wire_len, left) {
            Ok(Some(work)) if work.longest() > longest => Some(Fault::Long),
            Ok(_) => None,
            Err(_) => Some(Fault::Lie),
        }
    } else {
        None
    };
    Entered {
        from,
        bytes: frame.bytes,
        tail: None,
        offload: left.is_due().then_some(left),
        is_valid: left.is_valid(),
        fault,
    }
}

/// The way of ports that are uplinks.
pub(crate) const UPLINK: &str = "uplink";

/// Asks to be told once of what happens at a descriptor.
fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    let (data, flags) = (
        EventData::new_u64(token),
        EventFlags::IN | EventFlags::ONESHOT,
    );
    match epoll::modify(epoll, fd, data, flags) {
        // The queue has another socket since its interface was made again.
        Err(Errno::NOENT) => epoll::add(epoll, fd, data, flags),
        done => done,
    }
}

/// Of the `which`th descriptor of a queue.
fn token(uplink: u64, queue: u64, which: u64) -> u64 {
    uplink << 32 | queue << 1 | which
}

fn as_poll(flags: EventFlags) -> PollFlags {
    let pairs = [
        (EventFlags::IN, PollFlags::IN),
        (EventFlags::ERR, PollFlags::ERR),
        (EventFlags::HUP, PollFlags::HUP),
    ];
    let seen = pairs.into_iter().filter(|(flag, _)| flags.contains(*flag));
    seen.map(|(_, flag)| flag).collect()
}

/// The lock on a far end, which only the thread that forwards has.
fn locked(far: &Mutex<Far>) -> MutexGuard<'_, Far> {
    far.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events that are looked at after one sleep; the others tell after the next.
const EVENTS: usize = 64;
/// How often an interface is looked for that is not there.
const PAUSE: Duration = Duration::from_millis(250);
/// And one that is there and cannot be opened.
const LONG_PAUSE: Duration = Duration::from_secs(2);
/// The shortest sleep for that.
const MIN_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests;
