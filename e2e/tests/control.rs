//! What strangers say to the daemon's sockets: garbage, pieces, floods, descriptors, silence.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program, refusal};
use vnplug_e2e::raw::{Holdings, Raw, hello, open};
use vnplug_ring::control::wire::{HEADER, Header, MAX_REQUEST};
use vnplug_ring::control::{FilterSpec, Message, Role, VERSION, code};
use vnplug_testing::{Deadline, until};

const SOURCE: &[&str] = &["--source", "lab=gen,pps=1000"];

fn header(kind: u8, len: u32, version: u8) -> [u8; HEADER] {
    Header {
        version,
        kind,
        len,
        id: 7,
        app: 0,
    }
    .encode()
}

/// Waits until the daemon has as many descriptors as before, give or take none.
fn settles(daemon: &Daemon, before: usize) {
    let now = || Holdings::of(daemon.pid());
    let what = format!("it has {before} descriptors");
    until(&what, now, |now| now.fds == before);
}

/// Descriptors of the daemon once it is at rest.
fn at_rest(daemon: &Daemon) -> usize {
    Holdings::at_rest(daemon.pid()).fds
}

#[test]
fn a_transcript_in_pieces_of_any_size_is_answered_as_in_one() {
    let lab = Lab::new().unwrap();
    // Its state does not change: a generator that runs may be behind now and then.
    let source = "lab=gen,pps=1000,start=attach";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let transcript = [
        hello(Role::Client).encode(1, 0),
        Message::List.encode(2, 0),
        Message::Open(open("nowhere", 0)).encode(3, 0),
        Message::Close { port: 99 }.encode(4, 0),
        Message::Done.encode(5, 0),
    ]
    .concat();
    let answers = |pieces: &[&[u8]]| {
        let mut raw = Raw::connect(&daemon.socket());
        for piece in pieces {
            raw.send(piece).unwrap();
        }
        (0..5).map(|_| raw.next().unwrap()).collect::<Vec<_>>()
    };
    let whole = answers(&[&transcript]);
    assert!(matches!(whole[0], (1, Message::Welcome { .. })));
    assert!(matches!(whole[1], (2, Message::Devices(_))));
    for (at, kind) in [
        (2, code::NOT_FOUND),
        (3, code::NOT_FOUND),
        (4, code::PROTOCOL),
    ] {
        assert_eq!(refusal(whole[at].1.clone()).0, kind);
    }
    for cut in 0..transcript.len() {
        let (front, back) = transcript.split_at(cut);
        assert_eq!(answers(&[front, back]), whole, "cut at {cut}");
    }
    let bytes: Vec<&[u8]> = transcript.chunks(1).collect();
    assert_eq!(answers(&bytes), whole);
}

#[test]
fn requests_sent_in_one_piece_are_all_answered_in_order() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut raw = Raw::greeted(&daemon.socket());
    let many: Vec<u8> = (1..=1000)
        .flat_map(|id| Message::Close { port: id }.encode(id, 0))
        .collect();
    raw.send(&many).unwrap();
    for id in 1..=1000 {
        assert_eq!(raw.next().unwrap().0, id);
    }
}

