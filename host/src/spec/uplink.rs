//! An uplink of a switch as the operator writes it: `INTERFACE[/KIND][/OPTION=VALUE…]`, with the options
//! of that kind of source that make sense for a switch.

use std::collections::BTreeMap;

use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction, Gate, Interface};
use vnplug_path::source::af_xdp::{AfXdp, AfXdpConfig};
use vnplug_path::source::{Queue, SourceError};
use vnplug_switch::{OpenUplink, Uplink};

use super::{Options, af_packet, af_xdp};

/// An uplink, which is not opened yet. `twin` has the gate of the switch's twin, if this kernel has what that needs.
pub(super) fn of(
    options: &Options<'_>,
    text: &str,
    twin: &mut dyn FnMut() -> Result<Option<Gate>, SourceError>,
) -> Result<Uplink, SourceError> {
    let mut words = text.split('/');
    let interface = words.next().unwrap_or_default();
    let mut kind = AF_PACKET;
    let mut left = BTreeMap::new();
    for word in words {
        match word.split_once('=') {
            Some((key, value)) => {
                left.insert(key.to_owned(), value.to_owned());
            }
            None if word == AF_PACKET => {}
            None if word == AF_XDP => kind = AF_XDP,
            None => {
                let want =
                    "INTERFACE, then /af_packet or /af_xdp, then its options, as /OPTION=VALUE";
                return Err(options.bad("uplink", text, want));
            }
        }
    }
    if interface.is_empty() {
        return Err(options.bad("uplink", text, "the name of an interface"));
    }
    if let Some(key) = left.keys().find(|key| FIXED.contains(&key.as_str())) {
        return Err(SourceError::new(format!(
            "source {:?}: an uplink has no option {key:?}: it takes all that the interface receives, super-frames whole",
            options.name
        )));
    }
    let mut own = Options {
        name: options.name,
        left,
        waits: false,
        checks: false,
    };
    let there = Interface::new(interface)?;
    let is_twin = own.flag("twin")?.unwrap_or(false);
    if is_twin && kind != AF_PACKET {
        return Err(options.bad("twin", text, "for an uplink by af_packet"));
    }
    let gate = if is_twin { twin()? } else { None };
    let is_twin = gate.is_some();
    let open: OpenUplink = match kind {
        AF_XDP => {
            let (config, _) = af_xdp::config(&mut own, AfXdpConfig::new(interface), None)?;
            Box::new(move || xdp(&config))
        }
        _ => {
            let packets = AfPacketConfig {
                gate,
                ..packets(interface)
            };
            let config = af_packet::config(&mut own, packets)?;
            Box::new(move || match there.is_there() {
                true => AfPacket::open(config.clone()).map(Some),
                false => Ok(None),
            })
        }
    };
    own.done()?;
    Ok(Uplink {
        interface: interface.to_owned(),
        text: text.to_owned(),
        how: if is_twin { TWIN } else { kind },
        is_twin,
        open,
    })
}

/// NB: it must be there at the start. What loads a program the daemon cannot do later.
fn xdp(config: &AfXdpConfig) -> Result<Option<Vec<Box<dyn Queue>>>, SourceError> {
    let opened = AfXdp::open(config.clone()).map_err(|unfit| unfit.error)?;
    Ok(Some(opened.queues))
}

/// What an uplink by packet sockets is, if nothing else is said: the kernel holds little back, and much may
/// be on its way out.
fn packets(interface: &str) -> AfPacketConfig {
    AfPacketConfig {
        direction: Direction::Rx,
        block_size: 128 << 10,
        blocks: 256,
        block_timeout_ms: 1,
        reserve: false,
        offload: true,
        send_bytes: Some(SEND_BYTES),
        gate: None,
        ..AfPacketConfig::new(interface)
    }
}

/// The kinds of sources that can be uplinks.
const AF_PACKET: &str = "af_packet";
const TWIN: &str = "af_packet, twin";
pub(super) const AF_XDP: &str = "af_xdp";
/// Options that an uplink decides.
const FIXED: [&str; 7] = [
    "interface",
    "direction",
    "offload",
    "snaplen",
    "take",
    "arena",
    "early",
];
/// Frames that may wait in the queue of the interface: 8 MiB, which is 6 ms at 10 Gbit/s.
const SEND_BYTES: u32 = 8 << 20;
