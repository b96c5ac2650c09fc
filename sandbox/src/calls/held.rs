//! Calls that wait: for a verdict, or until a socket can go on.
//!
//! A held call is looked at every [`TICK`]: whether its thread was killed, and whether a signal came that the
//! program wants. The kernel lets only fatal signals end a call that was received; the others end it here, with
//! nothing done, as they end a call that waits in the kernel.

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::serve::{Job, Server};
use super::task::{Pending, Wait};
use crate::sys::lock;
use crate::sys::process::group_of;
use crate::sys::seccomp::Answer;

/// How often held calls are looked at.
const TICK: Duration = Duration::from_millis(10);
/// The most that are asked for signals in one tick.
const MOST_LOOKS: usize = 32;
/// The bell's name among the events; no call has it.
const BELL: u64 = 0;

/// Holds calls for ever.
pub(super) fn run(server: &Arc<Server>) {
    let Ok(watched) = epoll::create(epoll::CreateFlags::CLOEXEC) else {
        return;
    };
    let bell = epoll::EventData::new_u64(BELL);
    if epoll::add(&watched, &server.bell, bell, epoll::EventFlags::IN).is_err() {
        return;
    }
    let mut held: HashMap<u64, (Pending, Wait)> = HashMap::new();
    let mut turn = 0;
    let mut last = Instant::now();
    loop {
        let is_idle = held.is_empty() && lock(&server.asked).is_empty();
        let timeout = (!is_idle).then_some(rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: TICK.as_nanos() as i64,
        });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(BELL),
        }; 64];
        let count = epoll::wait(&watched, &mut events[..], timeout.as_ref()).unwrap_or(0);
        for event in &events[..count] {
            match event.data.u64() {
                BELL => {
                    let mut rung = [0; 8];
                    let _ = rustix::io::read(&server.bell, &mut rung);
                }
                id => {
                    if let Some((pending, _)) = held.remove(&id) {
                        unwatch(&watched, &pending);
                        server.carry_on(pending);
                    }
                }
            }
        }
        for job in server.jobs() {
            match job {
                Job::Again(pending) => server.carry_on(*pending),
                Job::Judged(id, verdict) => server.decided(id, verdict),
                Job::Hold(pending, wait) => {
                    watch(&watched, &pending, wait);
                    held.insert(pending.id, (*pending, wait));
                }
            }
        }
        if last.elapsed() >= TICK {
            last = Instant::now();
            look(server, &watched, &mut held, &mut turn);
        }
    }
}

/// Looks at what is held: who is gone, who got a signal, whose time is over, who must be tried again.
fn look(
    server: &Arc<Server>,
    watched: &impl AsFd,
    held: &mut HashMap<u64, (Pending, Wait)>,
    turn: &mut usize,
) {
    let now = Instant::now();
    let mut due = Vec::new();
    held.retain(|id, (pending, wait)| {
        if !server.listener.waits(*id) {
            unwatch(watched, pending);
            server.release(pending.slot);
            return false;
        }
        if wait.until.is_some_and(|(until, _)| until <= now) || !(wait.readable || wait.writable) {
            due.push(*id);
        }
        true
    });
    for id in due {
        let Some((pending, wait)) = held.remove(&id) else {
            continue;
        };
        unwatch(watched, &pending);
        match wait.until {
            Some((until, number)) if until <= now => {
                let answer = pending.task.done_so_far().unwrap_or(Answer::Error(number));
                server.answer(id, pending.slot, answer);
            }
            _ => server.carry_on(pending),
        }
    }
    let mut gone = Vec::new();
    {
        let mut asked = lock(&server.asked);
        asked.retain(|id, asked| {
            let waits = server.listener.waits(*id);
            if !waits {
                gone.push(asked.pending.slot);
            }
            waits
        });
    }
    for slot in gone {
        server.release(slot);
    }
    interrupt(server, watched, held, turn);
}

/// Ends calls whose thread has a signal to handle.
fn interrupt(
    server: &Arc<Server>,
    watched: &impl AsFd,
    held: &mut HashMap<u64, (Pending, Wait)>,
    turn: &mut usize,
) {
    let mut waiting: Vec<(u64, u32)> = held
        .iter()
        .filter(|(_, (pending, _))| pending.task.is_interruptible())
        .map(|(id, (pending, _))| (*id, pending.thread))
        .collect();
    waiting.extend(lock(&server.asked).iter().filter_map(|(id, asked)| {
        let pending = &asked.pending;
        pending
            .task
            .is_interruptible()
            .then_some((*id, pending.thread))
    }));
    if waiting.is_empty() {
        return;
    }
    waiting.sort_unstable();
    for step in 0..waiting.len().min(MOST_LOOKS) {
        let (id, thread) = waiting[(*turn + step) % waiting.len()];
        let Some(answer) = signalled(thread) else {
            continue;
        };
        let asked = lock(&server.asked).remove(&id).map(|asked| asked.pending);
        let pending = match asked {
            Some(pending) => pending,
            None => match held.remove(&id) {
                Some((pending, _)) => {
                    unwatch(watched, &pending);
                    pending
                }
                None => continue,
            },
        };
        let answer = pending.task.done_so_far().unwrap_or(answer);
        server.answer(id, pending.slot, answer);
    }
    *turn = turn.wrapping_add(MOST_LOOKS);
}

/// How a call ends if its thread has a signal to handle: it is made again if the program wants that of this
/// signal (`SA_RESTART`).
///
/// A signal for the whole process is handled by its first thread if that takes it. Another thread that has
/// no signal of its own must not be told to restart: the kernel would not do it.
fn signalled(thread: u32) -> Option<Answer> {
    const RESTART: i32 = 512; // ERESTARTSYS
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
            .unwrap_or(0)
    };
    let wanted = !(set("SigBlk:") | set("SigIgn:"));
    if set("SigPnd:") & wanted != 0 {
        return Some(Answer::Error(RESTART));
    }
    if set("ShdPnd:") & wanted == 0 {
        return None;
    }
    let is_first = group_of(thread).is_ok_and(|group| group == thread);
    Some(Answer::Error(if is_first { RESTART } else { libc::EINTR }))
}

fn watch(watched: &impl AsFd, pending: &Pending, wait: Wait) {
    let mut flags = epoll::EventFlags::ONESHOT;
    flags.set(epoll::EventFlags::IN, wait.readable);
    flags.set(epoll::EventFlags::OUT, wait.writable);
    if let Some(socket) = pending.task.socket()
        && (wait.readable || wait.writable)
    {
        let name = epoll::EventData::new_u64(pending.id);
        if let Err(error) = epoll::add(watched, socket, name, flags) {
            log::debug!("a socket cannot be waited for: {error}");
        }
    }
}

fn unwatch(watched: &impl AsFd, pending: &Pending) {
    if let Some(socket) = pending.task.socket() {
        // It was not watched if it was to be tried again only.
        let _ = epoll::delete(watched, socket);
    }
}
