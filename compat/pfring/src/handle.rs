//! One ring as a program holds it: what the program may look at, and what lies behind.
//!
//! | part      | who touches it                               | how                                     |
//! |-----------|----------------------------------------------|-----------------------------------------|
//! | `ring`    | the library writes, the program reads        | atomics, where it changes               |
//! | `gate`    | every thread, signal handlers                | atomics, never blocks                   |
//! | `reader`  | the thread that receives, and those that set | a lock, held asleep only by a reflector |
//! | `senders` | threads that send                            | a lock                                  |
//!
//! A handle counts the calls that are inside it. Closing takes one away; the last to leave frees
//! it, so a ring may be closed while a call is in progress, also by a signal handler.

use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use vnplug::{Client, Device, Error};

use crate::abi::packet::{PacketHeader, SHORT_HEADER};
use crate::abi::ring::{DEFAULT_POLL_DURATION, Ring, mode};
use crate::device;
use crate::error::{self, GENERIC, INVALID_STATUS, NOT_SUPPORTED, RING_NOT_ENABLED};
use crate::gate::{Gate, Woken};
use crate::reader::{Found, Lent, Reader};
use crate::send::Senders;
use crate::settings::Settings;

/// See the module's comment.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Handle {
    /// First: a program's pointer to its ring is a pointer to the handle.
    pub(crate) ring: Ring,
    pub(crate) gate: Gate,
    reader: Mutex<Reader>,
    pub(crate) senders: Mutex<Senders>,
    /// The program asked for a mode that sends.
    pub(crate) must_send: AtomicBool,
    /// Received packets go to a reflector, too.
    pub(crate) reflects: AtomicBool,
    enabled: AtomicBool,
    /// Milliseconds.
    poll_duration: AtomicU32,
    /// Calls inside, and the program that has not closed it.
    pub(crate) inside: AtomicU32,
    /// As it was opened.
    pub(crate) name: CString,
    pub(crate) reentrant: bool,
    pub(crate) long_header: bool,
    pub(crate) parse: bool,
    /// Longest captured length.
    pub(crate) caplen: u32,
    /// The interface's number on this machine, or -1.
    pub(crate) if_index: c_int,
    pub(crate) queues: u32,
}

/// A PF_RING error number and its `errno`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) errno: c_int,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            code: error::number(&error),
            errno: error::errno(&error),
        }
    }
}

impl Failure {
    pub(crate) const fn new(code: c_int, errno: c_int) -> Self {
        Self { code, errno }
    }
}

/// What waiting for a packet came to.
#[derive(Debug)]
pub(crate) enum Received<T> {
    Packet(T),
    /// None now.
    Nothing,
    /// The program broke the wait.
    Broken,
}

impl Handle {
    /// Opens ports on what `name` says; they are not enabled yet.
    pub(crate) fn open(name: CString, ring: Ring) -> Result<Self, Failure> {
        let no_device = Failure::new(error::BAD_IFNAME, libc::ENODEV);
        let text = name.to_str().map_err(|_| no_device)?;
        let (devices, group) = vnplug::split_group(text);
        let targets = match devices {
            "none" => Vec::new(),
            devices => device::targets(devices).ok_or(no_device)?,
        };
        let gate = Gate::new().map_err(|errno| Failure::new(GENERIC, errno.raw_os_error()))?;
        let poll = Duration::from_millis(DEFAULT_POLL_DURATION.into());
        let mut settings = Settings::new(ring.caplen, poll);
        settings.group = group.to_owned();
        let first = targets.first().cloned();
        let reader = Reader::open(targets, settings, &gate)?;
        let device = first.and_then(|target| facts(&target));
        Ok(Self {
            gate,
            reader: Mutex::new(reader),
            senders: Mutex::default(),
            must_send: AtomicBool::new(false),
            reflects: AtomicBool::new(false),
            enabled: AtomicBool::new(false),
            poll_duration: AtomicU32::new(DEFAULT_POLL_DURATION.into()),
            inside: AtomicU32::new(1),
            name,
            reentrant: ring.reentrant != 0,
            long_header: ring.long_header != 0,
            parse: ring.disable_parsing == 0,
            caplen: match ring.caplen {
                0 => u32::MAX,
                caplen => caplen,
            },
            if_index: device.as_ref().map_or(-1, local_index),
            queues: device.map_or(1, |device| device.queues.max(1)),
            ring,
        })
    }

