//! SIGHUP: the daemon reads its configuration file again.
//!
//! A thread of its own asks for it through the daemon's socket, as `vnplug reload` does, and `vnplugd --reload`: so there is
//! one way, and one answer.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};

use vnplug_os::service::Manager;
use vnplug_os::socket::connect_within;
use vnplug_ring::control::code::UNAVAILABLE;
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Message, Role, SourceRequest, VERSION};

/// The longest wait for an answer: filters may have to be compiled.
const PATIENCE: Duration = Duration::from_secs(120);

/// Between two looks whether another reload is over.
const PAUSE: Duration = Duration::from_millis(200);

/// Starts the thread; `hangup` is readable when the signal came.
///
/// # Errors
/// The system's.
pub(crate) fn start(hangup: OwnedFd, socket: PathBuf, manager: Arc<Manager>) -> io::Result<()> {
    let serve = move || {
        while hears(&hangup).is_ok() {
            log::info!(target: "control", "SIGHUP: the configuration is read again");
            let now = clock_gettime(ClockId::Monotonic);
            let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
            manager.tell(format_args!("RELOADING=1\nMONOTONIC_USEC={now_us}"));
            if let Err(error) = ask_again(&socket) {
                log::error!(target: "control", "SIGHUP: {error}");
            }
            manager.say_ready("Serving");
        }
    };
    let thread = std::thread::Builder::new().name("vnplug-hangup".into());
    thread.spawn(serve).map(drop)
}

/// Waits for the signal.
fn hears(hangup: &OwnedFd) -> io::Result<()> {
    loop {
        let mut fds = [PollFd::new(hangup, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // As many as came meanwhile are one.
    let mut signals = [0; 4096];
    match rustix::io::read(hangup, &mut signals) {
        Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// As [`ask`], until another reload is over that is on its way: it may have read an older file.
pub(crate) fn ask_again(socket: &Path) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask(socket)? {
            Message::Error { code, .. } if code == UNAVAILABLE && Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            Message::Error { text, .. } => return Err(text),
            _ => return Ok(()),
        }
    }
}

/// Has the configuration read again, and waits until it is in force or refused.
fn ask(socket: &Path) -> Result<Message, String> {
    let failed = |error: io::Error| format!("{}: {error}", socket.display());
    let mut stream = connect_within(socket, PATIENCE).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let hello = Message::Hello {
        min_version: VERSION,
        max_version: VERSION,
        role: Role::Client,
        name: "vnplugd, for a reload".into(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    };
    let request = Message::Sources(SourceRequest::Reload);
    let both = [hello.encode(1, 0), request.encode(2, 0)].concat();
    stream.write_all(&both).map_err(failed)?;
    let mut framer = Framer::strict(MAX_PAYLOAD);
    let mut bytes = [0; 4096];
    loop {
        match framer.next_message().map_err(|error| error.to_string())? {
            Some(frame) if frame.0.id == 2 => {
                return Message::from_frame(&frame).map_err(|error| error.to_string());
            }
            Some(_) => {}
            None => match stream.read(&mut bytes).map_err(failed)? {
                0 => return Err("the daemon hung up".into()),
                len => framer.push(&bytes[..len]),
            },
        }
    }
}
