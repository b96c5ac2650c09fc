//! `pcap_inject`: frames onto the device's wire, by a port of their own.
//!
//! Most programs never send, and sending needs a grant of its own. So the port that sends is opened
//! with the first frame; it receives nothing.
//!
//! What the kernel would refuse is refused here with its words: a frame that is too short, or longer
//! than the interface's MTU allows, and an interface that is down. The daemon is asked for both now and
//! then, not for each frame; what it cannot send for another reason later it counts.

use std::time::{Duration, Instant};

use vnplug::{Asker, Device, Error, Port, PortOptions, split_group};

use crate::devices::{describe, device_of};
use crate::handle::{Handle, lock};

/// The port that sends, and what is known of its device.
#[derive(Debug)]
pub(crate) struct Sender {
    port: Port,
    asker: Asker,
    device: Option<Device>,
    asked: Option<Instant>,
}

/// Sends a frame through the device of an activated handle; the host takes it from there. From any
/// thread.
///
/// # Errors
/// The text for the program.
pub(crate) fn inject(handle: &Handle, frame: &[u8]) -> Result<(), String> {
    let _visit = handle.visit();
    if frame.len() < HEADER {
        return Err("send: Invalid argument (shorter than an Ethernet header)".into());
    }
    let mut sender = lock(&handle.sender);
    let sender = match &mut *sender {
        Some(sender) => sender,
        none => {
            let name = handle.name.to_string_lossy();
            let port = open(&name, handle.number).map_err(|error| describe(&error))?;
            none.insert(Box::new(Sender {
                asker: port.asker(),
                port,
                device: None,
                asked: None,
            }))
        }
    };
    sender.judge(frame)?;
    sender.send(frame).map_err(|error| describe(&error))
}

impl Sender {
    /// Refuses what the device cannot send, as far as that is known.
    fn judge(&mut self, frame: &[u8]) -> Result<(), String> {
        if self.asked.is_none_or(|asked| asked.elapsed() >= FRESH) {
            self.device = self.asker.device(PATIENCE).ok().flatten();
            self.asked = Some(Instant::now());
        }
        let Some(device) = &self.device else {
            return Ok(());
        };
        match device.state.as_str() {
            "down" => return Err("send: Network is down".into()),
            "gone" => return Err("send: No such device or address".into()),
            _ => {}
        }
        let tag = match frame[12..HEADER] {
            [0x81, 0x00] | [0x88, 0xa8] => TAG,
            _ => 0,
        };
        let longest = device.mtu as usize + HEADER + tag;
        if device.mtu != 0 && frame.len() > longest {
            return Err(format!("send: Message too long (at most {longest} bytes)"));
        }
        Ok(())
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), Error> {
        // A port that lost its daemon comes back here.
        self.port.wait(Some(Duration::ZERO))?;
        while !self.port.send(frame)? {
            if !self.port.wait_for_room(frame.len(), PATIENCE)? {
                return Err(Error::TimedOut);
            }
        }
        Ok(())
    }
}

fn open(name: &str, handle: u64) -> Result<Port, Error> {
    let (device, _group) = split_group(device_of(name).unwrap_or(name));
    PortOptions::new(device)
        .enabled(false)
        .handle(handle)
        .ring_bytes(LEAST_RING)
        .transmit(RING)
        .open()
}

const LEAST_RING: u64 = 4096;
/// Some hundred frames of full length.
const RING: u64 = 512 << 10;
/// How long a program waits for the wire.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it is believed what the daemon said of the device.
const FRESH: Duration = Duration::from_millis(200);
/// Of Ethernet, in bytes.
const HEADER: usize = 14;
const TAG: usize = 4;
