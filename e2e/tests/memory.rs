//! Memory is committed and given back beside everything else that the daemon does.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use vnplug::{Client, map_memory};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, refusal};
use vnplug_e2e::raw::{Holdings, Raw, open};
use vnplug_ring::Region;
use vnplug_ring::control::{FilterSpec, Grant, Message, Role, VmKind, VmReady, VmSpec, code};
use vnplug_ring::layout::{HEAD, MAX_DELAY_US, TAIL, WAKE_AT, WAKE_SEQ};
use vnplug_testing::{Deadline, until};

const SOURCE: &[&str] = &["--source", "lab=gen,pps=1000"];
/// A quarter of a second and more to commit.
const LARGE: u64 = 512 << 20;

fn spec(name: &str, pool_bytes: u64) -> VmSpec {
    let allow = vec![Grant {
        source: "lab".into(),
        filter: String::new(),
    }];
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes,
        vectors: 0,
        allow,
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    }
}

fn pools(ready: &VmReady) -> usize {
    let pool = std::path::Path::new(&ready.pool_path);
    let dir = fs::read_dir(pool.parent().expect("a directory of pools"));
    dir.expect("it is there").count()
}

/// A reader in a VM that asks to be woken for every packet.
struct Reader {
    channel: Raw,
    ring: Region,
    port: u32,
    seq: u32,
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
impl Reader {
    fn open(ready: &VmReady) -> Self {
        let mut channel = Raw::connect(ready.control_path.as_ref());
        channel.hello(Role::Agent);
        let opened = channel.ask(&Message::Open(open("host:lab", 1 << 16)), 1);
        let Message::Opened(opened) = opened else {
            panic!("{opened:?}");
        };
        let mut options = File::options();
        let pool = options.read(true).write(true).open(&ready.pool_path);
        let pool = pool.unwrap();
        let pool = map_memory(pool.as_fd(), ready.pool_len).unwrap();
        let place = opened.rings[0];
        Self {
            channel,
            ring: pool.part(place.offset, place.len).unwrap(),
            port: opened.port,
            seq: 0,
        }
    }

    /// Sleeps until the next packet.
    fn wake(&mut self) {
        self.seq += 1;
        let head = self.ring.load_u64(HEAD, Ordering::Acquire);
        self.ring.store_u64(TAIL, head, Ordering::Release);
        self.ring.store_u64(WAKE_AT, head + 1, Ordering::Relaxed);
        self.ring.store_u32(MAX_DELAY_US, 0, Ordering::Relaxed);
        self.ring.store_u32(WAKE_SEQ, self.seq, Ordering::SeqCst);
        match self.channel.next() {
            Some((0, Message::Wake(ports))) => assert_eq!(ports, [self.port]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_large_attach_and_detach_and_a_large_ring_keep_nobody_waiting() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let ready = operator.attach_vm(spec("small", 1 << 20)).unwrap();
    let mut reader = Reader::open(&ready);
    // On a busy machine this process may not run while the daemon commits.
    let are_served = (0..5).any(|_| {
        let (answered, woken) = beside_large_memory(&daemon, &mut operator, &mut reader);
        eprintln!("{answered} answers, {woken} wake-ups");
        // A daemon that commits memory in its one thread answers and wakes once or twice meanwhile.
        answered > 10 && woken > 10
    });
    assert!(are_served, "others wait while memory is committed");
    daemon.audit();
}

/// Attaches, opens and detaches what is large; how many requests were answered meanwhile, and how often
/// a reader was woken.
#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn beside_large_memory(daemon: &Daemon, operator: &mut Client, reader: &mut Reader) -> (u64, u64) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        let mut client = Raw::greeted(&daemon.socket());
        let count = |mut turn: Box<dyn FnMut() + Send>| {
            move || {
                let mut turns = 0;
                while !over.load(Ordering::Acquire) {
                    turn();
                    turns += 1;
                }
                turns
            }
        };
        let answered = scope.spawn(count(Box::new(move || {
            assert!(matches!(client.ask(&Message::List, 0), Message::Devices(_)));
        })));
        let woken = scope.spawn(count(Box::new(move || reader.wake())));
        // The control: these take long.
        let begun = Instant::now();
        operator.attach_vm(spec("large", LARGE)).unwrap();
        let ring = daemon.port("lab").ring_bytes(LARGE / 2).open().unwrap();
        drop(ring);
        operator.detach_vm("large").unwrap();
        eprintln!("attached, opened and detached in {:?}", begun.elapsed());
        over.store(true, Ordering::Release);
        (answered.join().unwrap(), woken.join().unwrap())
    })
}

#[test]
fn who_leaves_while_a_pool_is_made_leaves_nothing() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let ready = operator.attach_vm(spec("other", 1 << 20)).unwrap();
    let mut before = Holdings::at_rest(daemon.pid());
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            before = Holdings::at_rest(daemon.pid());
        }
        let mut leaver = Raw::greeted(&daemon.socket());
        let request = Message::AttachVm(spec("vm", LARGE));
        leaver.send(&request.encode(7, 0)).unwrap();
        // Its name is taken meanwhile.
        // NB: looked at without a pause, for the pool is begun for a moment only.
        let deadline = Deadline::new("a pool is begun");
        while pools(&ready) < 2 {
            deadline.check();
        }
        let mut second = Raw::greeted(&daemon.socket());
        let answer = second.ask(&request, 0);
        if !matches!(answer, Message::VmReady(_)) {
            let (kind, text) = refusal(answer);
            assert!(kind == code::EXISTS && text.contains("vm"), "{text}");
        }
        drop((leaver, second));
        // Given up, or made before: either way it is as it was, and the name is free.
        let attach = || operator.attach_vm(spec("vm", LARGE));
        until("the name is free", attach, Result::is_ok).unwrap();
        operator.detach_vm("vm").unwrap();
        assert_eq!(pools(&ready), 1);
    }
    let after = Holdings::at_rest(daemon.pid());
    assert_eq!(after.fds, before.fds);
    // What is left behind is left behind each time. The first rounds, and as many threads at a time
    // as never before, leave the allocator's and the C library's: arenas, and stacks for later.
    assert!(after.maps < before.maps + ROUNDS, "{before:?} {after:?}");
}

