//! What a reader can do to memory that the daemon writes or reads: free pages of it, change its
//! length, write where it must not, keep it when its port is closed. The readers here are another user.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::process::{Gid, Uid};
use vnplug::{Meta, Next, map_apart, map_memory};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, label, refusal};
use vnplug_e2e::huge_pages::HugePages;
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Counted, Message, Open, Opened, code};
use vnplug_ring::layout::{HEAD, LIFE, Life};
use vnplug_ring::{Consumer, Producer, Region};
use vnplug_testing::{Deadline, eventually};

const NOBODY: u32 = 65_534;
const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// A daemon that lets user nobody read and send.
fn daemon(lab: &Lab) -> Daemon {
    let config = lab.dir().join("vnplug.toml");
    let text = format!(
        "socket_mode = 0o666\n\
         [[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 20000\nsize = 64\n\
         [[allow]]\nuid = {NOBODY}\nsource = \"lab\"\nsend = true\n"
    );
    fs::write(&config, text).unwrap();
    let open_to_all = |dir: &Path| {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    };
    open_to_all(lab.dir());
    let daemon = Daemon::start(lab, None, &["--config", config.to_str().unwrap()]).unwrap();
    open_to_all(daemon.socket().parent().unwrap());
    daemon
}

/// Does something as user nobody, in a thread of its own.
fn as_nobody<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let run = scope.spawn(|| {
            let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            what()
        });
        run.join().expect("nobody does it")
    })
}

/// A port that user nobody opened, and what came with it.
struct Theirs {
    raw: Raw,
    opened: Opened,
    words: OwnedFd,
    records: OwnedFd,
}

fn request(ring_bytes: u64, transmit_bytes: u64) -> Open {
    Open {
        transmit_bytes,
        ..open("lab", ring_bytes)
    }
}

fn theirs(raw: Raw, request: Open) -> Theirs {
    try_theirs(raw, request).unwrap_or_else(|(_, text)| panic!("{text}"))
}

fn try_theirs(mut raw: Raw, request: Open) -> Result<Theirs, (u16, String)> {
    let opened = match raw.ask(&Message::Open(request), 0) {
        Message::Opened(opened) => opened,
        other => return Err(refusal(other)),
    };
    let mut fds = raw.take_fds().into_iter();
    let (words, records) = (fds.next().unwrap(), fds.next().unwrap());
    Ok(Theirs {
        raw,
        opened,
        words,
        records,
    })
}

impl Theirs {
    fn map(&self) -> Region {
        map_apart(self.words.as_fd(), self.records.as_fd(), &self.opened).unwrap()
    }

    fn ring(&self) -> Region {
        let place = self.opened.rings[0];
        self.map().part(place.offset, place.len).unwrap()
    }
}

/// Bytes of memory that a file has.
fn held(fd: &OwnedFd) -> u64 {
    fstat(fd).unwrap().st_blocks as u64 * 512
}

/// Reads until it is told to end; packets, and packets lost.
fn bystand(daemon: &Daemon, over: &AtomicBool, ready: &AtomicBool) -> (u64, u64) {
    let mut port = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    ready.store(true, Ordering::Release);
    let mut packets = 0;
    while !over.load(Ordering::Acquire) {
        match port.next().unwrap() {
            Next::Packet(_) => packets += 1,
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(50))).unwrap();
            }
            Next::Ended => panic!("ended"),
        }
    }
    (packets, port.counts().lost)
}

/// Lets somebody read beside an attack, and checks that he lost nothing and that the daemon lives.
fn beside(daemon: &Daemon, attack: impl FnOnce()) {
    let (over, ready) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let reader = scope.spawn(|| bystand(daemon, &over, &ready));
        eventually("the bystander reads", || {
            ready.load(Ordering::Acquire) || reader.is_finished()
        });
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let ends = Ends(&over);
        attack();
        drop(ends);
        let (packets, lost) = reader.join().unwrap();
        assert!(packets > 0);
        assert_eq!(lost, 0, "the bystander lost packets");
    });
    daemon.audit();
}