#[test]
fn what_is_no_message_is_answered_and_ends_only_its_connection() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut bystander = Raw::greeted(&daemon.socket());
    let before = at_rest(&daemon);
    // Garbage and impossible lengths: told why, then closed.
    let mut endings: Vec<Vec<u8>> =
        vec![vec![0; 100], vec![0xff; 100], b"GET / HTTP/1.1".repeat(3)];
    for len in [MAX_REQUEST as u32 + 1, 1 << 31, u32::MAX] {
        endings.push(header(1, len, VERSION).to_vec());
    }
    let mut state = 1_u64;
    for _ in 0..200 {
        endings.push(
            (0..64)
                .map(|_| {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect(),
        );
    }
    for bytes in &endings {
        let mut raw = Raw::connect(&daemon.socket());
        raw.send(bytes).unwrap();
        let (_, answer) = raw.next().expect("a reason");
        assert_eq!(refusal(answer).0, code::PROTOCOL);
        assert!(raw.next().is_none(), "the connection ends");
    }
    // Well framed nonsense is refused, and the connection goes on.
    let mut raw = Raw::greeted(&daemon.socket());
    // 37 asks for the back-ends and 62 for the programs: they have no payload.
    for kind in (0..=255).filter(|kind| !(1..=20).contains(kind) && ![37, 62].contains(kind)) {
        raw.send(&header(kind, 0, VERSION)).unwrap();
        assert_eq!(refusal(raw.next().unwrap().1).0, code::PROTOCOL, "{kind}");
    }
    for kind in 1..=20 {
        // Each message with an empty payload and with one of ones.
        for payload in [vec![], vec![0xff; 40]] {
            raw.send(&header(kind, payload.len() as u32, VERSION))
                .unwrap();
            raw.send(&payload).unwrap();
            raw.next().expect("an answer");
        }
    }
    raw.send(&header(4, 0, VERSION + 1)).unwrap();
    assert_eq!(refusal(raw.next().unwrap().1).0, code::PROTOCOL);
    assert!(matches!(raw.ask(&Message::List, 0), Message::Devices(_)));
    // Before Hello nothing is served.
    let mut early = Raw::connect(&daemon.socket());
    assert_eq!(refusal(early.ask(&Message::List, 0)).0, code::PROTOCOL);
    drop((raw, early));
    settles(&daemon, before);
    assert!(matches!(
        bystander.ask(&Message::List, 0),
        Message::Devices(_)
    ));
    // What strangers provoke is logged within bounds.
    let lines = daemon
        .log()
        .lines()
        .filter(|line| line.contains("is cut off"))
        .count();
    assert!(lines > 0 && lines < endings.len(), "{lines} lines");
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut bystander = Raw::greeted(&daemon.socket());
    let before = at_rest(&daemon);
    let file = File::open("/dev/null").unwrap();
    for count in [1, 2, 64, 253] {
        for _ in 0..20 {
            let raw = Raw::greeted(&daemon.socket());
            let fds = vec![file.as_fd(); count];
            raw.send_with(&Message::List.encode(1, 0), &fds).unwrap();
            // The same with a message that is never finished.
            let half = Raw::greeted(&daemon.socket());
            half.send_with(&Message::List.encode(1, 0)[..5], &fds)
                .unwrap();
            // The control: our descriptors did arrive somewhere, for the connection is cut.
            let mut raw = raw;
            assert!(raw.next().is_none(), "{count}");
        }
        settles(&daemon, before);
    }
    // Adopt takes one, but only a stream socket, and only for a VM that there is.
    let mut raw = Raw::greeted(&daemon.socket());
    let adopt = Message::Adopt {
        name: "nobody".into(),
    };
    let (one, _two) = UnixStream::pair().unwrap();
    for (fd, expected) in [
        (file.as_fd(), code::INVALID),
        (one.as_fd(), code::NOT_FOUND),
    ] {
        raw.send_with(&adopt.encode(7, 0), &[fd]).unwrap();
        assert_eq!(refusal(raw.next().unwrap().1).0, expected);
    }
    drop((raw, one));
    settles(&daemon, before);
    assert!(matches!(
        bystander.ask(&Message::List, 0),
        Message::Devices(_)
    ));
}

const FLOODERS: u32 = 16;

#[test]
fn flooders_and_the_silent_do_not_keep_others_waiting() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let before = at_rest(&daemon);
    let silent: Vec<Raw> = (0..1000).map(|_| Raw::connect(&daemon.socket())).collect();
    let anon_before = Holdings::of(daemon.pid()).anon_kib;
    let stop = AtomicBool::new(false);
    let sent = AtomicU64::new(0);
    let mut waits: Vec<Duration> = Vec::new();
    thread::scope(|scope| {
        for flooder in 0..FLOODERS {
            let (stop, sent, daemon) = (&stop, &sent, &daemon);
            scope.spawn(move || {
                // Half of them read nothing of what they are answered.
                let raw = Raw::greeted(&daemon.socket());
                raw.stream.set_nonblocking(true).unwrap();
                let piece = match flooder % 4 {
                    0 => Message::List.encode(1, 0),
                    1 => Message::Stats { port: 0 }.encode(1, 0),
                    2 => hello(Role::Client).encode(1, 0),
                    _ => Message::Open(open("nowhere", 0)).encode(1, 0),
                };
                let bytes = piece.repeat(200);
                let mut at = 0;
                while !stop.load(Ordering::Relaxed) {
                    // Whole messages however the socket cuts them.
                    match rustix::net::send(
                        &raw.stream,
                        &bytes[at..],
                        rustix::net::SendFlags::NOSIGNAL,
                    ) {
                        Ok(count) => {
                            sent.fetch_add(count as u64 / piece.len() as u64, Ordering::Relaxed);
                            at = (at + count) % bytes.len();
                        }
                        Err(_) => thread::sleep(Duration::from_millis(1)),
                    }
                    if flooder % 2 == 0 {
                        let mut heap = vec![0; 1 << 16];
                        let _ = rustix::io::read(&raw.stream, &mut heap);
                    }
                }
            });
        }
        thread::sleep(Duration::from_millis(200));
        let mut victim = Raw::greeted(&daemon.socket());
        let deadline = Deadline::new("requests enough for a flood are sent");
        // The control: it was a flood, more than what the buckets let through.
        while waits.len() < 300 || sent.load(Ordering::Relaxed) <= 16 * 4_000 {
            let begun = Instant::now();
            deadline.check_seen(&sent);
            assert!(matches!(victim.ask(&Message::List, 0), Message::Devices(_)));
            waits.push(begun.elapsed());
            // A newcomer is served too.
            if waits.len().is_multiple_of(50) {
                drop(Raw::greeted(&daemon.socket()));
            }
            thread::sleep(Duration::from_millis(3));
        }
        stop.store(true, Ordering::Relaxed);
    });
    waits.sort();
    let (median, late) = (waits[waits.len() / 2], waits[waits.len() * 99 / 100]);
    let sent = sent.into_inner();
    eprintln!("{sent} requests in the flood; a victim waits {median:?}, p99 {late:?}");
    println!("figure: G-19 flooders = {FLOODERS}");
    println!(
        "figure: G-19 p99 of a victim = {:.1} ms",
        late.as_secs_f64() * 1e3
    );
    // On an idle machine the figure is 10 ms; here others may have the processors. A client gives up
    // after 10 s.
    assert!(late < Duration::from_secs(9), "{late:?}");
    let grown = Holdings::of(daemon.pid())
        .anon_kib
        .saturating_sub(anon_before);
    assert!(grown < 16 * 512, "{grown} KiB");
    // Nobody who is silent stays longer than the greeting takes.
    let now = || Holdings::of(daemon.pid());
    until("the silent are gone", now, |now| now.fds <= before);
    drop(silent);
    daemon.audit();
}

