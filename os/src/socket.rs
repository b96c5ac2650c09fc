//! Sockets whose other end is a stranger's: reads bytes and refuses descriptors, without ever
//! dropping one here, because that may block as long as the stranger likes (R8).
#![expect(unsafe_code, reason = "an option that rustix does not know")]

use std::fmt;
use std::io;
use std::io::IoSliceMut;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, connect, recv, recvmsg, socket_with,
};

use crate::placed::Placed;

/// What a stranger's socket had.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// The number of bytes; 0: it is closed.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Descriptors (or out-of-band bytes, which may bring some), which are still there.
    Rights,
}

/// Who was at the other end of a connection when it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its process; `None`: one that has no number here, in another namespace of processes.
    pub pid: Option<NonZeroU32>,
}

impl fmt::Display for Peer {
    /// Its process, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}

/// Who is at the other end (`SO_PEERCRED`).
///
/// NB: not rustix's `socket_peercred`, whose process is never 0: here it is where the peer is in a namespace that
/// ours does not see, and an answer with it is taken for an error. `guest/src/peer.rs` reads it again: guests have
/// nothing of this crate, and `ring`, which both have, calls no system.
///
/// # Errors
/// The system's.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the option's value is a live ucred, and its length is given; any bytes are one.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    match result {
        0 => Ok(Peer {
            uid: found.uid,
            pid: u32::try_from(found.pid).ok().and_then(NonZeroU32::new),
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The file that a socket was bound to, also if its name is another's by now.
///
/// # Errors
/// The process lacks `CAP_NET_ADMIN`, the socket has no file, Linux < 4.17; or the system's.
pub(crate) fn file_of(socket: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument, and touches no memory of ours.
    let file = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCUNIXFILE) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made this descriptor now, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Makes the kernel refuse descriptors sent to a socket (the sender gets `EPERM`), or to those that
/// a listener accepts; or reverts that. False: Linux < 6.16, which cannot.
pub fn pass_rights(socket: impl AsFd, pass: bool) -> bool {
    let value = libc::c_int::from(pass);
    // SAFETY: the option's value is a live c_int, and its length is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    result == 0
}

/// Whether the other end has read all that was sent to it, or is gone. True, too, if the system does not say.
pub fn is_read(socket: impl AsFd) -> bool {
    let mut unread: libc::c_int = 0;
    // SAFETY: the request writes one live c_int. TIOCOUTQ is SIOCOUTQ, as the kernel has it for sockets.
    let result =
        unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    result != 0 || unread == 0
}

/// Whether nobody could ever send descriptors to this socket: the kernel refuses them ([`pass_rights`]), and has done so since the
/// socket was made. Ask before anything is set: an accepted socket has this from its listener.
pub fn refuses_rights(socket: impl AsFd) -> bool {
    let mut value: libc::c_int = 1;
    let mut len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the option's value is a live c_int, and its length is given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    result == 0 && value == 0
}

/// Reads bytes without blocking, and no further than to a byte with descriptors.
///
/// To read that byte would drop them, received or not. So this looks first: `MSG_CTRUNC` says that
/// the last byte shown has some, and `POLLPRI` that an out-of-band byte is among those not shown.
/// Then it takes exactly what was shown; bytes that came meanwhile follow.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Heard> {
    let mut none = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let seen = match recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut none, flags) {
        Ok(seen) => seen,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Heard::Nothing),
        Err(error) => return Err(error.into()),
    };
    let urgent = has_urgent(&socket)?;
    if urgent || seen.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(Heard::Rights);
    }
    match seen.bytes {
        0 => Ok(Heard::Bytes(0)),
        seen => receive_bytes(socket, &mut bytes[..seen]),
    }
}

