//! The process that runs libpcap's compiler: `vnplugd --compile-filter`.
//!
//! It gives up its privileges, loads libpcap once, says that it is ready, and then serves requests
//! from stdin until end of file. It never parses an expression itself: for each one it forks a copy
//! of itself, which is confined further, compiles that one expression and ends. So an expression
//! that breaks libpcap meets a process that has seen no other expression and will see none; it can
//! only spoil its own answer, and that answer is a program which the daemon verifies again.
//!
//! Both directions are little-endian. Request: expression length, snaplen, link type (`u32` each),
//! expression. Reply: status (`u8`), length (`u32`), that many bytes: the program in wire form or a
//! text. The first reply, before any request, is [`status::READY`] or [`status::NO_LIBPCAP`].

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use vnplug_bpf::libpcap::Library;
use vnplug_bpf::{INSTRUCTION_BYTES, MAX_INSTRUCTIONS, instruction_bytes};

use super::compile::{CPU_LIMIT, MAX_EXPRESSION_BYTES, WALL_LIMIT};
use crate::sys::confine::{Limits, enter_service, fork_confined};

/// The kinds of replies.
pub(super) mod status {
    /// libpcap is loaded; requests may come.
    pub(in super::super) const READY: u8 = 0;
    /// There is no libpcap; the text says why. Nothing follows.
    pub(in super::super) const NO_LIBPCAP: u8 = 1;
    /// A program follows.
    pub(in super::super) const PROGRAM: u8 = 2;
    /// libpcap's message follows.
    pub(in super::super) const REFUSED: u8 = 3;
    /// A limit was hit: time, memory or size of the program.
    pub(in super::super) const TOO_COMPLEX: u8 = 4;
    /// The compiling process died; the text says how.
    pub(in super::super) const CRASHED: u8 = 5;
}

/// The largest reply: the longest program.
pub(super) const MAX_REPLY_BYTES: usize = MAX_INSTRUCTIONS * INSTRUCTION_BYTES;

/// Runs the compiling process; `main` calls it when the first argument is
/// [`COMPILE_FILTER_ARG`](super::COMPILE_FILTER_ARG), before anything else happens.
///
/// The exit code is 0 when the daemon closed the connection, else 1.
pub fn compile_child_main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnplugd: filter compiler: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let files = enter_service()?;
    let library = match Library::load() {
        Ok(library) => library,
        Err(why) => return reply(status::NO_LIBPCAP, why.as_bytes()),
    };
    // Opens what the C library opens on first use, so that every copy starts with it. The text is
    // ours; whether the names exist does not matter.
    let _ = library.compile(c"host localhost or tcp port http", 1, 1);
    reply(status::READY, &[])?;
    while let Some(request) = Request::read()? {
        let (code, bytes) = answer(&library, &request, files)?;
        reply(code, &bytes)?;
    }
    Ok(())
}

struct Request {
    expression: CString,
    snaplen: u32,
    link_type: u32,
}

