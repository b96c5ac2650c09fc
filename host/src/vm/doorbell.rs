//! The server of a VM's `ivshmem-doorbell` device, and the thread that raises its interrupts.
//!
//! QEMU connects while it executes `device_add` and does not answer its monitor until the
//! handshake is done (ivshmem-spec, "Client-Server protocol"); so the whole handshake is sent in
//! one go, from memory, when QEMU connects. It tells QEMU: protocol version 0; its id; the shared
//! memory (one page: the pool's header, so that the agent knows whose doorbell this is); the
//! eventfd of peer 0, us, which the guest's doorbell register writes; and one eventfd per vector of
//! its own, which we write and QEMU turns into MSI-X (by irqfd under KVM).
//!
//! QEMU shares these eventfds, so a write to one may block (R8). Only this VM's own thread writes
//! them; queues' threads ring that thread.
//!
//! The device's clients cannot reconnect to another server. After a restart of the daemon wake-ups
//! go by the control channel until the device is plugged again.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug_ring::pool::PoolHeader;

use crate::port::doorbell::VmBell;
use crate::sys::{event, memory};

/// The most vectors a device may have.
pub(crate) const MAX_VECTORS: u32 = 64;

/// QEMU's id on this server; ours is 0.
const QEMU_ID: i64 = 1;

/// One VM's doorbell.
pub(crate) struct DoorbellServer {
    pub(crate) listener: OwnedFd,
    vectors: u32,
    page: memory::Shared,
    thread_bell: Arc<OwnedFd>,
    lines: Arc<Mutex<Vec<Line>>>,
    stop: Arc<AtomicBool>,
    connected: Option<OwnedFd>,
}

struct Line {
    bell: VmBell,
    irq: OwnedFd,
    used: bool,
}

impl DoorbellServer {
    /// Listens for QEMU at `path`.
    pub(crate) fn listen(path: &Path, vectors: u32, header: &PoolHeader) -> io::Result<Self> {
        let page = memory::sealed("vnplug-doorbell", 4096)?;
        header.write(&page.region);
        let thread_bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = Raise {
            bell: Arc::clone(&thread_bell),
            lines: Arc::clone(&lines),
            stop: Arc::clone(&stop),
        };
        std::thread::Builder::new()
            .name("vnplug-doorbell".into())
            .spawn(move || thread.run())?;
        Ok(Self {
            listener: crate::control::listen(path, 0o600)?,
            vectors,
            page,
            thread_bell,
            lines,
            stop,
            connected: None,
        })
    }

    /// Does the handshake with a QEMU that just connected; an earlier one is forgotten.
    pub(crate) fn greet(&mut self, qemu: OwnedFd) -> io::Result<()> {
        let own = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut lines = Vec::new();
        let mut messages: Vec<(i64, Option<OwnedFd>)> = vec![
            (0, None),
            (QEMU_ID, None),
            (-1, Some(rustix::io::dup(&self.page.fd)?)),
            (0, Some(own)),
        ];
        for _ in 0..self.vectors {
            let irq = eventfd(0, EventfdFlags::CLOEXEC)?;
            messages.push((QEMU_ID, Some(rustix::io::dup(&irq)?)));
            let bell = VmBell::new(Arc::clone(&self.thread_bell));
            lines.push(Line {
                bell,
                irq,
                used: false,
            });
        }
        for (number, fd) in &messages {
            send(&qemu, *number, fd.as_ref().map(AsFd::as_fd))?;
        }
        *self.lines.lock().unwrap_or_else(PoisonError::into_inner) = lines;
        // QEMU takes a closed connection as the end of its server.
        self.connected = Some(qemu);
        Ok(())
    }

    /// A free vector and its bell, if QEMU is connected and one is left.
    pub(crate) fn take(&mut self) -> Option<(VmBell, u32)> {
        self.connected.as_ref()?;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (vector, line) = lines.iter_mut().enumerate().find(|(_, line)| !line.used)?;
        line.used = true;
        Some((line.bell.clone(), vector as u32))
    }

    /// Gives a vector back.
    pub(crate) fn give(&mut self, vector: u32) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get_mut(vector as usize) {
            line.used = false;
        }
    }
}

impl Drop for DoorbellServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        event::ring(&self.thread_bell);
    }
}

struct Raise {
    bell: Arc<OwnedFd>,
    lines: Arc<Mutex<Vec<Line>>>,
    stop: Arc<AtomicBool>,
}

impl Raise {
    fn run(self) {
        while !self.stop.load(Ordering::Acquire) {
            if rustix::io::read(&self.bell, &mut [0; 8]).is_err() {
                continue;
            }
            // Descriptors are duplicated so that a write that blocks holds no lock.
            let due: Vec<OwnedFd> = self
                .lines
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .filter(|line| line.bell.take())
                .filter_map(|line| rustix::io::dup(&line.irq).ok())
                .collect();
            for irq in due {
                event::ring(&irq);
            }
        }
    }
}

fn send(qemu: &OwnedFd, number: i64, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = number.to_le_bytes();
    let borrowed: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(qemu, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}
