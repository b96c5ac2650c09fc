//! Packet sockets (`AF_PACKET`, packet(7)): options, the mapped receive ring.
//!
//! Only what touches raw memory or lacks a safe wrapper is here. What the bytes in a ring mean is
//! `source::af_packet::block`'s business; this file lends them while the kernel leaves them alone.
#![expect(
    unsafe_code,
    reason = "packet socket options and the mapped ring have no safe wrapper"
)]

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::interface::named;

/// A packet socket that receives nothing until [`Socket::bind`].
#[derive(Debug)]
pub struct Socket(OwnedFd);

/// The receive ring's shape; `frames` and `frame_size` only satisfy the kernel's sanity checks.
#[derive(Debug, Clone, Copy)]
pub struct RingShape {
    /// Bytes of a block, a multiple of the page size.
    pub block_size: u32,
    /// How many there are.
    pub blocks: u32,
    /// The kernel hands over a block that is not full after this time.
    pub timeout_ms: u32,
}

impl Socket {
    /// Opens a socket; needs `CAP_NET_RAW`. Protocol 0: nothing arrives before it is bound.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        Ok(Self(fd))
    }

    /// Sets an integer option of level `SOL_PACKET`.
    pub fn set(&self, option: c_int, value: c_int) -> io::Result<()> {
        set_option(&self.0, libc::SOL_PACKET, option, &value)
    }

    /// Reads an integer option of level `SOL_PACKET`.
    pub fn get(&self, option: c_int) -> io::Result<c_int> {
        get_option(&self.0, libc::SOL_PACKET, option)
    }

    /// Takes the kernel's counters since the last call (it clears them).
    pub fn take_statistics(&self) -> io::Result<libc::tpacket_stats_v3> {
        get_option(&self.0, libc::SOL_PACKET, libc::PACKET_STATISTICS)
    }

    /// Takes the pending error, for instance `ENETDOWN` after the interface went down.
    pub fn take_error(&self) -> Option<io::Error> {
        match rustix::net::sockopt::socket_error(&self.0) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno.into()),
        }
    }

    /// How many bytes of frames may be on their way out, headers of the kernel's included. More than the
    /// system gives everybody (`net.core.wmem_max`) needs `CAP_NET_ADMIN`: without it, as many as that.
    pub fn set_send_buffer(&self, bytes: c_int) -> io::Result<()> {
        set_option(&self.0, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes)
            .or_else(|_| set_option(&self.0, libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes))
    }

    /// Replaces the classic BPF program that decides what enters the ring, and how much of it.
    pub fn set_filter(&self, program: &[libc::sock_filter]) -> io::Result<()> {
        let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let filter = libc::sock_fprog {
            len,
            filter: program.as_ptr().cast_mut(),
        };
        set_option(&self.0, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    /// Makes the interface promiscuous for as long as this socket lives.
    pub fn set_promiscuous(&self, index: i32) -> io::Result<()> {
        let request = libc::packet_mreq {
            mr_ifindex: index,
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        set_option(
            &self.0,
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            &request,
        )
    }

    /// Starts to receive every protocol of one interface.
    pub fn bind(&self, index: i32) -> io::Result<()> {
        let mut address = plain::<libc::sockaddr_ll>();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index;
        // SAFETY: `address` is a whole sockaddr_ll and the length says so.
        let result = unsafe {
            libc::bind(
                self.0.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        check(result)
    }

    /// The interface the socket is bound to; -1 after that interface was deleted.
    pub fn bound_to(&self) -> io::Result<i32> {
        let mut address = plain::<libc::sockaddr_ll>();
        let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, the size of `address`.
        let result = unsafe {
            libc::getsockname(self.0.as_raw_fd(), (&raw mut address).cast(), &raw mut len)
        };
        check(result)?;
        Ok(address.sll_ifindex)
    }

    /// Has the kernel stamp every frame once, where it arrives or leaves: without it each packet
    /// socket stamps for itself, and two of them tell two times of one frame. Concerns all sockets
    /// of the machine for as long as this one lives.
    pub fn stamp_in_kernel(&self) -> io::Result<()> {
        let on: c_int = 1;
        set_option(&self.0, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, &on)
    }

    /// Asks the NIC's driver to stamp every received frame; needs `CAP_NET_ADMIN`.
    pub fn stamp_in_hardware(&self, name: &str) -> io::Result<()> {
        let mut config = libc::hwtstamp_config {
            flags: 0,
            tx_type: libc::HWTSTAMP_TX_OFF as c_int,
            rx_filter: libc::HWTSTAMP_FILTER_ALL as c_int,
        };
        let mut request = named(name)?;
        request.ifr_ifru.ifru_data = (&raw mut config).cast();
        // SAFETY: SIOCSHWTSTAMP reads and writes the `hwtstamp_config` that `ifru_data` points to,
        // which outlives the call.
        check(unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::SIOCSHWTSTAMP as _,
                &raw mut request,
            )
        })
    }

    /// Sends frames by the interface it is bound to, without blocking: how many, and what stopped
    /// it before the end. The frames lie in `bytes`, one after the other, with these lengths.
    pub fn send(&self, bytes: &[u8], lens: &[u32]) -> (usize, Option<io::Error>) {
        let mut parts = Vec::with_capacity(lens.len());
        let mut rest = bytes;
        for &len in lens {
            let Some((frame, behind)) = rest.split_at_checked(len as usize) else {
                break;
            };
            rest = behind;
            parts.push(libc::iovec {
                iov_base: frame.as_ptr().cast_mut().cast(),
                iov_len: frame.len(),
            });
        }
        let mut messages: Vec<libc::mmsghdr> = parts
            .iter_mut()
            .map(|part| {
                let mut message = plain::<libc::mmsghdr>();
                message.msg_hdr.msg_iov = part;
                message.msg_hdr.msg_iovlen = 1;
                message
            })
            .collect();
        let mut sent = 0;
        while sent < messages.len() {
            let left = &mut messages[sent..];
            // SAFETY: each message has one part, a slice of `bytes`, which the kernel only reads;
            // both vectors outlive the call.
            let result = unsafe {
                libc::sendmmsg(
                    self.0.as_raw_fd(),
                    left.as_mut_ptr(),
                    left.len() as u32,
                    libc::MSG_DONTWAIT,
                )
            };
            match result {
                ..=0 => return (sent, Some(io::Error::last_os_error())),
                more => sent += more as usize,
            }
        }
        (sent, None)
    }

    /// One that another process opened.
    ///
    /// # Errors
    /// It is no packet socket.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        let is =
            socket_domain(&fd)? == AddressFamily::PACKET && socket_type(&fd)? == SocketType::RAW;
        match is {
            true => Ok(Self(fd)),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is no packet socket",
            )),
        }
    }

    /// Asks for a TPACKET_V3 ring and maps it.
    pub fn into_ring(self, shape: RingShape) -> io::Result<Ring> {
        const FRAME: u32 = 2048;
        self.set(
            libc::PACKET_VERSION,
            libc::tpacket_versions::TPACKET_V3 as c_int,
        )?;
        let request = libc::tpacket_req3 {
            tp_block_size: shape.block_size,
            tp_block_nr: shape.blocks,
            tp_frame_size: FRAME,
            tp_frame_nr: (shape.block_size / FRAME) * shape.blocks,
            tp_retire_blk_tov: shape.timeout_ms,
            tp_sizeof_priv: NOTE_LEN as u32,
            tp_feature_req_word: 0,
        };
        set_option(&self.0, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        self.map(shape)
    }

    /// Maps the ring of this shape that it has.
    ///
    /// # Errors
    /// It has none, or one of another size.
    pub fn map(self, shape: RingShape) -> io::Result<Ring> {
        let (block_size, blocks) = (shape.block_size as usize, shape.blocks as usize);
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; the kernel refuses any size but the ring's.
        let base = unsafe {
            libc::mmap(
                null_mut(),
                block_size * blocks,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.0.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Ring {
            socket: self,
            base,
            block_size,
            blocks,
        })
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A socket's receive ring: equal blocks, each at one time the kernel's or ours.
///
/// A block's status word says whose it is. The kernel sets `TP_STATUS_USER` and then leaves the
/// whole block alone; [`Ring::release`] gives it back.
#[derive(Debug)]
pub struct Ring {
    socket: Socket,
    base: NonNull<u8>,
    block_size: usize,
    blocks: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and only `Ring` refers to it.
unsafe impl Send for Ring {}

impl Ring {
    /// The socket that fills the ring.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The status word of a block that is ours, else `None`.
    pub fn status(&self, block: usize) -> Option<u32> {
        // Acquire: pairs with the kernel's barrier before it stores the status in
        // `prb_flush_block`; the block's bytes are visible once the status is.
        let status = self.status_word(block).load(Ordering::Acquire);
        (status & libc::TP_STATUS_USER != 0).then_some(status)
    }

    /// A block that is ours, as plain bytes: ours to change as well, until `release`.
    pub fn block(&mut self, block: usize) -> Option<&mut [u8]> {
        self.status(block)?;
        // SAFETY: `status_word` checked that `block` lies in the mapping; the kernel neither
        // writes nor takes back a block of ours, and `&mut self` keeps everyone else off it.
        Some(unsafe {
            std::slice::from_raw_parts_mut(
                self.base.as_ptr().add(block * self.block_size),
                self.block_size,
            )
        })
    }

    /// How many frames lie in a block, the kernel's or ours, that were not given back with it.
    pub fn frames(&self, block: usize) -> u32 {
        // Acquire: a frame that the kernel put into a block of ours after this one is not seen before.
        self.word(block, PACKETS_OFFSET).load(Ordering::Acquire)
    }

    /// The number of a block's filling: those of a ring are numbered as they are filled, from 1 on. 0: it never was.
    pub fn filling(&self, block: usize) -> u64 {
        self.long(block, FILLING_OFFSET)
    }

    /// Whether who read this filling of a block noted that it has no more frames. The note may be another process'.
    pub fn is_spent(&self, block: usize) -> bool {
        let filling = self.filling(block);
        filling != 0
            && self.long(block, NOTE) == filling
            && self.word(block, NOTE + 8).load(Ordering::Relaxed) == 0
    }

    /// Gives a block back to the kernel.
    pub fn release(&mut self, block: usize) {
        // The kernel does so when it opens the block, which a ring that was full puts off.
        self.word(block, PACKETS_OFFSET).store(0, Ordering::Relaxed);
        // Release: our accesses to the block end before the kernel sees that it may write.
        self.status_word(block)
            .store(libc::TP_STATUS_KERNEL, Ordering::Release);
    }

    fn status_word(&self, block: usize) -> &AtomicU32 {
        self.word(block, STATUS_OFFSET)
    }

    /// Two words, as the machine has them.
    fn long(&self, block: usize, offset: usize) -> u64 {
        let word = |offset| {
            self.word(block, offset)
                .load(Ordering::Relaxed)
                .to_ne_bytes()
        };
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&word(offset));
        bytes[4..].copy_from_slice(&word(offset + 4));
        u64::from_ne_bytes(bytes)
    }

    /// A word of a block's header, at one of the offsets below, or of the note after it.
    fn word(&self, block: usize, offset: usize) -> &AtomicU32 {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        assert!(offset + 4 <= NOTE + NOTE_LEN && offset.is_multiple_of(4));
        let offset = block * self.block_size + offset;
        // SAFETY: inside the mapping by the checks above; blocks are page-aligned and the offset is
        // a multiple of 4; no `&mut` to the block lives here, as `self` is borrowed.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, its whole length, never used again.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.block_size * self.blocks) };
    }
}

/// Types whose every bit pattern, all zeros included, is a value.
///
/// # Safety
/// The implementor has no invalid bit pattern and no padding that matters to the kernel.
unsafe trait Plain: Copy {}
// SAFETY: an integer.
unsafe impl Plain for c_int {}
// SAFETY: integers only.
unsafe impl Plain for libc::tpacket_stats_v3 {}
// SAFETY: integers only.
unsafe impl Plain for libc::sockaddr_ll {}
// SAFETY: integers and pointers, which may be null.
unsafe impl Plain for libc::mmsghdr {}

fn plain<T: Plain>() -> T {
    // SAFETY: all zeros is a value of a `Plain` type.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn set_option<T>(fd: &OwnedFd, level: c_int, option: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `value`; the filter program that
    // `sock_fprog` points to is borrowed by `set_filter` for the call.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    })
}

fn get_option<T: Plain>(fd: &OwnedFd, level: c_int, option: c_int) -> io::Result<T> {
    let mut value = plain::<T>();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `value`.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw mut value).cast(),
            &raw mut len,
        )
    })?;
    Ok(value)
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Where in a block its reader may note what it likes: after the header, as the kernel aligns it (`BLK_HDR_LEN`). The kernel
/// neither reads nor writes it. [`Ring::is_spent`] takes the first 8 bytes for the filling's number, and the next 4 for how many
/// frames are left.
pub const NOTE: usize = size_of::<libc::tpacket_block_desc>().next_multiple_of(8);
/// How long that may be.
pub const NOTE_LEN: usize = 16;
const HEADER: usize = offset_of!(libc::tpacket_block_desc, hdr);
/// `seq_num`.
const FILLING_OFFSET: usize = HEADER + offset_of!(libc::tpacket_hdr_v1, seq_num);
const STATUS_OFFSET: usize = HEADER + offset_of!(libc::tpacket_hdr_v1, block_status);
const PACKETS_OFFSET: usize = HEADER + offset_of!(libc::tpacket_hdr_v1, num_pkts);
