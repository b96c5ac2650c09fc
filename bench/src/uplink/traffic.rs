//! Streams of TCP and UDP between namespaces, each for a time.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;

use crate::row::Result;

/// Megabits per second of payload that one stream of TCP brings to an address of `to` within a time from
/// its beginning; 0 if it never begins.
pub(super) fn tcp(from: &Netns, to: &Netns, address: &str, time: Duration) -> Result<f64> {
    let listener = to.enter(|| TcpListener::bind((address, 0)))??;
    listener.set_nonblocking(true)?;
    let target = listener.local_addr()?;
    let over = AtomicBool::new(false);
    let received = scope(|threads| {
        threads.spawn(|| {
            // A stream that cannot begin brings nothing.
            let _ = send(from, &target, &over);
        });
        let received = receive(&listener, time);
        over.store(true, Ordering::Relaxed);
        received
    });
    // What still waits in a shaper belongs to no measurement.
    sleep(SETTLE);
    received
}

fn send(from: &Netns, target: &SocketAddr, over: &AtomicBool) -> Result<()> {
    let mut stream = from.enter(|| TcpStream::connect_timeout(target, BEGIN))??;
    stream.set_write_timeout(Some(STEP))?;
    let block = vec![0x5a; 128 << 10];
    while !over.load(Ordering::Relaxed) {
        match stream.write(&block) {
            Ok(_) => {}
            Err(error) if is_time_out(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive(listener: &TcpListener, time: Duration) -> Result<f64> {
    let asked = Instant::now();
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if asked.elapsed() > BEGIN {
            return Ok(0.0);
        }
        sleep(Duration::from_millis(1));
    };
    stream.set_nonblocking(false)?;
    let (begin, mut bytes) = (Instant::now(), 0);
    let mut block = vec![0; 1 << 20];
    while let left = time.saturating_sub(begin.elapsed())
        && !left.is_zero()
    {
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut block) {
            Ok(0) => break,
            Ok(len) => bytes += len as u64,
            Err(error) if is_time_out(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes as f64 * 8.0 / 1e6 / time.as_secs_f64())
}

/// Per cent of datagrams that are lost on the way to an address of `to`, at 95 Mb/s of payload.
pub(super) fn udp(from: &Netns, to: &Netns, address: &str, time: Duration) -> Result<f64> {
    let receiver = to.enter(|| UdpSocket::bind((address, 0)))??;
    receiver.set_read_timeout(Some(STEP))?;
    let target = receiver.local_addr()?;
    let sender = from.enter(|| UdpSocket::bind("0.0.0.0:0"))??;
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let received = scope(|threads| {
        let counter = threads.spawn(|| {
            let (mut count, mut block) = (0_u64, [0; 2048]);
            loop {
                match receiver.recv(&mut block) {
                    Ok(_) => count += 1,
                    Err(_) if over.load(Ordering::Relaxed) => return count,
                    Err(_) => {}
                }
            }
        });
        let (begin, datagram) = (Instant::now(), [0x5a; DATAGRAM]);
        let mut count = 0;
        while begin.elapsed() < time {
            let due = begin.elapsed().as_secs_f64() * UDP_MBPS * 1e6 / (8.0 * DATAGRAM as f64);
            while (count as f64) < due {
                // What the sender's own kernel refuses is lost as well.
                let _ = sender.send_to(&datagram, target);
                count += 1;
            }
            sleep(Duration::from_millis(1));
        }
        sent.store(count, Ordering::Relaxed);
        sleep(SETTLE);
        over.store(true, Ordering::Relaxed);
        counter.join()
    });
    let received = received.map_err(|_| "the receiver panicked")?;
    let sent = sent.load(Ordering::Relaxed).max(1) as f64;
    Ok((1.0 - received as f64 / sent) * 100.0)
}

/// Two at once.
pub(super) fn both(
    one: impl FnOnce() -> Result<f64> + Send,
    other: impl FnOnce() -> Result<f64>,
) -> Result<(f64, f64)> {
    let (one, other) = scope(|threads| {
        let one = threads.spawn(|| one().map_err(|error| error.to_string()));
        let other = other();
        (one.join(), other)
    });
    let one = one.map_err(|_| "a stream panicked")??;
    Ok((one, other?))
}

fn is_time_out(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// How long a stream may take to begin.
const BEGIN: Duration = Duration::from_secs(8);
const STEP: Duration = Duration::from_millis(100);
const SETTLE: Duration = Duration::from_millis(200);
const DATAGRAM: usize = 1470;
const UDP_MBPS: f64 = 95.0;