/// Opens with a filter of its own number that takes long to compile.
fn costly(number: u64) -> Message {
    let [high, low] = (number as u16).to_be_bytes();
    let hosts = (0..100).map(|host| format!("host 10.{high}.{low}.{host}"));
    let mut open = open("lab", 0);
    open.filter = FilterSpec::Expression(hosts.collect::<Vec<_>>().join(" or "));
    Message::Open(open)
}

#[test]
fn filters_of_connections_that_are_gone_keep_nobody_waiting() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    fs::write(&config, "socket_mode = 0o666\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let grant = ["--allow", "uid:65534=lab"];
    let daemon = Daemon::start(&lab, None, &[&config[..], SOURCE, &grant].concat()).unwrap();
    let before = at_rest(&daemon);
    let mut abandoned = 0;
    // Some milliseconds and the start of a process on an idle machine; a busy one may keep any of us
    // waiting once, but not each time.
    let is_soon = (0..5).any(|round| {
        let begun = Instant::now();
        let enough = abandoned + 100;
        while begun.elapsed() < Duration::from_secs(2) || abandoned <= enough {
            assert!(begun.elapsed() < Duration::from_secs(60), "{abandoned}");
            let mut raw = Raw::greeted(&daemon.socket());
            raw.send(&costly(abandoned).encode(2, 0)).unwrap();
            abandoned += 1;
        }
        // Another user has a filter compiled that the daemon has not seen.
        let begun = Instant::now();
        let filter = format!("ip and not port {}", 4000 + round);
        let counted = as_nobody(&daemon, &["count", "-c", "1", "-f", &filter, "lab"]);
        let other = begun.elapsed();
        assert!(counted.contains("packet"), "{counted}");
        // So has a new connection of the one who left so many.
        let begun = Instant::now();
        let mut raw = Raw::greeted(&daemon.socket());
        let mut fresh = open("lab", 0);
        fresh.filter = FilterSpec::Expression(format!("ip and not port {}", 5000 + round));
        let opened = raw.ask(&Message::Open(fresh), 0);
        let same = begun.elapsed();
        assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
        eprintln!("after {abandoned} abandoned filters: another user {other:?}, the same {same:?}");
        other.max(same) < Duration::from_secs(5)
    });
    assert!(is_soon, "they wait for filters that nobody wants");
    settles(&daemon, before);
}

