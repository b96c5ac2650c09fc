//! Streams of TCP and UDP between namespaces, each for a time.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;

use crate::row::Result;
use crate::streams;

/// Megabits per second of payload that one stream of TCP brings to an address of `to` within a time from
/// its beginning; 0 if it never begins.
pub(crate) fn tcp(from: &Netns, to: &Netns, address: &str, time: Duration) -> Result<f64> {
    let listener = to.enter(|| TcpListener::bind((address, 0)))??;
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
    let stream = from.enter(|| TcpStream::connect_timeout(target, BEGIN))??;
    streams::fill(stream, || over.load(Ordering::Relaxed))
}

fn receive(listener: &TcpListener, time: Duration) -> Result<f64> {
    let Some(mut stream) = streams::accept(listener, BEGIN)? else {
        return Ok(0.0);
    };
    let bytes = streams::drain(&mut stream, Instant::now() + time)?;
    Ok(bytes as f64 * 8.0 / 1e6 / time.as_secs_f64())
}

/// Per cent of datagrams that are lost on the way to an address of `to`, at 95 Mb/s of payload.
pub(super) fn udp(from: &Netns, to: &Netns, address: &str, time: Duration) -> Result<f64> {
    let receiver = to.enter(|| UdpSocket::bind((address, 0)))??;
    let target = receiver.local_addr()?;
    let sender = from.enter(|| UdpSocket::bind("0.0.0.0:0"))??;
    sender.connect(target)?;
    let over = AtomicBool::new(false);
    let (sent, received) = scope(|threads| {
        let counter = threads.spawn(|| {
            let over = || over.load(Ordering::Relaxed);
            streams::count(&receiver, over).map_err(|error| error.to_string())
        });
        let sent = streams::pace(&sender, UDP_MBPS, TICK, time);
        sleep(SETTLE);
        over.store(true, Ordering::Relaxed);
        (sent, counter.join())
    });
    let received = received.map_err(|_| "the receiver panicked")??;
    Ok((1.0 - received as f64 / sent?.max(1) as f64) * 100.0)
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

/// How long a stream may take to begin.
const BEGIN: Duration = Duration::from_secs(8);
const SETTLE: Duration = Duration::from_millis(200);
const UDP_MBPS: f64 = 95.0;
const TICK: Duration = Duration::from_millis(1);
