//! What a service manager is told: `sd_notify(3)`'s datagrams, and the priority of a line for the journal.
//!
//! Both are named by the environment of the process, so whoever started it is trusted to name them. What lies
//! at the name may still be anything: a full socket, a file, nothing. A datagram is sent without waiting and
//! is lost if it cannot be; the process never depends on it. Only that it is ready is said again for a while, and what is to
//! be kept is said later ([`Kept`](crate::kept::Kept)).

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with,
};

/// The way to the service manager that started this process, if one did.
#[derive(Debug, Default)]
pub struct Manager {
    to: Option<(OwnedFd, SocketAddrUnix)>,
    watchdog: Option<Duration>,
}

impl Manager {
    /// The one that the environment names: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    ///
    /// # Errors
    /// `NOTIFY_SOCKET` is none, or the system's.
    pub fn of_environment() -> io::Result<Self> {
        let Some(address) = env::var_os("NOTIFY_SOCKET") else {
            return Ok(Self::default());
        };
        let (usec, pid) = (env::var_os("WATCHDOG_USEC"), env::var_os("WATCHDOG_PID"));
        Self::new(&address, watchdog(usec, pid, std::process::id()))
    }

    /// One at this address: a path, or `@` and an abstract name.
    ///
    /// # Errors
    /// It is none, or the system's.
    pub fn new(address: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let address = match address.as_bytes() {
            [b'/', ..] => SocketAddrUnix::new(address),
            [b'@', name @ ..] if !name.is_empty() => SocketAddrUnix::new_abstract_name(name),
            _ => Err(rustix::io::Errno::INVAL),
        }?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(Self {
            to: Some((socket, address)),
            watchdog,
        })
    }

    /// Says something, lines of `NAME=VALUE`. Never waits.
    ///
    /// # Errors
    /// Nobody heard it: the system's reason.
    pub fn say(&self, lines: impl Display) -> io::Result<()> {
        self.send(&lines.to_string(), None)
    }

    /// The one of the environment; none, as the log has it, where that names none that is right.
    pub fn here() -> Self {
        Self::of_environment().unwrap_or_else(|error| {
            log::warn!("NOTIFY_SOCKET is no socket of a service manager: {error}");
            Self::default()
        })
    }

    /// Says that the process serves from now on; `status` is what `systemctl status` shows.
    ///
    /// A manager that waits for this (`Type=notify`) would end the process if it did not hear it. So where its queue is full this
    /// is said again, for five seconds at most, and the log has it if it was not heard.
    pub fn say_ready(&self, status: &str) {
        let lines = format!("READY=1\nSTATUS={}", one_line(status));
        let until = Instant::now() + FULL;
        while let Err(error) = self.say(&lines) {
            if !is_full(&error) || Instant::now() >= until {
                return log::warn!("the service manager does not hear {lines:?}: {error}");
            }
            thread::sleep(FULL_AGAIN);
        }
    }

    /// Says what the process does now.
    pub fn say_status(&self, status: &str) {
        self.tell(format_args!("STATUS={}", one_line(status)));
    }

    /// Says that the process is about to end, and takes the time that it needs for that.
    pub fn say_stopping(&self) {
        self.tell("STOPPING=1");
    }

    /// Says something on which nothing depends: the log has it if nobody heard it.
    pub fn tell(&self, lines: impl Display) {
        if let Err(error) = self.say(&lines) {
            log::debug!("{lines} did not reach the service manager: {error}");
        }
    }

