//! Captures that come as a stream: by TCP from a server of pcap-over-IP, or on standard input.
//!
//! A thread reads and takes apart; who sends takes what is there by then. A server that sends faster than frames leave waits,
//! as TCP has it.

use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use vnplug_store::read::{End, Reader};
use vnplug_store::replay::BATCH;

use super::Sink;
use crate::failure::Failure;
use crate::out;
use crate::text::escape;

/// What the reading thread has.
enum Item {
    Frame(Vec<u8>),
    /// Only its beginning was captured.
    Snapped,
    /// No frame is that long.
    TooLong,
    /// Of this link type, and no Ethernet.
    Foreign(u32),
    /// The stream is over, and why if that is not how captures end.
    End(Option<String>),
}

/// Reads from a server until a signal comes; when it ends, or cannot be reached, tries again, if not `once`.
pub(super) fn follow(server: &str, once: bool, sink: &mut Sink<'_>) -> Result<(), Failure> {
    let mut pause = FIRST_PAUSE;
    let mut told = String::new();
    while !sink.stops() {
        let why = match connect(server) {
            Ok(stream) => {
                // A server that takes and ends connections is told of once, too.
                if told.is_empty() {
                    out::note(&escape(&format!("{server}: connected")));
                }
                sink.report.connections += 1;
                let before = sink.report.frames;
                let why = read(Box::new(stream), server, sink)?;
                if sink.report.frames > before {
                    (pause, told) = (FIRST_PAUSE, String::new());
                }
                why
            }
            Err(error) => Some(error.to_string()),
        };
        if sink.stops() {
            return Ok(());
        }
        sink.report.broken += u64::from(why.is_some());
        match (once, why) {
            (true, Some(why)) => return Err(Failure::about(server, why)),
            (true, None) => return Ok(()),
            (false, why) => {
                let why = why.unwrap_or_else(|| "it ended".into());
                // A server that is away for hours is told once.
                if why != told {
                    out::warn(&escape(&format!("{server}: {why}; trying again")));
                    told = why;
                }
            }
        }
        let until = Instant::now() + pause;
        while Instant::now() < until && !sink.stops() {
            std::thread::sleep(LOOK.min(pause));
        }
        pause = (pause * 2).min(LAST_PAUSE);
    }
    Ok(())
}

/// Reads standard input to its end.
pub(super) fn read_input(sink: &mut Sink<'_>) -> Result<(), Failure> {
    match read(Box::new(io::stdin()), "standard input", sink)? {
        None => Ok(()),
        Some(why) => {
            sink.report.broken += 1;
            Err(Failure::about("standard input", why))
        }
    }
}

fn connect(server: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::other("it has no address");
    for address in server.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => {
                // A server whose machine is gone says nothing any more.
                rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
                rustix::net::sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
                rustix::net::sockopt::set_tcp_keepintvl(&stream, ASK_AGAIN)?;
                rustix::net::sockopt::set_tcp_keepcnt(&stream, ASK)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sends what a stream has until it is over, or a signal comes; says why it ended, if not as captures end.
fn read(
    stream: Box<dyn Read + Send>,
    name: &str,
    sink: &mut Sink,
) -> Result<Option<String>, Failure> {
    let (to, items) = sync_channel(AHEAD);
    let path = PathBuf::from(name);
    // NB: it may wait for a byte for ever, and ends with the process.
    let thread = std::thread::Builder::new().name("feed-read".into());
    thread.spawn(move || take_apart(Reader::stream(stream, path), &to))?;
    pass_on(&items, sink)
}

fn take_apart(mut reader: Reader, to: &SyncSender<Item>) {
    loop {
        let item = match reader.read() {
            Ok(Some(packet)) if packet.link_type != ETHERNET => Item::Foreign(packet.link_type),
            Ok(Some(packet)) if packet.bytes.len() < packet.wire_len as usize => Item::Snapped,
            Ok(Some(packet)) if packet.bytes.len() > LONGEST => Item::TooLong,
            Ok(Some(packet)) => Item::Frame(packet.bytes.to_vec()),
            Ok(None) => Item::End(match reader.end() {
                End::Torn(at) => Some(format!("it ended within the block at byte {at}")),
                End::Clean | End::Unwritten(_) => None,
            }),
            Err(error) => Item::End(Some(error.to_string())),
        };
        let is_end = matches!(item, Item::End(_));
        if to.send(item).is_err() || is_end {
            return;
        }
    }
}

fn pass_on(items: &Receiver<Item>, sink: &mut Sink<'_>) -> Result<Option<String>, Failure> {
    let mut batch: Vec<Vec<u8>> = Vec::with_capacity(BATCH);
    loop {
        if sink.stops() {
            return Ok(None);
        }
        let first = match items.recv_timeout(LOOK) {
            Ok(item) => item,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return Ok(Some("the reader failed".into())),
        };
        let mut end = None;
        for item in std::iter::once(first).chain(items.try_iter().take(BATCH - 1)) {
            match item {
                Item::Frame(frame) => batch.push(frame),
                Item::Snapped => sink.report.refused.snapped += 1,
                Item::TooLong => sink.report.refused.too_long += 1,
                Item::Foreign(kind) => *sink.report.refused.foreign.entry(kind).or_default() += 1,
                Item::End(why) => end = Some(why),
            }
        }
        let frames: Vec<&[u8]> = batch.iter().map(Vec::as_slice).collect();
        sink.send(&frames)?;
        batch.clear();
        if let Some(why) = end {
            return Ok(why);
        }
    }
}

/// `LINKTYPE_ETHERNET`.
const ETHERNET: u32 = 1;
/// A record has no more, with a tag of a VLAN and the Ethernet header: so what waits is bounded, too.
const LONGEST: usize = 65_535 + 18;
/// Frames that are read ahead of what was sent.
const AHEAD: usize = 1024;
/// How soon a signal is seen.
const LOOK: Duration = Duration::from_millis(50);
const CONNECT: Duration = Duration::from_secs(5);
/// After this silence the kernel asks whether the server is there.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// As often, each time after so long: it is gone after a minute. Linux by itself waits for eleven more.
const ASK: u32 = 3;
const ASK_AGAIN: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::{tcp_keepcnt, tcp_keepidle, tcp_keepintvl};

    use super::*;

    #[test]
    fn a_server_whose_machine_is_gone_is_missed_within_a_minute() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = connect(&server.local_addr().unwrap().to_string()).unwrap();
        let first = tcp_keepidle(&stream).unwrap();
        let rest = tcp_keepintvl(&stream).unwrap() * tcp_keepcnt(&stream).unwrap();
        assert!(first + rest <= Duration::from_secs(60));
    }
}
