//! Which frames the generator prepares: their lengths, flows and protocols.

use std::str::FromStr;

use vnplug_frame::witness::Shape;

use super::super::SourceError;
use super::GenConfig;
use vnplug_frame::MAX_BATCH;

/// Frame lengths in bytes as captured: Ethernet header and VLAN tag included, FCS excluded. What
/// other tools call 64 bytes "on the wire" is 60 here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// All the same, [`MIN_SIZE`] to [`MAX_SIZE`].
    Fixed(usize),
    /// From the first to the last, both included: each of them, or 64 spread evenly, in a mixed
    /// order.
    Range(usize, usize),
    /// The simple Internet mix: 7 of 60, 4 of 590, 1 of 1514 bytes; a protocol that needs more
    /// than 60 gets its shortest instead.
    Imix,
}

impl FromStr for Sizes {
    type Err = SourceError;

    /// `imix`, `FIRST-LAST` or a number.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        let number = |text: &str| {
            text.parse().map_err(|_| {
                SourceError::new("a size is a number of bytes, FIRST-LAST or imix".to_owned())
            })
        };
        match text.split_once('-') {
            _ if text == "imix" => Ok(Self::Imix),
            Some((first, last)) => Ok(Self::Range(number(first)?, number(last)?)),
            None => Ok(Self::Fixed(number(text)?)),
        }
    }
}

impl Sizes {
    /// One round of lengths.
    fn round(self) -> Result<Vec<usize>, SourceError> {
        let (first, last) = match self {
            Self::Imix => return Ok(IMIX.to_vec()),
            Self::Fixed(size) => (size, size),
            Self::Range(first, last) => (first, last),
        };
        if first < MIN_SIZE || last > MAX_SIZE || first > last {
            return Err(SourceError::new(format!(
                "frame sizes are {MIN_SIZE} to {MAX_SIZE} bytes without FCS, not {first} to {last}"
            )));
        }
        let steps = (last - first).min(RANGE_STEPS - 1);
        // 37 has no factor in common with 64; for shorter rounds the order does not matter.
        let mixed = |n: usize| {
            if steps == RANGE_STEPS - 1 {
                n * 37 % RANGE_STEPS
            } else {
                n
            }
        };
        let at = |n: usize| first + ((last - first) * mixed(n)).checked_div(steps).unwrap_or(0);
        Ok((0..=steps).map(at).collect())
    }
}

/// The frames a queue goes through in turn: as many as it takes for flows and sizes to repeat, and
/// at least a batch, for the frames of a batch must not share memory.
pub(super) fn shapes(config: &GenConfig, queue: usize) -> Result<Vec<Shape>, SourceError> {
    let sizes = config.sizes.round()?;
    let (flows, queues) = (config.flows as usize, config.queues);
    let flow_round = flows / gcd(flows, queues);
    let round = flow_round / gcd(flow_round, sizes.len()) * sizes.len();
    let count = round * MAX_BATCH.div_ceil(round);
    let mean = sizes.iter().map(|size| stride(*size)).sum::<usize>() / sizes.len();
    let needed = count.saturating_mul(mean).saturating_mul(queues);
    if needed > MAX_ARENA {
        return Err(SourceError::new(format!(
            "{flows} flows of {} sizes on {queues} queues need {} MiB of prepared frames, the limit \
             is {} MiB; take fewer flows or one size",
            sizes.len(),
            needed >> 20,
            MAX_ARENA >> 20
        )));
    }
    let shape = |n: usize| {
        let flow = (queue + n * queues) % flows;
        let protocol = config.protocols[flow % config.protocols.len()];
        let mut shape = Shape {
            len_bytes: sizes[n % sizes.len()],
            flow: flow as u32,
            protocol,
            vlan_tci: config.vlan_tci,
        };
        if config.sizes == Sizes::Imix {
            shape.len_bytes = shape.len_bytes.max(shape.min_bytes());
        }
        shape
    };
    Ok((0..count).map(shape).collect())
}

/// Frames start on cache lines.
pub(super) fn stride(len_bytes: usize) -> usize {
    len_bytes.next_multiple_of(64)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The shortest frame in bytes, FCS excluded.
pub const MIN_SIZE: usize = 60;
/// The longest frame in bytes, FCS excluded.
pub const MAX_SIZE: usize = 9000;
const RANGE_STEPS: usize = 64;
const IMIX: [usize; 12] = [60, 590, 60, 60, 590, 60, 1514, 60, 590, 60, 590, 60];
const MAX_ARENA: usize = 256 << 20;
