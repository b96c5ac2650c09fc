//! Many datagrams in one system call: `recvmmsg(2)` into memory of our own, `sendmmsg(2)` from it.
//!
//! The sender may be a stranger. Descriptors that come with a datagram must not be dropped by the
//! thread that reads ([`crate::socket`] says why): where the kernel can refuse them it does, and
//! elsewhere each datagram is looked at before it is taken.
#![expect(
    unsafe_code,
    reason = "recvmmsg and sendmmsg, which rustix does not have"
)]

use std::io::{self, IoSliceMut};
use std::mem::{MaybeUninit, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recvmsg};

/// Memory for frames that are received together: datagrams, and what is copied from elsewhere.
#[derive(Debug)]
pub struct Inbox {
    memory: Box<[u8]>,
    /// Bytes of it that are taken.
    used: usize,
    stride: usize,
    longest: usize,
    most: usize,
    came: Vec<Place>,
    /// Who sent each, if that is wanted; only datagrams come then.
    senders: Option<Vec<Name>>,
}

/// An address as the kernel writes it (`sockaddr_in`, `sockaddr_in6`).
type Name = [u8; 28];

/// Where a frame lies.
#[derive(Debug, Clone, Copy)]
struct Place {
    begin: u32,
    len: u32,
    /// There were more bytes than fit.
    is_cut: bool,
}

/// The end of a batch of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// There may be more.
    More,
    /// There is nothing more now.
    Nothing,
    /// The next one brings descriptors and stays where it is: close the socket aside.
    Rights,
}

impl Inbox {
    /// For at most `count` frames in all, of which as many as that may be datagrams of up to `longest`
    /// bytes.
    pub fn new(count: usize, longest: usize) -> Self {
        // Not a power of two: equal places in all datagrams would share a set of the cache.
        let stride = longest.next_multiple_of(LINE) + 3 * LINE;
        Self {
            memory: vec![0; stride * count].into_boxed_slice(),
            used: 0,
            stride,
            longest,
            most: count,
            came: Vec::with_capacity(count),
            senders: None,
        }
    }

    /// The same for datagrams alone, of which it is known who sent them.
    #[must_use]
    pub fn with_senders(self) -> Self {
        let senders = Some(Vec::with_capacity(self.most));
        Self { senders, ..self }
    }

    /// Who sent one, by UDP, if that is [known](Self::with_senders).
    pub fn sender(&self, at: usize) -> Option<IpAddr> {
        let name = self.senders.as_ref()?.get(at)?;
        let [low, high, _, _, rest @ ..] = name;
        match i32::from(u16::from_ne_bytes([*low, *high])) {
            libc::AF_INET => Some(Ipv4Addr::from(*rest.first_chunk::<4>()?).into()),
            // After the flow's label.
            libc::AF_INET6 => Some(Ipv6Addr::from(*rest.get(4..)?.first_chunk::<16>()?).into()),
            _ => None,
        }
    }

    /// Forgets what came.
    pub fn clear(&mut self) {
        self.came.clear();
        self.senders.iter_mut().for_each(Vec::clear);
        self.used = 0;
    }

    /// Forgets those from this one on; their room is free again with [`clear`](Self::clear).
    pub fn truncate(&mut self, len: usize) {
        self.came.truncate(len);
        let senders = self.senders.iter_mut();
        senders.for_each(|all| all.truncate(len));
    }

    /// How many are there.
    pub fn len(&self) -> usize {
        self.came.len()
    }

    /// Whether none is there.
    pub fn is_empty(&self) -> bool {
        self.came.is_empty()
    }

    /// How many more datagrams there is room for.
    pub fn room(&self) -> usize {
        let places = (self.memory.len() - self.used) / self.stride;
        places.min(self.most - self.came.len())
    }

    /// Whether there is room for one more frame of `len` bytes.
    #[inline]
    pub fn has_room(&self, len: usize) -> bool {
        self.came.len() < self.most && len <= self.memory.len() - self.used
    }

