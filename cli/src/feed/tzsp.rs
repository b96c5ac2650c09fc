//! TZSP, the TaZmen Sniffer Protocol: a frame in a datagram, as routers of MikroTik and access points mirror traffic.
//!
//! ```text
//!   0        1        2                 4
//!   version  type     encapsulation     tags: number, length, value …   1 (end)   the frame
//!   1        0, 1     1 = Ethernet      0 is padding, without a length
//! ```
//!
//! Numbers are big-endian. There is no standard; this is what Wireshark's dissector reads (`packet-tzsp.c`).

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vnplug_os::datagrams::Inbox;
use vnplug_sandbox::floor::Network;
use vnplug_store::replay::BATCH;

use super::Sink;
use crate::failure::Failure;
use crate::out;
use crate::text::grouped;

/// Where it is sent to by default.
pub(super) const PORT: u16 = 37008;

/// Datagrams that had no frame for us, by reason.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Unread {
    /// Their sender is not among those that were named.
    strangers: u64,
    /// They are no TZSP, or end early.
    malformed: u64,
    /// Frames of other encapsulations (802.11 …).
    foreign: u64,
    /// Without a frame: a sender that says that it is there.
    empty: u64,
}

/// What a datagram has.
#[derive(Debug, PartialEq)]
enum Content<'a> {
    Frame(&'a [u8]),
    /// Only its beginning.
    Snapped,
    Malformed,
    Foreign,
    Empty,
}

/// Takes what comes by UDP, from `senders` alone if there are some, until a signal comes.
pub(super) fn listen(
    address: SocketAddr,
    senders: &[Network],
    sink: &mut Sink<'_>,
) -> Result<(), Failure> {
    let about = |error: std::io::Error| Failure::about(address, error);
    let socket = UdpSocket::bind(address).map_err(about)?;
    // As much as the system gives: routers do not send again.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, BUFFER);
    out::note(&format!(
        "listening at {}",
        socket.local_addr().map_err(about)?
    ));
    let mut inbox = Inbox::new(BATCH, LONGEST).with_senders();
    let ended = loop {
        if sink.stops() {
            break Ok(());
        }
        let mut there = [PollFd::new(&socket, PollFlags::IN)];
        let within = Timespec::try_from(LOOK).unwrap_or_default();
        // A signal, or nothing: both are looked after above.
        let _ = poll(&mut there, Some(&within));
        inbox.clear();
        // Descriptors do not come by UDP.
        inbox.receive(socket.as_fd(), BATCH, true).map_err(about)?;
        if let Err(error) = pass_on(&inbox, senders, sink) {
            break Err(error);
        }
    };
    sink.report.overrun = overrun(&socket).unwrap_or(0);
    ended
}

fn pass_on(inbox: &Inbox, senders: &[Network], sink: &mut Sink<'_>) -> Result<(), Failure> {
    let mut frames = Vec::with_capacity(inbox.len());
    let mut snapped = 0;
    let unread = &mut sink.report.unread;
    for at in 0..inbox.len() {
        let from = inbox.sender(at).map(|it| it.to_canonical());
        let is_meant = |from| senders.iter().any(|it| it.contains(from));
        if !senders.is_empty() && !from.is_some_and(is_meant) {
            unread.strangers += 1;
            continue;
        }
        match content(inbox.get(at).0) {
            Content::Frame(frame) => frames.push(frame),
            Content::Snapped => snapped += 1,
            Content::Malformed => unread.malformed += 1,
            Content::Foreign => unread.foreign += 1,
            Content::Empty => unread.empty += 1,
        }
    }
    sink.report.refused.snapped += snapped;
    sink.send(&frames)
}