const WARM_UP: usize = 4;
const ROUNDS: usize = 16;

#[test]
fn pools_and_arenas_of_vms_that_are_detached_are_nobodys_to_keep() {
    use std::os::unix::fs::MetadataExt;
    const POOL: u64 = 32 << 20;
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let held = |files: &[File]| -> u64 {
        let blocks = files.iter().map(|it| it.metadata().unwrap().blocks());
        blocks.sum::<u64>() * 512
    };
    // A QEMU that lets go of nothing.
    let mut kept: Vec<File> = Vec::new();
    let mut mapped = Vec::new();
    for _ in 0..4 {
        let mut wanted = spec("keeper", POOL);
        wanted.groups = vec![vnplug_ring::control::HostGroup {
            name: "g".into(),
            source: "lab".into(),
            arena_bytes: 8 << 20,
        }];
        let ready = operator.attach_vm(wanted).unwrap();
        let mut reader = Reader::open(&ready);
        reader.wake();
        let before = kept.len();
        let open = |path: &str| File::options().read(true).write(true).open(path).unwrap();
        kept.push(open(&ready.pool_path));
        kept.push(open(&ready.arenas[0].0));
        // The control: all of it was there.
        assert!(held(&kept[before..]) >= POOL + (8 << 20));
        mapped.push(map_memory(kept[before].as_fd(), ready.pool_len).unwrap());
        // While ports are open and closed, a pool has what it was given, no more and no less.
        assert_eq!(held(&kept[before..=before]), POOL);
        let closed = Message::Close { port: reader.port };
        assert_eq!(reader.channel.ask(&closed, 1), Message::Done);
        assert_eq!(held(&kept[before..=before]), POOL);
        operator.detach_vm("keeper").unwrap();
    }
    until("nothing is kept", || held(&kept), |bytes| *bytes == 0);
    // Who still maps it finds zeroes, and no fault.
    assert!(
        mapped
            .iter()
            .all(|it| it.load_u64(8192, Ordering::Relaxed) == 0)
    );
    daemon.audit();
}

#[test]
fn a_user_who_asks_on_many_connections_at_once_gets_no_more_than_on_one() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config.toml");
    let text = "socket_mode = 0o666\nmax_user_bytes = '128MiB'\n\
        [[allow]]\nuid = 65534\nsource = 'lab'\n";
    fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let daemon = Daemon::start(&lab, None, &["--config", config, "--source", SOURCE[1]]).unwrap();
    let socket = daemon.socket();
    for dir in [lab.dir(), socket.parent().unwrap()] {
        fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    // The longest program there is: four of them are what the other readers must bear.
    let mut longest = [0, 0, 0, 0, 0, 0, 0, 0].repeat(4095);
    longest.extend([6, 0, 0, 0, 0xff, 0xff, 0, 0]);
    let outcome = |filter: FilterSpec, ring_bytes: u64, count: u32| {
        let ask = || {
            rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(65534)).unwrap();
            let mut all: Vec<Raw> = (0..count).map(|_| Raw::greeted(&socket)).collect();
            let mut request = open("lab", ring_bytes);
            request.filter = filter;
            for raw in &mut all {
                raw.send(&Message::Open(request.clone()).encode(7, 0))
                    .unwrap();
            }
            let answers = all.iter_mut().map(|raw| match raw.next().unwrap().1 {
                Message::Opened(_) => None,
                other => Some(refusal(other)),
            });
            let answers: Vec<_> = answers.collect();
            answers
        };
        thread::scope(|scope| scope.spawn(ask).join().unwrap())
    };
    let refused = outcome(FilterSpec::Program(longest), 8 << 20, 12);
    let limits = refused
        .iter()
        .flatten()
        .filter(|(code, _)| *code == code::LIMIT);
    assert_eq!(limits.count(), 8, "{refused:?}");
    let ports = || daemon.audit().iter().filter(|it| it.kind == "port").count();
    until("no port stays", ports, |ports| *ports == 0);
    // No memory is made that would be refused afterwards: the next one would wait for it.
    let refused = outcome(FilterSpec::All, 64 << 20, 300);
    let opened = refused.iter().filter(|refusal| refusal.is_none()).count();
    assert!((1..=2).contains(&opened), "{opened}");
    daemon.audit();
}
