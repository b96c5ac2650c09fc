//! What guests say to each other: this program, in the guest.
//!
//! All guests begin and end at once, so that rates and processor times are of the same interval. What they
//! agree on is the processor's time stamp counter, which host and guests have in common: the clock of User-mode
//! Linux is late by up to two seconds where fourteen guests boot on two CPUs.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_tcp_congestion;

use vnplug_e2e::Netns;

use crate::row::Result;
use crate::{streams, sys};

/// The name of the program's part that guests run.
pub(crate) const CHILD: &str = "talk";

/// What one guest does.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Talk {
    /// Takes one stream; prints the bytes that came between two instants.
    Take,
    /// Answers requests of one connection with the same bytes until its end is past.
    Answer,
    /// Gives whoever asks a page, by a connection for each, until its end is past.
    Serve,
    /// Sends one stream to this address until its end is past.
    Send(String),
    /// The same of a file, which nobody copies for it.
    SendFile(String),
    /// The same of content that the other end compares ([`taken_whole`]).
    SendContent(String),
    /// Sends datagrams to this address and counts what comes from there; prints both numbers,
    /// how many more found no room here, and how many its driver dropped.
    Both(String, Pace),
}

/// How datagrams are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// Mb/s of payload.
    pub(super) mbps: f64,
    /// Between two looks at what is due.
    pub(super) tick: Duration,
}

/// From which, and until which, count of the processor's time stamps something is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    begin: u64,
    end: u64,
    /// Time stamps of a millisecond.
    per_ms: u64,
}

impl Talk {
    /// The command line of a guest.
    pub(super) fn command(&self, window: Window) -> String {
        let Window { begin, end, per_ms } = window;
        let what = match self {
            Self::Take => "take".to_owned(),
            Self::Answer => "answer".to_owned(),
            Self::Serve => "serve".to_owned(),
            Self::Send(to) => format!("send {to}"),
            Self::SendFile(to) => format!("send-file {to}"),
            Self::SendContent(to) => format!("send-content {to}"),
            Self::Both(to, Pace { mbps, tick }) => {
                format!("both {to} {mbps} {}", tick.as_micros())
            }
        };
        format!("{PROGRAM} child {CHILD} {begin} {end} {per_ms} {what}")
    }
}

impl Window {
    /// From some time after now.
    pub(super) fn after(wait: Duration, time: Duration) -> Self {
        let per_ms = sys::time_stamps_per_ms();
        let begin = sys::time_stamp() + wait.as_millis() as u64 * per_ms;
        let end = begin + time.as_millis() as u64 * per_ms;
        Self { begin, end, per_ms }
    }

    /// Both by the clock of this process.
    pub(super) fn instants(self) -> (Instant, Instant) {
        let (now, stamp) = (Instant::now(), sys::time_stamp());
        let instant = |at: u64| {
            let micros = at.saturating_sub(stamp) * 1000 / self.per_ms.max(1);
            now + Duration::from_micros(micros)
        };
        (instant(self.begin), instant(self.end))
    }
}

/// The program.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let [begin, end, per_ms, what @ ..] = words else {
        return Err("BEGIN END PER_MS WHAT".into());
    };
    let window = Window {
        begin: begin.parse()?,
        end: end.parse()?,
        per_ms: per_ms.parse()?,
    };
    let (begin, end) = window.instants();
    // Who is there when others have begun would lose what they sent.
    if Instant::now() + WARM_UP > begin {
        println!("{LATE}");
        return Ok(());
    }
    let what: Vec<&str> = what.iter().map(String::as_str).collect();
    let done = run(&what, begin, end);
    // A switch that is too busy for the first frames is asked again, with more time.
    let is_late = |error: &crate::row::Error| {
        let error = error.downcast_ref::<std::io::Error>();
        error.is_some_and(|error| error.kind() == ErrorKind::TimedOut)
    };
    match done {
        Err(error) if is_late(&error) => {
            println!("{LATE}");
            Ok(())
        }
        done => done,
    }
}

fn run(what: &[&str], begin: Instant, end: Instant) -> Result<()> {
    match what[..] {
        ["take"] => take(begin, end),
        ["answer"] => answer(end),
        // Whoever has begun to ask has its page.
        ["serve"] => serve(end + WARM_UP),
        ["send", to] => send(to, None, begin, end),
        ["send-file", to] => {
            let file = streams::file()?;
            let over = || Instant::now() > end;
            streams::fill_from(connected(to, begin)?, &file, over)
        }
        ["send-content", to] => streams::fill_with(connected(to, begin)?, || Instant::now() > end),
        ["both", to, mbps, tick] => {
            let tick = Duration::from_micros(tick.parse()?);
            let mbps = mbps.parse()?;
            both(to, Pace { mbps, tick }, begin, end)
        }
        _ => Err(
            "take | answer | serve | send ADDRESS | send-file ADDRESS | send-content ADDRESS | \
             both ADDRESS MBPS MICROSECONDS"
                .into(),
        ),
    }
}