    /// Fills what the program may look at.
    pub(crate) fn show(&mut self) {
        use std::os::fd::AsRawFd;
        let mtu = self.facts().map_or(0, |device| device.mtu);
        let header_len = self.slot_header_len();
        let ring = &mut self.ring;
        ring.initialized = 1;
        ring.device_name = self.name.as_ptr().cast_mut();
        ring.fd = self.gate.fd().as_raw_fd();
        ring.mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        ring.device_id = self.if_index;
        ring.slot_header_len = header_len;
    }

    /// Bytes of a packet's header.
    pub(crate) fn slot_header_len(&self) -> u16 {
        match self.long_header {
            false => SHORT_HEADER as u16,
            true => size_of::<PacketHeader>() as u16,
        }
    }

    /// The longest packet that is received, in bytes.
    pub(crate) fn longest(&self) -> u32 {
        let mut reader = self.reader();
        let snaplens = reader.ports().iter().map(|port| port.snaplen());
        snaplens.max().unwrap_or(self.caplen).min(self.caplen)
    }

    /// The reader, for settings and questions.
    pub(crate) fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Acquire)
    }

    /// Lets packets flow, or not.
    pub(crate) fn enable(&self, enabled: bool) -> Result<(), Failure> {
        if self.gate.is_shut() {
            return Err(SHUT);
        }
        if enabled {
            self.open_to_send()?;
        }
        let mut reader = self.reader();
        reader.enable(enabled && !self.sends_only(), &self.gate)?;
        self.enabled.store(enabled, Ordering::Release);
        self.ring.enabled.store(enabled.into(), Ordering::Relaxed);
        drop(reader);
        // Ports may be new since the program asked for the descriptor.
        if enabled && self.gate.is_watched() {
            self.arm();
        }
        Ok(())
    }

    fn sends_only(&self) -> bool {
        self.ring.mode.load(Ordering::Relaxed) == mode::SEND_ONLY
    }

    /// Refuses what is fixed while packets flow.
    pub(crate) fn only_disabled(&self) -> Result<(), Failure> {
        match self.is_enabled() {
            false => Ok(()),
            true => Err(Failure::new(INVALID_STATUS, libc::EBUSY)),
        }
    }

    /// How long one wait takes at most.
    pub(crate) fn set_poll_duration(&self, duration: Duration) {
        let ms = u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        self.poll_duration.store(ms, Ordering::Relaxed);
        let mut reader = self.reader();
        reader.settings.poll_duration = duration;
        reader.wake_at();
    }

    /// The next packet, which `act` gets while the ring is locked. `entered`: a break since then
    /// ends the call.
    #[inline]
    pub(crate) fn receive<T>(
        &self,
        wait: bool,
        entered: Option<u32>,
        act: impl FnOnce(&Lent) -> T,
    ) -> Result<Received<T>, Failure> {
        loop {
            if self.gate.is_shut() {
                return Err(SHUT);
            }
            if !self.is_enabled() {
                return Err(NOT_ENABLED);
            }
            if self.sends_only() {
                return Err(Failure::new(NOT_SUPPORTED, libc::ENOTSUP));
            }
            if entered.is_some_and(|entered| self.gate.is_broken(entered)) {
                return Ok(Received::Broken);
            }
            if let Some(lent) = self.take(wait)? {
                let (lent, reader) = lent;
                let result = act(&lent);
                drop(reader);
                return Ok(Received::Packet(result));
            }
            if !wait {
                return Ok(Received::Nothing);
            }
            let limit = Duration::from_millis(self.poll_duration.load(Ordering::Relaxed).into());
            let entered = entered.unwrap_or_else(|| self.gate.enter());
            self.gate.sleep(entered, limit.max(SHORTEST_WAIT));
        }
    }

    /// Up to `max` packets at once, as [`receive`](Self::receive) gets one.
    pub(crate) fn receive_burst(
        &self,
        wait: bool,
        entered: u32,
        max: usize,
        mut act: impl FnMut(usize, &Lent),
    ) -> Result<Received<usize>, Failure> {
        let first = self.receive(wait, Some(entered), |lent| act(0, lent))?;
        if let Received::Packet(()) = first {
            let mut reader = self.reader();
            let mut count = 1;
            let mut lost = 0;
            for lent in reader.rest(max - 1) {
                act(count, lent);
                lost += u64::from(lent.meta.lost);
                count += 1;
            }
            self.gate.count(count as u64 - 1);
            self.gate.add_dropped(lost);
            return Ok(Received::Packet(count));
        }
        Ok(match first {
            Received::Broken => Received::Broken,
            _ => Received::Nothing,
        })
    }

    /// What lies ahead, without waiting and without taking it.
    pub(crate) fn peek(&self) -> Result<Option<Lent>, Failure> {
        if self.gate.is_shut() {
            return Err(SHUT);
        }
        let arm = self.gate.is_watched();
        match self.reader().peek(arm, &self.gate)? {
            Found::Packet(lent) => Ok(Some(lent)),
            Found::Nothing => Ok(None),
            Found::Ended => Err(ENDED),
        }
    }

    /// Waits for a packet without taking it. `Err(EINTR)` if a signal came.
    pub(crate) fn wait(&self, limit: Duration) -> Result<bool, Failure> {
        let deadline = Instant::now().checked_add(limit);
        let entered = self.gate.enter();
        loop {
            if self.gate.is_shut() {
                return Err(SHUT);
            }
            match self.reader().peek(true, &self.gate)? {
                Found::Packet(_) => return Ok(true),
                Found::Nothing => {}
                Found::Ended => return Err(ENDED),
            }
            if self.gate.is_broken(entered) {
                return Ok(false);
            }
            let now = Instant::now();
            let left = deadline.map_or(limit, |end| end.saturating_duration_since(now));
            if left.is_zero() {
                return Ok(false);
            }
            if self.gate.sleep(entered, left) == Woken::Interrupted {
                return Err(Failure::new(GENERIC, libc::EINTR));
            }
        }
    }

    /// A descriptor for the program's own waiting.
    pub(crate) fn watch(&self) -> c_int {
        use std::os::fd::AsRawFd;
        self.gate.watch();
        self.arm();
        self.gate.fd().as_raw_fd()
    }

    /// Arms the ports; what it finds stays ahead and makes the descriptor readable.
    fn arm(&self) {
        let found = self.reader().peek(true, &self.gate);
        if !matches!(found, Ok(Found::Nothing)) {
            self.gate.set_ready(true);
        }
    }

    /// Packets taken and packets lost. Waits for nobody: signal handlers may ask.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let reader = match self.reader.try_lock() {
            Ok(reader) => Some(reader),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(reader) = reader {
            self.gate.set_dropped(reader.dropped());
        }
        self.gate.counts()
    }

    /// What the daemon says about the first device now.
    pub(crate) fn facts(&self) -> Option<Device> {
        let target = self.reader().targets().first().cloned()?;
        facts(&target)
    }

    /// Takes a packet, keeping the lock for as long as it is looked at.
    #[inline]
    fn take(&self, wait: bool) -> Result<Option<(Lent, MutexGuard<'_, Reader>)>, Failure> {
        let mut reader = self.reader();
        let arm = wait || self.gate.is_watched();
        match reader.take(arm, &self.gate)? {
            Found::Packet(lent) => {
                self.gate.count(1);
                if lent.meta.lost > 0 {
                    self.gate.add_dropped(lent.meta.lost.into());
                }
                Ok(Some((lent, reader)))
            }
            Found::Nothing => Ok(None),
            Found::Ended => Err(ENDED),
        }
    }
}

