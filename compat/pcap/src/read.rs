//! Packets, from the ring to the program: `pcap_next_ex`, `pcap_dispatch`, `pcap_loop`.
//!
//! A packet is handed over where it lies; in a group, where it may be overwritten, as a copy that was
//! whole. Else there is no system call, no lock and no copy per packet; it costs a turn of the handle's
//! (see `turns`) and a look at the flag that ends the loop. The library sleeps only when the ring is empty; the port then wakes it at a watermark or when the packet buffer timeout is over, as the
//! kernel does with a block.
//!
//! A program that waits for the descriptor itself gets it told the truth before each call returns
//! ([`Port::settle`]): readable while packets are unread, and at the next one if there are none. So
//! level- and edge-triggered waiting work, also for one packet per call.
#![expect(unsafe_code, reason = "calls the program's handler")]

use std::ffi::{c_int, c_uchar};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use vnplug::{Direction, Error, Next, Port, Tuning, flags};

use crate::abi::{ERROR, ERROR_BREAK, ERROR_NOT_ACTIVATED, Handler, PacketHeader};
use crate::activate::Options;
use crate::devices::describe;
use crate::filter::{Cut, INTERRUPTED, Screen, fail};
use crate::handle::Handle;
use crate::stats::{Base, asking};

/// An activated handle.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) port: Port,
    pub(crate) snaplen: c_int,
    /// Of the ring, as it was when the handle was activated.
    pub(crate) buffer_bytes: c_int,
    pub(crate) nanoseconds: bool,
    pub(crate) nonblock: bool,
    /// The program asked for the descriptor.
    pub(crate) selectable: bool,
    /// Longest wait of a dispatch for its first packet; `None` = no limit.
    timeout: Option<Duration>,
    /// Packets from before a change of the filter are looked at once more.
    pub(crate) screen: Option<Box<Screen>>,
    pub(crate) cut: Cut,
    /// When the device was asked for last.
    looked: Option<Instant>,
    pub(crate) direction: Direction,
    pub(crate) base: Base,
    /// The header of the packet that is lent.
    pub(crate) header: PacketHeader,
}

/// Which of the two loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// `pcap_dispatch`: what there is, waiting once.
    OneBuffer,
    /// `pcap_loop`: this many packets.
    Count,
}

/// A packet, valid until the next step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lent {
    pub(crate) header: *mut PacketHeader,
    pub(crate) bytes: *const c_uchar,
}

/// What a call is to do next.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Turn<T> {
    /// Return this.
    Return(T),
    /// Wait for the descriptor, until then at most, and call again. The wait is the caller's: a
    /// thread that is cancelled in it unwinds through no frame that catches.
    Wait(c_int, Option<Instant>),
}

/// What a call has done before it waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    /// The calling thread is the one that receives.
    reads: bool,
    done: u64,
    deadline: Option<Instant>,
    /// It has waited before.
    waited: bool,
}

impl Progress {
    pub(crate) fn new(reads: bool) -> Self {
        Self {
            reads,
            done: 0,
            deadline: None,
            waited: false,
        }
    }
}

enum Step {
    Packet(Lent),
    Nothing,
    Over(Error),
    Ended,
    /// The source's interface was deleted.
    Vanished,
}

impl Live {
    pub(crate) fn new(port: Port, snaplen: c_int, options: Options) -> Self {
        let timeout = match options.timeout_ms {
            0 => None,
            ms => Some(Duration::from_millis(u64::from(ms.max(0).unsigned_abs()))),
        };
        Self {
            buffer_bytes: c_int::try_from(port.ring_bytes()).unwrap_or(c_int::MAX),
            port,
            snaplen,
            nanoseconds: options.nanoseconds,
            nonblock: options.nonblock,
            selectable: false,
            timeout,
            screen: None,
            cut: Cut::At(u32::MAX),
            looked: None,
            direction: Direction::Both,
            base: Base::default(),
            header: PacketHeader {
                ts: libc::timeval {
                    tv_sec: 0,
                    tv_usec: 0,
                },
                caplen: 0,
                len: 0,
            },
        }
    }