fn take(begin: Instant, end: Instant) -> Result<()> {
    println!("{}", taken(begin, end, 1)?);
    Ok(())
}

/// Takes `count` streams; the bytes that came of all of them between two instants.
pub(super) fn taken(begin: Instant, end: Instant, count: usize) -> Result<u64> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    let take = || -> std::result::Result<u64, String> {
        let patience = end.saturating_duration_since(Instant::now());
        let drain = || -> Result<u64> {
            let Some(mut stream) = streams::accept(&listener, patience)? else {
                return Ok(0);
            };
            streams::drain(&mut stream, begin)?;
            streams::drain(&mut stream, end)
        };
        drain().map_err(|error| error.to_string())
    };
    scope(|threads| {
        let takers: Vec<_> = (0..count).map(|_| threads.spawn(take)).collect();
        let mut all = 0;
        for taker in takers {
            all += taker.join().map_err(|_| "a taker panicked")??;
        }
        Ok(all)
    })
}

/// Takes one stream and compares every byte of it; those that came between two instants.
///
/// # Errors
/// And if another byte came.
pub(super) fn taken_whole(begin: Instant, end: Instant) -> Result<u64> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    let patience = end.saturating_duration_since(Instant::now());
    let Some(mut stream) = streams::accept(&listener, patience)? else {
        return Ok(0);
    };
    let mut content = streams::Content::new();
    streams::drain_all(&mut stream, &mut content, begin)?;
    streams::drain_all(&mut stream, &mut content, end)
}

fn answer(end: Instant) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", ECHO_PORT))?;
    let patience = end.saturating_duration_since(Instant::now());
    if let Some(stream) = streams::accept(&listener, patience)? {
        stream.set_nodelay(true)?;
        streams::answer(stream)?;
    }
    Ok(())
}

fn serve(end: Instant) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", WEB_PORT))?;
    let page = vec![b'x'; PAGE];
    let answer = [
        format!("HTTP/1.0 200 OK\r\nContent-Length: {PAGE}\r\n\r\n").as_bytes(),
        &page,
    ]
    .concat();
    listener.set_nonblocking(true)?;
    loop {
        let patience = end.saturating_duration_since(Instant::now());
        let mut asked = [PollFd::new(&listener, PollFlags::IN)];
        poll(&mut asked, Some(&Timespec::try_from(patience)?))?;
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        stream.set_nonblocking(false)?;
        // Who asks badly, or is gone, has no page, and the next one has its turn.
        let _ = serve_one(&mut stream, &answer);
    }
}

fn serve_one(stream: &mut TcpStream, answer: &[u8]) -> std::io::Result<()> {
    stream.set_read_timeout(Some(WARM_UP))?;
    let (mut request, mut len) = ([0; 1024], 0);
    while !request[..len].ends_with(b"\r\n\r\n") {
        match stream.read(&mut request[len..])? {
            0 => return Ok(()),
            count => len += count,
        }
    }
    stream.write_all(answer)
}

/// Sends a stream, with this control of congestion or the machine's default; begins [`WARM_UP`] before the window.
pub(super) fn send(to: &str, control: Option<&str>, begin: Instant, end: Instant) -> Result<()> {
    send_until(to, control, begin, || Instant::now() > end)
}

/// As [`send`]; before each block it is asked whether that was all.
pub(super) fn send_until(
    to: &str,
    control: Option<&str>,
    begin: Instant,
    over: impl Fn() -> bool,
) -> Result<()> {
    let stream = connected(to, begin)?;
    if let Some(control) = control {
        set_tcp_congestion(&stream, control)?;
    }
    streams::fill(stream, over)
}

fn connected(to: &str, begin: Instant) -> Result<TcpStream> {
    sleep((begin - WARM_UP).saturating_duration_since(Instant::now()));
    let address = format!("{to}:{PORT}").parse()?;
    Ok(TcpStream::connect_timeout(&address, WARM_UP)?)
}

fn both(to: &str, pace: Pace, begin: Instant, end: Instant) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", PORT))?;
    socket.connect((to, PORT))?;
    let before = (refused()?, untaken()?);
    let over = AtomicBool::new(false);
    let (sent, came) = scope(|threads| {
        let counter = threads.spawn(|| {
            let over = || over.load(Ordering::Relaxed);
            streams::count(&socket, over).map_err(|error| error.to_string())
        });
        sleep(begin.saturating_duration_since(Instant::now()));
        let time = end.saturating_duration_since(Instant::now());
        let sent = streams::pace(&socket, pace.mbps, pace.tick, time);
        sleep(SETTLE);
        over.store(true, Ordering::Relaxed);
        (sent, counter.join())
    });
    let came = came.map_err(|_| "the receiver panicked")??;
    let (refused, untaken) = (refused()? - before.0, untaken()? - before.1);
    println!("{} {came} {refused} {untaken}", sent?);
    Ok(())
}

