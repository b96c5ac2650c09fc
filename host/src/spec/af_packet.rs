//! The options of a packet-socket source.

use std::sync::Arc;

use super::{Means, Opened, Options};
use vnplug_path::source::af_packet::{
    AfPacket, AfPacketConfig, Direction, Interface, Lasting, Namespace,
};
use vnplug_path::source::{Queue, SourceError};

/// Opens the source that the options say, of the interface that `asked` is then.
pub(super) fn open(
    options: &mut Options<'_>,
    asked: &mut Option<Interface>,
    means: &Means,
) -> Result<Opened, SourceError> {
    let interface = options
        .take("interface")
        .unwrap_or_else(|| options.name.to_owned());
    let waits = options.waits()?;
    let namespace = options.take("netns");
    let namespace = namespace.map(|name| Namespace::new(&name, Arc::clone(&means.entrance)));
    let config = AfPacketConfig {
        namespace: namespace.transpose()?.map(Arc::new),
        lasting: Some(Lasting {
            kept: Arc::clone(&means.kept),
            name: options.name.to_owned(),
        }),
        seats: means.seats.clone(),
        ..AfPacketConfig::new(interface)
    };
    let config = self::config(options, config)?;
    options.done()?;
    if options.checks {
        return Ok(("af_packet", String::new(), Vec::new(), false));
    }
    let mut description = format!("interface {}", config.interface);
    let name = config.interface.clone();
    *asked = Some(match &config.namespace {
        None => Interface::new(name)?,
        Some(namespace) => {
            description += &format!(" in network namespace {}", namespace.name());
            Interface::within(Arc::clone(namespace), name)
        }
    });
    Ok(("af_packet", description, packets(config, waits)?, false))
}

/// The queues of an interface; if it does not exist it may be waited for.
pub(super) fn packets(
    config: AfPacketConfig,
    waits: bool,
) -> Result<Vec<Box<dyn Queue>>, SourceError> {
    if !waits {
        let name = config.interface.clone();
        let is_there = |namespace: Option<Arc<Namespace>>| match namespace {
            None => Interface::new(name).is_ok_and(|it| it.is_there()),
            Some(namespace) => Interface::within(namespace, name).is_there(),
        };
        let namespace = config.namespace.clone();
        let hint = |error: SourceError| match error.cause {
            None if !is_there(namespace) => {
                SourceError::new(format!("{error} (or wait for it: wait=yes)"))
            }
            _ => error,
        };
        return AfPacket::open(config).map_err(hint);
    }
    let name = config.interface.clone();
    let place = config.namespace.as_ref().map_or(String::new(), |it| {
        format!(" in network namespace {:?}", it.name())
    });
    let queues = AfPacket::open_when_there(config)?;
    if queues.iter().any(|queue| queue.state() == MISSING) {
        log::warn!(target: "source", "there is no interface {name:?}{place} yet; it is waited for");
    }
    Ok(queues)
}

/// A configuration with what the options say.
pub(super) fn config(
    options: &mut Options<'_>,
    mut config: AfPacketConfig,
) -> Result<AfPacketConfig, SourceError> {
    match options.take("direction").as_deref() {
        None | Some("both") => {}
        Some("rx") => config.direction = Direction::Rx,
        Some("tx") => config.direction = Direction::Tx,
        Some(other) => return Err(options.bad("direction", other, "both, rx or tx")),
    }
    options.set("queues", &mut config.queues)?;
    options.size("block_size", &mut config.block_size)?;
    options.set("blocks", &mut config.blocks)?;
    options.set("block_timeout_ms", &mut config.block_timeout_ms)?;
    options.size("snaplen", &mut config.snaplen)?;
    options.switch("promiscuous", &mut config.promiscuous)?;
    options.switch("reserve", &mut config.reserve)?;
    options.switch("hardware_timestamps", &mut config.hardware_timestamps)?;
    options.switch("offload", &mut config.offload)?;
    options.switch("early", &mut config.early)?;
    Ok(config)
}

/// The state of a queue whose interface was never there.
const MISSING: &str = "missing";