fn port(daemon: &Daemon, number: u32) -> Counted {
    let mut all = daemon.counters().into_iter();
    let is_it = |it: &Counted| it.kind == "port" && it.name == number.to_string();
    all.find(is_it).expect("the port is counted")
}

/// Whatever can be tried on the records is refused.
fn try_all_on_records(theirs: &Theirs) {
    let records = &theirs.records;
    let len = theirs.opened.rings[0].len - 4096;
    assert_eq!(
        fallocate(records, HOLE, 0, len),
        Err(rustix::io::Errno::BADF)
    );
    assert!(ftruncate(records, 0).is_err());
    assert!(rustix::io::pwrite(records, b"lies", 0).is_err());
    assert!(map_memory(records.as_fd(), len).is_err());
    assert!(rustix::fs::fchmod(records, rustix::fs::Mode::all()).is_err());
    let again = format!("/proc/self/fd/{}", records.as_raw_fd());
    assert!(File::options().write(true).open(&again).is_err());
    assert!(File::options().read(true).write(true).open(&again).is_err());
    assert_eq!(held(records), len);
}

/// Its ring gets packets.
fn flows(theirs: &Theirs) {
    let ring = theirs.ring();
    let before = ring.load_u64(HEAD, Ordering::Acquire);
    eventually("packets come", || {
        ring.load_u64(HEAD, Ordering::Acquire) != before
    });
}

#[test]
fn nobody_frees_records_and_who_frees_the_words_goes_alone() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    beside(&daemon, || {
        let theirs = as_nobody(|| {
            let theirs = theirs(Raw::greeted(&daemon.socket()), request(1 << 20, 0));
            flows(&theirs);
            try_all_on_records(&theirs);
            flows(&theirs);
            // Its own words it may free: for ever, if need be, and nobody else notices.
            let begun = Instant::now();
            let mut holes = 0_u64;
            while begun.elapsed() < Duration::from_secs(1) {
                fallocate(&theirs.words, HOLE, 0, 4096).unwrap();
                holes += 1;
            }
            println!("{holes} holes a second in a page of words");
            theirs
        });
        let state = label(&port(&daemon, theirs.opened.port), "state").to_owned();
        assert!(state.contains("freed their page"), "{state}");
        assert_eq!(held(&theirs.words), 0, "the daemon stores there no more");
    });
}

#[test]
fn huge_pages_under_a_ring_are_not_its_readers_to_free() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    beside(&daemon, || {
        let Some(pages) = HugePages::reserve(8) else {
            return;
        };
        as_nobody(|| {
            let theirs = theirs(Raw::greeted(&daemon.socket()), request(8 << 20, 0));
            assert!(daemon.log().contains("rings lie in huge pages"));
            try_all_on_records(&theirs);
            // Somebody has all the others: what was freed would be missing now.
            let others = memfd_create("others", MemfdFlags::HUGETLB).unwrap();
            let rest = pages.free() * (2 << 20);
            ftruncate(&others, rest).unwrap();
            fallocate(&others, FallocateFlags::empty(), 0, rest).unwrap();
            assert_eq!(pages.free(), 0);
            // More than a turn of the ring.
            let ring = theirs.ring();
            let mut reader = Consumer::attach(ring).unwrap();
            let mut bytes = 0;
            let deadline = Deadline::new("more than a turn of the ring comes");
            while bytes < 9 << 20 {
                while reader.next().unwrap().is_some() {
                    bytes += 96;
                }
                reader.release();
                deadline.check_seen(&bytes);
                thread::sleep(Duration::from_millis(1));
            }
        });
    });
}