#[test]
fn one_user_may_let_64_filters_wait_and_is_told_about_the_next() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let told =
        |answer: &&Message| matches!(answer, Message::Error { code, .. } if *code == code::LIMIT);
    // A test that is kept from the processor sends slower than the daemon compiles: it tries again.
    for round in 0..10 {
        let mut raws: Vec<Raw> = (0..200).map(|_| Raw::greeted(&daemon.socket())).collect();
        for (number, raw) in (1 + 200 * round..).zip(&mut raws) {
            raw.send(&costly(number).encode(2, 0)).unwrap();
        }
        let answers: Vec<Message> = raws.iter_mut().map(|raw| raw.next().unwrap().1).collect();
        let refused = answers.iter().filter(told).count();
        eprintln!("{refused} of {} refused", answers.len());
        assert!(refused <= 200 - 64, "{refused}");
        if refused > 0 {
            return;
        }
    }
    panic!("nobody was refused");
}

#[test]
fn what_a_refusal_quotes_is_cut_short() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let mut raw = Raw::greeted(&daemon.socket());
    let long = "\u{1}".repeat(60_000);
    let mut filtered = open("lab", 0);
    filtered.filter = FilterSpec::Expression(format!("tcp {}", &long[..7_000]));
    for message in [
        Message::Open(open(&long, 0)),
        Message::Open(filtered),
        Message::DetachVm {
            name: long.clone(),
            owner: 0,
        },
    ] {
        let (_, text) = refusal(raw.ask(&message, 0));
        assert!(text.len() <= 1024, "{} bytes", text.len());
    }
}

#[test]
fn who_reads_no_answers_is_not_served_on_and_costs_little() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let (before, descriptors) = (Holdings::of(daemon.pid()).anon_kib, at_rest(&daemon));
    let mut raws: Vec<Raw> = (0..32).map(|_| Raw::greeted(&daemon.socket())).collect();
    let bytes = Message::Close { port: 1 }.encode(1, 0).repeat(2_000);
    let deadline = Deadline::new("all wait");
    let mut stuck = 0;
    // The control: none of them is served any more, so each socket is full.
    while stuck < raws.len() {
        deadline.check_seen(&stuck);
        stuck = 0;
        for raw in &mut raws {
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            stuck += usize::from(rustix::net::send(&raw.stream, &bytes, flags).is_err());
        }
        thread::sleep(Duration::from_millis(5));
    }
    let mut other = Raw::greeted(&daemon.socket());
    let asked = Instant::now();
    assert!(matches!(other.ask(&Message::List, 0), Message::Devices(_)));
    assert!(asked.elapsed() < Duration::from_secs(1), "{asked:?}");
    let grown = Holdings::of(daemon.pid()).anon_kib.saturating_sub(before);
    // 256 KiB for each connection is the figure.
    assert!(grown < 32 * 256, "{grown} KiB");
    drop((raws, other));
    settles(&daemon, descriptors);
    daemon.audit();
}

#[test]
fn a_hundred_thousand_greetings_change_nothing() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let before = at_rest(&daemon);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut raw = Raw::greeted(&daemon.socket());
                let bytes = hello(Role::Agent).encode(1, 0).repeat(100);
                for _ in 0..40 {
                    raw.send(&bytes).unwrap();
                    for _ in 0..100 {
                        assert!(matches!(raw.next().unwrap().1, Message::Welcome { .. }));
                    }
                }
            });
        }
    });
    settles(&daemon, before);
    daemon.audit();
}

fn vnplugd(args: &[&str]) -> (bool, String) {
    let mut child = Command::new(program("vnplugd").expect("the daemon is built"));
    let output = child.args(args).output().expect("the daemon starts");
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn sockets_that_are_taken_wrong_or_stale() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, SOURCE).unwrap();
    let socket = daemon.socket();
    let at = |path: &Path| vnplugd(&["--socket", path.to_str().unwrap(), "--source", "lab=gen"]);
    // A second daemon is refused; the first goes on.
    let (ended_well, text) = at(&socket);
    assert!(!ended_well && text.contains("another daemon"), "{text}");
    drop(Raw::greeted(&socket));
    // A file that is no socket stays what it is.
    let file = lab.dir().join("precious");
    fs::write(&file, "data").unwrap();
    let (ended_well, text) = at(&file);
    assert!(!ended_well && text.contains("no socket"), "{text}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
    // So does the target of a symbolic link.
    let link = lab.dir().join("link");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    let (ended_well, text) = at(&link);
    assert!(!ended_well && text.contains("no socket"), "{text}");
    // A directory that cannot be, and a path that no socket can have.
    let (ended_well, text) = at(&file.join("s"));
    assert!(!ended_well && text.contains("precious"), "{text}");
    let (ended_well, text) = at(&lab.dir().join("x".repeat(120)));
    assert!(!ended_well && text.contains("cannot serve"), "{text}");
    // Clients of a wrong path are told so.
    let error = daemon.port("lab").socket(lab.dir().join("nobody")).open();
    assert!(error.unwrap_err().to_string().contains("nobody"));
    // A stale socket is taken over.
    daemon.kill();
    assert!(socket.exists());
    daemon.launch().unwrap();
    drop(Raw::greeted(&socket));
}

