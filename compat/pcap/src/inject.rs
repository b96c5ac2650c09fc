//! `pcap_inject`: frames onto the device's wire, by a port of their own.
//!
//! Most programs never send, and sending needs a grant of its own. So the port that sends is opened
//! with the first frame; it receives nothing.

use std::time::Duration;

use vnplug::{Error, Port, PortOptions};

use crate::devices::{describe, device_of, split_group};
use crate::handle::{Handle, lock};

/// Sends a frame through the device of an activated handle; the host takes it from there.
///
/// # Errors
/// The text for the program.
pub(crate) fn inject(handle: &Handle, frame: &[u8]) -> Result<(), String> {
    let _visit = handle.visit();
    send(handle, frame).map_err(|error| describe(&error))
}

fn send(handle: &Handle, frame: &[u8]) -> Result<(), Error> {
    let mut sender = lock(&handle.sender);
    let sender = match &mut *sender {
        Some(sender) => sender,
        none => none.insert(Box::new(open(&handle.name.to_string_lossy())?)),
    };
    // A port that lost its daemon comes back here.
    sender.wait(Some(Duration::ZERO))?;
    while !sender.send(frame)? {
        if !sender.wait_for_room(frame.len(), PATIENCE)? {
            return Err(Error::TimedOut);
        }
    }
    Ok(())
}

fn open(name: &str) -> Result<Port, Error> {
    let (device, _group) = split_group(device_of(name).unwrap_or(name));
    PortOptions::new(device)
        .enabled(false)
        .ring_bytes(LEAST_RING)
        .transmit(RING)
        .open()
}

const LEAST_RING: u64 = 4096;
/// Some hundred frames of full length.
const RING: u64 = 512 << 10;
/// How long a program waits for the wire.
const PATIENCE: Duration = Duration::from_secs(1);