    /// The next packet that the program is to see.
    #[inline]
    fn step(&mut self) -> Step {
        loop {
            let next = if self.nonblock && !self.selectable {
                // Who never waits is not rung either, which saves the system calls of arming.
                self.port.poll_next()
            } else {
                self.port.next()
            };
            let packet = match next {
                Ok(Next::Packet(packet)) => packet,
                Ok(Next::Nothing) => return Step::Nothing,
                Ok(Next::Ended) => return Step::Ended,
                Err(error) => return Step::Over(error),
            };
            // NB: field by field, into one place that stays: copies of structures just written in
            // smaller pieces wait for the stores, which cost as much as the packet itself.
            let (meta, bytes) = (&packet.meta, packet.bytes);
            let fraction_ns = meta.ts_ns % 1_000_000_000;
            self.header.ts.tv_sec = (meta.ts_ns / 1_000_000_000) as libc::time_t;
            self.header.ts.tv_usec = match self.nanoseconds {
                true => fraction_ns as libc::suseconds_t,
                false => (fraction_ns / 1000) as libc::suseconds_t,
            };
            self.header.caplen = self.cut.apply(meta, bytes);
            self.header.len = meta.wire_len;
            let (marks, lost, bytes_at) = (meta.flags, meta.lost, bytes.as_ptr());
            let mut passes = true;
            if let Some(screen) = &mut self.screen {
                passes = screen.passes(meta, bytes);
                if screen.is_over() {
                    self.screen = None;
                }
            }
            if marks & flags::GAP != 0 {
                self.base.restarted(self.port.counts(), lost);
            }
            if self.direction != Direction::Both {
                passes &= (self.direction == Direction::Tx) == (marks & flags::OUTBOUND != 0);
            }
            if !passes {
                continue;
            }
            return Step::Packet(Lent {
                header: &raw mut self.header,
                bytes: bytes_at,
            });
        }
    }
}

/// `pcap_next_ex`, less its pointers: 1 and the packet, or a status.
#[inline]
pub(crate) fn one(handle: &Handle, progress: &mut Progress) -> Turn<Result<Lent, c_int>> {
    loop {
        if handle.take_break() {
            return Turn::Return(Err(ERROR_BREAK));
        }
        match handle.live_as(progress.reads, Live::step) {
            Some(Step::Packet(lent)) => {
                settle(handle);
                return Turn::Return(Ok(lent));
            }
            Some(Step::Nothing) => match rest(handle, Until::OneBuffer, progress) {
                Rest::Over => {
                    settle(handle);
                    return Turn::Return(Err(0));
                }
                Rest::Again => {}
                Rest::Vanished => return Turn::Return(Err(over(handle, Some(Step::Vanished)))),
                Rest::Wait(fd, until) => return Turn::Wait(fd, until),
            },
            other => return Turn::Return(Err(over(handle, other))),
        }
    }
}

/// `pcap_dispatch` and `pcap_loop`.
///
/// # Safety
/// `handler` may be called with `user`.
pub(crate) unsafe fn many(
    handle: &Handle,
    progress: &mut Progress,
    count: c_int,
    until: Until,
    handler: Handler,
    user: *mut c_uchar,
) -> Turn<c_int> {
    let Some(handler) = handler else {
        handle.set_error("no handler was given");
        return Turn::Return(ERROR);
    };
    let most = match (count, until) {
        (1.., _) => u64::from(count.unsigned_abs()),
        (_, Until::OneBuffer) => ONE_BUFFER,
        (_, Until::Count) => u64::MAX,
    };
    let mut done = progress.done;
    let mut last = None;
    while done < most {
        if handle.break_flag.load(std::sync::atomic::Ordering::Relaxed) {
            if (done == 0 || until == Until::Count) && handle.take_break() {
                return Turn::Return(ERROR_BREAK);
            }
            // The flag stays, for the next call to say so.
            break;
        }
        match handle.live_as(progress.reads, Live::step) {
            Some(Step::Packet(lent)) => {
                done += 1;
                // SAFETY: the header stays until the next step, and so do the bytes in the ring; the
                // caller promises the rest. No borrow of the state is held.
                unsafe { handler(user, lent.header, lent.bytes) };
                if handle.is_closed() {
                    return Turn::Return(ERROR_BREAK);
                }
            }
            Some(Step::Nothing) => {
                if done > 0 && until == Until::OneBuffer {
                    break;
                }
                match rest(handle, until, progress) {
                    Rest::Over => break,
                    Rest::Again => {}
                    Rest::Vanished => return Turn::Return(over(handle, Some(Step::Vanished))),
                    Rest::Wait(fd, limit) => {
                        progress.done = done;
                        return Turn::Wait(fd, limit);
                    }
                }
            }
            other => {
                // What was handed over is told first; the reason is there for the next call.
                if done == 0 || until == Until::Count {
                    return Turn::Return(over(handle, other));
                }
                last = other;
                break;
            }
        }
    }
    drop(last);
    settle(handle);
    Turn::Return(match until {
        Until::Count => 0,
        Until::OneBuffer => c_int::try_from(done).unwrap_or(c_int::MAX),
    })
}

/// `pcap_setnonblock`.
pub(crate) fn set_nonblock(handle: &Handle, nonblock: bool) {
    handle.with(|state| match &mut state.live {
        Some(live) => live.nonblock = nonblock,
        None => state.options.nonblock = nonblock,
    });
    settle(handle);
}

/// `pcap_setdirection`: by the daemon, and here for what it published before.
pub(crate) fn set_direction(handle: &Handle, direction: c_int) -> c_int {
    let direction = match direction {
        0 => Direction::Both,
        1 => Direction::Rx,
        2 => Direction::Tx,
        _ => {
            handle.set_error("no such direction");
            return ERROR;
        }
    };
    let _visit = handle.visit();
    let tuned = handle.live(|live| {
        let tuning = Tuning {
            direction,
            ..live.port.tuning()
        };
        live.port.tune(tuning)?;
        live.direction = direction;
        Ok::<_, Error>(())
    });
    match tuned {
        Some(Ok(())) => 0,
        Some(Err(error)) => fail(handle, &describe(&error)),
        None => over(handle, None),
    }
}

