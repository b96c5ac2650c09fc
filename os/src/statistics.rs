//! What an interface and its driver count: `RTM_GETSTATS` of rtnetlink(7), which needs no privilege.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::netdevice::name_to_index;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::netlink::{self, NLMSG_ERROR, attributes, messages};

/// Figures of an interface since the kernel made it, in its words (`struct rtnl_link_stats64`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Frames received.
    pub rx_packets: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Damaged frames.
    pub rx_errors: u64,
    /// Frames that could not be sent.
    pub tx_errors: u64,
    /// Dropped after the NIC.
    pub rx_dropped: u64,
    /// Dropped before the NIC.
    pub tx_dropped: u64,
    /// Lost in the NIC: its memory was full.
    pub rx_fifo_errors: u64,
    /// Lost in the NIC: it had no buffer of the kernel's.
    pub rx_missed_errors: u64,
}

/// The figures of the interface that has this name now, by a socket of rtnetlink of its network namespace that does not block.
///
/// # Errors
/// `ENODEV` if there is none; the kernel's.
pub fn of(socket: BorrowedFd<'_>, name: &str) -> io::Result<Statistics> {
    let index = name_to_index(socket, name)?;
    let mut answer = [0; ANSWER_BYTES];
    // An answer that nobody took would be taken for this one.
    while recv(socket, &mut answer, RecvFlags::empty()).is_ok() {}
    send(socket, &request(index), SendFlags::empty())?;
    // NB: the kernel answers within `send`; nothing is waited for.
    let (len, _) = recv(socket, &mut answer, RecvFlags::empty())?;
    read(answer.get(..len).unwrap_or_default(), index)
}

const RTM_NEWSTATS: u16 = 92;
const RTM_GETSTATS: u16 = 94;
const NLM_F_REQUEST: u16 = 1;
const IFLA_STATS_LINK_64: u16 = 1;
/// `struct nlmsghdr`, and `struct if_stats_msg` behind it.
const HEADER: usize = 16;
const MESSAGE: usize = 12;
/// One interface with one attribute takes some 230.
const ANSWER_BYTES: usize = 4096;

fn request(index: u32) -> [u8; HEADER + MESSAGE] {
    let mut bytes = [0; HEADER + MESSAGE];
    bytes[..4].copy_from_slice(&((HEADER + MESSAGE) as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&RTM_GETSTATS.to_ne_bytes());
    bytes[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    bytes[HEADER + 4..HEADER + 8].copy_from_slice(&index.to_ne_bytes());
    let wanted = 1_u32 << (IFLA_STATS_LINK_64 - 1);
    bytes[HEADER + 8..].copy_from_slice(&wanted.to_ne_bytes());
    bytes
}

/// What the kernel answered about the interface of this number.
fn read(answer: &[u8], index: u32) -> io::Result<Statistics> {
    let odd = || io::Error::other("the kernel's answer makes no sense");
    let message = messages(answer).next().ok_or_else(odd)?;
    let number = |at: usize| message.body.get(at..).and_then(netlink::number);
    match message.kind {
        RTM_NEWSTATS if number(4) == Some(index) => {}
        NLMSG_ERROR => {
            let code = number(0).ok_or_else(odd)?.cast_signed();
            return Err(io::Error::from_raw_os_error(code.saturating_neg()));
        }
        _ => return Err(odd()),
    }
    let rest = message.body.get(MESSAGE..).ok_or_else(odd)?;
    let mut found = attributes(rest).filter(|(kind, _)| *kind == IFLA_STATS_LINK_64);
    found
        .next()
        .and_then(|(_, value)| statistics(value))
        .ok_or_else(odd)
}

/// Newer kernels add figures at the end.
fn statistics(bytes: &[u8]) -> Option<Statistics> {
    let figure = |place: usize| -> Option<u64> {
        let eight = bytes.get(place * 8..place * 8 + 8)?;
        Some(u64::from_ne_bytes(eight.try_into().ok()?))
    };
    Some(Statistics {
        rx_packets: figure(0)?,
        tx_packets: figure(1)?,
        rx_bytes: figure(2)?,
        tx_bytes: figure(3)?,
        rx_errors: figure(4)?,
        tx_errors: figure(5)?,
        rx_dropped: figure(6)?,
        tx_dropped: figure(7)?,
        rx_fifo_errors: figure(14)?,
        rx_missed_errors: figure(15)?,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::SocketFlags;

    use super::*;

    #[test]
    fn the_kernel_tells_the_same_here_and_in_sysfs() {
        let file = |what: &str| -> u64 {
            let path = format!("/sys/class/net/lo/statistics/{what}");
            std::fs::read_to_string(path)
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        };
        let socket = netlink::open(SocketFlags::NONBLOCK).unwrap();
        let before = file("rx_packets");
        let own = of(socket.as_fd(), "lo").unwrap();
        assert!((before..=file("rx_packets")).contains(&own.rx_packets));
        assert_eq!(own.rx_missed_errors, file("rx_missed_errors"));
        let error = of(socket.as_fd(), "no-such").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        // It is asked again after a refusal.
        assert!(of(socket.as_fd(), "lo").is_ok());
    }

    #[test]
    fn an_answer_that_is_cut_or_lies_is_refused() {
        let mut whole = [0_u8; HEADER + MESSAGE + 4 + 24 * 8];
        let len = whole.len() as u32;
        whole[..4].copy_from_slice(&len.to_ne_bytes());
        whole[4..6].copy_from_slice(&RTM_NEWSTATS.to_ne_bytes());
        let attribute = HEADER + MESSAGE;
        whole[attribute..attribute + 2].copy_from_slice(&196_u16.to_ne_bytes());
        whole[attribute + 2..attribute + 4].copy_from_slice(&IFLA_STATS_LINK_64.to_ne_bytes());
        whole[attribute + 4 + 15 * 8] = 7;
        assert_eq!(read(&whole, 0).unwrap().rx_missed_errors, 7);
        assert!(read(&whole, 1).is_err(), "it is about another one");
        for len in 0..whole.len() {
            assert!(read(&whole[..len], 0).is_err(), "{len}");
        }
        // An attribute of no length is not read for ever.
        whole[attribute..attribute + 2].fill(0);
        assert!(read(&whole, 0).is_err());
    }
}
