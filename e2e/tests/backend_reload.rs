//! Grants of back-ends that change while they are used: who may be one and who may use it, by the file and at run time.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vnplug::{BackEndOptions, Channel, ChannelOptions, Client, Error, Heard, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::Raw;
use vnplug_e2e::user::{USER, as_uid, open_to_all};
use vnplug_ring::control::{Backend, GrantAction, GrantKind, Message, REVOKED_CHANNEL, code};
use vnplug_testing::until;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
const SHARED: &[u8; 6] = b"shared";
/// Whose process is the back-end, first and later.
const SERVES: u32 = USER;
const SERVES_LATER: u32 = USER + 1;
/// Whose grant to use it is taken, and whose is not.
const TAKEN: u32 = USER + 2;
const STAYS: u32 = USER + 3;

/// A daemon whose file grants back-ends.
struct Configured {
    file: String,
    daemon: Daemon,
    _lab: Lab,
}

impl Configured {
    fn start(text: &str) -> Self {
        let lab = Lab::new().unwrap();
        let file = open_to_all(&lab, text);
        let daemon = Daemon::start(&lab, None, &["--config", &file]).unwrap();
        Self {
            file,
            daemon,
            _lab: lab,
        }
    }

    /// Has the file read again: what the command says.
    fn reload(&self, text: &str) -> String {
        fs::write(&self.file, format!("socket_mode = 0o666\n{text}")).unwrap();
        let (code, said) = self.daemon.vnplug(&["reload"]);
        assert_eq!(code, Some(0), "{said}");
        said
    }

    /// What the daemon says of the back-end `kv`.
    fn of_kv(&self, names: [&str; 2]) -> Option<[u64; 2]> {
        let counters = self.daemon.counters();
        let mut own = counters.iter().filter(|it| it.kind == "backend");
        let kv = own.find(|it| it.name == "kv")?;
        Some(names.map(|of| value(kv, of)))
    }
}

/// The back-end `kv`, and another one of root's.
fn tables(uid: u32, open: &[u32], memory: &str) -> String {
    let open: Vec<String> = open.iter().map(|uid| format!("\"uid:{uid}\"")).collect();
    let open = open.join(", ");
    format!(
        "[[backend]]\nid = 85\nname = \"kv\"\nuid = {uid}\nopen = [{open}]\nmemory = \"{memory}\"\n{}",
        other_table()
    )
}

fn other_table() -> String {
    "[[backend]]\nid = 86\nname = \"dns\"\nuid = 0\nopen = [\"uid:*\"]\n".to_owned()
}

/// Does something as this user, and goes on as him.
fn beside<T: Send + 'static>(uid: u32, does: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    thread::spawn(move || as_uid(uid, does))
}

/// A back-end of this user's that says everything back, and shares memory when it is asked for `memory`, until it may not be one
/// any more: why its channels were over, and what it is told then.
fn serve(
    socket: PathBuf,
    uid: u32,
    (id, name): (u32, &'static str),
) -> JoinHandle<(Vec<String>, Error)> {
    let (is_there, begun) = std::sync::mpsc::channel();
    let serves = beside(uid, move || {
        let options = BackEndOptions::new(id, name).socket(socket);
        let mut back = options.register().unwrap();
        is_there.send(()).unwrap();
        let mut reasons = Vec::new();
        loop {
            match back.next(None) {
                Ok(Some(Heard::Message { channel, bytes })) if bytes == b"memory" => {
                    let region = back.share(channel, 4096, true).unwrap();
                    back.memory(region).unwrap().write(0, SHARED).unwrap();
                }
                Ok(Some(Heard::Message { channel, bytes })) => match back.send(channel, &bytes) {
                    Ok(()) | Err(Error::Invalid(_) | Error::Disconnected) => {}
                    Err(error) => panic!("{error}"),
                },
                Ok(Some(Heard::Left { reason, .. })) => reasons.push(reason),
                Ok(Some(Heard::Joined { .. } | Heard::Gone(_) | Heard::Back)) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => return (reasons, error),
            }
        }
    });
    begun.recv_timeout(Duration::from_secs(20)).unwrap();
    serves
}

fn program(socket: PathBuf, uid: u32, name: &'static str) -> Channel {
    as_uid(uid, move || {
        ChannelOptions::new(name).socket(socket).open().unwrap()
    })
}

fn told(channel: &mut Channel) -> Told {
    let told = channel.next(SOON).unwrap();
    told.expect("the program is told something")
}

fn asks(program: &mut Channel, number: u64) {
    program.send(&number.to_le_bytes()).unwrap();
    assert_eq!(
        told(program),
        Told::Message(number.to_le_bytes().to_vec()),
        "lost, doubled or mixed"
    );
}

/// Memory of a program with what its back-end wrote there.
fn shared(program: &mut Channel) -> u32 {
    program.send(b"memory").unwrap();
    let Told::Shared { region } = told(program) else {
        panic!("no memory");
    };
    asks(program, 1);
    assert_eq!(&read(program, region), SHARED);
    region
}

fn read(program: &Channel, region: u32) -> [u8; SHARED.len()] {
    let mut read = [1; SHARED.len()];
    program.memory(region).unwrap().read(0, &mut read).unwrap();
    read
}

/// A program that asks on and on: with each question its answer, and nothing else.
struct Bystander {
    over: Arc<AtomicBool>,
    asks: JoinHandle<(Channel, u64)>,
}

impl Bystander {
    fn start(mut channel: Channel) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let asks = thread::spawn({
            let over = Arc::clone(&over);
            move || {
                let mut asked = 0;
                while !over.load(Ordering::Relaxed) {
                    asks(&mut channel, asked);
                    asked += 1;
                }
                (channel, asked)
            }
        });
        Self { over, asks }
    }

    fn end(self) -> Channel {
        self.over.store(true, Ordering::Relaxed);
        let (channel, asked) = self.asks.join().unwrap();
        assert!(asked > 20, "only {asked} questions beside them");
        channel
    }
}

