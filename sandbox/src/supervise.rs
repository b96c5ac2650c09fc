//! The supervisor: starts the program, serves its calls, and ends with it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::act::{Doing, Target, Transport};
use crate::calls::{Serving, serve};
use crate::program::{self, Start, become_program};
use crate::run::{Finish, MakeJudging};
use crate::sys::process::{self, Fate, Forked};
use crate::sys::seccomp::Listener;
use crate::sys::table::Table;
use crate::wire::Network;

/// What the supervisor's process does.
pub(crate) struct Supervision {
    pub(crate) start: Start,
    pub(crate) network: Network,
    pub(crate) judging: MakeJudging,
    /// See `Serving`.
    pub(crate) writable: Option<Vec<PathBuf>>,
    pub(crate) runnable: Vec<PathBuf>,
    pub(crate) finish: Option<Finish>,
    pub(crate) table: Arc<Table>,
    /// To the keeper.
    pub(crate) keeper: OwnedFd,
}

/// Runs the program to its end; returns the exit code.
///
/// # Errors
/// The program cannot be started; the text says why.
pub(crate) fn supervise(supervision: Supervision) -> io::Result<u8> {
    let Supervision {
        mut start,
        network,
        judging,
        writable,
        runnable,
        finish,
        table,
        keeper,
    } = supervision;
    process::become_subreaper();
    // While this process has one thread, and nobody runs who could look on.
    let mut place = network.make().map_err(io::Error::other)?;
    let (ours, theirs) = pair()?;
    let name = start.words[0].clone();
    let pid = match process::fork()? {
        Forked::Child => {
            drop(ours);
            drop(keeper);
            // What ends with it is the supervisor's; here all of it is closed by exec.
            let place = std::mem::ManuallyDrop::new(place);
            start.enter = Some(Box::new(move || place.enter()));
            become_program(start, &theirs);
            std::process::exit(127);
        }
        Forked::Parent(pid) => pid,
    };
    drop(theirs);
    drop(start.fence);
    // Ctrl-C and Ctrl-Z are for the program; this process must be there to answer.
    process::ignore(&[
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGHUP,
        libc::SIGTERM,
    ]);
    let listener = listener_of(pid, &ours)?;
    process::become_undumpable();
    give(&keeper, &listener)?;
    let mut judging = judging(&mut place)?;
    if let Some(fence) = place.fence() {
        let gate = judging.gate.clone();
        judging.permit = Some(Box::new(move |act, names| {
            let mut begins = None;
            if let (Doing::Connect, Target::Internet(peer)) = (act.doing, &act.target) {
                let allowing = || gate.names_allowing(act, names);
                match act.transport {
                    Transport::Tcp => {
                        let connects = fence.connects(&act.who, *peer, allowing());
                        begins = Some(connects.ok_or(TOO_MANY)?);
                    }
                    Transport::Udp if !fence.speaks(&act.who, *peer, allowing()) => {
                        return Err(TOO_MANY);
                    }
                    _ => {}
                }
            }
            match gate.lasts(act, names) {
                true => fence.allow(act),
                false => fence.allow_briefly(act),
            }
            Ok(begins)
        }));
    }
    place.start(&judging.gate).map_err(io::Error::other)?;
    raise_open_files();
    table.head().program.store(pid, Ordering::Release); // pairs with the keeper's Acquire
    serve(Serving {
        listener,
        table: Arc::clone(&table),
        judging,
        writable,
        runnable,
        program: pid,
    })?;
    rustix::io::write(&ours, &[1])?;
    let mut told = [0; 5];
    if let Ok(5) = rustix::io::read(&ours, &mut told)
        && told[0] == program::NOT_RUN
    {
        let number = i32::from_ne_bytes([told[1], told[2], told[3], told[4]]);
        let error = io::Error::from_raw_os_error(number);
        let text = format!("{}: {error}", name.to_string_lossy());
        return Err(io::Error::new(error.kind(), text));
    }
    drop(ours);
    let status = wait_for(pid)?;
    if let Some(finish) = finish {
        finish(place.finish());
    }
    table.head().status.store(status, Ordering::Relaxed);
    table.head().ended.store(1, Ordering::Release); // pairs with the keeper's Acquire
    Ok(process::code_of(status))
}

/// Takes the listener out of the program's process, which waits.
fn listener_of(pid: u32, channel: &OwnedFd) -> io::Result<Listener> {
    let mut told = vec![0; 4096];
    let length = rustix::io::read(channel, &mut told)?;
    match told.get(..length) {
        Some([program::READY, number @ ..]) if number.len() == 4 => {
            let number = i32::from_ne_bytes([number[0], number[1], number[2], number[3]]);
            let process = process::thread_fd(pid)?;
            let copy = process::file_of(process.as_fd(), number).map_err(|error| {
                io::Error::other(format!(
                    "the program's descriptors cannot be copied (pidfd_getfd): {error}. \
                     If kernel.yama.ptrace_scope is 2 or 3, this needs 1 or 0"
                ))
            })?;
            Ok(Listener::from_fd(copy))
        }
        Some([program::FAILED, text @ ..]) => {
            Err(io::Error::other(String::from_utf8_lossy(text).into_owned()))
        }
        _ => Err(io::Error::other(
            "the program's process ended before it ran",
        )),
    }
}

/// Gives the keeper the listener too.
fn give(keeper: &OwnedFd, listener: &Listener) -> io::Result<()> {
    let files = [listener.as_fd()];
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    control.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(
        keeper,
        &[io::IoSlice::new(&[1])],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Waits for the program; its children that lost their parents end here too.
fn wait_for(program: u32) -> io::Result<i32> {
    loop {
        match process::wait_any(true) {
            Ok(Some((pid, Fate::Ended(status)))) if pid == program => return Ok(status),
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Every call that waits holds some descriptors.
fn raise_open_files() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}

/// Two ends of a channel between processes.
///
/// # Errors
/// The system's.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Why a connection is refused although it was allowed.
const TOO_MANY: &str =
    "more peers are reached by name than can be compared with what is said to them";