#[test]
fn who_frees_what_it_sends_is_served_no_more() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    beside(&daemon, || {
        as_nobody(|| {
            let theirs = theirs(Raw::greeted(&daemon.socket()), request(1 << 16, 8 << 20));
            let place = theirs.opened.transmit;
            let memory = theirs.map();
            let ring = memory.part(place.offset, place.len).unwrap();
            let mut sender = Producer::attach(ring).unwrap();
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !over.load(Ordering::Acquire) {
                        // The records; the page before them stays.
                        fallocate(&theirs.words, HOLE, 8192, place.len - 4096).unwrap();
                    }
                });
                let (begun, deadline) = (Instant::now(), Deadline::new("it is served no more"));
                while sender.life() == Life::Open {
                    let _ = sender.push(&Meta::default(), &[7; 1_000]);
                    sender.publish();
                    deadline.check();
                    thread::sleep(Duration::from_micros(100));
                }
                over.store(true, Ordering::Release);
                println!("a sender with holes was served for {:?}", begun.elapsed());
            });
            assert_eq!(sender.life(), Life::Quarantined);
        });
    });
}

#[test]
fn memory_of_closed_ports_is_nobodys_to_keep() {
    const RING: u64 = 32 << 20;
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let begun = Instant::now();
    as_nobody(|| {
        let mut kept: Vec<OwnedFd> = Vec::new();
        let mut most = 0;
        for round in 0..16 {
            // At the limit of 128 MiB, whatever was opened and closed before.
            let open: Vec<Theirs> = (0..4)
                .map(|_| {
                    let deadline = Deadline::new("there is room below the limit");
                    loop {
                        let raw = Raw::greeted(&daemon.socket());
                        match try_theirs(raw, request(RING, 0)) {
                            Ok(theirs) => return theirs,
                            Err((code::LIMIT, _)) => deadline.check(),
                            Err((_, text)) => panic!("{text}"),
                        }
                        thread::sleep(Duration::from_millis(5));
                    }
                })
                .collect();
            let raw = Raw::greeted(&daemon.socket());
            let refused = try_theirs(raw, request(4096, 0)).map(|_| ()).unwrap_err();
            assert_eq!(refused.0, code::LIMIT, "{}", refused.1);
            let total: u64 = kept.iter().map(held).sum();
            let now: u64 = open.iter().map(|it| held(&it.records)).sum();
            most = most.max(total + now);
            for mut theirs in open {
                // By a message, by going, and by a process that still maps it.
                let ring = theirs.ring();
                if round % 2 == 0 {
                    let port = theirs.opened.port;
                    assert_eq!(theirs.raw.ask(&Message::Close { port }, 0), Message::Done);
                }
                drop(theirs.raw);
                kept.extend([theirs.words, theirs.records]);
                eventually("the ring is over", || {
                    let word = ring.load_u64(LIFE, Ordering::Acquire);
                    Life::from_word(word) != Life::Open || word == 0
                });
                let mut reader = [0; 64];
                ring.read(4096, &mut reader);
            }
        }
        eventually("what was closed is free", || {
            // A page that was looked at after it was freed is its looker's.
            kept.iter().map(held).sum::<u64>() <= 2 * 4096 * kept.len() as u64
        });
        println!(
            "{} MiB at most at a limit of 128, in {:?}",
            most >> 20,
            begun.elapsed()
        );
        assert!(most <= (128 << 20) + (1 << 20), "{most} bytes were held");
    });
    daemon.audit();
}

#[test]
fn a_reader_of_what_was_closed_finds_its_end_and_no_torn_packet() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    for _ in 0..20 {
        let mut theirs = theirs(Raw::greeted(&daemon.socket()), request(1 << 20, 0));
        flows(&theirs);
        let mut reader = Consumer::attach(theirs.ring()).unwrap();
        let port = theirs.opened.port;
        thread::scope(|scope| {
            let reads = scope.spawn(move || {
                let deadline = Deadline::new("the reader finds its end");
                while reader.life() == Life::Open {
                    while let Some(packet) = reader.next().unwrap() {
                        assert!(packet.meta.wire_len == 64, "{:?}", packet.meta);
                    }
                    reader.release();
                    deadline.check();
                }
                while let Some(packet) = reader.next().unwrap() {
                    assert!(packet.meta.wire_len == 64, "{:?}", packet.meta);
                }
            });
            thread::sleep(Duration::from_millis(5));
            let closed = theirs.raw.ask(&Message::Close { port }, 0);
            assert_eq!(closed, Message::Done);
            reads.join().unwrap();
        });
    }
}

