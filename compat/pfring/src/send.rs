//! What a ring sends by: its own device, the bridge to another, the reflector.
//!
//! Locks: a thread that holds the reader may take the senders, never the other way round.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use vnplug::Client;

use crate::abi::ring::{flags, mode};
use crate::device::Target;
use crate::error::{
    GENERIC, INVALID_ARGUMENT, NO_PKT_AVAILABLE, NOT_SUPPORTED, RING_NOT_ENABLED,
    WRONG_CONFIGURATION,
};
use crate::handle::{Failure, Handle, local_index};
use crate::reader::Lent;
use crate::sender::{Sender, TOO_LONG};

/// See the module's comment.
#[derive(Debug, Default)]
pub(crate) struct Senders {
    /// On the ring's own device, once it was asked for.
    own: Option<Sender>,
    /// On the interface of this number.
    bridge: Option<(c_int, Sender)>,
    reflector: Option<Sender>,
}

impl Handle {
    /// Takes the mode; one that sends opens what it sends by.
    pub(crate) fn set_mode(&self, wanted: u32) -> Result<(), Failure> {
        self.ring.mode.store(wanted, Ordering::Relaxed);
        let sends = matches!(wanted, mode::SEND_AND_RECV | mode::SEND_ONLY);
        self.must_send.store(sends, Ordering::Relaxed);
        self.open_to_send()?;
        match self.is_enabled() {
            true => self.enable(true),
            false => Ok(()),
        }
    }

    /// Opens the port that sends, if the program asked for a mode that does.
    pub(crate) fn open_to_send(&self) -> Result<(), Failure> {
        match self.must_send.load(Ordering::Relaxed) {
            true => self.with_own(Sender::open),
            false => Ok(()),
        }
    }

    /// Sends a frame on the ring's own device.
    pub(crate) fn send(&self, frame: &[u8], flush: bool) -> Result<(), Failure> {
        let mtu = usize::from(self.ring.mtu);
        if frame.len() < ETHERNET_HEADER {
            return Err(Failure::new(INVALID_ARGUMENT, libc::EINVAL));
        }
        if mtu > 0 && frame.len() > mtu + ETHERNET_HEADER + VLAN_TAG {
            return Err(TOO_LONG);
        }
        self.with_own(|own| match self.cannot_send() {
            Some(failure) => Err(own.refuse(failure)),
            None => own.send(frame, flush),
        })
    }

    /// Hands over what was written.
    pub(crate) fn flush(&self) {
        if let Some(own) = &mut self.senders().own {
            own.flush();
        }
    }

    /// This many written frames are handed over at once.
    pub(crate) fn set_tx_watermark(&self, frames: u16) {
        self.with_own(|own| own.set_watermark(frames.into()));
    }

    /// Sends the packet that was received last through the interface of that number.
    /// `copy` gets it while the ring is locked.
    pub(crate) fn send_last(
        &self,
        index: c_int,
        copy: impl FnOnce(&Lent) -> Vec<u8>,
    ) -> Result<(), Failure> {
        if self.ring.flags & flags::RX_PACKET_BOUNCE == 0 {
            return Err(Failure::new(WRONG_CONFIGURATION, libc::EINVAL));
        }
        if self.reentrant || !self.long_header || index < 0 {
            return Err(Failure::new(NOT_SUPPORTED, libc::ENOTSUP));
        }
        if index == self.if_index {
            return Err(Failure::new(INVALID_ARGUMENT, libc::EINVAL));
        }
        let reader = self.reader();
        let last = reader.last().map(|lent| copy(&lent));
        let (label, handle) = reader.settings.names();
        drop(reader);
        let mut frame = last.ok_or(Failure::new(NO_PKT_AVAILABLE, libc::EAGAIN))?;
        frame.truncate(self.caplen as usize);

        let bridge = &mut self.senders().bridge;
        let (_, sender) = match bridge {
            Some(bridge) if bridge.0 == index => bridge,
            bridge => bridge.insert((index, Sender::new(device_of(index), label, handle))),
        };
        sender.send(&frame, true)
    }

    /// From now on every packet that the program receives is sent through `target`, too.
    pub(crate) fn reflect_to(&self, target: Target) -> Result<(), Failure> {
        let (label, handle) = self.reader().settings.names();
        let mut senders = self.senders();
        if senders.reflector.is_some() {
            return Err(Failure::new(GENERIC, libc::EEXIST));
        }
        let mut sender = Sender::new(Some(target), label, handle);
        sender.open()?;
        senders.reflector = Some(sender);
        self.reflects.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Sends a received packet through the reflector. What it does not take is lost.
    pub(crate) fn reflect(&self, packet: &[u8]) {
        if let Some(sender) = &mut self.senders().reflector {
            let _lost = sender.send(packet, true);
        }
    }

    fn senders(&self) -> MutexGuard<'_, Senders> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `act` on the sender of the ring's own device.
    fn with_own<T>(&self, act: impl FnOnce(&mut Sender) -> T) -> T {
        if let Some(own) = &mut self.senders().own {
            return act(own);
        }
        let reader = self.reader();
        let target = reader.targets().first().cloned();
        let (label, handle) = reader.settings.names();
        drop(reader);
        let mut senders = self.senders();
        // Another thread may have made it meanwhile.
        act(senders
            .own
            .get_or_insert_with(|| Sender::new(target, label, handle)))
    }

    /// Why the ring does not send now.
    fn cannot_send(&self) -> Option<Failure> {
        let mode = self.ring.mode.load(Ordering::Relaxed);
        if self.gate.is_shut() {
            return Some(Failure::new(NOT_SUPPORTED, libc::ESHUTDOWN));
        }
        if !matches!(mode, mode::SEND_AND_RECV | mode::SEND_ONLY) {
            return Some(Failure::new(NOT_SUPPORTED, libc::ENOTSUP));
        }
        if !self.is_enabled() {
            return Some(Failure::new(RING_NOT_ENABLED, libc::ENETDOWN));
        }
        None
    }
}

/// The source of the daemon whose interface has that number on this machine.
fn device_of(index: c_int) -> Option<Target> {
    let devices = Client::connect().and_then(|mut client| client.devices());
    let mut devices = devices.ok()?.into_iter();
    let found = devices.find(|device| local_index(device) == index)?;
    Some(found.name)
}

/// Bytes.
const ETHERNET_HEADER: usize = 14;
/// Bytes.
const VLAN_TAG: usize = 4;
