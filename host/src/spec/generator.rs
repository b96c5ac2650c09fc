//! The options of a generator.

use super::{Opened, Options};
use vnplug_frame::witness::Protocol;
use vnplug_path::source::SourceError;
use vnplug_path::source::generator::{Gen, GenConfig};

/// Makes the frames that the options say.
pub(super) fn open(options: &mut Options<'_>) -> Result<Opened, SourceError> {
    let mut config = GenConfig::default();
    let size = options.take("size");
    if let Some(size) = &size {
        config.sizes = size.parse()?;
    }
    match options.take("pps").as_deref() {
        None | Some("max") => {}
        Some(text) => match text.parse() {
            Ok(pps) => config.pps = Some(pps),
            Err(_) => return Err(options.bad("pps", text, "a number or max")),
        },
    }
    config.count = options.number("count")?;
    if config.count == Some(0) {
        return Err(options.bad("count", "0", "a number of packets above 0"));
    }
    config.vlan_tci = options.number("vlan")?;
    options.set("flows", &mut config.flows)?;
    options.set("run", &mut config.run)?;
    options.set("queues", &mut config.queues)?;
    let protocols = options.list("protocols", protocol)?;
    if !protocols.is_empty() {
        config.protocols = protocols;
    }
    options.done()?;
    let rate = config
        .pps
        .map_or("flat out".to_owned(), |pps| format!("{pps} packets/s"));
    let size = size.unwrap_or_else(|| "60".to_owned());
    let description = format!(
        "generated frames of {size} bytes, {rate}, run {}",
        config.run
    );
    // Flat out for nobody would only heat a core.
    let ends = config.count.is_some() || config.pps.is_none();
    Ok(("gen", description, Gen::open(&config)?, ends))
}

fn protocol(text: &str) -> Option<Protocol> {
    Some(match text {
        "udp4" | "udp" => Protocol::Udp4,
        "tcp4" | "tcp" => Protocol::Tcp4,
        "icmp4" | "icmp" => Protocol::Icmp4,
        "udp6" => Protocol::Udp6,
        "tcp6" => Protocol::Tcp6,
        "icmp6" => Protocol::Icmp6,
        _ => return None,
    })
}
