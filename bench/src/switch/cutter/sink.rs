//! A TAP that drops all that it is given, and a packet socket that gives it super-frames.
#![expect(
    unsafe_code,
    reason = "ioctl and socket options that rustix does not know"
)]

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::sys;

/// The TAP, in the namespace of the thread that made it.
pub(super) struct Sink(File);

impl Sink {
    /// Makes a TAP of this name, whose link is down yet.
    pub(super) fn new(name: &str) -> Result<Self> {
        let tap = sys::tap(name, libc::IFF_VNET_HDR)?;
        // One instruction: 0 bytes of each frame are wanted.
        let mut nothing = libc::sock_filter {
            code: 0x06,
            jt: 0,
            jf: 0,
            k: 0,
        };
        let program = libc::sock_fprog {
            len: 1,
            filter: &raw mut nothing,
        };
        // SAFETY: TUNATTACHFILTER copies the program.
        let attached = unsafe {
            libc::ioctl(
                tap.as_raw_fd(),
                libc::TUNATTACHFILTER as _,
                &raw const program,
            )
        };
        checked(attached)?;
        Ok(Self(tap))
    }

    /// Whether the TAP offers to take super-frames and to make checksums, as a card does.
    pub(super) fn offers(&self, all: bool) -> Result<()> {
        let features = match all {
            true => libc::TUN_F_CSUM | libc::TUN_F_TSO4,
            false => 0,
        };
        // SAFETY: TUNSETOFFLOAD takes a number and touches no memory of ours.
        let set = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::TUNSETOFFLOAD as _,
                libc::c_ulong::from(features),
            )
        };
        checked(set)
    }
}

/// A packet socket on an interface, which takes each frame behind its virtio-net header. The link must be up.
pub(super) fn sender(name: &str) -> Result<File> {
    let protocol = (libc::ETH_P_IP as u16).to_be();
    // SAFETY: makes a descriptor and touches no memory.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            i32::from(protocol),
        )
    };
    checked(fd)?;
    // SAFETY: it was just made, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let yes: libc::c_int = 1;
    // SAFETY: the option's value is a live c_int, and its length is given.
    checked(unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_PACKET,
            PACKET_VNET_HDR,
            (&raw const yes).cast(),
            size_of_val(&yes) as _,
        )
    })?;
    let index = rustix::net::netdevice::name_to_index(&socket, name)?;
    // SAFETY: a `sockaddr_ll` of zeros is one.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as _;
    address.sll_protocol = protocol;
    address.sll_ifindex = index.cast_signed();
    // SAFETY: the address is live, and its length is given.
    checked(unsafe {
        libc::bind(
            fd,
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    })?;
    Ok(socket.into())
}

fn checked(result: libc::c_int) -> Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// `linux/if_packet.h`.
const PACKET_VNET_HDR: libc::c_int = 15;