    /// The bytes of one, and whether there were more than there was room for.
    #[inline]
    pub fn get(&self, at: usize) -> (&[u8], bool) {
        let Place { begin, len, is_cut } = self.came[at];
        let begin = begin as usize;
        (&self.memory[begin..begin + len as usize], is_cut)
    }

    /// As [`get`](Self::get), to be written again.
    #[inline]
    pub fn get_mut(&mut self, at: usize) -> &mut [u8] {
        let Place { begin, len, .. } = self.came[at];
        let begin = begin as usize;
        &mut self.memory[begin..begin + len as usize]
    }

    /// Appends a frame of `len` bytes, all of which `fill` writes; says whether it is there. It is not if
    /// there is [no room](Self::has_room), or if `fill` says that there is none.
    #[inline]
    pub fn push(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let is_there = self.place(len).is_some_and(fill);
        if is_there {
            self.placed(0..len);
        }
        is_there
    }

    /// Where the next frame of `len` bytes goes, if there is room.
    #[inline]
    pub fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        match self.has_room(len) {
            true => Some(&mut self.memory[self.used..self.used + len]),
            false => None,
        }
    }

    /// Appends a frame that lies there in that [place](Self::place), which had room for all of it.
    #[inline]
    pub fn placed(&mut self, frame: Range<usize>) {
        self.came.push(Place {
            begin: (self.used + frame.start) as u32,
            len: frame.len() as u32,
            is_cut: false,
        });
        self.used = (self.used + frame.end.next_multiple_of(LINE)).min(self.memory.len());
    }

    /// Takes at most `most` datagrams from a socket, as far as there is room, without blocking.
    /// `refuses`: the kernel refuses descriptors there ([`pass_rights`](crate::socket::pass_rights)).
    ///
    /// # Errors
    /// The system's.
    pub fn receive(&mut self, from: impl AsFd, most: usize, refuses: bool) -> io::Result<Rest> {
        let mut left = most.min(self.room());
        while left > 0 {
            let now = match refuses {
                true => left.min(AT_ONCE),
                false => match look(&from)? {
                    Rest::More => 1,
                    other => return Ok(other),
                },
            };
            let came = self.take(&from, now)?;
            left -= came;
            if came < now {
                return Ok(Rest::Nothing);
            }
        }
        Ok(Rest::More)
    }

    /// At most [`AT_ONCE`].
    fn take(&mut self, from: &impl AsFd, count: usize) -> io::Result<usize> {
        let count = count.min(self.room());
        let mut places: [libc::iovec; AT_ONCE] = EMPTY;
        // SAFETY: plain integers and pointers, of which zero is a value.
        let mut headers: [libc::mmsghdr; AT_ONCE] = unsafe { zeroed() };
        let memory = self.memory[self.used..].chunks_exact_mut(self.stride);
        let named = self.senders.as_ref().map_or(0, |_| count);
        let mut names: Vec<Name> = vec![[0; size_of::<Name>()]; named];
        let slots = places.iter_mut().zip(&mut headers).zip(memory).take(count);
        for ((place, header), memory) in slots {
            place.iov_base = memory.as_mut_ptr().cast();
            place.iov_len = self.longest;
            header.msg_hdr.msg_iov = place;
            header.msg_hdr.msg_iovlen = 1;
        }
        for (name, header) in names.iter_mut().zip(&mut headers) {
            header.msg_hdr.msg_name = name.as_mut_ptr().cast();
            header.msg_hdr.msg_namelen = size_of::<Name>() as libc::socklen_t;
        }
        // SAFETY: `count` headers, at most AT_ONCE, each with one place of `longest` bytes in memory
        // that is ours alone during the call, and a name, or none, whose length is given; no control messages.
        let came = unsafe {
            libc::recvmmsg(
                from.as_fd().as_raw_fd(),
                headers.as_mut_ptr(),
                count as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if came < 0 {
            return match io::Error::last_os_error() {
                error if is_later(&error) => Ok(0),
                error => Err(error),
            };
        }
        for header in &headers[..came as usize] {
            self.came.push(Place {
                begin: self.used as u32,
                len: header.msg_len.min(self.longest as u32),
                is_cut: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            });
            self.used += self.stride;
        }
        if let Some(senders) = &mut self.senders {
            senders.extend_from_slice(&names[..came as usize]);
        }
        Ok(came as usize)
    }
}

/// What the next datagram is, without taking it.
fn look(socket: &impl AsFd) -> io::Result<Rest> {
    let mut none = RecvAncillaryBuffer::default();
    let mut byte = [0; 1];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut none, flags) {
        Ok(seen) if seen.flags.contains(ReturnFlags::CTRUNC) => Ok(Rest::Rights),
        Ok(_) => Ok(Rest::More),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Rest::Nothing),
        Err(error) => Err(error.into()),
    }
}

