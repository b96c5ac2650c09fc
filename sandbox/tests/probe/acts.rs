//! What a program does in the sandbox that is no attack.
//!
//! | word | |
//! |---|---|
//! | `say PORT` | one datagram to this port of the loopback |
//! | `children COUNT BASE KILLED` | COUNT times `say BASE+i`, each KILLED-th killed at once |
//! | `connect ADDRESS` | connects by TCP, says what came of it |
//! | `serve PORT` | takes one connection, sends what it received back |
//! | `hold PORT` | one thread waits in accept, another connects all the time; both say what they get and when |
//! | `signals PORT COUNT` | COUNT numbered datagrams, while signals come |
//! | `waits PORT` | accept with signals: ends when a connection comes |
//! | `price KIND PORT COUNT` | nanoseconds of one call: `connect` (UDP), `send`, `bind` |
//! | `threads PORT COUNT ROUNDS [spread]` | COUNT threads at once, or spread evenly over the pause between their calls; percentiles of one call's time, and without each one's first |
//! | `flood PATH`, `speak PATH` | a Unix stream whose reader never reads; beside it, a call a millisecond |
//! | `pass` | a descriptor by a Unix socket, and back |
//! | `stream` | sendmsg of several MiB by a Unix stream, compared |

use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::sys;

/// Takes a descriptor by its number.
#[expect(unsafe_code, reason = "descriptors that system calls gave as numbers")]
pub(crate) fn adopt<T: From<OwnedFd>>(number: i32) -> T {
    // SAFETY: the caller got the number from a call that made it, and drops or forgets what it becomes.
    T::from(unsafe { OwnedFd::from_raw_fd(number) })
}

pub(crate) fn run(act: &str, words: &[String]) -> ExitCode {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let port = |at: usize| number(at) as u16;
    match act {
        "say" => say(port(0)),
        "children" => children(number(0), number(1), number(2)),
        "connect" => println!("{}", outcome(TcpStream::connect(&words[0]))),
        "serve" => serve(port(0)),
        "hold" => hold(port(0)),
        "signals" => signals(port(0), number(1)),
        "waits" => waits(port(0)),
        "price" => price(&words[0], port(1), number(2)),
        "threads" => threads(port(0), number(1), number(2), words.len() > 3),
        "flood" => flood(&words[0], port(1)),
        "pass" => pass(),
        "stream" => stream(),
        _ => return ExitCode::from(2),
    }
    ExitCode::SUCCESS
}

/// `done`, or the error as C names it.
pub(crate) fn outcome<T>(result: std::io::Result<T>) -> String {
    let Err(error) = result else {
        return "done".into();
    };
    let names = [
        (libc::EPERM, "EPERM"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::EADDRINUSE, "EADDRINUSE"),
        (libc::EACCES, "EACCES"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EBUSY, "EBUSY"),
        (libc::EFAULT, "EFAULT"),
        (libc::EINVAL, "EINVAL"),
        (libc::EINTR, "EINTR"),
        (libc::EPIPE, "EPIPE"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::EDESTADDRREQ, "EDESTADDRREQ"),
    ];
    let number = error.raw_os_error();
    let known = names.iter().find(|(known, _)| Some(*known) == number);
    known.map_or_else(|| error.to_string(), |(_, name)| (*name).into())
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

fn say(port: u16) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let result = socket.send_to(b"x", local(port));
    if result.is_err() {
        std::process::exit(1);
    }
}

fn children(count: u64, base: u64, killed: u64) {
    let own = std::env::current_exe().unwrap();
    let (mut said, mut refused, mut dead) = (0, 0, 0);
    for index in 0..count {
        let number = base + index % 20_000;
        let mut child = Command::new(&own)
            .args(["say", &number.to_string()])
            .spawn()
            .unwrap();
        if killed != 0 && index % killed == 0 {
            // Some before exec, some in the middle of the call.
            thread::sleep(Duration::from_micros((index * 37) % 2500));
            let _ = child.kill();
        }
        let status = child.wait().unwrap();
        match status.code() {
            Some(0) => said += 1,
            Some(_) => refused += 1,
            None => dead += 1,
        }
    }
    println!("said={said} refused={refused} dead={dead}");
}

fn serve(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    println!("listens");
    let (mut stream, peer) = listener.accept().unwrap();
    println!("peer {peer}");
    let mut bytes = [0; 64];
    let length = stream.read(&mut bytes).unwrap();
    stream.write_all(&bytes[..length]).unwrap();
}

