//! QEMU's guest agent: it reads and writes files in the guest and runs programs there, if its administrator allows it.
//!
//! What answers is the guest: every answer has a limit in time and size, and nothing of it is done here.
//!
//! **In step.** It answers in turn, whoever asked, and does not say which command an answer is to. So who comes finds answers to commands of
//! those who were there before:
//!
//! ```text
//!   somebody      {"execute":"guest-file-wr           is killed
//!   we            \xff {"execute":"guest-sync-delimited", with a number that nobody else has
//!   the agent     {"error": … stray …}                of the half
//!                 \xff {"return": that number}        all that comes from here on is ours
//! ```
//!
//! An agent that starts again while it reads a command of ours reads its end as if it were a beginning, and complains of each piece. That
//! says nothing of the command, and of the complaints only the first is read as its answer: what is asked next begins as above.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use vnplug_os::event::random;
use vnplug_os::socket::connect_within;

use crate::failure::Failure;
use crate::qemu::lines::{Lines, MARK};
use crate::qemu::monitor::MonitorError;
use crate::qemu::virsh::Virsh;

/// Why a guest's agent does not do what it is asked for.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It does not answer, or has forgotten what was begun: its guest has not started, or starts again.
    Passing(Failure),
    /// It refuses, or nobody will ever answer: there is no such machine, or it has no such channel.
    Final(Failure),
}

impl Trouble {
    pub(super) fn why(&self) -> String {
        let (Self::Passing(why) | Self::Final(why)) = self;
        why.line()
    }

    fn of_refusal(why: String) -> Self {
        let mut began_again = FORGOTTEN.iter().chain(&IN_PARTS);
        let kind = match began_again.any(|words| why.contains(words)) {
            true => Self::Passing,
            false => Self::Final,
        };
        kind(Failure::new(why))
    }
}

/// What virsh says. Words that are not known may be of libvirtd, which starts again.
impl From<MonitorError> for Trouble {
    fn from(error: MonitorError) -> Self {
        match &error {
            MonitorError::Libvirt(text) if text.contains(REFUSED) => {
                Self::of_refusal(error.to_string())
            }
            MonitorError::Libvirt(text) if NEVER.iter().any(|words| text.contains(words)) => {
                Self::Final(error.into())
            }
            MonitorError::NoVirsh(_) => Self::Final(error.into()),
            _ => Self::Passing(error.into()),
        }
    }
}

/// A guest whose agent answers.
pub(super) struct Guest {
    way: Way,
}

enum Way {
    Socket(Talk),
    /// With how many seconds an answer may take.
    Libvirt(Virsh, u64),
}

