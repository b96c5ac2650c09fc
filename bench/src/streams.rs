//! What the ends of streams of TCP and UDP do, on the host and in guests.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create, sendfile};
use rustix::io::Errno;

use crate::row::Result;

/// Bytes of payload of a datagram that fills a frame of Ethernet but for two bytes.
pub(crate) const DATAGRAM: usize = 1470;
/// Bytes of a file that is sent over and over.
const FILE: usize = 1 << 20;
/// Bytes after which [`Content`] begins again: a prime.
const PERIOD: usize = 1_048_573;
/// Bytes of it that are written or read at once.
const AT_ONCE: usize = 128 << 10;
/// How often who waits looks whether it is over.
const STEP: Duration = Duration::from_millis(100);

/// Writes into a stream as fast as it takes it, until it is over or the other end has closed.
pub(crate) fn fill(mut stream: TcpStream, over: impl Fn() -> bool) -> Result<()> {
    stream.set_write_timeout(Some(STEP))?;
    let block = vec![0x5a; 128 << 10];
    while !over() {
        match stream.write(&block) {
            Ok(_) => {}
            Err(error) if is_time_out(error.kind()) => {}
            Err(error) if is_closed(error.kind()) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A file in memory, for [`fill_from`].
pub(crate) fn file() -> Result<File> {
    let file = File::from(memfd_create("stream", MemfdFlags::CLOEXEC)?);
    file.write_all_at(&vec![0x5a; FILE], 0)?;
    Ok(file)
}

/// As [`fill`], of a file over and over, whose bytes the kernel sends from where they are.
pub(crate) fn fill_from(stream: TcpStream, file: &File, over: impl Fn() -> bool) -> Result<()> {
    stream.set_write_timeout(Some(STEP))?;
    while !over() {
        let mut at = 0;
        match sendfile(&stream, file, Some(&mut at), FILE) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads a stream until this instant, or its end; how many bytes came.
pub(crate) fn drain(stream: &mut TcpStream, end: Instant) -> Result<u64> {
    let (mut bytes, mut block) = (0, vec![0; 1 << 20]);
    while let left = end.saturating_duration_since(Instant::now())
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
    Ok(bytes)
}

/// What is at each place of a stream whose receiver looks at every byte: the same again after a prime number of bytes, which
/// no length of segments or blocks divides.
pub(crate) struct Content {
    /// One period, and as much of the next as is read or written at once.
    bytes: Vec<u8>,
    at: u64,
}

impl Content {
    /// From the stream's first byte on.
    pub(crate) fn new() -> Self {
        let mut state = 1_u32;
        let mut next = || {
            // Xorshift (Marsaglia, 2003).
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        };
        let mut bytes: Vec<u8> = (0..PERIOD).map(|_| next()).collect();
        bytes.extend_from_within(..AT_ONCE);
        Self { bytes, at: 0 }
    }

    /// The next bytes.
    fn next(&self) -> &[u8] {
        let begin = (self.at % PERIOD as u64) as usize;
        &self.bytes[begin..begin + AT_ONCE]
    }
}

/// As [`fill`], of this content.
pub(crate) fn fill_with(mut stream: TcpStream, over: impl Fn() -> bool) -> Result<()> {
    stream.set_write_timeout(Some(STEP))?;
    let mut content = Content::new();
    while !over() {
        match stream.write(content.next()) {
            Ok(len) => content.at += len as u64,
            Err(error) if is_time_out(error.kind()) => {}
            Err(error) if is_closed(error.kind()) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// As [`drain`], of this content.
///
/// # Errors
/// And if another byte came.
pub(crate) fn drain_all(
    stream: &mut TcpStream,
    content: &mut Content,
    end: Instant,
) -> Result<u64> {
    let (begin, mut block) = (content.at, vec![0; AT_ONCE]);
    while let left = end.saturating_duration_since(Instant::now())
        && !left.is_zero()
    {
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut block) {
            Ok(0) => break,
            Ok(len) if block[..len] != content.next()[..len] => {
                return Err(format!("the stream has other bytes at {}", content.at).into());
            }
            Ok(len) => content.at += len as u64,
            Err(error) if is_time_out(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(content.at - begin)
}

/// Sends back what comes, until the other end closes.
pub(crate) fn answer(mut stream: TcpStream) -> Result<()> {
    let mut block = [0; 1024];
    loop {
        match stream.read(&mut block)? {
            0 => return Ok(()),
            len => stream.write_all(&block[..len])?,
        }
    }
}

/// The first connection to a listener within this time, if one comes.
pub(crate) fn accept(listener: &TcpListener, patience: Duration) -> Result<Option<TcpStream>> {
    listener.set_nonblocking(true)?;
    let asked = Instant::now();
    while asked.elapsed() < patience {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(Some(stream));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Sends datagrams to whom a socket is connected to, with `mbps` Mb/s of payload: each `tick` those
/// that are due. How many it sent.
pub(crate) fn pace(socket: &UdpSocket, mbps: f64, tick: Duration, time: Duration) -> Result<u64> {
    let (begin, datagram) = (Instant::now(), [0x5a; DATAGRAM]);
    let mut count = 0;
    while begin.elapsed() < time {
        let due = begin.elapsed().as_secs_f64() * mbps * 1e6 / (8.0 * DATAGRAM as f64);
        while (count as f64) < due {
            // What the sender's own kernel refuses is lost as well.
            let _ = socket.send(&datagram);
            count += 1;
        }
        sleep(tick);
    }
    Ok(count)
}

/// Counts the datagrams that come, until it is over and none is there any more.
pub(crate) fn count(socket: &UdpSocket, over: impl Fn() -> bool) -> Result<u64> {
    socket.set_read_timeout(Some(STEP))?;
    let (mut count, mut block) = (0, [0; 2048]);
    loop {
        match socket.recv(&mut block) {
            Ok(_) => count += 1,
            Err(_) if over() => return Ok(count),
            Err(_) => {}
        }
    }
}

fn is_time_out(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn is_closed(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of which the receiver looks at what was sent by this.
    fn seen(send: impl FnOnce(TcpStream) -> Result<()> + Send) -> Result<u64> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::scope(|threads| {
            // Who has seen another byte closes, and the sender may see that.
            threads.spawn(move || {
                let _ = send(TcpStream::connect(address).unwrap());
            });
            let (mut stream, _) = listener.accept()?;
            let end = Instant::now() + Duration::from_secs(20);
            drain_all(&mut stream, &mut Content::new(), end)
        })
    }

    #[test]
    fn content_is_looked_at_whole_and_another_byte_is_seen() {
        const LEN: usize = 3 * PERIOD;
        let whole = || {
            let all = Content::new();
            let period = &all.bytes[..PERIOD];
            [period, period, period].concat()
        };
        let came = seen(|mut stream| Ok(stream.write_all(&whole())?));
        assert_eq!(came.unwrap(), LEN as u64);
        let came = seen(|mut stream| {
            let mut bytes = whole();
            bytes[LEN - 1000] ^= 1;
            Ok(stream.write_all(&bytes)?)
        });
        assert!(came.is_err());
        // A segment that is there twice.
        let came = seen(|mut stream| {
            let bytes = whole();
            stream.write_all(&bytes[..1448])?;
            Ok(stream.write_all(&bytes[..1448])?)
        });
        assert!(came.is_err());
        let over = std::cell::Cell::new(0);
        let came = seen(move |stream| fill_with(stream, || over.replace(over.get() + 1) == 50));
        assert!(came.unwrap() > PERIOD as u64);
    }
}