    /// As [`say`](Self::say), with a descriptor.
    pub(crate) fn send(&self, lines: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let Some((socket, address)) = &self.to else {
            return Ok(());
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fd {
            with.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        // NB: the flag, not `O_NONBLOCK`. A receiver that does not read costs nothing but the datagram.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = [IoSlice::new(lines.as_bytes())];
        sendmsg_addr(socket, address, &bytes, &mut with, flags)?;
        Ok(())
    }

    /// Whether there is one.
    pub fn listens(&self) -> bool {
        self.to.is_some()
    }

    /// Within which time it wants to hear that the process is well, again and again.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }
}

/// Whether there may be room later.
pub(crate) fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// How long it is tried to say that the process is ready, and how often.
const FULL: Duration = Duration::from_secs(5);
const FULL_AGAIN: Duration = Duration::from_millis(20);

/// A status is one line: what follows a line feed would be another variable. Names in it may be strangers'.
fn one_line(status: &str) -> String {
    status.replace(|letter: char| letter.is_control(), " ")
}

/// The time that `WATCHDOG_USEC` says, if it is for this process.
fn watchdog(usec: Option<OsString>, pid: Option<OsString>, own: u32) -> Option<Duration> {
    let number = |text: &OsStr| text.to_str()?.parse::<u64>().ok();
    if pid.is_some_and(|pid| number(&pid) != Some(u64::from(own))) {
        return None;
    }
    let usec = number(&usec?).filter(|usec| *usec > 0)?;
    Some(Duration::from_micros(usec))
}

/// Whether standard error is the journal's, which reads a priority in `<N>` at the begin of a line (`sd-daemon(3)`).
pub fn logs_to_journal() -> bool {
    static DOES: OnceLock<bool> = OnceLock::new();
    *DOES.get_or_init(is_journal)
}

fn is_journal() -> bool {
    let stderr = std::fs::metadata("/proc/self/fd/2");
    let Some((stream, file)) = env::var("JOURNAL_STREAM").ok().zip(stderr.ok()) else {
        return false;
    };
    stream == format!("{}:{}", file.dev(), file.ino())
}

/// Text for standard error; in the journal its lines have the priority of this level.
pub fn marked(level: log::Level, text: &str) -> String {
    match logs_to_journal() {
        true => with_priority(level, text),
        false => text.to_owned(),
    }
}

/// What the journal is told of a record of the log: the level is its priority, and the time is its own.
pub fn log_line(record: &log::Record<'_>) -> String {
    let text = format!("{}: {}", record.target(), record.args());
    with_priority(record.level(), &text)
}

fn with_priority(level: log::Level, text: &str) -> String {
    let mark = format!("<{}>", priority(level));
    // What follows a line feed is a line of the journal's, too.
    mark.clone() + &text.replace('\n', &format!("\n{mark}"))
}

/// The journal's number for a level of the log.
fn priority(level: log::Level) -> u8 {
    match level {
        log::Level::Error => 3,
        log::Level::Warn => 4,
        log::Level::Info => 6,
        log::Level::Debug | log::Level::Trace => 7,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use vnplug_testing::TestDir;

    use super::*;

    fn manager(path: &OsStr) -> Manager {
        Manager::new(path, None).unwrap()
    }

    #[test]
    fn each_line_has_its_priority() {
        use log::Level;
        assert_eq!(with_priority(Level::Info, "it reads"), "<6>it reads");
        assert_eq!(with_priority(Level::Warn, "lost\n7"), "<4>lost\n<4>7");
        assert_eq!(with_priority(Level::Error, ""), "<3>");
        let mut record = log::Record::builder();
        record.level(Level::Debug).target("port");
        let line = log_line(&record.args(format_args!("it is open")).build());
        assert_eq!(line, "<7>port: it is open");
        // What a test writes goes to no journal.
        assert_eq!(marked(Level::Error, "a\nb"), "a\nb");
    }

    #[test]
    fn what_is_said_arrives_at_a_path_and_at_an_abstract_name() {
        let dir = TestDir::new("notify");
        let path = dir.path("socket");
        let named = UnixDatagram::bind(&path).unwrap();
        manager(path.as_os_str()).say("READY=1").unwrap();
        let mut bytes = [0; 64];
        let len = named.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"READY=1");

        use std::os::linux::net::SocketAddrExt;
        let name = format!("vnplug-notify-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        let hidden = UnixDatagram::bind_addr(&address).unwrap();
        manager(OsStr::new(&format!("@{name}")))
            .say("STATUS=x")
            .unwrap();
        let len = hidden.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"STATUS=x");
    }

    #[test]
    fn nobody_who_does_not_read_makes_it_wait() {
        let dir = TestDir::new("notify");
        let path = dir.path("socket");
        let _deaf = UnixDatagram::bind(&path).unwrap();
        let manager = manager(path.as_os_str());
        let lost = (0..100_000).find_map(|_| manager.say("WATCHDOG=1").err());
        assert_eq!(lost.unwrap().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn that_it_is_ready_is_said_until_there_is_room_for_it() {
        let dir = TestDir::new("notify");
        let path = dir.path("socket");
        let hears = UnixDatagram::bind(&path).unwrap();
        let manager = manager(path.as_os_str());
        let lost = (0..100_000).find_map(|_| manager.say("WATCHDOG=1").err());
        assert_eq!(lost.unwrap().kind(), io::ErrorKind::WouldBlock);
        thread::scope(|scope| {
            let says = scope.spawn(|| manager.say_ready("Serving"));
            thread::sleep(FULL_AGAIN * 5);
            assert!(!says.is_finished(), "it was said to nobody");
            hears
                .set_read_timeout(Some(vnplug_testing::PATIENCE))
                .unwrap();
            let mut bytes = [0; 64];
            loop {
                let len = hears.recv(&mut bytes).unwrap();
                if bytes[..len] != *b"WATCHDOG=1" {
                    assert_eq!(&bytes[..len], b"READY=1\nSTATUS=Serving");
                    break;
                }
            }
        });
    }

    #[test]
    fn what_is_no_socket_for_datagrams_is_an_error_and_no_harm() {
        let dir = TestDir::new("notify");
        let (file, stream) = (dir.path("file"), dir.path("stream"));
        std::fs::write(&file, "").unwrap();
        let _listener = UnixListener::bind(&stream).unwrap();
        for path in [&file, &stream, &dir.path("nothing"), &dir.0] {
            manager(path.as_os_str()).say("READY=1").unwrap_err();
        }
        for address in ["", "@", "relative", &format!("/{}", "x".repeat(200))] {
            Manager::new(OsStr::new(address), None).unwrap_err();
        }
        Manager::default().say("READY=1").unwrap();
    }

    #[test]
    fn a_status_says_nothing_but_the_status() {
        let dir = TestDir::new("notify");
        let path = dir.path("socket");
        let hears = UnixDatagram::bind(&path).unwrap();
        let manager = manager(path.as_os_str());
        let mut bytes = [0; 64];
        let mut heard = || {
            let len = hears.recv(&mut bytes).unwrap();
            String::from_utf8(bytes[..len].to_vec()).unwrap()
        };
        manager.say_ready("x\nMAINPID=1");
        assert_eq!(heard(), "READY=1\nSTATUS=x MAINPID=1");
        manager.say_status("\ry");
        assert_eq!(heard(), "STATUS= y");
        manager.say_stopping();
        assert_eq!(heard(), "STOPPING=1");
        // Nobody hears it any more, which is no harm.
        drop(hears);
        manager.say_ready("z");
        manager.say_status("z");
        manager.say_stopping();
    }

    #[test]
    fn a_watchdog_is_for_the_process_that_it_names() {
        let usec = |text: &str| Some(OsString::from(text));
        let half = Some(Duration::from_millis(500));
        assert_eq!(watchdog(usec("500000"), None, 7), half);
        assert_eq!(watchdog(usec("500000"), usec("7"), 7), half);
        assert_eq!(watchdog(usec("500000"), usec("8"), 7), None);
        for wrong in ["", "0", "-1", "1s", "99999999999999999999"] {
            assert_eq!(watchdog(usec(wrong), None, 7), None);
        }
        assert_eq!(watchdog(None, None, 7), None);
    }
}