#[test]
fn a_daemon_that_nobody_could_use_as_it_was_meant_does_not_start() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("own/socket");
    let at = ["--socket", socket.to_str().unwrap(), "--source"];
    for (source, more, words) in [
        (
            "lab=gen",
            &["--allow", "uid:5=lab:blah blah"][..],
            "a grant for \"lab\"",
        ),
        ("lab=gen,size=60,protocols=tcp4", &[], "source \"lab\""),
        ("lab=gen,vlan=70000", &[], "up to 65535"),
    ] {
        let (ended_well, text) = vnplugd(&[&at[..], &[source], more].concat());
        assert!(!ended_well && text.contains(words), "{text}");
    }
    // A directory that is made, perhaps for a path that was mistyped, is told.
    let (_, text) = vnplugd(
        &["--socket", socket.with_file_name("new/s").to_str().unwrap()]
            .into_iter()
            .chain(["--source", "lab=nonsense"])
            .collect::<Vec<_>>(),
    );
    assert!(text.contains("made the directory"), "{text}");
}

/// Runs a client as the user nobody; what it printed.
fn as_nobody(daemon: &Daemon, args: &[&str]) -> String {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program("vnplug").expect("the program is built"))
        .args(args)
        .env("VNPLUG_SOCKET", daemon.socket())
        .process_group(0);
    let output = command.output().expect("setpriv runs");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn a_user_sees_what_is_granted_and_learns_nothing_of_the_rest() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    fs::write(&config, "socket_mode = 0o666\nmax_user_bytes = '1MiB'\n").unwrap();
    let source = "lab=gen,pps=20000,flows=4,size=128,protocols=udp4+tcp4,run=3";
    let config = config.to_str().unwrap();
    let grant = ["--allow", "uid:65534=lab:tcp"];
    let args = [
        "--config",
        config,
        "--source",
        source,
        "--source",
        "secret=gen,pps=1",
    ];
    let daemon = Daemon::start(&lab, None, &[&args[..], &grant].concat()).unwrap();
    // Of the sources only the granted one is there.
    let list = as_nobody(&daemon, &["list"]);
    assert!(
        list.contains("host:lab") && !list.contains("secret"),
        "{list}"
    );
    let hidden = as_nobody(&daemon, &["count", "-c", "1", "secret"]);
    let missing = as_nobody(&daemon, &["count", "-c", "1", "nothing"]);
    assert_eq!(
        hidden.replace("secret", "NAME"),
        missing.replace("nothing", "NAME")
    );
    // A port of this user, and one of root beside it, on the same source.
    let mut full = daemon.port("lab").open().unwrap();
    let ring = ["count", "--ring", "256K", "-c", "2000", "lab"];
    let counted = as_nobody(&daemon, &ring);
    assert!(
        counted.contains("2000") || counted.contains("2,000"),
        "{counted}"
    );
    let counters = daemon.counters();
    drop(full.next());
    let none = as_nobody(&daemon, &["stats"]);
    assert!(
        !none.contains("secret") && !none.contains("refused"),
        "{none}"
    );
    // Its limit of memory is its own.
    let large = as_nobody(&daemon, &["count", "--ring", "4M", "-c", "1", "lab"]);
    assert!(large.contains("max_user_bytes"), "{large}");
    vnplug_e2e::daemon::audit(&counters);
    daemon.audit();
    // Nobody else is let in, when the socket says so.
    fs::set_permissions(
        daemon.socket(),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    let refused = as_nobody(&daemon, &["list"]);
    assert!(refused.to_lowercase().contains("permi"), "{refused}");
}