/// What the daemon says about a target's device.
pub(crate) fn facts(target: &str) -> Option<Device> {
    let devices = Client::connect().and_then(|mut client| client.devices());
    let wanted = device::bare(target);
    let mut devices = devices.ok()?.into_iter();
    devices.find(|device| device::bare(&device.name) == wanted)
}

/// The number of the interface of that name on this machine; -1 if it is not the daemon's: a guest
/// may have an interface of the same name, but not with the same MAC address.
pub(crate) fn local_index(device: &Device) -> c_int {
    let name = device::bare(&device.name);
    let about = |what: &str| {
        let text = std::fs::read_to_string(format!("/sys/class/net/{name}/{what}")).ok()?;
        Some(text.trim().to_owned())
    };
    let mac: Vec<String> = device
        .mac
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let ours = device.mac != [0; 6] && about("address") == Some(mac.join(":"));
    let index = about("ifindex").filter(|_| ours);
    index.and_then(|text| text.parse().ok()).unwrap_or(-1)
}

/// The ring was shut down.
const SHUT: Failure = Failure::new(GENERIC, libc::ESHUTDOWN);
/// The source ended.
const ENDED: Failure = Failure::new(GENERIC, libc::ENODATA);
const NOT_ENABLED: Failure = Failure::new(RING_NOT_ENABLED, libc::ENETDOWN);
/// A poll duration of 0 does not spin.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