#[test]
fn an_old_library_is_told_so() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut raw = Raw::greeted(&daemon.socket());
    let request = Open {
        maps_apart: false,
        ..request(1 << 16, 0)
    };
    let (code, text) = refusal(raw.ask(&Message::Open(request), 0));
    assert_eq!(code, code::INVALID);
    assert!(text.contains("older than this daemon"), "{text}");
}

#[test]
fn a_state_directory_that_others_made_is_not_served() {
    let lab = Lab::new().unwrap();
    let victim = lab.dir().join("victim");
    let mut file = File::create(&victim).unwrap();
    file.write_all(&vec![0x5a; 1 << 20]).unwrap();
    let record = format!(
        "name = \"x\"\numl = false\npool = \"{}\"\npool_bytes = 1048576\nvectors = 0\nallow = []\n",
        victim.display()
    );
    let started = |state: &Path| {
        let state = state.to_str().unwrap();
        let args = ["--source", "lab=gen,pps=10", "--state-dir", state];
        Daemon::start(&lab, None, &args)
    };
    // Made by another user; then a link; then ours, with what does not belong there.
    let planted = lab.dir().join("planted");
    fs::create_dir_all(planted.join("vms")).unwrap();
    fs::write(planted.join("vms/x.toml"), &record).unwrap();
    for path in ["vms/x.toml", "vms"] {
        let path = planted.join(path);
        std::os::unix::fs::chown(path, Some(NOBODY), None).unwrap();
    }
    assert!(started(&planted).is_err());
    let linked = lab.dir().join("linked");
    fs::create_dir(&linked).unwrap();
    std::os::unix::fs::symlink(planted.join("vms"), linked.join("vms")).unwrap();
    assert!(started(&linked).is_err());
    let ours = lab.dir().join("ours");
    fs::create_dir_all(ours.join("vms")).unwrap();
    fs::write(ours.join("vms/x.toml"), &record).unwrap();
    let short = record.replace("1048576", "100");
    fs::write(ours.join("vms/y.toml"), short.replace("\"x\"", "\"y\"")).unwrap();
    std::os::unix::fs::symlink(&victim, ours.join("vms/z.toml")).unwrap();
    let daemon = started(&ours).expect("it serves the others");
    let log = daemon.log();
    assert!(log.contains("is no pool of VM \"x\""), "{log}");
    drop(daemon);
    assert_eq!(fs::read(&victim).unwrap(), vec![0x5a; 1 << 20]);
}

#[test]
fn a_ring_that_transmits_counts_for_its_users_limit_until_it_is_freed() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    as_nobody(|| {
        let ask = |transmit: u64| {
            let raw = Raw::greeted(&daemon.socket());
            try_theirs(raw, request(4096, transmit))
        };
        let refused = |transmit| ask(transmit).map(|_| ()).unwrap_err();
        // More than a ring may have, and more than a user may have.
        assert_eq!(refused(2 << 30).0, code::INVALID);
        let (code, text) = refused(256 << 20);
        assert!(
            code == code::LIMIT && text.contains("max_user_bytes"),
            "{text}"
        );
        let first = ask(64 << 20).map_err(|(_, text)| text).unwrap();
        assert_eq!(refused(64 << 20).0, code::LIMIT);
        // Freed with its port, whoever keeps it, and then there to be had again.
        let Theirs { raw, words, .. } = first;
        assert!(held(&words) > 64 << 20);
        drop(raw);
        eventually("it is free", || held(&words) == 0);
        eventually("it can be had again", || ask(64 << 20).is_ok());
    });
    daemon.audit();
}
