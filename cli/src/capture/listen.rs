//! `vnplug dump --listen`: packets by TCP to whoever connects ("pcap-over-IP").
//!
//! Each client is served by a process of its own, `vnplug dump` with the connection as its standard output, and so by a
//! port of its own: one that does not read loses its own packets alone, and one that is served wrongly ends alone.

use std::ffi::OsString;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use crate::failure::{Failure, OK, Outcome};
use crate::{external, out, sys};

/// A port of the loopback, or an address with a port.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text
        .parse()
        .map(|port: u16| (Ipv4Addr::LOCALHOST, port).into());
    port.or_else(|_| text.parse()).map_err(|_| {
        "write PORT (of the loopback) or ADDRESS:PORT, for example 57012 or 192.0.2.1:57012"
            .to_owned()
    })
}

/// Serves until a signal comes. `more` is said to each process besides what this one was told.
///
/// # Errors
/// The address cannot be listened at.
pub(crate) fn serve(address: SocketAddr, more: &[&str]) -> Outcome {
    let listener =
        TcpListener::bind(address).map_err(|error| Failure::about(address.to_string(), error))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    out::note(&format!("listening at {address}"));
    let signals = sys::signals_as_fd()?;
    let mut clients: Vec<Client> = Vec::new();
    let mut has_room = true;
    while !has_news(&signals)? {
        wait(&signals, has_room.then_some(&listener), &clients)?;
        clients.retain_mut(|client| !client.has_left());
        has_room = true;
        while let Some((stream, from)) = accepted(&listener, &mut has_room)? {
            if clients.len() >= MOST_CLIENTS {
                out::warn(&format!(
                    "{from}: refused, {MOST_CLIENTS} clients read already"
                ));
                continue;
            }
            match Client::start(stream, from, more) {
                Ok(client) => clients.push(client),
                Err(error) => out::warn(&format!("{from}: {error}")),
            }
        }
    }
    drop(clients);
    Ok(OK)
}

/// Who reads, and who serves it.
struct Client {
    stream: TcpStream,
    from: SocketAddr,
    server: Child,
}

impl Client {
    fn start(stream: TcpStream, from: SocketAddr, more: &[&str]) -> std::io::Result<Self> {
        stream.set_nonblocking(false)?;
        let given: OwnedFd = stream.try_clone()?.into();
        let said = more.iter().map(OsString::from);
        let said = said.chain([format!("--served-by={}", std::process::id()).into()]);
        let server = external::own()
            .args(arguments(std::env::args_os().skip(1), said))
            .stdin(Stdio::null())
            .stdout(given)
            .spawn()?;
        out::note(&format!("{from}: reads"));
        Ok(Self {
            stream,
            from,
            server,
        })
    }

    /// Whether either end has ended; a peer that says that it sends no more (FIN) has, too.
    fn has_left(&mut self) -> bool {
        let ended = !matches!(self.server.try_wait(), Ok(None));
        let mut there = [PollFd::new(&self.stream, LEFT)];
        let left = poll(&mut there, Some(&Timespec::default())).is_ok_and(|count| count > 0);
        if ended || left {
            out::note(&format!("{}: left", self.from));
        }
        ended || left
    }
}

impl Drop for Client {
    /// A server that waits for a client that does not read hears no signal, but that its connection has ended.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(process) = Pid::from_raw(self.server.id().cast_signed()) {
            let _ = kill_process(process, Signal::TERM);
        }
        let until = Instant::now() + PATIENCE;
        while matches!(self.server.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = self.server.kill();
                let _ = self.server.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// From now on this process ends when the one that listens does, however that ends: a client that leaves is seen by who writes to
/// it, and nothing is written while there is no daemon.
///
/// # Errors
/// It has ended already.
pub(crate) fn end_with(listener: u32) -> Result<(), Failure> {
    // NB: not one that asks it to end. Nobody hears that while a client does not read, and nothing has to be finished.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from)?;
    let is_there = getppid().is_some_and(|parent| parent.as_raw_pid().cast_unsigned() == listener);
    match is_there {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "process {listener}, which listens, has ended"
        ))),
    }
}

/// What this process was told, without that it listens, and with `more`.
fn arguments(
    all: impl Iterator<Item = OsString>,
    more: impl Iterator<Item = OsString>,
) -> Vec<OsString> {
    let mut is_value = false;
    let left = all.filter(|word| {
        let was_value = std::mem::take(&mut is_value);
        let text = word.to_string_lossy();
        is_value = !was_value && text == "--listen";
        // Whoever does not listen may not be told where it may.
        let is_flag = text.starts_with("--listen=") || text == "--allow-remote";
        !was_value && !is_value && !is_flag
    });
    let mut left: Vec<_> = left.collect();
    // NB: behind `--` nothing is an option.
    let end = left.iter().position(|word| word == "--");
    let at = end.unwrap_or(left.len());
    left.splice(at..at, more);
    left
}

/// Who has connected, if somebody has and there is room for one more descriptor.
fn accepted(
    listener: &TcpListener,
    has_room: &mut bool,
) -> Result<Option<(TcpStream, SocketAddr)>, Failure> {
    match listener.accept() {
        Ok(found) => Ok(Some(found)),
        // Whoever comes after is served when a client has left, or the machine has room again.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            *has_room = false;
            Ok(None)
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        // It left before it was accepted.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Waits until something is to be done; for a second at most. NB: not for a listener if nobody can be accepted. It would be
/// ready at once, again and again.
fn wait(
    signals: &OwnedFd,
    listener: Option<&TcpListener>,
    clients: &[Client],
) -> Result<(), Failure> {
    let mut waited = vec![PollFd::new(signals, PollFlags::IN)];
    waited.extend(listener.map(|it| PollFd::new(it, PollFlags::IN)));
    waited.extend(
        clients
            .iter()
            .map(|client| PollFd::new(&client.stream, LEFT)),
    );
    // A server that ended is seen then.
    match poll(
        &mut waited,
        Some(&Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        }),
    ) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(std::io::Error::from(error).into()),
    }
}

fn has_news(signals: &OwnedFd) -> Result<bool, Failure> {
    let mut waited = [PollFd::new(signals, PollFlags::IN)];
    let news = poll(&mut waited, Some(&Timespec::default()));
    news.map(|count| count > 0)
        .map_err(|error| std::io::Error::from(error).into())
}

const LEFT: PollFlags = PollFlags::RDHUP;
const MOST_CLIENTS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_port_of_the_loopback() {
        assert_eq!(address("57012").unwrap().to_string(), "127.0.0.1:57012");
        assert_eq!(address("[::1]:9").unwrap().to_string(), "[::1]:9");
        for wrong in ["", "65536", "localhost:1", "10.0.0.1", "-1"] {
            assert!(
                address(wrong).unwrap_err().contains("write PORT"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn who_serves_is_told_everything_but_to_listen() {
        for (told, left) in [
            ("dump a --listen 1 -f x", "dump a -f x --x=1"),
            ("dump --listen=1 a", "dump a --x=1"),
            ("dump a --allow-remote --listen [::]:1", "dump a --x=1"),
            (
                "--socket /s dump a --listen --listen",
                "--socket /s dump a --x=1",
            ),
            ("dump --listen 1 -- a", "dump --x=1 -- a"),
        ] {
            let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
            let given = arguments(words(told).into_iter(), words("--x=1").into_iter());
            assert_eq!(given, words(left), "{told}");
        }
    }
}
