//! Grants to join a switch that become narrower while clients of its entrances are there: what is open is closed at once, told
//! and counted, and others lose nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::Uid;
use serde_json::Value;
use vnplug::{Client, Error, GrantAction, GrantKind, Port, PortOptions};
use vnplug_e2e::Lab;
use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::reading::end_of;
use vnplug_e2e::times::Times;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_testing::{Deadline, Dice, PATIENCE, eventually};

/// The stations: who reads, who sends all the time, and the user's.
const READS: u8 = 1;
const STAYS: u8 = 2;
const THEIRS: u8 = 9;
/// A station of the user's in a VLAN of its own.
const APART: u8 = 8;

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
fn rounds() -> u64 {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000,
        None => 30,
    }
}

/// A switch with entrances that a user may use, and a grant to join it.
struct Scene {
    daemon: Daemon,
    operator: Client,
    dir: PathBuf,
    _lab: Lab,
}

impl Scene {
    fn new() -> Self {
        let lab = Lab::new().unwrap();
        let config = open_to_all(&lab, "");
        let dir = lab.dir().to_owned();
        let [stream, bess, vhost] = ["stream", "bess", "vhost"].map(|it| dir.join(it));
        let [stream, bess, vhost] = [&stream, &bess, &vhost].map(|it| it.display());
        let spec = format!("lan0,stream={stream},bess={bess},vhost={vhost},mode=666");
        let grant = format!("uid:{USER}=lan0");
        let args = [
            "--config",
            &config,
            "--switch",
            &spec,
            "--allow-join",
            &grant,
        ];
        let daemon = Daemon::start(&lab, None, &args).unwrap();
        let operator = Client::connect_to(&daemon.socket()).unwrap();
        Self {
            daemon,
            operator,
            dir,
            _lab: lab,
        }
    }

    /// The user may join so, and not otherwise: how long that took.
    fn set(&mut self, settings: &str) -> Duration {
        let begun = Instant::now();
        let grant = format!("uid:{USER}=lan0{settings}");
        let changed = self
            .operator
            .change_grant(GrantAction::Set, GrantKind::Join, &grant, false);
        changed.unwrap();
        begun.elapsed()
    }

    fn has_ports(&self, count: u64) {
        eventually("the ports are right", || {
            value(counted(&self.daemon.counters(), "source"), "switch_ports") == count
        });
    }

    fn shown(&self) -> Value {
        let show = ["switch", "show", "lan0", "--stations", "--json"];
        let (code, text) = self.daemon.vnplug(&show);
        assert_eq!(code, Some(0), "{text}");
        serde_json::from_str(&text).unwrap()
    }
}

/// What a user has at a switch, by each entrance and by rings.
struct Theirs {
    stream: UnixStream,
    others: [UnixStream; 2],
    ring: Port,
}

impl Theirs {
    fn come(scene: &Scene) -> Self {
        let (dir, control) = (scene.dir.clone(), scene.daemon.socket());
        as_user(move || Self {
            stream: UnixStream::connect(dir.join("stream")).unwrap(),
            others: [packets(&dir.join("bess")), front_end(&dir.join("vhost"))],
            ring: PortOptions::new("lan0")
                .socket(&control)
                .join()
                .reconnect(false)
                .open()
                .unwrap(),
        })
    }

    /// All of it is closed, and its programs are told.
    fn are_told(mut self) {
        let [one, other] = &mut self.others;
        for socket in [&mut self.stream, one, other] {
            is_closed(socket);
        }
        let told = end_of(&mut self.ring);
        assert!(
            matches!(&told, Error::Gone(why) if why.contains("grants")),
            "{told:?}"
        );
    }
}

fn packets(path: &Path) -> UnixStream {
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket.into()
}

/// A front-end of vhost-user: who speaks has a port.
fn front_end(path: &Path) -> UnixStream {
    let mut socket = UnixStream::connect(path).unwrap();
    // Get the features: request 1, version 1, no payload.
    let asked = socket.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    asked.unwrap();
    socket
}

/// Reads until the other end hangs up.
fn is_closed(socket: &mut UnixStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("it is not closed: {error}"),
        }
    }
}

/// A numbered frame, with its length before it.
fn frame(to: u8, from: u8, number: u64) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(60, 0);
    [&60_u32.to_be_bytes()[..], &frame].concat()
}