/// What is at the beginning of a piece of memory.
fn begins(memory: &OwnedFd) -> [u8; SHARED.len()] {
    let mut begins = [1; SHARED.len()];
    rustix::io::pread(memory, &mut begins, 0).unwrap();
    begins
}

/// A program of this user's that does not listen, and its memory.
fn deaf(socket: PathBuf, uid: u32) -> (Raw, OwnedFd) {
    as_uid(uid, move || {
        let (mut deaf, channel) = Raw::program(&socket, 85);
        let bytes = b"memory".to_vec();
        let says = Message::Backend(Backend::Say { channel, bytes });
        deaf.send(&says.encode(0, 0)).unwrap();
        while !matches!(
            deaf.next().unwrap(),
            (_, Message::Backend(Backend::Mapped(_)))
        ) {}
        let memory = deaf.take_fds().pop().unwrap();
        until(
            "the back-end wrote there",
            || begins(&memory),
            |it| it == SHARED,
        );
        (deaf, memory)
    })
}

fn is_revoked(channel: &mut Channel) {
    loop {
        match told(channel) {
            Told::Gone(reason) => return assert_eq!(reason, REVOKED_CHANNEL),
            Told::Message(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> u16 {
    match result {
        Err(Error::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

/// What opening a channel as this user is refused with.
fn refused(socket: PathBuf, uid: u32) -> u16 {
    as_uid(uid, move || {
        refusal(ChannelOptions::new("kv").socket(socket).open())
    })
}

#[test]
fn who_may_not_use_it_any_more_loses_its_channels_and_nobody_else_anything() {
    let it = Configured::start(&tables(SERVES, &[TAKEN, STAYS], "8MiB"));
    let socket = || it.daemon.socket();
    let _kv = serve(socket(), SERVES, (85, "kv"));
    let _dns = serve(socket(), 0, (86, "dns"));
    let bystander = Bystander::start(program(socket(), STAYS, "kv"));
    let mut elsewhere = program(socket(), TAKEN, "dns");
    let mut taken = program(socket(), TAKEN, "kv");
    let region = shared(&mut taken);
    let (silent, memory) = deaf(socket(), TAKEN);
    // The control: what does not concern it takes nothing.
    assert_eq!(
        it.reload(&tables(SERVES, &[TAKEN, STAYS], "4MiB")),
        "back-end kv: changed\n"
    );
    asks(&mut taken, 2);
    assert_eq!(
        it.reload(&tables(SERVES, &[STAYS], "4MiB")),
        format!("grant use uid:{TAKEN}=kv: removed\n")
    );
    is_revoked(&mut taken);
    assert_eq!(read(&taken, region), [0; SHARED.len()]);
    assert_eq!(refused(socket(), TAKEN), code::NOT_FOUND);
    until(
        "its memory is emptied",
        || begins(&memory),
        |it| *it == [0; 6],
    );
    asks(&mut elsewhere, 3);
    drop(silent);
    until(
        "theirs are gone, with their memory",
        || it.of_kv(["channels", "regions"]),
        |of| *of == Some([1, 0]),
    );
    let mut stays = bystander.end();
    asks(&mut stays, 4);
    // Who may again is let in again.
    it.reload(&tables(SERVES, &[TAKEN, STAYS], "4MiB"));
    asks(&mut program(socket(), TAKEN, "kv"), 5);
}

#[test]
fn who_may_not_be_it_any_more_is_withdrawn_and_another_one_takes_its_place() {
    let it = Configured::start(&tables(SERVES, &[STAYS], "8MiB"));
    let socket = || it.daemon.socket();
    let kv = serve(socket(), SERVES, (85, "kv"));
    let _dns = serve(socket(), 0, (86, "dns"));
    let bystander = Bystander::start(program(socket(), STAYS, "dns"));
    let (_silent, memory) = deaf(socket(), STAYS);
    // Goes on as that user: it connects again by itself.
    let (is_asking, begun) = std::sync::mpsc::channel();
    let theirs = beside(STAYS, {
        let socket = socket();
        move || {
            let mut channel = ChannelOptions::new("kv").socket(socket).open().unwrap();
            let region = shared(&mut channel);
            is_asking.send(()).unwrap();
            let gone = told(&mut channel);
            let left = read(&channel, region);
            let back = told(&mut channel);
            asks(&mut channel, 7);
            (gone, left, back)
        }
    });
    begun.recv_timeout(Duration::from_secs(20)).unwrap();
    let said = it.reload(&tables(SERVES_LATER, &[STAYS], "8MiB"));
    assert_eq!(
        said,
        format!("grant serve uid:{SERVES}=kv: removed\ngrant serve uid:{SERVES_LATER}=kv: added\n")
    );
    let (reasons, error) = kv.join().unwrap();
    assert_eq!(reasons.len(), 2);
    assert_eq!(refusal(Err::<(), _>(error)), code::DENIED);
    until(
        "its memory is emptied",
        || begins(&memory),
        |it| *it == [0; 6],
    );
    let _later = serve(socket(), SERVES_LATER, (85, "kv"));
    let (gone, left, back) = theirs.join().unwrap();
    assert!(
        matches!(&gone, Told::Gone(why) if why.contains("changed the grants")),
        "{gone:?}"
    );
    assert_eq!(left, [0; SHARED.len()]);
    assert!(matches!(back, Told::Back), "{back:?}");
    // A back-end that is no more in the file, and all that was open of it.
    let mut last = program(socket(), STAYS, "kv");
    asks(&mut last, 8);
    let said = it.reload(&other_table());
    assert!(said.starts_with("back-end kv: removed\n"), "{said}");
    assert!(matches!(told(&mut last), Told::Gone(_)));
    assert_eq!(refused(socket(), STAYS), code::NOT_FOUND);
    assert_eq!(it.of_kv(["channels", "regions"]), None);
    bystander.end();
}

#[test]
fn a_grant_is_given_and_taken_at_run_time_and_kept() {
    let mut it = Configured::start(&tables(SERVES, &[TAKEN, STAYS], "8MiB"));
    let socket = it.daemon.socket();
    let kv = serve(socket.clone(), SERVES, (85, "kv"));
    let bystander = Bystander::start(program(socket.clone(), STAYS, "kv"));
    let mut taken = program(socket.clone(), TAKEN, "kv");
    asks(&mut taken, 1);
    let command = |it: &Configured, words: &[&str]| {
        let (code, said) = it.daemon.vnplug(&[&["grant"], words].concat());
        assert_eq!((code, &*said), (Some(0), ""), "{words:?}");
    };
    let uses = format!("uid:{TAKEN}=kv");
    command(&it, &["rm", "--use", &uses]);
    is_revoked(&mut taken);
    assert_eq!(refused(socket.clone(), TAKEN), code::NOT_FOUND);
    let (code, said) = it.daemon.vnplug(&["grant", "rm", "--use", &uses]);
    assert!(code != Some(0) && said.contains("no such grant"), "{said}");
    // Once, and gone with the daemon.
    command(&it, &["add", "--once", "--use", &uses]);
    asks(&mut program(socket.clone(), TAKEN, "kv"), 2);
    bystander.end();
    // A second user's process may be it, too, and then the first one's not any more.
    command(&it, &["add", "--serve", &format!("uid:{SERVES_LATER}=kv")]);
    command(&it, &["rm", "--serve", &format!("uid:{SERVES}=kv")]);
    let (_, error) = kv.join().unwrap();
    assert_eq!(refusal(Err::<(), _>(error)), code::DENIED);
    let later = serve(socket.clone(), SERVES_LATER, (85, "kv"));
    asks(&mut program(socket.clone(), STAYS, "kv"), 3);
    let (_, list) = it.daemon.vnplug(&["grant", "list"]);
    for (whom, may) in [(SERVES_LATER, "serve"), (TAKEN, "use"), (STAYS, "use")] {
        let is_it = |line: &&str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.starts_with(&[&format!("uid:{whom}"), may, "kv"])
        };
        assert!(
            list.lines().any(|line| is_it(&line)),
            "{whom} {may}: {list}"
        );
    }
    // The next daemon has what was kept, and not what was given once.
    it.daemon.end();
    it.daemon.launch().unwrap();
    until(
        "the back-end is there again",
        || it.daemon.vnplug(&["backends"]).1,
        |text| {
            let mut lines = text.lines();
            lines.any(|line| line.starts_with("kv ") && line.contains(" there "))
        },
    );
    assert_eq!(refused(socket.clone(), TAKEN), code::NOT_FOUND);
    let mut operator = Client::connect_to(&socket).unwrap();
    let all = format!("uid:{SERVES_LATER}=kv");
    operator
        .change_grant(GrantAction::Remove, GrantKind::Serve, &all, true)
        .unwrap();
    let (_, error) = later.join().unwrap();
    assert_eq!(refusal(Err::<(), _>(error)), code::DENIED);
    let wrong = operator.change_grant(GrantAction::Add, GrantKind::Serve, "vm:a=kv", true);
    assert_eq!(refusal(wrong), code::INVALID);
}