/// Sends datagrams, each in two parts, to whom a socket is connected to, without blocking; says how
/// many the system took before one that it did not take now.
///
/// # Errors
/// The system's, if it refused the first.
pub fn send_many<'a>(
    to: impl AsFd,
    datagrams: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> io::Result<usize> {
    let mut parts: [MaybeUninit<[libc::iovec; 2]>; AT_ONCE] = [MaybeUninit::uninit(); AT_ONCE];
    // SAFETY: plain integers and pointers, of which zero is a value.
    let mut headers: [libc::mmsghdr; AT_ONCE] = unsafe { zeroed() };
    let mut count = 0;
    for ((datagram, part), header) in datagrams.zip(&mut parts).zip(&mut headers) {
        let (head, body) = datagram;
        header.msg_hdr.msg_iov = part.write([vector(head), vector(body)]).as_mut_ptr();
        header.msg_hdr.msg_iovlen = if body.is_empty() { 1 } else { 2 };
        count += 1;
    }
    if count == 0 {
        return Ok(0);
    }
    // SAFETY: `count` headers, each with one or two parts that were written just now and point into
    // slices that are borrowed during the call, which only reads them; no names, no control messages.
    let sent = unsafe {
        libc::sendmmsg(
            to.as_fd().as_raw_fd(),
            headers.as_mut_ptr(),
            count,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    match usize::try_from(sent) {
        Ok(sent) => Ok(sent),
        Err(_) => match io::Error::last_os_error() {
            error if is_later(&error) => Ok(0),
            error => Err(error),
        },
    }
}

/// Datagrams that one system call takes.
pub const AT_ONCE: usize = 64;
/// Bytes of a cache line.
const LINE: usize = 64;

const EMPTY: [libc::iovec; AT_ONCE] = [libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
}; AT_ONCE];

fn vector(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixDatagram;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[test]
    fn a_frame_is_written_where_it_stays_behind_what_is_not_of_it() {
        let mut inbox = Inbox::new(2, 100);
        inbox.place(80).unwrap().fill(7);
        inbox.placed(16..80);
        // Who asks and does not take it leaves nothing.
        inbox.place(50).unwrap().fill(9);
        inbox.place(3).unwrap().copy_from_slice(&[1, 2, 3]);
        inbox.placed(0..3);
        assert_eq!(inbox.get(0), (&[7; 64][..], false));
        assert_eq!(inbox.get(1), (&[1, 2, 3][..], false));
        assert!(inbox.place(1).is_none() && !inbox.has_room(1));
    }

    #[test]
    fn what_is_sent_together_is_received_together_in_order_and_cut_where_it_must_be() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let sent: Vec<Vec<u8>> = (0..100_u8).map(|n| vec![n; usize::from(n) + 1]).collect();
        let halves = sent.iter().map(|bytes| bytes.split_at(bytes.len() / 2));
        assert_eq!(send_many(&theirs, halves.clone()).unwrap(), AT_ONCE);
        assert_eq!(
            send_many(&theirs, halves.skip(AT_ONCE)).unwrap(),
            100 - AT_ONCE
        );
        for refuses in [true, false] {
            let mut inbox = Inbox::new(80, 40);
            assert_eq!(inbox.receive(&ours, 30, refuses).unwrap(), Rest::More);
            assert_eq!(inbox.len(), 30);
            assert_eq!(inbox.receive(&ours, 20, refuses).unwrap(), Rest::More);
            let first = if refuses { 0 } else { 50 };
            for at in 0..50 {
                let (bytes, is_cut) = inbox.get(at);
                let whole = &sent[first + at];
                assert_eq!(bytes, &whole[..whole.len().min(40)]);
                assert_eq!(is_cut, whole.len() > 40);
            }
        }
        let mut inbox = Inbox::new(80, 40);
        for refuses in [true, false] {
            assert_eq!(inbox.receive(&ours, 9, refuses).unwrap(), Rest::Nothing);
        }
        assert!(inbox.is_empty());
    }

    #[test]
    fn datagrams_and_copies_lie_side_by_side() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let mut inbox = Inbox::new(4, 100);
        theirs.send(b"one").unwrap();
        assert!(inbox.push(5, |place| {
            place.copy_from_slice(b"first");
            true
        }));
        assert!(!inbox.push(5, |_| false));
        assert_eq!(inbox.receive(&ours, 9, true).unwrap(), Rest::Nothing);
        let room = inbox.memory.len() - inbox.used;
        assert!(inbox.has_room(room) && !inbox.has_room(room + 1));
        assert!(inbox.push(room, |place| {
            place.fill(7);
            true
        }));
        assert_eq!((inbox.len(), inbox.room()), (3, 0));
        assert!(!inbox.push(1, |_| true));
        assert_eq!(
            (inbox.get(0).0, inbox.get(1).0),
            (&b"first"[..], &b"one"[..])
        );
        assert!(inbox.get(2).0.iter().all(|byte| *byte == 7));
        inbox.clear();
        assert!((0..4).all(|_| inbox.push(0, |_| true)) && !inbox.push(0, |_| true));
    }

    #[test]
    fn a_full_room_takes_nothing_and_a_full_receiver_too() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let mut taken = 0;
        let frame = [7; 1500];
        loop {
            let now = send_many(&theirs, std::iter::repeat_n((&frame[..], &[][..]), 50)).unwrap();
            taken += now;
            if now < 50 {
                break;
            }
        }
        assert_eq!(
            send_many(&theirs, [(&frame[..], &[][..])].into_iter()).unwrap(),
            0
        );
        let mut inbox = Inbox::new(4, 1500);
        assert_eq!(inbox.receive(&ours, 100, true).unwrap(), Rest::More);
        assert_eq!((inbox.len(), inbox.room()), (4, 0));
        assert_eq!(inbox.receive(&ours, 100, true).unwrap(), Rest::More);
        assert_eq!(inbox.len(), 4);
        assert!(taken > 4);
        drop(ours);
        let error = send_many(&theirs, [(&frame[..], &[][..])].into_iter()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_datagram_with_a_descriptor_stays_where_it_is() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.send(b"before").unwrap();
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let fds = [null.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::empty();
        sendmsg(&theirs, &[IoSlice::new(b"gift")], &mut control, flags).unwrap();
        let mut inbox = Inbox::new(8, 100);
        for _ in 0..2 {
            assert_eq!(inbox.receive(&ours, 8, false).unwrap(), Rest::Rights);
            assert_eq!(inbox.get(0), (&b"before"[..], false));
            assert_eq!(inbox.len(), 1);
        }
    }

    #[test]
    fn senders_are_known_where_that_is_wanted() {
        for address in ["127.0.0.1", "::1"] {
            let ip: IpAddr = address.parse().unwrap();
            let Ok(ours) = std::net::UdpSocket::bind((ip, 0)) else {
                eprintln!("SKIPPED: no {address}");
                continue;
            };
            let theirs = std::net::UdpSocket::bind((ip, 0)).unwrap();
            for _ in 0..3 {
                theirs.send_to(b"x", ours.local_addr().unwrap()).unwrap();
            }
            let mut inbox = Inbox::new(8, 64).with_senders();
            inbox.receive(&ours, 2, true).unwrap();
            inbox.receive(&ours, 2, true).unwrap();
            assert_eq!(inbox.len(), 3);
            assert!((0..3).all(|at| inbox.sender(at) == Some(ip)));
            assert_eq!(inbox.sender(3), None);
            inbox.clear();
            assert_eq!(inbox.sender(0), None);
        }
    }
}