impl Request {
    /// The next request; `None` at end of file.
    fn read() -> io::Result<Option<Self>> {
        let mut stdin = io::stdin().lock();
        let mut head = [[0_u8; 4]; 3];
        match stdin.read_exact(head.as_flattened_mut()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
        let [len, snaplen, link_type] = head.map(u32::from_le_bytes);
        if len as usize > MAX_EXPRESSION_BYTES {
            return Err(io::Error::other("request too long"));
        }
        let mut expression = vec![0_u8; len as usize];
        stdin.read_exact(&mut expression)?;
        let expression = CString::new(expression)?;
        Ok(Some(Self {
            expression,
            snaplen,
            link_type,
        }))
    }
}

fn reply(code: u8, bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(&[code])?;
    stdout.write_all(
        &u32::try_from(bytes.len())
            .map_err(io::Error::other)?
            .to_le_bytes(),
    )?;
    stdout.write_all(bytes)?;
    stdout.flush()
}

/// Lets a confined copy compile the expression, and judges how the copy ended.
fn answer(library: &Library, request: &Request, files: bool) -> io::Result<(u8, Vec<u8>)> {
    let limits = Limits {
        cpu: CPU_LIMIT,
        memory_bytes: MEMORY_LIMIT_BYTES,
        files,
    };
    let (from_copy, to_us) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let pid = fork_confined(limits, to_us, |to_daemon| {
        compile(library, request, to_daemon)
    })?;
    let received = receive(from_copy, Instant::now() + JOB_LIMIT);
    // If it answered and then does not end, the daemon's patience ends instead: it kills this
    // process, and the copy dies with it.
    if received.as_ref().is_ok_and(Option::is_some) {
        Ok(judge(reap(pid)?, received?))
    } else {
        kill_process(pid, Signal::KILL)?;
        reap(pid)?;
        received.map(|_| (status::TOO_COMPLEX, Vec::new()))
    }
}

/// The confined copy's work: one expression, one answer.
fn compile(library: &Library, request: &Request, to: OwnedFd) {
    let result = library.compile(&request.expression, request.snaplen, request.link_type);
    let answer = match result {
        Ok(list) if list.len() > MAX_INSTRUCTIONS => vec![status::TOO_COMPLEX],
        Ok(list) => {
            let mut bytes = vec![status::PROGRAM];
            list.iter()
                .for_each(|i| bytes.extend_from_slice(&instruction_bytes(*i)));
            bytes
        }
        Err(message) if OUT_OF_MEMORY.iter().any(|text| message.contains(text)) => {
            vec![status::TOO_COMPLEX]
        }
        Err(message) => [&[status::REFUSED], message.as_bytes()].concat(),
    };
    // If the pipe is gone, so is the reader: nothing is left to do.
    let _ = File::from(to).write_all(&answer);
}

/// Everything until end of file; `None` if that takes too long or is too much.
fn receive(from: OwnedFd, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut from = File::from(from);
    let mut bytes = Vec::new();
    let mut chunk = [0_u8; 4096];
    while bytes.len() <= 1 + MAX_REPLY_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = left.try_into().map_err(io::Error::other)?;
        if poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&timeout))? == 0 {
            return Ok(None);
        }
        match from.read(&mut chunk)? {
            0 => return Ok(Some(bytes)),
            n => bytes.extend_from_slice(&chunk[..n]),
        }
    }
    Ok(None)
}

fn reap(pid: Pid) -> io::Result<WaitStatus> {
    match waitpid(Some(pid), WaitOptions::empty())? {
        Some((_, status)) => Ok(status),
        None => Err(io::Error::other("the compiling process vanished")),
    }
}

fn judge(status: WaitStatus, received: Option<Vec<u8>>) -> (u8, Vec<u8>) {
    match (
        status.exit_status(),
        status.terminating_signal(),
        received.as_deref(),
    ) {
        (Some(0), None, Some([code @ (status::PROGRAM..=status::TOO_COMPLEX), bytes @ ..])) => {
            (*code, bytes.to_vec())
        }
        (_, Some(libc::SIGPROF | libc::SIGXCPU), _) => (status::TOO_COMPLEX, Vec::new()),
        (_, Some(signal), _) => (status::CRASHED, format!("signal {signal}").into_bytes()),
        (code, ..) => (
            status::CRASHED,
            format!("exit status {code:?}").into_bytes(),
        ),
    }
}

/// What libpcap says when the address space is used up.
const OUT_OF_MEMORY: [&str; 4] = [
    "malloc",
    "out of memory",
    "Out of memory",
    "Cannot allocate memory",
];

/// Address space of one compilation; libpcap and what it links to take about 7 MiB of it.
pub(super) const MEMORY_LIMIT_BYTES: u64 = 64 << 20;

/// Less than the daemon's own patience, so that this process survives and answers.
const JOB_LIMIT: Duration = WALL_LIMIT.saturating_sub(Duration::from_millis(100));
