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
    let is_timed = options.left.contains_key(TIMEOUT);
    let namespace = options.take("netns");
    let namespace = namespace.map(|name| Namespace::new(&name, Arc::clone(&means.entrance)));
    let config = AfPacketConfig {
        namespace: namespace.transpose()?.map(Arc::new),
        lasting: Some(Lasting {
            kept: Arc::clone(&means.kept),
            name: options.name.to_owned(),
            timeouts_ms: match is_timed {
                true => Vec::new(),
                false => timeouts_ms().collect(),
            },
        }),
        seats: means.seats.clone(),
        block_timeout_ms: timeout_ms_of(means.untimed),
        ..AfPacketConfig::new(interface)
    };
    let config = self::config(options, config)?;
    options.done()?;
    if options.checks {
        return Ok(("af_packet", String::new(), Vec::new(), false));
    }
    let ms = config.block_timeout_ms;
    if !is_timed && ms > BLOCK_TIMEOUT_MS && means.is_late {
        log::info!(target: "source", "source {:?}: {TIMEOUT}={ms}, as {} sources do not say it", options.name, means.untimed);
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
    options.set(TIMEOUT, &mut config.block_timeout_ms)?;
    options.size("snaplen", &mut config.snaplen)?;
    options.switch("promiscuous", &mut config.promiscuous)?;
    options.switch("reserve", &mut config.reserve)?;
    options.switch("hardware_timestamps", &mut config.hardware_timestamps)?;
    options.switch("offload", &mut config.offload)?;
    options.switch("early", &mut config.early)?;
    Ok(config)
}

/// How long a frame may wait for its block to fill of one of `sources` that do not say it.
///
/// NB: the kernel has a timer for each ring, which runs whether frames come or not. A thousand of 2 ms took all that other programs left of two
/// CPUs, more than one of them, and a thousand of 32 ms a tenth of one. So where there are more than a few they have slower ones: as many
/// runs in a second as the few have, or half as many. It doubles, so that one source more changes it seldom.
pub(super) fn timeout_ms_of(sources: usize) -> u32 {
    let is_slow_enough = |ms: &u32| FEW * (ms / BLOCK_TIMEOUT_MS) as usize >= sources;
    timeouts_ms().find(is_slow_enough).unwrap_or(SLOWEST_MS)
}

/// All that it may be.
fn timeouts_ms() -> impl Iterator<Item = u32> {
    let doubled = |ms: &u32| Some(ms * 2).filter(|ms| *ms <= SLOWEST_MS);
    std::iter::successors(Some(BLOCK_TIMEOUT_MS), doubled)
}

/// What is said of `sources` that do not say it if there are more than [`FEW`]: frames wait in them longer than usual.
pub(super) fn told_timeout(sources: usize) -> Option<String> {
    let ms = timeout_ms_of(sources);
    (ms > BLOCK_TIMEOUT_MS).then(|| {
        format!(
            "{sources} sources do not say {TIMEOUT}: it is {ms} for each, as the kernel has a timer for each ring. A frame on a quiet wire \
             waits up to {ms} ms; say {TIMEOUT}={BLOCK_TIMEOUT_MS} where it must not"
        )
    })
}

/// The option by which a source says it.
pub(super) const TIMEOUT: &str = "block_timeout_ms";
/// Up to this number of sources it is [`BLOCK_TIMEOUT_MS`].
const FEW: usize = 64;
const BLOCK_TIMEOUT_MS: u32 = 2;
/// The last doubling below the most that can be said.
const SLOWEST_MS: u32 = 512;
/// The state of a queue whose interface was never there.
const MISSING: &str = "missing";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::SourceSpec;

    #[test]
    fn of_many_sources_each_has_a_slower_timer() {
        for (sources, ms) in [
            (0, 2),
            (1, 2),
            (64, 2),
            (65, 4),
            (128, 4),
            (129, 8),
            (256, 8),
            (1000, 32),
            (1024, 32),
            (1025, 64),
            (16_384, 512),
            (65_536, 512),
        ] {
            assert_eq!(timeout_ms_of(sources), ms, "{sources}");
            assert_eq!(told_timeout(sources).is_some(), ms > 2, "{sources}");
        }
        assert_eq!(timeouts_ms().last(), Some(SLOWEST_MS));
        let few = AfPacketConfig::new("lo").block_timeout_ms;
        assert_eq!(
            few, BLOCK_TIMEOUT_MS,
            "of one alone it is what it always was"
        );
    }

    #[test]
    fn who_says_how_long_frames_may_wait_is_not_one_of_the_many() {
        for (text, is_untimed) in [
            ("eth0", true),
            ("eth0=af_packet,blocks=2", true),
            ("eth0=af_packet,block_timeout_ms=2", false),
            ("eth0=af_xdp", false),
            ("eth*=af_packet", false),
            ("lab=gen", false),
        ] {
            let spec: SourceSpec = text.parse().unwrap();
            assert_eq!(spec.is_untimed(), is_untimed, "{text}");
        }
        let pattern: SourceSpec = "eth*=af_packet".parse().unwrap();
        assert!(!pattern.member("0", "eth0").unwrap().is_untimed());
    }
}