fn hold(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("process {}", std::process::id());
    thread::spawn(move || {
        loop {
            let result = listener.accept();
            println!("accept {} {}", sys::now_ns(), outcome(result));
            thread::sleep(Duration::from_millis(1));
        }
    });
    loop {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
        let result = socket.and_then(|socket| socket.connect(local(port)));
        println!("connect {} {}", sys::now_ns(), outcome(result));
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sends signals to a thread of this process, some thousands a second, until it is told to stop.
fn storm(goes_on: Arc<AtomicBool>) -> thread::JoinHandle<u64> {
    let thread_id = rustix::thread::gettid().as_raw_nonzero().get() as u64;
    let process = u64::from(std::process::id());
    sys::handle(libc::SIGURG);
    thread::spawn(move || {
        let mut count = 0;
        while goes_on.load(Ordering::Relaxed) {
            let signal = libc::SIGURG as u64;
            sys::call(libc::SYS_tgkill, [process, thread_id, signal, 0, 0, 0]);
            count += 1;
            thread::sleep(Duration::from_micros(50));
        }
        count
    })
}

fn signals(port: u16, count: u64) {
    let goes_on = Arc::new(AtomicBool::new(true));
    let storm = storm(Arc::clone(&goes_on));
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut longest = Duration::ZERO;
    for index in 0..count {
        let before = Instant::now();
        // Sent again only if the call says that nothing was sent.
        while let Err(error) = socket.send_to(&index.to_ne_bytes(), local(port)) {
            assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{error}");
        }
        longest = longest.max(before.elapsed());
        if index % 64 == 0 {
            thread::sleep(Duration::from_micros(200));
        }
    }
    goes_on.store(false, Ordering::Relaxed);
    let signals = storm.join().unwrap();
    println!("signals={signals} longest_us={}", longest.as_micros());
}

fn waits(port: u16) {
    let goes_on = Arc::new(AtomicBool::new(true));
    let storm = storm(Arc::clone(&goes_on));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    println!("listens");
    let result = listener.accept();
    goes_on.store(false, Ordering::Relaxed);
    println!(
        "signals={} accept={}",
        storm.join().unwrap(),
        outcome(result)
    );
}

fn price(kind: &str, port: u16, count: u64) {
    use rustix::net::{AddressFamily, SocketType, bind, connect};
    let to = local(port);
    let datagram = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut took = Duration::ZERO;
    for index in 0..count + WARM_UP {
        // A socket is bound once.
        let fresh = (kind == "bind")
            .then(|| rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap());
        let before = Instant::now();
        match &fresh {
            Some(socket) => bind(socket, &to).unwrap(),
            None if kind == "connect" => connect(&datagram, &to).unwrap(),
            None => {
                datagram.send_to(b"x", to).unwrap();
            }
        }
        if index >= WARM_UP {
            took += before.elapsed();
        }
    }
    println!("{}", took.as_nanos() as u64 / count);
}

const WARM_UP: u64 = 100;

fn threads(port: u16, count: u64, rounds: u64, is_spread: bool) {
    let pause = Duration::from_millis(count / 4);
    // A program's file is read at its first call.
    let first = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    first.connect(local(port)).unwrap();
    let together = Arc::new(Barrier::new(count as usize));
    let threads: Vec<_> = (0..count)
        .map(|at| {
            let together = Arc::clone(&together);
            let builder = thread::Builder::new().stack_size(64 * 1024);
            let run = move || {
                let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                together.wait();
                if is_spread {
                    // Not before all have woken up, which takes a while.
                    thread::sleep(pause + pause.mul_f64(at as f64 / count as f64));
                }
                let mut times = Vec::new();
                for _ in 0..rounds {
                    let before = Instant::now();
                    socket.connect(local(port)).unwrap();
                    times.push(before.elapsed().as_nanos() as u64);
                    thread::sleep(pause);
                }
                times
            };
            builder.spawn(run).unwrap()
        })
        .collect();
    let (mut all, mut later) = (Vec::new(), Vec::new());
    for thread in threads {
        let times = thread.join().unwrap();
        later.extend_from_slice(&times[1..]);
        all.extend(times);
    }
    let at = |times: &mut Vec<u64>, part: usize| {
        times.sort_unstable();
        times[(times.len() - 1) * part / 100] / 1000
    };
    println!(
        "calls={} p50_us={} p99_us={} longest_us={} later_p50_us={} later_p99_us={}",
        all.len(),
        at(&mut all, 50),
        at(&mut all, 99),
        at(&mut all, 100),
        at(&mut later, 50),
        at(&mut later, 99),
    );
}

/// A reader that never reads must hold up its own writer alone.
fn flood(path: &str, port: u16) {
    let listener = UnixListener::bind(path).unwrap();
    let writer = UnixStream::connect(path).unwrap();
    let (_silent, _) = listener.accept().unwrap();
    let is_stuck = Arc::new(AtomicBool::new(false));
    let stuck = Arc::clone(&is_stuck);
    thread::spawn(move || {
        let chunk = vec![7; 1 << 20];
        loop {
            let mut control = SendAncillaryBuffer::default();
            let sent = sendmsg(
                &writer,
                &[IoSlice::new(&chunk)],
                &mut control,
                SendFlags::empty(),
            );
            println!("sent {sent:?}");
            stuck.store(true, Ordering::Relaxed);
        }
    });
    thread::sleep(Duration::from_millis(300));
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let before = Instant::now();
        socket.send_to(b"x", local(port)).unwrap();
        longest = longest.max(before.elapsed());
        thread::sleep(Duration::from_millis(1));
    }
    println!(
        "longest_us={} writer_returned={}",
        longest.as_micros(),
        is_stuck.load(Ordering::Relaxed)
    );
    std::process::exit(0);
}

fn pass() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let files = [writer.as_fd()];
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    control.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(
        &ours,
        &[IoSlice::new(b"f")],
        &mut control,
        SendFlags::empty(),
    )
    .unwrap();
    drop(writer);
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut room);
    let mut byte = [0];
    let mut parts = [std::io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(
        &theirs,
        &mut parts,
        &mut control,
        rustix::net::RecvFlags::empty(),
    )
    .unwrap();
    for message in control.drain() {
        if let rustix::net::RecvAncillaryMessage::ScmRights(files) = message {
            for file in files {
                rustix::io::write(&file, b"by the pipe").unwrap();
            }
        }
    }
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    println!("{text}");
}

fn stream() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let bytes: Vec<u8> = (0..5_000_000_u32)
        .map(|index| (index % 251) as u8)
        .collect();
    let expected = bytes.clone();
    let reader = thread::spawn(move || {
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).unwrap();
        read
    });
    let parts = [
        IoSlice::new(&bytes[..1_000_003]),
        IoSlice::new(&bytes[1_000_003..]),
    ];
    let sent = sendmsg(
        &ours,
        &parts,
        &mut SendAncillaryBuffer::default(),
        SendFlags::empty(),
    );
    drop(ours);
    let read = reader.join().unwrap();
    println!("sent {sent:?} same {}", read == expected);
}
