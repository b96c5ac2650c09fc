//! Readers with different grants, while others come and go: whatever one of them can map holds frames of
//! its own source and of no other. Each source's frames carry a run number that nobody else's have.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Uid;
use vnplug::Client;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, refusal};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Grant, Message, Open, Role, VmKind, VmSpec, code};

/// Sources, each with one user and one VM that see it: eight peers.
const PEERS: u32 = 4;
const FIRST_USER: u32 = 60_000;
const FIRST_RUN: u32 = 0xc0de_a5a0;
const TIME: Duration = Duration::from_secs(4);

/// What every frame of a source ends with, but for the number and the sum (UDP over IPv4).
fn canary(source: u32) -> [u8; 6] {
    let [a, b, c, d] = (FIRST_RUN + source).to_be_bytes();
    [0x76, 0x57, a, b, c, d]
}

/// Looks for all canaries in what can be read; own ones, others', and bytes.
#[derive(Debug, Default, Clone, Copy)]
struct Found {
    own: u64,
    others: u64,
    bytes: u64,
}

impl Found {
    fn scan(&mut self, file: &File, own: u32) {
        let len = file.metadata().expect("its length").len();
        let mut bytes = vec![0; 1 << 20];
        let mut at = 0;
        while at < len {
            let count = file.read_at(&mut bytes, at).expect("it is ours to read");
            assert!(count > 0, "it is as long as it says");
            self.look(&bytes[..count], own);
            // One that lies across two pieces is found in the next round.
            at += count as u64;
        }
        self.bytes += len;
    }

    fn look(&mut self, bytes: &[u8], own: u32) {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|&byte| byte == 0x76) {
            rest = &rest[at..];
            if let Some(source) = (0..PEERS).find(|&source| rest.starts_with(&canary(source))) {
                match source == own {
                    true => self.own += 1,
                    false => self.others += 1,
                }
            }
            rest = &rest[1..];
        }
    }

    fn add(&mut self, other: Self) {
        self.own += other.own;
        self.others += other.others;
        self.bytes += other.bytes;
    }
}

/// What a port has: rings of other sizes each time, sometimes one that transmits.
fn request(device: &str, turn: u32) -> Open {
    Open {
        transmit_bytes: if turn.is_multiple_of(3) { 1 << 16 } else { 0 },
        ..open(device, 4096 << (turn % 9))
    }
}

/// Opens, lets frames come, looks, closes; the descriptors are looked at once more when it is closed.
fn turn(raw: &mut Raw, own: u32, turn: u32, found: &mut Found) {
    let opened = match raw.ask(&Message::Open(request(&format!("s{own}"), turn)), 0) {
        Message::Opened(opened) => opened,
        other => {
            // What was closed is freed a moment later.
            let (code, text) = refusal(other);
            assert_eq!(code, code::LIMIT, "{text}");
            return;
        }
    };
    let fds: Vec<OwnedFd> = raw.take_fds();
    let files: Vec<File> = fds.into_iter().take(2).map(File::from).collect();
    // Before anything came: what whoever had the memory before left.
    files.iter().for_each(|file| found.scan(file, own));
    thread::sleep(Duration::from_millis(5));
    files.iter().for_each(|file| found.scan(file, own));
    let close = Message::Close { port: opened.port };
    assert_eq!(raw.ask(&close, 0), Message::Done);
    files.iter().for_each(|file| found.scan(file, own));
}

#[test]
fn nobody_finds_a_frame_of_a_source_that_it_may_not_see() {
    let lab = Lab::new().unwrap();
    let mut text = String::from("socket_mode = 0o666\n");
    for source in 0..PEERS {
        let (user, run) = (FIRST_USER + source, FIRST_RUN + source);
        text += &format!(
            "[[source]]\nname = \"s{source}\"\nkind = \"gen\"\npps = 20000\nsize = 200\nrun = {run}\n\
             [[allow]]\nuid = {user}\nsource = \"s{source}\"\nsend = true\n"
        );
    }
    let config = lab.dir().join("vnplug.toml");
    fs::write(&config, text).unwrap();
    let daemon = Daemon::start(&lab, None, &["--config", config.to_str().unwrap()]).unwrap();
    let socket = daemon.socket();
    for dir in [lab.dir(), socket.parent().unwrap()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    // The control: what is looked for is there, for who may see it.
    let mut control = Found::default();
    turn(&mut Raw::greeted(&socket), 0, 8, &mut control);
    assert!(control.own > 10, "{control:?}");
    let mut wrong = Found::default();
    wrong.look(&canary(1), 0);
    assert_eq!(wrong.others, 1);

    let user = |own: u32| {
        rustix::thread::set_thread_uid(Uid::from_raw(FIRST_USER + own)).unwrap();
        let (mut found, begun) = (Found::default(), Instant::now());
        let mut raw = Raw::greeted(&socket);
        for number in 0.. {
            if begun.elapsed() > TIME {
                break;
            }
            // Sometimes it goes without a word.
            if number % 7 == 6 {
                raw = Raw::greeted(&socket);
            }
            turn(&mut raw, own, number, &mut found);
        }
        found
    };
    let vm = |own: u32| {
        let (mut found, begun) = (Found::default(), Instant::now());
        let mut operator = Client::connect_to(&socket).unwrap();
        while begun.elapsed() < TIME {
            let spec = VmSpec {
                name: format!("vm{own}"),
                kind: VmKind::Qemu,
                pool_bytes: 8 << 20,
                vectors: 1,
                allow: vec![Grant {
                    source: format!("s{own}"),
                    filter: String::new(),
                }],
                owner: 1,
                groups: Vec::new(),
                stays_for: None,
            };
            let ready = operator.attach_vm(spec).unwrap();
            let pool = File::open(&ready.pool_path).unwrap();
            found.scan(&pool, own);
            let mut agent = Raw::connect(ready.control_path.as_ref());
            agent.hello(Role::Agent);
            for number in 0..6 {
                let asked = Message::Open(open(&format!("host:s{own}"), 4096 << number));
                let answer = agent.ask(&asked, 1);
                assert!(matches!(answer, Message::Opened(_)), "{answer:?}");
            }
            thread::sleep(Duration::from_millis(20));
            found.scan(&pool, own);
            operator.detach_vm(&format!("vm{own}")).unwrap();
            found.scan(&pool, own);
        }
        found
    };
    let mut all = Found::default();
    thread::scope(|scope| {
        let users = (0..PEERS).map(|own| scope.spawn(move || user(own)));
        let users: Vec<_> = users.collect();
        let vms: Vec<_> = (0..PEERS).map(|own| scope.spawn(move || vm(own))).collect();
        for peer in users.into_iter().chain(vms) {
            let found = peer.join().unwrap();
            assert!(found.own > 0, "it saw nothing of its own: {found:?}");
            all.add(found);
        }
    });
    println!("figure: G-22 bytes scanned = {}", all.bytes);
    println!("figure: G-22 canaries of others = {}", all.others);
    assert_eq!(all.others, 0, "{all:?}");
    daemon.audit();
}