impl Guest {
    /// By the socket of the agent's channel, within `limit`.
    ///
    /// # Errors
    /// Nobody is there, or nobody answers.
    pub(super) fn at(path: &Path, limit: Duration) -> Result<Self, Trouble> {
        let about = |why: String| Failure::about(path.display(), why);
        let stream = connect_within(path, limit).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Trouble::Passing(about(format!(
                "{error}; others hold this channel or wait for it"
            ))),
            _ => Trouble::Final(about(format!("{error}; QEMU makes it by {CHANNEL}"))),
        })?;
        let mut talk = Talk {
            lines: Lines::new(stream),
            in_step: false,
        };
        match talk.synchronise(Instant::now() + limit) {
            Ok(Some(())) => Ok(Self {
                way: Way::Socket(talk),
            }),
            Ok(None) | Err(_) => Err(Trouble::Passing(about("no answer".to_owned()))),
        }
    }

    /// By libvirt, which holds the channel; an answer may take `limit`.
    ///
    /// # Errors
    /// As for [`at`](Self::at).
    pub(super) fn of(virsh: Virsh, limit: Duration) -> Result<Self, Trouble> {
        let way = Way::Libvirt(virsh, limit.as_secs_f64().ceil() as u64);
        let mut guest = Self { way };
        guest.call("guest-ping", json!({}))?;
        Ok(guest)
    }

    /// Fails if the guest's administrator forbids what is needed.
    pub(super) fn must_do(&mut self, commands: &[&str]) -> Result<(), Trouble> {
        let info = self.call("guest-info", json!({}))?;
        let supported = info["supported_commands"].as_array();
        let can = |command: &str| {
            let named = |it: &&Value| it["name"] == command && it["enabled"] == true;
            supported.is_some_and(|all| all.iter().any(|it| named(&it)))
        };
        match commands.iter().find(|command| !can(command)) {
            None => Ok(()),
            Some(command) => Err(Trouble::Final(Failure::new(format!(
                "the guest's agent does not allow {command}: allow it in the guest (block-rpcs in /etc/qemu/qemu-ga.conf, \
                 or BLACKLIST_RPC in /etc/sysconfig/qemu-ga), or install vNPlug's agent there by its package"
            )))),
        }
    }

    /// Reads the beginning of a file, 4 KiB at most.
    pub(super) fn read(&mut self, path: &str) -> Result<String, Trouble> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "r"}))?;
        let read = self.call("guest-file-read", json!({"handle": file, "count": 4096}));
        self.call("guest-file-close", json!({"handle": file}))?;
        let bytes = STANDARD.decode(read?["buf-b64"].as_str().unwrap_or_default());
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    }

    /// Writes a file.
    pub(super) fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), Trouble> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "w"}))?;
        for piece in bytes.chunks(PIECE) {
            let arguments = json!({"handle": file, "buf-b64": STANDARD.encode(piece)});
            let written = self.call("guest-file-write", arguments)?;
            if written["count"] != piece.len() {
                let why = "the guest wrote less of it";
                return Err(Trouble::Final(Failure::about(path, why)));
            }
        }
        self.call("guest-file-flush", json!({"handle": file}))?;
        self.call("guest-file-close", json!({"handle": file}))
            .map(drop)
    }

    /// Has the guest's shell run a script; what it said.
    ///
    /// # Errors
    /// It failed, or is not done within 30 seconds.
    pub(super) fn run(&mut self, script: &str) -> Result<String, Trouble> {
        let script =
            format!("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; {script}");
        let arguments = json!({"path": "/bin/sh", "arg": ["-c", script], "capture-output": true});
        let pid = self.call("guest-exec", arguments)?["pid"].take();
        let deadline = Instant::now() + SCRIPT_LIMIT;
        loop {
            let status = self.call("guest-exec-status", json!({"pid": pid}))?;
            if status["exited"] == true {
                let text = |key: &str| {
                    let data = status[key].as_str().unwrap_or_default();
                    let bytes = STANDARD.decode(data).unwrap_or_default();
                    String::from_utf8_lossy(&bytes).trim().to_owned()
                };
                if status["exitcode"] == 0 {
                    return Ok(text("out-data"));
                }
                let why = Failure::about("in the guest", text("err-data"));
                // One that was killed: the guest is about to end.
                return Err(match status["signal"].is_null() {
                    true => Trouble::Final(why),
                    false => Trouble::Passing(why),
                });
            }
            if Instant::now() >= deadline {
                let limit = SCRIPT_LIMIT.as_secs();
                return Err(Trouble::Passing(Failure::new(format!(
                    "the guest is not done within {limit} s"
                ))));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn call(&mut self, command: &str, arguments: Value) -> Result<Value, Trouble> {
        let talk = match &mut self.way {
            Way::Libvirt(virsh, limit) => return Ok(virsh.in_guest(command, arguments, *limit)?),
            Way::Socket(talk) => talk,
        };
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        let answer = talk.ask(line.as_bytes(), Instant::now() + LIMIT);
        let lost = |why: String| Err(Trouble::Passing(Failure::new(why)));
        match answer {
            Ok(Some(mut answer)) if answer.get("return").is_some() => Ok(answer["return"].take()),
            Ok(Some(answer)) => {
                let why = answer["error"]["desc"].as_str().unwrap_or("no answer");
                let why = format!("the guest refused {command}: {why}");
                Err(Trouble::of_refusal(why))
            }
            Ok(None) => lost(format!(
                "the guest's agent did not answer {command} within {} s",
                LIMIT.as_secs()
            )),
            Err(error) => lost(format!(
                "the guest's agent is gone (during {command}): {error}"
            )),
        }
    }
}

/// A connection to an agent.
struct Talk {
    lines: Lines,
    /// The next answer is to what is asked next.
    in_step: bool,
}

impl Talk {
    /// The answer to a command; `None`: there was none until the deadline.
    fn ask(&mut self, line: &[u8], deadline: Instant) -> io::Result<Option<Value>> {
        if !self.in_step && self.synchronise(deadline)?.is_none() {
            return Ok(None);
        }
        self.in_step = false;
        self.lines.write(line, deadline)?;
        let answer = self.lines.read(deadline)?;
        self.in_step = answer.as_ref().is_some_and(|it| {
            let why = it["error"]["desc"].as_str().unwrap_or_default();
            !IN_PARTS.iter().any(|words| why.contains(words))
        });
        Ok(answer)
    }

    /// Waits until the agent has answered everything else; `None`: it has not until the deadline.
    fn synchronise(&mut self, deadline: Instant) -> io::Result<Option<()>> {
        // Who was there before may have sent it, too: what is sent before the guest's end is open arrives late. The agent reads it as
        // a signed number.
        let id = random() >> 1;
        let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}}).to_string();
        // The mark ends half a command of somebody who was interrupted.
        let bytes = [&[MARK], sync.as_bytes(), b"\n"].concat();
        self.lines.write(&bytes, deadline)?;
        loop {
            match self.lines.read(deadline) {
                Ok(Some(answer)) if answer["return"] == id => {
                    self.in_step = true;
                    return Ok(Some(()));
                }
                // To an earlier command, or a complaint about half of one.
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Ok(None) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

const CHANNEL: &str = "-chardev socket,id=qga,path=PATH,server=on,wait=off -device virtio-serial -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
/// What an agent says that has started again, of what the one before had begun (QEMU's qga/commands-posix.c, commands.c).
const FORGOTTEN: [&str; 2] = ["has not been found", "Invalid parameter 'pid'"];
/// And of a command of which it has not read the beginning, as it started again meanwhile (its qobject/json-*.c, qapi/qmp-dispatch.c):
/// those of ours are JSON and commands. The second is of QEMU 2.
const IN_PARTS: [&str; 3] = ["JSON parse error", "Invalid JSON syntax", "QMP input"];
/// libvirt's words for what the agent itself refuses (its qemu_agent.c).
const REFUSED: &str = "unable to execute QEMU agent command";
/// And for what will not change while the machine is the same (qemu_domain.c, virsh).
const NEVER: [&str; 3] = [
    "agent is not configured",
    "domain is not running",
    "failed to get domain",
];
/// How long one try to be heard takes.
pub(super) const TRY_LIMIT: Duration = Duration::from_millis(1500);
/// How long an answer may take.
pub(super) const LIMIT: Duration = Duration::from_secs(5);
const SCRIPT_LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(50);
/// The most of a file at a time: with libvirt it is an argument of a command, of 128 KiB at most.
const PIECE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread::{self, JoinHandle};

    use vnplug_testing::{Deadline, TestDir};

    use super::*;

    /// The agent's end of a channel, which a test plays.
    struct Played(BufReader<UnixStream>);

    impl Played {
        fn hears(&mut self) -> Vec<u8> {
            let mut line = Vec::new();
            self.0.read_until(b'\n', &mut line).unwrap();
            line
        }

        fn says(&mut self, bytes: impl AsRef<[u8]>) {
            self.0.get_mut().write_all(bytes.as_ref()).unwrap();
        }

        /// Is asked to begin, and says this before it does.
        fn begins_behind(&mut self, left: &[u8]) {
            let line = self.hears();
            let sync = line.strip_prefix(&[MARK]).expect("it begins by the mark");
            let sync: Value = serde_json::from_slice(sync).unwrap();
            assert_eq!(sync["execute"], "guest-sync-delimited");
            let answer = json!({"return": sync["arguments"]["id"]});
            self.says([left, &[MARK], format!("{answer}\n").as_bytes()].concat());
        }
    }

    /// A guest whose agent does this with the first connection.
    fn guest(
        limit: Duration,
        plays: impl FnOnce(Played) + Send + 'static,
    ) -> (Result<Guest, Trouble>, JoinHandle<()>) {
        let dir = TestDir::new("qga");
        let path = dir.path("qga");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            plays(Played(BufReader::new(stream)));
        });
        (Guest::at(&path, limit), agent)
    }

    /// As long as tests wait for anything.
    const LONG: Duration = Duration::from_secs(60);

    fn is_final(trouble: &Trouble) -> bool {
        matches!(trouble, Trouble::Final(_))
    }

    #[test]
    fn what_others_have_left_is_not_taken_for_an_answer() {
        // What qemu-ga 7.2 says of half a command when the mark comes, and what it may have said to those who are gone.
        let stray = r#"{"error": {"class": "GenericError", "desc": "JSON parse error, stray '\"guest-pi\uFFFD'"}}"#;
        let theirs = [
            "",
            &format!("{stray}\n"),
            &format!("{stray}\n{stray}\n"),
            "{\"return\": {\"pid\": 7}}\n",
            // The end of an answer, the beginning of one by an agent that was killed, and both.
            "d\": 7}}\n",
            "{\"return\": {\"pi",
            "d\": 7}}\n{\"return\": {\"pi",
            "{\"return\": {\"pi\n",
        ];
        let mut left: Vec<Vec<u8>> = theirs.map(|it| it.as_bytes().to_vec()).into();
        // Somebody else's beginning.
        left.push(b"\xff{\"return\": 7}\n".to_vec());
        for left in left {
            let said = String::from_utf8_lossy(&left).into_owned();
            let (guest, agent) = guest(LONG, move |mut agent| {
                agent.begins_behind(&left);
                agent.hears();
                agent.says("{\"return\": \"ours\"}\n");
            });
            let answer = guest.and_then(|mut guest| guest.call("guest-ping", json!({})));
            assert_eq!(answer.ok(), Some(json!("ours")), "{said:?}");
            agent.join().unwrap();
        }
    }

    #[test]
    fn an_agent_that_reads_the_end_of_a_command_has_started_again() {
        let complaint = |why: &str| {
            let error = json!({"error": {"class": "GenericError", "desc": why}});
            format!("{error}\n")
        };
        // What qemu-ga 7.2 says first of the end of a guest-file-write, wherever that begins.
        for first in [
            "JSON parse error, stray 'I'",
            "JSON parse error, expecting value",
            "QMP input must be a JSON object",
            "QMP input member 'handle' is unexpected",
        ] {
            let (guest, agent) = guest(LONG, move |mut agent| {
                agent.begins_behind(b"");
                agent.hears();
                agent.says(complaint(first));
                // The rest is there when we speak again.
                agent.begins_behind(complaint("JSON parse error, expecting value").as_bytes());
                agent.hears();
                agent.says("{\"return\": \"ours\"}\n");
            });
            let mut guest = guest.unwrap_or_else(|trouble| panic!("{}", trouble.why()));
            let trouble = guest.call("guest-file-write", json!({})).unwrap_err();
            assert!(!is_final(&trouble), "{}", trouble.why());
            assert!(trouble.why().contains(first), "{}", trouble.why());
            let answer = guest.call("guest-ping", json!({}));
            assert_eq!(answer.ok(), Some(json!("ours")), "{first}");
            agent.join().unwrap();
        }
        // The control: one that forbids it.
        let (guest, agent) = guest(LONG, move |mut agent| {
            agent.begins_behind(b"");
            agent.hears();
            agent.says(complaint("Command guest-exec has been disabled"));
        });
        let mut guest = guest.unwrap_or_else(|trouble| panic!("{}", trouble.why()));
        let trouble = guest.call("guest-exec", json!({})).unwrap_err();
        assert!(is_final(&trouble), "{}", trouble.why());
        agent.join().unwrap();
    }

    #[test]
    fn neither_silence_nor_a_flood_holds_us_up() {
        let floods = |line: &'static [u8]| {
            move |mut agent: Played| {
                let deadline = Deadline::new("nobody reads any more");
                while agent.0.get_mut().write_all(line).is_ok() {
                    deadline.check();
                }
            }
        };
        let is_silent = |mut agent: Played| {
            let _ = agent.0.read_to_end(&mut Vec::new());
        };
        let short = Duration::from_millis(100);
        for (guest, agent) in [
            guest(short, is_silent),
            guest(short, floods(b"{\"return\": {}}\n")),
            guest(short, floods(&[b'x'; 65536])),
        ] {
            let Err(trouble) = guest else {
                panic!("it says that it is there");
            };
            assert!(!is_final(&trouble), "{}", trouble.why());
            assert!(trouble.why().contains("no answer"), "{}", trouble.why());
            agent.join().unwrap();
        }
    }

    #[test]
    fn of_two_who_come_at_once_the_second_is_told_to_come_again() {
        let dir = TestDir::new("qga-two");
        let path = dir.path("qga");
        // QEMU serves one at a time, and the others wait.
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut agent = Played(BufReader::new(stream));
            agent.begins_behind(b"");
            assert_eq!(agent.hears(), b"", "the first goes");
            // What the second sent, who is gone, and then what it sends now.
            let (stream, _) = listener.accept().unwrap();
            let late = Played(BufReader::new(stream)).hears();
            let (stream, _) = listener.accept().unwrap();
            let late: Value = serde_json::from_slice(&late[1..]).unwrap();
            let late = json!({"return": late["arguments"]["id"]});
            let mut agent = Played(BufReader::new(stream));
            agent.begins_behind(&[&[MARK], format!("{late}\n").as_bytes()].concat());
        });
        let first = Guest::at(&path, LONG);
        assert!(first.is_ok());
        let second = Guest::at(&path, Duration::from_millis(50));
        assert!(second.is_err_and(|trouble| !is_final(&trouble)));
        drop(first);
        assert!(Guest::at(&path, LONG).is_ok());
        agent.join().unwrap();
    }

    #[test]
    fn what_may_change_is_told_from_what_will_not() {
        for (text, never) in [
            (
                "guest agent is not responding: QEMU guest agent is not connected",
                false,
            ),
            (
                "failed to connect to the hypervisor: Connection refused",
                false,
            ),
            (
                "Timed out during operation: cannot acquire state change lock",
                false,
            ),
            (
                "argument unsupported: QEMU guest agent is not configured",
                true,
            ),
            (
                "Requested operation is not valid: domain is not running",
                true,
            ),
            ("failed to get domain 'x'", true),
            (
                "unable to execute QEMU agent command 'guest-exec': it has been disabled",
                true,
            ),
            // The guest has started again meanwhile.
            (
                "unable to execute QEMU agent command 'guest-file-write': handle '1000' has not been found",
                false,
            ),
            (
                "unable to execute QEMU agent command 'guest-exec-status': Invalid parameter 'pid'",
                false,
            ),
            (
                "unable to execute QEMU agent command 'guest-file-write': JSON parse error, stray 'I'",
                false,
            ),
        ] {
            let said = Trouble::from(MonitorError::Libvirt(text.to_owned()));
            assert_eq!(is_final(&said), never, "{text}");
        }
        let silent = MonitorError::Silent("guest-ping".to_owned(), LIMIT);
        assert!(!is_final(&silent.into()));
        let missing = MonitorError::NoVirsh(io::ErrorKind::NotFound.into());
        assert!(is_final(&missing.into()));
    }
}
