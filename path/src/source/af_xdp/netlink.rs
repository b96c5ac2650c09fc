//! Facts about interfaces from rtnetlink: the XDP program that one has, and that something changed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use vnplug_os::netlink;
use vnplug_os::netlink::{GROUP_LINK, IFINFO, RTM_NEWLINK, attributes, number};

/// Becomes readable when an interface of this network namespace changed.
#[derive(Debug)]
pub(super) struct Watch(OwnedFd);

impl Watch {
    /// Listens in the calling thread's network namespace; needs no privilege.
    pub(super) fn new() -> std::io::Result<Self> {
        let socket = netlink::open(SocketFlags::NONBLOCK)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUP_LINK))?;
        Ok(Self(socket))
    }

    /// Forgets what was told; true if something was.
    pub(super) fn changed(&self) -> bool {
        let mut told = false;
        // Bounded: interfaces may change as fast as they are heard of.
        for _ in 0..MOST_NEWS {
            match rustix::net::recv(&self.0, &mut [0_u8; 64], RecvFlags::DONTWAIT) {
                // ENOBUFS: news were lost, which is news.
                Ok(_) | Err(Errno::NOBUFS) => told = true,
                Err(_) => break,
            }
        }
        told
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What the kernel says of an interface and XDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct XdpState {
    /// The id of the program that is attached in the driver, after it, or in the NIC; 0: none.
    pub(super) program: u32,
    /// Receive queues that were made for it; not all need to be in use.
    pub(super) made_queues: u32,
}

/// Asks for the state of the interface with this index.
pub(super) fn xdp_state(index: i32) -> std::io::Result<XdpState> {
    let socket = netlink::open(SocketFlags::empty())?;
    let request = netlink::link_request(0, index, &[]);
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&socket, &request, SendFlags::empty(), &kernel)?;
    let mut answer = vec![0_u8; 64 << 10];
    let (len, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    state(&answer[..len]).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// Reads an answer; `None` if it is none.
fn state(answer: &[u8]) -> Option<XdpState> {
    let message = netlink::messages(answer).next()?;
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let mut state = XdpState::default();
    for (kind, value) in attributes(message.body.get(IFINFO..)?) {
        match kind {
            IFLA_NUM_RX_QUEUES => state.made_queues = number(value)?,
            IFLA_XDP => {
                let mut ids = attributes(value)
                    .filter(|(kind, _)| {
                        let (first, last) = (IFLA_XDP_PROG_ID, IFLA_XDP_HW_PROG_ID);
                        (first..=last).contains(kind)
                    })
                    .filter_map(|(_, value)| number(value));
                state.program = ids.find(|&id| id != 0).unwrap_or(0);
            }
            _ => {}
        }
    }
    Some(state)
}

const MOST_NEWS: usize = 64;

// linux/if_link.h
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_HW_PROG_ID: u16 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn an_answer_tells_program_and_queues() {
        let mut answer = vec![0; 32];
        answer[4..6].copy_from_slice(&RTM_NEWLINK.to_ne_bytes());
        answer.extend(attribute(3, b"va\0"));
        answer.extend(attribute(IFLA_NUM_RX_QUEUES, &4_u32.to_ne_bytes()));
        let mut nested = attribute(2, &[1]);
        nested.extend(attribute(5, &77_u32.to_ne_bytes()));
        answer.extend(attribute(IFLA_XDP | 0x8000, &nested));
        let whole = |answer: &mut Vec<u8>| {
            let len = answer.len() as u32;
            answer[..4].copy_from_slice(&len.to_ne_bytes());
        };
        whole(&mut answer);
        let expected = XdpState {
            program: 77,
            made_queues: 4,
        };
        assert_eq!(state(&answer), Some(expected));
        for len in 0..answer.len() {
            let _ = state(&answer[..len]);
        }
        answer[4] = 2;
        assert_eq!(state(&answer), None);
    }
}
