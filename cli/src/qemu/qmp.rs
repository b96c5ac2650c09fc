//! A client of QEMU's machine protocol: JSON lines over a Unix socket.
//!
//! QEMU greets, the client asks for capabilities, then commands are answered one by one; events
//! may come between. A monitor socket serves one client: a second one connects and is left without
//! a greeting, hence every wait here has a limit.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use vnplug::{Peer, peer_of};
use vnplug_os::socket::connect_within;

use super::access::{self, Owner};
use super::lines::Lines;
use super::monitor::{Event, Monitor, MonitorError, News};

/// One connection to a monitor, ready for commands.
#[derive(Debug)]
pub(crate) struct Qmp {
    lines: Lines,
    events: VecDeque<Event>,
    next_id: u64,
    limit: Duration,
}

impl Qmp {
    /// Connects and negotiates; every answer may take up to `limit`.
    ///
    /// # Errors
    /// [`MonitorError`]; its text says what to do.
    pub(crate) fn connect(path: &Path, limit: Duration) -> Result<Self, MonitorError> {
        let stream = connect_within(path, limit)
            .map_err(|error| MonitorError::Connect(path.into(), error))?;
        let mut qmp = Self {
            lines: Lines::new(stream),
            events: VecDeque::new(),
            next_id: 1,
            limit,
        };
        match qmp.lines.read(Instant::now() + limit) {
            Ok(Some(greeting)) if greeting.get("QMP").is_some() => {}
            Ok(Some(_)) => return Err(MonitorError::NotQmp(path.into())),
            Ok(None) => return Err(MonitorError::NoGreeting(path.into(), limit)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(MonitorError::NotQmp(path.into()));
            }
            Err(_) => return Err(MonitorError::Closed("greeting".into())),
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn keep(&mut self, event: Event) {
        log::debug!("qmp event: {event:?}");
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

impl Qmp {
    fn run(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Value, MonitorError> {
        let id = self.next_id;
        self.next_id += 1;
        log::debug!("qmp {id}: {command} {arguments}");
        let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        let closed = || MonitorError::Closed(command.to_owned());
        let sent = match fd {
            Some(fd) => send_with(&self.lines.stream, line.as_bytes(), fd),
            None => Ok(0),
        };
        let sent = sent.map_err(|_| closed())?;
        let deadline = Instant::now() + self.limit;
        self.lines
            .write(&line.as_bytes()[sent..], deadline)
            .map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => MonitorError::Silent(command.to_owned(), self.limit),
                _ => closed(),
            })?;
        loop {
            let mut answer = match self.lines.read(deadline) {
                Ok(Some(answer)) => answer,
                Ok(None) => return Err(MonitorError::Silent(command.to_owned(), self.limit)),
                Err(_) => return Err(closed()),
            };
            if let Some(event) = Event::from_json(&answer) {
                self.keep(event);
            } else if let Some(refused) = MonitorError::in_answer(command, &answer) {
                return Err(refused);
            } else if answer["id"] == id {
                log::debug!("qmp {id}: {}", answer["return"]);
                return Ok(answer["return"].take());
            }
        }
    }
}

/// Sends the beginning of a line, with a descriptor; how much of it.
fn send_with(stream: &UnixStream, line: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let line = [IoSlice::new(line)];
    Ok(sendmsg(stream, &line, &mut control, SendFlags::NOSIGNAL)?)
}

impl Monitor for Qmp {
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        self.run(command, arguments, None)
    }

    fn add_fd(&mut self, fd: BorrowedFd<'_>) -> Result<(i64, i64), MonitorError> {
        let added = self.run("add-fd", json!({}), Some(fd))?;
        let number = |key: &str| added[key].as_i64();
        number("fdset-id")
            .zip(number("fd"))
            .ok_or_else(|| MonitorError::NotAnswer("add-fd".into()))
    }

    /// The next event, from those that came between answers or from the socket.
    fn news(&mut self, deadline: Instant) -> Result<News, MonitorError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(News::Event(event));
        }
        loop {
            match self.lines.read(deadline) {
                Ok(Some(answer)) => {
                    if let Some(event) = Event::from_json(&answer) {
                        return Ok(News::Event(event));
                    }
                }
                Ok(None) => return Ok(News::Nothing),
                Err(_) => return Err(MonitorError::Closed("events".into())),
            }
        }
    }

    fn qemu_user(&mut self) -> Result<Option<Owner>, MonitorError> {
        let Ok(peer) = peer_of(&self.lines.stream) else {
            return Ok(None);
        };
        Ok(Some(user_of_peer(peer)))
    }
}

