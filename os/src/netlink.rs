//! What the kernel says of interfaces by rtnetlink(7): messages and their attributes.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A message: its head's fields that matter, and the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// What it is.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// What comes after the head.
    pub body: &'a [u8],
}

/// A socket of rtnetlink in the calling thread's network namespace; needs no privilege.
///
/// # Errors
/// The system's.
pub fn open(flags: SocketFlags) -> std::io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    // No protocol is NETLINK_ROUTE, number 0.
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    Ok(socket)
}

/// A request about interfaces: about that of this number, or (0) about all, with these attributes.
pub fn link_request(flags: u16, index: i32, attributes: &[u8]) -> Vec<u8> {
    let len = HEAD + IFINFO + attributes.len();
    let mut request = (len as u32).to_ne_bytes().to_vec(); // nlmsghdr: length,
    request.extend(RTM_GETLINK.to_ne_bytes());
    request.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    request.extend([0; 8]); // sequence, port;
    request.extend([0; 4]); // ifinfomsg: family, type,
    request.extend(index.to_ne_bytes());
    request.extend([0; 8]); // flags, change
    request.extend(attributes);
    request
}

/// The messages of a datagram, up to its end or the first that does not fit.
pub fn messages(mut rest: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let head = rest.get(..HEAD)?;
        let len = u32::from_ne_bytes(*head.first_chunk()?) as usize;
        let half = |at: usize| Some(u16::from_ne_bytes(*head.get(at..)?.first_chunk()?));
        let message = Message {
            kind: half(4)?,
            flags: half(6)?,
            body: rest.get(HEAD..len)?,
        };
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes (type, value) of a message, up to its end or the first that does not fit.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, _) = rest.split_first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]) & NLA_TYPE_MASK;
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// A number that an attribute has.
pub fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Bytes of `nlmsghdr`.
const HEAD: usize = 16;
/// Bytes of `ifinfomsg`.
pub const IFINFO: usize = 16;

// linux/netlink.h, linux/rtnetlink.h
/// The end of an answer of several messages.
pub const NLMSG_DONE: u16 = 3;
/// A refusal.
pub const NLMSG_ERROR: u16 = 2;
/// There is an interface, or it is another one.
pub const RTM_NEWLINK: u16 = 16;
/// An interface is gone.
pub const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const NLM_F_REQUEST: u16 = 1;
/// What is told changed while it was.
pub const NLM_F_DUMP_INTR: u16 = 0x10;
/// About all there are.
pub const NLM_F_DUMP: u16 = 0x300;
const NLA_TYPE_MASK: u16 = 0x3fff;
/// The group that hears of interfaces.
pub const GROUP_LINK: u32 = 1;
