//! A program of VDE: the protocol of `vde_switch`, by which both switches are asked for a port.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use vnplug_os::datagrams::{AT_ONCE, Inbox, send_many};

use crate::row::Result;

/// A port of a switch by its sockets, as libvdeplug has one.
pub(super) struct Client {
    /// Open as long as the port is to be.
    _ctl: Option<UnixStream>,
    data: UnixDatagram,
}

/// What was carried.
#[derive(Clone, Copy, Default)]
pub(super) struct Carried {
    /// Frames that the switch's socket took.
    pub(super) sent: u64,
    /// Frames that came out at the other port.
    pub(super) came: u64,
    pub(super) seconds: f64,
}

impl Client {
    /// Joins the switch of a directory.
    ///
    /// # Errors
    /// The system's, and if the switch hangs up.
    pub(super) fn join(dir: &Path) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only uniqueness matters.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".{}-{number:05}", std::process::id()));
        let data = UnixDatagram::bind(&path)?;
        let mut ctl = UnixStream::connect(dir.join("ctl"))?;
        ctl.set_read_timeout(Some(PATIENCE))?;
        ctl.write_all(&request(&path))?;
        let mut answer = [0; ADDRESS];
        ctl.read_exact(&mut answer)
            .map_err(|error| format!("the switch gives no port: {error}"))?;
        let name = answer[2..].split(|byte| *byte == 0).next();
        data.connect(std::str::from_utf8(name.unwrap_or_default())?)?;
        std::fs::remove_file(path)?;
        Ok(Self {
            _ctl: Some(ctl),
            data,
        })
    }

    /// One end of a pair of sockets, of no switch.
    pub(super) fn of(data: UnixDatagram) -> Self {
        Self { _ctl: None, data }
    }

    /// Sends one frame.
    pub(super) fn send(&self, frame: &[u8]) -> Result<()> {
        self.data.send(frame)?;
        Ok(())
    }

    /// Sends a frame `times` times, as far as the switch's socket takes it now; how many it took.
    pub(super) fn offer(&self, frame: &[u8], times: usize) -> Result<usize> {
        let nothing: &[u8] = &[];
        let frames = std::iter::repeat_n((frame, nothing), times);
        Ok(send_many(&self.data, frames)?)
    }

    /// Takes what is there, and forgets it; how many frames had this length.
    pub(super) fn take(&self, inbox: &mut Inbox, len: usize) -> Result<usize> {
        inbox.clear();
        // NB: the switch sends no descriptors, so that nothing is looked at before it is taken.
        inbox.receive(&self.data, AT_ONCE, true)?;
        Ok((0..inbox.len())
            .filter(|&at| inbox.get(at).0.len() == len)
            .count())
    }
}

/// Two ports of a switch, which knows where the second is.
///
/// # Errors
/// As [`Client::join`].
pub(super) fn pair(dir: &Path) -> Result<[Client; 2]> {
    let pair = [Client::join(dir)?, Client::join(dir)?];
    pair[1].send(&frame(60, FROM, TO))?;
    std::thread::sleep(LEARNS);
    // What it sent comes to the first one.
    pair[0].take(&mut Inbox::new(AT_ONCE, 60), 60)?;
    Ok(pair)
}

/// Sends from one port to the other as fast as the switch takes frames, with as many as the sockets hold on
/// their way, from one thread; not faster than `pps` frames a second, if that is given.
pub(super) fn carry(
    (from, to): (&Client, &Client),
    frame: &[u8],
    time: Duration,
    pps: Option<f64>,
) -> Result<Carried> {
    let mut inbox = Inbox::new(AT_ONCE, frame.len());
    let (begin, mut carried) = (Instant::now(), Carried::default());
    while begin.elapsed() < time {
        let due = pps.map_or(u64::MAX, |pps| (begin.elapsed().as_secs_f64() * pps) as u64);
        let left = due.saturating_sub(carried.sent);
        if left > 0 {
            carried.sent += from.offer(frame, left.min(BURST) as usize)? as u64;
        }
        carried.came += to.take(&mut inbox, frame.len())? as u64;
    }
    carried.seconds = begin.elapsed().as_secs_f64();
    // What is still on its way.
    let end = Instant::now();
    while carried.came < carried.sent && end.elapsed() < SETTLE {
        carried.came += to.take(&mut inbox, frame.len())? as u64;
    }
    Ok(carried)
}

impl Carried {
    /// Millions of frames a second that came.
    pub(super) fn mpps(&self) -> f64 {
        self.came as f64 / self.seconds / 1e6
    }

    /// Per cent of the frames sent that did not come.
    pub(super) fn lost_percent(&self) -> f64 {
        (1.0 - self.came as f64 / self.sent.max(1) as f64) * 100.0
    }
}

/// Version 3 of the request, as libvdeplug writes it.
fn request(path: &Path) -> Vec<u8> {
    let mut bytes = [0xfeed_face_u32, 3, 0].map(u32::to_ne_bytes).concat();
    bytes.extend(1_u16.to_ne_bytes());
    bytes.extend(path.as_os_str().as_encoded_bytes());
    bytes.resize(12 + ADDRESS, 0);
    bytes.extend(b"vnplug-bench");
    bytes
}

/// A frame of an own EtherType from one station to another, by the last bytes of their addresses.
pub(super) fn frame(len: usize, to: u8, from: u8) -> Vec<u8> {
    let mut frame = vec![0x5a; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]);
    frame
}

/// The last bytes of the addresses of [`pair`]'s ports.
pub(super) const FROM: u8 = 1;
pub(super) const TO: u8 = 2;
/// Until a switch has learned an address.
const LEARNS: Duration = Duration::from_millis(50);
/// Bytes of a `sockaddr_un`.
const ADDRESS: usize = 110;
/// Most frames offered at once: more than a socket holds.
const BURST: u64 = 32;
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest time for the last frames to come.
const SETTLE: Duration = Duration::from_millis(100);