/// `pcap_get_selectable_fd`: from now on it is kept truthful.
pub(crate) fn selectable_fd(handle: &Handle) -> Option<c_int> {
    let fd = handle.live(|live| {
        live.selectable = true;
        live.port.fd().as_raw_fd()
    })?;
    settle(handle);
    Some(fd)
}

/// What to do when nothing is there.
enum Rest {
    /// Look again.
    Again,
    Wait(c_int, Option<Instant>),
    /// The call is to return, with nothing.
    Over,
    /// The interface is no more.
    Vanished,
}

#[cold]
fn rest(handle: &Handle, until: Until, progress: &mut Progress) -> Rest {
    let Some((fd, nonblock, selectable, timeout)) = handle.live(|live| {
        let fd = live.port.fd().as_raw_fd();
        (fd, live.nonblock, live.selectable, live.timeout)
    }) else {
        return Rest::Over;
    };
    if handle.is_closed() {
        handle.break_loop();
        return Rest::Again;
    }
    match look(handle, if nonblock { GLANCE } else { PATIENCE }) {
        Look::Gone => return Rest::Vanished,
        // Perhaps the descriptor was readable for this look alone, and the program calls for it.
        Look::There if selectable && until == Until::OneBuffer && !progress.waited => {
            return Rest::Over;
        }
        // The descriptor is waited for here, too.
        Look::There => settle(handle),
        Look::NotDue => {}
    }
    progress.waited = true;
    let deadline = &mut progress.deadline;
    let look = Instant::now() + LOOK_AGAIN;
    match until {
        // A loop never returns for want of packets; spinning would help nobody.
        Until::Count => {
            if nonblock {
                // It was not armed.
                handle.live(|live| live.port.settle().map(drop));
            }
            Rest::Wait(fd, Some(look))
        }
        Until::OneBuffer if nonblock => Rest::Over,
        Until::OneBuffer => {
            if let Some(timeout) = timeout
                && deadline.is_none()
            {
                *deadline = Instant::now().checked_add(timeout);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Rest::Over;
            }
            Rest::Wait(
                fd,
                Some(deadline.map_or(look, |deadline| deadline.min(look))),
            )
        }
    }
}

/// What became of the source's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// It was looked at a moment ago.
    NotDue,
    /// Nothing is known against it.
    There,
    Gone,
}

/// Whether the source's interface was deleted, asked now and then while no packets come. A real
/// interface that vanishes ends its captures, and supervisors wait for that.
fn look(handle: &Handle, patience: Duration) -> Look {
    let asker = handle.live(|live| {
        let now = Instant::now();
        let due = live.looked.is_none_or(|looked| now >= looked + LOOK_AGAIN);
        // The first wait is no reason to ask.
        let known = live.looked.is_some();
        if due {
            live.looked = Some(now);
        }
        (due && known).then(|| live.port.asker())
    });
    let Some(Some(asker)) = asker else {
        return Look::NotDue;
    };
    let asked = asking(|| asker.device(patience));
    let device = asked.and_then(|asked| asked.ok().flatten());
    match device.is_some_and(|device| device.state == "gone") {
        true => Look::Gone,
        false => Look::There,
    }
}

/// Makes the descriptor truthful, for a program that waits for it. Without packets it is readable when
/// the interface is to be looked at again, for nobody else would.
#[inline]
fn settle(handle: &Handle) {
    handle.live(|live| {
        if live.selectable {
            let looked = *live.looked.get_or_insert_with(Instant::now);
            // What cannot be settled is told by the next step.
            let settled = live.port.settle_until(looked + LOOK_AGAIN);
            debug_assert!(settled.is_ok(), "{settled:?}");
        }
    });
}

/// There will be no more packets: the status, and its text.
#[cold]
fn over(handle: &Handle, why: Option<Step>) -> c_int {
    let text = match why {
        None if handle.is_active() => return fail(handle, INTERRUPTED),
        None => {
            handle.set_error("This handle hasn't been activated yet");
            return ERROR_NOT_ACTIVATED;
        }
        // libpcap's words, which programs know.
        Some(Step::Over(Error::Gone(_)) | Step::Vanished) => "The interface disappeared".to_owned(),
        Some(Step::Over(error)) => describe(&error),
        Some(_) => "the source ended: its capture file was played to the end".to_owned(),
    };
    handle.set_error(&text);
    ERROR
}

/// How often an idle reader looks whether its interface is still there.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait for what the daemon says of it.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same of a call that is not to wait.
const GLANCE: Duration = Duration::from_millis(50);
/// Packets of one unlimited `pcap_dispatch`: "one bufferful", so that it ends on a busy wire.
const ONE_BUFFER: u64 = 4096;