/// Takes a datagram apart.
fn content(datagram: &[u8]) -> Content<'_> {
    let Some(([version, kind, encapsulation @ ..], mut rest)) = datagram.split_first_chunk::<4>()
    else {
        return Content::Malformed;
    };
    if *version != VERSION {
        return Content::Malformed;
    }
    match *kind {
        RECEIVED | TO_SEND => {}
        CONFIGURATION | KEEPALIVE | PORT_OPENER => return Content::Empty,
        _ => return Content::Malformed,
    }
    let mut original = 0;
    loop {
        rest = match rest {
            [ORIGINAL_LENGTH, 2, high, low, rest @ ..] => {
                original = usize::from(u16::from_be_bytes([*high, *low]));
                rest
            }
            [END, frame @ ..] => {
                rest = frame;
                break;
            }
            [PADDING, rest @ ..] => rest,
            [_, len, rest @ ..] => match rest.get(usize::from(*len)..) {
                Some(rest) => rest,
                None => return Content::Malformed,
            },
            _ => return Content::Malformed,
        };
    }
    match (u16::from_be_bytes(*encapsulation), rest) {
        (_, []) => Content::Empty,
        (ETHERNET, frame) if frame.len() < original => Content::Snapped,
        (ETHERNET, frame) => Content::Frame(frame),
        _ => Content::Foreign,
    }
}

impl Unread {
    pub(super) fn lines(&self) -> Vec<String> {
        [
            (
                self.strangers,
                "datagrams were of senders that --from does not name",
            ),
            (self.malformed, "datagrams are no TZSP"),
            (self.foreign, "frames are no Ethernet"),
            (self.empty, "datagrams without a frame"),
        ]
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{} {what}", grouped(*count)))
        .collect()
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "strangers": self.strangers, "malformed": self.malformed, "foreign": self.foreign, "empty": self.empty,
        })
    }
}

/// How many datagrams the kernel dropped at this socket (`/proc/net/udp`, the last column).
fn overrun(socket: &UdpSocket) -> Option<u64> {
    let file = std::fs::File::from(socket.as_fd().try_clone_to_owned().ok()?);
    let inode = file.metadata().ok()?.ino().to_string();
    ["udp", "udp6"].iter().find_map(|table| {
        let text = std::fs::read_to_string(format!("/proc/self/net/{table}")).ok()?;
        let mut rows = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.get(INODE) == Some(&inode.as_str()))?;
        row.last()?.parse().ok()
    })
}

const VERSION: u8 = 1;
const RECEIVED: u8 = 0;
const TO_SEND: u8 = 1;
const CONFIGURATION: u8 = 3;
const KEEPALIVE: u8 = 4;
const PORT_OPENER: u8 = 5;
const ETHERNET: u16 = 1;
const PADDING: u8 = 0;
const END: u8 = 1;
/// How long the frame was before it was cut.
const ORIGINAL_LENGTH: u8 = 41;
/// The column of `/proc/net/udp` that has the socket's file.
const INODE: usize = 9;
/// The longest datagram of UDP.
const LONGEST: usize = 65_535;
const BUFFER: usize = 16 << 20;
/// How soon a signal is seen.
const LOOK: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_is_what_comes_after_the_tags() {
        let plain = [1, 0, 0, 1, 1, 0xaa, 0xbb];
        assert_eq!(content(&plain), Content::Frame(&[0xaa, 0xbb]));
        let tagged = [1, 0, 0, 1, 0, 0, 10, 2, 1, 1, 41, 0, 1, 0xaa];
        assert_eq!(content(&tagged), Content::Frame(&[0xaa]));
        let cut = [1, 0, 0, 1, 41, 2, 0, 2, 1, 0xaa];
        assert_eq!(content(&cut), Content::Snapped);
        let to_send = [1, 1, 0, 1, 1, 0xaa];
        assert_eq!(content(&to_send), Content::Frame(&[0xaa]));
        assert_eq!(content(&[1, 4, 0, 0]), Content::Empty);
        assert_eq!(content(&[1, 0, 0, 1, 1]), Content::Empty);
        assert_eq!(content(&[1, 0, 0, 18, 1, 0xaa]), Content::Foreign);
        for wrong in [
            &[][..],
            &[1, 0, 0],
            &[2, 0, 0, 1, 1, 0xaa],
            &[1, 9, 0, 1, 1],
            &[1, 0, 0, 1],
            &[1, 0, 0, 1, 10],
            &[1, 0, 0, 1, 10, 3, 1, 1],
        ] {
            assert_eq!(content(wrong), Content::Malformed, "{wrong:?}");
        }
    }

    #[test]
    fn what_the_kernel_drops_is_counted() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 4096).unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(overrun(&socket), Some(0));
        for _ in 0..1000 {
            from.send_to(&[0; 1000], socket.local_addr().unwrap())
                .unwrap();
        }
        assert!(overrun(&socket).unwrap() > 900);
    }
}