/// Datagrams that arrived at this machine and found no room: in its driver (`rx_dropped`), in the kernel's
/// queue (`softnet_stat`) or in the socket (`RcvbufErrors`).
fn refused() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/softnet_stat")?;
    let dropped = text.lines().filter_map(|line| line.split(' ').nth(1));
    let dropped = dropped.filter_map(|number| u64::from_str_radix(number, 16).ok());
    Ok(of_udp("RcvbufErrors")? + of_interfaces("rx_dropped")? + dropped.sum::<u64>())
}

/// Datagrams of this machine that were not sent: the queue before an interface had no room (`SndbufErrors`), or
/// its driver dropped them.
fn untaken() -> Result<u64> {
    Ok(of_udp("SndbufErrors")? + of_interfaces("tx_dropped")?)
}

/// One of the kernel's counters of all interfaces.
fn of_interfaces(name: &str) -> Result<u64> {
    let mut all = 0;
    for interface in std::fs::read_dir("/sys/class/net")? {
        let file = interface?.path().join("statistics").join(name);
        all += std::fs::read_to_string(file)?.trim().parse::<u64>()?;
    }
    Ok(all)
}

/// One of the kernel's counters of UDP.
fn of_udp(name: &str) -> Result<u64> {
    counter(&std::fs::read_to_string(SNMP)?, "Udp:", name)
}

/// One of the counters in the text of `/proc/net/snmp`.
fn counter(text: &str, protocol: &str, name: &str) -> Result<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(protocol));
    let missing = || format!("no counter {protocol} {name}");
    let (names, values) = lines.next().zip(lines.next()).ok_or_else(missing)?;
    let mut both = names.split_whitespace().zip(values.split_whitespace());
    let value = both.find(|(it, _)| *it == name);
    Ok(value.ok_or_else(missing)?.1.parse()?)
}

/// Segments of TCP that a namespace has sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tcp {
    /// Without those that were sent again.
    sent: u64,
    again: u64,
}

impl Tcp {
    /// By the kernel's counters.
    pub(super) fn of(netns: &Netns) -> Result<Self> {
        Self::parse(&netns.exec(&["cat", SNMP])?)
    }

    /// Those of the text of [`SNMP`].
    pub(super) fn parse(text: &str) -> Result<Self> {
        let of = |name| counter(text, "Tcp:", name);
        Ok(Self {
            sent: of("OutSegs")?,
            again: of("RetransSegs")?,
        })
    }

    /// Of a thousand segments since then, how many were sent again.
    pub(super) fn again_since(self, before: Self) -> f64 {
        let (sent, again) = (self.sent - before.sent, self.again - before.again);
        1e3 * again as f64 / (sent.max(1)) as f64
    }
}

/// The unit of segments that were sent again.
pub(super) const AGAIN: &str = "of 1,000 segments";
pub(super) const SNMP: &str = "/proc/net/snmp";
/// How long a stream runs before it is measured.
pub(super) const WARM_UP: Duration = Duration::from_millis(500);
/// After the last datagram.
pub(super) const SETTLE: Duration = Duration::from_millis(600);
/// What a guest says that was not there in time.
pub(super) const LATE: &str = "late";
/// Where this program is in a guest.
pub(super) const PROGRAM: &str = "/bin/bench";
const PORT: u16 = 7000;
/// Where pages are, and how long each is without its header.
pub(super) const WEB_PORT: u16 = 7002;
pub(super) const PAGE: usize = 8192;
/// Where requests are answered.
pub(super) const ECHO_PORT: u16 = 7001;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_lies_between_two_instants() {
        let (wait, time) = (Duration::from_secs(2), Duration::from_secs(1));
        let (begin, end) = Window::after(wait, time).instants();
        let short = Duration::from_micros(10);
        assert!((end - begin).abs_diff(time) < short, "{:?}", end - begin);
        let until = begin.saturating_duration_since(Instant::now());
        assert!(until <= wait + short && until > wait / 2, "{until:?}");
    }

    #[test]
    fn a_talk_is_a_command_of_this_program() {
        let window = Window {
            begin: 1,
            end: 2,
            per_ms: 3,
        };
        let tick = Duration::from_millis(1);
        let talk = Talk::Both("10.0.0.1".into(), Pace { mbps: 45.5, tick });
        let command = talk.command(window);
        let told = "/bin/bench child talk 1 2 3 both 10.0.0.1 45.5 1000";
        assert_eq!(command, told);
    }
}