/// The same from a socket that [never had descriptors](refuses_rights): it does not look first.
pub fn receive_bytes(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Heard> {
    match recv(&socket, bytes, RecvFlags::DONTWAIT) {
        Ok((_, count)) => Ok(Heard::Bytes(count)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Heard::Nothing),
        Err(error) => Err(error.into()),
    }
}

/// Connections that wait to be accepted, as the standard library has it.
const WAITING: i32 = 4096;
/// Held while the process' mask for new files is another one: it has only one for all threads.
static MASKING: Mutex<()> = Mutex::new(());
/// Whether an out-of-band byte is there, which may bring descriptors that no reader gets to see.
///
/// # Errors
/// The system's.
pub fn has_urgent(socket: impl AsFd) -> io::Result<bool> {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut urgent = [PollFd::new(&socket, PollFlags::PRI)];
    poll(&mut urgent, Some(&now))?;
    Ok(urgent[0].revents().contains(PollFlags::PRI))
}

/// `linux/un.h`.
const SIOCUNIXFILE: libc::Ioctl = 0x89e0;
/// `asm-generic/socket.h` of Linux 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Connects to a stream socket. A listener whose queue is full, for it hangs, keeps nobody for longer than `limit`;
/// `connect(2)` would wait for ever, or for as long as it is alive.
///
/// # Errors
/// [`TimedOut`](io::ErrorKind::TimedOut) if nobody took the connection; the system's.
pub fn connect_within(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    let until = Instant::now() + limit;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            // There is nothing to poll for: a socket that is not connected is told of no room in the queue.
            Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(CONNECT_AGAIN),
            Err(Errno::AGAIN) => {
                let what = "whoever listens there takes no connections: it hangs, or has too many";
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Between two tries to connect.
const CONNECT_AGAIN: Duration = Duration::from_millis(5);

/// Listens at a path for streams, taking over a socket that nobody serves.
///
/// # Errors
/// Another daemon serves it, something else lies there, or the system's.
pub fn listen(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    listen_for(path, mode, SocketType::STREAM)
}

/// The same, for connections of another type.
///
/// # Errors
/// As [`listen`].
pub fn listen_for(path: &Path, mode: u32, kind: SocketType) -> io::Result<OwnedFd> {
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        use std::os::unix::fs::FileTypeExt;
        if !metadata.file_type().is_socket() {
            let what = format!("{} is there and is no socket", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        match connect_within(path, Duration::ZERO) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Not being allowed to connect to it does not make it ours.
            Err(error) => {
                let what = format!("{} may be in use: {error}", path.display());
                return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
            }
            Ok(_) => {
                let what = format!("another daemon serves {}", path.display());
                return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
            }
        }
    }
    // Nobody may connect before the mode is set, so it is made with that mode. The mask is the whole
    // process's; what other threads make in this moment becomes no laxer by it.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let in_path =
        |error: Errno| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let listener = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(in_path)?;
    let address = SocketAddrUnix::new(path).map_err(in_path)?;
    let masking = MASKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mask = rustix::process::umask(rustix::fs::Mode::from_bits_truncate(!mode & 0o777));
    let bound = bind(&listener, &address);
    rustix::process::umask(mask);
    drop(masking);
    bound.map_err(in_path)?;
    // If the kernel can, it refuses descriptors from every client, unless one is allowed to later. Before anybody can connect.
    pass_rights(&listener, false);
    rustix::net::listen(&listener, WAITING).map_err(in_path)?;
    // A directory's default access list goes before the mask.
    let placed = Placed::of_socket(&listener, path);
    placed.and_then(|it| it.set_mode(mode)).map_err(|error| {
        // A socket that nobody serves only misleads.
        let _ = std::fs::remove_file(path);
        io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    })?;
    Ok(listener)
}

/// The same of a socket that a service manager made, which listens already.
///
/// # Errors
/// It is another kind of socket, or lies elsewhere; or the system's.
pub fn passed_listener(listener: OwnedFd, path: &Path, mode: u32) -> io::Result<OwnedFd> {
    use rustix::net::sockopt::{socket_acceptconn, socket_type};
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let address = rustix::net::getsockname(&listener)?;
    let address = SocketAddrUnix::try_from(address)
        .map_err(|_| wrong("the service manager's socket is none of Unix".into()))?;
    let at = address.path_bytes().unwrap_or_default();
    if at != path.as_os_str().as_encoded_bytes() {
        let at = String::from_utf8_lossy(at);
        return Err(wrong(format!(
            "the service manager listens at {at:?}: ListenStream= of its unit and `socket` of the configuration must be one path"
        )));
    }
    if socket_type(&listener)? != SocketType::STREAM || !socket_acceptconn(&listener)? {
        return Err(wrong(
            "the service manager's socket is not ListenStream=".into(),
        ));
    }
    let flags = rustix::fs::fcntl_getfl(&listener)?;
    rustix::fs::fcntl_setfl(&listener, flags | rustix::fs::OFlags::NONBLOCK)?;
    // NB: the daemon is root here, and its user may put anything there.
    Placed::of_socket(&listener, path)?.set_mode(mode)?;
    pass_rights(&listener, false);
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

    use super::*;

    fn send_with(
        to: &UnixStream,
        bytes: &[u8],
        fd: &OwnedFd,
        flags: SendFlags,
    ) -> Result<usize, Errno> {
        let fds = [fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags)
    }

    /// True if the other end of `kept` is held by nobody: it was dropped.
    fn is_dropped(kept: &UnixStream) -> bool {
        send(kept, b"x", SendFlags::DONTWAIT | SendFlags::NOSIGNAL) == Err(Errno::PIPE)
    }

    #[test]
    fn bytes_are_read_up_to_a_descriptor_which_is_never_taken_nor_dropped() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (kept, sent) = UnixStream::pair().unwrap();
        let mut bytes = [0; 64];
        assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Nothing);
        theirs.write_all(b"hello").unwrap();
        theirs.write_all(b" you").unwrap();
        assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Bytes(9));
        assert_eq!(&bytes[..9], b"hello you");
        theirs.write_all(b"abc").unwrap();
        let sent = OwnedFd::from(sent);
        send_with(&theirs, b"d", &sent, SendFlags::empty()).unwrap();
        drop(sent);
        for _ in 0..3 {
            assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Rights);
            assert!(!is_dropped(&kept));
        }
        // The control: it was there, and what drops it is this.
        drop(ours);
        assert!(is_dropped(&kept));
    }

    #[test]
    fn an_out_of_band_byte_with_a_descriptor_is_not_passed_over() {
        for before in [&b""[..], b"abc"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let (kept, sent) = UnixStream::pair().unwrap();
            theirs.write_all(before).unwrap();
            let sent = OwnedFd::from(sent);
            match send_with(&theirs, b"!", &sent, SendFlags::OOB) {
                Ok(_) => {}
                // Linux < 5.15, or built without it.
                Err(error) => return eprintln!("SKIPPED: no out-of-band bytes: {error}"),
            }
            theirs.write_all(b"after").unwrap();
            drop(sent);
            for _ in 0..3 {
                assert_eq!(receive(&ours, &mut [0; 64]).unwrap(), Heard::Rights);
                assert!(!is_dropped(&kept));
            }
        }
    }

    /// A socket that nobody accepts at, with room for no connection more.
    fn full(path: &Path) -> (OwnedFd, Vec<UnixStream>) {
        let kind = SocketType::STREAM;
        let listener = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let connections = std::iter::from_fn(|| connect_within(path, Duration::ZERO).ok());
        (listener, connections.take(16).collect())
    }

    #[test]
    fn a_listener_that_hangs_keeps_nobody_who_connects() {
        let dir = vnplug_testing::TestDir::new("full");
        let path = dir.path("sock");
        let (listener, connections) = full(&path);
        assert!(
            (1..16).contains(&connections.len()),
            "{}",
            connections.len()
        );
        let (limit, begun) = (Duration::from_millis(50), Instant::now());
        let error = connect_within(&path, limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= limit);
        // The control: one who does not bound it is kept.
        let (tell, told) = std::sync::mpsc::channel();
        let own = path.clone();
        let kept = thread::spawn(move || tell.send(UnixStream::connect(own).is_ok()));
        told.recv_timeout(Duration::from_millis(200)).unwrap_err();
        // It goes on: who waits is taken, and blocks as any stream does.
        let waits = path.clone();
        let waiting = thread::spawn(move || connect_within(&waits, vnplug_testing::PATIENCE));
        let mut accepted = Vec::new();
        for _ in 0..connections.len() + 2 {
            accepted.push(rustix::net::accept(&listener).unwrap());
        }
        assert!(told.recv().unwrap());
        kept.join().unwrap().unwrap();
        let mut stream = waiting.join().unwrap().unwrap();
        let pause = Some(Duration::from_millis(10));
        stream.set_read_timeout(pause).unwrap();
        let begun = Instant::now();
        io::Read::read(&mut stream, &mut [0]).unwrap_err();
        assert!(begun.elapsed() >= Duration::from_millis(10));
        drop((listener, accepted, connections));
        // Nobody serves it, and nobody waits for that.
        let error = connect_within(&path, vnplug_testing::PATIENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let error = connect_within(&dir.path("none"), vnplug_testing::PATIENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_socket_whose_daemon_hangs_is_not_taken_over() {
        let dir = vnplug_testing::TestDir::new("hung");
        let path = dir.path("sock");
        let (_listener, _connections) = full(&path);
        let error = listen(&path, 0o600).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(
            error.to_string().contains("takes no connections"),
            "{error}"
        );
    }

    #[test]
    fn who_connects_to_a_socket_of_ours_could_never_send_descriptors() {
        let dir = vnplug_testing::TestDir::new("refuses");
        let path = dir.path("sock");
        let listener = listen(&path, 0o600).unwrap();
        let mut theirs = UnixStream::connect(&path).unwrap();
        // What was allowed for a moment does not count, whatever is set now.
        let (pair, _other) = UnixStream::pair().unwrap();
        assert!(!refuses_rights(&pair));
        if !pass_rights(&pair, false) {
            return eprintln!("SKIPPED: Linux before 6.16");
        }
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let sent = send_with(&theirs, b"x", &null, SendFlags::empty());
        assert_eq!(sent, Err(Errno::PERM), "not accepted yet");
        let ours = rustix::net::accept(&listener).unwrap();
        assert!(refuses_rights(&ours));
        theirs.write_all(b"hello").unwrap();
        let mut bytes = [0; 64];
        assert_eq!(receive_bytes(&ours, &mut bytes).unwrap(), Heard::Bytes(5));
        assert_eq!(receive_bytes(&ours, &mut bytes).unwrap(), Heard::Nothing);
        // An out-of-band byte keeps nobody busy: it is there no more when it was passed over.
        if send(&theirs, b"!", SendFlags::OOB).is_ok() {
            assert_eq!(receive_bytes(&ours, &mut bytes).unwrap(), Heard::Nothing);
            let mut there = [PollFd::new(&ours, PollFlags::IN)];
            let now = Timespec::default();
            assert_eq!(poll(&mut there, Some(&now)).unwrap(), 0);
        }
        drop(theirs);
        assert_eq!(receive_bytes(&ours, &mut bytes).unwrap(), Heard::Bytes(0));
    }

    #[test]
    fn a_closed_end_is_told_after_what_it_said() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"bye").unwrap();
        drop(theirs);
        let mut bytes = [0; 2];
        assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Bytes(2));
        assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Bytes(1));
        assert_eq!(receive(&ours, &mut bytes).unwrap(), Heard::Bytes(0));
    }

    #[test]
    fn a_managers_socket_has_its_mode_set_and_nothing_in_its_place() {
        use std::os::unix::fs::MetadataExt;
        let dir = vnplug_testing::TestDir::new("placed");
        let (path, victim) = (dir.path("sock"), dir.path("victim"));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        let passed = OwnedFd::from(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let ours = passed_listener(passed.try_clone().unwrap(), &path, 0o640);
        assert_eq!((ours.is_ok(), mode(&path)), (true, 0o640));
        std::fs::write(&victim, "").unwrap();
        let before = mode(&victim);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        passed_listener(passed, &path, 0o666).unwrap_err();
        assert_eq!(mode(&victim), before);
    }

    #[test]
    fn where_the_kernel_can_nobody_sends_descriptors_there() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        if !pass_rights(&ours, false) {
            return eprintln!("SKIPPED: Linux before 6.16");
        }
        let flags = SendFlags::empty();
        assert_eq!(send_with(&theirs, b"x", &null, flags), Err(Errno::PERM));
        assert!(pass_rights(&ours, true));
        assert_eq!(send_with(&theirs, b"x", &null, flags), Ok(1));
    }
}