/// The user that a peer opens files as, as far as one can see it.
fn user_of_peer(peer: Peer) -> Owner {
    // The credentials are those of the time of listen(2); -runas changes them later.
    let now = peer.pid.and_then(|pid| access::user_of(&pid.to_string()));
    now.unwrap_or(Owner {
        uid: peer.uid,
        gid: peer.gid,
    })
}

const MAX_EVENTS: usize = 1024;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::num::NonZeroU32;
    use std::ops::Deref;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::thread;

    use super::*;

    /// A socket's path; what is there goes at the end.
    struct Socket(PathBuf);

    impl Deref for Socket {
        type Target = Path;

        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Socket {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn socket(name: &str) -> Socket {
        let name = format!("vnplug-qmp-{}-{name}", std::process::id());
        Socket(std::env::temp_dir().join(name))
    }

    /// Serves one client: writes `greeting`, then one answer per received line, `%` being its id.
    fn serve(name: &str, greeting: &'static str, answers: &'static [&'static str]) -> Socket {
        let path = socket(name);
        let listener = UnixListener::bind(&*path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting.as_bytes()).unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in ["{\"return\": {}, \"id\": %}\n"].iter().chain(answers) {
                let Some(Ok(line)) = lines.next() else { return };
                let request: Value = serde_json::from_str(&line).unwrap();
                let answer = answer.replace('%', &request["id"].to_string());
                stream.write_all(answer.as_bytes()).unwrap();
            }
            let _ = lines.next();
        });
        path
    }

    fn connect(path: &Path) -> Result<Qmp, MonitorError> {
        Qmp::connect(path, Duration::from_secs(60))
    }

    #[test]
    fn answers_are_matched_and_events_in_between_kept() {
        let answer = "{\"event\": \"RESET\", \"data\": {\"a\": 1}}\n{\"return\": 9, \"id\": 77}\n\
                      {\"return\": 8, \"id\": %}\n";
        let greeting = "{\"QMP\": {}}\r\n";
        let path = serve("events", greeting, vec![answer].leak());
        let mut qmp = connect(&path).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap(), 8);
        let News::Event(event) = qmp.news(Instant::now()).unwrap() else {
            panic!("the event is lost");
        };
        assert_eq!(
            (event.name.as_str(), &event.data["a"]),
            ("RESET", &json!(1))
        );
        assert_eq!(qmp.news(Instant::now()).unwrap(), News::Nothing);
    }

    #[test]
    fn a_refusal_carries_qemus_words() {
        let answer = "{\"error\": {\"class\": \"DeviceNotFound\", \"desc\": \"Device 'x' not \
                      found\"}, \"id\": %}\n";
        let path = serve("refused", "{\"QMP\": {}}\n", vec![answer].leak());
        let error = connect(&path)
            .unwrap()
            .execute("device_del", json!({"id": "x"}));
        let error = error.unwrap_err();
        assert!(error.is_not_found());
        assert_eq!(
            error.to_string(),
            "QEMU refused device_del: Device 'x' not found"
        );
    }

    #[test]
    fn a_qemu_whose_process_has_no_number_here_is_the_user_of_its_socket() {
        let (uid, gid) = (u32::MAX - 2, u32::MAX - 3);
        let there = Owner { uid, gid };
        let peer = |pid| user_of_peer(Peer { uid, gid, pid });
        assert_eq!(peer(None), there);
        // It has ended.
        assert_eq!(peer(NonZeroU32::new(i32::MAX as u32)), there);
        // The control: one that runs is asked.
        let own = NonZeroU32::new(std::process::id());
        assert_eq!(Some(peer(own)), access::user_of("self"));
    }

    #[test]
    fn each_way_not_to_get_a_monitor_says_what_to_do() {
        let missing = connect(&socket("missing")).unwrap_err().to_string();
        assert!(missing.contains("-qmp unix:PATH"), "{missing}");

        let path = socket("dead");
        drop(UnixListener::bind(&*path).unwrap());
        let dead = connect(&path).unwrap_err().to_string();
        assert!(dead.contains("no QEMU listens"), "{dead}");

        let path = socket("held");
        let _listener = UnixListener::bind(&*path).unwrap();
        let held = Qmp::connect(&path, Duration::from_millis(20));
        let held = held.unwrap_err().to_string();
        assert!(held.contains("second -qmp socket"), "{held}");

        let path = serve("human", "QEMU 7.2 monitor\n(qemu) \n", &[]);
        let human = connect(&path).unwrap_err().to_string();
        assert!(human.contains("not a QMP monitor"), "{human}");
    }

    #[test]
    fn silence_and_an_ended_qemu_are_told_apart() {
        let path = serve("silent", "{\"QMP\": {}}\n", &["\n \n"]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        assert!(matches!(
            qmp.execute("stop", json!({})),
            Err(MonitorError::Silent(..) | MonitorError::Closed(..))
        ));
    }
}