/// Sends numbered frames until it cannot, or is to end: how many. `next` is the number of the next one.
fn sends(mut stream: &UnixStream, from: u8, next: &AtomicU64, over: &AtomicBool) -> u64 {
    let mut sent = 0;
    while !over.load(Ordering::Relaxed) {
        let number = next.load(Ordering::SeqCst);
        if stream.write_all(&frame(READS, from, number)).is_err() {
            break;
        }
        next.store(number + 1, Ordering::SeqCst);
        sent += 1;
        if sent % 4 == 0 {
            sleep(Duration::from_micros(500));
        }
    }
    sent
}

/// Who sent each frame that comes, and its number, until nothing comes any more and it is over.
fn reads(mut stream: &UnixStream, seen: &AtomicU64, over: &AtomicBool) -> Vec<(u8, u64)> {
    let pause = Some(Duration::from_millis(50));
    stream.set_read_timeout(pause).unwrap();
    let (mut all, mut bytes, mut room) = (Vec::new(), Vec::new(), [0; 1 << 16]);
    loop {
        match stream.read(&mut room) {
            Ok(0) => panic!("who stays is closed"),
            Ok(count) => bytes.extend(&room[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if over.load(Ordering::Relaxed) {
                    return all;
                }
            }
            Err(error) => panic!("{error}"),
        }
        let whole = bytes.len() / 64 * 64;
        for frame in bytes.drain(..whole).as_slice().chunks(64) {
            let (from, number) = (frame[4 + 11], frame[18..26].try_into().unwrap());
            all.push((from, u64::from_be_bytes(number)));
            if from == THEIRS {
                seen.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

#[test]
fn who_may_join_otherwise_is_closed_at_once_told_and_counted_and_others_lose_nothing() {
    let mut scene = Scene::new();
    let [read, stays] = [(); 2].map(|()| UnixStream::connect(scene.dir.join("stream")).unwrap());
    // Known, so that nothing is for all.
    (&read).write_all(&frame(STAYS, READS, 0)).unwrap();
    scene.has_ports(2);
    let (over, seen, next) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let mut times = Times::default();
    // Before which frame of who stays the last of a round must have come.
    let mut marks = Vec::new();
    let (came, sent) = scope(|threads| {
        let ends = Ends([&over; 2]);
        let reader = threads.spawn(|| reads(&read, &seen, &over));
        let stays = threads.spawn(|| sends(&stays, STAYS, &next, &over));
        for round in 0..rounds() {
            let theirs = Theirs::come(&scene);
            scene.has_ports(6);
            let stream = theirs.stream.try_clone().unwrap();
            let before = seen.load(Ordering::SeqCst);
            // It ends by itself when its port is closed, and by this if it is not.
            let gone = &AtomicBool::new(false);
            let number = AtomicU64::new(round << 32);
            let number = &number;
            scope(|threads| {
                let _gone = Ends([gone; 2]);
                threads.spawn(move || sends(&stream, THEIRS, number, gone));
                let deadline = Deadline::new("what they send arrives");
                while seen.load(Ordering::SeqCst) < before + 50 {
                    deadline.check();
                    sleep(Duration::from_micros(100));
                }
                times.push(scene.set(",vlan=10"));
                // One may be on its way.
                marks.push(next.load(Ordering::SeqCst) + 1);
                theirs.are_told();
                scene.has_ports(2);
            });
            if round % 10 == 0 {
                comes_again(&scene);
            }
            scene.set("");
        }
        // Who stays goes on behind the last mark.
        let last = marks.last().copied().unwrap_or_default();
        eventually("more comes", || next.load(Ordering::SeqCst) > last + 10);
        drop(ends);
        (reader.join().unwrap(), stays.join().unwrap())
    });
    // All of who stays, in order; and of the others nothing behind the mark of its round.
    let mut of_stays = 0;
    let mut of_theirs = 0;
    for (from, number) in came {
        match from {
            STAYS => {
                assert_eq!(number, of_stays);
                of_stays += 1;
            }
            THEIRS => {
                let round = (number >> 32) as usize;
                assert!(of_stays <= marks[round], "round {round}: {of_stays}");
                of_theirs += 1;
            }
            other => panic!("a frame of {other}, who is in a VLAN of its own"),
        }
    }
    assert_eq!(of_stays, sent);
    assert!(of_theirs >= 50 * rounds(), "{of_theirs}");
    eprintln!(
        "{} times: {:?} in the median, 99 of 100 at most {:?}, the worst {:?}; {of_stays} frames beside it, {of_theirs} theirs",
        rounds(),
        times.at(50),
        times.at(99),
        times.at(100)
    );
    times.are_within(Duration::from_millis(10), "a narrower grant to join");
    scene.daemon.audit();
    // And nobody at all.
    let grant = format!("uid:{USER}=lan0");
    let (remove, join) = (GrantAction::Remove, GrantKind::Join);
    let theirs = Theirs::come(&scene);
    let removed = scene.operator.change_grant(remove, join, &grant, false);
    removed.unwrap();
    theirs.are_told();
    let dir = scene.dir.clone();
    let refused = as_user(move || {
        [
            UnixStream::connect(dir.join("stream")).unwrap(),
            packets(&dir.join("bess")),
            front_end(&dir.join("vhost")),
        ]
    });
    for mut socket in refused {
        is_closed(&mut socket);
    }
    // There are 20 lines of them in a second, and no more.
    eventually("the log says why", || {
        let path = scene.dir.join("stream");
        is_closed(&mut as_user(move || UnixStream::connect(path).unwrap()));
        scene.daemon.log().contains("has no grant to join")
    });
    scene.has_ports(2);
}

/// Who comes again has the new settings, before its first frame.
fn comes_again(scene: &Scene) {
    let path = scene.dir.join("stream");
    let stream = as_user(move || UnixStream::connect(path).unwrap());
    for number in 0..5 {
        let sent = (&stream).write_all(&frame(READS, APART, number));
        sent.unwrap();
    }
    eventually("its station is known", || {
        let shown = scene.shown();
        let ports = shown["ports"].as_array().unwrap();
        let own = ports.iter().find(|it| is_theirs(it));
        let vlan = own.map(|it| ["value", "from"].map(|key| it["settings"]["vlan"][key].clone()));
        assert!(vlan.is_none_or(|it| it == ["10", "grant"]), "{shown}");
        shown["stations"].to_string().contains("02:00:00:00:00:08")
    });
    drop(stream);
    scene.has_ports(2);
}

fn is_theirs(port: &Value) -> bool {
    let owner = port["owner"].as_str().unwrap_or_default();
    owner.contains(&USER.to_string())
}

/// Clients that come and go all the time.
const CLIENTS: usize = 12;

#[test]
fn who_joins_while_its_grant_changes_has_the_new_one() {
    let mut scene = Scene::new();
    let (over, frozen) = (AtomicBool::new(false), AtomicBool::new(false));
    let held = AtomicUsize::new(0);
    let mut had = 0;
    scope(|threads| {
        let _ends = Ends([&over; 2]);
        for client in 0..CLIENTS {
            let dir = scene.dir.clone();
            let (over, frozen, held) = (&over, &frozen, &held);
            threads.spawn(move || {
                rustix::thread::set_thread_uid(Uid::from_raw(USER)).unwrap();
                let mut dice = Dice(client as u64 + 1);
                while !over.load(Ordering::SeqCst) {
                    let _socket = match client % 3 {
                        0 => UnixStream::connect(dir.join("stream")).unwrap(),
                        1 => packets(&dir.join("bess")),
                        _ => front_end(&dir.join("vhost")),
                    };
                    // Longer than a change takes: who came while it was made is there when all hold still.
                    sleep(Duration::from_micros(dice.below(5_000)));
                    if frozen.load(Ordering::SeqCst) {
                        held.fetch_add(1, Ordering::SeqCst);
                        while frozen.load(Ordering::SeqCst) && !over.load(Ordering::SeqCst) {
                            sleep(Duration::from_micros(200));
                        }
                        held.fetch_sub(1, Ordering::SeqCst);
                    }
                }
            });
        }
        for round in 0..10 * rounds() {
            let vlan = (10 + round % 2).to_string();
            scene.set(&format!(",vlan={vlan}"));
            // They keep what they have: what came by the old grant, if the change missed it, too.
            frozen.store(true, Ordering::SeqCst);
            let all = |count| {
                let deadline = Deadline::new("all hold still, or go on");
                while held.load(Ordering::SeqCst) != count {
                    deadline.check();
                    sleep(Duration::from_micros(100));
                }
            };
            all(CLIENTS);
            eventually("all have the new grant", || {
                let shown = scene.shown();
                let ports = shown["ports"].as_array().unwrap();
                let theirs: Vec<&Value> = ports.iter().filter(|it| is_theirs(it)).collect();
                had += theirs.len();
                theirs
                    .iter()
                    .all(|it| it["settings"]["vlan"]["value"] == vlan.as_str())
            });
            frozen.store(false, Ordering::SeqCst);
            all(0);
        }
    });
    // They were there.
    assert!(had as u64 > 10 * rounds(), "{had}");
}
